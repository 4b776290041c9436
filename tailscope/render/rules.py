"""A rule explained for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tailscope import stock_metrics
from tailscope.model import Alert, Rule, Signal


def listing(rules: list[Rule]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rule", no_wrap=True)
    table.add_column("what it looks for")
    for rule in rules:
        table.add_row(rule.name, rule.summary)
    return table


def explain(rule: Rule) -> RenderableType:
    body = Table.grid(padding=(0, 1))
    body.add_column(style="dim", no_wrap=True, justify="right")
    body.add_column(overflow="fold")
    body.add_row("why it hurts", rule.why)
    body.add_row("needs", rule.missing.removeprefix("needs "))
    for i, t in enumerate(rule.thresholds):
        body.add_row("decides by" if i == 0 else "", f"{t.name} = {t.value:g} {t.unit}: {t.why}")
    for i, r in enumerate(rule.remedies):
        body.add_row("change" if i == 0 else "", f"{i + 1}. {r.do}: {r.flag} ({r.versions}). Cost: {r.cost}")
    for i, text in enumerate(rule.confirm_by):
        body.add_row("confirm" if i == 0 else "", text)
    for i, (alert, signal) in enumerate(alerts_of(rule)):
        query = signal.query(rule.limits_of(alert)).replace("\n", " ")
        body.add_row(
            "alert" if i == 0 else "",
            f"{alert_name(alert, signal)} ({where(signal)}), for {alert.hold}: {query}",
        )
    return Group(Text(f"{rule.name}: {rule.summary}", "bold"), body)


def alerts_of(rule: Rule) -> list[tuple[Alert, Signal]]:
    """An entry for each form that an alert takes by what metrics there are."""
    return [(alert, signal) for alert in rule.alerts for signal in alert.signals]


def alert_name(alert: Alert, signal: Signal) -> str:
    return signal.source.capitalize() + alert.name


def where(signal: Signal) -> str:
    """Whose metrics it needs."""
    if signal.source == "tailscope":
        return "tailscope serve"
    return f"vLLM {stock_metrics.written(stock_metrics.since(f'{signal.expr} {signal.guard}'))} and later"
