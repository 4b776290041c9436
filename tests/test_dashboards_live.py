"""A real Prometheus watches a simulated fleet through the real exporter, and answers every panel's query."""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from shipped import EXPRS, SHIPPED, panel_of
from watched_fleet import PROMETHEUS, PROMTOOL, SERVER, Fleet, Prometheus, Samples, quantile_between, watched

from tailscope import stock_metrics
from tailscope.config import parse
from tailscope.grafana.fleet import OBJECTIVE

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(
        PROMETHEUS is None or PROMTOOL is None,
        reason="Prometheus is not installed (on Debian and Ubuntu: apt install prometheus)",
    ),
]
CONFIG = parse(
    {
        "slo": {
            "<512": {"ttft_p99_s": 0.04, "ttft_p95_s": 0.4, "e2e_p50_s": 3.0},
            "<32k": {"e2e_p99_s": 60.0, "tpot_p99_s": 0.2},
        }
    }
)
#: What Grafana puts for its variables; a fleet that is watched for seconds has no hours to look back to.
VARIABLES = {
    "class": ".*", "tenant": ".*", "model_name": ".*", "server": ".*", "engine": ".*",
    "window": "5m", "span": "5s", "__rate_interval": "10s", "__range": "5m",
}  # fmt: skip


def with_values(expr: str) -> str:
    return re.sub(r"\$(\w+)", lambda name: VARIABLES[name[1]], expr)


def exprs_of(board: str, title: str) -> list[str]:
    return [with_values(target["expr"]) for target in panel_of(board, title)["targets"]]


def test_promtool_takes_every_query(tmp_path: Path) -> None:
    exprs = sorted({with_values(expr) for _, _, expr in EXPRS})
    annotations = [
        one["expr"]
        for made in SHIPPED.values()
        for one in made["annotations"].get("list", [])
        if "expr" in one
    ]
    rules = [
        {"record": f"panel:{n}", "expr": expr}
        for n, expr in enumerate([*exprs, *map(with_values, annotations)])
    ]
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "p", "rules": rules}]}), encoding="utf-8"
    )
    done = subprocess.run(
        [str(PROMTOOL), "check", "rules", "rules.yaml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def of_the_past(now: float) -> str:
    """Hours of a prefix cache that found 80 % of tokens and, since half an hour, 30 %."""
    lines: dict[str, list[str]] = {"queries": [], "hits": []}
    hits = 0.0
    for number, at in enumerate(range(int(now) - 7 * 3600, int(now), 60)):
        hits += 30.0 if at > now - 1800 else 80.0
        for name, value in (("queries", 100.0 * number), ("hits", hits)):
            lines[name].append(
                f'vllm:prefix_cache_{name}_total{{instance="long",engine="0",model_name="m"}} {value} {at}'
            )
    text = "".join(
        f"# TYPE vllm:prefix_cache_{name} counter\n" + "\n".join(found) + "\n"
        for name, found in lines.items()
    )
    return f"{text}# EOF\n"


@pytest.fixture(scope="module")
def fleet_and_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Prometheus]]:
    folder = tmp_path_factory.mktemp("watched")
    fleet = Fleet(folder, CONFIG)
    with watched(folder, fleet, CONFIG, of_the_past(time.time())) as server:
        yield fleet, server


Watching = tuple[Fleet, Prometheus]


@pytest.mark.parametrize(("panel", "expr"), [pytest.param(p, expr, id=place) for place, p, expr in EXPRS])
def test_every_query_has_an_answer(fleet_and_server: Watching, panel: dict[str, Any], expr: str) -> None:
    _, server = fleet_and_server
    found = server.query(with_values(expr))
    assert found
    assert any(math.isfinite(value) for _, value in found)
    if panel["type"] == "table":
        # It would be one more column, and rows of several queries would not be one.
        assert not any("__name__" in labels for labels, _ in found)
        assert len(panel["targets"]) == 1 or {frozenset(k) for k, _ in found} == {
            frozenset(OBJECTIVE.split(", "))
        }
    # A line's name must tell it from the others.
    [legend] = {t["legendFormat"] for t in panel["targets"] if t["expr"] == expr}
    if panel["type"] in ("timeseries", "state-timeline"):
        names = [named(legend, labels) for labels, _ in found]
        assert len(names) == len(set(names)), names
        assert not any(re.fullmatch(r"\W*", name) for name in names)


def named(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda label: labels.get(label[1], ""), legend)


@pytest.mark.parametrize(
    ("title", "histogram"),
    [
        ("Time to first token, p99", "tailscope_time_to_first_token_seconds"),
        ("Whole latency, p99", "tailscope_e2e_request_latency_seconds"),
        ("Prefill, p99", "tailscope_request_prefill_time_seconds"),
    ],
)
def test_a_p99_is_that_of_the_requests_meanwhile(
    fleet_and_server: Watching, title: str, histogram: str
) -> None:
    fleet, server = fleet_and_server
    found = {labels["class"]: value for labels, value in server.query(exprs_of("classes", title)[0])}
    expected = quantile_between(fleet.served[0], fleet.served[-1], 0.99, histogram, "class")
    assert {"<512", "<32k"} <= expected.keys()
    assert {k: v for k, v in found.items() if math.isfinite(v)} == pytest.approx(expected, rel=1e-6)


def test_filters_choose_by_labels_that_series_have(fleet_and_server: Watching) -> None:
    """One that they do not have would choose nothing but for All, which any query of a test has."""
    _, server = fleet_and_server
    narrowed_by: dict[str, set[str]] = {}
    for _, _, expr in EXPRS:
        for metric, matchers in re.findall(r"([a-z][\w:]*)\{([^{}]*)\}", expr):
            narrowed_by.setdefault(metric, set()).update(re.findall(r'(\w+)=~"\$\w+"', matchers))
    former = {name for name, _ in stock_metrics.FORMERLY.values()}
    for metric, labels in narrowed_by.items():
        if stock_metrics.names(metric) & former:
            continue
        found = server.query(metric)
        assert found, metric
        for told, _ in found:
            # A label that is empty is none to Prometheus; nobody has a model's name in this fleet.
            assert labels - {"model_name", "tenant"} <= told.keys(), (metric, told)


def test_limits_and_shares_are_those_of_the_objectives(fleet_and_server: Watching) -> None:
    fleet, server = fleet_and_server
    limit, observed, above, *_ = exprs_of("fleet", "Objectives now")
    key = ("class", "metric", "quantile")
    limits = {tuple(labels[k] for k in key): value for labels, value in server.query(limit)}
    assert limits == {(slo.klass, slo.metric.lower(), slo.quantile): slo.limit_s for slo in CONFIG.slos}
    shares = {tuple(labels[k] for k in key): value for labels, value in server.query(above)}
    assert shares.keys() == limits.keys()

    def grown(le: str) -> float:
        name = "tailscope_time_to_first_token_seconds_bucket"

        def total(page: Samples) -> float:
            return sum(
                v
                for (n, labels), v in page.items()
                if n == name and {("class", "<512"), ("le", le)} <= labels
            )

        return total(fleet.served[-1]) - total(fleet.served[0])

    expected = 1 - grown("0.04") / grown("+Inf")
    assert 0.01 < expected < 0.9
    assert shares["<512", "ttft", "p99"] == pytest.approx(expected, rel=1e-6)
    [burn] = [v for labels, v in server.query(exprs_of("fleet", "Burn rate of p99 budgets")[0])
              if labels["class"] == "<512"]  # fmt: skip
    assert burn == pytest.approx(expected / 0.01, rel=1e-6)
    assert server.query(observed)


def test_findings_are_those_that_are_open(fleet_and_server: Watching) -> None:
    fleet, server = fleet_and_server
    is_open = fleet.watch.state.open.values()
    assert {"hol-coupling", "straggler-rank"} <= {finding.rule for finding in is_open}
    [table] = exprs_of("fleet", "Open findings")
    found = {(s["rule"], s["severity"], s["culprit"], s.get("victim", "")) for s, _ in server.query(table)}
    assert found == {(f.rule, f.severity, f.culprit, f.victim) for f in is_open}
    [timeline] = exprs_of("fleet", "Findings over time")
    worst = {"low": 1, "medium": 2, "high": 3}
    values = {(s["rule"], s["culprit"], s.get("victim", "")): v for s, v in server.query(timeline)}
    assert values == {(f.rule, f.culprit, f.victim): worst[f.severity] for f in is_open}
    [of_ranks] = exprs_of("ranks", "Open findings of rules of ranks")
    assert {s["rule"] for s, _ in server.query(of_ranks)} == {"straggler-rank"}


def test_some_panels_have_the_right_values(fleet_and_server: Watching) -> None:
    fleet, server = fleet_and_server

    def only(board: str, title: str, number: int = 0, **labels: str) -> float:
        found = server.query(exprs_of(board, title)[number])
        [value] = [v for s, v in found if labels.items() <= s.items()]
        return value

    assert only("ranks", "Time that others wait for a rank") == 0.25
    assert only("ranks", "Balance of experts") == pytest.approx(0.7)
    assert only("ranks", "Tokens of the fullest rank over the mean") == pytest.approx(1.5)
    assert only("pd", "Transfer time (NIXL)", 1) == pytest.approx(0.0075)
    assert only("pd", "Share of prompt tokens that were fetched", instance="vllm-pd") == pytest.approx(0.9)
    assert only("pd", "Hit rate of the connector's cache", instance="vllm-pd") == pytest.approx(0.6)
    assert only("engine", "Fall of the prefix cache's hit rate", instance="long") == pytest.approx(
        0.5, abs=0.02
    )
    assert only("fleet", "KV cache in use") == pytest.approx(0.5)
    assert only("fleet", "Rows that cannot be used") == pytest.approx(0.01)
    running = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", fleet.page(), re.MULTILINE)
    assert running
    assert only("engine", "Requests running", instance=SERVER) == float(running[1])
    coupled = {
        (labels["class"], labels["metric"]): value
        for labels, value in server.query(exprs_of("classes", "Share of the tail that is others' prefill")[0])
    }
    assert 0.3 < coupled["<512", "ttft"] <= 1


def test_alerts_of_the_same_rules_see_the_same_fleet(fleet_and_server: Watching) -> None:
    """That the limits are those of the rules' file, and that what is found is what fires."""
    _, server = fleet_and_server
    groups = server.get("/api/v1/rules")["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if rule["type"] == "alerting"]
    bad = {
        rule["name"]: rule["lastError"]
        for group in groups
        for rule in group["rules"]
        if rule["health"] != "ok"
    }
    assert not bad
    active = {(rule["name"], alert["labels"].get("class")) for rule in alerts for alert in rule["alerts"]}
    assert ("TailscopeCoupling", "<512") in active
    assert ("TailscopeStraggler", None) in active
    assert ("TailscopeP99AboveObjective", "<512") in active
    quiet = {"ObjectivesDiffer", "BucketMissing", "Absent", "ScrapeFailing", "DiskFull", "DiagnosisStale"}
    assert quiet <= {rule["name"].removeprefix("Tailscope") for rule in alerts}
    assert not quiet & {name.removeprefix("Tailscope") for name, _ in active}
