"""Measures `tailscope export perfetto`: `python tests/benchmarks/perfetto.py [--requests N] [--chrome]`.

Slices a second of one core, queries and all, from an aligned trace to the file; what a diagnosis takes comes on top, and is no part
of it. The limit is 200,000; printed, never asserted in tests: a benchmark on a busy machine tells of the machine.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

from big_worlds import write_world

from tailscope.align import Scope, align
from tailscope.config import Config
from tailscope.export.export import write
from tailscope.ranks.compared import write_ranks
from tailscope.store import Trace

LIMIT = 200_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=250_000)
    parser.add_argument("--chrome", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_world(folder / "trace", given.requests, 4 * given.requests)
        with Trace(folder / "trace", memory_limit="3GB", threads=1) as trace:
            align(trace, Config(), Scope())
            write_ranks(trace, Scope())
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            wall, cpu = time.perf_counter(), time.process_time()
            written = write(
                trace,
                None,
                Scope(),
                folder / "out",
                "chrome" if given.chrome else "perfetto",
                most=10**9,
            )
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"export    {written.slices:,} slices and {written.counters:,} counter values, {written.bytes / 1e6:,.0f} MB: {wall:.2f} s "
        f"({cpu:.2f} s of CPU), {written.slices / wall:,.0f} slices/s (limit {LIMIT:,}; {written.slices / cpu:,.0f} a second of CPU), peak {peak:,.0f} MB, before it {before:,.0f} MB, "
        f"load {os.getloadavg()[0]:.2f}"
    )


if __name__ == "__main__":
    main()
