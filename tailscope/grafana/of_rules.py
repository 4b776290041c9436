"""Panels of what rules and alerts watch: the expression is theirs, and so is the line from which on it is bad."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tailscope import registry
from tailscope.grafana.board import Chart, Column, Limit, Query, State
from tailscope.grafana.queries import of_every_version
from tailscope.model import SEVERITIES, Alert, Dashboard, Panel, Rule, with_limits

_TEST = re.compile(r">=?\s*\$(\w+)")
_COLORS = {"high": "red", "medium": "orange", "low": "yellow"}
#: Severities as numbers, the worst highest: a timeline shows one value at a time.
_RANKED = {severity: number for number, severity in enumerate(reversed(SEVERITIES), 1)}


def charts_of_rules(dashboard: Dashboard) -> tuple[Chart, ...]:
    """All that rules show on a dashboard."""
    return tuple(chart for rule, _ in registry.rules() for chart in _charts(rule, dashboard))


def _charts(rule: Rule, dashboard: Dashboard) -> Iterator[Chart]:
    for alert in rule.alerts:
        if alert.panel is not None and alert.panel.dashboard == dashboard:
            yield chart_of(alert, alert.panel, rule.limits_of(alert))
    for panel in rule.panels:
        if panel.dashboard == dashboard:
            yield _chart(panel, of_every_version(with_limits(panel.expr, rule.limits)), ())


def chart_of(alert: Alert, panel: Panel, limits: Mapping[str, float]) -> Chart:
    """What an alert's signals compute, of each place the first there is, and the threshold that they are held against."""
    expr = of_every_version(*(with_limits(signal.expr, limits) for signal in alert.signals))
    found = {name for signal in alert.signals for name in _TEST.findall(signal.test)}
    return _chart(panel, expr, tuple(Limit(limits[name], alert.severity) for name in sorted(found)))


def _chart(panel: Panel, expr: str, limits: tuple[Limit, ...]) -> Chart:
    return Chart(panel.title, panel.unit, panel.shows, (Query(expr, panel.legend),), limits=limits)


def open_findings(dashboard: Dashboard = "fleet") -> tuple[Chart, Chart]:
    """What the continuous diagnosis has found, over time and now; on the fleet's dashboard that of all rules."""
    rules = [rule.name for rule, _ in registry.rules() if rule.dashboard == dashboard]
    chosen = "" if dashboard == "fleet" else 'rule=~"' + "|".join(rules) + '"'
    whose = "" if dashboard == "fleet" else " of rules of ranks"
    return (
        Chart(
            f"Findings{whose} over time",
            "none",
            "A bar from when a finding opened until it closed, by its severity: what began together often has one cause.",
            (Query(_worst(chosen), "{{rule}}: {{culprit}} → {{victim}}"),),
            kind="timeline",
            states=tuple(State(n, severity, _COLORS[severity]) for severity, n in _RANKED.items()),
            wide=True,
        ),
        Chart(
            f"Open findings{whose}",
            "none",
            "Who does it to whom, now: `tailscope rules RULE` says what to change, `tailscope diagnose` shows the evidence.",
            (Query(f"max by (severity, rule, culprit, victim) (tailscope_finding{_braces(chosen)})"),),
            kind="table",
            columns=(Column("", "none"),),
            wide=True,
        ),
    )


def _worst(chosen: str) -> str:
    parts = []
    for severity in SEVERITIES:
        series = _braces(chosen, f'severity="{severity}"')
        parts.append(f"tailscope_finding{series} * {_RANKED[severity]}")
    return "max by (rule, culprit, victim) (\n  " + "\n  or ".join(parts) + "\n)"


def _braces(*matchers: str) -> str:
    inside = [m for m in matchers if m]
    return f"{{{','.join(inside)}}}" if inside else ""
