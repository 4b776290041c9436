"""The commands as a user calls them: what they print, and with which status they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import rank_worlds
from called import called
from real import CAPTURES, EXAMPLE, needs_captures

from tailscope import registry
from tailscope.render.as_json import schema


def tailscope(*args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "tailscope", *map(str, args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "140"},
        check=False,
    )


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "trace.parquet"
    done = tailscope("ingest", EXAMPLE, "-o", path)
    assert done.returncode == 0, done.stderr
    return path


def test_ingest_accounts_for_every_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, content in {
        "empty.json": "",
        "notes.txt": "hello",
        "spans.json": '{"resourceSpans": []}',
        "evil\x1b[31m.bin": "\x00\x01\x02",
    }.items():
        (tmp_path / "in" / name).write_text(content)
    (tmp_path / "in" / "client.jsonl").write_bytes(
        subprocess.check_output(["gzip", "-dc", EXAMPLE / "client.jsonl.gz"])
    )
    done = tailscope("ingest", tmp_path / "in", "-o", tmp_path / "t.parquet")
    assert done.returncode == 0, done.stderr
    assert "skipped, empty: empty.json" in done.stdout
    assert "notes.txt" in done.stdout
    assert "223 requests, 23,594 tokens" in done.stdout
    assert "\x1b" not in done.stdout
    again = called("ingest", tmp_path / "in", "-o", tmp_path / "t.parquet")
    assert again.returncode == 0
    assert "already in the trace" in again.stdout
    assert "0 rows of 0 file(s) added" in again.stdout


def test_ingest_takes_relative_and_absolute_paths_together(tmp_path: Path) -> None:
    for name in ("one.log", "two.log"):
        text = f"[2026-11-29 14:39:01 TP0] [EPLBManager] rebalance start\n{name}\n"
        (tmp_path / name).write_text(text)
    done = called("ingest", "one.log", tmp_path / "two.log", "-o", "trace.parquet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # Names are cut where lines are too short for them.
    assert "of 2 file(s) added" in done.stdout


def test_ingest_of_no_telemetry_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    done = tailscope("ingest", tmp_path / "notes.txt", "-o", tmp_path / "t.parquet")
    assert done.returncode == 2
    assert "nothing was ingested" in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["diagnose", "no-such.parquet"], "no such trace"),
        (["ingest", "no-such-folder"], "no such file or folder"),
        (["diagnose", "TRACE", "--slo", "nonsense"], "write CLASS:METRIC=SECONDS"),
        (["diagnose", "TRACE", "--from", "yesterday"], "write it as 2026-"),
        (["diagnose", "TRACE", "--last", "5 weeks"], "write 30s, 15m, 2h or 1d"),
        (["diagnose", "TRACE", "--last", "5m", "--from", "2026-11-29"], "--last goes without"),
        (["diagnose", "TRACE", "--instance", "nobody"], "not in the trace"),
        (["diagnose", "TRACE", "--config", "no-such.toml"], "cannot read the configuration"),
        (["diagnose", "TRACE", "--memory-limit", "lots"], "--memory-limit"),
        (["rules", "no-such-rule"], "rules are coincident-release, dp-coupling"),
        (["query", "TRACE", "DROP TABLE requests"], "SELECT"),
        (["query", "TRACE", "SELECT nothing FROM requests"], "nothing"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(
    trace: Path, tmp_path: Path, args: list[str], message: str
) -> None:
    done = called(*[str(trace) if a == "TRACE" else a for a in args], cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_diagnose_prints_the_findings_and_says_what_to_change(trace: Path) -> None:
    done = tailscope("diagnose", trace)
    assert done.returncode == 0
    out = done.stdout
    assert out.startswith("FOUND  ")
    positions = [
        out.index(part) for part in ("HIGH  KV cache ran out", "HIGH  Requests of class <512 wait behind")
    ]
    assert positions == sorted(positions)
    for part in ("--max-num-batched-tokens", "--max-num-seqs", "3 aborted", "evidence", "against", "confirm"):
        assert part in out


def test_json_keeps_its_schema(trace: Path) -> None:
    done = called("diagnose", trace, "--format", "json")
    document = json.loads(done.stdout)
    jsonschema.validate(document, schema())
    assert document["verdict"]["status"] == "found"
    assert [f["rule"] for f in document["findings"]][:2] == ["preemption-storm", "hol-coupling"]
    assert {c["rule"] for c in document["checks"]} == {rule.name for rule, _ in registry.rules()}


def test_fail_on(trace: Path) -> None:
    assert tailscope("diagnose", trace, "--fail-on", "high").returncode == 3
    quiet = ("--from", "2026-11-29T14:42:30", "--fail-on", "low")
    assert called("diagnose", trace, *quiet).returncode == 0


def test_last_counts_from_the_end_of_the_trace(trace: Path) -> None:
    done = called("diagnose", trace, "--last", "30s", "--format", "json")
    document = json.loads(done.stdout)
    assert document["trace"]["first_ns"] >= 1_795_963_360_000_000_000
    assert document["findings"] == []


def test_query(trace: Path) -> None:
    done = called(
        "query",
        trace,
        "SELECT status, count(*) AS n FROM requests GROUP BY ALL ORDER BY n DESC",
        "--format",
        "csv",
    )
    assert done.stdout.splitlines()[:2] == ['"status","n"', '"ok",775']


def test_rules_lists_and_explains() -> None:
    listed = called("rules")
    assert "hol-coupling" in listed.stdout
    explained = called("rules", "preemption-storm")
    assert "why it hurts" in explained.stdout
    assert "--max-num-seqs" in explained.stdout


def test_version_and_help() -> None:
    assert tailscope("--version").stdout.strip()
    shown = called("--help")
    assert shown.returncode == 0
    for command in ("ingest", "diagnose", "query", "rules", "demo"):
        assert command in shown.stdout


def test_demo_prints_a_diagnosis_from_anywhere(tmp_path: Path) -> None:
    done = tailscope("demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "259 requests" in done.stdout
    assert "HIGH  Requests of class <512 wait behind the prefill of class <8k" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_output_that_the_locale_cannot_encode_is_escaped(trace: Path) -> None:
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    for format in ("text", "json"):
        command = [sys.executable, "-P", "-m", "tailscope", "diagnose", str(trace), "--format", format]
        done = subprocess.run(command, capture_output=True, env=env, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()


def test_a_part_damaged_inside_is_one_message(tmp_path: Path) -> None:
    trace = tmp_path / "t.parquet"
    assert called("ingest", EXAMPLE / "client.jsonl.gz", "-o", trace).returncode == 0
    (part,) = trace.glob("tokens/*.parquet")
    content = bytearray(part.read_bytes())
    content[200:20_000] = bytes(19_800)
    part.write_bytes(content)
    done = tailscope("diagnose", trace)
    assert done.returncode == 2
    assert "A part of the trace is damaged" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_memory_limit_that_is_too_small_does_not_blame_the_data(trace: Path) -> None:
    for limit in ("1KB", "20MB"):
        done = called("diagnose", trace, "--memory-limit", limit)
        assert done.returncode == 2
        assert "too small" in done.stderr
        assert "damaged" not in done.stderr


def test_whatif_says_what_steps_would_take(tmp_path: Path) -> None:
    world = rank_worlds.World(name="[red]w", slow=(rank_worlds.Slow(1, 3.0),))
    path = rank_worlds.write(tmp_path / "t.parquet", world)
    shown = tailscope("whatif", path)
    assert shown.returncode == 0, shown.stderr
    assert "[red]w: 10 steps of 4 ranks" in shown.stdout
    assert "rank 1 as the others" in shown.stdout
    document = json.loads(called("whatif", path, "--format", "json").stdout)
    [window] = document["windows"]
    by_rank = {o["rank"]: o["saved"] for o in window["otherwise"] if o["scenario"] == "without rank"}
    assert max(by_rank, key=lambda rank: by_rank[rank]) == 1
    assert by_rank[1] > 0.3
    assert sum(p["share"] for p in window["path"]) == pytest.approx(1.0, abs=1e-6)


@needs_captures
def test_whatif_of_a_real_slow_rank_gives_the_steps_that_it_had_before(tmp_path: Path) -> None:
    """Rank 1 spins in the second window. Without its lateness the gaps between tokens are what they were in the first."""
    called("ingest", CAPTURES / "vllm-cpu" / "run3-moe-dp2-ep2-patched", "-o", tmp_path / "t.parquet")
    document = json.loads(called("whatif", tmp_path / "t.parquet", "--format", "json").stdout)
    clean, slow = document["windows"]
    [without] = [o for o in slow["otherwise"] if o["rank"] == 1]
    [gaps] = without["gaps"]
    before = clean["otherwise"][0]["gaps"][0]["p50_s"]
    assert gaps["p50_s"] > 2 * before
    assert gaps["p50_without_s"] == pytest.approx(before, rel=0.15)
    assert gaps["p99_s"] is None


def test_whatif_without_profiles_says_what_it_needs(trace: Path) -> None:
    shown = called("whatif", trace)
    assert shown.returncode == 0
    assert "torch profiler traces of all ranks" in shown.stdout
