"""The accuracy worlds of ranks: labels mean what they say, scores what the page says, and the page is made from what is stored."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tree import ROOT

sys.path.insert(0, str(Path(__file__).parent / "accuracy"))

import bars
import rank_page
import rank_score
from rank_families import FAMILIES, OFFSETS_MS, Labelled, count, replayed
from rank_play import play

from tailscope.sim.engine import simulate

STORED, PAGE = ROOT / "docs" / "accuracy-ranks.json", ROOT / "docs" / "accuracy-ranks.md"


def world(**changes: Any) -> dict[str, Any]:
    """A world in which rank 3 is late by 100 µs, as is said; clocks are known to 10 µs and are 5 off."""
    base: dict[str, Any] = {
        "family": "slow rank",
        "kind": "fault",
        "right": {"straggler-rank": ["rank:3"]},
        "tolerated": {"hot-expert": None},
        "lateness_s": 100e-6,
        "cost": 0.06,
        "clocks": 2,
        "bound_ns": [10_000.0, 10_000.0],
        "off_ns": [5_000.0, -5_000.0],
        "verdict": "found",
        "checks": {"straggler-rank": "found"},
        "findings": [finding()],
        "reasons": {},
    }
    return {**base, **changes}


def finding(**changes: Any) -> dict[str, Any]:
    return {"rule": "straggler-rank", "culprit": "rank:3", "status": "found", "severity": "high", **changes}


OTHER, TOLERATED = finding(culprit="rank:1", severity="low"), finding(rule="hot-expert", culprit="expert:7")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "top-1"),
        ({"findings": [TOLERATED, finding()]}, "later"),
        ({"findings": [TOLERATED]}, "missed"),
        ({"findings": [OTHER]}, "wrong"),
        ({"findings": [finding(culprit="rank:any", severity="low")]}, "missed"),
        ({"findings": [finding(culprit="rank:any", severity="medium")]}, "wrong"),
        ({"findings": [finding(rule="slow-link", culprit="link:1")]}, "wrong"),
        ({"findings": [finding(rule="slow-link", culprit="link:1", severity="low")]}, "missed"),
        ({"findings": [finding(status="inconclusive")]}, "missed"),
        ({"findings": [], "verdict": "inconclusive"}, "abstained"),
        ({"findings": [], "checks": {"straggler-rank": "inconclusive"}}, "abstained"),
        ({"kind": "decoy", "right": {}}, "wrong"),
        ({"kind": "decoy", "right": {}, "findings": [finding(severity="low")]}, "quiet"),
        ({"kind": "blind", "right": {}, "findings": [], "checks": {"straggler-rank": "clear"}}, "quiet"),
        (
            {"kind": "blind", "right": {}, "findings": [], "checks": {"straggler-rank": "inconclusive"}},
            "abstained",
        ),
    ],
)
def test_outcomes(changes: dict[str, Any], expected: str) -> None:
    assert rank_score.outcome(world(**changes)) == expected


def test_only_who_makes_others_wait_beyond_the_clocks_error_must_be_found() -> None:
    assert rank_score.decidable(world())
    assert not rank_score.decidable(world(lateness_s=49e-6))
    assert not rank_score.decidable(world(bound_ns=[10_000.0, 30_000.0])), "the worst clock counts"
    assert not rank_score.decidable(world(bound_ns=[10_000.0])), "one clock is not known at all"


def test_a_fault_that_costs_less_than_rules_tell_of_need_not_be_found() -> None:
    cheap = world(cost=rank_score.WORTH - 0.001, findings=[])
    assert not rank_score.decidable(cheap)
    assert rank_score.decidable(world(cost=rank_score.WORTH, findings=[])), "whatever was said of it"
    (row, _) = rank_score.rows([{**w, "offset_ms": 0.0} for w in (cheap, world(cost=0.01), world())])
    assert (row["decidable"], row["decided"], row["cheap"], row["cheap_decided"]) == (1, 1, 2, 1)


def test_bars_count_what_they_say() -> None:
    worlds = [
        *[world() for _ in range(30)],
        *[world(findings=[OTHER]) for _ in range(10)],
        *[world(family="damaged", findings=[]) for _ in range(10)],
        *[world(family="clean", kind="decoy", right={}, off_ns=[15_000.0, -15_000.0]) for _ in range(10)],
        *[world(family="clock set", kind="decoy", right={}, off_ns=[1e9, -1e9], findings=[]) for _ in range(10)],
    ]  # fmt: skip
    top1, alarms, clocks, blind, beside = rank_score.bars(worlds)
    assert (top1["hits"], top1["n"], top1["holds"]) == (30, 40, False), "damaged profiles are not counted"
    assert (alarms["hits"], alarms["n"]) == (10, 20)
    assert (clocks["hits"], clocks["n"]) == (100, 120), "a clock that is set has no one offset"
    assert blind["n"] == 0 and beside["value"] == pytest.approx(10 / 50)
    assert bars.broken({"bars": [top1, alarms, clocks, blind, beside]}) == [
        top1["bar"],
        alarms["bar"],
        clocks["bar"],
    ]


def test_clocks_of_a_world_count_as_what_they_are_worth() -> None:
    rng = np.random.default_rng(1)
    sizes = rng.integers(2, 17, 400)
    alone = rng.binomial(sizes, 0.9)
    together = sizes * (rng.random(400) < 0.9)
    assert bars.effective(alone.tolist(), sizes.tolist()) > 0.7 * sizes.sum()
    assert bars.effective(together.tolist(), sizes.tolist()) < 400, "large worlds count for more"
    assert bars.effective([3, 8], [3, 8]) == 2, "all hold: nothing tells the clocks of a world apart"


def test_the_bound_of_a_clustered_share_holds_in_95_of_100() -> None:
    rng = np.random.default_rng(2)
    below = 0
    for _ in range(400):
        sizes = rng.integers(2, 17, 150)
        hits = rng.binomial(sizes, rng.beta(19, 1, 150))
        worth = bars.effective(hits.tolist(), sizes.tolist())
        below += bars.bar("", int(hits.sum()), int(sizes.sum()), 0.9, "lower", worth)["bound"] <= 0.95
    assert 0.93 <= below / 400 <= 0.98


def test_the_page_is_made_from_what_is_stored() -> None:
    assert PAGE.read_text(encoding="utf-8") == rank_page.render(json.loads(STORED.read_bytes()))


def test_what_is_stored_is_of_all_kinds_and_offsets_and_meets_the_bars() -> None:
    stored = json.loads(STORED.read_bytes())
    assert not stored["failed"]
    assert {(row["family"], row["offset_ms"]) for row in stored["rows"]} == {
        (family.name, offset) for family in FAMILIES for offset in (None, *OFFSETS_MS)
    }
    if stored["form"] == "full":
        assert not bars.broken(stored)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_a_family_has_worlds_of_its_own(family: Any) -> None:
    one, same, other = (family.world(2.0, seed) for seed in (1, 1, 3))
    assert one == same and one != other
    assert bool(one.right) == (family.kind == "fault")
    assert np.abs(one.scenario.ranks.offset_s).max() <= 0.002
    assert 2 <= count(one.scenario) <= 16


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.kind == "fault"], ids=lambda f: f.name)
def test_a_fault_makes_somebody_late(family: Any) -> None:
    late = []
    for seed in (1, 3, 5):
        made: Labelled = family.world(0.0, seed)
        (ranks,) = simulate(made.scenario).worlds.values()
        assert 20 <= len(ranks.starts) <= 200
        late.append(replayed(ranks, made)[0] if made.healthy else 1.0)
    assert np.median(late) > 50e-6


def test_a_world_is_played_as_tables_and_as_files() -> None:
    one, other = (play("slow rank", 2.0, 1, via) for via in ("tables", "files"))
    assert rank_score.outcome(one) == rank_score.outcome(other) == "top-1"
    assert rank_score.decidable(one) and not rank_score.false_alarms(one)
    assert len(one["off_ns"]) == one["clocks"] == one["ranks"]
    assert max(map(abs, one["off_ns"])) < 100_000, "clocks are 2 ms apart, and known"
    assert one["off_ns"] == pytest.approx(other["off_ns"], abs=50)
