"""What became of a simulated world: every request and every step, as it truly was. Emitters show parts of it.

Times are seconds since the world began, by one true clock; NaN is "never". `START_NS` makes them Unix times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailscope.sim.scenario import Scenario

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: What the wall clock shows when a world begins, and what the engines' monotonic one does.
START_NS = 1_795_000_000_000_000_000
MONOTONIC_S = 3_600.0

#: `status` of a request, as its client and the truth have it.
OK, ABORTED, TIMEOUT, REJECTED, UNFINISHED = range(5)
STATUS_NAMES = ("ok", "aborted", "timeout", "rejected", "unfinished")

#: `phase` of a run.
PREFILL, DECODE, RECOMPUTE = range(3)

#: Why the head of the waiting queue was not admitted in a step, in `Steps.blocked`.
NOT_BLOCKED, BY_BUDGET, BY_KV, BY_SLOTS, BY_PREEMPTION = range(5)
BLOCKED_NAMES = (None, "budget", "kv", "slots", "kv")


@dataclass
class Requests:
    """All requests, one array element each, in the order they were sent.

    intended_s: when the client would have sent it with no limit of its own; sent_s: when it did; arrival_s: at the API
    server; input_s: in the engine's input, through the front end; queued_s, scheduled_s: by the scheduler (first time); first_token_s, last_token_s: end of the steps that gave
    them; fetch_s, fetched_s: when its KV cache began to come from its prefill engine, and when the scheduler knew that it was there;
    first_shown_s, last_shown_s: when the front end had them; finished_s: when the front end was done (NaN where
    it never was); left_s: when its client left by timeout, or the front end knew that it had. `output`: tokens the
    engine gave, those for a client that had left included. `engine` is an index of `Outcome.engines`, -1
    where none saw it; with a prefill/decode pair it is the decode engine, and `prefill_engine` the other.
    """

    id: list[str]
    load: Ints
    prompt: Ints
    planned: Ints
    output: Ints
    cached: Ints
    priority: Ints
    preemptions: Ints
    status: Ints
    engine: Ints
    prefill_engine: Ints
    intended_s: Floats
    sent_s: Floats
    arrival_s: Floats
    input_s: Floats
    queued_s: Floats
    fetch_s: Floats
    fetched_s: Floats
    scheduled_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    first_shown_s: Floats
    last_shown_s: Floats
    finished_s: Floats
    left_s: Floats
    kv_transfer_s: Floats

    def __len__(self) -> int:
        return len(self.id)

    def answers(self) -> Ints:
        """Which answer of its call each is, from 0: with `n` above 1 a call has several under one id."""
        seen: dict[str, int] = {}
        found = np.zeros(len(self.id), np.int64)
        for i, name in enumerate(self.id):
            found[i] = seen.get(name, 0)
            seen[name] = int(found[i]) + 1
        return found


@dataclass
class Steps:
    """All steps of an engine in order, one array element each.

    scheduled_s: when its batch was made; start_s, end_s: when it ran. `received_s`: when the API server had the
    result. `running`, `waiting`, `deferred`, `kv_usage`: after the step. `preempted`: requests preempted when its batch
    was made; `preempted_told`: preemptions the engine reports with it, which is late. `base_s`, `prefill_s`: what the
    step cost without and by prefill, that of the other engines of its lane too; then what it took beyond:
    `straggler_s`, `transfer_s` (the slow part of it), `pause_s`, `chance_s`; they sum to end_s − start_s.
    """

    scheduled_s: Floats
    start_s: Floats
    end_s: Floats
    received_s: Floats
    prefill_requests: Ints
    prefill_tokens: Ints
    decode_requests: Ints
    decode_tokens: Ints
    recompute_requests: Ints
    recompute_tokens: Ints
    context_tokens: Ints
    running: Ints
    waiting: Ints
    deferred: Ints
    kv_usage: Floats
    preempted: Ints
    preempted_told: Ints
    blocked: Ints
    base_s: Floats
    prefill_s: Floats
    straggler_s: Floats
    transfer_s: Floats
    pause_s: Floats
    chance_s: Floats
    #: A step without work, run to keep data-parallel engines together.
    dummy: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.end_s)


@dataclass
class Runs:
    """Which requests were in which steps: runs of consecutive steps in which a request's phase and tokens are one.

    `request` is an index of `Requests`, `first` and `last` of the engine's `Steps`, inclusive. Prefill chunks and
    recompute are runs of one step. Rows with 0 tokens: running, left out. `gives`: each step of the run gave a token
    (decode always; a prefill or recompute chunk when it is the last one).
    """

    request: Ints
    first: Ints
    last: Ints
    phase: Ints
    tokens: Ints
    computed_before: Ints
    gives: NDArray[np.bool_]


@dataclass
class EngineOutcome:
    """One engine: DP rank `engine` of `instance`. `role`: both, prefill or decode."""

    instance: str
    engine: int
    role: str
    steps: Steps
    runs: Runs


@dataclass
class Event:
    """Something an emitter may tell of: a rejection, or a pause by its reason; `engine` is an index or None."""

    time_s: float
    kind: str
    detail: str
    engine: int | None = None
    request: int | None = None
    length_s: float = 0.0


@dataclass
class Outcome:
    scenario: Scenario
    requests: Requests
    engines: list[EngineOutcome]
    events: list[Event] = field(default_factory=list)
    #: Rank worlds by instance (tailscope.sim.ranks), where the scenario has more than one rank.
    worlds: dict[str, Any] = field(default_factory=dict)

    def instances(self) -> list[str]:
        return list(dict.fromkeys(e.instance for e in self.engines))

    def token_times(self, engine: EngineOutcome) -> tuple[Ints, Ints, Floats]:
        """(request, step, time) of every token an engine gave, in order of request and time.

        A token comes with the end of each decode step, and of the step that ends a prefill or recompute.
        """
        steps, runs = engine.steps, engine.runs
        told = np.flatnonzero(runs.gives)
        # Runs of a request do not overlap, so that sorting the few runs sorts the many tokens.
        told = told[np.lexsort((runs.first[told], runs.request[told]))]
        lengths = runs.last[told] - runs.first[told] + 1
        request = np.repeat(runs.request[told], lengths)
        before = np.repeat(np.cumsum(lengths) - lengths, lengths)
        step = np.repeat(runs.first[told], lengths) + np.arange(len(request)) - before
        return request, step, steps.end_s[step]


def ns(seconds: Any, start_ns: int = START_NS) -> NDArray[np.int64]:
    """Seconds since the world began as Unix ns; the caller leaves NaN out."""
    return np.asarray(np.round(np.asarray(seconds, np.float64) * 1e9), np.int64) + start_ns
