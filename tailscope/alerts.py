"""Alerting rules for Prometheus: those that rules own, and those of objectives and of tailscope's own health, as one file.

Made either for what `tailscope serve` exports or for vLLM's own metrics, never mixed: who scrapes both would be told twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from tailscope import __version__, stock_metrics
from tailscope.alert_objectives import (
    INTERVAL_S,
    Engines,
    Exporter,
    Population,
    bucket_missing,
    goals,
    recordings,
)
from tailscope.alert_objectives import alerts as objective_alerts
from tailscope.alert_texts import MAKE_AGAIN, READY, escaped, go_string, run
from tailscope.config import Config
from tailscope.errors import UsageError
from tailscope.model import Alert, Rule, Signal, Threshold
from tailscope.safe import printable

Group = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """For whom the file is: vLLM's own metrics by the names of `vllm`, or tailscope's where it is None."""

    vllm: stock_metrics.Version | None = None
    dashboard_url: str | None = None
    trace: str = "TRACE"

    @property
    def source(self) -> str:
        return "tailscope" if self.vllm is None else "vllm"

    @property
    def prefix(self) -> str:
        return self.source.capitalize()


# -- what belongs to no rule -------------------------------------------------------------------------


#: That rules and recordings see what they should, with tailscope's exporter.
EXPORTER_HEALTH = (
    Alert(
        "Absent",
        "critical",
        "5m",
        "No tailscope exporter is scraped",
        (Signal("absent(tailscope_build_info)", "> 0"),),
        "Nothing else in this file can fire. Start `tailscope serve`, or look why Prometheus does not reach it.",
        run=READY,
    ),
    Alert(
        "ScrapeFailing",
        "warning",
        "5m",
        "tailscope cannot scrape engine {{ $labels.server }}",
        (Signal("tailscope_up", "== 0"),),
        "Its queue, KV cache and preemptions are unknown, and what needs them is judged without it. It is down, hangs, or answers "
        'with something else: tailscope_scrapes_total{server="…"} says which.',
        run=READY,
    ),
    Alert(
        "JournalGrowing",
        "warning",
        "0s",
        "The journal is {{ $value | humanize1024 }}B and has not become shorter for half an hour",
        (
            Signal(
                "min_over_time(tailscope_journal_bytes[30m])",
                "> max_over_time(tailscope_journal_bytes[30m] offset 35m)",
            ),
        ),
        "What is received is kept, but no parts of the trace are made of it: it is not diagnosed, and after a restart all of it is "
        "read again. Look for errors in the log of `tailscope serve`, and at the disk.",
        run=READY,
    ),
    Alert(
        "DiskFull",
        "critical",
        "1m",
        "tailscope has no room to write",
        (Signal("tailscope_disk_full", "> 0"),),
        "Metrics go on; requests are refused back to their senders, which keep them only for a while. Make room, or lower the "
        "retention in tailscope.toml.",
        run=READY,
    ),
    Alert(
        "RowsDropped",
        "warning",
        "5m",
        "{{ $value | humanizePercentage }} of the rows that tailscope receives cannot be used",
        (
            Signal(
                "sum(rate(tailscope_rows_rejected_total[15m])) / (sum(rate(tailscope_rows_rejected_total[15m])) "
                "+ sum(rate(tailscope_rows_written_total[15m])))",
                "> $share",
                "and sum(increase(tailscope_rows_rejected_total[15m])) >= $least",
            ),
        ),
        "A tail is made of few requests: where one in a hundred is missing a p99 of the rest is another one's. "
        "tailscope_rows_rejected_total says by `reason` why.",
        (
            Threshold("share", 0.01, "0-1", "As many as lie beyond a p99."),
            Threshold("least", 10, "rows", "A few damaged rows happen whenever a sender restarts."),
        ),
        run=READY,
    ),
    Alert(
        "Refusing",
        "warning",
        "10m",
        "tailscope refuses exports ({{ $labels.protocol }}: {{ $labels.reason }})",
        (Signal("sum by (protocol, reason) (increase(tailscope_requests_refused_total[5m]))", "> 0"),),
        "It cannot keep up, or what is sent is malformed. Senders try again for a while, then they drop: what is missing then is "
        "missing from the tail.",
        run=READY,
    ),
    Alert(
        "DiagnosisStale",
        "warning",
        "10m",
        "The last good diagnosis is {{ $value | humanizeDuration }} old",
        (Signal("time() - max(tailscope_diagnosis_timestamp_seconds)", "> $old"),),
        "Alerts that stand for findings show what was, and no new finding can open: tailscope_diagnoses_total says by `outcome` how "
        "diagnoses end, tailscope_diagnosis_duration_seconds whether they take too long.",
        (Threshold("old", 900, "s", "The window that `run` looks at: what is older says nothing of it."),),
        run=READY,
    ),
    Alert(
        "RequestsFailing",
        "warning",
        "5m",
        "{{ $value | humanizePercentage }} of the requests of class {{ $labels.class }} fail, time out or are rejected",
        (
            Signal(
                'sum by (class) (rate(tailscope_requests_total{status=~"error|timeout|rejected"}[5m])) '
                "/ sum by (class) (rate(tailscope_requests_total[5m]))",
                "> $share",
                'and sum by (class) (increase(tailscope_requests_total{status=~"error|timeout|rejected"}[5m])) >= $least',
            ),
        ),
        "They have no latency, or a short one, so the quantiles of the class look better than what its clients see.",
        (
            Threshold("share", 0.01, "0-1", "As many as lie beyond a p99: it is not the clients' any more."),
            Threshold("least", 10, "requests", "As many as a quantile needs beyond it to be stated."),
        ),
    ),
    Alert(
        "ObjectivesDiffer",
        "warning",
        "10m",
        "tailscope serve holds {{ $labels.metric }} {{ $labels.quantile }} of class {{ $labels.class }} against another limit than these "
        "rules",
        (
            Signal(
                "max by (class, metric, quantile) (tailscope_slo_seconds) != on (class, metric, quantile) tailscope:slo_limit_seconds\n"
                "or max by (class, metric, quantile) (tailscope_slo_seconds) unless on (class, metric, quantile) tailscope:slo_limit_seconds\n"
                "or (tailscope:slo_limit_seconds unless on (class, metric, quantile) tailscope_slo_seconds) and on () tailscope_build_info",
                "> 0",
            ),
        ),
        "tailscope.toml has changed since this file was made: make it again with `tailscope alerts`, and reload Prometheus.",
        run=MAKE_AGAIN,
    ),
)

#: The same for vLLM's own metrics.
ENGINE_HEALTH = (
    Alert(
        "Absent",
        "critical",
        "5m",
        "No vLLM engine is scraped",
        (Signal("absent(vllm:num_requests_running)", "> 0"),),
        "Nothing else in this file can fire. Either no engine runs, or Prometheus does not reach them, or they were started with "
        "--disable-log-stats.",
        run="curl -s http://ENGINE/metrics | grep -c ^vllm:",
    ),
    Alert(
        "Down",
        "critical",
        "2m",
        "{{ $labels.instance }} served vLLM's metrics and does not answer any more",
        (
            Signal(
                "up",
                "== 0",
                "and on (job, instance) count_over_time(vllm:num_requests_running[6h]) > 0",
            ),
        ),
        "The engine is down, or so busy that /metrics is not answered within the scrape's timeout. Its requests are lost or wait.",
        run="curl -s -m 10 http://{{ $labels.instance }}/health",
    ),
)


def finding_of_others(rules: Sequence[Rule]) -> Alert:
    """Findings of rules that have no alert for theirs, also of rules that are not installed here."""
    texts = [
        signal.expr + signal.guard for rule in rules for alert in rule.alerts for signal in alert.signals
    ]
    own = sorted({name for text in texts for name in re.findall(r'tailscope_finding\{rule="([^"]+)"', text)})
    none_of = "|".join(re.escape(name).replace("\\-", "-") for name in own)
    chosen = f'severity="high",rule!~{go_string(none_of)}'
    return Alert(
        "Finding",
        "warning",
        "2m",
        "{{ $labels.rule }}: culprit {{ $labels.culprit }}, victim {{ $labels.victim }}",
        (Signal(f"max by (rule, culprit, victim) (tailscope_finding{{{chosen}}})", "> 0"),),
        "The diagnosis of `tailscope serve` has found it, as 0.3 or more of a class's tail or as what breaks an SLO. "
        "`tailscope rules {{ $labels.rule }}` explains it and says what to change.",
    )


# -- all of it ---------------------------------------------------------------------------------------


def render(config: Config, rules: Sequence[Rule], wanted: Wanted) -> str:
    """The file. What is left out, and why, is told at its head."""
    population: Population = Exporter() if wanted.vllm is None else Engines(wanted.vllm)
    found, notes = goals(config, population)
    groups: list[Group] = []
    if found:
        made = [
            *recordings(population, found),
            *(_written(a, {}, None, wanted, labels) for a, labels in objective_alerts(population, found)),
            _written(bucket_missing(population), {}, None, wanted),
        ]
        groups.append(_group(f"{wanted.source}-objectives", made))
    elif not notes:
        notes.append("no [slo.CLASS] in the configuration, so no alert on a p99")
    of_rules, missing = _of_rules(rules, wanted)
    health = [
        _written(alert, alert.limits, None, wanted)
        for alert in (EXPORTER_HEALTH if wanted.vllm is None else ENGINE_HEALTH)
        if found or "slo_limit_seconds" not in alert.signals[0].expr
    ]
    groups += [_group(f"{wanted.source}-rules", of_rules), _group(f"{wanted.source}-health", health)]
    return _head(wanted, notes + missing) + _yaml({"groups": groups})


def _of_rules(rules: Sequence[Rule], wanted: Wanted) -> tuple[list[Group], list[str]]:
    """The alerts that rules own and metrics can show, and what is said of those that they cannot."""
    made, notes = [], []
    for rule in rules:
        names: set[str] = set()
        missing: dict[str, stock_metrics.Version] = {}
        for alert in rule.alerts:
            of_source = [s for s in alert.signals if s.source == wanted.source]
            usable = [s for s in of_source if wanted.vllm is None or since(s) <= wanted.vllm]
            if usable and alert.name not in names:
                names.add(alert.name)
                chosen = replace(alert, signals=(usable[0],))
                made.append(_written(chosen, rule.limits_of(alert), rule, wanted))
            elif of_source and not usable:
                missing[alert.name] = min(since(s) for s in of_source)
        notes += [
            f"{wanted.prefix}{name}: its metrics exist from vLLM {stock_metrics.written(version)} on"
            for name, version in missing.items()
            if name not in names
        ]
    if wanted.vllm is None:
        others = finding_of_others(rules)
        made.append(_written(others, {}, None, wanted))
    return made, notes


def since(signal: Signal) -> stock_metrics.Version:
    """The first vLLM that has all metrics of a signal."""
    return stock_metrics.since(f"{signal.expr} {signal.guard}")


def _written(
    alert: Alert,
    limits: dict[str, float],
    rule: Rule | None,
    wanted: Wanted,
    labels: dict[str, str] | None = None,
) -> Group:
    [signal] = alert.signals
    query, shown = signal.query(limits), signal.expr
    if wanted.vllm is not None:
        query, shown = (stock_metrics.spelled(text, wanted.vllm) for text in (query, shown))
    annotations = {
        "summary": alert.summary,
        "description": alert.description or escaped(rule.why if rule else ""),
        "run": alert.run
        # Only metrics of tailscope say which instance of the trace they are of.
        or run(wanted.trace, alert.last, rule.name if rule else None, narrowed=wanted.vllm is None),
        "dashboard": _dashboard(wanted.dashboard_url, shown),
    }
    if rule is not None and rule.remedies:
        first = rule.remedies[0]
        annotations["remedy"] = escaped(f"{first.do}: {first.flag}. Cost: {first.cost}.")
    made: Group = {"alert": wanted.prefix + alert.name, "expr": query}
    if alert.hold != "0s":
        made["for"] = alert.hold
    made["labels"] = {"severity": alert.severity} | ({"rule": rule.name} if rule else {}) | (labels or {})
    made["annotations"] = annotations
    return made


def _dashboard(url: str | None, expr: str) -> str:
    """A link to the dashboard, for the class if the alert is of one; without a dashboard, to Prometheus's own graph."""
    if url is None:
        return f"{{{{ $externalURL }}}}{{{{ graphLink {go_string(expr)} }}}}"
    return (
        escaped(url)
        + f"{{{{ with $labels.class }}}}{'&' if '?' in url else '?'}var-class={{{{ urlquery . }}}}{{{{ end }}}}"
    )


def _group(name: str, rules: list[Group]) -> Group:
    # Counts over long windows are sums of samples, so it must be known how often there is one.
    return {
        "name": name,
        "interval": f"{INTERVAL_S}s",
        "rules": [r | {"expr": _Query(r["expr"])} for r in rules],
    }


def _head(wanted: Wanted, notes: Iterable[str]) -> str:
    of = "tailscope serve" if wanted.vllm is None else f"vLLM {stock_metrics.written(wanted.vllm)}"
    lines = [
        f"Made by `tailscope alerts` {__version__} for the metrics of {of}. Do not edit: change tailscope.toml and make it again.",
        *(f"Left out: {note}." for note in notes),
    ]
    # Names of classes come from the configuration, and must not end the comment.
    return "".join(f"# {printable(line, 1000)}\n" for line in lines)


class _Query(str):
    """PromQL, which stands in a block of its own."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_TEXT = "tag:yaml.org,2002:str"
# PyYAML and Go differ in what ends a line, but for text in double quotes.
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(_TEXT, text, style=None if text.isprintable() else '"'),
)
_Dumper.add_representer(_Query, lambda dumper, text: dumper.represent_scalar(_TEXT, str(text), style="|"))


def _yaml(document: Any) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=130)


def parse_url(text: str) -> str:
    """Of a dashboard. Raises UsageError."""
    if not re.fullmatch(r"https?://[^\s\"'<>]+", text):
        raise UsageError(f"--dashboard-url {json.dumps(text)}: write it as https://grafana.example/d/UID")
    return text
