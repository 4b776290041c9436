"""Writing a trace: append-only Parquet parts, made visible all at once.

A part is written under a hidden temporary name, synced, and renamed. The parts of one commit carry one id in
their names and count only once its part of `sources` exists, which is renamed last: a writer that dies
leaves nothing half visible, and the next commit removes what it left.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailscope.dedupe import Known, find_known
from tailscope.layout import (
    commit_of,
    commits,
    dropped,
    locked,
    part_name,
    readable,
    remove_abandoned,
    sync,
    temporary_name,
    visible_parts,
    writable,
)
from tailscope.schema import BY_NAME, SCHEMA_VERSION, SOURCES, Table

PART_ROWS = 131_072
ROW_GROUP_ROWS = 65_536
COMPRESSION: Literal["zstd"] = "zstd"
#: Sources a commit takes at most, so that little is read again after a crash.
COMMIT_SOURCES = 1_000


def part_metadata(table: Table) -> dict[str, str]:
    return {"tailscope.table": table.name, "tailscope.schema_version": str(SCHEMA_VERSION)}


@dataclass
class Stored:
    """What was stored of a source, and what was found stored already."""

    rows: dict[str, int] = field(default_factory=dict)
    duplicate: int = 0
    conflicting: int = 0


@dataclass
class _Rows:
    """Rows of one table, not yet a part."""

    table: Table
    batches: list[pa.Table] = field(default_factory=list)
    count: int = 0


@dataclass
class _Pending:
    """Rows and temporary parts that wait for a commit, by table."""

    rows: dict[str, _Rows] = field(default_factory=dict)
    parts: dict[str, list[Path]] = field(default_factory=dict)
    count: int = 0

    def remove(self) -> None:
        for part in [p for parts in self.parts.values() for p in parts]:
            part.unlink(missing_ok=True)
        self.rows, self.parts, self.count = {}, {}, 0


class TraceWriter:
    """Adds sources to a trace: begin, write, finish or abandon each; commit when `full` and at the end.

    Use as a context manager; what is not committed does not stay. Memory is bounded by some PART_ROWS rows
    a table. Parts lie in the folder `partition` of each table, and rows are known only from that one and those of the
    names in `beside`; without, anywhere. Raises TailscopeError when the trace cannot be written.
    """

    def __init__(self, root: Path, partition: str = "", beside: Sequence[str] = ()) -> None:
        self.root = root
        self._partition, self._near = partition, {partition, *beside} if partition else set()
        self._token = secrets.token_hex(4)
        self._parts_written = 0
        self._source = ""
        self._written: Counter[str] = Counter()
        self._own, self._finished = _Pending(), _Pending()
        self._source_rows: dict[str, dict[str, Any]] = {}
        self._stored: dict[str, Stored] = {}
        self._sources_of: dict[Path, frozenset[str | None]] = {}

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: TracebackType | type[BaseException] | BaseException | None) -> None:
        self.abandon()
        self._forget()

    def knows(self, source_id: str) -> bool:
        """Whether the trace, or what waits for the commit, has the source."""
        return source_id in self._source_rows or source_id in self._committed()

    def begin(self, source_id: str) -> None:
        """Start a source; its id is 16 hex digits."""
        if not self._source:
            with writable(self.root), locked(self.root):
                remove_abandoned(self.root)
        self._source = source_id

    def write(self, table: Table, rows: pa.Table) -> None:
        """Append rows of exactly `table.arrow`; `source` is filled in here."""
        if not rows.num_rows:
            return
        index = rows.schema.get_field_index("source")
        rows = rows.set_column(index, "source", pa.repeat(pa.scalar(self._source), rows.num_rows))
        self._written[table.name] += rows.num_rows
        self._add(self._own, table, rows)

    def abandon(self) -> None:
        """Forget what was written of the source."""
        self._own.remove()
        self._written.clear()

    def finish(self, source_row: Mapping[str, Any]) -> None:
        """The source is complete. `source_row` is its row of `sources`, without counts of stored rows."""
        try:
            for name, parts in self._own.parts.items():
                self._finished.parts.setdefault(name, []).extend(parts)
            own, self._own = self._own, _Pending()
            for rows in own.rows.values():
                for batch in rows.batches:
                    self._add(self._finished, rows.table, batch)
        except BaseException:
            self._forget()
            raise
        self._source_rows[self._source] = dict(source_row, source=self._source)
        self._stored[self._source] = Stored(dict(self._written))
        self._finished.count += self._written.total()
        self._written.clear()

    @property
    def full(self) -> bool:
        """Whether enough was finished to be worth a commit."""
        return len(self._stored) >= COMMIT_SOURCES or self._finished.count >= PART_ROWS

    def commit(self) -> dict[str, Stored]:
        """Make the finished sources visible: id -> what was stored.

        One that another writer stored in the meantime is left out and not in the result.
        """
        if not self._stored:
            return {}
        try:
            for rows in list(self._finished.rows.values()):
                self._flush(self._finished, rows)
            with writable(self.root), locked(self.root):
                committed = self._committed()
                stored = {source: s for source, s in self._stored.items() if source not in committed}
                if stored:
                    self._remove_orphans()
                    for name, parts in self._finished.parts.items():
                        self._drop_known(BY_NAME[name], parts, stored)
                    self._add_source_rows(stored)
                    self._publish(commit_id=next(iter(stored)))
        finally:
            self._forget()
        return stored

    def _forget(self) -> None:
        """Start anew; temporary parts that were not published go."""
        self._finished.remove()
        self._source_rows, self._stored = {}, {}

    def _add(self, pending: _Pending, table: Table, batch: pa.Table) -> None:
        rows = pending.rows.setdefault(table.name, _Rows(table))
        rows.batches.append(batch)
        rows.count += batch.num_rows
        if rows.count >= PART_ROWS:
            self._flush(pending, rows)

    def _flush(self, pending: _Pending, rows: _Rows) -> None:
        table = rows.table
        pending.rows.pop(table.name, None)
        unordered = pa.concat_tables(rows.batches)
        # A key that is the same in all rows only costs time.
        keys = [key for key in table.sort if _varies(unordered[key])] or [table.sort[-1]]
        ordered = unordered.sort_by([(key, "ascending") for key in keys])
        folder = self.root / table.name / self._partition
        part = folder / temporary_name(self._token, self._parts_written)
        self._parts_written += 1
        with writable(self.root):
            folder.mkdir(parents=True, exist_ok=True)
            pending.parts.setdefault(table.name, []).append(part)
            write_part(part, table, ordered)

    def _drop_known(self, table: Table, parts: list[Path], stored: dict[str, Stored]) -> None:
        """Leave out rows that the trace has, and those of sources that another writer stored."""
        known = Known()
        if table.identity:
            with readable(self.root, table.name):
                others = self._visible(table)
                known = find_known(table, parts, others, list(stored))
        for source, count in known.duplicate.items():
            stored[source].rows[table.name] -= count
            stored[source].duplicate += count
        for source, count in known.conflicting.items():
            stored[source].conflicting += count
        lost = len(stored) < len(self._stored)
        for part in parts:
            if lost or part in known.keep:
                rows = pq.ParquetFile(part).read()
                keep = np.array(pc.is_in(rows["source"], pa.array(stored)))
                # Only rows of `stored` sources were judged.
                keep[keep] = known.keep.get(part, True)
                write_part(part, table, rows.filter(keep))

    def _add_source_rows(self, stored: dict[str, Stored]) -> None:
        rows = []
        for source, counts in stored.items():
            row = {
                "rows": sum(counts.rows.values()),
                "rows_duplicate": counts.duplicate,
                "rows_conflicting": counts.conflicting,
            }
            rows.append(self._source_rows[source] | row)
        names = {name for row in rows for name in row}
        batch = SOURCES.batch({name: [row.get(name) for row in rows] for name in names})
        self._flush(self._finished, _Rows(SOURCES, [batch]))

    def _publish(self, commit_id: str) -> None:
        """Rename the parts. Those of `sources`, which make the others count, were added last."""
        try:
            for name, parts in self._finished.parts.items():
                for number, part in enumerate(parts):
                    if pq.read_metadata(part).num_rows:
                        part.rename(part.with_name(part_name(commit_id, number)))
                sync(self.root / name / self._partition)
                sync(self.root / name)
                sync(self.root)
        except BaseException:
            self._remove_orphans()
            raise

    def _committed(self) -> set[str | None]:
        """Ids of the sources in the trace. A part never changes, so each is read once."""
        visible = self._visible(SOURCES)
        for part in visible:
            if part not in self._sources_of:
                with readable(self.root, SOURCES.name):
                    file = pq.ParquetFile(part)
                    named = (
                        file.read(["source"])["source"].to_pylist()
                        if "source" in file.schema_arrow.names
                        else []
                    )
                    self._sources_of[part] = frozenset(source for source in named if source is not None)
        return {source for part in visible for source in self._sources_of[part]}

    def _visible(self, table: Table) -> list[Path]:
        parts = visible_parts(self.root, table.name).get(table.name, [])
        return [part for part in parts if part.parent.name in self._near] if self._near else parts

    def _remove_orphans(self) -> None:
        """Parts that a writer renamed before it died. Called under the lock, so nobody is renaming now."""
        committed = commits(self.root) | dropped(self.root)
        for part in self.root.glob("*/**/part-*.parquet"):
            ours = commit_of(part)
            if ours and ours not in committed:
                part.unlink()


class Placement:
    """Says which instance rows belong to, and remembers which ones the source named and when it was."""

    def __init__(self, given: str | None, folder: str) -> None:
        self.given, self._folder = given, folder
        self.named: set[str] = {given} if given else set()
        self.first_ns: int | None = None
        self.last_ns: int | None = None

    def place(self, table: Table, rows: pa.Table) -> pa.Table:
        index = rows.schema.get_field_index("instance")
        instances: Any = rows.column(index)
        if self.given:
            instances = pa.repeat(pa.scalar(self.given), rows.num_rows)
        else:
            self.named.update(v for v in instances.unique().to_pylist() if v is not None)
            instances = instances.fill_null(self._folder)
        if table.time:
            times: Any = pc.min_max(rows[table.time])
            low, high = times["min"].as_py(), times["max"].as_py()
            if low is not None:
                self.first_ns = low if self.first_ns is None else min(low, self.first_ns)
                self.last_ns = high if self.last_ns is None else max(high, self.last_ns)
        return rows.set_column(index, "instance", instances)


class SourceWriter:
    """Adds one source to a trace, by itself. Use as a context manager; without `commit` nothing stays."""

    def __init__(self, root: Path, source_id: str) -> None:
        self._writer, self._source_id = TraceWriter(root), source_id
        self._writer.begin(source_id)
        self.write = self._writer.write

    def __enter__(self) -> SourceWriter:
        return self

    def __exit__(self, *_: TracebackType | type[BaseException] | BaseException | None) -> None:
        self._writer.__exit__()

    def commit(self, source_row: Mapping[str, Any]) -> Stored:
        """Make the source visible. Nothing is stored of one that the trace has."""
        self._writer.finish(source_row)
        return self._writer.commit().get(self._source_id, Stored())


def _varies(column: pa.ChunkedArray[Any]) -> bool:
    bounds: Any = pc.min_max(column)
    return bool(bounds["min"].as_py() != bounds["max"].as_py() or 0 < column.null_count < len(column))


def write_part(part: Path, table: Table, rows: pa.Table) -> None:
    """Write rows as a Parquet file of the table, and sync it."""
    with part.open("wb") as file:
        pq.write_table(
            rows.replace_schema_metadata(part_metadata(table)),
            file,
            compression=COMPRESSION,
            row_group_size=ROW_GROUP_ROWS,
        )
        file.flush()
        os.fsync(file.fileno())
