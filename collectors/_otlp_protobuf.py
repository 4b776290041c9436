"""Spans out of OTLP protobuf: one request, or requests each behind its length.

The envelope of a request is walked by its wire format, so that a file that is cut off or damaged still
gives its whole spans; spans and resources are parsed by the generated classes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tailscope.errors import BadInput
from tailscope.source import Source, Tally

from ._otlp_span import DATA_POINT, LOG_RECORD, Span

Framing = Literal["single", "delimited"]
Kind = Literal["span", "log", "metric"]
Piece = tuple[int, int, int]

CUT = "protobuf message is cut off or damaged"
#: gRPC accepts 4 MiB unless told otherwise; a length far beyond is damage.
MAX_MESSAGE = 256 << 20

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
#: Tags of the envelope. Requests for spans, logs and metrics share them; only the items differ.
RESOURCE_ITEMS = 1 << 3 | BYTES
RESOURCE, SCHEMA_URL = 1 << 3 | BYTES, 3 << 3 | BYTES
#: The second is the name of before OTLP 0.15, instrumentation_library_spans.
SCOPE_ITEMS = (2 << 3 | BYTES, 1000 << 3 | BYTES)
ITEM = 2 << 3 | BYTES
IN_RESOURCE = {RESOURCE, SCHEMA_URL, *SCOPE_ITEMS}
IN_SCOPE = {1 << 3 | BYTES, ITEM, SCHEMA_URL}


def _wire_types(message: Any) -> dict[int, int]:
    fixed = {1: FIXED64, 2: FIXED32, 6: FIXED64, 7: FIXED32, 9: BYTES, 11: BYTES, 12: BYTES}
    return {f.number: fixed.get(f.type, VARINT) for f in message.DESCRIPTOR.fields}


WIRE_TYPES: dict[Kind, dict[int, int]] = {
    "span": _wire_types(SpanMessage),
    "log": _wire_types(LogRecord),
    "metric": _wire_types(Metric),
}
#: Fields one of which tells the kind of an item: times, severity, data. `_kind_of_item` knows more.
MARKS: dict[Kind, set[int]] = {
    "span": {7 << 3 | FIXED64, 8 << 3 | FIXED64},
    "log": {1 << 3 | FIXED64, 2 << 3 | VARINT, 11 << 3 | FIXED64},
    "metric": {number << 3 | BYTES for number in (7, 9, 10, 11)},
}


def framing(head: bytes) -> Framing | None:
    """How the requests lie in a file that begins with `head`; None if it does not hold any."""
    if head[:1] == b"\n" and _kind_of_request(head, 0, len(head)):
        return "single"
    at = 0
    while at + 4 < len(head):
        size = int.from_bytes(head[at : at + 4], "big")
        if size > MAX_MESSAGE:
            return None
        if size and _kind_of_request(head, at + 4, at + 4 + size):
            return "delimited"
        at += 4 + size
    return None


def read_protobuf(source: Source, framing: Framing, wanted: Collection[str]) -> Iterator[Span]:
    number = 0
    messages = _delimited(source) if framing == "delimited" else iter([(source.read_all(), True)])
    for index, (data, whole) in enumerate(messages, 1):
        where = f"message {index}"
        for resource, kind, start, end in _items(data, whole, source.tally, wanted, where):
            if kind == "log":
                source.tally.skip(LOG_RECORD)
            elif kind == "metric":
                _skip_metric(data[start:end], source.tally, where)
            else:
                number += 1
                try:
                    span = SpanMessage.FromString(data[start:end])
                except DecodeError:
                    source.tally.reject("protobuf span is damaged", f"span {number}")
                    continue
                yield _span(number, span, wanted, resource)


def spans_of_protobuf(message: bytes, wanted: Collection[str], tally: Tally) -> Iterator[Span]:
    """Spans of one whole request for spans. Raises BadInput where it is none."""
    try:
        request = ExportTraceServiceRequest.FromString(message)
    except DecodeError as error:
        raise BadInput("not an OTLP request for spans") from error
    number = 0
    for of_resource in request.resource_spans:
        resource = _attributes(of_resource.resource, wanted)
        for scope in of_resource.scope_spans:
            for span in scope.spans:
                number += 1
                yield _span(number, span, wanted, resource)


def _span(number: int, span: SpanMessage, wanted: Collection[str], resource: Mapping[str, Any]) -> Span:
    return Span(
        number,
        span.name,
        _hex_id(span.trace_id),
        _hex_id(span.span_id),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == Status.STATUS_CODE_ERROR,
        _attributes(span, wanted),
        resource,
    )


def _delimited(source: Source) -> Iterator[tuple[bytes, bool]]:
    """(message, whether all of it is there)"""
    with source.open() as stream:
        index = 0
        while prefix := stream.read(4):
            index += 1
            size = int.from_bytes(prefix, "big")
            if len(prefix) < 4 or size > MAX_MESSAGE:
                source.tally.reject(CUT, f"message {index}")
                return
            data = stream.read(size)
            if len(data) < size:
                source.tally.reject(CUT, f"message {index}")
            yield data, len(data) == size


def _items(
    data: bytes, whole: bool, tally: Tally, wanted: Collection[str], where: str
) -> Iterator[tuple[Mapping[str, Any], Kind, int, int]]:
    """(attributes of the resource, kind, start, end) of each whole span, log record and metric.

    Damage is counted where it is met; that the message is not `whole` has been counted already.
    """
    limit = len(data)

    def inside(start: int, end: int) -> list[Piece]:
        pieces, complete = _pieces(data, start, min(end, limit))
        if end > limit or complete:
            return pieces
        if whole:
            tally.reject(CUT, where)
        return [piece for piece in pieces if piece[2] <= end]

    top, complete = _pieces(data, 0, limit)
    if whole and not (complete and all(tag == RESOURCE_ITEMS for tag, _, _ in top)):
        tally.reject(CUT, where)
    for in_resource in (inside(start, end) for tag, start, end in top if tag == RESOURCE_ITEMS):
        resource: dict[str, Any] = {}
        for tag, start, end in in_resource:
            if tag == RESOURCE and end <= limit:
                try:
                    resource |= _attributes(Resource.FromString(data[start:end]), wanted)
                except DecodeError:
                    tally.blank("protobuf resource is damaged", where)
        for in_scope in (inside(start, end) for tag, start, end in in_resource if tag in SCOPE_ITEMS):
            items = [(start, end) for tag, start, end in in_scope if tag == ITEM]
            kind = _kind_of_first(data, items)
            items = [(start, end) for start, end in items if end <= limit]
            if kind is None and items:
                tally.reject("neither span, log record nor metric", where, len(items))
            elif kind is not None:
                for start, end in items:
                    yield resource, kind, start, end


def _pieces(data: bytes, at: int, end: int) -> tuple[list[Piece], bool]:
    """(tag, start, end) of the fields in data[at:end], and whether they fill it exactly.

    The last one of a part that is cut off ends beyond it.
    """
    pieces: list[Piece] = []
    while at < end:
        tag = shift = 0
        while at < end and shift < 64:
            byte = data[at]
            at += 1
            tag |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        else:
            return pieces, False
        wire = tag & 7
        if tag < 8 or wire not in (VARINT, FIXED64, BYTES, FIXED32):
            return pieces, False
        if wire in (VARINT, BYTES):
            value = shift = 0
            while at < end and shift < 64:
                byte = data[at]
                at += 1
                value |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            else:
                return pieces, False
        stop = at + (value if wire == BYTES else 8 if wire == FIXED64 else 4 if wire == FIXED32 else 0)
        pieces.append((tag, at, stop))
        at = stop
    return pieces, at == end


def _kind_of_request(data: bytes, start: int, end: int) -> Kind | None:
    """Kind of the first item that has one; strict about the envelope, which all of OTLP shares."""
    limit = len(data)
    top, _ = _pieces(data, start, min(end, limit))
    if any(tag != RESOURCE_ITEMS for tag, _, _ in top):
        return None
    for _, start, end in top:
        in_resource, _ = _pieces(data, start, min(end, limit))
        if any(tag not in IN_RESOURCE for tag, _, _ in in_resource):
            continue
        for start, end in ((start, end) for tag, start, end in in_resource if tag in SCOPE_ITEMS):
            in_scope, _ = _pieces(data, start, min(end, limit))
            if all(tag in IN_SCOPE for tag, _, _ in in_scope):
                items = [(start, end) for tag, start, end in in_scope if tag == ITEM]
                if kind := _kind_of_first(data, items):
                    return kind
    return None


def _kind_of_first(data: bytes, items: Sequence[tuple[int, int]]) -> Kind | None:
    for start, end in items:
        if kind := _kind_of_item(data, start, end):
            return kind
    return None


def _kind_of_item(data: bytes, start: int, end: int) -> Kind | None:
    limit = len(data)
    pieces, complete = _pieces(data, start, min(end, limit))
    if not complete and end <= limit:
        return None
    fields = {tag: data[start:end] for tag, start, end in pieces}
    sizes = [len(fields.get(number << 3 | BYTES, b"")) for number in (1, 2)]
    # Where a span has its name, a metric has its gauge, which begins with a data point.
    has_gauge = fields.get(5 << 3 | BYTES, b"").startswith(b"\n")
    told = {"span": sizes == [16, 8] and not has_gauge, "log": False, "metric": has_gauge}
    for kind, wire_types in WIRE_TYPES.items():
        fits = all(wire_types.get(tag >> 3, tag & 7) == tag & 7 for tag in fields)
        if fits and (told[kind] or not MARKS[kind].isdisjoint(fields)):
            return kind
    return None


def _skip_metric(data: bytes, tally: Tally, where: str) -> None:
    try:
        metric = Metric.FromString(data)
    except DecodeError:
        tally.reject("protobuf metric is damaged", where)
        return
    if kind := metric.WhichOneof("data"):
        tally.skip(DATA_POINT, len(getattr(metric, kind).data_points))


def _attributes(owner: SpanMessage | Resource, wanted: Collection[str]) -> dict[str, Any]:
    return {item.key: _plain(item.value) for item in owner.attributes if item.key in wanted}


def _plain(value: AnyValue) -> Any:
    """A scalar or a list of scalars; None for what no wanted attribute is."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(entry) for entry in value.array_value.values if not entry.HasField("array_value")]
    return (
        getattr(value, kind) if kind in ("string_value", "int_value", "double_value", "bool_value") else None
    )


def _hex_id(raw: bytes) -> str | None:
    return raw.hex() if any(raw) else None
