"""Whether a world is asked for more than it can serve, whatever else is wrong in it: a label of its own."""

from __future__ import annotations

import numpy as np

from tailscope.sim.engine import simulate
from tailscope.sim.scenario import Cause, Scenario

#: With so many instances nobody queues.
REPLICAS = 4
OVERLOADED = Cause("queue-saturation", None, ("<512",), {"engine": {"replicas": REPLICAS}})


def too_much(one: Scenario) -> tuple[Cause, ...]:
    """A day with a burst that more than fills the engine for half a minute is too much for it, whoever it comes from."""
    return (OVERLOADED,) if longest_queue_s(one) >= 30 else ()


def longest_queue_s(one: Scenario) -> float:
    """For how long somebody waited without a break, at most."""
    steps = simulate(one).engines[0].steps
    waits = steps.waiting > 0
    begins = np.flatnonzero(waits & ~np.append(False, waits[:-1]))
    ends = np.flatnonzero(waits & ~np.append(waits[1:], False))
    return float((steps.end_s[ends] - steps.start_s[begins]).max(initial=0.0))
