"""The accuracy worlds: their scores mean what the page says, and the page is made from what is stored."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tree import ROOT

sys.path.insert(0, str(Path(__file__).parent / "accuracy"))

import bars
import page
import score
from catalogue import FAMILIES
from families import Family
from play import play

from tailscope import registry
from tailscope.sim.engine import simulate
from tailscope.sim.scenario import Scenario
from tailscope.sim.scenario_file import without

STORED, PAGE = ROOT / "docs" / "accuracy.json", ROOT / "docs" / "accuracy.md"


def world(**changes: Any) -> dict[str, Any]:
    """A world with a coupling that costs half a p99 more, and found."""
    base: dict[str, Any] = {
        "kind": "fault",
        "labels": {"hol-coupling": "class:<8k|<32k"},
        "cost": {"hol-coupling": 0.5},
        "cost_p95": {"hol-coupling": 0.01},
        "tail_cost": {"hol-coupling": 0.5},
        "suspects": {},
        "verdict": "found",
        "findings": [finding()],
    }
    return {**base, **changes}


def finding(**changes: Any) -> dict[str, Any]:
    return {"rule": "hol-coupling", "culprit": "class:<32k", "status": "found", "severity": "high", **changes}


def test_the_page_is_made_from_what_is_stored() -> None:
    assert PAGE.read_text(encoding="utf-8") == page.render(json.loads(STORED.read_bytes()))


def test_what_is_stored_says_which_bars_it_does_not_meet() -> None:
    stored = json.loads(STORED.read_bytes())
    assert stored["form"] in ("full", "reduced") and not stored["failed"]
    text = PAGE.read_text(encoding="utf-8")
    for bar in stored["bars"]:
        if "limit" in bar:
            [line] = [line for line in text.splitlines() if line.startswith(f"| {bar['bar']} |")]
            assert line.endswith("| holds |" if bar["holds"] else "| not shown |")
    assert {name for row in stored["confusion"].values() for name in row} <= {
        score.NOBODY,
        *(rule.name for rule, _ in registry.rules()),
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "top-1"),
        ({"findings": []}, "missed"),
        ({"findings": [], "verdict": "inconclusive"}, "abstained"),
        ({"findings": [finding(status="inconclusive")]}, "missed"),
        ({"findings": [finding(rule="straggler-rank"), finding()]}, "top-3"),
        ({"findings": [finding(rule="straggler-rank")]}, "wrong"),
        ({"findings": [finding(culprit="class:<2k")]}, "wrong"),
        ({"labels": {"hol-coupling": None}, "findings": [finding(culprit="class:<2k")]}, "top-1"),
    ],
)
def test_outcomes(changes: dict[str, Any], expected: str) -> None:
    assert score.outcome(world(**changes)) == expected


def test_false_alarms() -> None:
    assert score.false_alarms(world()) == []
    assert score.false_alarms(world(findings=[finding(rule="straggler-rank", culprit="rank:1")]))
    nothing = world(cost={"hol-coupling": 0.01}, tail_cost={"hol-coupling": 0.1})
    assert score.false_alarms(nothing), "much is made of what costs nothing"
    assert not score.false_alarms({**nothing, "findings": [finding(severity="low")]})
    assert not score.false_alarms({**nothing, "cost_p95": {"hol-coupling": 0.3}}), (
        "too few for a p99 have a p95"
    )
    assert not score.false_alarms({**nothing, "tail_cost": {"hol-coupling": 0.3}}), (
        "few requests are hit, hard"
    )
    decoy = world(kind="decoy", labels={}, cost={}, tail_cost={})
    assert score.false_alarms(decoy)
    assert not score.false_alarms({**decoy, "suspects": {"hol-coupling": 0.3}}), "it is right after all"


def test_bounds() -> None:
    # Of the rule of three: nothing in 300 bounds a share by 1 %.
    assert bars.bound(0, 300, "upper") == pytest.approx(0.01, abs=0.0005)
    assert bars.bound(300, 300, "lower") == pytest.approx(0.99, abs=0.0005)
    assert bars.bound(0, 10, "lower") == 0 and bars.bound(10, 10, "upper") == 1


@cache
def first_world(name: str) -> Scenario:
    [family] = [f for f in FAMILIES if f.name == name]
    return family.world(family.strengths[0], 1)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_a_family_has_worlds_of_its_own(family: Family) -> None:
    one = first_world(family.name)
    same, other = (family.world(family.strengths[0], seed) for seed in (1, 3))
    assert one == same and one != other
    assert bool(one.causes) == (family.kind != "decoy")
    for cause in one.causes:
        assert without(one, cause) != one


@pytest.mark.parametrize(
    ("family", "strength", "via"), [("coupling", 3, "tables"), ("kv-squeeze", 15, "files")]
)
def test_a_world_is_played(family: str, strength: float, via: str) -> None:
    played = play(family, strength, 1, via)
    assert score.outcome(played) == "top-1" and not score.false_alarms(played)
    assert played["bill_errors"]
    for bill in played["bill_errors"]:
        assert sum(bill["true"].values()) == pytest.approx(1, abs=0.02), "the parts are the excess"
        assert sum(bill["said"].values()) == pytest.approx(1, abs=0.02)


def test_a_suspect_is_innocent_with_the_same_load() -> None:
    for family in (f for f in FAMILIES if f.suspects):
        one = first_world(family.name)
        before = simulate(one).requests
        for innocent in family.suspects.values():
            after = simulate(innocent(one)).requests
            # It is by the first load that a suspect's cost is told.
            mine, same = before.planned[before.load == 0], after.planned[after.load == 0]
            assert len(mine) == len(same) and (mine == same).all()


@pytest.mark.parametrize(("seed", "labels"), [(1, []), (17, ["queue-saturation"])])
def test_a_burst_that_fills_an_engine_for_half_a_minute_is_too_much_whatever_the_world_shows(
    seed: int, labels: list[str]
) -> None:
    family = next(f for f in FAMILIES if f.name == "slots full of short answers")
    assert [cause.rule for cause in family.world(1.0, seed).causes] == labels


def test_what_waits_at_a_gateway_is_seen_by_somebody_in_the_files_too() -> None:
    played = play("seen at the gateway", 1, 7, "files")
    assert score.outcome(played) == "top-1"
