"""What clients and gateways saw beside engines, replicas beside their peers, and requests that no gauge counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import MS, START_NS, Request, Row, S, billed, client, clients, core, serve, span, step, write

from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.ledger.hidden import write_hidden
from tailscope.ledger.replicas import _held_against, _Served
from tailscope.ledger.upstream import write_upstream
from tailscope.model import Diagnosis
from tailscope.sim.engine import simulate
from tailscope.sim.on_the_way import place_of
from tailscope.sim.scenario import Cost, Engine, Fault, Gateway, Load, Scenario, Telemetry
from tailscope.sim.tables import request_tables
from tailscope.store import Trace


def gateway(request_id: str, arrival_ns: int, e2e_ns: int, **columns: Any) -> Row:
    columns.setdefault("request_key", f"gateway {request_id} {arrival_ns}")
    return {**client(request_id, arrival_ns, e2e_ns, **columns), "observer": "gateway"}


@contextmanager
def judged(folder: Path, tables: dict[str, Any]) -> Iterator[tuple[Trace, Diagnosis]]:
    with Trace(write(folder, tables), threads=1) as trace:
        yield trace, diagnose(trace, Config())


# -- three views -----------------------------------------------------------------------------------


def test_client_gateway_and_engine_are_one_request(tmp_path: Path) -> None:
    rows = [
        span("cmpl-a-0", 100 * MS, 50 * MS),
        core("cmpl-a-0", 101 * MS, 48 * MS),
        gateway("cmpl-a", 20 * MS, 135 * MS),
        client("cmpl-a", 10 * MS, 160 * MS),
        # One that only a gateway passed on, one that it refused.
        span("cmpl-b-0", 300 * MS, 50 * MS),
        gateway("cmpl-b", 280 * MS, 75 * MS),
        gateway("cmpl-c", 400 * MS, 0, ttft_ns=None, status="rejected"),
        client("cmpl-c", 395 * MS, 9 * MS, ttft_ns=None, status="rejected"),
    ]
    with judged(tmp_path / "t", {"requests": rows}) as (trace, _):
        found = trace.rows(
            "SELECT client_key, outer_view, client_e2e_ns, gateway_e2e_ns, gateway_arrival_ns, engine_saw, status FROM joined ORDER BY rid"
        )
        [coverage] = trace.rows("FROM coverage WHERE \"join\" LIKE 'client%'")
    assert len(found) == 3
    a, b, c = sorted(found, key=lambda r: r["client_key"].split()[1])
    assert (a["outer_view"], a["client_e2e_ns"], a["gateway_e2e_ns"]) == ("client", 160 * MS, 135 * MS)
    assert a["gateway_arrival_ns"] == START_NS + 20 * MS
    assert (b["outer_view"], b["client_e2e_ns"]) == ("gateway", 75 * MS)
    assert (c["outer_view"], c["engine_saw"], c["status"], c["gateway_e2e_ns"]) == (
        "client",
        False,
        "rejected",
        0,
    )
    assert (coverage["matched"], coverage["total"]) == (3, 3)


def test_a_gateways_clock_may_be_off_by_hours(tmp_path: Path) -> None:
    rows = []
    for i in range(30):
        rows += [
            span(f"cmpl-{i}-0", i * S, 50 * MS),
            gateway(f"cmpl-{i}", i * S - 5 * MS + 3_600 * S, 60 * MS),
            client(f"cmpl-{i}", i * S - 9 * MS - 60 * S, 68 * MS),
        ]
    with judged(tmp_path / "t", {"requests": rows}) as (trace, _):
        [row] = trace.rows(
            "SELECT count(*) AS n, count(client_e2e_ns) AS c, count(gateway_e2e_ns) AS g FROM joined"
        )
    assert row == {"n": 30, "c": 30, "g": 30}


# -- bills -----------------------------------------------------------------------------------------


def served() -> list[Request]:
    rng = np.random.default_rng(3)
    arrivals = np.cumsum(rng.exponential(0.08, 200))
    return [
        Request(f"cmpl-{i}-0", int(t * S), int(rng.integers(20, 400)), int(rng.integers(2, 40)))
        for i, t in enumerate(arrivals)
    ]


def seen_from_outside(rows: list[Row], rng: np.random.Generator, gateways: bool) -> list[Row]:
    """A client, and a gateway, of each span: later by chance, and now and then a view that is too short."""
    made = []
    for row in rows:
        before, after = int(rng.exponential(40 * MS)), int(rng.integers(0, 3 * MS))
        if rng.random() < 0.1:
            before, after = -int(rng.integers(0, row["ttft_ns"] // 2)), -int(rng.integers(0, MS))
        name, arrival = row["request_id"].removesuffix("-0"), row["arrival_ns"] - START_NS - max(before, 0)
        ttft = row["ttft_ns"] + before
        whole = max(row["e2e_ns"] + before + after, ttft)
        if gateways:
            made.append(gateway(name, arrival, max(whole - MS, 1), ttft_ns=max(ttft - before // 3, 1)))
        made.append(client(name, arrival, whole, ttft_ns=ttft))
    return made


@pytest.mark.parametrize("gateways", [False, True])
def test_a_clients_bill_sums_to_what_it_measured(tmp_path: Path, gateways: bool) -> None:
    tables = serve(served()).tables
    outside = seen_from_outside(tables["requests"], np.random.default_rng(5), gateways)
    requests = [*tables["requests"], *outside]
    with billed(tmp_path / "t", {**tables, "requests": requests}) as bill:
        rows = write_upstream(bill.trace, (), None)
        [sums] = bill.trace.rows(
            "WITH sums AS (SELECT id, sum(ns) AS ns, min(ns) AS least, sum(ns) FILTER (WHERE place NOT IN ('decode', 'after')) AS before FROM client_lines GROUP BY id) "
            "SELECT count(*) AS n, sum(abs(s.ns - b.before_ns - b.after_ns)) AS off, sum(abs(coalesce(s.before, 0) - b.before_ns)) AS off_before, min(least) AS least "
            "FROM client_bills b JOIN sums s ON s.id = b.rid"
        )
        components = {r["component"] for r in bill.trace.rows("SELECT DISTINCT component FROM client_lines")}
    assert sums["n"] == 200 and sums["least"] > 0
    assert sums["off"] == 0 and sums["off_before"] == 0, "to the nanosecond"
    assert ({"gateway", "network"} if gateways else {"upstream"}) <= components
    assert [(row.klass, row.metric, row.observer) for row in rows] == [
        ("<512", "TTFT", "client"),
        ("<512", "E2E", "client"),
    ]
    for row in rows:
        assert row.excess_s is not None
        assert sum(row.excess.values()) == pytest.approx(row.excess_s, abs=1e-6)


def test_engines_and_clients_rows_stay_apart(tmp_path: Path) -> None:
    tables = serve(served()).tables
    late = []
    for i, row in enumerate(tables["requests"]):
        wait = 3 * S if i % 20 == 0 else 0
        name, arrival = row["request_id"].removesuffix("-0"), row["arrival_ns"] - START_NS - wait
        late.append(client(name, arrival, row["e2e_ns"] + wait, ttft_ns=row["ttft_ns"] + wait))
    with judged(tmp_path / "t", {**tables, "requests": [*tables["requests"], *late]}) as (trace, diagnosis):
        engine = {r.metric: r for r in diagnosis.classes if r.observer == "engine"}
        outside = {r.metric: r for r in diagnosis.classes if r.observer == "client"}
        # Time queued is a part of TTFT and has no tail of its own.
        assert trace.count("class_rows") == len(engine.keys() - {"queue"})
    assert set(outside) == {"TTFT", "E2E"}
    assert [r.observer for r in diagnosis.classes] == ["engine"] * len(engine) + ["client"] * 2
    [finding] = [f for f in diagnosis.findings if f.rule == "upstream-wait"]
    assert set(finding.explains) == {"<512\tTTFT\tclient", "<512\tE2E\tclient"}
    assert engine["TTFT"].excess_s is not None and "upstream" not in engine["TTFT"].excess
    assert outside["TTFT"].excess["upstream"] == pytest.approx(outside["TTFT"].excess_s, rel=0.1)
    assert diagnosis.verdict.explained is not None and diagnosis.verdict.explained > 0.9


def test_where_only_clients_tell_nothing_stands_beside_them(tmp_path: Path) -> None:
    rows = clients(serve(served()).requests)["requests"]
    with judged(tmp_path / "t", {"requests": rows}) as (trace, diagnosis):
        assert trace.count("client_rows") == 0
    assert {r.metric for r in diagnosis.classes} == {"TTFT", "TPOT", "E2E"}


def test_a_wait_before_the_queue_is_the_front_ends_though_steps_ran(tmp_path: Path) -> None:
    """The engine reads its input between steps: nobody waits for more than those in work."""
    steps = [step((i + 1) * 10 * MS, start_ns=START_NS + i * 10 * MS, iteration=i) for i in range(300)]
    late = span("a", 100 * MS, S, ttft_ns=600 * MS, queue_ns=0, prefill_ns=10 * MS, engine=0)
    with billed(tmp_path / "t", {"requests": [late], "iterations": steps}) as bill:
        assert bill.total("frontend") == pytest.approx(570 * MS, abs=20 * MS)
        assert bill.total("frontend") + bill.total("step_wait") + bill.total("own_prefill") == 600 * MS


# -- hidden ----------------------------------------------------------------------------------------


def hidden(tmp_path: Path, wait_ms: int, running: int) -> dict[str, Any]:
    """Ten requests at a time for 0.5 s each, of which the first `wait_ms` are not the engine's, who says `running`."""
    requests = [span(f"r{i}", (i // 10) * 500 * MS, 500 * MS, engine=0) for i in range(200)]
    steps = [
        step((i + 1) * 10 * MS, iteration=i, running=running if (i * 10) % 500 >= wait_ms else 0)
        for i in range(1000)
    ]
    with billed(tmp_path / "t", {"requests": requests, "iterations": steps}) as bill:
        write_hidden(bill.trace)
        [row] = bill.trace.rows("FROM hidden")
    return row


def test_what_arrived_and_is_not_known_is_hidden(tmp_path: Path) -> None:
    row = hidden(tmp_path, 200, 10)
    assert row["most_hidden"] == 10
    # Ten for 0.2 s each time, less what a step, the one before and both clocks may account for.
    assert 0.7 * 20 * 2 <= row["hidden_s"] <= 20 * 2


def test_what_runs_is_not_hidden(tmp_path: Path) -> None:
    row = hidden(tmp_path, 0, 10)
    assert row["most_hidden"] == 0 and row["hidden_s"] == 0 and row["there_s"] > 50


# -- replicas --------------------------------------------------------------------------------------


def fleet(seed: int, slower: float = 1.0, share: float = 1 / 3) -> _Served:
    """Three replicas under one bursty load; the first's latencies are `slower` times as long, and it gets `share`."""
    rng = np.random.default_rng(seed)
    n = 1_200
    rate = np.exp(0.8 * np.convolve(rng.standard_normal(n + 40), np.ones(40) / np.sqrt(40), "valid")[:n])
    arrival = np.cumsum(rng.exponential(0.12, n) / rate)
    unit = np.where(rng.random(n) < share, 0, 1 + rng.integers(0, 2, n))
    ttft = 0.1 * rate * np.exp(0.5 * rng.standard_normal(n)) * np.where(unit == 0, slower, 1.0)
    ones = np.ones(n)
    return _Served(
        np.arange(n),
        unit,
        np.zeros(n, np.int64),
        (arrival * 1e9).astype(np.int64),
        200 * ones,
        0 * ones,
        50 * ones,
        {"TTFT": ttft, "TPOT": 0.1 * ttft, "E2E": 5 * ttft},
    )


def first_of(served: _Served) -> dict[str, Any]:
    return next(row for row, unit in _held_against([], served, [0, 1, 2]) if unit == 0)


def test_replicas_that_are_alike_are_not_told_apart() -> None:
    alarms = sum(
        any(row["p_value"] <= 0.01 for row, _ in _held_against([], fleet(seed), [0, 1, 2]))
        for seed in range(200)
    )
    assert alarms <= 6


def test_a_slower_or_busier_replica_is() -> None:
    found = [first_of(fleet(seed, slower=1.5)) for seed in range(20)]
    assert sum(row["p_value"] <= 0.01 for row in found) >= 19
    assert np.median([row["slower"] for row in found]) == pytest.approx(1.5, rel=0.05)
    assert sum(row["load_p_value"] <= 0.01 for row in found) <= 2
    busy = [first_of(fleet(seed, share=0.5)) for seed in range(20)]
    assert sum(row["load_p_value"] <= 0.01 and row["load"] > 1.6 for row in busy) >= 19


def test_a_replica_that_started_late_is_compared_while_it_was_there() -> None:
    served = fleet(1)
    early = served.arrival_ns < np.quantile(served.arrival_ns, 0.5)
    # While it was not there the others were slow.
    values = {name: np.where(early, 10 * v, v) for name, v in served.values.items()}
    kept = ~(early & (served.unit == 0))
    columns = {name: getattr(served, name)[kept] for name in _Served.__dataclass_fields__ if name != "values"}
    late = _Served(**columns, values={name: v[kept] for name, v in values.items()})
    rows = [row for row, _ in _held_against([], late, [0, 1, 2])]
    assert rows and all(row["p_value"] > 0.01 and row["load_p_value"] > 0.01 for row in rows)


# -- the simulator ---------------------------------------------------------------------------------


Play = Callable[..., Any]
LOAD = Load("a", rate=20)


def test_a_skewed_router_sends_a_share_to_the_first() -> None:
    one = Scenario((LOAD,), duration_s=40, engine=Engine(replicas=4, skew=0.5))
    q = simulate(one).requests
    assert (q.engine == 0).mean() == pytest.approx(0.5 + 0.5 / 4, abs=0.05)
    assert np.bincount(q.engine, minlength=4)[1:].std() < 6, "the rest in turn"


def test_a_slow_network_holds_up_a_share_for_a_while() -> None:
    fault = Fault("network", "way", from_s=10, to_s=20, length_s=0.7, often=0.4)
    one = Scenario((LOAD,), duration_s=30, faults=(fault,))
    q, usual = simulate(one).requests, simulate(replace(one, faults=())).requests
    late = q.arrival_s - q.sent_s
    chosen = np.array([place_of(name, "way") < 0.4 for name in q.id]) & (q.sent_s >= 10) & (q.sent_s < 20)
    assert late[chosen] == pytest.approx(0.7005) and late[~chosen] == pytest.approx(0.0005)
    assert 0.25 < chosen.sum() / ((q.sent_s >= 10) & (q.sent_s < 20)).sum() < 0.55
    assert (q.sent_s == usual.sent_s).all()


def test_a_gateway_tells_of_its_requests() -> None:
    one = Scenario(
        (replace(LOAD, rate=60),),
        duration_s=10,
        cost=Cost(),
        gateway=Gateway(max_in_flight=5, max_queue=10),
        telemetry=Telemetry(gateway=True),
    )
    outcome = simulate(one)
    rows = request_tables(outcome)["requests"].to_pylist()
    told = {row["request_id"]: row for row in rows if row["observer"] == "gateway"}
    outside = {row["request_id"]: row for row in rows if row["observer"] == "client"}
    inside = {
        row["request_id"].removesuffix("-0"): row
        for row in rows
        if row["observer"] == "engine" and row["ttft_ns"]
    }
    assert told.keys() == outside.keys() and len(told) == len(outcome.requests)
    assert sum(row["status"] == "rejected" for row in told.values()) > 0
    for name, row in inside.items():
        assert row["ttft_ns"] <= told[name]["ttft_ns"] + 1_000 <= outside[name]["ttft_ns"] + 2_000
    assert not any(
        row["observer"] == "gateway"
        for row in request_tables(simulate(replace(one, telemetry=Telemetry())))["requests"].to_pylist()
    )
