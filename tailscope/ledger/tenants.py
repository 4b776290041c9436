"""Blame by tenant: what each tenant's load costs the requests of all others, and how much of it is in flight.

`tenants` has a row per tenant, `tenant_blame` one per suspect, class of victims and metric: what of the excess of the
requests of all other tenants is due to the suspect. Both are empty where fewer than two tenants are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.ledger.bills import Ledger
from tailscope.ledger.tails import MIN_REQUESTS, compared, per_token
from tailscope.ledger.tenant_parts import GAP_KINDS, KINDS, Parts, divided
from tailscope.stats import Floats, Ints
from tailscope.store import Trace, schema_of_rows

#: Tenants that are told apart: those with most tokens; the rest count together.
MOST = 7
#: Of how many tenants it is found out what they cost all others: those that cost the classes' tails most.
SUSPECTS = 3
#: What there is only so much of: who has it keeps others out.
SCARCE = ("budget", "slots", "kv")
#: Victims that are named.
MOST_VICTIMS = 3


@dataclass(frozen=True)
class TenantRow:
    """A tenant's load. Tokens in flight are those of the prompts and answers of its requests that are not yet done, at
    most (`peak_*`, with its share of all in flight at that instant) and on average over the trace."""

    tenant: str
    requests: int
    prefill_tokens: float
    output_tokens: float
    mean_tokens: float
    peak_tokens: float
    peak_share: float
    peak_ns: int
    tenants: int


@dataclass(frozen=True)
class Blame:
    """What one tenant costs the requests of all others, of a class and by a metric, seconds.

    `excess_s`: tail less typical of the others' requests; each of KINDS the suspect's part of it, together `blamed_s`.
    `suspect_tail_s`: what the tail's requests waited for the suspect, `rest_tail_s` for each of the others on average,
    their own tenant among them; `suspect_mean_s` of `mean_s` is what all the others' requests waited for it, `scarce_mean_s` of that for SCARCE. `class_s`: the part of
    the excess of the whole class that is blamed on the suspect. `prompt_ratio`: how many times as long its prompts are.
    """

    culprit: str
    klass: str
    metric: str
    n: int
    p50_s: float | None
    tail_rule: str | None
    tail_n: int
    excess_s: float | None
    prefill_before: float
    prefill_beside: float
    budget: float
    slots: float
    kv: float
    prefill_in_decode: float
    preempted: float
    blamed_s: float
    suspect_tail_s: float
    rest_tail_s: float
    suspect_mean_s: float
    scarce_mean_s: float
    mean_s: float
    prompt_ratio: float
    class_s: float
    spells: int
    victims: list[str]
    first_ns: int
    last_ns: int


def write_tenants(trace: Trace, ledger: Ledger) -> None:
    """Fill `tenants` and `tenant_blame`. After bills and contrast."""
    names = _names(trace)
    load = _Load.of(trace) if len(names) > 1 else None
    rows = [] if load is None else _in_flight(load, names)
    trace.create("tenants", pa.Table.from_pylist([asdict(r) for r in rows], schema=schema_of_rows(TenantRow)))
    blame: list[Blame] = []
    if load is not None and ledger.times:
        trace.connection.execute(_GAPS)
        size = int(load.rid.max(initial=-1)) + 1
        parts, of_gaps = divided(trace, ledger, len(names), size, trace.count("tenant_gaps"))
        _forgive(load, parts, len(names))
        suspects, of_class = _suspects(trace, load, parts, names)
        blame += _by_requests(trace, load, parts, names, suspects, of_class)
        blame += _by_gaps(trace, of_gaps, names, suspects)
    trace.create(
        "tenant_blame", pa.Table.from_pylist([asdict(r) for r in blame], schema=schema_of_rows(Blame))
    )


#: The token gaps that were billed, with whose they are.
_GAPS = """
CREATE OR REPLACE TEMP TABLE tenant_gaps AS
SELECT row_number() OVER (ORDER BY g.id) - 1 AS place, g.id, g.rid, g.klass, t.number, g.instance, g.engine, g.start_ns, g.end_ns,
       m.decode_weight AS weight, m.tail
FROM gaps g JOIN members m ON m.metric = 'ITL' AND m.klass = g.klass AND m.id = g.id JOIN tenant_of t USING (rid)
"""


def _names(trace: Trace) -> list[str | None]:
    """The tenants, those with most tokens first, None for the rest together; and `tenant_of`, each request's number in the
    list, -1 where its tenant is not known."""
    rows = trace.rows(
        "SELECT tenant, sum(coalesce(prompt_tokens, 0) + coalesce(output_tokens, 0)) AS tokens FROM joined "
        "WHERE billed AND tenant IS NOT NULL GROUP BY tenant ORDER BY tokens DESC, tenant LIMIT $most",
        {"most": MOST + 2},
    )
    names: list[str | None] = [row["tenant"] for row in rows]
    rest = None
    if len(names) > MOST + 1:
        names, rest = [*names[:MOST], None], MOST
    known = [name for name in names if name is not None]
    numbers = pa.table(
        {"tenant": pa.array(known, pa.string()), "number": pa.array(range(len(known)), pa.int64())}
    )
    trace.create("tenant_numbers", numbers)
    trace.connection.execute(
        "CREATE OR REPLACE TEMP TABLE tenant_of AS SELECT j.rid, "
        "CASE WHEN j.tenant IS NULL THEN -1 ELSE coalesce(n.number, $rest, -1) END::BIGINT AS number "
        "FROM joined j LEFT JOIN tenant_numbers n ON n.tenant = j.tenant",
        {"rest": rest},
    )
    return names


# -- the requests, and what is in flight ---------------------------------------------------------


@dataclass(frozen=True)
class _Load:
    """All requests that have a bill, in the order of rid, arrays of one length; `tenant` is -1 where it is not known."""

    rid: Ints
    tenant: Ints
    priority: Ints
    arrival_ns: Ints
    ttft_ns: Ints
    e2e_ns: Ints
    computed: Floats
    prompt: Floats
    output: Floats

    @staticmethod
    def of(trace: Trace) -> _Load:
        columns = trace.connection.execute(
            "SELECT j.rid, t.number AS tenant, coalesce(priority, 0) AS priority, arrival_ns, ttft_ns, e2e_ns, "
            "coalesce(prompt_tokens - coalesce(cached_tokens, 0), 0) AS computed, coalesce(prompt_tokens, 0) AS prompt, "
            "coalesce(output_tokens, 0) AS output FROM joined j JOIN tenant_of t USING (rid) "
            "WHERE billed AND ttft_ns >= 0 AND e2e_ns >= ttft_ns ORDER BY j.rid"
        ).fetchnumpy()
        whole = ("rid", "tenant", "priority", "arrival_ns", "ttft_ns", "e2e_ns")
        arrays: dict[str, Any] = {name: np.asarray(columns.pop(name), np.int64) for name in whole}
        arrays |= {name: np.asarray(values, np.float64) for name, values in columns.items()}
        return _Load(**arrays)


def _in_flight(load: _Load, names: Sequence[str | None]) -> list[TenantRow]:
    tokens = load.prompt + load.output
    end_ns = load.arrival_ns + load.e2e_ns
    everybody = _running(load.arrival_ns, end_ns, tokens)
    length = max(int(end_ns.max() - load.arrival_ns.min()), 1) if len(end_ns) else 1
    rows = []
    for number, name in enumerate(names):
        mine = load.tenant == number
        if name is None or not mine.any():
            continue
        times, sums = _running(load.arrival_ns[mine], end_ns[mine], tokens[mine])
        peak = int(np.argmax(sums))
        all_then = everybody[1][np.searchsorted(everybody[0], times[peak], side="right") - 1]
        rows.append(
            TenantRow(
                tenant=name,
                requests=int(mine.sum()),
                prefill_tokens=float(load.computed[mine].sum()),
                output_tokens=float(load.output[mine].sum()),
                mean_tokens=float((tokens * load.e2e_ns)[mine].sum() / length),
                peak_tokens=float(sums[peak]),
                peak_share=float(sums[peak] / max(all_then, 1.0)),
                peak_ns=int(times[peak]),
                tenants=len(names),
            )
        )
    return rows


def _running(starts: Ints, ends: Ints, amount: Floats) -> tuple[Ints, Floats]:
    """The instants at which a sum of stays changes, and the sum from each of them on."""
    times = np.concatenate([starts, ends])
    change = np.concatenate([amount, -amount])
    # What leaves at an instant makes room for what comes at it.
    order = np.lexsort((change, times))
    return times[order], np.cumsum(change[order])


def _forgive(load: _Load, parts: Parts, tenants: int) -> None:
    """Who asked to be served after others, by its priority, waits for them as it wanted: for what is scarce it blames none of a
    better one. Lower numbers are served first."""
    for number in range(tenants):
        mine = load.tenant == number
        if mine.any():
            after = load.rid[load.priority > np.median(load.priority[mine])]
            for kind in (*SCARCE, "preempted"):
                parts[kind][number, after] = 0.0


# -- whose pain it was ---------------------------------------------------------------------------


def _weighed(parts: Parts, rid: Ints, before: Floats, decode: Floats) -> NDArray[np.float64]:
    """Seconds by kind and tenant that requests with these weights waited for, kinds x tenants."""
    return np.array(
        [parts[kind][:, rid] @ (before if first else decode) for kind, (_, first) in KINDS.items()]
    )


def _suspects(
    trace: Trace, load: _Load, parts: Parts, names: Sequence[str | None]
) -> tuple[list[int], dict[tuple[str, str], Floats]]:
    """The tenants that cost the others in the classes' tails most; and of each class and metric the seconds of its excess
    that each tenant costs all others."""
    tenant_of = np.full(int(load.rid.max(initial=-1)) + 1, -1)
    tenant_of[load.rid] = load.tenant
    of_class: dict[tuple[str, str], Floats] = {}
    cost = np.zeros(len(names))
    for row in trace.rows("SELECT DISTINCT klass, metric FROM members WHERE metric <> 'ITL' ORDER BY ALL"):
        columns = trace.connection.execute(
            "SELECT id, before_weight, decode_weight, tail FROM members WHERE klass = $klass AND metric = $metric ORDER BY id",
            {"klass": row["klass"], "metric": row["metric"]},
        ).fetchnumpy()
        rid, tail = np.asarray(columns["id"], np.int64), np.asarray(columns["tail"], bool)
        before, decode = (
            np.asarray(columns[name], np.float64) for name in ("before_weight", "decode_weight")
        )
        seconds, in_tail = np.zeros(len(names)), np.zeros(len(names))
        for number in range(len(names)):
            theirs = tenant_of[rid] != number
            everyone = _weighed(parts, rid[theirs], before[theirs], decode[theirs])
            seconds[number] = everyone[:, number].sum()
            slow = theirs & tail
            waited = _weighed(parts, rid[slow], before[slow], decode[slow])
            in_tail[number] = max(float(waited[:, number].sum()), 0.0)
        of_class[row["klass"], row["metric"]] = seconds
        cost = np.maximum(cost, in_tail / max(float(in_tail.sum()), 1e-12))
    order = np.argsort(-cost, kind="stable")
    return [int(t) for t in order if cost[t] > 0 and names[t] is not None][:SUSPECTS], of_class


def _by_requests(
    trace: Trace,
    load: _Load,
    parts: Parts,
    names: Sequence[str | None],
    suspects: Sequence[int],
    of_class: dict[tuple[str, str], Floats],
) -> Iterator[Blame]:
    """What each suspect costs the requests of all others, class by class."""
    for row in trace.rows(
        "SELECT klass FROM joined WHERE billed GROUP BY klass ORDER BY min(prompt_tokens), klass"
    ):
        columns = trace.connection.execute(
            "SELECT rid FROM joined WHERE billed AND klass = $klass AND ttft_ns >= 0 AND e2e_ns >= ttft_ns ORDER BY rid",
            {"klass": row["klass"]},
        ).fetchnumpy()
        inside = np.searchsorted(load.rid, np.asarray(columns["rid"], np.int64))
        for suspect in suspects:
            others = inside[(load.tenant[inside] != suspect) & (load.tenant[inside] >= 0)]
            if len(others) >= MIN_REQUESTS:
                yield from _on_others(load, parts, names, suspect, row["klass"], others, of_class)


def _on_others(
    load: _Load,
    parts: Parts,
    names: Sequence[str | None],
    suspect: int,
    klass: str,
    others: Ints,
    of_class: dict[tuple[str, str], Floats],
) -> Iterator[Blame]:
    """What a suspect costs the requests `others` of a class, by metric."""
    rid, arrivals = load.rid[others], load.arrival_ns[others]
    ttft, e2e = load.ttft_ns[others] / 1e9, load.e2e_ns[others] / 1e9
    output = load.output[others]
    for row, among, members in compared(klass, "", arrivals, ttft, e2e, load.computed[others], output):
        if members is None:
            continue
        slow = members.tail
        excess = _weighed(parts, rid, members.before, members.decode)
        in_tail = _weighed(parts, rid[slow], *_even_weights(row.metric, output[slow])).sum(axis=0)
        on_all = _weighed(parts, rid[among], *_even_weights(row.metric, output[among]))[:, suspect]
        values = {"TTFT": ttft, "TPOT": per_token(ttft, e2e, output), "E2E": e2e}[row.metric]
        yield _blame(
            names,
            suspect,
            dict(zip(KINDS, excess[:, suspect].tolist(), strict=True)),
            in_tail,
            load.tenant[others][slow],
            klass=klass,
            metric=row.metric,
            n=int(among.sum()),
            p50_s=float(np.median(values[among])),
            tail_rule=row.tail_rule,
            tail_n=row.tail_n,
            excess_s=row.excess_s,
            suspect_mean_s=float(on_all.sum()),
            scarce_mean_s=float(on_all[[kind in SCARCE for kind in KINDS]].sum()),
            mean_s=float(values[among].mean()),
            prompt_ratio=_median(load.computed[load.tenant == suspect])
            / max(_median(load.computed[others]), 1.0),
            class_s=float(of_class.get((klass, row.metric), np.zeros(len(names)))[suspect]),
            spells=_spells(
                arrivals[slow] + (load.ttft_ns[others][slow] if row.metric == "TPOT" else 0),
                arrivals[slow] + (load.ttft_ns if row.metric == "TTFT" else load.e2e_ns)[others][slow],
            ),
            first_ns=int(arrivals[slow].min()),
            last_ns=int((arrivals[slow] + load.e2e_ns[others][slow]).max()),
        )


def _blame(
    names: Sequence[str | None],
    suspect: int,
    seconds: dict[str, float],
    in_tail: Floats,
    tenants: Ints,
    **more: Any,
) -> Blame:
    """A row. `in_tail`: what the tail waited for each tenant; `tenants`: whose the tail's requests are."""
    count = np.bincount(tenants[tenants >= 0], minlength=len(names))
    worst = [names[t] for t in np.argsort(-count, kind="stable") if count[t]]
    parts: Any = {kind: seconds.get(kind, 0.0) for kind in KINDS}
    return Blame(
        culprit=str(names[suspect]),
        **parts,
        blamed_s=sum(seconds.values()),
        suspect_tail_s=float(in_tail[suspect]),
        rest_tail_s=float(np.delete(in_tail, suspect).mean()),
        victims=[name for name in worst if name is not None][:MOST_VICTIMS],
        **more,
    )


def _even_weights(metric: str, output: Floats) -> tuple[Floats, Floats]:
    """Weights of requests, for their time to the first token and their decode, with which what they wait for is the mean
    by a metric."""
    each = np.full(len(output), 1 / max(len(output), 1))
    if metric == "TTFT":
        return each, np.zeros(len(each))
    if metric == "TPOT":
        return np.zeros(len(each)), each / np.maximum(output - 1, 1)
    return each, each


def _spells(starts: Ints, ends: Ints) -> int:
    """How many times lie apart from each other, where those that overlap are one."""
    order = np.argsort(starts, kind="stable")
    reach = np.maximum.accumulate(ends[order])
    return 1 + int((starts[order][1:] >= reach[:-1]).sum())


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else 0.0


def _by_gaps(
    trace: Trace, parts: Parts, names: Sequence[str | None], suspects: Sequence[int]
) -> Iterator[Blame]:
    """What each suspect costs the token gaps of all others: those of the class's tail, less the typical ones."""
    for row in trace.rows(
        "SELECT klass, median(end_ns - start_ns) FILTER (WHERE NOT tail) / 1e9 AS p50_s, count(*) AS n FROM tenant_gaps "
        "GROUP BY klass ORDER BY klass"
    ):
        columns = trace.connection.execute(
            "SELECT place, number, rid, start_ns, end_ns, weight, tail FROM tenant_gaps WHERE klass = $klass ORDER BY place",
            {"klass": row["klass"]},
        ).fetchnumpy()
        tail, weight = np.asarray(columns.pop("tail"), bool), np.asarray(columns.pop("weight"), np.float64)
        place, number, rid, start, end = (np.asarray(values, np.int64) for values in columns.values())
        for suspect in suspects:
            theirs = (number != suspect) & (number >= 0)
            # Equal halves again: the tail's weights sum to 1, the typical ones' to -1.
            of_tail, typical = theirs & tail, theirs & (weight < 0)
            if len(np.unique(rid[theirs])) < MIN_REQUESTS or not of_tail.any() or not typical.any():
                continue
            own = np.zeros(len(place))
            own[of_tail] += 1 / of_tail.sum()
            in_tail = np.sum([parts[kind][:, place] @ own for kind in GAP_KINDS], axis=0)
            own[typical] -= 1 / typical.sum()
            yield _blame(
                names,
                suspect,
                {kind: float(parts[kind][suspect, place] @ own) for kind in GAP_KINDS},
                in_tail,
                number[of_tail],
                klass=row["klass"],
                metric="ITL",
                n=int(theirs.sum()),
                p50_s=row["p50_s"],
                tail_rule="the class's tail",
                tail_n=int(of_tail.sum()),
                excess_s=float((end - start) @ own / 1e9),
                # The gaps are a sample of the tail and of the middle, which has no mean of all.
                suspect_mean_s=0.0,
                scarce_mean_s=0.0,
                mean_s=0.0,
                prompt_ratio=0.0,
                class_s=float(
                    sum(parts[kind][suspect, place[theirs]] @ weight[theirs] for kind in GAP_KINDS)
                ),
                spells=_spells(start[of_tail], end[of_tail]),
                first_ns=int(start[of_tail].min()),
                last_ns=int(end[of_tail].max()),
            )
