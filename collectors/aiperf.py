"""AIPerf's requests, one a line: `profile_export.jsonl`, and `profile_export_raw.jsonl` with every message."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tailscope.errors import BadInput
from tailscope.model import request_key
from tailscope.schema import REQUESTS, TOKENS, Table
from tailscope.source import INT64_MAX, Source

from ._client_rows import Rows, Values, loads, text
from ._client_times import after, instant, number, summed

UNITS_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "sec": 1_000_000_000}
#: The request was given up by AIPerf (499: client closed request), or refused by the server.
CANCELLED, REJECTED = 499, (429, 503)
#: Requests of the warm-up are a class of their own: they load the server, and nobody waits for them.
WARMUP = "warmup"

ASSUMED_CHAT = (
    "The file does not say which API was called. Its X-Request-Ids were taken to be of chat completions, "
    "AIPerf's default, so that they join with an engine's ids."
)

WARMED_UP = "Requests of AIPerf's warm-up are a class of their own, named warmup."

_KEY = rb'[{,]\s*"%s"\s*:\s*'
_META = re.compile(_KEY % b"metadata" + rb"\{")
_PROCESSOR = re.compile(_KEY % b"record_processor_id" + rb'"')
_REST = re.compile(_KEY % b"(?:metrics|start_perf_ns|responses)")


@dataclass(frozen=True)
class AIPerf:
    name: str = "aiperf"
    version: str = "1"
    reads: str = (
        "AIPerf's records of requests, a JSON line each: profile_export.jsonl with its metrics, and "
        "profile_export_raw.jsonl (--export-level raw) with the time of every message."
    )
    tables: tuple[Table, ...] = (REQUESTS, TOKENS)

    def recognises(self, head: bytes, name: str) -> bool:
        return any(
            line.lstrip().startswith(b"{")
            and _META.search(line) is not None
            and _PROCESSOR.search(line) is not None
            and _REST.search(line) is not None
            for line in head.splitlines()
        )

    def read(self, source: Source) -> Iterator[tuple[Table, pa.Table]]:
        rows = Rows()
        values = Values(source.tally)
        for row, line in source.lines():
            values.where = f"line {row}"
            record = loads(line)
            metadata = record.get("metadata") if isinstance(record, dict) else None
            if not isinstance(metadata, dict):
                source.tally.reject("not a complete record of AIPerf", values.where)
                continue
            _Request(record, metadata, row, source, values).put(rows)
            yield from rows.full()
        yield from rows.rest()
        if not rows.stored:
            reason, where = next(iter(source.tally.first_seen.items()), ("the file is empty", ""))
            raise BadInput(
                f"no request can be used: {reason}",
                where=where,
                todo="Give the profile_export.jsonl or profile_export_raw.jsonl that AIPerf writes",
            )


COLLECTOR = AIPerf()


class _Request:
    """One record, of either level."""

    def __init__(
        self, record: dict[str, Any], metadata: dict[str, Any], row: int, source: Source, values: Values
    ) -> None:
        self._record, self._metadata, self._row, self._source = record, metadata, row, source
        self._values = values
        metrics = record.get("metrics")
        self._metrics: Mapping[str, Any] = metrics if isinstance(metrics, dict) else {}

    def put(self, rows: Rows) -> None:
        metadata, values = self._metadata, self._values
        # `timestamp_ns` in older versions; the metric is there where neither is.
        arrival = (
            instant(metadata.get("request_start_ns"))
            or instant(metadata.get("timestamp_ns"))
            or instant(self._value("min_request_timestamp")[0])
        )
        if arrival is None:
            self._source.tally.reject("start of the request missing or not a time", values.where)
            return
        raw = _Messages(self._record, arrival, values) if "responses" in self._record else None
        limit = INT64_MAX - arrival
        e2e = self._duration(limit, "request_latency")
        end = after(metadata.get("request_end_ns"), 1, arrival, "request_end_ns", values)
        if e2e is None and end is not None:
            e2e = end - arrival
        ttft = self._duration(limit, "time_to_first_token", "ttft")
        times, complete = (
            (raw.times, True) if raw else self._chunks(arrival, ttft, limit if e2e is None else e2e)
        )
        if ttft is None and raw and times:
            ttft = times[0] - arrival
        warmup = WARMUP in (self._metadata.get("benchmark_phase"), self._metadata.get("credit_phase"))
        if warmup:
            self._source.tally.note(WARMED_UP)
        output = self._tokens("usage_completion_tokens", "output_sequence_length")
        if raw and raw.output is not None:
            output = raw.output
        request_id = self._request_id(raw)
        key = request_key("client", request_id, arrival, 0)
        # AIPerf says when chunks came, not how many tokens were in each.
        count = 1 if complete and output == len(times) else None
        rows.tokens(key, range(len(times)), times, [count] * len(times))
        rows.request(
            {
                "request_key": key,
                "request_id": request_id,
                "file_row": self._row,
                "observer": "client",
                "model": raw.model if raw else None,
                "klass": WARMUP if warmup else None,
                "arrival_ns": arrival,
                "intended_ns": instant(metadata.get("credit_issued_ns")),
                "first_token_ns": None if ttft is None else arrival + ttft,
                "last_token_ns": times[-1] if times and complete else None,
                "finished_ns": None if e2e is None else arrival + e2e,
                "ttft_ns": ttft,
                "e2e_ns": e2e,
                "prompt_tokens": raw.prompt
                if raw and raw.prompt is not None
                else self._tokens("usage_prompt_tokens", "input_sequence_length", "error_isl"),
                "cached_tokens": raw.cached
                if raw and raw.cached is not None
                else self._tokens("usage_prompt_cache_read_tokens"),
                "output_tokens": output,
                "max_tokens": raw.limit if raw else None,
                "status": self._status(e2e is not None),
            }
        )

    def _value(self, *tags: str) -> tuple[Any, str]:
        """The first of the metrics that is there, with its unit."""
        for tag in tags:
            metric = self._metrics.get(tag)
            if isinstance(metric, dict) and metric.get("value") is not None:
                return metric["value"], str(metric.get("unit", ""))
        return None, ""

    def _duration(self, limit: int, *tags: str) -> int | None:
        value, unit = self._value(*tags)
        if value is None:
            return None
        if unit not in UNITS_NS:
            self._values.blank(f"{tags[0]} in no unit of time that is known")
            return None
        return self._values.duration(value, tags[0], UNITS_NS[unit], limit)

    def _tokens(self, *tags: str) -> int | None:
        return self._values.tokens(self._value(*tags)[0], tags[0])

    def _chunks(self, arrival: int, ttft: int | None, limit: int) -> tuple[list[int], bool]:
        """When each chunk came: the first token, then the gaps."""
        gaps, unit = self._value("inter_chunk_latency")
        if ttft is None:
            return [], False
        if not isinstance(gaps, list):
            return [arrival + ttft], False
        if unit not in UNITS_NS:
            self._values.blank("inter_chunk_latency in no unit of time that is known")
            return [arrival + ttft], False
        # Summed as floats and rounded once, so that rounding does not add up.
        scale = UNITS_NS[unit]
        since, complete = summed(ttft / scale, gaps, "inter_chunk_latency", self._values)
        times = [arrival + round(at * scale) for at in since if at * scale <= limit + 1]
        if len(times) < len(since):
            self._values.blank("chunk after the end of the response", len(since) - len(times))
        return times, complete and len(times) == len(since)

    def _request_id(self, raw: _Messages | None) -> str | None:
        """The id the server answered with, else the one vLLM makes of X-Request-Id."""
        own = text(self._metadata.get("x_request_id"))
        if raw and raw.response_id is not None:
            found: str | None = raw.response_id
        elif own is None:
            return None
        elif raw and raw.prefix:
            found = raw.prefix + own
        else:
            self._source.tally.note(ASSUMED_CHAT)
            found = f"chatcmpl-{own}"
        return request_key("id", found) if self._source.options.hash_ids else found

    def _status(self, ended: bool) -> str:
        error = self._record.get("error")
        code = error.get("code") if isinstance(error, dict) else None
        kind = str(error.get("type")) if isinstance(error, dict) else ""
        if self._metadata.get("was_cancelled") is True or code == CANCELLED:
            return "aborted"
        if code in REJECTED:
            return "rejected"
        if error:
            return "timeout" if "Timeout" in kind else "error"
        return "ok" if ended else "unfinished"


class _Messages:
    """What a raw record's messages tell: times, tokens, ids. Their texts are looked at and not kept."""

    def __init__(self, record: dict[str, Any], arrival: int, values: Values) -> None:
        payload = record.get("payload")
        payload = payload if isinstance(payload, dict) else {}
        self.model = text(payload.get("model"))
        limit = payload.get("max_completion_tokens") or payload.get("max_tokens")
        self.limit = values.tokens(limit, "max_tokens")
        self.prefix = "chatcmpl-" if "messages" in payload else "cmpl-" if "prompt" in payload else ""
        self.response_id: str | None = None
        self.prompt: int | None = None
        self.cached: int | None = None
        self.output: int | None = None
        self.times: list[int] = []
        start = record.get("start_perf_ns")
        responses = record.get("responses")
        for response in responses if isinstance(responses, list) else ():
            if isinstance(response, dict):
                self._message(response, start, arrival, values)

    def _message(self, response: dict[str, Any], start: object, arrival: int, values: Values) -> None:
        packets = response.get("packets")
        if isinstance(packets, list):
            bodies = [p.get("value") for p in packets if isinstance(p, dict) and p.get("name") == "data"]
        else:
            bodies = [response.get("text")]
        has_tokens = False
        for body in bodies:
            content = loads(body.encode("utf-8", "replace")) if isinstance(body, str) else None
            if isinstance(content, dict):
                has_tokens |= self._content(content, values)
        if not has_tokens or not isinstance(packets, list):
            return
        at, began = number(response.get("perf_ns")), number(start)
        if at is None or began is None or at < began:
            values.blank("time of a message missing or before the request was sent")
        elif self.times and arrival + round(at - began) < self.times[-1]:
            values.blank("time of a message goes back")
        else:
            self.times.append(arrival + int(response["perf_ns"]) - int(start))  # type: ignore[call-overload]

    def _content(self, content: dict[str, Any], values: Values) -> bool:
        """Takes what is no text from one message, and says whether it carried tokens."""
        self.response_id = self.response_id or text(content.get("id"))
        usage = content.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            self.prompt = values.tokens(usage.get("prompt_tokens"), "prompt_tokens")
            self.output = values.tokens(usage.get("completion_tokens"), "completion_tokens")
            if isinstance(details, dict):
                self.cached = values.tokens(details.get("cached_tokens"), "cached_tokens")
        choices = content.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return False
        delta = choice.get("delta")
        parts = delta if isinstance(delta, dict) else choice
        return any(
            bool(parts.get(name))
            for name in ("content", "reasoning_content", "reasoning", "tool_calls", "text")
        )
