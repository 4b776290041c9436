"""GenAI-Bench's result of one run: its requests' metrics, without when they were sent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tailscope.errors import BadInput
from tailscope.model import request_key
from tailscope.schema import REQUESTS, Table
from tailscope.source import Source

from ._client_rows import Rows, Values, loads
from ._client_times import (
    BEFORE_1970,
    MILLISECOND,
    SECOND,
    as_long_as,
    end_by_file_time,
    number,
    of_closed_loop,
)

REJECTED, TIMEOUTS = (429, 503), (408, 504)
UNITS = {"s": SECOND, "ms": MILLISECOND}

PLACED = (
    "The file does not say when requests were sent. With one request at a time each was sent when the one before "
    "had ended; so they were placed."
)
NOT_PLACED = (
    "The file does not say when requests were sent, and that cannot be told from it: its requests have no "
    "arrival. Their latencies can be queried; diagnose leaves them out."
)

_KEY = rb'[{,]\s*"%s"\s*:\s*'
_PARTS = [
    re.compile(_KEY % b"aggregated_metrics" + rb"\{"),
    re.compile(_KEY % b"num_concurrency" + rb"[0-9]"),
    re.compile(_KEY % b"mean_output_throughput_tokens_per_s"),
]


@dataclass(frozen=True)
class GenAIBench:
    name: str = "genai_bench"
    version: str = "1"
    reads: str = (
        "GenAI-Bench's JSON of one run with individual_request_metrics; there are no times of sending in it, so "
        "that only requests sent one at a time can be placed."
    )
    tables: tuple[Table, ...] = (REQUESTS,)

    def recognises(self, head: bytes, name: str) -> bool:
        return head.lstrip().startswith(b"{") and all(part.search(head) for part in _PARTS)

    def read(self, source: Source) -> Iterator[tuple[Table, pa.Table]]:
        result = loads(source.read_all())
        requests = result.get("individual_request_metrics") if isinstance(result, dict) else None
        if not isinstance(requests, list) or not requests:
            raise BadInput(
                "no requests in this result of GenAI-Bench",
                todo="Give the JSON of a run with individual_request_metrics; a file cut off cannot be read",
            )
        unit = UNITS.get(str(result.get("_time_unit", "s")))
        if unit is None:
            raise BadInput("unit is none that GenAI-Bench has", where="_time_unit")
        values = Values(source.tally)
        run = result.get("aggregated_metrics")
        run = run if isinstance(run, dict) else {}
        starts = _starts(requests, run, unit, source)
        rows = Rows()
        for position, request in enumerate(requests, 1):
            values.where = f"request {position}"
            if not isinstance(request, dict):
                source.tally.reject("not a request", values.where)
                continue
            arrival = None if starts is None else starts[position - 1]
            if arrival is not None and arrival <= 0:
                source.tally.reject(BEFORE_1970, values.where)
                continue
            key = request_key(
                "client", repr(run.get("run_duration")), repr(request.get("e2e_latency")), position
            )
            rows.request({**_row(request, arrival, unit, values), "request_key": key, "file_row": position})
            yield from rows.full()
        yield from rows.rest()


COLLECTOR = GenAIBench()


def _starts(requests: list[Any], run: Mapping[str, Any], unit: int, source: Source) -> list[int] | None:
    """When each was sent, in Unix nanoseconds. Requests are listed in the order in which they ended."""
    latencies = [
        None if value is None else value * unit / SECOND
        for value in (number(r.get("e2e_latency")) if isinstance(r, dict) else None for r in requests)
    ]
    # `run_duration` is in seconds whatever the unit of the latencies.
    since = of_closed_loop(latencies, 1) if run.get("num_concurrency") == 1 else None
    if since is None or not as_long_as(run.get("run_duration"), since, latencies):
        source.tally.note(NOT_PLACED)
        return None
    source.tally.note(PLACED)
    end = end_by_file_time(source)
    length = since[-1] + (latencies[-1] or 0.0)
    return [end - round((length - start) * SECOND) for start in since]


def _row(request: Mapping[str, Any], arrival: int | None, unit: int, values: Values) -> dict[str, Any]:
    ttft = values.duration(request.get("ttft"), "ttft", unit)
    e2e = values.duration(request.get("e2e_latency"), "e2e_latency", unit)
    code = request.get("error_code")
    status = (
        "ok"
        if code is None
        else "rejected"
        if code in REJECTED
        else "timeout"
        if code in TIMEOUTS
        else "error"
    )
    return {
        "observer": "client",
        "arrival_ns": arrival,
        "first_token_ns": None if arrival is None or ttft is None else arrival + ttft,
        "finished_ns": None if arrival is None or e2e is None else arrival + e2e,
        "ttft_ns": ttft,
        "e2e_ns": e2e,
        "prompt_tokens": values.tokens(request.get("num_input_tokens"), "num_input_tokens"),
        "output_tokens": values.tokens(request.get("num_output_tokens"), "num_output_tokens"),
        "status": status,
    }
