"""Fills the tables that say how a trace's ranks did against each other.

`rank_windows`: a row per profile and window; `windows`: a row per window. `rank_clocks`: the clock of each rank in each
window. `rank_rounds`: a row per rank and collective, with arrival, wait and transfer. `step_replays`: what each step of a
window would take if something were otherwise; `rank_costs`: what it would be shorter without one rank's lateness,
`link_costs` if one rank's link were like the others'; `rank_path`: whose work is on its critical path. `rank_steps`: which step of the engine each step of a profile is.
`step_evidence`: what the profiles say of the engine's steps: time lost to a late rank, to slow transfers. `pauses`: steps
beside which something stood that stops an engine.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from tailscope.align import Scope, sql_of
from tailscope.ranks.annotated import write_rank_steps
from tailscope.ranks.collectives import WORK
from tailscope.ranks.phases import write_phases
from tailscope.ranks.replay import (
    AS_IT_WAS,
    AS_THEY_LEFT,
    BALANCED,
    NO_SKEW,
    SHARED,
    USUAL_TRANSFERS,
    Replayed,
)
from tailscope.ranks.waits import WindowWaits, compare, whole
from tailscope.ranks.windows import Window, find_windows
from tailscope.store import Trace, schema_of

#: A rank that makes the others wait so many times as long as most do is late, not the last by chance.
MORE = 2.0
#: Rows inserted at a time.
BATCH = 122_880
_WINDOWS = schema_of(
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
_CLOCKS = schema_of(
    {
        "window": pa.int64(),
        "rank": pa.int64(),
        "host": pa.string(),
        "offset_ns": pa.float64(),
        "drift_ppm": pa.float64(),
        "knots": pa.int64(),
        "error_ns": pa.float64(),
        "residual_ns": pa.float64(),
        "rounds": pa.int64(),
        "together": pa.bool_(),
        "basis": pa.string(),
        # What it is at points of the window, in ns since its first event; straight lines between.
        "origin_ns": pa.int64(),
        "times_ns": pa.list_(pa.float64()),
        "offsets_ns": pa.list_(pa.float64()),
    }
)
_ROUNDS = schema_of(
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
        "at_step": pa.int64(),
        "layer": pa.int64(),
        "start_ns": pa.int64(),
        "end_ns": pa.int64(),
        "wait_ns": pa.int64(),
        "transfer_ns": pa.int64(),
        "transfer_low_ns": pa.int64(),
        "transfer_high_ns": pa.int64(),
        "usual_transfer_ns": pa.int64(),
        "slow_ns": pa.int64(),
        "exit_ns": pa.int64(),
        "size": pa.int64(),
        "verdict": pa.string(),
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
_STEP_REPLAYS = schema_of(
    {
        "window": pa.int64(),
        "at_step": pa.int64(),
        "replayed_ns": pa.int64(),
        "no_skew_ns": pa.int64(),
        "usual_transfers_ns": pa.int64(),
        "balanced_ns": pa.int64(),
        "as_left_ns": pa.int64(),
        "transfer_ns": pa.int64(),
    }
)
_RANK_COSTS = schema_of(
    {"window": pa.int64(), "at_step": pa.int64(), "rank": pa.int64(), "saved_ns": pa.int64()}
)
_LINK_COSTS = schema_of(
    {
        "window": pa.int64(),
        "at_step": pa.int64(),
        "rank": pa.int64(),
        "late": pa.bool_(),
        "saved_ns": pa.int64(),
    }
)
_RANK_PATH = schema_of(
    {"window": pa.int64(), "rank": pa.int64(), "phase": pa.string(), "work_ns": pa.int64()}
)

#: Filled window by window.
FILLED = {
    "rank_rounds": _ROUNDS,
    "step_replays": _STEP_REPLAYS,
    "rank_costs": _RANK_COSTS,
    "link_costs": _LINK_COSTS,
    "rank_path": _RANK_PATH,
}


def write_ranks(trace: Trace, scope: Scope) -> None:
    """Fill the tables. Cost is linear in collectives, and one window is in memory at a time."""
    windows = find_windows(trace, scope)
    for name, schema in FILLED.items():
        trace.create(name, schema.empty_table())
    about: list[dict[str, object]] = []
    clocks: list[dict[str, object]] = []
    for window in windows:
        waits = compare(trace, window)
        with trace.beside(waits.held_bytes), ThreadPoolExecutor(1) as pool:
            replayed = pool.submit(waits.replayed)
            write_rounds(trace, waits)
        if (result := replayed.result()) is not None:
            for name, rows in _costs(window, result).items():
                trace.insert(name, rows)
        about += _about(window, waits)
        clocks += [
            {
                "window": window.number,
                "rank": profile.rank,
                "host": profile.host,
                "offset_ns": clock.offset_ns,
                "drift_ppm": clock.drift * 1e6,
                "knots": len(clock.times_ns),
                "error_ns": clock.error_ns,
                "residual_ns": clock.residual_ns,
                "rounds": clock.rounds,
                "together": clock.together,
                "basis": clock.basis,
                "origin_ns": window.span_ns[0],
                "times_ns": clock.times_ns.tolist(),
                "offsets_ns": clock.offsets_ns.tolist(),
            }
            for profile, clock in zip(window.profiles, waits.clocks, strict=True)
        ]
    trace.create("rank_windows", pa.Table.from_pylist(about, schema=_WINDOWS))
    trace.create("rank_clocks", pa.Table.from_pylist(clocks, schema=_CLOCKS))
    write_phases(trace, windows)
    trace.connection.execute(sql_of(__package__, "windows"))
    write_rank_steps(trace)
    trace.connection.execute(sql_of(__package__, "step_evidence"), {"more": MORE})
    for name in ("pauses", "host_gaps"):
        trace.connection.execute(sql_of(__package__, name))


def write_rounds(trace: Trace, waits: WindowWaits) -> None:
    """Add the rows of a window to `rank_rounds`."""
    for rows in waits.tables:
        rows = rows.select(_ROUNDS.names)
        # In batches, so that DuckDB's threads share the work.
        trace.insert("rank_rounds", pa.Table.from_batches(rows.to_batches(BATCH), rows.schema))


def _costs(window: Window, replayed: Replayed) -> dict[str, pa.Table]:
    """Rows of `step_replays`, `rank_costs`, `link_costs` and `rank_path`."""
    duration, of_links = replayed.duration_ns, SHARED + len(replayed.without)
    saved = duration[:, [AS_IT_WAS]] - duration[:, SHARED:of_links]
    by_link = duration[:, [AS_THEY_LEFT]] - duration[:, of_links:]
    # Also what is 0: a rank without rows was not asked about.
    step, candidate = np.nonzero(np.ones_like(saved, bool))
    link_step, link = np.nonzero(np.ones_like(by_link, bool))
    links = np.array(replayed.links, np.int64).reshape(-1, 2)[link]
    rank, phase = np.nonzero(replayed.path_ns >= 0.5)
    ranks = np.array(window.ranks)
    steps = {
        "at_step": replayed.step,
        "replayed_ns": whole(duration[:, AS_IT_WAS]),
        "no_skew_ns": whole(duration[:, NO_SKEW]),
        "usual_transfers_ns": whole(duration[:, USUAL_TRANSFERS]),
        "balanced_ns": whole(duration[:, BALANCED]),
        "as_left_ns": whole(duration[:, AS_THEY_LEFT]),
        "transfer_ns": whole(replayed.path_transfer_ns),
    }
    costs = {
        "at_step": replayed.step[step],
        "rank": ranks[replayed.without][candidate],
        "saved_ns": whole(saved[step, candidate]),
    }
    of_link = {
        "at_step": replayed.step[link_step],
        "rank": ranks[links[:, 0]],
        "late": links[:, 1].astype(bool),
        "saved_ns": whole(by_link[link_step, link]),
    }
    path = {
        "rank": ranks[rank],
        "phase": [WORK[i] for i in phase],
        "work_ns": whole(replayed.path_ns[rank, phase]),
    }
    tables: dict[str, dict[str, Any]] = {
        "step_replays": steps,
        "rank_costs": costs,
        "link_costs": of_link,
        "rank_path": path,
    }
    return {
        name: pa.table({"window": pa.repeat(pa.scalar(window.number), len(columns[some])), **columns})
        for name, columns, some in ((n, c, next(iter(c))) for n, c in tables.items())
    }


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
