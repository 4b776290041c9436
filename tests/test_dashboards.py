"""Dashboards: the files are what the code makes, every panel is explained, and a real Prometheus answers every query."""

from __future__ import annotations

import enum
import inspect
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
import time
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import units
from tree import ROOT
from typer.testing import CliRunner
from watched_fleet import (
    PROMETHEUS,
    PROMTOOL,
    SERVER,
    Fleet,
    Prometheus,
    Samples,
    quantile_between,
    watched,
)

from tailscope import registry, stock_metrics
from tailscope.alerts import EXPORTER_HEALTH
from tailscope.cli import app
from tailscope.config import parse
from tailscope.grafana import __main__ as making
from tailscope.grafana.fleet import OBJECTIVE
from tailscope.grafana.of_rules import chart_of, open_findings
from tailscope.grafana.queries import narrowed, of_every_version
from tailscope.model import Alert, Rule, Signal

SHIPPED = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "dashboards").glob("*.json")
}
SHOWN = [
    (f"{name}: {panel['title']}", panel)
    for name, made in SHIPPED.items()
    for panel in made["panels"]
    if panel["type"] != "row"
]
PANELS = [pytest.param(panel, id=place) for place, panel in SHOWN]
EXPRS = [(f"{place} {t['refId']}", panel, t["expr"]) for place, panel in SHOWN for t in panel["targets"]]
QUERIES = [pytest.param(panel, expr, id=place) for place, panel, expr in EXPRS]
#: Panels that Grafana has today; graph, singlestat and table-old, which it migrates, are none of them.
PANEL_TYPES = {"timeseries", "table", "heatmap", "state-timeline"}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
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


def panel_of(board: str, title: str) -> dict[str, Any]:
    [found] = [p for p in SHIPPED[board]["panels"] if p["title"] == title]
    return typing.cast("dict[str, Any]", found)


def exprs_of(board: str, title: str) -> list[str]:
    return [with_values(target["expr"]) for target in panel_of(board, title)["targets"]]


# -- files -------------------------------------------------------------------------------------------


def test_the_files_are_what_the_code_makes() -> None:
    stale = making.out_of_date(ROOT / "dashboards")
    assert not stale, f"{stale} out of date; run: {making.COMMAND}"


def test_making_writes_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert making.main(["--check"]) == 1
    assert making.main([]) == 0
    assert making.main(["--check"]) == 0
    (tmp_path / "dashboards" / "gone.json").write_text("{}", encoding="utf-8")
    assert making.out_of_date(tmp_path / "dashboards") == ["gone.json"]
    assert making.main([]) == 0
    assert making.main(["--check"]) == 0
    assert making.main(["--other"]) == 2


def test_the_command_writes_what_is_shipped(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["dashboards", "-o", str(tmp_path / "new" / "folder")])
    assert done.exit_code == 0, done.output
    written = {p.relative_to(tmp_path / "new" / "folder") for p in (tmp_path / "new").rglob("*.*")}
    shipped = {
        p.relative_to(ROOT / "dashboards")
        for p in (ROOT / "dashboards").rglob("*")
        if p.suffix in (".json", ".yaml")
    }
    assert written == shipped
    for path in shipped:
        assert (tmp_path / "new" / "folder" / path).read_bytes() == (ROOT / "dashboards" / path).read_bytes()
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert CliRunner().invoke(app, ["dashboards", "-o", str(tmp_path / "file")]).exit_code != 0


def test_only_making_needs_the_builder_library(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['grafana_foundation_sdk'] = None\n"
        "from tailscope.cli import app\n"
        "app(['dashboards', '-o', sys.argv[1]])"
    )
    command = [sys.executable, "-P", "-c", code, str(tmp_path)]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert (tmp_path / "fleet.json").is_file()


def test_provisioning_names_what_dashboards_use() -> None:
    folder = ROOT / "dashboards" / "provisioning"
    [provider] = yaml.safe_load((folder / "dashboards.yaml").read_text(encoding="utf-8"))["providers"]
    assert provider["type"] == "file"
    assert provider["options"]["path"]
    [source] = yaml.safe_load((folder / "datasource.yaml").read_text(encoding="utf-8"))["datasources"]
    assert source["type"] == DATASOURCE["type"]


# -- what Grafana is told ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_it_keeps_to_the_schema(name: str) -> None:
    """Grafana's types, as its library has them for its current version: no field is unknown, none is of another type."""
    register_default_plugins()
    read = models.Dashboard.from_json(SHIPPED[name])
    assert json.loads(JSONEncoder().encode(read)) == SHIPPED[name]
    problems = list(mistyped(read, name))
    assert not problems
    assert SHIPPED[name]["schemaVersion"] == 42


def mistyped(value: Any, where: str) -> Iterator[str]:
    """Places below a model whose value is not of the type that the model declares."""
    if isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from mistyped(item, f"{where}[{number}]")
    elif hasattr(value, "to_json") and not isinstance(value, (str, int)):
        module = vars(sys.modules[type(value).__module__])
        hints = typing.get_type_hints(type(value).__init__, module)
        for name, hint in hints.items():
            held = getattr(value, name, None)
            if name != "return" and not _fits(held, hint):
                yield f"{where}.{name}: {held!r} is no {hint}"
            yield from mistyped(held, f"{where}.{name}")


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if hint in (Any, object):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(item, typing.get_args(hint)[1]) for item in value.values()
        )
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if inspect.isclass(hint) and issubclass(hint, enum.Enum):
        return value in [member.value for member in hint]
    if isinstance(value, dict) and hasattr(hint, "from_json"):
        # The library reads some parts no further than this.
        read = hint.from_json(value)
        return json.loads(JSONEncoder().encode(read)) == value and not list(mistyped(read, ""))
    return inspect.isclass(hint) and isinstance(value, hint)


def test_the_check_of_types_sees_a_wrong_one() -> None:
    read = models.Dashboard(title="t", schema_version=typing.cast("int", "42"))
    assert list(mistyped(read, "d")) == ["d.schema_version: '42' is no <class 'int'>"]


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_is_explained(panel: dict[str, Any]) -> None:
    assert panel["title"].strip()
    # One sentence, which may end in a remark on versions.
    assert re.fullmatch(r"[A-Za-z0-9][^\n]{30,200}\.", panel["description"]), panel["description"]
    assert panel["type"] in PANEL_TYPES
    assert panel["datasource"] == DATASOURCE
    assert panel["targets"]
    for target in panel["targets"]:
        assert target["datasource"] == DATASOURCE
        assert target["expr"].strip()
        assert target["instant"] is (panel["type"] == "table")
    unit = panel["fieldConfig"]["defaults"]["unit"]
    assert unit.startswith("suffix:") or unit in UNITS
    steps = panel["fieldConfig"]["defaults"].get("thresholds", {"steps": [{"value": None}]})["steps"]
    values = [step["value"] for step in steps]
    assert values[0] is None
    assert values[1:] == sorted(values[1:])


UNITS = {value for name, value in vars(units).items() if name[0].isupper() and isinstance(value, str)}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_dashboard_has_the_variables_of_its_queries(name: str) -> None:
    made = SHIPPED[name]
    variables = {one["name"]: one for one in made["templating"]["list"]}
    assert made["templating"]["list"][0]["name"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    text = json.dumps([panel for panel in made["panels"] if panel["type"] != "row"])
    used = set(re.findall(r"\$(\w+)", text)) | set(re.findall(r"\$\{(\w+)\}", text))
    assert {one for one in used if not one.startswith("__")} == variables.keys()
    for one in made["templating"]["list"]:
        if one["type"] == "query":
            assert one["includeAll"]
            assert one["multi"]
            assert one["allValue"] == ".*"
            assert one["datasource"] == DATASOURCE
    numbers = [panel["id"] for panel in made["panels"]]
    assert len(numbers) == len(set(numbers))
    assert 0 not in numbers
    assert made["uid"] == f"tailscope-{name}"


def test_the_filters_are_there() -> None:
    has = {name: {v["name"] for v in made["templating"]["list"]} for name, made in SHIPPED.items()}
    assert {"class", "tenant", "model_name", "server"} <= has["classes"]
    assert {"class", "tenant", "model_name", "server", "engine"} <= has["fleet"]
    assert {"model_name", "server", "engine"} <= has["engine"]
    assert {"model_name", "server", "engine"} <= has["pd"]
    assert "server" in has["ranks"]


@pytest.mark.parametrize("name", SHIPPED)
def test_panels_do_not_lie_on_each_other(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in SHIPPED[name]["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert not cells & taken, panel["title"]
        taken |= cells


# -- one definition ----------------------------------------------------------------------------------

OWNED = [(rule, alert) for rule, _ in registry.rules() for alert in rule.alerts]


@pytest.mark.parametrize(("rule", "alert"), OWNED, ids=lambda value: getattr(value, "name", None))
def test_what_an_alert_measures_has_a_panel(rule: Rule, alert: Alert) -> None:
    if all("tailscope_finding" in signal.expr for signal in alert.signals):
        assert alert.panel is None, "open findings are shown together"
        return
    assert alert.panel
    panel = panel_of(alert.panel.dashboard, alert.panel.title)
    assert panel["description"] == alert.panel.shows
    assert panel["fieldConfig"]["defaults"]["unit"] == alert.panel.unit
    [target] = panel["targets"]
    for signal in alert.signals:
        assert narrowed(signal.expr) in target["expr"]
        limits = rule.limits_of(alert)
        wanted = [limits[name] for name in re.findall(r"\$(\w+)", signal.test)]
        assert [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]] == [
            None,
            *wanted,
        ]


def test_every_rule_s_own_panels_are_shown() -> None:
    for rule, _ in registry.rules():
        for panel in rule.panels:
            [target] = panel_of(panel.dashboard, panel.title)["targets"]
            assert narrowed(panel.expr) in target["expr"]


def test_a_panel_shows_the_threshold_its_alert_holds_it_against() -> None:
    [alert] = [alert for alert in EXPORTER_HEALTH if alert.name == "RequestsFailing"]
    steps = panel_of("fleet", "Requests that fail")["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert [step["value"] for step in steps] == [None, alert.thresholds[0].value]


def test_findings_of_ranks_are_those_of_the_rules_that_say_so() -> None:
    rules = [rule.name for rule, _ in registry.rules() if rule.dashboard == "ranks"]
    assert "straggler-rank" in rules
    for chart in open_findings("ranks"):
        assert f'rule=~"{"|".join(rules)}"' in chart.queries[0].expr


def test_queries_are_narrowed_where_the_labels_are() -> None:
    assert narrowed("tailscope_finding") == "tailscope_finding"
    assert (
        narrowed('x{a="tailscope_up"} + tailscope_up')
        == 'x{a="tailscope_up"} + tailscope_up{server=~"$server"}'
    )
    assert narrowed('rate(vllm:admission_rejections_total{reason="r"}[5m])') == (
        'rate(vllm:admission_rejections_total{reason="r",instance=~"$server",model_name=~"$model_name"}[5m])'
    )
    assert narrowed("sum by (class) (tailscope:slo_above:rate5m)") == (
        'sum by (class) (tailscope:slo_above:rate5m{class=~"$class"})'
    )


def test_queries_are_spelled_for_every_vllm() -> None:
    assert of_every_version("vllm:num_requests_running") == "vllm:num_requests_running"
    assert of_every_version("rate(vllm:kv_cache_usage_perc[5m])") == (
        "(rate(vllm:kv_cache_usage_perc[5m]))\nor (rate(vllm:gpu_cache_usage_perc[5m]))"
    )


def test_an_expression_with_a_threshold_has_its_value() -> None:
    alert = Alert("X", "critical", "1m", "s", (Signal("vllm:num_requests_running * $k", ">= $k"),))
    [(_, other)] = [(r, a) for r, a in OWNED if a.name == "StandingStill"]
    assert other.panel
    chart = chart_of(alert, other.panel, {"k": 3})
    assert chart.queries[0].expr == "vllm:num_requests_running * 3"
    assert [(limit.value, limit.severity) for limit in chart.limits] == [(3, "critical")]


@pytest.mark.parametrize(("panel", "expr"), QUERIES)
def test_names_of_vllm_are_known(panel: dict[str, Any], expr: str) -> None:
    known = stock_metrics.SINCE | stock_metrics.TRANSFERS
    former = {name for name, _ in stock_metrics.FORMERLY.values()}
    assert stock_metrics.names(expr) <= known.keys() | former


# -- by Prometheus -----------------------------------------------------------------------------------

needs_prometheus = [
    pytest.mark.prometheus,
    pytest.mark.skipif(
        PROMETHEUS is None or PROMTOOL is None,
        reason="Prometheus is not installed (on Debian and Ubuntu: apt install prometheus)",
    ),
]


@pytest.mark.prometheus
@pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (on Debian and Ubuntu: apt install prometheus)"
)
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
        [str(shutil.which("promtool")), "check", "rules", "rules.yaml"],
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


@pytest.mark.parametrize(
    ("panel", "expr"), [pytest.param(p, expr, id=place, marks=needs_prometheus) for place, p, expr in EXPRS]
)
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


def check(mark: Any) -> Any:
    for one in needs_prometheus:
        mark = one(mark)
    return mark


@check
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


@check
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


@check
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


@check
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


@check
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


@check
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
