"""A trace in, a page out: diagnosed once, and everything the page shows taken from the tables that this leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TypeVar

from tailscope.align import Scope
from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.model import Diagnosis
from tailscope.report import (
    experts,
    findings,
    iterations,
    latency,
    latency_panel,
    ranks,
    requests,
    shapes,
    spoken_of,
    tables,
)
from tailscope.report.columns import shown_name
from tailscope.report.html import Html
from tailscope.report.page import assemble
from tailscope.store import Trace
from tailscope.units import seconds

T = TypeVar("T")


def report(trace: Trace, config: Config, scope: Scope) -> tuple[Diagnosis, str]:
    """The diagnosis, and the page. Raises as `diagnose` does."""
    diagnosis = diagnose(trace, config, scope)
    return diagnosis, page(trace, diagnosis, scope)


def page(trace: Trace, diagnosis: Diagnosis, scope: Scope, took: dict[str, float] | None = None) -> str:
    """The page of a trace just diagnosed: `trace` has the tables that this left. `took` gets the seconds of each part."""
    watch = _Watch(took)
    order = list(dict.fromkeys(row.klass for row in diagnosis.classes))
    of_requests = watch("latency", lambda: latency.gather(trace, scope, order))
    spoken = watch("findings", lambda: spoken_of.look_up(trace, diagnosis))
    named = [r["rid"] for one in spoken.values() for r in one.requests]
    followed = watch("requests", lambda: requests.gather(trace, scope, named))
    steps = watch("iterations", lambda: iterations.gather(trace))
    windows = watch("ranks", lambda: ranks.gather(trace))
    grids = watch("experts", lambda: experts.gather(trace))
    made: list[tuple[str, str, Html | None]] = [
        ("latency", "Latency", latency_panel.latency_section(diagnosis, of_requests)),
        ("excess", "Excess", tables.excess(diagnosis)),
        ("blame", "Blame", tables.blame(diagnosis)),
        ("requests", "Requests", requests.requests_section(followed, of_requests)),
        ("iterations", "Engine steps", iterations.iterations_section(steps)),
        ("shapes", "Lengths", shapes.shapes_section(diagnosis)),
        ("ranks", "Ranks", ranks.ranks_section(windows)),
        ("experts", "Experts", experts.experts_section(grids)),
        ("rules", "Rules", tables.rules(diagnosis)),
        ("trust", "Trust", tables.trust(diagnosis)),
    ]
    shown = [(place, title, content) for place, title, content in made if content]
    first = [
        ("verdict", "Verdict", findings.verdict(diagnosis, _span(diagnosis))),
        ("findings", "Findings", findings.findings(diagnosis, spoken, {place for place, _, _ in shown})),
        ("filters", "", latency_panel.filters(of_requests)),
    ]
    data = {
        "latency": latency_panel.data(of_requests),
        "requests": requests.data(followed),
        "iterations": iterations.data(steps),
        "shapes": shapes.data(diagnosis),
        "ranks": ranks.data(windows),
        "experts": experts.data(grids),
        "findings": [
            {
                "number": n,
                "window": f.window_ns and [ns / 1e6 for ns in f.window_ns],
                "classes": [shown_name(k) for k in spoken[n].classes] if n in spoken else [],
            }
            for n, f in enumerate(diagnosis.findings, 1)
        ],
    }
    name = Path(str(diagnosis.trace["path"])).name
    return watch("page", lambda: assemble(name, [*first, *shown], data))


class _Watch:
    def __init__(self, took: dict[str, float] | None) -> None:
        self._took = {} if took is None else took

    def __call__(self, name: str, run: Callable[[], T]) -> T:
        start = perf_counter()
        made = run()
        self._took[name] = perf_counter() - start
        return made


def _span(diagnosis: Diagnosis) -> str:
    first, last = diagnosis.trace["first_ns"], diagnosis.trace["last_ns"]
    return "" if first is None else seconds((last - first) / 1e9)
