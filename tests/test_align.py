"""Observers of a request joined, clocks told apart, steps in order: small worlds whose answer is known."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import MS, START_NS, Row, S, aligned, client, core, span, step

from tailscope.align import MOST_SHARED, Scope
from tailscope.config import Config, RequestClass, parse

Tables = Mapping[str, Sequence[Row] | pa.Table]
Ask = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Rows of a query on the aligned tables of a world, written as Parquet."""

    def run(tables: Tables, sql: str, **how: Any) -> list[dict[str, Any]]:
        with aligned(tmp_path_factory.mktemp("world"), tables, **how) as trace:
            return trace.rows(sql)

    return run


JOINED = "SELECT request_key, client_key, engine_saw, billed, status FROM joined ORDER BY rid"
COUNTS = (
    "SELECT count(*) AS n, count(*) FILTER (WHERE billed) AS billed, "
    "count(*) FILTER (WHERE engine_saw AND client_key IS NOT NULL) AS with_client, "
    "(SELECT count(*) FROM core_pairs) AS with_core FROM joined"
)


def views(request_id: str, arrival_ns: int, e2e_ns: int, mark: str = "", clock_ns: int = 0) -> list[Row]:
    """One request as an API server, its engine and its client tell of it."""
    return [
        span(request_id, arrival_ns, e2e_ns, request_key=f"span {request_id} {mark}"),
        core(request_id, arrival_ns, e2e_ns, request_key=f"core {request_id} {mark}"),
        client(
            request_id, arrival_ns - MS + clock_ns, e2e_ns + 2 * MS, request_key=f"client {request_id} {mark}"
        ),
    ]


def pairs(rows: Sequence[Mapping[str, Any]]) -> set[tuple[str, str | None]]:
    """What follows the word `span` and the word `client` in the keys."""
    return {
        (row["request_key"].partition(" ")[2], row["client_key"] and row["client_key"].partition(" ")[2])
        for row in rows
        if row["engine_saw"]
    }


# -- who is who -----------------------------------------------------------------------------------


def test_one_request_seen_by_three_is_one(ask: Ask) -> None:
    rows = [row for i in range(30) for row in views(f"r{i}", i * 50 * MS, S)]
    joined = ask({"requests": rows}, "SELECT * FROM joined ORDER BY rid")
    assert len(joined) == 30
    for row in joined:
        assert row["observer"] == "engine" and row["billed"] and row["engine_saw"]
        assert row["engine"] == 0, "the span does not say which; the stat logger does"
        assert row["request_key"].startswith("span ") and row["client_key"].startswith("client ")
        assert (row["preemptions"], row["cached_tokens"]) == (0, 0)
        assert row["client_e2e_ns"] == row["e2e_ns"] + 2 * MS


def test_a_completion_loses_its_prompt_index_for_the_client_only(ask: Ask) -> None:
    rows = [span("cmpl-a-0", 0, S), core("cmpl-a-0", 0, S), client("cmpl-a", -MS, S + 2 * MS)]
    rows += [span("chatcmpl-b-7", 0, S), client("chatcmpl-b", -MS, S + 2 * MS)]
    assert ask({"requests": rows}, COUNTS) == [{"n": 3, "billed": 2, "with_client": 1, "with_core": 1}]


@pytest.mark.parametrize("n", [2, 16, 64])
def test_n_answers_to_one_prompt_are_n_rows(ask: Ask, n: int) -> None:
    """As vLLM tells of n > 1: rows of one id, which may all end in one step."""
    rows = [row for i in range(n) for row in views("r", 0, S, str(i))]
    assert ask({"requests": rows}, COUNTS) == [{"n": n, "billed": n, "with_client": n, "with_core": n}]
    rows = [row for i in range(n) for row in views("r", 0, S + i * MS, str(i))]
    assert pairs(ask({"requests": rows}, JOINED)) == {(f"r {i}", f"r {i}") for i in range(n)}


def test_one_client_row_for_n_answers_goes_to_the_last(ask: Ask) -> None:
    rows = [span("r", 0, S + i * MS, request_key=f"span {i}") for i in range(3)] + [
        client("r", -MS, S + 4 * MS)
    ]
    with_client = {r["request_key"] for r in ask({"requests": rows}, JOINED) if r["client_key"]}
    assert with_client == {"span 2"}


def test_a_client_that_counts_from_one_again(ask: Ask) -> None:
    """Ids that repeat in time are told apart by it."""
    rows = [
        row
        for life in range(5)
        for i in range(8)
        for row in views(f"{i}", life * 60 * S + i * S, S, str(life))
    ]
    joined = ask({"requests": rows}, JOINED)
    assert len(joined) == 40
    assert pairs(joined) == {(f"{i} {life}", f"{i} {life}") for life in range(5) for i in range(8)}


def test_ids_that_overlap_in_time_pair_the_closest_ends(ask: Ask) -> None:
    rows = [row for i in range(20) for row in views("same", i * 100 * MS, S, str(i))]
    joined = ask({"requests": rows}, JOINED)
    assert pairs(joined) == {(f"same {i}", f"same {i}") for i in range(20)}


def test_an_id_of_thousands_identifies_nothing(ask: Ask) -> None:
    n = 3000
    rows = [row for i in range(n) for row in views("same", i * 100 * MS, S, str(i))]
    rows += views("own", 0, S)
    assert ask({"requests": rows}, "SELECT * FROM coverage LIMIT 2") == [
        {"join": "client request → engine request", "matched": 1, "total": n + 1, "ambiguous": n},
        {"join": "engine span → stat logger", "matched": 1, "total": n + 1, "ambiguous": n},
    ]


def test_many_prompts_of_one_call_are_not_ambiguous(ask: Ask) -> None:
    """A completion of 100 prompts: engine ids differ, and their client's is one row."""
    n = MOST_SHARED + 36
    rows = [row for i in range(n) for row in views(f"cmpl-x-{i}", 0, S)[:2]] + [
        client("cmpl-x", -MS, S + 2 * MS)
    ]
    assert ask({"requests": rows}, COUNTS) == [{"n": n, "billed": n, "with_client": 1, "with_core": n}]
    assert {row["ambiguous"] for row in ask({"requests": rows}, "FROM coverage")} == {0}


def test_missing_ids_join_nothing_and_are_not_ambiguous(ask: Ask) -> None:
    rows = [row for i in range(100) for row in (span(None, i * MS, S), core(None, i * MS, S))]
    assert ask({"requests": rows}, COUNTS)[0]["with_core"] == 0
    assert ask({"requests": rows}, "SELECT matched, ambiguous FROM coverage LIMIT 2")[1] == {
        "matched": 0,
        "ambiguous": 0,
    }


def test_client_rows_without_ids_count_only_where_no_engine_tells(ask: Ask) -> None:
    nameless = [client(None, i * MS, S) for i in range(10)]
    assert ask({"requests": [span("r", 0, S), *nameless]}, COUNTS)[0]["n"] == 1
    assert ask({"requests": nameless}, COUNTS)[0] == {"n": 10, "billed": 10, "with_client": 0, "with_core": 0}
    elsewhere = [{**row, "instance": "b"} for row in nameless]
    assert ask({"requests": [span("r", 0, S), *elsewhere]}, COUNTS)[0]["n"] == 11


def test_what_the_engine_never_told_of_is_kept_but_not_billed(ask: Ask) -> None:
    rows = views("fine", 0, S)
    rows += [
        client("gone", 0, S, status="aborted"),
        client("refused", 0, None or MS, status="rejected", ttft_ns=None),
    ]
    assert {(r["request_key"], r["billed"], r["status"]) for r in ask({"requests": rows}, JOINED)} == {
        ("span fine ", True, "ok"),
        ("client gone 0", False, "aborted"),
        ("client refused 0", False, "rejected"),
    }
    [coverage] = ask({"requests": rows}, "SELECT matched, total FROM coverage LIMIT 1")
    assert coverage == {"matched": 1, "total": 1}, "nobody expects those two at the engine"


def test_an_engine_does_not_know_that_its_client_left(ask: Ask) -> None:
    rows = [span("r", 0, S), client("r", -MS, S // 2, status="aborted")]
    [row] = ask({"requests": rows}, JOINED)
    assert (row["status"], row["billed"]) == ("aborted", True)


def test_a_client_alone_is_billed(ask: Ask) -> None:
    rows = [client(f"r{i}", i * S, S) for i in range(5)] + [client("bad", 0, S, status="error")]
    joined = ask({"requests": rows}, "SELECT * FROM joined WHERE billed")
    assert len(joined) == 5 and {row["observer"] for row in joined} == {"client"}
    assert not any(row["engine_saw"] for row in joined)
    assert ask({"requests": rows}, "SELECT total FROM coverage")[0]["total"] == 0


def test_a_stat_logger_alone_is_billed_by_its_parts(ask: Ask) -> None:
    [row] = ask({"requests": [core("r", 0, 4 * S, decode_ns=3 * S)]}, "FROM joined")
    assert (row["billed"], row["ttft_ns"], row["e2e_ns"]) == (True, S, 4 * S)


def test_a_table_without_instance_is_one_instance(ask: Ask) -> None:
    rows = [{**row, "instance": None} for row in views("r", 0, S)]
    assert ask({"requests": rows}, COUNTS) == [{"n": 1, "billed": 1, "with_client": 1, "with_core": 1}]
    steps = [step(i * MS, instance=None) for i in range(5)]
    assert ask({"requests": rows, "iterations": steps}, "SELECT DISTINCT instance FROM steps") == [
        {"instance": ""}
    ]


def test_instances_do_not_mix(ask: Ask) -> None:
    rows = views("r", 0, S) + [
        {**row, "instance": "b", "request_key": f"b{i}"} for i, row in enumerate(views("r", 0, S))
    ]
    assert ask({"requests": rows}, COUNTS)[0] == {"n": 2, "billed": 2, "with_client": 2, "with_core": 2}


# -- clocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock_ns", [7 * S, -3 * S, 3600 * S])
def test_a_client_clock_that_is_off(ask: Ask, clock_ns: int) -> None:
    rows = [row for i in range(40) for row in views(f"r{i}", i * 50 * MS, S, "", clock_ns)]
    rows += [row for i in range(2) for row in views("two", 0, S + i * 50 * MS, str(i), clock_ns)]
    rows += [row for i in range(3) for row in views("again", i * 20 * S, S, str(i), clock_ns)]
    tables = {"requests": rows}
    joined = ask(tables, JOINED)
    assert len(joined) == 45
    assert pairs(joined) >= {("two 0", "two 0"), ("two 1", "two 1")} | {
        (f"again {i}", f"again {i}") for i in range(3)
    }
    assert ask(tables, "SELECT matched, total FROM coverage LIMIT 1") == [{"matched": 45, "total": 45}]
    [clock] = ask(tables, "FROM client_clock")
    assert (clock["low_ns"], clock["high_ns"]) == (-clock_ns - MS, -clock_ns + MS)
    assert (clock["offset_ns"], clock["error_ns"], clock["crossed"]) == (-clock_ns, MS, False)


def test_clocks_that_agree_are_not_moved(ask: Ask) -> None:
    rows = [row for i in range(20) for row in views(f"r{i}", i * 50 * MS, S)]
    [clock] = ask({"requests": rows}, "FROM client_clock")
    assert (clock["pairs"], clock["low_ns"], clock["high_ns"]) == (20, -MS, MS)
    assert (clock["offset_ns"], clock["crossed"]) == (0, False)


def test_where_every_id_has_two_rows_the_clock_is_found_too(ask: Ask) -> None:
    rows = [
        row for i in range(20) for j in (0, 1) for row in views(f"r{i}", i * S, S + j * MS, str(j), 7 * S)
    ]
    assert ask({"requests": rows}, COUNTS)[0] == {"n": 40, "billed": 40, "with_client": 40, "with_core": 40}


def test_without_spans_the_stat_logger_tells_the_clock(ask: Ask) -> None:
    rows = [row for i in range(20) for row in views(f"r{i}", i * S, S, "", 7 * S)[1:]]
    assert ask({"requests": rows}, COUNTS)[0] == {"n": 20, "billed": 20, "with_client": 20, "with_core": 0}


def test_an_id_used_for_two_requests_does_not_spoil_the_clock(ask: Ask) -> None:
    """Today's client and yesterday's engine both knew a `bad`."""
    rows = [row for i in range(40) for row in views(f"r{i}", i * 50 * MS, S)]
    rows += [span("bad", -86_400 * S, S), client("bad", 0, S)]
    rows += [span("worse", 0, S), client("worse", 0, 90 * S)]
    tables = {"requests": rows}
    assert ask(tables, "SELECT offset_ns, crossed FROM client_clock") == [{"offset_ns": 0, "crossed": False}]
    assert ask(tables, COUNTS)[0]["with_client"] == 41, "all but yesterday's"


def test_a_clock_that_steps_is_crossed_and_most_still_join(ask: Ask) -> None:
    rows = [row for i in range(40) for row in views(f"r{i}", i * 50 * MS, S, "", 10 * S if i >= 30 else 0)]
    tables = {"requests": rows}
    assert ask(tables, "SELECT offset_ns, crossed FROM client_clock") == [{"offset_ns": 0, "crossed": True}]
    assert ask(tables, COUNTS)[0]["with_client"] == 30
    assert ask(tables, "SELECT matched, total FROM coverage LIMIT 1") == [{"matched": 30, "total": 40}]


def test_a_clock_that_drifts_is_crossed_and_joins(ask: Ask) -> None:
    rows = [row for i in range(40) for row in views(f"r{i}", i * S, S, "", i * 5 * MS)]
    tables = {"requests": rows}
    [clock] = ask(tables, "FROM client_clock")
    assert clock["crossed"] and -200 * MS < clock["offset_ns"] <= 0
    assert ask(tables, COUNTS)[0]["with_client"] == 40


# -- steps ----------------------------------------------------------------------------------------

STEPS = f"SELECT start_ns - {START_NS} AS s, end_ns - {START_NS} AS e, iteration AS i FROM steps ORDER BY k"


def tiles(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    return [(row["s"] // MS, row["e"] // MS) for row in rows]


def test_steps_are_tiled_end_to_end_while_there_is_work(ask: Ask) -> None:
    steps = [step(10 * MS, elapsed_ns=4 * MS), step(30 * MS, elapsed_ns=MS), step(35 * MS, elapsed_ns=MS)]
    assert tiles(ask({"iterations": steps}, STEPS)) == [(6, 10), (10, 30), (30, 35)]


def test_idle_time_is_nobodys(ask: Ask) -> None:
    idle = {"running": 0, "waiting": 0}
    steps = [
        step(10 * MS, **idle),
        step(9_000 * MS, elapsed_ns=5 * MS, **idle),
        step(9_010 * MS, elapsed_ns=5 * MS),
    ]
    assert tiles(ask({"iterations": steps}, STEPS)) == [(10, 10), (8_995, 9_000), (9_005, 9_010)]
    steps[1]["elapsed_ns"] = None
    assert tiles(ask({"iterations": steps}, STEPS))[1] == (10, 9_000), "not known to be idle"
    waited = [step(10 * MS, running=0, waiting=2), step(9_000 * MS, elapsed_ns=5 * MS)]
    assert tiles(ask({"iterations": waited}, STEPS))[1] == (10, 9_000), "somebody waited"


def test_a_restarted_engine_has_nothing_left_over(ask: Ask) -> None:
    steps = [step(10 * MS, iteration=99, running=4), step(9_000 * MS, iteration=0, elapsed_ns=5 * MS)]
    assert tiles(ask({"iterations": steps}, STEPS))[1] == (8_995, 9_000)


def test_a_measured_start_is_believed(ask: Ask) -> None:
    steps = [step(10 * MS, start_ns=START_NS + 2 * MS), step(30 * MS, start_ns=START_NS + 18 * MS)]
    assert tiles(ask({"iterations": steps}, STEPS)) == [(2, 10), (18, 30)]
    steps[1]["start_ns"] = START_NS + 5 * MS
    assert tiles(ask({"iterations": steps}, STEPS))[1] == (10, 30), "not before the step before it ended"
    steps[1]["start_ns"] = START_NS + 50 * MS
    assert tiles(ask({"iterations": steps}, STEPS))[1] == (30, 30), "not after its own end"


def test_elapsed_longer_than_the_gap_does_not_overlap(ask: Ask) -> None:
    steps = [step(10 * MS, running=0), step(12 * MS, elapsed_ns=8 * MS, running=0)]
    assert tiles(ask({"iterations": steps}, STEPS))[1] == (10, 12)


def test_steps_that_end_together_share_no_time(ask: Ask) -> None:
    steps = [step(10 * MS, iteration=0), *(step(20 * MS, iteration=i) for i in (7, 1, 1, None))]
    rows = ask({"iterations": steps}, STEPS)
    assert tiles(rows) == [(10, 10), (10, 20), (20, 20), (20, 20), (20, 20)]
    assert rows[1]["i"] == 1


def test_a_precise_source_wins_over_an_imprecise_one(ask: Ask) -> None:
    precise = [step(S + i * 100 * MS, iteration=i) for i in range(50)]
    # The log covers more, before and after.
    log = [step(-4 * S + i * 100 * MS, iteration=i, time_error_ns=500 * MS) for i in range(150)]
    count = "SELECT engine, time_error_ns > 0 AS log, count(*) AS n FROM steps GROUP BY ALL ORDER BY ALL"
    # Within a second of the precise ones a line of the log may be any of theirs.
    expected = [{"engine": 0, "log": False, "n": 50}, {"engine": 0, "log": True, "n": 40 + 40}]
    assert ask({"iterations": precise + log}, count) == expected
    nameless = [{**row, "engine": None} for row in log]
    assert ask({"iterations": precise + nameless}, count) == expected, "there is one engine only"
    other = [{**row, "engine": 1} for row in log]
    assert ask({"iterations": precise + other}, count)[1] == {"engine": 1, "log": True, "n": 150}


def test_an_engine_that_nobody_names_is_the_only_one(ask: Ask) -> None:
    nameless = [step(i * 100 * MS, engine=None) for i in range(20)]
    known = "SELECT DISTINCT engine, engine_known FROM joined"
    assert ask({"requests": [span("r", 0, S)], "iterations": nameless}, known) == [
        {"engine": None, "engine_known": True}
    ]
    told = {"requests": views("r", 0, S), "iterations": nameless}
    assert ask(told, known) == [{"engine": 0, "engine_known": True}]
    assert ask(told, "SELECT DISTINCT engine FROM steps") == [{"engine": 0}], "the stat logger's"
    two = [step(i * 100 * MS, engine=i % 2) for i in range(20)]
    assert ask({"requests": [span("r", 0, S)], "iterations": two}, known) == [
        {"engine": None, "engine_known": False}
    ]
    ambiguous = ask({"requests": [span("r", 0, S)], "iterations": two}, "FROM coverage")[2]
    assert (ambiguous["matched"], ambiguous["total"], ambiguous["ambiguous"]) == (1, 1, 1)


def test_a_dummy_step_takes_time_like_any(ask: Ask) -> None:
    steps = [step(10 * MS), step(20 * MS, is_dummy=True, decode_requests=0, decode_tokens=0), step(30 * MS)]
    assert tiles(ask({"iterations": steps}, STEPS)) == [(10, 10), (10, 20), (20, 30)]


@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(
        st.fixed_dictionaries(
            {
                "end_ns": st.integers(0, 60) | st.none(),
                "start_ns": st.none() | st.integers(-10, 70),
                "elapsed_ns": st.none() | st.integers(0, 100),
                "iteration": st.none() | st.integers(0, 5),
                "running": st.none() | st.integers(0, 2),
                "waiting": st.none() | st.integers(0, 1),
                "engine": st.sampled_from([0, 1, None]),
                "time_error_ns": st.sampled_from([None, None, 500 * MS]),
                "prefill_tokens": st.none() | st.integers(0, 9),
            }
        ),
        max_size=40,
    ),
    seed=st.integers(0, 99),
)
def test_steps_never_overlap(tmp_path_factory: pytest.TempPathFactory, steps: list[Row], seed: int) -> None:
    """Whatever the rows say, and in whatever order they were written."""
    rows = [
        {
            "instance": "a",
            **{k: v and START_NS + v if k in ("end_ns", "start_ns") else v for k, v in s.items()},
        }
        for s in steps
    ]
    columns = "SELECT * EXCLUDE (source) FROM steps ORDER BY k"
    with aligned(tmp_path_factory.mktemp("world"), {"iterations": rows}) as trace:
        result = trace.rows(columns)
    assert len(result) <= sum(s["end_ns"] is not None for s in steps)
    for before, after in pairwise(result):
        if before["engine"] == after["engine"]:
            assert (
                after["start_ns"] >= before["end_ns"]
                or after["start_ns"] == after["end_ns"] >= before["end_ns"]
            )
    for row in result:
        assert row["tile_ns"] == row["end_ns"] - row["start_ns"] >= 0
    shuffled = random.Random(seed).sample(rows, len(rows))
    with aligned(tmp_path_factory.mktemp("world"), {"iterations": shuffled}, parts=3) as trace:
        again = trace.rows(columns)
    places = [[(r["engine"], r["start_ns"], r["end_ns"]) for r in rows] for rows in (result, again)]
    assert places[0] == places[1]


# -- classes, window, coverage ----------------------------------------------------------------------


def test_default_classes(ask: Ask) -> None:
    sizes = {511: "<512", 512: "<2k", 2048: "<8k", 8192: "<32k", 32768: "≥32k", None: "unknown"}
    rows = [span(str(tokens), 0, S, prompt_tokens=tokens) for tokens in sizes]
    rows += [span("long", 0, S, output_tokens=2048), span("cut", 0, S, status="unfinished", max_tokens=4000)]
    rows += [span("named", 0, S, klass="chat")]
    expected = {
        **{str(k): v for k, v in sizes.items()},
        "long": "reasoning",
        "cut": "reasoning",
        "named": "chat",
    }
    got = ask({"requests": rows}, "SELECT request_id, klass FROM joined")
    assert {row["request_id"]: row["klass"] for row in got} == expected


HOSTILE = ["a'b", "'); DROP TABLE joined; --", 'q"u"o', "$name", "%s", "Ünïcode ≥", "new\nline", "\\", "''"]


def test_class_names_and_values_are_data(ask: Ask) -> None:
    classes = tuple(RequestClass(name, {}, {"tenant": (name,)}) for name in HOSTILE)
    rows = [span(name, 0, S, tenant=name) for name in HOSTILE] + [span("else", 0, S, tenant="other")]
    got = ask({"requests": rows}, "SELECT request_id, klass FROM joined", config=Config(classes))
    assert {row["request_id"]: row["klass"] for row in got} == {name: name for name in HOSTILE} | {
        "else": "unknown"
    }


@pytest.mark.parametrize(
    ("where", "row"),
    [
        ({"prompt_tokens": [10, 20]}, {"prompt_tokens": 10}),
        ({"prompt_tokens": [10, 20]}, {"prompt_tokens": 19}),
        ({"output_tokens": [5]}, {"output_tokens": 5}),
        ({"max_tokens": [100]}, {"max_tokens": 10**9}),
        ({"max_tokens": [10**30]}, None),
        ({"priority": [-5, 0]}, {"priority": -5}),
        ({"tenant": ["x", "y"]}, {"tenant": "y"}),
        ({"model": "m"}, {"model": "m"}),
        ({"adapter": "lora"}, {"adapter": "lora"}),
        ({"instance": "a"}, {}),
        ({}, {}),
        ({"tenant": "t", "prompt_tokens": [0, 5]}, {"tenant": "t", "prompt_tokens": 4}),
    ],
)
def test_class_tests(ask: Ask, where: dict[str, Any], row: Row | None) -> None:
    config = parse({"class": [{"name": "wanted", "where": where}, {"name": "rest", "where": {}}]})
    plain = span("plain", 0, S, prompt_tokens=None, output_tokens=None)
    rows = [plain] + ([{**plain, **row, "request_id": "meant"}] if row is not None else [])
    got = {r["request_id"]: r["klass"] for r in ask({"requests": rows}, "FROM joined", config=config)}
    assert got.get("meant", "wanted") == "wanted"
    assert got["plain"] == ("wanted" if where in ({}, {"instance": "a"}) else "rest")


def test_arrivals_in_the_window_only(ask: Ask) -> None:
    rows = [row for i in range(10) for row in views(f"r{i}", i * S, S)]
    scope = Scope(from_ns=START_NS + 3 * S - 2 * MS, to_ns=START_NS + 7 * S - 2 * MS)
    got = ask({"requests": rows}, "SELECT request_id FROM joined ORDER BY 1", scope=scope)
    assert [row["request_id"] for row in got] == ["r3", "r4", "r5", "r6"]


def test_one_instance_only(ask: Ask) -> None:
    rows = [{**row, "instance": name} for name in ("a", "b") for row in views(name, 0, S)]
    steps = [step(i * MS, instance=name) for name in ("a", "b") for i in range(5)]
    tables, scope = {"requests": rows, "iterations": steps}, Scope(instance="b")
    assert ask(tables, "SELECT DISTINCT request_id FROM joined", scope=scope) == [{"request_id": "b"}]
    assert ask(tables, "SELECT DISTINCT instance FROM steps", scope=scope) == [{"instance": "b"}]
    assert ask(tables, "FROM joined", scope=Scope(instance="none")) == []


def test_coverage_counts(ask: Ask) -> None:
    rows = [row for i in range(8) for row in views(f"r{i}", i * S, S)]
    rows = [row for row in rows if row["request_key"] not in ("core r0 ", "core r1 ", "span r2 ", "core r2 ")]
    steps = [step(i * 100 * MS) for i in range(36)]
    assert ask({"requests": rows, "iterations": steps}, "FROM coverage") == [
        {"join": "client request → engine request", "matched": 7, "total": 8, "ambiguous": 0},
        {"join": "engine span → stat logger", "matched": 5, "total": 7, "ambiguous": 0},
        # First tokens at 0.5, 1.5 ... 7.5 s; steps until 3.5 s.
        {"join": "request → iterations", "matched": 3, "total": 7, "ambiguous": 0},
    ]


def test_nothing_at_all(ask: Ask) -> None:
    assert ask({"events": [{"instance": "a", "time_ns": 1, "kind": "restart"}]}, "FROM joined") == []


# -- scale ----------------------------------------------------------------------------------------


def columns(n: int, request_id: list[str], time_ns: list[int]) -> pa.Table:
    """n spans and n stat logger records, without a Python object a row."""
    from tailscope.schema import REQUESTS

    def side(key: str, ttft_ns: int | None) -> pa.Table:
        return REQUESTS.batch(
            {
                "instance": "a",
                "observer": "engine",
                "status": "ok",
                "request_key": [f"{key}{i}" for i in range(n)],
                "request_id": request_id,
                "arrival_ns": time_ns,
                "finished_ns": pa.array(time_ns).cast(pa.int64()),
                "ttft_ns": ttft_ns,
                "e2e_ns": S,
            }
        )

    return pa.concat_tables([side("s", S // 2), side("c", None)])


@pytest.mark.parametrize(
    ("one_id", "one_time"), [(True, False), (False, True), (True, True)], ids=["one id", "one time", "both"]
)
def test_four_times_the_rows_take_nothing_like_sixteen_times_the_time(
    tmp_path: Path, one_id: bool, one_time: bool
) -> None:
    def seconds(n: int, attempt: int) -> float:
        ids = ["cmpl-x-0" if one_id else f"cmpl-load-{i}" for i in range(n)]
        times = [START_NS + (0 if one_time else i * MS) for i in range(n)]
        began = time.process_time()
        with aligned(tmp_path / f"{n} {attempt}", {"requests": columns(n, ids, times)}) as trace:
            assert trace.count("core_pairs") == (0 if one_id else n)
        return time.process_time() - began

    fewer = max(min(seconds(5_000, i) for i in range(3)), 0.05)
    assert min(seconds(20_000, i) for i in range(3)) < 9 * fewer
