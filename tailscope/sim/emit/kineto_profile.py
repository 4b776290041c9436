"""One rank's profile in one window: its events as columns, and what they say. See `kineto_shown` for what makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tailscope.schema import PHASES
from tailscope.sim.emit.kineto_forms import FORMS, Form
from tailscope.sim.outcome import Floats, Ints
from tailscope.sim.ranks import RankWorld

#: Between a profile's last event and its export, and from one rank's export to the next's.
EXPORT_NS, EXPORT_RANK_NS = 3_000_000, 370_000
#: Events in a buffer of the profiler: those are lost together.
BUFFER = 24
#: What seeds begin with, so that jitter and losses are drawn from streams of their own.
JITTER_STREAM, LOSS_STREAM = 11, 12
NONE = -1


@dataclass(frozen=True)
class Said:
    """What an event says beside its times: `args` in the file, `columns` of `rank_events` that follow from them."""

    args: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass
class Texts:
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
    name: Texts = field(default_factory=Texts)
    category: Texts = field(default_factory=Texts)
    said: Texts = field(default_factory=Texts)
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
    def form(self) -> Form:
        return FORMS[self.world.settings.emitter]

    @property
    def backend(self) -> str:
        return "nccl" if self.form.on_gpu else "gloo"

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
        found = {
            "0": everyone,
            self.group(False): everyone[first : first + world.tp],
            self.group(True): everyone,
        }
        if world.settings.coordinate:
            found[self.coordinating] = everyone
        return found

    @property
    def coordinating(self) -> str:
        """Name of the group that coordinates steps."""
        return str(3 + 2 * self.world.engines)

    def group(self, everyone: bool) -> str:
        """Name of the group of all ranks, or of the engine's own."""
        # Each is made with a twin for the CPU.
        return str(1 + 2 * (self.world.engines if everyone else self.dp))

    def add(self, name: str | Ints, category: str, start: Floats, end: Floats, **numbers: Any) -> None:
        """Events of a category, one an element of `start`; times in s by the true clock."""
        clock = self.world.clock_ns
        shape = start.shape
        block: dict[str, Any] = {"start": clock(self.rank, start), "end": clock(self.rank, end, start)}
        block["name"] = name if isinstance(name, np.ndarray) else self.name.code(name)
        block["category"] = self.category.code(category)
        if (launch := numbers.pop("launched", None)) is not None:
            block["launch"] = clock(self.rank, launch)
        block |= {"said": self.said.code((), Said), **numbers}
        self.blocks.append(
            {
                c: np.broadcast_to(np.asarray(block.get(c, NONE), np.int64), shape).ravel()
                for c in (*_NUMBERS, *_CODES)
            }
        )

    def rng(self, stream: int) -> np.random.Generator:
        return np.random.default_rng([stream, *self.world.seed, self.rank, self.window])

    def _damage(self, columns: dict[str, Ints], dropped: float) -> dict[str, Ints]:
        """What the profiler makes of kernels and gloo's transfers: stamps that are late, buffers that were lost."""
        jitter_s = self.world.settings.stamp_jitter_s
        if not jitter_s and not dropped:
            return columns
        category = self.category.code("kernel" if self.backend == "nccl" else "user_annotation")
        some = np.flatnonzero((columns["category"] == category) & ~np.isin(columns["name"], self.step_names))
        if jitter_s:
            late = self.rng(JITTER_STREAM).uniform(0, jitter_s * 1e9, len(some)).astype(np.int64)
            columns["start"][some] = np.minimum(columns["start"][some] + late, columns["end"][some])
        some = some[np.argsort(columns["start"][some], kind="stable")]
        lost = self.rng(LOSS_STREAM).random(len(some) // BUFFER + 1) < dropped
        kept = np.ones(len(columns["start"]), bool)
        kept[some[lost[np.arange(len(some)) // BUFFER]]] = False
        return {c: values[kept] for c, values in columns.items()}

    def finish(self, dropped: float = 0.0) -> None:
        columns = {c: np.concatenate([block[c] for block in self.blocks]) for c in (*_NUMBERS, *_CODES)}
        columns = self._damage(columns, dropped)
        order = np.lexsort((-columns["end"], columns["start"]))
        self.columns = {c: values[order] for c, values in columns.items()}
        self.blocks = []


def phase_code(name: str | None) -> int:
    return NONE if name is None else PHASES.index(name)
