"""inference-perf's report of requests: `per_request_lifecycle_metrics.json`."""

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
from ._client_times import SECOND, end_by_file_time, number

_RESPONSE_ID = re.compile(r'"id"\s*:\s*"((?:chat)?cmpl-[^"\\\s]{1,200})"')
_TIME = rb'"%s"\s*:\s*[0-9.eE+-]+\s*,\s*'
_HEAD = re.compile(
    rb"\s*\[\s*\{\s*"
    + _TIME % b"start_time"
    + _TIME % b"end_time"
    + rb'"(?:request|response|info|computed_metrics|error)"\s*:'
)
#: How far into a response its id may stand.
ID_WITHIN = 4_000

SPREAD = (
    "Times of tokens are those of chunks spread over the tokens a tokenizer counted in them: the file has no "
    "times of chunks."
)


@dataclass(frozen=True)
class InferencePerf:
    name: str = "inference_perf"
    version: str = "1"
    reads: str = (
        "inference-perf's per_request_lifecycle_metrics.json (report.request_lifecycle.per_request), with "
        "whichever of its parts it has."
    )
    tables: tuple[Table, ...] = (REQUESTS, TOKENS)

    def recognises(self, head: bytes, name: str) -> bool:
        return _HEAD.match(head) is not None

    def read(self, source: Source) -> Iterator[tuple[Table, pa.Table]]:
        records = loads(source.read_all())
        if not isinstance(records, list):
            raise BadInput(
                "not a complete list of requests",
                todo="Give the per_request_lifecycle_metrics.json that inference-perf writes; a file cut off "
                "cannot be read",
            )
        ends = [end for record in records if (end := _second(record, "end_time")) is not None]
        if not ends:
            raise BadInput("no request can be used: none has an end_time")
        offset = end_by_file_time(source) - round(max(ends) * SECOND)
        source.offset_ns = offset
        rows = Rows()
        values = Values(source.tally)
        for position, record in enumerate(records, 1):
            values.where = f"request {position}"
            start = _second(record, "start_time")
            if start is None or not 0 < offset + round(start * SECOND) <= INT64_MAX:
                source.tally.reject("start_time missing or not a time", values.where)
                continue
            _request(record, start, offset, position, source, values, rows)
            yield from rows.full()
        yield from rows.rest()
        if not rows.stored:
            raise BadInput("no request can be used: start_time missing or not a time", where="request 1")


COLLECTOR = InferencePerf()


def _second(record: object, name: str) -> float | None:
    return number(record.get(name)) if isinstance(record, dict) else None


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _request(
    record: Mapping[str, Any],
    start: float,
    offset: int,
    position: int,
    source: Source,
    values: Values,
    rows: Rows,
) -> None:
    info, computed = _object(record.get("info")), _object(record.get("computed_metrics"))
    response = _object(info.get("response_metrics"))
    usage = _object(response.get("server_usage"))
    sizes = _object(_object(info.get("request_metrics")).get("text"))
    arrival = offset + round(start * SECOND)
    end = _second(record, "end_time")
    if end is not None and end < start:
        values.blank("end_time before start_time")
        end = None
    times = _times(response, start, end, source, values)
    instants = [offset + round(at * SECOND) for at in times]
    ttft = values.duration(computed.get("time_to_first_token"), "time_to_first_token", SECOND)
    if ttft is None and times:
        ttft = instants[0] - arrival
    output = _first(
        usage.get("completion_tokens"), response.get("output_tokens"), computed.get("output_tokens")
    )
    prompt = _first(
        usage.get("prompt_tokens"),
        sizes.get("input_tokens"),
        info.get("input_tokens"),
        computed.get("input_tokens"),
    )
    model, limit = _asked(record.get("request"))
    request_id = _response_id(record, response)
    if source.options.hash_ids and request_id is not None:
        request_id = request_key("id", request_id)
    tokens = values.tokens(output, "output_tokens")
    # By the client's own clock: where the file was last written says nothing of which request it is.
    key = request_key("client", request_id, repr(start), position)
    rows.tokens(key, range(len(instants)), instants, [1 if tokens == len(instants) else None] * len(instants))
    rows.request(
        {
            "request_key": key,
            "request_id": request_id,
            "file_row": position,
            "observer": "client",
            "model": model,
            "adapter": text(info.get("lora_adapter")),
            "arrival_ns": arrival,
            "first_token_ns": None if ttft is None else arrival + ttft,
            "last_token_ns": instants[-1] if instants else None,
            "finished_ns": None if end is None else offset + round(end * SECOND),
            "ttft_ns": ttft,
            "e2e_ns": None if end is None else round((end - start) * SECOND),
            "prompt_tokens": values.tokens(prompt, "input_tokens"),
            "cached_tokens": values.tokens(
                _object(usage.get("prompt_tokens_details")).get("cached_tokens"), "cached_tokens"
            ),
            "output_tokens": tokens,
            "max_tokens": values.tokens(limit, "max_tokens"),
            "status": _status(record.get("error"), end is not None),
        }
    )


def _first(*values: object) -> object:
    return next((value for value in values if value is not None), None)


def _times(
    response: Mapping[str, Any], start: float, end: float | None, source: Source, values: Values
) -> list[float]:
    """When each chunk came, in seconds of the client's clock: what does not lie in order inside the response is left out."""
    listed = response.get("chunk_times")
    if not listed:
        listed = response.get("output_token_times")
        if listed:
            source.tally.note(SPREAD)
    times: list[float] = []
    last = start
    for value in listed if isinstance(listed, list) else ():
        at = number(value)
        if at is None or at < last or (end is not None and at > end):
            values.blank("time of a chunk outside of the response, or going back")
            continue
        last = at
        times.append(at)
    return times


def _asked(request: object) -> tuple[str | None, object]:
    """Model and limit of tokens from the body of the request; the rest of it is not looked at."""
    body = loads(request.encode("utf-8", "replace")) if isinstance(request, str) else request
    if not isinstance(body, dict):
        return None, None
    return text(body.get("model")), _first(body.get("max_completion_tokens"), body.get("max_tokens"))


def _response_id(record: Mapping[str, Any], response: Mapping[str, Any]) -> str | None:
    """The id the server answered with, from the first chunk or the start of the body."""
    chunks = response.get("response_chunks")
    first = chunks[0] if isinstance(chunks, list) and chunks else record.get("response")
    match = _RESPONSE_ID.search(first[:ID_WITHIN]) if isinstance(first, str) else None
    return match[1] if match else None


def _status(error: object, ended: bool) -> str:
    if error:
        kind = str(_object(error).get("error_type"))
        if "Timeout" in kind:
            return "timeout"
        return "aborted" if "Cancelled" in kind else "error"
    return "ok" if ended else "unfinished"
