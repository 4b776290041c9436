"""The section of latency: charts of distributions and of time, their filters and the tables behind them."""

from __future__ import annotations

from typing import Any

from tailscope.model import Diagnosis
from tailscope.report import tables
from tailscope.report.columns import shown_name
from tailscope.report.html import Child, Html, el, table
from tailscope.report.latency import METRICS, OVER_TIME, Latency, name_of
from tailscope.report.parts import behind, chart, choice, lacking, listed, section
from tailscope.units import amount, clock, seconds

#: Quantiles in the table behind the distributions.
TOLD = (0.5, 0.9, 0.95, 0.99, 0.999)
#: Rows of the table behind the chart of time.
MOST_ROWS = 200


def filters(latency: Latency) -> Html:
    """What narrows the charts. Without a script there is nothing to narrow."""
    if not latency.n:
        return Html("")
    names = [(str(i), name or "(none)") for i, name in enumerate(latency.tenants)]
    places = [(str(i), name or "(none)") for i, name in enumerate(latency.instances)]
    everything = [("", "all")]
    return el(
        "form",
        el("h2", "Narrow the charts", cls="kicker"),
        choice("filter-class", "Class", everything + [(str(i), n) for i, n in enumerate(latency.classes)]),
        choice("filter-tenant", "Tenant", everything + names) if len(names) > 1 else None,
        choice("filter-instance", "Instance", everything + places) if len(places) > 1 else None,
        el(
            "fieldset",
            el("legend", "Arrived between"),
            el(
                "label",
                el("span", "from", cls="sr"),
                el("input", type="range", id="filter-from", min=0, max=1000, value=0),
            ),
            el(
                "label",
                el("span", "to", cls="sr"),
                el("input", type="range", id="filter-to", min=0, max=1000, value=1000),
            ),
            el("output", f"{clock(latency.first_ns)} to {clock(latency.last_ns)} UTC", id="filter-time"),
        ),
        el("button", "Show all", type="button", id="filter-reset"),
        el("p", population(latency), id="filter-says", role="status", aria_live="polite"),
        id="filters",
        cls="only-script",
        aria_label="Narrow the charts",
    )


def population(latency: Latency) -> str:
    """Whose numbers the charts show when nothing is narrowed."""
    text = f"All {latency.n:,} requests with a latency, exactly."
    if latency.is_sample:
        text += (
            f" Narrowed, the charts count {latency.sampled:,} of them: the slowest {1 - latency.tail_from:.2%} of each class by TTFT "
            f"and by E2E whole, the rest a fixed pseudo-random choice, weighted back."
        )
    return text


def latency_section(diagnosis: Diagnosis, latency: Latency) -> Html:
    told = tables.classes(diagnosis)
    if not latency.n:
        return section(
            "latency",
            "Latency",
            None,
            without_latency(latency, "distributions and p99 over time"),
            *told,
        )
    metrics = [(m, m) for m in latency.curves]
    first = "TTFT" if "TTFT" in latency.curves else next(iter(latency.curves))
    over_time = [(m, m) for m in latency.times]
    left_out = sum(latency.left_out.values())
    return section(
        "latency",
        "Latency",
        _lead(latency, first),
        *told,
        chart(
            "dist",
            "How latencies are distributed, by class",
            dist_says(latency, first),
            choice("dist-metric", "Metric", metrics, first),
            height=360,
        ),
        behind("Numbers behind this chart", _quantiles(latency)),
        chart(
            "times",
            "Latency over time, by class",
            times_says(latency, first) if first in latency.times else "",
            choice("times-metric", "Metric", over_time, first),
            height=380,
        ),
        behind("Numbers behind this chart", _bins(latency, first)) if first in latency.times else None,
        el(
            "p",
            f"{left_out:,} more requests have no latency that counts ("
            + ", ".join(f"{n:,} {status}" for status, n in list(latency.left_out.items())[:5])
            + ") and are in no chart.",
            cls="note",
        )
        if left_out
        else None,
        el(
            "p",
            f"{latency.smaller[1]:,} requests of {latency.smaller[0]:,} smaller classes are in no chart; --class shows one of them.",
            cls="note",
        )
        if latency.smaller[0]
        else None,
    )


def without_latency(latency: Latency, what: str) -> Html:
    if latency.left_out:
        told = ", ".join(f"{n:,} {status}" for status, n in list(latency.left_out.items())[:5])
        return lacking(
            f"No request has a latency that counts: {told}. Those that end well would show {what}."
        )
    return lacking(
        "No request has a latency.",
        f"OpenTelemetry spans (vllm serve --otlp-traces-endpoint) or a client's log would show {what}.",
    )


def _lead(latency: Latency, metric: str) -> str:
    sizes = sorted(
        ((c["n"], k) for k, c in latency.curves[metric].items()), key=lambda item: (-item[0], item[1])
    )
    return (
        f"{latency.n:,} requests of {len(latency.classes)} "
        f"{'class' if len(latency.classes) == 1 else 'classes'}: {listed([f'{n:,} of {k}' for n, k in sizes])}."
    )


def quantile(curve: dict[str, Any], q: float) -> float | None:
    """Of a distribution, None where its values are too few for it."""
    if curve["n"] * (1 - q) < 1:
        return None
    below = [(at, s) for at, s in zip(curve["q"], curve["s"], strict=True) if at <= q + 1e-9]
    above = [(at, s) for at, s in zip(curve["q"], curve["s"], strict=True) if at > q]
    if not below or not above:
        return None
    (q0, s0), (q1, s1) = below[-1], above[0]
    return float(s0 + (s1 - s0) * (q - q0) / (q1 - q0))


def dist_says(latency: Latency, metric: str) -> str:
    what = "token gaps" if metric == "ITL" else "requests"
    every = max(curve["every"] for curve in latency.curves[metric].values())
    some = f" One of every {every} {what} is counted, chosen by a hash." if every > 1 else ""
    return (
        f"The share of {what} that take longer than a time, both axes logarithmic: a line that bends to the right has a long tail. "
        f"{_furthest(latency, metric)}{some}"
    )


def _furthest(latency: Latency, metric: str) -> str:
    """The class whose slowest are furthest from its median."""
    found = []
    for klass, curve in latency.curves[metric].items():
        q = next((q for q in (0.99, 0.95, 0.9) if curve["n"] * (1 - q) >= 10), None)
        median, high = quantile(curve, 0.5), None if q is None else quantile(curve, q)
        if q is not None and median and high:
            found.append((high / median, klass, q, curve["n"], high))
    if not found:
        return "No class has requests enough to speak of its tail."
    ratio, klass, q, n, high = max(found)
    # Of these requests: what holds for others like them is in the table, where there are enough.
    return f"The {metric} of {klass} has the longest here: of its {n:,} the slowest {round(n * (1 - q)):,} take {seconds(high)} and more, {amount(ratio)} times their median."


def times_says(latency: Latency, metric: str) -> str:
    rows = latency.times[metric]
    compared = False
    for q in reversed(OVER_TIME):
        name = name_of(q)
        told = [
            (value / before, i)
            for i, (value, before) in enumerate(zip(rows[name], _usual(rows, name), strict=True))
            if value and before
        ]
        compared |= len(told) > 1
        if told and max(told)[0] >= 1.05:
            ratio, i = max(told)
            start_ns = latency.first_ns + int(rows["bin"][i] * latency.bin_s * 1e9)
            return (
                f"Lines are a quantile of the requests that arrived in {seconds(latency.bin_s)}, dots are single requests. The {name} {metric} of "
                f"{latency.classes[rows['klass'][i]]} is highest for its class at {clock(start_ns)} UTC: {seconds(rows[name][i])}, {amount(ratio)} times its usual."
            )
    bins = f"Lines are a quantile of the requests that arrived in {seconds(latency.bin_s)}, where these are enough, dots are single requests."
    return (
        f"{bins} No point of a line stands out."
        if compared
        else f"{bins} No two times of a class have enough to be compared."
    )


def _usual(rows: dict[str, list[Any]], name: str) -> list[float | None]:
    """Of each bin the median of its class's bins."""
    by_class: dict[int, list[float]] = {}
    for klass, value in zip(rows["klass"], rows[name], strict=True):
        if value is not None:
            by_class.setdefault(klass, []).append(value)
    usual = {k: sorted(v)[len(v) // 2] for k, v in by_class.items() if len(v) > 2}
    return [usual.get(k) for k in rows["klass"]]


def _quantiles(latency: Latency) -> Html:
    rows = [
        (
            f"{klass} {metric}",
            f"{curve['n']:,}",
            *(seconds(quantile(curve, q)) if curve["n"] * (1 - q) >= 10 else "-" for q in TOLD),
            seconds(curve["s"][-1]),
        )
        for metric, curves in latency.curves.items()
        for klass, curve in curves.items()
    ]
    head = ("class and metric", "n", *(f"p{q * 100:g}" for q in TOLD), "slowest")
    return table("Quantiles; withheld where fewer than 10 values lie beyond", head, rows)


def _bins(latency: Latency, metric: str) -> Child:
    rows = latency.times[metric]
    n = len(rows["klass"])
    told = [
        (
            clock(latency.first_ns + int(rows["bin"][i] * latency.bin_s * 1e9)),
            latency.classes[rows["klass"][i]],
            f"{rows['n'][i]:,}",
            *(seconds(rows[name_of(q)][i]) for q in OVER_TIME),
        )
        for i in range(min(n, MOST_ROWS))
    ]
    caption = f"{metric} by time of arrival, {seconds(latency.bin_s)} each" + (
        f"; the first {MOST_ROWS} of {n:,} rows" if n > MOST_ROWS else ""
    )
    return table(caption, ("from, UTC", "class", "n", *(name_of(q) for q in OVER_TIME)), told, numbers=2)


def data(latency: Latency) -> dict[str, Any]:
    return {
        "n": latency.n,
        "sampled": latency.sampled,
        "all": population(latency),
        "first_ms": latency.first_ns / 1e6,
        "span": (latency.last_ns - latency.first_ns) / 1e9,
        "bin": latency.bin_s,
        "classes": [shown_name(name) for name in latency.classes],
        "tenants": [shown_name(name) for name in latency.tenants],
        "instances": [shown_name(name) for name in latency.instances],
        "metrics": [m for m in METRICS if m in latency.curves],
        "curves": {
            m: {shown_name(k): curve for k, curve in curves.items()} for m, curves in latency.curves.items()
        },
        "times": latency.times,
        "says": {
            "dist": {metric: dist_says(latency, metric) for metric in latency.curves},
            "times": {metric: times_says(latency, metric) for metric in latency.times},
        },
        "sample": latency.sample,
    }
