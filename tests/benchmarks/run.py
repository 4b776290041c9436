"""Measures what tailscope promises about speed: `python tests/benchmarks/run.py [--full]`.

Ratios and limits, printed, never asserted in tests: a benchmark on a busy machine tells of the machine.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from big_worlds import write_world

BARE = "import typer\napp = typer.Typer()\n@app.command()\ndef a(x: int = 1): ...\n@app.command()\ndef b(x: int = 1): ...\napp()\n"


def timed(*command: str) -> tuple[float, float]:
    """Wall seconds and peak resident MB of a command, in a process of its own."""
    probe = (
        "import resource, subprocess, sys, time\n"
        "start = time.perf_counter()\n"
        "subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)\n"
        "print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe, *command], capture_output=True, text=True, check=True)
    wall, peak = map(float, done.stdout.split())
    return wall, peak


def cli(*args: str) -> list[str]:
    return [sys.executable, "-P", "-m", "tailscope", *args]


def startup(rounds: int = 7) -> None:
    bare = min(timed(sys.executable, "-c", BARE, "--help")[0] for _ in range(rounds))
    ours = min(timed(*cli("--help"))[0] for _ in range(rounds))
    print(f"--help            {ours:.2f} s, {ours - bare:+.2f} s to a bare Typer app (limit +0.20 s)")


def demo(folder: Path, rounds: int = 3) -> None:
    example = Path(__file__).parents[2] / "examples" / "mixed-load"
    trace = str(folder / "demo.parquet")
    wall, _ = timed(*cli("ingest", str(example), "-o", trace))
    best = min(timed(*cli("diagnose", trace))[0] for _ in range(rounds))
    print(f"example           ingest {wall:.2f} s, diagnose {best:.2f} s (limit 3 s)")


def scale(folder: Path, requests: int) -> None:
    walls = []
    for n in (requests // 2, requests):
        trace = folder / f"world-{n}.parquet"
        write_world(trace, n, 4 * n)
        wall, peak = timed(*cli("diagnose", str(trace), "--format", "json"))
        walls.append(wall)
        print(
            f"diagnose          {n:,} requests x {4 * n:,} iterations: {wall:.1f} s, {peak:,.0f} MB (limit 60 s, 4,096 MB at 1 M)"
        )
    print(f"doubling          x{walls[1] / walls[0]:.2f} (limit x2.2)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--full", action="store_true", help="1 M requests x 4 M iterations; without it a tenth"
    )
    full = parser.parse_args().full
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}{' (busy: times are upper bounds)' if load > 0.5 else ''}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        startup()
        demo(folder)
        scale(folder, 1_000_000 if full else 100_000)
    print(
        f"finished in {time.process_time():.0f} s of our own time, {resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime:.0f} s of children's"
    )


if __name__ == "__main__":
    main()
