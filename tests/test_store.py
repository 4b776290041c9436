from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake import stored

import tailscope
from tailscope.errors import BadInput, UsageError
from tailscope.parts import SourceWriter
from tailscope.scan import types_of
from tailscope.schema import BY_NAME, ITERATIONS, REQUESTS, SERIES, SOURCES, TABLES
from tailscope.store import Trace, schema_of


def identity(number: int) -> str:
    return f"{number:016x}"


def write(trace: Path, number: int = 1, *, row: dict[str, Any] | None = None, **requests: Any) -> Path:
    with SourceWriter(trace, identity(number)) as writer:
        columns = {"request_key": [f"r{number}"], "arrival_ns": [number], "file_row": [number]} | requests
        writer.write(REQUESTS, REQUESTS.batch(columns))
        writer.commit(row or {})
    return trace


def foreign(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


# -- what a trace may be ---------------------------------------------------------------------------


def test_a_directory(tmp_path: Path) -> None:
    with tailscope.open(write(tmp_path / "t.parquet")) as trace:
        assert trace.count("requests") == 1
        assert trace.has("requests")
        assert not trace.has("tokens")
        assert not trace.warnings


def test_a_part_of_ours_says_itself_what_table_it_holds(tmp_path: Path) -> None:
    write(tmp_path / "t.parquet")
    (part,) = (tmp_path / "t.parquet" / "requests").iterdir()
    alone = part.rename(tmp_path / "anything.bin")
    assert stored(alone, "SELECT arrival_ns FROM requests") == [1]


def test_a_foreign_file_is_known_by_folder_name_or_columns(tmp_path: Path) -> None:
    columns = {"request_id": ["a"], "prompt_tokens": [5], "ttft_ns": [7], "colour": ["red"]}
    for path in ("requests/x.parquet", "requests.parquet", "any.parquet"):
        file = foreign(tmp_path / path, **columns)
        assert stored(file, "SELECT request_id, prompt_tokens, ttft_ns, colour FROM requests") == [
            ("a", 5, 7, "red")
        ]


def test_a_file_that_is_no_table_of_ours(tmp_path: Path) -> None:
    path = foreign(tmp_path / "x.parquet", instance=["i"], engine=[1], source=["s"], time_ns=[1], a=[1])
    with pytest.raises(BadInput) as caught:
        Trace(path)
    assert str(caught.value) == (
        f"{path}, columns instance, engine, source, time_ns, a: holds none of the tables of a trace. "
        "See docs/tables.md for the columns of each table"
    )


@pytest.mark.parametrize("content", [b"", b"PAR1", b"a,b\n1,2\n", b"PAR1" + bytes(100) + b"PAR1"])
def test_a_file_that_is_no_parquet(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(
        BadInput, match=r"x\.parquet: is not a Parquet file\. Make a trace with: tailscope ingest"
    ):
        Trace(path)


def test_a_glob_of_files_and_of_traces(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / f"run{number}.parquet", number)
        foreign(tmp_path / "loose" / f"{number}.parquet", request_id=["a"], model=["m"], arrival_ns=[number])
    assert stored(tmp_path / "run*.parquet", "SELECT arrival_ns FROM requests ORDER BY ALL") == [1, 2]
    assert stored(tmp_path / "loose" / "*", "SELECT arrival_ns FROM requests ORDER BY ALL") == [1, 2]
    assert stored(tmp_path / "run[2]*", "SELECT arrival_ns FROM requests") == [2]
    with pytest.raises(UsageError, match="no such trace"):
        Trace(tmp_path / "no*.parquet")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone: no such trace\. Make one with: tailscope ingest FILES -o"):
        Trace(tmp_path / "gone")
    with pytest.raises(UsageError, match="holds no table of a trace"):
        Trace(tmp_path)
    with pytest.raises(UsageError, match="cannot be read: File name too long"):
        Trace("x" * 5000)
    with pytest.raises(UsageError, match="s3://b/t: object stores are not supported yet; copy the trace"):
        Trace("s3://b/t")


@pytest.mark.parametrize("name", ["it's", 'a "b" c', "a[1]b", "a*b", "tenant=x", "new\nline"])
def test_a_path_of_any_name(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a1b" / "a1b", arrival_ns=[9])  # what a[1]b and a*b would match as patterns
    trace = write(tmp_path / name / name)
    (part,) = (trace / "requests").iterdir()
    for path in (trace, part):
        assert stored(path, "SELECT arrival_ns, tenant FROM requests") == [(1, None)]


# -- what is missing, added or of another type -------------------------------------------------------


def test_a_missing_table_has_its_columns_and_no_rows(tmp_path: Path) -> None:
    with Trace(write(tmp_path)) as trace:
        for table in TABLES:
            relation = getattr(trace, table.name)
            assert dict(zip(relation.columns, map(str, relation.types), strict=True)) == types_of(table)
        assert trace.tokens.fetchall() == []
        assert set(BY_NAME) <= set(dir(trace))
        with pytest.raises(AttributeError, match="a trace has no table 'spans'; tables are requests, tokens"):
            _ = trace.spans


def test_a_missing_column_is_null_and_an_unknown_one_is_kept(tmp_path: Path) -> None:
    write(tmp_path)
    foreign(tmp_path / "requests" / "theirs.parquet", REQUEST_ID=["x"], arrival_ns=[7], colour=["red"])
    sql = "SELECT arrival_ns, request_id, prompt_tokens, colour FROM requests ORDER BY ALL"
    assert stored(tmp_path, sql) == [(1, None, None, None), (7, "x", None, "red")]
    assert stored(tmp_path, "SELECT typeof(prompt_tokens), typeof(arrival_ns) FROM requests LIMIT 1") == [
        ("BIGINT", "BIGINT")
    ]


def test_case_does_not_matter_in_a_column_name(tmp_path: Path) -> None:
    path = foreign(tmp_path / "requests.parquet", Request_ID=["x"], ARRIVAL_NS=[7])
    assert stored(path, "SELECT request_id, arrival_ns FROM requests") == [("x", 7)]


@pytest.mark.parametrize(
    ("column", "value", "read"),
    [
        ("arrival_ns", pa.array([7, None], pa.int32()), [7, None]),
        ("arrival_ns", pa.array([7, 1 << 63], pa.uint64()), [7, None]),
        ("arrival_ns", pa.array([7.0, None]), [7, None]),
        ("arrival_ns", pa.array([float("nan"), float("inf")]), [None, None]),
        ("arrival_ns", pa.array([7, 8], pa.timestamp("us", "UTC")), [7000, 8000]),
        ("request_id", pa.array(["a", None]).dictionary_encode(), ["a", None]),
        ("request_id", pa.array(["a", None], pa.large_string()), ["a", None]),
    ],
)
def test_a_column_of_another_type_is_converted(
    tmp_path: Path, column: str, value: Any, read: list[Any]
) -> None:
    path = foreign(tmp_path / "requests.parquet", **{column: value})
    with Trace(path) as trace:
        assert [row[column] for row in trace.rows("FROM requests")] == read
        assert not trace.warnings


def test_a_column_that_is_something_else_is_left_empty_and_said(tmp_path: Path) -> None:
    path = foreign(tmp_path / "requests.parquet", arrival_ns=["soon", "7"], model=["a", "b"])
    with Trace(path) as trace:
        assert trace.rows("SELECT arrival_ns, model FROM requests") == [
            {"arrival_ns": None, "model": "a"},
            {"arrival_ns": 7, "model": "b"},
        ]
        assert trace.warnings == [
            "table requests, column arrival_ns (VARCHAR, not BIGINT): values of another type are left empty"
        ]


# -- which parts count -------------------------------------------------------------------------------


def test_parts_named_by_others_count_and_hidden_ones_do_not(tmp_path: Path) -> None:
    for number, name in enumerate(
        [
            "requests/part-00000-0e6cbb5c-8b3c-4a5e-9d3c-000000000000-c000.snappy.parquet",
            "requests/part-r-00000.parquet",
            "requests/part.0.parquet",
            "requests/day=1/x.parquet",
            "requests/.hidden.parquet",
            "requests/_temporary/0/x.parquet",
            "requests/.cache/x.parquet",
            ".requests/x.parquet",
            "requests/part-00000000000000aa-0000.parquet",  # of a commit that was not finished
            "strangers/x.parquet",
        ]
    ):
        foreign(tmp_path / name, arrival_ns=[number])
    (tmp_path / "requests" / "folder.parquet").mkdir()
    (tmp_path / "requests" / "_SUCCESS").touch()
    assert stored(tmp_path, "SELECT arrival_ns FROM requests ORDER BY ALL") == [0, 1, 2, 3]


def test_partition_folders_inside_a_table_give_columns(tmp_path: Path) -> None:
    foreign(tmp_path / "requests" / "instance=a" / "x.parquet", arrival_ns=[1])
    foreign(tmp_path / "requests" / "instance=b" / "x.parquet", arrival_ns=[2])
    assert stored(tmp_path, "SELECT instance, arrival_ns FROM requests ORDER BY ALL") == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"not Parquet at all", b"PAR1" + bytes(50) + b"PAR1"])
def test_a_damaged_part_is_named(tmp_path: Path, damage: bytes) -> None:
    write(tmp_path)
    (tmp_path / "requests" / "bad.parquet").write_bytes(damage)
    with pytest.raises(BadInput) as caught:
        Trace(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}, table requests: cannot be read as Parquet: ")
    assert "bad.parquet" in str(caught.value)
    assert str(caught.value).endswith(". Remove the damaged part, or ingest into a new trace")


def test_a_newer_schema_is_warned_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 2)
    monkeypatch.setattr("tailscope.parts.SCHEMA_VERSION", 7)
    write(tmp_path, 1)
    with Trace(tmp_path) as trace:
        assert trace.warnings == [
            "the trace was written by a newer tailscope (schema 7, this one reads 1): columns may be misread; "
            "upgrade tailscope"
        ]
        assert trace.count("requests") == 2


# -- results -----------------------------------------------------------------------------------------


def test_tables_are_relations_that_do_not_block_each_other(tmp_path: Path) -> None:
    with SourceWriter(tmp_path, identity(1)) as writer:
        writer.write(ITERATIONS, ITERATIONS.batch({"end_ns": list(range(5000)), "kv_usage": 0.5}))
        writer.write(SERIES, SERIES.batch({"labels": [[("a", "b")]]}))
        writer.commit({"notes": ["n"]})
    with tailscope.open(tmp_path, threads=1, memory_limit="100MB") as trace:
        unread = trace.iterations.arrow()
        assert trace.iterations.df()["end_ns"].sum() == sum(range(5000))
        assert trace.series.df()["labels"].tolist() == [{"a": "b"}]
        assert trace.sources.filter("rows = 5001").fetchall()
        assert trace.rows("SELECT count(*) AS n FROM iterations WHERE end_ns < $below", {"below": 7}) == [
            {"n": 7}
        ]
        # DuckDB 1.4 and later give a reader, before it was a table.
        table = unread.read_all() if isinstance(unread, pa.RecordBatchReader) else unread
        assert table.num_rows == 5000
        relation = trace.iterations
    with pytest.raises(duckdb.Error):
        relation.fetchall()


def test_temporary_tables_are_made_and_filled_by_name(tmp_path: Path) -> None:
    schema = schema_of({"a": pa.int64(), "b": pa.string()})
    with tailscope.open(write(tmp_path / "t.parquet")) as trace:
        trace.create("made", schema.empty_table())
        trace.insert("made", pa.table({"b": ["x", "y"], "a": [1, 2]}))
        trace.insert("made", pa.table({"a": [3]}))
        with pytest.raises(duckdb.Error):
            trace.insert("made", pa.table({"c": [4]}))
        # Of what failed nothing is left that a next one would take for its rows.
        with pytest.raises(duckdb.Error):
            trace.rows("FROM new_rows")
        assert trace.rows("SELECT a, b FROM made ORDER BY a") == [
            {"a": 1, "b": "x"},
            {"a": 2, "b": "y"},
            {"a": 3, "b": None},
        ]
        trace.create("made", pa.table({"c": [5]}))
        assert trace.rows("FROM made") == [{"c": 5}]


def test_options_that_duckdb_refuses(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(UsageError, match="--memory-limit 'much'"):
        Trace(tmp_path, memory_limit="much")
    with pytest.raises(UsageError, match="threads -1"):
        Trace(tmp_path, threads=-1)


def test_nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spill = tmp_path / "tmp"
    spill.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spill))
    trace = write(tmp_path / "t")
    with Trace(trace):
        assert len(list(spill.iterdir())) == 1
    (trace / "requests" / "bad.parquet").write_bytes(b"bad")
    with pytest.raises(BadInput):
        Trace(trace)
    with pytest.raises(UsageError):
        Trace(trace, memory_limit="much")
    assert list(spill.iterdir()) == []


# -- instances ---------------------------------------------------------------------------------------


def placed(trace: Path, number: int, folder: str, instance: str, *named: str) -> None:
    write(
        trace, number, instance=instance, row={"folder": folder, "instances": list(named), "instance": folder}
    )


def instances(trace: Path) -> dict[int, str]:
    return dict(stored(trace, "SELECT arrival_ns, instance FROM requests"))


def test_sources_that_name_no_instance_join_the_one_named_in_their_folder(tmp_path: Path) -> None:
    placed(tmp_path, 1, "run1", "run1")
    placed(tmp_path, 2, "run1", "h:1", "h:1")
    placed(tmp_path, 3, "run1", "h:1", "h:1")
    placed(tmp_path, 4, "run2", "run2")
    assert instances(tmp_path) == {1: "h:1", 2: "h:1", 3: "h:1", 4: "run2"}
    assert stored(tmp_path, "SELECT DISTINCT instance FROM sources ORDER BY ALL") == ["h:1", "run2"]


@pytest.mark.parametrize("others", [["h:1", "h:2"], ["h:1"], []])
def test_where_several_are_named_or_none_the_folder_stands_for_itself(
    tmp_path: Path, others: list[str]
) -> None:
    placed(tmp_path, 1, "run1", "run1")
    placed(tmp_path, 2, "run1", "h:2", *others, *(["h:2"] if others == ["h:1"] else []))
    assert instances(tmp_path)[1] == "run1"


def test_a_folder_called_like_an_instance_is_not_renamed(tmp_path: Path) -> None:
    placed(tmp_path, 1, "prod", "prod")
    placed(tmp_path, 2, "prod", "h:1", "h:1")
    placed(tmp_path, 3, "elsewhere", "prod", "prod")
    assert instances(tmp_path) == {1: "prod", 2: "h:1", 3: "prod"}


def test_an_alias_may_need_quotes(tmp_path: Path) -> None:
    placed(tmp_path, 1, "it's", "it's")
    placed(tmp_path, 2, "it's", "that's", "that's")
    assert instances(tmp_path) == {1: "that's", 2: "that's"}


def test_foreign_sources_of_any_shape_do_no_harm(tmp_path: Path) -> None:
    foreign(tmp_path / "sources" / "x.parquet", folder=["a"], instances=["b"], rows=["many"])
    foreign(tmp_path / "requests" / "x.parquet", arrival_ns=[1], instance=["a"])
    assert instances(tmp_path) == {1: "a"}
    assert SOURCES.name in BY_NAME


def test_a_trace_without_anything_so_late_says_so(tmp_path: Path) -> None:
    part = tmp_path / "t" / "requests" / "2026-01-01T00"
    part.mkdir(parents=True)
    pq.write_table(REQUESTS.batch({"request_id": ["a"]}), part / "part-0.parquet")
    late_ns = 1_800_000_000 * 10**9
    with pytest.raises(UsageError, match=r"holds no table written after 2027-01-1\d \d\d:00 UTC"):
        Trace(tmp_path / "t", since_ns=late_ns)
