"""Simulated worlds as their emitters tell them: the files, what ingesting them gives, and what no emitter can see."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families
from real import EXAMPLE

from tailscope.align import Scope
from tailscope.config import Attributes, Config
from tailscope.engine import diagnose
from tailscope.ingest import ingest
from tailscope.model import Diagnosis
from tailscope.sim.emit.files import write_files
from tailscope.sim.emit.front_end import client_id, front_ends
from tailscope.sim.engine import simulate
from tailscope.sim.outcome import (
    ABORTED,
    DECODE,
    OK,
    PREFILL,
    RECOMPUTE,
    REJECTED,
    START_NS,
    TIMEOUT,
    UNFINISHED,
    EngineOutcome,
    Outcome,
    Requests,
    Runs,
    Steps,
)
from tailscope.sim.scenario import Engine, Fault, Gateway, Load, Scenario, Sizes, Telemetry
from tailscope.sim.tables import request_tables
from tailscope.source import Options
from tailscope.store import Trace

Rows = list[dict[str, Any]]
REASONS: tuple[Literal["eplb", "jit", "profiler", "unknown"], ...] = ("eplb", "jit", "profiler", "unknown")

LOAD = Load("chat", rate=10.0, output_tokens=Sizes(60.0, 0.5))
#: Names as no one should choose them: they travel in JSON, protobuf, label values, log lines and headers.
HOSTILE = Load('b"\n,\\é \x00', rate=2.0, n=3, output_tokens=Sizes(20.0))
PLAIN = Scenario((LOAD,), duration_s=5.0)
SCENARIOS = {
    "plain": PLAIN,
    "preemptions": replace(
        PLAIN,
        loads=(Load("chat", rate=20.0, output_tokens=Sizes(150.0, 0.3)),),
        engine=Engine(kv_blocks=300),
    ),
    "left": replace(
        PLAIN,
        loads=(replace(LOAD, rate=20.0, abort_share=0.3, timeout_s=0.6, output_tokens=Sizes(90.0, 0.5)),),
        engine=Engine(max_num_seqs=8, max_num_queued_reqs=4),
    ),
    "gateway": replace(
        PLAIN, gateway=Gateway(max_in_flight=3, max_queue=3), loads=(replace(LOAD, timeout_s=0.9),)
    ),
    "data-parallel": replace(PLAIN, engine=Engine(data_parallel=2, moe=True)),
    "independent": replace(PLAIN, engine=Engine(data_parallel=2)),
    "replicas": replace(PLAIN, loads=(LOAD, HOSTILE), engine=Engine(replicas=2), model='m"\n\\é/x'),
    "clock": replace(PLAIN, telemetry=Telemetry(client_offset_s=1.75)),
    "pair": replace(PLAIN, engine=Engine(prefill_replicas=1)),
    "pair-left": replace(
        PLAIN,
        loads=(replace(LOAD, rate=25.0, abort_share=0.3, timeout_s=0.4),),
        engine=Engine(prefill_replicas=2, max_num_seqs=6, data_parallel=2),
    ),
    "several-answers": replace(PLAIN, loads=(replace(LOAD, n=3, abort_share=0.1, timeout_s=1.0),)),
    "idle": replace(PLAIN, duration_s=0.5, engine=Engine(replicas=3, routing="least-loaded")),
    "no-details": replace(PLAIN, telemetry=Telemetry(iteration_details=False)),
    "bench": replace(
        PLAIN, loads=(replace(LOAD, timeout_s=0.6),), telemetry=Telemetry(client_format="vllm-bench")
    ),
    "pauses": replace(
        PLAIN,
        duration_s=8.0,
        faults=tuple(Fault("pause", reason=reason, from_s=1.5 * (i + 1)) for i, reason in enumerate(REASONS)),
        telemetry=Telemetry(scrape_s=0.25, profile=((6.5, 0.5),)),
    ),
    "tenants": replace(
        PLAIN, loads=(replace(LOAD, tenant="a\n\u00e9"), replace(LOAD, name="bulk", priority=5))
    ),
    "schedule": replace(
        PLAIN,
        loads=(
            Load("chat", rate=20.0, output_tokens=Sizes(150.0, 0.3), abort_share=0.1),
            Load("long", rate=0.5, prompt_tokens=Sizes(3_000.0), output_tokens=Sizes(20.0)),
        ),
        engine=Engine(kv_blocks=500, max_num_batched_tokens=512),
        telemetry=Telemetry(schedule=True),
    ),
    "schedule-starved": replace(
        PLAIN,
        loads=(Load("chat", rate=30.0, output_tokens=Sizes(60.0, 0.3)),),
        engine=Engine(max_num_batched_tokens=16),
        telemetry=Telemetry(schedule=True),
    ),
    "schedule-replicas": replace(
        PLAIN,
        loads=(LOAD, HOSTILE),
        engine=Engine(replicas=2, data_parallel=2, moe=True),
        telemetry=Telemetry(schedule=True),
    ),
    "schedule-pair": replace(
        PLAIN, engine=Engine(prefill_replicas=1), telemetry=Telemetry(schedule=True, stat_logger=False)
    ),
    "silent": replace(PLAIN, duration_s=0.05, loads=(Load("none", requests=0),)),
}
#: What spans of the fleet's own name.
NAMED = Attributes(tenant="sim.tenant", priority="sim.priority")
#: Of a source only what does not depend on the file's bytes and place.
OF_SOURCES = ["instance", "kind", "clock", "offset_ns", "offset_error_ns", "rows", "rows_rejected", "values_blanked",
              "rows_duplicate", "rows_conflicting", "instances", "folder", "first_ns", "last_ns"]  # fmt: skip


@cache
def world(name: str) -> Outcome:
    return simulate(SCENARIOS[name])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


def written(folder: Path, name: str) -> Path:
    """The files of a world, written once."""
    if not (folder / name).is_dir():
        write_files(world(name), folder / name)
    return folder / name


def ingested(folder: Path, name: str) -> Path:
    trace = folder / f"{name}.parquet"
    if not trace.is_dir():
        for outcome in ingest([written(folder, name)], trace, config=Config(), options=Options(NAMED)):
            assert outcome.status == "ingested", outcome
            assert not outcome.tally.rejected, outcome
            # Of several answers whose client left no one can tell which had which token.
            assert set(outcome.tally.blanked) <= {"tokens per choice cannot be told"}, outcome
    return trace


def saved(tables: dict[str, pa.Table], folder: Path) -> Path:
    for name, table in tables.items():
        (folder / name).mkdir(parents=True)
        pq.write_table(table, folder / name / "rows.parquet")
    return folder


def rows_of(trace: Trace, table: str, columns: list[str]) -> list[str]:
    chosen = ", ".join(f'"{column}"' for column in columns)
    return sorted(map(repr, trace.connection.execute(f'SELECT {chosen} FROM "{table}"').fetchall()))


# -- files and tables ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_tables_are_what_the_files_give(name: str, folder: Path, tmp_path: Path) -> None:
    tables = request_tables(world(name), metrics=True)
    assert all(table.schema.equals(pa.schema(table.schema)) for table in tables.values())
    with Trace(ingested(folder, name)) as read, Trace(saved(tables, tmp_path / "direct")) as direct:
        for table, rows in tables.items():
            columns = OF_SOURCES if table == "sources" else [c for c in rows.schema.names if c != "source"]
            assert rows_of(read, table, columns) == rows_of(direct, table, columns), table
        # And there is nothing else.
        assert set(read.files) <= set(tables)


@pytest.mark.parametrize("name", ["preemptions", "left", "replicas", "schedule"])
def test_the_diagnosis_is_the_same(name: str, folder: Path, tmp_path: Path) -> None:
    with Trace(ingested(folder, name)) as trace:
        read = diagnose(trace, Config(), Scope())
    with Trace(saved(request_tables(world(name), metrics=True), tmp_path / "direct")) as trace:
        direct = diagnose(trace, Config(), Scope())
    assert to_nine_digits(read) == to_nine_digits(direct)


def to_nine_digits(diagnosis: Diagnosis) -> str:
    """All it says but where it read; threads add numbers up in any order."""
    text = repr(replace(diagnosis, trace={}))
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.9g}", text)


def test_metrics_are_left_out_unless_asked_for() -> None:
    assert request_tables(world("plain")).keys() == {"requests", "tokens", "iterations", "events", "sources"}


def test_the_same_world_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = write_files(simulate(SCENARIOS["left"]), tmp_path)
    assert again
    for path in again:
        before = written(folder, "left") / path.relative_to(tmp_path)
        assert path.read_bytes() == before.read_bytes()
        assert path.stat().st_mtime_ns == before.stat().st_mtime_ns


def test_only_what_telemetry_says_is_written(tmp_path: Path) -> None:
    nothing = Telemetry(spans=False, stat_logger=False, log=False, metrics=False, client=False)
    outcome = replace(world("plain"), scenario=replace(PLAIN, telemetry=nothing))
    assert write_files(outcome, tmp_path) == []
    assert all(not table.num_rows for table in request_tables(outcome, metrics=True).values())
    only = replace(outcome, scenario=replace(PLAIN, telemetry=replace(nothing, spans=True)))
    assert [path.name for path in write_files(only, tmp_path)] == ["otlp_spans.pb.delim"]


def test_a_folder_an_instance_and_one_name_for_it(folder: Path) -> None:
    with Trace(ingested(folder, "replicas")) as trace:
        for table in ("requests", "iterations", "tokens", "events", "metrics"):
            found = trace.rows(f"SELECT DISTINCT instance FROM {table} ORDER BY 1")
            assert [row["instance"] for row in found] == ["vllm-0", "vllm-1"], table


# -- a world made by hand --------------------------------------------------------------------------


def made_steps(**columns: list[Any]) -> Steps:
    """Steps with 0 where nothing is said; each of 10 ms and heard of 1 ms after it."""
    size = len(next(iter(columns.values())))
    end = 0.01 * np.arange(1, size + 1)
    clock = {"scheduled_s": end - 0.01, "start_s": end - 0.01, "end_s": end, "received_s": end + 0.001}
    kinds = {
        name: np.float64 if "Floats" in kind else np.int64 for name, kind in Steps.__annotations__.items()
    }
    values: dict[str, Any] = {name: np.zeros(size, kind) for name, kind in kinds.items()}
    values |= clock | {"dummy": np.zeros(size, np.bool_)}
    values |= {name: np.array(column, values[name].dtype) for name, column in columns.items()}
    return Steps(**values)


def made_runs(rows: list[tuple[int, ...]]) -> Runs:
    request, first, last, phase, tokens, before, gives = np.array(rows, np.int64).reshape(-1, 7).T
    return Runs(request, first, last, phase, tokens, before, gives > 0)


def by_hand() -> Outcome:
    """Two requests. The second one's prompt takes three steps; it is preempted in step 4, comes back in step 6."""
    names = Requests.__annotations__
    size = 2
    values: dict[str, Any] = {
        name: np.full(size, 0 if kind == "Ints" else np.nan, np.int64 if kind == "Ints" else np.float64)
        for name, kind in names.items()
        if name != "id"
    }
    values |= {"prompt": np.array([5, 30]), "planned": np.array([2, 3]), "output": np.array([2, 3])}
    values |= {
        "prefill_engine": np.array([-1, -1]),
        "preemptions": np.array([0, 1]),
        "status": np.array([OK, OK]),
    }
    for name, times in {
        "sent_s": [0.0, 0.0], "intended_s": [0.0, 0.0], "arrival_s": [0.0, 0.0], "queued_s": [0.0, 0.0],
        "scheduled_s": [0.0, 0.01], "first_token_s": [0.01, 0.04], "last_token_s": [0.02, 0.08],
        "first_shown_s": [0.011, 0.041], "last_shown_s": [0.021, 0.081], "finished_s": [0.021, 0.081],
    }.items():  # fmt: skip
        values[name] = np.array(times)
    steps = made_steps(
        prefill_requests=[1, 1, 1, 1, 0, 0, 0, 0], prefill_tokens=[5, 10, 10, 10, 0, 0, 0, 0],
        decode_requests=[0, 1, 0, 0, 0, 0, 0, 1], decode_tokens=[0, 1, 0, 0, 0, 0, 0, 1],
        recompute_requests=[0, 0, 0, 0, 0, 0, 1, 0], recompute_tokens=[0, 0, 0, 0, 0, 0, 31, 0],
        preempted=[0, 0, 0, 0, 1, 0, 0, 0], preempted_told=[0, 0, 0, 0, 0, 0, 1, 0],
    )  # fmt: skip
    runs = made_runs(
        [
            (0, 0, 0, PREFILL, 5, 0, 1),
            (0, 1, 1, DECODE, 1, 5, 1),
            (1, 1, 1, PREFILL, 10, 0, 0),
            (1, 2, 2, PREFILL, 10, 10, 0),
            (1, 3, 3, PREFILL, 10, 20, 1),
            (1, 6, 6, RECOMPUTE, 31, 0, 1),
            (1, 7, 7, DECODE, 1, 31, 1),
        ]
    )
    scenario = replace(PLAIN, duration_s=1.0, telemetry=Telemetry(scrape_s=0.01))
    requests = Requests(id=["a-0", "a-1"], **values)
    return Outcome(scenario, requests, [EngineOutcome("i", 0, "both", steps, runs)])


def test_a_world_made_by_hand_is_told_the_same_way_twice(tmp_path: Path) -> None:
    outcome = by_hand()
    write_files(outcome, tmp_path / "files")
    ingest([tmp_path / "files"], tmp_path / "read", config=Config(), options=Options())
    tables = request_tables(outcome, metrics=True)
    with Trace(tmp_path / "read") as read, Trace(saved(tables, tmp_path / "direct")) as direct:
        for table, rows in tables.items():
            columns = OF_SOURCES if table == "sources" else [c for c in rows.schema.names if c != "source"]
            assert rows_of(read, table, columns) == rows_of(direct, table, columns), table


def test_a_request_that_never_ends_is_the_clients_only(tmp_path: Path) -> None:
    outcome = by_hand()
    outcome.requests.status[1], outcome.requests.finished_s[1] = UNFINISHED, np.nan
    write_files(outcome, tmp_path)
    assert span_ids(tmp_path / "i") == ["cmpl-a-0-0"]
    line = clients(tmp_path / "i")[1]
    assert not line.keys() & {"done_us", "end_us", "exception", "client_aborted_us", "usage"}
    assert len(line["chunks_us_ntok"]) == 3
    rows = request_tables(outcome)["requests"].to_pylist()
    assert [row["status"] for row in rows if row["observer"] == "client"] == ["ok", "unfinished"]


def test_token_times() -> None:
    outcome = by_hand()
    request, step, time = outcome.token_times(outcome.engines[0])
    assert request.tolist() == [0, 0, 1, 1, 1]
    assert step.tolist() == [0, 1, 3, 6, 7]
    assert time.tolist() == [0.01, 0.02, 0.04, 0.07, 0.08]


def test_token_times_of_a_run_of_many_steps_and_of_an_engine_that_did_nothing() -> None:
    outcome = by_hand()
    engine = outcome.engines[0]
    runs = made_runs([(1, 4, 6, DECODE, 1, 9, 1), (0, 0, 2, DECODE, 1, 9, 1)])
    request, step, _ = outcome.token_times(replace(engine, runs=runs))
    assert list(zip(request.tolist(), step.tolist(), strict=True)) == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 4),
        (1, 5),
        (1, 6),
    ]
    assert not len(outcome.token_times(replace(engine, runs=made_runs([])))[0])


def test_outputs_and_messages(tmp_path: Path) -> None:
    write_files(by_hand(), tmp_path)
    records = records_of(tmp_path / "i")
    stats = [record["iteration_stats"] for record in records]
    # A message without outputs has no iteration statistics: two prompt chunks, and two steps of nothing.
    assert [s is None for s in stats] == [False, False, True, False, True, True, False, False]
    # The whole prompt is booked with the message that ends it.
    assert [s["prompt_token_stats"]["total"] for s in stats if s] == [5, 0, 30, 0, 0]
    assert [s["num_generation_tokens"] for s in stats if s] == [1, 1, 1, 1, 1]
    details = [record["scheduler_stats"]["iteration_details"] for record in records]
    assert [d["num_ctx_tokens"] for d in details] == [5, 10, 10, 10, 0, 0, 0, 0]
    # What is computed again is "generation".
    assert [d["num_generation_tokens"] for d in details] == [0, 1, 0, 0, 0, 0, 31, 1]
    # A preemption is told with the victim's next output, and its stall is one sample between two tokens.
    assert [s and s["num_preempted_reqs"] for s in stats] == [0, 0, None, 0, None, None, 1, 0]
    assert stats[6]["inter_token_latencies_iter"] == pytest.approx([0.03])
    assert [len(s["time_to_first_tokens_iter"]) for s in stats if s] == [1, 0, 1, 0, 0]
    prefix = records[6]["scheduler_stats"]["prefix_cache_stats"]
    assert (prefix["queries"], prefix["preempted_requests"], prefix["preempted_queries"]) == (0, 1, 31)
    [finished] = stats[7]["finished_requests"]
    assert (finished["request_id"], finished["num_preemptions"]) == ("cmpl-a-1-0", 1)
    assert finished["queued_time"] == pytest.approx(0.01)
    assert finished["prefill_time"] == pytest.approx(0.03)
    assert finished["decode_time"] == pytest.approx(0.04)
    assert finished["e2e_latency"] == pytest.approx(0.081, abs=1e-6)


def test_preemptions_are_counted_late_and_prompts_at_their_end(tmp_path: Path) -> None:
    write_files(by_hand(), tmp_path)
    pages = scrapes(tmp_path / "i")
    preempted = [page["vllm:num_preemptions_total"][()] for _, page in pages]
    told = 0.071  # when the front end heard of step 6; the engine preempted at 0.04
    assert preempted == [float(at >= told) for at, _ in pages]
    prompts = {round(at, 3): page["vllm:prompt_tokens_total"][()] for at, page in pages}
    assert (prompts[0.02], prompts[0.04], prompts[0.05]) == (5.0, 5.0, 35.0)
    last = pages[-1][1]
    assert last["vllm:iteration_tokens_total_sum"][()] == 35 + 5
    assert last["vllm:iteration_tokens_total_count"][()] == 5
    assert last["vllm:inter_token_latency_seconds_count"][()] == 3
    assert last["vllm:request_success_total"][("finished_reason", "length"),] == 2


# -- what emitters cannot see ----------------------------------------------------------------------


def records_of(instance: Path, engine: int = 0) -> Rows:
    [path] = instance.glob(f"statlogger_engine{engine}_pid*.jsonl")
    lines = path.read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["ev"] == "record"]


def exported(instance: Path) -> Iterator[tuple[str, list[Span]]]:
    """(instance as named, spans) of each export."""
    data = (instance / "otlp_spans.pb.delim").read_bytes()
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        message = ExportTraceServiceRequest.FromString(data[at + 4 : at + 4 + size])
        at += 4 + size
        [resource] = message.resource_spans
        [name] = [
            a.value.string_value for a in resource.resource.attributes if a.key == "service.instance.id"
        ]
        [scope] = resource.scope_spans
        yield name, list(scope.spans)


def attributes(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}


def span_ids(instance: Path) -> list[str]:
    return [attributes(span)["gen_ai.request.id"] for _, spans in exported(instance) for span in spans]


def scrapes(instance: Path) -> list[tuple[float, dict[str, dict[tuple[tuple[str, str], ...], float]]]]:
    """(time of the world, name -> labels beyond model and engine -> value) of each scrape."""
    pages = []
    for text in (instance / "metrics.txt").read_text().split("#@SCRAPE ")[1:]:
        mark, _, page = text.partition("\n")
        found = re.match(r"unix_ns=(\d+) mono_ns=\d+ dur_ms=\S+ status=200 bytes=(\d+)$", mark)
        assert found and len(page.encode()) == int(found[2])
        values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                values.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
        pages.append(((int(found[1]) - START_NS) / 1e9, values))
    return pages


def clients(instance: Path) -> Rows:
    return [json.loads(line) for line in (instance / "client.jsonl").read_text().splitlines()]


def test_who_left_or_was_refused_is_known_to_clients_alone(folder: Path) -> None:
    outcome, instance = world("left"), written(folder, "left") / "vllm-0"
    requests = outcome.requests
    by_status = {s: {requests.id[i] for i in np.flatnonzero(requests.status == s)} for s in range(5)}
    assert all(by_status[s] for s in (OK, ABORTED, TIMEOUT, REJECTED))
    ids = {f"cmpl-{name}-0" for name in by_status[OK]}
    assert set(span_ids(instance)) == ids
    finished = [
        f for r in records_of(instance) for f in (r["iteration_stats"] or {}).get("finished_requests", ())
    ]
    assert {f["request_id"] for f in finished} == ids
    last = scrapes(instance)[-1][1]
    assert last["vllm:request_success_total"][("finished_reason", "abort"),] == 0
    assert sum(last["vllm:request_success_total"].values()) == len(ids)
    assert last["vllm:e2e_request_latency_seconds_count"][()] == len(ids)
    # What they had until they left stays in the histograms.
    assert last["vllm:time_to_first_token_seconds_count"][()] > len(ids)
    refused = last["vllm:admission_rejections_total"]
    assert refused[("reason", "max_num_queued_reqs"),] == len(by_status[REJECTED])
    lines = {line["client_request_id"]: line for line in clients(instance)}
    assert lines.keys() == set(requests.id)
    for name, line in lines.items():
        assert ("client_aborted_us" in line) == (name in by_status[ABORTED])
        assert ("exception" in line) == (name in by_status[TIMEOUT])
        assert (line.get("status") == 503) == (name in by_status[REJECTED])
        assert ("done_us" in line) == (name in by_status[OK])
        assert all(0 <= us <= line["end_us"] for us, _ in line["chunks_us_ntok"])


def test_the_log_names_who_left(folder: Path) -> None:
    requests = world("left").requests
    text = (written(folder, "left") / "vllm-0" / "server.log").read_text()
    named = set(re.findall(r"Request (\S+) aborted\.", text))
    left = np.flatnonzero(np.isin(requests.status, (ABORTED, TIMEOUT)))
    assert named == {f"cmpl-{requests.id[i]}-0" for i in left}
    assert text.count(" 503 Service Unavailable\n") == int((requests.status == REJECTED).sum())


def test_log_lines_have_seconds_and_no_year(folder: Path) -> None:
    text = (written(folder, "plain") / "vllm-0" / "server.log").read_text()
    ours = [line for line in text.splitlines() if not line.startswith("INFO:     ")]
    assert all(
        re.match(r"\((APIServer|EngineCore) pid=\d+\) INFO \d\d-\d\d \d\d:\d\d:\d\d \[\S+:\d+\] ", line)
        for line in ours
    )
    assert ours[0].count("'max_num_batched_tokens': 2048, 'max_num_seqs': 256")
    stamps = [re.search(r"INFO (\S+ \S+) ", line) for line in ours]
    assert [s[1] for s in stamps if s] == sorted(s[1] for s in stamps if s)


def test_dummy_steps_are_gaps(folder: Path) -> None:
    outcome, instance = world("data-parallel"), written(folder, "data-parallel") / "vllm-0"
    for engine in outcome.engines:
        dummy = np.flatnonzero(engine.steps.dummy)
        assert len(dummy)
        details = [r["scheduler_stats"]["iteration_details"] for r in records_of(instance, engine.engine)]
        told = [d["iteration_index"] for d in details]
        assert set(told) == set(range(len(engine.steps))) - set(dummy.tolist())
        assert not any(d["is_dummy"] for d in details)


def test_gauges_freeze_during_a_long_step(folder: Path) -> None:
    outcome, instance = world("pauses"), written(folder, "pauses") / "vllm-0"
    steps = outcome.engines[0].steps
    k = int(np.argmax(steps.pause_s))
    pages = [page for at, page in scrapes(instance) if steps.received_s[k - 1] <= at < steps.received_s[k]]
    assert len(pages) >= 3
    for page in pages:
        assert page["vllm:num_requests_running"][()] == steps.running[k - 1]
        assert page["vllm:num_requests_waiting"][()] == (steps.waiting + steps.deferred)[k - 1]
        assert page["vllm:kv_cache_usage_perc"][()] == steps.kv_usage[k - 1]


def test_the_log_says_of_a_pause_what_it_knows(folder: Path) -> None:
    with Trace(ingested(folder, "pauses")) as trace:
        found = trace.rows("SELECT kind, detail, (time_ns - $0) // 1000000000 AS at FROM events ORDER BY time_ns, detail".replace("$0", str(START_NS)))  # fmt: skip
    assert [(row["kind"], row["detail"], row["at"]) for row in found if row["at"] >= 0] == [
        ("eplb", "Rearranging experts sync mode", 1),
        ("eplb", "Rearranged experts in 1.00 s", 2),
        ("jit", "Triton kernel JIT compilation during inference: fused_moe_kernel", 3),
        ("config", "profiler start", 4),
        ("config", "profiler start", 6),
        ("config", "profiler stop", 7),
    ]


def test_spans_are_exported_in_batches(folder: Path) -> None:
    exports = list(exported(written(folder, "preemptions") / "vllm-0"))
    ends = [span.end_time_unix_nano for _, spans in exports for span in spans]
    assert ends == sorted(ends) and len(exports) > 1
    assert max(len(spans) for _, spans in exports) <= 512
    for _, spans in exports:
        first, last = spans[0].end_time_unix_nano - START_NS, spans[-1].end_time_unix_nano - START_NS
        assert first // 5_000_000_000 == last // 5_000_000_000
    for _, spans in exports:
        for span in spans:
            assert (span.name, span.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
            found = attributes(span)
            parts = [found[f"gen_ai.latency.time_in_model_{part}"] for part in ("prefill", "decode")]
            assert found["gen_ai.latency.time_in_model_inference"] == pytest.approx(sum(parts))
            assert span.end_time_unix_nano >= span.start_time_unix_nano


def test_a_pair_gives_two_spans(folder: Path) -> None:
    root = written(folder, "pair")
    spans = {
        name: [attributes(span) for _, batch in exported(root / name) for span in batch]
        for name in ("vllm-0", "vllm-prefill-0")
    }
    decode = {span["gen_ai.request.id"]: span for span in spans["vllm-0"]}
    prefill = {span["gen_ai.request.id"]: span for span in spans["vllm-prefill-0"]}
    assert decode.keys() == prefill.keys() and len(decode) == len(world("pair").requests)
    for name, span in prefill.items():
        assert (span["gen_ai.request.max_tokens"], span["gen_ai.usage.completion_tokens"]) == (1, 1)
        assert span["gen_ai.latency.time_in_model_decode"] == 0
        # The hand-over of the KV cache is in the queue time of the instance that gets it.
        least = world("pair").scenario.engine.kv_transfer_latency_s
        assert decode[name]["gen_ai.latency.time_in_queue"] >= least
    assert not clients_of_prefill(root)


def clients_of_prefill(root: Path) -> bool:
    return (root / "vllm-prefill-0" / "client.jsonl").exists()


def test_the_answers_of_one_call_share_an_id(folder: Path) -> None:
    outcome = world("replicas")
    name = next(name for name in outcome.requests.id if name.startswith("b"))
    ids = [i for instance in ("vllm-0", "vllm-1") for i in span_ids(written(folder, "replicas") / instance)]
    assert ids.count(f"cmpl-{client_id(name)}-0") == 3
    lines = [line for i in ("vllm-0", "vllm-1") for line in clients(written(folder, "replicas") / i)]
    assert sum(line["n"] for line in lines if line["client_request_id"] == client_id(name)) == 3


def test_the_clients_clock_is_its_own(folder: Path) -> None:
    outcome, instance = world("clock"), written(folder, "clock") / "vllm-0"
    requests = outcome.requests
    for i, line in enumerate(clients(instance)):
        assert (line["send_unix_ns"] - START_NS) / 1e9 == pytest.approx(requests.sent_s[i] + 1.75, abs=1e-6)
        network = outcome.scenario.telemetry.network_s
        assert line["chunks_us_ntok"][0][0] / 1e6 == pytest.approx(requests.first_shown_s[i] + network - requests.sent_s[i], abs=2e-6)  # fmt: skip
        assert len(line["chunks_us_ntok"]) == requests.output[i]


def test_front_ends_agree_with_the_truth() -> None:
    for name in ("plain", "preemptions", "left", "data-parallel"):
        outcome = world(name)
        requests = outcome.requests
        for view in front_ends(outcome):
            told = view.told
            request = view.stays.request[told]
            assert np.array_equal(
                view.steps.received_s[view.first_step[told]], requests.first_shown_s[request]
            )
            assert np.array_equal(view.steps.received_s[view.last_step[told]], requests.last_shown_s[request])
            assert np.array_equal(view.steps.end_s[view.first_step[told]], requests.first_token_s[request])
            assert np.array_equal(view.outputs[told], requests.output[request])
            assert np.all(view.elapsed_ms >= 0)
            assert np.all(view.elapsed_ms / 1000 <= view.steps.end_s - view.steps.scheduled_s + 1e-5)


# -- the real thing --------------------------------------------------------------------------------


def keys(value: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield prefix + key
            yield from keys(inner, f"{prefix}{key}.")
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner, f"{prefix}[]")


def keys_of(lines: Any) -> set[str]:
    return {key for line in lines for key in keys(json.loads(line))}


def test_records_have_the_fields_of_real_ones(folder: Path) -> None:
    with gzip.open(EXAMPLE / "statlogger_engine0_pid29933.jsonl.gz") as lines:
        real = keys_of(lines)
    [path] = (written(folder, "preemptions") / "vllm-0").glob("statlogger_engine0_pid*.jsonl")
    ours = keys_of(path.open())
    assert not ours - real
    # Left out: what no reader of ours takes, inside of fields that are there.
    inside = ("scheduler_stats.kv_cache_eviction_events.", "scheduler_stats.perf_stats.")
    assert all(key.startswith(inside) for key in real - ours)


def test_client_lines_have_the_fields_of_real_ones(folder: Path) -> None:
    with gzip.open(EXAMPLE / "client.jsonl.gz") as lines:
        real = keys_of(lines)
    ours = keys_of((written(folder, "left") / "vllm-0" / "client.jsonl").open())
    assert ours - real == {"exception"}  # no client of the example had to wait that long


def test_metrics_have_the_names_labels_and_bounds_of_real_ones(folder: Path) -> None:
    def series(text: str) -> dict[str, tuple[set[str], list[str]]]:
        found: dict[str, tuple[set[str], list[str]]] = {}
        for name, inside in re.findall(r"^(vllm:\w+)\{(.*)\} \S+$", text, re.MULTILINE):
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', inside))
            names, bounds = found.setdefault(name, (set(), []))
            names.update(labels)
            if "le" in labels:
                bounds.append(labels["le"])
        return found

    with gzip.open(EXAMPLE / "metrics.txt.gz", "rt") as file:
        real = series(file.read().split("#@SCRAPE")[10])
    engine = replace(PLAIN.engine, max_model_len=8192)
    outcome = replace(world("plain"), scenario=replace(PLAIN, engine=engine))
    write_files(outcome, folder / "names")
    ours = series((folder / "names" / "vllm-0" / "metrics.txt").read_text().split("#@SCRAPE")[2])
    for name, (labels, bounds) in ours.items():
        if name == "vllm:cache_config_info":
            assert labels <= real[name][0]
        else:
            assert (labels, bounds) == real[name], name
