"""`tailscope query`: what is refused, what cannot be reached, and how results are written."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailscope import query
from tailscope.config import Config, RequestClass
from tailscope.errors import QueryError, UsageError
from tailscope.parts import SourceWriter
from tailscope.schema import BY_NAME, EVENTS
from tailscope.store import Trace

SECRET = "the-secret-outside"
HOSTILE = [
    "\x1b]0;title\x07\x1b[2J",
    "\u202egnp.exe",
    'a,b;"c"\td',
    "line\r\nbreak\rand\nmore",
    "=1+1",
    "[red]markup[/red] :smile:",
    "x" * 500,
    "",
    "NULL",
    "日本語 ≥32k",
    "\u2028\u00ad",
    None,
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trace, and files beside and inside it that are no part of the trace."""
    place = tmp_path_factory.mktemp("place")
    root = place / 'it\'s a "trace".parquet'
    _put(
        root,
        "requests",
        instance=["a", "a", "b", "b"],
        observer=["engine"] * 4,
        request_id=["r0", "r1", "r2", "r3"],
        arrival_ns=[100, 200, 300, None],
        prompt_tokens=[10, 5000, None, 20],
        output_tokens=[5, 5, 5, 5],
        klass=[None, None, "gold", None],
        ttft_ns=[2**53 + 1, 10, None, 30],
    )
    _put(root, "tokens", instance=["a", "b"], request_key=["k0", "k1"], time_ns=[150, 250], count=[1, 1])
    _put(root, "iterations", instance=["a"], end_ns=[10**18 + 7], elapsed_ns=[10**7], prefill_tokens=[8])
    _put(root, "series", instance=["a", "b"], name=["up", "up"], labels=[[("k", "v")], []])
    _put(root, "sources", instance=["a", "folder"], source=["s0", "s1"], instances=[["a"], ["b", "c"]])
    secret = place / "secret.csv"
    secret.write_text(f"a,b\n{SECRET},1\n")
    (place / "secret.json").write_text(json.dumps({"a": SECRET}))
    pq.write_table(pa.table({"a": [SECRET]}), place / "secret.parquet")
    with duckdb.connect(str(place / "secret.db")) as con:
        con.execute(f"CREATE TABLE secret AS SELECT '{SECRET}' AS a")
    (root / "link.csv").symlink_to(secret)
    (root / "requests" / ".link.parquet").symlink_to(place / "secret.parquet")
    return place


@pytest.fixture(scope="module")
def root(place: Path) -> Path:
    return place / 'it\'s a "trace".parquet'


@pytest.fixture(autouse=True)
def _unchanged(place: Path) -> Iterator[None]:
    """No test may change a byte or a time of anything there."""
    before = _state(place)
    yield
    assert _state(place) == before


@pytest.fixture
def fenced(root: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """The connection behind the checks of the statement, which must hold without them."""
    with Trace(root) as trace:
        query._fence(trace)
        yield trace.connection


def _put(root: Path, table: str, **columns: Any) -> None:
    (root / table).mkdir(parents=True)
    pq.write_table(BY_NAME[table].batch(columns), root / table / "rows.parquet")


def _state(place: Path) -> dict[str, tuple[int, str]]:
    return {
        str(p): (p.lstat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "")
        for p in sorted(place.rglob("*"))
    }


def _run(root: Path, sql: str, **options: Any) -> list[tuple[Any, ...]]:
    rows = query.run(str(root), sql, **options)
    return list(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def _written(table: pa.Table, format: Any, **options: Any) -> str:
    stream = io.StringIO(newline="")
    query.write(table, format, stream, **options)
    return stream.getvalue()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(*) FROM requests",
        "WITH r AS (SELECT * FROM requests) SELECT count(*) FROM r;",
        "FROM requests SELECT count(*) -- no more",
        "/* a */ VALUES (4)",
        "SELECT count(*) FROM query_table('requests')",
        "SELECT count(*) FROM range(4)",
        "(SELECT 4)",
    ],
)
def test_one_select_runs(root: Path, sql: str) -> None:
    assert _run(root, sql) == [(4,)]


@pytest.mark.parametrize(
    "sql", ["DESCRIBE requests", "SHOW TABLES", "SUMMARIZE requests", "DESCRIBE SELECT 1"]
)
def test_what_the_parser_calls_a_select_runs(root: Path, sql: str) -> None:
    assert _run(root, sql)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("COPY requests TO 'x.csv'", "a COPY statement"),
        ("ATTACH 'x.db'", "an ATTACH statement"),
        ("DETACH memory", "a DETACH statement"),
        ("INSTALL httpfs", "an INSTALL statement"),
        ("LOAD httpfs", "a LOAD statement"),
        ("SET threads = 1", "a SET statement. Only one SELECT can be run; --memory-limit and --timeout"),
        ("RESET threads", "a RESET statement"),
        ("USE memory", "a USE statement"),
        ("PRAGMA version", r"a PRAGMA statement|Only SELECT"),
        ("PRAGMA memory_limit = '1TB'", "a PRAGMA statement"),
        ("CALL pragma_version()", "a CALL statement"),
        ("CREATE TABLE x AS SELECT 1", "a CREATE statement"),
        ("CREATE MACRO f() AS 1", "a CREATE statement"),
        ("CREATE SECRET s (TYPE s3)", "a CREATE statement"),
        ("DROP VIEW requests", "a DROP statement"),
        ("ALTER VIEW requests RENAME TO r", "an ALTER statement"),
        ("INSERT INTO requests VALUES (1)", "an INSERT statement"),
        ("WITH x AS (SELECT 1) INSERT INTO requests SELECT * FROM x", "an INSERT statement"),
        ("UPDATE requests SET engine = 1", "an UPDATE statement"),
        ("DELETE FROM requests", "a DELETE statement"),
        ("EXPORT DATABASE 'x'", "an EXPORT statement"),
        ("EXPLAIN SELECT 1", "an EXPLAIN statement"),
        ("BEGIN", "a TRANSACTION statement"),
        ("PREPARE p AS SELECT 1", "a PREPARE statement"),
        ("SELECT 1; SELECT 2", "holds 2 statements. Give exactly one SELECT"),
        ("SELECT 1; COPY requests TO 'x.csv'", "holds 2 statements"),
        ("", "is empty. Give one SELECT, for example"),
        ("  -- nothing", "is empty"),
        ("/* nothing */ ;", "is empty"),
        ("SELECT 1 \0", "null character"),
        ("SELECT '\ud800'", "not valid UTF-8"),
        ("SELEC 1", 'syntax error at or near "SELEC"'),
        ("SELECT $1", "Values were not provided|can't be prepared"),
        ("SELECT " + "1 + " * 3000 + "1", "[Mm]ax expression depth"),
    ],
)
def test_all_else_is_refused_by_name(root: Path, sql: str, message: str) -> None:
    with pytest.raises(QueryError, match=message):
        query.run(str(root), sql)


def test_import_reads_nothing_while_it_is_parsed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.sql").write_text(f"SELECT '{SECRET}'")
    (tmp_path / "load.sql").write_text("")
    with pytest.raises(QueryError, match=r"an IMPORT statement|own files only") as refused:
        query.run(str(root), f"IMPORT DATABASE '{tmp_path}'")
    assert SECRET not in str(refused.value)


def test_errors_help_on(root: Path) -> None:
    with pytest.raises(QueryError, match=r'"ttft" not found.*"ttft_ns".*Tables are requests, tokens'):
        query.run(str(root), "SELECT ttft FROM requests")
    with pytest.raises(QueryError, match=r'Did you mean "requests"\. Tables are'):
        query.run(str(root), "SELECT * FROM reqests")
    with pytest.raises(QueryError, match=r"Could not convert string 'r\d'[^\n]*$"):
        query.run(str(root), "SELECT request_id::INT FROM requests")
    with pytest.raises(UsageError, match="--timeout"):
        query.run(str(root), "SELECT 1", timeout_s=float("nan"))
    with pytest.raises(UsageError, match="--memory-limit"):
        query.run(str(root), "SELECT 1", memory_limit="lots")


def _writers(target: str) -> list[str]:
    copy = f"COPY (SELECT 1) TO {_sql(target)} (FORMAT csv, USE_TMP_FILE false)"
    writing = f"WITH x AS ({copy}) SELECT 1"
    return [
        writing,
        f"SELECT * FROM ({writing})",
        f"SELECT (WITH x AS ({copy}) SELECT 1)",
        "WITH x AS (DELETE FROM requests) SELECT 1",
        "WITH x AS (INSERT INTO requests VALUES (1) RETURNING *) SELECT 1",
        "WITH x AS (UPDATE requests SET engine = 1 RETURNING *) FROM x",
        f"FROM json_execute_serialized_sql(json_serialize_sql({_sql(writing)}))",
        f'FROM system.main."JSON_execute_serialized_SQL"(json_serialize_sql({_sql(writing)}))',
        f"FROM query({_sql(writing)})",
        f"FROM query('FROM json_execute_serialized_sql(json_serialize_sql({_sql(_sql(writing))[1:-1]}))')",
        f"FROM destroy_external_resource('json_execute_serialized_sql', {_sql(writing)})",
        f"FROM enable_logging(storage := 'file', storage_path := {_sql(target)})",
        f"FROM enable_profiling(save_location := {_sql(target)})",
        "FROM checkpoint()",
    ]


def _sql(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@pytest.mark.parametrize("number", range(len(_writers(""))))
def test_a_select_cannot_write_the_files_it_may_read(root: Path, number: int) -> None:
    """The fixture sees that nothing changed."""
    sql = _writers(str(root / "requests" / "rows.parquet"))[number]
    with pytest.raises(QueryError, match=r"inside WITH|table function \w+ cannot be used|[Pp]arser|CTE"):
        query.run(str(root), sql)


def _readers(place: Path, root: Path) -> list[str]:
    files = [place / "secret.csv", place / "secret.json", place / "secret.parquet", place / "secret.db"]
    files += [root / "link.csv", root / "requests" / ".link.parquet"]
    files += [root / "requests" / "rows.parquet" / ".." / ".." / ".." / "secret.csv"]
    functions = [
        *("read_csv", "read_csv_auto", "read_text", "read_blob", "sniff_csv", "glob", "query_table"),
        *("read_json", "read_json_auto", "read_json_objects", "read_ndjson", "read_duckdb", "read_parquet"),
        *(
            "parquet_scan",
            "parquet_metadata",
            "parquet_schema",
            "parquet_kv_metadata",
            "parquet_file_metadata",
        ),
    ]
    reads = [f"FROM {function}({_sql(str(file))})" for function in functions for file in files]
    reads += [f"FROM {_sql(str(file))}" for file in files]
    reads += [f'FROM "{file}"' for file in files[:4]]
    folder = str(place).replace("'", "''")
    reads += [
        f"FROM read_csv('{folder}/*.csv')",
        f"FROM read_parquet('{folder}/**/*.parquet')",
        f"FROM read_text(['{folder}/secret.csv'])",
        f"FROM read_text('file://{folder}/secret.csv')",
        f"FROM glob('{folder}/*')",
        f"FROM query('FROM read_text(''{folder}/secret.csv'')')",
        f"FROM query('SELECT * FROM ''{folder}/secret.csv''')",
        f"SELECT (SELECT content FROM read_text('{folder}/secret.csv'))",
        f"WITH x AS (FROM '{folder}/secret.csv') FROM x",
        f"SUMMARIZE '{folder}/secret.csv'",
        f"DESCRIBE '{folder}/secret.csv'",
        "FROM 'https://127.0.0.1:9/x.csv'",
        "FROM read_csv('https://127.0.0.1:9/x.csv')",
        "FROM read_parquet('s3://bucket/x.parquet')",
        "FROM read_text('/proc/self/environ')",
        "FROM read_text('/dev/stdin')",
        "SELECT getenv('HOME')",
        "FROM duckdb_secrets()",
        "FROM which_secret('s3://bucket', 's3')",
        "FROM duckdb_extensions()",
    ]
    return reads


def test_no_other_file_can_be_read(place: Path, root: Path, fenced: duckdb.DuckDBPyConnection) -> None:
    for sql in _readers(place, root):
        with pytest.raises(QueryError) as refused:
            query.run(str(root), sql)
        assert SECRET not in str(refused.value), sql
        try:
            reached = str(fenced.sql(sql).fetchall())
        except duckdb.Error as error:
            reached = str(error)
            assert SECRET not in reached, sql
        else:
            assert reached == "[]", sql


def test_the_folder_to_spill_to_leads_nowhere(
    place: Path, root: Path, fenced: duckdb.DuckDBPyConnection
) -> None:
    [(spill,)] = fenced.sql("SELECT current_setting('temp_directory')").fetchall()
    way = os.path.relpath(place / "secret.csv", spill)
    with pytest.raises(duckdb.Error, match="Permission Error"):
        fenced.sql(f"FROM read_text({_sql(f'{spill}/{way}')})").fetchall()


def test_no_function_of_duckdb_reads_or_writes(
    place: Path, root: Path, fenced: duckdb.DuckDBPyConnection
) -> None:
    """Whatever takes a text is given a path outside, and a part of the trace: the fixture sees writes."""
    functions = fenced.sql(
        "SELECT DISTINCT function_name, function_type FROM duckdb_functions() "
        "WHERE function_type IN ('scalar', 'table') AND function_name NOT LIKE 'icu_collate%' AND "
        "regexp_full_match(function_name, '[a-z_0-9]+') "
        "AND parameter_types[1]::VARCHAR IN ('VARCHAR', 'ANY', 'ANY[]')"
    ).fetchall()
    assert len(functions) > 100
    for name, kind in functions:
        for file in (place / "secret.csv", root / "requests" / "rows.parquet"):
            for argument in (_sql(str(file)), f"[{_sql(str(file))}]"):
                call = f"{name}({argument})"
                sql = f"FROM {call}" if kind == "table" else f"SELECT {call}"
                try:
                    result = str(fenced.execute(sql).fetchmany(10))
                except duckdb.Error as error:
                    result = str(error)
                assert SECRET not in result, sql


def test_stored_secrets_are_not_loaded(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    secrets = "SELECT name FROM duckdb_secrets()"
    with duckdb.connect(config={"autoinstall_known_extensions": False}) as con:
        try:
            con.execute(f"CREATE PERSISTENT SECRET mine (TYPE http, BEARER_TOKEN '{SECRET}')")
        except duckdb.Error:
            pytest.skip("this DuckDB has no secrets without an extension")
    with duckdb.connect() as con:
        assert con.execute(secrets).fetchall() == [("mine",)]
    with Trace(root) as trace:
        query._fence(trace)
        assert trace.connection.execute(secrets).fetchall() == []


def test_settings_stay_locked(fenced: duckdb.DuckDBPyConnection) -> None:
    for setting in ("enable_external_access = true", "allowed_paths = ['/']", "memory_limit = '1TB'"):
        with pytest.raises(duckdb.Error, match=r"locked|while database is running|cannot be"):
            fenced.execute(f"SET {setting}")
    [(value,)] = fenced.sql("SELECT current_setting('enable_external_access')").fetchall()
    assert value is False


frame_of_module = pd.DataFrame({"a": [SECRET]})


def test_python_variables_cannot_be_read(root: Path, fenced: duckdb.DuckDBPyConnection) -> None:
    frame = pd.DataFrame({"a": [SECRET]})
    arrow = pa.table({"a": [SECRET]})
    assert len(frame) == arrow.num_rows == 1
    for name in ("frame", "arrow", "frame_of_module"):
        with pytest.raises(QueryError, match="does not exist"):
            query.run(str(root), f"SELECT * FROM {name}")
        with pytest.raises(duckdb.Error):
            fenced.sql(f"SELECT * FROM {name}").fetchall()


def test_timeout(root: Path) -> None:
    for sql in (
        "SELECT count(*) FROM range(10000000) a, range(10000000) b",
        "SELECT count(a.range) FROM range(10000000) a, range(10000000) b WHERE hash(a.range, b.range) = 1",
    ):
        start = time.monotonic()
        with pytest.raises(QueryError, match=r"stopped after 1 s\..*raise --timeout"):
            query.run(str(root), sql, timeout_s=1, memory_limit="500MB")
        assert 1 <= time.monotonic() - start < 2


def test_timeout_while_rows_come(root: Path) -> None:
    sql = "SELECT a.range FROM range(1000000) a, range(1000000) b WHERE hash(a.range, b.range) % 100000 = 1"
    with pytest.raises(QueryError, match=r"stopped after 0\.5 s"):
        query.run(str(root), sql, timeout_s=0.5)


def test_long_timeouts_are_taken(root: Path) -> None:
    assert _run(root, "SELECT 1", timeout_s=float("inf")) == [(1,)]


def test_out_of_memory(root: Path) -> None:
    with pytest.raises(QueryError, match=r"needs more memory than 100MB.*raise --memory-limit.*DuckDB says"):
        query.run(str(root), "SELECT list(range) FROM range(100000000)", memory_limit="100MB", threads=2)
    with pytest.raises(QueryError, match=r"result is larger than 50MB.*LIMIT.*--memory-limit"):
        query.run(str(root), "SELECT * FROM range(100000000)", memory_limit="50MB")


def test_spills_and_cleans_up(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    numbered = "SELECT row_number() OVER (ORDER BY hash(range)) AS n FROM range(4000000)"
    sql = f"SELECT max(n), count(*) FROM ({numbered})"
    assert _run(root, sql, memory_limit="80MB", threads=2) == [(4_000_000, 4_000_000)]
    with pytest.raises(QueryError):
        query.run(str(root), "COPY requests TO 'x'")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_is_heard(root: Path) -> None:
    code = (
        "import sys; from tailscope import query; print('ready', flush=True);"
        "query.run(sys.argv[1], 'SELECT count(*) FROM range(10000000) a, range(10000000) b', timeout_s=60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.5)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert b"KeyboardInterrupt" in errors
    assert time.monotonic() - start < 5


def test_scope(root: Path) -> None:
    ids = "SELECT request_id FROM requests ORDER BY 1"
    assert _run(root, ids, scope={"from_ns": 200}) == [("r1",), ("r2",)]
    assert _run(root, ids, scope={"to_ns": 200}) == [("r0",)]
    assert _run(root, ids, scope={"from_ns": 100, "to_ns": 300, "instance": "a"}) == [("r0",), ("r1",)]
    assert _run(root, ids, scope={"instance": "b"}) == [("r2",), ("r3",)]
    assert _run(root, ids, scope={"instance": "it's; DROP"}) == []
    assert _run(root, "SELECT time_ns FROM tokens", scope={"from_ns": 200}) == [(250,)]
    assert _run(root, "SELECT name FROM series", scope={"from_ns": 200}) == [("up",), ("up",)]
    assert _run(root, "SELECT source FROM sources", scope={"instance": "c"}) == [("s1",)]
    assert _run(root, ids, scope={}) == [("r0",), ("r1",), ("r2",), ("r3",)]


def test_scope_by_class(root: Path) -> None:
    ids = "SELECT request_id FROM requests ORDER BY 1"
    assert _run(root, ids, scope={"klass": "<512"}) == [("r0",), ("r3",)]
    assert _run(root, ids, scope={"klass": "gold"}) == [("r2",)]
    config = Config(classes=(RequestClass("it's big", {"prompt_tokens": (1000, None)}),))
    assert _run(root, ids, scope={"klass": "it's big"}, config=config) == [("r1",)]
    assert _run(root, ids, scope={"klass": "unknown", "to_ns": 250}, config=config) == [("r0",)]
    assert _run(root, "SELECT count(*) FROM tokens", scope={"klass": "gold"}) == [(2,)]


def test_a_lone_file_and_a_glob(root: Path) -> None:
    assert _run(root / "requests" / "rows.parquet", "SELECT count(*) FROM requests") == [(4,)]
    assert _run(root / "*" / "*.parquet", "SELECT count(*) FROM tokens") == [(2,)]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    root = tmp_path_factory.mktemp("hostile")
    rows = BY_NAME["requests"].batch({"request_id": HOSTILE, "prompt_tokens": [2**63 - 1] * len(HOSTILE)})
    (root / "requests").mkdir()
    rows = rows.append_column('\x1b[31m"unknown",\n', pa.array(HOSTILE))
    pq.write_table(rows, root / "requests" / "rows.parquet")
    return query.run(
        str(root),
        "SELECT request_id, prompt_tokens, COLUMNS(lambda c: c LIKE '%unknown%') FROM requests",
    )


def test_hostile_values_cannot_drive_a_terminal(hostile: pa.Table) -> None:
    text = _written(hostile, "table")
    assert all(c.isprintable() or c == "\n" for c in text)
    assert len(text.splitlines()) == len(HOSTILE) + 2
    assert r"\x1b]0;title\x07\x1b[2J" in text
    assert "[red]markup[/red] :smile:" in text
    assert "x" * 199 + "…" in text
    assert "x" * 200 not in text


def test_csv_gives_values_as_they_are(hostile: pa.Table) -> None:
    text = _written(hostile, "csv")
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert rows[0] == ["request_id", "prompt_tokens", '\x1b[31m"unknown",\n']
    assert [row[0] for row in rows[1:]] == [value or "" for value in HOSTILE]
    assert {row[1] for row in rows[1:]} == {str(2**63 - 1)}
    assert text.endswith(f",{2**63 - 1},\n")
    assert f'"",{2**63 - 1},""\n' in text


def test_json_gives_values_as_they_are(hostile: pa.Table) -> None:
    rows = json.loads(_written(hostile, "json"))
    assert [row["request_id"] for row in rows] == HOSTILE
    assert [row['\x1b[31m"unknown",\n'] for row in rows] == HOSTILE
    assert rows[0]["prompt_tokens"] == 2**63 - 1


TYPES = {
    "1": (1, "1"),
    "9007199254740993": (2**53 + 1, str(2**53 + 1)),
    "18446744073709551615::UBIGINT": (2**64 - 1, str(2**64 - 1)),
    "170141183460469231731687303715884105::HUGEINT": (170141183460469231731687303715884105,) * 2,
    "1.10::DECIMAL(5, 2)": (1.1, "1.10"),
    "0.1::DOUBLE": (0.1, "0.1"),
    "'nan'::DOUBLE": (None, "nan"),
    "'-infinity'::DOUBLE": (None, "-inf"),
    "true": (True, "true"),
    "NULL": (None, ""),
    "NULL::TIMESTAMP": (None, ""),
    "TIMESTAMP '2026-01-02 03:04:05.5'": ("2026-01-02T03:04:05.5",) * 2,
    "TIMESTAMP_NS '2026-01-02 03:04:05.123456789'": ("2026-01-02T03:04:05.123456789",) * 2,
    "TIMESTAMPTZ '2026-01-02 03:04:05+01'": ("2026-01-02T02:04:05Z",) * 2,
    "TIMESTAMP '1969-12-31 23:59:59.75'": ("1969-12-31T23:59:59.75",) * 2,
    "'infinity'::TIMESTAMP": ("infinity",) * 2,
    "'-infinity'::TIMESTAMPTZ": ("-infinity",) * 2,
    "TIMESTAMP '12345-01-01'": ("327403382400000000/1000000 s",) * 2,
    "DATE '2026-01-02'": ("2026-01-02",) * 2,
    "DATE '12345-01-01'": ("3789391 days",) * 2,
    "TIME '24:00:00'": ("24:00:00",) * 2,
    "INTERVAL '1 month 2 days 3.5 seconds'": ("P1M2DT3.5S",) * 2,
    "[1, NULL]": ([1, None], "[1,null]"),
    "[DATE '2026-01-02', NULL]": (["2026-01-02", None], '["2026-01-02",null]'),
    "[1, 2]::INT[2]": ([1, 2], "[1,2]"),
    "['nan'::DOUBLE]": ([None], "[null]"),
    "{'a': TIMESTAMP '2026-01-02', 'b': 'x\"'}": (
        {"a": "2026-01-02T00:00:00", "b": 'x"'},
        '{"a":"2026-01-02T00:00:00","b":"x\\""}',
    ),
    "map {'k': 1.5::DECIMAL(3, 1)}": ({"k": 1.5}, '{"k":1.5}'),
    "map {1: 'v'}": ([[1, "v"]], '[[1,"v"]]'),
    "'\\xAA'::BLOB": ("aa",) * 2,
    "'5a7f1d0e-0000-4000-8000-000000000000'::UUID": ("5a7f1d0e-0000-4000-8000-000000000000",) * 2,
    "'b'::ENUM('a', 'b')": ("b",) * 2,
    "'{}'::JSON": ("{}",) * 2,
    "union_value(k := 1)": (1, "1"),
}


@pytest.mark.parametrize("expression", TYPES)
def test_every_type_is_written(root: Path, expression: str) -> None:
    in_json, in_csv = TYPES[expression]
    table = query.run(str(root), f"SELECT {expression} AS v")
    assert json.loads(_written(table, "json")) == [{"v": in_json}]
    assert next(csv.DictReader(io.StringIO(_written(table, "csv")))) == {"v": str(in_csv)}
    assert _written(table, "table")


def test_big_integers_are_written_exactly(root: Path) -> None:
    table = query.run(str(root), "SELECT sum(ttft_ns) AS s FROM requests WHERE ttft_ns > 100")
    assert _written(table, "json") == f'[\n{{"s":{2**53 + 1}}}\n]\n'
    assert _written(table, "csv") == f'"s"\n{2**53 + 1}\n'


def test_empty_results_and_equal_names(root: Path) -> None:
    empty = query.run(str(root), "SELECT request_id, engine FROM requests WHERE false")
    assert _written(empty, "csv") == '"request_id","engine"\n'
    assert _written(empty, "json") == "[]\n"
    assert _written(empty, "table").endswith("no rows\n")
    twice = query.run(str(root), "SELECT 1 AS a, 2 AS a, 3 AS a_1")
    assert json.loads(_written(twice, "json")) == [{"a": 1, "a_1": 2, "a_1_1": 3}]
    assert _written(twice, "csv") == '"a","a","a_1"\n1,2,3\n'


def test_a_table_is_cut_and_says_so(root: Path) -> None:
    table = query.run(str(root), "SELECT range AS n, 'x' AS t, range / 3 AS f FROM range(70000)")
    lines = _written(table, "table").splitlines()
    assert lines[-1].startswith("69,800 more rows left out")
    assert lines[2].split() == ["0", "x", "0"]
    assert lines[201].split() == ["199", "x", "66.3333"]
    assert lines[2].startswith("  0   x")
    assert _written(table, "table", limit=1).splitlines()[-1].startswith("69,999 more")
    assert "left out" not in _written(table.slice(0, 300), "table", limit=None)
    assert len(json.loads(_written(table, "json"))) == 70_000
    assert _written(table, "csv").count("\n") == 70_001


def test_rows_come_in_order(root: Path) -> None:
    rows = _run(root, "SELECT range FROM range(1000000) ORDER BY range DESC")
    assert rows == [(n,) for n in reversed(range(1_000_000))]


def test_examples_of_the_documentation(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parent.parent / "docs" / "query.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.parquet").symlink_to(root)
    results = []
    for command in re.findall(r"```sh\n(.*?)```", text, re.S):
        words = shlex.split(command)
        assert words[:3] == ["tailscope", "query", "trace.parquet"]
        results.append(query.run("trace.parquet", words[-1]))
    assert results[0].to_pylist()[0]["requests"] == 2
    ended = results[1]["ended"].cast(pa.int64()).to_pylist()
    assert ended == [10**18 + 7]
    assert _written(results[1], "csv").splitlines()[1].startswith('"2001-09-09T01:46:40.000000007","a",10,8,')
    [code] = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102
    assert {row["class"]: row["requests"] for row in names["table"].to_pylist()} == {
        "<512": 2,
        "<8k": 1,
        "gold": 1,
    }


def test_a_path_that_looks_like_a_pattern_is_a_path(tmp_path: Path) -> None:
    place = tmp_path / "a[1]*?" / "t.parquet"
    with SourceWriter(place, "0" * 16) as writer:
        writer.write(EVENTS, EVENTS.batch({"instance": ["a"], "time_ns": [1], "kind": ["restart"]}))
        writer.commit({"kind": "test"})
    assert query.run(str(place), "SELECT count(*) AS n FROM events").to_pylist() == [{"n": 1}]
