"""What a class's tail is, what it is compared with, and what of the difference is whose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import MS, START_NS, Billed, Request, Row, S, billed, chunks, client, clients, serve, span

from tailscope import stats
from tailscope.config import Config, parse
from tailscope.model import ClassRow

Bill = Callable[..., Billed]


@pytest.fixture
def bill(tmp_path: Path) -> Iterator[Bill]:
    with ExitStack() as stack:
        places = iter(range(100))

        def run(requests: list[Row], config: Config | None = None, **tables: list[Row]) -> Billed:
            place = tmp_path / str(next(places))
            return stack.enter_context(billed(place, {"requests": requests, **tables}, config))

        yield run


def requests(n: int, of: Callable[[int], dict[str, Any]], every_ns: int = S) -> list[Row]:
    """n of them; `of` gives ttft_ns, output_tokens, what else is not usual, and decode_per_token_ns."""
    rows = []
    for i in range(n):
        columns = {"ttft_ns": 100 * MS, "output_tokens": 11, **of(i)}
        per_token = columns.pop("per_token_ns", 20 * MS)
        tokens = columns["output_tokens"] or columns.pop("true_tokens", 1)
        rows.append(span(f"r{i}", i * every_ns, columns["ttft_ns"] + (tokens - 1) * per_token, **columns))
    return rows


def adds_up(row: ClassRow) -> bool:
    assert row.excess_s is not None
    return sum(row.excess.values()) == pytest.approx(row.excess_s, rel=1e-6, abs=1e-9)


# -- which requests are the tail --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "rule", "tail_n"),
    [
        (19, None, 0),
        (20, "slowest 5", 5),
        (60, "slowest 6", 6),
        (190, "slowest 19", 19),
        (220, "above p95", 11),
        (980, "above p95", 49),
        (1020, "above p99", 11),
    ],
)
def test_the_tail_rule_follows_the_samples(bill: Bill, n: int, rule: str | None, tail_n: int) -> None:
    order = np.random.default_rng(0).permutation(n)
    row = bill(requests(n, lambda i: {"ttft_ns": (100 + int(order[i])) * MS})).row("<512", "TTFT")
    assert (row.n, row.tail_rule, row.tail_n) == (n, rule, tail_n)
    assert (row.p50_s is None) == (n < 20)
    assert (row.p95_s is None) == (n < 220) and (row.p99_s is None) == (n < 1020)
    assert row.reason == ("too-few-samples" if n < 1020 else None)
    assert (row.ci99_s is None) == (row.p99_s is None)
    if row.p99_s is not None and row.ci99_s is not None:
        assert row.ci99_s[0] <= row.p99_s <= row.ci99_s[1]


def test_samples_in_one_burst_are_few(bill: Bill) -> None:
    """2,000 requests whose slow ones all lie in one incident do not make a p99."""
    row = bill(
        requests(2000, lambda i: {"ttft_ns": (100 + i % 7 + (900 + i % 50) * (700 < i < 760)) * MS})
    ).row("<512", "TTFT")
    assert row.n == 2000 and row.n_eff is not None and row.n_eff < 200
    assert row.p99_s is None and row.tail_rule == "slowest 200"
    assert not stats.allows_quantile(0.99, row.n_eff)


def test_below_twenty_requests_a_class_gets_counts_only(bill: Bill) -> None:
    result = bill(requests(19, lambda i: {}))
    for metric in ("TTFT", "TPOT", "E2E"):
        row = result.row("<512", metric)
        assert (row.n, row.tail_n, row.n_eff, row.excess_s, dict(row.excess)) == (19, 0, None, None, {})
    assert not result.trace.rows("FROM excess")


def test_what_is_not_billed_is_no_sample(bill: Bill) -> None:
    rows = requests(30, lambda i: {"status": "ok" if i % 3 else "aborted", "ttft_ns": 100 * MS})
    assert bill(rows).row("<512", "TTFT").n == 20
    rows = requests(30, lambda i: {}) + [client(f"c{i}", i * S, 60 * S, status="timeout") for i in range(10)]
    assert bill(rows).row("<512", "E2E").n == 30


# -- with what it is compared ------------------------------------------------------------------------


def test_a_long_request_is_not_an_abnormal_one(bill: Bill) -> None:
    """The slowest are those with 1,000 tokens; their decode per token is everybody's."""
    make = np.random.default_rng(0)
    tokens, first = make.choice([10, 20, 1000], 400), make.integers(90, 110, 400)
    result = bill(requests(400, lambda i: {"output_tokens": int(tokens[i]), "ttft_ns": int(first[i]) * MS}))
    row = result.row("<512", "E2E")
    assert row.tail_n and row.excess_s == pytest.approx(0, abs=0.02)
    assert adds_up(row) and abs(row.excess["decode_phase"]) < 1e-6
    assert result.row("<512", "TPOT").excess_s == pytest.approx(0, abs=1e-9)


def test_a_long_prompt_is_not_an_abnormal_one(bill: Bill) -> None:
    """In a class of 512 to 2,048 tokens the slowest are the longest; prefill takes 1 ms a token."""
    make = np.random.default_rng(0)
    long = make.random(400) < 0.3
    rows = requests(
        400,
        lambda i: {
            "prompt_tokens": (1500 if long[i] else 600) + i % 20,
            "ttft_ns": ((1500 if long[i] else 600) + i % 20) * MS,
        },
    )
    row = bill(rows).row("<2k", "TTFT")
    assert row.tail_n and row.p50_s is not None and row.p50_s < 0.7
    assert row.excess_s == pytest.approx(0, abs=0.02)


def test_cached_prompts_are_compared_with_cached_ones(bill: Bill) -> None:
    rows = requests(
        400,
        lambda i: {
            "prompt_tokens": 1500,
            "cached_tokens": 0 if i % 5 == 0 else 1400,
            "ttft_ns": (1500 if i % 5 == 0 else 100) * MS + i % 20 * MS,
        },
    )
    row = bill(rows).row("<2k", "TTFT")
    assert row.excess_s == pytest.approx(0, abs=0.02)


def test_a_slow_decode_of_most_requests_of_a_length_shows(bill: Bill) -> None:
    """What is typical of an answer's length is a typical decode per token of the class, times its tokens."""
    make = np.random.default_rng(0)
    slow = (np.arange(500) % 5 == 0) & (make.random(500) < 0.8)
    rows = requests(
        500,
        lambda i: {
            "output_tokens": 201 if i % 5 == 0 else 51,
            "per_token_ns": (100 if slow[i] else 20) * MS + int(make.integers(0, MS)),
        },
    )
    result = bill(rows)
    assert result.row("<512", "TPOT").excess_s == pytest.approx(0.080, rel=0.02)
    row = result.row("<512", "E2E")
    assert row.excess_s == pytest.approx(200 * 0.080, rel=0.02) and adds_up(row)
    assert row.excess["decode_phase"] == pytest.approx(16, rel=0.02)


def test_rare_lengths_are_compared_with_the_whole_class(bill: Bill) -> None:
    rows = requests(
        100,
        lambda i: {
            "prompt_tokens": 10 if i in (3, 4) else 300,
            "ttft_ns": (900 if i in (3, 4) else 100) * MS,
        },
    )
    row = bill(rows).row("<512", "TTFT")
    # Two of the ten slowest, each 0.8 s above the others.
    assert row.tail_rule == "slowest 10" and row.excess_s == pytest.approx(0.16)


def test_where_tokens_are_not_counted_decodes_are_compared_whole(bill: Bill) -> None:
    make = np.random.default_rng(0)
    rows = requests(
        200,
        lambda i: {"output_tokens": None, "true_tokens": 11, "per_token_ns": int(make.integers(19, 22)) * MS},
    )
    result = bill(rows)
    assert result.row("<512", "TPOT").n == 0
    row = result.row("<512", "E2E")
    assert row.p50_s == pytest.approx(0.3) and row.excess_s == pytest.approx(0.01, abs=1e-6) and adds_up(row)


@pytest.mark.parametrize("n", [50, 400, 3000])
def test_equal_values_have_no_excess(bill: Bill, n: int) -> None:
    result = bill(requests(n, lambda i: {}))
    for metric in ("TTFT", "TPOT", "E2E"):
        row = result.row("<512", metric)
        assert row.tail_rule is not None and row.tail_n == max(5, n // 10)
        assert row.excess_s == pytest.approx(0, abs=1e-9) and adds_up(row)


def test_the_slowest_may_be_equal(bill: Bill) -> None:
    """Two percent hit a limit of 2 s: nothing lies above the p99, and they are the tail."""
    make = np.random.default_rng(0)
    capped = make.random(3000) < 0.02
    rows = requests(3000, lambda i: {"ttft_ns": 2 * S if capped[i] else (100 + i % 30) * MS})
    row = bill(rows).row("<512", "TTFT")
    assert (row.tail_rule, row.tail_n, row.p99_s) == ("at p99", int(capped.sum()), 2.0)
    assert row.excess_s == pytest.approx(2 - 0.115, abs=0.005)


def test_answers_of_one_token_have_no_tpot(bill: Bill) -> None:
    result = bill(requests(100, lambda i: {"output_tokens": 1, "ttft_ns": (100 + i) * MS}))
    assert result.row("<512", "TPOT").n == 0
    row = result.row("<512", "E2E")
    assert row.excess_s == pytest.approx(0.045) == result.row("<512", "TTFT").excess_s


def test_unlike_metrics_are_of_unlike_requests(bill: Bill) -> None:
    """TTFT's tail waits, TPOT's decodes slowly: each bill shows its own."""
    rows = requests(
        100,
        lambda i: {
            "ttft_ns": (2000 if i < 10 else 100) * MS,
            "queue_ns": (1900 if i < 10 else 0) * MS,
            "prefill_ns": 100 * MS,
            "per_token_ns": (200 if i >= 90 else 20) * MS,
        },
    )
    result = bill(rows)
    ttft, tpot, e2e = (result.row("<512", metric) for metric in ("TTFT", "TPOT", "E2E"))
    assert ttft.excess == pytest.approx({"queue": 1.9, "prefill_phase": 0.0}, abs=1e-6)
    assert tpot.excess == pytest.approx({"decode_phase": 0.18}, abs=1e-6)
    assert e2e.tail_n == 10 and adds_up(e2e)


# -- token gaps -----------------------------------------------------------------------------------


def streams(
    n: int, gap_ns: Callable[[int, int], int], tokens: int = 10, count: int = 1
) -> tuple[list[Row], list[Row]]:
    """n client rows and their chunks, `gap_ns(i, j)` before chunk j of request i."""
    rows, told = [], []
    for i in range(n):
        times = (i * S + 100 * MS + np.cumsum([0] + [gap_ns(i, j) for j in range(1, tokens)])).tolist()
        row = client(f"r{i}", i * S, times[-1] - i * S, ttft_ns=100 * MS, output_tokens=tokens * count)
        rows.append(row)
        told += chunks(row, times, count)
    return rows, told


def test_gaps_between_chunks(bill: Bill) -> None:
    rows, told = streams(200, lambda i, j: (200 if j == 5 and i % 5 == 0 else 20) * MS)
    row = bill(rows, tokens=told).row("<512", "ITL")
    assert (row.n, row.observer, row.p50_s) == (200 * 9, "client", 0.02)
    assert (row.tail_rule, row.tail_n) == ("at p99", 40)
    assert row.excess_s == pytest.approx(0.18) and row.excess == pytest.approx({"decode_phase": 0.18})


@pytest.mark.parametrize("tokens", [2, 10])
def test_equal_gaps_have_no_excess(bill: Bill, tokens: int) -> None:
    rows, told = streams(30, lambda i, j: 10 * MS, tokens)
    row = bill(rows, tokens=told).row("<512", "ITL")
    assert row.n == 30 * (tokens - 1) and row.excess_s == pytest.approx(0, abs=1e-12)
    assert sum(row.excess.values()) == pytest.approx(0, abs=1e-12)


def test_chunks_of_several_tokens_are_gaps_between_chunks(bill: Bill) -> None:
    """ITL is what a reader of the stream waits; TPOT counts the tokens."""
    rows, told = streams(30, lambda i, j: 80 * MS, count=4)
    result = bill(rows, tokens=told)
    assert result.row("<512", "ITL").p50_s == pytest.approx(0.08)
    assert result.row("<512", "TPOT").p50_s == pytest.approx(9 * 0.08 / 39)


def test_chunks_out_of_order_or_of_nobody_are_no_gaps(bill: Bill) -> None:
    rows, told = streams(30, lambda i, j: 10 * MS)
    told[5]["time_ns"] -= 25 * MS
    stranger = [{**chunk, "request_key": "nobody"} for chunk in told[:10]]
    row = bill(rows, tokens=told[::-1] + stranger).row("<512", "ITL")
    # One gap is negative, and the one after it 35 ms.
    assert row.n == 30 * 9 - 1 and max(chunk["time_ns"] for chunk in told) > START_NS


def test_gaps_are_billed_on_the_engines_clock(bill: Bill) -> None:
    """A client 7 s ahead sees the gap that a long prefill made, and the prefill's class is blamed for it."""
    served = serve(
        [Request(f"b{i}", i * 300 * MS, 40 + i * 7 % 50, 20 + i % 9) for i in range(60)]
        + [Request(f"l{i}", (i * 3 + 2) * S + 80 * MS, 3000, 2) for i in range(4)]
    )
    told = clients(served.requests)
    for row in told["requests"]:
        row["arrival_ns"] += 7 * S
        row["finished_ns"] += 7 * S
    for chunk in told["tokens"]:
        chunk["time_ns"] += 7 * S
    tables = {"iterations": served.tables["iterations"], "tokens": told["tokens"]}
    result = bill(served.tables["requests"] + told["requests"], **tables)
    itl = result.row("<512", "ITL")
    assert adds_up(itl) and itl.excess_s is not None
    assert itl.excess["others_prefill_in_decode"] == pytest.approx(itl.excess_s, rel=0.02)
    blamed = result.trace.rows(
        "SELECT culprit, sum(excess_s) AS s FROM excess WHERE metric = 'ITL' AND klass = '<512' "
        "AND component = 'others_prefill_in_decode' GROUP BY culprit ORDER BY s DESC LIMIT 1"
    )
    assert blamed[0]["culprit"] == "<8k" and blamed[0]["s"] > 0.6 * itl.excess_s


# -- objectives and classes -------------------------------------------------------------------------


def test_an_objective_can_be_broken_where_its_quantile_cannot_be_stated(bill: Bill) -> None:
    config = parse({"slo": {"<512": {"ttft_p50_s": 0.09, "ttft_p99_s": 0.01, "e2e_p50_s": 9.0}}})
    result = bill(requests(50, lambda i: {}), config)
    assert result.row("<512", "TTFT").slo_broken, "by its p50"
    assert not result.row("<512", "E2E").slo_broken
    config = parse({"slo": {"<512": {"ttft_p99_s": 0.01}}})
    of_50 = bill(requests(50, lambda i: {}), config).row("<512", "TTFT")
    assert of_50.p99_s is None
    assert of_50.slo_broken, "all 50 lie above it"
    config = parse({"slo": {"<512": {"ttft_p99_s": 9.0}}})
    assert [o.status for o in bill(requests(50, lambda i: {}), config).row("<512", "TTFT").objectives] == [
        "undecided"
    ]
    config = parse({"slo": {"<512": {"ttft_p99_s": 0.01}}})
    assert bill(requests(2000, lambda i: {}), config).row("<512", "TTFT").slo_broken


def test_classes_come_by_length_and_metrics_in_order(bill: Bill) -> None:
    sizes = [100, 700, 3000, 10_000]
    result = bill(requests(100, lambda i: {"prompt_tokens": sizes[i % 4]}))
    assert [(row.klass, row.metric) for row in result.classes] == [
        (klass, metric)
        for klass in ("<512", "<2k", "<8k", "<32k")
        for metric in ("TTFT", "TPOT", "E2E", "queue")
    ]
