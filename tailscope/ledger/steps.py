"""An engine's steps, the prefills in them and what it may put into one, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailscope.stats import Floats, Ints

#: What keeps a request out of a step.
BLOCKERS = ("budget", "slots", "kv", "other")


@dataclass(frozen=True)
class Limits:
    """What a scheduler may put into a step, where it is known: tokens, and requests that run at once."""

    tokens: float | None = None
    requests: float | None = None


@dataclass(frozen=True)
class Steps:
    """An engine's steps in order, arrays of one length."""

    start_ns: Ints
    end_ns: Ints
    prefill_requests: Floats
    prefill_tokens: Floats
    decode_requests: Floats
    decode_tokens: Floats
    running: Floats
    waiting: Floats
    #: Requests that wait for something else than room.
    deferred: Floats
    kv_usage: Floats
    #: What the ranks' profiles say, ns: lost to a rank that came late, and what this engine's own made all lose by it; lost to
    #: slow transfers. Whether something stood beside the step that stops an engine.
    late_ns: Floats
    caused_ns: Floats
    slow_ns: Floats
    paused: Floats
    #: Time at the beginning of a step, and just before it, in which its host had not begun it though there was work, ns.
    host_ns: Floats
    before_ns: Floats
    #: Tokens computed again after a preemption, whatever kind of tokens the engine counts them as.
    recompute_tokens: Floats
    #: How many of the engine's own steps each is: 1, or 0 where it only ran along with others.
    own: Floats
    #: How often the engine had started before each step.
    epoch: Floats
    #: What kept the head of the queue out, as the scheduler told it: an index of BLOCKERS, NaN where it told nothing.
    blocked: Floats


@dataclass(frozen=True)
class Prefills:
    """Requests' prefill phases on the engine, arrays of one length; `culprit` is an index of a class."""

    scheduled_ns: Ints
    first_token_ns: Ints
    last_ns: Ints
    computed_tokens: Floats
    cached_tokens: Floats
    held_tokens: Floats
    culprit: NDArray[np.intp]


class Place:
    """Positions of instants on an engine's tiles: step index and the share of the step that is over."""

    def __init__(self, steps: Steps, times_ns: Ints) -> None:
        index = np.searchsorted(steps.start_ns, times_ns, side="right") - 1
        before = index < 0
        index = np.maximum(index, 0)
        length = np.maximum(steps.end_ns[index] - steps.start_ns[index], 1)
        share = np.clip((times_ns - steps.start_ns[index]) / length, 0.0, 1.0)
        self.index, self.share = index, np.where(before, 0.0, share)

    def boundary(self) -> NDArray[np.intp]:
        """The step boundary nearest to each instant: the number of steps before it."""
        return self.index + (self.share >= 0.5)
