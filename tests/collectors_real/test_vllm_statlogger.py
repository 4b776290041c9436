"""The vllm_statlogger collector on whole captures, and on other files, which it must leave alone."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from real import CAPTURES, CORPUS, EXAMPLE, needs_captures, needs_corpus

from tailscope import registry
from tailscope.model import request_key
from tailscope.source import Options, Source

STATLOGGER = next(c for c in registry.collectors() if c.name == "vllm_statlogger")
RUNS = CAPTURES / "vllm-cpu"
RUN1 = EXAMPLE / "statlogger_engine0_pid29933.jsonl.gz"
PREEMPTED = {
    "cmpl-A-short-0119-0",
    "chatcmpl-A-chat-0120",
    "cmpl-A-short-0121-0",
    "cmpl-A-pfx-0131-0",
    *(f"cmpl-B-burst-{number:04}-0" for number in range(160, 185)),
}

Rows = list[dict[str, Any]]


def read(path: Path, options: Options | None = None) -> tuple[dict[str, Rows], Source]:
    source = Source(path, options=options)
    rows: dict[str, Rows] = {table.name: [] for table in STATLOGGER.tables}
    for table, batch in STATLOGGER.read(source):
        rows[table.name] += batch.to_pylist(maps_as_pydicts="strict")
    return rows, source


def records(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path) as lines:
        yield from (record for line in lines if (record := json.loads(line))["ev"] == "record")


def recognised(path: Path) -> bool:
    source = Source(path)
    return STATLOGGER.recognises(source.head(), source.name)


def test_example() -> None:
    rows, source = read(RUN1)
    iterations, requests = rows["iterations"], rows["requests"]
    assert [r["iteration"] for r in iterations] == list(range(2261))
    assert all(a["end_ns"] < b["end_ns"] for a, b in pairwise(iterations))
    assert Counter(r["request_id"] for r in requests if r["preemptions"]) == dict.fromkeys(PREEMPTED, 1)
    assert len(requests) == 259
    assert {r["status"] for r in requests} == {"ok"}
    assert {r["model"] for r in requests} == {"tiny-qwen3"}
    assert len({r["request_key"] for r in requests}) == 259  # n = 2 gives two requests of one id
    assert sum(r["preempted"] or 0 for r in iterations) == 29
    assert max(r["kv_usage"] for r in iterations) > 0.98
    tally = source.tally
    assert not tally.rejected and not tally.blanked
    assert tally.skipped == {"life-cycle record": 51, "record without iteration details": 19}
    assert rows["events"] == []


def test_instants_of_a_request_are_in_order() -> None:
    rows, _ = read(RUN1)
    for r in rows["requests"]:
        order = ("arrival_ns", "queued_ns", "scheduled_ns", "first_token_ns", "last_token_ns", "finished_ns")
        assert all(r[a] <= r[b] for a, b in pairwise(order)), r["request_id"]
        assert r["e2e_ns"] >= r["queue_ns"] + r["prefill_ns"] + r["decode_ns"]
        assert r["finished_ns"] - r["arrival_ns"] == r["e2e_ns"]


def test_counters_are_the_sums_of_the_records() -> None:
    rows, _ = read(RUN1)
    sums: Counter[str] = Counter()
    for record in records(RUN1):
        stats = record["scheduler_stats"]["prefix_cache_stats"]
        for field in ("queries", "hits", "preempted_queries", "preempted_hits"):
            sums[f"statlogger:prefix_cache_{field}"] += stats[field]
        if record["iteration_stats"]:
            sums["statlogger:prompt_tokens_computed"] += record["iteration_stats"]["prompt_token_stats"][
                "computed"
            ]
    names = {r["series"]: r["name"] for r in rows["series"]}
    assert set(names.values()) == set(sums)
    samples: dict[str, list[float]] = {name: [] for name in sums}
    for r in rows["metrics"]:
        samples[names[r["series"]]].append(r["value"])
    for name, values in samples.items():
        assert values[0] == 0 and values[-1] == sums[name]
        assert all(a < b for a, b in pairwise(values)), f"{name} is written when it changes only"


def test_keys_do_not_depend_on_the_place_in_the_file(tmp_path: Path) -> None:
    whole, _ = read(RUN1)
    tail = tmp_path / "tail.jsonl"
    with gzip.open(RUN1) as lines:
        tail.write_bytes(b"".join(list(lines)[1000:]))
    part, _ = read(tail)
    keys = [r["request_key"] for r in whole["requests"]]
    assert 0 < len(part["requests"]) < len(keys)
    assert [r["request_key"] for r in part["requests"]] == keys[-len(part["requests"]) :]


def test_hashed_ids_are_those_of_the_client() -> None:
    plain, _ = read(RUN1)
    hashed, _ = read(RUN1, Options(hash_ids=True))
    for a, b in zip(plain["requests"], hashed["requests"], strict=True):
        engine_id = a["request_id"]
        client_id = engine_id.removesuffix("-0") if engine_id.startswith("cmpl-") else engine_id
        assert b["request_id"] == request_key("id", client_id)


@needs_captures
@pytest.mark.parametrize(
    ("run", "engine", "iterations", "requests"),
    [
        ("run1-dense-mixed", 0, 2261, 259),
        ("run2-moe-tp2", 0, 253, 39),
        ("run3-moe-dp2-ep2-patched", 0, 373, 32),
        ("run3-moe-dp2-ep2-patched", 1, 470, 34),
        ("run5-dense-ngram-spec", 0, 234, 31),
    ],
)
def test_captures(run: str, engine: int, iterations: int, requests: int) -> None:
    (path,) = (RUNS / run).glob(f"statlogger_engine{engine}_*.jsonl.gz")
    assert recognised(path)
    rows, source = read(path)
    assert (len(rows["iterations"]), len(rows["requests"])) == (iterations, requests)
    assert {r["engine"] for table in rows.values() for r in table} == {engine}
    assert not source.tally.rejected and not source.tally.blanked
    details = [d for r in records(path) if (d := r["scheduler_stats"]["iteration_details"])]
    tokens = sum(d["num_ctx_tokens"] for d in details), sum(d["num_generation_tokens"] for d in details)
    totals = (sum(r[name] for r in rows["iterations"]) for name in ("prefill_tokens", "decode_tokens"))
    assert tuple(totals) == tokens


@needs_captures
def test_drafts_of_speculative_decoding() -> None:
    (path,) = (RUNS / "run5-dense-ngram-spec").glob("statlogger_*.jsonl.gz")
    rows, _ = read(path)
    names = {r["series"]: r["name"] for r in rows["series"]}
    last = {names[r["series"]]: r["value"] for r in rows["metrics"]}
    stats = [s for r in records(path) if (s := r["scheduler_stats"]["spec_decoding_stats"])]
    for field in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert last[f"statlogger:spec_decode_{field}"] == sum(s[field] for s in stats)


@needs_captures
def test_engines_that_never_ran() -> None:
    paths = list(RUNS.glob("fail-*/statlogger_*.jsonl.gz"))
    assert len(paths) == 5
    for path in paths:
        assert recognised(path)
        rows, source = read(path)
        assert not any(rows.values())
        (note,) = source.tally.notes
        assert "no records" in note


@needs_captures
def test_other_files_of_captures_are_not_recognised() -> None:
    for path in CAPTURES.rglob("*"):
        if path.is_file():
            assert recognised(path) == path.name.startswith("statlogger_"), path


@needs_corpus
def test_corpus_is_not_recognised() -> None:
    assert not [path for path in CORPUS.rglob("*") if path.is_file() and recognised(path)]


def test_a_damaged_or_cut_beginning_is_recognised(tmp_path: Path) -> None:
    content = gzip.decompress(RUN1.read_bytes())
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_bytes(b"\xff\x00" + content[100:20_000])
    assert recognised(damaged)
    first = next(records(RUN1))
    first["scheduler_stats"]["kv_cache_eviction_events"] = [1.5] * 50_000
    one_long = tmp_path / "long.jsonl"
    one_long.write_text(json.dumps(first) + "\n")
    assert recognised(one_long)
    other = tmp_path / "other.jsonl"
    other.write_text('{"wall": 1.5, "ev": "record"}\n{"wall": 1, "mono": 2, "ev": "boot"}\n[1]\n')
    assert not recognised(other)
