"""Tables of the ranks' profiles, as ingesting the files of `emit.kineto` would give them, without the files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.schema import BY_NAME, PHASES, SOURCES
from tailscope.sim.emit.kineto import BASE_NS, profiles
from tailscope.sim.emit.kineto_profile import NONE, Profile
from tailscope.sim.outcome import Ints, Outcome
from tailscope.sim.tables_sources import source_row


def profile_tables(outcome: Outcome) -> dict[str, pa.Table]:
    """`profiles`, `rank_events`, `iterations` (of ranks) and `sources` as `ingest` makes them of the files, by table; those
    with rows. Where the scenario tells it, `expert_load` too, which none of the files has."""
    parts: dict[str, list[pa.Table]] = {}
    for profile in profiles(outcome):
        tables = {"profiles": _profiles_row(profile), "rank_events": _rank_events(profile)}
        if profile.batches:
            tables["iterations"] = _iterations(profile)
        if profile.expert_tokens is not None:
            tables["expert_load"] = _expert_load(profile, profile.expert_tokens)
        tables["sources"] = _source_row(profile, tables)
        for name, rows in tables.items():
            parts.setdefault(name, []).append(rows)
    return {name: pa.concat_tables(tables) for name, tables in parts.items()}


def _common(profile: Profile) -> dict[str, Any]:
    text = f"{profile.world.instance}/{profile.file_name}"
    return {
        "instance": profile.world.instance,
        "engine": profile.dp,
        "rank": profile.rank,
        "source": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
    }


def _source_row(profile: Profile, tables: Mapping[str, pa.Table]) -> pa.Table:
    """What `ingest` says of the file."""
    common = _common(profile)
    times = [rows[time].to_numpy() for name, rows in tables.items() if (time := BY_NAME[name].time)]
    row = source_row(
        "torch_profiler",
        common["instance"],
        profile.file_name,
        common["source"],
        rows=sum(rows.num_rows for rows in tables.values()),
        clock={"clock": "wall", "offset_ns": BASE_NS},
        first_ns=min(int(t.min()) for t in times),
        last_ns=max(int(t.max()) for t in times),
    )
    return SOURCES.batch({name: [value] for name, value in row.items()})


def _of_rank(profile: Profile) -> dict[str, Any]:
    place = {"dp": profile.dp, "pp": 0, "tp": profile.tp, "ep": profile.rank}
    return {**_common(profile), "host": profile.host, **place}


def _profiles_row(profile: Profile) -> pa.Table:
    row = {
        **_of_rank(profile),
        "world_size": profile.world.ranks,
        "backend": profile.backend,
        "groups": sorted(profile.groups().items()),
        "first_ns": int(profile.columns["start"][0]),
        "last_ns": profile.last_ns,
        "exported_ns": profile.exported_ns,
        "steps": len(profile.batches),
        "captures": 0,
        "events": len(profile.columns["start"]),
    }
    return BY_NAME["profiles"].batch({name: [value] for name, value in row.items()})


def _iterations(profile: Profile) -> pa.Table:
    batches, times = np.array(profile.batches), np.array(profile.step_ns)
    kinds = ("prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens")
    return BY_NAME["iterations"].batch(
        {
            **_common(profile),
            "iteration": list(range(len(batches))),
            "start_ns": pa.array(times[:, 0]),
            "end_ns": pa.array(times[:, 1]),
            "end_basis": "measured",
            **{kind: pa.array(batches[:, i]) for i, kind in enumerate(kinds)},
        }
    )


def _expert_load(profile: Profile, tokens: Ints) -> pa.Table:
    """Tokens of the rank's own experts in its annotated steps. `tokens`: steps × layers × experts."""
    experts = np.array([e for e in range(tokens.shape[2]) if profile.world.rank_of(e) == profile.rank])
    mine = tokens[:, :, experts]
    steps, layers, _ = mine.shape
    return BY_NAME["expert_load"].batch(
        {
            **_common(profile),
            "step": pa.array(np.repeat(np.arange(steps), layers * len(experts))),
            "layer": pa.array(np.tile(np.repeat(np.arange(layers), len(experts)), steps)),
            "expert": pa.array(np.tile(experts, steps * layers)),
            "tokens": pa.array(mine.ravel()),
        }
    )


def _rank_events(profile: Profile) -> pa.Table:
    columns, table = profile.columns, BY_NAME["rank_events"]
    told = {c for said in profile.said.values for c in said.columns}
    by_said = {
        c: pa.array([said.columns.get(c) for said in profile.said.values], table.arrow.field(c).type).take(
            pa.array(columns["said"])
        )
        for c in told
    }
    # A number is told of the collective alone, not of the call.
    is_collective = np.array(["collective" in said.columns for said in profile.said.values])
    seq = np.where(is_collective[columns["said"]], columns["seq"], NONE)
    return table.batch(
        {
            **_of_rank(profile),
            "step": _nullable(columns["step"]),
            "layer": _nullable(columns["layer"]),
            "phase": pa.array(PHASES).take(_nullable(columns["phase"])),
            "name": pa.array(profile.name.values).take(pa.array(columns["name"])),
            "category": pa.array(profile.category.values).take(pa.array(columns["category"])),
            "stream": pa.array(columns["thread"]),
            "start_ns": pa.array(columns["start"]),
            "duration_ns": pa.array(columns["end"] - columns["start"]),
            "launch_ns": _nullable(columns["launch"]),
            "seq": _nullable(seq),
            **by_said,
        }
    )


def _nullable(values: NDArray[np.int64]) -> Any:
    return pa.array(values, mask=values < 0)
