"""Hot experts in worlds where it is known what each token costs, and loads of experts as recordings have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import rank_worlds
import worlds
from numpy.typing import NDArray
from rank_worlds import World, several

from tailscope import registry
from tailscope.config import Config
from tailscope.engine import diagnose, judge
from tailscope.ingest import ingest
from tailscope.model import Decision, Diagnosis
from tailscope.schema import EXPERT_LOAD
from tailscope.source import Options
from tailscope.store import Trace

(RULE, SQL) = next((rule, sql) for rule, sql in registry.rules() if rule.name == "hot-expert")
US = rank_worlds.US
Floats = NDArray[np.float64]
EVEN = ((1.0,) * 4,)
#: Rank 2 gets twice an even share in all layers.
SKEWED = ((1.0, 1.0, 2.4, 1.0),)
#: Every layer has a hot rank of its own.
BY_LAYER = (((3.0, 1, 1, 1), (1, 3.0, 1, 1), (1, 1, 3.0, 1), (1, 1, 1, 3.0)),)
#: Every step has.
BY_STEP = tuple((tuple(3.0 if rank == step else 1.0 for rank in range(4)),) for step in range(4))
HOT = World(ranks=4, steps=12, layers=4, routed=4_000, token_ns=800.0, expert_ns=100 * US, shares=(SKEWED,))


def diagnosed(folder: Path, tables: dict[str, Any]) -> Diagnosis:
    with Trace(worlds.write(folder, tables), threads=1) as trace:
        return diagnose(trace, Config())


def decided(folder: Path, *lived: World, **tables: pa.Table) -> tuple[str, str, list[Any]]:
    result = diagnosed(folder, {**rank_worlds.tables(*lived), **tables})
    check = next(c for c in result.checks if c.rule == RULE.name)
    return check.status, check.reason, [f for f in result.findings if f.rule == RULE.name]


def loads(
    counts: NDArray[np.int64],
    instance: str = "w",
    *,
    slots: NDArray[np.int64] | None = None,
    rank: int | None = None,
) -> pa.Table:
    """`expert_load` of steps x layers x experts, or slots whose experts are given, layers x slots."""
    step, layer, place = np.nonzero(np.ones(counts.shape))
    expert = place if slots is None else slots[layer, place]
    return EXPERT_LOAD.batch(
        {
            "instance": [instance] * len(step), "step": step.tolist(), "layer": layer.tolist(), "expert": expert.tolist(),
            "slot": None if slots is None else pa.array(place), "rank": rank, "tokens": counts.reshape(-1).tolist(),
        }
    )  # fmt: skip


# -- profiles --------------------------------------------------------------------------------------


def test_a_rank_with_more_tokens_is_named(tmp_path: Path) -> None:
    status, _, [found] = decided(tmp_path, HOT)
    assert status == "found"
    assert (found.culprit.kind, found.culprit.id) == ("rank", "2")
    assert (found.basis, found.severity) == ("measured", "medium")
    assert [v.id for v in found.victims] != []
    assert "2" not in [v.id for v in found.victims]
    data = {k: v for e in found.evidence for k, v in e.data.items()}
    assert data["ns_per_token"] == pytest.approx(800, abs=data["ns_per_token_margin"])
    assert data["ns_per_token_margin"] < 400
    assert data["max_over_mean"] == pytest.approx(2.4 / 1.35, rel=0.05)
    assert data["explained_low"] > 0.5
    assert 0.9 < data["explained"] <= data["explained_high"] <= 1
    # Even tokens would take (max - mean) x 0.8 us away in each layer and step.
    expected = HOT.steps * HOT.layers * 4_000 * (2.4 / 5.4 - 1 / 4) * 800
    assert data["saved_ns"] == pytest.approx(expected, rel=0.25)
    assert any("stays on the same ranks" in e.text for e in found.evidence)
    assert found.remedies[0].flag.startswith("--init-expert-location")


def test_each_layer_may_have_a_hot_rank_of_its_own(tmp_path: Path) -> None:
    status, _, [found] = decided(tmp_path, replace(HOT, shares=BY_LAYER))
    assert status == "found"
    assert found.culprit.kind == "expert"
    layer, rank = (int(part.split()[1]) for part in found.culprit.id.split(", "))
    assert layer == rank
    named = {(e.data["layer"], e.data["rank"]) for e in found.evidence if "layer" in e.data}
    assert named == {(i, i) for i in range(4)}


def test_hot_spots_that_move_are_found_and_not_placed_once(tmp_path: Path) -> None:
    status, _, [found] = decided(tmp_path, replace(HOT, shares=BY_STEP, steps=24))
    assert status == "found"
    assert any("moves from pass to pass" in e.text for e in found.counter_evidence)
    assert not any("--init-expert-location" in r.flag for r in found.remedies)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"shares": (EVEN,)}, id="even but for chance"),
        pytest.param({"shares": (EVEN,), "noise": 0.3}, id="noise"),
        pytest.param({"token_ns": 0.0, "expert_ns": 900 * US}, id="time that does not follow tokens"),
        pytest.param({"token_ns": 0.0, "expert_ns": 900 * US, "noise": 0.3}, id="nor in noise"),
        pytest.param({"shares": (EVEN,), "slow": (rank_worlds.Slow(2, 2.0),)}, id="a slow device with even tokens"),
        pytest.param(
            {"token_ns": 10.0, "expert_ns": 900 * US, "slow": (rank_worlds.Slow(2, 2.0),)},
            id="a slow device that gets more tokens too",
        ),
    ],
)  # fmt: skip
def test_what_is_no_hot_expert_is_not_called_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    status, reason, findings = decided(tmp_path, *several(HOT, range(4), **changes))
    assert findings == []
    assert status in ("clear", "inconclusive"), reason


def test_a_slow_device_is_said_not_to_follow_tokens(tmp_path: Path) -> None:
    slow = replace(HOT, token_ns=10.0, expert_ns=900 * US, slow=(rank_worlds.Slow(2, 2.0),), steps=60)
    status, reason, _ = decided(tmp_path, slow)
    assert status == "clear"
    assert "balancing experts would not help" in reason


def test_what_a_hot_device_would_cost_is_not_told_from_two_alike_causes(tmp_path: Path) -> None:
    """Tokens that never change, on ranks that get the same otherwise: a slow device would look the same."""
    world = replace(
        HOT,
        routed=0,
        shares=(),
        tokens={0: 100, 1: 100, 2: 200, 3: 100},
        slow=(rank_worlds.Slow(2, 3.0),),
        expert_ns=400 * US,
    )
    status, reason, findings = decided(tmp_path, world)
    assert (status, findings) == ("inconclusive", [])
    assert "tokens vary too little" in reason


def test_two_ranks_are_told_by_what_changes_over_time(tmp_path: Path) -> None:
    two = replace(HOT, ranks=2, shares=(((1.0, 2.0),),), routed=2_000, steps=40)
    status, _, [found] = decided(tmp_path, two)
    assert status == "found"
    assert found.culprit.id == "1"
    slow = replace(two, shares=(((1.0, 1.0),),), slow=(rank_worlds.Slow(1, 1.8),))
    status, _, findings = decided(tmp_path / "slow", slow)
    assert (status, findings) == ("clear", [])


def test_without_tokens_the_cost_alone_decides_nothing(tmp_path: Path) -> None:
    status, reason, findings = decided(tmp_path, replace(HOT, tells_tokens=False))
    assert (status, findings) == ("inconclusive", [])
    assert "how many tokens each got" in reason


def test_dummy_batches_do_not_count(tmp_path: Path) -> None:
    _, _, [plain] = decided(tmp_path / "a", HOT)
    _, _, [found] = decided(tmp_path / "b", replace(HOT, dummies=2))
    lost, same = (next(e.data["lost_ns"] for e in f.evidence if "lost_ns" in e.data) for f in (found, plain))
    assert lost == pytest.approx(same, rel=0.1)


def test_a_recording_stands_for_tokens_that_profiles_lack(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    slots = np.tile(np.arange(8), (4, 1))

    def recorded(shares: Floats) -> pa.Table:
        parts = (rng.poisson(np.repeat(shares, 2, axis=1) * 50, (30, 4, 8)) for _ in range(4))
        return pa.concat_tables([loads(part, slots=slots, rank=rank) for rank, part in enumerate(parts)])

    skewed_alike = np.repeat(np.array(SKEWED), 4, axis=0)
    world = replace(HOT, tells_tokens=False, shares=(SKEWED,), steps=20)
    status, reason, findings = decided(tmp_path, world, expert_load=recorded(skewed_alike))
    # One rank is the busiest in all layers, and the others got alike: what tokens cost they do not say.
    assert (status, findings) == ("inconclusive", []), reason
    world = replace(world, shares=BY_LAYER)
    status, _, [found] = decided(tmp_path / "a", world, expert_load=recorded(np.array(BY_LAYER[0])))
    # Each rank takes longer in the layer in which it got more, which no slow device would.
    assert (status, found.basis) == ("found", "inferred")
    shares = np.array([[4.0, 3, 2, 1], [1, 2, 3, 4], [2, 4, 1, 3], [3, 1, 4, 2]])
    world = replace(world, shares=(tuple(map(tuple, shares.tolist())),))
    status, _, [found] = decided(tmp_path / "b", world, expert_load=recorded(shares))
    assert status == "found"
    assert found.basis == "inferred"
    assert any("recording at another time" in e.text for e in found.counter_evidence)
    assert any("instead of 1.60 x" in e.text for e in found.evidence)
    # A recording of other layers' ranks does not fit, and proves nothing.
    other = [loads(np.tile(rng.poisson(50, (30, 4, 8)), 1), slots=slots, rank=rank) for rank in range(4)]
    status, _, findings = decided(tmp_path / "c", world, expert_load=pa.concat_tables(other))
    assert findings == []


# -- many worlds, without the profiles around them --------------------------------------------------


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    """A diagnosed trace without anything: the views are there, and empty."""
    table = loads(np.zeros((1, 1, 1), np.int64))
    path = worlds.write(tmp_path_factory.mktemp("views") / "t", {"expert_load": table})
    with Trace(path, threads=1) as trace:
        diagnose(trace, Config())
        yield trace


def judged(
    trace: Trace, some: Sequence[tuple[Floats, Floats]], step_ns: float = 4e6
) -> list[tuple[Decision, dict[str, Any]]]:
    """The rule on worlds of work (ns) and tokens, rounds x layers x ranks, in steps that take so long in each layer beside it:
    a window for each, all asked about at once."""
    trace.connection.execute("DELETE FROM expert_work; DELETE FROM rank_rounds; DELETE FROM rank_windows")
    for window, (work, tokens) in enumerate(some):
        rounds, layers, ranks = work.shape
        step, layer, rank = (place.reshape(-1) for place in np.indices(work.shape))
        number = step * layers + layer
        columns = {
            "window": np.full(len(step), window), "group": [""] * len(step), "round": number, "rank": rank, "step": step,
            "layer": layer, "work_ns": work.reshape(-1).astype(np.int64),
        }  # fmt: skip
        spans = np.repeat(np.arange(rounds), ranks)
        told = pa.table({**columns, "tokens": pa.array(tokens.reshape(-1)), "recorded": [False] * len(step)})
        whole = work.max(axis=2).sum(axis=1) + layers * step_ns
        rows = {
            "window": np.full(len(spans), window), "rank": np.tile(np.arange(ranks), rounds), "step": spans,
            "start_ns": spans * 10**10, "end_ns": spans * 10**10 + whole[spans].astype(np.int64),
        }  # fmt: skip
        for name, table in {
            "expert_work": told,
            "rank_rounds": pa.table(rows),
            "rank_windows": pa.table({"window": [window], "world": ["w"]}),
        }.items():
            trace.insert(name, table)
    parameters = {name: value for name, value in RULE.limits.items() if f"${name}" in SQL}
    by_window = {r["window"]: r for r in trace.rows(SQL, parameters) if r["told_by"] == "work"}
    assert by_window.keys() == set(range(len(some)))
    return [(RULE.decide([by_window[i]], RULE.limits), by_window[i]) for i in range(len(some))]


@dataclass(frozen=True)
class Family:
    """Random worlds of one kind: shares of the ranks (spread of the logarithm), that stay for so many steps, and what time does."""

    skew: float = 0.0
    stays: int = 1_000
    per_token_ns: float = 1_000.0
    fixed_ns: float = 200_000.0
    #: Weights take at least so long, however few the tokens.
    least_ns: float = 0.0
    slow: float = 1.0
    noise: float = 0.05
    tokens: int = 1_000

    def world(self, seed: int) -> tuple[Floats, Floats, Floats]:
        """Work and tokens, and the work if all ranks got the same, rounds x layers x ranks."""
        rng = np.random.default_rng([7, seed])
        ranks, layers, steps = int(rng.choice([2, 4, 8])), 6, 24
        shares = np.exp(self.skew * rng.standard_normal((-(-steps // self.stays), layers, ranks)))
        shares = (shares / shares.mean(axis=2, keepdims=True)).repeat(self.stays, axis=0)[:steps]
        load = rng.gamma(8, 1 / 8, (steps, layers, 1))  # batches differ
        tokens = rng.poisson(self.tokens * load * shares).astype(float)
        device = np.ones(ranks)
        device[rng.integers(ranks)] = self.slow
        varies = device * np.exp(self.noise * rng.standard_normal(tokens.shape))
        even = np.broadcast_to(tokens.mean(axis=2, keepdims=True), tokens.shape)
        return self.takes(tokens) * varies, tokens, self.takes(even) * varies

    def takes(self, tokens: Floats) -> Floats:
        return np.maximum(self.fixed_ns + self.per_token_ns * tokens, self.least_ns)


QUIET = {
    "even": Family(),
    "noise": Family(noise=0.3),
    "few tokens": Family(tokens=8, per_token_ns=20_000),
    "slow device": Family(slow=1.6),
    "uneven, but weights decide": Family(skew=0.5, per_token_ns=20.0, fixed_ns=1e6),
    "uneven, weights decide, slow device": Family(skew=0.3, per_token_ns=20.0, fixed_ns=1e6, slow=1.8),
    "nothing follows anything": Family(skew=0.5, per_token_ns=0.0, fixed_ns=1e6, noise=0.3),
}
HOT_ONES = {
    "stays": Family(skew=0.6),
    "moves": Family(skew=0.6, stays=4),
    "stays, in noise": Family(skew=0.6, noise=0.2),
    "only many tokens cost time": Family(skew=0.8, fixed_ns=0.0, least_ns=1.2e6),
}


@pytest.mark.parametrize("name", QUIET)
def test_no_false_alarms(views: Trace, name: str) -> None:
    some = [QUIET[name].world(seed)[:2] for seed in range(25)]
    for seed, (decision, _) in enumerate(judged(views, some)):
        assert decision.status in ("clear", "inconclusive"), f"world {seed}: {decision.reason}"


@pytest.mark.parametrize("name", HOT_ONES)
def test_hot_experts_are_found_where_they_cost(views: Trace, name: str) -> None:
    statuses, said, saves = [], [], []
    some = [HOT_ONES[name].world(seed) for seed in range(25)]
    for (work, _, even), (decision, row) in zip(some, judged(views, [w[:2] for w in some]), strict=True):
        saved = (work.max(axis=2) - even.max(axis=2)).sum()
        # Worlds that lie near the threshold may go either way.
        if saved / row["step_ns"] > 0.08:
            statuses.append(decision.status)
            said.append(row["saved_ns"])
            saves.append(saved)
    assert len(statuses) > 10
    assert statuses.count("found") >= 0.9 * len(statuses)
    assert "clear" not in statuses
    # Where time bends, less is promised than would be saved.
    assert 0.75 * np.sum(saves) < np.sum(said) < 1.1 * np.sum(saves)


def test_the_stated_error_of_the_slope_holds(views: Trace) -> None:
    covered = []
    for family in (QUIET["even"], QUIET["noise"], HOT_ONES["stays"], HOT_ONES["moves"]):
        for _, row in judged(views, [family.world(seed)[:2] for seed in range(25)]):
            if not row["bent"]:
                covered.append(abs(row["ns_per_token"] - family.per_token_ns) <= row["ns_per_token_margin"])
    assert np.mean(covered) >= 0.93 - 0.05  # two standard errors of 100 worlds


# -- recordings alone ------------------------------------------------------------------------------


def skewed(steps: int, layers: int, experts: int, seed: int = 1, tokens: int = 500) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    return rng.poisson(rng.lognormal(0, 1, (layers, experts)) * tokens, (steps, layers, experts))


def sets(folder: Path, table: pa.Table) -> list[dict[str, Any]]:
    with worlds.aligned(folder, {"expert_load": table}) as trace:
        return trace.rows("FROM expert_sets ORDER BY set")


def alone(folder: Path, table: pa.Table) -> Decision:
    with Trace(worlds.write(folder, {"expert_load": table}), threads=1) as trace:
        diagnose(trace, Config())
        return judge(trace, RULE, SQL)


def test_a_recording_alone_says_how_uneven_but_not_what_it_costs(tmp_path: Path) -> None:
    decision = alone(tmp_path, loads(skewed(40, 4, 32)))
    assert decision.status == "inconclusive"
    [found] = decision.findings
    assert (found.status, found.severity, found.remedies) == ("inconclusive", "low", ())
    assert found.culprit.kind == "expert"


def test_even_routing_is_even(tmp_path: Path) -> None:
    for tokens, seed in ((2, 0), (20, 1), (2_000, 2)):
        counts = np.random.default_rng(seed).poisson(tokens, (40, 4, 32))
        decision = alone(tmp_path / str(seed), loads(counts))
        assert (decision.status, decision.findings) == ("clear", ()), decision.reason


def test_slots_say_where_experts_are_and_how_many_ranks(tmp_path: Path) -> None:
    slots = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7, 7, 6]])
    parts = []
    for rank in range(2):
        counts = np.full((16, 2, 10), 100)
        counts[:, 0, 9] = 900
        parts.append(loads(counts, slots=slots, rank=rank))
    [found] = sets(tmp_path, pa.concat_tables(parts))
    assert (found["ranks"], found["placement"], found["spare"], found["experts"]) == (2, "recorded", 2, 8)
    assert (found["rank_layer"], found["rank"]) == (0, 1)
    assert found["rank_ratio_worst"] == pytest.approx(1300 / 900)
    assert found["rank_ratio"] == pytest.approx((1300 + 500) / (900 + 500))
    assert (found["expert_layer"], found["expert"]) == (0, 0)
    assert found["gains"][0]["spare"] == 2
    assert found["gains"][0]["after"] == pytest.approx(1.0, abs=0.15)


def test_a_file_of_the_recorder_is_diagnosed(tmp_path: Path) -> None:
    case = Path(__file__).parent / "collectors" / "sglang_experts" / "stat" / "input.pt"
    ingest([case], tmp_path / "t", config=Config(), options=Options())
    with Trace(tmp_path / "t", threads=1) as trace:
        result = diagnose(trace, Config())
        [found] = trace.rows("FROM expert_sets")
    assert (found["steps"], found["layers"], found["experts"], found["tokens"]) == (2, 2, 4, 32)
    [check] = [c for c in result.checks if c.rule == RULE.name]
    # Eight tokens of a layer are too few to be more uneven than by chance.
    assert check.status == "clear"


def test_one_rank_of_several_says_nothing_of_ranks(tmp_path: Path) -> None:
    slots = np.tile(np.arange(8), (2, 1))
    [found] = sets(tmp_path, loads(np.full((16, 2, 8), 100), slots=slots, rank=3))
    assert found["ranks"] is None
    assert found["rank_ratio"] is None
    assert found["gains"] is None


@pytest.mark.parametrize(
    ("column", "value"),
    [("tokens", -5), ("layer", -1), ("layer", 1 << 40), ("expert", 1 << 40), ("expert", None), ("tokens", None), ("step", None)],
)  # fmt: skip
def test_rows_that_cannot_be_are_left_out(tmp_path: Path, column: str, value: int | None) -> None:
    table = loads(skewed(8, 2, 8))
    odd, whole = table.slice(0, 1), sum(filter(None, table["tokens"].to_pylist()))
    odd = odd.set_column(odd.schema.get_field_index(column), column, pa.array([value], pa.int64()))
    found = sets(tmp_path, pa.concat_tables([table, odd]))
    assert [s["experts"] for s in found] == [8]
    assert found[0]["tokens"] in (whole, whole + table["tokens"][0].as_py())


def test_older_tables_lack_columns(tmp_path: Path) -> None:
    table = loads(skewed(8, 2, 8)).drop_columns(["slot", "recorded_ns", "rank"])
    [found] = sets(tmp_path, table)
    assert found["experts"] == 8


def scraped(values: Sequence[Sequence[float]]) -> dict[str, list[dict[str, Any]]]:
    """Scrapes of SGLang's tokens by rank, of one layer: cumulative counts of the buckets 0, 1, 2, 3 and +Inf."""
    series = {
        "instance": "w",
        "series": "s",
        "name": "sglang:eplb_gpu_physical_count",
        "type": "histogram",
        "labels": [("layer", "5")],
    }
    rows = [
        {"instance": "w", "series": "s", "time_ns": worlds.START_NS + i, "value": 0.0, "le": [0, 1, 2, 3, float("inf")], "counts": list(np.cumsum([*v, 0]))}
        for i, v in enumerate(values)
    ]  # fmt: skip
    return {"series": [series], "metrics": rows}


def test_tokens_by_rank_come_from_metrics_too(tmp_path: Path) -> None:
    tables = scraped([[10.0, 500, 10, 10], [110, 600, 410, 110]])
    with worlds.aligned(tmp_path, tables) as trace:
        [found] = trace.rows("FROM expert_sets")
        by_rank = trace.rows("FROM expert_rank_loads ORDER BY rank")
    assert (found["kind"], found["ranks"], found["tokens"]) == ("metrics", 4, 700)
    assert [(r["layer"], round(r["load"], 3)) for r in by_rank] == [
        (5, 0.571),
        (5, 0.571),
        (5, 2.286),
        (5, 0.571),
    ]
    assert (found["rank_layer"], found["rank"]) == (5, 2)
    # After a restart all that is counted is new.
    with worlds.aligned(tmp_path / "b", scraped([[10.0, 500, 10, 10], [0, 0, 40, 0]])) as trace:
        [found] = trace.rows("FROM expert_sets")
    assert found["tokens"] == 40


@pytest.mark.parametrize("by_slot", [False, True])
def test_numbers_of_any_size_in_a_recording_end_nothing(by_slot: bool, tmp_path: Path) -> None:
    most = (1 << 63) - 1
    for name, values in {
        "beyond": (most, most, 5, 1 << 60),
        "largest": (1 << 44,) * 4,
        "negative": (-1, -most, 0, 0),
        "mixed": (1 << 44, 0, 0, 1),
    }.items():
        counts = np.tile(np.array(values, np.int64), (60, 300, 1))
        table = loads(
            counts, slots=np.tile(np.arange(4), (300, 1)) if by_slot else None, rank=most if by_slot else None
        )
        with Trace(worlds.write(tmp_path / f"{name}{by_slot}", {"expert_load": table}), threads=1) as trace:
            result = diagnose(trace, Config())
        check = next(c for c in result.checks if c.rule == RULE.name)
        assert check.status in ("clear", "inconclusive", "no-data"), (name, check.reason)
        assert "nan" not in " ".join(e.text for f in result.findings for e in f.evidence), name


def test_scraped_counts_that_no_server_has_say_nothing(tmp_path: Path) -> None:
    result = diagnosed(tmp_path, scraped([[1e300, 1, 1, 1], [float("inf"), 1e300, float("nan"), 1]]))
    assert next(c for c in result.checks if c.rule == RULE.name).status == "no-data"
