"""Reads a timeline as Perfetto's trace processor does: packets by the official schema, in order of time, and of the file where
times are equal; a slice that ends is the innermost of its track; flows go from slice to slice."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4


@dataclass
class Slice:
    track: int
    name: str
    start: int
    args: dict[str, Any]
    parent: Slice | None
    end: int | None = None
    #: (flow, whether it ends here)
    flows: list[tuple[int, bool]] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1


@dataclass
class Read:
    tracks: dict[int, Any]
    slices: list[Slice]
    counters: dict[int, list[tuple[int, float]]]
    flows: list[tuple[Slice, Slice]]

    def path(self, track: int) -> str:
        own = self.tracks[track]
        above = f"{self.path(own.parent_uuid)}/" if own.parent_uuid else ""
        return f"{above}{own.name}"

    def on(self, path: str) -> list[Slice]:
        return [s for s in self.slices if self.path(s.track) == path]

    def counter(self, path: str) -> list[tuple[int, float]]:
        (found,) = [values for track, values in self.counters.items() if self.path(track) == path]
        return found


def read(file: Path) -> Read:
    trace = schema.Trace()
    trace.ParseFromString(file.read_bytes())
    tracks: dict[int, Any] = {}
    names: dict[int, str] = {}
    arg_names: dict[int, str] = {}
    events = []
    cleared = False
    for packet in trace.packet:
        assert packet.trusted_packet_sequence_id == 1
        assert not packet.FindInitializationErrors()
        cleared |= bool(packet.sequence_flags & 1)
        if packet.HasField("track_descriptor"):
            own = packet.track_descriptor
            assert own.uuid not in tracks
            assert not own.parent_uuid or own.parent_uuid in tracks
            tracks[own.uuid] = own
        for entry in packet.interned_data.event_names:
            assert cleared
            names[entry.iid] = entry.name
        for entry in packet.interned_data.debug_annotation_names:
            arg_names[entry.iid] = entry.name
        if packet.HasField("track_event"):
            event = packet.track_event
            assert event.track_uuid in tracks
            iids = event.name_iid or any(a.name_iid for a in event.debug_annotations)
            assert not iids or packet.sequence_flags & 2, "a number of a name needs the state that tells it"
            name = names[event.name_iid] if event.name_iid else event.name
            args = {
                arg_names[a.name_iid] if a.name_iid else a.name: getattr(a, a.WhichOneof("value"))
                for a in event.debug_annotations
            }
            events.append((packet.timestamp, event, name, args))
    events.sort(key=lambda event: event[0])
    return _played(tracks, events)


def _played(tracks: dict[int, Any], events: list[tuple[int, Any, str, dict[str, Any]]]) -> Read:
    stacks: dict[int, list[Slice]] = defaultdict(list)
    slices: list[Slice] = []
    counters: dict[int, list[tuple[int, float]]] = defaultdict(list)
    begun: dict[int, Slice] = {}
    flows: list[tuple[Slice, Slice]] = []
    for time, event, name, args in events:
        stack = stacks[event.track_uuid]
        if event.type == COUNTER:
            assert tracks[event.track_uuid].HasField("counter")
            counters[event.track_uuid].append((time, event.double_counter_value))
            continue
        assert not tracks[event.track_uuid].HasField("counter")
        if event.type == END:
            stack.pop().end = time
            continue
        new = Slice(event.track_uuid, name, time, args, stack[-1] if stack else None)
        slices.append(new)
        for number in event.flow_ids:
            assert number not in begun, "a flow begins once"
            begun[number] = new
        for number in event.terminating_flow_ids:
            flows.append((begun.pop(number), new))
        if event.type == INSTANT:
            new.end = time
        else:
            assert event.type == BEGIN
            stack.append(new)
    assert not any(stacks.values()), "a slice does not end"
    assert not begun, "a flow goes nowhere"
    for own in slices:
        assert own.end is not None and own.end >= own.start
        if own.parent is not None:
            assert own.parent.end is not None
            assert own.parent.start <= own.start and own.end <= own.parent.end, (own, own.parent)
    return Read(tracks, slices, counters, flows)
