"""One engine's time as prefix sums over its steps, so that any interval's contents are two look-ups.

All sums are in seconds. Steps are tiled without overlap; time in no tile is idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailscope.ledger.cost import CostModel, fit
from tailscope.stats import Floats, Ints

#: Steps whose KV cache is at least this full cannot admit a request of ordinary size.
KV_FULL = 0.9
#: Share of the token budget from which a step counts as having used it up: block and chunk rounding.
BUDGET_FULL = 0.95
#: Below this many tokens in the largest step the budget was never met, so it cannot be read off the steps.
MIN_BUDGET = 512


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
    kv_usage: Floats
    #: What the ranks' profiles say, ns; and whether something stood beside the step that stops an engine.
    late_ns: Floats
    slow_ns: Floats
    paused: Floats


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


class EngineTime:
    """Prefix sums over an engine's steps. `culprits` is the number of classes that can be blamed.

    A request's computed prompt tokens are spread over the steps of its prefill in proportion to the steps'
    prefill tokens; that gives each step's prefill by class, and the length of the context its tokens attend to,
    without knowing who was in which step. Tokens no known request accounts for belong to nobody.
    """

    def __init__(self, steps: Steps, prefills: Prefills, culprits: int, budget: float | None) -> None:
        self.steps = steps
        n = len(steps.start_ns)
        tile = (steps.end_ns - steps.start_ns) / 1e9
        tokens = steps.prefill_tokens
        self._token_sum = _prefix(tokens)
        first = np.minimum(Place(steps, prefills.scheduled_ns).boundary(), n - 1)
        beyond = np.clip(Place(steps, prefills.first_token_ns).boundary(), first + 1, n)
        inside = self._token_sum[beyond] - self._token_sum[first]
        with np.errstate(divide="ignore", invalid="ignore"):
            #: Share of its window's prefill tokens that is each request's own.
            self.weight = np.where(inside > 0, np.minimum(1.0, prefills.computed_tokens / inside), 0.0)
        self.weight = np.nan_to_num(self.weight)
        by_class = [
            _active(first[mine], beyond[mine], self.weight[mine], n)
            for mine in (prefills.culprit == c for c in range(culprits))
        ]
        known = np.maximum(np.sum(by_class, axis=0) if by_class else np.zeros(n), 0.0)
        attention = self._attention(prefills, first, beyond, known)
        base_features = np.column_stack(
            [
                np.ones(n),
                steps.decode_requests,
                np.nan_to_num(steps.kv_usage),
                np.maximum(steps.decode_tokens - steps.decode_requests, 0),
            ]
        )
        prefill_features = np.column_stack([steps.prefill_requests, tokens, attention])
        late, slow = _within(tile, np.nan_to_num(steps.late_ns) / 1e9, np.nan_to_num(steps.slow_ns) / 1e9)
        # What the ranks lost to each other is measured, and no cost of the batch.
        without = tile - late - slow
        self.cost: CostModel | None = fit(base_features, prefill_features, without)
        if self.cost is None:
            base, prefill, unexplained = np.zeros(n), np.zeros(n), without
        else:
            base, prefill, unexplained = self.cost.split(base_features, prefill_features, without)
        paused = np.where(np.nan_to_num(steps.paused) > 0, unexplained, 0.0)
        unexplained = unexplained - paused
        rate = prefill / np.maximum(known, 1.0)
        self.busy, self.base, self.unexplained = _prefix(tile), _prefix(base), _prefix(unexplained)
        self.straggler_wait, self.slow_transfer, self.pause = _prefix(late), _prefix(slow), _prefix(paused)
        #: Prefill time a request causes per unit of its weight.
        self.own_rate = _prefix(rate)
        self.prefill_by = [_prefix(rate * share) for share in by_class]
        #: Prefill of requests nobody saw finish: client aborts leave no span.
        self.prefill_by_nobody = _prefix(rate * np.maximum(0.0, 1.0 - known))
        self.count = _prefix(np.ones(n))
        blocked = self._blocked(budget)
        self.blocked = {name: _prefix(tile * mask) for name, mask in blocked.items()}
        budget_rate = tile * blocked["budget"] / np.maximum(known, 1.0)
        self.budget_by = [_prefix(budget_rate * share) for share in by_class]
        self.budget_by_nobody = _prefix(budget_rate * np.maximum(0.0, 1.0 - known))
        held = self._held(prefills, culprits)
        total = np.maximum(np.sum(held, axis=0) if held else np.zeros(n), 1e-9)
        self.held_by = [_prefix(tile * share / total) for share in held]

    def at(self, sums: Floats, place: Place) -> Floats:
        """The prefix sum up to each instant, linear inside a step."""
        return sums[place.index] + place.share * (sums[place.index + 1] - sums[place.index])

    def between(self, sums: Floats, start: Place, end: Place) -> Floats:
        return np.maximum(self.at(sums, end) - self.at(sums, start), 0.0)

    def longest_unexplained(self, within: NDArray[np.bool_], count: int) -> list[tuple[int, float]]:
        """(step, seconds) of the chosen steps that the cost model explains least, pauses among them, longest first."""
        unexplained = np.where(within, np.diff(self.unexplained) + np.diff(self.pause), 0.0)
        worst = np.argsort(-unexplained, kind="stable")[:count]
        return [(int(k), float(unexplained[k])) for k in worst]

    def _attention(
        self, prefills: Prefills, first: NDArray[np.intp], beyond: NDArray[np.intp], known: Floats
    ) -> Floats:
        """Per step, the sum over its prefill tokens of the context they attend to, in token^2.

        Request r has in step k w_r P_k tokens, after cached_r + w_r (F_k - F_first) others, F the prefix
        sum of prefill tokens: linear in F_k, so two prefix sums over all requests give it.
        """
        tokens = self.steps.prefill_tokens
        n = len(tokens)
        w, cached = self.weight, np.nan_to_num(prefills.cached_tokens)
        constant = _active(first, beyond, w * cached - w * w * self._token_sum[first], n)
        slope = _active(first, beyond, w * w, n)
        middle = self._token_sum[:-1] + tokens / 2
        nobody = np.maximum(0.0, 1.0 - known) * tokens / 2
        return np.asarray(np.maximum(0.0, tokens * (constant + slope * middle + nobody)))

    def _blocked(self, budget: float | None) -> dict[str, Floats]:
        """For each step, what kept a waiting request out: budget, kv, slots, as 0/1."""
        steps = self.steps
        tokens = steps.prefill_tokens + steps.decode_tokens
        largest = float(tokens.max(initial=0.0))
        budget = budget or (largest if largest >= MIN_BUDGET else np.inf)
        by_budget = (tokens >= BUDGET_FULL * budget) & (steps.prefill_tokens > 0)
        by_kv = ~by_budget & (np.nan_to_num(steps.kv_usage) >= KV_FULL)
        most = np.nanmax(steps.running) if np.isfinite(steps.running).any() else np.inf
        by_slots = ~by_budget & ~by_kv & (steps.running >= most) & (np.nan_to_num(steps.waiting) > 0)
        return {"budget": by_budget.astype(float), "kv": by_kv.astype(float), "slots": by_slots.astype(float)}

    def _held(self, prefills: Prefills, culprits: int) -> list[Floats]:
        """For each class, the KV tokens its running requests hold at each step: prompt and half their output."""
        n = len(self.steps.start_ns)
        first = np.minimum(Place(self.steps, prefills.scheduled_ns).boundary(), n)
        beyond = np.maximum(np.minimum(Place(self.steps, prefills.last_ns).boundary(), n), first)
        held = np.nan_to_num(prefills.held_tokens)
        return [
            np.maximum(_active(first[mine], beyond[mine], held[mine], n), 0.0)
            for mine in (prefills.culprit == c for c in range(culprits))
        ]


def _within(tile: Floats, *parts: Floats) -> list[Floats]:
    """Parts of each step that together are no longer than it."""
    total = np.maximum(np.sum(parts, axis=0), 1e-12)
    return [part * np.minimum(1.0, tile / total) for part in parts]


def _prefix(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


def _active(first: NDArray[np.intp], beyond: NDArray[np.intp], values: Floats, n: int) -> Floats:
    """Sum of `values` over the intervals [first, beyond) that contain each of n steps."""
    change = np.bincount(first, weights=values, minlength=n + 1) - np.bincount(
        beyond, weights=values, minlength=n + 1
    )
    return np.asarray(np.cumsum(change)[:n])
