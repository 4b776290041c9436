"""Ranks on a timeline, on the clock of their window: steps, phases, and collectives with the wait for the last to come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailscope.export.lanes import stacked
from tailscope.export.span import Span
from tailscope.export.timeline import Inner, Names, Slices, Tracks, ints
from tailscope.ranks.clocks import offset_at
from tailscope.ranks.collectives import GPU_SQL
from tailscope.ranks.waits import whole
from tailscope.safe import printable
from tailscope.stats import Ints
from tailscope.store import Trace

_PHASES = """
SELECT start_ns, end_ns, phase AS named, step, layer, shown(name) AS op FROM (
    SELECT start_ns, start_ns + duration_ns AS end_ns, phase, step, layer, name,
           -- What lies in another of its phase is a part of that one.
           max(start_ns + duration_ns) OVER (
               PARTITION BY stream, phase ORDER BY start_ns, duration_ns DESC, name
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS covered_ns
    FROM rank_events
    WHERE source = $source AND phase IS NOT NULL AND collective IS NULL AND duration_ns >= 0 AND instant(start_ns) IS NOT NULL
      AND start_ns BETWEEN $first_ns AND $last_ns
      AND (NOT $on_gpu OR category IN {gpu})
) WHERE covered_ns IS NULL OR end_ns > covered_ns ORDER BY start_ns, end_ns DESC, op
"""
_ON_GPU = "SELECT 1 FROM rank_events WHERE source = $source AND category IN {gpu} LIMIT 1"
_COLLECTIVES = """
SELECT start_ns, end_ns, coalesce(phase, kind) AS named, step, layer, wait_ns, shown(kind) AS kind, shown("group") AS "group", ranks, size AS bytes,
       verdict, is_last AND ranks > 1 AS came_last, own_ns, tokens
FROM rank_rounds WHERE "window" = $window AND rank = $rank AND start_ns BETWEEN $first_ns AND $last_ns
ORDER BY start_ns, end_ns DESC, "group", round
"""
_STEPS = """
SELECT instant(i.start_ns) AS start_ns, instant(i.end_ns) AS end_ns, 'step' AS named, i.iteration AS step, s.k AS engine_step, s.alike AS same_batch
FROM iterations i LEFT JOIN rank_steps s ON s."window" = $window AND s.rank = i.rank AND s.step = i.iteration
WHERE i.source = $source AND i.rank = $rank AND instant(i.end_ns) >= instant(i.start_ns)
  AND i.start_ns BETWEEN $first_ns AND $last_ns ORDER BY 1, 4
"""


@dataclass
class RankSlices:
    """What of a rank lies on tracks of one name. `start`, `end`: on the window's clock."""

    table: Any
    start: Ints
    end: Ints
    track: Ints


@dataclass
class Ranks:
    #: Of each window and rank its steps, phases and collectives, in this order; those it has.
    rows: list[tuple[str, RankSlices]] = field(default_factory=list)
    #: (window, rank) -> its collectives.
    collectives: dict[tuple[int, int], RankSlices] = field(default_factory=dict)

    def track_of(self, window: int, rank: int, start_ns: int, end_ns: int) -> int | None:
        """Of a collective, where it is on the timeline."""
        rows = self.collectives.get((window, rank))
        if rows is None:
            return None
        # They are sorted by start.
        low, beyond = (int(np.searchsorted(rows.start, start_ns, side)) for side in ("left", "right"))
        same = np.flatnonzero(rows.end[low:beyond] == end_ns)
        return int(rows.track[low + same[0]]) if len(same) else None


def place(trace: Trace, span: Span, tracks: Tracks) -> Ranks:
    """Fetch what the profiles say of the span, and give it tracks."""
    found = Ranks()
    worlds = trace.rows(
        'SELECT world, "window", rank, any_value(source) AS source FROM rank_windows WHERE used GROUP BY ALL ORDER BY world, rank, "window"'
    )
    clocks = {(c["window"], c["rank"]): c for c in trace.rows("SELECT * FROM rank_clocks")}
    shown: dict[tuple[str, int], list[tuple[int, dict[str, tuple[Any, Ints, Ints]]]]] = {}
    for row in worlds:
        key = (row["window"], row["rank"])
        kinds = _of_rank(trace, span, row, clocks.get(key))
        if kinds:
            shown.setdefault((row["world"], row["rank"]), []).append((row["window"], kinds))
    root: dict[str, int] = {}
    several = len({world for world, _ in shown}) > 1
    for (world, rank), windows in shown.items():
        if world not in root:
            root[world] = tracks.add(f"ranks of {printable(world, 60)}" if several else "ranks")
        own = tracks.add(f"rank {rank}", root[world])
        for kind in ("steps", "phases", "collectives"):
            some = [(window, kinds[kind]) for window, kinds in windows if kind in kinds]
            if not some:
                continue
            start, end = (np.concatenate([columns[i] for _, columns in some]) for i in (1, 2))
            order = np.argsort(start, kind="stable")
            lane, of_lane = stacked(np.zeros(len(start), np.int64), start[order], end[order])
            ids = np.array([tracks.add(kind, own) for _ in of_lane], np.int64)
            track = np.empty(len(start), np.int64)
            track[order] = ids[lane]
            at = 0
            for window, (table, first, last) in some:
                rows = RankSlices(table, first, last, track[at : at + len(first)])
                at += len(first)
                found.rows.append((kind, rows))
                if kind == "collectives":
                    found.collectives[window, rank] = rows
    return found


def _of_rank(
    trace: Trace, span: Span, row: dict[str, Any], clock: dict[str, Any] | None
) -> dict[str, tuple[Any, Ints, Ints]]:
    con = trace.connection
    of_rank = {**span.parameters, "window": row["window"], "rank": row["rank"]}
    of_source = {"source": row["source"]}
    on_gpu = bool(con.execute(_ON_GPU.format(gpu=GPU_SQL), of_source).fetchall())
    queries = {
        "steps": (_STEPS, {**of_rank, **of_source}),
        "phases": (_PHASES.format(gpu=GPU_SQL), {**span.parameters, **of_source, "on_gpu": on_gpu}),
        "collectives": (_COLLECTIVES, of_rank),
    }
    found = {}
    for kind, (sql, parameters) in queries.items():
        table = con.sql(sql, params=parameters).to_arrow_table()
        if not len(table):
            continue
        start, end = ints(table["start_ns"].to_numpy()), ints(table["end_ns"].to_numpy())
        # Rounds are on the window's clock already.
        if kind != "collectives" and clock is not None:
            start, end = (times - _offset(clock, times) for times in (start, end))
        found[kind] = table, start, np.maximum(end, start)
    return found


def _offset(clock: dict[str, Any], times: Ints) -> Ints:
    """The rank's clock less the window's."""
    since = (times - clock["origin_ns"]).astype(np.float64)
    known, offsets = (np.asarray(clock[name], np.float64) for name in ("times_ns", "offsets_ns"))
    return whole(offset_at(since, known, offsets, clock["drift_ppm"] * 1e-6))


def slices(ranks: Ranks, names: Names) -> Iterator[Slices]:
    for kind, rows in ranks.rows:
        table = rows.table
        order = np.argsort(rows.start, kind="stable")
        start, end = rows.start[order], rows.end[order]
        named = pc.dictionary_encode(table["named"].combine_chunks())
        of_name = np.array(
            [names.of(printable(str(name), 60)) for name in named.dictionary.to_pylist()], np.int64
        )
        args = {
            name: table[name].combine_chunks().take(pa.array(order))
            for name in table.schema.names
            if name not in ("start_ns", "end_ns", "named", "wait_ns")
        }
        inner = []
        if kind == "collectives":
            wait = np.clip(ints(table["wait_ns"].to_numpy())[order], 0, end - start)
            for name, first, last in (("wait", start, start + wait), ("transfer", start + wait, end)):
                inner.append(Inner(np.full(len(start), names.of(name)), first, last, last > first))
        yield Slices(
            rows.track[order],
            of_name[np.asarray(named.indices.to_numpy(), np.int64)[order]],
            start,
            end,
            args,
            inner,
        )
