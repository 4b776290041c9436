"""Which rows of new parts the trace holds already: equal to a row of another source in all but provenance."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import numpy as np
import numpy.typing as npt

from tailscope.scan import listed, quote, scan, types_of
from tailscope.schema import REQUESTS, Table

#: Beyond it DuckDB spills to a temporary folder.
MEMORY = "1GB"


@dataclass
class Known:
    """Rows to leave out, by part, and how many those and the conflicting ones are, by source."""

    rows: dict[Path, npt.NDArray[np.int64]] = field(default_factory=dict)
    duplicate: Counter[str] = field(default_factory=Counter)
    conflicting: Counter[str] = field(default_factory=Counter)


def find_known(table: Table, new: Sequence[Path], stored: Sequence[Path], sources: Sequence[str]) -> Known:
    """Judge the rows of the parts `new`, which come from `sources` in this order, against `stored` and each other.

    Rows that one source repeats are kept, except in `requests`, where a row has a key. Rows of `requests`
    with the key of another row but other content conflict; they are kept. Only stored rows of the same span
    of time are read.
    """
    known = Known()
    keyed = table is REQUESTS
    if not stored and not keyed and len(sources) == 1:
        return known
    with tempfile.TemporaryDirectory(prefix="tailscope-") as spill:
        config: dict[str, str | bool | int | float | list[str]] = {
            "threads": 2,
            "memory_limit": MEMORY,
            "temp_directory": spill,
            "preserve_insertion_order": False,
        }
        with closing(duckdb.connect(config=config)) as con:
            _load_new(con, table, new, sources, keyed)
            _load_stored(con, table, new, stored, keyed)
            _judge(con, keyed)
            for number, part in enumerate(new):
                rows = con.execute("SELECT row FROM judged WHERE known AND part = $part", {"part": number})
                gone = np.asarray(rows.fetchnumpy()["row"])
                if len(gone):
                    known.rows[part] = gone
            for counts, sql in (
                (known.duplicate, DUPLICATE),
                (known.conflicting, CONFLICTING if keyed else ""),
            ):
                for number, count in con.execute(sql).fetchall() if sql else []:
                    counts[sources[number]] = count
    return known


DUPLICATE = "SELECT source, count(*) FROM judged WHERE known GROUP BY source"
CONFLICTING = """
    WITH kept AS (SELECT source, key, content FROM judged WHERE NOT known AND key IS NOT NULL),
    contents AS (
        SELECT key FROM (SELECT key, content FROM kept UNION ALL SELECT key, content FROM stored)
        GROUP BY key HAVING count(DISTINCT content) > 1
    )
    SELECT source, count(*) FROM kept SEMI JOIN contents USING (key) GROUP BY source
"""


def _load_new(
    con: duckdb.DuckDBPyConnection, table: Table, new: Sequence[Path], sources: Sequence[str], keyed: bool
) -> None:
    con.execute(
        "CREATE TEMP TABLE fresh(part USMALLINT, row BIGINT, source UINTEGER, key UBIGINT, content UBIGINT)"
    )
    order = ", ".join(f"({quote(source)}, {number})" for number, source in enumerate(sources))
    con.execute(f"CREATE TEMP TABLE numbered AS SELECT * FROM (VALUES {order}) AS v(source, number)")
    columns = {column.name: f'"{column.name}"' for column in table.columns}
    for number, part in enumerate(new):
        con.execute(
            f"INSERT INTO fresh SELECT {number}, file_row_number, number, {_key(columns, keyed)}, "
            f"{_content(table, columns)} FROM {_parts([part])} JOIN numbered USING (source)"
        )


def _load_stored(
    con: duckdb.DuckDBPyConnection, table: Table, new: Sequence[Path], stored: Sequence[Path], keyed: bool
) -> None:
    """Of the stored rows those that a new one equals or shares its key with."""
    con.execute("CREATE TEMP TABLE stored(key UBIGINT, content UBIGINT)")
    if not stored:
        return
    old = scan(con, table, map(str, stored))
    within = "true"
    if table.time:
        # Rows of other times cannot be equal, and row-group statistics skip them.
        [(low, high)] = con.execute(
            f'SELECT min("{table.time}"), max("{table.time}") FROM {_parts(new)}'
        ).fetchall()
        time = old.columns[table.time]
        within = f"({time} IS NULL" + (")" if low is None else f" OR {time} BETWEEN {low} AND {high})")
    key = _key(old.columns, keyed)
    con.execute(
        f"INSERT INTO stored SELECT DISTINCT key, content FROM "
        f"(SELECT {key} AS key, {_content(table, old.columns)} AS content FROM {old.relation} WHERE {within}) "
        "WHERE content IN (SELECT content FROM fresh)"
        + (" OR key IN (SELECT key FROM fresh WHERE key IS NOT NULL)" if keyed else "")
    )


def _judge(con: duckdb.DuckDBPyConnection, keyed: bool) -> None:
    # No source comes after the last, which is also the one that may be large.
    con.execute(
        "CREATE TEMP TABLE earlier AS SELECT content, min(source) AS first FROM fresh "
        "WHERE source < (SELECT max(source) FROM fresh) GROUP BY content"
    )
    again = "row_number() OVER (PARTITION BY key, fresh.content ORDER BY source, part, row) > 1"
    con.execute(
        "CREATE TEMP TABLE judged AS SELECT part, row, source, key, fresh.content, "
        "fresh.content IN (SELECT content FROM stored) OR coalesce(first < source, false) "
        + (f"OR (key IS NOT NULL AND {again}) " if keyed else "")
        + "AS known FROM fresh LEFT JOIN earlier ON earlier.content = fresh.content"
    )


def _parts(paths: Sequence[Path]) -> str:
    return f"read_parquet({listed(map(str, paths))}, file_row_number=true, hive_partitioning=false)"


def _key(columns: dict[str, str], keyed: bool) -> str:
    key = columns["request_key"] if keyed else ""
    return f"CASE WHEN {key} IS NOT NULL THEN hash({key}) END" if keyed else "NULL"


def _content(table: Table, columns: dict[str, str]) -> str:
    """A hash of all but provenance. Lengths tell NULL from empty, and [1], [2, 3] from [1, 2], [3]."""
    values = []
    for name, kind in types_of(table).items():
        if name not in table.provenance:
            values.append(columns[name])
            if kind.endswith("[]"):
                values.append(f"len({columns[name]})")
            elif kind.startswith("MAP"):
                values.append(f"cardinality({columns[name]})")
    return f"hash({', '.join(values)})"
