"""Any table of requests by a mapping: what a mapping may say, what is guessed, and that values come through whole."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailscope import mapping, registry
from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.errors import UsageError
from tailscope.ingest import ingest
from tailscope.mapping import UNITS_NS
from tailscope.mapping_guess import guess
from tailscope.source import Options, Source
from tailscope.store import Trace

READER = next(c for c in [registry.table_collector()] if c)
#: 2026, in nanoseconds.
NOW = 1_790_000_000_000_000_000

Record = dict[str, Any]


def read(path: Path, told: dict[str, Any], **options: Any) -> tuple[list[Record], Source]:
    source = Source(path, options=Options(mapping=mapping.parse(told), **options))
    return [row for _, batch in READER.read(source) for row in batch.to_pylist()], source


def write(folder: Path, kind: str, rows: list[Record]) -> Path:
    path = folder / f"log.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


def in_unit(ns: int, unit: str) -> str:
    """Digits of a time in `unit`, all of them."""
    scale = UNITS_NS[unit]
    whole, rest = divmod(ns, scale)
    return str(whole) if scale == 1 else f"{whole}.{rest:0{len(str(scale)) - 1}d}"


requests = st.fixed_dictionaries(
    {
        "arrival": st.integers(NOW, NOW + 10**15),
        "ttft": st.integers(0, 10**12),
        "more": st.integers(0, 10**13),
        "prompt": st.integers(0, 2**31 - 1),
        # Not a word for "nothing", such as null.
        "id": st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=9).map(
            "r-{}".format
        ),
    }
)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests, min_size=1, max_size=30), st.sampled_from(list(UNITS_NS)), st.randoms())
def test_times_come_through_in_every_unit_and_order_changes_nothing(
    tmp_path: Path, kind: str, drawn: list[Record], unit: str, random: Any
) -> None:
    rows = [
        {
            "id": r["id"],
            "at": in_unit(r["arrival"], unit),
            "ttft": in_unit(r["ttft"], unit),
            "e2e": in_unit(r["ttft"] + r["more"], unit),
            "n": r["prompt"],
        }
        for r in drawn
    ]
    told = {
        "columns": {
            "id": "id",
            "arrival": {"column": "at", "unit": unit},
            "ttft": {"column": "ttft", "unit": unit},
            "e2e": {"column": "e2e", "unit": unit},
            "prompt_tokens": "n",
        }
    }
    got, source = read(write(tmp_path, kind, rows), told)
    assert not source.tally.rejected and not source.tally.blanked
    assert [
        (g["arrival_ns"], g["ttft_ns"], g["e2e_ns"], g["prompt_tokens"], g["request_id"]) for g in got
    ] == [(r["arrival"], r["ttft"], r["ttft"] + r["more"], r["prompt"], r["id"]) for r in drawn]
    assert all(g["finished_ns"] == g["arrival_ns"] + g["e2e_ns"] for g in got)
    random.shuffle(rows)
    again, _ = read(write(tmp_path, kind, rows), told)

    def content(found: list[Record]) -> list[Any]:
        return sorted(str({k: v for k, v in row.items() if k != "file_row"}) for row in found)

    assert content(again) == content(got)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=9, max_size=9), max_size=8
    ),
    st.sampled_from(["csv", "jsonl"]),
)
def test_no_text_in_a_log_can_stop_its_ingest(tmp_path: Path, cells: list[list[str]], kind: str) -> None:
    keys = ("finished", "queue", "decode", "priority", "engine", "max_tokens", "trace_id", "status", "tenant")
    columns: dict[str, Any] = {"arrival": {"column": "at", "unit": "s"}}
    for key in keys:
        unit = "iso8601" if key == "finished" else "ms"
        columns[key] = {"column": key, "unit": unit} if key in ("finished", "queue", "decode") else key
    whole = {"at": "1790000000", **dict.fromkeys(keys, ""), "finished": "2026-10-01T10:00:00Z"}
    rows = [whole] * (2 * len(cells) + 1)
    rows += [{"at": "1790000001", **dict(zip(keys, row, strict=True))} for row in cells]
    got, _ = read(write(tmp_path, kind, rows), {"columns": columns})
    assert len(got) == len(rows)
    assert all(row["status"] in (None, *mapping.STATUSES) for row in got)


def test_equal_rows_without_ids_are_requests_of_their_own(tmp_path: Path) -> None:
    rows = [{"t": 1790000000, "n": 5}] * 3 + [{"t": 1790000001, "n": 5}]
    told = {"columns": {"arrival": {"column": "t", "unit": "s"}, "prompt_tokens": "n"}}
    got, _ = read(write(tmp_path, "csv", rows), told)
    assert len({row["request_key"] for row in got}) == 4
    assert [row["file_row"] for row in got] == [1, 2, 3, 4]


def test_columns_that_differ_in_case_are_two(tmp_path: Path) -> None:
    rows = [{"t": 1790000000, "T": "acme"}]
    told = {"columns": {"arrival": {"column": "t", "unit": "s"}, "tenant": "T"}}
    got, _ = read(write(tmp_path, "csv", rows), told)
    assert got[0]["tenant"] == "acme"


def test_a_line_of_json_may_be_long(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 300_000, "t": 1790000000 + i, "id": f"r{i}"} for i in range(3)]
    told = {"columns": {"arrival": {"column": "t", "unit": "s"}, "id": "id"}}
    got, _ = read(write(tmp_path, "jsonl", rows), told)
    assert [row["request_id"] for row in got] == ["r0", "r1", "r2"]


def test_many_rows_come_in_small_batches_and_in_order(tmp_path: Path) -> None:
    count = 200_000
    path = tmp_path / "log.csv"
    path.write_text("id,t\n" + "".join(f"r{i},{1790000000 + i}\n" for i in range(count)))
    told = mapping.parse({"columns": {"arrival": {"column": "t", "unit": "s"}, "id": "id"}})
    sizes, rows = [], []
    for _, batch in READER.read(Source(path, options=Options(mapping=told))):
        sizes.append(batch.num_rows)
        rows += batch["file_row"].to_pylist()
    assert rows == list(range(1, count + 1)) and max(sizes) <= 100_000


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("", "[columns] is missing"),
        ("arrival = 1", "arrival: unknown key; known are clock, columns, instance, observer, status, zone; arrival belongs under [columns]"),
        ("observer = 'me'\n[columns]", "observer: 'me' is unknown; use one of client, gateway, engine"),
        ("clock = 'sun'\n[columns]", "clock: 'sun' is unknown; use one of wall, monotonic"),
        ("zone = 'Mars'\n[columns]", "zone: 'Mars': no such time zone"),
        ("[columns]\nttft = { column = 'a', unit = 's' }", "[columns] must have arrival, or both finished and e2e"),
        ("[columns]\narrivel = 'a'", "columns.arrivel: unknown key; known are adapter, arrival,"),
        ("[columns]\narrival = 'a'", "columns.arrival: needs a unit: write { column = \"a\", unit = \"…\" } with s, ms, us or ns, or iso8601"),
        ("[columns]\narrival = { column = 'a' }", "columns.arrival: needs a unit: s, ms, us or ns, or iso8601"),
        ("[columns]\nttft = { column = 'a', unit = 'iso8601' }", "columns.ttft: unit 'iso8601' is unknown; use s, ms, us or ns"),
        ("[columns]\narrival = { column = 'a', unit = 'minutes' }", "columns.arrival: unit 'minutes' is unknown"),
        ("[columns]\nid = { column = 'a', unit = 's' }", "columns.id: has no unit"),
        ("[columns]\nid = 7", "columns.id: must be the name of a column"),
        ("[columns]\narrival = { from = 'a', to = 'b', unit = 's' }", "columns.arrival: only a duration can be the time from one column to another"),
        ("[columns]\nqueue = { from = 'a', unit = 's' }", "columns.queue: only a duration can be the time from one column to another, both named"),
        ("[columns]\nqueue = { col = 'a', unit = 's' }", "columns.queue.col: unknown key; known are column, from, to, unit"),
        ("instance = 'a'\n[columns]\narrival = { column = 'a', unit = 's' }\ninstance = 'b'", "instance and columns.instance: give one of the two"),
        ("[columns]\narrival = { column = 'a', unit = 's' }\n[status]\nok = 'x'", "[status] needs columns.status"),
        ("[columns]\narrival = { column = 'a', unit = 's' }\nstatus = 's'\n[status]\nfine = 'x'", "status.fine: unknown; use one of ok, error,"),
        ("[columns]\narrival = { column = 'a', unit = 's' }\nstatus = 's'\n[status]\nok = 'X'\nerror = ['x']", "status.error: 'x' has two meanings"),
        ("[columns]\narrival = { column = 'a', unit = 's' }\nstatus = 's'\n[status]\nok = [true]", "status.ok: must be texts of the column"),
        ("[columns", "not valid TOML"),
    ],
)  # fmt: skip
def test_a_mapping_that_is_wrong_is_told_where(tmp_path: Path, toml: str, message: str) -> None:
    path = tmp_path / "mapping.toml"
    path.write_text(toml)
    with pytest.raises(UsageError) as caught:
        mapping.load(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_mapping_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the mapping: No such file"):
        mapping.load(tmp_path / "none.toml")


GUESSED = {
    "requestId": "ab12",
    "start_time": "2026-10-01T10:00:00.5Z",
    "time_to_first_token_ms": "12.5",
    "latency": "1.5",
    "queue_time_us": "7",
    "input_tokens": "100",
    "usage.cached_tokens": "64",
    "completion_tokens": "20",
    "http_status": "200",
    "customer": "acme",
    "user_email": "someone@example.org",
    "prompt": "a secret",
    "pod": "pod-1",
}


def test_what_is_guessed_is_a_mapping(tmp_path: Path) -> None:
    path = write(tmp_path, "csv", [GUESSED] * 3)
    table = READER.table_of(Source(path))
    assert table is not None
    text = guess(table, path.name)
    assert "someone" not in text and "a secret" not in text
    told = mapping.parse(tomllib.loads(text))
    assert {key: (f.column, f.unit) for key, f in told.fields.items()} == {
        "id": ("requestId", ""),
        "arrival": ("start_time", "iso8601"),
        "ttft": ("time_to_first_token_ms", "ms"),
        "e2e": ("latency", "s"),
        "queue": ("queue_time_us", "us"),
        "prompt_tokens": ("input_tokens", ""),
        "cached_tokens": ("usage.cached_tokens", ""),
        "output_tokens": ("completion_tokens", ""),
        "status": ("http_status", ""),
        "tenant": ("customer", ""),
        "instance": ("pod", ""),
    }
    got, source = read(path, tomllib.loads(text))
    assert len(got) == 3 and not source.tally.blanked
    assert got[0]["arrival_ns"] == 1_790_848_800_500_000_000
    assert (got[0]["ttft_ns"], got[0]["e2e_ns"], got[0]["queue_ns"]) == (12_500_000, 1_500_000_000, 7_000)


def test_a_guess_says_what_it_could_not_find(tmp_path: Path) -> None:
    table = READER.table_of(Source(write(tmp_path, "jsonl", [{"a": 1, "b": 2}])))
    assert table is not None
    text = guess(table, "log\x1b[31m")
    assert "\x1b" not in text
    assert "# arrival = {" in text and "Columns that are not used: a, b." in text


@pytest.mark.parametrize(
    "content",
    [
        b"2026-10-01 INFO: hello, world\n2026-10-01 INFO: more, of it\n",
        b"plain text\nof two lines\n",
        b'{"whole": "document"}\n',
        b"\x00\x01\x02,\x03\n",
        b"1,2,3\n4,5,6\n",
        b"PAR1 is not Parquet",
        b"# HELP x y, z\nvllm:x{a=\"b\",c=\"d\"} 1\n",
    ],
)  # fmt: skip
def test_what_is_no_table_is_not_taken_for_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert READER.table_of(Source(path)) is None


def test_a_table_without_a_mapping_is_said_to_be_one(tmp_path: Path) -> None:
    path = write(tmp_path, "csv", [{"a": 1, "b": 2, "c": 3}] * 2)
    (outcome,) = ingest([path], tmp_path / "t.parquet", config=Config(), options=Options())
    assert outcome.status == "skipped"
    assert outcome.message.startswith("a table of 3 columns ('a', 'b', 'c'); if a row of it is a request, ")
    assert "--map" in outcome.message and "--guess-map" in outcome.message


def test_the_same_file_with_another_mapping_needs_a_new_trace(tmp_path: Path) -> None:
    path = write(tmp_path, "csv", [{"t": 1790000000, "x": 5}])
    options = Options(mapping=mapping.parse({"columns": {"arrival": {"column": "t", "unit": "s"}}}))
    for expected in ("ingested", "known"):
        (outcome,) = ingest([path], tmp_path / "t.parquet", config=Config(), options=options)
        assert outcome.status == expected
    assert "--map need a new trace" in outcome.message


def test_a_csv_that_was_packed(tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "log"
    path.write_bytes(gzip.compress(b"t,n\n1790000000,5\n"))
    got, _ = read(path, {"columns": {"arrival": {"column": "t", "unit": "s"}, "prompt_tokens": "n"}})
    assert got[0]["prompt_tokens"] == 5


def test_a_clock_from_elsewhere_ends_when_the_file_was_written(tmp_path: Path) -> None:
    path = write(tmp_path, "csv", [{"t": 5, "e": 1}, {"t": 7, "e": 3}])
    os.utime(path, ns=(NOW, NOW))
    told = {
        "clock": "monotonic",
        "columns": {"arrival": {"column": "t", "unit": "s"}, "e2e": {"column": "e", "unit": "s"}},
    }
    got, source = read(path, told)
    assert [row["arrival_ns"] for row in got] == [NOW - 5 * 10**9, NOW - 3 * 10**9]
    assert source.clock == "monotonic" and source.offset_ns == NOW - 10 * 10**9


def test_nothing_but_the_named_columns_is_stored(tmp_path: Path) -> None:
    rows = [{"t": 1790000000, "prompt": "a secret", "headers": "Authorization: x"}]
    path = write(tmp_path, "csv", rows)
    got, _ = read(path, {"columns": {"arrival": {"column": "t", "unit": "s"}}})
    assert "secret" not in json.dumps(got) and "Authorization" not in json.dumps(got)


ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "request-log"


def test_the_page_explains_every_key_and_its_mapping_is_the_example() -> None:
    page = (ROOT / "docs" / "request-logs.md").read_text()
    table = page.partition("| `[columns]` |")[2].partition("\n\n")[0]
    explained = {key for line in table.splitlines() for key in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert explained == set(mapping.KEYS)
    shown = tomllib.loads(page.partition("```toml\n")[2].partition("```")[0])
    assert shown == tomllib.loads((EXAMPLE / "mapping.toml").read_text())


def test_the_example_is_diagnosed(tmp_path: Path) -> None:
    options = Options(mapping=mapping.load(EXAMPLE / "mapping.toml"))
    (outcome,) = ingest([EXAMPLE / "requests.csv"], tmp_path / "t.parquet", config=Config(), options=options)
    assert outcome.stored.rows["requests"] == 938
    assert not outcome.tally.rejected and not outcome.tally.blanked
    with Trace(str(tmp_path / "t.parquet")) as trace:
        diagnosis = diagnose(trace, Config())
    (finding,) = [f for f in diagnosis.findings if f.rule == "hol-coupling"]
    assert (finding.status, finding.culprit.id, finding.victims[0].id) == ("found", "<32k", "<512")


def test_requests_that_have_no_arrival_are_said_to_have_none(tmp_path: Path) -> None:
    path = ROOT / "tests" / "collectors" / "client_log" / "sglang-bench" / "input.jsonl"
    ingest([path], tmp_path / "t.parquet", config=Config(), options=Options())
    with Trace(str(tmp_path / "t.parquet")) as trace:
        diagnosis = diagnose(trace, Config())
    assert diagnosis.verdict.status == "no-data"
    assert diagnosis.verdict.text.startswith("No request of the trace has an arrival")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "tailscope", *words], capture_output=True, text=True, check=False
    )


def test_the_commands(tmp_path: Path) -> None:
    log = write(tmp_path, "csv", [GUESSED, {**GUESSED, "requestId": "cd34"}])
    told = tmp_path / "mapping.toml"
    guessed = command("ingest", str(log), "--guess-map")
    assert guessed.returncode == 0 and not guessed.stderr
    told.write_text(guessed.stdout)
    trace = str(tmp_path / "t.parquet")
    done = command("ingest", str(log), "--map", str(told), "-o", trace)
    assert done.returncode == 0 and "2 requests" in done.stdout, done.stderr
    told.write_text(guessed.stdout.replace('"latency"', '"latence"'))
    wrong = command("ingest", str(log), "--map", str(told), "-o", str(tmp_path / "u.parquet"))
    assert wrong.returncode == 2
    shown = " ".join(wrong.stdout.split())
    assert "log.csv, header: columns.e2e: no column 'latence'; the file has requestId," in shown
    for words, message in (
        (["--guess-map", "--map", str(told)], "give one of the two"),
        (["--map", str(tmp_path / "none")], "cannot read the mapping"),
    ):
        refused = command("ingest", str(log), *words)
        assert refused.returncode == 2 and message in refused.stderr
    refused = command("ingest", str(tmp_path), "--guess-map")
    assert refused.returncode == 2 and "name one file" in refused.stderr
