"""The vllm_log collector on whole captures, with the stat logger's records of the same runs as the truth."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from real import CAPTURES, CORPUS, EXAMPLE, needs_captures, needs_corpus

from tailscope import registry
from tailscope.source import Options, Source

LOG = next(c for c in registry.collectors() if c.name == "vllm_log")
RUNS = CAPTURES / "vllm-cpu"
SECOND = 1_000_000_000

Rows = list[dict[str, Any]]


def dated(path: Path, folder: Path, when: str = "2026-11-30T00:00:00+00:00") -> Path:
    """A copy last written at a time that is right for the log, as a checkout's is not."""
    copy = folder / path.name
    shutil.copyfile(path, copy)
    at = datetime.fromisoformat(when).timestamp()
    os.utime(copy, (at, at))
    return copy


def written(folder: Path, when: str, *lines: str) -> Path:
    path = folder / "server.log"
    path.write_text("\n".join(lines) + "\n")
    at = datetime.fromisoformat(when).timestamp()
    os.utime(path, (at, at))
    return path


def read(path: Path, options: Options | None = None) -> tuple[dict[str, Rows], Source]:
    source = Source(path, options=options)
    rows: dict[str, Rows] = {table.name: [] for table in LOG.tables}
    for table, batch in LOG.read(source):
        rows[table.name] += batch.to_pylist(maps_as_pydicts="strict")
    return rows, source


def truth(folder: Path) -> dict[tuple[int, int], tuple[int, dict[str, Any]]]:
    """(engine, iteration) -> (end, details), as the stat logger had them."""
    steps = {}
    for path in folder.glob("statlogger_*.jsonl.gz"):
        with gzip.open(path) as lines:
            for record in map(json.loads, lines):
                details = (record.get("scheduler_stats") or {}).get("iteration_details")
                if details:
                    iteration = record["iteration_stats"]
                    end = iteration["iteration_timestamp"] if iteration else record["wall"]
                    steps[record["engine_idx"], details["iteration_index"]] = round(end * 1e9), details
    return steps


def covered(rows: Rows, steps: dict[tuple[int, int], tuple[int, dict[str, Any]]]) -> float:
    inside: list[bool] = [
        abs(row["end_ns"] - steps[row["engine"], row["iteration"]][0]) <= row["time_error_ns"] for row in rows
    ]
    return sum(inside) / len(inside)


def assert_same_steps(rows: Rows, steps: dict[tuple[int, int], tuple[int, dict[str, Any]]]) -> None:
    names = {
        "prefill_requests": "num_ctx_requests",
        "prefill_tokens": "num_ctx_tokens",
        "decode_requests": "num_generation_requests",
        "decode_tokens": "num_generation_tokens",
        "is_dummy": "is_dummy",
    }
    assert Counter((row["engine"], row["iteration"]) for row in rows) == dict.fromkeys(steps, 1)
    for row in rows:
        _, details = steps[row["engine"], row["iteration"]]
        assert {name: row[name] for name in names} == {name: details[key] for name, key in names.items()}
        assert abs(row["elapsed_ns"] - details["elapsed_ms"] * 1e6) <= 5_001  # two decimals of a millisecond
    for engine in {row["engine"] for row in rows}:
        ends = [row["end_ns"] for row in rows if row["engine"] == engine]
        assert ends == sorted(ends)


def recognised(path: Path) -> bool:
    source = Source(path)
    return LOG.recognises(source.head(), source.name)


def test_example(tmp_path: Path) -> None:
    rows, source = read(dated(EXAMPLE / "server.log.gz", tmp_path))
    iterations, steps = rows["iterations"], truth(EXAMPLE)
    assert len(iterations) == 2261
    assert_same_steps(iterations, steps)
    assert covered(iterations, steps) >= 0.99
    # Order and elapsed time narrow the second that a line gives: half of the steps to better than 0.12 s.
    errors = sorted(row["time_error_ns"] for row in iterations)
    assert errors[len(errors) // 2] < 120_000_000
    assert errors[-1] <= SECOND // 2 + 5_000_000
    assert source.clock == "log"
    assert (source.offset_ns, source.offset_error_ns) == (0, SECOND)
    tally = source.tally
    assert not tally.rejected and not tally.blanked
    assert tally.notes == [
        "times are read as UTC of 2026: the year is from the file's time; --log-tz sets the zone"
    ]
    with gzip.open(source.path) as lines:
        total = sum(1 for line in lines if line.strip())
    aborted_again, statistics = 3, len(rows["metrics"]) // 6
    assert total == tally.skipped["other log line"] + 2261 + statistics + len(rows["events"]) + aborted_again


def test_events_of_the_example(tmp_path: Path) -> None:
    rows, _ = read(dated(EXAMPLE / "server.log.gz", tmp_path))
    assert [(row["kind"], row["detail"]) for row in rows["events"]] == [
        (
            "config",
            "block_size=32, num_gpu_blocks_override=384, max_num_batched_tokens=2048, max_num_seqs=48",
        ),
        ("restart", "engine started, vLLM 0.32.0"),
        ("config", "kv_cache_size_tokens=12288"),
        ("abort", "cmpl-C-abort-0208-0"),
        ("abort", "cmpl-C-abortprefill-0210-0"),
        ("abort", "cmpl-C-abort-0209-0"),
        ("config", "profiler start"),
        ("config", "profiler stop"),
    ]


def test_statistics_of_the_example(tmp_path: Path) -> None:
    rows, _ = read(dated(EXAMPLE / "server.log.gz", tmp_path))
    series = {row["series"]: row for row in rows["series"]}
    assert all(row["labels"] == {"engine": "0"} and row["type"] == "gauge" for row in series.values())
    waiting = [
        r["value"] for r in rows["metrics"] if series[r["series"]]["name"] == "vllm:num_requests_waiting"
    ]
    assert len(waiting) == 30 and max(waiting) == 41
    usage = [r["value"] for r in rows["metrics"] if series[r["series"]]["name"] == "vllm:kv_cache_usage_perc"]
    assert max(usage) == 0.987


@needs_captures
@pytest.mark.parametrize(
    ("run", "lines"),
    [
        ("run1-dense-mixed", 2261),
        ("run2-moe-tp2", 253),
        ("run3-moe-dp2-ep2-patched", 843),
        ("run5-dense-ngram-spec", 234),
    ],
)
def test_captures(run: str, lines: int, tmp_path: Path) -> None:
    rows, source = read(dated(RUNS / run / "server.log.gz", tmp_path))
    steps = truth(RUNS / run)
    assert len(rows["iterations"]) == lines
    assert_same_steps(rows["iterations"], steps)
    assert covered(rows["iterations"], steps) >= 0.99
    assert not source.tally.rejected and not source.tally.blanked
    assert "engine died" not in {row["detail"] for row in rows["events"]}  # all were told to stop


@needs_captures
def test_engine_deaths_are_said_once() -> None:
    for path in RUNS.glob("fail-*/server.log.gz"):
        rows, source = read(path)
        assert [row["detail"] for row in rows["events"]].count("engine died") == 1
        assert not rows["iterations"]
        assert any("no iteration lines" in note for note in source.tally.notes)


@needs_captures
def test_nothing_private_is_stored() -> None:
    for path in RUNS.glob("*/server.log.gz"):
        rows, _ = read(path)
        for row in rows["events"]:
            assert not any(text in row["detail"] for text in ("/", "127.0.0.1", "tiny-qwen3", "sk-")), row


@needs_captures
def test_other_files_of_captures_are_not_recognised() -> None:
    for path in CAPTURES.rglob("*"):
        if path.is_file():
            assert recognised(path) == (path.name == "server.log.gz"), path


@needs_corpus
def test_corpus_is_not_recognised() -> None:
    assert not [path for path in CORPUS.rglob("*") if path.is_file() and recognised(path)]


def test_blocks_change_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dated(EXAMPLE / "server.log.gz", tmp_path)
    whole, _ = read(path)
    monkeypatch.setattr(sys.modules[type(LOG).__module__], "BATCH", 1_100)
    blocks, _ = read(path)
    assert_same_steps(blocks["iterations"], truth(EXAMPLE))
    differing = 0
    for a, b in zip(whole["iterations"], blocks["iterations"], strict=True):
        differing += a["end_ns"] != b["end_ns"]
        assert {**a, "end_ns": 0, "time_error_ns": 0} == {**b, "end_ns": 0, "time_error_ns": 0}
    assert differing == 0  # a thousand steps of look-ahead hold all that could narrow an end here
    assert whole["metrics"] == blocks["metrics"]


def iteration(when: str, index: int = 0, elapsed: str = "10.00") -> str:
    return (
        f"(APIServer pid=1) INFO {when} [loggers.py:199] Engine 000: Iteration({index}): 1 context requests, "
        "5 context tokens, 0 generation requests, 0 generation tokens, "
        f"iteration elapsed time: {elapsed} ms, GPU KV cache usage: 0.3%"
    )


def seconds(rows: Rows) -> list[datetime]:
    return [datetime.fromtimestamp(row["end_ns"] // SECOND, UTC) for row in rows]


@pytest.mark.parametrize(
    ("file_time", "line", "year"),
    [
        ("2026-11-29T15:00:00+00:00", "11-29 14:39:17", 2026),
        ("2026-11-29T15:00:00+00:00", "11-30 14:00:00", 2026),  # zones: up to a day after the file's time
        ("2026-11-29T15:00:00+00:00", "12-01 00:00:00", 2025),
        ("2027-01-02T00:00:00+00:00", "12-31 23:00:00", 2026),
        ("2026-12-31T23:59:00+00:00", "01-01 09:00:00", 2027),
        ("2026-06-01T00:00:00+00:00", "02-29 12:00:00", 2024),
    ],
)
def test_the_year_is_from_the_files_time(tmp_path: Path, file_time: str, line: str, year: int) -> None:
    rows, source = read(written(tmp_path, file_time, iteration(line)))
    (end,) = seconds(rows["iterations"])
    assert end == datetime.strptime(f"{year}-{line} +0000", "%Y-%m-%d %H:%M:%S %z")
    assert f"UTC of {year}: the year is from the file's time" in source.tally.notes[0]


def test_a_file_time_before_vllm_is_no_clue(tmp_path: Path) -> None:
    rows, source = read(written(tmp_path, "1980-01-01T00:00:00+00:00", iteration("01-01 00:00:00")))
    assert seconds(rows["iterations"])[0].year >= 2026
    assert "the year is a guess" in source.tally.notes[0]


def test_the_year_turns_in_the_log(tmp_path: Path) -> None:
    lines = [iteration("12-31 23:59:59", 0), iteration("01-01 00:00:00", 1), iteration("12-31 23:59:59", 2)]
    rows, source = read(
        written(tmp_path, "2027-01-01T01:00:00+00:00", *lines, iteration("01-01 00:00:01", 3))
    )
    assert [end.isoformat()[:19] for end in seconds(rows["iterations"])] == [
        "2026-12-31T23:59:59",
        "2027-01-01T00:00:00",
        "2026-12-31T23:59:59",
        "2027-01-01T00:00:01",
    ]
    assert source.tally.notes == [
        "times are read as UTC of 2026 to 2027: the year is from the file's time; --log-tz sets the zone"
    ]


def test_a_given_zone_and_the_hour_that_comes_twice(tmp_path: Path) -> None:
    times = ["10-25 01:59:59", "10-25 02:30:00", "10-25 02:59:59", "10-25 02:00:00", "10-25 03:00:00"]
    path = written(tmp_path, "2026-10-26T00:00:00+00:00", *(iteration(t, i) for i, t in enumerate(times)))
    rows, source = read(path, Options(log_tz=ZoneInfo("Europe/Berlin")))
    assert [end.isoformat()[11:19] for end in seconds(rows["iterations"])] == [
        "23:59:59",
        "00:30:00",
        "00:59:59",
        "01:00:00",
        "02:00:00",
    ]
    assert source.tally.notes == ["times are read as Europe/Berlin of 2026: the year is from the file's time"]


def test_order_and_elapsed_time_narrow_an_end(tmp_path: Path) -> None:
    lines = [iteration("11-29 14:00:00", 0), iteration("11-29 14:00:00", 1, "600.00")]
    lines += [iteration("11-29 14:00:01", 2, "900.00")]
    rows, _ = read(written(tmp_path, "2026-11-30T00:00:00+00:00", *lines))
    start = round(datetime(2026, 11, 29, 14, tzinfo=UTC).timestamp()) * SECOND
    spans = [
        (row["end_ns"] - row["time_error_ns"] - start, row["end_ns"] + row["time_error_ns"] - start)
        for row in rows["iterations"]
    ]
    ms = 1_000_000
    assert spans == [
        (-5 * ms, 405 * ms),  # 0.6 s before the next, which ends in the same second
        (595 * ms, 1_005 * ms),
        (1_495 * ms, 2_005 * ms),
    ]


def test_contradicting_lines_keep_their_second(tmp_path: Path) -> None:
    # Steps that overlap cannot have been waited for one after the other.
    lines = [iteration("11-29 14:00:00", i, "700.00") for i in range(3)]
    lines += [iteration("11-29 14:00:05", 3, "90000.00"), iteration("11-29 13:59:00", 4)]
    rows, _ = read(written(tmp_path, "2026-11-30T00:00:00+00:00", *lines))
    names = [end.isoformat()[11:19] for end in seconds(rows["iterations"])]
    assert names == ["14:00:00"] * 3 + ["14:00:05", "13:59:00"]
    assert all(row["time_error_ns"] >= 5_000_000 for row in rows["iterations"])


def test_lines_without_time_lie_between_their_neighbours(tmp_path: Path) -> None:
    call = 'INFO:     10.0.0.9:55 - "POST /{}_profile HTTP/1.1" 200 OK'
    lines = [
        call.format("start"),
        iteration("11-29 14:00:00"),
        call.format("start"),
        iteration("11-29 14:00:09"),
    ]
    rows, source = read(written(tmp_path, "2026-11-30T00:00:00+00:00", *lines, call.format("stop")))
    start = round(datetime(2026, 11, 29, 14, tzinfo=UTC).timestamp()) * SECOND
    assert [(r["time_ns"] - start, r["time_error_ns"], r["detail"]) for r in rows["events"]] == [
        (5 * SECOND, 5 * SECOND, "profiler start"),
        (9 * SECOND + SECOND // 2, SECOND // 2, "profiler stop"),
    ]
    assert source.tally.skipped == {"other log line": 1}  # nothing says when the first call was
