"""Packets of many rows at once, against Perfetto's own schema; and lanes, against a loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

from tailscope.export import wire
from tailscope.export.lanes import lanes, stacked
from tailscope.export.perfetto import _value
from tailscope.export.wire import constant, flatten, message, one

NUMBERS = st.integers(0, 2**62)


@given(
    st.lists(
        st.tuples(NUMBERS, st.booleans(), st.one_of(st.none(), st.text(max_size=40))), min_size=1, max_size=20
    )
)
def test_rows_are_the_packets_that_the_schema_reads(rows: list[tuple[int, bool, str | None]]) -> None:
    times = np.array([time for time, _, _ in rows])
    there = np.array([kept for _, kept, _ in rows])
    texts = pa.array([text for _, _, text in rows], pa.string())
    event = message(
        11,
        [
            constant(one(9, 1)),
            wire.varint(11, times % 2**28, 4),
            *wire.string(23, texts),
            wire.double(44, times / 7),
        ],
    )
    data = flatten(message(1, [wire.varint(8, times, 9), *event], there), len(rows))
    trace = schema.Trace()
    trace.ParseFromString(data)
    expected = [row for row in rows if row[1]]
    assert len(trace.packet) == len(expected)
    for packet, (time, _, text) in zip(trace.packet, expected, strict=True):
        assert packet.timestamp == time
        assert packet.track_event.track_uuid == time % 2**28
        assert packet.track_event.double_counter_value == time / 7
        assert (packet.track_event.name if packet.track_event.HasField("name") else None) == text


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array([0, 1, 2**41], pa.int64()), "uint_value"),
        (pa.array([-1, 2**62, -(2**62)], pa.int64()), "int_value"),
        (pa.array([True, False, True]), "bool_value"),
        (pa.array([0.1, -2.5, float("inf")]), "double_value"),
        (pa.array(["a", "", "ünï"]), "string_value"),
    ],
)
def test_arguments_keep_their_type_and_value(values: Any, kind: str) -> None:
    data = flatten(message(1, _value(values)), len(values))
    # A repeated message of annotations: DebugAnnotation.dict_entries is field 11, here field 1 of a list we take apart.
    for expected, value in zip(values.to_pylist(), _split(data), strict=True):
        annotation = schema.DebugAnnotation()
        annotation.ParseFromString(value)
        assert annotation.WhichOneof("value") == kind
        assert getattr(annotation, kind) == expected


def _split(data: bytes) -> list[bytes]:
    found = []
    while data:
        size = (data[1] & 0x7F) | (data[2] << 7)
        found.append(data[3 : 3 + size])
        data = data[3 + size :]
    return found


def test_strings_of_a_slice_of_an_array() -> None:
    values = pa.array(["not this", "één", None, "x"]).slice(1)
    data = flatten(wire.string(1, values), 3)
    assert data == b"\x0a\x85\x00" + "één".encode() + b"\x0a\x81\x00x"


def test_a_message_that_its_length_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than its length can say"):
        flatten(message(1, wire.string(1, pa.array(["x" * 20_000]))), 1)


def test_single_numbers() -> None:
    annotation = schema.DebugAnnotation()
    for value in (0, 1, -1, 2**63 - 1, -(2**63)):
        annotation.ParseFromString(one(4, value))
        assert annotation.int_value == value


INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=60)


@given(INTERVALS)
def test_lanes_hold_what_does_not_overlap_and_are_as_few_as_can_be(intervals: list[tuple[int, int]]) -> None:
    ordered = sorted((start, start + length) for start, length in intervals)
    start, end = (np.array([pair[i] for pair in ordered], np.int64) for i in (0, 1))
    lane = lanes(start, end)
    busy: dict[int, int] = {}
    for own, first, last in zip(lane.tolist(), start.tolist(), end.tolist(), strict=True):
        assert busy.get(own, 0) <= first
        busy[own] = max(last, first + 1)
    most = max(
        (int(((start <= t) & (np.maximum(end, start + 1) > t)).sum()) for t in start.tolist()), default=0
    )
    assert len(busy) == most


def test_lanes_of_groups_are_numbered_over_all() -> None:
    group = np.array([0, 0, 2, 2, 2])
    start = np.array([0, 5, 0, 1, 20])
    lane, of_lane = stacked(group, start, start + 10)
    assert of_lane.tolist() == [0, 0, 2, 2]
    assert lane[:2].tolist() == [0, 1]
    assert set(lane[2:4].tolist()) == {2, 3}
    assert stacked(group[:0], start[:0], start[:0])[1].tolist() == []
