"""A trace's tables of a simulated world, as ingesting the files of `emit.files` would give them, without the files.

What is rounded on its way through a file is rounded here the same way. Only the ids of sources differ, which are hashes
of files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from tailscope.model import request_key
from tailscope.schema import (
    BY_NAME,
    EVENTS,
    ITERATIONS,
    METRICS,
    REQUESTS,
    SCHEDULE,
    SERIES,
    SOURCES,
    TOKENS,
    Table,
)
from tailscope.sim import tables_clients, tables_metrics, tables_schedule
from tailscope.sim.emit import client, files, log, otlp, schedule, stat_logger
from tailscope.sim.emit.front_end import (
    LOG_INTERVAL_S,
    FrontEnd,
    digest,
    engine_id,
    front_ends,
    of_instance,
    wall,
    whole_ns,
)
from tailscope.sim.outcome import Ints, Outcome
from tailscope.sim.tables_sources import source_row

SECOND = 1_000_000_000
#: What the log's reader allows between a step's end and its line.
JITTER_NS = 5_000_000
Columns = Mapping[str, Any]


def request_tables(outcome: Outcome, *, metrics: bool = False) -> dict[str, pa.Table]:
    """The tables requests, tokens, iterations, events and sources; with `metrics` also metrics and series.

    Those two say nothing of a request. Without them the rows that `sources` counts are those of the other tables. The
    tables' rows are in no particular order.
    """
    views = front_ends(outcome)
    telemetry, tables = outcome.scenario.telemetry, _Tables(outcome, metrics)
    for number, instance in enumerate(outcome.instances()):
        here = of_instance(views, instance)
        if telemetry.spans and any(len(view.told) for view in here):
            tables.add("otlp", instance, files.SPANS, [(REQUESTS, _spans(outcome, here))])
        if telemetry.log:
            tables.add("vllm_log", instance, files.LOG, _log(outcome, here, metrics))
        if telemetry.stat_logger:
            for view in here:
                name = stat_logger.file_name(view)
                tables.add("vllm_statlogger", instance, name, _stat_logger(outcome, view, metrics))
        if telemetry.schedule:
            for view in here:
                rows = tables_schedule.of_log(outcome, view)
                tables.add("vllm_schedule", instance, schedule.file_name(view), rows)
        if telemetry.metrics:
            tables.add(
                "vllm_metrics",
                instance,
                files.METRICS,
                tables_metrics.of_scrapes(outcome, here) if metrics else (),
            )
        if telemetry.gateway:
            rows = tables_clients.of_gateway(outcome, client.instances_of_calls(outcome) == number)
            tables.add("gateway", instance, "gateway", rows)
        if telemetry.client:
            calls = client.calls(outcome, views, number)
            if not len(calls):
                continue
            if telemetry.client_format == "vllm-bench":
                result = client.bench(outcome, calls)
                offset = tables_clients.bench_offset(result)
                clock = {"clock": "perf_counter", "offset_ns": offset, "offset_error_ns": 2 * SECOND}
                rows = tables_clients.of_bench(outcome, calls, result, offset)
                tables.add("client_log", instance, files.BENCH, rows, clock)
            else:
                rows, blanked = tables_clients.of_log(outcome, calls), tables_clients.blanked(outcome, calls)
                tables.add("client_log", instance, files.CLIENT, rows, blanked=blanked)
    return tables.finish()


class _Tables:
    """Rows by table, and the source each came from."""

    def __init__(self, outcome: Outcome, metrics: bool) -> None:
        self.outcome = outcome
        names = [REQUESTS, TOKENS, ITERATIONS, EVENTS, SOURCES, *([METRICS, SERIES] if metrics else [])]
        names += [SCHEDULE] if outcome.scenario.telemetry.schedule else []
        self.rows: dict[str, list[pa.Table]] = {table.name: [] for table in names}
        self.sources: list[dict[str, Any]] = []
        self.known: set[tuple[str, str]] = set()

    def add(
        self,
        kind: str,
        instance: str,
        file: str,
        rows: Iterable[tuple[Table, Columns]],
        clock: Mapping[str, Any] | None = None,
        blanked: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Rows of one file, without instance and source; `clock`, if its clock is none that its kind has; `blanked`:
        values its reader leaves NULL, by reason."""
        source = digest(
            "source", self.outcome.scenario.name, self.outcome.scenario.seed, instance, file
        ).hex()
        count, repeated, times = 0, 0, list[int]()
        for table, columns in rows:
            batch = _batch(table, {**columns, "instance": instance, "source": source})
            if table is SERIES:
                # What two files say is stored once; of all rows only those of series can be quite alike.
                keys = [(instance, str(series)) for series in batch["series"].to_pylist()]
                new = [key not in self.known for key in keys]
                self.known.update(keys)
                batch, repeated = batch.filter(pa.array(new, pa.bool_())), new.count(False)
            if batch.num_rows:
                self.rows[table.name].append(batch)
                count += batch.num_rows
            if batch.num_rows and table.time:
                found = batch[table.time].to_numpy()
                times += [int(found.min()), int(found.max())]
        self.sources.append(
            source_row(
                kind,
                instance,
                file,
                source,
                rows=count,
                clock=clock or _clock_of(kind),
                first_ns=min(times, default=None),
                last_ns=max(times, default=None),
                blanked=blanked,
                rows_duplicate=repeated,
            )
        )

    def _count_conflicts(self) -> None:
        """Answers to one call that arrived together and ended apart have one key by a stat logger's reader."""
        keys = Counter(key for rows in self.rows[REQUESTS.name] for key in rows["request_key"].to_pylist())
        twice = {key for key, count in keys.items() if count > 1}
        by_source = {row["source"]: row for row in self.sources}
        for rows in self.rows[REQUESTS.name] if twice else ():
            for key, source in zip(rows["request_key"].to_pylist(), rows["source"].to_pylist(), strict=True):
                by_source[source]["rows_conflicting"] += key in twice

    def finish(self) -> dict[str, pa.Table]:
        self._count_conflicts()
        self.rows[SOURCES.name] = [pa.Table.from_pylist(self.sources, schema=SOURCES.arrow)]
        return {
            name: pa.concat_tables(parts) if parts else BY_NAME[name].arrow.empty_table()
            for name, parts in self.rows.items()
        }


def _clock_of(kind: str) -> dict[str, Any]:
    if kind == "vllm_log":
        return {"clock": "log", "offset_ns": 0, "offset_error_ns": SECOND}
    return {"clock": "wall"}


def _batch(table: Table, columns: Columns) -> pa.Table:
    arrays = {name: pa.array(v) if isinstance(v, np.ndarray) else v for name, v in columns.items()}
    return table.batch(arrays)


def _ids(outcome: Outcome, requests: Ints) -> list[str]:
    names = outcome.requests.id
    return [engine_id(names[request]) for request in requests.tolist()]


# -- what the front end tells ------------------------------------------------------------------------


def _spans(outcome: Outcome, views: list[FrontEnd]) -> Columns:
    parts = [_span_columns(outcome, view) for view in views]
    end = np.concatenate([view.stays.finished_s[view.told] for view in views])
    number = np.concatenate([np.full(len(view.told), v) for v, view in enumerate(views)])
    order = np.lexsort((number, end))
    row = np.empty(len(order), np.int64)
    row[order] = np.arange(1, len(order) + 1)
    joined = {
        name: [v for part in parts for v in part[name]] for name in ("request_id", "trace_id", "span_id")
    }
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if name not in joined}
    keys = [request_key("otlp", t, s) for t, s in zip(joined["trace_id"], joined["span_id"], strict=True)]
    return {**joined, **arrays, "request_key": keys, "file_row": row, "observer": "engine", "status": "ok"}


def _span_columns(outcome: Outcome, view: FrontEnd) -> dict[str, Any]:
    stays, told = view.stays, view.told
    spent = {name: whole_ns(values) for name, values in view.durations.items()}
    arrival = otlp.start_ns(view)
    # Spans give durations; instants are made of them.
    first_token, last_token = arrival + spent["ttft"], arrival + spent["e2e"]
    scheduled = first_token - spent["prefill"]
    ids = [otlp.ids(outcome, view, request) for request in stays.request[told].tolist()]
    loads = [outcome.scenario.loads[i] for i in outcome.requests.load[stays.request[told]]]
    return {
        "tenant": [load.tenant for load in loads],
        "priority": [load.priority or None for load in loads],
        "request_id": _ids(outcome, stays.request[told]),
        "trace_id": [trace.hex() for trace, _ in ids],
        "span_id": [span.hex() for _, span in ids],
        "arrival_ns": arrival,
        "queued_ns": scheduled - spent["queued"],
        "scheduled_ns": scheduled,
        "first_token_ns": first_token,
        "last_token_ns": last_token,
        "finished_ns": last_token,
        "queue_ns": spent["queued"],
        "prefill_ns": spent["prefill"],
        "decode_ns": spent["decode"],
        "ttft_ns": spent["ttft"],
        "e2e_ns": spent["e2e"],
        "prompt_tokens": stays.prompt[told],
        "output_tokens": view.outputs[told],
        "max_tokens": stays.max_tokens[told],
    }


def _stat_logger(outcome: Outcome, view: FrontEnd, metrics: bool) -> Iterator[tuple[Table, Columns]]:
    steps, kept = view.steps, view.reported
    now = whole_ns(wall(steps.received_s[kept]))
    details = outcome.scenario.telemetry.iteration_details
    if details:
        preempted = pa.array(steps.preempted_told[kept], mask=view.messages[kept] == 0)
        yield (
            ITERATIONS,
            {
                **_composition(view),
                "engine": np.full(len(kept), view.engine),
                "end_ns": now,
                "elapsed_ns": np.rint(view.elapsed_ms[kept] * 1e6).astype(np.int64),
                "end_basis": "receipt",
                "running": steps.running[kept],
                "waiting": steps.waiting[kept],
                "deferred": steps.deferred[kept],
                "kv_usage": steps.kv_usage[kept],
                "preempted": preempted,
                "is_dummy": False,
            },
        )

    yield REQUESTS, _finished(outcome, view)
    if metrics:
        yield from tables_metrics.of_records(view, now, details)


def _composition(view: FrontEnd) -> dict[str, Ints]:
    """What is in a step, by vLLM's V1 model runner: what is computed again is decoding."""
    steps, kept = view.steps, view.reported
    return {
        "iteration": kept,
        "prefill_requests": steps.prefill_requests[kept],
        "prefill_tokens": steps.prefill_tokens[kept],
        "decode_requests": (steps.decode_requests + steps.recompute_requests)[kept],
        "decode_tokens": (steps.decode_tokens + steps.recompute_tokens)[kept],
    }


def _finished(outcome: Outcome, view: FrontEnd) -> Columns:
    stays, told = view.stays, view.told
    at = view.steps.received_s[view.last_step[told]]
    now, spent = whole_ns(wall(at)), {name: whole_ns(values) for name, values in view.durations.items()}
    arrival, first_token = now - spent["e2e"], now - spent["decode"]
    scheduled = first_token - spent["prefill"]
    ids = _ids(outcome, stays.request[told])
    # Two lines come first, and one each time the statistics are logged.
    logs = np.arange(LOG_INTERVAL_S, stat_logger.end_s(view), LOG_INTERVAL_S)
    record = np.searchsorted(view.reported, view.last_step[told])
    row = 2 + np.searchsorted(logs, at, side="right") + record + 1
    rows = zip(ids, arrival.tolist(), view.place.tolist(), strict=True)
    return {
        "engine": np.full(len(told), view.engine),
        "request_key": [request_key("vllm_statlogger", name, ns, place) for name, ns, place in rows],
        "request_id": ids,
        "file_row": row,
        "observer": "engine",
        "model": _model(outcome.scenario.model),
        "arrival_ns": arrival,
        "queued_ns": scheduled - spent["queued"],
        "scheduled_ns": scheduled,
        "first_token_ns": first_token,
        "last_token_ns": now,
        "finished_ns": now,
        "queue_ns": spent["queued"],
        "prefill_ns": spent["prefill"],
        "decode_ns": spent["decode"],
        "e2e_ns": spent["e2e"],
        "prompt_tokens": stays.prompt[told],
        "cached_tokens": (stays.cached + stays.external)[told],
        "output_tokens": view.outputs[told],
        "max_tokens": stays.max_tokens[told],
        "preemptions": stays.preemptions[told],
        "status": "ok",
    }


def _model(name: str) -> str | None:
    """Of a model that is a path readers keep the last part."""
    if not name.strip("/"):
        return None
    is_hub_name = name.count("/") <= 1 and name[0] not in "/.~"
    return name if is_hub_name else name.rstrip("/").rpartition("/")[2]


# -- the log -----------------------------------------------------------------------------------------


def _log(outcome: Outcome, views: list[FrontEnd], metrics: bool) -> Iterator[tuple[Table, Columns]]:
    if outcome.scenario.telemetry.iteration_details:
        for view in views:
            yield ITERATIONS, _logged_steps(view)
    told = [one for one in log.told(outcome, views) if one.kind]
    several = outcome.scenario.engine.data_parallel > 1
    yield (
        EVENTS,
        {
            # The only engine of a server is not numbered in its log.
            "engine": [one.rank if several else None for one in told],
            "time_ns": log.second_ns(np.array([one.time_s for one in told])) + SECOND // 2,
            "time_error_ns": SECOND // 2,
            "kind": [str(one.kind) for one in told],
            "detail": [one.detail for one in told],
        },
    )
    if metrics:
        yield from tables_metrics.of_statistics(views)


def _logged_steps(view: FrontEnd) -> Columns:
    elapsed = log.elapsed_hundredths(view) * 10_000
    low = log.second_ns(view.steps.received_s[view.reported])
    end, error = _narrowed(low.tolist(), elapsed.tolist())
    return {
        **_composition(view),
        "engine": np.full(len(low), view.engine),
        "end_ns": end,
        "elapsed_ns": elapsed,
        "time_error_ns": error,
        "end_basis": "derived",
        "kv_usage": log.usage_thousandths(view) / 10 / 100,
        "is_dummy": False,
    }


def _narrowed(seconds: list[int], elapsed: list[int]) -> tuple[list[int], list[int]]:
    """Ends of steps and bounds of their errors, as the log's reader narrows them down from both sides: a step ends
    its elapsed time or more after the one before."""
    lows, highs = list[int](), list[int]()
    low: int | None = None
    for second, took in zip(seconds, elapsed, strict=True):
        bound = second if low is None else low + took
        low = bound if second < bound < second + SECOND else second
        lows.append(low)
    bound = seconds[-1] + SECOND if seconds else 0
    for second, took in zip(reversed(seconds), reversed(elapsed), strict=True):
        high = bound if second < bound < second + SECOND else second + SECOND
        highs.append(high)
        bound = high - took
    ends, errors = list[int](), list[int]()
    last = 0
    for second, low, high in zip(seconds, lows, reversed(highs), strict=True):
        if low - high > 2 * JITTER_NS:
            low, high = second, second + SECOND
        end = (low + high) // 2
        if end < last <= second + SECOND:
            end = last
        ends.append(end)
        errors.append(max(abs(high - end), abs(end - low)) + JITTER_NS)
        last = end
    return ends, errors
