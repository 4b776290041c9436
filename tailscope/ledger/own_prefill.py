"""What an engine's requests account for of the prefill in its steps, and what the steps of engines computed in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tailscope.ledger.cost import ROUNDS, CostModels
from tailscope.ledger.steps import Place, Prefills, Steps
from tailscope.ranks.compared import MORE
from tailscope.stats import Floats, active, prefix_sums, robust_fit


@dataclass(frozen=True)
class ToldPrefill:
    """Prefill as a schedule tells it: runs of steps with so many tokens each, arrays of one length.

    `place`: index of the engine's prefills, -1 for requests that have no bill. `begins`: the first run of its prefill.
    `complete`: of each prefill, whether all of it is told; `covered`: of each step, whether the schedule tells of its time.
    """

    place: NDArray[np.intp]
    first: NDArray[np.intp]
    beyond: NDArray[np.intp]
    tokens: Floats
    before: Floats
    begins: NDArray[np.bool_]
    complete: NDArray[np.bool_]
    covered: NDArray[np.bool_]

    def attention(self, n: int) -> Floats:
        """Per step, the sum over its prefill tokens of the context they attend to, in token^2."""
        t = self.tokens
        constant = active(self.first, self.beyond, t * (self.before - self.first * t + t / 2), n)
        return np.maximum(constant + active(self.first, self.beyond, t * t, n) * np.arange(n), 0.0)

    def seconds(self, per_token: Floats) -> Floats:
        """What each prefill's own tokens took. `per_token`: prefix sums of a token's seconds in each step."""
        known = self.place >= 0
        took = self.tokens * (per_token[self.beyond] - per_token[self.first])
        n = len(self.complete)
        return np.asarray(np.bincount(self.place[known], weights=took[known], minlength=n), np.float64)


class OwnPrefill:
    """What an engine's requests account for of the prefill in each of its steps.

    A request's computed prompt tokens are spread over the steps of its prefill in proportion to the steps'
    prefill tokens; that gives each step's prefill by class, and the length of the context its tokens attend to,
    without knowing who was in which step. Tokens no known request accounts for belong to nobody.
    """

    def __init__(
        self, steps: Steps, prefills: Prefills, culprits: int, told: ToldPrefill | None = None
    ) -> None:
        self.tokens = steps.prefill_tokens
        self._token_sum = prefix_sums(self.tokens)
        n = len(self.tokens)
        first = np.minimum(Place(steps, prefills.scheduled_ns).boundary(), n - 1)
        beyond = np.clip(Place(steps, prefills.first_token_ns).boundary(), first + 1, n)
        inside = self._token_sum[beyond] - self._token_sum[first]
        with np.errstate(divide="ignore", invalid="ignore"):
            #: Share of its window's prefill tokens that is each request's own.
            self.weight = np.where(inside > 0, np.minimum(1.0, prefills.computed_tokens / inside), 0.0)
        self.weight = np.nan_to_num(self.weight)
        #: Share of each step's prefill tokens that is each class's, and all classes'.
        self.by_class = [
            active(first[mine], beyond[mine], self.weight[mine], n)
            for mine in (prefills.culprit == c for c in range(culprits))
        ]
        self.known = np.maximum(np.sum(self.by_class, axis=0) if self.by_class else np.zeros(n), 0.0)
        #: Of each class's share that of requests which begin in the step, and where each request does.
        self.first = first
        self.begun = [
            np.asarray(np.bincount(first[mine], weights=self.weight[mine], minlength=n), np.float64)
            for mine in (prefills.culprit == c for c in range(culprits))
        ]
        #: Of each request's own share, that in the step its prefill begins in.
        self.first_weight = self.weight
        self.attention = self._attention(prefills, first, beyond)
        self.told = told
        if told is not None:
            self._tell(told, prefills, culprits)

    def _tell(self, told: ToldPrefill, prefills: Prefills, culprits: int) -> None:
        """Put what the schedule tells in the place of what was inferred."""
        n, per_token = len(self.tokens), 1 / np.maximum(self.tokens, 1.0)
        known = told.place >= 0
        culprit = np.where(known, prefills.culprit[told.place], -1) if len(prefills.culprit) else told.place
        share = [
            np.maximum(active(told.first[mine], told.beyond[mine], told.tokens[mine], n), 0.0) * per_token
            for mine in (culprit == c for c in range(culprits))
        ]
        # An engine may count fewer tokens than its schedule tells of.
        scale = 1 / np.maximum(np.sum(share, axis=0), 1.0) if share else np.ones(n)
        begins = known & told.begins
        self.first[told.place[begins]] = told.first[begins]
        self.first_weight = self.weight.copy()
        self.first_weight[told.place[begins]] = (told.tokens * per_token[told.first] * scale[told.first])[
            begins
        ]
        begun = [
            np.bincount(self.first[mine], weights=self.first_weight[mine], minlength=n)
            for mine in (prefills.culprit == c for c in range(culprits))
        ]
        self.by_class = [
            np.where(told.covered, exact * scale, inferred)
            for exact, inferred in zip(share, self.by_class, strict=True)
        ]
        self.begun = [np.asarray(part, np.float64) for part in begun]
        self.known = np.sum(self.by_class, axis=0) if self.by_class else np.zeros(n)
        self.attention = np.where(told.covered, told.attention(n), self.attention)

    def _attention(self, prefills: Prefills, first: NDArray[np.intp], beyond: NDArray[np.intp]) -> Floats:
        """Per step, the sum over its prefill tokens of the context they attend to, in token^2.

        Request r has in step k w_r P_k tokens, after cached_r + w_r (F_k - F_first) others, F the prefix
        sum of prefill tokens: linear in F_k, so two prefix sums over all requests give it.
        """
        tokens = self.tokens
        n = len(tokens)
        w, cached = self.weight, np.nan_to_num(prefills.cached_tokens)
        constant = active(first, beyond, w * cached - w * w * self._token_sum[first], n)
        slope = active(first, beyond, w * w, n)
        middle = self._token_sum[:-1] + tokens / 2
        nobody = np.maximum(0.0, 1.0 - self.known) * tokens / 2
        return np.asarray(np.maximum(0.0, tokens * (constant + slope * middle + nobody)))


#: An engine's prefills in each step: requests, tokens, and the sum of the context these attend to.
Amounts: TypeAlias = list[Floats]
#: From so many steps with prefill of one engine alone it is learnt what that takes.
MIN_UNEVEN_STEPS = 8


@dataclass(frozen=True)
class Work:
    """What the engines that step together compute in each step, one engine or several.

    Features of the cost model; prefill tokens and those computed again after a preemption, whose cost is prefill's;
    the classes' shares of the prefill tokens, the sum of these shares, and the shares of requests that begin in the
    step. `uneven_s`: how long ranks waited in each step for those of an engine that has more prefill, or was the last by chance.
    """

    base_features: Floats
    prefill_features: Floats
    prefill_tokens: Floats
    recompute_tokens: Floats
    by_class: list[Floats]
    begun: list[Floats]
    known: Floats
    uneven_s: Floats

    @staticmethod
    def of(engines: Sequence[Steps], own: Sequence[OwnPrefill]) -> Work:
        """The work of engines whose k-th steps are one."""
        prefill = np.sum([s.prefill_tokens for s in engines], axis=0)
        again = np.sum([s.recompute_tokens for s in engines], axis=0)
        amounts = [_prefill_amounts(s, o) for s, o in zip(engines, own, strict=True)]
        base_features, prefill_features = _features(engines, amounts)
        if len(engines) == 1:
            by_class, begun, known = own[0].by_class, own[0].begun, own[0].known
        else:
            share = [s.prefill_tokens / np.maximum(prefill, 1.0) for s in engines]

            def together(parts: Sequence[Floats]) -> Floats:
                return np.asarray(np.sum([a * b for a, b in zip(share, parts, strict=True)], axis=0))

            classes = range(len(own[0].by_class))
            by_class = [together([o.by_class[c] for o in own]) for c in classes]
            begun = [together([o.begun[c] for o in own]) for c in classes]
            known = together([o.known for o in own])
        uneven_s = _uneven(engines, amounts)
        return Work(base_features, prefill_features, prefill, again, by_class, begun, known, uneven_s)


def _features(engines: Sequence[Steps], prefill: Sequence[Amounts]) -> tuple[Floats, Floats]:
    """Columns of the cost model. Engines that step together wait for the one with most to do, and what they share
    takes as long as all of it: of each amount the largest, and of requests and tokens the sum as well."""
    base = []
    for steps in engines:
        drafts = np.maximum(steps.decode_tokens - steps.decode_requests - steps.recompute_tokens, 0)
        base.append([steps.decode_requests, np.nan_to_num(steps.kv_usage), drafts])
    ones = [np.ones(len(engines[0].start_ns))]
    if len(engines) == 1:
        return np.column_stack(ones + base[0]), np.column_stack(prefill[0])
    base_columns = [*ones, *np.max(base, axis=0), np.sum([b[0] for b in base], axis=0)]
    most = np.max(prefill, axis=0)
    prefill_columns = [*most, np.sum([p[1] for p in prefill], axis=0)]
    return np.column_stack(base_columns), np.column_stack(prefill_columns)


def _uneven(engines: Sequence[Steps], prefill: Sequence[Amounts]) -> Floats:
    """Seconds of each step in which the ranks of engines that step together waited for one that is not slow: it has more prefill than
    the others, or is the last one by chance, as each is now and then.

    What a token takes is how the lateness of its engine's ranks grows with it. That of a slow rank grows by more: by as much more as
    it makes steps longer that have no prefill. So it is learnt from the other engines; where these are hardly ever late, from the
    slow one's, less that. Where beyond prefill none makes the others wait twice as long as most do, all are last by chance.
    """
    late = [np.nan_to_num(steps.caused_ns) / 1e9 for steps in engines]
    if len(engines) == 1 or not any(caused.any() for caused in late):
        return np.zeros(len(late[0]))
    amounts = np.array([np.column_stack(each[1:]) for each in prefill])
    beyond = [
        np.maximum(own - np.delete(amounts, e, axis=0).max(axis=0), 0.0) for e, own in enumerate(amounts)
    ]
    even = amounts[:, :, 0].max(axis=0) == 0
    slowest = int(np.argmax([caused[even].sum() for caused in late]))
    others = [e for e in range(len(engines)) if e != slowest]
    takes = _prefill_takes([late[e] for e in others], [beyond[e] for e in others])
    if takes is None:
        tile_s = float((engines[0].end_ns - engines[0].start_ns)[even].sum()) / 1e9
        takes = _prefill_takes([late[slowest]], [beyond[slowest]])
        if takes is not None and tile_s > 0:
            takes = takes * max(1 - float(late[slowest][even].sum()) / tile_s, 0.0)
    if takes is None:
        takes = np.zeros(amounts.shape[2])
    by_prefill = [np.minimum(caused, more @ takes) for caused, more in zip(late, beyond, strict=True)]
    rest = [caused - part for caused, part in zip(late, by_prefill, strict=True)]
    total = sorted(float(part.sum()) for part in rest)
    by_chance = total[-1] < MORE * total[(len(engines) - 1) // 2]
    return np.asarray(np.sum(late if by_chance else by_prefill, axis=0))


def _prefill_takes(late: Sequence[Floats], beyond: Sequence[Floats]) -> Floats | None:
    """Seconds for each of the amounts that engines have `beyond` the others, from how `late` they are; None where too few steps tell."""
    told = [(caused > 0) & (more[:, 0] > 0) for caused, more in zip(late, beyond, strict=True)]
    if sum(int(some.sum()) for some in told) < MIN_UNEVEN_STEPS:
        return None
    caused = np.concatenate([each[some] for each, some in zip(late, told, strict=True)])
    more = np.concatenate([each[some] for each, some in zip(beyond, told, strict=True)])
    # An engine whose prefill makes up for another's slow rank is late by so much less.
    one = np.ones(len(caused))
    features = np.column_stack([one, -one, more])
    return robust_fit(features, caused, 1 / np.sqrt(np.maximum(caused, np.median(caused))), ROUNDS)[2:]


def _prefill_amounts(steps: Steps, own: OwnPrefill) -> Amounts:
    again = steps.recompute_tokens
    # What is computed again begins at its first token.
    attention = own.attention + again * again / 2
    return [steps.prefill_requests + (again > 0), steps.prefill_tokens + again, attention]


def by_others(steps: Steps, own: OwnPrefill, work: Work, cost: CostModels, computed: Floats) -> Floats:
    """What of a step's prefill there would not be if only this one of the engines that step together had some."""
    requests, tokens, attention = _prefill_amounts(steps, own)
    alone = cost.prefill_seconds(np.column_stack([requests, tokens, attention, tokens]))
    together = cost.prefill_seconds(work.prefill_features)
    return np.asarray(computed * np.clip(1 - alone / np.maximum(together, 1e-12), 0.0, 1.0))
