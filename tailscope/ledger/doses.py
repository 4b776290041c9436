"""Whether the harm follows the dose: more of a class's prefill, slower; and over when the prefill is over.

Evidence beside the mechanism and the exposure test (Hill 1965 on what speaks for a cause): the Spearman correlation of a
victim's TTFT with the prefill tokens that a culprit class computed in a fixed window after its arrival, and the victims'
TTFT while such a prefill ran, right after it, and else. `doses` has a row per victim and culprit class that `coupling`
has; `chunks` the step of each engine that prefill made longest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa

from tailscope import stats
from tailscope.ledger.bills import Ledger
from tailscope.ledger.coupling import MAX_VICTIMS, own_window_ns
from tailscope.stats import Floats, Ints
from tailscope.store import Trace, schema_of, schema_of_rows

#: Fewer requests in a group have no median to speak of.
LEAST = 5


@dataclass(frozen=True)
class Dose:
    """One victim class against one culprit class, by TTFT, seconds.

    rho: Spearman's correlation with the dose, of `n` requests worth `n_eff`, and its 95 % interval. none/little/much: median
    TTFT at no dose and below and above the median dose of those that have some. during/after/other: median TTFT of
    arrivals while a prefill of the culprit ran, within its length after it, and at any other time.
    """

    victim: str
    culprit: str
    window_s: float
    n: int
    n_eff: float
    dosed: int
    rho: float | None
    rho_low: float | None
    rho_high: float | None
    median_tokens: float | None
    none_s: float | None
    little_s: float | None
    much_s: float | None
    during: int
    during_s: float | None
    after: int
    after_s: float | None
    other_s: float | None


_CHUNKS = schema_of(
    {
        "instance": pa.string(),
        "engine": pa.int64(),
        "tokens": pa.float64(),
        "base_s": pa.float64(),
        "prefill_s": pa.float64(),
    }
)


def write_doses(trace: Trace, ledger: Ledger) -> None:
    """Fill `doses` and `chunks`. After coupling."""
    rows = [
        _dose(trace, ledger, row["victim"], row["culprit"])
        for row in trace.rows("SELECT victim, culprit FROM coupling WHERE timed ORDER BY victim, culprit")
    ]
    trace.create("doses", pa.Table.from_pylist([asdict(row) for row in rows], schema=schema_of_rows(Dose)))
    trace.create("chunks", _chunks(ledger))


def _dose(trace: Trace, ledger: Ledger, victim: str, culprit: str) -> Dose:
    doses, latencies, times, phases = [], [], [], []
    at_victims, at_culprits = _by_lane(trace, ledger, victim), _by_lane(trace, ledger, culprit)
    window_ns = own_window_ns(np.concatenate([v.ttft_s for v in at_victims.values()]))
    for lane, v in at_victims.items():
        prefill = at_culprits.get(lane)
        if prefill is None:
            doses.append(np.zeros(len(v.arrival_ns)))
            phases.append(np.full(len(v.arrival_ns), 2))
        else:
            given = prefill.computed_by(v.arrival_ns + window_ns) - prefill.computed_by(v.arrival_ns)
            doses.append(np.maximum(given, 0.0))
            phases.append(prefill.phase(v.arrival_ns))
        latencies.append(v.ttft_s)
        times.append(v.arrival_ns)
    dose, ttft, at = np.concatenate(doses), np.concatenate(latencies), np.concatenate(times)
    phase = np.concatenate(phases)
    some = dose >= 1
    middle = float(np.median(dose[some])) if some.any() else None
    thin = slice(None, None, -(-len(dose) // MAX_VICTIMS))
    found = stats.rank_correlation(dose[thin], ttft[thin], at[thin])
    return Dose(
        victim=victim,
        culprit=culprit,
        window_s=window_ns / 1e9,
        n=len(dose),
        n_eff=found.n_eff,
        dosed=int(some.sum()),
        rho=found.rho,
        rho_low=found.low,
        rho_high=found.high,
        median_tokens=middle,
        none_s=_median(ttft[~some]),
        little_s=None if middle is None else _median(ttft[some & (dose <= middle)]),
        much_s=None if middle is None else _median(ttft[some & (dose > middle)]),
        during=int((phase == 0).sum()),
        during_s=_median(ttft[phase == 0]),
        after=int((phase == 1).sum()),
        after_s=_median(ttft[phase == 1]),
        other_s=_median(ttft[phase == 2]),
    )


def _median(values: Floats) -> float | None:
    return float(np.median(values)) if len(values) >= LEAST else None


class _Class:
    """Requests of a class on engines that share their steps: when they came and were prefilled, and how much."""

    def __init__(
        self, arrival_ns: Ints, ttft_s: Floats, start_ns: Ints, end_ns: Ints, tokens: Floats
    ) -> None:
        self.arrival_ns, self.ttft_s = arrival_ns, ttft_s
        end_ns = np.maximum(end_ns, start_ns + 1)
        knots = np.concatenate([start_ns, end_ns])
        rate = tokens / (end_ns - start_ns)
        change = np.concatenate([rate, -rate])
        order = np.argsort(knots, kind="stable")
        self._knots = knots[order]
        rates = np.cumsum(change[order])[:-1]
        self._sums = np.concatenate([[0.0], np.cumsum(rates * np.diff(self._knots))])
        # Prefills that overlap are one.
        by_start = np.argsort(start_ns, kind="stable")
        begins, reach = start_ns[by_start], np.maximum.accumulate(end_ns[by_start])
        first = np.flatnonzero(np.append(True, begins[1:] > reach[:-1]))
        self._begins, self._ends = begins[first], reach[np.append(first, len(reach))[1:] - 1]

    def computed_by(self, times_ns: Ints) -> Floats:
        """Tokens computed until each instant, a prompt's evenly over its prefill."""
        since = (times_ns - self._knots[0]).astype(np.float64)
        return np.asarray(np.interp(since, (self._knots - self._knots[0]).astype(np.float64), self._sums))

    def phase(self, times_ns: Ints) -> Ints:
        """0 while a prefill runs, 1 for as long after it, 2 else."""
        last = np.searchsorted(self._begins, times_ns, side="right") - 1
        place = np.maximum(last, 0)
        length = self._ends[place] - self._begins[place]
        since = times_ns - self._ends[place]
        return np.where((last < 0) | (since > length), 2, np.where(since <= 0, 0, 1))


def _by_lane(trace: Trace, ledger: Ledger, klass: str) -> dict[object, _Class]:
    """A class's requests by the engines that step together, or by instance where their engine is not known."""
    found: dict[object, list[tuple[Ints, ...]]] = {}
    for row in trace.rows(
        "SELECT DISTINCT instance, engine FROM joined WHERE billed AND klass = $klass AND ttft_ns >= 0 AND e2e_ns >= ttft_ns "
        "ORDER BY ALL",
        {"klass": klass},
    ):
        columns = trace.connection.execute(
            "SELECT arrival_ns, ttft_ns, coalesce(prefill_ns, ttft_ns) AS prefill_ns, "
            "greatest(coalesce(prompt_tokens - coalesce(cached_tokens, 0), 0), 0) AS tokens FROM joined "
            "WHERE billed AND klass = $klass AND ttft_ns >= 0 AND e2e_ns >= ttft_ns AND instance = $instance "
            "AND engine IS NOT DISTINCT FROM $engine ORDER BY arrival_ns, rid",
            {"klass": klass, "instance": row["instance"], "engine": row["engine"]},
        ).fetchnumpy()
        key: tuple[str, int | None] = (row["instance"], row["engine"])
        lane: object = ledger.lanes.get(key, key)
        found.setdefault(lane, []).append(tuple(np.asarray(v, np.int64) for v in columns.values()))
    made: dict[object, _Class] = {}
    for lane, parts in found.items():
        arrival, ttft, prefill, tokens = (np.concatenate(each) for each in zip(*parts, strict=True))
        prefill = np.clip(prefill, 0, ttft)
        first = arrival + ttft
        made[lane] = _Class(arrival, ttft / 1e9, first - prefill, first, tokens.astype(np.float64))
    return made


def _chunks(ledger: Ledger) -> pa.Table:
    """Of each engine the step that prefill made longest: seconds of it without prefill, and of prefill."""
    rows = []
    for (instance, engine), time in ledger.times.items():
        if time.cost is None or not time.cost.usable or not len(time.steps.start_ns):
            continue
        prefill: Floats = np.diff(np.sum(time.prefill_by, axis=0) + time.prefill_by_nobody)
        k = int(np.argmax(prefill))
        rows.append(
            {
                "instance": instance,
                "engine": engine,
                "tokens": float(time.steps.prefill_tokens[k]),
                "base_s": float(time.base[k + 1] - time.base[k]),
                "prefill_s": float(prefill[k]),
            }
        )
    return pa.Table.from_pylist(rows, schema=_CHUNKS)
