"""What simulated ranks owe to physics: transfers by size, exchanges in which each has its own end, hosts that launch late,
tokens that say what experts got; and profiles that show just that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from test_sim_ranks import outcome, rows_of, scenario

from tailscope.config import Config
from tailscope.errors import UsageError
from tailscope.ingest import ingest
from tailscope.sim import scenario_file
from tailscope.sim.emit.kineto import write_profiles
from tailscope.sim.engine import simulate
from tailscope.sim.lanes import shape_of
from tailscope.sim.outcome import Outcome
from tailscope.sim.rank_noise import CHUNK
from tailscope.sim.rank_transfers import ROW
from tailscope.sim.ranks import RankWorld, Timeline
from tailscope.sim.scenario import Engine, Fault, Load, Ranks, Scenario, Telemetry
from tailscope.sim.tables_ranks import profile_tables
from tailscope.source import Options
from tailscope.store import Trace

#: Nothing by chance, so that what is left is physics.
EXACT: dict[str, Any] = {"spread": 0.0, "straggle_s": 0.0}
EXCHANGE: dict[str, Any] = {"engines": 4, "tp": 1, "moe": True, "exchange": "all-to-all"}
NESTED: dict[str, Any] = {"engines": 2, "tp": 2, "moe": True}
FAULTS = {
    "none": (),
    "rank": (Fault("slow-rank", rank=1, factor=2.0, often=0.5),),
    "link": (Fault("slow-link", rank=1, factor=4.0),),
    "host": (Fault("host-slow", rank=2, length_s=1e-3, per_request_s=1e-5),),
    "collections": (Fault("host-slow", rank=3, length_s=0.02, every_s=0.3),),
    "all hosts": (Fault("host-slow", all_ranks=True, length_s=2e-3),),
}


def tokens_of(world: RankWorld, steps: int) -> list[list[int]]:
    drawn: list[list[int]] = np.random.default_rng(5).integers(1, 200, (steps, world.engines)).tolist()
    return drawn


def run(world: RankWorld, steps: int = CHUNK + 20, stalls: dict[int, float] | None = None) -> np.ndarray:
    """(duration, by ranks, by links, held) of each step; costs and tokens are drawn, alike for alike worlds."""
    rng = np.random.default_rng(4)
    now, rows = 0.0, []
    for k, tokens in enumerate(tokens_of(world, steps)):
        costs = (0.012 * np.exp(rng.normal(0, 0.2, world.engines))).tolist()
        step = world.step(k, now, costs, tokens, sum(tokens) // 8, (stalls or {}).get(k, 0.0))
        rows.append((*step, world.held_s))
        # The same instants whatever a step takes, so that worlds can be compared.
        now += 0.05
    return np.array(rows)


def lived(of: Scenario, steps: int = 40) -> tuple[RankWorld, Timeline]:
    world = RankWorld(of, "a", 0, 3)
    run(world, steps)
    return world, world.timelines(0, steps)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("exchange", ["all-gather", "all-to-all"])
@pytest.mark.parametrize("tp", [1, 2])
def test_steps_are_replayed_to_the_last_bit(fault: str, exchange: str, tp: int) -> None:
    """A step's duration, what its ranks did, and what it had taken without the fault, all from one set of random numbers."""
    shape: dict[str, Any] = {"engines": 4 // tp, "tp": tp, "moe": True, "exchange": exchange}
    physics: dict[str, Any] = {
        "bandwidth_gb_s": 20.0,
        "leave_bias_s": (0.0, 1e-5),
        "hot": 0.1,
        "hot_steps": 100,
    }
    faulty, healthy = (
        RankWorld(scenario(**shape, **physics, faults=f), "a", 0, 3) for f in (FAULTS[fault], ())
    )
    steps, as_ever = run(faulty, stalls={7: 0.004}), run(healthy)
    told = faulty.timelines(0, len(steps))
    assert told.duration_s.tolist() == steps[:, 0].tolist()
    assert told.leave[:, -1, -1].max(axis=-1) == pytest.approx(told.duration_s, abs=1e-12)
    some = faulty.timelines(CHUNK - 3, CHUNK + 3)
    assert np.array_equal(some.leave, told.leave[CHUNK - 3 : CHUNK + 3])
    assert steps[7, 3] >= 0.004 - 1e-12
    parts = steps[:, 1:].sum(axis=1)
    assert steps[:, 0] - parts == pytest.approx(as_ever[:, 0], abs=1e-9)
    column = {"rank": 1, "host": 1, "collections": 1, "link": 2, "all hosts": 3}.get(fault)
    for other in {1, 2, 3} - {column}:
        assert not np.delete(steps[:, other], 7).any()
    if column is not None:
        assert steps[:, column].sum() > 0


def test_a_transfer_takes_its_bytes_time() -> None:
    of = scenario(tp=4, bandwidth_gb_s=2.0, **EXACT)
    world, told = lived(of)
    took = told.leave - told.arrival.max(axis=-1, keepdims=True)
    tokens = np.array(world.tokens)[:, 0]
    assert took[:, 1, 1, 2] == pytest.approx(of.ranks.transfer_s + tokens * ROW / 2e9)
    with pytest.raises(ValueError, match="must tell the tokens of 1 engines, not of 0"):
        RankWorld(of, "a", 0, 3).step(0, 0.0, [0.01])


def test_in_an_exchange_each_leaves_when_it_has_its_own() -> None:
    of = scenario(**EXCHANGE, bandwidth_gb_s=2.0, hot=0.3, **EXACT)
    world, told = lived(of)
    rows = world.transfers.exchanged(np.array(world.tokens), world.loads(0, 40))
    took = told.leave - told.arrival.max(axis=-1, keepdims=True)
    assert took[:, :, 0] == pytest.approx(of.ranks.transfer_s + rows.sum(axis=-2) * ROW / 2e9)
    assert took[:, :, 1] == pytest.approx(of.ranks.transfer_s + rows.sum(axis=-1) * ROW / 2e9)
    assert np.allclose(told.begin[:, 0, 1], told.leave[:, 0, 0]), "none waits for the others to leave"


def test_rows_add_up_to_what_experts_work_on() -> None:
    load = np.array([[0.9, 1.3, 1.1, 0.7]])
    tokens = np.array([1, 1, 1, 2])
    alone, exact = (
        RankWorld(scenario(**EXCHANGE, exact_rows=exact, **EXACT), "a", 0, 3).transfers.exchanged(
            tokens, load
        )
        for exact in (False, True)
    )
    expected = tokens.sum() * 2 * load[0] / 4
    assert np.abs(alone.sum(axis=-2)[0] - expected).max() > 0.5, "each sender's rows are rounded alone"
    assert np.abs(exact.sum(axis=-2)[0] - expected).max() <= 0.5
    assert (exact >= 0).all()


@pytest.mark.parametrize(
    ("fault", "late"),
    [
        (Fault("slow-link", rank=1), [0, 2, 3]),
        (Fault("slow-link", rank=1, side="destination"), [1]),
        (Fault("slow-link", rank=1, peer=3), [3]),
        (Fault("slow-link", rank=1, side="destination", peer=0), [1]),
    ],
)
def test_a_slow_link_is_felt_by_who_gets_something_over_it(fault: Fault, late: list[int]) -> None:
    slow = scenario(**EXCHANGE, bandwidth_gb_s=2.0, faults=(replace(fault, factor=50.0),), **EXACT)
    (_, told), (_, healthy) = lived(slow), lived(replace(slow, faults=()))
    # In the first collective of a step nobody comes later than it did.
    longer = (told.leave - healthy.leave)[:, 0, 0]
    assert np.flatnonzero((longer > 1e-6).all(axis=0)).tolist() == late
    assert np.abs(np.delete(longer, late, axis=1)).max() < 1e-12


def test_who_leaves_late_always_begins_late_always() -> None:
    bias = (0.0, 5e-6, 1e-5, 2e-5)
    _, told = lived(scenario(tp=4, leave_bias_s=bias, **EXACT))
    left = told.leave - told.leave.min(axis=-1, keepdims=True)
    assert left == pytest.approx(np.broadcast_to(bias, left.shape), abs=1e-12)
    assert np.allclose(told.begin[:, 1:, 0], told.leave[:, :-1, 1])


def test_a_slow_host_leaves_its_rank_idle_and_its_work_as_it_was() -> None:
    fault = Fault("host-slow", rank=2, length_s=1e-3, per_request_s=2e-4, phase="mlp", layers=(1, 3))
    slow = scenario(tp=4, faults=(fault,), **EXACT)
    (world, told), (_, healthy) = lived(slow), lived(replace(slow, faults=()))
    assert told.arrival - told.begin == pytest.approx(healthy.arrival - healthy.begin, abs=1e-12)
    idle = told.begin[:, :, 1] - told.leave[:, :, 0]
    expected = np.zeros_like(idle)
    expected[:, [1, 3], 2] = ((1e-3 + 2e-4 * np.array(world.requests)) / 2)[:, None]
    assert idle == pytest.approx(expected, abs=1e-12)


def test_a_host_stands_still_as_often_as_it_says() -> None:
    fault = Fault("host-slow", rank=1, length_s=0.03, every_s=0.345, from_s=0.2, to_s=1.5)
    _, told = lived(scenario(tp=2, faults=(fault,), **EXACT))
    before = np.concatenate([np.zeros((40, 1, 2)), told.leave.reshape(40, -1, 2)[:, :-1]], axis=1)
    idle = told.begin.reshape(40, -1, 2) - before
    steps, places, ranks = np.nonzero(idle > 0.01)
    assert idle[steps, places, ranks] == pytest.approx(0.03)
    # Steps begin every 0.05 s here.
    assert (steps * 0.05).tolist() == pytest.approx([0.2, 0.55, 0.9, 1.25])
    assert set(ranks.tolist()) == {1}
    assert len(set(places.tolist())) > 1, "it does not always meet the same piece of work"


def test_time_follows_tokens_as_far_as_it_is_told_to() -> None:
    work = []
    for follow in (0.0, 0.5, 1.0):
        _, told = lived(scenario(moe=True, hot=0.3, follow=follow, **EXACT))
        of_rank = (told.arrival - told.begin)[:, :, -1].mean(axis=(0, 1))
        work.append(of_rank.max() / of_rank.mean())
    assert work[0] == pytest.approx(1.0) and work[1] - 1 == pytest.approx((work[2] - 1) / 2, rel=0.02)
    assert work[2] > 1.3


def test_the_hottest_expert_stays_or_moves() -> None:
    fixed, moving = (RankWorld(scenario(moe=True, hot=0.3, hot_steps=n), "a", 0, 3) for n in (0, 30))
    assert len({fixed.hot_expert(k) for k in range(0, 100_000, 5_000)}) == 1
    hot = [moving.hot_expert(k) for k in range(3_000)]
    assert len(set(hot)) > 8 and all(len(set(hot[k : k + 30])) == 1 for k in range(0, 3_000, 30))
    run(moving, 300)
    latest = moving.loads(0, 300).mean(axis=1).argmax(axis=1)
    assert np.mean(latest == [moving.rank_of(e) for e in hot[:300]]) > 0.95


# -- engines --------------------------------------------------------------------------------------


def chat(**changes: Any) -> Load:
    return replace(Load("chat", arrivals="at", times_s=tuple(0.01 * i for i in range(12)), prompts=(50,) * 12, outputs=tuple(range(10, 34, 2))), **changes)  # fmt: skip


def played(**changes: Any) -> Outcome:
    settings: dict[str, Any] = {
        "ranks": Ranks(2),
        "telemetry": Telemetry(profile=((0.0, 60.0),)),
        "duration_s": 1.0,
    }
    return simulate(Scenario(changes.pop("loads", (chat(),)), **{**settings, **changes}))


def test_the_first_batch_of_a_size_takes_longer() -> None:
    fault = Fault("first-shape", length_s=0.05, reason="jit")
    made = played(faults=(fault,))
    steps = made.engines[0].steps
    shapes = [shape_of(int(t)) for t in steps.prefill_tokens + steps.decode_tokens]
    first = [shape not in shapes[:k] for k, shape in enumerate(shapes)]
    assert sum(first) > 3 and not all(first)
    assert steps.pause_s == pytest.approx(np.where(first, 0.05, 0.0))
    assert np.all((steps.end_s - steps.start_s > 0.05) == first)
    assert [e.time_s for e in made.events if e.kind == "jit"] == steps.start_s[first].tolist()
    # No rank waits for another: all stand still before their first work.
    told = made.worlds["vllm-0"].timelines(0, len(steps))
    assert np.all((told.begin[:, 0, 0] > 0.049).all(axis=-1) == first)


def test_sizes_of_batches() -> None:
    assert [shape_of(n) for n in (1, 2, 3, 4, 5, 9, 250, 257, 500, 513, 2_000)] == [1, 2, 4, 4, 8, 16, 256, 272, 512, 1_024, 2_048]  # fmt: skip


def test_ones_prefill_is_everyones_wait() -> None:
    """Engine 0 gets the long prompts; engine 1, which decodes, shows the same time as waiting in its dispatch."""
    loads = (chat(prompts=(1_500, 20) * 6),)
    made = played(loads=loads, engine=Engine(data_parallel=2, moe=True), ranks=Ranks(1))
    assert [e.steps.prefill_tokens.sum() > 1_000 for e in made.engines] == [True, False]
    long = made.engines[0].steps.prefill_tokens > 1_000
    events = profile_tables(made)["rank_events"]
    stay = {}
    for rank in (0, 1):
        mine = events.filter((pc.field("rank") == rank) & (pc.field("collective") == "all_gather"))
        stay[rank] = mine.sort_by("start_ns")["duration_ns"].to_numpy().reshape(len(long), -1).sum(axis=1)
    assert (stay[1] / stay[0])[long].min() > 10
    assert np.median((stay[1] / stay[0])[~long]) == pytest.approx(1.0, rel=0.3)


# -- profiles -------------------------------------------------------------------------------------

SHOWN = {
    "exchange": {**EXCHANGE, "hot": 0.2},
    "coordinated": {**EXCHANGE, "coordinate": True},
    "nested exchange": {**NESTED, "exchange": "all-to-all"},
    "slow host": {"tp": 4, "faults": FAULTS["host"]},
    "collections": {"tp": 4, "faults": (Fault("host-slow", rank=3, length_s=0.02, every_s=0.05),)},
    "jitter": {"tp": 2, "stamp_jitter_s": 3e-6},
    "clock set": {"tp": 2, "hosts": 2, "clock_steps": ((1, 0.15, -0.002),)},
    "sizes": {"tp": 4, "leave_bias_s": (0.0, 1e-5, 2e-5, 3e-5)},
}


def profiled(name: str, emitter: str, **telemetry: Any) -> Outcome:
    window = Telemetry(profile=((0.1, 0.09),), **telemetry)
    return outcome(
        scenario(**SHOWN[name], name=f"{name} {emitter}", emitter=emitter, layers=2, telemetry=window)
    )


def emitters_of(name: str) -> list[str]:
    if "exchange" in SHOWN[name]:
        return ["gloo", "nccl", "deepep-ll", "deepep-ht"]
    return ["gloo", "nccl", "custom", "graph"]


def test_files_hold_what_the_tables_say(tmp_path: Path) -> None:
    made = [profiled(name, emitter) for name in SHOWN for emitter in emitters_of(name)]
    for one in made:
        write_profiles(one, tmp_path / "run")
    done = ingest([tmp_path / "run"], tmp_path / "t", config=Config(), options=Options())
    assert {(file.status, file.tally.rejected.total()) for file in done} == {("ingested", 0)}
    with Trace(tmp_path / "t", threads=1) as trace:
        for one in made:
            for name, table in profile_tables(one).items():
                if name == "sources":
                    continue
                sql = f"SELECT * FROM {name} WHERE list_contains($instances, instance)"
                read = trace.connection.sql(sql, params={"instances": one.instances()}).to_arrow_table()
                assert rows_of(read) == rows_of(table), (one.scenario.name, name)


@pytest.mark.parametrize("emitter", ["gloo", "nccl", "deepep-ll", "deepep-ht"])
def test_what_coordinates_steps_ends_at_one_time_between_them(emitter: str) -> None:
    made = profiled("coordinated", emitter)
    events = profile_tables(made)["rank_events"]
    mine = events.filter((pc.field("collective") == "all_reduce") & pc.field("step").is_null()).sort_by(
        "start_ns"
    )
    (world,) = made.worlds.values()
    first, stop = world.between(0.1, 0.19)
    begins = world.clock_ns(0, np.array(world.starts[first:stop]))
    for rank in range(4):
        some = mine.filter(pc.field("rank") == rank)
        start, ends = (
            some["start_ns"].to_numpy(),
            some["start_ns"].to_numpy() + some["duration_ns"].to_numpy(),
        )
        assert len(ends) == stop - first and np.all(begins - ends < 3_001) and np.all(begins >= ends)
        assert np.all(ends - start >= 30_000)


@pytest.mark.parametrize("name", ["exchange", "slow host", "collections", "coordinated"])
def test_on_a_gpu_a_kernel_is_launched_before_it_starts_and_late_where_its_host_was(name: str) -> None:
    events = profile_tables(profiled(name, "nccl"))["rank_events"]
    kernels = events.filter(pc.field("category") == "kernel")
    lead = pc.subtract(kernels["start_ns"], kernels["launch_ns"]).to_numpy()
    assert lead.min() > 0
    late = {"slow host": 2, "collections": 3}.get(name)
    for rank in range(4):
        some = kernels.filter(pc.field("rank") == rank).sort_by("start_ns")
        start, end = some["start_ns"].to_numpy(), some["start_ns"].to_numpy() + some["duration_ns"].to_numpy()
        launched = some["launch_ns"].to_numpy()
        assert np.all(np.diff(launched) > 0), "one after another"
        same = np.diff(some["step"].to_numpy()) == 0
        idle = (start[1:] - end[:-1] > 300_000) & same
        assert idle.any() == (rank == late)
        # Only shortly before it starts, while others wait in the queue of their stream.
        assert np.all((start - launched)[1:][idle] < 100_000)


def test_tokens_of_an_exchange_are_those_of_the_experts() -> None:
    tables = profile_tables(profiled("exchange", "nccl", expert_load=True))
    loads = tables["expert_load"].group_by(["rank", "step", "layer"]).aggregate([("tokens", "sum")])
    by_experts = {(r["rank"], r["step"], r["layer"]): r["tokens_sum"] for r in loads.to_pylist()}
    kernels = tables["rank_events"].filter(
        (pc.field("phase") == "dispatch") & pc.field("collective").is_valid()
    )
    told = {
        (r["rank"], r["step"], r["layer"]): r["tokens"] for r in kernels.to_pylist() if r["step"] is not None
    }
    assert told == by_experts and len(told) > 20
    for row in kernels.to_pylist():
        assert row["tokens"] == sum(row["out_split"]) and row["bytes_in"] == sum(row["in_split"]) * ROW
    assert {len(r["out_split"]) for r in kernels.to_pylist()} == {4}


def test_what_a_profile_loses_is_lost_by_buffers() -> None:
    whole, part = (profile_tables(profiled("sizes", "nccl", profile_dropped=share)) for share in (0.0, 0.3))
    some, all_ = part["rank_events"], whole["rank_events"]
    lost = set(rows_of(all_)) - set(rows_of(some))
    assert set(rows_of(some)) < set(rows_of(all_))
    assert 0.1 < len(lost) / all_.filter(pc.field("category") == "kernel").num_rows < 0.5
    assert all("'category', 'kernel'" in row for row in lost)


def test_a_profile_can_be_missing() -> None:
    tables = profile_tables(profiled("sizes", "gloo", profile_missing=(2,)))
    assert tables["profiles"]["rank"].to_pylist() == [0, 1, 3]
    assert set(tables["profiles"]["world_size"].to_pylist()) == {4}


def test_clocks_jump_and_stamps_are_late() -> None:
    world = RankWorld(scenario(tp=2, hosts=2, clock_steps=((1, 5.0, -0.25),)), "a", 0, 0)
    apart = world.clock_ns(1, np.array([4.9, 5.0])) - world.clock_ns(0, np.array([4.9, 5.0]))
    assert apart.tolist() == [0, -250_000_000]

    def stays(jitter_s: float) -> pa.Table:
        shown = scenario(
            tp=2, emitter="nccl", stamp_jitter_s=jitter_s, telemetry=Telemetry(profile=((0.1, 0.09),))
        )
        return profile_tables(outcome(shown))["rank_events"].sort_by(
            [("rank", "ascending"), ("launch_ns", "ascending")]
        )

    exact, shown = (stays(j).filter(pc.field("category") == "kernel") for j in (0.0, 4e-6))
    late = shown["start_ns"].to_numpy() - exact["start_ns"].to_numpy()
    assert late.min() >= 0 and 3_000 < late.max() <= 4_000
    ends = [t["start_ns"].to_numpy() + t["duration_ns"].to_numpy() for t in (exact, shown)]
    assert np.array_equal(*ends)


# -- scenario files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"fault": [{"kind": "slow-link", "side": "destination"}]}, "side: is of exchange = all-to-all"),
        ({"fault": [{"kind": "slow-link", "peer": 1}]}, "peer: is of exchange = all-to-all"),
        ({"fault": [{"kind": "slow-rank", "peer": 1}]}, "peer: is for kind = slow-link only"),
        ({"fault": [{"kind": "pause", "per_request_s": 0.1}]}, "is for kind = host-slow only"),
        ({"fault": [{"kind": "host-slow", "phase": "combine"}]}, "must be one of attention, mlp"),
        ({"ranks": {"tensor_parallel": 2, "exchange": "all-to-all"}}, "all-to-all is between experts"),
        ({"ranks": {"tensor_parallel": 2, "clock_steps": [[1, 2.0, 0.1]]}}, "hosts are 0 to 0"),
        ({"ranks": {"tensor_parallel": 2, "leave_bias_s": [0, 0, 1e-5]}}, "has 3 entries, but there are 2 ranks"),
        ({"ranks": {"tensor_parallel": 2, "coordinate": True}}, "is for moe = true"),
        ({"telemetry": {"profile_missing": [2]}}, "profile_missing: there is no rank 2"),
        (
            {
                "engine": {"data_parallel": 2, "moe": True},
                "ranks": {"exchange": "all-to-all"},
                "fault": [{"kind": "slow-link", "rank": 1, "peer": 1}],
            },
            "must be another rank than 1",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(document: dict[str, Any], told: str) -> None:
    whole = {"load": [{"name": "a"}], "ranks": {"tensor_parallel": 2}, **document}
    with pytest.raises(UsageError, match=told.replace("[", r"\[")):
        scenario_file.parse(whole, Path(), "s.toml")
