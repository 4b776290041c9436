"""The log of `vllm serve`: lines of an API server and its engines, to the second and without a year.

Of a step it has what `--enable-logging-iteration-details` prints; of a client that left, that its request was aborted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from math import floor
from pathlib import Path
from typing import Any

import numpy as np

from tailscope.sim.emit.front_end import (
    BOOT_S,
    ENGINE_S,
    LOG_INTERVAL_S,
    FrontEnd,
    digest,
    engine_id,
    process_id,
)
from tailscope.sim.emit.stat_logger import end_s
from tailscope.sim.outcome import START_NS, Ints, Outcome

VERSION = "0.33.0"
#: The hit rate of the statistics line is that of so many requests.
RECENT = 1000
#: uvicorn's line of a call, up to its status.
ACCESS = 'INFO:     127.0.0.1:50000 - "POST /v1/completions HTTP/1.1"'


@dataclass(frozen=True)
class Told:
    """Something the log tells of at a time: its lines, and the event a reader may make of it.

    `rank`: of the engine that wrote it; None where the API server did.
    """

    time_s: float
    lines: tuple[str, ...]
    kind: str | None = None
    detail: str = ""
    rank: int | None = None


#: (time of the world, rank of the engine that wrote it or None, place in vLLM's code, message)
Line = tuple[float, int | None, str, str]


def write(outcome: Outcome, views: list[FrontEnd], path: Path) -> None:
    lines: list[Line] = [
        (one.time_s, one.rank, *line.partition(" ")[::2])
        for one in told(outcome, views)
        for line in one.lines
    ]
    lines += [*_request_lines(outcome, views), *_iteration_lines(outcome, views)]
    lines += [(one["time_s"], None, "loggers.py:335", _summary_text(one)) for one in summaries(views)]
    lines.sort(key=lambda line: line[0])
    processes = _processes(outcome, views)
    with path.open("wb") as file:
        for time_s, rank, place, message in lines:
            # uvicorn's lines are not of vLLM's form.
            head = f"({processes[rank]}) INFO {_stamp(floor(time_s))} [{place}] " if place else ""
            file.write(f"{head}{message}\n".encode())


_stamps: dict[int, str] = {}


def _stamp(second: int) -> str:
    if second not in _stamps:
        _stamps[second] = f"{datetime.fromtimestamp(START_NS // 10**9 + second, UTC):%m-%d %H:%M:%S}"
    return _stamps[second]


def second_ns(time_s: Any) -> Ints:
    """The second that a line of this time names, Unix ns."""
    return START_NS + np.floor(np.asarray(time_s, np.float64)).astype(np.int64) * 1_000_000_000


def _processes(outcome: Outcome, views: list[FrontEnd]) -> dict[int | None, str]:
    """Names of the API server (None) and of the engines by rank, as they stand before their lines."""
    pid, several = process_id(views[0].instance), outcome.scenario.engine.data_parallel > 1
    names: dict[int | None, str] = {None: f"APIServer pid={pid}"}
    for view in views:
        names[view.engine] = f"EngineCore{f'_DP{view.engine}' if several else ''} pid={pid + 1 + view.engine}"
    return names


# -- steps -----------------------------------------------------------------------------------------


def elapsed_hundredths(view: FrontEnd) -> Ints:
    """`iteration elapsed time` of the reported steps, in hundredths of a millisecond."""
    return np.rint(view.elapsed_ms[view.reported] * 100).astype(np.int64)


def usage_thousandths(view: FrontEnd) -> Ints:
    return np.rint(view.steps.kv_usage[view.reported] * 1000).astype(np.int64)


def _iteration_lines(outcome: Outcome, views: list[FrontEnd]) -> Iterator[Line]:
    if not outcome.scenario.telemetry.iteration_details:
        return
    for view in views:
        steps, kept = view.steps, view.reported
        columns = (
            steps.received_s[kept], kept, steps.prefill_requests[kept], steps.prefill_tokens[kept],
            steps.decode_requests[kept] + steps.recompute_requests[kept],
            steps.decode_tokens[kept] + steps.recompute_tokens[kept],
            elapsed_hundredths(view), usage_thousandths(view),
        )  # fmt: skip
        for at, k, requests, tokens, decodes, decoded, elapsed, usage in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            message = (
                f"Engine {view.engine:03d}: Iteration({k}): {requests} context requests, {tokens} context tokens, "
                f"{decodes} generation requests, {decoded} generation tokens, iteration elapsed time: "
                f"{elapsed // 100}.{elapsed % 100:02d} ms, GPU KV cache usage: {usage // 10}.{usage % 10}%"
            )
            yield at, None, "loggers.py:199", message


# -- statistics ------------------------------------------------------------------------------------


def summaries(views: list[FrontEnd]) -> list[dict[str, Any]]:
    """The statistics lines: their times, engines and numbers as printed. An engine without work prints none."""
    found = [one for view in views for one in _summaries(view)]
    return sorted(found, key=lambda one: (one["time_s"], one["engine"]))


def _summaries(view: FrontEnd) -> Iterator[dict[str, Any]]:
    steps, kept = view.steps, view.reported
    heard = steps.received_s[kept]
    at = np.arange(LOG_INTERVAL_S, end_s(view) + 2 * LOG_INTERVAL_S, LOG_INTERVAL_S)
    until = np.searchsorted(heard, at, side="right")

    def between(amounts: Ints) -> Ints:
        return np.diff(np.concatenate(([0], np.cumsum(amounts[kept])))[until], prepend=0)

    prompt = np.rint(between(view.prompts["computed"]) / LOG_INTERVAL_S * 10) / 10
    generated = np.rint(between(view.generated) / LOG_INTERVAL_S * 10) / 10
    preempted = between(np.where(view.messages > 0, steps.preempted_told, 0))
    last = np.where(until > 0, kept[until - 1] if len(kept) else 0, -1)
    rates = _hit_rates(view, until)
    was_busy = False
    for i, k in enumerate(last.tolist()):
        busy = bool(prompt[i] or generated[i])
        if busy or was_busy:
            yield {
                "time_s": float(at[i]),
                "engine": view.engine,
                "prompt": float(prompt[i]),
                "generated": float(generated[i]),
                "running": int(steps.running[k]) if k >= 0 else 0,
                "waiting": int(steps.waiting[k] + steps.deferred[k]) if k >= 0 else 0,
                "deferred": int(steps.deferred[k]) if k >= 0 else 0,
                "preempted": int(preempted[i]),
                "usage": int(np.rint(steps.kv_usage[k] * 1000)) / 10 if k >= 0 else 0.0,
                "hits": rates[i],
            }
        was_busy = busy


def _hit_rates(view: FrontEnd, until: Ints) -> list[float]:
    """Per cent of the tokens that the last requests looked up in the prefix cache."""
    totals = {
        name: np.concatenate(([0], np.cumsum(view.admissions[name][view.reported])))
        for name in ("requests", "queries", "hits")
    }
    begin = np.searchsorted(totals["requests"], totals["requests"][until] - RECENT)
    asked = totals["queries"][until] - totals["queries"][begin]
    found = totals["hits"][until] - totals["hits"][begin]
    return [
        round(1000 * f / a) / 10 if a else 0.0 for f, a in zip(found.tolist(), asked.tolist(), strict=True)
    ]


def _summary_text(one: dict[str, Any]) -> str:
    deferred = f", Deferred: {one['deferred']} reqs" if one["deferred"] else ""
    preempted = f", Preemptions: {one['preempted']}" if one["preempted"] else ""
    return (
        f"Engine {one['engine']:03d}: Avg prompt throughput: {one['prompt']:.1f} tokens/s, Avg generation throughput: "
        f"{one['generated']:.1f} tokens/s, Running: {one['running']} reqs, Waiting: {one['waiting']} reqs{deferred}"
        f"{preempted}, GPU KV cache usage: {one['usage']:.1f}%, Prefix cache hit rate: {one['hits']:.1f}%"
    )


# -- requests --------------------------------------------------------------------------------------


def internal_id(outcome: Outcome, request: int, child: int | None) -> str:
    """The id the engine core gives a request, or a child of one that asks for several answers."""
    name = engine_id(outcome.requests.id[request])
    suffix = digest("internal", outcome.scenario.seed, request, size=4).hex()
    return f"{name if child is None else f'{child}_{name}'}-{suffix}"


def children(outcome: Outcome) -> list[int | None]:
    """Of each request: its place among the children of one call, None where it was the only one."""
    loads, counts, places = outcome.scenario.loads, dict[str, int](), list[int | None]()
    for name, load in zip(outcome.requests.id, outcome.requests.load.tolist(), strict=True):
        counts[name] = counts.get(name, -1) + 1
        places.append(counts[name] if loads[load].n > 1 else None)
    return places


def _request_lines(outcome: Outcome, views: list[FrontEnd]) -> Iterator[Line]:
    """What `--enable-log-requests` adds, and uvicorn's access lines."""
    requests, place = outcome.requests, children(outcome)
    for view in views:
        stays = view.stays
        rows = zip(stays.request.tolist(), stays.arrival_s.tolist(), stays.max_tokens.tolist(), strict=True)
        for request, at, limit in rows:
            if np.isnan(at):
                continue
            n = outcome.scenario.loads[int(requests.load[request])].n
            if not place[request]:
                message = (
                    f"Received request {engine_id(requests.id[request])}: params: SamplingParams(n={n}, temperature=1.0, "
                    f"top_p=1.0, ignore_eos=True, max_tokens={limit}), lora_request: None."
                )
                yield at, None, "request_logger.py:65", message
            added = f"Added request {internal_id(outcome, request, place[request])}."
            yield at, None, "async_llm.py:578", added
            if not place[request]:
                yield at, None, "", f"{ACCESS} 200 OK"
    engines = {view.index for view in views}
    for event in outcome.events:
        if event.kind == "rejection" and event.engine in engines:
            yield event.time_s, None, "", f"{ACCESS} 503 Service Unavailable"


# -- events ----------------------------------------------------------------------------------------


def told(outcome: Outcome, views: list[FrontEnd]) -> list[Told]:
    """All that is an event to a reader, in the order of the file."""
    found = [*_start(outcome, views), *_aborts(outcome, views), *_pauses(outcome, views)]
    return sorted(found, key=lambda one: one.time_s)


def settings(outcome: Outcome) -> dict[str, object]:
    """The arguments the server was started with, where they say how it schedules."""
    engine, ranks = outcome.scenario.engine, outcome.scenario.ranks
    given: dict[str, object] = {
        "tensor_parallel_size": ranks.tensor_parallel,
        "data_parallel_size": engine.data_parallel,
        "block_size": engine.block_size,
        "num_gpu_blocks_override": engine.kv_blocks,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_num_seqs": engine.max_num_seqs,
        "async_scheduling": engine.async_scheduling,
        "scheduling_policy": engine.policy,
    }
    if engine.moe:
        given["enable_expert_parallel"] = True
    if engine.long_prefill_token_threshold:
        given["long_prefill_token_threshold"] = engine.long_prefill_token_threshold
    return given


def _start(outcome: Outcome, views: list[FrontEnd]) -> Iterator[Told]:
    given, model, engine = settings(outcome), outcome.scenario.model, outcome.scenario.engine
    arguments = {"model_tag": model, "model": model, "max_model_len": engine.max_model_len, **given}
    # Printed by Python, which escapes what would break the line.
    shown = f"api_utils.py:286 non-default args: {arguments!r}"
    detail = ", ".join(f"{key}={value}" for key, value in given.items())
    yield Told(BOOT_S, (shown,), "config", detail)
    tokens = engine.kv_blocks * engine.block_size
    for view in views:
        begins = f"core.py:133 Initializing a V1 LLM engine (v{VERSION}) with config: model={model!r}"
        size = f"kv_cache_utils.py:2327 GPU KV cache size: {tokens:,} tokens"
        yield Told(ENGINE_S, (begins,), "restart", f"engine started, vLLM {VERSION}", view.engine)
        yield Told(ENGINE_S + 10, (size,), "config", f"kv_cache_size_tokens={tokens}", view.engine)


def _aborts(outcome: Outcome, views: list[FrontEnd]) -> Iterator[Told]:
    requests, place = outcome.requests, children(outcome)
    for view in views:
        stays = view.stays
        # Of a request that was handed over, the instance that has answered holds nothing any more.
        left = ~np.isnan(stays.gone_s) & ~stays.told & (stays.arrival_s <= stays.gone_s)
        for request, at in zip(stays.request[left].tolist(), stays.gone_s[left].tolist(), strict=True):
            name, internal = engine_id(requests.id[request]), internal_id(outcome, request, place[request])
            lines = (
                f"async_llm.py:922 Aborted request(s) {internal}.",
                f"async_llm.py:783 Request {name} aborted.",
            )
            yield Told(at, lines, "abort", (name if place[request] is None else internal)[:200])


def _pauses(outcome: Outcome, views: list[FrontEnd]) -> Iterator[Told]:
    """What the log says of the pauses that have a reason it knows, and of the windows of the profiler."""
    by_index = {view.index: view for view in views}
    for event in outcome.events:
        if event.engine not in by_index:
            continue
        at, rank, after = event.time_s, by_index[event.engine].engine, event.time_s + event.length_s
        if event.kind == "profiler":
            yield Told(at, ("api_router.py:39 Starting profiler...",), "config", "profiler start")
            yield Told(after, ("api_router.py:44 Profiler started.",))
        elif event.kind == "eplb":
            took = f"eplb_state.py:1010 Rearranged experts in {event.length_s:.2f} s."
            yield Told(
                at,
                ("eplb_state.py:880 Rearranging experts sync mode ...",),
                "eplb",
                "Rearranging experts sync mode",
                rank,
            )
            yield Told(after, (took,), "eplb", f"Rearranged experts in {event.length_s:.2f} s", rank)
        elif event.kind == "jit":
            compiled = "Triton kernel JIT compilation during inference: fused_moe_kernel"
            yield Told(
                at, (f"jit_monitor.py:103 {compiled}. This causes a latency spike.",), "jit", compiled, rank
            )
    for begin, seconds in outcome.scenario.telemetry.profile:
        yield Told(begin, ("api_router.py:39 Starting profiler...",), "config", "profiler start")
        yield Told(begin + seconds, ("api_router.py:50 Stopping profiler...",), "config", "profiler stop")
