"""The all-reduce before each step, outside of any, that lets all ranks begin it at one time.

It is c10d's own, whatever the layers use.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from tailscope.sim.emit.kineto_forms import CALLS, NCCL
from tailscope.sim.emit.kineto_profile import Said, phase_code
from tailscope.sim.emit.kineto_said import group_args, shaped
from tailscope.sim.emit.kineto_shown import Shown
from tailscope.sim.outcome import Floats

#: How long before a step ranks come to the collective that coordinates it, at most and at least, and by how much it ends
#: before, at most, s.
EARLY_S, LATE_S, ENDS_S = 2e-4, 4e-5, 3e-6
#: What coordinates a step: rows of so many numbers for each engine.
COORDINATED = 4
#: What the seed of its times begins with.
COORDINATE_STREAM = 13


def coordinate(shown: Shown) -> None:
    """Adds it to a profile whose steps are shown."""
    profile, start = shown.profile, shown.start
    over = np.concatenate([start[:1] - 1.0, (shown.leave[:, -1, -1])[:-1]])
    arrival = np.minimum(np.maximum(over, start - EARLY_S), start - LATE_S)
    leave = start - profile.rng(COORDINATE_STREAM).uniform(0, ENDS_S, len(start))
    if shown.form.on_gpu:
        _on_gpu(shown, arrival, leave)
    else:
        _on_cpu(shown, arrival, leave)


def _call_code(shown: Shown) -> int:
    """Code of what the call says."""
    dims = [[[COORDINATED, shown.world.engines]], [], []]
    return shown.profile.said.code("coordinate", lambda: shaped(dims, ["TensorList", "", ""]))


def _on_cpu(shown: Shown, arrival: Floats, leave: Floats) -> None:
    profile, main, engines = shown.profile, shown.profile.pid, shown.world.engines
    profile.add(
        CALLS["all_reduce"][0], "cpu_op", arrival, arrival + 1e-5, thread=main, said=_call_code(shown)
    )
    size = 4 * COORDINATED * engines
    columns = {"collective": "all_reduce", "bytes_in": size, "bytes_out": size, "dtype": "int"}
    one = shaped([[COORDINATED, engines]], ["int"])
    said = profile.said.code("coordinate gloo", lambda: Said(one.args, {**one.columns, **columns}))
    profile.add(
        "gloo:all_reduce", "user_annotation", arrival, leave, thread=main + 299, said=said,
        phase=phase_code("collective"),
    )  # fmt: skip


def _on_gpu(shown: Shown, arrival: Floats, leave: Floats) -> None:
    profile, main, ranks = shown.profile, shown.profile.pid, shown.world.ranks
    call, kernel, name, _ = CALLS["all_reduce"]
    numbers = COORDINATED * shown.world.engines
    args = {
        "Collective name": name,
        "In msg nelems": numbers,
        "Out msg nelems": numbers,
        "Group size": ranks,
        "dtype": "Int",
    }
    args |= group_args(profile, profile.coordinating)
    columns = {
        "collective": "all_reduce",
        "group": profile.coordinating,
        "group_size": ranks,
        "bytes_in": 4 * numbers,
        "bytes_out": 4 * numbers,
        "dtype": "Int",
    }
    told = profile.said.code("coordinate c10d", lambda: Said(args))
    runs = profile.said.code(
        "coordinate nccl", lambda: Said({"device": 0, "context": 1, "stream": NCCL, **args}, columns)
    )
    launch = profile.said.code("launch", partial(Said, {"cbid": 211}))
    seq = shown.numbers[:, 0] // shown.step.shape[1]
    # Numbers that no launch of a step has.
    correlation = shown.step.size * shown.units + 1 + np.arange(len(arrival))
    opened = arrival - 2e-5
    profile.add(call, "cpu_op", opened, opened + 1.8e-5, thread=main, said=_call_code(shown))
    profile.add(
        "record_param_comms", "cpu_op", opened + 1e-6, opened + 1.7e-5, thread=main, said=told, seq=seq
    )
    profile.add(
        "cudaLaunchKernel", "cuda_runtime", opened + 5e-6, opened + 8e-6, thread=main, said=launch,
        correlation=correlation,
    )  # fmt: skip
    profile.add(
        f"ncclDevKernel_{kernel.replace('bf16', 'i32')}_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel", arrival, leave,
        thread=NCCL, said=runs, phase=phase_code("collective"), seq=seq, correlation=correlation, launched=opened + 5e-6,
    )  # fmt: skip
