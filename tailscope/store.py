"""Reading a trace: a directory, a Parquet file with one table, or a glob, as DuckDB views."""

from __future__ import annotations

import glob
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb
import pyarrow.parquet as pq

from tailscope.errors import BadInput, UsageError
from tailscope.parts import visible_parts
from tailscope.scan import first_line, identifier, quote, scan, types_of
from tailscope.schema import BY_NAME, SCHEMA_VERSION, TABLES, Table


class Trace:
    """A trace opened for reading.

    Each declared table is an attribute, a DuckDB relation with `.df()` and `.arrow()`: `trace.requests`.
    A table the trace lacks has no rows, a column it lacks is NULL, columns we do not know are kept.
    `memory_limit` is DuckDB's, for example "4GB"; beyond it, queries spill to a temporary folder.

    Raises UsageError when there is nothing at `path`, BadInput when a file is no Parquet.
    """

    def __init__(
        self, path: str | Path, *, memory_limit: str | None = None, threads: int | None = None
    ) -> None:
        self.path = str(path)
        self.warnings: list[str] = []
        self.files = _find(self.path)
        self._spill = tempfile.mkdtemp(prefix="tailscope-")
        config: dict[str, Any] = {"temp_directory": self._spill, "preserve_insertion_order": False}
        if memory_limit:
            config["memory_limit"] = memory_limit
        if threads:
            config["threads"] = threads
        try:
            self.connection = duckdb.connect(config=config)
        except duckdb.Error as error:
            shutil.rmtree(self._spill, ignore_errors=True)
            raise UsageError(f"--memory-limit {memory_limit!r}: {first_line(error)}") from error
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
        self.connection.close()
        shutil.rmtree(self._spill, ignore_errors=True)

    def __getattr__(self, name: str) -> duckdb.DuckDBPyRelation:
        if name in BY_NAME:
            return self.connection.view(name)
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

    def view_sql(self, table: Table) -> str:
        """The SELECT behind a table's view: declared columns first, typed, then those we do not know."""
        files = self.files.get(table.name)
        if not files:
            columns = ", ".join(f'NULL::{sql} AS "{name}"' for name, sql in types_of(table).items())
            return f"SELECT {columns} WHERE false"
        found = scan(self.connection, table, files)
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
        except duckdb.Error as error:
            raise BadInput(
                f"cannot be read as Parquet: {first_line(error)}",
                path=self.path,
                where=f"table {table.name}",
                todo="Remove the damaged part, or ingest into a new trace",
            ) from error

    def _instance_aliases(self) -> dict[str, str]:
        """Folder -> instance, for sources that name no instance and lie with sources that name just one."""
        rows = self.connection.execute(
            "SELECT folder, list(DISTINCT named) FILTER (named IS NOT NULL) AS named FROM "
            "(SELECT folder, unnest(coalesce(nullif(instances, []), [NULL])) AS named FROM sources) "
            "WHERE folder IS NOT NULL GROUP BY folder"
        ).fetchall()
        return {
            folder: named[0] for folder, named in rows if named and len(named) == 1 and named[0] != folder
        }

    def _check_version(self) -> None:
        for files in self.files.values():
            metadata = pq.read_metadata(files[-1]).metadata or {}
            version = metadata.get(b"tailscope.schema_version", b"1")
            if version.isdigit() and int(version) > SCHEMA_VERSION:
                self.warnings.append(
                    f"the trace was written by a newer tailscope (schema {int(version)}, this one reads "
                    f"{SCHEMA_VERSION}): columns may be misread; upgrade tailscope"
                )
                return


def _find(path: str) -> dict[str, list[str]]:
    if "://" in path:
        raise UsageError(f"{path}: object stores are not supported yet; copy the trace to a local folder")
    place = Path(path)
    if place.is_dir():
        found = {
            name: [str(p) for p in parts] for name, parts in visible_parts(place).items() if name in BY_NAME
        }
        if not found:
            raise UsageError(
                f"{path}: holds no table of a trace. Make one with: tailscope ingest FILES -o trace.parquet"
            )
        return found
    matches = (
        [path]
        if place.is_file()
        else sorted(
            f
            for f in glob.glob(path, recursive=True)  # noqa: PTH207 (an absolute pattern)
            if Path(f).is_file()
        )
    )
    if not matches:
        raise UsageError(f"{path}: no such trace. Make one with: tailscope ingest FILES -o trace.parquet")
    tables: dict[str, list[str]] = {}
    for match in matches:
        tables.setdefault(_table_of(Path(match)), []).append(match)
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
