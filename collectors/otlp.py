"""Request spans of OpenTelemetry traces, in every encoding of OTLP."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tailscope.errors import BadInput
from tailscope.model import request_key
from tailscope.schema import REQUESTS, Table
from tailscope.source import INT64_MAX, Options, Source, Tally

from ._ids import stored_request_id
from ._otlp_json import is_otlp_json, read_json, spans_of_json
from ._otlp_protobuf import framing, read_protobuf, spans_of_protobuf
from ._otlp_span import NOT_OTLP, Span

BATCH = 50_000
MAX_SECONDS = INT64_MAX // 1_000_000_000
EXPORT = "Give exported spans, as the Collector's file exporter or an OTLP receiver writes them."
DERIVED = "instants after arrival are derived: span start + durations"

VLLM_SPAN = "llm_request"
REQUEST_ID = "gen_ai.request.id"
TTFT, E2E = "gen_ai.latency.time_to_first_token", "gen_ai.latency.e2e"
QUEUE = "gen_ai.latency.time_in_queue"
PREFILL, DECODE = "gen_ai.latency.time_in_model_prefill", "gen_ai.latency.time_in_model_decode"
#: The first one present counts: vLLM's and SGLang's names, then those of the semantic conventions.
PROMPT_TOKENS = ("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens")
OUTPUT_TOKENS = ("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens")
CACHED_TOKENS = (
    "gen_ai.usage.cached_tokens",
    "gen_ai.usage.prompt_tokens_details.cached_tokens",
    "gen_ai.usage.cache_read.input_tokens",
)
MAX_TOKENS = "gen_ai.request.max_tokens"
MODEL = ("gen_ai.response.model", "gen_ai.request.model")
FINISH_REASONS, ERROR_TYPE = "gen_ai.response.finish_reasons", "error.type"
INSTANCE, ENGINE = "service.instance.id", "dp_rank"

#: Nothing else is read from a span: attributes may hold prompts and completions.
ALLOWED = frozenset(
    (REQUEST_ID, TTFT, E2E, QUEUE, PREFILL, DECODE, MAX_TOKENS, FINISH_REASONS, ERROR_TYPE, INSTANCE, ENGINE)
    + (PROMPT_TOKENS + OUTPUT_TOKENS + CACHED_TOKENS + MODEL)
)


@dataclass(frozen=True)
class Otlp:
    name: str = "otlp"
    version: str = "1"
    reads: str = (
        "OpenTelemetry request spans of vLLM (0.10 and later) and SGLang: OTLP JSON, NDJSON of the "
        "Collector's file exporter, and protobuf, single or each message behind its length."
    )
    tables: tuple[Table, ...] = (REQUESTS,)

    def recognises(self, head: bytes, name: str) -> bool:
        return is_otlp_json(head) or framing(head) is not None

    def read(self, source: Source) -> Iterator[tuple[Table, pa.Table]]:
        mapping = _Mapping(source.options, source.tally)
        spans = _spans(source, mapping.wanted)
        names: Iterable[str] = ()
        rows: list[tuple[Any, ...]] = []
        seen = False
        for span in spans:
            seen = True
            row = mapping.row(span)
            if row is not None:
                names = row.keys()
                rows.append(tuple(row.values()))  # a third of a dictionary's memory
                if len(rows) == BATCH:
                    yield REQUESTS, _table(names, rows)
                    rows = []
        if rows:
            yield REQUESTS, _table(names, rows)
        tally = source.tally
        if not seen and not tally.skipped and tally.rejected:
            reason = next(iter(tally.rejected))
            todo = EXPORT if reason == NOT_OTLP else "Copy or export the file again."
            raise BadInput(reason, path=source.display, where=tally.first_seen[reason], todo=todo)

    def receive(
        self, message: bytes, is_json: bool, options: Options, tally: Tally
    ) -> Iterator[tuple[Table, pa.Table]]:
        """Rows of one export request as a receiver gets it. Raises BadInput for one that is not what it claims to be."""
        mapping = _Mapping(options, tally)
        read = spans_of_json if is_json else spans_of_protobuf
        rows = [row for span in read(message, mapping.wanted, tally) if (row := mapping.row(span))]
        if rows:
            yield REQUESTS, _table(rows[0].keys(), [tuple(row.values()) for row in rows])


def _spans(source: Source, wanted: frozenset[str]) -> Iterator[Span]:
    head = source.head()
    if found := framing(head):
        return read_protobuf(source, found, wanted)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"", b"{", b"[") or is_otlp_json(head):
        return read_json(source, wanted)
    raise BadInput("neither OTLP JSON nor OTLP protobuf", path=source.display, todo=EXPORT)


def _table(names: Iterable[str], rows: list[tuple[Any, ...]]) -> pa.Table:
    columns: dict[str, Any] = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    return REQUESTS.batch({**columns, "observer": "engine"})


class _Mapping:
    """Spans to rows, by options and into a tally."""

    def __init__(self, options: Options, tally: Tally) -> None:
        self.tally = tally
        self.hash_ids = options.hash_ids
        self.attributes = options.attributes
        self.wanted = ALLOWED.union(filter(None, vars(self.attributes).values()))
        self.without_ids: Counter[tuple[str | None, int]] = Counter()

    def row(self, span: Span) -> dict[str, Any] | None:
        found, resource = span.attributes, span.resource
        if span.name != VLLM_SPAN and E2E not in found and TTFT not in found:
            self.tally.skip("span is not a request")
            return None
        number = span.number
        try:
            arrival, end = _interval(span)
        except ValueError as error:
            self.tally.reject(str(error), f"span {number}")
            return None

        ttft, e2e = self.duration(found.get(TTFT), number), self.duration(found.get(E2E), number)
        decode = self.duration(found.get(DECODE), number)
        queue = prefill = None
        if span.name == VLLM_SPAN:  # SGLang's prefill includes its queue, so neither can be told
            queue, prefill = (
                self.duration(found.get(QUEUE), number),
                self.duration(found.get(PREFILL), number),
            )
        if ttft is not None or e2e is not None:
            self.tally.note(DERIVED)
        first_token, last_token = self.later(arrival, ttft, number), self.later(arrival, e2e, number)
        scheduled = None if first_token is None or prefill is None else first_token - prefill
        queued = None if scheduled is None or queue is None else scheduled - queue

        request_id = _text(found.get(REQUEST_ID))
        if request_id is not None:
            request_id = stored_request_id(request_id, self.hash_ids)
        named = self.attributes
        return {
            "instance": _text(resource.get(INSTANCE)),
            "engine": self.count(_either(found, resource, ENGINE), number),
            "request_key": self.key(span, request_id, arrival),
            "request_id": request_id,
            "trace_id": _text(span.trace_id),
            "span_id": _text(span.span_id),
            "file_row": number,
            "model": _text(_either(found, resource, named.model)) or _text(_first(found, MODEL)),
            "adapter": _text(_either(found, resource, named.adapter)),
            "tenant": _text(_either(found, resource, named.tenant)),
            "priority": self.whole(_either(found, resource, named.priority), number),
            "klass": _text(_either(found, resource, named.klass)),
            "arrival_ns": arrival,
            "queued_ns": queued,
            "scheduled_ns": scheduled,
            "first_token_ns": first_token,
            "last_token_ns": last_token,
            "finished_ns": end if last_token is None else last_token,
            "queue_ns": queue,
            "prefill_ns": prefill,
            "decode_ns": decode,
            "ttft_ns": ttft,
            "e2e_ns": e2e,
            "prompt_tokens": self.count(_first(found, PROMPT_TOKENS), number),
            "cached_tokens": self.count(_first(found, CACHED_TOKENS), number),
            "output_tokens": self.count(_first(found, OUTPUT_TOKENS), number),
            "max_tokens": self.count(found.get(MAX_TOKENS), number),
            "status": _status(span),
        }

    def key(self, span: Span, request_id: str | None, arrival: int) -> str:
        if span.trace_id and span.span_id:
            return request_key("otlp", span.trace_id, span.span_id)
        same = request_id, arrival
        self.without_ids[same] += 1
        return request_key("engine", request_id, arrival, self.without_ids[same] - 1)

    def duration(self, value: object, number: int) -> int | None:
        """Nanoseconds of seconds."""
        if value is None:
            return None
        seconds = value if type(value) is float else _number(value)
        if 0 <= seconds <= MAX_SECONDS:
            return round(seconds * 1_000_000_000)
        if not -math.inf < seconds < math.inf:
            self.tally.blank("duration is not a finite number", f"span {number}")
        elif seconds < 0:
            self.tally.blank("duration is negative", f"span {number}")
        else:
            self.tally.blank("duration is out of range", f"span {number}")
        return None

    def later(self, arrival: int, duration: int | None, number: int) -> int | None:
        if duration is None:
            return None
        if duration > INT64_MAX - arrival:
            self.tally.blank("time is out of range", f"span {number}")
            return None
        return arrival + duration

    def whole(self, value: object, number: int, least: int = -INT64_MAX) -> int | None:
        if value is None:
            return None
        found = _number(value)
        if isinstance(found, float):
            if not found.is_integer():
                self.tally.blank("value is not a whole number", f"span {number}")
                return None
            found = int(found)
        if least <= found <= INT64_MAX:
            return found
        self.tally.blank("value is out of range", f"span {number}")
        return None

    def count(self, value: object, number: int) -> int | None:
        return None if value is None else self.whole(value, number, 0)


def _interval(span: Span) -> tuple[int, int | None]:
    """(start, end or None where the span has none). Raises ValueError saying what is wrong with them."""
    start, end = _instant(span.start), _instant(span.end)
    if start == 0:
        raise ValueError("span has no start time")
    if 0 < end < start:
        raise ValueError("span ends before it starts")
    return start, end or None


def _instant(value: object) -> int:
    number = 0 if value is None or value == "" else _number(value)
    if isinstance(number, float):
        if not number.is_integer():
            raise ValueError("span time is not a whole number of nanoseconds")
        number = int(number)
    if not 0 <= number <= INT64_MAX:
        raise ValueError("span time is out of range")
    return number


def _number(value: object) -> int | float:
    """JSON has int64 as strings, and NaN and infinities too; NaN for what is not a number."""
    if isinstance(value, str):
        # Python's own parsers would also accept "1_000"; no number of an emitter is this long.
        if len(value) < 40 and "_" not in value:
            for parse in (int, float):
                try:
                    return parse(value)
                except ValueError:
                    continue
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    return math.nan


def _text(value: object) -> str | None:
    if isinstance(value, str):
        if not value.isascii():  # Arrow takes no lone surrogates
            value = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return value or None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.17g}"
    return str(value) if isinstance(value, int) else None


def _first(found: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if (value := found.get(name)) is not None:
            return value
    return None


def _either(found: Mapping[str, Any], resource: Mapping[str, Any], name: str | None) -> Any:
    if name is None:
        return None
    value = found.get(name)
    return resource.get(name) if value is None else value


def _status(span: Span) -> str:
    if span.error or _text(span.attributes.get(ERROR_TYPE)):
        return "error"
    reasons = span.attributes.get(FINISH_REASONS)
    # A list of strings, or such a list as JSON text.
    texts = reasons if isinstance(reasons, list) else [reasons]
    return "aborted" if any(isinstance(t, str) and "abort" in t.lower() for t in texts) else "ok"


COLLECTOR = Otlp()
