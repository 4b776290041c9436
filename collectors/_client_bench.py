"""Result files of `vllm bench serve`. What of them another client's files share is public here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from tailscope.model import request_key
from tailscope.schema import Table
from tailscope.source import INT64_MAX, Source

from ._client_rows import Rows, Values, loads, text

SECOND = 1_000_000_000
#: More than a century: no clock of a benchmark reads that.
MAX_SECONDS = 4e9
#: Requests per second; "inf" in the file is no rate.
MAX_RATE = 1e9
#: `date` has a resolution of 1 s and is written after the results were computed.
OFFSET_ERROR_NS = 2 * SECOND

#: Arrays by request. `generated_texts` is not among them on purpose.
ARRAYS = ("start_times", "input_lens", "output_lens", "ttfts", "itls", "latencies", "errors", "queue_times")
#: A file without --save-detailed keeps `latencies` and `queue_times`, which place nothing.
DETAILS = ("start_times", "input_lens", "output_lens", "ttfts", "itls")

NO_ARRAYS = "benchmark summary without per-request arrays (run with --save-detailed)"
NO_START = "benchmark without start times: its requests cannot be put on a time line"

_TIMEOUT = re.compile(r"time-?\s?out|timed out", re.IGNORECASE)
_OBJECT = re.compile(rb"^(?:\xef\xbb\xbf)?[ \t]*\{", re.MULTILINE)
#: A key, not the same text inside a string, where its quotes would be escaped.
_KEY = rb'(?:[{,]\s*)"%s"\s*:\s*'
_DATE = re.compile(_KEY % b"date" + rb'"\d{8}-\d{6}"')
_VLLM = [
    re.compile(_KEY % key)
    for key in (b"(?:backend|endpoint_type)", b"model_id", b"tokenizer_id", b"num_prompts")
]


def is_vllm(head: bytes) -> bool:
    """Whether an object in `head` has the run fields `vllm bench serve` writes first."""
    start = _OBJECT.search(head)
    if start is None or not _DATE.search(head, start.start()):
        return False
    return all(key.search(head, start.start()) for key in _VLLM)


def read_vllm(source: Source, rows: Rows) -> Iterator[tuple[Table, pa.Table]]:
    values = Values(source.tally)
    offsets: list[int] = []
    records = 0
    for where, result in _results(source):
        run = _usable(result, where, source)
        if not run:
            continue
        size = len(run["start_times"])
        offset = _offset(run, result.get("date"), source)
        if offset is None:
            source.tally.reject("date of the run missing or not YYYYMMDD-HHMMSS", where, size)
            continue
        offsets.append(offset)
        model = text(result.get("model_id"))
        scheduled = has_schedule(result)
        for index in range(size):
            records += 1
            values.where = f"{where}, request {index + 1}"
            request = {name: array[index] for name, array in run.items()}
            start = _seconds(request["start_times"])
            arrival = 0 if not start else offset + round(start * SECOND)
            if not 0 < arrival <= INT64_MAX:
                source.tally.reject("start time missing or not a time", values.where)
                continue
            key = request_key("client", result["date"], repr(request["start_times"]), index)
            row = request_row(request, key, arrival, values, rows)
            if scheduled:
                row["intended_ns"] = _intended(request.get("queue_times"), arrival, values)
            rows.request(
                {**row, "request_key": key, "file_row": records, "observer": "client", "model": model}
            )
            yield from rows.full()
    if offsets:
        source.clock = "perf_counter"
        source.offset_ns = offsets[0] if len(offsets) == 1 else None
        source.offset_error_ns = OFFSET_ERROR_NS
        _note(source, len(offsets))


def _results(source: Source) -> Iterator[tuple[str, Any]]:
    """One object a file, or with --append-result one a line."""
    data = source.read_all()
    whole = loads(data)
    if whole is not None:
        del data  # the caller works on `whole` for as long as it takes
        yield "run 1", whole
        return
    lines = (line for line in data.split(b"\n") if line.strip())
    for number, line in enumerate(lines, 1):
        yield f"run {number}", loads(line)


def _usable(result: Any, where: str, source: Source) -> dict[str, list[Any]] | None:
    """The arrays of a run, cut to the length they have in common."""
    if not isinstance(result, dict):
        source.tally.reject("not a complete JSON object", where)
        return None
    arrays = filled(result, ARRAYS)
    if "start_times" not in arrays:
        source.tally.skip(NO_START if any(name in arrays for name in DETAILS) else NO_ARRAYS)
        return None
    return of_one_length(arrays, where, source)


def filled(result: dict[str, Any], names: Sequence[str]) -> dict[str, list[Any]]:
    """The arrays of a run by name. An empty one beside full ones says as little as a missing one."""
    return {name: result[name] for name in names if isinstance(result.get(name), list) and result[name]}


def of_one_length(arrays: dict[str, list[Any]], where: str, source: Source) -> dict[str, list[Any]]:
    """The arrays, cut to the length they have in common."""
    lengths = [len(array) for array in arrays.values()]
    common = min(lengths)
    if max(lengths) > common:
        source.tally.reject(
            "arrays of unequal length", f"{where}, request {common + 1}", max(lengths) - common
        )
    return {name: array[:common] for name, array in arrays.items()}


def _offset(run: dict[str, list[Any]], date: object, source: Source) -> int | None:
    """What turns the run's clock into Unix time: its last response had come when the date was written."""
    try:
        if not isinstance(date, str):
            return None
        written = datetime.strptime(date, "%Y%m%d-%H%M%S").replace(tzinfo=source.options.log_tz or UTC)
        written_ns = int(written.timestamp()) * SECOND
    except (ValueError, OverflowError):
        return None
    unknown = [None] * len(run["start_times"])
    last = 0.0
    for start, *durations in zip(
        *(run.get(name, unknown) for name in ("start_times", "ttfts", "itls", "latencies")), strict=True
    ):
        ttft, gaps, latency = durations
        streamed = (_seconds(ttft) or 0.0) + sum(
            _seconds(gap) or 0.0 for gap in (gaps if isinstance(gaps, list) else ())
        )
        last = max(last, (_seconds(start) or 0.0) + max(streamed, _seconds(latency) or 0.0))
    return written_ns - round(last * SECOND)


def _seconds(value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_SECONDS:
        return float(value)
    return None


def has_schedule(result: dict[str, Any]) -> bool:
    """Whether the client sent at a rate. Without one all requests are due at once, and who waits for a free slot is not late."""
    rate = result.get("request_rate")
    return isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 < rate < MAX_RATE


def _intended(waited: object, arrival: int, values: Values) -> int | None:
    """When a request was due: a client that keeps to `max_concurrency` sends it when a slot gets free."""
    ns = values.duration(waited, "queue time of the client", SECOND, arrival)
    return None if ns is None else arrival - ns


def request_row(
    request: dict[str, Any], key: str, arrival: int, values: Values, rows: Rows
) -> dict[str, object]:
    """Columns of one request; its chunks are put into `rows`.

    A failed request has 0 where it measured nothing, so a time of 0 is unknown.
    """
    limit = INT64_MAX - arrival
    ttft = values.duration(request.get("ttfts"), "time to first token", SECOND, limit) or None
    latency = values.duration(request.get("latencies"), "latency", SECOND, limit) or None
    output = values.tokens(request.get("output_lens"), "output length")
    error = request.get("errors")
    times, complete = _chunk_times(request.get("itls"), ttft, arrival, values)
    if times:
        # The client says when chunks came, not how many tokens were in each.
        count = 1 if complete and output == len(times) else None
        rows.tokens(key, range(len(times)), times, [count] * len(times))
    last = times[-1] if times and complete else None
    if "latencies" not in request and last is not None and not error:
        latency = last - arrival
    status: str | None
    if error:
        status = "timeout" if isinstance(error, str) and _TIMEOUT.search(error) else "error"
        output = output or (None if times else output)
    else:
        status = "ok" if latency or times or output else None
    return {
        "arrival_ns": arrival,
        "first_token_ns": times[0] if times else None,
        "last_token_ns": last,
        "finished_ns": None if latency is None else arrival + latency,
        "ttft_ns": ttft,
        "e2e_ns": latency,
        "prompt_tokens": values.tokens(request.get("input_lens"), "input length"),
        "output_tokens": output,
        "status": status,
    }


def _chunk_times(gaps: object, ttft: int | None, arrival: int, values: Values) -> tuple[list[int], bool]:
    """When each chunk came, and whether these are all: after a gap that is none, nothing can be placed."""
    if ttft is None:
        return [], False
    times = [arrival + ttft]
    if not isinstance(gaps, list):
        if gaps is not None:
            values.blank("gaps between chunks not a list")
        return times, False
    # Summed as floats and rounded once, so that rounding does not add up.
    elapsed = ttft / SECOND
    for gap in gaps:
        seconds = _seconds(gap)
        if seconds is None or (at := arrival + round((elapsed + seconds) * SECOND)) > INT64_MAX:
            values.blank("gap between chunks not a duration")
            return times, False
        elapsed += seconds
        times.append(at)
    return times, True


def _note(source: Source, runs: int) -> None:
    zone = source.options.log_tz
    reading = "UTC assumed" if zone is None else f"read as {zone}"
    source.tally.note(
        "Start times are the client's perf_counter. They were placed by the date the client wrote after the "
        f"run, which has 1 s resolution and no time zone ({reading}): instants are good to about 2 s, "
        "durations are not affected."
    )
    if runs > 1:
        source.tally.note("The file holds several runs; each was placed by its own date.")
