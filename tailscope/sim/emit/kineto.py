"""Profiles of the ranks as torch's profiler writes them under vLLM: files of Kineto's JSON.

One rank's events are gathered once, as columns; these files and the tables of `tables_ranks` are two ways to show them. How
collectives look is the emitter's form, see `kineto_forms`.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from tailscope.sim.emit.kineto_coordinated import coordinate
from tailscope.sim.emit.kineto_profile import NONE, Profile
from tailscope.sim.emit.kineto_shown import Shown, tokens_of
from tailscope.sim.outcome import START_NS, Ints, Outcome, Steps
from tailscope.sim.ranks import RankWorld, Timeline

#: Kineto counts times from the last whole multiple of so many seconds, three months.
BASE_EVERY_S = 7_889_238
BASE_NS: Final = START_NS // (BASE_EVERY_S * 1_000_000_000) * BASE_EVERY_S * 1_000_000_000
#: Events made JSON at a time.
EVENTS = 20_000
ON_GPU = ("kernel", "gpu_user_annotation")


def profiles(outcome: Outcome) -> Iterator[Profile]:
    """The profiles of an outcome, by window, instance and rank."""
    for number, (from_s, seconds) in enumerate(outcome.scenario.telemetry.profile):
        for instance, world in outcome.worlds.items():
            first, stop = world.between(from_s, from_s + seconds)
            steps = {e.engine: e.steps for e in outcome.engines if e.instance == instance}
            # A world that is cut off has begun steps that never ended.
            stop = min(stop, *map(len, steps.values()))
            if first >= stop:
                continue
            timeline = world.timelines(first, stop)
            telemetry = outcome.scenario.telemetry
            experts = _expert_tokens(world, timeline, steps) if telemetry.expert_load and world.moe else None
            for rank in range(world.ranks):
                if rank in telemetry.profile_missing:
                    continue
                profile = Profile(world, rank, number)
                shown = Shown(profile, timeline, steps)
                shown.show()
                if world.settings.coordinate:
                    coordinate(shown)
                if experts is not None:
                    own = steps[profile.dp].dummy[timeline.first : timeline.first + len(experts)]
                    profile.expert_tokens = experts[~own]
                profile.finish(telemetry.profile_dropped)
                yield profile


def _expert_tokens(world: RankWorld, timeline: Timeline, steps: dict[int, Steps]) -> Ints:
    """Tokens of every expert in the steps of a timeline: steps × layers × experts."""
    first, stop = timeline.first, timeline.first + len(timeline.start_s)
    tokens = np.array([tokens_of(steps[e])[first:stop] for e in range(world.engines)])
    by_rank = world.transfers.exchanged(tokens.T, world.loads(first, stop)).sum(axis=-2)
    return world.experts.tokens(first, by_rank)


# -- files ----------------------------------------------------------------------------------------


def write_profiles(outcome: Outcome, folder: Path) -> list[Path]:
    """Write a file for each rank of each instance and window, in a folder per instance; returns them."""
    paths = []
    for profile in profiles(outcome):
        place = folder / profile.world.instance
        place.mkdir(parents=True, exist_ok=True)
        paths.append(place / profile.file_name)
        _write(profile, paths[-1])
    return paths


def _write(profile: Profile, path: Path) -> None:
    when = profile.exported_ns // 1_000_000_000
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 3, raw, mtime=when) as file:
        file.write(orjson.dumps(_head(profile))[:-1] + b',"traceEvents":[')
        file.write(_listed(_surroundings(profile)))
        events = _events(profile)
        while some := list(islice(events, EVENTS)):
            file.write(b",\n" + _listed(some))
        file.write(b'],"traceName":"' + path.name.removesuffix(".gz").encode() + b'"}')


def _listed(events: list[dict[str, Any]]) -> bytes:
    """JSON of a list without its brackets."""
    return orjson.dumps(events)[1:-1]


def _head(profile: Profile) -> dict[str, Any]:
    backend, groups = profile.backend, profile.groups()
    device = {"nccl": "cuda:nccl", "gloo": "cpu:gloo,cuda:gloo"}[backend]
    trace = f"{profile.world.instance} {profile.window} {profile.rank}"
    return {
        "schemaVersion": 1,
        "deviceProperties": [],
        "trace_id": hashlib.blake2b(trace.encode(), digest_size=16).hexdigest().upper(),
        "vllm_version_tuple": ["0", "32", "0"],
        "record_shapes": 1,
        "distributedInfo": {
            "backend": backend,
            "rank": profile.rank,
            "world_size": profile.world.ranks,
            "pg_count": len(groups),
            "pg_config": [
                {
                    "pg_name": name,
                    "pg_desc": "undefined" if name != "0" else "default_pg",
                    "backend_config": device,
                    "pg_size": len(ranks),
                    "ranks": ranks,
                }
                for name, ranks in groups.items()
            ],
        },
        "vllm_version": "0.32.0",
        "host_name": profile.host,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": BASE_NS,
    }


def _surroundings(profile: Profile) -> list[dict[str, Any]]:
    """What else a file holds: the worker's name, the profiler's own span, its end."""
    first, last = _us(profile.columns["start"][:1])[0], _us(np.array([profile.last_ns]))[0]
    # Parallelism that there is names the worker.
    parts = [f"DP{profile.dp}"] * (profile.world.engines > 1) + [f"TP{profile.tp}"] * (profile.world.tp > 1)
    label = "VLLM::Worker_" + "_".join(parts + [f"EP{profile.rank}"] * profile.world.moe)
    common = {"pid": profile.pid, "tid": 0, "ts": first}
    span: dict[str, Any] = {"pid": "Spans", "tid": "PyTorch Profiler", "ts": first, "dur": last - first}
    return [
        {"ph": "M", "name": "process_name", **common, "args": {"name": label}},
        {"ph": "M", "name": "process_labels", **common, "args": {"labels": "CPU"}},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", **span, "args": {"Op count": 0}},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": last},
    ]


def _events(profile: Profile) -> Iterator[dict[str, Any]]:
    columns = profile.columns
    names, categories, said = profile.name.values, profile.category.values, profile.said.values
    durations = ((columns["end"] - columns["start"]) / 1_000).tolist()
    numbers = [columns[c].tolist() for c in ("name", "category", "said", "thread", "correlation", "seq")]
    rows = zip(*numbers, _us(columns["start"]), durations, strict=True)
    for number, (name, category, says, thread, correlation, seq, ts, dur) in enumerate(rows):
        kind = categories[category]
        args = {"External id": number, **said[says].args}
        if correlation != NONE:
            args["correlation"] = correlation
        if seq != NONE:
            args["Seq"] = seq
        pid = 0 if kind in ON_GPU else profile.pid
        yield {
            "ph": "X", "cat": kind, "name": names[name], "pid": pid, "tid": thread, "ts": ts, "dur": dur, "args": args,
        }  # fmt: skip


def _us(times_ns: Ints) -> list[float]:
    """µs since Kineto's base: to the ns, as a float of that size holds it."""
    values: list[float] = ((times_ns - BASE_NS) / 1_000).tolist()
    return values
