"""Profiles of the ranks as torch's profiler writes them under vLLM: files of Kineto's JSON.

One rank's events are gathered once, as columns; these files and the tables of `tables_ranks` are two ways to show them.
With gloo a rank's part in a collective is an annotation of a worker thread that says no group; on a GPU it is a kernel
with c10d's metadata.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from tailscope.schema import PHASES
from tailscope.sim.outcome import START_NS, Floats, Ints, Outcome, Steps
from tailscope.sim.ranks import ALL_TO_ALL, HIDDEN, Place, RankWorld, Timeline

#: Kineto counts times from the last whole multiple of so many seconds, three months.
BASE_EVERY_S = 7_889_238
BASE_NS: Final = START_NS // (BASE_EVERY_S * 1_000_000_000) * BASE_EVERY_S * 1_000_000_000
#: Between a profile's last event and its export, and from one rank's export to the next's.
EXPORT_NS, EXPORT_RANK_NS = 3_000_000, 370_000
#: Width of an attention head: for shapes.
HEAD = 128
#: Of a piece of work the share before its op begins.
BEFORE_OP = 0.02
#: Longest call that enqueues a collective for gloo, s.
ENQUEUE_S = 5e-5
#: On a GPU: how long the launches of a step begin before its first kernel, at most, and how far they are apart, s.
LEAD_S, LAUNCH_S = 2e-5, 5e-6
#: An idle time before a kernel from which on its launch was late.
IDLE_S = 1e-7
#: Events in a buffer of the profiler: those are lost together.
BUFFER = 24
#: What seeds begin with, so that jitter and losses are drawn from streams of their own.
JITTER_STREAM, LOSS_STREAM = 11, 12
#: Streams of kernels and of NCCL's.
COMPUTE, NCCL = 7, 24
#: Events made JSON at a time.
EVENTS = 20_000
NONE = -1

#: Kind of collective -> what gloo's call is named, then NCCL's kernel, then c10d's own word for it.
CALLS = {
    "all_reduce": ("c10d::allreduce_", "AllReduce_Sum_bf16", "allreduce"),
    "all_gather": ("c10d::_allgather_base_", "AllGather", "_allgather_base"),
    "reduce_scatter": ("c10d::_reduce_scatter_base_", "ReduceScatter_Sum_bf16", "_reduce_scatter_base"),
    ALL_TO_ALL: ("c10d::alltoall_base_", "SendRecv", "all_to_allv"),
}
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
ON_GPU = ("kernel", "gpu_user_annotation")


@dataclass(frozen=True)
class _Said:
    """What an event says beside its times: `args` in the file, `columns` of `rank_events` that follow from them."""

    args: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Texts:
    """Different values in the order in which they came; a code is a place among them."""

    values: list[Any] = field(default_factory=list)
    places: dict[Any, int] = field(default_factory=dict)

    def code(self, key: Any, value: Callable[[], Any] | None = None) -> int:
        """The code of what `key` stands for: itself, or `value()`."""
        place = self.places.setdefault(key, len(self.values))
        if place == len(self.values):
            self.values.append(value() if value else key)
        return place


#: Columns of a profile's events that are numbers, NONE for nothing.
_NUMBERS = ("thread", "start", "end", "step", "layer", "phase", "launch", "correlation", "seq")
#: And those that are codes.
_CODES = ("name", "category", "said")


@dataclass
class Profile:
    """One rank's profile in one window, times in ns on the rank's clock."""

    world: RankWorld
    rank: int
    window: int
    #: What the annotated steps hold (see `_batch`), and their start and end.
    batches: list[tuple[int, int, int, int]] = field(default_factory=list)
    step_ns: list[tuple[int, int]] = field(default_factory=list)
    #: All events, by start once `finish` has put the blocks together; codes are of the three that follow.
    columns: dict[str, Ints] = field(default_factory=dict)
    name: _Texts = field(default_factory=_Texts)
    category: _Texts = field(default_factory=_Texts)
    said: _Texts = field(default_factory=_Texts)
    blocks: list[dict[str, Ints]] = field(default_factory=list)
    #: Tokens of every expert in the annotated steps, where the scenario tells them: steps × layers × experts.
    expert_tokens: Ints | None = None
    #: Codes of the steps' names.
    step_names: list[int] = field(default_factory=list)

    @property
    def dp(self) -> int:
        return self.rank // self.world.tp

    @property
    def tp(self) -> int:
        return self.rank % self.world.tp

    @property
    def pid(self) -> int:
        return 5_000 + 101 * self.rank

    @property
    def host(self) -> str:
        return f"{self.world.instance}-{self.world.host_of(self.rank)}"

    @property
    def backend(self) -> str:
        return "nccl" if self.world.settings.metadata else "gloo"

    @property
    def last_ns(self) -> int:
        return int(self.columns["end"].max())

    @property
    def exported_ns(self) -> int:
        return self.last_ns + EXPORT_NS + EXPORT_RANK_NS * self.rank

    @property
    def file_name(self) -> str:
        # The rank in the name is the one within the engine.
        place = f"dp{self.dp}_pp0_tp{self.tp}_dcp0_ep{self.rank}_rank{self.tp}"
        return f"{place}.{self.exported_ns}.pt.trace.json.gz"

    def groups(self) -> dict[str, list[int]]:
        """Ranks of the process groups this rank is in, by name."""
        world, everyone = self.world, list(range(self.world.ranks))
        first = self.dp * world.tp
        return {
            "0": everyone,
            self.group(False): everyone[first : first + world.tp],
            self.group(True): everyone,
        }

    def group(self, everyone: bool) -> str:
        """Name of the group of all ranks, or of the engine's own."""
        # Each is made with a twin for the CPU.
        return str(1 + 2 * (self.world.engines if everyone else self.dp))

    def add(self, name: str | Ints, category: str, start: Floats, end: Floats, **numbers: Any) -> None:
        """Events of a category, one an element of `start`; times in s by the true clock."""
        clock = self.world.clock_ns
        shape = start.shape
        block: dict[str, Any] = {"start": clock(self.rank, start), "end": clock(self.rank, end)}
        block["name"] = name if isinstance(name, np.ndarray) else self.name.code(name)
        block["category"] = self.category.code(category)
        if (launch := numbers.pop("launched", None)) is not None:
            block["launch"] = clock(self.rank, launch)
        block |= {"said": self.said.code((), _Said), **numbers}
        self.blocks.append(
            {
                c: np.broadcast_to(np.asarray(block.get(c, NONE), np.int64), shape).ravel()
                for c in (*_NUMBERS, *_CODES)
            }
        )

    def _rng(self, stream: int) -> np.random.Generator:
        return np.random.default_rng([stream, *self.world.seed, self.rank, self.window])

    def _damage(self, columns: dict[str, Ints], dropped: float) -> dict[str, Ints]:
        """What the profiler makes of kernels and gloo's transfers: stamps that are late, buffers that were lost."""
        jitter_s = self.world.settings.stamp_jitter_s
        if not jitter_s and not dropped:
            return columns
        category = self.category.code("kernel" if self.backend == "nccl" else "user_annotation")
        some = np.flatnonzero((columns["category"] == category) & ~np.isin(columns["name"], self.step_names))
        if jitter_s:
            late = self._rng(JITTER_STREAM).uniform(0, jitter_s * 1e9, len(some)).astype(np.int64)
            columns["start"][some] = np.minimum(columns["start"][some] + late, columns["end"][some])
        some = some[np.argsort(columns["start"][some], kind="stable")]
        lost = self._rng(LOSS_STREAM).random(len(some) // BUFFER + 1) < dropped
        kept = np.ones(len(columns["start"]), bool)
        kept[some[lost[np.arange(len(some)) // BUFFER]]] = False
        return {c: values[kept] for c, values in columns.items()}

    def finish(self, dropped: float = 0.0) -> None:
        columns = {c: np.concatenate([block[c] for block in self.blocks]) for c in (*_NUMBERS, *_CODES)}
        columns = self._damage(columns, dropped)
        order = np.lexsort((-columns["end"], columns["start"]))
        self.columns = {c: values[order] for c, values in columns.items()}
        self.blocks = []


def profiles(outcome: Outcome) -> Iterator[Profile]:
    """The profiles of an outcome, by window, instance and rank."""
    for number, (from_s, seconds) in enumerate(outcome.scenario.telemetry.profile):
        for instance, world in outcome.worlds.items():
            first, stop = world.between(from_s, from_s + seconds)
            steps = {e.engine: e.steps for e in outcome.engines if e.instance == instance}
            # A world that is cut off has begun steps that never ended.
            stop = min(stop, *map(len, steps.values()))
            if first >= stop:
                continue
            timeline = world.timelines(first, stop)
            telemetry = outcome.scenario.telemetry
            experts = _expert_tokens(world, timeline, steps) if telemetry.expert_load and world.moe else None
            for rank in range(world.ranks):
                if rank in telemetry.profile_missing:
                    continue
                profile = Profile(world, rank, number)
                _Shown(profile, timeline, steps).show()
                if experts is not None:
                    own = steps[profile.dp].dummy[timeline.first : timeline.first + len(experts)]
                    profile.expert_tokens = experts[~own]
                profile.finish(telemetry.profile_dropped)
                yield profile


def _expert_tokens(world: RankWorld, timeline: Timeline, steps: dict[int, Steps]) -> Ints:
    """Tokens of every expert in the steps of a timeline: steps × layers × experts."""
    first, stop = timeline.first, timeline.first + len(timeline.start_s)
    tokens = np.array([_tokens(steps[e])[first:stop] for e in range(world.engines)])
    by_rank = world.exchanged(tokens.T, world.loads(first, stop)).sum(axis=-2)
    return world.experts.tokens(first, by_rank)


class _Shown:
    """A rank's part of a timeline, as events of its profile. Arrays are steps × layers, times s since the world began."""

    def __init__(self, profile: Profile, timeline: Timeline, steps: dict[int, Steps]) -> None:
        self.profile, self.world = profile, profile.world
        rank, since = profile.rank, timeline.start_s[:, None, None]
        self.begin, self.arrival, self.leave = (
            values[..., rank] + since for values in (timeline.begin, timeline.arrival, timeline.leave)
        )
        self.start = timeline.start_s
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
        tokens = np.array([_tokens(steps[e])[rows] for e in range(self.world.engines)])
        #: Tokens of the engine's batch; and of the largest, to which those of all are padded, as parts for each rank.
        self.tokens, self.part = tokens[profile.dp], -(-tokens.max(axis=0) // self.world.tp)
        #: In an all-to-all the rows that this rank sends to each and gets from each: steps × layers × ranks.
        self.sent = self.received = np.zeros((count, layers, 0), np.int64)
        if self.world.moe:
            load = self.world.loads(rows.start, rows.stop)
            rows_of = self.world.exchanged(tokens.T, load)
            self.sent, self.received = rows_of[:, :, rank], rows_of[..., rank]
        profile.batches = [_batch(own, rows.start + int(k)) for k in np.flatnonzero(self.annotated)]
        self.places: Sequence[Place] = self.world.places
        self.units = sum(1 + (place.after is not None) for place in self.places)

    def show(self) -> None:
        if self.world.settings.metadata:
            self._on_gpu()
        else:
            self._on_cpu()

    def _annotate(self, start: Floats, end: Floats, category: str, thread: int) -> None:
        shown = self.annotated
        names = [self.profile.name.code(_annotation(batch)) for batch in self.profile.batches]
        self.profile.step_names = names
        if category == "user_annotation":
            times = (self.world.clock_ns(self.profile.rank, t[shown]).tolist() for t in (start, end))
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
                said = self._by_tokens(self._op_said, place, place.after)
                profile.add(
                    name, "cpu_op", opened, arrival, thread=main, phase=_phase(phase), said=said, **common
                )
            called = arrival + np.minimum(ENQUEUE_S, (leave - arrival) / 2)
            said = self._told(self._call_said, place)
            profile.add(CALLS[place.kind][0], "cpu_op", arrival, called, thread=main, said=said, **common)
            said = self._told(self._gloo_said, place)
            thread = main + 300 + index
            name = f"gloo:{place.kind}"
            profile.add(
                name, "user_annotation", arrival, leave, thread=thread, phase=_phase(place.phase), said=said,
                **common,
            )  # fmt: skip

    # -- GPU --------------------------------------------------------------------------------------

    def _on_gpu(self) -> None:
        """Launches on the CPU, one after another from shortly before the step on; kernels when the work is done."""
        kernels = np.concatenate([self._kernel_starts(place) for place in range(len(self.places))], axis=2)
        count, layers = self.step.shape
        lead = min(LEAD_S, max(self.world.settings.transfer_s, LEAD_S / 10))
        first = self.start - lead
        # Nothing runs before it was launched.
        room = (kernels.reshape(count, -1) - first[:, None]) / np.arange(1, layers * self.units + 1)
        apart = np.minimum(LAUNCH_S, room.min(axis=1))
        # The step's annotation begins before the first op.
        late, apart = self._late_launches(kernels.reshape(count, -1), first, apart)
        slots = first[:, None] + apart[:, None] * (0.05 + np.arange(layers * self.units)) + late
        self.slots, self.apart = slots.reshape(count, layers, self.units), apart[:, None]
        over = first + apart * layers * self.units + late[:, -1]
        self._annotate(first, over, "user_annotation", self.profile.pid)
        begin, end = self.begin[:, 0, 0], self.leave[:, -1, -1]
        self._annotate(begin, end, "gpu_user_annotation", COMPUTE)
        unit = 0
        for index, place in enumerate(self.places):
            if place.after:
                self._show_work(index, place, place.after, unit)
                unit += 1
            self._show_collective(index, place, unit)
            unit += 1

    def _late_launches(self, kernels: Floats, first: Floats, apart: Floats) -> tuple[Floats, Floats]:
        """How much later than in a row each kernel of a step is launched (steps × kernels), and how far apart they are.

        A kernel that begins a while after the one before has ended was launched only then.
        """
        left = np.concatenate(
            [np.zeros_like(self.leave[:, 0, :1]), self.leave.reshape(len(first), -1)[:, :-1]], axis=1
        )
        left[:, 0] = self.start
        idle = self.begin - left.reshape(self.begin.shape)
        places = [i for i, place in enumerate(self.places) for _ in range(1 + (place.after is not None))]
        opens = np.array(
            [i == places.index(p) and self.places[p].after is not None for i, p in enumerate(places)]
        )
        waited = (idle[:, :, places] > IDLE_S) & opens
        if not waited.any():
            return np.zeros(kernels.shape), apart
        apart = np.minimum(apart, np.diff(kernels, axis=1).min(axis=1))
        slot = first[:, None] + apart[:, None] * (1 + np.arange(kernels.shape[1]))
        behind = np.where(waited.reshape(kernels.shape), np.maximum(kernels - slot, 0.0), 0.0)
        return np.maximum.accumulate(behind, axis=1), apart

    def _kernel_starts(self, index: int) -> Floats:
        """When the kernels of a place start: of the work before it, if there is any, and its own."""
        starts = [self.begin[:, :, index]] if self.places[index].after else []
        return np.stack([*starts, self.arrival[:, :, index]], axis=2)

    def _show_work(self, index: int, place: Place, after: str, unit: int) -> None:
        _, (op, phase), kernel = OPS[after]
        said = self._by_tokens(self._op_said, place, after)
        self._launched(op, _phase(phase), said, unit)
        begin, arrival = self.begin[:, :, index], self.arrival[:, :, index]
        opened = begin + BEFORE_OP * (arrival - begin)
        self._kernel(kernel, opened, arrival, unit, COMPUTE, phase=_phase(KERNEL_PHASES[after]))

    def _show_collective(self, index: int, place: Place, unit: int) -> None:
        profile = self.profile
        call, kernel, _ = CALLS[place.kind]
        self._launched(call, NONE, self._told(self._call_said, place), unit)
        # A number for each collective of a group, from the first step on.
        in_group = [p for p in self.places if p.everyone == place.everyone]
        seq = self.numbers * len(in_group) + in_group.index(place)
        told = self._told(self._c10d_said, place)
        slot = self.slots[:, :, unit]
        profile.add(
            "record_param_comms", "cpu_op", slot + 0.2 * self.apart, slot + 0.8 * self.apart,
            thread=profile.pid, step=self.step, layer=self.layer, said=told, seq=seq,
        )  # fmt: skip
        told = self._told(self._nccl_said, place)
        ring = "" if place.kind == ALL_TO_ALL else "_RING_LL"
        name = f"ncclDevKernel_{kernel}{ring}(ncclDevKernelArgsStorage<4096ul>)"
        arrival, leave = self.arrival[:, :, index], self.leave[:, :, index]
        self._kernel(name, arrival, leave, unit, NCCL, phase=_phase(place.phase), said=told, seq=seq)

    def _launched(self, op: str, phase: int, said: Ints, unit: int) -> None:
        """An op on the CPU and its launch within."""
        profile, slot = self.profile, self.slots[:, :, unit]
        common: dict[str, Any] = {"thread": profile.pid, "step": self.step, "layer": self.layer}
        profile.add(op, "cpu_op", slot, slot + 0.9 * self.apart, phase=phase, said=said, **common)
        launch = slot + 0.4 * self.apart
        said_launch = profile.said.code("launch", partial(_Said, {"cbid": 211}))
        profile.add(
            "cudaLaunchKernel", "cuda_runtime", launch, launch + 0.2 * self.apart, said=said_launch,
            correlation=self._correlation(unit), **common,
        )  # fmt: skip

    def _kernel(self, name: str, start: Floats, end: Floats, unit: int, stream: int, **more: Any) -> None:
        profile = self.profile
        where = partial(_Said, {"device": 0, "context": 1, "stream": stream})
        more.setdefault("said", profile.said.code(stream, where))
        profile.add(
            name, "kernel", start, end, thread=stream, step=self.step, layer=self.layer,
            launched=self.slots[:, :, unit] + 0.4 * self.apart, correlation=self._correlation(unit), **more,
        )  # fmt: skip

    def _correlation(self, unit: int) -> Ints:
        return np.asarray(1 + np.arange(self.step.size).reshape(self.step.shape) * self.units + unit)

    # -- what events say --------------------------------------------------------------------------

    def _by_tokens(self, what: Callable[..., _Said], *of: Any) -> Ints:
        """Codes of what the events of each step say, which differs by the batch's tokens alone."""
        codes = [
            self.profile.said.code((what.__name__, *of, *pair), partial(what, *of, *pair))
            for pair in zip(self.tokens.tolist(), self.part.tolist(), strict=True)
        ]
        return np.array(codes, np.int64)[:, None]

    def _told(self, what: Callable[..., _Said], place: Place) -> Ints:
        """Codes of what the events of a collective say: in an all-to-all each has rows of its own."""
        if place.kind != ALL_TO_ALL:
            return self._by_tokens(what, place)
        # What came for the experts goes back from them.
        rows = (self.sent, self.received) if place.phase == "dispatch" else (self.received, self.sent)
        given, got = (values.reshape(self.step.size, -1).tolist() for values in rows)
        codes = [
            self.profile.said.code((what.__name__, place, *pair), partial(what, place, *pair))
            for pair in zip(map(tuple, given), map(tuple, got), strict=True)
        ]
        return np.array(codes, np.int64).reshape(self.step.shape)

    def _elements(self, place: Place, tokens: _Rows, part: _Rows) -> tuple[int, int]:
        """Elements that a rank gives into a collective and gets out of it."""
        if isinstance(tokens, tuple) or isinstance(part, tuple):
            return sum(_listed_rows(tokens)) * HIDDEN, sum(_listed_rows(part)) * HIDDEN
        if place.kind == "all_reduce":
            return tokens * HIDDEN, tokens * HIDDEN
        whole = part * self.world.ranks
        return (
            (part * HIDDEN, whole * HIDDEN) if place.kind == "all_gather" else (whole * HIDDEN, part * HIDDEN)
        )

    def _op_said(self, place: Place, after: str, tokens: int, part: int) -> _Said:
        if after == "attention":
            shape = [tokens, max(HIDDEN // HEAD // self.world.tp, 1), HEAD]
            return _shaped([shape, shape, shape], ["float"] * 3)
        rows = part * self.world.ranks if after == "expert" else tokens
        return _shaped([[rows, HIDDEN], [rows, HIDDEN]], ["float", "float"])

    def _call_said(self, place: Place, tokens: _Rows, part: _Rows) -> _Said:
        given, got = (n // HIDDEN for n in self._elements(place, tokens, part))
        if place.kind == ALL_TO_ALL:
            # alltoall_base_(output, input, group, output_split_sizes, input_split_sizes, async, timeout)
            splits = [str(list(_listed_rows(rows))) for rows in (part, tokens)]
            said = _shaped(
                [[got, HIDDEN], [given, HIDDEN], [], [], [], [], []],
                ["float", "float", "", "ScalarList", "ScalarList", "Scalar", "Scalar"],
            )
            return _Said({**said.args, "Concrete Inputs": ["", "", "", *splits, "True", "-1"]}, said.columns)
        if place.kind == "all_reduce":
            return _shaped([[[given, HIDDEN]], [], []], ["TensorList", "", ""])
        return _shaped([[got, HIDDEN], [given, HIDDEN], []], ["float", "float", ""])

    def _gloo_said(self, place: Place, tokens: _Rows, part: _Rows) -> _Said:
        given, got = self._elements(place, tokens, part)
        said = _shaped([[given // HIDDEN, HIDDEN]], ["float"])
        size = 4 * given
        both: dict[str, Any] = {"bytes_in": size, "bytes_out": size if place.kind == "all_reduce" else None}
        if place.kind == ALL_TO_ALL:
            both |= {"bytes_out": 4 * got, **_splits(tokens, part)}
        return _Said(said.args, {**said.columns, **both, "collective": place.kind, "dtype": "float"})

    def _c10d_said(self, place: Place, tokens: _Rows, part: _Rows) -> _Said:
        """c10d's metadata, as on the call and on its kernel."""
        given, got = self._elements(place, tokens, part)
        group = self.profile.group(place.everyone)
        ranks = self.profile.groups()[group]
        return _Said(
            {
                "Collective name": CALLS[place.kind][2],
                "In msg nelems": given,
                "Out msg nelems": got,
                "Group size": len(ranks),
                "dtype": "BFloat16",
                "In split size": str(list(_listed_rows(tokens))),
                "Out split size": str(list(_listed_rows(part))),
                "Process Group Name": group,
                "Process Group Description": "undefined",
                "Process Group Ranks": str(ranks),
            }
        )

    def _nccl_said(self, place: Place, tokens: _Rows, part: _Rows) -> _Said:
        told = self._c10d_said(place, tokens, part).args
        return _Said(
            {"device": 0, "context": 1, "stream": NCCL, **told},
            {
                "collective": place.kind,
                "group": told["Process Group Name"],
                "group_size": told["Group size"],
                "bytes_in": 2 * told["In msg nelems"],
                "bytes_out": 2 * told["Out msg nelems"],
                "dtype": told["dtype"],
                **(_splits(tokens, part) if place.kind == ALL_TO_ALL else {}),
            },
        )


def _phase(name: str | None) -> int:
    return NONE if name is None else PHASES.index(name)


#: A batch's tokens, or in an all-to-all the rows to or from each rank.
_Rows = int | tuple[int, ...]


def _listed_rows(rows: _Rows) -> tuple[int, ...]:
    return rows if isinstance(rows, tuple) else ()


def _splits(given: _Rows, got: _Rows) -> dict[str, Any]:
    """Columns of an exchange that c10d's splits tell."""
    return {
        "in_split": list(_listed_rows(given)),
        "out_split": list(_listed_rows(got)),
        "tokens": sum(_listed_rows(got)),
    }


def _tokens(steps: Steps) -> Ints:
    """Tokens of each batch; a dummy batch computes one."""
    return np.asarray(np.maximum(steps.prefill_tokens + steps.decode_tokens + steps.recompute_tokens, 1))


def _batch(steps: Steps, k: int) -> tuple[int, int, int, int]:
    """Requests and tokens of a batch, of prefill then of the rest: to vLLM what is computed again after output is decode."""
    return (
        int(steps.prefill_requests[k]),
        int(steps.prefill_tokens[k]),
        int(steps.decode_requests[k] + steps.recompute_requests[k]),
        int(steps.decode_tokens[k] + steps.recompute_tokens[k]),
    )


def _annotation(batch: tuple[int, int, int, int]) -> str:
    return "execute_context_{}({})_generation_{}({})".format(*batch)


def _shaped(dims: list[Any], types: list[str]) -> _Said:
    return _Said({"Input type": types, "Input Dims": dims}, {"input_dims": orjson.dumps(dims).decode()})


# -- files ----------------------------------------------------------------------------------------


def write_profiles(outcome: Outcome, folder: Path) -> list[Path]:
    """Write a file for each rank of each instance and window, in a folder per instance; returns them."""
    paths = []
    for profile in profiles(outcome):
        place = folder / profile.world.instance
        place.mkdir(parents=True, exist_ok=True)
        paths.append(place / profile.file_name)
        _write(profile, paths[-1])
    return paths


def _write(profile: Profile, path: Path) -> None:
    when = profile.exported_ns // 1_000_000_000
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 3, raw, mtime=when) as file:
        file.write(orjson.dumps(_head(profile))[:-1] + b',"traceEvents":[')
        file.write(_listed(_surroundings(profile)))
        events = _events(profile)
        while some := list(islice(events, EVENTS)):
            file.write(b",\n" + _listed(some))
        file.write(b'],"traceName":"' + path.name.removesuffix(".gz").encode() + b'"}')


def _listed(events: list[dict[str, Any]]) -> bytes:
    """JSON of a list without its brackets."""
    return orjson.dumps(events)[1:-1]


def _head(profile: Profile) -> dict[str, Any]:
    backend, groups = profile.backend, profile.groups()
    device = {"nccl": "cuda:nccl", "gloo": "cpu:gloo,cuda:gloo"}[backend]
    trace = f"{profile.world.instance} {profile.window} {profile.rank}"
    return {
        "schemaVersion": 1,
        "deviceProperties": [],
        "trace_id": hashlib.blake2b(trace.encode(), digest_size=16).hexdigest().upper(),
        "vllm_version_tuple": ["0", "32", "0"],
        "record_shapes": 1,
        "distributedInfo": {
            "backend": backend,
            "rank": profile.rank,
            "world_size": profile.world.ranks,
            "pg_count": len(groups),
            "pg_config": [
                {
                    "pg_name": name,
                    "pg_desc": "undefined" if name != "0" else "default_pg",
                    "backend_config": device,
                    "pg_size": len(ranks),
                    "ranks": ranks,
                }
                for name, ranks in groups.items()
            ],
        },
        "vllm_version": "0.32.0",
        "host_name": profile.host,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": BASE_NS,
    }


def _surroundings(profile: Profile) -> list[dict[str, Any]]:
    """What else a file holds: the worker's name, the profiler's own span, its end."""
    first, last = _us(profile.columns["start"][:1])[0], _us(np.array([profile.last_ns]))[0]
    # Parallelism that there is names the worker.
    parts = [f"DP{profile.dp}"] * (profile.world.engines > 1) + [f"TP{profile.tp}"] * (profile.world.tp > 1)
    label = "VLLM::Worker_" + "_".join(parts + [f"EP{profile.rank}"] * profile.world.moe)
    common = {"pid": profile.pid, "tid": 0, "ts": first}
    span: dict[str, Any] = {"pid": "Spans", "tid": "PyTorch Profiler", "ts": first, "dur": last - first}
    return [
        {"ph": "M", "name": "process_name", **common, "args": {"name": label}},
        {"ph": "M", "name": "process_labels", **common, "args": {"labels": "CPU"}},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", **span, "args": {"Op count": 0}},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": last},
    ]


def _events(profile: Profile) -> Iterator[dict[str, Any]]:
    columns = profile.columns
    names, categories, said = profile.name.values, profile.category.values, profile.said.values
    durations = ((columns["end"] - columns["start"]) / 1_000).tolist()
    numbers = [columns[c].tolist() for c in ("name", "category", "said", "thread", "correlation", "seq")]
    rows = zip(*numbers, _us(columns["start"]), durations, strict=True)
    for number, (name, category, says, thread, correlation, seq, ts, dur) in enumerate(rows):
        kind = categories[category]
        args = {"External id": number, **said[says].args}
        if correlation != NONE:
            args["correlation"] = correlation
        if seq != NONE:
            args["Seq"] = seq
        pid = 0 if kind in ON_GPU else profile.pid
        yield {
            "ph": "X", "cat": kind, "name": names[name], "pid": pid, "tid": thread, "ts": ts, "dur": dur, "args": args,
        }  # fmt: skip


def _us(times_ns: Ints) -> list[float]:
    """µs since Kineto's base: to the ns, as a float of that size holds it."""
    values: list[float] = ((times_ns - BASE_NS) / 1_000).tolist()
    return values
