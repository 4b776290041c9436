"""The trace of a running server: segments of the journal become parts, small parts become large ones, old ones go.

All of it runs in a process of its own, which can die at any point: a segment is removed after its rows are committed, and
one that was committed already is known by its name.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from tailscope.errors import TailscopeError
from tailscope.layout import (
    PARTITION,
    commit_of,
    drop,
    locked,
    part_name,
    partition_of,
    remove_abandoned,
    remove_dropped,
    sync,
    temporary_name,
    visible_parts,
    writable,
)
from tailscope.live.journal import Damaged, Segment, segments
from tailscope.model import request_key
from tailscope.parts import COMPRESSION, ROW_GROUP_ROWS, Placement, TraceWriter, part_metadata, write_part
from tailscope.scan import connect, listed, quote
from tailscope.schema import BY_NAME, SOURCES, Table
from tailscope.source import Tally

#: Rows that name no instance are of the folder, as those of files are.
FOLDER = "live"
HOUR_S = 3600
#: So many commits of the hour are made one; when the hour has passed, all of it is. A row is written three times at most.
MANY_COMMITS = 30
#: Files that no longer count stay for those who read them still.
GRACE_S = 600.0
#: Memory of the queries that put parts together.
MEMORY = "512MB"


@dataclass(frozen=True)
class Kept:
    """What one round did."""

    segments: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    duplicates: int = 0
    partitions_merged: int = 0
    partitions_dropped: int = 0
    #: Segments that could not be read to their end, and why.
    damaged: tuple[str, ...] = ()
    trace_bytes: int = 0
    trace_parts: int = 0


#: Why a round can fail, though the next one may not.
FAILURES = (TailscopeError, OSError, duckdb.Error, pa.ArrowException)


class Keeper:
    """Keeps the trace `root` from the journal in `journal`; `kinds` says which collector the rows of a journal are of."""

    def __init__(
        self,
        root: Path,
        journal: Path,
        kinds: dict[str, tuple[str, str]],
        *,
        most_age_s: float | None = None,
        most_bytes: int | None = None,
        many_commits: int = MANY_COMMITS,
        grace_s: float = GRACE_S,
    ) -> None:
        self._root, self._journal, self._kinds = root, journal, kinds
        self._most_age_s, self._most_bytes = most_age_s, most_bytes
        self._many_commits, self._grace_s = many_commits, grace_s
        self._damaged: list[str] = []
        #: Commits made of others.
        self._merged: set[str] = set()

    def round(self) -> Kept:
        """Do what there is to do. Raises TailscopeError where the trace cannot be written; nothing is lost by that."""
        rows: Counter[str] = Counter()
        duplicates = done = 0
        self._damaged = []
        for partition, group in _by_partition(segments(self._journal)):
            stored, duplicate = self._commit(partition, group)
            rows += stored
            duplicates += duplicate
            done += len(group)
        held = _held(self._root)
        gone = self._retain(held)
        to_merge = self._to_merge({name: part for name, part in held.items() if name not in gone})
        for partition, names in to_merge:
            self._merge(partition, names)
        with writable(self._root), locked(self._root):
            remove_dropped(self._root, self._grace_s)
        if gone or to_merge:
            held = _held(self._root)
        size, parts = sum(p.bytes for p in held.values()), sum(p.parts for p in held.values())
        return Kept(done, dict(rows), duplicates, len(to_merge), len(gone), tuple(self._damaged), size, parts)

    # -- from the journal ----------------------------------------------------------------------

    def _commit(self, partition: str, group: Sequence[Segment]) -> tuple[Counter[str], int]:
        before = partition_of(group[0].created_s - HOUR_S)
        rows: Counter[str] = Counter()
        duplicates = 0
        damaged: dict[Segment, str] = {}
        with TraceWriter(self._root, partition, [before]) as writer:
            for segment in group:
                source_id = _source_id(segment)
                if writer.knows(source_id):
                    continue
                if segment.name not in self._kinds:
                    damaged[segment] = "is no journal of spans or pages"
                    continue
                writer.begin(source_id)
                source = _SourceRow(*self._kinds[segment.name], segment)
                try:
                    for table, batch, tally in segment.frames():
                        writer.write(table, source.place(table, batch, tally))
                except Damaged as why:
                    damaged[segment] = str(why)
                except FileNotFoundError:
                    writer.abandon()  # somebody removed it
                    continue
                if source.says_something:
                    writer.finish(source.row())
                else:
                    writer.abandon()
            for stored in writer.commit().values():
                rows.update(stored.rows)
                duplicates += stored.duplicate
        for segment in group:
            if segment in damaged:
                aside = segment.set_aside()
                self._damaged.append(f"{aside}: {damaged[segment]}; what came before is kept")
            else:
                segment.path.unlink(missing_ok=True)
        return rows, duplicates

    # -- together ------------------------------------------------------------------------------

    def _to_merge(self, held: Mapping[str, _Held]) -> list[tuple[str, list[str]]]:
        """Partitions, and the commits in them that are to be one."""
        now = partition_of(time.time())
        found = []
        for partition, part in held.items():
            small = part.commits - self._merged
            if partition < now and len(part.commits) > 1:
                found.append((partition, sorted(part.commits)))
            elif len(small) >= self._many_commits:
                found.append((partition, sorted(small)))
        return found

    def _merge(self, partition: str, names: Sequence[str]) -> None:
        """Make commits of a partition one. Their rows stay the same, but for the source they name."""
        commit_id = request_key(partition, *names)
        written: list[tuple[Path, Path]] = []
        try:
            self._write_and_publish(partition, names, commit_id, written)
        except BaseException:
            # The disk may be full: what was written of it would stay as long as this process runs.
            for temporary, _ in written:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
            raise
        self._merged.add(commit_id)

    def _write_and_publish(
        self, partition: str, names: Sequence[str], commit_id: str, written: list[tuple[Path, Path]]
    ) -> None:
        with writable(self._root):
            # One that died here left hidden files.
            remove_abandoned(self._root)
            sources = pa.concat_tables(
                [pq.read_table(p, partitioning=None) for p in self._parts(SOURCES, partition, names)],
                promote_options="default",
            ).to_pylist()
            # Rows of one kind become one, named anew.
            renamed = {row["source"]: request_key(commit_id, row["path"]) for row in sources}
            for number, table in enumerate(sorted(BY_NAME.values(), key=lambda table: table is SOURCES)):
                parts = self._parts(table, partition, names)
                if not parts:
                    continue
                temporary = parts[0].parent / temporary_name(commit_id, number)
                written.append((temporary, parts[0].parent / part_name(commit_id, 0)))
                if table is SOURCES:
                    _write_sources(sources, renamed, temporary)
                else:
                    _write_merged(table, parts, renamed, temporary)
                    sync(temporary)
            with locked(self._root):
                drop(self._root, names, by=commit_id)
                # With the part of `sources`, the last one, the new commit counts, and the old ones do not.
                for temporary, final in written:
                    temporary.rename(final)
                    sync(final.parent)

    def _parts(self, table: Table, partition: str, names: Sequence[str]) -> list[Path]:
        visible = visible_parts(self._root, table.name).get(table.name, [])
        return [p for p in visible if p.parent.name == partition and commit_of(p) in names]

    # -- away ----------------------------------------------------------------------------------

    def _retain(self, held: Mapping[str, _Held]) -> set[str]:
        """Take out the partitions that are too old, and the oldest while all are too large; says which."""
        total = sum(part.bytes for part in held.values())
        current = partition_of(time.time())
        oldest = "" if self._most_age_s is None else partition_of(time.time() - self._most_age_s)
        gone: set[str] = set()
        for partition in sorted(name for name, part in held.items() if part.commits):
            too_large = self._most_bytes is not None and total > self._most_bytes
            if partition >= current or not (partition < oldest or too_large):
                break
            gone.add(partition)
            total -= held[partition].bytes
        if gone:
            with writable(self._root), locked(self._root):
                drop(self._root, [name for partition in gone for name in held[partition].commits])
        return gone


class _SourceRow:
    """The row of `sources` of a segment, put together while its frames are read."""

    def __init__(self, kind: str, version: str, segment: Segment) -> None:
        self._kind, self._version, self._segment = kind, version, segment
        self._tally = Tally()
        self._placed = Placement(None, FOLDER)
        self._rows = 0

    @property
    def says_something(self) -> bool:
        """Whether it holds rows or counts of more than unchanged samples."""
        return bool(self._rows or self._tally.rejected or self._tally.blanked)

    def place(self, table: Table, rows: pa.Table, tally: Tally) -> pa.Table:
        self._tally.add(tally)
        self._rows += rows.num_rows
        return self._placed.place(table, rows)

    def row(self) -> dict[str, Any]:
        return {
            "instance": FOLDER,
            "kind": self._kind,
            "path": f"{FOLDER}/{self._segment.name}",
            "content_hash": _source_id(self._segment),
            "collector": self._kind,
            "version": self._version,
            "clock": "wall",
            **self._tally.columns,
            "instances": sorted(self._placed.named),
            "folder": FOLDER,
            "first_ns": self._placed.first_ns,
            "last_ns": self._placed.last_ns,
        }


def _source_id(segment: Segment) -> str:
    return request_key(segment.path.stem)


def _by_partition(found: Iterable[Segment]) -> list[tuple[str, list[Segment]]]:
    groups: dict[str, list[Segment]] = {}
    for segment in found:
        groups.setdefault(partition_of(segment.created_s), []).append(segment)
    return list(groups.items())


@dataclass
class _Held:
    """What a partition holds; that of the empty name is what lies in none."""

    commits: set[str] = field(default_factory=set)
    bytes: int = 0
    parts: int = 0


def _held(root: Path) -> dict[str, _Held]:
    found: dict[str, _Held] = {}
    for table, parts in visible_parts(root).items():
        for part in parts:
            name = part.parent.name
            held = found.setdefault(name if PARTITION.fullmatch(name) else "", _Held())
            held.bytes += part.stat().st_size
            held.parts += 1
            if table == SOURCES.name and held is not found.get("") and (commit_id := commit_of(part)):
                held.commits.add(commit_id)
    return found


def _write_merged(table: Table, parts: Sequence[Path], renamed: dict[str, str], target: Path) -> None:
    """One part of many, sorted; spills where it does not fit into memory."""
    metadata = ", ".join(f"'{key}': {quote(value)}" for key, value in part_metadata(table).items())
    order = ", ".join(f'"{key}"' for key in table.sort)
    config: dict[str, Any] = {
        "threads": 1,
        "memory_limit": MEMORY,
        "temp_directory": str(target.parent / f"{target.name}.spill"),
    }
    names = pa.table({"old": list(renamed), "new": list(renamed.values())})
    with closing(connect(config)) as con:
        con.register("names", names)
        con.execute(
            f"COPY (SELECT part.* REPLACE (new AS source) FROM read_parquet({listed(map(str, parts))}, union_by_name=true, "
            f"hive_partitioning=false) AS part LEFT JOIN names ON source = old ORDER BY {order}) TO {quote(str(target))} "
            f"(FORMAT parquet, COMPRESSION {COMPRESSION}, ROW_GROUP_SIZE {ROW_GROUP_ROWS}, KV_METADATA {{{metadata}}})"
        )


def _write_sources(rows: Sequence[dict[str, Any]], renamed: dict[str, str], target: Path) -> None:
    """Rows of `sources` that get one name become one, with their counts added up."""
    merged: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = renamed[row["source"]]
        merged[name] = _added(merged[name], row) if name in merged else dict(row)
        merged[name]["source"] = merged[name]["content_hash"] = name
    columns = {column: [row.get(column) for row in merged.values()] for column in SOURCES.arrow.names}
    write_part(target, SOURCES, SOURCES.batch(columns))


def _added(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    both = dict(a)
    for name, value in b.items():
        if name.endswith("_reasons"):
            both[name] = sorted((Counter(dict(a[name] or ())) + Counter(dict(value or ()))).items())
        elif name in ("notes", "instances"):
            both[name] = sorted({*(a[name] or ()), *(value or ())})
        elif name in ("first_ns", "last_ns"):
            known = [v for v in (a[name], value) if v is not None]
            both[name] = (min if name == "first_ns" else max)(known) if known else None
        elif name.startswith(("rows", "values")):
            both[name] = (a[name] or 0) + (value or 0)
    return both
