"""The otlp collector on every capture's spans and on other projects' OTLP files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from real import CAPTURES, CORPUS, needs_captures, needs_corpus

from tailscope import registry
from tailscope.errors import BadInput
from tailscope.model import request_key
from tailscope.source import Options, Source

COLLECTOR = next(c for c in registry.collectors() if c.name == "otlp")

NOT_REQUEST = "span is not a request"
LOG = "OTLP log record, not a span"
POINT = "OTLP metric data point, not a span"
DERIVED = "instants after arrival are derived: span start + durations"

#: capture -> (request spans, other spans) of its delimited file, other spans in its single requests
COUNTS = {
    "fail-moe-dp2-noallgatherv": (0, 4, (2, 2)),
    "fail-moe-tp2-ep-segfault": (0, 17, (2, 2, 2)),
    "run1-dense-mixed": (259, 22, (2, 3, 4)),
    "run2-moe-tp2": (39, 17, (1, 1, 1)),
    "run3-moe-dp2-ep2-patched": (66, 20, (1, 1, 1)),
    "run5-dense-ngram-spec": (31, 11, (1, 1, 4)),
}

#: What each file of the corpus gives: (rejected, skipped), None where no collector is to claim it, or
#: the message. None of them holds a request of an engine, so none gives rows.
PROTO = "otlp-proto/examples"
JAEGER = "otlp-jaeger/cmd/jaeger/internal/extension/jaegerquery/internal/fixture"
DUCKDB = "otlp-duckdb/test/data"
Outcome = tuple[dict[str, int], dict[str, int]] | str | None
CORPUS_FILES: dict[str, Outcome] = {
    "otlp-proto/SOURCE.txt": None,
    f"{PROTO}/6d01eee~trace.json": ({}, {NOT_REQUEST: 1}),
    f"{PROTO}/f4999d5~trace.json": ({}, {NOT_REQUEST: 1}),
    f"{PROTO}/trace.json": ({}, {NOT_REQUEST: 1}),
    f"{PROTO}/events.json": ({}, {LOG: 1}),
    f"{PROTO}/logs.json": ({}, {LOG: 1}),
    f"{PROTO}/metrics.json": ({}, {POINT: 4}),
    "otlp-jaeger/SOURCE.txt": None,
    f"{JAEGER}/otlp2jaeger-in.json": ({}, {NOT_REQUEST: 2}),
    f"{JAEGER}/otlp2jaeger-out.json": None,
    "otlp-duckdb/SOURCE.txt": None,
    f"{DUCKDB}/empty.jsonl": None,
    f"{DUCKDB}/whitespace.jsonl": None,
    f"{DUCKDB}/logs_document.json": ({}, {LOG: 1}),
    f"{DUCKDB}/logs_nulls.jsonl": ({}, {LOG: 3}),
    f"{DUCKDB}/logs_simple.jsonl": ({}, {LOG: 3}),
    f"{DUCKDB}/malformed.jsonl": ({"not an OTLP request": 1, "not valid JSON": 2}, {NOT_REQUEST: 1}),
    f"{DUCKDB}/metrics_all_types.jsonl": ({}, {POINT: 5}),
    f"{DUCKDB}/metrics_exp_histogram_ndjson.jsonl": ({}, {POINT: 1}),
    f"{DUCKDB}/metrics_histogram_ndjson.jsonl": ({}, {POINT: 1}),
    f"{DUCKDB}/metrics_nulls.jsonl": ({}, {POINT: 3}),
    f"{DUCKDB}/metrics_optional_fields.jsonl": ({}, {POINT: 3}),
    f"{DUCKDB}/metrics_simple.jsonl": ({}, {POINT: 3}),
    f"{DUCKDB}/metrics_summary_only.jsonl": ({}, {POINT: 2}),
    f"{DUCKDB}/metrics_temporality_strings.jsonl": ({}, {POINT: 1}),
    f"{DUCKDB}/multifile_malformed_traces.jsonl": (
        "multifile_malformed_traces.jsonl, line 1 column 89: not valid JSON. Copy or export the file again."
    ),
    f"{DUCKDB}/multifile_valid_traces.jsonl": ({}, {NOT_REQUEST: 1}),
    f"{DUCKDB}/otap/logs-initial.bar": None,
    f"{DUCKDB}/otap/logs-initial.otlp": ({}, {LOG: 3}),
    f"{DUCKDB}/otap/logs-reuse.bar": None,
    f"{DUCKDB}/otap/logs-zstd.bar": None,
    f"{DUCKDB}/otap/metrics-initial.bar": None,
    f"{DUCKDB}/otap/metrics-initial.otlp": ({}, {POINT: 5}),
    f"{DUCKDB}/otap/traces-initial.bar": None,
    f"{DUCKDB}/otap/traces-initial.otlp": ({}, {NOT_REQUEST: 1}),
    f"{DUCKDB}/otlp_logs.pb": ({}, {LOG: 1}),
    f"{DUCKDB}/otlp_metrics.pb": ({}, {POINT: 1}),
    f"{DUCKDB}/otlp_traces.pb": ({}, {NOT_REQUEST: 1}),
    f"{DUCKDB}/single_trace.jsonl": ({}, {NOT_REQUEST: 1}),
    f"{DUCKDB}/traces_deep_nesting.jsonl": ({}, {NOT_REQUEST: 1}),
    f"{DUCKDB}/traces_large_attrs.jsonl": ({}, {NOT_REQUEST: 1}),
    f"{DUCKDB}/traces_nulls.jsonl": ({}, {NOT_REQUEST: 3}),
    f"{DUCKDB}/traces_simple.jsonl": ({}, {NOT_REQUEST: 3}),
    f"{DUCKDB}/ts_boundary_logs.jsonl": ({}, {LOG: 1}),
    f"{DUCKDB}/ts_overflow_logs.jsonl": ({}, {LOG: 1}),
}


def read(path: Path, options: Options | None = None) -> tuple[list[dict[str, Any]], Source]:
    source = Source(path, display=path.name, options=options)
    rows: list[dict[str, Any]] = []
    for _, batch in COLLECTOR.read(source):
        rows.extend(batch.to_pylist())
    return rows, source


def otlp(capture: str) -> Path:
    return CAPTURES / "vllm-cpu" / capture / "otlp"


def claimed(path: Path) -> bool:
    source = Source(path)
    return COLLECTOR.recognises(source.head(), source.name)


def messages(path: Path) -> list[bytes]:
    data, at, found = gzip.decompress(path.read_bytes()), 0, []
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return found


@needs_captures
@pytest.mark.parametrize("capture", sorted(COUNTS))
def test_captures_are_read_whole(capture: str) -> None:
    requests, others, single = COUNTS[capture]
    for name in ("otlp_spans.pb.delim.gz", "otlp_spans.jsonl.gz"):
        path = otlp(capture) / name
        assert claimed(path)
        rows, source = read(path)
        assert len(rows) == requests
        assert source.tally.skipped == {NOT_REQUEST: others}
        assert not source.tally.rejected
        assert not source.tally.blanked
        assert source.tally.notes == ([DERIVED] if requests else [])
    singles = sorted(otlp(capture).glob("otlp_request_*.pb"))
    for path, count in zip(singles, single, strict=True):
        assert claimed(path)
        rows, source = read(path)
        assert (rows, source.tally.skipped) == ([], {NOT_REQUEST: count})


@needs_captures
@pytest.mark.parametrize("capture", sorted(COUNTS))
def test_encodings_give_equal_rows(capture: str, tmp_path: Path) -> None:
    protobuf, _ = read(otlp(capture) / "otlp_spans.pb.delim.gz")
    envelope, _ = read(otlp(capture) / "otlp_spans.jsonl.gz")
    assert protobuf == envelope
    one_by_one = []
    path = tmp_path / "request.pb"
    for message in messages(otlp(capture) / "otlp_spans.pb.delim.gz"):
        path.write_bytes(message)
        assert claimed(path)
        one_by_one += read(path)[0]
    for row in (*protobuf, *one_by_one):
        del row["file_row"]
    assert protobuf == one_by_one


@needs_captures
def test_rows_agree_with_the_generated_classes() -> None:
    path = otlp("run1-dense-mixed") / "otlp_spans.pb.delim.gz"
    rows, _ = read(path)
    spans = [
        (span, {a.key: a.value for a in span.attributes}, resource_spans.resource)
        for message in messages(path)
        for resource_spans in ExportTraceServiceRequest.FromString(message).resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
        if span.name == "llm_request"
    ]
    for row, (span, attributes, resource) in zip(rows, spans, strict=True):
        ns = {k.rpartition(".")[2]: round(v.double_value * 1e9) for k, v in attributes.items()}
        assert row["trace_id"] == span.trace_id.hex()
        assert row["span_id"] == span.span_id.hex()
        assert row["request_id"] == attributes["gen_ai.request.id"].string_value
        assert row["instance"] in {a.value.string_value for a in resource.attributes}
        assert row["arrival_ns"] == span.start_time_unix_nano
        assert row["first_token_ns"] == span.start_time_unix_nano + ns["time_to_first_token"]
        assert row["last_token_ns"] == row["finished_ns"] == span.start_time_unix_nano + ns["e2e"]
        assert row["scheduled_ns"] == row["first_token_ns"] - ns["time_in_model_prefill"]
        assert row["queued_ns"] == row["scheduled_ns"] - ns["time_in_queue"]
        assert row["decode_ns"] == ns["time_in_model_decode"]
        assert row["prompt_tokens"] == attributes["gen_ai.usage.prompt_tokens"].int_value
        assert row["output_tokens"] == attributes["gen_ai.usage.completion_tokens"].int_value
        assert row["max_tokens"] == attributes["gen_ai.request.max_tokens"].int_value
        assert (row["observer"], row["status"]) == ("engine", "ok")
        assert row["engine"] is row["role"] is row["model"] is row["tenant"] is row["source"] is None
        assert row["arrival_ns"] <= row["queued_ns"] <= row["scheduled_ns"] <= row["first_token_ns"]
    assert len({row["request_key"] for row in rows}) == 259


@needs_captures
def test_a_cut_file_keeps_its_whole_spans(tmp_path: Path) -> None:
    data = gzip.decompress((otlp("run1-dense-mixed") / "otlp_spans.pb.delim.gz").read_bytes())
    whole, _ = read(otlp("run1-dense-mixed") / "otlp_spans.pb.delim.gz")
    path = tmp_path / "cut.pb"
    path.write_bytes(data[: len(data) // 2])
    rows, source = read(path)
    assert 100 < len(rows) < 200
    assert rows == whole[: len(rows)]
    assert source.tally.rejected == {"protobuf message is cut off or damaged": 1}


@needs_captures
def test_hashed_ids_still_tell_requests_apart() -> None:
    path = otlp("run1-dense-mixed") / "otlp_spans.jsonl.gz"
    plain, hashed = read(path)[0], read(path, Options(hash_ids=True))[0]
    assert not {row["request_id"] for row in plain} & {row["request_id"] for row in hashed}
    assert len({row["request_id"] for row in hashed}) == len({row["request_id"] for row in plain}) == 258
    for before, after in zip(plain, hashed, strict=True):
        assert {**before, "request_id": None} == {**after, "request_id": None}


@needs_captures
def test_hashed_ids_join_with_the_ids_clients_got() -> None:
    """The client has `cmpl-X`, the span of its first prompt `cmpl-X-0`."""
    path = otlp("run1-dense-mixed")
    rows, _ = read(path / "otlp_spans.jsonl.gz", Options(hash_ids=True))
    known = {row["request_id"] for row in rows}
    with gzip.open(path.parent / "client.jsonl.gz", "rt") as lines:
        sent = [json.loads(line) for line in lines]
    ids = [client["response_id"] for client in sent if client.get("finish_reason")]
    assert len(ids) == 216
    assert all(request_key("id", i) in known for i in ids)


@needs_captures
def test_other_telemetry_of_the_captures_is_left_to_others() -> None:
    others = [p for p in (CAPTURES / "vllm-cpu").rglob("*") if p.is_file() and p.parent.name != "otlp"]
    assert len(others) > 20
    assert [p for p in others if claimed(p)] == []


@needs_corpus
def test_every_corpus_file_has_an_outcome() -> None:
    folders = ("otlp-proto", "otlp-jaeger", "otlp-duckdb")
    files = [p for folder in folders for p in (CORPUS / folder).rglob("*") if p.is_file()]
    assert {str(p.relative_to(CORPUS)) for p in files} == CORPUS_FILES.keys()


@needs_corpus
@pytest.mark.parametrize("name", CORPUS_FILES)
def test_corpus_file(name: str) -> None:
    path, outcome = CORPUS / name, CORPUS_FILES[name]
    assert claimed(path) == (outcome is not None)
    if outcome is None:
        if not path.read_bytes().strip():
            assert read(path)[0] == []
        else:
            with pytest.raises(BadInput):
                read(path)
    elif isinstance(outcome, str):
        with pytest.raises(BadInput) as caught:
            read(path)
        assert str(caught.value) == outcome
    else:
        rows, source = read(path)
        assert (rows, source.tally.rejected, source.tally.skipped) == ([], *outcome)


@needs_corpus
def test_no_other_corpus_file_is_claimed() -> None:
    others = [p for p in CORPUS.rglob("*") if p.is_file() and "otlp-" not in str(p.relative_to(CORPUS))]
    assert [p for p in others if claimed(p)] == []
