"""Records of a vLLM stat-logger plug-in: one JSON object a line, with all that vLLM hands its stat loggers.

Field names differ by vLLM version, and the classes behind them are declared unstable: a field may be absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from tailscope.errors import BadInput
from tailscope.model import request_key
from tailscope.schema import EVENTS, ITERATIONS, METRICS, REQUESTS, SERIES, Table
from tailscope.source import Source

from ._ids import stored_request_id
from ._series import series_id
from ._vllm_statlogger_values import Group, Values, before, instant, json_object, model_name, nanoseconds

BATCH = 50_000
LIFE_CYCLE = ("init", "log_engine_initialized", "log", "sleep")
#: A record cut by the end of the head still shows its kind.
_BEGINS = re.compile(rb'\s*\{\s*"wall":\s*[\d.eE+-]+,\s*"mono":\s*[\d.eE+-]+,\s*"ev":\s*"(record|init)"')

#: (series, stats object, part of it, field): counts of one record, summed up to a counter. Running, waiting
#: and KV usage are not here: iterations hold them.
_COUNTERS = tuple(
    (f"statlogger:{prefix}{field}", stats, part, field)
    for prefix, stats, part, fields in (
        (
            "prefix_cache_",
            0,
            "prefix_cache_stats",
            ("queries", "hits", "preempted_queries", "preempted_hits"),
        ),
        ("spec_decode_", 0, "spec_decoding_stats", ("num_drafts", "num_draft_tokens", "num_accepted_tokens")),
        ("prompt_tokens_", 1, "prompt_token_stats", ("computed",)),
    )
    for field in fields
)


@dataclass(frozen=True)
class VllmStatLogger:
    name: ClassVar[str] = "vllm_statlogger"
    version: ClassVar[str] = "1"
    reads: ClassVar[str] = (
        "JSON lines of a vLLM stat-logger plug-in (vLLM 0.12 and later) with every record vLLM gives it."
    )
    tables: ClassVar[tuple[Table, ...]] = (ITERATIONS, REQUESTS, METRICS, SERIES, EVENTS)

    def recognises(self, head: bytes, name: str) -> bool:
        lines = head.split(b"\n")
        return any(_is_record(json_object(line)) for line in lines) or bool(_BEGINS.match(lines[-1]))

    def read(self, source: Source) -> Iterator[tuple[Table, pa.Table]]:
        return _Reader(source).read()


COLLECTOR = VllmStatLogger()


def _is_record(record: dict[str, Any] | None) -> bool:
    if record is None or not {"wall", "mono", "ev"} <= record.keys():
        return False
    return "scheduler_stats" in record if record["ev"] == "record" else record["ev"] in LIFE_CYCLE


class _Reader:
    def __init__(self, source: Source) -> None:
        self.source, self.tally, self.values = source, source.tally, Values(source.tally)
        self.rows: dict[Table, list[dict[str, Any]]] = {table: [] for table in COLLECTOR.tables}
        self.line = 0
        self.wall: float | None = None
        self.stepped = False
        self.start_ns: int | None = None
        self.engine: int | None = None
        self.model: str | None = None
        self.has_records = self.has_details = False
        #: Last value of each series of an engine.
        self.samples: dict[tuple[int | None, str], float] = {}

    def read(self) -> Iterator[tuple[Table, pa.Table]]:
        self.source.clock = "wall"
        usable = False
        for number, line in self.source.lines():
            self.line, self.values.where = number, f"line {number}"
            record = json_object(line)
            ev = record.get("ev") if record else None
            if record is None:
                self.tally.reject("line is not a JSON object", self.values.where)
            elif ev == "record" or ev in LIFE_CYCLE:
                now = self._clock(record.get("wall"))
                if ev == "record":
                    self._record(record, now)
                else:
                    self._life_cycle(ev, record, now, first=not usable)
                usable = True
                self.start_ns = self.start_ns or now
                yield from self._flush(BATCH)
            else:
                self.tally.skip("record of another kind")
        if not usable:
            raise BadInput(
                "no stat-logger record in the file",
                path=self.source.display,
                todo='Give JSON lines with "wall", "mono" and "ev", as a stat-logger plug-in writes them',
            )
        yield from self._flush(1)
        self._notes()

    def _flush(self, at_least: int) -> Iterator[tuple[Table, pa.Table]]:
        for table, rows in self.rows.items():
            if len(rows) >= at_least:
                self.rows[table] = []
                yield table, table.batch({name: [row[name] for row in rows] for name in rows[0]})

    def _notes(self) -> None:
        if not self.has_records:
            self.tally.note("the file has no records: the engine reported nothing while it was written")
            return
        if not self.has_details:
            self.tally.note(
                "no record has iteration details; --enable-logging-iteration-details would add what each "
                "engine step computed (prompt and decode tokens and requests) and how long it took"
            )
        self.tally.note(
            "instants of requests are derived: finish is when the front end had the last output, earlier "
            "ones lie before it by the durations the engine reported"
        )

    def _clock(self, wall: Any) -> int | None:
        now = instant(wall)
        if now is not None:
            if self.wall is not None and wall < self.wall and not self.stepped:
                self.stepped = True
                by = self.wall - wall
                self.tally.note(f"wall clock steps backwards at line {self.line} by {by:.3f} s")
            self.wall = wall
        return now

    # -- records -------------------------------------------------------------------------------

    def _life_cycle(self, ev: str, record: Group, now: int | None, first: bool) -> None:
        kind = detail = ""
        if ev == "init":
            self.engine = self.values.count(record, "engine_index")
            self.model = model_name(record.get("model"))
            if not first:
                kind, detail = "restart", "stat logger started again"
        elif ev == "sleep":
            kind, detail = "config", _sleep(record.get("a"))
        else:
            self.tally.skip("life-cycle record")
        if kind and now is None:
            self.tally.reject("record without a usable time", self.values.where)
        elif kind:
            self.rows[EVENTS].append({"engine": self.engine, "time_ns": now, "kind": kind, "detail": detail})

    def _record(self, record: Group, now: int | None) -> None:
        scheduler = self.values.group(record, "scheduler_stats")
        iteration = self.values.group(record, "iteration_stats")
        engine = self.values.count(record, "engine_idx")
        if engine is None:
            engine = self.engine
        if "iteration_timestamp" in iteration:
            received = instant(iteration["iteration_timestamp"])
            if received is None:
                self.tally.blank("iteration timestamp is not a time", self.values.where)
            else:
                now = received
        if now is None:
            self.tally.reject("record without a usable time", self.values.where)
            return
        self.has_records = True
        finished = iteration.get("finished_requests") or []
        if not isinstance(finished, list):
            self.tally.reject("finished requests are not a list", self.values.where)
            finished = []
        if details := self.values.group(scheduler, "iteration_details"):
            self.has_details = True
            self._iteration(engine, now, scheduler, details, iteration)
        elif scheduler and not self.has_details:
            # A file without details has these nowhere else. One with details has them in its iterations:
            # there, samples of the idle wake-ups alone would say that the engine never has work.
            self._gauges(engine, now, scheduler)
        elif not finished:
            self.tally.skip("record without iteration details")
        for index, request in enumerate(finished):
            self._request(engine, now, index, request)
        self._counters(engine, now, scheduler, iteration)

    def _iteration(
        self, engine: int | None, now: int, scheduler: Group, details: Group, iteration: Group
    ) -> None:
        count, dummy = self.values.count, details.get("is_dummy")
        self.rows[ITERATIONS].append(
            {
                "engine": engine,
                "iteration": count(details, "iteration_index"),
                "end_ns": now,
                "elapsed_ns": self.values.duration(details, "elapsed_ms", 1e6),
                "end_basis": "receipt",
                "prefill_requests": count(details, "num_ctx_requests"),
                "prefill_tokens": count(details, "num_ctx_tokens"),
                "decode_requests": count(details, "num_generation_requests"),
                "decode_tokens": count(details, "num_generation_tokens"),
                "running": count(scheduler, "num_running_reqs"),
                "waiting": count(scheduler, "num_waiting_reqs"),
                "deferred": count(scheduler, "num_skipped_waiting_reqs"),
                "kv_usage": self.values.share(scheduler, "kv_cache_usage"),
                "preempted": count(iteration, "num_preempted_reqs"),
                "is_dummy": dummy if isinstance(dummy, bool) else None,
            }
        )

    def _request(self, engine: int | None, now: int, index: int, request: Any) -> None:
        if not isinstance(request, dict):
            self.tally.reject("finished request is not an object", self.values.where)
            return
        count, duration = self.values.count, self.values.duration
        e2e = duration(request, "e2e_latency")
        arrival = before(now, e2e)
        if arrival is None:
            self.tally.reject("finished request without a usable arrival", self.values.where)
            return
        output = count(request, "num_generation_tokens")
        if output == 0:
            # The engine takes durations from instants that it then never set: no fault of the file.
            last_token = prefill = decode = None
            queue = nanoseconds(request.get("queued_time"))
        else:
            last_token = now
            queue = duration(request, "queued_time")
            prefill, decode = duration(request, "prefill_time"), duration(request, "decode_time")
        first_token = before(last_token, decode)
        scheduled = before(first_token, prefill)
        request_id = self.values.text(request, "request_id")
        if request_id is not None:
            request_id = stored_request_id(request_id, self.source.options.hash_ids)
        self.rows[REQUESTS].append(
            {
                "engine": engine,
                # By the content alone: a longer copy of the file gives the same request the same key.
                "request_key": request_key("vllm_statlogger", request_id, arrival, index),
                "request_id": request_id,
                "file_row": self.line,
                "observer": "engine",
                "model": self.model,
                "arrival_ns": arrival,
                "queued_ns": before(scheduled, queue),
                "scheduled_ns": scheduled,
                "first_token_ns": first_token,
                "last_token_ns": last_token,
                "finished_ns": now,
                "queue_ns": queue,
                "prefill_ns": prefill,
                "decode_ns": decode,
                "e2e_ns": e2e,
                "prompt_tokens": count(request, "num_prompt_tokens"),
                "cached_tokens": count(request, "num_cached_tokens"),
                "output_tokens": output,
                "max_tokens": count(request, "max_tokens_param"),
                "preemptions": count(request, "num_preemptions"),
                "status": self.values.status(request, "finish_reason"),
            }
        )

    def _gauges(self, engine: int | None, now: int, scheduler: Group) -> None:
        running = self.values.count(scheduler, "num_running_reqs")
        waiting = self.values.count(scheduler, "num_waiting_reqs")
        if waiting is not None:  # the endpoint's number of waiting requests includes the deferred ones
            waiting += self.values.count(scheduler, "num_skipped_waiting_reqs") or 0
        self._sample(engine, now, "vllm:num_requests_running", "gauge", running)
        self._sample(engine, now, "vllm:num_requests_waiting", "gauge", waiting)
        kv_usage = self.values.share(scheduler, "kv_cache_usage")
        self._sample(engine, now, "vllm:kv_cache_usage_perc", "gauge", kv_usage)

    def _counters(self, engine: int | None, now: int, *stats: Group) -> None:
        for name, which, part, field in _COUNTERS:
            group = stats[which].get(part)
            amount = self.values.count(group, field) if isinstance(group, dict) else None
            if amount is None:
                continue
            if amount and self.start_ns is not None and (engine, name) not in self.samples:
                # A counter's first sample has no past; this one begins where the file does.
                self._sample(engine, self.start_ns, name, "counter", 0)
            self._sample(engine, now, name, "counter", self.samples.get((engine, name), 0) + amount)

    def _sample(self, engine: int | None, now: int, name: str, kind: str, value: float | None) -> None:
        """A metric row if the value differs from the series' last one."""
        if value is None or self.samples.get((engine, name)) == value:
            return
        labels = {} if engine is None else {"engine": str(engine)}
        series = series_id(name, labels)
        if (engine, name) not in self.samples:
            self.rows[SERIES].append(
                {
                    "engine": engine,
                    "series": series,
                    "name": name,
                    "type": kind,
                    "labels": list(labels.items()),
                }
            )
        self.samples[engine, name] = value
        self.rows[METRICS].append({"engine": engine, "time_ns": now, "series": series, "value": float(value)})


def _sleep(arguments: Any) -> str:
    match arguments:
        case [True, *_]:
            return "sleep state changed: awake"
        case [False, int(level), *_] if level in range(10):
            return f"sleep state changed: asleep, level {level}"
        case [False, *_]:
            return "sleep state changed: asleep"
    return "sleep state changed"
