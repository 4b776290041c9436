"""Whether requests that meet another class's prefill are slower: with the steps' evidence and without it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope import stats
from tailscope.ledger.contrast import MIN_REQUESTS
from tailscope.stats import Floats, Ints
from tailscope.store import Trace

#: A request counts as coupled to a class when its steps held at least this much of the class's prefill.
COUPLED_NS = 1_000_000
#: Own load is what arrived in this long before a request.
LOAD_WINDOW_NS = 5_000_000_000
LOAD_STRATA = 8
#: Latencies used by the statistical test.
MAX_VICTIMS = 10_000
#: Culprits whose prompts are not at least this many times as long cannot be a head of line.
MIN_SIZE_RATIO = 2.0


@dataclass(frozen=True)
class Coupling:
    """One victim class against one culprit class, by TTFT.

    coupled/uncoupled: requests with and without the culprit's prefill in their steps before the first token
    (None without iterations). exposed: a culprit's prefill within a fixed window after arrival.
    control_*: the same test with the culprits of other instances, where no effect can be.
    """

    victim: str
    culprit: str
    n: int
    n_eff: float
    size_ratio: float
    culprit_requests: int
    coupled: int | None
    uncoupled: int | None
    coupled_p50_s: float | None
    uncoupled_p50_s: float | None
    exposed: int | None
    difference_s: float | None
    p_value: float | None
    control_difference_s: float | None
    control_p_value: float | None
    first_ns: int | None
    last_ns: int | None


def write_coupling(trace: Trace) -> None:
    """Fill `coupling` for each victim class of enough requests and each culprit class of longer prompts."""
    victims = trace.rows(
        "SELECT klass, count(*) AS n, median(prompt_tokens) AS size FROM joined "
        "WHERE billed AND ttft_ns >= 0 GROUP BY klass ORDER BY klass"
    )
    rows: list[Coupling] = []
    for victim in victims:
        if victim["n"] < MIN_REQUESTS:
            continue
        for culprit in victims:
            if culprit["size"] and victim["size"] and culprit["size"] >= MIN_SIZE_RATIO * victim["size"]:
                rows.append(_test(trace, victim, culprit))
    schema = pa.schema(
        [
            (
                name,
                pa.string()
                if name in ("victim", "culprit")
                else pa.float64()
                if _is_float(name)
                else pa.int64(),
            )
            for name in Coupling.__dataclass_fields__
        ]
    )
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=schema)
    trace.connection.register("coupling_rows", table)
    trace.connection.execute("CREATE OR REPLACE TEMP TABLE coupling AS SELECT * FROM coupling_rows")
    trace.connection.unregister("coupling_rows")


def _is_float(name: str) -> bool:
    return name.endswith(("_s", "_value", "_eff", "_ratio"))


def _test(trace: Trace, victim: dict[str, Any], culprit: dict[str, Any]) -> Coupling:
    con = trace.connection
    requests = con.execute(
        """
        WITH met AS (
            SELECT id, sum(ns) AS ns FROM bill_lines
            WHERE place <> 'decode' AND culprit = $culprit
              AND component IN ('others_prefill_before', 'others_prefill_in_prefill', 'queue_budget')
            GROUP BY id
        )
        SELECT j.instance, j.arrival_ns, j.ttft_ns / 1e9 AS ttft_s, coalesce(met.ns, 0) >= $least AS coupled,
               j.arrival_ns + j.ttft_ns AS first_token_ns
        FROM joined j LEFT JOIN met ON met.id = j.rid
        WHERE j.billed AND j.klass = $victim AND j.ttft_ns >= 0 ORDER BY j.instance, j.arrival_ns
        """,
        {"victim": victim["klass"], "culprit": culprit["klass"], "least": COUPLED_NS},
    ).fetchnumpy()
    times, ttft = np.asarray(requests["arrival_ns"], np.int64), np.asarray(requests["ttft_s"], np.float64)
    instance, coupled = np.asarray(requests["instance"]).astype(str), np.asarray(requests["coupled"], bool)
    with_steps = trace.count("steps") > 0
    windows = _prefill_windows(trace, culprit["klass"])
    own, control = _pooled_test(times, ttft, instance, windows)
    return Coupling(
        victim=victim["klass"],
        culprit=culprit["klass"],
        n=len(times),
        n_eff=stats.effective_samples((ttft > np.median(ttft)).astype(np.float64), times),
        size_ratio=culprit["size"] / victim["size"],
        culprit_requests=culprit["n"],
        coupled=int(coupled.sum()) if with_steps else None,
        uncoupled=int((~coupled).sum()) if with_steps else None,
        coupled_p50_s=float(np.median(ttft[coupled])) if with_steps and coupled.any() else None,
        uncoupled_p50_s=float(np.median(ttft[~coupled])) if with_steps and (~coupled).any() else None,
        exposed=own.exposed if own else None,
        difference_s=own.difference if own else None,
        p_value=own.p_value if own else None,
        control_difference_s=control.difference if control else None,
        control_p_value=control.p_value if control else None,
        first_ns=int(times[coupled].min()) if coupled.any() else None,
        last_ns=int(np.asarray(requests["first_token_ns"], np.int64)[coupled].max())
        if coupled.any()
        else None,
    )


def _prefill_windows(trace: Trace, klass: str) -> dict[str, tuple[Ints, Ints]]:
    """Instance -> starts and ends of the prefills of a class."""
    rows = trace.connection.execute(
        "SELECT instance, arrival_ns + ttft_ns - coalesce(prefill_ns, ttft_ns) AS start_ns, "
        "arrival_ns + ttft_ns AS end_ns FROM joined "
        "WHERE billed AND klass = $klass AND ttft_ns >= 0 ORDER BY instance, start_ns",
        {"klass": klass},
    ).fetchnumpy()
    instance = np.asarray(rows["instance"]).astype(str)
    starts, ends = np.asarray(rows["start_ns"], np.int64), np.asarray(rows["end_ns"], np.int64)
    return {str(name): (starts[instance == name], ends[instance == name]) for name in np.unique(instance)}


def _pooled_test(
    times: Ints, ttft: Floats, instance: NDArray[np.str_], windows: dict[str, tuple[Ints, Ints]]
) -> tuple[stats.ExposureEffect | None, stats.ExposureEffect | None]:
    """The test on the instance with most victims, and its control: the same victims, other instances' culprits."""
    names, counts = np.unique(instance, return_counts=True)
    name = str(names[np.argmax(counts)])
    mine = np.flatnonzero(instance == name)
    mine = mine[:: -(-len(mine) // MAX_VICTIMS)]
    window = max(int(np.quantile(ttft[mine], 0.25) * 1e9), 50_000_000)
    strata = _load_strata(times[mine])

    def test(culprits: tuple[Ints, Ints]) -> stats.ExposureEffect | None:
        if not len(culprits[0]):
            return None
        return stats.exposure_test(times[mine], ttft[mine], *culprits, window_ns=window, strata=strata)

    others = [w for other, w in windows.items() if other != name]
    control = (
        test((np.concatenate([w[0] for w in others]), np.concatenate([w[1] for w in others])))
        if others
        else None
    )
    nothing = np.empty(0, np.int64)
    return test(windows.get(name, (nothing, nothing))), control


def _load_strata(times: Ints) -> Ints:
    """Quantile group of each request's own class's arrivals in the window before it."""
    ordered = np.sort(times)
    before = np.searchsorted(ordered, times) - np.searchsorted(ordered, times - LOAD_WINDOW_NS)
    edges = np.unique(np.quantile(before, np.linspace(0, 1, LOAD_STRATA + 1)[1:-1]))
    return np.asarray(np.searchsorted(edges, before, side="right"), dtype=np.int64)
