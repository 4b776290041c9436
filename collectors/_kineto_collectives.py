"""The collectives of a profile: the one event that stands for this rank's part in each, with what its call says.

On a GPU that is the kernel; for gloo the transfer in its worker thread, which begins when the rank has come and ends
when all have. Kernels may carry c10d's metadata; else their call on the CPU does, found by when it launched them.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
from pyarrow import compute

from tailscope.schema import RANK_EVENTS

from . import _kineto_names as names
from ._kineto_spool import NONE, PHASE_INDEX, Spool
from ._kineto_timeline import Intervals, Ints

#: Untyped: the stubs of pyarrow know only some of what these functions take.
pc: Any = compute

#: Columns of `rank_events` that only collectives have.
_COLUMNS = (
    "collective",
    "group",
    "group_size",
    "seq",
    "bytes_in",
    "bytes_out",
    "in_split",
    "out_split",
    "tokens",
    "dtype",
)
DISPATCH, COMBINE, EXPERT, ATTENTION, COLLECTIVE = (
    PHASE_INDEX[phase] for phase in ("dispatch", "combine", "expert", "attention", "collective")
)


class _Told(NamedTuple):
    """What an event says of a collective."""

    name: str
    on_gpu: bool
    collective: int
    shapes: tuple[tuple[int, ...], ...] = ()
    types: tuple[str, ...] = ()
    splits: tuple[str | None, str | None] = (None, None)
    kind: str | None = None
    elements_in: int | None = None
    elements_out: int | None = None
    in_split: str | None = None
    out_split: str | None = None
    group_size: int | None = None
    dtype: str | None = None
    group: str | None = None
    seq: int | None = None


def _told(rows: pa.Table) -> list[_Told]:
    told = []
    columns = (rows[c].to_pylist() for c in ("name", "on_gpu", "collective", "args"))
    for name, on_gpu, collective, text in zip(*columns, strict=True):
        args = _read(text) if text else None
        if not isinstance(args, dict):
            told.append(_Told(name, on_gpu, collective))
            continue
        get = args.get
        types, dims, inputs = get("Input type"), get("Input Dims"), get("Concrete Inputs")
        told.append(
            _Told(
                name,
                on_gpu,
                collective,
                tensors_in(dims) if dims else (),
                tuple(t for t in types if isinstance(t, str)) if isinstance(types, list) else (),
                splits_in(inputs),
                _text(get("Collective name")),
                _number(get("In msg nelems")),
                _number(get("Out msg nelems")),
                _text(get("In split size")),
                _text(get("Out split size")),
                _number(get("Group size")),
                _text(get("dtype")),
                _text(get("Process Group Name")),
                _number(get("Seq")),
            )
        )
    return told


def _text(value: Any) -> str | None:
    return value if type(value) is str else None


def _number(value: Any) -> int | None:
    return value if type(value) is int and not _beyond(value) else None


def _read(text: str) -> Any:
    """JSON, None where it is none or nested beyond what can be read."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _beyond(value: Any) -> bool:
    """Whether a number is none that a table holds, or that can count anything."""
    return isinstance(value, int) and not 0 <= value < 1 << 53


class Collectives:
    """The rows that stand for collectives, by number of their event."""

    def __init__(self, spool: Spool) -> None:
        told = spool.told.sort_by("start_ns")
        calls = Calls(told)
        gloo = pc.and_(pc.starts_with(told["name"], "gloo:"), pc.invert(told["on_gpu"]))
        mine = told.filter(pc.or_(pc.greater_equal(told["collective"], 0), gloo)).sort_by("number")
        launch = spool.launch_of(mine).filled(NONE)
        rows = _told(mine)
        self._numbers = np.asarray(mine["number"].to_numpy(), np.int64)
        self._starts = np.asarray(mine["start_ns"].to_numpy(), np.int64)
        self._on_gpu = np.asarray(mine["on_gpu"].to_numpy(), bool)
        call = calls.around(np.where(launch >= 0, launch, self._starts))
        self._kinds = [
            _kind(row, calls.rows[c] if c >= 0 else None) for row, c in zip(rows, call.tolist(), strict=True)
        ]
        for kind in {k for k, gpu in zip(self._kinds, self._on_gpu, strict=True) if k and not gpu}:
            of_kind = np.array([k == kind for k in self._kinds]) & ~self._on_gpu
            chosen = np.flatnonzero(of_kind)[np.argsort(self._starts[of_kind], kind="stable")]
            call[chosen] = calls.of_gloo(kind, self._starts[chosen])
        for i in _sends(rows, self._starts):
            self._kinds[i] = None
        self._phases = self._told_phases(spool, np.asarray(mine["phase"].to_numpy(), np.int64))
        said = [
            _said(row, k, calls.rows[c] if c >= 0 else None)
            for row, k, c in zip(rows, self._kinds, call.tolist(), strict=True)
        ]
        # The last entry is for events that are no collective.
        columns = zip(*said, (None,) * len(_COLUMNS[1:]), strict=True)
        fields = [RANK_EVENTS.arrow.field(name) for name in _COLUMNS]
        self._table = pa.Table.from_arrays(
            [
                pa.array(values, field.type)
                for values, field in zip([[*self._kinds, None], *columns], fields, strict=True)
            ],
            schema=pa.schema(fields),
        )
        self._known = [name for name in _COLUMNS if self._table[name].null_count <= len(rows)]

    def of(self, numbers: Ints) -> Ints:
        """Index of the collective that each event stands for, else NONE."""
        if not len(self._numbers):
            return np.full(len(numbers), NONE)
        index = np.minimum(np.searchsorted(self._numbers, numbers), len(self._numbers) - 1)
        return np.asarray(np.where(self._numbers[index] == numbers, index, NONE))

    def phase_of(self, part: Ints, around: Ints) -> Ints:
        """Index of each collective's phase: what its name or its surroundings say, else `collective`."""
        told = self._phases[part] if len(self._phases) else np.full(len(part), COLLECTIVE)
        enclosed = (around == DISPATCH) | (around == COMBINE)
        return np.where(enclosed, around, told)

    def columns(self, part: Ints, batch: pa.Table) -> dict[str, Any]:
        """Columns of `rank_events` for a batch of events, of which `part` says what collective each is."""
        places: Any = pa.array(np.where(part >= 0, part, len(self._numbers)))
        taken = self._table.select(self._known).take(places)
        columns: dict[str, Any] = {name: taken[name] for name in self._known}
        columns["bytes_in"] = pc.coalesce(columns.get("bytes_in", batch["bytes"]), batch["bytes"])
        return columns

    def _told_phases(self, spool: Spool, named: Ints) -> Ints:
        """dispatch or combine, by name or by what runs before and after; else `collective`.

        All-gather before experts and reduce-scatter after them are how vLLM dispatches and combines by default;
        of all-to-alls the one before is the dispatch.
        """
        phases = np.where(self._on_gpu & ((named == DISPATCH) | (named == COMBINE)), named, COLLECTIVE)
        around = pc.is_in(spool.marks["phase"], value_set=pa.array([EXPERT, ATTENTION]))
        marks = spool.marks.filter(around)
        for on_gpu in (True, False):
            here = marks.filter(pc.equal(marks["on_gpu"], on_gpu))
            times, expert = here["start_ns"].to_numpy(), here["phase"].to_numpy() == EXPERT
            mine = np.flatnonzero(self._on_gpu == on_gpu)
            if not expert.any() or not len(mine):
                continue
            after = np.searchsorted(times, self._starts[mine])
            next_is = (after < len(times)) & expert[np.minimum(after, len(times) - 1)]
            last_was = (after > 0) & expert[np.maximum(after - 1, 0)]
            kinds = np.array([self._kinds[i] or "" for i in mine])
            # Of several all-to-alls between the experts of two layers the first combines.
            first = np.ones(len(mine), bool)
            order = np.lexsort((self._starts[mine], after))
            first[order[1:]] = after[order][1:] != after[order][:-1]
            exchange = kinds == "all_to_all"
            gathers = ((kinds == "all_gather") & next_is) | (exchange & next_is & ~(last_was & first))
            scatters = ((kinds == "reduce_scatter") & last_was) | (exchange & last_was & (first | ~next_is))
            undecided = phases[mine] == COLLECTIVE
            phases[mine[undecided & gathers]] = DISPATCH
            phases[mine[undecided & scatters & ~gathers]] = COMBINE
        return phases


class Calls:
    """The CPU side of collectives: who called which, on what group, with how much data."""

    def __init__(self, told: pa.Table) -> None:
        """`told`: the spool's rows at hand, by start."""
        named = pc.match_substring_regex(told["name"], "^(record_param_comms$|nccl:|c10d::)")
        mine = told.filter(pc.and_(named, pc.invert(told["on_gpu"])))
        self.rows = _told(mine)
        self._start = np.asarray(mine["start_ns"].to_numpy(), np.int64)
        self._end = self._start + np.asarray(pc.fill_null(mine["duration_ns"], 0).to_numpy(), np.int64)
        # Older torch records the call without saying what it was; its annotation does.
        recorded = [row.name == "record_param_comms" and row.kind is not None for row in self.rows]
        self._recorded = np.flatnonzero(np.array(recorded, bool))
        self._annotated = np.flatnonzero(np.array([row.name.startswith("nccl:") for row in self.rows], bool))
        kinds = [
            names.collective_kind(row.name) if row.name.startswith("c10d::") else None for row in self.rows
        ]
        self._enqueued = {
            kind: np.flatnonzero(np.array([k == kind for k in kinds], bool)) for kind in set(kinds) if kind
        }

    def around(self, launches_ns: Ints) -> Ints:
        """Index of the call each kernel was launched in: its record, else its annotation, else NONE."""
        result = np.full(len(launches_ns), NONE)
        for which in (self._annotated, self._recorded):
            if len(which):
                index = Intervals(self._start[which], self._end[which]).of(launches_ns)
                result = np.where(index >= 0, which[index], result)
        return result

    def of_gloo(self, kind: str, starts_ns: Ints) -> Ints:
        """Index of the call that enqueued each of gloo's transfers of a kind, in order of time."""
        calls = self._enqueued.get(kind)
        if calls is None:
            return np.full(len(starts_ns), NONE)
        if len(calls) == len(starts_ns):
            return calls
        index = np.searchsorted(self._start[calls], starts_ns, side="right") - 1
        return np.where(index >= 0, calls[np.maximum(index, 0)], NONE)


def _kind(row: _Told, call: _Told | None) -> str | None:
    if not row.on_gpu:
        return names.collective_kind(row.name)
    if row.kind and (kind := names.collective_kind(row.kind)):
        return kind
    by_name = names.KINDS[row.collective]
    # NCCL builds an all-to-all of sends and receives; RCCL's kernels have one name for all.
    if by_name in ("send_recv", "unknown") and call is not None:
        return names.collective_kind(call.kind or call.name) or by_name
    return by_name


def _sends(rows: list[_Told], starts: Ints) -> list[int]:
    """Of DeepEP's low-latency kernels that come in pairs the first, which sends; the second waits."""
    chosen = sorted(
        (i for i, row in enumerate(rows) if names.is_low_latency(row.name)), key=lambda i: int(starts[i])
    )
    sends: list[int] = []
    at = 0
    while at + 1 < len(chosen):
        pair = rows[chosen[at]].name == rows[chosen[at + 1]].name
        if pair:
            sends.append(chosen[at])
        at += 2 if pair else 1
    return sends


def _said(row: _Told, kind: str | None, call: _Told | None) -> tuple[Any, ...]:
    """What is known of a collective, in the order of _COLUMNS: from the event itself, else from its call."""
    known = row
    if call is not None:
        mine: Any = (
            theirs if own in (None, ()) else own for own, theirs in zip(row[3:], call[3:], strict=True)
        )
        known = _Told(*row[:3], *mine)
    dtype = known.dtype or next((t for t in known.types if t in names.ELEMENT_BYTES), None)
    width = names.ELEMENT_BYTES.get(dtype or "")
    bytes_in = known.elements_in * width if known.elements_in is not None and width else None
    bytes_out = known.elements_out * width if known.elements_out is not None and width else None
    received, sent = numbers_in(known.out_split), numbers_in(known.in_split)
    if bytes_in is None and width and known.shapes:
        bytes_in = _bytes(known.shapes[0], width)
    if call is not None and call.name.startswith("c10d::") and kind == "all_to_all":
        received, sent = received or numbers_in(call.splits[0]), sent or numbers_in(call.splits[1])
        if bytes_out is None and len(call.shapes) == 2 and width:
            bytes_out = _bytes(call.shapes[0], width)
    if bytes_out is None and kind == "all_reduce":
        bytes_out = bytes_in
    return (
        known.group,
        known.group_size,
        known.seq,
        bytes_in,
        bytes_out,
        sent,
        received,
        sum(received) if received else None,
        dtype,
    )


def _bytes(shape: tuple[int, ...], width: int) -> int | None:
    size = prod(shape) * width
    return None if _beyond(size) else size


@lru_cache(maxsize=65_536)
def numbers_in(text: str | None) -> tuple[int, ...] | None:
    """The numbers of a list as text, `[80, 61]`; None for an empty list and for what is none."""
    values = _read(text or "null")
    if isinstance(values, list) and values and all(type(v) is int and not _beyond(v) for v in values):
        return tuple(values) if not _beyond(sum(values)) else None
    return None


def tensors_in(dims: Any) -> tuple[tuple[int, ...], ...]:
    """Shapes of the tensors in `Input Dims`, lists of tensors taken apart: [[[64, 256]], []] is ((64, 256),)."""
    found: list[tuple[int, ...]] = []

    def visit(value: Any, depth: int) -> None:
        if isinstance(value, list) and value and depth < 4:
            if all(type(v) is int for v in value):
                found.append(tuple(value))
            else:
                for inner in value:
                    visit(inner, depth + 1)

    visit(dims, 0)
    return tuple(found)


def splits_in(inputs: Any) -> tuple[str | None, str | None]:
    """Splits received and sent, as text, of an exchange's `Concrete Inputs`: its third and fourth, from 0."""
    if not isinstance(inputs, list) or len(inputs) < 5:
        return None, None
    received, sent = (v if isinstance(v, str) else None for v in inputs[3:5])
    return received, sent
