"""Alerting rules: what stands in the file, and by promtool that each alert fires on its fault and is quiet on its decoys.

Cases are promtool's own, in `tests/alerts/ALERT.yaml`. They name the rules that `tailscope alerts` makes of `tailscope.toml`
beside them: `tailscope-rules.yaml`, `vllm-rules.yaml` (--stock) and `vllm-0.10-rules.yaml` (--stock --vllm-version 0.10).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tailscope import config, registry, stock_metrics
from tailscope.alert_texts import go_string
from tailscope.alerts import Wanted, render
from tailscope.cli import app
from tailscope.errors import UsageError
from tailscope.model import Alert, Rule, Signal
from tailscope.sim.emit import prometheus as emitted

CASES = Path(__file__).parent / "alerts"
PROMTOOL = shutil.which("promtool")
WANTED = {
    "tailscope": Wanted(),
    "vllm": Wanted(stock_metrics.NEWEST),
    "vllm-0.10": Wanted((0, 10)),
}
RULES = [rule for rule, _ in registry.rules()]
OWNED = [(rule, alert) for rule in RULES for alert in rule.alerts]
CONFIG = config.load(CASES / "tailscope.toml")
NO_PROMTOOL = "promtool is not installed (on Debian and Ubuntu: apt install prometheus)"
needs_promtool = [
    pytest.mark.prometheus,
    pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMTOOL),
]


def rules_of(text: str) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def alerts_of(text: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for rule in rules_of(text):
        if "alert" in rule:
            found.setdefault(rule["alert"], []).append(rule)
    return found


def promtool(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL
    return subprocess.run(
        [PROMTOOL, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=600,
        # A third of what it takes would be spent to keep its memory small.
        env={**os.environ, "GOGC": "800"},
        check=False,
    )


def printed_by(case: str, folder: Path) -> str:
    """What promtool says of a case of which something fires where nothing is expected to."""
    done = promtool("test", "rules", case, cwd=folder)
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the rules, and the cases beside them."""
    path = tmp_path_factory.mktemp("alerts")
    for name, wanted in WANTED.items():
        (path / f"{name}-rules.yaml").write_text(render(CONFIG, RULES, wanted), encoding="utf-8")
    for case in CASES.glob("*.yaml"):
        shutil.copy(case, path)
    return path


# -- by Prometheus -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_promtool) for name in WANTED])
def test_prometheus_takes_the_rules(folder: Path, name: str) -> None:
    done = promtool("check", "rules", "--lint-fatal", f"{name}-rules.yaml", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "case", [pytest.param(path.name, marks=needs_promtool) for path in sorted(CASES.glob("*.yaml"))]
)
def test_an_alert_fires_on_its_fault_and_is_quiet_on_its_decoys(folder: Path, case: str) -> None:
    done = promtool("test", "rules", case, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.prometheus
@pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMTOOL)
def test_annotations_say_what_to_run_whatever_a_class_is_called(tmp_path: Path) -> None:
    name = "{{ .Labels }}'\"\\$(touch owned)`id`\n{"
    settings_ = config.Config(slos=(config.Slo(name, "TTFT", "p99", 2.0),))
    url = "https://grafana.example/d/tailscope?from=now-1h"
    (tmp_path / "rules.yaml").write_text(
        render(settings_, RULES, Wanted(dashboard_url=url)), encoding="utf-8"
    )
    metric = "tailscope_time_to_first_token_seconds_bucket"
    series = [
        {"series": f"{metric}{{class={go_string(name)},le={le}}}", "values": values}
        for le, values in (('"2.0"', "0+588x60"), ('"+Inf"', "0+600x60"))
    ]
    test = {
        "interval": "1m",
        "input_series": series,
        "alert_rule_test": [{"eval_time": "20m", "alertname": "TailscopeP99AboveObjective"}],
    }
    case = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "case.yaml").write_text(yaml.safe_dump(case, allow_unicode=True), encoding="utf-8")
    printed = printed_by("case.yaml", tmp_path)
    said = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', printed))
    run = said["run"].encode().decode("unicode_escape")
    words = subprocess.run(
        ["sh", "-c", f"printf '%s\\0' {run}"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert words.stdout.split("\0")[:-1] == [
        "tailscope",
        "diagnose",
        "TRACE",
        "--last",
        "15m",
        "--class",
        name,
    ]
    assert not (tmp_path / "owned").exists()
    assert said["dashboard"].startswith(url + "&var-class=%7B%7B+.Labels")
    assert "of class {{ .Labels }}" in said["summary"]
    assert "error expanding" not in printed


@pytest.mark.prometheus
@pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMTOOL)
def test_prometheus_takes_any_name_of_a_class(tmp_path: Path) -> None:
    names = [
        *(chr(n) for n in (*range(32), 0x7F, 0x85, 0xA0, 0x2028, 0x2029, 0xFEFF, 0xFFFE, 0x1F600)),
        "\r\n- x: y",
        "{{",
        "%s",
        "&a",
    ]
    slos = tuple(config.Slo(name, "TTFT", "p99", 2.0) for name in names)
    (tmp_path / "rules.yaml").write_text(render(config.Config(slos=slos), RULES, Wanted()), encoding="utf-8")
    done = promtool("check", "rules", "--lint-fatal", "rules.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_promtool) for name in WANTED])
def test_every_annotation_can_be_expanded(folder: Path, tmp_path: Path, name: str) -> None:
    """Of every alert, on the first case in which it fires."""
    shutil.copy(folder / f"{name}-rules.yaml", tmp_path)
    seen = set()
    for path in sorted(CASES.glob("*.yaml")):
        case = yaml.safe_load(path.read_text(encoding="utf-8"))
        if case["rule_files"] != [f"{name}-rules.yaml"]:
            continue
        for test in case["tests"]:
            firing = [t for t in test.pop("promql_expr_test") if t["exp_samples"]]
            if firing and int(firing[0]["eval_time"].removesuffix("m")) < 200:
                alert = path.stem.partition("-0")[0]
                test["alert_rule_test"] = [{"eval_time": firing[0]["eval_time"], "alertname": alert}]
                case["tests"] = [test]
                break
        else:
            continue
        (tmp_path / "case.yaml").write_text(yaml.safe_dump(case, allow_unicode=True), encoding="utf-8")
        printed = printed_by("case.yaml", tmp_path)
        assert "Annotations" in printed, (alert, printed)
        assert "error expanding" not in printed, printed
        assert "<no value>" not in printed, printed
        assert "%!" not in printed, printed
        seen.add(alert)
    assert seen


# -- what stands in the file -------------------------------------------------------------------------


def test_every_alert_has_cases_that_fire_and_cases_that_are_quiet() -> None:
    for name, wanted in WANTED.items():
        for alert in alerts_of(render(CONFIG, RULES, wanted)):
            paths = [CASES / f"{alert}.yaml", CASES / f"{alert}{name.removeprefix('vllm')}.yaml"]
            case = yaml.safe_load(next(p for p in paths if p.exists()).read_text(encoding="utf-8"))
            expected = [t["exp_samples"] for test in case["tests"] for t in test["promql_expr_test"]]
            assert any(expected), alert
            assert [] in expected, alert


def test_no_case_is_of_an_alert_that_is_gone() -> None:
    made = {alert for wanted in WANTED.values() for alert in alerts_of(render(CONFIG, RULES, wanted))}
    assert {path.stem.partition("-0")[0] for path in CASES.glob("*.yaml")} == made


@pytest.mark.parametrize(("rule", "alert"), OWNED, ids=lambda value: getattr(value, "name", None))
def test_an_alert_decides_by_thresholds_that_have_a_reason(rule: Rule, alert: Alert) -> None:
    limits = rule.limits_of(alert)
    assert len(limits) == len(rule.thresholds) + len(alert.thresholds), (
        "an alert has a threshold of its rule's name"
    )
    texts = [f"{signal.expr} {signal.test} {signal.guard}" for signal in alert.signals]
    for threshold in alert.thresholds:
        assert any(f"${threshold.name}" in text for text in texts)
        assert re.fullmatch(r"[A-Z0-9`][^\n]*\.", threshold.why)
    for signal in alert.signals:
        query = signal.query(limits)
        assert "$" not in query
        sources = {"vllm:" in query, "tailscope_" not in query}
        assert len(sources) == 1, "an alert asks either vLLM's metrics or tailscope's"
        assert stock_metrics.names(query) <= stock_metrics.SINCE.keys()


def test_the_sources_are_never_mixed() -> None:
    for name, wanted in WANTED.items():
        for rule in rules_of(render(CONFIG, RULES, wanted)):
            if name == "tailscope":
                assert "vllm" not in rule["expr"]
            else:
                assert not re.search(r"tailscope_", rule["expr"])


def test_no_percentile_is_recorded() -> None:
    for wanted in WANTED.values():
        for rule in rules_of(render(CONFIG, RULES, wanted)):
            assert "alert" in rule or "quantile(" not in rule["expr"]


def test_buckets_are_those_that_vllm_has() -> None:
    assert stock_metrics.EDGES == {
        "TTFT": emitted.TTFT,
        "ITL": emitted.ITL,
        "TPOT": emitted.ITL,
        "E2E": emitted.LATENCY,
    }
    unknown = {name.removeprefix("vllm:") for name in stock_metrics.SINCE} - emitted.HELP.keys()
    assert not unknown


def test_names_are_those_of_the_version() -> None:
    old, new = (render(CONFIG, RULES, Wanted(version)) for version in ((0, 10), stock_metrics.NEWEST))
    assert "vllm:gpu_cache_usage_perc" in old
    assert "vllm:kv_cache_usage_perc" not in old
    assert "waiting_by_reason" not in old
    assert "vllm:kv_cache_usage_perc" in new
    assert "gpu_cache" not in new
    assert "waiting_by_reason" in new
    slos = (config.Slo("all", "ITL", "p99", 0.1), config.Slo("all", "TPOT", "p99", 0.1))
    itl = config.Config(slos=slos)
    assert "rate(vllm:time_per_output_token_seconds_bucket[5m])" in render(itl, RULES, Wanted((0, 10)))
    assert "rate(vllm:inter_token_latency_seconds_bucket[5m])" in render(itl, RULES, Wanted((0, 11)))
    # A name that became another one's is not asked for what it never was.
    assert "Left out: p99 TPOT above 0.1 s: its histogram exists from vLLM 0.11 on." in render(
        itl, RULES, Wanted((0, 10))
    )


def test_an_alert_without_its_metrics_is_left_out_and_told() -> None:
    later = Alert("Later", "warning", "5m", "x", (Signal("vllm:request_num_preemptions_count", "> 1"),))
    rule = Rule("acme", "S.", "W.", (), "needs x", (), (), (), lambda rows, limits: None, (later,))  # type: ignore[arg-type, return-value]
    text = render(config.Config(), [rule], Wanted((0, 28)))
    assert "VllmLater" not in alerts_of(text)
    assert "# Left out: VllmLater: its metrics exist from vLLM 0.30 on." in text
    assert "VllmLater" in alerts_of(render(config.Config(), [rule], Wanted((0, 30))))


def stock_p99(slos: dict[str, float], **more: Any) -> tuple[dict[str, Any] | None, str]:
    settings_ = config.Config(slos=tuple(config.Slo(k, "TTFT", "p99", v) for k, v in slos.items()), **more)
    text = render(settings_, RULES, Wanted(stock_metrics.NEWEST))
    found = alerts_of(text).get("VllmP99AboveObjective")
    return found[0] if found else None, text


def test_without_classes_all_requests_are_held_against_the_loosest_limit() -> None:
    every = {c.name: 5.0 for c in config.DEFAULT_CLASSES}
    alert, _ = stock_p99(every | {"≥32k": 30.0})
    assert alert
    assert ">= 40.0" in alert["expr"]
    for part in (
        "the loosest limit",
        "class ≥32k",
        "No bucket of vLLM ends at the objective of 30 s",
        "40 s",
    ):
        assert part in alert["annotations"]["description"]
    # One class without an objective may take as long as it likes, and nobody could tell its requests apart.
    alert, text = stock_p99({k: v for k, v in every.items() if k != "<8k"})
    assert alert is None
    assert "class <8k has no objective" in text
    alert, _ = stock_p99({"<512": 5.0, "all": 10.0})
    assert alert
    assert ">= 10.0" in alert["expr"]
    assert "loosest" not in alert["annotations"]["description"]
    assert "No bucket" not in alert["annotations"]["description"]
    alert, text = stock_p99(every, attributes=config.Attributes(klass="acme.class"))
    assert alert is None
    assert "acme.class" in text


def test_a_limit_above_all_buckets_is_told() -> None:
    alert, text = stock_p99({"all": 9000.0})
    assert alert is None
    assert "vLLM's last bucket ends at 2560 s" in text


def test_without_objectives_the_rest_is_made() -> None:
    text = render(config.Config(), RULES, Wanted())
    assert "# Left out: no [slo.CLASS] in the configuration" in text
    names = set(alerts_of(text))
    assert "TailscopePreemptionStorm" in names
    assert not {n for n in names if "Objective" in n or "Budget" in n}


@given(st.text(min_size=1, max_size=30))
@example("$0 $limit")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_name_of_a_class_stays_a_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        return  # no TOML holds it
    slos = (config.Slo(name, "TTFT", "p99", 2.0),)
    text = render(config.Config(slos=slos), RULES, Wanted())
    labels = {
        r["labels"]["class"] for r in rules_of(text) if r.get("record") == "tailscope:slo_limit_seconds"
    }
    assert labels == {name}
    assert [a["labels"]["metric"] for a in alerts_of(text)["TailscopeP99AboveObjective"]] == ["ttft"]
    stock = render(config.Config(slos=slos, classes=(config.RequestClass(name),)), RULES, Wanted((0, 33)))
    comments = [line for line in stock.splitlines() if line.startswith("#")]
    assert stock.splitlines()[len(comments)] == "groups:"


# -- the command -------------------------------------------------------------------------------------


def test_the_command_writes_a_file_and_prints(tmp_path: Path) -> None:
    runner = CliRunner()
    path = tmp_path / "rules.yaml"
    toml = str(CASES / "tailscope.toml")
    done = runner.invoke(app, ["alerts", "--config", toml, "-o", str(path), "--trace", "/data/my trace"])
    assert done.exit_code == 0, done.output
    assert "tailscope diagnose '/data/my trace' --last 15m" in path.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["rules.yaml"]
    printed = runner.invoke(app, ["alerts", "--config", toml, "--stock", "--vllm-version", "v0.12.0"])
    assert yaml.safe_load(printed.stdout)["groups"]
    assert "vLLM 0.12.0" in printed.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--vllm-version", "0.12"], "goes with --stock"),
        (["--stock", "--vllm-version", "newest"], "write it as 0.33"),
        (["--stock", "--vllm-version", "0.7.3"], "known from 0.8 on"),
        (["--dashboard-url", "grafana/d/x"], "write it as https://"),
        (["-o", "no/such/folder/rules.yaml"], "cannot be written"),
        (["--config", "no-such.toml"], "cannot read the configuration"),
    ],
)
def test_a_mistake_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["alerts", *args])
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)


def test_the_configuration_of_the_cases_is_as_it_says() -> None:
    raw = tomllib.loads((CASES / "tailscope.toml").read_text(encoding="utf-8"))
    assert any("{{" in name for name in raw["slo"])
