"""Every case of `tests/rules/RULE.yaml` through its rule's query and decision: rows of views in, findings out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from tailscope import registry
from tailscope.config import Config
from tailscope.engine import diagnose, judge
from tailscope.ledger.kv import write_storms
from tailscope.ledger.step_costs import write_member_sums
from tailscope.model import Decision, Finding
from tailscope.parts import SourceWriter
from tailscope.schema import EVENTS, TABLES
from tailscope.store import Trace

RULES = {rule.name: (rule, sql) for rule, sql in registry.rules()}
FOLDER = Path(__file__).parent / "rules"
CASES = [
    (path.stem, name, case)
    for path in sorted(FOLDER.glob("*.yaml"))
    for name, case in yaml.safe_load(path.read_text(encoding="utf-8")).items()
]
#: What a case says beside the rows of views.
SAID = {"status", "reason", "findings"}
#: Views whose rows follow from those of others.
FOLLOW = {"coverage", "iterations", "profiles", "rank_costs", "step_replays", "step_costs", "member_spans"}
VIEWS = sorted({view for _, _, case in CASES for view in case} - SAID | FOLLOW)
#: Tables of the trace, which are views of files: a case's rows take their place.
STORED = {table.name for table in TABLES} & set(VIEWS)
#: What a row is unless the case says otherwise.
DEFAULTS: dict[str, dict[str, Any]] = {
    "class_rows": {"observer": "engine", "basis": "requests", "slo_broken": False, "tail_rule": "above p99"},
    "joined": {"billed": True, "engine_saw": True, "status": "ok", "instance": "a"},
    "client_rows": {
        "metric": "TTFT", "observer": "client", "n": 1000, "n_eff": 500.0, "slo_broken": False, "tail_rule": "above p95", "with_gateway": 0,
        "longer": 0, "engine_p99_s": 0.2, "typical_gap_s": 0.01, "tail_gap_s": 5.0, "calm_p99_s": 0.3, "delayed": 0, "most_in_flight": 20,
    },
    "replicas": {
        "engine": 0, "peers": 2, "of_several": False, "requests": 500, "blocks": 20, "slower": 1.0, "p_value": 1.0, "slower_blocks": 10,
        "load": 1.0, "load_p_value": 1.0, "load_of": "requests", "first_ns": 10, "last_ns": 90,
    },
    "replica_tails": {"engine": 0, "metric": "TTFT", "tail_share": 0.8, "p99_s": 2.0, "peers_p99_s": 1.0},
    "hidden": {"hidden_s": 0.0, "there_s": 100.0, "most_hidden": 0, "most_known": 20},
    "coupling": {"n": 1000, "n_eff": 500, "culprit_requests": 5},
    "steps": {"instance": "a"},
    "profiles": {"instance": "a"},
    "rank_clocks": {"window": 0, "error_ns": 1000.0, "together": True, "basis": "ends of collectives"},
    "step_replays": {"window": 0},
    "link_costs": {"window": 0},
    "rank_windows": {
        "window": 0, "world": "w", "world_size": 2, "missing": 0, "used": True, "collectives": 32, "unmatched": 0,
        "first_ns": 100, "last_ns": 900,
    },
    "rank_idle": {"window": 0, "gap_before_ns": 0, "gap_launch_wait_ns": 0},
    "member_spans": {"instance": "a", "engine": 0, "tail": True},
    "step_costs": {
        "lane": 0, "instance": "a", "engine": 0, "tile_s": 0.01, "batch_s": 0.01, "beyond_s": 0.0, "ranks_s": 0.0, "by_others_s": 0.0,
        "prefill_tokens": 0.0, "decode_requests": 1.0, "running": 1.0, "is_dummy": False, "usable": True, "error_s": 0.0,
    },
    "rank_rounds": {
        "window": 0, "group": "", "complete": True, "kind": "all_reduce", "phase": "combine", "error_ns": 1000.0, "is_last": False,
        "is_shortest": False, "caused_ns": 0, "own_ns": 0, "wait_ns": 0, "transfer_ns": 1_000_000, "slow_ns": 0, "exit_ns": 0, "size": 96,
        "end_ns": 11_000_000,
    },
    "expert_work": {"window": 0, "group": "", "layer": 0, "recorded": False},
    "expert_sets": {"set": 0, "instance": "a", "kind": "experts", "steps": 100, "windows": 1, "tokens": 100_000},
    "tenants": {
        "requests": 100, "prefill_tokens": 10_000.0, "output_tokens": 1_000.0, "mean_tokens": 500.0, "peak_tokens": 2_000.0,
        "peak_share": 0.6, "peak_ns": 50, "tenants": 3,
    },
    "tenant_blame": {
        "tail_rule": "above p99", "tail_n": 10, "prefill_before": 0.0, "prefill_beside": 0.0, "budget": 0.0, "slots": 0.0, "kv": 0.0,
        "prefill_in_decode": 0.0, "preempted": 0.0, "suspect_mean_s": 0.0, "scarce_mean_s": 0.0, "mean_s": 1.0, "prompt_ratio": 1.0, "spells": 10, "first_ns": 10,
        "last_ns": 90,
    },
    "class_work": {"instance": "a"},
    "chunks": {"instance": "a", "engine": 0},
    "doses": {"window_s": 0.1},
    "metrics": {"instance": "a"},
    "series": {"instance": "a"},
}  # fmt: skip


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    """A trace without requests, diagnosed: every view exists, empty and typed."""
    path = tmp_path_factory.mktemp("rules") / "empty.parquet"
    with SourceWriter(path, "0" * 16) as writer:
        writer.write(EVENTS, EVENTS.batch({"instance": ["a"], "time_ns": [1], "kind": ["restart"]}))
        writer.commit({"kind": "test"})
    with Trace(path) as trace:
        diagnose(trace, Config())
        for table in STORED:
            trace.connection.execute(f"CREATE TEMP TABLE {table} AS FROM main.{table} LIMIT 0")
        yield trace


def run(trace: Trace, rule: str, case: dict[str, Any]) -> Decision:
    if case.get("steps"):
        case = {"coverage": [{"join": "request → iterations", "matched": 1, "total": 1}], **case}
    if case.get("rank_idle"):
        case = {"iterations": [{"instance": "a"}], **case}
    if case.get("rank_windows"):
        case = {"profiles": [{}], **case}
    if case.get("rank_rounds"):
        case = {
            "rank_costs": costs(case["rank_rounds"]),
            "step_replays": replays(case["rank_rounds"]),
            **case,
        }
    for view in VIEWS:
        trace.connection.execute(f"DELETE FROM {view}")
        rows = [{**DEFAULTS.get(view, {}), **row} for row in expanded(case.get(view, []))]
        if view == "rank_rounds":
            rows = [labelled(row) for row in rows]
        if view == "step_costs":
            rows = [placed(row) for row in rows]
        of_like: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in rows:
            of_like.setdefault(tuple(sorted(row)), []).append(row)
        for alike in of_like.values():
            trace.connection.register("case_rows", pa.Table.from_pylist(alike))
            trace.connection.execute(f"INSERT INTO {view} BY NAME SELECT * FROM case_rows")
            trace.connection.unregister("case_rows")
    write_member_sums(trace)
    write_storms(trace)
    return judge(trace, *RULES[rule])


def expanded(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row with a list of rounds, of steps that rounds are of, or of ranks, or spans of them as "0..9 12..19", stands for one
    of each. A round of ranks is a step of its own unless the row says which; so is one of `steps`, of ranks' steps that are
    numbered."""
    for row in rows:
        if "steps" in row:
            rest = {key: value for key, value in row.items() if key != "steps"}
            yield from ({"step": number, **rest} for number in numbers(row["steps"]))
            continue
        lists = {key: numbers(row[key]) for key in ("round", "at_step", "rank") if key in row}
        for values in product(*lists.values()):
            one = {**row, **dict(zip(lists, values, strict=True))}
            yield {"step": one["round"], **one} if {"round", "rank"} <= one.keys() else one


def labelled(row: dict[str, Any]) -> dict[str, Any]:
    """A round of ranks, with the step that the window's first rank says, or eight rounds to a step where none does."""
    return {"at_step": row["round"] // 8 if row["step"] is None else row["step"], **row}


def costs(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the replay says of rounds of one group: a rank's lateness in a step is what the step would be shorter by."""
    saved: dict[tuple[int, int], int] = {}
    for row in map(labelled, expanded(rounds)):
        key = row["at_step"], row["rank"]
        saved[key] = saved.get(key, 0) + row.get("own_ns", 0)
    return [
        {"window": 0, "at_step": step, "rank": rank, "saved_ns": ns}
        for (step, rank), ns in saved.items()
        if ns
    ]


def replays(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the replay says of steps of a second each: without skew they lack what ranks cost."""
    saved: dict[int, int] = {}
    for row in map(labelled, expanded(rounds)):
        saved[row["at_step"]] = saved.get(row["at_step"], 0) + row.get("own_ns", 0)
    return [
        {"at_step": step, "replayed_ns": 10**9, "no_skew_ns": 10**9 - ns, "usual_transfers_ns": 10**9}
        for step, ns in saved.items()
        if step is not None
    ]


def numbers(spans: int | list[int] | str | None) -> list[Any]:
    if not isinstance(spans, str):
        return spans if isinstance(spans, list) else [spans]
    ends = [[int(end) for end in span.split("..")] for span in spans.split()]
    return [number for first, last in ends for number in range(first, last + 1)]


def placed(row: dict[str, Any]) -> dict[str, Any]:
    """A step begins 10 ms after the one before unless the row says when."""
    start_ns = row.get("start_ns", 1_000_000_000 + 10_000_000 * row["round"])
    return {
        "k": 100 * row["round"] + (row["engine"] or 0),
        "start_ns": start_ns,
        "end_ns": start_ns + round(1e9 * row["tile_s"]),
        **row,
    }


def shown(finding: Finding, keys: set[str]) -> dict[str, Any]:
    values = {
        "status": finding.status,
        "severity": finding.severity,
        "basis": finding.basis,
        "culprit": finding.culprit.id,
        "title": finding.title,
        "victims": [victim.id for victim in finding.victims],
        "share_of_tail": finding.share_of_tail,
        "explains": dict(finding.explains),
        "window_ns": None if finding.window_ns is None else list(finding.window_ns),
    }
    return {key: values[key] for key in keys}


@pytest.mark.parametrize(("rule", "name", "case"), CASES, ids=[f"{rule}: {name}" for rule, name, _ in CASES])
def test_case(views: Trace, rule: str, name: str, case: dict[str, Any]) -> None:
    decision = run(views, rule, case)
    assert decision.status == case["status"], decision.reason
    assert decision.reason
    assert case.get("reason", "") in decision.reason
    expected = case["findings"]
    assert len(decision.findings) == len(expected)
    for finding, wanted in zip(decision.findings, expected, strict=True):
        wanted = dict(wanted)
        for told in ("evidence", "counter_evidence"):
            said = "\n".join(e.text for e in getattr(finding, told))
            assert wanted.pop(told, "") in said
        got = shown(finding, set(wanted))
        share = got.pop("share_of_tail", None)
        assert share == pytest.approx(wanted.get("share_of_tail"))
        assert got == {k: v for k, v in wanted.items() if k != "share_of_tail"}
        assert finding.rule == rule
        assert finding.evidence
        assert bool(finding.remedies) == (finding.status == "found")
        assert finding.confirm_by


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_has_a_case_that_fires_one_that_is_quiet_and_one_without_data(rule: str) -> None:
    statuses = {case["status"] for name, _, case in CASES if name == rule}
    assert {"found", "clear", "no-data"} <= statuses


def test_every_case_file_belongs_to_a_rule() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(RULES)


def test_what_goes_wrong_inside_a_rule_is_its_result(views: Trace) -> None:
    rule, _ = RULES["hol-coupling"]
    run(views, "hol-coupling", {"class_rows": [{"klass": "a", "metric": "TTFT", "n": 30}]})
    decision = judge(views, rule, "SELECT no_such_column FROM class_rows")
    assert decision.status == "failed"
    assert "no_such_column" in decision.reason
    assert decision.findings == ()
