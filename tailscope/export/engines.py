"""Engines on a timeline: their steps, what each held, and events that explain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tailscope.export.span import Span
from tailscope.export.timeline import BATCH, Batch, Counters, Names, Slices, Tracks, ints
from tailscope.safe import printable
from tailscope.scan import quote
from tailscope.store import Trace, floats

#: Counter: column, unit. Those of a batch hold during the step, the others from its end on.
HELD = {"prefill tokens": ("prefill_tokens", "tokens"), "decode tokens": ("decode_tokens", "tokens")}
AFTER = {
    "running": ("running", "requests"),
    "waiting": ("waiting", "requests"),
    "KV cache": ("100 * kv_usage", "%"),
}
SHOWN = {**AFTER, **HELD}
KINDS = ("empty", "prefill", "decode", "prefill + decode", "dummy")
_KIND = "CASE WHEN is_dummy THEN 4 ELSE (coalesce(prefill_tokens, 0) > 0)::INT + 2 * (coalesce(decode_tokens, 0) > 0)::INT END"
_IN_SPAN = "start_ns BETWEEN $first_ns AND $last_ns"

Engine = tuple[str, int | None]


def place(
    trace: Trace, span: Span, tracks: Tracks, instances: dict[str, int]
) -> tuple[list[tuple[Engine, dict[str, int]]], dict[str, int]]:
    """Tracks of each engine that has steps in the span, by what they show; and those of events, by instance."""
    engines = []
    # What is never known, and tokens that are never there, are no counters.
    known = ", ".join(
        f'coalesce(max({sql}) >= {0 if shown in AFTER else 1}, false) AS "{shown}"'
        for shown, (sql, _) in SHOWN.items()
    )
    for row in trace.rows(
        f"SELECT instance, engine, {known} FROM steps WHERE {_IN_SPAN} GROUP BY instance, engine ORDER BY instance, engine",
        span.parameters,
    ):
        instance, engine = row["instance"], row["engine"]
        if instance not in instances:
            instances[instance] = tracks.add(f"instance {printable(instance, 60)}")
        name = "engine" if engine is None else f"engine {engine}"
        own = {"steps": tracks.add(f"{name} steps", instances[instance])}
        for shown, (_, unit) in SHOWN.items():
            if row[shown]:
                own[shown] = tracks.add(f"{name} {shown}", instances[instance], unit)
        engines.append(((instance, engine), own))
    events = {}
    for row in trace.rows(
        f"SELECT DISTINCT coalesce(instance, '') AS instance FROM events WHERE {_events(span)} ORDER BY 1",
        span.parameters,
    ):
        instance = row["instance"]
        if instance not in instances:
            instances[instance] = tracks.add(f"instance {printable(instance, 60)}")
        events[instance] = tracks.add("events", instances[instance])
    return engines, events


def _events(span: Span) -> str:
    narrowed = "" if span.instance is None else f" AND instance = {quote(span.instance)}"
    return f"instant(time_ns) BETWEEN $first_ns AND $last_ns{narrowed}"


def batches(
    trace: Trace,
    span: Span,
    names: Names,
    engines: list[tuple[Engine, dict[str, int]]],
    events: dict[str, int],
) -> Iterator[Batch]:
    kinds = np.array([names.of(kind) for kind in KINDS], np.int64)
    values = ", ".join(f"{sql} AS c{i}" for i, (sql, _) in enumerate(SHOWN.values()))
    for (instance, engine), own in engines:
        reader = trace.connection.sql(
            f"SELECT start_ns, end_ns, coalesce(lead(start_ns) OVER (ORDER BY k) > end_ns, true) AS idle_after, {_KIND} AS kind, "
            "iteration, prefill_requests, prefill_tokens, decode_requests, decode_tokens, running, waiting, deferred, "
            f"elapsed_ns, blocked, {values} FROM steps WHERE {_IN_SPAN} "
            "AND instance = $instance AND engine IS NOT DISTINCT FROM $engine ORDER BY k",
            params={**span.parameters, "instance": instance, "engine": engine},
        ).to_arrow_reader(BATCH)
        for batch in reader:
            yield from _steps(batch, own, kinds)
    for instance, track in events.items():
        reader = trace.connection.sql(
            "SELECT instant(time_ns) AS time_ns, shown(coalesce(kind, 'event')) AS kind, shown(detail) AS detail, "
            f"shown(request_id) AS request, rank FROM events WHERE {_events(span)} AND coalesce(instance, '') = $events_of "
            "ORDER BY time_ns, kind, detail",
            params={**span.parameters, "events_of": instance},
        ).to_arrow_reader(BATCH)
        for batch in reader:
            time = ints(batch["time_ns"].to_numpy())
            kind = np.array([names.of(name) for name in batch["kind"].to_pylist()], np.int64)
            yield Slices(
                np.full(len(batch), track),
                kind,
                time,
                time,
                {name: batch[name] for name in ("detail", "request", "rank")},
            )


def _steps(batch: Any, own: dict[str, int], kinds: Any) -> Iterator[Batch]:
    start, end = ints(batch["start_ns"].to_numpy()), ints(batch["end_ns"].to_numpy())
    args = {
        name: batch[name]
        for name in (
            *("iteration", "prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens"),
            *("running", "waiting", "deferred", "elapsed_ns", "blocked"),
        )
    }
    yield Slices(np.full(len(batch), own["steps"]), kinds[ints(batch["kind"].to_numpy())], start, end, args)
    idle = np.asarray(batch["idle_after"].to_numpy(zero_copy_only=False), bool)
    for i, name in enumerate(SHOWN):
        value = floats(batch[f"c{i}"].to_numpy(zero_copy_only=False))
        if name not in own:
            continue
        if name in AFTER:
            times, values = end, value
        else:
            # An engine that stands still holds no tokens.
            times = np.column_stack([start, end]).ravel()
            values = np.column_stack([value, np.where(idle, 0.0, np.nan)]).ravel()
        known = np.isfinite(values)
        times, values = times[known], values[known]
        # A counter keeps its value until another comes.
        new = np.diff(values, prepend=np.nan) != 0
        yield Counters(np.full(int(new.sum()), own[name]), times[new], values[new])
