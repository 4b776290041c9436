"""What an API server has of one of its engines: all that its spans, metrics, log and stat loggers can be made of.

It hears of a step when the step's outputs come in, knows nothing of dummy steps, and drops what comes for requests
whose client has left.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailscope.sim.outcome import MONOTONIC_S, OK, PREFILL, RECOMPUTE, START_NS, Floats, Ints, Outcome, Steps

#: What `time.time()` shows when the world begins, seconds.
EPOCH_S = START_NS / 1e9
#: When the server was started, its log named the engine, and its loggers began; seconds of the world.
BOOT_S, ENGINE_S, LOGGERS_S = -60.0, -40.0, -10.0
#: `VLLM_LOG_STATS_INTERVAL`, seconds.
LOG_INTERVAL_S = 10.0

#: A request's id travels in a header, and log lines list ids with commas between.
_UNSENDABLE = re.compile(r"[\x00-\x20\x7f,]")


def wall(time_s: Any) -> Floats:
    """`time.time()` at a time of the world, seconds; as coarse as a double is (238 ns)."""
    return np.asarray(EPOCH_S + np.asarray(time_s, np.float64))


def mono(time_s: Any) -> Floats:
    """The engines' `time.monotonic()`, seconds."""
    return np.asarray(MONOTONIC_S + np.asarray(time_s, np.float64))


def whole_ns(seconds: Any) -> Ints:
    """Seconds as whole nanoseconds, as Python's `round(seconds * 1e9)` has them."""
    return np.rint(np.asarray(seconds, np.float64) * 1e9).astype(np.int64)


def client_id(request_id: str) -> str:
    """What the client sends as X-Request-Id."""
    return _UNSENDABLE.sub("_", request_id)


def response_id(request_id: str) -> str:
    return f"cmpl-{client_id(request_id)}"


def engine_id(request_id: str) -> str:
    """The id spans, stat loggers and logs know: the completions API appends the prompt's index."""
    return f"{response_id(request_id)}-0"


def digest(*parts: object, size: int = 8) -> bytes:
    """Bytes that look random and are the same on every run."""
    text = "\x1f".join(map(str, parts))
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


def process_id(instance: str) -> int:
    """Of an instance's API server. Its engines' follow: so no two instances write the same bytes."""
    return 1_000 + int.from_bytes(digest("process", instance, size=2))


@dataclass(frozen=True)
class Stays:
    """Requests at one engine, an array element each. With a prefill/decode pair a request stays at two.

    `request` is an index of `Requests`. `gone_s`: when its client left, NaN where it stayed. `external`: prompt tokens
    whose KV cache another instance computed. `max_tokens`: what this engine was asked for. `told`: finished at the
    engine with the client still there, so that front ends tell of it.
    """

    request: Ints
    arrival_s: Floats
    queued_s: Floats
    scheduled_s: Floats
    finished_s: Floats
    gone_s: Floats
    prompt: Ints
    cached: Ints
    external: Ints
    max_tokens: Ints
    preemptions: Ints
    told: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True)
class FrontEnd:
    """The front end of one engine: `index` is the engine's in `Outcome.engines`, `engine` its data-parallel rank.

    `output_*`: each output token the front end took, in order of stay and time, `output_first` the first ones of stays.
    `messages`: outputs in each step's message, dropped ones too. `first_step`, `last_step`, `outputs`: of each stay its
    outputs; `admitted_step`: when it was scheduled first; -1 where never. `resumed`: see `_resumed`.
    """

    instance: str
    engine: int
    index: int
    role: str
    steps: Steps
    stays: Stays
    output_stay: Ints
    output_step: Ints
    output_first: NDArray[np.bool_]
    messages: Ints
    first_step: Ints
    last_step: Ints
    outputs: Ints
    admitted_step: Ints
    resumed: tuple[Ints, Ints, Ints]

    @cached_property
    def reported(self) -> Ints:
        """Steps the front end hears of, as indexes of `steps`."""
        return np.flatnonzero(~self.steps.dummy)

    @cached_property
    def told(self) -> Ints:
        """Stays it tells of, in the order in which they finish."""
        told = np.flatnonzero(self.stays.told)
        return told[np.argsort(self.last_step[told], kind="stable")]

    @cached_property
    def place(self) -> Ints:
        """Of each of `told`: its place among those that finish with the same step, from 0."""
        step = self.last_step[self.told]
        return np.arange(len(step)) - np.searchsorted(step, step)

    @cached_property
    def shown_s(self) -> Floats:
        """When the front end had each output."""
        return self.steps.received_s[self.output_step]

    @cached_property
    def ttft(self) -> Floats:
        """Of each first output: seconds since arrival, wall clock."""
        first = self.output_first
        return wall(self.shown_s[first]) - wall(self.stays.arrival_s[self.output_stay[first]])

    @cached_property
    def itl(self) -> Floats:
        """Of each output but the first ones: seconds since the one before, by the engine's clock."""
        end = mono(self.steps.end_s[self.output_step])
        later = np.flatnonzero(~self.output_first)
        return end[later] - end[later - 1]

    @cached_property
    def durations(self) -> dict[str, Floats]:
        """Seconds of each of `told`, by vLLM's names of them."""
        stays, told, steps = self.stays, self.told, self.steps
        first, last = self.first_step[told], self.last_step[told]
        arrival, scheduled = wall(stays.arrival_s[told]), mono(stays.scheduled_s[told])
        first_token, last_token = mono(steps.end_s[first]), mono(steps.end_s[last])
        decode, later = last_token - first_token, self.outputs[told] - 1
        return {
            "ttft": wall(steps.received_s[first]) - arrival,
            "e2e": wall(steps.received_s[last]) - arrival,
            "queued": scheduled - mono(stays.queued_s[told]),
            "prefill": first_token - scheduled,
            "decode": decode,
            "inference": last_token - scheduled,
            "tpot": np.where(later > 0, decode / np.maximum(later, 1), 0.0),
        }

    @cached_property
    def prompts(self) -> dict[str, Ints]:
        """Prompt tokens booked with each step's message: those of prompts whose first output it holds."""
        stay, step = self.output_stay[self.output_first], self.output_step[self.output_first]
        stays = self.stays

        def booked(tokens: Ints) -> Ints:
            return np.bincount(step, tokens[stay], len(self.steps)).astype(np.int64)

        cached, external = booked(stays.cached), booked(stays.external)
        total = booked(stays.prompt)
        return {"total": total, "cached": cached, "external": external, "computed": total - cached - external}

    @cached_property
    def generated(self) -> Ints:
        """Output tokens the front end took with each step's message."""
        return np.bincount(self.output_step, minlength=len(self.steps))

    @cached_property
    def elapsed_ms(self) -> Floats:
        """How long the engine waited for each step's result, in hundredths of a millisecond at the finest.

        With asynchronous scheduling it makes the next batch first, and waits for what is left.
        """
        steps = self.steps
        before, after = np.roll(steps.end_s, 1), np.roll(steps.scheduled_s, -1)
        if len(steps):
            before[0], after[-1] = -np.inf, np.inf
        begun = np.maximum(steps.scheduled_s, before)
        begun = np.where(after < steps.end_s, np.maximum(begun, after), begun)
        return np.asarray(np.rint((steps.end_s - begun) * 1e5) / 100)

    @cached_property
    def admissions(self) -> dict[str, Ints]:
        """Prefix cache statistics of each step: what was looked up and found when requests were admitted."""
        stays, size = self.stays, len(self.steps)
        admitted = np.flatnonzero(self.admitted_step >= 0)
        step = self.admitted_step[admitted]
        again, asked, found = self.resumed
        return {
            "requests": np.bincount(step, minlength=size),
            "queries": np.bincount(step, stays.prompt[admitted], size).astype(np.int64),
            "hits": np.bincount(step, stays.cached[admitted], size).astype(np.int64),
            "preempted_requests": np.bincount(again, minlength=size),
            "preempted_queries": np.bincount(again, asked, size).astype(np.int64),
            "preempted_hits": np.bincount(again, found, size).astype(np.int64),
        }


def front_ends(outcome: Outcome) -> list[FrontEnd]:
    """One for each of `Outcome.engines`."""
    known: list[FrontEnd] = []
    by_index: dict[int, FrontEnd] = {}
    # What arrives at a decode instance is what a prefill instance has answered.
    for index in sorted(range(len(outcome.engines)), key=lambda i: outcome.engines[i].role == "decode"):
        by_index[index] = _front_end(outcome, index, known)
        known.append(by_index[index])
    return [by_index[index] for index in range(len(outcome.engines))]


def of_instance(views: list[FrontEnd], instance: str) -> list[FrontEnd]:
    return [view for view in views if view.instance == instance]


def _front_end(outcome: Outcome, index: int, known: list[FrontEnd]) -> FrontEnd:
    requests, engine = outcome.requests, outcome.engines[index]
    steps = engine.steps
    members = np.flatnonzero(
        (requests.prefill_engine if engine.role == "prefill" else requests.engine) == index
    )
    request, step, _ = outcome.token_times(engine)
    stay = np.searchsorted(members, request)
    gone = requests.left_s[members]
    kept = ~(steps.received_s[step] > gone[stay])
    messages = np.bincount(step, minlength=len(steps))
    stay, step = stay[kept], step[kept]
    first = np.ones(len(stay), np.bool_)
    first[1:] = stay[1:] != stay[:-1]
    outputs = np.bincount(stay, minlength=len(members))
    first_step, last_step = np.full(len(members), -1), np.full(len(members), -1)
    first_step[stay[first]] = step[first]
    last_step[stay] = step
    admitted, found = np.full(len(members), -1), np.zeros(len(members), np.int64)
    runs = engine.runs
    order = np.lexsort((runs.first, runs.request))
    of, begin = runs.request[order], runs.first[order]
    new = np.ones(len(of), np.bool_)
    new[1:] = of[1:] != of[:-1]
    place = np.searchsorted(members, of[new])
    admitted[place], found[place] = begin[new], runs.computed_before[order][new]
    stays = _stays(outcome, index, members, (outputs, first_step, last_step, admitted, found), known)
    return FrontEnd(
        engine.instance, engine.engine, index, engine.role, steps, stays, stay, step, first, messages,
        first_step, last_step, outputs, admitted, _resumed(outcome, index),
    )  # fmt: skip


def _stays(
    outcome: Outcome,
    index: int,
    members: Ints,
    seen: tuple[Ints, Ints, Ints, Ints, Ints],
    known: list[FrontEnd],
) -> Stays:
    requests, engine, steps = outcome.requests, outcome.engines[index], outcome.engines[index].steps
    outputs, _, last_step, admitted, found = seen
    finished = requests.finished_s[members]
    stays = Stays(
        request=members,
        arrival_s=requests.arrival_s[members],
        queued_s=requests.queued_s[members],
        scheduled_s=requests.scheduled_s[members],
        finished_s=finished,
        gone_s=requests.left_s[members],
        prompt=requests.prompt[members],
        cached=requests.cached[members],
        external=np.zeros(len(members), np.int64),
        max_tokens=requests.planned[members],
        preemptions=requests.preemptions[members],
        told=(requests.status[members] == OK) & ~np.isnan(finished) & (outputs > 0),
    )
    if engine.role == "prefill":
        # Its clients are a router's: each asks for one token, and what a request's own times are is the other's.
        told, scheduled = outputs > 0, _at(steps.scheduled_s, admitted)
        asked = stays.arrival_s + outcome.scenario.cost.frontend
        return replace(
            stays,
            queued_s=np.fmin(_drained(steps, asked, outcome.scenario.cost.host_gap), scheduled),
            scheduled_s=scheduled,
            finished_s=np.where(told, _at(steps.received_s, last_step), np.nan),
            cached=found,
            max_tokens=np.ones(len(members), np.int64),
            preemptions=np.zeros(len(members), np.int64),
            told=told,
        )
    if engine.role == "decode":
        handed = np.full(len(requests), np.nan)
        for view in known:
            if view.role == "prefill":
                answered = np.flatnonzero(view.last_step >= 0)
                handed[view.stays.request[answered]] = view.steps.received_s[view.last_step[answered]]
        return replace(
            stays,
            arrival_s=handed[members],
            cached=np.zeros(len(members), np.int64),
            external=np.maximum(stays.prompt - 1, 0),
        )
    return stays


def _at(times: Floats, step: Ints) -> Floats:
    """The times of steps, NaN for step -1."""
    return np.append(times, np.nan)[step]


def _drained(steps: Steps, asked_s: Floats, gap_s: float) -> Floats:
    """When an engine takes what lies in its input queue: between two steps, at once if it has nothing to do."""
    step = np.searchsorted(steps.end_s, asked_s)
    begun, end = np.append(steps.start_s - gap_s, np.inf)[step], np.append(steps.end_s, np.inf)[step]
    return np.where(begun <= asked_s, end, asked_s)


def _resumed(outcome: Outcome, index: int) -> tuple[Ints, Ints, Ints]:
    """Of each request that came back after a preemption: the step, the tokens it needed, those found in the cache.

    It comes back with a prefill or recompute that does not continue the chunk before.
    """
    runs, prompts = outcome.engines[index].runs, outcome.requests.prompt
    order = np.lexsort((runs.first, runs.request))
    order = order[runs.tokens[order] > 0]
    request, before = runs.request[order], runs.computed_before[order]
    lengths = runs.last[order] - runs.first[order] + 1
    after = before + runs.tokens[order] * lengths
    same = np.zeros(len(order), np.bool_)
    same[1:] = request[1:] == request[:-1]
    broken = same.copy()
    broken[1:] &= before[1:] != after[:-1]
    chunk = (runs.phase[order] == RECOMPUTE) | (runs.phase[order] == PREFILL)
    again = np.flatnonzero(broken & chunk)
    # Tokens given before: all that the request's earlier runs gave.
    gave = np.where(runs.gives[order], lengths, 0)
    total = np.cumsum(gave) - gave
    start = np.searchsorted(request, request[again])
    given = total[again] - total[start] if len(again) else total[:0]
    return runs.first[order][again], prompts[request[again]] + given, before[again]
