"""The rows that a scheduler's log of a simulated engine gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from tailscope.schema import EVENTS, ITERATIONS, SCHEDULE, Table
from tailscope.sim.emit.front_end import FrontEnd, engine_id
from tailscope.sim.emit.schedule import Log
from tailscope.sim.outcome import BLOCKED_NAMES, Outcome

PHASES = ("prefill", "decode", "recompute")


def of_log(outcome: Outcome, view: FrontEnd) -> Iterator[tuple[Table, Mapping[str, Any]]]:
    log = Log(outcome, view)
    runs, steps, kept = log.runs, view.steps, log.steps
    count, names = log.composition, outcome.requests.id
    preempted_step, preempted_run = log.preempted
    waited, began, known = log.fetches
    fetch, fetched = np.zeros((2, len(runs.first)), np.int64)
    fetch[waited], fetched[waited] = began, known
    before = np.append(np.iinfo(np.int64).min, log.end_ns[:-1])[: len(kept)]
    yield (
        ITERATIONS,
        {
            "engine": np.full(len(kept), view.engine),
            "iteration": np.arange(len(kept)),
            "end_ns": log.end_ns,
            "elapsed_ns": log.end_ns - np.maximum(log.begin_ns, before),
            "end_basis": "measured",
            "prefill_requests": count["prefill_requests"],
            "prefill_tokens": count["prefill_tokens"],
            # As for a stat logger, what is computed again is generation.
            "decode_requests": count["decode_requests"] + count["recompute_requests"],
            "decode_tokens": count["decode_tokens"] + count["recompute_tokens"],
            "recompute_tokens": count["recompute_tokens"],
            "running": steps.running[kept],
            "waiting": steps.waiting[kept],
            "deferred": steps.deferred[kept],
            "kv_usage": steps.kv_usage[kept],
            "preempted": np.bincount(preempted_step, minlength=len(kept)),
            "is_dummy": False,
            "blocked": pa.array([BLOCKED_NAMES[code] for code in steps.blocked[kept]], pa.string()),
        },
    )
    yield (
        SCHEDULE,
        {
            "engine": np.full(len(runs.first), view.engine),
            "iteration_first": runs.first,
            "iteration_last": runs.last,
            "first_end_ns": log.end_ns[runs.first],
            "last_end_ns": log.end_ns[runs.last],
            "request_id": pa.array([engine_id(names[request]) for request in runs.request], pa.string()),
            "stay": log.stay,
            "phase": pa.array([PHASES[code] for code in runs.phase], pa.string()),
            "tokens": runs.tokens,
            "computed_before": runs.computed_before,
            "fetch_ns": pa.array(fetch, mask=fetched == 0),
            "fetched_ns": pa.array(fetched, mask=fetched == 0),
        },
    )
    engine = outcome.scenario.engine
    detail = f"max_num_batched_tokens={engine.max_num_batched_tokens}, max_num_seqs={engine.max_num_seqs}"
    if len(kept):
        yield (
            EVENTS,
            {
                "engine": [view.engine],
                "time_ns": [int(log.begin_ns[0])],
                "kind": "config",
                "detail": detail,
            },
        )
    yield (
        EVENTS,
        {
            "engine": np.full(len(preempted_step), view.engine),
            "time_ns": log.begin_ns[preempted_step],
            "kind": "preemption",
            "request_id": pa.array(
                [engine_id(names[request]) for request in runs.request[preempted_run]], pa.string()
            ),
        },
    )
