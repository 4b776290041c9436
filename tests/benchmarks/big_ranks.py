"""Worlds of ranks of any size as Parquet: one slow rank, clocks apart, no metadata but kind and order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from tailscope.parts import SourceWriter
from tailscope.schema import PROFILES, RANK_EVENTS

START_NS = 1_795_963_214_000_000_000
ROWS = 100_000


def write_ranks(path: Path, ranks: int, collectives: int, seed: int = 1) -> None:
    """A trace with `collectives` all-reduces on each of `ranks` ranks, ten a step; rank 1 works a tenth longer."""
    random = np.random.default_rng(seed)
    work = random.normal(1e6, 2e4, (ranks, collectives))
    work[1 % ranks] *= 1.1
    transfer = random.normal(3e4, 1e3, collectives)
    # All leave together, so that each round begins where the one before ended.
    end = np.cumsum(work.max(axis=0) + transfer)
    arrival = end - transfer - work.max(axis=0) + work
    offsets = random.normal(0, 5e5, ranks)
    for rank in range(ranks):
        start = (START_NS + arrival[rank] + offsets[rank]).astype(np.int64)
        left = (START_NS + end + offsets[rank] + random.normal(0, 2e3, collectives)).astype(np.int64)
        with SourceWriter(path, f"{rank:016x}") as writer:
            same = {"instance": "world", "world": "world", "rank": rank, "host": f"host{rank}"}
            whole = {"world_size": ranks, "first_ns": int(start[0]), "last_ns": int(left[-1])}
            profile = {key: [value] for key, value in {**same, **whole, "events": collectives}.items()}
            writer.write(PROFILES, PROFILES.batch(profile))
            for first in range(0, collectives, ROWS):
                rows = slice(first, first + ROWS)
                number = np.arange(collectives)[rows]
                columns = {
                    **same,
                    "start_ns": pa.array(start[rows]),
                    "duration_ns": pa.array((left - start)[rows]),
                    "step": pa.array(number // 10),
                    "collective": "all_reduce",
                    "category": "kernel",
                    "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
                    "bytes_in": 65_536,
                }
                writer.write(RANK_EVENTS, RANK_EVENTS.batch(columns))
            writer.commit({"kind": "generated"})
