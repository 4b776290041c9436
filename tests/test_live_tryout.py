"""The try-out, whole and hurried: a fleet that plays against the clock, `tailscope serve` and, where installed, Prometheus."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailscope import alerts, registry
from tailscope import config as configuration
from tailscope.errors import UsageError
from tailscope.examples.live import parts, tryout
from tailscope.sim.scenario import Scenario
from tailscope.sim.scenario_file import parse

CULPRIT, VICTIM = "class:legal-documents", "class:interactive"
LIMIT_S = 0.2


#: A fleet that plays against the clock takes minutes, and says little on a machine that does other things beside.
against_the_clock = pytest.mark.skipif(
    not os.environ.get("TAILSCOPE_TRYOUT"),
    reason="plays against the clock for minutes: set TAILSCOPE_TRYOUT=1",
)


def world(name: str, from_s: float, to_s: float, over_s: float) -> Scenario:
    """A scenario of the try-out, in less time."""
    path = tryout.HERE / name
    document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    document["duration_s"] = over_s
    for load in document["load"]:
        if "from_s" in load:
            load["from_s"], load["to_s"] = from_s, to_s
    return parse(document, path.parent, name)


def play(scenario: Scenario, window: str = "30s", **more: Any) -> tuple[tryout.Seen, list[str]]:
    said: list[str] = []
    folders = set(Path(tempfile.gettempdir()).glob("tailscope-live-*"))
    seen = asyncio.run(tryout.run(scenario, said.append, window=window, every="2s", **more))
    assert seen is not None
    assert set(Path(tempfile.gettempdir()).glob("tailscope-live-*")) <= folders
    return seen, said


def opened(seen: tryout.Seen) -> bool:
    return seen.first("opened", CULPRIT) is not None


@against_the_clock
def test_the_finding_names_who_was_injected() -> None:
    scenario = world(tryout.NOISY, 12.0, 100.0, 110.0)
    seen, said = play(scenario, prometheus=None, enough=opened)
    found = [change for change in seen.changes if change["change"] == "opened"]
    assert [(change["culprit"], change["victim"]) for change in found] == [(CULPRIT, VICTIM)], said
    assert found[0]["at_s"] > seen.began_s
    assert "class legal-documents" in found[0]["title"]
    before, during = seen.p99["before"]["interactive"][0], seen.p99["during"]["interactive"][0]
    assert before < LIMIT_S < during
    assert any("Prometheus  is not installed" in line for line in said)


@against_the_clock
def test_a_neighbour_who_is_busy_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tryout, "QUIET_S", 5.0)
    scenario = world(tryout.HEALTHY, 10.0, 30.0, 45.0)
    seen, said = play(scenario, prometheus=None)
    assert seen.changes == []
    assert seen.p99["during"]["interactive"][0] < LIMIT_S
    assert tryout.verdict(scenario, seen, said.append)


@against_the_clock
@pytest.mark.prometheus
@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed")
def test_the_alert_fires_and_the_finding_closes_when_the_neighbour_stops() -> None:
    scenario = world(tryout.NOISY, 10.0, 45.0, 150.0)
    seen, said = play(scenario)
    assert [change["change"] for change in seen.changes] == ["opened", "closed"], said
    states = [(name, what, state) for _, name, what, state in seen.alerts]
    what = "class interactive, metric ttft"
    pending = states.index(("TailscopeP99AboveObjective", what, "pending"))
    assert states.index(("TailscopeP99AboveObjective", what, "firing")) > pending
    assert {name for name, _, _ in states} == {"TailscopeP99AboveObjective"}, said
    assert tryout.verdict(scenario, seen, said.append)


@pytest.mark.parametrize("name", [tryout.NOISY, tryout.HEALTHY])
def test_decoy_and_fault_differ_in_the_neighbour_alone(name: str) -> None:
    document = tomllib.loads((tryout.HERE / name).read_text(encoding="utf-8"))
    fault = tomllib.loads((tryout.HERE / tryout.NOISY).read_text(encoding="utf-8"))
    for key in ("engine", "telemetry", "duration_s", "seed"):
        assert document[key] == fault[key]
    assert document["load"][:-1] == fault["load"][:-1]


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found += [int(path.parent.name), *children(int(path.parent.name))]
    return found


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tailscope", "demo", "--live"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "the fleet runs" in line:
                break
        started = children(process.pid)
        assert len(started) >= 3
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # whoever is impatient
        rest = process.stdout.read()
        assert process.wait(30) == 0, rest
    finally:
        process.kill()
        process.wait()
    assert "stopping" in rest
    assert list(tmp_path.iterdir()) == []
    # Python's own tracker of shared memory ends a moment after the process it is for.
    for _ in range(50):
        if not (left := [pid for pid in started if Path(f"/proc/{pid}").exists()]):
            break
        time.sleep(0.1)
    assert not left


# -- parts -----------------------------------------------------------------------------------------


def test_rules_are_those_of_alerts_but_quicker() -> None:
    settings = configuration.load(tryout.HERE / tryout.CONFIG)
    made = yaml.safe_load(alerts.render(settings, [rule for rule, _ in registry.rules()], alerts.Wanted()))
    quick = parts.quickened(made)

    def of(rules: Mapping[str, Any]) -> dict[str, Any]:
        return {
            f"{rule.get('alert', rule.get('record'))} {rule.get('labels')}": rule
            for group in rules["groups"]
            for rule in group["rules"]
        }

    slow, fast = of(made), of(quick)
    assert {re.sub(r" .*", "", name) for name in slow.keys() - fast.keys()} == {"TailscopeP99BudgetBurn"}
    for name, rule in fast.items():
        assert rule.get("for", parts.HOLD) == parts.HOLD
        expr = rule["expr"].replace(f"{parts.SCRAPE_S} * sum", "60 * sum")
        assert {**rule, "expr": expr, "for": None} == {**slow[name], "for": None}


def test_p99_is_what_prometheus_would_say() -> None:
    before = {"a": {0.1: 5.0, 0.2: 5.0, float("inf"): 5.0}}
    after = {
        "a": {0.1: 95.0, 0.2: 105.0, float("inf"): 105.0},
        "slow": {0.1: 0.0, 0.2: 0.0, float("inf"): 3.0},
        "none": {0.1: 0.0, float("inf"): 0.0},
    }
    found = parts.p99s(before, after)
    assert found["a"] == (pytest.approx(0.19), 100)
    assert found["slow"] == (0.2, 3)
    assert "none" not in found


def test_a_scenario_without_a_neighbour_is_none(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('[[load]]\nname = "a"\n')
    with pytest.raises(UsageError, match="needs a \\[\\[load\\]\\] with from_s"):
        tryout.main(path, False, False, print)


def test_serve_that_does_not_start_is_told(tmp_path: Path) -> None:
    async def start() -> None:
        command = [sys.executable, "-c", "raise SystemExit('cannot listen')"]
        async with parts.running(command, tmp_path / "serve.log") as process:
            await parts.said(process, tmp_path / "serve.log", r"on (\S+)")

    with pytest.raises(Exception, match="serve did not start: cannot listen"):
        asyncio.run(start())
