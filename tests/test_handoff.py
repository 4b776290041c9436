"""KV hand-off and host gaps: bills against worlds whose bills are known, and what nothing was measured of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import MS, START_NS, Billed, Row, S, billed, core, span, step

from tailscope.sim.engine import simulate
from tailscope.sim.outcome import Outcome
from tailscope.sim.scenario import Cost, Engine, Load, Ranks, Scenario, Sizes, Telemetry
from tailscope.sim.tables import request_tables
from tailscope.sim.truth import bills
from tailscope.sim.written import tables

PAIR = Scenario(
    (
        Load("chat", rate=6.0, prompt_tokens=Sizes(800.0, 0.6), output_tokens=Sizes(60.0, 0.4)),
        Load("long", rate=0.5, prompt_tokens=Sizes(6_000.0, 0.2), output_tokens=Sizes(40.0)),
    ),
    seed=1,
    duration_s=15.0,
    engine=Engine(
        prefill_replicas=1, kv_blocks=1_500, kv_transfer_latency_s=0.05, kv_transfer_tokens_per_s=20_000.0
    ),
    telemetry=Telemetry(client=False),
)
PROFILED = Scenario(
    (Load("chat", rate=5.0, prompt_tokens=Sizes(300.0), output_tokens=Sizes(40.0)),),
    seed=1,
    duration_s=8.0,
    cost=Cost(host_gap=0.004),
    ranks=Ranks(tensor_parallel=2),
    telemetry=Telemetry(client=False, profile=((0.0, 60.0),)),
)


def said_of(
    bill: Billed, outcome: Outcome, component: str
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Seconds of a component by request as the ledger says, and as it was, of the engines that answered."""
    true = bills(outcome).component(component)
    place = {f"cmpl-{name}-0": i for i, name in enumerate(outcome.requests.id)}
    said, mine = np.zeros(len(true)), np.zeros(len(true), bool)
    for row in bill.trace.rows(
        "SELECT request_id, coalesce((SELECT sum(ns) FROM bill_lines WHERE id = rid AND component = $component), 0) / 1e9 AS s "
        "FROM joined WHERE billed AND instance NOT LIKE '%prefill%'",
        {"component": component},
    ):
        said[place[row["request_id"]]], mine[place[row["request_id"]]] = row["s"], True
    return said[mine], true[mine]


def check_sums(bill: Billed) -> None:
    rows = bill.trace.rows(
        "SELECT j.ttft_ns, j.e2e_ns, sum(l.ns) FILTER (WHERE l.place <> 'decode') AS before, sum(l.ns) AS ns, min(l.ns) AS least "
        "FROM joined j JOIN bill_lines l ON l.id = j.rid GROUP BY j.rid, j.ttft_ns, j.e2e_ns"
    )
    assert rows
    for row in rows:
        assert (row["before"], row["ns"]) == (row["ttft_ns"], row["e2e_ns"]) and row["least"] > 0


# -- hand-off -------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize(("schedule", "within"), [(True, 0.02), (False, 0.1)], ids=["schedule", "steps"])
def test_how_long_each_request_waited_for_its_kv_cache(
    schedule: bool, within: float, async_scheduling: bool, tmp_path: Path
) -> None:
    outcome = simulate(
        replace(
            PAIR,
            engine=replace(PAIR.engine, async_scheduling=async_scheduling),
            telemetry=replace(PAIR.telemetry, schedule=schedule),
        )
    )
    with billed(tmp_path / "t", request_tables(outcome)) as bill:
        check_sums(bill)
        said, true = said_of(bill, outcome, "kv_handoff")
        kept, truly_kept = said_of(bill, outcome, "queue_kv")
    assert len(true) > 50 and true.min() > 0.05 and true.sum() > 5.0
    assert np.abs(said - true).sum() < within * true.sum()
    assert np.abs(kept - truly_kept).sum() < within * true.sum()


def test_without_steps_a_decode_engines_queue_stays_unknown(tmp_path: Path) -> None:
    outcome = simulate(replace(PAIR, telemetry=Telemetry(client=False, stat_logger=False, log=False)))
    with billed(tmp_path / "t", request_tables(outcome)) as bill:
        assert bill.total("kv_handoff") == 0 < bill.total("queue")


def test_the_wait_for_room_is_no_handoff_without_a_schedule_either(tmp_path: Path) -> None:
    engine = replace(PAIR.engine, kv_blocks=700)
    outcome = simulate(replace(PAIR, engine=engine))
    with billed(tmp_path / "t", request_tables(outcome)) as bill:
        said, true = said_of(bill, outcome, "queue_kv")
        handed, truly_handed = said_of(bill, outcome, "kv_handoff")
    assert true.sum() > 1.0
    assert said.sum() == pytest.approx(true.sum(), rel=0.3)
    assert handed.sum() == pytest.approx(truly_handed.sum(), rel=0.1)


def deferred(elsewhere: bool, **columns: Any) -> dict[str, list[Row]]:
    """One decodes; another is queued for 200 ms and deferred, and its answer is 10 tokens of 10 ms each."""
    steps = [
        step((i + 1) * 10 * MS, iteration=i, elapsed_ns=10 * MS, deferred=int(10 <= i < 30), running=1)
        for i in range(60)
    ]
    requests = [
        span("cmpl-a-0", 0, 600 * MS, ttft_ns=10 * MS, prefill_ns=10 * MS, engine=0, output_tokens=60)
    ]
    times = {"ttft_ns": 210 * MS, "queue_ns": 200 * MS, "prefill_ns": 10 * MS}
    requests.append(span("cmpl-b-0", 100 * MS, 300 * MS, engine=0, **times, **columns))
    if elsewhere:
        requests.append(
            span(
                "cmpl-b-0", 20 * MS, 70 * MS, ttft_ns=70 * MS, instance="p", output_tokens=1, request_key="p"
            )
        )
    return {"requests": requests, "iterations": steps}


def test_deferred_is_handed_over_only_where_the_prefill_was_elsewhere(tmp_path: Path) -> None:
    with billed(tmp_path / "one", deferred(elsewhere=True)) as bill:
        assert bill.of("cmpl-b-0")["queue", "kv_handoff", None] == 200 * MS
        assert bill.total("kv_handoff") == 200 * MS
    with billed(tmp_path / "two", deferred(elsewhere=False)) as bill:
        assert bill.total("kv_handoff") == 0 and bill.of("cmpl-b-0")["queue", "queue", None] == 200 * MS


@pytest.mark.parametrize("steps", [True, False])
def test_what_an_emitter_says_of_the_handoff_is_part_of_the_queue(steps: bool, tmp_path: Path) -> None:
    for told, booked in ((150 * MS, 150 * MS), (5 * S, 200 * MS)):
        rows = deferred(elsewhere=False, kv_transfer_ns=told)
        rows = rows if steps else {"requests": rows["requests"]}
        with billed(tmp_path / f"t{told}", rows) as bill:
            assert bill.total("kv_handoff") == pytest.approx(booked, abs=1_000)
            check_sums(bill)


# -- host gaps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_ranks_profiles_show_how_long_the_host_took_between_steps(
    async_scheduling: bool, tmp_path: Path
) -> None:
    outcome = simulate(replace(PROFILED, engine=Engine(async_scheduling=async_scheduling)))
    with billed(tmp_path / "t", tables(outcome)) as bill:
        check_sums(bill)
        said, true = said_of(bill, outcome, "host_gap")
        [row] = bill.trace.rows("SELECT median(inside_ns) AS ns, count(*) AS n FROM host_gaps")
    assert row["ns"] == pytest.approx(4 * MS, abs=MS // 10) and row["n"] > 300
    assert true.sum() > 2.0
    assert said.sum() == pytest.approx(true.sum(), rel=0.05)
    assert np.abs(said - true).sum() < 0.1 * true.sum()


def test_nothing_changes_where_no_start_is_measured(tmp_path: Path) -> None:
    outcome = simulate(replace(PROFILED, telemetry=Telemetry(client=False)))
    with billed(tmp_path / "t", request_tables(outcome)) as bill:
        assert bill.trace.count("host_gaps") == 0 == bill.total("host_gap")


def told(starts: Sequence[int], **columns: Any) -> list[Row]:
    """Steps that end every 10 ms, `starts` ns after the end of the one before."""
    return [
        step(
            (i + 1) * 10 * MS,
            start_ns=START_NS + i * 10 * MS + gap,
            iteration=i,
            end_basis="measured",
            **columns,
        )
        for i, gap in enumerate(starts)
    ]


def test_an_emitter_that_tells_starts_shows_gaps(tmp_path: Path) -> None:
    rows = [span("a", 0, 600 * MS, ttft_ns=10 * MS, prefill_ns=10 * MS, engine=0), core("a", 0, 600 * MS)]
    steps = told([0] + [2 * MS] * 29 + [6 * MS] + [2 * MS] * 29)
    with billed(tmp_path / "t", {"requests": rows, "iterations": steps}) as bill:
        assert bill.of("a")["decode", "host_gap", None] == 57 * 2 * MS + 6 * MS
        check_sums(bill)
        assert bill.total("unexplained") < 10 * MS


def test_an_idle_engine_has_no_gap(tmp_path: Path) -> None:
    rows = [span("a", 0, 600 * MS, ttft_ns=10 * MS, prefill_ns=10 * MS, engine=0), core("a", 0, 600 * MS)]
    for name, columns in (("idle", {"running": 0}), ("lost", {})):
        steps = told([0] + [2 * MS] * 59, **columns)
        if name == "lost":
            steps = [{**one, "iteration": 2 * i} for i, one in enumerate(steps)]
        with billed(tmp_path / name, {"requests": rows, "iterations": steps}) as bill:
            assert bill.total("host_gap") == 0
            check_sums(bill)
