"""Who was in which steps, where the engine's schedule was recorded: exact, instead of inferred by time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tailscope.ledger.own_prefill import ToldPrefill
from tailscope.ledger.requests import Requests
from tailscope.stats import Floats, Ints, active
from tailscope.store import Trace

#: Phases of a run, by their names in `schedule`.
PREFILL, DECODE, RECOMPUTE = 0, 1, 2
PHASE_CODES = f"WHEN 'prefill' THEN {PREFILL} WHEN 'decode' THEN {DECODE} WHEN 'recompute' THEN {RECOMPUTE}"


@dataclass(frozen=True)
class Runs:
    """Runs of steps in which a request was given so many tokens a step, by request and time; arrays of one length.

    `row`: index of the engine's requests that have a bill, -1 for others, which come first. `first`, `beyond`: indices of
    the engine's steps. `before`: tokens computed before the run. Steps in which a request was given none have no run.
    """

    row: NDArray[np.intp]
    first: NDArray[np.intp]
    beyond: NDArray[np.intp]
    phase: Ints
    tokens: Floats
    before: Floats

    def select(self, chosen: NDArray[np.bool_]) -> Runs:
        return Runs(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})

    @property
    def after(self) -> Floats:
        """Tokens computed after the run."""
        return self.before + self.tokens * (self.beyond - self.first)


class Membership:
    """The runs of an engine with so many `steps`, and whose time they tell whole."""

    def __init__(self, runs: Runs, requests: Requests, steps: int) -> None:
        self.runs, self.steps = runs, steps
        self.prompt_tokens, self.cached_tokens = requests.prompt_tokens, requests.cached_tokens

    @cached_property
    def covered(self) -> NDArray[np.bool_]:
        """Which steps lie in the time that was recorded."""
        covered = np.zeros(self.steps, bool)
        if len(self.runs.first):
            covered[self.runs.first.min() : self.runs.beyond.max()] = True
        return covered

    @cached_property
    def complete(self) -> NDArray[np.bool_]:
        """Of which requests all of the prefill is in the runs, from what was cached to the end of the prompt."""
        runs, n = self.runs, len(self.prompt_tokens)
        mine = runs.row >= 0
        least, most = np.full(n, np.inf), np.full(n, -np.inf)
        np.minimum.at(least, runs.row[mine], runs.before[mine])
        np.maximum.at(most, runs.row[mine], runs.after[mine])
        begun = least <= np.where(np.isfinite(self.cached_tokens), self.cached_tokens, np.inf)
        return np.asarray(begun & (most >= np.nan_to_num(self.prompt_tokens)) & np.isfinite(most))

    @property
    def recompute_tokens(self) -> Floats:
        """Tokens computed again in each step."""
        runs = self.runs.select(self.runs.phase == RECOMPUTE)
        return np.maximum(active(runs.first, runs.beyond, runs.tokens, self.steps), 0.0)

    def prefill(self, inside: NDArray[np.bool_], others: int) -> ToldPrefill:
        """The runs of prefill of an engine's prefills: of the requests `inside`, and then of `others` nothing is told of."""
        runs = self.runs.select(self.runs.phase == PREFILL)
        place = np.where(inside, np.cumsum(inside) - 1, -1)
        of_run = np.where(runs.row >= 0, place[runs.row] if len(place) else -1, -1)
        return ToldPrefill(
            place=of_run,
            first=runs.first,
            beyond=runs.beyond,
            tokens=runs.tokens,
            before=runs.before,
            begins=np.append(True, runs.row[1:] != runs.row[:-1])[: len(runs.row)],
            complete=np.concatenate([self.complete[inside], np.zeros(others, bool)]),
            covered=self.covered,
        )


class Absences:
    """Steps between a request's first and last in which it was given nothing: preempted, or left out though it ran.

    Only of requests whose whole time is told (`Membership.complete`); `n` of them and others.
    """

    def __init__(self, membership: Membership) -> None:
        runs = membership.runs
        self._n = len(membership.prompt_tokens)
        told = (runs.row >= 0) & (membership.complete[runs.row] if self._n else False)
        runs = runs.select(np.asarray(told))
        same = runs.row[1:] == runs.row[:-1]
        gap = np.flatnonzero(same & (runs.first[1:] > runs.beyond[:-1]))
        self._row, self._first, self._beyond = runs.row[gap], runs.beyond[gap], runs.first[gap + 1]
        #: What was computed is gone: it was preempted. Else it ran, and was left out.
        self._preempted = (runs.phase[gap + 1] == RECOMPUTE) | (runs.before[gap + 1] < runs.after[gap])
        self._decoding = self._answering(membership, runs)[gap]

    def _answering(self, membership: Membership, runs: Runs) -> NDArray[np.bool_]:
        """Whether each run's request had its first token by its end."""
        prompt = np.nan_to_num(membership.prompt_tokens)[runs.row]
        reached = (runs.after >= prompt) | (runs.phase == DECODE)
        # What was reached once stays so: positions of the first such run of each request.
        position = np.arange(len(runs.row))
        began = np.full(self._n, len(runs.row))
        np.minimum.at(began, runs.row[reached], position[reached])
        return np.asarray(position >= began[runs.row])

    def of(self, sums: Floats, *, decoding: bool, preempted: bool | None = None) -> Floats:
        """What of a prefix sum over steps lies in each request's absences before, or after, its first token."""
        chosen = self._decoding == decoding
        if preempted is not None:
            chosen = chosen & (self._preempted == preempted)
        seconds = sums[self._beyond[chosen]] - sums[self._first[chosen]]
        return np.asarray(np.bincount(self._row[chosen], weights=seconds, minlength=self._n), np.float64)


def load_membership(
    trace: Trace, instance: str, engine: int | None, requests: Requests, end_ns: Ints
) -> Membership | None:
    """What the schedule tells of an engine whose steps end at `end_ns`; None where none was recorded."""
    columns = trace.connection.execute(
        "SELECT coalesce(s.rid, -1) AS rid, a.end_ns AS first_ns, b.end_ns AS last_ns, "
        f"CASE s.phase {PHASE_CODES} END AS phase, "
        "s.tokens::DOUBLE AS tokens, coalesce(s.computed_before, 0)::DOUBLE AS before "
        "FROM scheduled s JOIN steps a ON a.k = s.k_first JOIN steps b ON b.k = s.k_last "
        "WHERE a.instance = $instance AND a.engine IS NOT DISTINCT FROM $engine AND s.tokens > 0 AND s.phase IS NOT NULL "
        "ORDER BY rid, s.k_first",
        {"instance": instance, "engine": engine},
    ).fetchnumpy()
    rid = np.asarray(columns["rid"], np.int64)
    if not len(rid):
        return None
    place = np.searchsorted(requests.rid, rid)
    place = np.minimum(place, max(len(requests.rid) - 1, 0))
    known = requests.rid[place] == rid if len(requests.rid) else np.zeros(len(rid), bool)
    first = np.searchsorted(end_ns, np.asarray(columns["first_ns"], np.int64))
    last = np.searchsorted(end_ns, np.asarray(columns["last_ns"], np.int64))
    most = max(len(end_ns) - 1, 0)
    first = np.minimum(first, most)
    runs = Runs(
        row=np.where(known, place, -1),
        first=first,
        beyond=np.clip(last, first, most) + 1,
        phase=np.asarray(columns["phase"], np.int64),
        tokens=np.asarray(columns["tokens"], np.float64),
        before=np.asarray(columns["before"], np.float64),
    )
    order = np.lexsort((runs.first, runs.row))
    ordered = Runs(**{name: getattr(runs, name)[order] for name in runs.__dataclass_fields__})
    return Membership(ordered, requests, len(end_ns))
