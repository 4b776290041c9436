"""The fleet: objectives and how fast their budgets are used up, open findings, load, and tailscope itself."""

from __future__ import annotations

from tailscope.alert_objectives import BURNS, Exporter, Goal, burn_rate
from tailscope.alerts import EXPORTER_HEALTH
from tailscope.config import SLO_KEYS, Slo
from tailscope.grafana.board import Board, Chart, Column, Limit, Query, Row, State
from tailscope.grafana.of_rules import chart_of, charts_of_rules, open_findings
from tailscope.grafana.queries import RATE, WINDOW
from tailscope.model import Panel

POPULATION = Exporter()
OBJECTIVE = "class, metric, quantile"
#: Error budget by quantile, of all that an objective may be of.
BUDGETS = {
    quantile: Goal(Slo("", "E2E", quantile, 1.0), 1.0, None).budget
    for quantile in sorted({quantile for _, quantile in SLO_KEYS.values()}, reverse=True)
}
#: Of burn rates, as the alerts have them.
FACTORS = tuple(Limit(burn.factor, burn.severity) for burn in BURNS)
WATCHED = {alert.name: alert for alert in EXPORTER_HEALTH}


def board() -> Board:
    return Board(
        "fleet",
        "tailscope: fleet",
        "Which class breaks its objective, how fast its error budget is used up, and what the diagnosis has found. Objectives and "
        "burn rates need the rules that `tailscope alerts` writes.",
        (
            Row("Objectives", (_now(), _kept(), *(_burn(quantile) for quantile in ("p99", "p95")))),
            Row("Findings", open_findings()),
            Row("Load", _load()),
            Row("Engines, as tailscope sees them", _engines()),
            Row("tailscope itself", _itself()),
        ),
    )


def _any_quantile(window: str) -> str:
    return "\nor ".join(
        burn_rate(POPULATION, quantile, budget, window) for quantile, budget in BUDGETS.items()
    )


def _now() -> Chart:
    share = f"{POPULATION.above} / {POPULATION.observed}"
    numbers = (
        (f"max by ({OBJECTIVE}) (tailscope_slo_seconds)", Column("limit", "s")),
        (f"max by ({OBJECTIVE}) ({POPULATION.observed})", Column("requests/s", "reqps")),
        (share, Column("above the limit, 5 min", "percentunit")),
        (_any_quantile("5m"), Column("burn, 5 min", "none", FACTORS)),
        *((_any_quantile(burn.long), Column(f"burn, {burn.long}", "none", FACTORS)) for burn in BURNS),
    )
    return Chart(
        "Objectives now",
        "none",
        "Each class's limits and how many requests lie above: a burn rate of 1 uses the whole budget in 30 days, 14.4 in two.",
        tuple(Query(expr) for expr, _ in numbers),
        kind="table",
        columns=tuple(column for _, column in numbers),
        wide=True,
    )


def _kept() -> Chart:
    return Chart(
        "Requests within their objective",
        "percentunit",
        "Share of each class's requests below its limit in five minutes: a p99 is kept where it is 99 % or more.",
        (Query(f"1 - {POPULATION.above} / {POPULATION.observed}", "{{class}} {{quantile}} {{metric}}"),),
    )


def _burn(quantile: str) -> Chart:
    windows = dict.fromkeys((BURNS[0].short, *(burn.long for burn in BURNS)))
    return Chart(
        f"Burn rate of {quantile} budgets",
        "none",
        "How many times as fast as allowed: a short peak above the lines is an incident, a long time just above 1 a class too slow.",
        tuple(
            Query(
                burn_rate(POPULATION, quantile, BUDGETS[quantile], window),
                f"{{{{class}}}} {{{{metric}}}}, {window}",
            )
            for window in windows
        ),
        limits=FACTORS,
    )


def _load() -> tuple[Chart, ...]:
    failing = WATCHED["RequestsFailing"]
    tokens = f"rate(tailscope_token_seconds_total[{RATE}])"
    return (
        Chart(
            "Requests finished",
            "reqps",
            "By class and by how they ended: a class that grows is the first suspect when another one becomes slow.",
            (
                Query(
                    f"sum by (class, status) (rate(tailscope_requests_total[{RATE}]))", "{{class}} {{status}}"
                ),
            ),
            kind="stacked",
        ),
        chart_of(
            failing,
            Panel(
                "fleet",
                "Requests that fail",
                "percentunit",
                "{{class}}",
                "Share of each class's requests that fail, time out or are rejected: they have no latency, and make a p99 look better.",
            ),
            failing.limits,
        ),
        Chart(
            "Tokens in flight by class",
            "short",
            "Who fills the engines: tokens of prompts and answers that are held at once, on average.",
            (Query(f"sum by (class) ({tokens})", "{{class}}"),),
            kind="stacked",
        ),
        Chart(
            "Tokens in flight by tenant",
            "short",
            "The same by tenant: a noisy neighbour stands out here before others' latency shows it.",
            (Query(f"sum by (tenant) ({tokens})", "{{tenant}}"),),
            kind="stacked",
        ),
    )


def _engines() -> tuple[Chart, ...]:
    engine = "{{server}} {{engine}}"
    return (
        *charts_of_rules("fleet"),
        Chart(
            "Requests running",
            "none",
            "Size of each engine's batch: an engine far above its peers gets more than its share.",
            (Query("tailscope_requests_running", engine),),
        ),
        Chart(
            "Requests waiting",
            "none",
            "Each engine's queue: one that does not empty between bursts is asked for more than it can serve.",
            (Query("tailscope_requests_waiting", engine),),
        ),
        Chart(
            "Preemptions",
            "cps",
            "Running requests thrown out of the KV cache, each second: any that last mean a cache too small for its load.",
            (Query(f"rate(tailscope_preemptions_total[{WINDOW}])", engine),),
        ),
    )


def _itself() -> tuple[Chart, ...]:
    def watched(name: str, title: str, unit: str, legend: str, shows: str) -> Chart:
        alert = WATCHED[name]
        panel = Panel("fleet", title, unit, legend, shows)
        return chart_of(alert, panel, alert.limits)

    [up] = WATCHED["ScrapeFailing"].signals
    return (
        Chart(
            "Engines scraped",
            "none",
            "Red where an engine's metrics could not be read: its queue, cache and preemptions are unknown meanwhile.",
            (Query(up.expr, "{{server}}"),),
            kind="timeline",
            states=(State(0, "failing", "red"), State(1, "good", "green")),
        ),
        watched(
            "RowsDropped",
            "Rows that cannot be used",
            "percentunit",
            "rejected",
            "Share of what tailscope receives: above the line the tail that it shows is not the whole one.",
        ),
        watched(
            "Refusing",
            "Exports refused",
            "none",
            "{{protocol}}: {{reason}}",
            "In five minutes: senders try these again for a while and drop them then, so anything above nothing loses spans.",
        ),
        watched(
            "DiagnosisStale",
            "Age of the last good diagnosis",
            "s",
            "age",
            "A saw that goes on rising is a diagnosis that fails: findings are then as they were at its foot.",
        ),
        Chart(
            "Journal",
            "decbytes",
            "What is accepted and not yet part of the trace: it falls back every few seconds while the disk keeps up.",
            (Query("tailscope_journal_bytes", "journal"),),
        ),
        Chart(
            "Trace",
            "decbytes",
            "Size of the trace on the disk: level when retention removes as much as comes.",
            (Query("tailscope_trace_bytes", "trace"),),
        ),
    )
