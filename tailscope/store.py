"""Reading a trace: a directory, a Parquet file with one table, or a glob, as DuckDB views."""

from __future__ import annotations

import dataclasses
import glob
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tailscope.errors import BadInput, UsageError
from tailscope.layout import PARTITION, partition_of, visible_parts
from tailscope.scan import connect, first_line, identifier, quote, scan, types_of
from tailscope.schema import BY_NAME, SCHEMA_VERSION, TABLES, Table

#: How far ahead of the one that wrote it down the clock of a row may be.
AHEAD_S = 3600.0


def schema_of(columns: Mapping[str, pa.DataType]) -> pa.Schema:
    """A schema from names and types, for the rows of `Trace.create` and `Trace.insert`."""
    return pa.schema(list(columns.items()))


_OF_ANNOTATION: Mapping[str, pa.DataType] = {
    "bool": pa.bool_(),
    "str": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "list[str]": pa.list_(pa.string()),
}


def schema_of_rows(kind: type[Any]) -> pa.Schema:
    """The schema of a dataclass's fields, for rows made by `dataclasses.asdict`. Raises KeyError for a type no column has."""
    return schema_of(
        {f.name: _OF_ANNOTATION[str(f.type).removesuffix(" | None")] for f in dataclasses.fields(kind)}
    )


def floats(column: Any) -> NDArray[np.float64]:
    """A column as `fetchnumpy` gives it as float64, NULL as NaN."""
    return np.asarray(np.ma.filled(np.ma.asarray(column).astype(np.float64), np.nan))


def memory_bytes(con: duckdb.DuckDBPyConnection) -> float:
    [(text,)] = con.execute("SELECT current_setting('memory_limit')").fetchall()
    number, unit = str(text).split()
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    return float(number) * units.get(unit, math.inf)


class Trace:
    """A trace opened for reading.

    Each declared table is an attribute, a DuckDB relation with `.df()` and `.arrow()`: `trace.requests`.
    Each is on a connection of its own, so that an unread result blocks no other; `trace.connection` joins.
    A table the trace lacks has no rows, a column it lacks is NULL, columns we do not know are kept.
    `memory_limit` is DuckDB's, for example "4GB"; beyond it, queries spill to a temporary folder. Partitions that were
    written before `since_ns`, and so hold nothing that came later, are left out.

    Raises UsageError when there is nothing at `path`, BadInput when a file is no Parquet.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        memory_limit: str | None = None,
        threads: int | None = None,
        since_ns: int | None = None,
    ) -> None:
        self.path = str(path)
        self.warnings: list[str] = []
        self.files = _find(self.path, since_ns)
        self._cursors: list[duckdb.DuckDBPyConnection] = []
        self._spill = tempfile.mkdtemp(prefix="tailscope-")
        config: dict[str, Any] = {"temp_directory": self._spill, "preserve_insertion_order": False}
        if memory_limit:
            config["memory_limit"] = memory_limit
        if threads:
            config["threads"] = threads
        try:
            self.connection = connect(config)
        except duckdb.Error as error:
            shutil.rmtree(self._spill, ignore_errors=True)
            what = f"--memory-limit {memory_limit!r}" if memory_limit else f"threads {threads}"
            raise UsageError(f"{what}: {first_line(error)}") from error
        self._aliases: dict[str, str] = {}
        try:
            self._create_views()
            self._aliases = self._instance_aliases()
            if self._aliases:
                self._create_views()
            self._check_version()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: TracebackType | type[BaseException] | BaseException | None) -> None:
        self.close()

    def close(self) -> None:
        for cursor in self._cursors:
            cursor.close()
        self.connection.close()
        shutil.rmtree(self._spill, ignore_errors=True)

    def __getattr__(self, name: str) -> duckdb.DuckDBPyRelation:
        if name in BY_NAME:
            self._cursors.append(self.connection.cursor())
            return self._cursors[-1].view(name)
        raise AttributeError(f"a trace has no table {name!r}; tables are {', '.join(BY_NAME)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *BY_NAME]

    def has(self, table: str) -> bool:
        """Whether the trace has rows of the table."""
        return table in self.files and self.count(table) > 0

    def count(self, table: str) -> int:
        [(count,)] = self.connection.execute(f'SELECT count(*) FROM "{table}"').fetchall()
        return int(count)

    def rows(self, sql: str, parameters: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """A small result as dictionaries."""
        cursor = self.connection.execute(sql, parameters or {})
        names = [d[0] for d in cursor.description or []]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def create(self, name: str, rows: pa.Table) -> None:
        """Make a temporary table of the rows, in place of one of that name."""
        self._take(rows, f"CREATE OR REPLACE TEMP TABLE {name} AS FROM new_rows")

    def insert(self, name: str, rows: pa.Table) -> None:
        """Add rows to a temporary table, column by name; those it lacks are NULL."""
        self._take(rows, f"INSERT INTO {name} BY NAME FROM new_rows")

    @contextmanager
    def beside(self, held_bytes: int) -> Iterator[None]:
        """DuckDB does with less of its memory, though no less than a quarter, while arrays of so many bytes are held: both
        together stay within what was allowed."""
        allowed = memory_bytes(self.connection)
        self.connection.execute(f"SET memory_limit = '{int(max(allowed - held_bytes, allowed / 4))}B'")
        try:
            yield
        finally:
            self.connection.execute(f"SET memory_limit = '{int(allowed)}B'")

    def _take(self, rows: pa.Table, sql: str) -> None:
        self.connection.register("new_rows", rows)
        try:
            self.connection.execute(sql)
        finally:
            self.connection.unregister("new_rows")

    def view_sql(self, table: Table) -> str:
        """The SELECT behind a table's view: declared columns first, typed, then those we do not know."""
        files = self.files.get(table.name)
        if not files:
            columns = ", ".join(f'NULL::{sql} AS "{name}"' for name, sql in types_of(table).items())
            return f"SELECT {columns} WHERE false"
        # Folders above the trace may be named key=value too, and say nothing of its rows.
        above = len(Path(self.path).parts)
        partitioned = all(any("=" in name for name in Path(f).parts[above:-1]) for f in files)
        found = scan(self.connection, table, files, partitioned)
        for column in found.mistyped:
            warning = f"table {table.name}, column {column}: values of another type are left empty"
            if warning not in self.warnings:
                self.warnings.append(warning)
        selected = []
        for name, value in found.columns.items():
            if name == "instance" and self._aliases:
                cases = " ".join(f"WHEN {quote(a)} THEN {quote(b)}" for a, b in self._aliases.items())
                value = f"CASE {value} {cases} ELSE {value} END"
            selected.append(f'{value} AS "{name}"')
        selected += [identifier(name) for name in found.unknown]
        return f"SELECT {', '.join(selected)} FROM {found.relation}"

    def _create_views(self) -> None:
        for table in TABLES:
            self._create_view(table)

    def _create_view(self, table: Table) -> None:
        try:
            self.connection.execute(f'CREATE OR REPLACE VIEW "{table.name}" AS {self.view_sql(table)}')
        except duckdb.OutOfMemoryException as error:
            raise UsageError(f"{self.path}: the memory limit is too small to open the trace") from error
        except duckdb.Error as error:
            raise BadInput(
                f"cannot be read as Parquet: {first_line(error)}",
                path=self.path,
                where=f"table {table.name}",
                todo="Remove the damaged part, or ingest into a new trace",
            ) from error

    def _instance_aliases(self) -> dict[str, str]:
        """Folder -> instance, for sources that name no instance and lie with sources that name just one.

        A folder that some source names as an instance stands for itself.
        """
        rows = self.connection.execute(
            "WITH named AS (SELECT folder, unnest(instances) AS name FROM sources) "
            "SELECT folder, min(name) FROM named "
            "WHERE folder IS NOT NULL AND folder NOT IN (SELECT name FROM named WHERE name IS NOT NULL) "
            "GROUP BY folder HAVING count(DISTINCT name) = 1"
        ).fetchall()
        return dict(rows)

    def _check_version(self) -> None:
        """Every commit of ours has a part of `sources`; of the other tables one part will do."""
        parts = [
            f for name, files in self.files.items() for f in (files if name == "sources" else files[-1:])
        ]
        versions = ((pq.read_metadata(f).metadata or {}).get(b"tailscope.schema_version", b"") for f in parts)
        newest = max((int(version) for version in versions if version.isdigit()), default=0)
        if newest > SCHEMA_VERSION:
            self.warnings.append(
                f"the trace was written by a newer tailscope (schema {newest}, this one reads "
                f"{SCHEMA_VERSION}): columns may be misread; upgrade tailscope"
            )


def _find(path: str, since_ns: int | None) -> dict[str, list[str]]:
    """Table name -> Parquet files. A glob may match files and whole traces."""
    # Clocks of engines may be ahead of ours.
    oldest = "" if since_ns is None else partition_of(max(0.0, since_ns / 1e9 - AHEAD_S))
    if "://" in path:
        raise UsageError(f"{path}: object stores are not supported yet; copy the trace to a local folder")
    matches = [path]
    try:
        found = Path(path).exists()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if not found:
        matches = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 (an absolute pattern)
        if not matches:
            raise UsageError(f"{path}: no such trace. Make one with: tailscope ingest FILES -o trace.parquet")
    tables: dict[str, list[str]] = {}
    for place in map(Path, matches):
        if not place.is_dir():
            tables.setdefault(_table_of(place), []).append(str(place))
            continue
        for name, parts in visible_parts(place).items():
            if name in BY_NAME:
                parts = [
                    p for p in parts if not (PARTITION.fullmatch(p.parent.name) and p.parent.name < oldest)
                ]
                tables.setdefault(name, []).extend(map(str, parts))
    if not any(tables.values()):
        # There are some, but none that counts.
        if tables:
            raise UsageError(
                f"{path}: holds no table written after {oldest.replace('T', ' ')}:00 UTC. Look at more"
            )
        raise UsageError(
            f"{path}: holds no table of a trace. Make one with: tailscope ingest FILES -o trace.parquet"
        )
    return tables


def _table_of(path: Path) -> str:
    """The table a lone Parquet file holds: by our metadata, else by its folder, else by its columns."""
    try:
        schema = pq.read_schema(path)
    except (OSError, ValueError) as error:
        raise BadInput(
            "is not a Parquet file",
            path=str(path),
            todo="Make a trace with: tailscope ingest FILES -o trace.parquet",
        ) from error
    named = (schema.metadata or {}).get(b"tailscope.table", b"").decode("utf-8", "replace")
    for name in (named, path.parent.name, path.stem):
        if name in BY_NAME:
            return name
    # Columns every table has say nothing of which it is.
    common = {"instance", "engine", "source"}
    columns = set(schema.names) - common
    scores = {t.name: len(columns & set(t.arrow.names)) for t in TABLES}
    best = max(scores, key=lambda name: scores[name])
    if scores[best] < 3:
        raise BadInput(
            "holds none of the tables of a trace",
            path=str(path),
            where=f"columns {', '.join(schema.names[:8])}",
            todo="See docs/tables.md for the columns of each table",
        )
    return best
