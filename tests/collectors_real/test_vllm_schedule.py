"""The schedule of a real vLLM (0.32, on a CPU): 104 requests of mixed lengths, ten of them preempted, two aborted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real import CAPTURES, needs_captures

from tailscope import registry
from tailscope.align import Scope, align
from tailscope.config import Config
from tailscope.ingest import ingest
from tailscope.source import Options, Source
from tailscope.store import Trace

CAPTURE = Path(__file__).parent.parent / "captures" / "scheduled"
SCHEDULE = next(c for c in registry.collectors() if c.name == "vllm_schedule")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    place = tmp_path_factory.mktemp("scheduled") / "trace"
    for outcome in ingest([CAPTURE], place, config=Config(), options=Options()):
        assert not outcome.tally.rejected and not outcome.tally.blanked
    with Trace(place) as trace:
        align(trace, Config(), Scope())
        yield trace


def one(trace: Trace, sql: str) -> dict[str, Any]:
    [row] = trace.rows(sql)
    return dict(row)


def test_steps_are_the_stat_loggers_by_index_and_content(trace: Trace) -> None:
    both = "iterations s JOIN iterations r USING (iteration) WHERE s.end_basis = 'measured' AND r.end_basis = 'receipt'"
    assert one(trace, f"SELECT count(*) AS n FROM {both}") == {"n": 1316}
    for column in (
        "prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens", "running", "waiting", "deferred",
    ):  # fmt: skip
        assert one(trace, f"SELECT count(*) AS n FROM {both} AND s.{column} <> r.{column}") == {"n": 0}, (
            column
        )
    late = one(
        trace, f"SELECT min(r.end_ns - s.end_ns) AS low, median(r.end_ns - s.end_ns) AS mid FROM {both}"
    )
    assert 0 < late["low"] < late["mid"] < 5_000_000, "the front end hears of a step after its end"
    assert trace.count("steps") == 1316


def test_requests_compute_their_prompts_and_give_their_tokens(trace: Trace) -> None:
    rows = trace.rows(
        """
        SELECT j.rid, j.prompt_tokens - coalesce(j.cached_tokens, 0) AS prompt, j.output_tokens, j.preemptions,
               sum(s.tokens * (k_last - k_first + 1)) FILTER (WHERE phase = 'prefill') AS computed,
               coalesce(sum(s.tokens * (k_last - k_first + 1)) FILTER (WHERE phase = 'decode'), 0) AS decoded,
               count(*) FILTER (WHERE phase = 'recompute') AS again
        FROM joined j JOIN scheduled s USING (rid) GROUP BY ALL
        """
    )
    assert len(rows) == 102
    for row in rows:
        assert row["computed"] == row["prompt"]
        # The last step of a prefill gives the first token, that of computing again the next one.
        assert row["decoded"] == row["output_tokens"] - 1 - row["preemptions"]
        assert (row["again"] > 0) == (row["preemptions"] > 0)
    told = one(trace, "SELECT count(DISTINCT request_id) AS n FROM events WHERE kind = 'preemption'")
    assert told["n"] == sum(row["preemptions"] for row in rows) == 10


def test_each_steps_tokens_are_those_of_its_requests(trace: Trace) -> None:
    differ = """
        SELECT count(*) AS n FROM steps s JOIN (
            SELECT k, sum(tokens) AS tokens FROM (SELECT *, unnest(range(k_first, k_last + 1)) AS k FROM scheduled) GROUP BY k
        ) t USING (k) WHERE t.tokens <> s.prefill_tokens + s.decode_tokens
    """
    assert one(trace, differ) == {"n": 0}
    # Aborted requests are in steps, and in no span.
    assert one(trace, "SELECT count(DISTINCT stay) AS n FROM scheduled WHERE rid IS NULL") == {"n": 2}


def test_a_file_cut_anywhere_gives_what_it_held(tmp_path: Path) -> None:
    whole = Source(CAPTURE / "schedule_engine0_pid4834.jsonl.gz").read_all()
    header = whole.index(b"\n") + 1
    for at in range(header, len(whole), len(whole) // 40):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(whole[:at])
        source = Source(path)
        steps = sum(batch.num_rows for table, batch in SCHEDULE.read(source) if table.name == "iterations")
        # The line that is cut is lost.
        assert steps == whole[:at].count(b"\n") - 1
        assert sum(source.tally.rejected.values()) == (not whole[:at].endswith(b"\n"))


@needs_captures
def test_no_other_file_is_taken_for_a_schedule() -> None:
    for path in (p for p in CAPTURES.rglob("*") if p.is_file()):
        source = Source(path)
        assert not SCHEDULE.recognises(source.head(), source.name), path
