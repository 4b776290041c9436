"""Per-request files that benchmark clients really wrote, and request logs of others by a mapping."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real import CORPUS, EXAMPLE, needs_corpus

from tailscope import mapping, registry
from tailscope.source import Options, Source

COLLECTORS = {c.name: c for c in registry.collectors()}
AIPERF = CORPUS / "aiperf" / "examples" / "artifacts" / "run1" / "profile_export.jsonl"
GUIDELLM = sorted(CORPUS.glob("guidellm/tests/unit/entrypoints/assets/*.json"))
GENAI = CORPUS / "genai-bench"
SIM = CORPUS / "llmservingsim-vllm-bench" / "bench" / "examples" / "RTXPRO6000"

Rows = list[dict[str, Any]]


def read(name: str, path: Path, options: Options | None = None) -> tuple[Rows, Rows, Source]:
    source = Source(path, options=options)
    rows: dict[str, Rows] = {"requests": [], "tokens": []}
    for table, batch in COLLECTORS[name].read(source):
        rows[table.name] += batch.to_pylist()
    return rows["requests"], rows["tokens"], source


def recognised(path: Path) -> list[str]:
    source = Source(path)
    head = source.head()
    return [c.name for c in COLLECTORS.values() if c.recognises(head, source.name)]


@needs_corpus
def test_aiperf() -> None:
    requests, tokens, source = read("aiperf", AIPERF)
    assert len(requests) == len({r["request_key"] for r in requests}) == 100
    assert Counter(r["status"] for r in requests) == {"ok": 89, "aborted": 11}
    # AIPerf's own summary of the same run.
    summary = json.loads(AIPERF.with_name("profile_export_aiperf.json").read_bytes())["records"]
    whole = [r for r in requests if r["status"] == "ok"]
    for name, column in (("ttft", "ttft_ns"), ("request_latency", "e2e_ns")):
        assert np.mean([r[column] for r in whole]) / 1e6 == pytest.approx(summary[name]["avg"])
        assert max(r[column] for r in whole) / 1e6 == pytest.approx(summary[name]["max"])
    assert sum(r["output_tokens"] for r in whole) == summary["output_sequence_length"]["avg"] * 89
    last: dict[str, int] = {}
    for token in tokens:
        assert last.get(token["request_key"], 0) <= token["time_ns"]
        last[token["request_key"]] = token["time_ns"]
    assert all(abs(last[r["request_key"]] - r["finished_ns"]) <= 2 for r in whole)
    assert not source.tally.rejected and not source.tally.blanked


@needs_corpus
@pytest.mark.parametrize("path", GUIDELLM, ids=lambda p: p.name[:7])
def test_guidellm(path: Path) -> None:
    (request,), _, source = read("guidellm", path)
    own = json.loads(path.read_bytes())["benchmarks"][0]["requests"]["successful"][0]
    assert request["ttft_ns"] / 1e6 == pytest.approx(own["time_to_first_token_ms"])
    assert request["e2e_ns"] / 1e9 == pytest.approx(own["request_latency"])
    assert (request["prompt_tokens"], request["output_tokens"]) == (257, 128)
    assert request["intended_ns"] is None  # one after another: nothing was due at a time
    assert own["prompt"][:40] not in json.dumps(request)
    assert "ran 47 requests and the report lists 1" in source.tally.notes[0]


@needs_corpus
def test_genai_bench() -> None:
    paths = sorted(GENAI.glob("*/D*.json"))
    assert len(paths) == 4
    for path in paths:
        requests, _, source = read("genai_bench", path)
        run = json.loads(path.read_bytes())["aggregated_metrics"]
        assert len(requests) == run["num_requests"]
        assert np.mean([r["ttft_ns"] for r in requests]) / 1e9 == pytest.approx(run["stats"]["ttft"]["mean"])
        # One at a time: each begins where the one before ended, and all took as long as the run.
        for before, after in pairwise(requests):
            assert abs(after["arrival_ns"] - before["finished_ns"]) <= 1
        length = (requests[-1]["finished_ns"] - requests[0]["arrival_ns"]) / 1e9
        assert length == pytest.approx(run["run_duration"], rel=0.01)
        assert requests[-1]["finished_ns"] == pytest.approx(source.modified_ns, abs=2)


@needs_corpus
def test_genai_bench_cut_for_a_test_of_theirs_is_not_placed() -> None:
    requests, _, _ = read("genai_bench", GENAI / "tests" / "analysis" / "mock_run_data.json")
    assert [r["arrival_ns"] for r in requests] == [None, None]
    assert all(r["ttft_ns"] and r["e2e_ns"] for r in requests)


@needs_corpus
def test_each_file_of_clients_is_recognised_by_one_collector_and_no_other_file() -> None:
    theirs = {"aiperf": 1, "guidellm": 3, "genai_bench": 5, "inference_perf": 0, "request_log": 0}
    found: Counter[str] = Counter()
    for path in CORPUS.rglob("*"):
        if path.is_file():
            names = recognised(path)
            assert len(names) <= 1, path
            found.update(names)
    assert {name: found[name] for name in theirs} == theirs


def test_no_file_of_the_example_is_taken_for_a_benchmark_of_another_client() -> None:
    others = {"aiperf", "guidellm", "genai_bench", "inference_perf", "request_log"}
    assert not any(others & set(recognised(path)) for path in EXAMPLE.rglob("*") if path.is_file())


TWO_CLOCKS = {
    "observer": "engine",
    "columns": {
        "id": "request_id",
        "arrival": {"column": "arrival_time", "unit": "s"},
        "queue": {"from": "queued_ts", "to": "scheduled_ts", "unit": "s"},
        "ttft": {"from": "queued_ts", "to": "first_token_ts", "unit": "s"},
        "e2e": {"from": "queued_ts", "to": "last_token_ts", "unit": "s"},
        "prompt_tokens": "input_toks",
        "output_tokens": "output_toks",
    },
}


@needs_corpus
def test_a_log_with_two_clocks_by_a_mapping() -> None:
    """Arrivals on the wall clock, all else on the monotonic one: the queue's wait of the mixture-of-experts run is known."""
    path = next(SIM.glob("Qwen3-30B*")) / "vllm" / "requests.jsonl"
    requests, _, source = read("request_log", path, Options(mapping=mapping.parse(TWO_CLOCKS)))
    assert len(requests) == 300
    queue = np.array([r["queue_ns"] for r in requests]) / 1e9
    assert np.percentile(queue, 50) < 0.001
    assert np.percentile(queue, 99) == pytest.approx(9.5, abs=0.1)
    assert queue.max() == pytest.approx(10.3, abs=0.05)
    given = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["prompt_tokens"] for r in requests] == [g["input_toks"] for g in given]
    assert not source.tally.rejected and not source.tally.blanked


@needs_corpus
def test_production_traffic_by_a_mapping() -> None:
    path = CORPUS / "azure-llm" / "data" / "AzureLLMInferenceTrace_conv.csv"
    columns = {
        "arrival": {"column": "TIMESTAMP", "unit": "iso8601"},
        "prompt_tokens": "ContextTokens",
        "output_tokens": "GeneratedTokens",
    }
    requests, _, source = read("request_log", path, Options(mapping=mapping.parse({"columns": columns})))
    assert len(requests) == len({r["request_key"] for r in requests}) == 19_366
    assert requests[0]["arrival_ns"] == 1_700_158_546_680_590_000
    assert not source.tally.rejected and not source.tally.blanked
