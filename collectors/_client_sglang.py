"""Result files of SGLang's `bench_serving --output-details`: a line a run, and no times of sending.

Of a run that sent all requests at once, or kept a number of them under way (`--request-rate inf`, with or without
`--max-concurrency`), the lengths of the requests tell when each was sent. Of a run at a rate they do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from tailscope.model import request_key
from tailscope.schema import Table
from tailscope.source import Source

from ._client_bench import NO_ARRAYS, filled, has_schedule, of_one_length, request_row
from ._client_rows import Rows, Values, loads
from ._client_times import (
    BEFORE_1970,
    BETWEEN_RUNS_NS,
    SECOND,
    as_long_as,
    end_by_file_time,
    number,
    of_closed_loop,
)

#: Arrays by request, in the order of sending. `generated_texts` is not among them on purpose.
ARRAYS = ("input_lens", "output_lens", "ttfts", "itls", "errors", "cached_tokens")

PLACED = (
    "The file does not say when requests were sent. Of runs without a request rate that follows from how long each "
    "took; so they were placed, to within what the client itself needed between requests."
)
NOT_PLACED = (
    "The file does not say when requests were sent, and of a run at a request rate, or with failed requests, that "
    "cannot be told from it: its requests have no arrival. Their latencies can be queried; diagnose leaves them out."
)
SMOOTHED = (
    "SGLang's own backend splits the gap between two chunks evenly over the tokens in them: the longest waits between "
    "tokens were longer than shown."
)
#: Backends whose client does that; those of OpenAI's API give the gaps of chunks as they came.
SMOOTHING = ("sglang", "sglang-native")
SEVERAL = "The file holds several runs; they were placed in its order, a minute apart."

_OBJECT = re.compile(rb"^(?:\xef\xbb\xbf)?[ \t]*\{", re.MULTILINE)
_KEY = rb'(?:[{,]\s*)"%s"\s*:\s*'
_PARTS = [
    re.compile(_KEY % key)
    for key in (b"backend", b"dataset_name", b"(?:sharegpt_output_len|total_output_tokens_retokenized)")
]


def is_sglang(head: bytes) -> bool:
    start = _OBJECT.search(head)
    return start is not None and all(part.search(head, start.start()) for part in _PARTS)


def read(source: Source, rows: Rows) -> Iterator[tuple[Table, pa.Table]]:
    values = Values(source.tally)
    runs: list[tuple[str, dict[str, Any], dict[str, list[Any]]]] = []
    for number_, line in source.lines():
        where = f"line {number_}"
        result = loads(line)
        if not isinstance(result, dict):
            source.tally.reject("not a complete JSON object", where)
        elif arrays := _arrays(result, where, source):
            runs.append((where, result, arrays))
            if result.get("backend") in SMOOTHING:
                source.tally.note(SMOOTHED)
    placed = [_since_start(result, arrays) for _, result, arrays in runs]
    begins = _begins(placed, source)
    records = 0
    for (where, result, arrays), starts, begin in zip(runs, placed, begins, strict=True):
        for index in range(len(arrays["ttfts"])):
            records += 1
            values.where = f"{where}, request {index + 1}"
            request = {name: array[index] for name, array in arrays.items()}
            key = request_key("client", repr(result.get("duration")), repr(request["ttfts"]), index)
            arrival = None if begin is None or starts is None else begin + round(starts[0][index] * SECOND)
            if arrival is not None and arrival <= 0:
                source.tally.reject(BEFORE_1970, values.where)
                continue
            row = _row(request, key, arrival, values, rows)
            cached = values.tokens(request.get("cached_tokens"), "cached tokens")
            rows.request(
                {
                    **row,
                    "request_key": key,
                    "file_row": records,
                    "observer": "client",
                    "cached_tokens": cached,
                }
            )
            yield from rows.full()


def _arrays(result: dict[str, Any], where: str, source: Source) -> dict[str, list[Any]] | None:
    """The arrays of a run, cut to the length they have in common."""
    arrays = filled(result, ARRAYS)
    if "ttfts" not in arrays:
        source.tally.skip(NO_ARRAYS.replace("--save-detailed", "--output-details"))
        return None
    return of_one_length(arrays, where, source)


def _since_start(result: dict[str, Any], arrays: dict[str, list[Any]]) -> tuple[list[float], float] | None:
    """When each request was sent, in seconds since the run began, and how long the run took; None where that cannot be
    told."""
    if has_schedule(result) or not _no_rate(result.get("request_rate")):
        return None
    limit = result.get("max_concurrency")
    if limit is not None and (type(limit) is not int or limit < 1):
        return None
    latencies = [
        _latency(ttft, gaps) for ttft, gaps in zip(arrays["ttfts"], arrays.get("itls") or (), strict=False)
    ]
    if len(latencies) < len(arrays["ttfts"]):
        return None
    starts = of_closed_loop(latencies, limit)
    if starts is None or not as_long_as(result.get("duration"), starts, latencies):
        return None
    return starts, number(result.get("duration")) or 0.0


def _no_rate(rate: object) -> bool:
    return rate in ("inf", float("inf"))


def _latency(ttft: object, gaps: object) -> float | None:
    """How long a request took: a failed one has a time of 0, and nothing says how long it was."""
    first = number(ttft)
    lengths = [number(gap) for gap in gaps] if isinstance(gaps, list) else [None]
    if not first or None in lengths:
        return None
    return first + sum(length for length in lengths if length is not None)


def _begins(placed: list[tuple[list[float], float] | None], source: Source) -> list[int | None]:
    """When each run began: the last one ended when the file was written."""
    if None in placed:
        source.tally.note(NOT_PLACED)
    if not any(placed):
        return [None] * len(placed)
    source.tally.note(PLACED)
    if len(placed) > 1:
        source.tally.note(SEVERAL)
    begins: list[int | None] = []
    end = end_by_file_time(source)
    for run in reversed(placed):
        if run is None:
            begins.append(None)
            continue
        begin = end - round(run[1] * SECOND)
        begins.append(begin)
        end = begin - BETWEEN_RUNS_NS
    return begins[::-1]


def _row(
    request: dict[str, Any], key: str, arrival: int | None, values: Values, rows: Rows
) -> dict[str, object]:
    """Columns of one request. Where its arrival is unknown, so are all instants, and its chunks cannot be placed."""
    if arrival is not None:
        return request_row(request, key, arrival, values, rows)
    row = request_row(request, key, 0, values, Rows())
    return {name: value for name, value in row.items() if name[-3:] != "_ns" or name in ("ttft_ns", "e2e_ns")}
