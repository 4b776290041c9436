"""One engine's time as prefix sums over its steps, so that any interval's contents are two look-ups.

All sums are in seconds. Steps are tiled without overlap; time in no tile is idle.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tailscope.ledger.cost import CostModels, fit_epochs
from tailscope.ledger.own_prefill import OwnPrefill, Work, by_others
from tailscope.ledger.steps import Limits, Place, Prefills, Steps
from tailscope.stats import Floats, Ints, active, prefix_sums

#: Steps whose KV cache is at least this full cannot admit a request of ordinary size.
KV_FULL = 0.9
#: From here on one as large as nearly all of the cache does not fit.
KV_PARTLY = 0.1
#: Share of the token budget from which a step counts as having used it up: block and chunk rounding.
BUDGET_FULL = 0.95
#: Below this many tokens in the largest step the budget was never met, so it cannot be read off the steps.
MIN_BUDGET = 512
#: Least share of a step that must be left, after what its ranks lost, for it to count in the fit of the cost model.
LEFT = 0.1


class EngineTime:
    """Prefix sums over an engine's steps. `culprits` is the number of classes that can be blamed.

    `own` is the prefill of its own requests, `work` what was computed in its steps: by it alone, or by `engines` of
    them that step together.
    """

    def __init__(
        self,
        steps: Steps,
        prefills: Prefills,
        culprits: int,
        limits: Limits,
        own: OwnPrefill,
        work: Work,
        engines: int = 1,
    ) -> None:
        self.steps, self.weight, self.engines = steps, own.weight, engines
        n = len(steps.start_ns)
        tile = (steps.end_ns - steps.start_ns) / 1e9
        late, slow = _within(tile, np.nan_to_num(steps.late_ns) / 1e9, np.nan_to_num(steps.slow_ns) / 1e9)
        late = late - np.minimum(late, work.uneven_s)
        # What the ranks lost to each other is measured, and no cost of the batch.
        without = np.maximum(tile - late - slow, 0.0)
        # A step of which hardly anything is left does not say what its batch costs.
        told = np.where(without >= LEFT * tile, without, 0.0)
        self.cost: CostModels | None = fit_epochs(
            work.base_features, work.prefill_features, told, steps.epoch
        )
        if self.cost is None:
            base, computed, unexplained = np.zeros(n), np.zeros(n), without
        else:
            base, computed, unexplained = self.cost.split(work.base_features, work.prefill_features, without)
        #: Prefix sums of each step's prefill as it is booked, the least and the most that it can be.
        self._prefill_sums = (np.zeros(n + 1),) * 3
        if self.cost is not None:
            low, high = self.cost.prefill_bounds(work.base_features, work.prefill_features, without)
            self._prefill_sums = (
                prefix_sums(computed),
                prefix_sums(np.minimum(low, computed)),
                prefix_sums(np.maximum(high, computed)),
            )
        #: Seconds of each step that the prefill of other engines which step together made it longer.
        self.by_others = np.zeros(n)
        if engines > 1 and self.cost is not None:
            self.by_others = by_others(steps, own, work, self.cost, computed)
        prefill = computed * _share_of(work.prefill_tokens, work.recompute_tokens)
        paused = np.where(np.nan_to_num(steps.paused) > 0, unexplained, 0.0)
        host = np.minimum(np.nan_to_num(steps.host_ns) / 1e9, tile)
        in_base, self.host_beyond = _of_the_host(host, base, unexplained, np.nan_to_num(steps.paused) > 0)
        base, unexplained = base - in_base, unexplained - self.host_beyond
        self.host_gap = prefix_sums(in_base + self.host_beyond)
        self._before = np.nan_to_num(steps.before_ns)
        self._before_s = prefix_sums(self._before / 1e9)
        self.busy, self.base, self.unexplained = (
            prefix_sums(tile),
            prefix_sums(base),
            prefix_sums(unexplained - paused),
        )
        self.straggler_wait, self.slow_transfer, self.pause = (
            prefix_sums(late),
            prefix_sums(slow),
            prefix_sums(paused),
        )
        self.recompute = prefix_sums(computed - prefill)
        rate = prefill / np.maximum(work.known, 1.0)
        own_rate = rate
        if engines > 1:
            own_rate = rate * _share_of(steps.prefill_tokens, work.prefill_tokens - steps.prefill_tokens)
        #: Prefill time a request causes per unit of its weight.
        self.own_rate = prefix_sums(own_rate)
        #: Seconds of each prefill's own tokens, where a schedule tells them; NaN else.
        self.own_told = np.full(len(own.weight), np.nan)
        if own.told is not None:
            per_token = prefix_sums(own_rate / np.maximum(steps.prefill_tokens, 1.0))
            self.own_told = np.where(own.told.complete, own.told.seconds(per_token), np.nan)
        direct, begun = ([rate * share for share in shares] for shares in (work.by_class, work.begun))
        held_back = _held_back(direct, begun, tile, steps)
        caused = [d + g for d, g in zip(direct, _given(begun, held_back), strict=True)]
        self.prefill_by = [prefix_sums(part) for part in caused]
        #: What of a request's own prefill counts as each class's, at the step it begins in.
        self.own_held_back = [
            own.first_weight * own_rate[own.first] * share[own.first] for share in held_back
        ]
        #: Prefill of requests nobody saw finish: client aborts leave no span.
        self.prefill_by_nobody = prefix_sums(rate * np.maximum(0.0, 1.0 - work.known))
        #: Its own steps: those in which it only ran along with others are none.
        self.count = prefix_sums(steps.own)
        self._block(limits, own, tile)
        #: The share of those queued in each step who waited for something else than room, and these shares' time.
        deferred = np.nan_to_num(steps.deferred)
        self.deferred_share = deferred / np.maximum(deferred + np.nan_to_num(steps.waiting), 1.0)
        self.deferred = prefix_sums(tile * self.deferred_share)
        #: Steps' time by the class whose prefill they held, in proportion to its tokens.
        self.tile_by = [prefix_sums(tile * share) for share in own.by_class]
        #: Each class's share of the time, by the KV tokens and by the slots that its running requests hold.
        self.held_by = self._shares(prefills, culprits, np.nan_to_num(prefills.held_tokens), tile)
        self.slots_by = self._shares(prefills, culprits, np.ones(len(prefills.scheduled_ns)), tile)

    @cached_property
    def usual_step_s(self) -> float | None:
        """Seconds of the median step; None where none takes any time."""
        tiles = np.diff(self.busy)
        return float(np.median(tiles[tiles > 0])) if (tiles > 0).any() else None

    def at(self, sums: Floats, place: Place) -> Floats:
        """The prefix sum up to each instant, linear inside a step."""
        return sums[place.index] + place.share * (sums[place.index + 1] - sums[place.index])

    def between(self, sums: Floats, start: Place, end: Place) -> Floats:
        return np.maximum(self.at(sums, end) - self.at(sums, start), 0.0)

    def host_between(self, start_ns: Ints, end_ns: Ints) -> Floats:
        """Seconds between two instants that lie between two steps, in which the host had not begun the next."""
        return np.maximum(self._host_until(end_ns) - self._host_until(start_ns), 0.0)

    def _host_until(self, times_ns: Ints) -> Floats:
        begun = np.searchsorted(self.steps.start_ns, times_ns, side="right")
        following = np.minimum(begun, len(self._before) - 1)
        left = np.where(begun == following, self.steps.start_ns[following] - times_ns, np.inf)
        return self._before_s[begun] + np.maximum(self._before[following] - left, 0.0) / 1e9

    def prefill_bounds(self, start: Place, end: Place) -> tuple[Floats, Floats]:
        """The least and the most that the prefill between two instants can be, as multiples of what is booked."""
        booked, low, high = (self.between(sums, start, end) for sums in self._prefill_sums)
        some = np.maximum(booked, 1e-12)
        return np.where(booked > 0, low / some, 1.0), np.where(booked > 0, high / some, 1.0)

    def longest_unexplained(self, within: NDArray[np.bool_], count: int) -> list[tuple[int, float]]:
        """(step, seconds) of the chosen steps that the cost model explains least, pauses among them, longest first."""
        unexplained = np.where(within, np.diff(self.unexplained) + np.diff(self.pause), 0.0)
        worst = np.argsort(-unexplained, kind="stable")[:count]
        return [(int(k), float(unexplained[k])) for k in worst]

    def _block(self, limits: Limits, own: OwnPrefill, tile: Floats) -> None:
        """What kept waiting requests out of each step; a used-up budget by the class that used it."""
        steps = self.steps
        blocked = self._blocked(limits)
        self.blocked = {name: prefix_sums(tile * mask) for name, mask in blocked.items()}
        rate = tile * blocked["budget"] * _share_of(steps.prefill_tokens, steps.recompute_tokens)
        by_known = rate / np.maximum(own.known, 1.0)
        self.budget_by = [prefix_sums(by_known * share) for share in own.by_class]
        self.budget_by_nobody = prefix_sums(by_known * np.maximum(0.0, 1.0 - own.known))
        self.budget_by_recompute = prefix_sums(tile * blocked["budget"] - rate)

    def _blocked(self, limits: Limits) -> dict[str, Floats]:
        """For each step, what kept a waiting request out: budget, kv, slots, as 0/1."""
        steps = self.steps
        tokens = steps.prefill_tokens + steps.decode_tokens
        largest = float(tokens.max(initial=0.0))
        budget = limits.tokens or (largest if largest >= MIN_BUDGET else np.inf)
        by_budget = (tokens >= BUDGET_FULL * budget) & (steps.prefill_tokens + steps.recompute_tokens > 0)
        waits = np.nan_to_num(steps.waiting) > 0
        # The scheduler looks for a slot before it looks for blocks; what the most slots are must be known for that.
        slots = limits.requests or np.inf
        no_slot = ~by_budget & (self._ran_at_once() >= slots) & waits
        by_kv = ~by_budget & ~no_slot & (np.nan_to_num(steps.kv_usage) >= KV_FULL)
        most = np.nanmax(steps.running) if np.isfinite(steps.running).any() else np.inf
        by_slots = no_slot | (~by_budget & ~by_kv & (steps.running >= most) & waits)
        by_kv |= ~by_budget & ~by_slots & self._head_too_big(waits)
        told = np.flatnonzero(np.isfinite(steps.blocked))
        if len(told):
            # A scheduler that tells says so of each step in which somebody waits.
            inside = np.zeros(len(tokens), bool)
            inside[told[0] : told[-1] + 1] = True
            by_budget, by_slots, by_kv = (
                np.where(inside, steps.blocked == code, guess)
                for code, guess in enumerate((by_budget, by_slots, by_kv))
            )
        return {"budget": by_budget.astype(float), "kv": by_kv.astype(float), "slots": by_slots.astype(float)}

    def _ran_at_once(self) -> Floats:
        """How many requests had a slot when each step's batch was made, or when the next one was, ahead of its results.

        What is told after a step lacks those that ended with it, and with many slots nearly every step ends one: they are
        those of its batch that are not in the next, but for the ones that are new in it.
        """
        steps = self.steps
        running, batch = np.nan_to_num(steps.running), steps.prefill_requests + steps.decode_requests
        after, new = np.append(batch[1:], 0.0), np.append(steps.prefill_requests[1:], 0.0)
        ended = np.clip(batch + new - after, 0.0, batch)
        return np.asarray(np.maximum(batch, running + np.where(after > 0, ended, 0.0)))

    def _head_too_big(self, waits: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Steps after which somebody still waited, and after which nobody was admitted: with budget and slots left, the
        head of the queue does not fit the cache. Who came in the step may be too late for a batch made ahead."""
        steps = self.steps
        still = waits & np.append(False, waits[:-1])
        nobody = np.append(steps.prefill_tokens[1:] + steps.recompute_tokens[1:] == 0, False)
        return np.asarray(still & nobody & (np.nan_to_num(steps.kv_usage) >= KV_PARTLY))

    def _shares(self, prefills: Prefills, culprits: int, amounts: Floats, tile: Floats) -> list[Floats]:
        """For each class, prefix sums of the time by its share of what the running requests hold, `amounts` each: KV
        tokens are a prompt and half its output."""
        n = len(self.steps.start_ns)
        first = np.minimum(Place(self.steps, prefills.scheduled_ns).boundary(), n)
        beyond = np.maximum(np.minimum(Place(self.steps, prefills.last_ns).boundary(), n), first)
        held = [
            np.maximum(active(first[mine], beyond[mine], amounts[mine], n), 0.0)
            for mine in (prefills.culprit == c for c in range(culprits))
        ]
        total = np.maximum(np.sum(held, axis=0) if held else np.zeros(n), 1e-9)
        return [prefix_sums(tile * share / total) for share in held]


def _of_the_host(
    host: Floats, base: Floats, unexplained: Floats, paused: NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    """What of each step's measured host gap is in its normal cost, and what in what that does not explain. Usual gaps are a part
    of all steps, from which the normal cost was learnt; what exceeds them is beyond it as far as that goes, or is the pause that
    stands beside the step."""
    if not host.any():
        return np.zeros(len(host)), np.zeros(len(host))
    usual = np.minimum(np.minimum(host, np.median(host[host > 0])), base)
    host = np.where(paused, usual, host)
    beyond = np.minimum(host - usual, np.maximum(unexplained, 0.0))
    return usual + np.minimum(host - usual - beyond, base - usual), beyond


def _within(tile: Floats, *parts: Floats) -> list[Floats]:
    """Parts of each step that together are no longer than it."""
    total = np.maximum(np.sum(parts, axis=0), 1e-12)
    return [part * np.minimum(1.0, tile / total) for part in parts]


#: How many steps on what a step held back is followed: each passes on a part of what it got.
FOLLOWED = 4


def _held_back(direct: list[Floats], begun: list[Floats], tile: Floats, steps: Steps) -> list[Floats]:
    """By class: the share of the requests that begin in each step which begin there, together, because of it.

    What comes while a step runs is prefilled together after it, or with a batch made ahead in the step after that. Where a
    class's prefill made these steps longer, so much more came together, and that part of the next prefill is as much its
    doing as its own.
    """
    if len(direct) < 2:
        return [np.zeros(len(tile)) for _ in direct]
    follows = np.append(False, steps.start_ns[1:] == steps.end_ns[:-1])
    one, two = _later(tile, follows, 1), _later(tile, follows, 2)

    def share(caused: Floats) -> Floats:
        before = _later(caused, follows, 1) + _later(caused, follows, 2)
        return np.minimum(before / np.maximum(one + two, 1e-9), 1.0)

    shares = [share(part) for part in direct]
    for _ in range(FOLLOWED):
        given = _given(begun, shares)
        shares = [share(np.maximum(d + g, 0.0)) for d, g in zip(direct, given, strict=True)]
    return shares


def _later(values: Floats, follows: NDArray[np.bool_], by: int) -> Floats:
    """The values `by` steps before each; 0 beyond an idle time, over which nothing is passed on."""
    for _ in range(by):
        values = np.where(follows, np.append(0.0, values[:-1]), 0.0)
    return values


def _given(begun: list[Floats], shares: list[Floats]) -> list[Floats]:
    """What each class's prefill changes by when those of other classes that begin late because of it count as its."""
    everyone, every_share = np.sum(begun, axis=0), np.sum(shares, axis=0)
    return [
        (everyone - mine) * share - mine * (every_share - share)
        for mine, share in zip(begun, shares, strict=True)
    ]


def _share_of(part: Floats, rest: Floats) -> Floats:
    """The share that `part` is of both; all of it where there is no rest."""
    return np.asarray(np.where(rest > 0, part / np.maximum(part + rest, 1e-12), 1.0))
