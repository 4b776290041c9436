"""Slow links: what they cost, against the same steps without them, and worlds in which nothing but a link is slow."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "accuracy"))

import rank_score
from rank_families import FAMILIES, replayed
from rank_play import play

from tailscope.align import Scope, align
from tailscope.config import Config
from tailscope.ranks.compared import write_ranks
from tailscope.ranks.replay import Link
from tailscope.sim.engine import simulate
from tailscope.sim.tables_ranks import profile_tables
from tailscope.sim.written import write_trace
from tailscope.store import Trace


@pytest.mark.parametrize(
    ("family", "offset_ms", "seed"),
    [
        ("slow source", 2.0, 57),
        # The rank that receives slowly comes late to the next collective, where others are late too: the smaller part shows there.
        ("slow destination", 0.0, 51),
        ("slow destination", 0.5, 55),
        ("slow pair", 0.1, 43),
        ("slow pair", 0.0, 41),
    ],
)
def test_a_link_costs_what_the_steps_are_shorter_by_without_it(
    family: str, offset_ms: float, seed: int, tmp_path: Path
) -> None:
    made = next(f for f in FAMILIES if f.name == family).world(offset_ms, seed)
    outcome = simulate(made.scenario)
    (ranks,) = outcome.worlds.values()
    _, true = replayed(ranks, made)
    write_trace(profile_tables(outcome), tmp_path / "t")
    with Trace(str(tmp_path / "t"), threads=1) as trace:
        align(trace, Config(), Scope())
        write_ranks(trace, Scope())
        costs = trace.rows(
            "SELECT rank, late, sum(saved_ns)::DOUBLE AS ns FROM link_costs GROUP BY rank, late"
        )
        [steps] = trace.rows("SELECT sum(as_left_ns)::DOUBLE AS ns FROM step_replays")
    fault = made.scenario.faults[0]
    late = fault.side == "destination" or fault.peer is not None
    rank = fault.rank if fault.peer is None else fault.peer
    of_link = {Link(row["rank"], row["late"]): row["ns"] / steps["ns"] for row in costs}
    assert of_link[Link(rank, late)] == pytest.approx(true, rel=0.1)
    # Who leaves last leaves after each of the others; that is no slow link of theirs, and the rule asks of who differs most.
    assert all(share < true / 5 for link, share in of_link.items() if link.late and link.rank != rank)


@pytest.mark.parametrize(
    ("family", "offset_ms", "seed"),
    [
        # Ends of exchanges lie a millisecond apart, and nothing else that is not numbered is there to tell the clocks.
        ("slow pair", 0.1, 53),
        # Of a size most transfers are slow; those of sizes beside are not.
        ("slow group", 20.0, 39),
        # A tensor-parallel group and all ranks lose half of it each.
        ("slow group", 0.1, 53),
    ],
)
def test_the_link_is_named(family: str, offset_ms: float, seed: int) -> None:
    world = play(family, offset_ms, seed, "tables")
    assert rank_score.decidable(world)
    assert rank_score.outcome(world) == "top-1"
    assert not rank_score.false_alarms(world)
