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

from big_profile import write_profile
from big_ranks import write_ranks
from big_worlds import write_world

from tailscope.sim.engine import simulate
from tailscope.sim.scenario import Engine, Load, Scenario, Sizes

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


def scale(folder: Path, requests: int, told: bool = False) -> None:
    """`told`: with the schedule, some 200 expanded rows of it a request, and 50 rows of tokens."""
    walls = []
    beside = f" x {50 * requests:,} tokens x {200 * requests:,} scheduled" if told else ""
    limit = "120 s, 6,144 MB" if told else "60 s, 4,096 MB"
    for n in (requests // 2, requests):
        trace = folder / f"world-{n}-{told}.parquet"
        write_world(trace, n, 4 * n, told=told)
        wall, peak = timed(*cli("diagnose", str(trace), "--format", "json"))
        walls.append(wall)
        print(
            f"diagnose          {n:,} requests x {4 * n:,} iterations{beside}: {wall:.1f} s, {peak:,.0f} MB (limit {limit} at 1 M)"
        )
    print(f"doubling          x{walls[1] / walls[0]:.2f} (limit x2.2)")


OUR_LOAD = (
    "import resource, sys, time\n"
    "from pathlib import Path\n"
    "from tailscope import registry\n"
    "from tailscope.config import Config\n"
    "from tailscope.ingest import ingest\n"
    "from tailscope.source import Options\n"
    "registry.collectors()\n"
    "start = time.perf_counter()\n"
    "ingest([Path(sys.argv[1])], Path(sys.argv[2]), config=Config(), options=Options())\n"
    "print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)\n"
)
PEERS_LOAD = (
    "import resource, sys, time\n"
    "from hta.common.trace import Trace\n"
    "start = time.perf_counter()\n"
    "Trace(trace_files={0: sys.argv[1]}, trace_dir='/').parse_traces(use_multiprocessing=False)\n"
    "print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)\n"
)
#: DuckDB imports pandas with the first table it is given.
WAITS = """
import resource, sys, time
import pandas
from tailscope.align import Scope, align
from tailscope.config import Config
from tailscope.ranks.compared import FILLED, write_ranks, write_rounds
from tailscope.ranks.waits import compare
from tailscope.ranks.windows import find_windows
from tailscope.store import Trace
with Trace(sys.argv[1], memory_limit='2GB') as trace:
    align(trace, Config(), Scope())
    start = time.perf_counter()
    if sys.argv[2] == 'waits':
        trace.create('rank_rounds', FILLED['rank_rounds'].empty_table())
        for window in find_windows(trace, Scope()):
            write_rounds(trace, compare(trace, window))
    else:
        write_ranks(trace, Scope())
    print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def printed(python: str, code: str, *args: str) -> tuple[float, float]:
    """What a program prints last: seconds and MB. Both sides are timed from after their imports."""
    done = subprocess.run([python, "-c", code, *args], capture_output=True, text=True, check=True)
    seconds, megabytes = map(float, done.stdout.splitlines()[-1].split())
    return seconds, megabytes


def profile(folder: Path, events: int, rounds: int = 3) -> None:
    """JSON to Parquet against HolisticTraceAnalysis, which is installed for it, loading the same file."""
    path = folder / "rank0.pt.trace.json"
    count = write_profile(path, events)
    size = path.stat().st_size / 1e6
    runs = [
        printed(sys.executable, OUR_LOAD, str(path), str(folder / f"p{i}.parquet")) for i in range(rounds)
    ]
    ours, peak = min(runs)
    print(f"profile           {count:,} events, {size:.0f} MB: {ours:.2f} s, {peak:.0f} MB (limit 500 MB)")
    longer = folder / "longer.pt.trace.json"
    count = write_profile(longer, 10 * events)
    wall, peak = printed(sys.executable, OUR_LOAD, str(longer), str(folder / "longer.parquet"))
    print(f"tenfold           {count:,} events: {wall:.1f} s, x{wall / ours:.1f}, {peak:.0f} MB")
    longer.unlink()
    peer = folder / "peer"
    subprocess.run([sys.executable, "-m", "venv", str(peer)], check=True)
    python = str(peer / "bin" / "python")
    installed = subprocess.run(
        [python, "-m", "pip", "install", "-q", "HolisticTraceAnalysis"], capture_output=True, check=False
    )
    if installed.returncode:
        print("peer              not measured: HolisticTraceAnalysis cannot be installed")
        return
    theirs, their_peak = printed(python, PEERS_LOAD, str(path))
    print(f"peer              HTA {theirs:.1f} s, {their_peak:.0f} MB: x{theirs / ours:.1f} ours (aim x20)")


def waits(folder: Path, collectives: int, ranks: int = 8, rounds: int = 3) -> None:
    """From Parquet to each collective's waits, clocks among it; and to all that is asked of ranks, replays and phases too."""
    trace = folder / "ranks.parquet"
    write_ranks(trace, ranks, collectives)
    for what, aim in (("waits", " (limit 1)"), ("all of ranks", "")):
        wall, peak = min(printed(sys.executable, WAITS, str(trace), what) for _ in range(rounds))
        rate = ranks * collectives / wall / 1e6
        print(f"{what:17} {ranks} ranks x {collectives:,}: {wall:.1f} s, {rate:.2f} M/s{aim}, {peak:,.0f} MB")


def many_ranks(folder: Path, events: int, ranks: int = 64) -> None:
    """The whole diagnosis of a world where every event is a collective."""
    trace = folder / "many.parquet"
    write_ranks(trace, ranks, events // ranks)
    wall, peak = timed(*cli("diagnose", str(trace), "--format", "json"))
    print(
        f"{ranks} ranks          {events:,} events: diagnose {wall:.0f} s, {peak:,.0f} MB (limit 4,096 MB at 20 M)"
    )


#: Engines that are idle half the time, busy, short of KV cache, and two that step together.
WORLDS = {
    "light": Scenario((Load("a", rate=4),), duration_s=120),
    "busy": Scenario(
        (Load("a", rate=25), Load("b", rate=0.3, prompt_tokens=Sizes(12_000, 0.3))), duration_s=120
    ),
    "short of cache": Scenario(
        (Load("a", rate=20),), engine=Engine(kv_blocks=500, max_model_len=4_000), duration_s=120
    ),
    "lockstep": Scenario((Load("a", rate=25),), engine=Engine(data_parallel=2, moe=True), duration_s=120),
}


def simulation(rounds: int = 3) -> None:
    """A request in a step counts once, whether it decodes or is prefilled."""
    for name, scenario in WORLDS.items():
        best = 0.0
        for _ in range(rounds):
            start = time.process_time()
            outcome = simulate(scenario)
            seconds = time.process_time() - start
            steps = [e.steps for e in outcome.engines]
            count = sum(
                int((s.prefill_requests + s.decode_requests + s.recompute_requests).sum()) for s in steps
            )
            best = max(best, count / seconds)
        print(f"simulation        {name}: {best / 1e3:,.0f} k request-steps/s a core (limit 200 k)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--full", action="store_true", help="1 M requests, profile events; without it a tenth"
    )
    full = parser.parse_args().full
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}{' (busy: times are upper bounds)' if load > 0.5 else ''}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        startup()
        demo(folder)
        simulation()
        profile(folder, 1_000_000 if full else 100_000)
        waits(folder, 500_000 if full else 50_000)
        many_ranks(folder, 20_000_000 if full else 1_000_000)
        scale(folder, 1_000_000 if full else 100_000)
        scale(folder, 1_000_000 if full else 100_000, told=True)
    print(
        f"finished in {time.process_time():.0f} s of our own time, {resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime:.0f} s of children's"
    )


if __name__ == "__main__":
    main()
