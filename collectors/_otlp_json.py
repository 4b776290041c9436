"""Spans out of OTLP JSON: documents and NDJSON, camelCase and snake_case, hex and base64 ids."""

from __future__ import annotations

import gc
import json
import re
from binascii import a2b_base64, a2b_hex
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any

import orjson

from tailscope.errors import BadInput
from tailscope.source import Source, Tally

from ._otlp_span import DATA_POINT, LOG_RECORD, NOT_OTLP, Span

WRONG_TYPE = "OTLP field has the wrong JSON type"
NOT_JSON = "not valid JSON"

SPANS = ("resourceSpans", "resource_spans")
LOGS = ("resourceLogs", "resource_logs")
METRICS = ("resourceMetrics", "resource_metrics")
#: The second pair is the name of before OTLP 0.15.
SCOPE_SPANS = ("scopeSpans", "scope_spans", "instrumentationLibrarySpans", "instrumentation_library_spans")
SCOPE_LOGS = ("scopeLogs", "scope_logs", "instrumentationLibraryLogs", "instrumentation_library_logs")
SCOPE_METRICS = (
    "scopeMetrics",
    "scope_metrics",
    "instrumentationLibraryMetrics",
    "instrumentation_library_metrics",
)
METRIC_DATA = ("gauge", "sum", "histogram", "exponentialHistogram", "exponential_histogram", "summary")
SCALARS = frozenset(
    kind + suffix for kind in ("string", "int", "double", "bool") for suffix in ("Value", "_value")
)
ERROR_CODES = (2, "2", "STATUS_CODE_ERROR")

#: Lines tried before a file that does not begin with a request is taken for one document.
TRIED_LINES = 1000

_STRING = rb'"(?:[^"\\\n]|\\.){0,300}"'
_PAIR = _STRING + rb"\s*:\s*(?:" + _STRING + rb"|[-+.\w]{1,40})\s*,\s*"
_REQUEST = (
    rb"\{\s*(?:" + _PAIR + rb'){0,8}(?:"request"\s*:\s*\{\s*)?'
    rb'"resource(?:Spans|Logs|Metrics|_spans|_logs|_metrics)"\s*:\s*\['
)
_AT_START = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[\s*)?" + _REQUEST)
#: Not indented: a request inside another document is not ours.
_AT_LINE = re.compile(rb"^" + _REQUEST, re.MULTILINE)


def is_otlp_json(head: bytes) -> bool:
    """Whether a request begins the file, or one of its lines after damaged ones."""
    return bool(_AT_START.match(head) or _AT_LINE.search(head))


class _NotJsonError(ValueError):
    pass


def _load(data: bytes) -> Any:
    """Raises _NotJsonError, which says where."""
    # A request makes 10^4 objects without cycles; collecting meanwhile costs a third of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        # orjson refuses what Python's own writer emits (NaN, Infinity, lone surrogates), bad UTF-8 and BOMs.
        try:
            return json.loads(data.decode("utf-8-sig", "replace"))
        except (ValueError, RecursionError):
            raise _NotJsonError(f"line {error.lineno} column {error.colno}") from None
    finally:
        if collecting:
            gc.enable()


def _request(entry: Any) -> Mapping[str, Any] | None:
    """The request a JSON object is, or holds as the envelope of a receiver does."""
    for candidate in (entry, entry.get("request")) if isinstance(entry, dict) else ():
        if isinstance(candidate, dict) and not candidate.keys().isdisjoint(SPANS + LOGS + METRICS):
            return candidate
    return None


def _entries(document: Any) -> list[Any]:
    return document if isinstance(document, list) else [document]


def _is_line_by_line(source: Source) -> bool:
    for _, line in islice(Source(source.path).lines(), TRIED_LINES):
        try:
            document = _load(line)
        except _NotJsonError:
            continue
        if any(_request(entry) for entry in _entries(document)):
            return True
    return False


def _documents(source: Source) -> Iterator[tuple[str, Any]]:
    if _is_line_by_line(source):
        for number, line in source.lines():
            try:
                document = _load(line)
            except _NotJsonError:
                source.tally.reject(NOT_JSON, f"line {number}")
            else:
                yield f"line {number}", document
        return
    data = source.read_all()
    if data.strip():
        try:
            document = _load(data)
        except _NotJsonError as error:
            source.tally.reject(NOT_JSON, str(error))
        else:
            yield "", document


def read_json(source: Source, wanted: Collection[str]) -> Iterator[Span]:
    tally = source.tally
    number = 0
    for where, document in _documents(source):
        for entry in _entries(document):
            request = _request(entry)
            if request is None:
                tally.reject(NOT_OTLP, where)
                continue
            for span in _spans(request, wanted, tally, where, number):
                number = span.number
                yield span
            _skip_others(request, tally, where)


def spans_of_json(message: bytes, wanted: Collection[str], tally: Tally) -> Iterator[Span]:
    """Spans of one whole request. Raises BadInput where it is none."""
    try:
        request = _load(message)
    except _NotJsonError as error:
        raise BadInput(f"{NOT_JSON} ({error})") from error
    # Fields that are not known are ignored, as the protocol says; those of another signal are a wrong address.
    if not isinstance(request, dict) or not request.keys().isdisjoint(LOGS + METRICS):
        raise BadInput("not an OTLP request for spans")
    yield from _spans(request, wanted, tally, "", 0)


def _spans(
    request: Mapping[str, Any], wanted: Collection[str], tally: Tally, where: str, number: int
) -> Iterator[Span]:
    """Spans of a request, numbered on from `number`."""
    for resource_spans in _objects(request, SPANS, tally, where):
        resource = {}
        if isinstance(owner := resource_spans.get("resource"), dict):
            resource = _attributes(owner, wanted, tally, where)
        elif owner is not None:
            tally.blank(WRONG_TYPE, where)
        for scope in _objects(resource_spans, SCOPE_SPANS, tally, where):
            for span in _objects(scope, ("spans",), tally, where):
                number += 1
                status = span.get("status")
                yield Span(
                    number,
                    span.get("name"),
                    _hex_id(span.get("traceId") or span.get("trace_id"), 16),
                    _hex_id(span.get("spanId") or span.get("span_id"), 8),
                    span.get("startTimeUnixNano") or span.get("start_time_unix_nano"),
                    span.get("endTimeUnixNano") or span.get("end_time_unix_nano"),
                    isinstance(status, dict) and status.get("code") in ERROR_CODES,
                    _attributes(span, wanted, tally, where),
                    resource,
                )


def _skip_others(request: Mapping[str, Any], tally: Tally, where: str) -> None:
    for resource in _objects(request, LOGS, tally, where):
        for scope in _objects(resource, SCOPE_LOGS, tally, where):
            for _ in _objects(scope, ("logRecords", "log_records", "logs"), tally, where):
                tally.skip(LOG_RECORD)
    for resource in _objects(request, METRICS, tally, where):
        for scope in _objects(resource, SCOPE_METRICS, tally, where):
            for metric in _objects(scope, ("metrics",), tally, where):
                for data in (metric[kind] for kind in METRIC_DATA if isinstance(metric.get(kind), dict)):
                    for _ in _objects(data, ("dataPoints", "data_points"), tally, where):
                        tally.skip(DATA_POINT)


def _objects(
    parent: Mapping[str, Any], names: tuple[str, ...], tally: Tally, where: str
) -> Iterator[dict[str, Any]]:
    for name in names:
        values = parent.get(name)
        if values is None:
            continue
        if not isinstance(values, list):
            tally.reject(WRONG_TYPE, where)
            continue
        for value in values:
            if isinstance(value, dict):
                yield value
            else:
                tally.reject(WRONG_TYPE, where)


def _attributes(
    owner: Mapping[str, Any], wanted: Collection[str], tally: Tally, where: str
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    items = owner.get("attributes")
    if items is None:
        return found
    if not isinstance(items, list):
        tally.blank("attributes are not a list", where)
        return found
    for item in items:
        try:
            key = item["key"]
            if key in wanted:
                found[key] = None
                value = item.get("value") or {}
                for kind, content in value.items():
                    found[key] = content if kind in SCALARS else _plain(value)
                    break
        except (TypeError, KeyError, AttributeError):
            tally.blank("attribute is not a key with an object as value", where)
    return found


def _plain(value: Any) -> Any:
    """An AnyValue as a scalar or a list of scalars; None for what no wanted attribute is."""
    if isinstance(value, dict):
        for kind, content in value.items():
            if kind in SCALARS:
                return content
            if kind in ("arrayValue", "array_value"):
                values = content.get("values") if isinstance(content, dict) else None
                if isinstance(values, list):
                    return [
                        scalar
                        for entry in values
                        if isinstance(entry, dict)
                        for kind, scalar in entry.items()
                        if kind in SCALARS
                    ]
    return None


def _hex_id(text: object, size: int) -> str | None:
    """Lower-case hex of an id of `size` bytes, hex itself or base64; None for an invalid one, all zero."""
    if not isinstance(text, str):
        return None
    if len(text) == 2 * size:
        try:
            text = a2b_hex(text).hex()
        except ValueError:
            return text
    elif len(text) == (size + 2) // 3 * 4 and text.endswith("="):
        try:
            raw = a2b_base64(text, strict_mode=True)
        except ValueError:
            return text
        text = raw.hex() if len(raw) == size else text
    return text if text.strip("0") else None
