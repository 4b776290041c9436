"""Fills the tables that say how a trace's ranks did against each other.

`rank_windows`: a row per profile and window. `rank_clocks`: the clock of each rank in each window. `rank_rounds`: a row per
rank and collective, with arrival, wait and transfer. `rank_steps`: which step of the engine each step of a profile is.
`step_evidence`: what the profiles say of the engine's steps: time lost to a late rank, to slow transfers. `pauses`: steps
beside which something stood that stops an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

import pyarrow as pa

from tailscope.align import Scope
from tailscope.ranks.phases import write_phases
from tailscope.ranks.waits import WindowWaits, compare
from tailscope.ranks.windows import Window, find_windows
from tailscope.store import Trace


def _schema(columns: Mapping[str, pa.DataType]) -> pa.Schema:
    return pa.schema(list(columns.items()))


BATCH = 122_880
_WINDOWS = _schema(
    {
        "window": pa.int64(),
        "world": pa.string(),
        "instance": pa.string(),
        "engine": pa.int64(),
        "rank": pa.int64(),
        "source": pa.string(),
        "first_ns": pa.int64(),
        "last_ns": pa.int64(),
        "world_size": pa.int64(),
        "missing": pa.int64(),
        "used": pa.bool_(),
        "collectives": pa.int64(),
        "unmatched": pa.int64(),
    }
)
_CLOCKS = _schema(
    {
        "window": pa.int64(),
        "rank": pa.int64(),
        "offset_ns": pa.float64(),
        "drift_ppm": pa.float64(),
        "error_ns": pa.float64(),
        "basis": pa.string(),
    }
)
_ROUNDS = _schema(
    {
        "window": pa.int64(),
        "group": pa.string(),
        "round": pa.int64(),
        "rank": pa.int64(),
        "ranks": pa.int64(),
        "complete": pa.bool_(),
        "kind": pa.string(),
        "phase": pa.string(),
        "step": pa.int64(),
        "layer": pa.int64(),
        "start_ns": pa.int64(),
        "end_ns": pa.int64(),
        "wait_ns": pa.int64(),
        "transfer_ns": pa.int64(),
        "slow_ns": pa.int64(),
        "work_ns": pa.int64(),
        "is_last": pa.bool_(),
        "is_shortest": pa.bool_(),
        "caused_ns": pa.int64(),
        "own_ns": pa.int64(),
        "error_ns": pa.float64(),
        "late_phase": pa.string(),
        "phase_work_ns": pa.int64(),
        "phase_others_ns": pa.int64(),
        "tokens": pa.int64(),
    }
)


def write_ranks(trace: Trace, scope: Scope) -> None:
    """Fill the tables. Cost is linear in collectives, and one window is in memory at a time."""
    windows = find_windows(trace, scope)
    con = trace.connection
    _create(trace, "rank_rounds", _ROUNDS.empty_table())
    about: list[dict[str, object]] = []
    clocks: list[dict[str, object]] = []
    for window in windows:
        waits = compare(trace, window)
        if waits.tables:
            table = pa.concat_tables(waits.tables)
            # In batches, so that DuckDB's threads share the work.
            rows = table.select(_ROUNDS.names)
            con.register("new_rounds", pa.Table.from_batches(rows.to_batches(BATCH), rows.schema))
            con.execute("INSERT INTO rank_rounds SELECT * FROM new_rounds")
            con.unregister("new_rounds")
        about += _about(window, waits)
        clocks += [
            {
                "window": window.number,
                "rank": rank,
                "offset_ns": clock.offset_ns,
                "drift_ppm": clock.drift * 1e6,
                "error_ns": clock.error_ns,
                "basis": clock.basis,
            }
            for rank, clock in zip(window.ranks, waits.clocks, strict=True)
        ]
    _create(trace, "rank_windows", pa.Table.from_pylist(about, schema=_WINDOWS))
    _create(trace, "rank_clocks", pa.Table.from_pylist(clocks, schema=_CLOCKS))
    write_phases(trace, windows)
    for name in ("rank_steps", "step_evidence", "pauses"):
        con.execute(files(__package__).joinpath(f"{name}.sql").read_text(encoding="utf-8"))


def _create(trace: Trace, name: str, rows: pa.Table) -> None:
    trace.connection.register("new_rows", rows)
    trace.connection.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS SELECT * FROM new_rows")
    trace.connection.unregister("new_rows")


def _about(window: Window, waits: WindowWaits) -> list[dict[str, object]]:
    return [
        {
            "window": window.number,
            "world": window.world,
            "instance": profile.instance,
            "engine": profile.engine,
            "rank": profile.rank,
            "source": profile.source,
            "first_ns": profile.first_ns,
            "last_ns": profile.last_ns,
            "world_size": window.world_size,
            "missing": window.missing,
            "used": profile in window.profiles,
            "collectives": waits.collectives,
            "unmatched": waits.unmatched,
        }
        for profile in [*window.profiles, *window.double]
    ]
