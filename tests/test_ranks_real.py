"""Ranks against each other on real profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rank_worlds import MS, US, said
from real import CAPTURES, CORPUS, needs_captures, needs_corpus

from tailscope import registry
from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.ingest import ingest
from tailscope.model import Diagnosis, Finding
from tailscope.source import Options
from tailscope.store import Trace

RULE = next(rule for rule, _ in registry.rules() if rule.name == "straggler-rank")


@dataclass(frozen=True)
class Read:
    """A folder of real files, ingested and diagnosed."""

    diagnosis: Diagnosis
    rows: Callable[[str], list[dict[str, Any]]]

    def findings(self) -> list[Finding]:
        return [f for f in self.diagnosis.findings if f.rule == RULE.name]

    def status(self) -> tuple[str, str]:
        [found] = [(c.status, c.reason) for c in self.diagnosis.checks if c.rule == RULE.name]
        return found

    def trust(self, check: str) -> list[tuple[str, str]]:
        return [(t.status, t.detail) for t in self.diagnosis.trust if t.check == check]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Read]]:
    """Each folder is read once."""
    done: dict[Path, Read] = {}
    with ExitStack() as stack:

        def of(folder: Path) -> Read:
            if folder not in done:
                path = tmp_path_factory.mktemp("real") / "trace.parquet"
                ingest([folder], path, config=Config(), options=Options())
                trace = stack.enter_context(Trace(path))
                done[folder] = Read(diagnose(trace, Config()), trace.rows)
            return done[folder]

        yield of


VLLM = CAPTURES / "vllm-cpu"
#: The second profile of each of these runs is of a time in which rank 1 had less CPU.
TP2, EP2 = VLLM / "run2-moe-tp2", VLLM / "run3-moe-dp2-ep2-patched"


@needs_captures
def test_a_slowed_tensor_parallel_rank_is_named_in_its_window_alone(read: Callable[[Path], Read]) -> None:
    of = read(TP2)
    [found] = of.findings()
    assert (found.severity, found.basis, said(found)) == (
        "high",
        "measured",
        ("1", "persistent", "work in no single phase"),
    )
    assert [victim.id for victim in found.victims if victim.kind == "rank"] == ["0"]
    assert found.evidence[0].data["lead_steps"] == found.evidence[0].data["steps"] == 12
    assert found.evidence[1].data["slowdown"] == pytest.approx(1.86, abs=0.02)
    [second] = of.rows(
        'SELECT min(first_ns) AS low, max(last_ns) AS high FROM rank_windows WHERE "window" = 1'
    )
    assert found.window_ns == (second["low"], second["high"])
    assert of.rows("SELECT sum(unmatched)::BIGINT AS n FROM rank_windows") == [{"n": 0}]


@needs_captures
def test_a_slowed_expert_parallel_rank_is_named_with_its_experts(read: Callable[[Path], Read]) -> None:
    of = read(EP2)
    found, ordinary = of.findings()
    assert (found.severity, said(found)) == ("high", ("1", "persistent", "expert compute of 4 layers"))
    assert found.victims[0].detail["waits_in"] == "combine"
    assert found.evidence[1].data["slowdown"] == pytest.approx(2.02, abs=0.02)
    windows = of.rows(
        'SELECT "window", min(first_ns) AS low FROM rank_windows GROUP BY "window" ORDER BY "window"'
    )
    assert [f.window_ns and f.window_ns[0] for f in (ordinary, found)] == [w["low"] for w in windows]
    # Two ranks never do quite the same: in the first window they differ by a quarter.
    assert (ordinary.severity, said(ordinary)[2]) == ("low", "work in no single phase")
    assert ordinary.counter_evidence[0].data["slowdown"] == pytest.approx(1.24, abs=0.02)
    assert of.rows("SELECT sum(unmatched)::BIGINT AS n FROM rank_windows") == [{"n": 0}]


@needs_captures
@pytest.mark.parametrize("run", ["run1-dense-mixed", "run5-dense-ngram-spec"])
def test_a_lone_rank_has_nobody_to_wait_for(read: Callable[[Path], Read], run: str) -> None:
    assert read(VLLM / run / "profile").status() == ("clear", "one rank: nobody to wait for")


@needs_captures
def test_experts_slow_in_two_steps_are_found_without_blaming_their_load(read: Callable[[Path], Read]) -> None:
    of = read(CAPTURES / "torch-gloo-moe" / "slow")
    [found] = of.findings()
    assert said(found) == ("2", "transient", "expert compute of layer 1")
    assert {victim.id for victim in found.victims} == {"0", "1", "3"}
    assert found.evidence[0].data["steps"] == [2, 5]
    assert found.evidence[0].data["work_ns"] > 8 * found.evidence[0].data["others_ns"]
    assert found.evidence[-1].text.endswith("load is no cause")
    assert of.rows("SELECT max(unmatched) AS n FROM rank_windows") == [{"n": 0}]


@needs_corpus
def test_late_arrival_in_one_step_of_eight_gpus_is_measured_and_not_judged(
    read: Callable[[Path], Read],
) -> None:
    of = read(CORPUS / "param" / "dlrm_8ranks")
    assert of.status()[0] == "inconclusive"
    assert of.findings() == []
    rows = of.rows(
        "SELECT min(start_ns) AS first_ns, arg_max(rank, start_ns) AS last, max(rank) FILTER (WHERE is_last) AS told, "
        "max(start_ns) - min(start_ns) AS starts_ns, max(end_ns) - min(end_ns) AS ends_ns, max(wait_ns) AS wait_ns, "
        'count(*) AS ranks FROM rank_rounds GROUP BY "group", round ORDER BY first_ns'
    )
    assert [row["last"] for row in rows] == [row["told"] for row in rows] == [7, 7, 7, 7, 7, 5, 5, 4]
    assert {row["ranks"] for row in rows} == {8}
    assert rows[0]["starts_ns"] == rows[0]["wait_ns"] == pytest.approx(7_624 * US, abs=3 * US)
    assert rows[0]["ends_ns"] <= 3 * US
    [clocks] = of.rows("SELECT max(error_ns) AS error_ns FROM rank_clocks")
    # Five of the eight are exchanges, whose ends need not agree: the clocks are known by what is possible.
    assert clocks["error_ns"] < 150 * US


@needs_corpus
def test_two_of_128_ranks_decide_nothing_and_that_is_said(read: Callable[[Path], Read]) -> None:
    of = read(CORPUS / "hta" / "trace_filter")
    assert of.status() == (
        "inconclusive",
        "profiles of 2 of 128 ranks: the one that is waited for may be among the others",
    )
    assert of.findings() == []
    [(level, detail)] = of.trust("rank-coverage")
    assert level == "warn"
    assert "126 of 128" in detail


@needs_corpus
def test_one_of_300_ranks_decides_nothing(read: Callable[[Path], Read]) -> None:
    of = read(CORPUS / "hta" / "cpu_only")
    assert of.status()[0] == "inconclusive"
    assert "1 of 300 ranks" in of.status()[1]
    assert [detail[:12] for _, detail in of.trust("rank-coverage")] == ["1 of 1 profi", "1 profile(s)"]


@needs_captures
def test_waiting_for_a_rank_is_part_of_the_bill(read: Callable[[Path], Read]) -> None:
    of = read(EP2)
    found, ordinary = of.findings()
    assert (found.severity, said(found)) == ("high", ("1", "persistent", "expert compute of 4 layers"))
    assert ordinary.severity == "low"
    [ttft] = [
        row
        for row in of.diagnosis.classes
        if (row.klass, row.metric, row.observer) == ("<512", "TTFT", "engine")
    ]
    assert ttft.excess["straggler_wait"] > 0.3 * (ttft.excess_s or 0.0)
    # Both windows' late rank is paid by the same tail, each for its part.
    shares = [f.share_of_tail or 0.0 for f in (found, ordinary)]
    assert sum(shares) == pytest.approx(ttft.excess["straggler_wait"] / (ttft.excess_s or 1.0), rel=0.1)
    assert sum(shares) < ttft.excess["straggler_wait"] / (ttft.excess_s or 1.0)
    assert [(v.kind, v.id) for v in found.victims] == [("rank", "0"), ("class", "<512")]


@needs_captures
def test_steps_stopped_by_the_profiler_are_nobodys_fault(read: Callable[[Path], Read]) -> None:
    of = read(TP2)
    [found] = of.findings()
    assert (found.severity, said(found)[:2]) == ("high", ("1", "persistent"))
    longest = of.rows(
        "SELECT s.iteration, s.tile_ns, p.reason FROM steps s LEFT JOIN pauses p USING (k) ORDER BY s.tile_ns DESC LIMIT 4"
    )
    assert [row["iteration"] for row in longest] == [142, 0, 77, 196]
    assert all(row["tile_ns"] > 2_500 * MS for row in longest)
    assert all(
        word in row["reason"]
        for row, word in zip(
            longest, ("writes its files", "first batch", "profiler", "profiler"), strict=True
        )
    )
    [e2e] = [
        row
        for row in of.diagnosis.classes
        if (row.klass, row.metric, row.observer) == ("<512", "E2E", "engine")
    ]
    assert e2e.excess["pause"] > 0.9 * (e2e.excess_s or 0.0)
    assert abs(e2e.excess["unexplained"]) < 0.05 * (e2e.excess_s or 0.0)
