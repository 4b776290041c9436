"""The collectives of a profile: the one event that stands for this rank's part in each, with what its call says.

On a GPU that is the kernel; for gloo the transfer in its worker thread, which begins when the rank has come and ends
when all have. Kernels may carry c10d's metadata; else their call on the CPU does, found by when it launched them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from tailscope.schema import RANK_EVENTS

from . import _kineto_names as names
from ._kineto_spool import NONE, PHASE_INDEX, Spool
from ._kineto_timeline import Intervals, Ints

#: Untyped: the stubs of pyarrow know only some of what these functions take.
pc: Any = compute

#: Columns of `rank_events` that only collectives have, beside `seq`.
_COLUMNS = (
    "collective",
    "group",
    "group_size",
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


ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE = (
    names.KIND_INDEX[kind] for kind in ("all_to_all", "all_gather", "reduce_scatter", "broadcast", "reduce")
)


class _Told(NamedTuple):
    """What an event says of a collective, but for its number."""

    name: str
    on_gpu: bool
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


def _told(name: str, on_gpu: bool, text: str | None) -> _Told:
    """From a name and what the spool keeps of the event's args."""
    args = _read(text) if text else None
    if not isinstance(args, dict):
        return _Told(name, on_gpu)
    get = args.get
    types = get("Input type")
    return _Told(
        name,
        on_gpu,
        tensors_in(get("Input Dims")),
        tuple(t for t in types if isinstance(t, str)) if isinstance(types, list) else (),
        splits_in(get("Concrete Inputs")),
        _word(get("Collective name")),
        _number(get("In msg nelems")),
        _number(get("Out msg nelems")),
        get("In split size"),
        get("Out split size"),
        _number(get("Group size")),
        _word(get("dtype")),
        _word(get("Process Group Name")),
    )


def _word(text: str | None) -> str | None:
    """A text that is none of a list or an object."""
    return None if text is None or text.startswith(("[", "{")) else text


def _number(value: int | None) -> int | None:
    return None if value is None or _beyond(value) else value


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
        calls = Calls(spool, told)
        gloo = spool.names.where(lambda name: name.startswith("gloo:"))[told["name"].to_numpy()]
        chosen = (told["collective"].to_numpy() >= 0) | (gloo & ~np.asarray(told["on_gpu"]))
        mine = told.filter(pa.array(chosen)).sort_by("number")
        launch = np.append(spool.launches.start_ns, NONE)[spool.launch_of(mine)]
        self._numbers = _ints(mine["number"])
        self._starts = _ints(mine["start_ns"])
        self._on_gpu = np.asarray(mine["on_gpu"].to_numpy(), bool)
        call = calls.around(np.where(launch >= 0, launch, self._starts))
        name, said = _ints(mine["name"]), _ints(mine["said"])

        def read(name: int, said: int, on_gpu: bool) -> _Told:
            return _told(spool.names.texts[name], on_gpu, spool.said.texts[said] if said >= 0 else None)

        def kind_of(key: tuple[int, ...]) -> int:
            row = read(key[0], key[1], bool(key[2]))
            called = read(key[4], key[5], False) if key[4] >= 0 else None
            return names.KIND_INDEX.get(_kind(row, names.KINDS[key[3]], called) or "", NONE)

        def said_of(key: tuple[int, ...]) -> tuple[Any, ...]:
            row = read(key[0], key[1], bool(key[2]))
            kind = names.KINDS[key[3]] if key[3] >= 0 else None
            return kind, *_said(row, kind, read(key[4], key[5], False) if key[4] >= 0 else None)

        by_name = _ints(mine["collective"])
        found, which = _each(kind_of, name, said, self._on_gpu, by_name, calls.name(call), calls.said(call))
        kinds = np.array([*found, NONE])[which]
        for kind in np.unique(kinds[~self._on_gpu & (kinds >= 0)]).tolist():
            of_kind = np.flatnonzero((kinds == kind) & ~self._on_gpu)
            of_kind = of_kind[np.argsort(self._starts[of_kind], kind="stable")]
            call[of_kind] = calls.of_gloo(kind, self._starts[of_kind])
        kinds[_sends(name, self._starts, spool.names.where(names.is_low_latency))] = NONE
        # Of unequal parts vLLM gathers and scatters by a broadcast from, or a reduction to, each rank, launched as one.
        grouped = self._on_gpu & (call < 0)
        kinds_told = np.where(grouped & (kinds == BROADCAST), ALL_GATHER, kinds)
        kinds_told = np.where(grouped & (kinds == REDUCE), REDUCE_SCATTER, kinds_told)
        self._phases = self._told_phases(spool, kinds_told, _ints(mine["phase"]))
        kinds = np.where(self._phases == COLLECTIVE, kinds, kinds_told)
        records, self._record = _each(
            said_of, name, said, self._on_gpu, kinds, calls.name(call), calls.said(call)
        )
        seq = _ints(mine["seq"])
        # The last entries are for events that are no collective.
        self._seq = np.append(np.where(seq >= 0, seq, calls.seq(call)), NONE)
        self._record = np.append(self._record, len(records))
        fields = [RANK_EVENTS.arrow.field(column) for column in _COLUMNS]
        columns = zip(*records, (None,) * len(_COLUMNS), strict=True)
        self._table = pa.Table.from_arrays(
            [pa.array(values, field.type) for values, field in zip(columns, fields, strict=True)],
            schema=pa.schema(fields),
        )
        self._known = [column for column in _COLUMNS if self._table[column].null_count <= len(records)]

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
        place = np.where(part >= 0, part, len(self._numbers))
        records: Any = pa.array(self._record[place])
        taken = self._table.select(self._known).take(records)
        columns: dict[str, Any] = {name: taken[name] for name in self._known}
        seq = self._seq[place]
        columns["seq"] = pa.array(seq, mask=seq < 0)
        columns["bytes_in"] = pc.coalesce(columns.get("bytes_in", batch["bytes"]), batch["bytes"])
        return columns

    def _told_phases(self, spool: Spool, kinds: Ints, named: Ints) -> Ints:
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
            kind = kinds[mine]
            # Of several all-to-alls between the experts of two layers the first combines.
            first = np.ones(len(mine), bool)
            order = np.lexsort((self._starts[mine], after))
            first[order[1:]] = after[order][1:] != after[order][:-1]
            exchange = kind == ALL_TO_ALL
            gathers = ((kind == ALL_GATHER) & next_is) | (exchange & next_is & ~(last_was & first))
            scatters = ((kind == REDUCE_SCATTER) & last_was) | (exchange & last_was & (first | ~next_is))
            undecided = phases[mine] == COLLECTIVE
            phases[mine[undecided & gathers]] = DISPATCH
            phases[mine[undecided & scatters & ~gathers]] = COMBINE
        return phases


class Calls:
    """The CPU side of collectives: who called which, on what group, with how much data."""

    def __init__(self, spool: Spool, told: pa.Table) -> None:
        """`told`: the spool's rows at hand, by start."""
        call = spool.names.where(lambda name: names.CALL.match(name) and not name.startswith("gloo:"))
        mine = told.filter(pa.array(call[told["name"].to_numpy()] & ~np.asarray(told["on_gpu"])))
        self._name, self._said, self._seq = (np.append(_ints(mine[c]), NONE) for c in ("name", "said", "seq"))
        self._start = _ints(mine["start_ns"])
        self._end = self._start + _ints(pc.fill_null(mine["duration_ns"], 0))
        name, said = self._name[:-1], self._said[:-1]
        # Older torch records the call without saying what it was; its annotation does.
        speaks = spool.said.where(lambda text: _told("", False, text).kind)
        recorded = spool.names.where(lambda name: name == "record_param_comms")[name] & speaks[said]
        self._recorded = np.flatnonzero(recorded)
        self._annotated = np.flatnonzero(spool.names.where(lambda name: name.startswith("nccl:"))[name])
        kinds = np.array([*(_enqueued_kind(name) for name in spool.names.texts), NONE])[name]
        self._enqueued = {
            kind: np.flatnonzero(kinds == kind) for kind in np.unique(kinds).tolist() if kind >= 0
        }

    def name(self, calls: Ints) -> Ints:
        """Codes of the names of calls, NONE for NONE."""
        return np.asarray(self._name[calls])

    def said(self, calls: Ints) -> Ints:
        """Codes of what calls say, NONE for NONE."""
        return np.asarray(self._said[calls])

    def seq(self, calls: Ints) -> Ints:
        """Numbers of calls, NONE where there is none."""
        return np.asarray(self._seq[calls])

    def around(self, launches_ns: Ints) -> Ints:
        """Index of the call each kernel was launched in: its record, else its annotation, else NONE."""
        result = np.full(len(launches_ns), NONE)
        for which in (self._annotated, self._recorded):
            if len(which):
                index = Intervals(self._start[which], self._end[which]).of(launches_ns)
                result = np.where(index >= 0, which[index], result)
        return result

    def of_gloo(self, kind: int, starts_ns: Ints) -> Ints:
        """Index of the call that enqueued each of gloo's transfers of a kind, in order of time."""
        calls = self._enqueued.get(kind)
        if calls is None:
            return np.full(len(starts_ns), NONE)
        if len(calls) == len(starts_ns):
            return calls
        index = np.searchsorted(self._start[calls], starts_ns, side="right") - 1
        return np.where(index >= 0, calls[np.maximum(index, 0)], NONE)


def _ints(column: Any) -> Ints:
    return np.asarray(column.to_numpy(), np.int64)


def _each(what: Callable[[tuple[int, ...]], Any], *codes: Ints) -> tuple[list[Any], Ints]:
    """What each different combination of codes gives, and which of these each row has: many rows, few combinations."""
    keys, which = np.unique(np.stack([np.asarray(c, np.int64) for c in codes]), axis=1, return_inverse=True)
    return [what(tuple(key)) for key in keys.T.tolist()], which.reshape(-1)


def _enqueued_kind(name: str) -> int:
    kind = names.collective_kind(name) if name.startswith("c10d::") else None
    return names.KIND_INDEX[kind] if kind else NONE


def _kind(row: _Told, by_name: str, call: _Told | None) -> str | None:
    if not row.on_gpu:
        return names.collective_kind(row.name)
    if row.kind and (kind := names.collective_kind(row.kind)):
        return kind
    # NCCL builds an all-to-all of sends and receives; RCCL's kernels have one name for all.
    if by_name in ("send_recv", "unknown") and call is not None:
        return names.collective_kind(call.kind or call.name) or by_name
    return by_name


def _sends(name: Ints, starts: Ints, low_latency: NDArray[np.bool_]) -> Ints:
    """Of DeepEP's low-latency kernels that come in pairs the first, which sends; the second waits."""
    chosen = np.flatnonzero(low_latency[name])
    chosen = chosen[np.argsort(starts[chosen], kind="stable")]
    places = np.arange(len(chosen))
    fresh = np.concatenate([[True], name[chosen][1:] != name[chosen][:-1]])[: len(chosen)]
    first = np.maximum.accumulate(np.where(fresh, places, 0)) if len(chosen) else places
    followed = np.append(~fresh[1:], False)[: len(chosen)]
    return np.asarray(chosen[((places - first) % 2 == 0) & followed])


def _said(row: _Told, kind: str | None, call: _Told | None) -> tuple[Any, ...]:
    """What is known of a collective, in the order of _COLUMNS: from the event itself, else from its call."""
    known = row
    if call is not None:
        mine: Any = (
            theirs if own in (None, ()) else own for own, theirs in zip(row[2:], call[2:], strict=True)
        )
        known = _Told(*row[:2], *mine)
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
