"""vllm_metrics on whole captures, third-party files, and what is too big to be stored as a case."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from real import CAPTURES, CORPUS, needs_captures, needs_corpus

from tailscope import registry
from tailscope.errors import BadInput
from tailscope.schema import METRICS
from tailscope.source import Source

(COLLECTOR,) = [c for c in registry.collectors() if c.name == "vllm_metrics"]
VLLM_CPU = CAPTURES / "vllm-cpu"
T0 = 1_795_963_213_970_335_831


class Read:
    """All rows of a file."""

    def __init__(self, path: Path) -> None:
        self.source = Source(path)
        self.tally = self.source.tally
        self.series: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        for table, batch in COLLECTOR.read(self.source):
            assert batch.schema == table.arrow
            rows = self.metrics if table is METRICS else self.series
            rows.extend(batch.to_pylist(maps_as_pydicts="strict"))

    def last(self, name: str, **labels: str) -> dict[str, Any]:
        """The last sample of the one series of that name."""
        wanted = labels.items()
        (series,) = [s for s in self.series if s["name"] == name and wanted <= s["labels"].items()]
        return [m for m in self.metrics if m["series"] == series["series"]][-1]

    def find(self, concept: str) -> dict[str, Any]:
        (series,) = [s for s in self.series if s["labels"].get("__concept__") == concept]
        return series


@pytest.fixture(scope="module")
def run1() -> Read:
    return Read(VLLM_CPU / "run1-dense-mixed" / "metrics.txt.gz")


@needs_captures
def test_run1_ends_with_the_known_counts(run1: Read) -> None:
    assert not run1.tally.rejected
    assert not run1.tally.blanked
    assert run1.tally.notes == []
    assert run1.last("vllm:num_preemptions_total")["value"] == 29
    assert run1.last("vllm:time_to_first_token_seconds")["counts"][-1] == 262
    assert run1.last("vllm:e2e_request_latency_seconds")["counts"][-1] == 259
    assert run1.last("vllm:request_success_total", finished_reason="length")["value"] == 259
    assert run1.last("http_requests_total", status="4xx")["value"] == 3
    ttft = run1.last("vllm:time_to_first_token_seconds")
    assert ttft["value"] == pytest.approx(881.9654629230499)
    assert ttft["le"][:3] == [0.001, 0.005, 0.01]
    assert ttft["le"][-2:] == [2560.0, math.inf]
    assert len(ttft["le"]) == len(ttft["counts"]) == 23
    assert {m["engine"] for m in run1.metrics} == {0, None}


@needs_captures
def test_run1_accounts_for_every_sample_of_its_193_scrapes(run1: Read) -> None:
    histograms = {s["series"] for s in run1.series if s["type"] == "histogram"}
    assert {"counter", "gauge", "histogram", "summary"} == {s["type"] for s in run1.series}
    assert next(s for s in run1.series if s["name"] == "vllm:iteration_tokens_total")["type"] == "histogram"
    scrapes, samples, created, runtime = 0, 0, 0, 0
    with gzip.open(VLLM_CPU / "run1-dense-mixed" / "metrics.txt.gz", "rt") as text:
        for line in text:
            name = line.partition("{")[0].partition(" ")[0]
            if line.startswith("#"):
                scrapes += line.startswith("#@SCRAPE")
            elif name.endswith("_created"):
                created += 1
            elif name.startswith(("python_", "process_")):
                runtime += 1
            elif name.strip():
                # A histogram counts once, by its sum; the sums of summaries are series of their own.
                part = name.endswith(("_bucket", "_count")) and not name.startswith(
                    ("http_request_size", "http_response_size")
                )
                samples += not part
    assert scrapes == 193
    assert run1.tally.skipped["_created timestamp"] == created
    assert run1.tally.skipped["metric of the exporting process itself"] == runtime
    unchanged = run1.tally.skipped["sample unchanged since the last scrape"]
    assert len(run1.metrics) + unchanged == samples
    assert histograms


@needs_captures
def test_run1_is_written_on_change_with_a_heartbeat(run1: Read) -> None:
    times = sorted({m["time_ns"] for m in run1.metrics})
    assert times[0] == T0
    by_series: dict[str, list[dict[str, Any]]] = {}
    for row in run1.metrics:
        by_series.setdefault(row["series"], []).append(row)
    for rows in by_series.values():
        for before, after in pairwise(rows):
            same = (before["value"], before["counts"]) == (after["value"], after["counts"])
            gap = after["time_ns"] - before["time_ns"]
            assert gap > 0
            assert not same or gap >= 60e9
            assert gap < 63e9


@needs_captures
def test_run1_is_read_in_time() -> None:
    started = time.monotonic()
    Read(VLLM_CPU / "run1-dense-mixed" / "metrics.txt.gz")
    assert time.monotonic() - started < 6


@needs_captures
def test_a_single_scrape_has_the_time_of_its_file() -> None:
    path = VLLM_CPU / "run1-dense-mixed" / "metrics_final.txt"
    final = Read(path)
    assert {m["time_ns"] for m in final.metrics} == {path.stat().st_mtime_ns}
    assert final.tally.notes == ["time of the scrape is the file's modification time"]
    assert final.last("vllm:time_to_first_token_seconds")["counts"][-1] == 262


@needs_captures
def test_data_parallel_engines_are_told_apart() -> None:
    run3 = Read(VLLM_CPU / "run3-moe-dp2-ep2-patched" / "metrics.txt.gz")
    assert not run3.tally.rejected
    assert {s["engine"] for s in run3.series} == {0, 1, None}
    ttft = {e: run3.last("vllm:time_to_first_token_seconds", engine=str(e)) for e in (0, 1)}
    assert {e: row["engine"] for e, row in ttft.items()} == {0: 0, 1: 1}
    assert {e: row["counts"][-1] for e, row in ttft.items()} == {0: 32, 1: 34}


@needs_captures
@pytest.mark.parametrize(
    ("folder", "good", "failed"), [("fail-moe-dp2-noallgatherv", 2, 23), ("fail-moe-tp2-ep-segfault", 27, 55)]
)
def test_scrapes_of_a_dead_server_are_counted(folder: str, good: int, failed: int) -> None:
    read = Read(VLLM_CPU / folder / "metrics.txt.gz")
    assert dict(read.tally.rejected) == {"scrape failed": failed}
    with gzip.open(VLLM_CPU / folder / "metrics.txt.gz", "rb") as text:
        assert sum(b"status=200" in line for line in text if line.startswith(b"#@SCRAPE")) == good
    assert read.last("vllm:num_preemptions_total", engine="0")["value"] == 0


@needs_captures
def test_an_empty_file_is_refused() -> None:
    with pytest.raises(BadInput, match="holds no metric sample"):
        Read(VLLM_CPU / "fail-moe-dp2-noallgatherv" / "metrics_final.txt")


@needs_captures
def test_every_capture_and_no_other_file_is_recognised() -> None:
    claimed = Counter[str]()
    for path in sorted(VLLM_CPU.glob("*/**/*")):
        if path.is_file() and path.stat().st_size:
            source = Source(path)
            if COLLECTOR.recognises(source.head(), "x"):
                assert path.name.startswith("metrics")
                claimed[source.name] += 1
    assert claimed == {"metrics.txt": 6, "metrics_final.txt": 4}


@needs_captures
def test_a_capture_is_recognised_however_its_head_is_cut_or_damaged() -> None:
    head = Source(VLLM_CPU / "run1-dense-mixed" / "metrics_final.txt").head()
    for size in (200, 1_000, 5_000, 20_001):
        assert COLLECTOR.recognises(head[:size], "x")
        assert COLLECTOR.recognises(b"\x00\xff garbage\n" + head[size:], "x")


@needs_captures
def test_a_cut_at_any_place_keeps_what_was_complete(tmp_path: Path, run1: Read) -> None:
    text = gzip.decompress((VLLM_CPU / "run1-dense-mixed" / "metrics.txt.gz").read_bytes())
    whole = {(m["series"], m["time_ns"]): m for m in run1.metrics}
    cut = tmp_path / "cut.txt"
    chosen = random.Random(5)
    for _ in range(12):
        cut.write_bytes(text[: chosen.randrange(100_000, 400_000)])
        for row in Read(cut).metrics:
            expected = whole[row["series"], row["time_ns"]]
            assert row["counts"] == expected["counts"]
            assert row["value"] in (expected["value"], None)


@needs_corpus
def test_an_overloaded_sglang() -> None:
    read = Read(CORPUS / "transcribed" / "sglang" / "metrics_sglang_docs_overloaded.txt")
    assert not read.tally.rejected
    assert not read.tally.blanked
    name = read.find("ttft")["name"]
    assert name == "sglang:time_to_first_token_seconds"
    ttft = read.last(name)
    assert ttft["le"][-2:] == [30.0, math.inf]
    assert ttft["counts"][-1] == 11_008
    assert ttft["counts"][-1] - ttft["counts"][-2] == 8_495
    assert read.last(read.find("running")["name"])["value"] == 162
    assert read.last(read.find("waiting")["name"])["value"] == 2_826
    assert read.last(read.find("kv_usage")["name"])["value"] == 0.28


@needs_corpus
def test_vllm_v0_and_vllm_through_ray_have_the_names_of_v1() -> None:
    folder = CORPUS / "transcribed" / "datadog"
    v0, ray = Read(folder / "metrics_vllm_v0.txt"), Read(folder / "metrics_ray_vllm_excerpt.txt")
    for read in (v0, ray):
        assert not read.tally.rejected
        assert not read.tally.blanked
        assert read.find("kv_usage")["name"] == "vllm:kv_cache_usage_perc"
        assert read.find("itl")["name"] == "vllm:inter_token_latency_seconds"
    assert v0.find("itl")["labels"]["__scraped_name__"] == "vllm:time_per_output_token_seconds"
    assert v0.last("vllm:time_to_first_token_seconds")["counts"][-1] == 1
    assert v0.last("vllm:inter_token_latency_seconds")["value"] == pytest.approx(0.19016313552856445)
    assert "__scraped_name__" not in v0.find("ttft")["labels"]
    assert ray.find("kv_usage")["labels"]["__scraped_name__"] == "ray_vllm:gpu_cache_usage_perc"
    assert ray.last("vllm:inter_token_latency_seconds")["counts"][-1] == 299
    assert all(s["name"].startswith("vllm:") for s in ray.series)


@needs_corpus
def test_no_other_file_of_the_corpus_is_recognised() -> None:
    for path in sorted(p for p in CORPUS.rglob("*") if p.is_file()):
        if path.name.startswith("metrics_"):
            continue
        assert not COLLECTOR.recognises(Source(path).head(), "x"), path


#: Its own process, to see the memory it takes.
COUNT_ROWS = """
import collections, json, pathlib, sys
from tailscope import registry, source
def peak_kib():
    # Not ru_maxrss: a child's begins with the peak of the process that started it.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
(collector,) = [c for c in registry.collectors() if c.name == "vllm_metrics"]
rows, largest, ids = collections.Counter(), 0, set()
for table, batch in collector.read(source.Source(pathlib.Path(sys.argv[1]))):
    rows[table.name] += batch.num_rows
    largest = max(largest, batch.num_rows)
    if table.name == "series":
        ids.update(batch["series"].to_pylist())
print(json.dumps([rows, largest, len(ids), peak_kib() << 10]))
"""


def test_a_name_with_100_000_label_values(tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    with path.open("w") as file:
        for scrape in range(2):
            file.write(f"#@SCRAPE unix_ns={T0 + scrape * 10**9} status=200\n# TYPE vllm:x gauge\n")
            file.writelines(f'vllm:x{{engine="0",adapter="a{i}"}} {i + scrape}\n' for i in range(100_000))
    started = time.monotonic()
    child = subprocess.run([sys.executable, "-c", COUNT_ROWS, path], capture_output=True, check=True)
    rows, largest, ids, peak = json.loads(child.stdout)
    assert time.monotonic() - started < 60
    assert rows == {"series": 100_000, "metrics": 200_000}
    assert ids == 100_000
    assert largest <= 100_000
    assert peak < 600 << 20


def test_a_histogram_that_never_completes_is_not_quadratic(tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    buckets = "".join(f'vllm:x_bucket{{le="{i}"}} {i}\n' for i in range(5_000))
    path.write_text("# TYPE vllm:x histogram\n" + buckets + "vllm:x_count 1\n" + "vllm:x_sum 1\n" * 20_000)
    started = time.monotonic()
    source = Source(path)
    with pytest.raises(BadInput):
        list(COLLECTOR.read(source))
    assert time.monotonic() - started < 10
    assert source.tally.rejected == {"series repeated in one scrape": 19_999, "histogram is incomplete": 1}


def test_an_answer_full_of_damage_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    path.write_text('{"data":{"resultType":"matrix","result":[' + '{"metric":"' * 200_000)
    source = Source(path)
    with pytest.raises(BadInput):
        list(COLLECTOR.read(source))
    assert source.tally.rejected == {"JSON is damaged or cut off": 100}
    assert source.tally.notes == ["reading stopped at the 100th damaged place"]


def test_lone_surrogates_of_an_answer_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    metric = '{"__name__":"vllm:x","adapter":"a\\ud800b"}'
    point = '[1795963213,"1"]'
    path.write_text(f'{{"data":{{"resultType":"vector","result":[{{"metric":{metric},"value":{point}}}]}}}}')
    read = Read(path)
    assert [s["labels"] for s in read.series] == [{"adapter": "a\ufffdb"}]


def test_keys_in_any_order_several_answers_and_a_bare_list(tmp_path: Path) -> None:
    result = [{"metric": {"__name__": "vllm:x"}, "value": [1_795_963_213, "1"]}]
    other = [{"metric": {"__name__": "vllm:y"}, "value": [1_795_963_213, "1"]}]
    answers = [{"status": "success", "data": {"resultType": "vector", "result": r}} for r in (result, other)]
    path = tmp_path / "answer.json"
    for text, series in (
        (json.dumps(answers[0], sort_keys=True), 1),
        (json.dumps(result, indent=2), 1),
        ("\n".join(json.dumps(a) for a in answers), 2),
    ):
        path.write_text(text)
        assert COLLECTOR.recognises(Source(path).head(), "x")
        read = Read(path)
        assert len(read.series) == series
        assert not read.tally.rejected


def test_a_file_without_a_time_has_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text('# TYPE vllm:num_requests_running gauge\r\nvllm:num_requests_running{engine="0"} 1\r\n')
    os.utime(path, ns=(0, 0))
    read = Read(path)
    assert [m["time_ns"] for m in read.metrics] == [None]
    assert read.series[0]["type"] == "gauge"


def test_a_page_without_types(tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(
        'vllm:t_seconds_sum 2.5\nvllm:t_seconds_bucket{le="1.0"} 1\nvllm:t_seconds_bucket{le="+Inf"} 3\n'
        "vllm:t_seconds_count 3\nvllm:num_preemptions_total 2\nvllm:n_count 4\n"
    )
    read = Read(path)
    assert {s["name"]: s["type"] for s in read.series} == {
        "vllm:t_seconds": "histogram",
        "vllm:num_preemptions_total": "unknown",
        "vllm:n_count": "unknown",
    }


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x00" * 100,
        b'{"resourceSpans":[]}',
        b'{"traceEvents":[{"ph":"X","ts":1.5}]}',
        b'{"metric": 3, "values": [1, 2]}',
        b"time,ttft\n1.5,2\n",
        b"2026-11-29 17:46:53 INFO vllm 1\n",
        b"INFO 11-29 17:46:53 [metrics.py:120] Avg prompt throughput: 1.0 tokens/s\n",
        b"# Heading\n\nProse about vllm:num_requests_running 3 and more.\n",
        b"# TYPE of apples counter\nprose\nprose\n",
        b"total 56\ndrwxr-xr-x 2 root\n",
    ],
)
def test_other_files_are_not_recognised(text: bytes) -> None:
    assert not COLLECTOR.recognises(text, "metrics.txt")
