"""`first-shape` knows batches by the sizes vLLM's graphs have unless told otherwise: engines with other sizes, which it cannot know."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "accuracy"))

from families import new_shapes

from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.model import Diagnosis
from tailscope.sim import lanes, written
from tailscope.sim.engine import simulate
from tailscope.store import Trace


def coarse(tokens: int) -> int:
    """Graphs for few sizes up to 64, beyond them whole chunks."""
    return -(-tokens // 8) * 8 if tokens <= 64 else -(-tokens // 512) * 512


def powers(tokens: int) -> int:
    return int(2 ** (tokens - 1).bit_length())


def finer(tokens: int) -> int:
    """No powers of two where the rule takes them for granted, and coarser where it takes steps of 8."""
    return -(-tokens // 32) * 32


def played(
    size: Callable[[int], int] | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, Diagnosis]:
    """Batches that something was compiled for, and the diagnosis; without a size nothing is."""
    scenario = new_shapes(np.random.default_rng(2), 1.0)
    if size is None:
        scenario = replace(scenario, faults=(), causes=())
    else:
        monkeypatch.setattr(lanes, "shape_of", size)
    outcome = simulate(scenario)
    written.write_trace(written.tables(outcome), folder / "trace.parquet")
    with Trace(folder / "trace.parquet") as trace:
        return int((outcome.engines[0].steps.pause_s > 0).sum()), diagnose(trace, Config())


@pytest.mark.parametrize("size", [coarse, powers, finer])
def test_engines_with_other_sizes_are_found(
    size: Callable[[int], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not each batch is, but none that nothing was compiled for."""
    compiled, diagnosis = played(size, tmp_path, monkeypatch)
    # Who came meanwhile is let go together.
    [found] = [
        f for f in diagnosis.findings if f.status == "found" and f.rule not in ("coincident-release", "pause")
    ]
    [check] = [c for c in diagnosis.checks if c.rule == "first-shape"]
    assert (found.rule, found.culprit.id) == ("first-shape", "0")
    assert compiled / 4 < int(check.reason.split()[0]) <= compiled


def test_the_same_load_without_compiling_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, diagnosis = played(None, tmp_path, monkeypatch)
    assert compiled == 0
    assert [f.rule for f in diagnosis.findings if f.status == "found"] == []
