"""A timeline in Perfetto's own format: a `Trace` of `TracePacket`s with track events (protos/perfetto/trace of Perfetto)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from tailscope.export import wire
from tailscope.export.timeline import Batch, Counters, Mark, Mask, Slices, Timeline, Track
from tailscope.export.wire import Part, constant, flatten, message, one, one_fixed64
from tailscope.render.words import sentence
from tailscope.safe import printable
from tailscope.stats import Ints

# Numbers of fields.
PACKET = 1
TIMESTAMP, SEQUENCE, TRACK_EVENT, INTERNED, FLAGS, DESCRIPTOR, CLOCKS = 8, 10, 11, 12, 13, 60, 6
EVENT_TYPE, EVENT_TRACK, EVENT_NAME_IID, EVENT_NAME = 9, 11, 10, 23
EVENT_ARG, EVENT_VALUE, EVENT_FLOW, EVENT_FLOW_END = 4, 44, 47, 48
ARG_NAME_IID, ARG_UINT, ARG_INT, ARG_DOUBLE, ARG_TEXT, ARG_NAME, ARG_BOOL = 1, 3, 4, 5, 6, 10, 2
INTERNED_EVENT_NAMES, INTERNED_ARG_NAMES = 2, 3
TRACK_UUID, TRACK_PARENT, TRACK_NAME, TRACK_COUNTER, TRACK_ABOUT = 1, 5, 2, 8, 14
TRACK_CHILDREN, TRACK_RANK, TRACK_MERGING = 11, 12, 15
COUNTER_UNIT_NAME = 6
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4
EXPLICIT, BY_NAME = 3, 1
CLEARED, NEEDED = 1, 2
BOOTTIME, REALTIME = 6, 1

#: Of a track's id, a name's number, and an unsigned argument, in bytes of 7 bits.
TRACK_BYTES, NAME_BYTES, UINT_BYTES = 4, 3, 6
TIME_BYTES = 9
_SEQUENCE = one(SEQUENCE, 1)
_NEEDS = constant(_SEQUENCE + one(FLAGS, NEEDED))
_PLAIN = constant(_SEQUENCE)
_TYPE = {kind: constant(one(EVENT_TYPE, kind)) for kind in (BEGIN, END, COUNTER)}


class Writer:
    """Writes packets in the order in which they come. Readers order them by time, and keep this order where times are equal."""

    def __init__(self, out: BinaryIO) -> None:
        self.out = out
        self.names_written = 0
        self.arg_names: dict[str, int] = {}
        self.args_written = 0
        self.slices = 0
        self.counters = 0

    def write(self, timeline: Timeline) -> None:
        self.out.write(self._clock(timeline.first_ns))
        for rank, track in enumerate(timeline.tracks.all):
            self.out.write(_packet(one(DESCRIPTOR, _descriptor(track, rank))))
        for batch in timeline.batches:
            data = self._batch(batch)
            self.out.write(self._new_names(list(timeline.names.known)))
            self.out.write(data)

    def _clock(self, first_ns: int) -> bytes:
        """Times are those of the wall clock; a viewer can show them as such."""
        same = b"".join(one(1, one(1, clock) + one(2, first_ns)) for clock in (BOOTTIME, REALTIME))
        return _packet(one(CLOCKS, same + one(2, BOOTTIME)), first_ns) + _packet(b"", flags=CLEARED)

    def _batch(self, batch: Batch) -> bytes:
        if isinstance(batch, Slices):
            self.slices += batch.count
            return self._slices(batch)
        if isinstance(batch, Counters):
            self.counters += batch.count
            return _counters(batch)
        self.slices += len(batch)
        return b"".join(_mark(mark) for mark in batch)

    def _new_names(self, names: Sequence[str]) -> bytes:
        """Names that came up since the last batch: of slices by their number, of arguments by theirs."""
        new = b"".join(
            one(INTERNED_EVENT_NAMES, one(1, i + 1) + one(2, names[i]))
            for i in range(self.names_written, len(names))
        )
        self.names_written = len(names)
        new += b"".join(
            one(INTERNED_ARG_NAMES, one(1, i) + one(2, name))
            for name, i in self.arg_names.items()
            if i > self.args_written
        )
        self.args_written = len(self.arg_names)
        return _packet(one(INTERNED, new), flags=NEEDED) if new else b""

    def _slices(self, batch: Slices) -> bytes:
        n = len(batch.track)
        track = wire.varint(EVENT_TRACK, batch.track, TRACK_BYTES)
        args = self._args(batch.args)
        parts = _begin(batch.start, track, batch.name, args, batch.there)
        for inner in batch.inner:
            parts += _begin(inner.start, track, inner.name, [], inner.there)
            parts += _end(inner.end, track, inner.there)
        parts += _end(batch.end, track, batch.there)
        return flatten(parts, n)

    def _args(self, args: Mapping[str, Any]) -> list[Part]:
        parts: list[Part] = []
        for name, values in args.items():
            if values.null_count == len(values):
                continue
            iid = self.arg_names.setdefault(name, len(self.arg_names) + 1)
            there = np.asarray(values.is_valid()) if values.null_count else None
            parts += message(EVENT_ARG, [constant(one(ARG_NAME_IID, iid)), *_value(values)], there)
        return parts


def _value(values: Any) -> list[Part]:
    kind = values.type
    if pa.types.is_boolean(kind):
        numbers = np.asarray(values.fill_null(False)).astype(np.int64)
        return [wire.varint(ARG_BOOL, numbers, 1)]
    if pa.types.is_integer(kind):
        numbers = np.asarray(values.fill_null(0)).astype(np.int64)
        if len(numbers) and (numbers.min() < 0 or int(numbers.max()) >= 1 << 7 * UINT_BYTES):
            return [wire.signed(ARG_INT, numbers)]
        return [wire.varint(ARG_UINT, numbers, UINT_BYTES)]
    if pa.types.is_floating(kind):
        return [wire.double(ARG_DOUBLE, np.asarray(values.fill_null(0.0), np.float64))]
    return wire.string(ARG_TEXT, values)


def _begin(time: Ints, track: Part, name: Ints, args: list[Part], there: Mask | None) -> list[Part]:
    event = message(
        TRACK_EVENT, [_TYPE[BEGIN], track, wire.varint(EVENT_NAME_IID, name + 1, NAME_BYTES), *args]
    )
    return message(PACKET, [wire.varint(TIMESTAMP, time, TIME_BYTES), _NEEDS, *event], there)


def _end(time: Ints, track: Part, there: Mask | None) -> list[Part]:
    event = message(TRACK_EVENT, [_TYPE[END], track])
    return message(PACKET, [wire.varint(TIMESTAMP, time, TIME_BYTES), _PLAIN, *event], there)


def _counters(batch: Counters) -> bytes:
    event = message(
        TRACK_EVENT,
        [
            _TYPE[COUNTER],
            wire.varint(EVENT_TRACK, batch.track, TRACK_BYTES),
            wire.double(EVENT_VALUE, batch.value),
        ],
    )
    packet = message(PACKET, [wire.varint(TIMESTAMP, batch.time, TIME_BYTES), _PLAIN, *event])
    return flatten(packet, len(batch.track))


def _packet(data: bytes, time: int | None = None, flags: int | None = None) -> bytes:
    head = b"" if time is None else one(TIMESTAMP, time)
    tail = b"" if flags is None else one(FLAGS, flags)
    return one(PACKET, head + _SEQUENCE + tail + data)


def _descriptor(track: Track, rank: int) -> bytes:
    data = one(TRACK_UUID, track.id) + one(TRACK_NAME, printable(track.name)) + one(TRACK_RANK, rank)
    if track.parent is not None:
        data += one(TRACK_PARENT, track.parent)
    if track.about:
        data += one(TRACK_ABOUT, sentence(track.about))
    if track.unit is not None:
        data += one(TRACK_COUNTER, one(COUNTER_UNIT_NAME, track.unit))
    return data + one(TRACK_CHILDREN, EXPLICIT) + one(TRACK_MERGING, BY_NAME)


def _mark(mark: Mark) -> bytes:
    event = one(EVENT_TRACK, mark.track)
    named = one(EVENT_NAME, sentence(mark.name))
    for name, value in mark.args.items():
        field = ARG_TEXT if isinstance(value, str) else ARG_DOUBLE if isinstance(value, float) else ARG_INT
        named += one(EVENT_ARG, one(ARG_NAME, printable(name)) + one(field, value))
    for number in mark.begins:
        named += one_fixed64(EVENT_FLOW, number)
    for number in mark.ends:
        named += one_fixed64(EVENT_FLOW_END, number)
    kind = INSTANT if mark.end is None else BEGIN
    written = _packet(one(TRACK_EVENT, one(EVENT_TYPE, kind) + event + named), mark.start)
    if mark.end is not None:
        written += _packet(one(TRACK_EVENT, one(EVENT_TYPE, END) + event), mark.end)
    return written
