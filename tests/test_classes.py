"""What a diagnosis says of classes beyond their quantiles: when, of which shape, of which tenant, and how many meet objectives."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from worlds import MS, START_NS, Billed, Row, S, billed, chunks, client, span

from tailscope.classes import MOST_GROUPS, class_tables, quantiles
from tailscope.config import Config, parse
from tailscope.render import text_classes

Tables = Callable[..., tuple[dict[str, Any], Billed]]


@pytest.fixture
def of(tmp_path: Path) -> Iterator[Tables]:
    with ExitStack() as stack:
        places = iter(range(100))

        def run(
            requests: list[Row], config: Config | None = None, klass: str | None = None, **tables: list[Row]
        ) -> tuple[dict[str, Any], Billed]:
            place = tmp_path / str(next(places))
            made = stack.enter_context(billed(place, {"requests": requests, **tables}, config))
            slos = (config or Config()).slos
            return class_tables(made.trace, made.classes, slos, klass), made

        yield run


def requests(n: int, of: Callable[[int], dict[str, Any]], every_ns: int = S) -> list[Row]:
    return [
        span(f"r{i}", i * every_ns, 1_000 * MS, **{"ttft_ns": 100 * MS, "output_tokens": 11, **of(i)})
        for i in range(n)
    ]


def shown(table: Any) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


# -- over time ---------------------------------------------------------------------------------------


def test_when_the_tail_was(of: Tables) -> None:
    """Forty of a thousand requests are slow, all between 600 s and 640 s."""
    result, _ = of(requests(1000, lambda i: {"ttft_ns": (900 if 600 <= i < 640 else 100 + i % 7) * MS}))
    first, second = result["class_times"]
    assert [(e["class"], e["metric"], e["limit"]) for e in (first, second)] == [
        ("<512", "TTFT", "p95 of the class"),
        ("<512", "E2E", "p95 of the class"),
    ]
    assert sum(row["n"] for row in first["bins"]) == 1000
    assert (
        sum(row["above"] for row in first["bins"])
        == 40
        == sum(row["above"] for row in first["bins"] if row["unusual"])
    )
    unusual = [row["start_ns"] for row in first["bins"] if row["unusual"]]
    assert START_NS + 600 * S - first["bin_s"] * S <= min(unusual) <= max(unusual) < START_NS + 640 * S
    assert not any(row["unusual"] for row in second["bins"]), "E2E is the same all the time"
    (line,) = text_classes.over_time(result["class_times"])
    assert line.plain.startswith("  <512 TTFT above ") and "▁▆▆▁" in line.plain


def test_an_objective_is_the_limit_that_is_counted(of: Tables) -> None:
    config = parse({"slo": {"<512": {"ttft_p99_s": 0.5, "ttft_p50_s": 0.2}}})
    result, _ = of(requests(300, lambda i: {"ttft_ns": (300 if i % 3 == 0 else 100) * MS}), config)
    entry = next(e for e in result["class_times"] if e["metric"] == "TTFT")
    assert (entry["limit_s"], entry["limit"], sum(row["above"] for row in entry["bins"])) == (
        0.2,
        "objective",
        100,
    )
    assert list(text_classes.over_time(result["class_times"])) == []


def test_few_requests_are_not_followed_over_time(of: Tables) -> None:
    assert of(requests(39, lambda i: {}))[0]["class_times"] == []
    of_day = of(requests(200, lambda i: {}, every_ns=3600 * S))[0]["class_times"][0]
    assert len(of_day["bins"]) <= 48 and of_day["bin_s"] % 86_400 == 0


# -- by shape ----------------------------------------------------------------------------------------


def test_a_shape_that_waits_stands_out(of: Tables) -> None:
    """Answers of 200 tokens get their first token late, one request in ten; nothing else does."""
    rows = requests(
        1000,
        lambda i: {
            "prompt_tokens": 100 + i % 20,
            "output_tokens": 200 if i % 10 == 0 else 11,
            "ttft_ns": (900 if i % 20 == 0 else 100 + i % 7) * MS,
        },
    )
    cells = of(rows)[0]["shapes"]
    assert {(*c["prompt_tokens"], *c["output_tokens"]): c["n"] for c in cells} == {
        (64, 128, 8, 16): 900,
        (64, 128, 128, 256): 100,
    }
    assert [c["output_tokens"] for c in cells if c["stands_out"]] == [[128, 256]]
    (line,) = text_classes.cells(cells)
    assert "prompts of 64-127 with answers of 128-255 tokens: 10.0% of requests, 100%" in line.plain


def test_a_long_prompt_alone_does_not_stand_out(of: Tables) -> None:
    rows = requests(
        600,
        lambda i: {
            "prompt_tokens": 5000 if i % 10 == 0 else 100,
            "ttft_ns": (900 + i % 5 if i % 10 == 0 else 100 + i % 7) * MS,
        },
    )
    cells = of(rows)[0]["shapes"]
    assert len(cells) == 2 and not any(c["stands_out"] for c in cells)
    assert cells[0]["ttft"]["p50_s"] < 0.11 < 0.9 <= cells[1]["ttft"]["p50_s"]


def test_quantiles_are_told_as_far_as_samples_allow() -> None:
    times = np.arange(2000) * S
    values = np.random.default_rng(0).random(2000)
    assert quantiles(values[:19], times[:19]) == {
        "p50_s": None,
        "p95_s": None,
        "p99_s": None,
        "reason": "too-few-samples",
    }
    some = quantiles(values[:300], times[:300])
    assert some["p95_s"] is not None and (some["p99_s"], some["reason"]) == (None, "too-few-samples")
    assert quantiles(values, times)["reason"] is None
    assert quantiles(np.sort(values), times)["p99_s"] is None, "it rises all the time: a few samples"


# -- tenants, priorities, sizes --------------------------------------------------------------------


def test_tenants_with_most_tokens_and_the_rest(of: Tables) -> None:
    """Tenant k has k requests; the ones with fewest are `other`."""
    names = [f"t{k}" for k in range(1, 12) for _ in range(k)]
    rows = [
        *requests(66, lambda i: {"tenant": names[i]}),
        span("x", 70 * S, S, tenant="t11", status="aborted"),
        span("y", 71 * S, S),
    ]
    told = of(rows)[0]["tenants"]
    assert [row["id"] for row in told] == [*(f"t{k}" for k in range(11, 3, -1)), "other"]
    assert len(told) == MOST_GROUPS + 1
    assert (told[0]["n"], told[0]["failed"], told[-1]["n"], told[-1]["members"]) == (12, 1, 7, 4)
    assert sum(row["share_of_tokens"] for row in told) == pytest.approx(1)
    assert told[0]["ttft"]["p50_s"] is None, "11 are too few"
    text = shown(text_classes.groups("tenant", told))
    assert "t11" in text and "other (4)" in text


def test_tenants_are_hostile_text(of: Tables) -> None:
    rows = requests(40, lambda i: {"tenant": "a'; DROP--" if i % 2 else "\x1b[31mred", "priority": i % 2})
    result, _ = of(rows)
    assert {row["id"] for row in result["tenants"]} == {"a'; DROP--", "\x1b[31mred"}
    assert [row["id"] for row in result["priorities"]] == ["0", "1"]
    assert "\x1b[31mred" not in shown(text_classes.groups("tenant", result["tenants"]))


def test_without_tenants_there_is_no_table(of: Tables) -> None:
    result, _ = of(requests(30, lambda i: {}))
    assert result["tenants"] == result["priorities"] == []
    assert text_classes.groups("tenant", []) is None


@pytest.mark.parametrize(("longest", "mark"), [(900, None), (1000, 10), (5000, 50)])
def test_sizes(of: Tables, longest: int, mark: int | None) -> None:
    (row,) = of(requests(101, lambda i: {"prompt_tokens": longest if i == 0 else 100}))[0]["sizes"]
    assert (row["instance"], row["n"], row["median"], row["longest"], row["mark"]) == (
        "a",
        101,
        100,
        longest,
        mark,
    )
    assert row["longest_to_median"] == longest / 100 and row["p99_to_median"] == 1


# -- objectives --------------------------------------------------------------------------------------


def test_what_failed_meets_no_objective(of: Tables) -> None:
    """60 good, 20 late, 10 refused, 5 whose end is not known yet, 5 of another class."""
    kinds: list[Row] = (
        [{}] * 60 + [{"ttft_ns": 300 * MS}] * 20 + [{"status": "rejected", "ttft_ns": None}] * 10
    )
    kinds += [{"status": "unfinished"}] * 5 + [{"prompt_tokens": 1000}] * 5
    config = parse(
        {"slo": {"<512": {"ttft_p99_s": 0.2, "ttft_p50_s": 0.05, "e2e_p99_s": 5.0, "tpot_p99_s": 0.1}}}
    )
    (entry,) = of(requests(100, lambda i: kinds[i]), config)[0]["attainment"]
    assert (entry["class"], entry["n"], entry["met"], entry["failed"], entry["unknown"]) == (
        "<512",
        90,
        60,
        10,
        5,
    )
    assert entry["share"] == pytest.approx(2 / 3) and entry["ci95"][0] < 2 / 3 < entry["ci95"][1]
    assert entry["goodput_rps"] == pytest.approx(60 / 100) and entry["rate_rps"] == pytest.approx(95 / 100)
    assert {o["metric"]: o["limit_s"] for o in entry["objectives"]} == {"TTFT": 0.2, "E2E": 5.0, "TPOT": 0.1}
    assert "66.7%" in text_classes.attained(entry) and "10 failed" in text_classes.attained(entry)


def test_slow_decode_misses_tpot(of: Tables) -> None:
    config = parse({"slo": {"<512": {"tpot_p95_s": 0.1}}})
    rows = requests(40, lambda i: {"output_tokens": (11, 5, 1, None)[i % 4]})
    (entry,) = of(rows, config)[0]["attainment"]
    # 0.9 s over 10 gaps, over 4, over none, and over nobody knows how many.
    assert (entry["met"], entry["n"], entry["unknown"]) == (20, 30, 10)


def test_too_few_are_undecided(of: Tables) -> None:
    config = parse({"slo": {"<512": {"e2e_p99_s": 5.0}}})
    (entry,) = of(requests(19, lambda i: {}), config)[0]["attainment"]
    assert (entry["share"], entry["ci95"], entry["reason"], entry["met"]) == (
        None,
        None,
        "too-few-samples",
        19,
    )
    assert text_classes.attained(entry).startswith("undecided")


def test_an_objective_of_itl_is_of_a_requests_own_gaps(of: Tables) -> None:
    """Of ten gaps one is long, in every other request: kept at p50, not at p99. Nothing is known of those without chunks."""
    rows, told = [], []
    for i in range(60):
        times = (
            i * S + 100 * MS + np.cumsum([0] + [(300 if j == 4 and i % 2 else 20) * MS for j in range(10)])
        ).tolist()
        row = client(f"r{i}", i * S, times[-1] - i * S, ttft_ns=100 * MS, output_tokens=11)
        rows.append(row)
        told += chunks(row, times) if i < 40 else []
    for quantile, met in (("p50", 40), ("p99", 20)):
        config = parse({"slo": {"<512": {f"itl_{quantile}_s": 0.1}}})
        (entry,) = of(rows, config, tokens=told)[0]["attainment"]
        assert (entry["met"], entry["n"], entry["unknown"]) == (met, 40, 20)


def test_an_objective_for_all_is_of_all_classes(of: Tables) -> None:
    config = parse({"slo": {"all": {"ttft_p50_s": 0.15}}})
    rows = requests(
        300, lambda i: {"prompt_tokens": (100, 5000)[i % 2], "ttft_ns": (100, 300)[i % 2] * MS + i}
    )
    result, made = of(rows, config)
    (entry,) = result["attainment"]
    assert (entry["class"], entry["met"], entry["n"]) == ("all", 150, 300)
    row = made.row("all", "TTFT")
    assert (row.n, row.tail_n, [o.above for o in row.objectives]) == (300, 0, [150])
    assert all(r.metric == "TTFT" for r in made.classes if r.klass == "all")
    # With a class picked there is no all.
    assert of(rows, config, "<512")[0]["attainment"] == []


def test_classes_by_tenant_priority_and_model(of: Tables) -> None:
    config = parse(
        {
            "class": [
                {"name": "gold", "where": {"tenant": ["acme", "umbrella"]}},
                {"name": "batch", "where": {"priority": [5], "model": "m1"}},
                {"name": "rest"},
            ],
            "slo": {"gold": {"e2e_p95_s": 0.5}, "batch": {"e2e_p95_s": 5.0}},
        }
    )
    kinds: list[dict[str, Any]] = [
        {"tenant": "acme"}, {"tenant": "umbrella", "priority": 9}, {"priority": 5, "model": "m1"},
        {"priority": 5, "model": "m2"}, {"priority": 4, "model": "m1"}, {},
    ]  # fmt: skip
    result, made = of(requests(240, lambda i: kinds[i % 6]), config)
    assert {row.klass: row.n for row in made.classes if row.metric == "E2E"} == {
        "gold": 80,
        "batch": 40,
        "rest": 120,
    }
    assert {e["class"]: (e["met"], e["n"]) for e in result["attainment"]} == {
        "gold": (0, 80),
        "batch": (40, 40),
    }
    assert {e["class"] for e in result["class_times"]} == {"gold", "batch", "rest"}
