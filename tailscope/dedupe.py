"""Which rows of new parts the trace holds already: equal to a row of another source in all but provenance."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt

from tailscope.scan import Scan, connect, listed, quote, scan, types_of
from tailscope.schema import REQUESTS, Table

#: Beyond it DuckDB spills to a temporary folder.
MEMORY = "1GB"


@dataclass
class Known:
    """Which rows to keep, for parts that lose some; how many are left out and how many conflict, by source."""

    keep: dict[Path, npt.NDArray[np.bool_]] = field(default_factory=dict)
    duplicate: Counter[str] = field(default_factory=Counter)
    conflicting: Counter[str] = field(default_factory=Counter)


def find_known(table: Table, new: Sequence[Path], stored: Sequence[Path], sources: Sequence[str]) -> Known:
    """Judge the rows of the parts `new`, of `sources` in this order, against `stored` and each other.

    Rows that one source repeats are kept, except in `requests`, where a row has a key. Rows of `requests`
    with the key of another row but other content conflict; they are kept. Only stored rows of the same span
    of time are read.
    """
    known = Known()
    keyed = table is REQUESTS
    if not stored and not keyed and len(sources) == 1:
        return known
    with tempfile.TemporaryDirectory(prefix="tailscope-") as spill:
        config: dict[str, Any] = {
            "threads": 2,
            "memory_limit": MEMORY,
            "temp_directory": spill,
            "preserve_insertion_order": False,
        }
        with closing(connect(config)) as con:
            old = scan(con, table, map(str, stored)) if stored else None
            _number(con, table, new, sources)
            # Without keys one part at a time will do, which bounds memory.
            for group in [new] if keyed else [[part] for part in new]:
                _load_new(con, table, group, keyed)
                _load_stored(con, table, group, old, keyed)
                _judge(con, keyed)
                _collect(con, group, sources, keyed, known)
    return known


def _number(
    con: duckdb.DuckDBPyConnection, table: Table, new: Sequence[Path], sources: Sequence[str]
) -> None:
    """The order of the sources, and the rows of all but the last, which no other comes after and may be large."""
    order = ", ".join(f"({quote(source)}, {number})" for number, source in enumerate(sources))
    con.execute(f"CREATE TEMP TABLE numbered AS SELECT * FROM (VALUES {order}) AS v(source, number)")
    con.execute(
        f"CREATE TEMP TABLE earlier AS SELECT {_content(table)} AS content, min(number) AS first "
        f"FROM {_parts(new)} JOIN numbered USING (source) WHERE number < {len(sources) - 1} GROUP BY content"
    )


def _load_new(con: duckdb.DuckDBPyConnection, table: Table, new: Sequence[Path], keyed: bool) -> None:
    con.execute(
        "CREATE OR REPLACE TEMP TABLE fresh"
        "(part USMALLINT, row BIGINT, source UINTEGER, key UBIGINT, content UBIGINT)"
    )
    for number, part in enumerate(new):
        con.execute(
            f"INSERT INTO fresh SELECT {number}, file_row_number, number, {_key(keyed)}, {_content(table)} "
            f"FROM {_parts([part])} JOIN numbered USING (source)"
        )


def _load_stored(
    con: duckdb.DuckDBPyConnection, table: Table, new: Sequence[Path], old: Scan | None, keyed: bool
) -> None:
    """Of the stored rows those that a new one equals or shares its key with."""
    con.execute("CREATE OR REPLACE TEMP TABLE stored(key UBIGINT, content UBIGINT)")
    if old is None:
        return
    within = "true"
    if table.time:
        # Rows of other times cannot be equal, and row-group statistics skip them.
        span = f'SELECT min("{table.time}"), max("{table.time}") FROM {_parts(new)}'
        [(low, high)] = con.execute(span).fetchall()
        time = old.columns[table.time]
        within = f"({time} IS NULL" + (")" if low is None else f" OR {time} BETWEEN {low} AND {high})")
    con.execute(
        f"INSERT INTO stored SELECT DISTINCT key, content FROM (SELECT {_key(keyed, old.columns)} AS key, "
        f"{_content(table, old.columns)} AS content FROM {old.relation} WHERE {within}) "
        "WHERE content IN (SELECT content FROM fresh)"
        + (" OR key IN (SELECT key FROM fresh WHERE key IS NOT NULL)" if keyed else "")
    )


def _judge(con: duckdb.DuckDBPyConnection, keyed: bool) -> None:
    again = "row_number() OVER (PARTITION BY key, fresh.content ORDER BY source, part, row) > 1"
    con.execute(
        "CREATE OR REPLACE TEMP TABLE judged AS SELECT part, row, source, key, fresh.content, "
        "fresh.content IN (SELECT content FROM stored) OR coalesce(first < source, false) "
        + (f"OR (key IS NOT NULL AND {again}) " if keyed else "")
        + "AS known FROM fresh LEFT JOIN earlier ON earlier.content = fresh.content"
    )


def _collect(
    con: duckdb.DuckDBPyConnection, new: Sequence[Path], sources: Sequence[str], keyed: bool, known: Known
) -> None:
    for number, part in enumerate(new):
        sql = "SELECT NOT known AS keep FROM judged WHERE part = $part ORDER BY row"
        keep = np.asarray(con.execute(sql, {"part": number}).fetchnumpy()["keep"], dtype=bool)
        if not keep.all():
            known.keep[part] = keep
    for number, count in con.execute(DUPLICATE).fetchall():
        known.duplicate[sources[number]] += count
    for number, count in con.execute(CONFLICTING).fetchall() if keyed else []:
        known.conflicting[sources[number]] += count


DUPLICATE = "SELECT source, count(*) FROM judged WHERE known GROUP BY source"
CONFLICTING = """
    WITH kept AS (SELECT source, key, content FROM judged WHERE NOT known AND key IS NOT NULL),
    contents AS (
        SELECT key FROM (SELECT key, content FROM kept UNION ALL SELECT key, content FROM stored)
        GROUP BY key HAVING count(DISTINCT content) > 1
    )
    SELECT source, count(*) FROM kept SEMI JOIN contents USING (key) GROUP BY source
"""


def _parts(paths: Sequence[Path]) -> str:
    return f"read_parquet({listed(map(str, paths))}, file_row_number=true, hive_partitioning=false)"


def _key(keyed: bool, columns: dict[str, str] | None = None) -> str:
    if not keyed:
        return "NULL"
    key = columns["request_key"] if columns else "request_key"
    return f"CASE WHEN {key} IS NOT NULL THEN hash({key}) END"


def _content(table: Table, columns: dict[str, str] | None = None) -> str:
    """A hash of all but provenance. Lengths tell NULL from empty, and [1], [2, 3] from [1, 2], [3]."""
    values = []
    for name, kind in types_of(table).items():
        if name not in table.provenance:
            value = columns[name] if columns else f'"{name}"'
            values.append(value)
            if kind.endswith("[]"):
                values.append(f"len({value})")
            elif kind.startswith("MAP"):
                values.append(f"cardinality({value})")
    return f"hash({', '.join(values)})"
