"""A stop of an engine that nothing explains: found where anybody can notice it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.sim.engine import simulate
from tailscope.sim.scenario import Cost, Fault, Load, Scenario, Sizes
from tailscope.sim.written import tables, write_trace
from tailscope.store import Trace

CHAT = Load("chat", rate=8.0, prompt_tokens=Sizes(100, 0.3), output_tokens=Sizes(60, 0.4, 4, 300))


@pytest.mark.parametrize(
    ("length_s", "times", "status"),
    [(0.5, 1, "found"), (0.06, 1, "clear"), (0.06, 8, "found")],
)
def test_what_nobody_notices_is_no_stop(length_s: float, times: int, status: str, tmp_path: Path) -> None:
    """Eight short stops are noticed, as those of a garbage collector are: each makes a gap in some answers."""
    stops = tuple(
        Fault("pause", f"stop {i}", from_s=3.1 + 3.3 * i + 0.37 * i**2 % 1, length_s=length_s)
        for i in range(times)
    )
    scenario = Scenario((CHAT,), duration_s=30.0, seed=3, cost=Cost(noise=0.05), faults=stops)
    write_trace(tables(simulate(scenario)), tmp_path / "t.parquet")
    with Trace(tmp_path / "t.parquet") as trace:
        diagnosis = diagnose(trace, Config())
    [check] = [c for c in diagnosis.checks if c.rule == "pause"]
    assert check.status == status
    assert ("nobody notices" in check.reason) == (status == "clear")
