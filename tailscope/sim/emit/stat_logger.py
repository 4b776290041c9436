"""Records of a stat-logger plug-in: all that vLLM hands its stat loggers, a JSON object a line, a file an engine.

A record comes with each message of the engine: none for dummy steps, `iteration_stats` only where the message holds
outputs, who left in no list of finished requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tailscope.sim.emit.front_end import (
    LOG_INTERVAL_S,
    LOGGERS_S,
    FrontEnd,
    engine_id,
    mono,
    process_id,
    wall,
)
from tailscope.sim.outcome import Floats, Ints, Outcome

#: vLLM's FinishReason.LENGTH and STOP.
STOP, LENGTH = 0, 1
SOURCES = ["local_compute", "local_cache_hit", "external_kv_transfer"]


def file_name(view: FrontEnd) -> str:
    return f"statlogger_engine{view.engine}_pid{process_id(view.instance)}.jsonl"


def write(outcome: Outcome, view: FrontEnd, path: Path) -> None:
    with path.open("wb") as file:
        for _, line in sorted(_lines(outcome, view), key=lambda item: item[0]):
            file.write(orjson.dumps(line) + b"\n")


def _lines(outcome: Outcome, view: FrontEnd) -> Iterator[tuple[float, dict[str, Any]]]:
    """(time of the world, record)"""
    begun = {"engine_index": view.engine, "pid": process_id(view.instance), "model": outcome.scenario.model}
    yield LOGGERS_S, _event(LOGGERS_S, "init") | begun
    yield LOGGERS_S, _event(LOGGERS_S, "log_engine_initialized")
    for at in np.arange(LOG_INTERVAL_S, end_s(view), LOG_INTERVAL_S).tolist():
        yield at, _event(at, "log")
    yield from _records(outcome, view)


def end_s(view: FrontEnd) -> float:
    return float(view.steps.received_s.max()) if len(view.steps) else 0.0


def _event(at: float, kind: str) -> dict[str, Any]:
    return {"wall": float(wall(at)), "mono": float(mono(at)), "ev": kind}


def _records(outcome: Outcome, view: FrontEnd) -> Iterator[tuple[float, dict[str, Any]]]:
    steps = view.steps
    ttft = _by_step(view.ttft, view.output_step[view.output_first], len(steps))
    itl = _by_step(view.itl, view.output_step[~view.output_first], len(steps))
    finished: dict[int, list[int]] = {}
    for i, step in enumerate(view.last_step[view.told].tolist()):
        finished.setdefault(step, []).append(i)
    for k in view.reported.tolist():
        at = float(steps.received_s[k])
        record = _event(at, "record")
        record["engine_idx"] = view.engine
        record["scheduler_stats"] = _scheduler_stats(outcome, view, k)
        record["iteration_stats"] = None
        if view.messages[k]:
            ending = [_finished(outcome, view, i) for i in finished.get(k, ())]
            record["iteration_stats"] = _iteration_stats(outcome, view, k, (ttft[k], itl[k]), ending)
        record["mm_cache_stats"] = None
        yield at, record


def _by_step(values: Floats, step: Ints, steps: int) -> list[list[float]]:
    order = np.argsort(step, kind="stable")
    ends = np.searchsorted(step[order], np.arange(steps + 1))
    ordered = values[order].tolist()
    return [ordered[a:b] for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


def _scheduler_stats(outcome: Outcome, view: FrontEnd, k: int) -> dict[str, Any]:
    steps = view.steps
    details = None
    if outcome.scenario.telemetry.iteration_details:
        details = {
            "iteration_index": k,
            "num_ctx_requests": int(steps.prefill_requests[k]),
            "num_ctx_tokens": int(steps.prefill_tokens[k]),
            # The V1 model runner calls what is computed again generation too.
            "num_generation_requests": int(steps.decode_requests[k] + steps.recompute_requests[k]),
            "num_generation_tokens": int(steps.decode_tokens[k] + steps.recompute_tokens[k]),
            "elapsed_ms": float(view.elapsed_ms[k]),
            "num_encoder_inputs": 0,
            "num_encoder_output_tokens": 0,
            "is_dummy": False,
        }
    prefix = {name: int(values[k]) for name, values in view.admissions.items()}
    return {
        "num_running_reqs": int(steps.running[k]),
        "num_waiting_reqs": int(steps.waiting[k]),
        "num_skipped_waiting_reqs": int(steps.deferred[k]),
        "num_kv_fetch_reqs_by_stage": {
            "waiting_to_start": 0,
            "in_progress": int(steps.deferred[k]),
            "completed_waiting": 0,
        },
        "step_counter": 0,
        "current_wave": 0,
        "kv_cache_usage": float(steps.kv_usage[k]),
        "iteration_details": details,
        "prefix_cache_stats": {"reset": False, **prefix, "hits_by_source": {}},
        "connector_prefix_cache_stats": None,
        "kv_cache_eviction_events": [],
        "spec_decoding_stats": None,
        "kv_connector_stats": None,
        "ec_connector_stats": None,
        "waiting_lora_adapters": {},
        "running_lora_adapters": {},
        "cudagraph_stats": None,
        "perf_stats": None,
    }


def _iteration_stats(
    outcome: Outcome,
    view: FrontEnd,
    k: int,
    latencies: tuple[list[float], list[float]],
    ending: list[dict[str, Any]],
) -> dict[str, Any]:
    prompts = {name: int(values[k]) for name, values in view.prompts.items()}
    return {
        "iteration_timestamp": float(wall(view.steps.received_s[k])),
        "num_generation_tokens": int(view.generated[k]),
        "prompt_token_stats": {
            "ALL_SOURCES": SOURCES,
            "computed": prompts["computed"],
            "local_cache_hit": prompts["cached"],
            "external_kv_transfer": prompts["external"],
            "cached_tokens": prompts["cached"] + prompts["external"],
            "total": prompts["total"],
        },
        "num_preempted_reqs": int(view.steps.preempted_told[k]),
        "finished_requests": ending,
        "max_num_generation_tokens_iter": [request["num_generation_tokens"] for request in ending],
        "n_params_iter": [1] * len(ending),
        "time_to_first_tokens_iter": latencies[0],
        "inter_token_latencies_iter": latencies[1],
        "num_corrupted_reqs": 0,
        "num_watermarked_reqs": 0,
        "num_watermark_skipped_reqs": 0,
        "num_not_watermarked_reqs": len(ending),
    }


def _finished(outcome: Outcome, view: FrontEnd, i: int) -> dict[str, Any]:
    """FinishedRequestStats of the `i`-th of `view.told`."""
    stay = int(view.told[i])
    stays, spent = view.stays, {name: float(values[i]) for name, values in view.durations.items()}
    output, limit = int(view.outputs[stay]), int(stays.max_tokens[stay])
    return {
        "finish_reason": LENGTH if output >= limit else STOP,
        "request_id": engine_id(outcome.requests.id[int(stays.request[stay])]),
        "e2e_latency": spent["e2e"],
        "num_prompt_tokens": int(stays.prompt[stay]),
        "num_preemptions": int(stays.preemptions[stay]),
        "num_generation_tokens": output,
        "max_tokens_param": limit,
        "queued_time": spent["queued"],
        "prefill_time": spent["prefill"],
        "inference_time": spent["inference"],
        "decode_time": spent["decode"],
        "mean_time_per_output_token": spent["tpot"],
        "is_corrupted": False,
        "num_cached_tokens": int(stays.cached[stay] + stays.external[stay]),
    }
