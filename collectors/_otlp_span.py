"""What the encodings of OTLP have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

LOG_RECORD = "OTLP log record, not a span"
DATA_POINT = "OTLP metric data point, not a span"
NOT_OTLP = "not an OTLP request"


class Span(NamedTuple):
    """A span as its encoding gives it: times unchecked, attributes cut down to the wanted ones.

    `number` counts the file's spans from 1. Of an attribute given twice the last value is here.
    """

    number: int
    name: object
    trace_id: str | None
    span_id: str | None
    start: object
    end: object
    error: bool
    attributes: Mapping[str, Any]
    resource: Mapping[str, Any]
