"""Which requests were in which steps, where the scheduler told: the view `scheduled` against worlds whose truth is known."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import MS, START_NS, Row, S, aligned, core

from tailscope.sim.engine import simulate
from tailscope.sim.outcome import ABORTED, OK, Outcome
from tailscope.sim.scenario import Engine, Load, Scenario, Sizes, Telemetry
from tailscope.sim.tables import request_tables

PHASES = ("prefill", "decode", "recompute")
SQUEEZED = Scenario(
    (
        Load("chat", rate=20.0, output_tokens=Sizes(150.0, 0.3), abort_share=0.1),
        Load("long", rate=0.5, prompt_tokens=Sizes(3_000.0), output_tokens=Sizes(20.0)),
    ),
    duration_s=5.0,
    engine=Engine(kv_blocks=500, max_num_batched_tokens=512),
    telemetry=Telemetry(schedule=True),
)
WORLDS = {
    "squeezed": SQUEEZED,
    "starved": replace(
        SQUEEZED, engine=Engine(max_num_batched_tokens=16), loads=(Load("chat", rate=30.0),), duration_s=3.0
    ),
    "answers": replace(SQUEEZED, loads=(Load("chat", rate=5.0, n=3),)),
    "replicas": replace(SQUEEZED, engine=Engine(replicas=2, data_parallel=2, moe=True)),
    "without the stat logger": replace(SQUEEZED, telemetry=Telemetry(schedule=True, stat_logger=False)),
}
Key = tuple[str, int, int, str, int]


@cache
def world(name: str) -> Outcome:
    return simulate(WORLDS[name])


def truth(outcome: Outcome) -> Counter[Key]:
    """(request, end of step, tokens computed before it, phase, tokens) of each request that was answered, each step."""
    found: Counter[Key] = Counter()
    for engine in outcome.engines:
        runs = engine.runs
        end_ns = START_NS - 1 + np.round(engine.steps.end_s * 1e9).astype(np.int64)
        for row in zip(
            runs.request, runs.first, runs.last, runs.phase, runs.tokens, runs.computed_before, strict=True
        ):
            request, first, last, phase, tokens, before = map(int, row)
            if outcome.requests.status[request] == OK:
                name = f"cmpl-{outcome.requests.id[request]}-0"
                for step in range(first, last + 1):
                    at = before + tokens * (step - first)
                    found[name, int(end_ns[step]), at, PHASES[phase], tokens] += 1
    return found


EXPANDED = """
    SELECT j.request_id, s.end_ns, r.computed_before + r.tokens * (s.k - r.k_first) AS before, r.phase, r.tokens
    FROM (SELECT *, unnest(range(k_first, k_last + 1)) AS k FROM scheduled) r
    JOIN steps s ON s.k = r.k JOIN joined j ON j.rid = r.rid
"""


@pytest.mark.parametrize("name", WORLDS)
def test_every_request_is_in_the_steps_it_was_in(name: str, tmp_path: Path) -> None:
    outcome = world(name)
    with aligned(tmp_path, request_tables(outcome)) as trace:
        found = Counter(trace.connection.execute(EXPANDED).fetchall())
        # The engine finishes some whose client has left: nobody else tells of these.
        kept = {f"cmpl-{outcome.requests.id[i]}-0" for i in np.flatnonzero(outcome.requests.status == OK)}
        assert {key: n for key, n in found.items() if key[0] in kept} == truth(outcome)
        if name == "answers":
            of_one = trace.rows("SELECT count(DISTINCT stay) AS n FROM scheduled GROUP BY rid")
            assert {row["n"] for row in of_one} == {1}
        coverage = {row["join"]: row for row in trace.rows("FROM coverage")}
        for join in ("schedule → steps", "schedule → requests"):
            assert coverage[join]["matched"] == coverage[join]["total"] > 0


def test_steps_are_told_once_and_by_the_scheduler(tmp_path: Path) -> None:
    outcome = world("squeezed")
    with aligned(tmp_path, request_tables(outcome)) as trace:
        rows = trace.rows(
            "SELECT count(*) AS n, count(blocked) AS blocked, sum(preempted) AS lost FROM steps"
        )
        steps = outcome.engines[0].steps
        assert rows == [
            {
                "n": len(steps),
                "blocked": int((steps.blocked > 0).sum()),
                "lost": int(outcome.requests.preemptions.sum()),
            }
        ]
        tokens = trace.rows(
            "SELECT s.k FROM steps s JOIN (SELECT k, sum(tokens) AS tokens FROM "
            "(SELECT *, unnest(range(k_first, k_last + 1)) AS k FROM scheduled) GROUP BY k) t USING (k) "
            "WHERE t.tokens <> s.prefill_tokens + s.decode_tokens"
        )
        assert not tokens


def test_who_left_is_in_steps_without_a_request(tmp_path: Path) -> None:
    outcome = world("squeezed")
    left = int(((outcome.requests.status == ABORTED) & ~np.isnan(outcome.requests.scheduled_s)).sum())
    with aligned(tmp_path, request_tables(outcome)) as trace:
        [row] = trace.rows("SELECT count(DISTINCT stay) AS n FROM scheduled WHERE rid IS NULL")
        assert 0 < row["n"] <= left


def step(number: int, end_ns: int, **columns: Any) -> Row:
    return {
        "instance": "a", "engine": 0, "iteration": number, "end_ns": START_NS + end_ns, "elapsed_ns": 10 * MS,
        "end_basis": "measured", "prefill_tokens": 0, "decode_requests": 1, "running": 1, "waiting": 0, "source": "s",
    } | columns  # fmt: skip


def run(first: int, last: int, end_ns: int, stay: int, request_id: str, **columns: Any) -> Row:
    return {
        "instance": "a", "engine": 0, "iteration_first": first, "iteration_last": last, "source": "s",
        "first_end_ns": START_NS + end_ns, "last_end_ns": START_NS + end_ns + (last - first) * 10 * MS,
        "request_id": request_id, "stay": stay, "phase": "decode", "tokens": 1, "computed_before": 100,
    } | columns  # fmt: skip


def test_an_engine_started_again_counts_from_0_again(tmp_path: Path) -> None:
    steps = [step(i, i * 10 * MS) for i in range(10)] + [step(i, 60 * S + i * 10 * MS) for i in range(10)]
    schedule = [run(2, 5, 20 * MS, 0, "r"), run(2, 5, 60 * S + 20 * MS, 1, "r")]
    requests = [core("r", 10 * MS, 50 * MS, engine=0), core("r", 60 * S + 10 * MS, 50 * MS, engine=0)]
    with aligned(tmp_path, {"iterations": steps, "schedule": schedule, "requests": requests}) as trace:
        rows = trace.rows("SELECT k_first, k_last, rid FROM scheduled ORDER BY k_first")
    assert rows == [{"k_first": 2, "k_last": 5, "rid": 0}, {"k_first": 12, "k_last": 15, "rid": 1}]


def test_a_step_is_not_blamed_for_those_that_a_log_lost(tmp_path: Path) -> None:
    steps = [step(i, i * 10 * MS) for i in (0, 1, 2, 90)]
    with aligned(tmp_path, {"iterations": steps}) as trace:
        assert [row["tile_ns"] for row in trace.rows("SELECT tile_ns FROM steps ORDER BY k")] == [10 * MS] * 4


def test_ids_that_nobody_else_knows_are_kept_apart(tmp_path: Path) -> None:
    hostile = "'; DROP TABLE steps; --\x00\n"
    schedule = [run(0, 1, 0, i, hostile) for i in range(3)]
    steps = [step(i, i * 10 * MS) for i in range(3)]
    with aligned(tmp_path, {"iterations": steps, "schedule": schedule}) as trace:
        rows = trace.rows("SELECT stay, rid FROM scheduled ORDER BY stay")
    assert rows == [{"stay": i, "rid": None} for i in range(3)]
