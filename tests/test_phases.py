"""Phases and idle time of ranks: every instant of a step is exposed once, whatever overlaps; on made events and real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_worlds
import worlds
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from real import CAPTURES, CORPUS, needs_captures, needs_corpus

from tailscope.align import Scope
from tailscope.config import Config
from tailscope.ingest import ingest
from tailscope.ranks.phases import ON_CPU, ON_GPU, idle_times, phase_times, write_phases
from tailscope.ranks.windows import find_windows
from tailscope.schema import BY_NAME
from tailscope.source import Options
from tailscope.store import Trace

Events = list[tuple[int, int, int, int, int, int]]
COLUMNS = ("start_ns", "end_ns", "step", "layer", "phase", "launch_ns")
START_NS, US = worlds.START_NS, 1_000


@st.composite
def some_events(draw: st.DrawFn) -> Events:
    """(start, end, step, layer, phase, launch), steps -1 to 3 that overlap at will."""
    count = draw(st.integers(1, 25))
    event = st.tuples(
        st.integers(0, 60), st.integers(0, 20), st.integers(-1, 3), st.integers(-1, 2), st.integers(0, 7), st.integers(-1, 60)
    )  # fmt: skip
    events = [draw(event) for _ in range(count)]
    return sorted((s, s + d, step, layer, phase, launch) for s, d, step, layer, phase, launch in events)


def columns(events: Events) -> dict[str, NDArray[np.int64]]:
    table = np.array(events, np.int64).reshape(-1, len(COLUMNS))
    return {name: table[:, i] for i, name in enumerate(COLUMNS)}


@pytest.mark.parametrize("names", [ON_GPU, ON_CPU], ids=["gpu", "cpu"])
@given(events=some_events())
def test_every_instant_of_a_step_is_exposed_once(names: tuple[str, ...], events: Events) -> None:
    found = phase_times(columns(events), names)
    rows = {
        (int(s), int(k), str(p)): (int(b), int(e), int(h))
        for s, k, p, b, e, h in zip(*found.values(), strict=True)
    }
    assert len(rows) == len(found["step"])
    filler = {i for i, name in enumerate(names) if names.index(name) != i}
    busy: dict[tuple[int, int, str], int] = {}
    exposed: dict[tuple[int, int, str], int] = {}
    for now in range(81):
        for step in range(-1, 4):
            running = [e for e in events if e[0] <= now < e[1] and e[2] == step]
            groups = {(e[2], e[3], names[e[4]]) for e in running if e[4] not in filler}
            if running:
                first = min(e[4] for e in running)
                # Of one phase the layer that began first is the one waited for.
                reaching = [e for e in running if e[4] == first]
                owner = next(e for e in events if e in reaching)
                key = owner[2], owner[3], names[owner[4]]
                exposed[key] = exposed.get(key, 0) + 1
                groups |= {key}
            for group in groups:
                busy[group] = busy.get(group, 0) + 1
    assert {key: row[0] for key, row in rows.items()} == busy
    assert {key: row[1] for key, row in rows.items() if row[1]} == exposed
    assert all(h == b - e >= 0 for b, e, h in rows.values())


@given(events=some_events())
def test_a_steps_span_is_its_work_and_its_idle_time(events: Events) -> None:
    found = idle_times(columns(events))
    phases = phase_times(columns(events), ON_GPU)
    busy = {now for now in range(81) for e in events if e[0] <= now < e[1]}
    ends: dict[int, int] = {}
    steps = sorted({e[2] for e in events if e[2] >= 0})
    assert found["step"].tolist() == steps
    until = -1
    for i, step in enumerate(steps):
        mine = [e for e in events if e[2] == step]
        first, last = min(e[0] for e in mine), max(e[1] for e in mine)
        row = {name: int(values[i]) for name, values in found.items()}
        assert row["span_ns"] == last - first
        assert row["span_ns"] == row["busy_ns"] + row["beside_ns"] + row["inner_idle_ns"]
        assert row["busy_ns"] == int(phases["exposed_ns"][phases["step"] == step].sum())
        inside = {now for now in range(first, last) if now not in busy}
        assert row["inner_idle_ns"] == len(inside)
        assert row["kernels"] == len(mine)
        assert row["unlaunched"] == sum(e[5] < 0 for e in mine)
        between = {now for now in range(until, first) if now not in busy} if until >= 0 else set()
        if step - 1 in ends:
            assert row["gap_before_ns"] == len(between)
        else:
            assert row["gap_before_ns"] == row["gap_launch_wait_ns"] == -1
            between = set()

        def waits(idle: set[int]) -> int:
            """Instants at which the next event had not been launched yet."""
            nexts = (min((e for e in events if e[0] > now), key=lambda e: e[0]) for now in sorted(idle))
            return sum(nxt[5] >= 0 and now < nxt[5] for now, nxt in zip(sorted(idle), nexts, strict=True))

        if row["unlaunched"] == len(mine):
            assert row["launch_wait_ns"] == -1
        else:
            assert row["launch_wait_ns"] == waits(inside | between)
            assert row["gap_launch_wait_ns"] in (-1, waits(between))
        until = max(until, last)
        ends[step] = last


# -- tables ---------------------------------------------------------------------------------------

GPU_ROW = {"instance": "w", "source": "a", "rank": 0, "world": "w", "category": "kernel"}


def trace_of(folder: Path, rows: list[dict[str, Any]], steps: list[tuple[int, int]] = []) -> Path:  # noqa: B006
    """A trace of one profile; times in µs."""
    shown = [
        {
            **GPU_ROW,
            **row,
            "start_ns": START_NS + row["start_ns"] * US,
            "duration_ns": row["duration_ns"] * US,
            "launch_ns": START_NS + row["launch_ns"] * US if "launch_ns" in row else None,
        }
        for row in rows
    ]
    tables = {
        "rank_events": BY_NAME["rank_events"].batch({c: [r.get(c) for r in shown] for c in {c for r in shown for c in r}}),
        "profiles": BY_NAME["profiles"].batch(
            {"instance": ["w"], "source": ["a"], "rank": [0], "first_ns": [START_NS], "last_ns": [START_NS + 10_000 * US], "steps": [2], "events": [len(rows)]}
        ),
    }  # fmt: skip
    if steps:
        tables["iterations"] = BY_NAME["iterations"].batch(
            {
                "instance": "w", "source": "a", "rank": 0, "iteration": list(range(len(steps))), "end_basis": "measured",
                "start_ns": [START_NS + s * US for s, _ in steps], "end_ns": [START_NS + e * US for _, e in steps],
            }
        )  # fmt: skip
    return worlds.write(folder, tables)


def tables_of(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    with Trace(path) as trace:
        write_phases(trace, find_windows(trace, Scope()))
        phases = trace.rows('SELECT * FROM rank_phases ORDER BY "window", rank, step, layer, phase')
        return phases, trace.rows('SELECT * FROM rank_idle ORDER BY "window", rank, step')


def times(rows: list[dict[str, Any]]) -> dict[tuple[int | None, int | None, str], tuple[int, int]]:
    """(busy, exposed) in µs by step, layer and phase."""
    return {(r["step"], r["layer"], r["phase"]): (r["busy_ns"] // US, r["exposed_ns"] // US) for r in rows}


def kernel(phase: str | None, start: int, length: int, **more: Any) -> dict[str, Any]:
    return {
        "phase": phase,
        "start_ns": start,
        "duration_ns": length,
        "step": 0,
        "layer": 0,
        "stream": 7,
        **more,
    }


def test_overlapped_micro_batches_are_not_summed_twice(tmp_path: Path) -> None:
    """Two batches take turns: the exchange of one runs behind the experts and attention of the other."""
    rows = [
        kernel("attention", 0, 100),
        kernel("dispatch", 100, 80, collective="all_to_all", stream=9),
        kernel("attention", 100, 100),  # of the other batch: hides the dispatch
        kernel("dispatch", 200, 150, collective="all_to_all", stream=9),
        kernel("expert", 200, 90),  # hides 90 of the second dispatch
        kernel("combine", 350, 50, collective="all_to_all", stream=9),  # nothing beside it
    ]
    phases, [idle] = tables_of(trace_of(tmp_path, rows))
    assert times(phases) == {
        (0, 0, "attention"): (200, 200),
        (0, 0, "dispatch"): (230, 60),
        (0, 0, "expert"): (90, 90),
        (0, 0, "combine"): (50, 50),
    }
    assert idle["span_ns"] == 400 * US == sum(r["exposed_ns"] for r in phases)
    assert idle["inner_idle_ns"] == 0


def test_kernels_without_a_phase_between_dispatch_and_combine_are_the_experts(tmp_path: Path) -> None:
    rows = [
        kernel(None, 0, 10),
        kernel("dispatch", 10, 20, collective="all_to_all"),
        kernel(None, 30, 5),
        kernel("expert", 35, 20),
        kernel(None, 55, 6),
        kernel("combine", 61, 9, collective="all_to_all"),
        kernel(None, 70, 3),
        # Attention begins before the combine: another batch runs in between.
        kernel("dispatch", 80, 10, collective="all_to_all", layer=1),
        kernel(None, 90, 7, layer=1),
        kernel("attention", 97, 3, layer=1),
        kernel(None, 100, 4, layer=1),
        kernel("combine", 104, 6, collective="all_to_all", layer=1),
    ]
    found = times(tables_of(trace_of(tmp_path, rows))[0])
    assert found[0, 0, "expert"] == (31, 31)
    assert found[0, 0, "other"] == (13, 13)
    assert found[0, 1, "other"] == (11, 11)
    assert (0, 1, "expert") not in found


def test_idle_time_is_the_hosts_where_the_next_kernel_was_not_launched(tmp_path: Path) -> None:
    rows = [
        kernel(None, 100, 50, launch_ns=10),
        kernel(None, 180, 20, launch_ns=170),  # 20 of 30 before its launch
        kernel(None, 230, 20, launch_ns=20),  # launched long before: it waited for something else
        # Work of no step between the two, then 40 idle, of which 30 before the launch.
        kernel(None, 260, 40, launch_ns=30, step=None),
        kernel(None, 340, 60, launch_ns=330, step=1),
        kernel(None, 400, 10, launch_ns=330, step=1),  # of one graph
    ]
    phases, [first, second] = tables_of(trace_of(tmp_path, rows, [(0, 190), (320, 350)]))
    for row in (first, second):
        for name in ("window", "rank"):
            row.pop(name)
    assert first == {
        "step": 0, "span_ns": 150 * US, "busy_ns": 90 * US, "beside_ns": 0, "inner_idle_ns": 60 * US, "gap_before_ns": None,
        "launch_wait_ns": 20 * US, "gap_launch_wait_ns": None, "launches": 3, "kernels": 3, "unlaunched": 0, "cpu_step_ns": 190 * US,
    }  # fmt: skip
    assert second == {
        "step": 1, "span_ns": 70 * US, "busy_ns": 70 * US, "beside_ns": 0, "inner_idle_ns": 0, "gap_before_ns": 50 * US,
        "launch_wait_ns": 30 * US, "gap_launch_wait_ns": 30 * US, "launches": 1, "kernels": 2, "unlaunched": 0, "cpu_step_ns": 30 * US,
    }  # fmt: skip
    assert times(phases)[None, 0, "other"] == (40, 40)


def test_kernels_whose_launch_was_lost_say_nothing_of_the_host(tmp_path: Path) -> None:
    rows = [kernel(None, 0, 10), kernel(None, 50, 10), kernel(None, 90, 10, step=2, launch_ns=80)]
    _, [lost, known] = tables_of(trace_of(tmp_path, rows))
    assert (lost["launch_wait_ns"], lost["unlaunched"], lost["inner_idle_ns"]) == (None, 2, 40 * US)
    # The step before it is not in the profile.
    assert (known["gap_before_ns"], known["launch_wait_ns"], known["cpu_step_ns"]) == (None, 0, None)


def test_on_a_cpu_ops_nest_and_transfers_run_beside_them(tmp_path: Path) -> None:
    def op(phase: str | None, start: int, length: int, **more: Any) -> dict[str, Any]:
        return kernel(phase, start, length, **{"category": "cpu_op", "stream": 1, **more})

    def gloo(phase: str, start: int, length: int) -> dict[str, Any]:
        return kernel(phase, start, length, category="user_annotation", stream=9, collective="all_gather")

    rows = [
        op(None, 0, 200, category="user_annotation"),  # the step's annotation holds, it does nothing
        op("expert", 0, 200, category="python_function"),
        op("moe", 10, 150),
        op("router", 12, 8),
        op(None, 20, 60),  # the call that waits
        gloo("dispatch", 25, 50),
        op("expert", 90, 30),
        gloo("combine", 130, 25),
        op("attention", 170, 20),
        op(None, 172, 10),  # inside of it
        op(None, 0, 300, stream=5),  # of another thread
    ]
    phases, idle = tables_of(trace_of(tmp_path, rows))
    assert idle == []
    assert times(phases) == {
        (0, 0, "router"): (8, 8),
        (0, 0, "dispatch"): (50, 50),
        # 75 to 130: from the end of the dispatch to the combine, in ops and between them.
        (0, 0, "expert"): (55, 55),
        (0, 0, "combine"): (25, 25),
        (0, 0, "moe"): (150, 12),
        (0, 0, "attention"): (20, 20),
        (0, 0, "other"): (70, 0),
    }


def test_worlds_give_back_their_work(tmp_path: Path) -> None:
    """Exposed experts of a made world: what each rank was made to compute."""
    lived = rank_worlds.live(rank_worlds.World(ranks=2, steps=5, layers=3))
    phases, _ = tables_of(rank_worlds.write(tmp_path, lived))
    for rank in range(2):
        made = [end - start for phase, *_, start, end in lived.ops[0, rank] if phase == "expert"]
        found = sum(r["exposed_ns"] for r in phases if r["rank"] == rank and r["phase"] == "expert")
        assert found == pytest.approx(sum(made), rel=1e-3)
    assert {r["on_gpu"] for r in phases} == {False}
    assert all(r["exposed_ns"] + r["hidden_ns"] == r["busy_ns"] for r in phases)


def test_a_trace_without_profiles_has_empty_tables(tmp_path: Path) -> None:
    assert tables_of(worlds.write(tmp_path, {"requests": BY_NAME["requests"].batch({"instance": ["a"]})})) == ([], [])  # fmt: skip


# -- real profiles --------------------------------------------------------------------------------


def ingested(folder: Path, where: Path) -> Path:
    ingest([folder], where / "trace", config=Config(), options=Options())
    return where / "trace"


@needs_captures
def test_experts_of_the_slowed_rank_are_exposed(tmp_path: Path) -> None:
    """Rank 1 spins 15 ms in each of the experts' calls of the second window, 48 of them, outside of any op."""
    path = ingested(CAPTURES / "vllm-cpu" / "run3-moe-dp2-ep2-patched" / "profile", tmp_path)
    phases, _ = tables_of(path)
    spent = {
        (rank, phase): sum(r["exposed_ns"] for r in phases if (r["window"], r["rank"], r["phase"]) == (1, rank, phase)) / 1e6
        for rank in (0, 1) for phase in ("expert", "combine", "dispatch")
    }  # fmt: skip
    assert 48 * 15 <= spent[1, "expert"] - spent[0, "expert"] < 48 * 16.5
    assert spent[0, "combine"] / 48 == pytest.approx(17.8, abs=0.2)
    assert spent[1, "combine"] / 48 == pytest.approx(1.8, abs=0.2)


@needs_corpus
def test_the_decode_step_of_a_full_graph(tmp_path: Path) -> None:
    """Busy and idle time as TraceLens computed them for this file: gpu_timeline.csv beside it."""
    folder = CORPUS / "tracelens" / "tests" / "traces" / "inference" / "vllm_decode_full"
    phases, [idle] = tables_of(ingested(folder / "graph_execution.json.gz", tmp_path))
    told = {
        line.split(",")[0]: float(line.split(",")[1])
        for line in (folder / "perf_csvs" / "gpu_timeline.csv").read_text().splitlines()[1:]
    }
    assert idle["span_ns"] / 1e6 == pytest.approx(told["total_time"], rel=1e-3)
    assert idle["busy_ns"] / 1e6 == pytest.approx(told["busy_time"], rel=1e-3)
    assert idle["inner_idle_ns"] / 1e6 == pytest.approx(told["idle_time"], rel=1e-3)
    assert sum(r["exposed_ns"] for r in phases) == idle["busy_ns"]
