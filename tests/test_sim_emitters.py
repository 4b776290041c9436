"""What profiles of each emitter look like: graphs, DeepEP's exchanges, kernels that say nothing; and what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import worlds
from test_sim_ranks import SEEN, SLOW, found, outcome, said, scenario

from tailscope.align import Scope
from tailscope.errors import UsageError
from tailscope.ranks.phases import write_phases
from tailscope.ranks.windows import find_windows
from tailscope.sim import scenario_file
from tailscope.sim.emit.kineto_forms import FORMS
from tailscope.sim.outcome import Outcome
from tailscope.sim.scenario import Fault, Telemetry
from tailscope.sim.tables_ranks import profile_tables
from tailscope.store import Trace

GATHER: dict[str, Any] = {"engines": 2, "tp": 2, "moe": True}
EXCHANGE: dict[str, Any] = {**GATHER, "exchange": "all-to-all"}
SHAPES = {name: EXCHANGE if name.startswith("deepep") else GATHER for name in FORMS}
PROFILED = Telemetry(profile=((0.1, 0.3),))


def made(emitter: str, **changes: Any) -> Outcome:
    shape = {**SHAPES[emitter], "name": emitter, "emitter": emitter, "layers": 3, "telemetry": PROFILED}
    return outcome(scenario(**{**shape, **changes}))


def events_of(emitter: str, rank: int = 0, **changes: Any) -> pa.Table:
    events = profile_tables(made(emitter, **changes))["rank_events"]
    return events.filter(pc.field("rank") == rank).sort_by("start_ns")


def kernels(events: pa.Table) -> pa.Table:
    return events.filter(pc.field("category") == "kernel")


def replayed(events: pa.Table) -> set[int]:
    """Steps with a graph."""
    steps = events.filter(pc.field("name") == "cudaGraphLaunch")["step"].to_pylist()
    return {step for step in steps if step is not None}


@pytest.mark.parametrize("emitter", ["graph", "deepep-ll"])
def test_decodes_are_replayed_from_one_launch(emitter: str) -> None:
    events = events_of(emitter)
    steps = replayed(events)
    iterations = profile_tables(made(emitter))["iterations"].filter(pc.field("rank") == 0).to_pylist()
    assert steps == {row["iteration"] for row in iterations if not row["prefill_tokens"]}
    assert 3 < len(steps) < len(iterations)
    for row in iterations:
        step = row["iteration"]
        mine = events.filter(pc.field("step") == step)
        assert mine.filter(pc.field("category") == "cpu_op").num_rows == 0 or step not in steps
        ran = kernels(mine)
        launches = len(set(ran["launch_ns"].to_pylist()))
        assert launches == (1 if step in steps else ran.num_rows)
        assert set(ran["layer"].to_pylist()) == {0, 1, 2}
        assert np.all(ran["launch_ns"].to_numpy() < ran["start_ns"].to_numpy())
    assert set(events["seq"].to_pylist()) == set(events["group"].to_pylist()) == {None}


def test_a_step_whose_host_was_late_within_it_was_not_replayed() -> None:
    late = Fault("host-slow", rank=0, length_s=0.002, phase="expert", layers=(1,))
    steps = [replayed(events_of("graph", rank, faults=(late,))) for rank in (0, 1)]
    assert not steps[0]
    assert len(steps[1]) > 3


def test_a_low_latency_dispatch_is_sent_then_received() -> None:
    ran = kernels(events_of("deepep-ll"))
    dispatch = ran.filter(pc.field("phase") == "dispatch")
    assert dispatch["collective"].to_pylist() == [None, "all_to_all"] * (dispatch.num_rows // 2)
    assert dispatch["duration_ns"].to_numpy()[::2].max() <= 3_000
    start, end = (
        dispatch["start_ns"].to_numpy(),
        pc.add(dispatch["start_ns"], dispatch["duration_ns"]).to_numpy(),
    )
    assert np.all(start[1::2] == end[::2])  # fmt: skip
    combine = ran.filter(pc.field("phase") == "combine")
    assert set(combine["collective"].to_pylist()) == {"all_to_all"}
    assert 2 * combine.num_rows == dispatch.num_rows


def test_a_normal_dispatch_waits_in_its_notification() -> None:
    """All ranks leave the barrier at one time; the late one has the shortest; moving takes each about as long."""
    late = Fault("slow-rank", rank=1, factor=3.0, phase="attention")
    tables = profile_tables(made("deepep-ht", faults=(late,)))["rank_events"]
    ends, stays, moves = [], [], []
    for rank in range(4):
        ran = kernels(tables.filter(pc.field("rank") == rank)).sort_by("start_ns")
        barrier = ran.filter(pc.field("collective") == "barrier")
        assert all("notify_dispatch" in str(name) for name in barrier["name"].to_pylist())
        ends.append(pc.add(barrier["start_ns"], barrier["duration_ns"]).to_numpy())
        stays.append(barrier["duration_ns"].to_numpy())
        exchange = ran.filter((pc.field("collective") == "all_to_all") & (pc.field("phase") == "dispatch"))
        assert exchange["start_ns"].to_numpy().tolist() == ends[-1].tolist()
        moves.append(exchange["duration_ns"].to_numpy())
    assert np.ptp(np.array(ends), axis=0).max() <= 1
    assert np.mean(np.argmin(np.array(stays), axis=0) == 1) > 0.5
    assert np.median(moves) < np.median(np.array(stays).max(axis=0)) / 3


@pytest.mark.parametrize("emitter", ["custom", "graph", "deepep-ht"])
def test_kernels_without_metadata_are_told_by_their_names(emitter: str) -> None:
    ran = kernels(events_of(emitter))
    assert ran["bytes_in"].null_count == ran["group"].null_count == ran["dtype"].null_count == ran.num_rows
    reduces = ran.filter(pc.field("collective") == "all_reduce")
    assert {str(name).split("<")[0] for name in reduces["name"].to_pylist()} == {"void vllm::cross_device_reduce_1stage"}  # fmt: skip
    assert {"dispatch", "combine", "collective", "attention", "expert"} == set(ran["phase"].to_pylist())


@pytest.mark.parametrize("emitter", list(FORMS))
def test_the_phases_of_a_step_are_its_span(emitter: str, tmp_path: Path) -> None:
    path = worlds.write(tmp_path, profile_tables(made(emitter)))
    with Trace(path) as trace:
        write_phases(trace, find_windows(trace, Scope()))
        broken = trace.rows(
            "SELECT i.* FROM rank_idle i LEFT JOIN (SELECT \"window\", rank, step, sum(exposed_ns) AS exposed FROM rank_phases "
            "GROUP BY ALL) p USING (\"window\", rank, step) WHERE p.exposed IS DISTINCT FROM i.busy_ns "
            "OR i.span_ns <> i.busy_ns + i.beside_ns + i.inner_idle_ns OR i.unlaunched > 0 OR i.launch_wait_ns IS NULL"
        )  # fmt: skip
        assert broken == []
        [(steps, layers)] = trace.connection.execute(
            "SELECT count(DISTINCT (rank, step)), count(DISTINCT layer) FROM rank_phases"
        ).fetchall()
        assert layers == 3
        idle = trace.count("rank_idle")
        assert idle == 0 if emitter == "gloo" else idle > 20 and steps >= idle


@pytest.mark.parametrize("emitter", ["deepep-ll", "deepep-ht"])
def test_the_slow_rank_is_named_and_nobody_else(emitter: str, tmp_path: Path) -> None:
    healthy = scenario(**EXCHANGE, name=emitter, emitter=emitter, layers=2, telemetry=SEEN)
    slow = scenario(
        **EXCHANGE, name=f"{emitter} slow", emitter=emitter, layers=2, telemetry=SEEN,
        faults=(Fault("slow-rank", rank=SLOW.rank, factor=SLOW.factor, phase="expert"),),
    )  # fmt: skip
    findings = found(tmp_path, [healthy, slow])
    assert [f for f in findings[healthy.name] if f.severity != "low"] == []
    assert said(findings[slow.name]) == [(str(SLOW.rank), "persistent", "expert compute of 2 layers")]


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ({"emitter": "rccl"}, "emitter: must be one of"),
        ({"emitter": "deepep-ll"}, "emitter: deepep-ll exchanges tokens of experts; set exchange = all-to-all"),
        ({"emitter": "graph", "exchange": "all-to-all"}, "emitter: graph gathers and scatters"),
    ],
)  # fmt: skip
def test_what_an_emitter_cannot_show_is_refused(ranks: dict[str, Any], told: str) -> None:
    whole = {"load": [{"name": "a"}], "engine": {"data_parallel": 2, "moe": True}, "ranks": ranks}
    with pytest.raises(UsageError, match=told):
        scenario_file.parse(whole, Path(), "s.toml")
