"""Requests as the client saw them: a load client's log, or the result of `vllm bench serve`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import pyarrow as pa

from tailscope.errors import BadInput
from tailscope.model import request_key
from tailscope.schema import REQUESTS, TOKENS, Table
from tailscope.source import INT64_MAX, Source

from . import _client_bench as bench
from . import _client_sglang as sglang
from ._client_chunks import MICROSECOND, Chunks, read_chunks
from ._client_rows import Rows, Values, loads, text

#: OpenAI's limit on `n`; beyond it only the choices that show in the chunks get rows.
MAX_CHOICES = 128
#: Too many requests, and service unavailable: the server refused to take the request on.
REJECTED = (429, 503)

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}", re.IGNORECASE)
#: Keys a line of the log must show; the quotes of the same text inside a string would be escaped.
_CHUNKS = re.compile(rb'[{,]\s*"chunks_us_ntok"\s*:\s*\[')
_SENT = re.compile(rb'[{,]\s*"send_unix_ns"\s*:\s*\d')
_ID = re.compile(rb'[{,]\s*"client_request_id"\s*:')


@dataclass(frozen=True)
class ClientLog:
    name: str = "client_log"
    version: str = "2"
    reads: str = (
        "What clients measured: a JSON line per request with send time and chunk times, the JSON of "
        "`vllm bench serve --save-result --save-detailed` with start times (also with --append-result), or that "
        "of SGLang's `bench_serving --output-details`, which has no start times."
    )
    tables: tuple[Table, ...] = (REQUESTS, TOKENS)

    def recognises(self, head: bytes, name: str) -> bool:
        return is_log(head) or bench.is_vllm(head) or sglang.is_sglang(head)

    def read(self, source: Source) -> Iterator[tuple[Table, pa.Table]]:
        head = source.head()
        rows = Rows()
        if bench.is_vllm(head):
            yield from bench.read_vllm(source, rows)
        elif sglang.is_sglang(head):
            yield from sglang.read(source, rows)
        else:
            yield from _read_log(source, rows)
        yield from rows.rest()
        tally = source.tally
        if not rows.stored and not tally.skipped:
            if not tally.rejected:
                raise BadInput("the file is empty")
            reason, where = next(iter(tally.first_seen.items()))
            raise BadInput(
                f"no request can be used: {reason}",
                where=where,
                todo="Give a client's log with one JSON object a line, or the file that "
                "vllm bench serve --save-result --save-detailed writes",
            )


COLLECTOR = ClientLog()


def is_log(head: bytes) -> bool:
    return any(
        line.lstrip().startswith(b"{") and (_CHUNKS.search(line) or (_SENT.search(line) and _ID.search(line)))
        for line in head.removeprefix(b"\xef\xbb\xbf").splitlines()
    )


def _read_log(source: Source, rows: Rows) -> Iterator[tuple[Table, pa.Table]]:
    values = Values(source.tally)
    for number, line in source.lines():
        values.where = f"line {number}"
        record = loads(line)
        if not isinstance(record, dict):
            source.tally.reject("not a complete JSON object", values.where)
        elif _whole(sent := record.get("send_unix_ns")):
            _request(record, sent, number, source.options.hash_ids, values, rows)
            yield from rows.full()
        else:
            source.tally.reject("send_unix_ns missing or not a time", values.where)


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= INT64_MAX


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _request(
    record: dict[str, Any], arrival: int, number: int, hash_ids: bool, values: Values, rows: Rows
) -> None:
    """Puts the request's rows into `rows`: one a choice, as an engine runs each choice as a sequence."""
    limit = INT64_MAX - arrival
    end: int | None = None
    for name in ("done_us", "end_us", "client_aborted_us"):
        if end is None:
            end = values.duration(record.get(name), name, MICROSECOND, limit)
    usage = _object(record.get("usage"))
    details = _object(usage.get("prompt_tokens_details"))
    prompt = usage.get("prompt_tokens")
    if prompt is None:
        prompt = record.get("prompt_tokens_sent")
    request_id = _request_id(record)
    if hash_ids and request_id is not None:
        # Not normalised: a client's id has no prompt index, digits at its end are its own.
        request_id = request_key("id", request_id)
    shared = {
        "request_id": request_id,
        "trace_id": _trace_id(record.get("traceparent"), values),
        "file_row": number,
        "observer": "client",
        "arrival_ns": arrival,
        "finished_ns": None if end is None else arrival + end,
        "e2e_ns": end,
        "prompt_tokens": values.tokens(prompt, "prompt_tokens"),
        "cached_tokens": values.tokens(details.get("cached_tokens"), "cached_tokens"),
        "max_tokens": values.tokens(record.get("max_tokens"), "max_tokens"),
        "status": _status(record, values),
    }
    output = values.tokens(usage.get("completion_tokens"), "completion_tokens")
    chunks = read_chunks(record.get("chunks_us_ntok"), limit if end is None else end, values)
    choices = _choices(record, chunks, values)
    if len(choices) > 1:
        chunks.untangle(output, values)
        split = chunks.by_choice()
    else:
        chunks.drop_negative(values)
        split = {choices[0]: chunks}
    for choice in choices:
        own = split.get(choice) or Chunks(listed=chunks.listed)
        if len(choices) > 1 or output is None:
            output = own.total()
        key = request_key("client", request_id, arrival, choice)
        first, last = own.ends()
        rows.tokens(key, *own.placed(arrival))
        rows.request(
            {
                **shared,
                "request_key": key,
                "first_token_ns": None if first is None else arrival + first,
                "last_token_ns": None if last is None else arrival + last,
                "ttft_ns": first,
                "output_tokens": output,
            }
        )


def _choices(record: dict[str, Any], chunks: Chunks, values: Values) -> list[int]:
    """The choices the engine ran. A request it did not accept never became several."""
    seen = set(chunks.choices)
    accepted = bool(seen) or record.get("status") == 200
    wanted = record.get("n")
    if _whole(wanted):
        if accepted and wanted <= MAX_CHOICES:
            seen.update(range(wanted))
    elif wanted is not None:
        values.blank("n not a number of choices")
    return sorted(seen) or [0]


def _request_id(record: dict[str, Any]) -> str | None:
    """The id the server answered with, else the one vLLM makes of the client's."""
    if (answered := text(record.get("response_id"))) is not None:
        return answered
    own = text(record.get("client_request_id"))
    path = record.get("path")
    # An id that was not sent is known to the client alone.
    if own is None or not isinstance(path, str) or record.get("x_request_id_sent") is False:
        return own
    if path.endswith("/chat/completions"):
        return f"chatcmpl-{own}"
    return f"cmpl-{own}" if path.endswith("/completions") else own


def _trace_id(traceparent: object, values: Values) -> str | None:
    if traceparent is None:
        return None
    match = _TRACEPARENT.fullmatch(traceparent) if isinstance(traceparent, str) else None
    if match is None or not match[1].strip("0"):
        values.blank("traceparent not of the form version-trace-parent-flags")
        return None
    return match[1].lower()


def _status(record: dict[str, Any], values: Values) -> str:
    http = record.get("status")
    if http is not None and (not isinstance(http, int) or isinstance(http, bool)):
        values.blank("status not an HTTP status")
        http = None
    exception = record.get("exception")
    if record.get("client_aborted_us") is not None:
        return "aborted"
    if http in REJECTED:
        return "rejected"
    if record.get("stream_error") is not None or (http is not None and http != 200):
        return "error"
    if exception is not None:
        # The exception's repr: its type, then its arguments.
        return "timeout" if "Timeout" in str(exception).partition("(")[0] else "error"
    return "ok" if http == 200 and record.get("done_us") is not None else "unfinished"
