"""Writing a trace: append-only Parquet parts, made visible all at once.

A part is written under a hidden temporary name, synced, and renamed. The parts of one commit carry one id in
their names and count only once its part of `sources` exists, which is renamed last: a writer that dies
leaves nothing half visible, and the next commit removes what it left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailscope.dedupe import Known, find_known
from tailscope.errors import BadInput, TailscopeError
from tailscope.scan import first_line
from tailscope.schema import BY_NAME, SCHEMA_VERSION, SOURCES, Table

PART_ROWS = 131_072
ROW_GROUP_ROWS = 65_536
COMPRESSION: Literal["zstd"] = "zstd"
#: Sources a commit takes at most, so that little is read again after a crash.
COMMIT_SOURCES = 1_000
#: A temporary part of another machine is as good as abandoned after this time.
ABANDONED_S = 86_400

#: A part of ours. The first group is the id of its commit.
PART_NAME = re.compile(r"part-([0-9a-f]{16})-\d{4,}\.parquet")


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
    a table. Raises TailscopeError when the trace cannot be written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._token = secrets.token_hex(4)
        self._parts_written = 0
        self._source = ""
        self._written: Counter[str] = Counter()
        self._own, self._finished = _Pending(), _Pending()
        self._source_rows: dict[str, dict[str, Any]] = {}
        self._stored: dict[str, Stored] = {}
        self._sources_of: dict[Path, frozenset[str]] = {}

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
            with _writable(self.root), _locked(self.root):
                _remove_abandoned(self.root)
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
            with _writable(self.root), _locked(self.root):
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
        ordered = pa.concat_tables(rows.batches).sort_by([(column, "ascending") for column in table.sort])
        name = f".{self._token}-{self._parts_written:04d}-{os.getpid()}-{socket.gethostname()}.tmp"
        part = self.root / table.name / name
        self._parts_written += 1
        with _writable(self.root):
            part.parent.mkdir(exist_ok=True)
            pending.parts.setdefault(table.name, []).append(part)
            _write_part(part, table, ordered)

    def _drop_known(self, table: Table, parts: list[Path], stored: dict[str, Stored]) -> None:
        """Leave out rows that the trace has, and those of sources that another writer stored."""
        known = Known()
        if table.identity:
            with _readable(self.root, table.name):
                others = visible_parts(self.root).get(table.name, [])
                known = find_known(table, parts, others, list(stored))
        for source, count in known.duplicate.items():
            stored[source].rows[table.name] -= count
            stored[source].duplicate += count
        for source, count in known.conflicting.items():
            stored[source].conflicting += count
        lost = len(stored) < len(self._stored)
        for part in parts:
            if lost or part in known.rows:
                rows = pq.ParquetFile(part).read()
                keep = np.array(pc.is_in(rows["source"], pa.array(stored)))
                keep[known.rows.get(part, [])] = False
                _write_part(part, table, rows.filter(keep))

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
        """Rename the parts. Those of `sources`, which make the others count, were added last and come last."""
        try:
            for name, parts in self._finished.parts.items():
                for number, part in enumerate(parts):
                    if pq.read_metadata(part).num_rows:
                        part.rename(part.with_name(f"part-{commit_id}-{number:04d}.parquet"))
                _sync(self.root / name)
                _sync(self.root)
        except BaseException:
            self._remove_orphans()
            raise

    def _committed(self) -> set[str]:
        """Ids of the sources in the trace. A part never changes, so each is read once."""
        visible = visible_parts(self.root, SOURCES.name).get(SOURCES.name, [])
        for part in visible:
            if part not in self._sources_of:
                with _readable(self.root, SOURCES.name):
                    file = pq.ParquetFile(part)
                    named = (
                        file.read(["source"])["source"].to_pylist()
                        if "source" in file.schema_arrow.names
                        else []
                    )
                    self._sources_of[part] = frozenset(source for source in named if source is not None)
        return {source for part in visible for source in self._sources_of[part]}

    def _remove_orphans(self) -> None:
        """Parts that a writer renamed before it died. Called under the lock, so nobody is renaming now."""
        committed = _commits(self.root)
        for part in self.root.glob("*/part-*.parquet"):
            ours = PART_NAME.fullmatch(part.name)
            if ours and ours[1] not in committed:
                part.unlink()


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


def visible_parts(root: Path, only: str = "*") -> dict[str, list[Path]]:
    """Table name -> Parquet files of a trace directory that count; `only` a table, if given.

    A part named after a commit counts if that commit's part of `sources` exists; a part of any other name
    always does. Hidden files and folders, and those that begin with an underscore, do not.
    """
    committed = _commits(root)
    tables: dict[str, list[Path]] = {}
    for folder in sorted(p for p in root.glob(only) if p.is_dir() and not p.name.startswith((".", "_"))):
        parts = []
        for part in sorted(folder.rglob("*.parquet")):
            ours = PART_NAME.fullmatch(part.name)
            hidden = any(name.startswith((".", "_")) for name in part.relative_to(folder).parts)
            if not hidden and (ours[1] in committed if ours else part.is_file()):
                parts.append(part)
        if parts:
            tables[folder.name] = parts
    return tables


def _commits(root: Path) -> set[str]:
    names = (PART_NAME.fullmatch(p.name) for p in root.glob(f"{SOURCES.name}/part-*.parquet"))
    return {name[1] for name in names if name}


def _write_part(part: Path, table: Table, rows: pa.Table) -> None:
    with part.open("wb") as file:
        pq.write_table(
            rows.replace_schema_metadata(part_metadata(table)),
            file,
            compression=COMPRESSION,
            row_group_size=ROW_GROUP_ROWS,
        )
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One commit at a time, so that two writers do not both store the same row."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _writable(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            todo = (
                "no space left on the device. What was stored before is intact; free space and ingest again"
            )
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            todo = "no permission to write there. Choose another -o"
        elif error.errno in (errno.EEXIST, errno.ENOTDIR):
            todo = "exists and is not a trace directory. Choose another -o"
        else:
            todo = f"cannot write: {error.strerror or error}"
        raise TailscopeError(f"{root}: {todo}") from error


@contextlib.contextmanager
def _readable(root: Path, table: str) -> Iterator[None]:
    try:
        yield
    except (duckdb.Error, pa.ArrowException) as error:
        raise BadInput(
            f"cannot be read: {first_line(error)}",
            path=str(root),
            where=f"table {table}",
            todo="Remove the damaged part, or ingest into a new trace",
        ) from error


def _remove_abandoned(root: Path) -> None:
    """Temporary parts of writers that no longer run."""
    for part in root.glob("*/.*.tmp"):
        _, _, pid, host = f"{part.stem}---".split("-", 3)
        ours = host.rstrip("-") == socket.gethostname()
        with contextlib.suppress(FileNotFoundError):
            if pid.isdecimal() and not _runs(int(pid)) if ours else _age_s(part) > ABANDONED_S:
                part.unlink()


def _age_s(part: Path) -> float:
    return time.time() - part.stat().st_mtime


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
