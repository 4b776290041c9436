"""The slow requests that the page follows through the engine: their phases, bills, steps, and who shared these steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tailscope.align import Scope
from tailscope.ledger.lines import COMPONENTS
from tailscope.report.columns import Columns, columns, few_digits, shown_name
from tailscope.report.html import Html, el, table
from tailscope.report.latency import Latency
from tailscope.report.latency_panel import without_latency
from tailscope.report.parts import behind, chart, choice, lacking, section
from tailscope.store import Trace
from tailscope.units import clock, seconds

#: Requests that are followed; the slowest of a class by TTFT and by E2E, in so many classes.
MOST, A_CLASS, MOST_CLASSES = 60, 3, 10
#: Steps of a request that are shown one by one; with more, so many groups of equally many.
MOST_STEPS = 240
#: Others shown beside a request, those with most prefill in its steps.
MOST_BESIDE = 14
#: Spans of a request that are drawn, and how far apart they are told apart.
MOST_SPANS, GAP_NS = 40, 1_000_000


@dataclass
class Followed:
    requests: list[dict[str, Any]] = field(default_factory=list)
    #: Whether a scheduler told who was in which steps.
    exact: bool = False
    has_steps: bool = False
    #: rid of the one shown first: what the worst finding speaks of, else the slowest.
    first: int | None = None


def gather(trace: Trace, scope: Scope, named: Iterable[int]) -> Followed:
    """`named`: rid of the requests that findings speak of."""
    chosen = _choose(trace, scope, list(dict.fromkeys(named)))
    found = Followed(exact=trace.count("scheduled") > 0, has_steps=trace.count("steps") > 0)
    if not chosen:
        return found
    trace.connection.execute(_CHOSEN, {"rids": chosen})
    found.requests = trace.rows("SELECT * FROM report_chosen ORDER BY klass, e2e_ns DESC, rid")
    found.first = chosen[0]
    _add_bills(trace, found.requests)
    _add_places(trace, found.requests)
    [longest] = trace.rows(
        "SELECT coalesce(max(coalesce(e2e_ns, ttft_ns)), 0) AS ns FROM joined WHERE billed"
    )
    for request in found.requests:
        request["steps"] = _steps(trace, request)
        request["beside"] = _beside(trace, request, found.exact, longest["ns"])
    return found


def _choose(trace: Trace, scope: Scope, named: list[int]) -> list[int]:
    rows = trace.rows(
        f"""
        WITH sizes AS (SELECT klass FROM report_pool GROUP BY klass ORDER BY count(*) DESC, klass LIMIT {MOST_CLASSES}),
        placed AS (
            SELECT rid, e2e_ns, row_number() OVER (PARTITION BY klass ORDER BY ttft_ns DESC NULLS LAST, rid) AS by_ttft,
                   row_number() OVER (PARTITION BY klass ORDER BY e2e_ns DESC NULLS LAST, rid) AS by_e2e
            FROM report_pool SEMI JOIN sizes USING (klass)
        )
        SELECT rid FROM placed WHERE by_ttft <= {A_CLASS} OR by_e2e <= {A_CLASS} ORDER BY least(by_ttft, by_e2e), e2e_ns DESC, rid
        """
    )
    return list(dict.fromkeys([*named, *(row["rid"] for row in rows)]))[:MOST]


#: wait, queue and prefill are up to the first token as the ledger has them; what is not known is NULL.
_CHOSEN = """
CREATE OR REPLACE TEMP TABLE report_chosen AS
SELECT rid, request_id, klass, tenant, instance, engine, engine_known, arrival_ns, ttft_ns, e2e_ns,
       least(greatest(ttft_ns - coalesce(prefill_ns, 0) - coalesce(queue_ns, 0), 0), ttft_ns) AS wait_ns, queue_ns, prefill_ns,
       prompt_tokens, cached_tokens, output_tokens, preemptions,
       arrival_ns + greatest(ttft_ns - coalesce(prefill_ns, 0) - coalesce(queue_ns, 0), 0) AS queued_ns,
       arrival_ns + coalesce(e2e_ns, ttft_ns) AS end_ns
FROM joined WHERE list_contains($rids::BIGINT[], rid)
"""


def _add_bills(trace: Trace, requests: Sequence[dict[str, Any]]) -> None:
    order = {name: i for i, name in enumerate(COMPONENTS)}
    by_rid: dict[int, list[dict[str, Any]]] = {}
    for row in trace.rows(
        "SELECT l.id, l.place, l.component, l.culprit, sum(l.ns) / 1e9 AS s FROM bill_lines l JOIN report_chosen c ON c.rid = l.id "
        "GROUP BY ALL ORDER BY s DESC, component, culprit"
    ):
        by_rid.setdefault(row["id"], []).append(row)
    for request in requests:
        lines = by_rid.get(request["rid"], [])
        summed: dict[str, float] = {}
        for line in lines:
            summed[line["component"]] = summed.get(line["component"], 0.0) + line["s"]
        request["bill"] = sorted(summed.items(), key=lambda item: order.get(item[0], 99))
        request["culprits"] = [
            (line["component"], line["culprit"], line["s"]) for line in lines if line["culprit"]
        ][:6]


def _add_places(trace: Trace, requests: Sequence[dict[str, Any]]) -> None:
    """Of each request the steps, k_first to k_last, of the time from when it was queued to its end."""
    places = {
        row["rid"]: row
        for row in trace.rows(
            """
            SELECT c.rid, f.k AS k_first, l.k AS k_last
            FROM (SELECT *, coalesce(engine, -1) AS e FROM report_chosen WHERE engine_known) c
            ASOF JOIN (SELECT k, instance, coalesce(engine, -1) AS e, end_ns FROM steps) f
              ON f.instance = c.instance AND f.e = c.e AND f.end_ns >= c.queued_ns
            ASOF JOIN (SELECT k, instance, coalesce(engine, -1) AS e, start_ns FROM steps) l
              ON l.instance = c.instance AND l.e = c.e AND l.start_ns <= c.end_ns
            """
        )
    }
    for request in requests:
        place = places.get(request["rid"])
        request["k_first"], request["k_last"] = (
            (place["k_first"], place["k_last"])
            if place and place["k_last"] >= place["k_first"]
            else (None, None)
        )


def _steps(trace: Trace, request: dict[str, Any]) -> Columns | None:
    if request["k_first"] is None:
        return None
    count = request["k_last"] - request["k_first"] + 1
    return columns(
        trace,
        """
        SELECT round((min(s.start_ns) - $origin) / 1e9, 6) AS at, (max(s.end_ns) - min(s.start_ns)) / 1e9 AS took, count(*) AS steps,
               sum(s.prefill_tokens) AS prefill, avg(s.decode_requests) AS decode, max(s.kv_usage) AS kv,
               sum(c.batch_s - c.by_others_s) AS batch, sum(c.by_others_s) AS others, sum(c.ranks_s) AS ranks, sum(c.beyond_s) AS beyond
        FROM steps s LEFT JOIN step_costs c ON c.k = s.k WHERE s.k BETWEEN $first AND $last
        GROUP BY (s.k - $first) // $each ORDER BY 1
        """,
        {
            "origin": request["arrival_ns"],
            "first": request["k_first"],
            "last": request["k_last"],
            "each": max(1, -(-count // MOST_STEPS)),
        },
    )


def _beside(trace: Trace, request: dict[str, Any], exact: bool, longest_ns: int) -> list[dict[str, Any]]:
    """Those who were in its steps: told by the scheduler, else whose time in the engine overlaps with its own."""
    if request["k_first"] is None:
        return []
    known = {"rid": request["rid"], "most": MOST_BESIDE}
    if exact:
        steps = {"first": request["k_first"], "last": request["k_last"], "rid": request["rid"]}
        request["runs"] = trace.rows(_OWN, steps)
        rows = trace.rows(_TOLD, {**steps, "most": MOST_BESIDE})
        if rows:
            return [{**row, "basis": "told"} for row in rows]
    rows = trace.rows(
        _OVERLAPPING,
        {
            **known,
            "instance": request["instance"],
            "engine": request["engine"],
            "start": request["queued_ns"],
            "end": request["end_ns"],
            "longest": longest_ns,
        },
    )
    return [{**row, "basis": "inferred"} for row in rows]


#: Runs in which a request was given tokens, in the steps from $first to $last: all but its own, and its own.
_RUNS = """
SELECT s.stay, s.rid, s.phase, greatest(s.k_first, $first) AS a, least(s.k_last, $last) AS b, s.tokens, f.start_ns, l.end_ns
FROM scheduled s JOIN steps f ON f.k = greatest(s.k_first, $first) JOIN steps l ON l.k = least(s.k_last, $last)
WHERE s.k_first <= $last AND s.k_last >= $first AND s.tokens > 0 AND
"""
_TOLD = f"""
WITH mine AS ({_RUNS} s.rid IS DISTINCT FROM $rid),
summed AS (
    SELECT stay, any_value(rid) AS rid, coalesce(sum(tokens * (b - a + 1)) FILTER (WHERE phase <> 'decode'), 0)::BIGINT AS prefill,
           sum(b - a + 1)::BIGINT AS steps, list([start_ns, end_ns] ORDER BY a) FILTER (WHERE phase <> 'decode') AS computed,
           list([start_ns, end_ns] ORDER BY a) FILTER (WHERE phase = 'decode') AS decoded
    FROM mine GROUP BY stay ORDER BY prefill DESC, steps DESC, stay LIMIT $most
)
SELECT j.request_id, j.klass, m.* EXCLUDE (stay, rid) FROM summed m LEFT JOIN joined j ON j.rid = m.rid ORDER BY m.prefill DESC, m.steps DESC, m.stay
"""
_OWN = f"SELECT phase, start_ns, end_ns FROM ({_RUNS} s.rid = $rid) ORDER BY a"
#: What of its prefill lies in the time is taken to be as much of its tokens.
_OVERLAPPING = """
WITH others AS (
    SELECT rid, request_id, klass, arrival_ns + ttft_ns - least(coalesce(prefill_ns, ttft_ns), ttft_ns) AS p0, arrival_ns + ttft_ns AS p1,
           arrival_ns + coalesce(e2e_ns, ttft_ns) AS end_ns, coalesce(prompt_tokens, 0) - coalesce(cached_tokens, 0) AS computed
    FROM joined
    WHERE arrival_ns BETWEEN $start - $longest AND $end AND billed AND ttft_ns >= 0 AND instance = $instance AND (engine IS NOT DISTINCT FROM $engine OR NOT engine_known) AND rid <> $rid
      AND arrival_ns + coalesce(e2e_ns, ttft_ns) >= $start
),
shared AS (
    SELECT *, greatest(least(p1, $end) - greatest(p0, $start), 0) AS prefill_ns FROM others WHERE p0 <= $end
)
SELECT request_id, klass, (computed * prefill_ns / greatest(p1 - p0, 1))::BIGINT AS prefill, NULL AS steps,
       [[greatest(least(p1, $end), $start)::BIGINT, least(end_ns, $end)::BIGINT]] AS decoded,
       CASE WHEN prefill_ns > 0 THEN [[greatest(p0, $start)::BIGINT, least(p1, $end)::BIGINT]] END AS computed
FROM shared ORDER BY prefill DESC, least(end_ns, $end) - greatest(p0, $start) DESC, rid LIMIT $most
"""


def requests_section(found: Followed, of: Latency) -> Html:
    if not found.requests:
        return section(
            "requests",
            "Slow requests",
            None,
            without_latency(of, "where each request's time went"),
        )
    slowest = max(found.requests, key=lambda r: r["e2e_ns"] or r["ttft_ns"] or 0)
    options = [(str(r["rid"]), _option(r)) for r in found.requests]
    how = (
        "Who shared its steps is what the scheduler recorded."
        if found.exact
        else "Who shared its steps is inferred from times: a recorded schedule (examples/vllm/schedule_logger.py) would tell exactly."
    )
    return section(
        "requests",
        "Slow requests",
        f"The {len(found.requests)} requests on the page are the slowest of each class by TTFT and by E2E, and those that findings speak of. "
        f"The slowest took {_took(slowest)}" + (f", {_share(slowest)}" if slowest["bill"] else "") + ".",
        chart(
            "waterfall",
            "One request, and who was there meanwhile",
            how,
            choice("request", "Request", options, str(found.first)),
            height=380,
        ),
        el("div", id="request-bill", cls="bill only-script", aria_live="polite"),
        chart(
            "request-steps",
            "The steps it waited behind and ran in",
            "The height is how long a step took, the colours what of it the batch accounts for, what others' prefill added, what late ranks or slow transfers cost, "
            "and what has no explanation.",
            height=300,
        )
        if found.has_steps
        else lacking(
            "Nothing tells of the engine's steps.",
            "vllm serve --enable-logging-iteration-details with its log, or a stat logger, would show the steps each request ran in.",
        ),
        behind("All of these requests", _table(found)),
    )


def _option(r: dict[str, Any]) -> str:
    return f"{r['klass']}  {r['request_id'] or r['rid']}  TTFT {_of(r['ttft_ns'])}, E2E {_of(r['e2e_ns'])}"


def _of(ns: int | None) -> str:
    return seconds(None if ns is None else ns / 1e9)


def _took(r: dict[str, Any]) -> str:
    return f"{_of(r['e2e_ns'] or r['ttft_ns'])} ({r['request_id'] or r['rid']}, class {r['klass']})"


def _share(r: dict[str, Any]) -> str:
    name, most = max(r["bill"], key=lambda item: item[1])
    whole = sum(s for _, s in r["bill"]) or 1.0
    return f"{most / whole:.0%} of it {name}"


def _table(found: Followed) -> Html:
    rows = [
        (
            el("a", r["request_id"] or str(r["rid"]), href="#requests", data_request=r["rid"]),
            r["klass"],
            clock(r["arrival_ns"]),
            _of(r["ttft_ns"]),
            _of(r["queue_ns"]),
            _of(r["e2e_ns"]),
            "-" if r["prompt_tokens"] is None else f"{r['prompt_tokens']:,}",
            "-" if r["output_tokens"] is None else f"{r['output_tokens']:,}",
            el(
                "td",
                ", ".join(f"{seconds(s)} {n}" for n, s in sorted(r["bill"], key=lambda i: -i[1])[:3]),
                cls="words",
            ),
        )
        for r in found.requests
    ]
    head = (
        "request",
        "class",
        "arrived, UTC",
        "TTFT",
        "queued",
        "E2E",
        "prompt",
        "answer",
        "largest parts of its bill",
    )
    return table("Tokens, times, and where most of it went", head, rows, numbers=3, until=8)


def data(found: Followed) -> list[dict[str, Any]]:
    def since(request: dict[str, Any], ns: int | None) -> Any:
        return None if ns is None else few_digits((ns - request["arrival_ns"]) / 1e9, 6)

    def spans(request: dict[str, Any], found: list[list[int]] | None) -> list[list[Any]]:
        """Spans that follow each other as one."""
        merged: list[list[int]] = []
        for start, end in found or ():
            if merged and start <= merged[-1][1] + GAP_NS:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        return [[since(request, start), since(request, end)] for start, end in merged[:MOST_SPANS]]

    def runs(request: dict[str, Any], *phases: str) -> list[list[Any]]:
        told = [[r["start_ns"], r["end_ns"]] for r in request.get("runs", ()) if r["phase"] in phases]
        return spans(request, told)

    return [
        {
            "rid": r["rid"],
            "id": shown_name(r["request_id"] or r["rid"]),
            "klass": shown_name(r["klass"]),
            "at_ms": r["arrival_ns"] / 1e6,
            "wait": _s(r["wait_ns"]),
            "queue": _s(r["queue_ns"]),
            "prefill": _s(r["prefill_ns"]),
            "ttft": _s(r["ttft_ns"]),
            "e2e": _s(r["e2e_ns"]),
            "prompt": r["prompt_tokens"],
            "cached": r["cached_tokens"],
            "output": r["output_tokens"],
            "preemptions": r["preemptions"],
            "engine_known": r["engine_known"],
            "bill": [(n, few_digits(s)) for n, s in r["bill"]],
            "culprits": [(n, shown_name(c), few_digits(s)) for n, c, s in r["culprits"]],
            "steps": r["steps"],
            "runs": {phase: runs(r, phase) for phase in ("prefill", "decode", "recompute")}
            if r.get("runs")
            else None,
            "beside": [
                {
                    "id": shown_name(o["request_id"] or "a request nobody else told of"),
                    "klass": shown_name(o["klass"] or "unknown"),
                    "prefill": o["prefill"],
                    "steps": o["steps"],
                    "basis": o["basis"],
                    "computed": spans(r, o["computed"]),
                    "decoded": spans(r, o["decoded"]),
                }
                for o in r["beside"]
            ],
        }
        for r in found.requests
    ]


def _s(ns: int | None) -> Any:
    return None if ns is None else few_digits(ns / 1e9, 6)
