"""Who gets in and who goes on, against worlds in which it is known: slots, long answers, priorities, requests left out, and
prompts that the cache no longer has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailscope.align import Scope
from tailscope.config import Config
from tailscope.engine import prepare
from tailscope.ledger.prompt_cache import BESIDE, as_ever, bad_blocks, whole
from tailscope.ledger.unserved import MIN_STEPS
from tailscope.sim.engine import simulate
from tailscope.sim.outcome import Outcome
from tailscope.sim.scenario import Engine, Fault, Load, Scenario, Sizes, Telemetry
from tailscope.sim.truth import bills
from tailscope.sim.written import tables, write_trace
from tailscope.stats import Floats
from tailscope.store import Trace

CHAT = Load("chat", rate=40.0, prompt_tokens=Sizes(100, 0.3), output_tokens=Sizes(60, 0.4, 4, 300))


def played(*loads: Load, **changes: Any) -> Outcome:
    settings: dict[str, Any] = {"duration_s": 20.0, "seed": 5, **changes}
    engine = replace(Engine(kv_blocks=100_000, max_model_len=16_000), **settings.pop("engine", {}))
    return simulate(Scenario(loads or (CHAT,), engine=engine, **settings))


@contextmanager
def prepared(outcome: Outcome, folder: Path) -> Iterator[Trace]:
    place = folder / "trace.parquet"
    write_trace(tables(outcome), place)
    with Trace(place) as trace:
        prepare(trace, Config(), Scope())
        yield trace


def seconds(trace: Trace, component: str) -> float:
    [row] = trace.rows(
        "SELECT coalesce(sum(ns), 0) / 1e9 AS s FROM bill_lines WHERE place = 'queue' AND component = $c",
        {"c": component},
    )
    return float(row["s"])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("slots", [12, 60])
def test_a_wait_for_slots_is_one_though_requests_end_with_every_step(
    ahead: bool, slots: int, tmp_path: Path
) -> None:
    load = replace(CHAT, rate=1.4 * slots)
    made = played(load, engine={"max_num_seqs": slots, "async_scheduling": ahead})
    true = float(bills(made).component("queue_slots", "queue").sum())
    assert true > 3
    with prepared(made, tmp_path) as trace:
        assert seconds(trace, "queue_slots") == pytest.approx(true, rel=0.03)
        assert seconds(trace, "queue") < 0.03 * true


def test_a_wait_for_slots_is_divided_by_slots(tmp_path: Path) -> None:
    """Long prompts hold much of the cache and no more slots than others."""
    documents = replace(CHAT, name="documents", rate=4.0, prompt_tokens=Sizes(6_000, 0.0))
    made = played(replace(CHAT, rate=16.0), documents, engine={"max_num_seqs": 16})
    with prepared(made, tmp_path) as trace:
        held = {
            r["culprit"]: r["ns"]
            for r in trace.rows(
                "SELECT culprit, sum(ns) AS ns FROM bill_lines WHERE component = 'queue_slots' GROUP BY culprit"
            )
        }
    assert held["<512"] > held["<8k"]


def test_long_answers_hold_what_others_queue_for(tmp_path: Path) -> None:
    writers = replace(CHAT, name="writers", rate=0.5, output_tokens=Sizes(1_500, 0.1))
    made = played(replace(CHAT, rate=10.0), writers, engine={"max_num_seqs": 12})
    with prepared(made, tmp_path) as trace:
        [row] = trace.rows(
            "SELECT sum(ns) / sum(waited_ns) AS share, bool_or(j.output_tokens >= a.long_from) AS long_waits "
            "FROM held_up h JOIN joined j ON j.rid = h.id CROSS JOIN answers a WHERE holder = 'long answers'"
        )
    assert 0.15 < row["share"] < 1.0
    assert not row["long_waits"], "who waits to give a long answer waits for its peers"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_better_priority_waits_behind_a_lower_one_only_where_it_is_not_kept(
    policy: str, tmp_path: Path
) -> None:
    users = replace(CHAT, name="users", rate=8.0, priority=1)
    jobs = replace(CHAT, name="jobs", rate=40.0, priority=2, arrivals="bursty", burst_sigma=0.8)
    made = played(users, jobs, engine={"max_num_seqs": 12, "policy": policy})
    with prepared(made, tmp_path) as trace:
        [row] = trace.rows(
            "SELECT count(*) AS n, sum(behind_ns) / 1e9 AS behind_s, sum(queue_ns) / 1e9 AS queue_s, "
            "count(*) FILTER (WHERE overtaken > 0) AS overtaken FROM waits_behind"
        )
    assert row["n"] == sum(made.requests.priority == 1)
    if policy == "fcfs":
        assert row["behind_s"] > 0.5 * row["queue_s"] > 10
    else:
        assert row["behind_s"] < 0.02 * row["queue_s"]
        assert row["overtaken"] < 0.02 * row["n"]


def test_priorities_that_nobody_tells_are_none(tmp_path: Path) -> None:
    with prepared(played(), tmp_path) as trace:
        assert trace.count("waits_behind") == 0


LEFT_OUT = Fault("left-out", "nothing", from_s=3.0, every_s=6.0, length_s=0.6, often=0.3)


def left_out(made: Outcome, least: int) -> dict[int, int]:
    """Request -> steps in which it decoded, got nothing, and was not preempted."""
    runs = made.engines[0].runs
    found: dict[int, int] = {}
    for request, first, last, tokens in zip(runs.request, runs.first, runs.last, runs.tokens, strict=True):
        if tokens == 0:
            found[int(request)] = found.get(int(request), 0) + int(last - first + 1)
    return {request: steps for request, steps in found.items() if steps >= least}


def test_who_is_left_out_keeps_its_place_and_others_go_on() -> None:
    made, without = played(faults=(LEFT_OUT,)), played()
    assert not left_out(without, 1)
    out = left_out(made, MIN_STEPS)
    assert out
    assert (made.requests.preemptions == 0).all()
    assert (made.requests.output == made.requests.planned).all()
    slower = made.requests.finished_s - without.requests.finished_s
    assert slower[list(out)].min() > 0


@pytest.mark.parametrize("client", [True, False])
def test_who_is_left_out_follows_from_the_steps_answers_took(client: bool, tmp_path: Path) -> None:
    made = played(faults=(LEFT_OUT,), telemetry=Telemetry(client=client))
    true = left_out(made, MIN_STEPS + 2)
    with prepared(made, tmp_path) as trace:
        rows = trace.rows(
            "SELECT j.request_id, o.missed, o.ns / 1e9 AS s, o.basis, o.place FROM left_out o JOIN joined j ON j.rid = o.id"
        )
    names = {f"cmpl-{name}-0": i for i, name in enumerate(made.requests.id)}
    found = {names[r["request_id"]]: r for r in rows}
    assert true.keys() <= found.keys() <= left_out(made, MIN_STEPS - 2).keys()
    assert {r["basis"] for r in rows} == {"steps"}
    decoded = [i for i in true if found[i]["place"] == "decode"]
    assert len(decoded) > 5
    missed = np.array([found[i]["missed"] - true[i] for i in decoded])
    assert np.abs(missed).max() <= 3
    spent = np.array([bills(made).component("starved")[i] for i in decoded])
    assert np.array([found[i]["s"] for i in decoded]).sum() == pytest.approx(spent.sum(), rel=0.25)


def test_a_schedule_says_it_exactly(tmp_path: Path) -> None:
    made = played(faults=(LEFT_OUT,), telemetry=Telemetry(schedule=True))
    runs = made.engines[0].runs
    zero = runs.tokens == 0
    with prepared(made, tmp_path) as trace:
        rows = trace.rows("SELECT j.request_id, o.* FROM left_out o JOIN joined j ON j.rid = o.id")
    lengths = runs.last[zero] - runs.first[zero] + 1
    assert {row["basis"] for row in rows} == {"schedule"}
    assert sum(row["missed"] for row in rows) == lengths[lengths >= MIN_STEPS].sum()


@pytest.mark.parametrize("schedule", [True, False])
def test_gaps_of_who_is_left_out_are_no_decode(schedule: bool, tmp_path: Path) -> None:
    made = played(faults=(LEFT_OUT,), telemetry=Telemetry(client=True, schedule=schedule))
    with prepared(made, tmp_path) as trace:
        said = {
            row["component"]: row["s"]
            for row in trace.rows(
                "SELECT component, sum(ns) / 1e9 AS s FROM gap_lines SEMI JOIN left_out_gaps USING (id) GROUP BY ALL"
            )
        }
        [out] = trace.rows("SELECT sum(ns) / 1e9 AS s FROM left_out WHERE place = 'decode'")
        [gaps] = trace.rows(
            "SELECT sum(end_ns - start_ns) / 1e9 AS s FROM gaps SEMI JOIN left_out_gaps USING (id)"
        )
        [itl] = trace.rows("SELECT excess_s FROM excess WHERE metric = 'ITL' ORDER BY excess_s DESC LIMIT 1")
    assert (
        said["starved"]
        == pytest.approx(out["s"], rel=0.01)
        == pytest.approx(bills(made).component("starved").sum(), rel=0.25)
    )
    assert said["decode"] < 0.1 * said["starved"]
    assert sum(said.values()) <= gaps["s"] * 1.001
    assert itl["excess_s"] > 0.02


def test_what_the_cache_lost_is_not_found() -> None:
    agents = replace(CHAT, name="agents", rate=10.0, prompt_tokens=Sizes(2_000, 0.0), prefix_tokens=1_920)
    lost = Fault("cache-loss", "cleared", from_s=5.0, every_s=10.0, length_s=2.0)
    made = played(agents, faults=(lost,))
    q = made.requests
    during = np.array([lost.is_on(at) for at in q.scheduled_s])
    assert during.sum() > 10
    assert (q.cached[during] == 0).all()
    later = ~during & (q.scheduled_s > 2.0)
    assert (q.cached[later] == 1_920).all()


def test_blocks_in_which_prompts_are_no_longer_found() -> None:
    rng = np.random.default_rng(3)
    block = np.repeat(np.arange(20), 40)

    def judged(shares: list[float]) -> list[int]:
        found = rng.random(len(block)) < np.repeat(shares, 40)
        return np.flatnonzero(bad_blocks(found, block)[1]).tolist()

    assert judged([0.95] * 12 + [0.1] * 8) == list(range(12, 20))
    assert judged([0.9] * 5 + [0.0] + [0.9] * 14) == [5]
    assert judged([0.0, 0.3] + [0.95] * 18) == [], "a cache that fills has lost nothing"
    assert sum(bool(judged([0.5] * 20)) for _ in range(100)) <= 2


def test_a_cache_that_still_fills_has_lost_nothing() -> None:
    """Prompts drawn from some dozens of beginnings: each has to be computed once, and chance makes the share that is found
    rise unevenly."""
    block = np.repeat(np.arange(18), 40)
    called = 0
    for seed in range(200):
        drawn = np.random.default_rng(seed).integers(80, size=len(block))
        found = np.ones(len(block), bool)
        found[np.unique(drawn, return_index=True)[1]] = False
        called += bool(bad_blocks(found, block)[1].any())
        found[400:480] = False
        assert bad_blocks(found, block)[1].tolist() == [10 <= b < 12 for b in range(18)]
    assert called <= 2


def test_others_come_on_top_of_those_that_are_found() -> None:
    """A block in which by chance few come is no loss, where those beside it are found as often as ever; prompts that are no
    longer found are one, however the load swings."""
    came = lost = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        rate = np.exp(rng.normal(0, 0.3, 60))

        def judged(others: float, found: float, rng: np.random.Generator = rng, rate: Floats = rate) -> bool:
            """From half of the time on: prompts that nothing begins as, as a share of the usual; and what of the usual is found."""
            known = rng.poisson(24 * rate)
            unknown = rng.poisson(np.where(np.arange(60) < 30, 0.0, others) * 24 * rate)
            hits = rng.binomial(known, np.where(np.arange(60) < 30, 0.95, found))
            share = hits / np.maximum(known + unknown, 1)
            bad = (share < 0.7) & (np.arange(60) >= 30)
            return not bad.any() or as_ever(
                hits.astype(float), np.ones(60), whole(bad, share <= 0.95 - BESIDE)
            )

        came += judged(0.35, 0.95)
        lost += judged(0.0, 0.5)
    assert came >= 195
    assert lost <= 5


@pytest.mark.parametrize(
    ("worse", "expected"),
    [([], [4]), ([3, 5, 6, 8], [3, 4, 5, 6]), ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], list(range(10)))],
)
def test_an_episode_is_all_that_is_worse_around_its_worst(worse: list[int], expected: list[int]) -> None:
    at = np.arange(10)
    assert np.flatnonzero(whole(at == 4, np.isin(at, worse))).tolist() == expected
