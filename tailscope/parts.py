"""Writing a trace: append-only Parquet parts, one set a source, made visible all at once.

A part is written under a hidden temporary name, synced, and renamed. A source's parts carry its id in their
names and count only once its row in `sources` exists, which is renamed last: a writer that dies leaves
nothing half visible, and reading the same source again replaces what it left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from tailscope.errors import TailscopeError
from tailscope.schema import REQUESTS, SCHEMA_VERSION, SOURCES, Table

PART_ROWS = 131_072
ROW_GROUP_ROWS = 65_536
COMPRESSION = "zstd"


def part_metadata(table: Table) -> dict[str, str]:
    return {"tailscope.table": table.name, "tailscope.schema_version": str(SCHEMA_VERSION)}


@dataclass
class Stored:
    """What a commit stored, and what it found stored already."""

    rows: dict[str, int] = field(default_factory=dict)
    duplicate: int = 0
    conflicting: int = 0


class SourceWriter:
    """Writes the rows of one source. Use as a context manager; without `commit` nothing stays.

    Memory is bounded by PART_ROWS rows a table. Raises TailscopeError when the target cannot be written.
    """

    def __init__(self, root: Path, source_id: str) -> None:
        self.root, self.source_id = root, source_id
        self._buffers: dict[str, list[pa.Table]] = {}
        self._parts: dict[str, list[Path]] = {}
        self._tables: dict[str, Table] = {}
        with _writable(root):
            root.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(root)

    def __enter__(self) -> SourceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for part in [p for parts in self._parts.values() for p in parts]:
            part.unlink(missing_ok=True)

    def write(self, table: Table, rows: pa.Table) -> None:
        """Append rows of exactly `table.arrow`; `source` is filled in here."""
        if not rows.num_rows:
            return
        index = rows.schema.get_field_index("source")
        rows = rows.set_column(index, "source", pa.repeat(pa.scalar(self.source_id), rows.num_rows))
        self._tables[table.name] = table
        buffer = self._buffers.setdefault(table.name, [])
        buffer.append(rows)
        if sum(b.num_rows for b in buffer) >= PART_ROWS:
            self._flush(table)

    def commit(self, source_row: dict[str, Any]) -> Stored:
        """Make the source visible. `source_row` is its row of `sources`, counts of stored rows not yet in it."""
        for table in list(self._tables.values()):
            self._flush(table)
        stored = Stored()
        with _writable(self.root), _locked(self.root):
            self._remove_orphans()
            for name, table in self._tables.items():
                if table.identity:
                    self._drop_known(table, stored)
                stored.rows[name] = sum(pq.read_metadata(p).num_rows for p in self._parts[name])
            for name in self._tables:
                self._publish(name)
            row = dict(
                source_row,
                source=self.source_id,
                rows=sum(stored.rows.values()),
                rows_duplicate=stored.duplicate,
                rows_conflicting=stored.conflicting,
            )
            self.write(SOURCES, SOURCES.batch({k: [v] for k, v in row.items()}))
            self._flush(SOURCES)
            self._publish(SOURCES.name)
        return stored

    def _flush(self, table: Table) -> None:
        buffer = self._buffers.pop(table.name, [])
        if not buffer:
            return
        rows = pa.concat_tables(buffer)
        rows = rows.sort_by([(column, "ascending") for column in table.sort])
        parts = self._parts.setdefault(table.name, [])
        part = self.root / table.name / f".{self.source_id}-{len(parts):04d}-{os.getpid()}.tmp"
        with _writable(self.root):
            part.parent.mkdir(exist_ok=True)
            parts.append(part)
            _write_part(part, table, rows)

    def _publish(self, name: str) -> None:
        for number, part in enumerate(self._parts.pop(name, [])):
            if pq.read_metadata(part).num_rows == 0:
                part.unlink()
                continue
            part.rename(part.with_name(f"part-{self.source_id}-{number:04d}.parquet"))
        _sync(self.root / name)

    def _remove_orphans(self) -> None:
        """Parts an earlier writer of this source renamed before it died."""
        for part in self.root.glob(f"*/part-{self.source_id}-*.parquet"):
            part.unlink()

    def _drop_known(self, table: Table, stored: Stored) -> None:
        """Leave out rows that other sources gave already, equal in all but their provenance."""
        new = [str(p) for p in self._parts[table.name]]
        known = [str(p) for p in visible_parts(self.root).get(table.name, [])]
        keyed = table is REQUESTS
        if not known and not keyed:
            return
        with duckdb.connect(config={"threads": 2}) as con:
            content = ", ".join(f'"{c.name}"' for c in table.columns if c.name not in table.provenance)
            key = "request_key" if keyed else "NULL"
            con.execute(
                f"CREATE TEMP TABLE fresh AS SELECT filename, file_row_number AS row, {key} AS key, "
                f"hash({content}) AS content FROM read_parquet($new, filename=true, file_row_number=true)",
                {"new": new},
            )
            con.execute("CREATE TEMP TABLE stored(key VARCHAR, content UBIGINT)")
            if known:
                within = "true"
                if table.time:
                    # Rows of other times cannot be equal, and row-group statistics skip them.
                    low, high = _range(con, new, table.time)
                    within = f"{table.time} IS NULL OR {table.time} BETWEEN {low} AND {high}"
                con.execute(
                    f"INSERT INTO stored SELECT {key}, hash({content}) "
                    f"FROM read_parquet($known, union_by_name=true) WHERE {within}",
                    {"known": known},
                )
            con.execute(
                "CREATE TEMP TABLE judged AS SELECT filename, row, "
                "content IN (SELECT content FROM stored) "
                "OR (key IS NOT NULL AND row_number() OVER (PARTITION BY key, content ORDER BY filename, row) > 1)"
                " AS known, key, content FROM fresh"
            )
            if keyed:
                stored.conflicting += _count(
                    con,
                    "WITH kept AS (SELECT key, content FROM judged WHERE NOT known), "
                    "contents AS (SELECT key, count(DISTINCT content) AS n "
                    "FROM (SELECT key, content FROM kept UNION ALL SELECT * FROM stored) GROUP BY key) "
                    "SELECT count(*) FROM kept JOIN contents USING (key) WHERE n > 1",
                )
            stored.duplicate += _count(con, "SELECT count(*) FROM judged WHERE known")
            for part in self._parts[table.name]:
                keep = con.sql(
                    "SELECT NOT known AS keep FROM judged WHERE filename = $part ORDER BY row",
                    params={"part": str(part)},
                ).to_arrow_table()["keep"]
                if not all(keep.to_pylist()):
                    _write_part(part, table, pq.read_table(part, schema=table.arrow).filter(keep))


def visible_parts(root: Path) -> dict[str, list[Path]]:
    """Table name -> Parquet files of a trace directory that count.

    A part named after a source counts if the source's row exists; a part of any other name always does.
    """
    committed = {p.name.split("-")[1] for p in root.glob(f"{SOURCES.name}/part-*-*.parquet")}
    tables: dict[str, list[Path]] = {}
    for folder in sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")):
        parts = [
            p
            for p in sorted(folder.rglob("*.parquet"))
            if not p.name.startswith(".")
            and not (p.name.startswith("part-") and p.name.count("-") == 2 and p.name.split("-")[1] not in committed)
        ]
        if parts:
            tables[folder.name] = parts
    return tables


def is_known(root: Path, source_id: str) -> bool:
    return any(root.glob(f"{SOURCES.name}/part-{source_id}-*.parquet"))


def _write_part(part: Path, table: Table, rows: pa.Table) -> None:
    metadata = {**(rows.schema.metadata or {}), **{k.encode(): v.encode() for k, v in part_metadata(table).items()}}
    with part.open("wb") as file:
        pq.write_table(
            rows.replace_schema_metadata(metadata), file, compression=COMPRESSION, row_group_size=ROW_GROUP_ROWS
        )
        file.flush()
        os.fsync(file.fileno())


def _range(con: duckdb.DuckDBPyConnection, files: list[str], column: str) -> tuple[int, int]:
    sql = f"SELECT coalesce(min({column}), 0), coalesce(max({column}), 0) FROM read_parquet($files)"
    [(low, high)] = con.execute(sql, {"files": files}).fetchall()
    return int(low), int(high)


def _count(con: duckdb.DuckDBPyConnection, sql: str) -> int:
    [(count,)] = con.execute(sql).fetchall()
    return int(count)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One commit at a time, so that two writers do not both store the same row."""
    with (root / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _writable(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            todo = "no space left on the device; nothing of this source was stored. Free space and ingest it again"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            todo = "no permission to write there. Choose another -o"
        elif error.errno in (errno.EEXIST, errno.ENOTDIR):
            todo = "exists and is not a trace directory. Choose another -o"
        else:
            todo = f"cannot write: {error.strerror or error}"
        raise TailscopeError(f"{root}: {todo}") from error


def _remove_abandoned(root: Path) -> None:
    """Temporary parts of writers on this machine that no longer run."""
    for part in root.glob("*/.*.tmp"):
        pid = part.stem.rsplit("-", 1)[-1]
        if pid.isdecimal() and not _runs(int(pid)):
            part.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
