"""Alerts on the objectives of `[slo.CLASS]`: a class's p99 against its own limit, and how fast its error budget is used up.

What is recorded are rates of buckets, and of them how many lie above a limit: both can be added up and compared at any time.
Percentiles are computed last and recorded nowhere, as they cannot be averaged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

from prometheus_client.utils import floatToGoString

from tailscope import stock_metrics
from tailscope.alert_texts import MAKE_AGAIN, escaped, go_string
from tailscope.config import Config, Slo
from tailscope.model import Alert, Signal
from tailscope.stats import CONFIDENCE, MIN_TAIL_SAMPLES

INFINITE = "+Inf"
#: The class of everybody's objectives.
ALL = "all"
#: How often a group is evaluated, so that a sum of recorded rates is a count; and the window of the rates.
INTERVAL_S, SHORT_S = 60, 300
#: One-sided test of a share above a limit, as `diagnose` calls an objective broken.
Z = NormalDist().inv_cdf(CONFIDENCE)


@dataclass(frozen=True)
class Burn:
    """Windows in which the error budget is used up `factor` times as fast as it may be (Google's SRE workbook, chapter 5):
    the long one says that it matters, the short one that it still goes on. `budget`: what is gone by then of 30 days'.
    `known`: samples of the long window that there must be, as a bad hour is no bad day where nobody knows the rest of it.
    """

    long: str
    short: str
    factor: float
    severity: Literal["critical", "warning"]
    budget: str
    last: str
    known: int = 0


BURNS = (
    Burn("1h", "5m", 14.4, "critical", "2 %", "1h"),
    Burn("6h", "30m", 6, "critical", "5 %", "6h"),
    Burn("1d", "2h", 3, "warning", "10 %", "2h", known=12 * 60),
    Burn("3d", "6h", 1, "warning", "10 %", "6h", known=36 * 60),
)


#: Metric -> the exporter's histogram of it.
EXPORTED = {
    "TTFT": "tailscope_time_to_first_token_seconds",
    "TPOT": "tailscope_time_per_output_token_seconds",
    "ITL": "tailscope_inter_token_latency_seconds",
    "E2E": "tailscope_e2e_request_latency_seconds",
}


class Population:
    """Whose requests an objective is held against, and what their series are called."""

    label: str
    #: Prefix of what is recorded, and how series are called in a sentence.
    prefix: str
    whose: str
    histograms: dict[str, str]
    spelled_by: stock_metrics.Version | None = None

    @property
    def observed(self) -> str:
        return f"tailscope:{self.prefix}slo_observed:rate5m"

    @property
    def above(self) -> str:
        return f"tailscope:{self.prefix}slo_above:rate5m"

    def broken(self, window: str) -> str:
        return f"tailscope:{self.prefix}slo_broken:ratio{window}"

    def buckets(self, metric: str) -> str:
        return f"{self.label}:{self.histograms[metric].replace(':', '_')}_bucket:rate5m"


class Exporter(Population):
    """Classes, as `tailscope serve` tells them: each limit is the end of a bucket."""

    label, prefix, whose = "class", "", "class {{ $labels.class }}"
    histograms = EXPORTED


class Engines(Population):
    """All requests of a model, as vLLM's own histograms know no classes and have the buckets they have."""

    label, prefix, whose = "model_name", "vllm_", "model {{ $labels.model_name }}"
    histograms = stock_metrics.HISTOGRAMS

    def __init__(self, version: stock_metrics.Version) -> None:
        self.spelled_by = version


@dataclass(frozen=True)
class Goal:
    """An objective and where it is counted: requests of `klass` above `edge_s`, which is the limit or the next edge above it."""

    slo: Slo
    edge_s: float
    klass: str | None
    note: str = ""

    @property
    def quantile(self) -> float:
        return float(self.slo.quantile[1:]) / 100

    @property
    def budget(self) -> float:
        """The share of requests that may lie above."""
        return round(1 - self.quantile, 6)

    @property
    def labels(self) -> dict[str, str]:
        """Of what is recorded of it."""
        own = {"metric": self.slo.metric.lower(), "quantile": self.slo.quantile}
        return own if self.klass is None else {"class": self.klass} | own

    @property
    def selector(self) -> str:
        return "{" + ",".join(f"{name}={go_string(value)}" for name, value in self.labels.items()) + "}"


def goals(config: Config, population: Population) -> tuple[list[Goal], list[str]]:
    """What can be watched, and why the rest cannot."""
    if isinstance(population, Exporter):
        return [Goal(slo, slo.limit_s, slo.klass) for slo in config.slos], []
    found, notes = [], []
    for slo, unknown in _everybodys(config):
        what = f"{slo.quantile} {slo.metric} above {slo.limit_s:g} s"
        first, version = stock_metrics.SINCE[population.histograms[slo.metric]], population.spelled_by
        edge = next((e for e in stock_metrics.EDGES[slo.metric] if e >= slo.limit_s), None)
        if unknown:
            notes.append(
                f"{slo.quantile} {slo.metric}: vLLM's metrics know no classes, and {unknown} has no objective of it that could be "
                f"held against theirs; [slo.{ALL}] would be everybody's"
            )
        elif version is not None and version < first:
            notes.append(f"{what}: its histogram exists from vLLM {stock_metrics.written(first)} on")
        elif edge is None:
            notes.append(f"{what}: vLLM's last bucket ends at {stock_metrics.EDGES[slo.metric][-1]:g} s")
        else:
            found.append(Goal(slo, float(edge), None, _note(slo, edge)))
    return found, notes


def _everybodys(config: Config) -> Iterator[tuple[Slo, str]]:
    """Of each metric and quantile what `all` may take; else the loosest limit, if every class has one: where more than the
    budget of all requests lie above it, more of some class's do. With it, whose requests have none, if anybody's."""
    groups: dict[tuple[str, str], list[Slo]] = {}
    for slo in config.slos:
        groups.setdefault((slo.metric, slo.quantile), []).append(slo)
    for some in groups.values():
        if everybody := [slo for slo in some if slo.klass == ALL]:
            yield everybody[0], ""
            continue
        without = [c.name for c in config.classes if c.name not in {slo.klass for slo in some}]
        unknown = f"class {without[0]}" if without else ""
        if config.attributes.klass:
            unknown = f"who knows which class that spans name by {config.attributes.klass}"
        yield max(some, key=lambda slo: slo.limit_s), unknown


def _note(slo: Slo, edge: float) -> str:
    note = ""
    if slo.klass != ALL:
        note = (
            f" vLLM's metrics know no classes, so all requests are held against the loosest limit of the configuration, that of class "
            f"{slo.klass}: a class with a tighter one may break it unseen, which `tailscope serve` would tell."
        )
    if edge != slo.limit_s:
        note += (
            f" No bucket of vLLM ends at the objective of {slo.limit_s:g} s: what is counted lies above the next end, {edge:g} s, and "
            "requests in between are not seen."
        )
    if slo.metric == "TPOT":
        note += " vLLM counts an answer of one token as 0 s, so where there are many the quantile is better than that of the rest."
    return escaped(note)


def bucket_missing(population: Population) -> Alert:
    """An objective without its bucket is not watched, which nothing else would tell."""
    return Alert(
        "BucketMissing",
        "warning",
        "10m",
        "{{ $labels.metric }} {{ $labels.quantile }} cannot be held against its limit: the histogram has no bucket that ends there",
        (
            Signal(
                population.observed,
                ">= 0",
                f"unless on (class, model_name, metric, quantile) {population.above}",
            ),
        ),
        "Its alerts cannot fire. With `tailscope serve` an objective is always the end of a bucket: make this file again from the "
        "configuration that it uses. A vLLM with --custom-histogram-buckets has others than its version's own.",
        run=MAKE_AGAIN,
    )


def bucket_rates(histogram: str, label: str, window: str, offset: str = "") -> str:
    """PromQL of its buckets by a label, of which quantiles are computed: those of parts cannot be added up."""
    ago = f" offset {offset}" if offset else ""
    return f"sum by (le, {label}) (rate({histogram}_bucket[{window}]{ago}))"


def burn_rate(population: Population, quantile: str, budget: float, window: str) -> str:
    """PromQL: how many times as fast as it may be the error budget is used up."""
    chosen = f'{{quantile="{quantile}"}}'
    observed, above = population.observed + chosen, population.above + chosen
    if window == "5m":
        return f"{above} / {observed} / {budget:g}"
    return f"sum_over_time({above}[{window}]) / sum_over_time({observed}[{window}]) / {budget:g}"


# -- recordings --------------------------------------------------------------------------------------


def recordings(population: Population, found: Sequence[Goal]) -> Iterator[dict[str, Any]]:
    for metric in dict.fromkeys(goal.slo.metric for goal in found):
        name = population.histograms[metric]
        if population.spelled_by is not None:
            name = stock_metrics.spelled(name, population.spelled_by)
        expr = bucket_rates(name, population.label, "5m")
        yield {"record": population.buckets(metric), "expr": expr}
    for goal in found:
        if goal.klass is not None:
            limit = f"vector({goal.slo.limit_s!r})"
            yield {"record": "tailscope:slo_limit_seconds", "expr": limit, "labels": goal.labels}
        observed, above = _counted(population, goal)
        yield {"record": population.observed, "expr": observed, "labels": goal.labels}
        yield {"record": population.above, "expr": above, "labels": goal.labels}
    for quantile, budget in _budgets(found).items():
        yield from _broken(population, quantile, budget)


def _counted(population: Population, goal: Goal) -> tuple[str, str]:
    """PromQL of the requests a second that an objective is held against, and of those above its limit."""
    by, on = f"sum by ({population.label})", f"on ({population.label})"
    if goal.klass == ALL:
        by, on = "sum", "on ()"
    total = f"{by} ({_of(population, goal, f'le={go_string(INFINITE)}')})"
    below = f"{by} ({_of(population, goal, f'le=~{go_string(_le(goal.edge_s))}')})"
    # A difference of sums of floats may be a hair below nothing.
    above = f"clamp_min({total}\n- {below}, 0)"
    if goal.slo.metric != "ITL":
        return total, above
    # One request has hundreds of gaps, which are slow together: what they say is worth as much as there are requests.
    own = _matchers(goal)
    requests = f"{by} (rate({population.histograms['E2E']}_count{f'{{{own}}}' if own else ''}[5m]))"
    return f"{requests}\nand {on} {total}", f"{requests}\n* {above}\n/ clamp_min({total}, 1e-9)"


def _budgets(found: Sequence[Goal]) -> dict[str, float]:
    return {goal.slo.quantile: goal.budget for goal in found}


def _broken(population: Population, quantile: str, budget: float) -> Iterator[dict[str, Any]]:
    """The share above the limit, of those objectives of which more lie there than chance would put.

    Five minutes decide alone where they hold so many that a quantile of them may be stated; else the last hour may speak.
    """
    chosen = f'{{quantile="{quantile}"}}'
    observed, above = population.observed + chosen, population.above + chosen
    by_chance = Z * math.sqrt(budget * (1 - budget))

    def record(window: str, above: str, observed: str, seconds: int, but: str = "") -> dict[str, Any]:
        return {
            "record": population.broken(window),
            "expr": f"{above} / {observed}\n> {budget:g} + {by_chance:.4f} / sqrt({seconds} * {observed})\n"
            f"and {seconds} * {above} >= {MIN_TAIL_SAMPLES:g}{but}",
            "labels": {"quantile": quantile},
        }

    enough = math.ceil(MIN_TAIL_SAMPLES / budget)
    yield record("5m", above, observed, SHORT_S)
    hour = f"sum_over_time({above}[1h])", f"sum_over_time({observed}[1h])"
    yield record("1h", *hour, INTERVAL_S, f"\nunless {SHORT_S} * {observed} >= {enough}")


def _of(population: Population, goal: Goal, *matchers: str) -> str:
    inside = ",".join(filter(None, (_matchers(goal), *matchers)))
    return population.buckets(goal.slo.metric) + (f"{{{inside}}}" if inside else "")


def _matchers(goal: Goal) -> str:
    return "" if goal.klass in (None, ALL) else f"class={go_string(str(goal.klass))}"


def _le(edge_s: float) -> str:
    """Regular expression of an edge: exporters write 2 as 2.0 or as 2, and what relays them may change it."""
    text = str(floatToGoString(edge_s))  # type: ignore[no-untyped-call]
    whole = text.removesuffix(".0")
    return re.escape(text) if whole == text else f"{whole}|{re.escape(text)}"


# -- alerts ------------------------------------------------------------------------------------------


def alerts(population: Population, found: Sequence[Goal]) -> Iterator[tuple[Alert, dict[str, str]]]:
    """With the labels that tell those of one name apart; like all of an alert's they are templates."""
    for goal in found:
        yield _quantile_alert(population, goal), {name: escaped(value) for name, value in goal.labels.items()}
    for quantile, budget in _budgets(found).items():
        # More than all requests cannot lie above; and half of them are no budget for errors.
        for burn in BURNS if BURNS[0].factor * budget < 1 else ():
            yield _burn_alert(population, quantile, budget, burn), {"window": burn.long}


def _quantile_alert(population: Population, goal: Goal) -> Alert:
    """The quantile, in seconds, while its objective is broken by the count of what lies above it.

    The quantile alone does not do: one in the last bucket is reported as that bucket's lower end, so `> limit` would never
    be true of an objective that is the last edge.
    """
    q, limit, buckets = f"{goal.quantile:g}", f">= {goal.edge_s!r}", _of(population, goal)
    short, long, on = buckets, f"sum_over_time({buckets}[1h])", f"and on ({population.label})"
    if goal.klass == ALL:
        short, long, on = f"sum by (le) ({short})", f"sum by (le) ({long})", "and on ()"
    name, unit, counted = goal.slo.metric, "requests", ""
    if name == "ITL":
        unit, counted = "token gaps", " Gaps count as the requests that they are of."
    said = (
        ""
        if goal.edge_s == goal.slo.limit_s
        else f" (counted from {goal.edge_s:g} s on, where a bucket ends)"
    )
    return Alert(
        f"{goal.slo.quantile.upper()}AboveObjective",
        "warning",
        "5m",
        f"{goal.slo.quantile} {name} of {_whose(population, goal)} is {{{{ $value | humanizeDuration }}}}, above its objective of "
        f"{goal.slo.limit_s:g} s{said}",
        (
            Signal(
                f"histogram_quantile({q}, {short})",
                limit,
                f"{on} {population.broken('5m')}{goal.selector}\n"
                f"or (histogram_quantile({q}, {long})) {limit}\n{on} {population.broken('1h')}{goal.selector}",
            ),
        ),
        f"More than {goal.budget:.0%} of its {unit} take longer than that, by more than chance (one-sided test at 5 %), and at least "
        f"{MIN_TAIL_SAMPLES:g} requests do: in the last five minutes, or, where these hold fewer than "
        f"{math.ceil(MIN_TAIL_SAMPLES / goal.budget):,} requests, in the last hour.{counted}" + goal.note,
    )


def _whose(population: Population, goal: Goal) -> str:
    return "all requests" if goal.klass == ALL else population.whose


def _burn_alert(population: Population, quantile: str, budget: float, burn: Burn) -> Alert:
    chosen = f'{{quantile="{quantile}"}}'
    observed, above = population.observed + chosen, population.above + chosen
    long, short = (burn_rate(population, quantile, budget, window) for window in (burn.long, burn.short))
    return Alert(
        f"{quantile.upper()}BudgetBurn",
        burn.severity,
        "2m",
        f"{{{{ $labels.metric }}}} of {population.whose} uses up its error budget {{{{ $value | humanize }}}} times as fast as its "
        f"{quantile} objective allows",
        (
            Signal(
                long,
                f"> {burn.factor:g}",
                f"and {short} > {burn.factor:g}\n"
                f"and {INTERVAL_S} * sum_over_time({above}[{burn.long}]) >= {MIN_TAIL_SAMPLES:g}"
                + (f"\nand count_over_time({observed}[{burn.long}]) >= {burn.known}" if burn.known else ""),
            ),
        ),
        f"The budget is the {budget:.0%} that may lie above the limit. So it was for {burn.long}, and still is in the last {burn.short}: "
        f"at {burn.factor:g} times the rate {burn.budget} of 30 days' budget are gone after {burn.long}. At least {MIN_TAIL_SAMPLES:g} lay above.",
        last=burn.last,
    )
