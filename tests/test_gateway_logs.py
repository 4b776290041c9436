"""A gateway's log, from a file of its own format through a mapping to the client's bill."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailscope import mapping
from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.errors import UsageError
from tailscope.ingest import ingest
from tailscope.sim.emit.files import write_files
from tailscope.sim.emit.front_end import client_id, response_id
from tailscope.sim.engine import simulate
from tailscope.sim.outcome import OK, START_NS, Outcome
from tailscope.sim.scenario import Gateway, Load, Scenario, Sizes, Telemetry
from tailscope.source import Options
from tailscope.store import Trace

EXAMPLE = Path(__file__).parent.parent / "examples" / "gateway"
#: Short bursts meet a gateway that lets few calls through.
SCENARIO = Scenario(
    (
        Load(
            "chat",
            arrivals="bursty",
            rate=8.0,
            burst_sigma=1.0,
            prompt_tokens=Sizes(150.0, 0.2),
            output_tokens=Sizes(30.0, 0.3),
        ),
    ),
    name="gateway",
    duration_s=60.0,
    gateway=Gateway(max_in_flight=3, delay_s=0.002),
    telemetry=Telemetry(network_s=0.004, stat_logger=False, log=False, metrics=False),
)
Line = dict[str, Any]


def calls(outcome: Outcome) -> Iterator[tuple[int, float, float]]:
    """(request, when the gateway had it, when its answer was through), seconds since the world began."""
    q = outcome.requests
    for i in np.flatnonzero(q.status == OK).tolist():
        yield i, float(q.sent_s[i]) + outcome.scenario.telemetry.network_s, float(q.finished_s[i])


def envoy(outcome: Outcome) -> Iterator[Line]:
    for i, arrival, end in calls(outcome):
        begun = datetime.fromtimestamp(START_NS / 1e9 + arrival, UTC)
        yield {
            "start_time": begun.strftime("%Y-%m-%dT%H:%M:%S.") + f"{begun.microsecond // 1000:03d}Z",
            "duration": int((end - arrival) * 1000),
            "response_code": 200,
            "path": "/v1/completions",
            "x_request_id": client_id(outcome.requests.id[i]),
            "downstream_remote_address": "192.0.2.7:40000",
        }
        if i % 20 == 0:
            yield {
                "start_time": "2026-11-18T10:00:00.000Z",
                "duration": 0,
                "response_code": 200,
                "path": "/health",
            }


def nginx(outcome: Outcome) -> Iterator[Line]:
    for i, arrival, end in calls(outcome):
        yield {
            "msec": f"{START_NS / 1e9 + end:.3f}",
            "request_time": f"{end - arrival:.3f}",
            "status": "200",
            "uri": "/v1/completions?x=1",
            "x_request_id": client_id(outcome.requests.id[i]),
        }


def litellm(outcome: Outcome) -> Iterator[Line]:
    q = outcome.requests
    for i, arrival, end in calls(outcome):
        yield {
            "id": response_id(q.id[i]),
            "startTime": START_NS / 1e9 + arrival,
            "completionStartTime": START_NS / 1e9 + float(q.first_shown_s[i]),
            "endTime": START_NS / 1e9 + end,
            "prompt_tokens": int(q.prompt[i]),
            "completion_tokens": int(q.output[i]),
            "model_group": outcome.scenario.model,
            "status": "success",
            "messages": [{"role": "user", "content": "a secret"}],
            "api_base": "http://192.0.2.1/v1",
        }


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return simulate(SCENARIO)


def read(folder: Path, mapped: str, raw: Path, log: Path) -> Path:
    """A trace of a run's folder, and of its gateway's log by a mapping."""
    trace = folder / "trace.parquet"
    ingest([raw], trace, config=Config(), options=Options(), instance="vllm-0")
    options = Options(mapping=mapping.load(EXAMPLE / mapped))
    ingest([log], trace, config=Config(), options=options, instance="vllm-0")
    return trace


@pytest.mark.parametrize(
    ("mapped", "lines"), [("envoy.toml", envoy), ("nginx.toml", nginx), ("litellm.toml", litellm)]
)
def test_a_gateways_log_divides_what_lies_before_the_engine(
    mapped: str, lines: Callable[[Outcome], Iterator[Line]], outcome: Outcome, tmp_path: Path
) -> None:
    raw, log = tmp_path / "raw", tmp_path / "access.jsonl"
    raw.mkdir()
    write_files(outcome, raw)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines(outcome)))
    with Trace(str(read(tmp_path, mapped, raw, log))) as trace:
        diagnosis = diagnose(trace, Config())
        said = dict(
            trace.connection.execute(
                "SELECT component, sum(ns) / 1e9 FROM client_lines GROUP BY ALL"
            ).fetchall()
        )
        whole = trace.rows("SELECT sum(before_ns + after_ns) / 1e9 AS s, count(*) AS n FROM client_bills")[0]
        joined = trace.rows("SELECT count(*) FILTER (WHERE gateway_e2e_ns IS NOT NULL) AS n FROM joined")[0]
        stored = json.dumps(
            trace.rows("SELECT * EXCLUDE (file_row) FROM requests WHERE observer = 'gateway'"), default=str
        )
    q, ok = outcome.requests, outcome.requests.status == OK
    network = SCENARIO.telemetry.network_s
    true = float((q.arrival_s - q.sent_s)[ok].sum()) - network * ok.sum()
    assert whole["n"] == joined["n"] == ok.sum() > 100
    assert sum(said.values()) == pytest.approx(whole["s"], abs=1e-6), "to the nanosecond"
    assert true > 20.0 and "upstream" not in said
    # Access logs know milliseconds.
    assert said["gateway"] == pytest.approx(true, abs=0.0011 * ok.sum())
    assert said["network"] == pytest.approx(2 * network * ok.sum(), abs=0.0011 * ok.sum())
    assert "secret" not in stored and "192.0.2" not in stored
    [finding] = [f for f in diagnosis.findings if f.rule == "upstream-wait"]
    assert finding.status == "found"


def test_the_example_is_what_the_simulator_writes_and_joins(outcome: Outcome, tmp_path: Path) -> None:
    shown = [
        json.loads(line)
        for line in gzip.decompress((EXAMPLE / "run" / "access.jsonl.gz").read_bytes()).splitlines()
    ]
    assert shown == json.loads(json.dumps(list(envoy(outcome))))
    raw = tmp_path / "run"
    shutil.copytree(EXAMPLE / "run", raw)
    log = tmp_path / "access.jsonl.gz"
    shutil.move(raw / "access.jsonl.gz", log)
    with Trace(str(read(tmp_path, "envoy.toml", raw, log))) as trace:
        diagnosis = diagnose(trace, Config())
    [client] = [row for row in diagnosis.classes if row.observer == "client" and row.metric == "E2E"]
    assert client.excess["gateway"] == max(client.excess.values())


def test_a_path_needs_an_id() -> None:
    with pytest.raises(UsageError, match=r"columns\.path: needs columns\.id"):
        mapping.parse({"columns": {"arrival": {"column": "t", "unit": "s"}, "path": "p"}})
