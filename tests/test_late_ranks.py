"""A rank that is late because its engine has prefill, or by chance, is told from a slow one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tailscope.align import Scope
from tailscope.config import Config
from tailscope.engine import prepare
from tailscope.sim.engine import simulate
from tailscope.sim.scenario import Engine, Fault, Load, Ranks, Scenario, Sizes, Telemetry
from tailscope.sim.truth import bills
from tailscope.sim.written import tables, write_trace
from tailscope.store import Trace

CHAT = Load("chat", rate=16.0, prompt_tokens=Sizes(100.0, 0.3), output_tokens=Sizes(50.0, 0.4, 4, 300))
DOCUMENTS = Load("documents", rate=2.0, prompt_tokens=Sizes(5_000.0, 0.3), output_tokens=Sizes(20.0))
PARTS = {
    "straggler_wait": ("straggler_wait",),
    "others": (
        "others_prefill_before",
        "others_prefill_in_prefill",
        "others_prefill_in_decode",
        "queue_budget",
    ),
}


def said_and_true(scenario: Scenario, folder: Path) -> tuple[dict[str, float], dict[str, float], float]:
    """Seconds of `PARTS` in all bills, as the ledger says and as it was, and of all bills in all."""
    outcome = simulate(scenario)
    write_trace(tables(outcome), folder / "t.parquet")
    with Trace(folder / "t.parquet") as trace:
        prepare(trace, Config(), Scope())
        seconds = {
            row["component"]: row["s"]
            for row in trace.rows("SELECT component, sum(ns) / 1e9 AS s FROM bill_lines GROUP BY ALL")
        }
    true = bills(outcome)
    said = {part: sum(seconds.get(name, 0.0) for name in names) for part, names in PARTS.items()}
    was = {
        part: sum(float(true.component(name)[true.billed].sum()) for name in names)
        for part, names in PARTS.items()
    }
    return said, was, float(true.e2e_s[true.billed].sum())


def world(engine: Engine, tp: int, slow: int, factor: float) -> Scenario:
    return Scenario(
        (CHAT, DOCUMENTS),
        duration_s=15.0,
        seed=4,
        engine=replace(engine, max_num_batched_tokens=2_048, kv_blocks=20_000),
        ranks=Ranks(tensor_parallel=tp, layers=3, emitter="nccl", spread=0.02),
        telemetry=Telemetry(client=False, profile=((0.0, 30.0),)),
        faults=(Fault("slow-rank", "slow", rank=slow, factor=factor),) if factor > 1 else (),
    )


@pytest.mark.parametrize(("engines", "slow", "factor"), [(2, 0, 1.6), (4, 1, 1.6), (4, 1, 1.0)])
def test_prefill_of_one_engine_makes_no_rank_slow(
    engines: int, slow: int, factor: float, tmp_path: Path
) -> None:
    said, was, whole = said_and_true(
        world(Engine(data_parallel=engines, moe=True), 1, slow, factor), tmp_path
    )
    assert said == pytest.approx(was, abs=0.03 * whole)
    assert (said["straggler_wait"] < 0.03 * whole) == (factor == 1)


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_ranks_that_are_last_by_chance_are_not_late(factor: float, tmp_path: Path) -> None:
    said, was, whole = said_and_true(world(Engine(), 4, 2, factor), tmp_path)
    assert said == pytest.approx(was, abs=0.03 * whole)
    assert (said["straggler_wait"] == 0) == (factor == 1)
