"""What steps would take if something were otherwise, against worlds lived again in which it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_worlds
from rank_worlds import MS, US, Slow, World, live

from tailscope.align import Scope
from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.ranks.clocks import median_of, median_of_others
from tailscope.ranks.steps import label
from tailscope.store import Trace

#: Nothing but work and transfers, so that sums are exact.
EXACT: dict[str, Any] = {"straggle_ns": 0.0, "noise": 0.0}


def costs(folder: Path, world: World) -> tuple[dict[str, float], dict[int, float], Trace]:
    """Sums of `step_replays` in ns, what steps would be shorter without each rank's lateness, and the trace."""
    trace = Trace(rank_worlds.write(folder, world), threads=1)
    diagnose(trace, Config(), Scope())
    [steps] = trace.rows(
        "SELECT sum(replayed_ns)::DOUBLE AS replayed, sum(no_skew_ns)::DOUBLE AS no_skew, "
        "sum(usual_transfers_ns)::DOUBLE AS usual, sum(balanced_ns)::DOUBLE AS balanced, count(*) AS steps FROM step_replays"
    )
    ranks = trace.rows("SELECT rank, sum(saved_ns)::DOUBLE AS saved FROM rank_costs GROUP BY rank")
    return steps, {r["rank"]: r["saved"] for r in ranks}, trace


def lasted(world: World) -> float:
    """How long the steps that the profiles show whole took, ns: all but the first, whose begin no profile shows."""
    ends: dict[int, float] = {}
    for r in live(world).windows[0]:
        assert r.step is not None
        ends[r.step] = max(ends.get(r.step, 0.0), *r.left.values())
    return ends[max(ends)] - ends[0]


def shown(folder: Path, world: World) -> tuple[float, dict[int, float]]:
    """The replayed length of the steps after the first, and what it is without each rank's lateness."""
    _, _, trace = costs(folder, world)
    with trace:
        [whole] = trace.rows("SELECT sum(replayed_ns)::DOUBLE AS ns FROM step_replays WHERE at_step > 0")
        saved = trace.rows(
            "SELECT rank, sum(saved_ns)::DOUBLE AS ns FROM rank_costs WHERE at_step > 0 GROUP BY rank"
        )
    return whole["ns"], {r["rank"]: whole["ns"] - r["ns"] for r in saved}


WORLDS: Mapping[str, World] = {
    "one group": World(name="one", slow=(Slow(1, 1.5),), **EXACT),
    "two groups in the world": World(name="two", tp=2, slow=(Slow(3, 1.7, "attention"),), **EXACT),
    "dense": World(name="dense", layout="dense", tp=4, slow=(Slow(0, 1.3, None),), **EXACT),
}


@pytest.mark.parametrize("name", WORLDS)
def test_without_a_ranks_lateness_steps_take_what_they_take_where_it_is_not_slow(
    name: str, tmp_path: Path
) -> None:
    """Also where its lateness goes on through another group: who waited for it there comes late to the next as well."""
    world = WORLDS[name]
    whole, without = shown(tmp_path / "t", world)
    assert whole == pytest.approx(lasted(world), rel=1e-6)
    [slow] = {s.rank for s in world.slow}
    assert set(without) == {slow}
    assert without[slow] == pytest.approx(lasted(replace(world, slow=())), rel=1e-6)


def test_offsets_of_clocks_change_nothing(tmp_path: Path) -> None:
    world = World(name="near", ranks=4, slow=(Slow(1, 1.5),), steps=20)
    far = replace(
        world,
        name="far",
        hosts=tuple("abcd"),
        offset_ns=(0, 20 * MS, -20 * MS, 3 * MS),
        drift_ppm=(0, 40, -40, 0),
    )
    (near, saved, one), (apart, saved_apart, other) = costs(tmp_path / "a", world), costs(tmp_path / "b", far)
    one.close()
    other.close()
    for key, value in near.items():
        assert apart[key] == pytest.approx(value, rel=1e-4)
    assert saved_apart[1] == pytest.approx(saved[1], rel=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_otherwise_makes_steps_longer(seed: int, tmp_path: Path) -> None:
    world = World(
        name="w",
        seed=seed,
        tp=2,
        ranks=8,
        noise=0.3,
        load=0.2,
        slow=(Slow(5, 1.4),),
        congested_ns={7: 1 * MS, 90: 2 * MS},
    )
    steps, saved, trace = costs(tmp_path / "t", world)
    trace.close()
    assert steps["no_skew"] < steps["replayed"]
    assert steps["usual"] <= steps["replayed"] - 2.5 * MS
    assert all(steps["replayed"] - s >= steps["no_skew"] - 1 for s in saved.values())
    assert max(saved, key=lambda r: saved[r]) == 5


def test_balanced_experts_take_their_mean(tmp_path: Path) -> None:
    world = World(name="w", slow=(Slow(2, 3.0),), **EXACT)
    whole, _ = shown(tmp_path / "t", world)
    steps, _, trace = costs(tmp_path / "b", world)
    trace.close()
    # One of four takes 3 x 900 us in each layer: the mean is 1.5 x.
    saved = steps["replayed"] - steps["balanced"]
    assert saved == pytest.approx(world.steps * world.layers * 900 * US * (3.0 - 1.5), rel=1e-6)
    assert whole < steps["replayed"]


def test_the_critical_path_is_the_slow_ranks_work_and_the_transfers(tmp_path: Path) -> None:
    world = World(name="w", slow=(Slow(2, 3.0),), **EXACT)
    steps, _, trace = costs(tmp_path / "t", world)
    with trace:
        path = {(r["rank"], r["phase"]): r["work_ns"] for r in trace.rows("FROM rank_path")}
        [moved] = trace.rows("SELECT sum(transfer_ns)::DOUBLE AS ns FROM step_replays")
    assert path[2, "expert"] == pytest.approx(world.steps * world.layers * 2_700 * US, rel=1e-6)
    assert sum(path.values()) + moved["ns"] == pytest.approx(steps["replayed"], rel=1e-6)
    assert moved["ns"] == pytest.approx(world.steps * world.layers * 2 * 80 * US, rel=1e-3)


def test_what_a_profile_lost_makes_no_rank_late(tmp_path: Path) -> None:
    """Without that, the time of a lost collective would count as work before the next."""
    world = World(name="w", ranks=4, steps=20, dropped={2: tuple(range(3, 150, 7))}, metadata="named")
    steps, saved, trace = costs(tmp_path / "t", world)
    trace.close()
    assert max(saved.values()) < 0.03 * steps["replayed"]


def test_steps_are_labelled_by_the_lowest_rank_and_further_ranks_groups_with_them() -> None:
    """Engine 0 counts steps 0, 1, engine 1 the same ones as 4, 5; a pass of engine 1 alone is a step of its own."""
    unknown = -1
    world = np.array([[0, 0, 1, 1, unknown], [0, 0, 1, 1, unknown], [4, 4, 5, 5, 6], [4, 4, 5, 5, 6]])
    tp = np.array([[unknown] * 3, [unknown] * 3, [4, 5, 6], [4, 5, 6]])
    labels = label([world, tp], [np.array([1.0, 2, 4, 5, 7]), np.array([0.5, 3, 6])])
    assert labels[0].tolist() == [0, 0, 1, 1, 2]
    assert labels[1].tolist() == [0, 1, 2]


def test_a_step_of_another_rank_alone_is_counted_where_it_was() -> None:
    """Engine 1 ran its step 8 while engine 0 had nothing to do, between engine 0's steps 0 and 1."""
    unknown = -1
    world = np.array([[0, unknown, 1], [7, 8, 9]])
    assert label([world], [np.arange(3.0)])[0].tolist() == [0, 1, 2]


def test_the_median_of_the_others() -> None:
    rng = np.random.default_rng(0)
    for ranks in range(1, 8):
        values = rng.normal(size=(ranks, 50))
        values[rng.random(values.shape) < 0.2] = np.nan
        values[rng.random(values.shape) < 0.1] = 1.0  # ties
        got = median_of_others(values)
        for rank in range(ranks):
            expected = median_of(np.delete(values, rank, axis=0)) if ranks > 1 else np.full(50, np.nan)
            known = np.isfinite(values[rank])
            np.testing.assert_allclose(got[rank, known], expected[known])


def test_two_ranks_late_in_two_groups_are_late_together(tmp_path: Path) -> None:
    """Without either one the other's group is as late, so that neither costs anything alone."""
    world = World(
        name="two",
        tp=2,
        ranks=8,
        steps=20,
        slow=(Slow(1, 1.8, None), Slow(3, 1.85, None)),
        noise=0.01,
        straggle_ns=0.0,
    )
    with Trace(rank_worlds.write(tmp_path / "t", world), threads=1) as trace:
        diagnosis = diagnose(trace, Config(), Scope())
    [found] = [f for f in diagnosis.findings if f.rule == "straggler-rank"]
    assert (found.severity, found.culprit.id) == ("low", "1, 3")
    assert "late together" in found.title
