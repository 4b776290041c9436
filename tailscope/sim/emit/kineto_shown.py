"""A rank's part of a timeline as events of its profile: ops and transfers of a CPU, or launches and kernels of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tailscope.sim.emit.kineto_forms import CACHE_WRITER, CALLS, COMPUTE, kernels_of
from tailscope.sim.emit.kineto_profile import NONE, Profile, Said, phase_code
from tailscope.sim.emit.kineto_said import Saying
from tailscope.sim.outcome import Floats, Ints, Steps
from tailscope.sim.rank_places import Place
from tailscope.sim.ranks import Timeline

#: Of a piece of work the share before its op begins.
BEFORE_OP = 0.02
#: Longest call that enqueues a collective for gloo, s.
ENQUEUE_S = 5e-5
#: On a GPU: how long the launches of a step begin before its first kernel, at most, and how far they are apart, s.
LEAD_S, LAUNCH_S = 2e-5, 5e-6
#: An idle time before a kernel from which on its launch was late.
IDLE_S = 1e-7
#: Longest part of an exchange that sends, s; and which share of a transfer is left to move when all have met.
SEND_S, MOVES = 3e-6, 0.7

#: Phase of work -> its op with gloo (and the phase that its name tells), then on a GPU; then the kernel.
OPS: dict[str, tuple[tuple[str, str | None], tuple[str, str | None], str]] = {
    "attention": (
        ("vllm::unified_attention_with_output", "attention"),
        ("vllm::unified_attention_with_output", "attention"),
        "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>(flash::Flash_fwd_params)",
    ),
    "expert": (("_C::cpu_fused_moe", "expert"), ("vllm::moe_forward", "moe"), "fused_moe_kernel"),
    "mlp": (
        ("_C::onednn_mm", None),
        ("aten::mm", None),
        "nvjet_tst_128x64_64x8_2x1_v_bz_TNT",
    ),
}
#: What the kernels' names tell of their phase.
KERNEL_PHASES = {"attention": "attention", "expert": "expert", "mlp": None}


@dataclass(frozen=True)
class Piece:
    """A kernel that every layer has; times are steps × layers, s. `of`: number of the collective it is of, or leads to."""

    of: int
    name: str
    start: Floats
    end: Floats
    stream: int
    phase: int
    #: What its launch is within, if anything: an op's name, phase, and what it says.
    op: tuple[str, int, Ints] | None
    #: What it says, and of a collective that tells it the number, and what its call says.
    said: Ints
    seq: Ints | None = None
    call: Ints | None = None
    #: Begins the work before the collective: nothing of it runs earlier.
    opens: Floats | None = None
    #: How many launches the op holds.
    launches: int = 1


class Shown:
    """A rank's part of a timeline, as events of its profile. Arrays are steps × layers, times s since the world began."""

    def __init__(self, profile: Profile, timeline: Timeline, steps: dict[int, Steps]) -> None:
        self.profile, self.world = profile, profile.world
        rank, since = profile.rank, timeline.start_s[:, None, None]
        self.begin, self.arrival, self.leave = (
            values[..., rank] + since for values in (timeline.begin, timeline.arrival, timeline.leave)
        )
        self.start = timeline.start_s
        self.timeline = timeline
        count, layers, _ = self.begin.shape
        rows = slice(timeline.first, timeline.first + count)
        own = steps[profile.dp]
        self.annotated = ~own.dummy[rows]
        #: Number of each step in the profile, NONE for dummy batches: those are not annotated.
        number = np.where(self.annotated, np.cumsum(self.annotated) - 1, NONE)
        self.step = np.repeat(number[:, None], layers, axis=1)
        # Layers are counted in annotated steps alone.
        self.layer = np.where(self.step >= 0, np.arange(layers), NONE)
        self.numbers = (timeline.first + np.arange(count))[:, None] * layers + np.arange(layers)
        tokens = np.array([tokens_of(steps[e])[rows] for e in range(self.world.engines)])
        # The batches of all are padded to the largest, as parts for each rank.
        part = -(-tokens.max(axis=0) // self.world.tp)
        sent = received = np.zeros((count, layers, 0), np.int64)
        if self.world.moe:
            load = self.world.loads(rows.start, rows.stop)
            rows_of = self.world.transfers.exchanged(tokens.T, load)
            sent, received = rows_of[:, :, rank], rows_of[..., rank]
        self.says = Saying(profile, tokens[profile.dp], part, sent, received)
        profile.batches = [batch_of(own, rows.start + int(k)) for k in np.flatnonzero(self.annotated)]
        self.places: Sequence[Place] = self.world.places
        self.form = profile.form
        computed = own.prefill_tokens[rows] + own.recompute_tokens[rows]
        #: Steps that are replayed from a graph.
        self.replayed = np.asarray((computed == 0) & self.form.graphs)
        #: Kernels of a layer.
        self.units = 0

    def show(self) -> None:
        if self.form.on_gpu:
            self._on_gpu()
        else:
            self._on_cpu()

    def _annotate(self, start: Floats, end: Floats, category: str, thread: int) -> None:
        shown = self.annotated
        names = [self.profile.name.code(_annotation(batch)) for batch in self.profile.batches]
        self.profile.step_names = names
        if category == "user_annotation":
            times = (
                self.world.clock_ns(self.profile.rank, t[shown], start[shown]).tolist() for t in (start, end)
            )
            self.profile.step_ns = list(zip(*times, strict=True))
        self.profile.add(
            np.array(names, np.int64), category, start[shown], end[shown], thread=thread, step=self.step[shown, 0]
        )  # fmt: skip

    # -- gloo -------------------------------------------------------------------------------------

    def _on_cpu(self) -> None:
        """Ops on the main thread; each collective's transfer in one of gloo's threads, from arrival to leave."""
        profile, main = self.profile, self.profile.pid
        self._annotate(self.start, self.leave[:, -1, -1], "user_annotation", main)
        common: dict[str, Any] = {"step": self.step, "layer": self.layer}
        for index, place in enumerate(self.places):
            begin, arrival, leave = (v[:, :, index] for v in (self.begin, self.arrival, self.leave))
            if place.after:
                (name, phase), _, _ = OPS[place.after]
                opened = begin + BEFORE_OP * (arrival - begin)
                said = self.says.by_tokens(self.says.op, place, place.after)
                profile.add(
                    name, "cpu_op", opened, arrival, thread=main, phase=phase_code(phase), said=said, **common
                )
            called = arrival + np.minimum(ENQUEUE_S, (leave - arrival) / 2)
            said = self.says.told(self.says.call, place)
            profile.add(CALLS[place.kind][0], "cpu_op", arrival, called, thread=main, said=said, **common)
            said = self.says.told(self.says.gloo, place)
            thread = main + 300 + index
            name = f"gloo:{place.kind}"
            profile.add(
                name, "user_annotation", arrival, leave, thread=thread, phase=phase_code(place.phase), said=said,
                **common,
            )  # fmt: skip

    # -- GPU --------------------------------------------------------------------------------------

    def _on_gpu(self) -> None:
        """Launches on the CPU, one after another from shortly before the step on; kernels when the work is done."""
        pieces = self._pieces()
        kernels = np.stack([piece.start if piece.opens is None else piece.opens for piece in pieces], axis=2)
        count, layers = self.step.shape
        self.units = len(pieces)
        lead = min(LEAD_S, max(self.world.settings.transfer_s, LEAD_S / 10))
        first = self.start - lead
        # Nothing runs before it was launched.
        room = (kernels.reshape(count, -1) - first[:, None]) / np.arange(1, layers * self.units + 1)
        apart = np.minimum(LAUNCH_S, room.min(axis=1))
        # The step's annotation begins before the first op.
        late, apart = self._late_launches(pieces, kernels.reshape(count, -1), first, apart)
        slots = first[:, None] + apart[:, None] * (0.05 + np.arange(layers * self.units)) + late
        self.slots, self.apart = slots.reshape(count, layers, self.units), apart[:, None]
        # A graph is launched as a whole: a step whose host was late within it was not replayed.
        self.replayed &= np.isclose(late[:, -1], late[:, 0], rtol=0, atol=IDLE_S)
        over = first + np.where(self.replayed, apart + late[:, 0], apart * layers * self.units + late[:, -1])
        self._annotate(first, over, "user_annotation", self.profile.pid)
        begin, end = self.begin[:, 0, 0], self.leave[:, -1, -1]
        self._annotate(begin, end, "gpu_user_annotation", COMPUTE)
        self._launch("cudaGraphLaunch", np.flatnonzero(self.replayed), slice(0, 1), 0, layer=NONE)
        for unit, piece in enumerate(pieces):
            self._show(piece, unit)

    def _late_launches(
        self, pieces: Sequence[Piece], kernels: Floats, first: Floats, apart: Floats
    ) -> tuple[Floats, Floats]:
        """How much later than in a row each kernel of a step is launched (steps × kernels), and how far apart they are.

        A kernel that begins a while after the one before has ended was launched only then.
        """
        left = np.concatenate(
            [np.zeros_like(self.leave[:, 0, :1]), self.leave.reshape(len(first), -1)[:, :-1]], axis=1
        )
        left[:, 0] = self.start
        idle = self.begin - left.reshape(self.begin.shape)
        waited = (idle[:, :, [p.of for p in pieces]] > IDLE_S) & np.array(
            [p.opens is not None for p in pieces]
        )
        if not waited.any():
            return np.zeros(kernels.shape), apart
        apart = np.minimum(apart, np.diff(kernels, axis=1).min(axis=1))
        slot = first[:, None] + apart[:, None] * (1 + np.arange(kernels.shape[1]))
        behind = np.where(waited.reshape(kernels.shape), np.maximum(kernels - slot, 0.0), 0.0)
        return np.maximum.accumulate(behind, axis=1), apart

    def _pieces(self) -> list[Piece]:
        """The kernels of a layer, in order."""
        pieces: list[Piece] = []
        for index, place in enumerate(self.places):
            if place.after:
                pieces += self._work(index, place, place.after)
            pieces += self._collective(index, place)
        return pieces

    def _work(self, index: int, place: Place, after: str) -> list[Piece]:
        _, (op, phase), kernel = OPS[after]
        begin, arrival = self.begin[:, :, index], self.arrival[:, :, index]
        opened = begin + BEFORE_OP * (arrival - begin)
        call = op, phase_code(phase), self.says.by_tokens(self.says.op, place, after)
        mine: dict[str, Any] = {
            "of": index,
            "stream": COMPUTE,
            "phase": phase_code(KERNEL_PHASES[after]),
            "said": self.says.runs(COMPUTE),
        }
        if after == "attention" and not self.form.told:
            # Both are launched in the one op.
            return [
                Piece(name=CACHE_WRITER, start=begin, end=opened, op=call, launches=2, opens=begin, **mine),
                Piece(name=kernel, start=opened, end=arrival, op=None, **mine),
            ]
        return [Piece(name=kernel, start=opened, end=arrival, op=call, opens=begin, **mine)]

    def _collective(self, index: int, place: Place) -> list[Piece]:
        arrival, leave = self.arrival[:, :, index], self.leave[:, :, index]
        kernels = kernels_of(self.form, place, self.world.settings.hosts)
        mine: dict[str, Any] = {"of": index, "phase": phase_code(place.phase)}
        if self.form.told:
            # A number for each collective of a group, from the first step on.
            in_group = [p for p in self.places if p.everyone == place.everyone]
            mine |= {
                "op": (CALLS[place.kind][0], NONE, self.says.told(self.says.call, place)),
                "said": self.says.told(self.says.nccl, place),
                "seq": self.numbers * len(in_group) + in_group.index(place),
                "call": self.says.told(self.says.c10d, place),
            }
            return [Piece(name=k.name, start=arrival, end=leave, stream=k.stream, **mine) for k in kernels]
        sent = arrival + np.minimum(SEND_S, (leave - arrival) / 4)
        met = self._all_met(index)
        times = {
            "whole": (arrival, leave), "send": (arrival, sent), "receive": (sent, leave), "meet": (arrival, met), "move": (met, leave)
        }  # fmt: skip
        op = CALLS[place.kind][3]
        mine["op"] = (op, NONE, self.says.by_tokens(self.says.vllm, place)) if op else None
        return [
            Piece(
                name=k.name,
                start=times[k.part][0],
                end=times[k.part][1],
                stream=k.stream,
                said=self.says.runs(k.stream, k.collective),
                **mine,
            )
            for k in kernels
        ]

    def _all_met(self, index: int) -> Floats:
        """When ranks that first wait for each other go on to move data: once all have come, before the first leaves."""
        since = self.timeline.start_s[:, None]
        last, soonest = (
            values + since
            for values in (
                self.timeline.arrival[:, :, index].max(axis=-1),
                self.timeline.leave[:, :, index].min(axis=-1),
            )
        )
        return np.asarray(last + (1 - MOVES) * np.maximum(soonest - last, 0.0))

    def _show(self, piece: Piece, unit: int) -> None:
        """A kernel, and where it was not replayed its launch, in an op if there is one."""
        profile, eager = self.profile, np.flatnonzero(~self.replayed)
        slot = self.slots[eager, :, unit]
        step, layer, apart = self.step[eager], self.layer[eager], self.apart[eager]
        common: dict[str, Any] = {"thread": profile.pid, "step": step, "layer": layer}
        if piece.op:
            name, phase, said = piece.op
            over = self.slots[eager, :, unit + piece.launches - 1] + 0.9 * apart
            profile.add(name, "cpu_op", slot, over, phase=phase, said=said[eager], **common)
        if piece.call is not None and piece.seq is not None:
            profile.add(
                "record_param_comms", "cpu_op", slot + 0.2 * apart, slot + 0.8 * apart, said=piece.call[eager],
                seq=piece.seq[eager], **common,
            )  # fmt: skip
        self._launch("cudaLaunchKernel", eager, slice(None), unit, layer=layer)
        launched, correlation = self.slots[:, :, unit] + 0.4 * self.apart, self._correlation(unit)
        replayed = self.replayed[:, None]
        launched = np.where(replayed, self.slots[:, :1, 0] + 0.4 * self.apart, launched)
        correlation = np.where(replayed, self._correlation(0)[:, :1], correlation)
        profile.add(
            piece.name, "kernel", piece.start, piece.end, thread=piece.stream, step=self.step, layer=self.layer,
            launched=launched, correlation=correlation, phase=piece.phase, said=piece.said,
            seq=NONE if piece.seq is None else piece.seq,
        )  # fmt: skip

    def _launch(self, name: str, steps: Ints, layers: slice, unit: int, layer: int | Ints) -> None:
        """Launches of a kernel, or of a graph, in some steps and layers."""
        launch = self.slots[steps, layers, unit] + 0.4 * self.apart[steps]
        cbid = {"cudaLaunchKernel": 211, "cudaGraphLaunch": 311}[name]
        said = self.profile.said.code(name, partial(Said, {"cbid": cbid}))
        self.profile.add(
            name, "cuda_runtime", launch, launch + 0.2 * self.apart[steps], thread=self.profile.pid, said=said,
            step=self.step[steps, layers], layer=layer, correlation=self._correlation(unit)[steps, layers],
        )  # fmt: skip

    def _correlation(self, unit: int) -> Ints:
        return np.asarray(1 + np.arange(self.step.size).reshape(self.step.shape) * self.units + unit)


def tokens_of(steps: Steps) -> Ints:
    """Tokens of each batch; a dummy batch computes one."""
    return np.asarray(np.maximum(steps.prefill_tokens + steps.decode_tokens + steps.recompute_tokens, 1))


def batch_of(steps: Steps, k: int) -> tuple[int, int, int, int]:
    """Requests and tokens of a batch, of prefill then of the rest: to vLLM what is computed again after output is decode."""
    return (
        int(steps.prefill_requests[k]),
        int(steps.prefill_tokens[k]),
        int(steps.decode_requests[k] + steps.recompute_requests[k]),
        int(steps.decode_tokens[k] + steps.recompute_tokens[k]),
    )


def _annotation(batch: tuple[int, int, int, int]) -> str:
    return "execute_context_{}({})_generation_{}({})".format(*batch)
