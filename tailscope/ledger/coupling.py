"""Whether requests that meet another class's prefill are slower: with the steps' evidence and without it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope import stats
from tailscope.ledger.half_timed import COLUMNS, KNOWN, known
from tailscope.ledger.tails import MIN_REQUESTS
from tailscope.stats import Floats, Ints
from tailscope.store import Trace, schema_of_rows

#: A request counts as coupled to a class when its steps held at least this much of the class's prefill.
COUPLED_NS = 1_000_000
#: Own load is what arrived in so many seconds before a request.
LOAD_WINDOWS_S = (0.1, 0.5, 2.0, 5.0, 15.0)
#: Latencies used by the statistical test.
MAX_VICTIMS = 10_000
#: Culprits whose prompts are not at least this many times as long cannot be a head of line.
MIN_SIZE_RATIO = 2.0


@dataclass(frozen=True)
class Coupling:
    """One victim class against one culprit class, by TTFT, or by E2E where few of the class have a TTFT.

    coupled/uncoupled: requests with and without the culprit's prefill in their steps before the first token
    (None without iterations). exposed: a culprit's prefill within a fixed window after arrival.
    control_*: the same test with the culprits of other instances, where no effect can be.
    """

    victim: str
    culprit: str
    #: Whether both TTFT and E2E are known, so that its time has a place in steps.
    timed: bool
    n: int
    n_eff: float
    prompt_ratio: float
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
        f"SELECT klass, count(*) AS n, count(*) FILTER (WHERE {known('TTFT')}) AS ttft, median(prompt_tokens) AS size FROM joined "
        f"WHERE {KNOWN} GROUP BY klass ORDER BY klass"
    )
    rows: list[Coupling] = []
    for victim in victims:
        if victim["n"] < MIN_REQUESTS:
            continue
        for culprit in victims:
            if culprit["size"] and victim["size"] and culprit["size"] >= MIN_SIZE_RATIO * victim["size"]:
                rows.append(_test(trace, victim, culprit))
    trace.create(
        "coupling", pa.Table.from_pylist([asdict(row) for row in rows], schema=schema_of_rows(Coupling))
    )


def _test(trace: Trace, victim: dict[str, Any], culprit: dict[str, Any]) -> Coupling:
    con = trace.connection
    # One metric for all of them: those of which only the other is known cannot be held against these.
    metric = "TTFT" if 2 * victim["ttft"] >= victim["n"] else "E2E"
    latency, beyond_ttft = f"j.{COLUMNS[metric]}", "0" if metric == "TTFT" else "coalesce(j.output_tokens, 0)"
    requests = con.execute(
        f"""
        WITH met AS (
            SELECT id, sum(ns) AS ns FROM bill_lines
            WHERE place <> 'decode' AND culprit = $culprit
              AND component IN ('others_prefill_before', 'others_prefill_in_prefill', 'queue_budget')
            GROUP BY id
        )
        SELECT j.instance, j.arrival_ns, {latency} / 1e9 AS ttft_s, coalesce(met.ns, 0) >= $least AS coupled,
               j.arrival_ns + {latency} AS first_token_ns, j.arrival_ns + coalesce(j.e2e_ns, j.ttft_ns) AS end_ns,
               coalesce(j.prompt_tokens - coalesce(j.cached_tokens, 0), 0)::DOUBLE AS tokens,
               j.ttft_ns IS NOT NULL AND j.e2e_ns IS NOT NULL AS timed, ({beyond_ttft})::DOUBLE AS output
        FROM joined j LEFT JOIN met ON met.id = j.rid
        WHERE j.klass = $victim AND {known(metric)} ORDER BY j.instance, j.arrival_ns
        """,
        {"victim": victim["klass"], "culprit": culprit["klass"], "least": COUPLED_NS},
    ).fetchnumpy()
    times, ttft = np.asarray(requests["arrival_ns"], np.int64), np.asarray(requests["ttft_s"], np.float64)
    instance, coupled = np.asarray(requests["instance"]).astype(str), np.asarray(requests["coupled"], bool)
    timed = bool(np.asarray(requests["timed"]).any())
    with_steps = trace.count("steps") > 0 and timed
    windows = _prefill_windows(trace, culprit["klass"])
    ends, tokens = np.asarray(requests["end_ns"], np.int64), np.asarray(requests["tokens"], np.float64)
    output = np.asarray(requests["output"], np.float64)
    answers = output if output.any() else None
    own, control = _pooled_test(Victims(times, ttft, ends, tokens, answers), instance, windows)
    return Coupling(
        victim=victim["klass"],
        culprit=culprit["klass"],
        timed=timed,
        n=len(times),
        n_eff=stats.uncorrelated((ttft > np.median(ttft)).astype(np.float64), times),
        prompt_ratio=culprit["size"] / victim["size"],
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
        # No prefill lasts longer than the fastest answers of its class took as a whole.
        f"WITH of AS (SELECT * FROM joined WHERE klass = $klass AND {KNOWN}), "
        "fast AS (SELECT quantile_cont(e2e_ns, 0.05)::BIGINT AS e2e_ns FROM of WHERE ttft_ns IS NULL) "
        "SELECT instance, CASE WHEN ttft_ns IS NULL THEN arrival_ns ELSE arrival_ns + ttft_ns - coalesce(prefill_ns, ttft_ns) END AS start_ns, "
        "arrival_ns + coalesce(ttft_ns, least(of.e2e_ns, fast.e2e_ns)) AS end_ns FROM of, fast ORDER BY instance, start_ns",
        {"klass": klass},
    ).fetchnumpy()
    instance = np.asarray(rows["instance"]).astype(str)
    starts, ends = np.asarray(rows["start_ns"], np.int64), np.asarray(rows["end_ns"], np.int64)
    return {str(name): (starts[instance == name], ends[instance == name]) for name in np.unique(instance)}


@dataclass(frozen=True)
class Victims:
    """Requests of one class on one instance by arrival: seconds to the first token, when each ended, tokens it computed.

    Where only E2E is known that stands for `ttft_s`, and `output` is what of it is due to the answer's length.
    """

    arrival_ns: Ints
    ttft_s: Floats
    end_ns: Ints
    tokens: Floats
    output: Floats | None = None

    def select(self, chosen: NDArray[np.bool_]) -> Victims:
        output = None if self.output is None else self.output[chosen]
        return Victims(
            self.arrival_ns[chosen], self.ttft_s[chosen], self.end_ns[chosen], self.tokens[chosen], output
        )

    @property
    def window_ns(self) -> int:
        """How long after an arrival a culprit's prefill exposes a request to it."""
        return own_window_ns(self.ttft_s)


def own_window_ns(ttft_s: Floats) -> int:
    """A window after arrival that most of a class's requests do not outlast, whatever befalls them."""
    return max(int(np.quantile(ttft_s, 0.25) * 1e9), 50_000_000)


def exposure(victims: Victims, starts_ns: Ints, ends_ns: Ints) -> stats.ExposureEffect | None:
    """The exposure test of `stats` with what is known of the victims' own load taken off."""
    thin = slice(None, None, -(-len(victims.arrival_ns) // MAX_VICTIMS))
    return stats.exposure_test(
        victims.arrival_ns[thin],
        victims.ttft_s[thin],
        starts_ns,
        ends_ns,
        window_ns=victims.window_ns,
        controls=own_load(victims)[thin],
    )


def own_load(v: Victims) -> Floats:
    """What a request finds of its own class and what comes right after it, requests x controls.

    Its own size; how many run and how many still wait for their first token when it arrives; how many, and how many
    tokens, came shortly before and come in the window after it. Given all that, another pool's arrivals say nothing.
    """
    at, window = v.arrival_ns, v.window_ns
    order = np.argsort(at, kind="stable")
    ordered = at[order]
    sums = np.concatenate([[0.0], np.cumsum(v.tokens[order])])

    def between(low_ns: int, high_ns: int) -> tuple[Ints, Floats]:
        low = np.searchsorted(ordered, at + low_ns, side="left")
        high = np.searchsorted(ordered, at + high_ns, side="left")
        return np.asarray(high - low, np.int64), sums[high] - sums[low]

    before = np.searchsorted(ordered, at, side="left")
    first = np.sort(at + np.asarray(v.ttft_s * 1e9, np.int64))
    controls: list[Floats | Ints] = [
        v.tokens,
        *([] if v.output is None else [v.output]),
        before - np.searchsorted(np.sort(v.end_ns), at, side="right"),
        before - np.searchsorted(first, at, side="right"),
    ]
    for seconds in LOAD_WINDOWS_S:
        count, tokens = between(-int(seconds * 1e9), 0)
        controls += [count, tokens] if seconds < 1 else [count]
    for reach in (window, 2 * window, 500_000_000):
        count, tokens = between(1, reach)
        controls += [count, tokens] if reach == window else [count]
    return np.column_stack([np.asarray(c, np.float64) for c in controls])


def _pooled_test(
    victims: Victims, instance: NDArray[np.str_], windows: dict[str, tuple[Ints, Ints]]
) -> tuple[stats.ExposureEffect | None, stats.ExposureEffect | None]:
    """The test on the instance with most victims, and its control: the same victims, other instances' culprits."""
    if not len(instance):
        return None, None  # none of a class whose times can be true
    names, counts = np.unique(instance, return_counts=True)
    name = str(names[np.argmax(counts)])
    mine = victims.select(instance == name)
    nothing = np.empty(0, np.int64)
    others = [w for other, w in windows.items() if other != name]
    control = (
        exposure(mine, np.concatenate([w[0] for w in others]), np.concatenate([w[1] for w in others]))
        if others
        else None
    )
    return exposure(mine, *windows.get(name, (nothing, nothing))), control
