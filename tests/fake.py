"""A collector for tests: a line `FAKE`, then a JSON object a line with `table` and that table's columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from tailscope.config import Config
from tailscope.errors import BadInput
from tailscope.ingest import Outcome, ingest
from tailscope.schema import BY_NAME, TABLES, Table
from tailscope.source import Options, Source
from tailscope.store import Trace

Row = dict[str, Any]


class Fake:
    name = "fake"
    version = "1"
    reads = "Files of these tests."
    tables = TABLES

    def recognises(self, head: bytes, name: str) -> bool:
        return head.startswith(b"FAKE\n")

    def read(self, source: Source) -> Iterator[tuple[Table, pa.Table]]:
        for number, line in source.lines():
            try:
                row = json.loads(line)
            except ValueError:
                if number > 1:
                    source.tally.reject("not JSON", f"line {number}")
                continue
            if row.get("raise") == "BadInput":
                raise BadInput("nothing in it can be used", path=source.display, where=f"line {number}")
            if "raise" in row:
                raise RuntimeError(row["raise"])
            table = BY_NAME[row.pop("table")]
            yield table, table.batch({name: [value] for name, value in row.items()})


def request(number: int, **columns: Any) -> Row:
    row: Row = {
        "table": "requests",
        "request_key": f"r{number}",
        "arrival_ns": 1000 + number,
        "file_row": number,
    }
    return row | columns


def write(path: Path, *rows: Row) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("FAKE\n" + "".join(json.dumps(row) + "\n" for row in rows))
    return path


def add(
    trace: Path, *paths: Path, config: Config | None = None, instance: str | None = None
) -> list[Outcome]:
    return ingest(list(paths), trace, config=config or Config(), options=Options(), instance=instance)


def stored(trace: Path, sql: str) -> list[Any]:
    """The result of a query: rows, or values where there is one column."""
    with Trace(trace) as opened:
        rows = opened.connection.execute(sql).fetchall()
    return [row[0] if len(row) == 1 else row for row in rows]


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
