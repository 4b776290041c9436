"""Writes a simulated world: as a trace, as the emitters' files, and the truth beside them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailscope.errors import UsageError
from tailscope.schema import BY_NAME
from tailscope.sim import truth as true_bills
from tailscope.sim.emit.files import write_files
from tailscope.sim.emit.kineto import write_profiles
from tailscope.sim.engine import simulate
from tailscope.sim.outcome import STATUS_NAMES, Floats, Ints, Outcome, ns
from tailscope.sim.scenario_file import without
from tailscope.sim.tables import request_tables
from tailscope.sim.tables_ranks import profile_tables

#: Below so many answers of a load no p99 is told.
MIN_ANSWERS = 20


def check_places(**places: Path | None) -> None:
    """Raises UsageError for folders that hold something already, cannot be made, or lie in each other."""
    named = {f"--{name}": path.absolute() for name, path in places.items() if path is not None}
    for option, path in named.items():
        if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
            raise UsageError(f"{path} is there already; a simulated world needs a folder of its own")
        above = next(p for p in path.parents if p.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise UsageError(f"{option} {path}: cannot be made in {above}")
        for other_option, other in named.items():
            if option != other_option and (path == other or other in path.parents):
                raise UsageError(f"{option} and {other_option} must be folders apart from each other")


def write(
    outcome: Outcome, *, trace: Path | None = None, raw: Path | None = None, truth: Path | None = None
) -> Iterator[str]:
    """Write what is asked for and yield a line on each. A folder appears when it is complete."""
    q = outcome.requests
    counts = np.bincount(q.status, minlength=len(STATUS_NAMES))
    told = ", ".join(f"{n:,} {name}" for n, name in zip(counts, STATUS_NAMES, strict=True) if n)
    steps = sum(len(engine.steps) for engine in outcome.engines)
    yield f"{outcome.scenario.name}, seed {outcome.scenario.seed}: {len(q):,} requests ({told}), {steps:,} steps"
    if trace is not None:
        with _complete(trace) as place:
            rows = write_trace(tables(outcome, metrics=True), place)
        yield f"{trace}: {rows:,} rows; look at it with: tailscope diagnose {trace}"
    if raw is not None:
        with _complete(raw) as place:
            files = [*write_files(outcome, place), *write_profiles(outcome, place)]
        yield f"{raw}: {len(files)} files; read them with: tailscope ingest {raw}"
    if truth is not None:
        with _complete(truth) as place:
            write_truth(outcome, place)
        yield f"{truth}: truth.json, requests.parquet and bills.parquet"


@contextmanager
def _complete(folder: Path) -> Iterator[Path]:
    """A folder beside the one to be made, which takes its place when all is in it; nothing stays of a failure."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name[:100]}-", dir=folder.parent))
    try:
        yield made
        made.chmod(0o777 & ~_umask())
        if folder.is_dir():
            folder.rmdir()
        made.rename(folder)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def tables(outcome: Outcome, *, metrics: bool = False) -> dict[str, pa.Table]:
    """All tables of the trace that ingesting the world's files would give; `metrics`: those of /metrics too."""
    found = request_tables(outcome, metrics=metrics)
    for name, rows in profile_tables(outcome).items():
        found[name] = pa.concat_tables([found[name], rows]) if name in found else rows
    return found


def write_trace(found: Mapping[str, pa.Table], folder: Path) -> int:
    """Write tables as a trace; the number of rows."""
    for name, rows in found.items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        order = pc.sort_indices(rows, [(column, "ascending") for column in BY_NAME[name].sort])
        pq.write_table(rows.take(order), place / "simulated.parquet", compression="zstd")
    return sum(len(rows) for rows in found.values())


def write_truth(outcome: Outcome, folder: Path) -> None:
    """What was injected and what it cost, every request as it was, and every request's true bill."""
    scenario = outcome.scenario
    document = {
        "scenario": scenario.name,
        "seed": scenario.seed,
        "loads": [load.name for load in scenario.loads],
        "faults": [asdict(fault) for fault in scenario.faults],
        "causes": [
            {
                "rule": cause.rule,
                "culprit": cause.culprit,
                "victims": cause.victims,
                "without": cause.without,
                "p99_s": costs(outcome, simulate(without(scenario, cause))),
            }
            for cause in scenario.causes
        ],
        "tolerated": scenario.tolerated,
        "events": [asdict(event) for event in outcome.events],
    }
    (folder / "truth.json").write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    pq.write_table(request_table(outcome), folder / "requests.parquet", compression="zstd")
    pq.write_table(
        true_bills.table(outcome, true_bills.bills(outcome)), folder / "bills.parquet", compression="zstd"
    )


def request_table(outcome: Outcome) -> pa.Table:
    """Every request as it truly was; instants in Unix ns by the one true clock, NULL where something never was."""
    q = outcome.requests
    columns: dict[str, Any] = {
        "request_id": pa.array(q.id, pa.string()),
        "answer": pa.array(q.answers()),
        "load": pa.array([outcome.scenario.loads[i].name for i in q.load], pa.string()),
        "status": pa.array([STATUS_NAMES[i] for i in q.status], pa.string()),
        "instance": pa.array(
            [outcome.engines[e].instance if e >= 0 else None for e in q.engine], pa.string()
        ),
        "engine": pa.array([outcome.engines[e].engine if e >= 0 else None for e in q.engine], pa.int64()),
    }
    for name in ("prompt", "cached", "output"):
        columns[f"{name}_tokens"] = pa.array(getattr(q, name))
    columns["preemptions"] = pa.array(q.preemptions)
    instants = (
        "intended",
        "sent",
        "arrival",
        "queued",
        "scheduled",
        "first_token",
        "last_token",
        "finished",
        "left",
    )
    for name in instants:
        seconds: Floats = getattr(q, f"{name}_s")
        never = np.isnan(seconds)
        columns[f"{name}_ns"] = pa.array(ns(np.where(never, 0.0, seconds)), mask=never)
    return pa.table(columns)


def costs(outcome: Outcome, other: Outcome, quantile: float = 0.99) -> dict[str, dict[str, dict[str, float]]]:
    """load -> metric -> p99 with the cause and without it, seconds, for loads that both worlds have."""
    others = quantiles_of(other, quantile)
    return {
        load: {
            metric: {"with": value, "without": others[load][metric]}
            for metric, value in metrics.items()
            if metric in others[load]
        }
        for load, metrics in quantiles_of(outcome, quantile).items()
        if load in others
    }


def quantiles_of(outcome: Outcome, quantile: float = 0.99) -> dict[str, dict[str, float]]:
    """load -> metric -> p99 of the requests that were answered, and of the gaps between their tokens, seconds, as their
    front end measured them; or another quantile."""
    q, found = outcome.requests, {}
    gaps = [_gaps(outcome, place) for place in range(len(outcome.engines))]
    gap_load = q.load[np.concatenate([request for request, _ in gaps])]
    gap_s = np.concatenate([seconds for _, seconds in gaps])
    for index, load in enumerate(outcome.scenario.loads):
        mine = (q.load == index) & np.isfinite(q.finished_s)
        if mine.sum() < MIN_ANSWERS:
            continue
        ttft, e2e = (q.first_shown_s - q.arrival_s)[mine], (q.last_shown_s - q.arrival_s)[mine]
        tokens = q.output[mine] - 1
        found[load.name] = {
            "TTFT": float(np.quantile(ttft, quantile)),
            "E2E": float(np.quantile(e2e, quantile)),
        }
        if (tokens > 0).sum() >= MIN_ANSWERS:
            tpot = ((e2e - ttft)[tokens > 0]) / tokens[tokens > 0]
            found[load.name]["TPOT"] = float(np.quantile(tpot, quantile))
            found[load.name]["ITL"] = float(np.quantile(gap_s[gap_load == index], quantile))
    return found


def _gaps(outcome: Outcome, place: int) -> tuple[Ints, Floats]:
    """(request, seconds) of each gap between two tokens of a request that was answered."""
    request, _, times = outcome.token_times(outcome.engines[place])
    q = outcome.requests
    same = np.append(False, request[1:] == request[:-1])
    same &= np.isfinite(q.finished_s[request]) & (q.engine[request] == place)
    return request[same], np.diff(times, prepend=0.0)[same]
