"""Latency by class: quantiles against objectives, shape × latency, what couples classes, and whether a change uncoupled them."""

from __future__ import annotations

from tailscope.alert_objectives import EXPORTED
from tailscope.grafana.board import LIMIT, Board, Chart, Column, Query, Row
from tailscope.grafana.of_rules import charts_of_rules
from tailscope.grafana.queries import RATE, WINDOW, correlation, mean, quantile

TTFT = EXPORTED["TTFT"]
#: How long ago the time to compare with is, and how long a correlation looks back.
SPAN = "$span"


def board() -> Board:
    return Board(
        "classes",
        "tailscope: classes",
        "How slow each class is, whose load that is, and whether a change uncoupled short from long requests. Mark a change with "
        "an annotation tagged `tailscope-change`, or by restarting an engine, which is marked by itself.",
        (
            Row(
                "p99 and its limit",
                (
                    _p99(
                        "TTFT", "Time to first token", "a class above its dashed limit breaks its objective."
                    ),
                    _p99(
                        "TPOT",
                        "Time per output token",
                        "a step up for all classes at once is the engine's, not theirs.",
                    ),
                    _p99("E2E", "Whole latency", "follows the length of answers as much as the engine."),
                ),
            ),
            Row(
                "Where the time goes: p99 by phase",
                (
                    _phase(
                        "queue", "Queue", "rises for all classes of an engine that is asked for too much."
                    ),
                    _phase(
                        "prefill",
                        "Prefill",
                        "of short prompts it rises only when others' prefill shares their steps.",
                    ),
                    _phase("decode", "Decode", "rises with long answers, preemptions and prefill of others."),
                ),
            ),
            Row("Shape × latency", (_share_slower(), _heat())),
            Row("Coupling", (*charts_of_rules("classes"), _unexplained(), _excess())),
            Row("Decoupling check around a change", _decoupling()),
        ),
        servers=("tailscope_requests_total", "server"),
        changes=True,
    )


def _p99(metric: str, title: str, seen: str) -> Chart:
    limit = f'max by (class) (tailscope_slo_seconds{{metric="{metric.lower()}",quantile="p99"}})'
    return Chart(
        f"{title}, p99",
        "s",
        f"Of all requests of a class, from summed buckets: {seen}",
        (Query(quantile(0.99, EXPORTED[metric], "class"), "{{class}}"), Query(limit, "{{class}}" + LIMIT)),
    )


def _phase(phase: str, title: str, seen: str) -> Chart:
    return Chart(
        f"{title}, p99",
        "s",
        f"The engine's own time for it: {seen}",
        (Query(quantile(0.99, f"tailscope_request_{phase}_time_seconds", "class"), "{{class}}"),),
    )


def _share_slower() -> Chart:
    below = f'sum by (le, class) (increase({TTFT}_bucket{{le!="+Inf"}}[$__range]))'
    return Chart(
        "Share of requests slower than … by class",
        "percentunit",
        "Classes are shapes, so each column is a shape and falls from row to row: where it stays coloured furthest down its tail is longest.",
        (
            Query(
                f"1 - {below} / on (class) group_left () (sum by (class) (increase({TTFT}_count[$__range])) > 0)"
            ),
        ),
        kind="matrix",
        by=("le", "class"),
        wide=True,
        columns=(Column("TTFT above", "s"),),
    )


def _heat() -> Chart:
    return Chart(
        "TTFT of $class",
        "s",
        "Requests by TTFT over time: a second band above the usual one is requests that waited for somebody, not a slower engine.",
        (Query(f"sum by (le) (increase({TTFT}_bucket[{RATE}]))", "{{le}}"),),
        kind="heatmap",
        repeat="class",
        wide=True,
    )


def _unexplained() -> Chart:
    return Chart(
        "Share of the tail that nothing explains",
        "percentunit",
        "How much of the slow requests' excess no component holds: where it is most of it, believe no finding before more is recorded.",
        (Query("max by (class, metric) (tailscope_unexplained_ratio)", "{{class}} {{metric}}"),),
    )


def _excess() -> Chart:
    return Chart(
        "Where the tail's excess goes",
        "s",
        "Mean of the slow requests less that of typical ones, by component: the thickest band is what to change first.",
        (
            Query(
                "max by (class, metric, component) (tailscope_tail_excess_seconds)",
                "{{class}} {{metric}}: {{component}}",
            ),
        ),
        kind="stacked",
        wide=True,
    )


def _decoupling() -> tuple[Chart, ...]:
    now, then = quantile(0.99, TTFT, "class"), quantile(0.99, TTFT, "class", offset=SPAN)
    own = f"sum by (class) (rate(tailscope_prompt_tokens_total[{WINDOW}]))"
    others = f"-1 * {own} + on () group_left () sum(rate(tailscope_prompt_tokens_total[{WINDOW}]))"
    return (
        Chart(
            "p99 TTFT against $span ago",
            "none",
            "1 is unchanged: one span after a change that worked, short classes are below 1 while long ones are not much above.",
            (Query(f"{now}\n/ {then}", "{{class}}"),),
        ),
        Chart(
            "Do short requests wait for long prompts?",
            "none",
            "Correlation of a class's mean TTFT with others' prompt tokens over the last $span: near 0 the classes are decoupled, near 1 not.",
            (Query(correlation(mean(TTFT, "class"), others, SPAN), "{{class}}"),),
        ),
        Chart(
            "Prompt tokens by class",
            "suffix: tokens/s",
            "A comparison around a change means something only where this is the same before and after it.",
            (Query(f"sum by (class) (rate(tailscope_prompt_tokens_total[{RATE}]))", "{{class}}"),),
            kind="stacked",
        ),
    )
