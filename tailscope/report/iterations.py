"""What the page shows of engines' steps: batch, duration, KV cache and queue, each step or, where they are many, bins of time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tailscope.report.columns import Columns, columns, shown_name
from tailscope.report.html import Html, el, table
from tailscope.report.parts import behind, chart, choice, lacking, section
from tailscope.store import Trace
from tailscope.units import clock, seconds

#: Steps of an engine that are shown one by one; with more, so many bins of time.
MOST_STEPS, BINS = 1_200, 600
#: Engines on the page, those with the most time in steps.
MOST_ENGINES = 12
#: Rows of the table behind the chart.
LONGEST = 12


@dataclass
class Engine:
    name: str
    instance: str
    engine: int | None
    steps: int
    first_ns: int
    last_ns: int
    binned: bool
    rows: Columns = field(default_factory=dict)


@dataclass
class Iterations:
    engines: list[Engine] = field(default_factory=list)
    #: How many there are.
    of: int = 0
    longest: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0
    about: dict[str, Any] = field(default_factory=dict)


def gather(trace: Trace) -> Iterations:
    found = trace.rows(
        "SELECT instance, engine, count(*) AS steps, min(start_ns) AS first_ns, max(end_ns) AS last_ns, sum(tile_ns) AS busy "
        "FROM steps GROUP BY instance, engine ORDER BY busy DESC, instance, engine"
    )
    result = Iterations(of=len(found), steps=sum(row["steps"] for row in found))
    if not found:
        return result
    many = len({row["instance"] for row in found}) > 1
    for row in found[:MOST_ENGINES]:
        instance, engine = row["instance"], row["engine"]
        number = "" if engine is None else f"engine {engine}"
        name = (f"{instance} {number}".strip() if many else number or instance) or "engine"
        one = Engine(
            name, instance, engine, row["steps"], row["first_ns"], row["last_ns"], row["steps"] > MOST_STEPS
        )
        one.rows = columns(
            trace,
            _BINNED if one.binned else _EACH,
            {
                "instance": instance,
                "engine": engine,
                "first": one.first_ns,
                **({"span": max(one.last_ns - one.first_ns, 1), "bins": BINS} if one.binned else {}),
            },
        )
        result.engines.append(one)
    result.engines.sort(key=lambda e: (e.instance, e.engine is not None, e.engine or 0))
    result.longest = trace.rows(
        "SELECT instance, engine, end_ns, tile_ns / 1e9 AS seconds, prefill_tokens, decode_requests, kv_usage, running, waiting "
        "FROM steps ORDER BY tile_ns DESC, k LIMIT $most",
        {"most": LONGEST},
    )
    [result.about] = trace.rows(
        "SELECT median(tile_ns) FILTER (WHERE prefill_tokens = 0) / 1e9 AS without_s, median(tile_ns) FILTER (WHERE prefill_tokens > 0) / 1e9 AS with_s, "
        "count(*) FILTER (WHERE prefill_tokens > 0) AS prefill_steps, max(kv_usage) AS kv, max(waiting) AS waiting, sum(preempted) AS preempted FROM steps"
    )
    return result


#: Most engines tell of tokens that preemptions made computed again as of those of decodes; a recorded schedule tells them apart.
_COMPUTED = """
WITH computed AS (
    SELECT s.*, coalesce(c.recompute_tokens, 0) AS again, CASE WHEN s.decode_tokens IS NOT NULL THEN greatest(s.decode_tokens - again, least(s.decode_tokens, s.decode_requests)) END AS decode
    FROM steps s LEFT JOIN step_costs c USING (k)
)
"""
#: Seconds are from the engine's first step.
_EACH = f"""{_COMPUTED}
SELECT round((end_ns - $first) / 1e9, 4) AS at, tile_ns / 1e9 AS took, 1 AS steps, prefill_tokens AS prefill,
       decode, again,
       kv_usage AS kv, running, waiting, preempted
FROM computed WHERE instance = $instance AND engine IS NOT DISTINCT FROM $engine ORDER BY k
"""
_BINNED = f"""{_COMPUTED}
SELECT round(max(end_ns - $first) / 1e9, 4) AS at, max(tile_ns) / 1e9 AS took, median(tile_ns) / 1e9 AS usual, count(*) AS steps,
       avg(prefill_tokens) AS prefill, avg(decode) AS decode, avg(again) AS again, max(kv_usage) AS kv, avg(running) AS running, max(waiting) AS waiting,
       sum(preempted) AS preempted
FROM computed WHERE instance = $instance AND engine IS NOT DISTINCT FROM $engine
GROUP BY least((end_ns - $first) * $bins // $span, $bins - 1) ORDER BY 1
"""


def iterations_section(found: Iterations) -> Html:
    if not found.engines:
        return section(
            "iterations",
            "Engine steps",
            None,
            lacking(
                "Nothing tells of the engine's steps.",
                "vllm serve --enable-logging-iteration-details with its log, or a stat logger, would show each step's batch, duration and KV cache.",
            ),
        )
    worst = found.longest[0]
    engine = next(
        (
            i
            for i, e in enumerate(found.engines)
            if (e.instance, e.engine) == (worst["instance"], worst["engine"])
        ),
        0,
    )
    return section(
        "iterations",
        "Engine steps",
        _lead(found),
        chart(
            "iterations",
            "What each step computed, how long it took, and how full the engine was",
            _says(found.engines[engine], worst),
            choice(
                "iterations-engine",
                "Engine",
                [(str(i), e.name) for i, e in enumerate(found.engines)],
                str(engine),
            )
            if len(found.engines) > 1
            else None,
            height=560,
        ),
        el(
            "p",
            f"{len(found.engines)} of {found.of} engines are on the page: those with most time in steps.",
            cls="note",
        )
        if found.of > len(found.engines)
        else None,
        behind("The longest steps", _longest(found)),
    )


def _lead(found: Iterations) -> str:
    about = found.about
    text = f"{found.steps:,} steps of {found.of} {'engine' if found.of == 1 else 'engines'}"
    if about["with_s"] and about["without_s"]:
        text += (
            f". One without prefill takes {seconds(about['without_s'])}, one with prefill {seconds(about['with_s'])} (medians; "
            f"{about['prefill_steps'] / found.steps:.0%} have some)"
        )
    if about["kv"] is not None:
        text += f". The KV cache was up to {about['kv']:.0%} full"
    if about["waiting"]:
        text += f", and up to {about['waiting']:,} requests waited"
    return text + "."


def _says(engine: Engine, worst: dict[str, Any]) -> str:
    how = (
        f"Of {engine.steps:,} steps, {BINS} bins of time: the mean batch, the longest step."
        if engine.binned
        else f"All {engine.steps:,} steps."
    )
    return (
        f"{how} The longest step ended at {clock(worst['end_ns'])} UTC and took {seconds(worst['seconds'])}, with {worst['prefill_tokens']:,} "
        f"tokens of prefill and {worst['decode_requests']:,} requests decoding."
    )


def _longest(found: Iterations) -> Html:
    names = {(e.instance, e.engine): e.name for e in found.engines}
    rows = [
        (
            clock(row["end_ns"], short=True),
            names.get((row["instance"], row["engine"]), row["instance"]),
            seconds(row["seconds"]),
            f"{row['prefill_tokens']:,}",
            f"{row['decode_requests']:,}",
            "-" if row["kv_usage"] is None else f"{row['kv_usage']:.0%}",
            "-" if row["running"] is None else f"{row['running']:,}",
            "-" if row["waiting"] is None else f"{row['waiting']:,}",
        )
        for row in found.longest
    ]
    head = ("ended, UTC", "engine", "took", "prefill tokens", "decoding", "KV", "running", "waiting")
    return table(f"The {len(rows)} longest of {found.steps:,} steps", head, rows, numbers=2)


def data(found: Iterations) -> list[dict[str, Any]]:
    return [
        {
            "name": shown_name(e.name),
            "instance": shown_name(e.instance),
            "first_ms": e.first_ns / 1e6,
            "binned": e.binned,
            "rows": e.steps,
            **e.rows,
        }
        for e in found.engines
    ]
