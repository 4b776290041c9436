"""Parquet files of one table, of whatever age and origin, as a SELECT of its declared columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import duckdb

from tailscope.schema import Table

#: DuckDB's name for each declared type.
SQL_TYPES = {
    "int64": "BIGINT",
    "double": "DOUBLE",
    "string": "VARCHAR",
    "bool": "BOOLEAN",
    "list<item: double>": "DOUBLE[]",
    "list<element: double>": "DOUBLE[]",
    "list<item: int64>": "BIGINT[]",
    "list<element: int64>": "BIGINT[]",
    "list<item: string>": "VARCHAR[]",
    "list<element: string>": "VARCHAR[]",
    "map<string, string>": "MAP(VARCHAR, VARCHAR)",
    "map<string, int64>": "MAP(VARCHAR, BIGINT)",
    "map<string, list<item: int64>>": "MAP(VARCHAR, BIGINT[])",
    "map<string, list<element: int64>>": "MAP(VARCHAR, BIGINT[])",
}
_NUMBERS = {"TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "FLOAT", "DOUBLE"}
_NUMBERS |= {f"U{name}" for name in _NUMBERS}


def connect(config: Mapping[str, Any]) -> duckdb.DuckDBPyConnection:
    """A connection that draws no bars: in a child process DuckDB takes itself for interactive. Raises duckdb.Error for settings that
    it does not take."""
    con = duckdb.connect(config=dict(config))
    con.execute("SET enable_progress_bar = false")
    return con


@dataclass(frozen=True)
class Scan:
    """`columns` maps each declared column to its expression over `relation`; `unknown` are the others.

    `mistyped` names declared columns the files hold as neither the declared type nor another number.
    """

    relation: str
    columns: dict[str, str]
    unknown: tuple[str, ...] = ()
    mistyped: tuple[str, ...] = ()


def types_of(table: Table) -> dict[str, str]:
    return {column.name: SQL_TYPES[str(column.type)] for column in table.columns}


def scan(
    connection: duckdb.DuckDBPyConnection, table: Table, files: Iterable[str], partitioned: bool = False
) -> Scan:
    """How to read `files` as `table`: a column they lack is NULL, another type is cast, else NULL.

    `partitioned` says that folders named key=value give columns. Raises duckdb.Error for a file that is
    no Parquet.
    """
    relation = (
        f"read_parquet({listed(files)}, union_by_name=true, hive_partitioning={str(partitioned).lower()})"
    )
    described = connection.execute(
        f"SELECT column_name, column_type FROM (DESCRIBE FROM {relation})"
    ).fetchall()
    present = {name.casefold(): (name, kind) for name, kind in described}
    columns, mistyped = {}, []
    for name, wanted in types_of(table).items():
        actual, kind = present.pop(name.casefold(), ("", ""))
        if not actual:
            columns[name] = f"NULL::{wanted}"
        elif kind == wanted:
            columns[name] = identifier(actual)
        elif wanted == "BIGINT" and kind.startswith("TIMESTAMP"):
            columns[name] = f"epoch_ns({identifier(actual)})"
        else:
            columns[name] = f"TRY_CAST({identifier(actual)} AS {wanted})"
            if kind.partition("(")[0] not in _NUMBERS | {"DECIMAL"} or wanted not in _NUMBERS:
                mistyped.append(f"{name} ({kind}, not {wanted})")
    return Scan(relation, columns, tuple(name for name, _ in present.values()), tuple(mistyped))


def listed(files: Iterable[str]) -> str:
    """A list for `read_parquet`."""
    return f"[{', '.join(quote(pattern(file)) for file in files)}]"


def pattern(file: str) -> str:
    """A path as a pattern that matches nothing else; DuckDB takes every path for a pattern."""
    return "".join(f"[{c}]" if c in "[*?" else c for c in file)


def quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]
