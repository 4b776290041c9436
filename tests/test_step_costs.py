"""The steps' table and the members' stays give what the bills say."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from real import CAPTURES, EXAMPLE, needs_captures
from worlds import START_NS, Row, aligned

from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.ingest import ingest
from tailscope.ledger.contrast import write_ledger
from tailscope.ledger.step_costs import write_member_sums, write_step_costs
from tailscope.source import Options
from tailscope.store import Trace

#: Per class and metric: seconds of the excess that lie in steps of `member_spans`, by a column of `step_costs`.
SHARED = """
SELECT m.klass, m.metric,
       sum(m.weight * c.{column} * (least(m.end_ns, c.end_ns) - greatest(m.start_ns, c.start_ns)) / (c.end_ns - c.start_ns)) AS seconds
FROM member_spans m
JOIN step_costs c ON c.instance = m.instance AND c.engine IS NOT DISTINCT FROM m.engine AND m.start_ns < c.end_ns AND m.end_ns > c.start_ns
GROUP BY ALL
"""
BILLED = """
SELECT klass, metric, sum(excess_s) AS seconds FROM excess WHERE component IN ('pause', 'unexplained') GROUP BY ALL
"""


#: The same of each step, as pairs of a step and a stay.
BY_STEP = """
SELECT c.lane, c.round, m.klass, m.metric,
       sum(m.weight * c.beyond_s * (least(m.end_ns, c.end_ns) - greatest(m.start_ns, c.start_ns)) / (c.end_ns - c.start_ns)) AS seconds
FROM chosen o JOIN step_costs c USING (lane, round)
JOIN member_spans m ON m.instance = c.instance AND m.engine IS NOT DISTINCT FROM c.engine AND m.start_ns < c.end_ns AND m.end_ns > c.start_ns
WHERE c.end_ns > c.start_ns
GROUP BY ALL
"""
HURT_BY = """
SELECT lane, round, h.klass, h.metric, h.seconds FROM (SELECT lane, round, unnest(hurt) AS h FROM hurt_by('chosen'))
"""


def diagnosed(source: Path, folder: Path) -> Iterator[Trace]:
    ingest([source], folder / "trace.parquet", config=Config(), options=Options())
    with Trace(folder / "trace.parquet") as trace:
        diagnose(trace, Config())
        yield trace


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    yield from diagnosed(EXAMPLE, tmp_path_factory.mktemp("example"))


def test_each_step_has_a_row_and_its_parts_are_all_of_it(example: Trace) -> None:
    (row,) = example.rows(
        "SELECT count(*) AS n, count(DISTINCT k) AS steps, max(abs(batch_s + ranks_s + beyond_s - tile_s)) AS off, "
        "min(least(batch_s, ranks_s, beyond_s)) AS least, bool_and(usable) AS usable FROM step_costs"
    )
    assert row["n"] == row["steps"] == example.count("steps")
    assert row["off"] < 1e-9
    assert row["least"] >= 0
    assert row["usable"]


@needs_captures
@pytest.mark.parametrize("name", ["run2-moe-tp2", "run3-moe-dp2-ep2-patched", "run5-dense-ngram-spec"])
def test_what_the_bills_call_pause_and_unexplained_is_what_lies_in_the_members_steps(
    name: str, tmp_path: Path
) -> None:
    for trace in diagnosed(CAPTURES / "vllm-cpu" / name, tmp_path):
        billed = {(r["klass"], r["metric"]): r["seconds"] for r in trace.rows(BILLED)}
        shared = {
            (r["klass"], r["metric"]): r["seconds"] for r in trace.rows(SHARED.format(column="beyond_s"))
        }
        assert len(shared) >= 4
        for key, seconds in shared.items():
            assert seconds == pytest.approx(billed.get(key, 0.0), abs=2e-3)


@needs_captures
def test_engines_in_step_show_what_each_others_prefill_takes(tmp_path: Path) -> None:
    """Two prompts of 3,000 tokens on engine 0, during whose chunks engine 1 decodes in steps of up to 0.84 s."""
    for trace in diagnosed(CAPTURES / "vllm-cpu" / "run3-moe-dp2-ep2-patched", tmp_path):
        by_engine = {
            r["engine"]: r
            for r in trace.rows(
                "SELECT engine, sum(by_others_s) AS dragged_s, max(by_others_s) AS longest_s, "
                "count(*) FILTER (WHERE k IS NULL) AS along FROM step_costs GROUP BY engine"
            )
        }
        assert by_engine[1]["dragged_s"] == pytest.approx(3.9, abs=0.4)
        assert by_engine[1]["longest_s"] == pytest.approx(0.74, abs=0.08)
        assert by_engine[0]["dragged_s"] == pytest.approx(0.7, abs=0.3)
        # Engine 0 had no work of its own in 102 steps of engine 1, which it reported to nobody.
        assert by_engine[0]["along"] == 102


def test_engines_without_requests_have_their_steps_too(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"instance": "a", "engine": 0, "iteration": i, "end_ns": START_NS + i * 10_000_000, "elapsed_ns": 9_000_000,
         "end_basis": "receipt", "decode_requests": 1 + i % 3, "running": 1 + i % 3, "prefill_tokens": 0}
        for i in range(60)
    ]  # fmt: skip
    with aligned(tmp_path, {"iterations": rows}) as trace:
        ledger, _ = write_ledger(trace, {}, (), None)
        write_step_costs(trace, ledger, {})
        (row,) = trace.rows(
            "SELECT count(*) AS n, bool_and(usable) AS usable, sum(tile_s) AS s FROM step_costs"
        )
        assert row["n"] == 60
        assert row["usable"]
        assert np.isclose(row["s"], 0.599, atol=1e-3)
        assert trace.count("member_spans") == 0


@pytest.mark.parametrize("seed", range(8))
def test_sums_over_time_give_what_pairs_of_steps_and_stays_give(seed: int, tmp_path: Path) -> None:
    """Two engines in step, one alone and one without a number; stays short and long, before, after and across steps, with
    ends that meet each other's and the steps'."""
    rng = np.random.default_rng(seed)
    engines = [(0, "a", 0), (0, "a", 1), (1, "b", 0), (2, "c", None)]
    steps: list[Row] = []
    for lane, instance, engine in engines:
        ends_ns = START_NS + np.cumsum(rng.integers(0, 50, 60)) * 1_000_000
        for round_, (start_ns, end_ns) in enumerate(pairwise(ends_ns)):
            steps.append({"lane": lane, "round": round_, "instance": instance, "engine": engine, "start_ns": int(start_ns),
                          "end_ns": int(end_ns), "beyond_s": float(rng.exponential(0.1))})  # fmt: skip
    stays: list[Row] = []
    for n in range(3_000):
        _, instance, engine = engines[rng.integers(4)]
        start_ns = START_NS + int(rng.integers(-500, 2_500)) * 1_000_000
        stays.append({"klass": "abc"[n % 3], "metric": ("TTFT", "ITL")[rng.integers(2)], "tail": True, "instance": instance,
                      "engine": engine, "start_ns": start_ns, "end_ns": start_ns + int(rng.integers(1, 400)) ** 2 * 10_000,
                      "weight": float(rng.normal())})  # fmt: skip
    with aligned(tmp_path, {"iterations": []}) as trace:
        ledger, _ = write_ledger(trace, {}, (), None)
        write_step_costs(trace, ledger, {})
        trace.insert("step_costs", pa.Table.from_pylist(steps))
        trace.insert("member_spans", pa.Table.from_pylist(stays))
        write_member_sums(trace)
        trace.connection.execute(
            "CREATE TEMP TABLE chosen AS SELECT DISTINCT lane, round FROM step_costs WHERE round % 3 = 0"
        )
        wanted, got = (
            {(r["lane"], r["round"], r["klass"], r["metric"]): r["seconds"] for r in trace.rows(sql)}
            for sql in (BY_STEP, HURT_BY)
        )
    assert len(wanted) > 300
    # Where no stay is left there is nothing but what rounding leaves.
    assert got.keys() >= wanted.keys()
    for key, seconds in got.items():
        assert seconds == pytest.approx(wanted.get(key, 0.0), abs=1e-9)
