"""Requests that ran and were given nothing, as the engine's own numbers show it: who decodes gets a token a step, so a
request whose answer took many more steps than it has tokens was left out of the rest, and one whose prompt was in work
over steps in which nobody's was had to stand by. A client that had its tokens late shows nothing of that kind, nor does a
step that took long.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tailscope.ledger.engine_time import EngineTime
from tailscope.ledger.steps import Place
from tailscope.stats import Floats, Ints, prefix_sums
from tailscope.store import Trace

#: Fewer steps without a token than so many are a batch made ahead, or the edge of a step.
MIN_STEPS = 8
#: And fewer than this share of an answer's tokens: where few tokens come a step, as with drafts, steps are no count of them.
MIN_SHARE = 0.1
#: Answers of fewer tokens do not say how many steps a token takes here.
MIN_TOKENS = 16
#: Steps between a request's first scheduling and its first chunk, and after the last one.
LEAD_STEPS = 3
#: Steps whose ends are less certain than so many of them take together count for nothing.
MOST_UNCERTAIN = 50


def uncertain_ns(trace: Trace, instance: str, engine: int | None) -> float:
    """How far off the end of an engine's step is known to be."""
    [row] = trace.rows(
        "SELECT median(time_error_ns) AS error_ns FROM steps WHERE instance = $instance AND engine IS NOT DISTINCT FROM $engine",
        {"instance": instance, "engine": engine},
    )
    return float(row["error_ns"] or 0)


@dataclass(frozen=True)
class Left:
    """Of each request: how many of so many steps (`of`) it was left out of, 0 where that is nothing to speak of; and which
    of the engine's steps count."""

    steps: Floats
    of: Floats
    counted: NDArray[np.bool_]

    @property
    def share(self) -> Floats:
        return np.where(self.steps > 0, self.steps / np.maximum(self.of, 1.0), 0.0)


class Unserved:
    """What requests on an engine were left out of. `tokens`: of their answers; NaN where unknown, and so are `preemptions`:
    who was preempted was not left out."""

    def __init__(
        self,
        time: EngineTime,
        scheduled_ns: Ints,
        first_ns: Ints,
        last_ns: Ints,
        tokens: Floats,
        preemptions: Floats,
        error_ns: float,
    ) -> None:
        self._time, self._tokens = time, tokens
        self.scheduled, self.first, self.last = (
            Place(time.steps, at) for at in (scheduled_ns, first_ns, last_ns)
        )
        #: By how many steps an interval may seem longer, because their ends are not exactly known.
        extra = 2e-9 * error_ns / (time.usual_step_s or np.inf)
        self.least = MIN_STEPS + extra
        self._possible = ~(preemptions > 0) & (extra <= MOST_UNCERTAIN)

    @property
    def certain_enough(self) -> bool:
        return self.least <= MIN_STEPS + MOST_UNCERTAIN

    @cached_property
    def _goes_on(self) -> NDArray[np.bool_]:
        steps = self._time.steps
        return np.asarray((steps.decode_requests > 0) & (steps.own > 0))

    @cached_property
    def decode(self) -> Left:
        """Of the steps after the first token."""
        counted = self._goes_on
        spent = self._time.between(prefix_sums(counted.astype(float)), self.first, self.last)
        needed = self._tokens - 1
        left = spent - needed * _steps_a_token(spent, needed)
        out = self._possible & (needed >= 0) & (left >= np.maximum(self.least, MIN_SHARE * needed))
        return Left(np.where(out, left, 0.0), spent, counted)

    @cached_property
    def prefill(self) -> Left:
        """Of the steps from its scheduling to its first token in which nobody's prompt was in work."""
        steps = self._time.steps
        counted = self._goes_on & (steps.prefill_tokens + steps.recompute_tokens == 0)
        spent = self._time.between(prefix_sums(counted.astype(float)), self.scheduled, self.first)
        stood = spent - LEAD_STEPS
        out = self._possible & (stood >= self.least)
        return Left(np.where(out, stood, 0.0), spent, counted)

    def of(self, sums: Floats, *, decoding: bool) -> Floats:
        """What of a prefix sum over steps lies in those that each request was left out of."""
        left = self.decode if decoding else self.prefill
        if not left.steps.any():
            return np.zeros(len(left.steps))
        masked = prefix_sums(np.where(left.counted, np.diff(sums), 0.0))
        start, end = (self.first, self.last) if decoding else (self.scheduled, self.first)
        return np.asarray(left.share * self._time.between(masked, start, end))


def _steps_a_token(spent: Floats, needed: Floats) -> float:
    """Steps that a token takes here, usually 1: more where requests take turns, as in a pipeline; with drafts fewer, which
    tells nothing, so that it counts as 1."""
    long = needed >= MIN_TOKENS
    return max(1.0, float(np.median(spent[long] / needed[long]))) if long.any() else 1.0
