from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailscope.parts import SourceWriter
from tailscope.scan import types_of
from tailscope.schema import BY_NAME, METRICS, REQUESTS, SERIES, SOURCES, TABLES, Table
from tailscope.source import INT64_MAX
from tailscope.store import Trace

UNITS = {"", "ns", "tokens", "bytes", "hex", "0-1", "JSON"}


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_a_table_is_declared_in_full(table: Table) -> None:
    names = [column.name for column in table.columns]
    assert len(set(names)) == len(names)
    assert {"instance", "source"} <= set(names)
    assert set(table.sort) <= set(names)
    assert table.time is None or table.time in names
    assert table.row
    for column in table.columns:
        assert column.doc.endswith("."), column.name
        assert column.unit in UNITS, column.name
        assert (column.unit == "ns") == column.name.endswith("_ns"), column.name
        if column.unit in ("ns", "tokens", "bytes"):
            assert column.type == pa.int64(), column.name
    assert types_of(table).keys() == set(names)


def test_table_names_are_unique() -> None:
    assert len(BY_NAME) == len(TABLES)


# -- round trip ------------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.sampled_from(["", "'", '"', "\n", "\r\n", "\x00", "NULL", "ß漢🙂", "a" * 5000, "\\", "$1", "%s"]),
    st.text(max_size=8),
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "BIGINT": st.one_of(
        st.integers(-INT64_MAX - 1, INT64_MAX), st.sampled_from([0, -1, INT64_MAX, -INT64_MAX - 1])
    ),
    "DOUBLE": st.floats(),
    "VARCHAR": TEXTS,
    "BOOLEAN": st.booleans(),
    "DOUBLE[]": st.lists(st.one_of(st.none(), st.floats()), max_size=4),
    "BIGINT[]": st.lists(st.one_of(st.none(), st.integers(-INT64_MAX, INT64_MAX)), max_size=4),
    "VARCHAR[]": st.lists(st.one_of(st.none(), TEXTS), max_size=4),
    "MAP(VARCHAR, VARCHAR)": st.dictionaries(TEXTS, st.one_of(st.none(), TEXTS), max_size=3),
    "MAP(VARCHAR, BIGINT[])": st.dictionaries(
        TEXTS, st.one_of(st.none(), st.lists(st.integers(0, INT64_MAX), max_size=3)), max_size=3
    ),
    "MAP(VARCHAR, BIGINT)": st.dictionaries(TEXTS, st.integers(0, INT64_MAX), max_size=3),
}


def rows_of(table: Table) -> st.SearchStrategy[list[dict[str, Any]]]:
    columns = {
        name: st.one_of(st.none(), VALUES[kind]) for name, kind in types_of(table).items() if name != "source"
    }
    return st.lists(st.fixed_dictionaries(columns), max_size=3)


def comparable(value: Any) -> Any:
    """A value as one that is equal to itself and can be counted."""
    if isinstance(value, dict):
        return tuple(sorted((k, comparable(v)) for k, v in value.items()))
    if isinstance(value, list):
        return tuple(comparable(v) for v in value)
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def batch_of(table: Table, rows: list[dict[str, Any]]) -> pa.Table:
    def plain(value: Any) -> Any:
        return list(value.items()) if isinstance(value, dict) else value

    return table.batch({c.name: [plain(row.get(c.name)) for row in rows] for c in table.columns})


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.fixed_dictionaries({table.name: rows_of(table) for table in TABLES if table is not SOURCES}),
    source=rows_of(SOURCES).filter(bool),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    rows: dict[str, list[dict[str, Any]]],
    source: list[dict[str, Any]],
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    for number, row in enumerate(rows["requests"]):
        row["request_key"] = f"{number}{row['request_key']}"  # rows of one key and content are stored once
    # An alias of the folder's name is another test's matter.
    row = dict(source[0], folder=None)
    with SourceWriter(path, "0" * 16) as writer:
        for name, values in rows.items():
            writer.write(BY_NAME[name], batch_of(BY_NAME[name], values))
        pairs = {k: list(v.items()) if isinstance(v, dict) else v for k, v in row.items()}
        counts = writer.commit(pairs)
    assert counts.rows == {name: len(values) for name, values in rows.items() if values}
    row |= {
        "source": "0" * 16,
        "rows": sum(map(len, rows.values())),
        "rows_duplicate": 0,
        "rows_conflicting": 0,
    }
    with Trace(path) as trace:
        for name, values in {**rows, "sources": [row]}.items():
            expected = [{**v, "source": "0" * 16} for v in values]
            assert Counter(map(comparable, expected)) == Counter(
                map(comparable, trace.rows(f'SELECT * FROM "{name}"'))
            )


# -- Table.batch -----------------------------------------------------------------------------------


def test_a_batch_repeats_scalars_and_leaves_the_rest_null() -> None:
    batch = REQUESTS.batch(
        {"arrival_ns": [1, 2], "observer": "client", "prompt_tokens": pa.array([3, 4], pa.int32())}
    )
    assert batch.schema == REQUESTS.arrow
    assert batch["observer"].to_pylist() == ["client", "client"]
    assert batch["prompt_tokens"].to_pylist() == [3, 4]
    assert batch["model"].null_count == 2
    assert SERIES.batch({"series": ["a"], "labels": [[("x", "y")]]})["labels"].to_pylist() == [[("x", "y")]]
    assert REQUESTS.batch({}).num_rows == 0


def test_a_batch_refuses_an_unknown_column() -> None:
    with pytest.raises(KeyError, match="table requests has no column arrivals, colour"):
        REQUESTS.batch({"colour": [1], "arrivals": [1]})


@pytest.mark.parametrize(
    ("table", "columns", "named"),
    [
        (REQUESTS, {"arrival_ns": ["x"]}, "requests.arrival_ns"),
        (REQUESTS, {"arrival_ns": [1 << 63]}, "requests.arrival_ns"),
        (REQUESTS, {"arrival_ns": [10**400]}, "requests.arrival_ns"),
        (REQUESTS, {"arrival_ns": [1], "model": 1 << 70}, "requests.model"),
        (REQUESTS, {"model": [17]}, "requests.model"),
        (REQUESTS, {"model": ["\ud800"]}, "requests.model"),
        (REQUESTS, {"arrival_ns": [1], "model": "\udfff"}, "requests.model"),
        (REQUESTS, {"arrival_ns": [1, 2], "model": ["a"]}, "requests.model: 1 values for 2 rows"),
        (METRICS, {"le": [["x"]]}, "metrics.le"),
        (METRICS, {"le": [1.0]}, "metrics.le"),
        (REQUESTS, {"arrival_ns": pa.array(["x"])}, "requests.arrival_ns"),
    ],
)
def test_a_batch_names_the_column_that_does_not_fit(
    table: Table, columns: dict[str, Any], named: str
) -> None:
    with pytest.raises(pa.ArrowInvalid, match=named):
        table.batch(columns)


def test_a_part_says_what_it_is(tmp_path: Path) -> None:
    with SourceWriter(tmp_path, "0" * 16) as writer:
        writer.write(METRICS, METRICS.batch({"time_ns": [1]}))
        writer.commit({})
    (part,) = tmp_path.glob("metrics/*.parquet")
    file = pq.ParquetFile(part)
    assert file.schema_arrow.metadata[b"tailscope.table"] == b"metrics"
    assert file.schema_arrow.metadata[b"tailscope.schema_version"] == b"1"
    assert file.schema_arrow.equals(METRICS.arrow)
