"""`tailscope sim`: a scenario in, a trace, raw files and the truth out; what is wrong is said in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest
from real import ROOT
from typer.testing import CliRunner

from tailscope.cli import app
from tailscope.errors import UsageError

SCENARIOS = sorted((ROOT / "examples" / "scenarios").glob("*.toml"))
SMALL = """
duration_s = 20
[engine]
kv_blocks = 200
max_model_len = 2048
[[load]]
name = "chat"
rate = 6
timeout_s = 1
[[load]]
name = "long"
rate = 0.3
prompt_tokens = { median = 1500, sigma = 0.1, most = 1800 }
[[cause]]
rule = "preemption-storm"
without = { engine = { kv_blocks = 20000 } }
"""


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.output


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda p: p.stem)
def test_the_shipped_scenarios_are_diagnosed_as_they_say(path: Path, tmp_path: Path) -> None:
    status, output = run("sim", path, "-o", tmp_path / "t.parquet", "--truth", tmp_path / "truth")
    assert status == 0, output
    truth = json.loads((tmp_path / "truth" / "truth.json").read_bytes())
    _, text = run("diagnose", tmp_path / "t.parquet", "--format", "json")
    found = [f for f in json.loads(text)["findings"] if f["status"] == "found"]
    assert [f["rule"] for f in found] == [cause["rule"] for cause in truth["causes"]]
    for cause, finding in zip(truth["causes"], found, strict=True):
        if cause["culprit"]:
            assert f"{finding['culprit']['kind']}:{finding['culprit']['id']}" == cause["culprit"]
        worst = max(p["with"] / p["without"] for load in cause["p99_s"].values() for p in load.values())
        assert worst > 1.2, "it costs what the scenario promises"


def test_the_truth_holds_every_request(scenario: Path, tmp_path: Path) -> None:
    status, output = run("sim", scenario, "--truth", tmp_path / "truth", "--raw", tmp_path / "raw")
    assert status == 0, output
    rows = (
        duckdb.connect()
        .execute(
            f"""
        SELECT r.status, r.finished_ns - r.arrival_ns AS measured_ns, b.ns
        FROM '{tmp_path}/truth/requests.parquet' r
        LEFT JOIN (SELECT request_id, sum(ns) AS ns FROM '{tmp_path}/truth/bills.parquet' GROUP BY ALL) b USING (request_id)
        """
        )
        .fetchall()
    )
    assert {status for status, _, _ in rows} == {"ok", "timeout"}
    for status, measured_ns, ns in rows:
        assert (measured_ns is None) == (ns is None) and (
            status == "timeout" or abs(measured_ns - ns) < 50
        ), "rounding"
    assert {path.name for path in (tmp_path / "raw" / "vllm-0").iterdir()} >= {
        "client.jsonl",
        "metrics.txt",
        "server.log",
    }


def test_the_same_seed_gives_the_same_files(scenario: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run("sim", scenario, "--raw", tmp_path / name, "--seed", seed)[0] == 0

    def content(name: str) -> dict[str, bytes]:
        return {
            str(p.relative_to(tmp_path / name)): p.read_bytes()
            for p in (tmp_path / name).rglob("*")
            if p.is_file()
        }

    assert content("a") == content("b") != content("c")


def test_bad_calls_are_one_sentence(scenario: Path, tmp_path: Path) -> None:
    def call(*arguments: object) -> str:
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert isinstance(result.exception, UsageError) and result.exception.exit_code == 2
        return str(result.exception)

    assert "nothing to write" in call("sim", scenario)
    assert "is there already" in call("sim", scenario, "-o", tmp_path)
    assert "no-such.toml" in call("sim", tmp_path / "no-such.toml", "-o", tmp_path / "t")
    scenario.write_text("[[load]]\nname = 'a'\nrat = 3\n", encoding="utf-8")
    assert "did you mean rate" in call("sim", scenario, "-o", tmp_path / "t")
    assert not (tmp_path / "t").exists()
