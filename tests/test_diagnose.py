"""The whole chain on real captures, against what is known to have happened in them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from real import CAPTURES, CORPUS, EXAMPLE, needs_captures, needs_corpus

from tailscope.align import Scope
from tailscope.config import Config, parse, parse_slo
from tailscope.engine import diagnose
from tailscope.errors import UsageError
from tailscope.ingest import ingest
from tailscope.model import ClassRow, Diagnosis, Finding
from tailscope.render.as_json import as_dict, schema
from tailscope.source import Options
from tailscope.store import Trace

SECOND = 1_000_000_000
#: Phase A of the example: short requests and four long prefills. Phase B: a burst that does not fit the KV cache.
PHASE_A = Scope(1_795_963_214 * SECOND, 1_795_963_264 * SECOND)
PHASE_B = Scope(1_795_963_264 * SECOND, 1_795_963_303 * SECOND)

PREEMPTED = {
    "cmpl-A-short-0119-0", "cmpl-A-pfx-0131-0", "cmpl-A-short-0121-0", "chatcmpl-A-chat-0120",
    *(f"cmpl-B-burst-{i:04d}-0" for i in range(160, 185)),
}  # fmt: skip

#: Rules about what these runs do not have.
UNTOLD = {"noisy-tenant", "priority-inversion", "replica-imbalance", "prefix-cache-loss"}


def traced(source: Path, folder: Path) -> Path:
    trace = folder / "trace.parquet"
    ingest([source], trace, config=Config(), options=Options())
    return trace


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced(EXAMPLE, tmp_path_factory.mktemp("example"))


def judged(path: Path, scope: Scope | None = None, config: Config | None = None) -> Diagnosis:
    with Trace(path) as trace:
        diagnosis = diagnose(trace, config or Config(), scope)
    jsonschema.validate(as_dict(diagnosis), schema())
    assert not [check for check in diagnosis.checks if check.status == "failed"]
    return diagnosis


def finding(diagnosis: Diagnosis, rule: str) -> Finding:
    (found,) = [f for f in diagnosis.findings if f.rule == rule]
    return found


def row(diagnosis: Diagnosis, klass: str, metric: str) -> ClassRow:
    # The engine's view comes first.
    found, *_ = [r for r in diagnosis.classes if (r.klass, r.metric) == (klass, metric)]
    return found


def status(diagnosis: Diagnosis, rule: str) -> str:
    (found,) = [c.status for c in diagnosis.checks if c.rule == rule]
    return found


def status_reason(diagnosis: Diagnosis, rule: str) -> str:
    (reason,) = [c.reason for c in diagnosis.checks if c.rule == rule]
    return reason


def trust(diagnosis: Diagnosis, check: str) -> list[tuple[str, str]]:
    return [(t.status, t.detail) for t in diagnosis.trust if t.check == check]


def test_both_findings_and_nothing_else(example: Path) -> None:
    diagnosis = judged(example)
    assert diagnosis.verdict.status == "found"
    assert {(f.rule, f.status) for f in diagnosis.findings if f.severity in ("high", "medium")} == {
        ("hol-coupling", "found"),
        ("preemption-storm", "found"),
    }


def test_each_request_span_counts_once_though_three_encodings_lie_in_the_folder(example: Path) -> None:
    with Trace(example) as trace:
        spans = trace.rows(
            "SELECT count(*) AS n, count(DISTINCT span_id) AS ids FROM requests WHERE span_id IS NOT NULL"
        )
        assert spans == [{"n": 259, "ids": 259}]
        duplicates = trace.rows("SELECT sum(rows_duplicate)::BIGINT AS n FROM sources WHERE kind = 'otlp'")
        assert duplicates == [{"n": 259}]


def test_says_which_requests_were_preempted(example: Path) -> None:
    with Trace(example) as trace:
        diagnose(trace, Config())
        rows = trace.rows("SELECT request_id, preemptions FROM joined WHERE preemptions > 0")
    assert {r["request_id"] for r in rows} == PREEMPTED
    assert {r["preemptions"] for r in rows} == {1}


def test_observers_are_joined(example: Path) -> None:
    with Trace(example) as trace:
        diagnose(trace, Config())
        coverage = {
            r["join"]: (r["matched"], r["total"], r["ambiguous"])
            for r in trace.rows("SELECT * FROM coverage")
        }
        unseen = trace.rows(
            "SELECT status, count(*) AS n FROM joined WHERE NOT engine_saw GROUP BY status ORDER BY status"
        )
    assert coverage == {
        "client request → engine request": (217, 217, 0),
        "engine span → stat logger": (259, 259, 0),
        "request → iterations": (259, 259, 0),
    }
    # Three aborts and three refused requests left no span.
    assert unseen == [{"status": "aborted", "n": 3}, {"status": "error", "n": 3}]


def test_three_aborts_are_missing_from_the_tail_and_that_is_said(example: Path) -> None:
    ((level, detail),) = trust(judged(example), "survivorship")
    assert level == "warn"
    assert "3 aborted" in detail
    assert "6 of them in no span" in detail


def test_phase_a_couples_short_requests_to_long_prefills(example: Path) -> None:
    diagnosis = judged(example, PHASE_A)
    coupling = finding(diagnosis, "hol-coupling")
    assert (coupling.status, coupling.severity) == ("found", "high")
    assert coupling.culprit.id == "<8k"
    assert coupling.culprit.detail["longest_prompt_tokens"] == 7400
    assert [v.id for v in coupling.victims] == ["<512"]
    numbers: Mapping[str, Any] = next(e.data for e in coupling.evidence if "coupled_p50_s" in e.data)
    # Known from the client's log: p50 4.81 s for those that overlap a long prefill, 0.074 s for the others.
    assert numbers["coupled_p50_s"] == pytest.approx(4.8, abs=0.2)
    assert numbers["uncoupled_p50_s"] == pytest.approx(0.074, abs=0.02)
    assert numbers["coupled"] == pytest.approx(78, abs=6)
    assert numbers["coupled"] + numbers["uncoupled"] == row(diagnosis, "<512", "TTFT").n


def test_phase_b_is_a_kv_squeeze(example: Path) -> None:
    diagnosis = judged(example, PHASE_B)
    storm = finding(diagnosis, "preemption-storm")
    assert (storm.status, storm.severity) == ("found", "high")
    assert not [
        f for f in diagnosis.findings if f.rule == "hol-coupling" and f.severity in ("high", "medium")
    ]
    stalled: Mapping[str, Any] = next(e.data for e in storm.evidence if "stalled_requests" in e.data)
    assert stalled["stalled_requests"] == 25
    # The longest gap between two tokens of a request was 19.3 s; the step that ended it is not part of the wait.
    assert stalled["longest_s"] == pytest.approx(19.1, abs=0.4)


def test_requests_that_end_were_not_thrown_out_though_they_came_before_the_window(example: Path) -> None:
    fifty_seconds = Scope(from_ns=1_795_963_250_000_000_000, to_ns=1_795_963_300_000_000_000)
    storms = []
    for scope in (None, fifty_seconds):
        evidence = finding(judged(example, scope), "preemption-storm").evidence
        storms += [e.data["preempted"] for e in evidence if "told" in e.data]
    assert storms == [29, 29]


def test_stalls_are_nobodys_who_was_not_preempted(example: Path) -> None:
    with Trace(example) as trace:
        diagnose(trace, Config())
        rows = trace.rows(
            "SELECT DISTINCT j.request_id FROM bill_lines l JOIN joined j ON j.rid = l.id WHERE l.component = 'preempted'"
        )
    assert {r["request_id"] for r in rows} <= PREEMPTED


def test_bills_sum_to_the_measured_latency(example: Path) -> None:
    with Trace(example) as trace:
        diagnose(trace, Config())
        wrong = trace.rows(
            """
            SELECT j.rid, j.request_id, j.e2e_ns, j.ttft_ns, sum(l.ns) AS billed, min(l.ns) AS least,
                   sum(l.ns) FILTER (WHERE l.place <> 'decode') AS billed_ttft
            FROM joined j JOIN bill_lines l ON l.id = j.rid WHERE j.billed GROUP BY ALL
            HAVING billed <> j.e2e_ns OR coalesce(billed_ttft, 0) <> j.ttft_ns OR least < 0
            """
        )
        billed = trace.rows("SELECT count(DISTINCT id) AS n FROM bill_lines")
    assert wrong == []
    assert billed == [{"n": 259}]


def test_little_of_the_tail_is_unexplained(example: Path) -> None:
    diagnosis = judged(example)
    for metric in ("TTFT", "TPOT", "E2E", "ITL"):
        tail = row(diagnosis, "<512", metric)
        assert tail.excess_s is not None
        assert sum(tail.excess.values()) == pytest.approx(tail.excess_s)
        assert abs(tail.excess.get("unexplained", 0.0)) < 0.1 * tail.excess_s


def test_too_few_samples_give_no_p99(example: Path) -> None:
    diagnosis = judged(example)
    short, long = row(diagnosis, "<512", "TTFT"), row(diagnosis, "<8k", "TTFT")
    assert (short.p99_s, short.ci99_s, short.reason) == (None, None, "too-few-samples")
    assert short.p50_s is not None
    assert (long.n, long.p50_s, long.tail_rule, long.reason) == (5, None, None, "too-few-samples")


def test_slo_and_classes_of_the_configuration(example: Path) -> None:
    config = parse(
        {
            "class": [{"name": "chat", "where": {"prompt_tokens": [0, 1000]}}, {"name": "documents"}],
            "slo": {"chat": {"ttft_p50_s": 0.02}},
        }
    )
    diagnosis = judged(example, config=config)
    assert {r.klass for r in diagnosis.classes} == {"chat", "documents"}
    assert row(diagnosis, "chat", "TTFT").slo_broken
    (objective,) = row(diagnosis, "chat", "TTFT").objectives
    assert objective.status == "broken"
    assert objective.above is not None
    assert objective.above > 100
    # 84 of them lie above 2 s: no p99 can be stated, but this one is not kept.
    strict = replace(config, slos=(parse_slo("chat:ttft_p99_s=2"),))
    assert row(judged(example, config=strict), "chat", "TTFT").slo_broken
    kept = replace(config, slos=(parse_slo("chat:ttft_p50_s=100"),))
    assert not row(judged(example, config=kept), "chat", "TTFT").slo_broken
    with pytest.raises(UsageError, match="no such class; there are chat, documents and all"):
        judged(example, config=replace(config, slos=(parse_slo("nope:ttft_p50_s=100"),)))


def test_an_instance_or_class_can_be_picked(example: Path) -> None:
    assert {r.klass for r in judged(example, Scope(klass="<512")).classes} == {"<512"}
    empty = judged(example, Scope(to_ns=1))
    assert empty.verdict.status == "no-data"


@needs_captures
def test_a_quiet_run_stays_quiet(tmp_path: Path) -> None:
    """A long pause of the profiler and a slow first step are in it; no coupling, preemption or KV finding."""
    diagnosis = judged(traced(CAPTURES / "vllm-cpu" / "run5-dense-ngram-spec", tmp_path))
    first, pause = diagnosis.findings
    # Who ingests profiles does not look for what taking them did.
    assert (pause.rule, pause.severity, pause.culprit.id) == ("pause", "low", "the profiler")
    assert pause.title == "Engine 0 stood still for 20.7 s (the profiler)"
    assert (first.rule, first.severity) == ("first-shape", "medium")
    assert first.title == "The first batch after the start of engine 0 takes 3.3 s more than it accounts for"
    assert diagnosis.verdict.status == "found"
    # The step in which the profiler wrote its trace is told of once.
    assert diagnosis.verdict.text.count("20.7 s") == 1
    assert "profiler" in diagnosis.verdict.text
    statuses = {c.rule: c.status for c in diagnosis.checks}
    # A profile of a CPU does not tell whether it waits.
    assert (statuses.pop("first-shape"), statuses.pop("host-bound")) == ("found", "no-data")
    assert (statuses.pop("hot-expert"), statuses.pop("pause")) == ("no-data", "found")
    # Nothing tells of tenants, priorities, replicas or a prefix cache.
    assert {rule for rule, status in statuses.items() if status == "no-data"} <= UNTOLD
    assert set(statuses.values()) == {"clear", "no-data"}
    assert status_reason(diagnosis, "periodic-pause") == "2 long steps, not periodic: fewer than 4"
    # Of what the batches do not account for next to nothing is left beside the pauses.
    assert row(diagnosis, "<512", "E2E").excess["pause"] == pytest.approx(20.8, abs=0.1)
    assert trust(diagnosis, "unexplained")[0][0] == "pass"


@needs_captures
def test_a_slow_rank_is_not_taken_for_coupling_or_preemption(tmp_path: Path) -> None:
    diagnosis = judged(traced(CAPTURES / "vllm-cpu" / "run2-moe-tp2", tmp_path))
    assert [(f.rule, f.severity) for f in diagnosis.findings if f.severity in ("high", "medium")] == [
        ("straggler-rank", "high"),
        ("first-shape", "medium"),
    ]
    there = ("pause", "straggler-rank", "first-shape")
    statuses = {c.rule: c.status for c in diagnosis.checks if c.rule not in there}
    # Experts of this run are split by tensor parallelism: nothing is dispatched.
    assert (statuses.pop("host-bound"), statuses.pop("hot-expert")) == ("no-data", "no-data")
    assert {rule for rule, status in statuses.items() if status == "no-data"} <= UNTOLD
    assert set(statuses.values()) == {"clear", "no-data"}
    # The profiler starts and stops, and the first batch: four, at no beat.
    assert status_reason(diagnosis, "periodic-pause").startswith("4 long steps, not periodic")


@needs_captures
def test_beside_a_slow_rank_prefill_on_the_other_engine_counts(tmp_path: Path) -> None:
    """The engines step together: two prompts of 3,000 tokens on engine 0 make engine 1's decode steps take 0.6 to 0.8 s."""
    diagnosis = judged(traced(CAPTURES / "vllm-cpu" / "run3-moe-dp2-ep2-patched", tmp_path))
    first, *others = [f for f in diagnosis.findings if f.severity in ("high", "medium")]
    assert (first.rule, first.severity) == ("straggler-rank", "high")
    # A step of 8.8 s beside which nothing stands in the log, and the prompts on the other engine.
    assert {(f.rule, f.culprit.id) for f in others} <= {("pause", "1"), ("hol-coupling", "<8k")}
    statuses = {c.rule: c.status for c in diagnosis.checks}
    assert statuses["preemption-storm"] == "clear"
    # The late rank is late in expert compute, but nothing says how many tokens it got.
    assert statuses["hot-expert"] == "inconclusive"
    # Most of the tail is the profiler's pauses; without them the same prompts would be the rest of it.
    assert statuses["dp-coupling"] == "clear"
    assert "engine 1 spends 10% of its time on other engines' prefill, up to 0.74" in status_reason(
        diagnosis, "dp-coupling"
    )


@needs_captures
@pytest.mark.parametrize(
    ("run", "failed"), [("fail-moe-dp2-noallgatherv", 39), ("fail-moe-tp2-ep-segfault", 25)]
)
def test_a_failed_server_gets_no_latency_verdict(tmp_path: Path, run: str, failed: int) -> None:
    diagnosis = judged(traced(CAPTURES / "vllm-cpu" / run, tmp_path))
    assert diagnosis.verdict.status == "inconclusive"
    assert diagnosis.verdict.text.startswith(f"No latency verdict: {failed} of {failed} requests failed")
    assert diagnosis.findings == ()
    assert trust(diagnosis, "survivorship")[0][0] == "fail"


@needs_corpus
def test_a_p99_above_the_last_bucket_is_no_number(tmp_path: Path) -> None:
    diagnosis = judged(traced(CORPUS / "transcribed" / "sglang", tmp_path))
    ttft = row(diagnosis, "all", "TTFT")
    assert (ttft.p99_s, ttft.range99_s, ttft.n) == (None, (30.0, None), 11_008)
    assert "p99 TTFT is > 30 s" in diagnosis.verdict.text
    assert diagnosis.verdict.status == "inconclusive"


#: What rules about steps say where there are none, and from the steps of the example.
NO_STEPS = dict.fromkeys(("dp-coupling", "first-shape", "host-bound", "pause", "periodic-pause"), "no-data")
STEPS = NO_STEPS | dict.fromkeys(("dp-coupling", "first-shape", "pause", "periodic-pause"), "clear")
#: Parts of the example's telemetry, and what each rule may say from them.
PARTS = {
    "spans": (
        ["otlp"],
        {
            "hol-coupling": "inconclusive",
            "preemption-storm": "no-data",
            "straggler-rank": "no-data",
            **NO_STEPS,
        },
    ),
    "spans and log": (
        ["otlp", "server.log.gz"],
        {"hol-coupling": "found", "preemption-storm": "no-data", "straggler-rank": "no-data", **STEPS},
    ),
    "stat logger": (
        ["statlogger_engine0_pid29933.jsonl.gz"],
        {"hol-coupling": "found", "preemption-storm": "found", "straggler-rank": "no-data", **STEPS},
    ),
    "client": (
        ["client.jsonl.gz"],
        {
            "hol-coupling": "inconclusive",
            "preemption-storm": "no-data",
            "straggler-rank": "no-data",
            **NO_STEPS,
        },
    ),
    "bench": (
        ["bench"],
        {"hol-coupling": "clear", "preemption-storm": "no-data", "straggler-rank": "no-data", **NO_STEPS},
    ),
    "metrics": (
        ["metrics.txt.gz"],
        {
            "hol-coupling": "no-data",
            "preemption-storm": "inconclusive",
            "straggler-rank": "no-data",
            **NO_STEPS,
        },
    ),
    "log": (
        ["server.log.gz"],
        {"hol-coupling": "no-data", "preemption-storm": "no-data", "straggler-rank": "no-data", **STEPS},
    ),
}


@pytest.mark.parametrize("part", sorted(PARTS))
def test_less_telemetry_decides_less_and_says_what_is_missing(tmp_path: Path, part: str) -> None:
    names, expected = PARTS[part]
    source = tmp_path / "run"
    source.mkdir()
    for name in names:
        (shutil.copytree if (EXAMPLE / name).is_dir() else shutil.copy2)(EXAMPLE / name, source / name)
    diagnosis = judged(traced(source, tmp_path))
    assert {c.rule: c.status for c in diagnosis.checks if c.rule in expected} == expected
    assert diagnosis.missing
    if "found" in expected.values():
        assert diagnosis.verdict.status == "found"
    else:
        # Nothing was looked at closely enough to be called healthy, but a class by itself holds nobody up.
        assert diagnosis.verdict.status == {"log": "nothing", "bench": "nothing"}.get(part, "inconclusive")


def test_a_log_is_of_the_year_it_was_packed_in_whatever_the_copy_says(tmp_path: Path) -> None:
    copy = tmp_path / "server.log.gz"
    shutil.copy(EXAMPLE / "server.log.gz", copy)
    os.utime(copy, (1_900_000_000, 1_900_000_000))  # 2030
    with Trace(traced(copy, tmp_path)) as trace:
        ((first,),) = trace.connection.execute("SELECT min(end_ns) FROM iterations").fetchall()
    assert first == pytest.approx(1_795_963_157 * SECOND, abs=2 * SECOND)


def test_a_tail_of_token_gaps_alone_has_a_verdict(tmp_path: Path) -> None:
    """Ten streams: too few requests of any class, but a hundred gaps between their tokens."""
    lines = [
        {
            "client_request_id": f"r{i}",
            "path": "/v1/completions",
            "send_unix_ns": (1_795_963_214 + i) * SECOND,
            "status": 200,
            "max_tokens": 10,
            "usage": {"prompt_tokens": 10, "completion_tokens": 10},
            "chunks_us_ntok": [[20_000 * (k + 1) + (k == 5) * 9_000, 1] for k in range(10)],
            "done_us": 250_000,
        }
        for i in range(10)
    ]
    log = tmp_path / "client.jsonl"
    log.write_text("\n".join(map(json.dumps, lines)))
    diagnosis = judged(traced(log, tmp_path))
    assert row(diagnosis, "<512", "ITL").n == 90
    assert "10 requests" in diagnosis.verdict.text
