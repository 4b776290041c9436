"""What the page shows, against what the trace holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import worlds
from real import EXAMPLE, ROOT
from test_experts import loads

from tailscope.align import Scope
from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.ingest import ingest
from tailscope.report import experts, iterations, latency, ranks, requests
from tailscope.report.build import page
from tailscope.report.columns import few_digits, numbered
from tailscope.source import Options
from tailscope.store import Trace


def prepared(source: Path, folder: Path) -> Trace:
    path = folder / "trace.parquet"
    ingest([source], path, config=Config(), options=Options())
    trace = Trace(path)
    diagnose(trace, Config())
    return trace


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    with prepared(EXAMPLE, tmp_path_factory.mktemp("example")) as trace:
        yield trace


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    with prepared(ROOT / "tests/captures/scheduled", tmp_path_factory.mktemp("scheduled")) as trace:
        yield trace


def ttfts(trace: Trace) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in trace.rows(
        "SELECT klass, ttft_ns / 1e9 AS s FROM joined WHERE billed AND ttft_ns >= 0 AND e2e_ns >= ttft_ns"
    ):
        found.setdefault(row["klass"], []).append(row["s"])
    return found


# -- distributions and the sample ------------------------------------------------------------------


def test_distributions_are_those_of_all_requests(example: Trace) -> None:
    of = latency.gather(example, Scope(), [])
    curves = of.curves["TTFT"]
    expected = ttfts(example)
    assert {k: c["n"] for k, c in curves.items()} == {k: len(v) for k, v in expected.items()}
    for klass, values in expected.items():
        for q, s in zip(curves[klass]["q"], curves[klass]["s"], strict=True):
            assert s == pytest.approx(np.quantile(values, q), rel=1e-3)
        assert curves[klass]["s"][-1] == pytest.approx(max(values), rel=1e-3)


def test_a_small_trace_is_there_whole(example: Trace) -> None:
    of = latency.gather(example, Scope(), [])
    assert of.n == of.sampled == len(of.sample["at"]) and not of.is_sample
    assert set(of.sample["weight"]) == {1}


def test_a_sample_keeps_the_slowest_and_weighs_the_rest(
    example: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "MOST_SAMPLED", 120)
    monkeypatch.setattr(latency, "MOST_TAIL", 12)
    monkeypatch.setattr(latency, "LEAST_REST", 2)
    of = latency.gather(example, Scope(), [])
    assert of.is_sample and 60 < of.sampled < 180
    weights = np.array(of.sample["weight"], float)
    values = ttfts(example)
    for k, name in enumerate(of.classes):
        mine = np.array(of.sample["klass"]) == k
        # What a class's sample stands for is the class.
        assert weights[mine].sum() == pytest.approx(len(values[name]), rel=1e-3)
        # Its slowest by TTFT are in it, each for itself.
        slowest = max(values[name])
        assert max(np.array(of.sample["ttft"])[mine & (weights == 1)]) == pytest.approx(slowest, rel=1e-3)
    again = latency.gather(example, Scope(), [])
    assert again.sample == of.sample


def test_a_class_alone(example: Trace) -> None:
    of = latency.gather(example, Scope(klass="<8k"), [])
    assert of.classes == ["<8k"] and of.n == len(ttfts(example)["<8k"])


def test_quantiles_over_time_are_withheld_where_requests_are_few(example: Trace) -> None:
    of = latency.gather(example, Scope(), [])
    rows = of.times["TTFT"]
    assert sum(rows["n"]) == of.n
    for n, p50, p99 in zip(rows["n"], rows["p50"], rows["p99"], strict=True):
        assert (p50 is None) == (n < 20) and p99 is None


def test_names_beyond_the_most_are_counted_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "MOST_NAMES", 2)
    names, numbers = latency._names(["b", "a", "b", None, "a", "b", "c"])
    assert names == ["a", "b", "other"]
    assert numbers == [1, 0, 1, 2, 0, 1, 2]


# -- requests ----------------------------------------------------------------------------------------


def of_request(trace: Trace, request_id: str) -> dict[str, Any]:
    latency.gather(trace, Scope(), [])
    [row] = trace.rows("SELECT rid FROM joined WHERE request_id = $id", {"id": request_id})
    followed = requests.gather(trace, Scope(), [row["rid"]])
    assert followed.first == row["rid"]
    [found] = [r for r in requests.data(followed) if r["id"] == request_id]
    return found


def test_bills_sum_to_the_latency(example: Trace) -> None:
    latency.gather(example, Scope(), [])
    for request in requests.gather(example, Scope(), []).requests:
        assert sum(s for _, s in request["bill"]) == pytest.approx(request["e2e_ns"] / 1e9, abs=1e-8)


def test_who_shared_the_steps_is_what_the_scheduler_told(scheduled: Trace) -> None:
    """cmpl-B-burst-0089 was preempted once. Of those beside it 0082 and others were too, and computed their prompts again."""
    found = of_request(scheduled, "cmpl-B-burst-0089-0")
    assert found["preemptions"] == 1
    assert {phase: len(spans) for phase, spans in found["runs"].items()} == {
        "prefill": 1,
        "decode": 2,
        "recompute": 1,
    }
    # The gap between its runs is what its bill calls preempted.
    (_, paused), (resumed, _) = found["runs"]["decode"]
    assert resumed - paused == pytest.approx(dict(found["bill"])["preempted"], rel=0.05)
    first = found["beside"][0]
    assert (first["id"], first["basis"]) == ("cmpl-B-burst-0082-0", "told")
    assert len(first["computed"]) == 2
    # All of its prompt, and what it computed again, lies in this request's time.
    [told] = scheduled.rows(
        "SELECT sum(tokens * (iteration_last - iteration_first + 1)) AS tokens FROM schedule "
        "WHERE request_id = 'cmpl-B-burst-0082-0' AND phase <> 'decode'"
    )
    assert first["prefill"] == told["tokens"] == 447


def test_who_shared_the_steps_is_else_inferred(example: Trace) -> None:
    latency.gather(example, Scope(), [])
    followed = requests.gather(example, Scope(), [])
    assert not followed.exact
    beside = [o for r in requests.data(followed) for o in r["beside"]]
    assert beside and {o["basis"] for o in beside} == {"inferred"}
    for request in requests.data(followed):
        for other in request["beside"]:
            for start, end in (*other["computed"], *other["decoded"]):
                assert -0.001 <= start <= end <= request["e2e"] + 0.001


def test_steps_of_a_request_lie_in_its_time(example: Trace) -> None:
    latency.gather(example, Scope(), [])
    for request in requests.data(requests.gather(example, Scope(), [])):
        steps = request["steps"]
        assert steps and len(steps["at"]) <= requests.MOST_STEPS
        assert steps["at"][-1] <= request["e2e"] + 0.001
        assert steps["at"][0] + steps["took"][0] >= -0.001


# -- engines, ranks, experts -------------------------------------------------------------------------


@pytest.mark.parametrize("most", [10, 100_000])
def test_steps_are_all_counted(example: Trace, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(iterations, "MOST_STEPS", most)
    found = iterations.gather(example)
    [engine] = found.engines
    assert engine.binned == (most == 10)
    assert sum(engine.rows["steps"]) == example.count("steps")
    [truth] = example.rows(
        "SELECT sum(prefill_tokens)::DOUBLE AS prefill, max(tile_ns) / 1e9 AS longest, max(kv_usage) AS kv FROM steps"
    )
    computed = sum(n * tokens for n, tokens in zip(engine.rows["steps"], engine.rows["prefill"], strict=True))
    assert computed == pytest.approx(truth["prefill"], rel=1e-2)
    assert max(engine.rows["took"]) == pytest.approx(truth["longest"], rel=1e-3)
    assert max(v for v in engine.rows["kv"] if v is not None) == pytest.approx(truth["kv"], rel=1e-3)


def test_ranks_by_step_sum_to_the_ranks(tmp_path: Path) -> None:
    with prepared(ROOT / "examples/moe-straggler", tmp_path) as trace:
        windows = ranks.gather(trace)
        assert windows
        for window in windows:
            told = trace.rows(
                'SELECT rank, sum(wait_ns) / 1e9 AS waited FROM rank_rounds WHERE "window" = $w AND at_step IS NOT NULL GROUP BY rank',
                {"w": window.number},
            )
            for row in told:
                cells = zip(window.steps["rank"], window.steps["waited"], strict=True)
                assert sum(s for rank, s in cells if rank == row["rank"]) == pytest.approx(
                    row["waited"], rel=1e-3
                )
        # The capture's second rank was slowed down.
        worst = max(windows, key=lambda w: max(r["own"] for r in w.ranks))
        assert max(worst.ranks, key=lambda r: r["own"])["rank"] == 1
        assert "rank 1 was late by its own work most" in ranks._says(worst)


def test_experts_over_an_even_share(tmp_path: Path) -> None:
    counts = np.array([[[100, 300, 0, 0], [50, 50, 50, 50]]])
    with Trace(worlds.write(tmp_path, {"expert_load": loads(counts)})) as trace:
        diagnose(trace, Config())
        [grid, *_] = experts.gather(trace)
    assert (grid.of, grid.layers, grid.places) == ("expert", [0, 1], [0, 1, 2, 3])
    assert grid.z == [[1, 3, 0, 0], [1, 1, 1, 1]]
    assert grid.hottest == (3, 0, 1)


# -- pages of little -----------------------------------------------------------------------------------


def test_a_trace_of_ranks_alone_says_what_is_missing(tmp_path: Path) -> None:
    counts = np.array([[[100, 300, 0, 0]]])
    with Trace(worlds.write(tmp_path, {"expert_load": loads(counts)})) as trace:
        made = page(trace, diagnose(trace, Config()), Scope())
    for text in (
        "No request has a latency.",
        "Nothing tells of the engine",
        "No two ranks were profiled at one time.",
        "Expert 1 of layer 0 has most: 3 times an even share.",
    ):
        assert text in made
    assert 'data-chart="dist"' not in made and 'data-chart="experts"' in made


def test_numbers_have_few_digits() -> None:
    assert (
        json.dumps([few_digits(v) for v in (0.123456, 2.0, 12345.6, float("nan"))])
        == "[0.1235, 2, 12350, null]"
    )
    assert numbered(["a", "b", "a"]) == (["a", "b"], [0, 1, 0])


def test_only_the_largest_of_many_classes_are_in_charts(
    example: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "MOST_CLASSES", 1)
    of = latency.gather(example, Scope(), [])
    assert of.classes == ["<512"] and of.smaller == (1, len(ttfts(example)["<8k"]))
    assert of.left_out == {"aborted": 3, "error": 3}
