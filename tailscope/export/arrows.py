"""Arrows on a timeline: from those who made others wait to those who did, as the findings and the bills say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from tailscope.export.ranks import Ranks
from tailscope.export.requests import PLACES, Requests
from tailscope.export.span import Span
from tailscope.export.timeline import Mark, Mask, arrow
from tailscope.model import Diagnosis, Finding, Party
from tailscope.render.text import told
from tailscope.render.words import sentence
from tailscope.safe import printable
from tailscope.scan import quote
from tailscope.stats import Ints
from tailscope.store import Trace

#: Arrows of each finding: the longest waits. More would hide each other.
MOST_ARROWS = 100
#: Components of a bill that are waits for somebody's prefill; for others the culprit held something all the time it ran.
PREFILL = ("others_prefill_before", "others_prefill_in_prefill", "others_prefill_in_decode", "queue_budget")
#: What of a bill a finding explains, by its claim. Without one it is all that has a culprit.
CLAIMED = {
    "others' prefill": PREFILL,
    "the KV cache": ("queue_kv", "preempted", "recompute"),
    "queued for slots or KV cache": ("queue_kv", "queue_slots"),
    "running without tokens": ("starved",),
}
#: What of a party is a column of requests.
OF_REQUESTS = {"class": "klass", "tenant": "tenant", "request": "request_id"}


def draw(
    trace: Trace, diagnosis: Diagnosis, span: Span, requests: Requests, ranks: Ranks
) -> tuple[list[Mark], str]:
    """Marks that flows join, and a sentence on how many of how many waits they show."""
    numbers = count(1)
    written: list[Mark] = []
    # Only what lies on the timeline can have an arrow.
    trace.connection.register(
        "arrow_requests",
        arrow(
            rid=requests.rid,
            prefill_ns=requests.edges[:, 2],
            first_token_ns=requests.edges[:, 3],
            last_ns=requests.edges[:, -1],
        ),
    )
    seen: set[tuple[Any, ...]] = set()
    taken: set[tuple[int, str]] = set()
    for entry, finding in zip(told(diagnosis.findings), diagnosis.findings, strict=True):
        if finding.status != "found" or entry.same is not None:
            continue
        if finding.culprit.kind in OF_REQUESTS:
            victims = tuple(sorted(v.id for v in finding.victims if v.kind == "class"))
            key = (finding.culprit.kind, finding.culprit.id, victims)
            if victims and key not in seen:
                seen.add(key)
                written += _between_requests(trace, finding, victims, requests, numbers, taken)
        elif finding.culprit.kind == "rank":
            written += _between_ranks(trace, finding, span, ranks, numbers)
    trace.connection.unregister("arrow_requests")
    drawn = sum(len(mark.ends) for mark in written)
    return written, f"{drawn:,} arrows: of each finding the {MOST_ARROWS} longest waits at most"


def _between_requests(
    trace: Trace,
    finding: Finding,
    victims: Sequence[str],
    requests: Requests,
    numbers: count[int],
    taken: set[tuple[int, str]],
) -> list[Mark]:
    """The longest waits that bills book to the culprit, each with the request that took most of that time. `taken`: the places of
    requests that show such a wait already."""
    party = finding.culprit
    column = OF_REQUESTS[party.kind]
    blamed = f"l.culprit = {quote(party.id)}" if party.kind == "class" else "l.culprit IS NOT NULL"
    claimed = CLAIMED.get(finding.claims)
    of_claim = f"l.component IN ({', '.join(map(quote, claimed))})" if claimed else "true"
    lines = trace.rows(
        f"""
        SELECT l.id AS rid, l.place, arg_max(l.component, l.ns) AS component, sum(l.ns)::BIGINT AS ns
        FROM bill_lines l JOIN joined j ON j.rid = l.id SEMI JOIN arrow_requests a ON a.rid = l.id
        WHERE {blamed} AND {of_claim} AND j.klass IN ({", ".join(map(quote, victims))}) AND l.place IN {PLACES}
        GROUP BY l.id, l.place
        -- Of each request the place where it waited longest.
        QUALIFY row_number() OVER (PARTITION BY l.id ORDER BY sum(l.ns) DESC, l.place) = 1
        ORDER BY ns DESC, l.id LIMIT {MOST_ARROWS}
        """
    )
    lines = [line for line in lines if (line["rid"], line["place"]) not in taken]
    taken |= {(line["rid"], line["place"]) for line in lines}
    if not lines:
        return []
    track, edges = requests.edges_of(_column(lines, "rid"))
    place = np.array([PLACES.index(line["place"]) for line in lines])
    row = np.arange(len(lines))
    begin, end = edges[row, place], edges[row, place + 1]
    by_prefill = np.array([line["component"] in PREFILL for line in lines])
    pairs = _culprits(
        trace, requests, f"j.{column} = {quote(party.id)}", _column(lines, "rid"), begin, end, by_prefill
    )
    written: list[Mark] = []
    held: dict[int, list[int]] = {}
    waits: list[Mark] = []
    for i, (rid, first, last) in pairs.items():
        number = next(numbers)
        held.setdefault(rid, []).append(number)
        line = lines[i]
        waits.append(
            Mark(
                int(track[i]),
                f"waits for {_called(party)}",
                first,
                # A nanosecond before what it lies in ends, so that neither can seem to end the other.
                last - 1,
                {
                    "booked_ms": line["ns"] / 1e6,
                    "component": line["component"],
                    "finding": sentence(finding.title),
                },
                ends=(number,),
            )
        )
    tracks, culprit_edges = requests.edges_of(np.array(list(held), np.int64))
    for own, its, flows in zip(tracks, culprit_edges, held.values(), strict=True):
        first, last = _where_it_shows(its)
        name = f"makes {len(flows)} wait"
        written.append(Mark(int(own), name, first, max(last - 1, first), begins=tuple(flows)))
    # What begins a flow is written before what ends it.
    return written + waits


def _where_it_shows(edges: Ints) -> tuple[int, int]:
    """The prefill of a culprit; where that is not known the longest part that is, or all of the request."""
    lengths = np.diff(edges[: len(PLACES) + 1])
    prefill = PLACES.index("prefill")
    longest = prefill if lengths[prefill] > 0 else int(np.argmax(lengths))
    if lengths[longest] > 0:
        return int(edges[longest]), int(edges[longest + 1])
    return int(edges[0]), int(edges[-1])


def _column(rows: Sequence[dict[str, Any]], name: str) -> Ints:
    return np.array([row[name] for row in rows], np.int64)


def _called(party: Party) -> str:
    return f"{party.kind} {printable(party.id, 60)}"


def _culprits(
    trace: Trace,
    requests: Requests,
    which: str,
    rids: Ints,
    begin: Ints,
    end: Ints,
    by_prefill: Mask,
) -> dict[int, tuple[int, int, int]]:
    """Of each wait the request whose prefill, or stay, shares most time with it: its id, and the time shared."""
    con = trace.connection
    con.register(
        "arrow_waits",
        arrow(wait=np.arange(len(rids)), victim=rids, begin_ns=begin, end_ns=end, by_prefill=by_prefill),
    )
    rows = con.execute(
        f"""
        WITH culprits AS (
            SELECT r.*, j.instance, j.engine FROM arrow_requests r JOIN joined j USING (rid) WHERE {which}
        ),
        waits AS (SELECT w.*, j.instance, j.engine FROM arrow_waits w JOIN joined j ON j.rid = w.victim)
        SELECT w.wait, c.rid, greatest(c.prefill_ns, w.begin_ns) AS first_ns,
               least(CASE WHEN w.by_prefill THEN c.first_token_ns ELSE c.last_ns END, w.end_ns) AS last_ns
        FROM waits w JOIN culprits c
          ON c.prefill_ns < w.end_ns AND CASE WHEN w.by_prefill THEN c.first_token_ns ELSE c.last_ns END > w.begin_ns
        WHERE c.rid <> w.victim AND c.instance = w.instance
          AND (c.engine IS NULL OR w.engine IS NULL OR c.engine = w.engine) AND last_ns > first_ns + 1
        QUALIFY row_number() OVER (PARTITION BY w.wait ORDER BY last_ns - first_ns DESC, c.rid) = 1
        ORDER BY w.wait
        """
    ).fetchall()
    con.unregister("arrow_waits")
    return {int(wait): (int(rid), int(first), int(last)) for wait, rid, first, last in rows}


def _between_ranks(
    trace: Trace, finding: Finding, span: Span, ranks: Ranks, numbers: count[int]
) -> list[Mark]:
    """The collectives in which the rank's own lateness cost the most: from where it came to where the others went on."""
    try:
        rank = int(finding.culprit.id)
    except ValueError:
        return []
    world = finding.culprit.detail.get("world")
    of_world = f"world = {quote(str(world))}" if world else "true"
    first, last = finding.window_ns or (span.first_ns, span.last_ns)
    rounds = trace.rows(
        f"""
        WITH worst AS (
            SELECT "window", "group", round, start_ns, end_ns, own_ns FROM rank_rounds
            WHERE rank = {rank} AND is_last AND own_ns > 0
              AND start_ns BETWEEN {max(first, span.first_ns)} AND {min(last, span.last_ns)}
              AND "window" IN (SELECT "window" FROM rank_windows WHERE {of_world})
            ORDER BY own_ns DESC, "window", "group", round LIMIT {MOST_ARROWS}
        )
        SELECT w."window", w.start_ns AS came_ns, w.end_ns AS left_ns, w.own_ns, r.rank, r.start_ns, r.end_ns, r.wait_ns
        FROM worst w JOIN rank_rounds r ON r."window" = w."window" AND r."group" IS NOT DISTINCT FROM w."group" AND r.round = w.round
        WHERE r.rank <> {rank} AND r.wait_ns > 0
        ORDER BY w.own_ns DESC, w."window", w."group", w.round, r.wait_ns DESC, r.rank LIMIT {MOST_ARROWS}
        """
    )
    causes: dict[tuple[int, int, int], tuple[int, list[int]]] = {}
    waits: list[Mark] = []
    for row in rounds:
        own = ranks.track_of(row["window"], row["rank"], row["start_ns"], row["end_ns"])
        late = ranks.track_of(row["window"], rank, row["came_ns"], row["left_ns"])
        if own is None or late is None:
            continue
        number = next(numbers)
        causes.setdefault((late, row["came_ns"], row["left_ns"]), (row["own_ns"], []))[1].append(number)
        args: dict[str, str | int | float] = {"waited_ms": row["wait_ns"] / 1e6}
        waits.append(Mark(own, f"waited for rank {rank}", row["came_ns"], None, args, ends=(number,)))
    came = [
        Mark(late, "comes last", at, None, {"late_by_own_work_ms": ns / 1e6}, begins=tuple(flows))
        for (late, at, _), (ns, flows) in causes.items()
    ]
    # What begins a flow is written before what ends it.
    return came + waits
