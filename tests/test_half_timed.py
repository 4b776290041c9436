"""Request logs that know one of TTFT and E2E, or neither: what is said of them, and what they lack."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tailscope import mapping
from tailscope.align import Scope
from tailscope.compare.read import read
from tailscope.config import Config, parse
from tailscope.engine import diagnose
from tailscope.ingest import ingest
from tailscope.model import Diagnosis
from tailscope.source import Options
from tailscope.store import Trace

TOLD = {
    "arrival": ("startedAt", "iso8601"),
    "ttft": ("firstTokenMs", "ms"),
    "e2e": ("totalMs", "ms"),
    "queue": ("waitedMs", "ms"),
    "prefill": ("prefillMs", "ms"),
    "prompt_tokens": ("promptTokens", None),
    "output_tokens": ("completionTokens", None),
}
BOTH = "arrival prompt_tokens output_tokens"


def written(rows: list[dict[str, str]], place: Path) -> Path:
    with place.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return place


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log that ships, with a queue of a quarter of each TTFT and a prefill of the rest."""
    place = tmp_path_factory.mktemp("log") / "requests.csv"
    with (Path(__file__).parent.parent / "examples/request-log/requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        ttft = float(row["firstTokenMs"])
        row |= {"waitedMs": str(ttft / 4), "prefillMs": str(ttft * 3 / 4)}
    return written(rows, place)


def diagnosed(log: Path, folder: Path, columns: str, config: Config | None = None) -> Diagnosis:
    told = {
        name: {"column": column, "unit": unit} if unit else column
        for name, (column, unit) in TOLD.items()
        if name in columns.split()
    }
    options = Options(mapping=mapping.parse({"columns": told}))
    ingest([log], folder / "t.parquet", config=Config(), options=options)
    with Trace(folder / "t.parquet") as trace:
        return diagnose(trace, config or Config())


@pytest.mark.parametrize(("known", "lacking"), [("e2e", "a TTFT"), ("ttft", "an E2E")])
def test_one_of_two_is_used_and_the_other_named(log: Path, tmp_path: Path, known: str, lacking: str) -> None:
    found = diagnosed(log, tmp_path, f"{BOTH} {known}")
    rows = {row.klass: row for row in found.classes}
    assert {row.metric for row in found.classes} == {known.upper()}
    assert (rows["<512"].n, rows["<32k"].n) == (896, 42)
    assert rows["<512"].excess_s == pytest.approx(sum(rows["<512"].excess.values()))
    assert f"No request has {lacking}" in found.missing[0]
    assert "too few" not in found.verdict.text
    [coupling] = [f for f in found.findings if f.rule == "hol-coupling"]
    assert coupling.victims[0].detail["metric"] == known.upper()
    assert {entry["metric"] for entry in found.trace["class_times"]} == {known.upper()}
    [quality] = [t for t in found.trust if t.check == "input-quality"]
    assert quality.status == "warn", "what is there was used"


def test_e2e_alone_says_what_it_lacks(log: Path, tmp_path: Path) -> None:
    config = parse({"slo": {"all": {"e2e_p95_s": 1.0, "ttft_p95_s": 1.0}}})
    found = diagnosed(log, tmp_path, "arrival e2e", config)
    assert found.verdict.status == "inconclusive"
    assert "No request has a TTFT" in found.verdict.text
    [everyone] = found.trace["attainment"]
    assert everyone["not_measured"] == ["TTFT"]
    assert {check.rule: check.status for check in found.checks}["hol-coupling"] == "no-data"


def test_no_latency_at_all(log: Path, tmp_path: Path) -> None:
    found = diagnosed(log, tmp_path, BOTH)
    assert found.verdict.text == (
        "938 requests, 0 failed: no request has a TTFT or an E2E, so nothing can be said of latency."
    )


def test_queue_beside_e2e_is_booked(log: Path, tmp_path: Path) -> None:
    found = diagnosed(log, tmp_path, f"{BOTH} e2e queue")
    [row] = [row for row in found.classes if (row.klass, row.metric) == ("<512", "E2E")]
    assert row.excess["queue"] > 0.1 and row.excess["unexplained"] > 1
    assert ("<512", "queue") in {(row.klass, row.metric) for row in found.classes}


def test_queue_and_prefill_make_a_ttft(log: Path, tmp_path: Path) -> None:
    found = diagnosed(log, tmp_path, f"{BOTH} e2e queue prefill")
    [row] = [row for row in found.classes if (row.klass, row.metric) == ("<512", "TTFT")]
    assert row.p50_s == pytest.approx(0.0282, abs=1e-4)


def blanked(log: Path, folder: Path, column_of: Mapping[int, str]) -> Path:
    """The log without a column in each third row, each third but one, each third but two."""
    place = folder / "blanked.csv"
    with log.open() as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows):
        if number % 3 in column_of:
            row[column_of[number % 3]] = ""
    return written(rows, place)


def test_a_comparison_counts_whom_a_diagnosis_counts(log: Path, tmp_path: Path) -> None:
    """Where most of a class have both, those with one of them are none of it."""
    some = blanked(log, tmp_path, {0: "firstTokenMs"})
    found = diagnosed(some, tmp_path, f"{BOTH} ttft e2e")
    with Trace(tmp_path / "t.parquet") as trace:
        side = read(trace, Config(), Scope())
    counted = {(r.klass, r.metric): r.n for r in found.classes if r.metric in ("TTFT", "E2E")}
    assert counted == {
        (klass, metric): int(np.isfinite(side.requests.metric(metric)[side.requests.klass == klass]).sum())
        for klass, metric in counted
    }
    assert sum(counted.values()) < 2 * 938 * 0.7


@pytest.mark.parametrize(("rarer", "metric"), [("firstTokenMs", "E2E"), ("totalMs", "TTFT")])
def test_coupling_is_of_one_metric(log: Path, tmp_path: Path, rarer: str, metric: str) -> None:
    """Of a class of which some have a TTFT alone, and some an E2E alone, the more are held against each other."""
    commoner = {"firstTokenMs": "totalMs", "totalMs": "firstTokenMs"}[rarer]
    diagnosed(blanked(log, tmp_path, {0: rarer, 1: rarer, 2: commoner}), tmp_path, f"{BOTH} ttft e2e")
    with Trace(tmp_path / "t.parquet") as trace:
        diagnose(trace, Config())
        [row] = trace.rows("SELECT * FROM coupling WHERE victim = '<512' AND culprit = '<32k'")
        [counts] = trace.rows(
            'SELECT count(*) FILTER (WHERE ttft_ns IS NOT NULL) AS "TTFT", count(*) FILTER (WHERE e2e_ns IS NOT NULL) AS "E2E" '
            "FROM joined WHERE klass = '<512'"
        )
    assert row["n"] == counts[metric] == max(counts.values()) < sum(counts.values())
