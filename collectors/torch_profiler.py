"""torch profiler traces (Kineto JSON) of one rank each, from vLLM, SGLang or any torch program."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from tailscope.schema import EVENTS, ITERATIONS, PHASES, PROFILES, RANK_EVENTS, Table
from tailscope.source import INT64_MAX, Source

from . import _kineto_names as names
from ._kineto_collectives import Collectives
from ._kineto_json import START, TraceEvents
from ._kineto_spool import NONE, Spool
from ._kineto_timeline import Ints, Timeline

#: Untyped: the stubs of pyarrow know only some of what these functions take.
pc: Any = compute

#: Batches of rows made while others are stored, which is done two at a time.
ROWS_AHEAD = 3
Item = TypeVar("Item")
#: Times from here on are ns since the epoch and not since a base: 2001.
ABSOLUTE_NS = 1_000_000_000_000_000_000
NAMES: Any = pa.array(PHASES)
#: Events further apart than this are not of one profile.
LONGEST_NS = 7 * 86_400_000_000_000


@dataclass(frozen=True)
class Rank:
    """Whose profile it is; None where neither the trace, its name nor the caller says."""

    rank: int | None
    world_size: int | None
    host: str | None
    backend: str | None
    groups: list[tuple[str, list[int]]]
    coordinates: dict[str, int]

    @property
    def columns(self) -> dict[str, Any]:
        """Columns that all rows of the profile share."""
        known = {key: self.coordinates.get(key) for key in ("dp", "pp", "tp", "ep")}
        return {"engine": known["dp"], "rank": self.rank, "host": self.host, **known}


class Lost:
    """Counts kernels whose launch the profile lacks, and launches whose kernels it lacks: before it began, after its end, or
    dropped by the profiler."""

    def __init__(self, spool: Spool) -> None:
        self._launches = spool.launches
        self._seen = np.zeros(len(spool.launches.is_launch), bool)
        self._unlaunched = self._ran = 0

    def see(self, launch: Ints, ran: NDArray[np.bool_]) -> None:
        """`launch`: index of the launch of each event, `ran`: whether the event is work on a GPU."""
        self._seen[launch[launch >= 0]] = True
        self._unlaunched += int(np.sum(ran & (launch < 0)))
        self._ran += int(np.sum(ran))

    def notes(self) -> Iterator[str]:
        if self._unlaunched:
            yield f"{self._unlaunched:,} of {self._ran:,} kernels and copies have no launch in the profile"
        launched = np.unique(self._launches.correlation[self._launches.is_launch])
        ran = np.unique(self._launches.correlation[self._seen])
        unrun = len(np.setdiff1d(launched, ran, assume_unique=True))
        if unrun and self._ran:
            yield f"{unrun:,} of {len(launched):,} launches have no kernel in the profile"


class TorchProfiler:
    name = "torch_profiler"
    version = "1"
    reads = "torch profiler traces in Kineto's JSON, one file a rank: vLLM's and SGLang's /start_profile, torch.profiler."
    tables = (PROFILES, RANK_EVENTS, ITERATIONS, EVENTS)

    def recognises(self, head: bytes, name: str) -> bool:
        if not head.lstrip().startswith(b"{"):
            return False
        # The metadata before the events can be longer than the head.
        return bool(START.search(head)) or (
            b'"schemaVersion"' in head and (b'"deviceProperties"' in head or b'"distributedInfo"' in head)
        )

    def read(self, source: Source) -> Iterator[tuple[Table, pa.Table]]:
        with tempfile.TemporaryDirectory(prefix="tailscope-") as folder:
            spooled = Spool(Path(folder), source.tally, python_stacks=source.options.python_stacks)
            with spooled as spool:
                events = TraceEvents(source)
                if spool.fill(_ahead(events)):
                    yield from _ahead(_rows(source, spool, events.metadata), ROWS_AHEAD)
                else:
                    source.tally.note("the profile holds no ops: no CPU or GPU activity was recorded")


def _ahead(items: Iterable[Item], count: int = 1) -> Iterator[Item]:
    """The same items, the next ones of which are made while one is used: cutting and parsing take a core each, and so
    do making rows and storing them."""
    iterator = iter(items)
    with ThreadPoolExecutor(1) as pool:
        coming = deque(pool.submit(next, iterator, None) for _ in range(count))
        while (item := coming.popleft().result()) is not None:
            coming.append(pool.submit(next, iterator, None))
            yield item


def _rows(source: Source, spool: Spool, metadata: dict[str, Any]) -> Iterator[tuple[Table, pa.Table]]:
    rank = _rank(source, metadata)
    half = (len(spool.starts) - 1) // 2
    middle = int(np.partition(spool.starts, half)[half])
    base = _base_ns(source, metadata, middle)
    believable = max(middle - LONGEST_NS, -base), min(middle + LONGEST_NS, INT64_MAX // 2)
    spool.keep_between(*believable, LONGEST_NS)
    timeline = Timeline(spool)
    if timeline.captures and not timeline.steps:
        source.tally.note("a profile of graph captures: it shows no step of the engine")
    elif not timeline.steps:
        source.tally.note("no step is annotated in the profile")
    collectives = Collectives(spool)
    if timeline.steps:
        yield ITERATIONS, _iterations(rank, timeline, base)
    if timeline.captures:
        yield EVENTS, _captures(rank, timeline, base)
    lost = Lost(spool)
    first, last, count = INT64_MAX, 0, 0
    for batch in spool.rows():
        near = _near(source, batch, *believable)
        if near.num_rows:
            rows = _rank_events(rank, timeline, spool, collectives, lost, base, near)
            first = min(first, pc.min(rows["start_ns"]).as_py())
            last = max(last, pc.max(pc.add(rows["start_ns"], pc.fill_null(rows["duration_ns"], 0))).as_py())
            count += rows.num_rows
            yield RANK_EVENTS, rows
    if not count:
        return
    # Of a graph's capture nothing runs.
    for note in lost.notes() if timeline.steps or not timeline.captures else ():
        source.tally.note(note)
    yield (
        PROFILES,
        PROFILES.batch(
            {
                **{key: [value] for key, value in rank.columns.items()},
                "world_size": [rank.world_size],
                "backend": [rank.backend],
                "groups": [rank.groups],
                "first_ns": [first],
                "last_ns": [last],
                "exported_ns": [names.exported_ns(source.name)],
                "steps": [len(timeline.steps)],
                "captures": [len(timeline.captures)],
                "events": [count],
            }
        ),
    )


def _base_ns(source: Source, metadata: dict[str, Any], middle: int) -> int:
    """What to add to the file's times. Three regimes: ns after a base (torch since 2.2), absolute µs, neither."""
    if middle >= ABSOLUTE_NS:
        return 0
    base = metadata.get("baseTimeNanoseconds")
    if isinstance(base, int) and ABSOLUTE_NS <= base < INT64_MAX // 2:
        source.offset_ns = base
        return base
    source.clock = "profiler"
    source.tally.note("times are not on the wall clock: the trace has no baseTimeNanoseconds")
    return 0


def _near(source: Source, batch: pa.Table, low: int, high: int) -> pa.Table:
    """Events within days of the others, at times that can be."""
    start: Any = batch["start_ns"]
    near = pc.and_(pc.greater_equal(start, low), pc.less_equal(start, high))
    near = pc.and_(near, pc.less_equal(pc.fill_null(batch["duration_ns"], 0), LONGEST_NS))
    kept = batch.filter(near)
    if kept.num_rows < batch.num_rows:
        source.tally.reject("event at an impossible time", count=batch.num_rows - kept.num_rows)
    return kept


def _rank(source: Source, metadata: dict[str, Any]) -> Rank:
    told = metadata.get("distributedInfo")
    told = told if isinstance(told, dict) else {}
    coordinates = names.coordinates_of(source.name)
    stated, named, size = (
        _count(told.get("rank")),
        names.rank_in_name(source.name),
        _count(told.get("world_size")),
    )
    rank = stated
    dp = coordinates.get("dp")
    if rank is not None and dp and size and named == rank and rank < size:
        # A data-parallel rank whose torch world is its own engine's: its rank 0 is another than dp 0's.
        rank += dp * size
    elif rank is None:
        rank = named
        if rank is None:
            rank = source.options.rank
        if rank is None and "async_llm" not in source.name:
            source.tally.note("nothing says which rank this is a profile of: give --rank")
    host = metadata.get("host_name")
    backend = told.get("backend")
    return Rank(
        rank=rank,
        world_size=size,
        host=_text(host),
        backend=_text(backend),
        groups=_groups(told.get("pg_config")),
        coordinates=coordinates,
    )


def _groups(told: Any) -> list[tuple[str, list[int]]]:
    groups = {}
    for group in told if isinstance(told, list) else []:
        ranks = group.get("ranks") if isinstance(group, dict) else None
        name = group.get("pg_name") if isinstance(group, dict) else None
        named = isinstance(name, (str, int))
        if named and isinstance(ranks, list) and all(_count(r) is not None for r in ranks):
            groups[_text(str(name)) or ""] = ranks
    return sorted(groups.items())


def _text(value: Any) -> str | None:
    # JSON may hold half of a surrogate pair, a table may not.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def _iterations(rank: Rank, timeline: Timeline, base: int) -> pa.Table:
    steps = timeline.steps
    return ITERATIONS.batch(
        {
            "engine": rank.columns["engine"],
            "rank": rank.rank,
            "iteration": list(range(len(steps))),
            "start_ns": [base + step.start_ns for step in steps],
            "end_ns": [base + step.end_ns for step in steps],
            "end_basis": "measured",
            "prefill_requests": [step.name.prefill_requests for step in steps],
            "prefill_tokens": [step.name.prefill_tokens for step in steps],
            "decode_requests": [step.name.decode_requests for step in steps],
            "decode_tokens": [step.name.decode_tokens for step in steps],
        }
    )


def _captures(rank: Rank, timeline: Timeline, base: int) -> pa.Table:
    return EVENTS.batch(
        {
            "engine": rank.columns["engine"],
            "rank": rank.rank,
            "time_ns": [base + start for start, _ in timeline.captures],
            "kind": "jit",
            "detail": [f"graph capture: {name[:60]}" for _, name in timeline.captures],
        }
    )


def _rank_events(
    rank: Rank,
    timeline: Timeline,
    spool: Spool,
    collectives: Collectives,
    lost: Lost,
    base: int,
    batch: pa.Table,
) -> pa.Table:
    start, on_gpu = _ints(batch["start_ns"]), np.asarray(batch["on_gpu"])
    launch = spool.launch_of(batch)
    launched = launch >= 0
    annotation = np.asarray(pc.fill_null(pc.equal(batch["category"], "gpu_user_annotation"), False))
    lost.see(launch, on_gpu & ~annotation)
    launch_ns = np.append(spool.launches.start_ns, NONE)[launch]
    step = timeline.step_of(start, launch_ns, on_gpu)
    origin = np.where(launched, launch_ns, start)
    threads = _ints(batch["thread"])
    on_main = threads == (NONE if timeline.main_thread is None else timeline.main_thread)
    part = collectives.of(_ints(batch["number"]))
    enclosed = np.where(on_gpu, launched, on_main) | (part >= 0)
    around_layer, around = timeline.surroundings.of(origin)
    around = np.where(enclosed, around, NONE)
    layer = np.where(enclosed, around_layer, NONE)
    # Micro-batches run in threads of their own. An annotation's twin on the GPU is over what it holds.
    counting = enclosed | (~on_gpu & np.isin(threads, timeline.layers.threads)) | (on_gpu & ~annotation)
    origin_thread = np.append(spool.launches.thread, NONE)[launch]
    origin_thread = np.where(on_gpu, origin_thread, threads)
    counted = timeline.layers.of(start, origin, origin_thread, step, on_gpu, launched)
    layer = np.where(counting & (layer < 0), counted, layer)
    own_layer, own_phase = _ints(batch["layer"]), _ints(batch["phase"])
    layer = np.where(own_layer >= 0, own_layer, layer)
    phase = np.where(own_phase >= 0, own_phase, around)
    # A collective is of the phase around it: an all-gather may be a dispatch.
    phase = np.where(part >= 0, collectives.phase_of(part, around), phase)
    columns = {
        **rank.columns,
        "step": _nullable(step),
        "layer": _nullable(layer),
        "phase": NAMES.take(_nullable(phase)),
        "name": batch["name"],
        "category": batch["category"],
        "stream": pc.coalesce(batch["stream"], batch["thread"]),
        "start_ns": pa.array(start + base),
        "duration_ns": batch["duration_ns"],
        "launch_ns": pa.array(launch_ns + base, mask=~launched),
        "input_dims": batch["input_dims"],
    }
    return RANK_EVENTS.batch({**columns, **collectives.columns(part, batch)})


def _ints(column: Any) -> Ints:
    return np.asarray(pc.fill_null(column, NONE).to_numpy(), np.int64)


def _nullable(values: Ints) -> pa.Array[Any]:
    return pa.array(values, mask=values < 0)


COLLECTOR = TorchProfiler()
