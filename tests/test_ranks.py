"""Ranks against each other: windows found, waits measured, stragglers named; on worlds whose every nanosecond is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import rank_worlds
import worlds
from rank_worlds import HOSTS, LAYOUTS, MS, OFFSETS_MS, US, Lived, Slow, World, apart, live, said, several

from tailscope import registry
from tailscope.align import Scope
from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.model import Decision
from tailscope.parts import SourceWriter
from tailscope.ranks import groups
from tailscope.ranks.collectives import KINDS
from tailscope.ranks.windows import find_windows
from tailscope.schema import BY_NAME
from tailscope.store import Trace

RULE, SQL = next((rule, sql) for rule, sql in registry.rules() if rule.name == "straggler-rank")

# -- windows --------------------------------------------------------------------------------------


@contextmanager
def opened(folder: Path, *some: Lived | World, parts: int = 1) -> Iterator[Trace]:
    with Trace(rank_worlds.write(folder, *some, parts=parts), threads=1) as trace:
        yield trace


def test_profiles_that_overlap_are_a_window_of_their_world(tmp_path: Path) -> None:
    one = World(name="one", ranks=2, steps=2, windows=3)
    two = World(name="two", ranks=3, steps=2, absent=(1,), twice=(2,))
    with opened(tmp_path / "t", one, two) as trace:
        windows = find_windows(trace, Scope())
        late = find_windows(trace, Scope(from_ns=rank_worlds.START_NS + 6 * rank_worlds.S))
        other = find_windows(trace, Scope(instance="two"))
    assert [(w.number, w.world, w.ranks, w.missing) for w in windows] == [
        (0, "one", [0, 1], 0),
        (1, "one", [0, 1], 0),
        (2, "one", [0, 1], 0),
        (3, "two", [0, 2], 1),
    ]
    assert [
        (d.rank, d.events < p.events) for d, p in zip(windows[3].double, windows[3].profiles[1:], strict=True)
    ] == [(2, True)]
    assert [(w.world, w.ranks) for w in late] == [("one", [0, 1])]
    assert [(w.world, w.missing) for w in other] == [("two", 1)]


def test_ranks_beyond_the_world_are_of_another(tmp_path: Path) -> None:
    """vLLM numbers ranks over all data-parallel engines, each of which may be a world."""
    tables = rank_worlds.tables(World(ranks=4, steps=2))
    size = tables["profiles"].schema.get_field_index("world_size")
    tables["profiles"] = tables["profiles"].set_column(size, "world_size", pa.array([2] * 4, pa.int64()))
    with Trace(worlds.write(tmp_path / "t", tables)) as trace:
        found = [(w.world, w.ranks, w.missing) for w in find_windows(trace, Scope())]
    assert found == [("w", [0, 1], 0), ("w/1", [2, 3], 0)]


# -- waits ----------------------------------------------------------------------------------------


def compared(folder: Path, *some: Lived | World, parts: int = 1) -> dict[str, list[dict[str, Any]]]:
    """Rows of `rank_rounds` by world."""
    with opened(folder, *some, parts=parts) as trace:
        diagnose(trace, Config())
        rows = trace.rows(
            'SELECT w.world, r.* FROM rank_rounds r JOIN (SELECT DISTINCT "window", world FROM rank_windows) w USING ("window") '
            'ORDER BY "window", "group", round, rank'
        )
    return {name: list(group) for name, group in groupby(rows, key=lambda r: str(r["world"]))}


@pytest.mark.parametrize("metadata", ["named", "plain"])
def test_waits_are_the_true_ones(tmp_path: Path, metadata: str) -> None:
    some = [
        live(World(name=f"{ms:g} ms", seed=i, metadata=metadata, tokens_are_ids=True, slow=(Slow(2, 1.6),), noise=0.1, **apart(4, ms)))
        for i, ms in enumerate(OFFSETS_MS)
    ]  # fmt: skip
    found = compared(tmp_path / "t", *some)
    for lived in some:
        rows = found[lived.world.name]
        assert len(rows) == 4 * len(lived.windows[0])
        last = []
        for row in rows:
            true = lived.windows[0][row["tokens"]]
            error, rank = 3 * row["error_ns"], row["rank"]
            assert error < 60 * US
            assert row["wait_ns"] == pytest.approx(true.wait(rank), abs=error)
            assert row["transfer_ns"] == pytest.approx(lived.world.transfer_ns, abs=lived.world.straggle_ns)
            # Waiting and transfer are all of a stay, but for how much later than it could a rank left.
            stay = row["end_ns"] - row["start_ns"]
            assert row["wait_ns"] + row["transfer_ns"] == pytest.approx(stay, abs=error)
            assert (row["step"], row["layer"], row["kind"], row["phase"]) == (
                true.step,
                true.layer,
                true.kind,
                true.phase,
            )
            if row["is_last"]:
                assert row["wait_ns"] == 0
                assert row["caused_ns"] == pytest.approx(true.caused, abs=error)
                if true.caused > error:
                    last.append(rank == true.last)
            else:
                assert (row["caused_ns"], row["own_ns"]) == (0, 0)
        assert len(last) > 50
        assert all(last)


def test_lateness_is_of_the_phase_that_took_longer(tmp_path: Path) -> None:
    some = [
        World(name=phase, slow=(Slow(1, 2.0, phase),), layout=layout, **apart(4, 0.5))
        for phase, layout in (("attention", "dense"), ("expert", "dense"))
    ]
    for phase, rows in compared(tmp_path / "t", *some).items():
        late = [r for r in rows if r["is_last"] and r["rank"] == 1 and r["own_ns"] > 200 * US]
        assert len(late) >= 35
        assert {r["late_phase"] for r in late} == {phase}
        extra = sum(r["phase_work_ns"] - r["phase_others_ns"] for r in late)
        assert sum(r["own_ns"] for r in late) == pytest.approx(extra, rel=0.1)


def test_between_dispatch_and_combine_the_experts_run_whatever_the_ops_are_called(tmp_path: Path) -> None:
    tables = rank_worlds.tables(World(slow=(Slow(1, 2.0),)))
    events = tables["rank_events"]
    names = [None if p == "expert" else p for p in events["phase"].to_pylist()]
    at = events.schema.get_field_index("phase")
    tables["rank_events"] = events.set_column(at, "phase", pa.array(names, pa.string()))
    with Trace(worlds.write(tmp_path / "t", tables)) as trace:
        diagnose(trace, Config())
        late = trace.rows("SELECT late_phase FROM rank_rounds WHERE is_last AND rank = 1 AND own_ns > 400000")
    assert len(late) >= 35
    assert {r["late_phase"] for r in late} == {"expert"}


def test_groups_side_by_side_are_kept_apart_without_their_names(tmp_path: Path) -> None:
    """Collectives outside of MoE exchanges are those of an engine's ranks."""
    rows = compared(tmp_path / "t", World(tp=2, tokens_are_ids=True))["w"]
    groups = {name: {r["rank"] for r in rows if r["group"] == name} for name in {r["group"] for r in rows}}
    assert groups == {"": {0, 1, 2, 3}, "dp0 pp0": {0, 1}, "dp1 pp0": {2, 3}}
    assert all(r["complete"] for r in rows)
    assert {(r["group"] == "", r["kind"]) for r in rows} == {
        (True, "all_gather"),
        (True, "reduce_scatter"),
        (False, "all_reduce"),
    }
    # Each round is one true collective.
    pairs = {(r["group"], r["round"], r["tokens"]) for r in rows}
    assert len(pairs) == len({(group, number) for group, number, _ in pairs}) == 160


def test_transfers_slower_than_their_like_are_told(tmp_path: Path) -> None:
    congested = {20: 200.0 * US, 45: 1.0 * MS}
    rows = compared(tmp_path / "t", World(tokens_are_ids=True, congested_ns=congested, **apart(4, 0.5)))["w"]
    slow = {r["tokens"]: r["slow_ns"] for r in rows if r["slow_ns"]}
    assert slow.keys() == congested.keys()
    assert all(slow[number] == pytest.approx(more, abs=12 * US) for number, more in congested.items())


def test_who_is_late_because_it_left_late_has_caused_nothing_of_its_own(tmp_path: Path) -> None:
    world = World(leaves_late_ns=(0, 0, 1.0 * MS, 0), noise=0.01)
    rows = compared(tmp_path / "t", world)["w"]
    last = [r for r in rows if r["is_last"] and r["work_ns"] is not None]
    assert {r["rank"] for r in last} == {2}
    assert min(r["caused_ns"] for r in last) > 0.9 * MS
    assert sum(r["own_ns"] for r in last) < 0.01 * sum(r["caused_ns"] for r in last)
    assert judged(tmp_path / "j", world)["w"].status != "found"


def key(row: Mapping[str, Any], *left_out: str) -> tuple[Any, ...]:
    return tuple((k, str(v)) for k, v in row.items() if k not in left_out)


def test_the_order_of_rows_and_parts_says_nothing(tmp_path: Path) -> None:
    world = World(slow=(Slow(1, 1.5),), twice=(2,), windows=2, **apart(3, 2.0))
    tables = rank_worlds.tables(world)
    rng = np.random.default_rng(0)
    shuffled = {name: table.take(rng.permutation(len(table))) for name, table in tables.items()}
    results = []
    for name, some, parts in (("a", tables, 1), ("b", shuffled, 3)):
        with Trace(worlds.write(tmp_path / name, some, parts)) as trace:
            diagnosis = diagnose(trace, Config())
            rows = trace.rows('FROM rank_rounds ORDER BY "window", "group", round, rank')
            results.append(([key(r) for r in rows], diagnosis.findings, diagnosis.checks))
    assert len(results[0][1]) == 2
    assert results[0] == results[1]


def test_how_many_rounds_are_compared_at_a_time_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = worlds.write(tmp_path / "t", rank_worlds.tables(World(slow=(Slow(1, 1.5),), **apart(3, 2.0))))
    results = []
    for at_once in (groups.ROWS, 7 * 3):
        monkeypatch.setattr(groups, "ROWS", at_once)
        with Trace(path) as trace:
            diagnose(trace, Config())
            rows = trace.rows('FROM rank_rounds ORDER BY "window", "group", round, rank')
            results.append([key(row) for row in rows])
    assert len(results[0]) > 7
    assert results[0] == results[1]


def test_the_order_of_ingestion_says_nothing(tmp_path: Path) -> None:
    world = World(slow=(Slow(1, 1.5),), steps=6, **apart(3, 2.0))
    tables = rank_worlds.tables(world)
    sources = sorted({str(source) for source in tables["profiles"]["source"].to_pylist()})
    results = []
    for name, order in (("a", sources), ("b", sources[::-1])):
        for source in order:
            with SourceWriter(tmp_path / name, source) as writer:
                for table, rows in tables.items():
                    writer.write(BY_NAME[table], rows.filter(pc.equal(rows["source"], pa.scalar(source))))
                writer.commit({"kind": "test"})
        with Trace(tmp_path / name) as trace:
            diagnosis = diagnose(trace, Config())
            rows_ = trace.rows('FROM rank_rounds ORDER BY "window", "group", round, rank')
            results.append(([key(r) for r in rows_], diagnosis.findings))
    assert len(results[0][1]) == 1
    assert results[0] == results[1]


def test_a_constant_on_all_clocks_changes_nothing(tmp_path: Path) -> None:
    world = World(slow=(Slow(1, 1.5),), **apart(3, 2.0))
    later = replace(world, name="later", offset_ns=tuple(o + 3_600_000 * MS for o in world.offset_ns))
    found = compared(tmp_path / "t", world, later)
    moving = ("world", "window", "start_ns", "end_ns")
    for one, other in zip(found["w"], found["later"], strict=True):
        assert [k for k in one if k not in moving and one[k] != other[k]] == []
        assert other["start_ns"] - one["start_ns"] == 3_600_000 * MS


def test_other_names_for_the_ranks_give_the_same_with_those_names(tmp_path: Path) -> None:
    new = {0: 2, 1: 0, 2: 1}
    tables = rank_worlds.tables(World(slow=(Slow(1, 1.5),), metadata="named", **apart(3, 2.0)))
    renamed = {}
    for name, table in tables.items():
        ranks = pa.array([new[int(r or 0)] for r in table["rank"].to_pylist()], pa.int64())
        renamed[name] = table.set_column(table.schema.get_field_index("rank"), "rank", ranks)
    results, culprits = [], []
    for name, some, names in (("a", tables, new), ("b", renamed, {0: 0, 1: 1, 2: 2})):
        with Trace(worlds.write(tmp_path / name, some)) as trace:
            culprits += [f.culprit.id for f in diagnose(trace, Config()).findings]
            rows = trace.rows('FROM rank_rounds ORDER BY "window", "group", round')
        results.append({(r["round"], names[r["rank"]]): r for r in rows})
    assert culprits == ["1", "0"]
    one, other = results
    assert one.keys() == other.keys()
    # Clocks are fitted from the first rank on, so that they are the same only within their error.
    for place, row in one.items():
        for name in ("wait_ns", "caused_ns", "own_ns"):
            assert row[name] == pytest.approx(other[place][name], abs=row["error_ns"])


# -- who is named ---------------------------------------------------------------------------------


def judged(folder: Path, *some: Lived | World) -> dict[str, Decision]:
    """What the rule says of each world, which has one window."""
    decisions = {}
    with opened(folder, *some) as trace:
        diagnosis = diagnose(trace, Config())
        assert "failed" not in {check.status for check in diagnosis.checks}
        rows = trace.rows(SQL, {name: value for name, value in RULE.limits.items() if f"${name}" in SQL})
        for _, window in groupby(rows, key=lambda r: r["window"]):
            of_window = list(window)
            name = str(of_window[0]["world"])
            assert name not in decisions
            decisions[name] = RULE.decide(of_window, RULE.limits)
    told = sorted((f.culprit.detail["world"], f.title) for f in diagnosis.findings if f.rule == RULE.name)
    assert told == sorted((name, f.title) for name, d in decisions.items() for f in d.findings)
    return decisions


def loud(decision: Decision) -> bool:
    return any(f.severity in ("high", "medium") for f in decision.findings)


@pytest.mark.parametrize("offset_ms", OFFSETS_MS)
def test_a_straggler_is_named_whatever_the_clocks(tmp_path: Path, offset_ms: float) -> None:
    """Persistent and transient ones, with and without sequence numbers; one may itself have the clock that is off."""
    some: list[World] = []
    expected: dict[str, tuple[str, str, str]] = {}
    for seed in range(2):
        common: dict[str, Any] = {"seed": seed, "load": 0.1, **apart(4, offset_ms)}
        late = (seed + round(offset_ms)) % 4
        some += [
            World(name=f"expert {seed}", metadata="named", slow=(Slow(late, 1.8),), **common),
            World(name=f"attention {seed}", layout="dense", slow=(Slow(late, 1.8, "attention"),), **common),
            World(
                name=f"passing {seed}",
                metadata="named",
                slow=(Slow(late, 8.0, "expert", 1, (2, 5)),),
                **common,
            ),
        ]
        expected |= {
            f"expert {seed}": (str(late), "persistent", "expert compute of 4 layers"),
            f"attention {seed}": (str(late), "persistent", "attention of 4 layers"),
            f"passing {seed}": (str(late), "transient", "expert compute of layer 1"),
        }
    decisions = judged(tmp_path / "t", *some)
    assert all(loud(d) for d in decisions.values())
    assert {name: said(f) for name, d in decisions.items() for f in d.findings} == expected
    passing = decisions["passing 1"].findings[0]
    assert passing.evidence[0].data["steps"] == [2, 5]
    assert all(len(d.findings[0].victims) == 3 for d in decisions.values())


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_a_straggler_is_named_among_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    some = several(World(metadata="named", layers=2, slow=(Slow(1, 2.0),), **apart(ranks, 2.0)), range(2))
    some.append(World(name="healthy", metadata="named", layers=2, noise=0.1, **apart(ranks, 2.0)))
    decisions = judged(tmp_path / "t", *some)
    assert decisions.pop("healthy").status == "clear"
    assert {said(d.findings[0]) for d in decisions.values()} == {
        ("1", "persistent", "expert compute of 2 layers")
    }
    assert all(loud(d) for d in decisions.values())
    victims = {victim.id for d in decisions.values() for victim in d.findings[0].victims}
    assert "1" not in victims
    assert len(victims) >= min(ranks - 1, 8)


STRAGGLERS: dict[str, World] = {
    "two engines of two ranks, no metadata": World(tp=2, hosts=("a", "a", "b", "b"), offset_ns=(0, 0, 20 * MS, 20 * MS)),
    "two engines of two ranks, named": World(tp=2, metadata="named", hosts=("a", "a", "b", "b"), offset_ns=(0, 0, 20 * MS, 20 * MS)),
    "two engines that exchange all to all": World(tp=2, layout="all_to_all", hosts=("a", "a", "b", "b"), offset_ns=(0, 0, 20 * MS, 20 * MS)),
    "one host": World(),
    "one host, its clock 20 ms off": World(offset_ns=(0, 20 * MS, 0, 0)),
    "another's clock 20 ms off": World(offset_ns=(0, 0, 20 * MS, 0)),
    "all to all alone": World(layout="all_to_all", **apart(4, 2.0)),
    "passes without a step": World(dummies=2, **apart(4, 0.5)),
    "steps counted from elsewhere": World(step_shift=(0, 3, 5, 0), **apart(4, 0.5)),
    "a second profile of two ranks": World(twice=(1, 2), **apart(4, 0.5)),
    "profiles begin late and have gaps": World(steps=14, begins_late=(0, 40, 10, 20), dropped={1: (60,), 2: (65, 70)}, **apart(4, 2.0)),
    "drift": World(drift_ppm=(0, 50, -30, 10), steps=20, metadata="named", **apart(4, 2.0)),
}  # fmt: skip


def test_a_straggler_is_named_in_all_kinds_of_worlds(tmp_path: Path) -> None:
    some = [replace(world, name=name, slow=(Slow(1, 2.0),)) for name, world in STRAGGLERS.items()]
    decisions = judged(tmp_path / "t", *some)
    assert {name: [said(f) for f in d.findings] for name, d in decisions.items()} == {
        name: [("1", "persistent", "expert compute of 4 layers")] for name in STRAGGLERS
    }
    assert all(loud(d) for d in decisions.values())


def test_healthy_worlds_raise_no_alarm(tmp_path: Path) -> None:
    """Noise, load that all share, clocks that are off, lateness that goes round."""
    kinds = {
        "noise 2 %": {"noise": 0.02, "load": 0.2},
        "noise 20 %": {"noise": 0.2, "load": 0.1},
        "two ranks": {"noise": 0.2, "metadata": "named", **apart(2, 2.0)},
        "clocks": {"noise": 0.1, "metadata": "named", **apart(4, 20.0)},
        "goes round": {"slow": tuple(Slow(step % 4, 1.5, steps=(step,)) for step in range(12)), "steps": 12, "metadata": "named", **apart(4, 0.5)},
    }  # fmt: skip
    some = [
        World(name=f"{name} {seed}", seed=seed, layers=2, **{"steps": 10, **kind})
        for name, kind in kinds.items()
        for seed in range(4)
    ]
    decisions = judged(tmp_path / "t", *some)
    assert len(decisions) == 20
    assert sum(loud(d) for d in decisions.values()) == 0


def test_lateness_that_goes_round_in_every_step_is_no_ranks(tmp_path: Path) -> None:
    slow = tuple(Slow(step % 2, 2.0, steps=(step,)) for step in range(12))
    some = several(World(layers=2, steps=12, metadata="named", slow=slow, **apart(2, 0.5)), range(3))
    decisions = judged(tmp_path / "t", *some)
    assert sum(loud(d) for d in decisions.values()) == 0


def test_what_cannot_be_decided_is_not(tmp_path: Path) -> None:
    slow = (Slow(1, 2.0),)
    some = {
        "a rank is missing": (World(absent=(3,), slow=slow), "inconclusive", "profiles of 3 of 4 ranks"),
        "one step": (World(steps=1, slow=slow), "inconclusive", "one step of 4 ranks"),
        "one rank": (World(ranks=2, absent=(1,)), "inconclusive", "profiles of 1 of 2 ranks"),
        "clocks unknown": (World(slow=(Slow(1, 1.15),), straggle_ns=800 * US, metadata="named", **apart(4, 2.0)), "inconclusive", "less than clocks are known"),
    }  # fmt: skip
    decisions = judged(tmp_path / "t", *(replace(world, name=name) for name, (world, _, _) in some.items()))
    for name, (_, status, reason) in some.items():
        assert (decisions[name].status, decisions[name].findings) == (status, ())
        assert reason in decisions[name].reason


def test_three_steps_are_too_few_to_say_that_lateness_rotates(tmp_path: Path) -> None:
    """Late in every one of them, each time elsewhere."""
    slow = tuple(Slow(1, 4.0, "expert", step, (step,)) for step in range(3))
    decision = judged(tmp_path / "t", World(ranks=2, steps=3, slow=slow))["w"]
    assert not loud(decision)
    assert decision.status == "inconclusive"


def test_two_late_steps_are_not_called_all(tmp_path: Path) -> None:
    """By noise a rank leads in others too; still it is those two that cost time."""
    slow = (Slow(1, 6.0, "expert", 1, (2, 5)),)
    some = several(World(metadata="named", slow=slow, **apart(4, 0.5)), range(4))
    decisions = judged(tmp_path / "t", *some)
    assert {said(f) for d in decisions.values() for f in d.findings} == {
        ("1", "transient", "expert compute of layer 1")
    }


def test_tokens_tell_a_loaded_rank_from_a_slow_one(tmp_path: Path) -> None:
    """Experts that take twice as long, with twice the tokens, half as many more, and as many as the others have."""
    world = World(slow=(Slow(1, 2.0),))
    tokens = {"w": 200, "half": 150, "even": 100}
    some = [
        replace(world, name=name, tokens={**dict.fromkeys(range(4), 100), 1: n}) for name, n in tokens.items()
    ]
    decisions = judged(tmp_path / "t", *some)
    found = {name: d.findings[0] for name, d in decisions.items()}
    assert {name: f.culprit.detail["cause"] for name, f in found.items()} == {
        "w": "load",
        "half": "compute and load",
        "even": "compute",
    }
    assert {name: f.severity for name, f in found.items()} == {"w": "low", "half": "high", "even": "high"}
    for name, one in found.items():
        [said] = [e for e in (*one.evidence, *one.counter_evidence) if "tokens_ratio" in e.data]
        assert said.data["tokens_ratio"] == tokens[name] / 100
        assert said.data["work_ratio"] == pytest.approx(2.0, rel=0.1)
        assert (said in one.counter_evidence) == (name == "w")
    balance = {name for name, f in found.items() if any("balance" in r.do.lower() for r in f.remedies)}
    assert balance == {"w", "half"}


def test_layouts_are_those_of_the_rounds() -> None:
    """The worlds of these tests consist of collectives that are compared."""
    assert {kind for layout in LAYOUTS.values() for kind, _ in layout.values()} <= set(KINDS)


def test_a_profile_without_collectives_among_others(tmp_path: Path) -> None:
    """Of what the rank did beside the others nothing is known; the others' rounds are still told."""
    tables = rank_worlds.tables(World(ranks=3, steps=4, hosts=HOSTS[:3]))
    events = tables["rank_events"]
    tables["rank_events"] = events.filter((pc.field("rank") != 2) | pc.field("collective").is_null())
    with Trace(worlds.write(tmp_path / "t", tables), threads=1) as trace:
        diagnosis = diagnose(trace, Config())
        ranks = {r["rank"] for r in trace.rows("FROM rank_rounds")}
    assert ranks == {0, 1}
    assert {c.status for c in diagnosis.checks if c.rule in ("straggler-rank", "slow-link")} <= {
        "inconclusive",
        "no-data",
    }


def test_collectives_at_one_time_are_judged_by_nobody(tmp_path: Path) -> None:
    tables = rank_worlds.tables(World(ranks=3, steps=4, hosts=HOSTS[:3]))
    events = tables["rank_events"]
    for name, value in (("start_ns", events["start_ns"][0].as_py()), ("duration_ns", 0)):
        index = events.schema.get_field_index(name)
        events = events.set_column(index, name, pa.array([value] * events.num_rows, pa.int64()))
    tables["rank_events"] = events
    with Trace(worlds.write(tmp_path / "t", tables), threads=1) as trace:
        diagnosis = diagnose(trace, Config())
    assert not diagnosis.findings
    assert "failed" not in {c.status for c in diagnosis.checks}
