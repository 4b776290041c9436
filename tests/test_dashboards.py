"""Dashboards: the files are what the code makes, every panel is explained, and shows what its rule's alert watches."""

from __future__ import annotations

import enum
import inspect
import itertools
import json
import re
import subprocess
import sys
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
from shipped import EXPRS, SHIPPED, SHOWN, panel_of
from tree import ROOT
from typer.testing import CliRunner

from tailscope import registry, stock_metrics
from tailscope.alerts import EXPORTER_HEALTH
from tailscope.cli import app
from tailscope.grafana import __main__ as making
from tailscope.grafana.of_rules import chart_of, open_findings
from tailscope.grafana.queries import narrowed, of_every_version
from tailscope.model import Alert, Rule, Signal

PANELS = [pytest.param(panel, id=place) for place, panel in SHOWN]
QUERIES = [pytest.param(panel, expr, id=place) for place, panel, expr in EXPRS]
#: Panels that Grafana has today; graph, singlestat and table-old, which it migrates, are none of them.
PANEL_TYPES = {"timeseries", "table", "heatmap", "state-timeline"}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

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
