"""GuideLLM's report of benchmarks, `benchmarks.json`: of 0.8 with its timings, and of older versions."""

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

from ._client_rows import Rows, Values, loads, text
from ._client_times import MILLISECOND, SECOND, after, instant

#: GuideLLM lists requests by how they ended. Incomplete ones it gave up when the benchmark's time was over.
ENDED = {"successful": "ok", "errored": "error", "incomplete": "aborted"}
#: Strategies that have a schedule. The others mean to send as soon as they can.
SCHEDULED = ("constant", "poisson", "async", "trace")

_TIMEOUT = re.compile(r"time-?\s?out|timed out", re.IGNORECASE)
_KEY = rb'[{,]\s*"%s"\s*:\s*'
_BENCHMARKS = re.compile(_KEY % b"benchmarks" + rb"\[")
_VERSION = re.compile(_KEY % b"guidellm_version" + rb'"')
_KIND = re.compile(_KEY % b"type_" + rb'"generative_benchmark"')


@dataclass(frozen=True)
class GuideLLM:
    name: str = "guidellm"
    version: str = "1"
    reads: str = (
        "GuideLLM's benchmarks.json with its requests, of 0.8 and of older versions (a report made without "
        "requests, or with a sample of them, says so)."
    )
    tables: tuple[Table, ...] = (REQUESTS,)

    def recognises(self, head: bytes, name: str) -> bool:
        if not head.lstrip().startswith(b"{"):
            return False
        return _VERSION.search(head) is not None or (
            _BENCHMARKS.search(head) is not None and _KIND.search(head) is not None
        )

    def read(self, source: Source) -> Iterator[tuple[Table, pa.Table]]:
        report = loads(source.read_all())
        benchmarks = report.get("benchmarks") if isinstance(report, dict) else None
        if not isinstance(benchmarks, list):
            raise BadInput(
                "not a complete report of GuideLLM",
                todo="Give the benchmarks.json that guidellm benchmark writes; a file cut off cannot be read",
            )
        rows = Rows()
        values = Values(source.tally)
        for position, benchmark in enumerate(benchmarks, 1):
            if not isinstance(benchmark, dict):
                source.tally.reject("not a benchmark", f"benchmark {position}")
                continue
            _say_what_is_missing(benchmark, position, source)
            for status, number, request in _requests(benchmark):
                values.where = f"benchmark {position}, {status} request {number}"
                row = _row(request, status, _scheduled(benchmark), source, values)
                if row is not None:
                    rows.request({**row, "file_row": rows.stored + 1})
                    yield from rows.full()
        yield from rows.rest()
        if not rows.stored:
            reason, where = next(iter(source.tally.first_seen.items()), ("the report lists none", ""))
            raise BadInput(
                f"no request can be used: {reason}",
                where=where,
                todo="Run guidellm benchmark so that its report keeps the requests (no sample size of 0)",
            )


COLLECTOR = GuideLLM()


def _requests(benchmark: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    requests = benchmark.get("requests")
    for status in ENDED:
        listed = requests.get(status) if isinstance(requests, dict) else None
        for number, request in enumerate(listed if isinstance(listed, list) else (), 1):
            yield status, number, request


def _say_what_is_missing(benchmark: Mapping[str, Any], position: int, source: Source) -> None:
    """A report may keep a sample of the requests; percentiles hold, but those left out loaded the server too."""
    totals = benchmark.get("request_totals") or _object(benchmark.get("metrics")).get("request_totals")
    listed = sum(1 for _ in _requests(benchmark))
    counts = [value for name in ENDED if isinstance(value := _object(totals).get(name), int)]
    if sum(counts) > listed:
        source.tally.note(
            f"Benchmark {position} ran {sum(counts):,} requests and the report lists {listed:,}: the others "
            "loaded the server too, and are not seen."
        )


def _scheduled(benchmark: Mapping[str, Any]) -> bool:
    run = _object(benchmark.get("config") or benchmark.get("args"))
    strategy = run.get("strategy")
    kind = strategy.get("type_") if isinstance(strategy, dict) else strategy
    return kind in SCHEDULED


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _row(request: Any, status: str, scheduled: bool, source: Source, values: Values) -> dict[str, Any] | None:
    if not isinstance(request, dict):
        source.tally.reject("not a request", values.where)
        return None
    info = _object(request.get("info"))
    # In older versions the scheduler's times stood apart from the request's own.
    old = _object(request.get("scheduler_info"))
    times = _object(info.get("timings")) or {
        "targeted_start": old.get("targeted_start_time"),
        "request_start": request.get("start_time") or old.get("request_start"),
        "first_token_iteration": request.get("first_token_time"),
        "last_token_iteration": request.get("last_token_time"),
        "request_end": request.get("end_time") or old.get("request_end"),
    }
    start = times.get("request_start")
    arrival = instant(times.get("resolve_start") if start is None else start, SECOND)
    if arrival is None:
        if status == "incomplete":
            source.tally.skip("request that was never sent")
        else:
            source.tally.reject("start of the request missing or not a time", values.where)
        return None
    end = times.get("request_end")
    finished = after(times.get("resolve_end") if end is None else end, SECOND, arrival, "request_end", values)
    first = after(times.get("first_token_iteration"), SECOND, arrival, "first_token_iteration", values)
    last = after(times.get("last_token_iteration"), SECOND, arrival, "last_token_iteration", values)
    ttft = values.duration(request.get("time_to_first_token_ms"), "time_to_first_token_ms", MILLISECOND)
    e2e = values.duration(request.get("request_latency"), "request_latency", SECOND)
    request_id = text(request.get("response_id"))
    if source.options.hash_ids and request_id is not None:
        request_id = request_key("id", request_id)
    error = info.get("error") or request.get("error")
    timed_out = status == "errored" and isinstance(error, str) and _TIMEOUT.search(error) is not None
    return {
        # Its own id says which request it is; the server's, where there is one, joins it with an engine's row.
        "request_key": request_key("client", text(request.get("request_id")), arrival, 0),
        "request_id": request_id,
        "observer": "client",
        "arrival_ns": arrival,
        "intended_ns": instant(times.get("targeted_start"), SECOND) if scheduled else None,
        "first_token_ns": first,
        "last_token_ns": last,
        "finished_ns": finished,
        "ttft_ns": first - arrival if ttft is None and first is not None else ttft,
        "e2e_ns": finished - arrival if e2e is None and finished is not None else e2e,
        "prompt_tokens": values.tokens(request.get("prompt_tokens"), "prompt_tokens"),
        "cached_tokens": values.tokens(request.get("cached_tokens"), "cached_tokens"),
        "output_tokens": values.tokens(request.get("output_tokens"), "output_tokens"),
        "status": "timeout" if timed_out else ENDED[status],
    }
