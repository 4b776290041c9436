"""Simulated ranks: what a step costs is what its ranks did, their profiles are read as they were meant, and the rank
that was made slow is named."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import worlds

from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.ingest import ingest
from tailscope.model import Finding
from tailscope.sim.emit.kineto import write_profiles
from tailscope.sim.outcome import EngineOutcome, Outcome, Requests, Runs, Steps
from tailscope.sim.rank_noise import CHUNK
from tailscope.sim.ranks import RankWorld
from tailscope.sim.scenario import Engine, Fault, Ranks, Scenario, Telemetry
from tailscope.sim.tables_ranks import profile_tables
from tailscope.source import Options
from tailscope.store import Trace

#: Milliseconds apart, drifting: nothing that an NTP daemon would not leave.
CLOCKS: dict[str, Any] = {"hosts": 2, "offset_s": (0.0, 0.004, -0.003, 0.02), "drift_ppm": (0.0, 20.0, -15.0, 5.0)}  # fmt: skip
SLOW = Fault("slow-rank", rank=1, factor=2.5)


def scenario(engines: int = 1, tp: int = 4, moe: bool = False, **changes: Any) -> Scenario:
    """A world of engines × tp ranks; `changes` of Ranks, or of the scenario: faults, telemetry, engine."""
    of_scenario = {k: changes.pop(k) for k in ("name", "faults", "telemetry", "seed") if k in changes}
    for name in ("offset_s", "drift_ppm"):
        if name in changes:
            changes[name] = changes[name][: engines * tp]
    engine = Engine(data_parallel=engines, moe=moe, replicas=changes.pop("replicas", 1))
    return Scenario((), engine=engine, ranks=Ranks(tp, **changes), **of_scenario)


SHAPES: dict[str, dict[str, Any]] = {"TP2": {"tp": 2}, "TP4": {}, "DP2": {"engines": 2, "tp": 1, "moe": True}, "EP4": {"moe": True}, "DP2 TP2": {"engines": 2, "tp": 2, "moe": True}}  # fmt: skip


def played(world: RankWorld, steps: int, seed: int = 0) -> list[tuple[float, float, float]]:
    """A world that computes so many steps, each of a cost of its own for each engine."""
    rng = np.random.default_rng(seed)
    now, results = 0.0, []
    for k in range(steps):
        results.append(world.step(k, now, (0.012 * np.exp(rng.normal(0, 0.2, world.engines))).tolist()))
        now += results[-1][0] + 0.0002
    return results


def outcome(scenario: Scenario, steps: int = 80) -> Outcome:
    """What became of a scenario whose engines computed batches made up here, some of them dummies. Its instances are
    called after it."""
    empty: dict[str, Any] = {"Ints": np.zeros(0, np.int64), "Floats": np.zeros(0)}
    requests = Requests(**{name: empty.get(kind, []) for name, kind in Requests.__annotations__.items()})
    runs: dict[str, Any] = {
        name: np.zeros(0, bool if name == "gives" else np.int64) for name in Runs.__annotations__
    }
    result = Outcome(scenario, requests, [])
    for replica in range(scenario.engine.replicas):
        name = f"{scenario.name} {replica}"
        world = result.worlds[name] = RankWorld(scenario, name, replica, scenario.seed)
        duration = np.array([step[0] for step in played(world, steps)])
        for engine in range(world.engines):
            made = batches(world, engine, duration)
            result.engines.append(EngineOutcome(name, engine, "both", made, Runs(**runs)))
    return result


def batches(world: RankWorld, engine: int, duration: Any) -> Steps:
    rng = np.random.default_rng(engine)
    steps = len(duration)
    dummy = rng.random(steps) < (0.1 if world.engines > 1 else 0.0)
    start = np.array(world.starts)
    columns: dict[str, Any] = {name: np.zeros(steps, np.int64) for name in Steps.__annotations__}
    columns |= {"dummy": dummy, "start_s": start, "end_s": start + duration}
    columns["prefill_requests"] = np.where(dummy, 0, rng.random(steps) < 0.2)
    columns["prefill_tokens"] = columns["prefill_requests"] * rng.integers(16, 512, steps)
    columns["decode_requests"] = np.where(dummy, 0, rng.integers(1, 40, steps))
    columns["decode_tokens"] = columns["decode_requests"]
    return Steps(**columns)


# -- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_lasts_as_long_as_its_ranks_need(shape: str) -> None:
    faults = (replace(SLOW, often=0.5), Fault("slow-link", rank=1, factor=3.0, layers=(1, 2)))
    world = RankWorld(scenario(**SHAPES[shape], faults=faults), "a", 0, 3)
    results = played(world, CHUNK + 50)
    lived = world.timelines(0, len(results))
    assert lived.duration_s.tolist() == [duration for duration, _, _ in results]
    assert np.array_equal(lived.leave[:, -1, -1].max(axis=-1), lived.duration_s)
    again = world.timeline(CHUNK + 7, world.starts[CHUNK + 7], world.costs[CHUNK + 7])
    assert np.array_equal(again.arrival[0], lived.arrival[CHUNK + 7])
    some = world.timelines(CHUNK - 3, CHUNK + 3)
    assert np.array_equal(some.leave, lived.leave[CHUNK - 3 : CHUNK + 3])


@pytest.mark.parametrize("shape", SHAPES)
def test_nobody_leaves_before_the_last_has_come_and_all_go_on_at_once(shape: str) -> None:
    world = RankWorld(scenario(**SHAPES[shape]), "a", 0, 3)
    played(world, 40)
    lived = world.timelines(0, 40)
    before = np.zeros_like(lived.begin[:, 0, 0])
    for layer in range(lived.begin.shape[1]):
        for index, place in enumerate(world.places):
            begin, arrival, leave = (v[:, layer, index] for v in (lived.begin, lived.arrival, lived.leave))
            assert np.allclose(begin, before, atol=1e-12)
            assert np.all(arrival > begin) if place.after else np.array_equal(arrival, begin)
            groups = [range(world.ranks)]
            if not place.everyone:
                groups = [range(e * world.tp, (e + 1) * world.tp) for e in range(world.engines)]
            for group in groups:
                last = arrival[:, list(group)].max(axis=1, keepdims=True)
                late = leave[:, list(group)] - last - world.settings.transfer_s
                assert np.all((late > -1e-12) & (late < world.settings.straggle_s + 1e-12))
            before = leave


def test_work_is_the_cost_and_experts_share_that_of_all_engines() -> None:
    world = RankWorld(scenario(2, 1, True, spread=0.0, attention_share=0.25), "a", 0, 1)
    world.step(0, 0.0, [0.010, 0.030])
    lived = world.timelines(0, 1)
    work = (lived.arrival - lived.begin)[0].sum(axis=0)
    assert work[0].tolist() == pytest.approx([0.0025, 0.0075])
    assert work[1].tolist() == pytest.approx([0.015, 0.015], rel=0.05)


def test_a_slow_rank_costs_what_it_takes_longer() -> None:
    lost = []
    for factor in (1.0, 1.5, 2.0, 4.0):
        world = RankWorld(scenario(spread=0.0, faults=(replace(SLOW, factor=factor),)), "a", 0, 3)
        results = np.array(played(world, 100))
        assert not results[:, 2].any()
        lost.append(results[:, 1].sum())
        cost = sum(cost for (cost,) in world.costs)
        assert lost[-1] == pytest.approx((factor - 1) * cost, rel=0.02, abs=1e-9)
    assert all(one < other for one, other in pairwise(lost))


def test_faults_apply_where_and_when_they_say() -> None:
    faults = (
        replace(SLOW, phase="mlp", layers=(2,), from_s=0.2, to_s=0.6),
        Fault("slow-link", rank=0, factor=5.0, from_s=0.9),
        replace(SLOW, replica=1, factor=9.0),
    )
    world = RankWorld(scenario(faults=faults), "a", 0, 3)
    healthy = RankWorld(scenario(), "a", 0, 3)
    results, as_ever = played(world, 100), played(healthy, 100)
    for (duration, by_ranks, by_links), start, (cost,) in zip(
        results, world.starts, world.costs, strict=True
    ):
        # 0.6 of the cost is in 4 layers.
        expected = 1.5 * 0.6 * cost / 4 if 0.2 <= start < 0.6 else 0.0
        assert by_ranks == pytest.approx(expected, rel=0.2)
        # Four times 80 µs more in each of 8 all-reduces.
        assert by_links == pytest.approx(8 * 4 * 80e-6 if start >= 0.9 else 0.0)
        assert duration > by_ranks + by_links
    # Without the faults the step is as it would have been, to rounding.
    assert [d - r - t for d, r, t in results] == pytest.approx([d for d, _, _ in as_ever])


def test_a_fault_may_come_in_some_steps_only() -> None:
    world = RankWorld(scenario(faults=(replace(SLOW, often=0.25),)), "a", 0, 3)
    struck = [by_ranks > 0 for _, by_ranks, _ in played(world, 1_000)]
    assert 200 <= sum(struck) <= 300


def test_no_fault_costs_nothing_and_the_seed_says_all() -> None:
    one, same, other = (played(RankWorld(scenario(**SHAPES["DP2"]), "a", 0, s), 300) for s in (1, 1, 2))
    assert one == same != other
    assert all(parts == (0.0, 0.0) for _, *rest in one for parts in [tuple(rest)])


def test_experts_that_many_tokens_go_to_make_their_rank_late() -> None:
    even, hot = (RankWorld(scenario(moe=True, hot=share, spread=0.0), "a", 0, 3) for share in (0.0, 0.2))
    for world in (even, hot):
        played(world, 200)
    late = hot.rank_of(hot.hot_expert(0))
    work = (hot.timelines(0, 200).arrival - hot.timelines(0, 200).begin)[:, :, -1].mean(axis=(0, 1))
    # 4 of 16 experts: a quarter of the tokens, and a fifth less the cold ones' share of it.
    expected = np.full(4, (1 - 0.2625 - 3 * 0.7375 / 15) / 3)
    expected[late] = 0.2625 + 3 * 0.7375 / 15
    assert work / work.sum() == pytest.approx(expected, rel=0.02)
    alike = (even.timelines(0, 200).arrival - even.timelines(0, 200).begin)[:, :, -1].mean(axis=(0, 1))
    assert alike / alike.sum() == pytest.approx(np.full(4, 0.25), rel=0.02)
    every = hot.settings.hot_steps
    assert len({hot.hot_expert(k) for k in range(0, 20 * every, every)}) > 4


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"faults": (replace(SLOW, rank=4),)}, "there are 4 ranks"),
        ({"faults": (replace(SLOW, phase="expert"),)}, "ranks have attention, mlp"),
        ({"faults": (replace(SLOW, layers=(4,)),)}, "there are 4"),
        ({"moe": True, "experts": 3}, "too few for 4 ranks"),
        ({"engines": 2}, "do not wait for each other"),
    ],
)
def test_worlds_that_cannot_be_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RankWorld(scenario(**changes), "a", 0, 0)


def test_steps_come_in_order() -> None:
    world = RankWorld(scenario(), "a", 0, 0)
    world.step(0, 0.0, [0.01])
    with pytest.raises(ValueError, match="step 2 comes after step 0"):
        world.step(2, 0.1, [0.01])


# -- profiles -------------------------------------------------------------------------------------

#: Emitters that gather experts' tokens from all ranks.
GATHERING = ("gloo", "nccl", "custom", "graph")
#: Seven steps or so; and two windows of them.
PROFILED = Telemetry(profile=((0.1, 0.09),))
TWICE = Telemetry(profile=((0.1, 0.09), (0.4, 0.09)))


def test_files_hold_what_the_tables_say(tmp_path: Path) -> None:
    shown = [
        scenario(**shape, name=f"{name} {emitter}", emitter=emitter, telemetry=PROFILED, layers=2, **CLOCKS)
        for name, shape in SHAPES.items()
        for emitter in GATHERING
    ]  # fmt: skip
    shown.append(scenario(tp=2, name="replicas", replicas=2, telemetry=TWICE))
    made = [outcome(one) for one in shown]
    paths = [path for one in made for path in write_profiles(one, tmp_path / "run")]
    ranks = sum(world.ranks for one in made for world in one.worlds.values())
    # The last one has four ranks more, as it is profiled twice.
    assert len(set(paths)) == len(paths) == ranks + 4
    done = ingest([tmp_path / "run"], tmp_path / "t", config=Config(), options=Options())
    assert {(file.status, file.tally.rejected.total(), *file.tally.notes) for file in done} == {
        ("ingested", 0)
    }
    with Trace(tmp_path / "t", threads=1) as trace:
        for one in made:
            for name, table in profile_tables(one).items():
                sql = f"SELECT * FROM {name} WHERE list_contains($instances, instance)"
                read = trace.connection.sql(sql, params={"instances": one.instances()}).to_arrow_table()
                if name == "sources":
                    # Paths are those of this test, hashes of the files' content; and what a reader skips no table has.
                    told = ["instance", "kind", "clock", "offset_ns", "rows", "first_ns", "last_ns"]
                    read, table = (t.select([*told, "source"]) for t in (read, table))
                assert rows_of(read) == rows_of(table)


def rows_of(table: pa.Table) -> list[str]:
    """In an order of their own, without their source, which is of a file's content."""
    return sorted(repr(list(row.items())) for row in table.drop_columns(["source"]).to_pylist())


def test_a_profile_is_of_one_rank(tmp_path: Path) -> None:
    clocks = {"hosts": 2, "offset_s": (0.0, 0.001, 0.005)}
    made = outcome(scenario(2, 2, True, name="vllm", emitter="nccl", telemetry=PROFILED, **clocks))
    path = write_profiles(made, tmp_path)[3]
    assert path.parent.name == "vllm 0"
    assert path.name.startswith("dp1_pp0_tp1_dcp0_ep3_rank1.")
    told = orjson.loads(gzip.decompress(path.read_bytes()))
    assert (told["host_name"], told["distributedInfo"]["rank"]) == ("vllm 0-1", 3)
    assert {g["pg_name"]: g["ranks"] for g in told["distributedInfo"]["pg_config"]} == {
        "0": [0, 1, 2, 3],
        "3": [2, 3],
        "5": [0, 1, 2, 3],
    }
    kernels = [e for e in told["traceEvents"] if e.get("cat") == "kernel"]
    launches = {
        e["args"]["correlation"]: e["ts"] for e in told["traceEvents"] if e.get("cat") == "cuda_runtime"
    }
    assert all(launches[e["args"]["correlation"]] < e["ts"] for e in kernels)
    # Where a rank has no clock of its own it is that of its host.
    world = made.worlds["vllm 0"]
    assert world.clock_ns(3, np.zeros(1)) == world.clock_ns(2, np.zeros(1)) != world.clock_ns(1, np.zeros(1))


def test_dummy_batches_compute_without_a_step() -> None:
    made = outcome(scenario(2, 1, True, name="x", telemetry=Telemetry(profile=((0.1, 0.4),))))
    tables, world = profile_tables(made), made.worlds["x 0"]
    first, stop = world.between(0.1, 0.5)
    steps = made.engines[1].steps
    kept, dummies = ~steps.dummy[first:stop], int(steps.dummy[first:stop].sum())
    assert dummies
    mine = tables["iterations"].filter(pc.field("rank") == 1)
    assert mine["decode_requests"].to_pylist() == steps.decode_requests[first:stop][kept].tolist()
    assert mine["iteration"].to_pylist() == list(range(len(mine)))
    events = tables["rank_events"].filter((pc.field("rank") == 1) & pc.field("collective").is_valid())
    assert len(events) == (stop - first) * 4 * 2
    assert events["step"].null_count == dummies * 4 * 2


def test_the_same_outcome_gives_the_same_files(tmp_path: Path) -> None:
    shown = scenario(emitter="nccl", telemetry=PROFILED)
    one, other = (
        [(p.name, p.read_bytes()) for p in write_profiles(outcome(shown), tmp_path / name)] for name in "ab"
    )
    assert one == other


# -- who is named ---------------------------------------------------------------------------------

#: Long enough for a rank to be late in many steps.
SEEN = Telemetry(profile=((0.1, 0.4),))


def found(folder: Path, some: Sequence[Scenario]) -> dict[str, list[Finding]]:
    """What `straggler-rank` finds in the profiles of each scenario, by its name."""
    parts: dict[str, list[pa.Table]] = {}
    for one in some:
        for name, rows in profile_tables(outcome(one)).items():
            parts.setdefault(name, []).append(rows)
    tables = {name: pa.concat_tables(rows) for name, rows in parts.items()}
    with Trace(worlds.write(folder, tables), threads=1) as trace:
        diagnosis = diagnose(trace, Config())
    checks = {check.rule: check.status for check in diagnosis.checks}
    assert "failed" not in checks.values()
    findings: dict[str, list[Finding]] = {one.name: [] for one in some}
    for finding in diagnosis.findings:
        assert finding.rule == "straggler-rank" and finding.culprit
        findings[finding.culprit.detail["world"].removesuffix(" 0")].append(finding)
    return findings


def said(findings: Sequence[Finding]) -> list[tuple[str, str, str]]:
    return [
        (f.culprit.id, f.culprit.detail["pattern"], f.culprit.detail["where"]) for f in findings if f.culprit
    ]


def test_the_slow_rank_is_named_and_nobody_else(tmp_path: Path) -> None:
    """Whatever the clocks, whoever emits them; a rank slow in attention of dense models, in experts else."""
    healthy = [
        scenario(**shape, name=f"{name} {emitter}", emitter=emitter, telemetry=SEEN, layers=2, **CLOCKS)
        for name, shape in SHAPES.items()
        for emitter in GATHERING
    ]
    slow = [
        replace(one, name=f"{one.name} slow", faults=(replace(SLOW, phase="expert" if one.engine.moe else "attention"),))
        for one in healthy
    ]  # fmt: skip
    findings = found(tmp_path, [*healthy, *slow])
    assert [f for one in healthy for f in findings[one.name] if f.severity != "low"] == []
    for one in slow:
        place = "expert compute" if one.engine.moe else "attention"
        assert said(findings[one.name]) == [("1", "persistent", f"{place} of 2 layers")]
        assert findings[one.name][0].severity != "low"


def test_a_rank_with_hot_experts_is_late_by_its_experts(tmp_path: Path) -> None:
    """So it is whatever the reason; who knows how many tokens it got would say that load is."""
    hot = scenario(moe=True, hot=0.25, name="hot", telemetry=SEEN, **CLOCKS)
    world = RankWorld(hot, "hot 0", 0, hot.seed)
    late = str(world.rank_of(world.hot_expert(0)))
    findings = found(tmp_path, [hot])
    assert said(findings["hot"]) == [(late, "persistent", "expert compute of 4 layers")]


def test_a_slow_link_is_nobodys_lateness(tmp_path: Path) -> None:
    links = scenario(tp=2, name="links", faults=(Fault("slow-link", rank=1, factor=20.0),), telemetry=SEEN)
    assert [f for f in found(tmp_path, [links])["links"] if f.severity != "low"] == []
