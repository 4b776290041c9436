"""A trace whose every name is somebody's attempt to run a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

#: Ends a script, opens another, leaves an attribute, speaks Plotly's and JavaScript's languages.
EVIL = "</script><script>window.__pwned=1</script>\"'><img src=x onerror=window.__pwned=1><!--${x}%{x}`\u2028\u202e&lt;b&gt;"
#: Columns of anybody's text, by which tables are joined.
NAMES = {
    "instance",
    "request_id",
    "model",
    "adapter",
    "world",
    "host",
    "folder",
    "path",
    "detail",
    "blocked",
    "name",
}


def spoil(trace: Path) -> None:
    """Put it into all names of a trace, and name tenants and classes by it."""
    for part in sorted(trace.rglob("*.parquet")):
        table = pq.ParquetFile(part).read()
        for i, column in enumerate(table.column_names):
            values: list[Any]
            if column in NAMES and pa.types.is_string(table.schema.field(i).type):
                values = [None if v is None else f"{v}{EVIL}" for v in table.column(i).to_pylist()]
            elif column in ("instances", "notes"):
                values = [
                    None if v is None else [f"{name}{EVIL}" for name in v]
                    for v in table.column(i).to_pylist()
                ]
            elif column == "tenant":
                values = [f"tenant {n % 3}{EVIL}" for n in range(table.num_rows)]
            elif column == "klass" and "request_id" in table.column_names:
                prompts = table.column("prompt_tokens").to_pylist()
                values = [f"{'long' if (p or 0) > 1000 else 'short'}{EVIL}" for p in prompts]
            else:
                continue
            field = table.schema.field(i)
            table = table.set_column(i, field, pa.array(values, field.type))
        pq.write_table(table, part)
