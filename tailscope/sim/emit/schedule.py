"""What a scheduler that logs its schedule writes (`examples/vllm/schedule_logger.py`): a JSON object a step, a file an engine.

A line names the requests whose state changed with the step, and all of them every `KEYFRAME` lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tailscope.sim.emit.front_end import FrontEnd, digest, engine_id, process_id
from tailscope.sim.outcome import BLOCKED_NAMES, DECODE, MONOTONIC_S, START_NS, Ints, Outcome, Runs, ns

VERSION = 1
#: Lines from one that names all running requests to the next.
KEYFRAME = 1_000
#: What engines' monotonic clocks show when the world begins.
MONOTONIC_NS = round(MONOTONIC_S * 1e9)


@dataclass(frozen=True)
class Log:
    """An engine's schedule as its logger numbers it: dummy steps, which no scheduler makes, are not counted.

    `steps`: those logged, as indexes of the engine's. `runs`: with `first` and `last` numbers of logged steps, chunks of
    one size that follow each other as one run. `stay`: of each run its request's number in the file.
    `preempted`: (step, run) pairs, the run the last one before the preemption.
    """

    outcome: Outcome
    view: FrontEnd

    @cached_property
    def steps(self) -> Ints:
        return self.view.reported

    @cached_property
    def begin_ns(self) -> Ints:
        return ns(self.view.steps.scheduled_s[self.steps])

    @cached_property
    def end_ns(self) -> Ints:
        return ns(self.view.steps.end_s[self.steps])

    @cached_property
    def runs(self) -> Runs:
        runs = self.outcome.engines[self.view.index].runs
        number = np.cumsum(~self.view.steps.dummy) - 1
        order = np.lexsort((runs.first, runs.request))
        request, phase, tokens = runs.request[order], runs.phase[order], runs.tokens[order]
        first, last = number[runs.first[order]], number[runs.last[order]]
        before = runs.computed_before[order]
        follows = np.zeros(len(order), np.bool_)
        after = before + tokens * (last - first + 1)
        follows[1:] = (request[1:] == request[:-1]) & (phase[1:] == phase[:-1]) & (tokens[1:] == tokens[:-1])
        follows[1:] &= (first[1:] == last[:-1] + 1) & (before[1:] == after[:-1])
        begins = np.flatnonzero(~follows)
        ends = np.append(begins[1:], len(order)) - 1 if len(order) else begins
        merged = Runs(
            request[begins], first[begins], last[ends], phase[begins], tokens[begins], before[begins],
            gives=runs.gives[order][ends],
        )  # fmt: skip
        by_step = np.lexsort((merged.request, merged.first))
        return Runs(**{name: getattr(merged, name)[by_step] for name in Runs.__annotations__})

    @cached_property
    def stay(self) -> Ints:
        request = self.runs.request
        _, first, inverse = np.unique(request, return_index=True, return_inverse=True)
        number = np.empty(len(first), np.int64)
        number[np.argsort(first)] = np.arange(len(first))
        return np.asarray(number[inverse], np.int64)

    @cached_property
    def preempted(self) -> tuple[Ints, Ints]:
        """A request that comes back otherwise than it went was preempted with the step after it was last in one."""
        runs = self.runs
        order = np.lexsort((runs.first, runs.request))
        before, after = order[:-1], order[1:]
        held = runs.computed_before + runs.tokens * (runs.last - runs.first + 1)
        back = (runs.request[before] == runs.request[after]) & (runs.phase[after] != DECODE)
        back &= (runs.computed_before[after] != held[before]) | (runs.first[after] > runs.last[before] + 1)
        run = before[back]
        step = np.minimum(runs.last[run] + 1, len(self.steps) - 1)
        again = np.lexsort((run, step))
        return step[again], run[again]

    @cached_property
    def fetches(self) -> tuple[Ints, Ints, Ints]:
        """(run, began, known): the runs before which a request waited for its KV cache, from when to when in ns."""
        requests, runs = self.outcome.requests, self.runs
        if self.view.role != "decode" or not len(runs.request):
            nothing = np.zeros(0, np.int64)
            return nothing, nothing, nothing
        _, first = np.unique(runs.request, return_index=True)
        run = first[np.isfinite(requests.fetched_s[runs.request[first]])]
        those = runs.request[run]
        return run, ns(requests.fetch_s[those]), ns(requests.fetched_s[those])

    @cached_property
    def composition(self) -> dict[str, Ints]:
        """Requests and tokens in each step, as its scheduler counts them."""
        steps, kept = self.view.steps, self.steps
        return {
            "prefill_requests": steps.prefill_requests[kept],
            "prefill_tokens": steps.prefill_tokens[kept],
            "decode_requests": steps.decode_requests[kept],
            "decode_tokens": steps.decode_tokens[kept],
            "recompute_requests": steps.recompute_requests[kept],
            "recompute_tokens": steps.recompute_tokens[kept],
        }


def file_name(view: FrontEnd) -> str:
    # Every engine is a process of its own.
    return f"schedule_engine{view.engine}_pid{process_id(view.instance) + 1 + view.engine}.jsonl"


def request_id(outcome: Outcome, request: int) -> str:
    """The scheduler's own: vLLM makes ids its own by eight random digits."""
    name = engine_id(outcome.requests.id[request])
    return f"{name}-{digest('internal', outcome.scenario.seed, request, size=4).hex()}"


def write(outcome: Outcome, view: FrontEnd, path: Path) -> None:
    with path.open("wb") as file:
        for line in _lines(Log(outcome, view)):
            file.write(orjson.dumps(line) + b"\n")


def _lines(log: Log) -> Iterator[dict[str, Any]]:
    engine, view, runs = log.outcome.scenario.engine, log.view, log.runs
    yield {
        "vllm_schedule": VERSION,
        "engine": view.engine,
        "pid": process_id(view.instance) + 1 + view.engine,
        "suffix": True,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_num_seqs": engine.max_num_seqs,
        "block_size": engine.block_size,
        "kv_blocks": engine.kv_blocks,
    }
    begins, ends = _by_step(runs.first, len(log.steps)), _by_step(runs.last, len(log.steps))
    preempted = dict[int, list[int]]()
    for step, run in zip(*(values.tolist() for values in log.preempted), strict=True):
        preempted.setdefault(step, []).append(int(log.stay[run]))
    fetched = {
        run: [int(log.stay[run]), began - START_NS + MONOTONIC_NS, known - START_NS + MONOTONIC_NS]
        for run, began, known in zip(*(values.tolist() for values in log.fetches), strict=True)
    }
    states = np.column_stack([log.stay, runs.phase, runs.tokens, runs.computed_before]).tolist()
    begin, end = log.begin_ns.tolist(), log.end_ns.tolist()
    counts = list(zip(*(values.tolist() for values in log.composition.values()), strict=True))
    steps, known = view.steps, 0
    open_runs: dict[int, int] = {}
    for n, k in enumerate(log.steps.tolist()):
        new = []
        for run in begins[n]:
            if states[run][0] == known:
                request = int(runs.request[run])
                new.append(
                    [known, request_id(log.outcome, request), int(log.outcome.requests.prompt[request])]
                )
                known += 1
        over = [states[run][0] for run in ends[n - 1]] if n else []
        for stay in over:
            del open_runs[stay]
        open_runs |= {states[run][0]: run for run in begins[n]}
        full = n % KEYFRAME == 0
        said = list(open_runs.values()) if full else begins[n]
        line: dict[str, Any] = {
            "n": n,
            "t": [begin[n], begin[n] - START_NS + MONOTONIC_NS, end[n] - START_NS + MONOTONIC_NS],
            "s": [_state(log, states[run], run, n) for run in said],
            "c": counts[n],
            "q": [int(steps.running[k]), int(steps.waiting[k]), int(steps.deferred[k])],
            "kv": float(steps.kv_usage[k]),
        }
        if new:
            line["new"] = new
        if gone := [stay for stay in over if stay not in open_runs]:
            line["x"] = gone
        if n in preempted:
            line["p"] = preempted[n]
        if waited := [fetched[run] for run in begins[n] if run in fetched]:
            line["r"] = waited
        if blocked := BLOCKED_NAMES[int(steps.blocked[k])]:
            line["b"] = blocked
        if full:
            line["full"] = True
        yield line


def _by_step(step: Ints, steps: int) -> list[list[int]]:
    """The runs of each step."""
    order = np.argsort(step, kind="stable")
    ends = np.searchsorted(step[order], np.arange(steps + 1)).tolist()
    ordered = order.tolist()
    return [ordered[a:b] for a, b in pairwise(ends)]


def _state(log: Log, state: list[int], run: int, n: int) -> list[int]:
    """A run as it stands in step n: [stay, phase, tokens, computed before]."""
    stay, phase, tokens, before = state
    return [stay, phase, tokens, before + tokens * (n - int(log.runs.first[run]))]
