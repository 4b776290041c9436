"""The client_log collector on whole captures, and on files of other clients that it must leave alone."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from real import CAPTURES, CORPUS, EXAMPLE, needs_captures, needs_corpus

from tailscope import registry
from tailscope.model import request_key
from tailscope.source import Options, Source

CLIENT_LOG = next(c for c in registry.collectors() if c.name == "client_log")
RUNS = CAPTURES / "vllm-cpu"
BENCH = next((EXAMPLE / "bench").glob("*.json"))
#: Wall minus monotonic clock of the machine the captures were made on.
MONOTONIC_OFFSET_NS = 1_795_959_672_136_400_000

Rows = list[dict[str, Any]]


def read(path: Path, options: Options | None = None) -> tuple[Rows, Rows, Source]:
    source = Source(path, options=options)
    rows: dict[str, Rows] = {"requests": [], "tokens": []}
    for table, batch in CLIENT_LOG.read(source):
        rows[table.name] += batch.to_pylist()
    return rows["requests"], rows["tokens"], source


def recognised(path: Path) -> bool:
    source = Source(path)
    return CLIENT_LOG.recognises(source.head(), source.name)


def test_example() -> None:
    requests, tokens, source = read(EXAMPLE / "client.jsonl.gz")
    assert len(requests) == 223  # 222 lines, one of them with n = 2
    assert Counter(r["status"] for r in requests) == {"ok": 217, "error": 3, "aborted": 3}
    assert len({r["request_key"] for r in requests}) == 223
    assert max(r["file_row"] for r in requests) == 222
    assert len(tokens) == 23_594  # 23,610 chunks, 16 of them the role chunks of chats
    assert sum(t["count"] for t in tokens) == sum(r["output_tokens"] for r in requests) == 23_595
    assert sum(r["trace_id"] is not None for r in requests) == 35
    assert all(r["span_id"] is None and r["queue_ns"] is None for r in requests)
    tally = source.tally
    assert not tally.rejected and not tally.blanked and not tally.skipped
    keys = {r["request_key"] for r in requests}
    assert all(t["request_key"] in keys for t in tokens)


def test_choices_of_the_example() -> None:
    requests, tokens, _ = read(EXAMPLE / "client.jsonl.gz")
    two = [r for r in requests if r["request_id"] == "cmpl-C-n2-0211"]
    assert [r["output_tokens"] for r in two] == [20, 20]
    assert two[0]["ttft_ns"] < two[1]["ttft_ns"]
    for request in two:
        times = [t["time_ns"] for t in tokens if t["request_key"] == request["request_key"]]
        assert len(times) == 20
        assert (times[0], times[-1]) == (request["first_token_ns"], request["last_token_ns"])


def test_times_of_the_example_are_in_order() -> None:
    requests, tokens, _ = read(EXAMPLE / "client.jsonl.gz")
    for r in requests:
        if r["first_token_ns"] is not None:
            assert r["arrival_ns"] < r["first_token_ns"] <= r["last_token_ns"] <= r["finished_ns"]
            assert r["ttft_ns"] == r["first_token_ns"] - r["arrival_ns"]
        assert r["e2e_ns"] == r["finished_ns"] - r["arrival_ns"]
    for before, after in pairwise(tokens):
        if before["request_key"] == after["request_key"]:
            assert before["time_ns"] <= after["time_ns"]
            assert after["seq"] == before["seq"] + 1


def test_keys_do_not_depend_on_the_order_of_lines(tmp_path: Path) -> None:
    lines = gzip.decompress((EXAMPLE / "client.jsonl.gz").read_bytes()).splitlines()
    path = tmp_path / "client.jsonl"
    path.write_bytes(b"\n".join(reversed(lines)))
    there, _, _ = read(EXAMPLE / "client.jsonl.gz")
    back, _, _ = read(path)
    assert {r["request_key"] for r in there} == {r["request_key"] for r in back}


def test_hashed_ids_equal_the_hash_of_the_id_as_the_client_saw_it() -> None:
    plain, _, _ = read(EXAMPLE / "client.jsonl.gz")
    hashed, _, _ = read(EXAMPLE / "client.jsonl.gz", Options(hash_ids=True))
    assert [r["request_id"] for r in hashed] == [request_key("id", r["request_id"]) for r in plain]


def test_no_text_of_requests_or_errors_is_stored() -> None:
    given = gzip.decompress((EXAMPLE / "client.jsonl.gz").read_bytes()) + BENCH.read_bytes()
    stored = json.dumps([read(EXAMPLE / "client.jsonl.gz")[0], read(BENCH)[0]])
    for private in ("maximum context length", "does not exist", "GenericAlias"):
        assert private.encode() in given and private not in stored


def test_bench() -> None:
    requests, tokens, _ = read(BENCH)
    assert len(requests) == 40 and {r["status"] for r in requests} == {"ok"}
    assert len({r["request_key"] for r in requests}) == 40
    assert sum(r["prompt_tokens"] for r in requests) == 5_122
    assert len(tokens) == sum(t["count"] for t in tokens) == 40 * 32
    assert all(r["request_id"] is None and r["model"] == "tiny-qwen3" for r in requests)
    result = json.loads(BENCH.read_bytes())
    mean_ms = sum(r["ttft_ns"] for r in requests) / 40 / 1e6
    assert mean_ms == pytest.approx(result["mean_ttft_ms"])
    assert [r["e2e_ns"] / 1e9 for r in requests] == pytest.approx(result["latencies"])


def test_bench_lies_where_it_ran() -> None:
    requests, _, source = read(BENCH)
    assert source.clock == "perf_counter"
    assert source.offset_ns is not None and source.offset_error_ns is not None
    assert abs(source.offset_ns - MONOTONIC_OFFSET_NS) < source.offset_error_ns
    start = json.loads(BENCH.read_bytes())["start_times"][0]
    assert requests[0]["arrival_ns"] == source.offset_ns + round(start * 1e9)


@pytest.mark.parametrize("path", [EXAMPLE / "client.jsonl.gz", BENCH], ids=["log", "bench"])
def test_recognised_with_the_first_record_cut(path: Path) -> None:
    head = Source(path).head()
    assert all(CLIENT_LOG.recognises(head[:size], "x") for size in range(700, len(head), 997))


def test_only_its_own_files_of_the_example_are_recognised() -> None:
    files = [p for p in EXAMPLE.rglob("*") if p.is_file()]
    assert {p for p in files if recognised(p)} == {EXAMPLE / "client.jsonl.gz", BENCH}


def test_batches_stay_small(tmp_path: Path) -> None:
    chunks = [[i, 1] for i in range(120_001)]
    record = {"client_request_id": "long", "send_unix_ns": 1, "chunks_us_ntok": chunks}
    path = tmp_path / "client.jsonl"
    path.write_text(json.dumps(record))
    sizes = [batch.num_rows for table, batch in CLIENT_LOG.read(Source(path)) if table.name == "tokens"]
    assert sum(sizes) == 120_001 and max(sizes) <= 100_000


@needs_captures
@pytest.mark.parametrize(
    ("run", "rows", "ids", "chunks", "status"),
    [
        ("run1-dense-mixed", 223, 222, 23_594, {"ok": 217, "error": 3, "aborted": 3}),
        ("run2-moe-tp2", 39, 23, 2_064, {"ok": 39}),
        ("run3-moe-dp2-ep2-patched", 65, 38, 3_133, {"ok": 65}),
        ("run5-dense-ngram-spec", 30, 30, 1_093, {"ok": 30}),
        ("fail-moe-dp2-noallgatherv", 39, 23, 0, {"error": 39}),
        ("fail-moe-tp2-ep-segfault", 25, 9, 0, {"error": 25}),
    ],
)
def test_captures(run: str, rows: int, ids: int, chunks: int, status: dict[str, int]) -> None:
    requests, tokens, source = read(RUNS / run / "client.jsonl.gz")
    assert len(requests) == len({r["request_key"] for r in requests}) == rows  # though ids repeat
    assert len({r["request_id"] for r in requests}) == ids
    assert len(tokens) == chunks
    assert Counter(r["status"] for r in requests) == status
    assert not source.tally.rejected and not source.tally.blanked


@needs_captures
def test_only_its_own_files_of_the_captures_are_recognised() -> None:
    files = {p for p in CAPTURES.rglob("*") if p.is_file() and recognised(p)}
    assert {p.name for p in files} == {"client.jsonl.gz", BENCH.name}
    assert len(files) == 7


@needs_corpus
def test_nothing_of_the_corpus_is_recognised() -> None:
    files = [p for p in CORPUS.rglob("*") if p.is_file()]
    assert {"aiperf", "guidellm", "genai-bench"} <= {p.relative_to(CORPUS).parts[0] for p in files}
    assert [p for p in files if recognised(p)] == []
