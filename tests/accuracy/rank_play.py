"""Plays a labelled world of ranks: simulate, profile, diagnose, and note what was said and how right the clocks were."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rank_families import FAMILIES, Labelled, Parties, replayed

from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.ingest import ingest
from tailscope.sim.emit.kineto import write_profiles
from tailscope.sim.engine import simulate
from tailscope.sim.outcome import START_NS, Outcome
from tailscope.sim.ranks import RankWorld
from tailscope.sim.tables_ranks import profile_tables
from tailscope.sim.written import write_trace
from tailscope.source import Options
from tailscope.store import Trace


def play(family_name: str, offset_ms: float, seed: int, via: str) -> dict[str, Any]:
    """Play a world, `via` tables or files."""
    began = time.perf_counter()
    family = next(f for f in FAMILIES if f.name == family_name)
    made = family.world(offset_ms, seed)
    outcome = simulate(made.scenario)
    (ranks,) = outcome.worlds.values()
    lateness_s, cost = replayed(ranks, made) if made.healthy else _coupling(ranks, made)
    folder = Path(tempfile.mkdtemp(prefix="tailscope-accuracy-"))
    try:
        place = folder / "trace.parquet"
        _write(outcome, place, via)
        with Trace(str(place), threads=1) as trace:
            diagnosis = diagnose(trace, Config())
            clocks = _clocks(trace, ranks)
    finally:
        shutil.rmtree(folder)
    return {
        "family": family.name,
        "kind": family.kind,
        "offset_ms": offset_ms,
        "seed": seed,
        "via": via,
        "emitter": made.scenario.ranks.emitter,
        "ranks": ranks.ranks,
        "steps": len(ranks.starts),
        "right": _listed(made.right),
        "tolerated": _listed(made.tolerated),
        "lateness_s": lateness_s,
        "cost": cost,
        **clocks,
        "verdict": diagnosis.verdict.status,
        "checks": {check.rule: check.status for check in diagnosis.checks},
        "reasons": {check.rule: check.reason for check in diagnosis.checks if check.status == "inconclusive"},
        "findings": [
            {
                "rule": f.rule,
                "status": f.status,
                "severity": f.severity,
                "culprit": f"{f.culprit.kind}:{f.culprit.id}" if f.culprit else None,
            }
            for f in diagnosis.findings
        ],
        "seconds": time.perf_counter() - began,
    }


def _write(outcome: Outcome, place: Path, via: str) -> None:
    if via == "tables":
        write_trace(profile_tables(outcome), place)
        return
    raw = place.with_name("raw")
    raw.mkdir()
    write_profiles(outcome, raw)
    ingest([raw], place, config=Config(), options=Options())


def _listed(parties: Parties) -> dict[str, list[str] | None]:
    return {rule: None if ids is None else sorted(ids) for rule, ids in parties.items()}


def _coupling(ranks: RankWorld, made: Labelled) -> tuple[float, float]:
    """How late the attention of the longest batch is for the others, on average, where it is by half a step and more; and
    what share of all steps' time that is."""
    if not made.places:
        return 0.0, 0.0
    costs = np.sort(np.array(ranks.costs), axis=1)
    extra = (costs[:, -1] - costs[:, -2]) * ranks.settings.attention_share
    struck = extra[costs[:, -1] > 1.5 * costs[:, -2]]
    took = ranks.timelines(0, len(costs)).duration_s
    return float(struck.mean() / made.places) if len(struck) else 0.0, float(struck.sum() / took.sum())


def _clocks(trace: Trace, ranks: RankWorld) -> dict[str, Any]:
    """Of the window's ranks: how far each clock's offset is from the true one, and the bound that was stated, ns.

    Only differences between clocks mean anything, so both are taken about their median.
    """
    rows = trace.rows(
        "SELECT c.rank, c.offset_ns, c.error_ns, c.basis, median(r.end_ns)::BIGINT AS at_ns "
        'FROM rank_clocks c LEFT JOIN rank_rounds r ON r.rank = c.rank AND r."window" = c."window" '
        "GROUP BY ALL ORDER BY c.rank"
    )
    known = [row for row in rows if np.isfinite(row["error_ns"]) and row["at_ns"] is not None]
    true = []
    for row in known:
        at_s = (row["at_ns"] - START_NS) / 1e9
        shown = ranks.clock_ns(row["rank"], np.array([at_s]))[0]
        true.append(int(shown) - START_NS - round(at_s * 1e9))
    off = np.array([row["offset_ns"] for row in known], float) - np.array(true, float)
    off -= np.median(off) if len(off) else 0.0
    return {
        "clocks": len(rows),
        "bound_ns": [float(row["error_ns"]) for row in known],
        "off_ns": off.tolist(),
        "bases": sorted({row["basis"] for row in rows}),
    }
