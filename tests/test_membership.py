"""Bills where a schedule tells who was in which step, against worlds whose bills are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from worlds import MS, Row, S, billed, core, span, step

from tailscope.ledger.cost import EPOCH_STEPS
from tailscope.sim.engine import simulate
from tailscope.sim.outcome import Outcome
from tailscope.sim.scenario import Engine, Load, Scenario, Sizes, Telemetry
from tailscope.sim.tables import request_tables
from tailscope.sim.truth import bills

COUPLED = Scenario(
    (
        Load("chat", rate=6.0, prompt_tokens=Sizes(100.0), output_tokens=Sizes(60.0)),
        Load("long", rate=0.4, prompt_tokens=Sizes(6_000.0), output_tokens=Sizes(20.0)),
    ),
    duration_s=30.0,
    engine=Engine(max_num_batched_tokens=512, kv_blocks=20_000),
    telemetry=Telemetry(schedule=True, client=False),
)
SQUEEZED = replace(
    COUPLED,
    loads=(Load("chat", rate=12.0, output_tokens=Sizes(300.0, 0.3)),),
    engine=Engine(kv_blocks=600, max_model_len=2_048),
)


def own(request_id: str) -> str:
    return request_id.removeprefix("cmpl-").removesuffix("-0")


def said_and_true(outcome: Outcome, folder: Path, component: str) -> tuple[float, float, float]:
    """Seconds of a component in all bills: as the ledger says, as it was, and their difference request by request."""
    true = bills(outcome)
    seconds = dict(zip(outcome.requests.id, true.component(component), strict=True))
    with billed(folder, request_tables(outcome)) as world:
        rows = world.trace.rows(
            "SELECT j.request_id, sum(l.ns) / 1e9 AS s FROM joined j JOIN bill_lines l ON l.id = j.rid "
            "WHERE l.component = $component GROUP BY ALL",
            {"component": component},
        )
        ids = [
            own(row["request_id"]) for row in world.trace.rows("SELECT request_id FROM joined WHERE billed")
        ]
    said = {own(row["request_id"]): row["s"] for row in rows}
    apart = sum(abs(said.get(name, 0.0) - seconds[name]) for name in ids)
    return sum(said.values()), sum(seconds[name] for name in ids), apart


@pytest.mark.parametrize(
    ("scenario", "component"),
    [
        (COUPLED, "others_prefill_in_decode"),
        (SQUEEZED, "preempted"),
        (SQUEEZED, "recompute"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_schedule_tells_what_each_request_waited_for(
    scenario: Scenario, component: str, tmp_path: Path
) -> None:
    said, true, apart = said_and_true(simulate(scenario), tmp_path, component)
    assert true > 0.2
    assert said == pytest.approx(true, rel=0.1)
    assert apart < 0.15 * true


def left_out(told: str) -> dict[str, list[Row]]:
    """Three requests decode; one of them runs from step 10 to 29 and is given nothing. `told`: the schedule, that none was
    preempted, or nothing."""
    steps = [
        step(
            (i + 1) * 10 * MS,
            iteration=i,
            elapsed_ns=10 * MS,
            decode_requests=2 + (i < 10 or i >= 30),
            running=3,
        )
        for i in range(60)
    ]
    requests = []
    for name, tokens in (("cmpl-a-0", 40), ("cmpl-b-0", 60), ("cmpl-c-0", 60)):
        known: Row = {"engine": 0, "prompt_tokens": 1, "output_tokens": tokens}
        known["preemptions"] = 0 if told == "preemptions" else None
        times = {"ttft_ns": 10 * MS, "queue_ns": 0, "prefill_ns": 10 * MS}
        requests += [span(name, 0, 600 * MS, **known, **times), core(name, 0, 600 * MS, **known)]
    runs = [("cmpl-a-0", 0, 0, 9), ("cmpl-a-0", 10, 30, 59), ("cmpl-b-0", 0, 0, 59), ("cmpl-c-0", 0, 0, 59)]
    rows = [
        {
            "instance": "a", "engine": 0, "request_id": name, "iteration_first": first, "iteration_last": last,
            "phase": "decode" if first else "prefill", "tokens": 1, "computed_before": before,
        }
        for name, before, first, last in [
            part for name, before, first, last in runs
            for part in ([(name, 0, 0, 0), (name, 1, 1, last)] if first == 0 else [(name, before, first, last)])
        ]
    ]  # fmt: skip
    return {"iterations": steps, "requests": requests} | ({"schedule": rows} if told == "schedule" else {})


@pytest.mark.parametrize("told", ["schedule", "preemptions", "nothing"])
def test_who_runs_and_is_given_nothing_is_starved(told: str, tmp_path: Path) -> None:
    """Without a schedule its tokens are too few for its steps; unless it may have been preempted, which is another thing."""
    with billed(tmp_path, left_out(told)) as world:
        assert world.total("starved", "cmpl-a-0") == pytest.approx(
            0 if told == "nothing" else 200 * MS, abs=2
        )
        assert world.total("starved", "cmpl-b-0") == world.total("preempted") == 0


def test_bills_sum_to_what_was_measured(tmp_path: Path) -> None:
    with billed(tmp_path, request_tables(simulate(COUPLED))) as world:
        rows = world.trace.rows(
            "SELECT j.ttft_ns, j.e2e_ns, sum(l.ns) FILTER (WHERE l.place <> 'decode') AS before, sum(l.ns) AS ns, min(l.ns) AS least "
            "FROM joined j JOIN bill_lines l ON l.id = j.rid GROUP BY ALL"
        )
        assert rows
        for row in rows:
            assert (row["before"], row["ns"]) == (row["ttft_ns"], row["e2e_ns"]) and row["least"] > 0


def test_others_prefill_lies_within_its_bounds(tmp_path: Path) -> None:
    with billed(tmp_path, request_tables(simulate(COUPLED))) as world:
        [row] = world.trace.rows(
            "SELECT count(*) AS n, max(low) AS low, min(high) AS high FROM bill_lines_bounds"
        )
        assert row["n"] > 0 and row["low"] <= 1 <= row["high"]
        bounded = [row for row in world.classes if row.others_prefill_s is not None]
        assert bounded
        for one in bounded:
            assert one.others_prefill_s is not None
            low, high = one.others_prefill_s
            booked = sum(s for name, s in one.excess.items() if name.startswith("others_prefill"))
            assert low - 1e-9 <= booked <= high + 1e-9


@pytest.mark.parametrize("again", [True, False], ids=["started again", "one start"])
def test_an_engine_started_again_has_a_cost_of_its_own(again: bool, tmp_path: Path) -> None:
    """Twice as slow from the middle on: a second start explains it, and without one it is a cause nobody knows."""
    n = 2 * EPOCH_STEPS
    rng = np.random.default_rng(1)
    steps, now = [], 0
    for i in range(2 * n):
        decodes = int(rng.integers(1, 9))
        took = (5 * MS + decodes * MS) * (2 if i >= n else 1)
        now += took
        number = i % n if again else i
        steps.append(
            step(now, iteration=number, elapsed_ns=took, decode_requests=decodes, running=decodes, waiting=0)
        )
    requests = []
    for i in range(40):
        one = {"engine": 0, "prompt_tokens": 10, "output_tokens": 20}
        requests += [span(f"r{i}", i * S // 4, S, **one), core(f"r{i}", i * S // 4, S, **one)]
    with billed(tmp_path, {"iterations": steps, "requests": requests}) as world:
        [engine] = world.ledger.engines
        error = engine["cost_error"]
    assert (error < 0.02) is again
