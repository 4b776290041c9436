"""A trace in, a page out: diagnosed once, and everything the page shows taken from the tables that this leaves."""

from __future__ import annotations

from pathlib import Path

from tailscope.align import Scope
from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.model import Diagnosis
from tailscope.render.units import seconds
from tailscope.report import findings, latency, latency_panel, spoken_of, tables
from tailscope.report.html import Html
from tailscope.report.page import assemble
from tailscope.store import Trace


def report(trace: Trace, config: Config, scope: Scope) -> tuple[Diagnosis, str]:
    """The diagnosis, and the page. Raises as `diagnose` does."""
    diagnosis = diagnose(trace, config, scope)
    return diagnosis, page(trace, diagnosis, scope)


def page(trace: Trace, diagnosis: Diagnosis, scope: Scope) -> str:
    """The page of a trace just diagnosed: `trace` has the tables that this left."""
    order = list(dict.fromkeys(row.klass for row in diagnosis.classes))
    of_requests = latency.gather(trace, scope, order)
    shown: list[tuple[str, str, Html | None]] = [
        ("latency", "Latency", latency_panel.latency_section(diagnosis, of_requests)),
        ("excess", "Excess", tables.excess(diagnosis)),
        ("blame", "Blame", tables.blame(diagnosis)),
        ("rules", "Rules", tables.rules(diagnosis)),
        ("trust", "Trust", tables.trust(diagnosis)),
    ]
    sections = [(name, title, content) for name, title, content in shown if content is not None]
    spoken = spoken_of.look_up(trace, diagnosis, {name for name, _, _ in sections})
    first = [
        ("verdict", "Verdict", findings.verdict(diagnosis, _span(diagnosis))),
        ("findings", "Findings", findings.findings(diagnosis, spoken)),
        ("filters", "", latency_panel.filters(of_requests)),
    ]
    data = {
        "latency": latency_panel.data(of_requests),
        "findings": [
            {
                "number": n,
                "window": f.window_ns and [ns / 1e6 for ns in f.window_ns],
                "classes": spoken[n].classes if n in spoken else [],
            }
            for n, f in enumerate(diagnosis.findings, 1)
        ],
    }
    return assemble(Path(str(diagnosis.trace["path"])).name, first + sections, data)


def _span(diagnosis: Diagnosis) -> str:
    first, last = diagnosis.trace["first_ns"], diagnosis.trace["last_ns"]
    return "" if first is None else seconds((last - first) / 1e9)
