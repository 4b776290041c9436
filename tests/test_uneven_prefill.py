"""Engines that step together: a rank that is late because its engine has prefill is told from a slow one."""

from __future__ import annotations

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


@pytest.mark.parametrize(("engines", "slow", "factor"), [(2, 0, 1.6), (4, 1, 1.6), (4, 1, 1.0)])
def test_prefill_of_one_engine_makes_no_rank_slow(
    engines: int, slow: int, factor: float, tmp_path: Path
) -> None:
    faults = (Fault("slow-rank", "slow", rank=slow, factor=factor),) if factor > 1 else ()
    scenario = Scenario(
        (CHAT, DOCUMENTS),
        duration_s=15.0,
        seed=4,
        engine=Engine(data_parallel=engines, moe=True, max_num_batched_tokens=2_048, kv_blocks=20_000),
        ranks=Ranks(tensor_parallel=1, layers=3, emitter="nccl", spread=0.02),
        telemetry=Telemetry(client=False, profile=((0.0, 30.0),)),
        faults=faults,
    )
    outcome = simulate(scenario)
    write_trace(tables(outcome), tmp_path / "t.parquet")
    with Trace(tmp_path / "t.parquet") as trace:
        prepare(trace, Config(), Scope())
        said = {
            row["component"]: row["s"]
            for row in trace.rows("SELECT component, sum(ns) / 1e9 AS s FROM bill_lines GROUP BY ALL")
        }
    true = bills(outcome)
    whole = float(true.e2e_s[true.billed].sum())
    for components in PARTS.values():
        was = sum(float(true.component(name)[true.billed].sum()) for name in components)
        assert sum(said.get(name, 0.0) for name in components) == pytest.approx(was, abs=0.03 * whole)
    assert (said.get("straggler_wait", 0.0) < 0.03 * whole) == (factor == 1)
