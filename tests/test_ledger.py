"""Bills: every nanosecond booked once whatever the rows say, and to the right cause where the cause is known."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from real import CAPTURES, needs_captures
from worlds import (
    MS,
    START_NS,
    Billed,
    Cost,
    Request,
    Row,
    S,
    Served,
    aligned,
    billed,
    chunks,
    clients,
    serve,
    span,
    step,
    write,
)

from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.ingest import ingest
from tailscope.ledger.contrast import write_ledger
from tailscope.ledger.cost import MIN_FIT_STEPS, fit
from tailscope.ledger.coupling import write_coupling
from tailscope.ledger.engine_time import FOLLOWED
from tailscope.ledger.lockstep import Ends, groups, one_timeline
from tailscope.ledger.recompute import recomputed
from tailscope.ledger.steps import Place, Steps
from tailscope.schema import REQUESTS
from tailscope.sim.engine import simulate
from tailscope.sim.outcome import Outcome
from tailscope.sim.scenario import Cost as SimCost
from tailscope.sim.scenario import Engine, Load, Ranks, Scenario, Sizes
from tailscope.sim.truth import bills
from tailscope.sim.written import tables as written
from tailscope.source import Options
from tailscope.store import Trace

Tables = dict[str, list[Row]]
OTHERS = ("others_prefill_before", "others_prefill_in_prefill", "others_prefill_in_decode", "queue_budget")


#: A failing world is small enough as it is, and shrinking it would take minutes.
SETTINGS = partial(
    settings,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)

# -- conservation, in any world ---------------------------------------------------------------------

#: Durations that agree with nothing.
durations = st.none() | st.sampled_from([0, 1, -5 * MS, 10**15]) | st.integers(0, 6 * S)


@st.composite
def worlds(draw: st.DrawFn) -> Tables:
    """Requests, steps and chunks that need not fit each other at all."""
    make = random.Random(draw(st.integers(0, 10**6)))
    steps, now = [], 0
    for i in range(draw(st.sampled_from([0, 1, 29, 40, 150]))):
        now += make.choice([0, 1, 10 * MS, 15 * MS, 20 * MS, 300 * MS, 2 * S])
        prefill, decode = make.choice([None, 0, 0, 100, 2048]), make.choice([None, 0, 3, 50])
        steps.append(
            step(
                now,
                engine=make.choice([0, 0, 0, 1, None]),
                iteration=make.choice([None, i]),
                elapsed_ns=make.choice([None, 0, 10 * MS, 5 * S]),
                start_ns=make.choice([None, None, START_NS + now - 10 * MS]),
                prefill_requests=prefill and make.randrange(1, 4),
                prefill_tokens=prefill,
                decode_requests=decode,
                # More tokens than requests: drafts of speculative decoding.
                decode_tokens=decode and decode * make.choice([1, 1, 4]),
                running=make.choice([None, 0, 3, 40]),
                waiting=make.choice([None, 0, 7]),
                deferred=make.choice([None, 0, 2]),
                kv_usage=make.choice([None, 0.0, 0.5, 0.95, 1.0, float("nan"), float("inf"), -1.0]),
                time_error_ns=make.choice([None, None, None, 500 * MS]),
            )
        )
    if draw(st.booleans()):
        steps = [s for s in steps if s["engine"] == 0]
        # A second engine whose steps end with them, some of which it does not tell of.
        steps += [
            {
                **s,
                "engine": 1,
                "prefill_tokens": make.choice([0, 0, 900]),
                "end_ns": s["end_ns"] + make.choice([0, 0, 2 * MS]),
            }
            for s in steps
            if make.random() < 0.9
        ]
    requests, tokens = [], []
    for i in range(draw(st.integers(1, 40))):
        arrival = make.randrange(-3 * S, 12 * S)
        row = span(f"r{i % 30}", arrival, S, request_key=f"k{i}", engine=make.choice([0, 0, None, 1]))
        row.update(
            {name: draw(durations) for name in ("ttft_ns", "e2e_ns", "queue_ns", "prefill_ns", "decode_ns")},
            finished_ns=make.choice([None, START_NS + make.randrange(20 * S)]),
            observer=make.choice(["engine", "engine", "engine", "client", None]),
            status=make.choice(["ok", "ok", "ok", None, "aborted"]),
            prompt_tokens=make.choice([None, 0, 1, 50, 600, 5000, -3, 10**12]),
            cached_tokens=make.choice([None, 0, 10, 10**6]),
            output_tokens=make.choice([None, 0, 1, 2, 50, 3000]),
            preemptions=make.choice([None, 0, 0, 1, 3, 100]),
            kv_transfer_ns=make.choice([None, None, 0, 30 * MS, 10**15]),
        )
        requests.append(row)
        if make.random() < 0.5:
            steps_ns = make.choices([0, 1, 10 * MS, 10 * MS, 100 * MS, 3 * S, -5 * MS], k=make.randrange(30))
            tokens += chunks(row, np.cumsum([arrival, *steps_ns]).tolist(), make.choice([1, 4]))
    # Another instance that may have done the prefill of some, at any time.
    requests += [
        {**row, "instance": "p", "request_key": f"p{i}", "output_tokens": 1, "max_tokens": 1}
        for i, row in enumerate(requests)
        if make.random() < 0.2
    ]
    schedule = [
        {
            "instance": "a", "engine": 0, "request_id": f"r{make.randrange(30)}", "stay": i, "phase": "prefill", "tokens": 9,
            "iteration_first": i, "iteration_last": i, "computed_before": 0,
            "fetch_ns": START_NS + make.randrange(-S, 12 * S), "fetched_ns": START_NS + make.randrange(-S, 12 * S),
        }
        for i in range(draw(st.sampled_from([0, 0, 30])))
    ]  # fmt: skip
    return {"requests": requests, "iterations": steps, "tokens": tokens} | (
        {"schedule": schedule} if schedule else {}
    )


_SUMS = """
SELECT j.rid, j.ttft_ns, j.e2e_ns, min(l.ns) AS least,
       coalesce(sum(l.ns) FILTER (WHERE l.place IN ('wait', 'queue', 'prefill')), 0)::BIGINT AS before_ns,
       coalesce(sum(l.ns), 0)::BIGINT AS all_ns
FROM joined j LEFT JOIN bill_lines l ON l.id = j.rid
WHERE j.billed AND j.ttft_ns >= 0 AND j.e2e_ns >= j.ttft_ns GROUP BY ALL
"""
_GAP_SUMS = """
SELECT g.id, g.end_ns - g.start_ns AS gap_ns, coalesce(sum(l.ns), 0)::BIGINT AS all_ns, min(l.ns) AS least
FROM gaps g SEMI JOIN members m ON m.id = g.id AND m.metric = 'ITL'
LEFT JOIN gap_lines l ON l.id = g.id GROUP BY ALL
"""


def check_conserved(bill: Billed) -> None:
    trace = bill.trace
    for row in trace.rows(_SUMS):
        assert row["before_ns"] == row["ttft_ns"], row
        assert row["all_ns"] == row["e2e_ns"], row
        assert row["least"] is None or row["least"] > 0, row
    for row in trace.rows(_GAP_SUMS) if trace.has("tokens") else []:
        assert row["all_ns"] == row["gap_ns"] and (row["least"] is None or row["least"] > 0), row
    assert not trace.rows("SELECT 1 FROM bill_lines WHERE id NOT IN (SELECT rid FROM joined WHERE billed)")
    for klass in bill.classes:
        if klass.excess_s is not None:
            scale = max(abs(klass.excess_s), klass.p50_s or 0.0, 1e-6)
            assert abs(sum(klass.excess.values()) - klass.excess_s) <= 1e-6 * scale, klass


@SETTINGS(max_examples=20)
@given(tables=worlds(), seed=st.integers(0, 99))
def test_every_bill_sums_to_what_was_measured(
    tmp_path_factory: pytest.TempPathFactory, tables: Tables, seed: int
) -> None:
    with billed(tmp_path_factory.mktemp("world"), tables) as bill:
        check_conserved(bill)
        lines = bill.trace.rows("FROM bill_lines ORDER BY ALL")
        classes = bill.classes
    shuffled: Tables = {}
    for name, rows in tables.items():
        rows = rows if name == "tokens" else random.Random(seed).sample(rows, len(rows))
        shuffled[name] = [{**row, "source": f"{seed:016x}"} for row in rows]
    with billed(tmp_path_factory.mktemp("world"), shuffled, parts=3) as again:
        assert again.trace.rows("FROM bill_lines ORDER BY ALL") == lines, "the order of rows is no evidence"
        for one, other in zip(classes, again.classes, strict=True):
            assert (one.klass, one.metric, one.n, one.tail_n) == (
                other.klass,
                other.metric,
                other.n,
                other.tail_n,
            )
            assert (one.excess_s or 0.0) == pytest.approx(other.excess_s or 0.0, rel=1e-9, abs=1e-9)


@SETTINGS(max_examples=8)
@given(seed=st.integers(0, 10**6), budget=st.sampled_from([256, 1024, 4096]), slots=st.sampled_from([3, 50]))
def test_only_who_prefills_is_blamed_for_prefill(
    tmp_path_factory: pytest.TempPathFactory, seed: int, budget: int, slots: int
) -> None:
    """In a real engine's world: all is conserved and explained, and no class is blamed that had no prefill then or just before."""
    make = random.Random(seed)
    requests = [
        Request(
            f"r{i}", make.randrange(20) * S // 2, make.choice([30, 30, 30, 700, 5000]), make.randrange(1, 60)
        )
        for i in range(60)
    ]
    served = serve(requests, budget=budget, slots=slots)
    tables = served.tables
    told = clients(served.requests)
    tables["requests"] += told["requests"]
    tables["tokens"] = told["tokens"]
    with billed(tmp_path_factory.mktemp("world"), tables) as bill:
        check_conserved(bill)
        # A request's window from arrival to finish, and the prefills of each class.
        blamed = bill.trace.rows(
            f"SELECT j.rid, j.klass, j.arrival_ns, j.arrival_ns + j.e2e_ns AS last_ns, l.culprit FROM bill_lines l "
            f"JOIN joined j ON j.rid = l.id WHERE l.component IN {OTHERS} AND l.culprit IS NOT NULL AND l.ns > 1000"
        )
        prefills = bill.trace.rows(
            "SELECT rid, klass, arrival_ns + ttft_ns - prefill_ns AS first_ns, arrival_ns + ttft_ns AS last_ns FROM joined"
        )
        # What a prefill held back runs a few steps later, beside requests that came after it.
        [longest] = bill.trace.rows("SELECT max(tile_ns) AS ns FROM steps")
        reach = (FOLLOWED + 2) * longest["ns"]
        for row in blamed:
            assert any(
                p["klass"] == row["culprit"]
                # What it held back itself and then waits for is its own class's doing.
                and (p["rid"] != row["rid"] or row["culprit"] == row["klass"])
                and p["first_ns"] < row["last_ns"]
                and p["last_ns"] + reach > row["arrival_ns"]
                for p in prefills
            ), row
        assert (
            bill.total("unexplained")
            < 1e-6 * bill.trace.rows("SELECT sum(e2e_ns) AS ns FROM joined")[0]["ns"]
        )


def test_values_that_cannot_be_true_do_not_stop_a_diagnosis(tmp_path: Path) -> None:
    absurd = [2**63 - 1, -(2**63), 9 * 10**18, -1, 0, 2**62]
    served = serve(background())
    tables = served.tables
    told = clients(served.requests)
    tables["requests"] += told["requests"]
    tables["tokens"] = told["tokens"]
    make = random.Random(7)
    for rows in tables.values():
        for row in rows:
            for name, value in row.items():
                if isinstance(value, int) and name not in ("engine", "seq") and make.random() < 0.01:
                    row[name] = make.choice(absurd)
    with Trace(write(tmp_path, tables)) as trace:
        assert not [check for check in diagnose(trace, Config()).checks if check.status == "failed"]
        check_conserved(Billed(trace, None, []))  # type: ignore[arg-type]


# -- causes, where they are known -------------------------------------------------------------------

World = Callable[..., tuple[Served, Billed]]
COST = Cost()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Serves requests after a background of short ones, and bills them; with `told` a client tells of its tokens."""
    with ExitStack() as stack:
        places = iter(range(100))

        def run(requests: Iterable[Request], told: bool = False, **how: Any) -> tuple[Served, Billed]:
            served = serve([*background(), *requests], **how)
            tables = dict(served.tables)
            if told:
                client = clients(served.requests)
                tables |= {"requests": tables["requests"] + client["requests"], "tokens": client["tokens"]}
            opened: AbstractContextManager[Billed] = billed(tmp_path / str(next(places)), tables)
            return served, stack.enter_context(opened)

        yield run


def background() -> list[Request]:
    """What a fit needs: steps with different numbers of decodes, and some prefill."""
    return [Request(f"b{i}", i * 300 * MS, 40 + i * 7 % 50, 20 + i % 9) for i in range(40)]


#: Long after the background.
T = 20 * S


def seconds(ns: int) -> float:
    return ns / S


def test_a_short_request_that_decodes_beside_a_long_prompt(world: World) -> None:
    served, bill = world([Request("victim", T, 50, 60), Request("long", T + 300 * MS, 9000, 3)])
    prefill_s = 9000 * COST.prefill
    assert served.others_in_decode["victim"] == pytest.approx(prefill_s)
    lines = bill.of("victim")
    assert seconds(lines["decode", "others_prefill_in_decode", "<32k"]) == pytest.approx(prefill_s, rel=0.02)
    # What its own steps cost without the long prompt.
    assert seconds(lines["decode", "decode", None]) == pytest.approx(59 * COST.step, rel=0.02)
    assert bill.total("unexplained", "victim") < MS


def test_a_short_request_that_arrives_in_a_long_step(world: World) -> None:
    served, bill = world([Request("long", T, 2000, 3), Request("victim", T + 130 * MS, 50, 5)])
    step_s = COST.step + 2000 * COST.prefill
    rest_s = (step_s - 0.130) * 2000 * COST.prefill / step_s
    assert served.others_before["victim"] == pytest.approx(rest_s)
    lines = bill.of("victim")
    assert seconds(lines["wait", "others_prefill_before", "<2k"]) == pytest.approx(rest_s, rel=0.02)
    assert seconds(lines["wait", "step_wait", None]) == pytest.approx(step_s - 0.130 - rest_s, rel=0.02)
    assert seconds(lines["prefill", "own_prefill", None]) == pytest.approx(
        COST.base(1) + 50 * COST.prefill, rel=0.02
    )


def test_the_whole_wait_and_decode_of_everybody(world: World) -> None:
    make = random.Random(3)
    requests = [Request(f"s{i}", T + i * 80 * MS + make.randrange(50) * MS, 50, 40) for i in range(60)]
    requests += [Request(f"l{i}", T + (i * 1500 + 333) * MS, 6000, 5) for i in range(4)]
    served, bill = world(requests)
    assert seconds(bill.total("others_prefill_in_decode")) == pytest.approx(
        sum(served.others_in_decode.values()), rel=0.02
    )
    assert seconds(bill.total("others_prefill_before")) == pytest.approx(
        sum(served.others_before.values()), rel=0.02
    )


def test_ones_own_prefill_is_not_others(world: World) -> None:
    _, bill = world([Request("alone", T, 6000, 3)])
    assert sum(bill.total(component, "alone") for component in OTHERS) < MS
    expected = 3 * COST.step + 6000 * COST.prefill
    assert seconds(bill.total("own_prefill", "alone")) == pytest.approx(expected, rel=0.02)


def test_two_of_a_class_in_one_step_hold_each_other_up(world: World) -> None:
    """The diagonal of the blame matrix: one's own class counts, one's own tokens do not."""
    _, bill = world([Request("one", T, 600, 3), Request("two", T, 900, 3)])
    in_prefill = "others_prefill_in_prefill"
    assert seconds(bill.of("one")["prefill", in_prefill, "<2k"]) == pytest.approx(
        900 * COST.prefill, rel=0.02
    )
    assert seconds(bill.of("two")["prefill", in_prefill, "<2k"]) == pytest.approx(
        600 * COST.prefill, rel=0.02
    )


def test_two_classes_in_one_step_divide_by_tokens(world: World) -> None:
    _, bill = world(
        [Request("victim", T, 50, 60), Request("a", T + 300 * MS, 600, 3), Request("b", T + 300 * MS, 300, 3)]
    )
    lines = bill.of("victim")
    assert seconds(lines["decode", "others_prefill_in_decode", "<2k"]) == pytest.approx(
        600 * COST.prefill, rel=0.02
    )
    assert seconds(lines["decode", "others_prefill_in_decode", "<512"]) == pytest.approx(
        300 * COST.prefill, rel=0.02
    )


def test_cached_tokens_are_nobodys_prefill(world: World) -> None:
    _, bill = world(
        [
            Request("victim", T, 50, 60),
            Request("cached", T + 300 * MS, 9000, 3, cached=8700),
            Request("fresh", T + 300 * MS, 600, 3),
        ]
    )
    lines, component = bill.of("victim"), "others_prefill_in_decode"
    assert seconds(lines["decode", component, "<32k"]) == pytest.approx(300 * COST.prefill, rel=0.02)
    assert seconds(lines["decode", component, "<2k"]) == pytest.approx(600 * COST.prefill, rel=0.02)


PREEMPTED = [
    Request("victim", T, 50, 60, preempted_after=20, preempted_steps=30),
    Request("holder", T - 800 * MS, 3000, 150),
]


def test_a_preemption_is_placed_by_the_clients_tokens(world: World) -> None:
    served, bill = world([*PREEMPTED, Request("long", T + 350 * MS, 1500, 2)], told=True)
    tokens_ns = np.array(next(r for r in served.requests if r.id == "victim").tokens_ns)
    gap_s = seconds(int(np.diff(tokens_ns).max()))
    stall_s = served.preempted["victim"]
    assert stall_s < gap_s < stall_s + 0.02, "the gap is the stall and the step that gave the next token"
    assert seconds(bill.total("preempted", "victim")) == pytest.approx(stall_s, rel=0.02)
    others = seconds(bill.total("others_prefill_in_decode", "victim"))
    assert others == pytest.approx(served.others_in_decode["victim"], abs=0.02), "not what ran in the stall"
    holders = {key[2]: ns for key, ns in bill.of("victim").items() if key[1] == "preempted"}
    assert max(holders, key=lambda name: holders[name]) == "<8k", "it held most of the cache"
    # The same of the one gap, among the gaps between tokens.
    [gap] = bill.trace.rows(
        "SELECT sum(l.ns)::BIGINT AS ns FROM gap_lines l JOIN gaps g USING (id) "
        "WHERE l.component = 'preempted' AND g.preempted"
    )
    assert seconds(gap["ns"]) == pytest.approx(stall_s, rel=0.02)


def test_without_tokens_a_preemption_is_inferred_from_the_steps(world: World) -> None:
    served, bill = world(PREEMPTED)
    stall_s = served.preempted["victim"]
    assert seconds(bill.total("preempted", "victim")) == pytest.approx(stall_s, rel=0.02)
    assert bill.total("preempted") == bill.total("preempted", "victim")


def test_a_healthy_world_has_no_interference(world: World) -> None:
    _, bill = world([])
    everything = bill.trace.rows("SELECT sum(e2e_ns)::BIGINT AS ns FROM joined")[0]["ns"]
    # Their own prompts of 40 to 90 tokens, now and then beside another.
    assert sum(bill.total(component) for component in OTHERS) < 0.03 * everything
    assert bill.total("preempted") == bill.total("queue_kv") == bill.total("queue_slots") == 0
    assert bill.total("unexplained") < 1e-6 * everything


def test_a_pause_is_nobodys(world: World) -> None:
    served, bill = world(
        [Request("victim", T, 50, 60), Request("late", T + 1200 * MS, 50, 5)], pause=(T + 100 * MS, 5.0)
    )
    assert seconds(bill.of("victim")["decode", "unexplained", None]) == pytest.approx(5.0, rel=0.01)
    assert seconds(bill.of("late")["wait", "unexplained", None]) == pytest.approx(3.9, rel=0.01)
    for name in ("victim", "late"):
        assert sum(bill.total(component, name) for component in OTHERS) < 20 * MS
    [longest, *_] = bill.ledger.engines[0]["longest"]
    assert longest["seconds"] == pytest.approx(5.0, rel=0.01)
    assert longest["time_ns"] == pytest.approx(START_NS + T + 100 * MS, abs=20 * MS)
    assert served.others_in_decode["victim"] < 0.02


def test_queueing_for_a_full_cache(world: World) -> None:
    _, bill = world(
        [Request("holder", T, 5000, 300), Request("victim", T + S, 50, 5)], kv_full=(T + 900 * MS, T + 3 * S)
    )
    lines = bill.of("victim")
    waited = next(row for row in bill.trace.rows("FROM joined") if row["request_id"] == "victim")["queue_ns"]
    assert lines["queue", "queue_kv", "<8k"] == pytest.approx(waited, rel=0.02)


def test_queueing_behind_one_that_does_not_fit_the_cache(tmp_path: Path) -> None:
    """The cache is half full; yet with budget and slots left nobody is admitted from 1.0 s to 2.0 s."""
    steps = [
        step(
            i * 20 * MS,
            prefill_tokens=600 if i in (5, 101) else 0,
            decode_requests=4 + i % 3,
            decode_tokens=4 + i % 3,
            running=9 if i == 5 else 5,
            waiting=2 if 48 <= i < 100 else int(i % 7 == 0),
            kv_usage=0.5,
        )
        for i in range(1, 150)
    ]
    waits = span(
        "waits", S, 2 * S, ttft_ns=S + 40 * MS, queue_ns=S, prefill_ns=30 * MS, engine=0, prompt_tokens=600
    )
    # One that came just too late for the batch that was made ahead was not kept out.
    late = span("late", 2_240 * MS, 100 * MS, ttft_ns=50 * MS, queue_ns=20 * MS, prefill_ns=30 * MS, engine=0)
    with billed(tmp_path, {"requests": [waits, late], "iterations": steps}) as bill:
        check_conserved(bill)
        queued = sum(ns for (_, component, _), ns in bill.of("waits").items() if component == "queue_kv")
        assert seconds(queued) == pytest.approx(1.0, abs=0.06)
        assert ("queue", "queue", None) in bill.of("late")
        assert not [key for key in bill.of("late") if key[1] == "queue_kv"]


def test_queueing_for_a_slot(world: World) -> None:
    _, bill = world(
        [Request(f"h{i}", T, 50, 100) for i in range(8)] + [Request("victim", T + 100 * MS, 50, 5)], slots=8
    )
    assert seconds(bill.of("victim")["queue", "queue_slots", "<512"]) > 0.95 * seconds(
        bill.trace.rows("SELECT queue_ns FROM joined WHERE request_id = 'victim'")[0]["queue_ns"]
    )


def test_queueing_for_the_token_budget(world: World) -> None:
    _, bill = world([Request("long", T, 9000, 3), Request("victim", T + 100 * MS, 50, 5)])
    assert seconds(bill.of("victim")["queue", "queue_budget", "<32k"]) == pytest.approx(
        seconds(bill.trace.rows("SELECT queue_ns FROM joined WHERE request_id = 'victim'")[0]["queue_ns"]),
        rel=0.02,
    )


def test_a_prefill_whose_client_left_is_nobodys(world: World) -> None:
    """It leaves no row: its work is known from the steps, its class is not, and nobody else is blamed."""
    served, bill = world(
        [
            Request("victim", T, 50, 60),
            Request("gone", T + 300 * MS, 6000, 3, aborted=True),
            Request("late", T + 400 * MS, 50, 5),
        ]
    )
    others = {
        key[2]: seconds(ns) for key, ns in bill.of("victim").items() if key[1] == "others_prefill_in_decode"
    }
    assert others.pop(None) == pytest.approx(6000 * COST.prefill, rel=0.02)
    assert sum(others.values()) == pytest.approx(50 * COST.prefill, rel=0.05), "that of the late one"
    late = bill.of("late")
    assert not [key for key, ns in late.items() if key[2] is not None and ns > MS]
    assert seconds(late["wait", "others_prefill_before", None]) == pytest.approx(
        served.others_before["late"], rel=0.02
    )
    assert late["queue", "queue_budget", None] > 300 * MS
    assert late["prefill", "others_prefill_in_prefill", None] > 300 * MS


def test_who_is_outside_the_steps_time_keeps_the_emitters_phases(world: World, tmp_path: Path) -> None:
    served = serve(background())
    early = span("early", -100 * S, 2 * S, ttft_ns=S, queue_ns=S // 4, prefill_ns=S // 2, engine=0)
    with billed(
        tmp_path / "early", {**served.tables, "requests": [*served.tables["requests"], early]}
    ) as bill:
        assert bill.of("early") == {
            ("wait", "frontend", None): S // 4,
            ("queue", "queue", None): S // 4,
            ("prefill", "prefill_phase", None): S // 2,
            ("decode", "decode_phase", None): S,
        }


def test_too_few_steps_for_a_model_explain_nothing(tmp_path: Path) -> None:
    steps = [
        step(i * 10 * MS, prefill_tokens=i % 3 * 10, prefill_requests=1) for i in range(MIN_FIT_STEPS - 1)
    ]
    with billed(tmp_path, {"requests": [span("r", 0, 200 * MS, engine=0)], "iterations": steps}) as bill:
        check_conserved(bill)
        assert bill.ledger.engines[0]["cost_error"] is None
        assert {component for _, component, _ in bill.of("r")} == {"unexplained"}


# -- engines that step together ------------------------------------------------------------------

CHAT = Load("chat", rate=12.0, prompt_tokens=Sizes(150, 0.4, 8, 500), output_tokens=Sizes(60, 0.5, 4, 200))


def moe_pair(lockstep: bool) -> Scenario:
    """Two data-parallel engines with chats and, now and then on either of them, a long document."""
    documents = Load(
        "documents",
        arrivals="at",
        times_s=(5.0, 11.0, 18.0, 26.0),
        prompts=(9_000,) * 4,
        outputs=(20,) * 4,
    )
    return Scenario(
        (CHAT, documents),
        engine=Engine(data_parallel=2, moe=lockstep, kv_blocks=20_000),
        ranks=Ranks(layers=2),
        cost=SimCost(prefill_token=4e-5, attention=1e-9, noise=0.05),
        duration_s=30.0,
        seed=5,
    )


def true_seconds(
    outcome: Outcome, components: Iterable[str], load: int | None, requests: NDArray[Any]
) -> float:
    true = bills(outcome)
    return sum(
        float(seconds[requests].sum())
        for (_, component, culprit), seconds in true.lines.items()
        if component in components and culprit == load
    )


def billed_seconds(
    bill: Billed, components: Sequence[str], culprit: str | None, engine: int | None = None
) -> float:
    rows = bill.trace.rows(
        "SELECT coalesce(sum(l.ns), 0)::BIGINT AS ns FROM bill_lines l JOIN joined j ON j.rid = l.id "
        "WHERE l.component IN (SELECT unnest($components)) AND l.culprit IS NOT DISTINCT FROM $culprit "
        "AND ($engine IS NULL OR j.engine = $engine)",
        {"components": list(components), "culprit": culprit, "engine": engine},
    )
    return seconds(rows[0]["ns"])


def test_prefill_on_one_engine_is_blamed_for_long_steps_of_another(tmp_path: Path) -> None:
    outcome = simulate(moe_pair(lockstep=True))
    q = outcome.requests
    parts = ("others_prefill_before", "others_prefill_in_prefill", "others_prefill_in_decode")
    with billed(tmp_path, written(outcome)) as bill:
        check_conserved(bill)
        assert all(engine["cost_error"] < 0.1 for engine in bill.ledger.engines)
        assert sum(engine["unexplained_s"] for engine in bill.ledger.engines) < 1.0
        for engine in (0, 1):
            chats = np.flatnonzero((q.load == 0) & (q.engine == engine))
            expected = true_seconds(outcome, parts, 1, chats)
            assert expected > 3.0
            own = billed_seconds(bill, parts, "<32k", engine)
            own -= true_seconds(outcome, parts, 1, np.flatnonzero((q.load == 1) & (q.engine == engine)))
            assert own == pytest.approx(expected, rel=0.1)


def test_engines_that_step_alone_have_bills_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = written(simulate(moe_pair(lockstep=False)))
    with billed(tmp_path / "decided", made) as bill:
        check_conserved(bill)
        decided = bill.trace.rows("FROM bill_lines ORDER BY ALL")
        assert [time.engines for time in bill.ledger.times.values()] == [1, 1]
    monkeypatch.setattr("tailscope.ledger.bills.groups", lambda ends: [[engine] for engine in ends])
    with billed(tmp_path / "alone", made) as bill:
        assert bill.trace.rows("FROM bill_lines ORDER BY ALL") == decided


def ends(lengths_ns: Sequence[int], jitter_ns: int = 0, first_ns: int = 0, seed: int = 0) -> Ends:
    end = START_NS + first_ns + np.cumsum(np.array(lengths_ns, np.int64))
    end = end + np.random.default_rng(seed).integers(-jitter_ns, jitter_ns + 1, len(end))
    return Ends(np.concatenate([[START_NS + first_ns], end[:-1]]), end)


def test_who_steps_together_is_told_by_the_ends_of_the_steps() -> None:
    make = np.random.default_rng(1)
    lengths = np.where(make.random(400) < 0.1, 60 * MS, 10 * MS) + make.integers(0, MS, 400)
    one, other = ends(lengths.tolist(), MS, seed=1), ends(lengths.tolist(), MS, seed=2)
    assert groups({0: one, 1: other}) == [[0, 1]]
    # Without its idle time, and in part.
    some = Ends(other.start_ns[100:250], other.end_ns[100:250])
    assert groups({0: one, 1: some}) == [[0, 1]]
    # Each its own long steps.
    shuffled = ends(make.permutation(lengths).tolist(), MS)
    assert groups({0: one, 1: shuffled, 2: other}) == [[0, 2], [1]]
    # Never busy at one time, too few steps, or alike all the time.
    later = Ends(other.start_ns + 100 * S, other.end_ns + 100 * S)
    assert groups({0: one, 1: later}) == [[0], [1]]
    few = Ends(other.start_ns[:40], other.end_ns[:40])
    assert groups({0: one, 1: few}) == [[0], [1]]
    alike = ends([10 * MS] * 400)
    assert groups({0: alike, 1: alike}) == [[0], [1]]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), engines=st.integers(2, 4))
def test_one_timeline_loses_nothing(seed: int, engines: int) -> None:
    make = np.random.default_rng(seed)
    alike = ends(make.choice([0, 10 * MS, 60 * MS], 60).tolist())
    given_steps = []
    for _ in range(engines):
        kept = np.flatnonzero(make.random(60) < 0.7)
        kept = kept if len(kept) else np.array([7])
        end = np.sort(alike.end_ns[kept] + make.integers(-MS, MS, len(kept)) * int(make.integers(0, 3)))
        start = np.minimum(np.maximum(alike.start_ns[kept], np.concatenate([[0], end[:-1]])), end)
        amounts = {
            name: make.integers(0, 9, len(kept)).astype(float)
            for name in Steps.__dataclass_fields__
            if name not in ("start_ns", "end_ns")
        }
        given_steps.append(Steps(start, end, **{**amounts, "own": np.ones(len(kept))}))
    made = one_timeline(given_steps)
    assert len({len(steps.end_ns) for steps in made}) == 1
    for before, after in zip(given_steps, made, strict=True):
        assert (after.start_ns <= after.end_ns).all() and (after.start_ns[1:] >= after.end_ns[:-1]).all()
        assert np.isin(after.end_ns[after.own == 1], before.end_ns).all()
        for name in ("own", "prefill_tokens", "decode_requests", "recompute_tokens"):
            assert getattr(after, name).sum() == getattr(before, name).sum()


# -- what is computed again ----------------------------------------------------------------------


def squeezed() -> Scenario:
    load = Load(
        "chat", rate=6.0, prompt_tokens=Sizes(200, 0.3, 8, 500), output_tokens=Sizes(350, 0.3, 50, 700)
    )
    return Scenario(
        (load,),
        engine=Engine(kv_blocks=420, max_model_len=2048),
        cost=SimCost(prefill_token=6e-5, noise=0.05),
        duration_s=40.0,
        seed=2,
    )


@pytest.mark.parametrize("told", [False, True])
def test_what_a_preemption_makes_others_compute_again(tmp_path: Path, told: bool) -> None:
    outcome = simulate(squeezed())
    made = written(outcome)
    everybody = np.arange(len(outcome.requests))
    if told:
        steps = outcome.engines[0].steps
        again = {int(k): int(n) for k, n in enumerate(steps.recompute_tokens)}
        rows = made["iterations"].to_pylist()
        for row in rows:
            row["recompute_tokens"] = again[row["iteration"]]
        made = {**made, "iterations": pa.Table.from_pylist(rows, schema=made["iterations"].schema)}
    with billed(tmp_path, made) as bill:
        check_conserved(bill)
        # The victims' own steps are part of their preemption in truth, and here where it is placed by tokens.
        expected = true_seconds(outcome, ["recompute"], None, everybody)
        assert expected > 5.0
        assert seconds(bill.total("recompute")) == pytest.approx(expected, rel=0.2)


def test_drafts_are_not_computed_again(tmp_path: Path) -> None:
    """Extra decode tokens in most steps, beside a preemption or two; and in few, where nobody was preempted."""
    n = 1000
    requests = np.full(n, 4.0)
    unknown, none = np.full(n, np.nan), np.zeros(n)
    some = np.arange(n) % 10 == 0
    often, seldom = requests + 8, requests + np.where(some, 8, 0)
    rare = requests + np.where(np.arange(n) % 100 == 0, 700, 0)
    assert not recomputed(requests, often, none, unknown, 20.0).any()
    assert not recomputed(requests, seldom, none, unknown, 20.0).any()
    assert not recomputed(requests, seldom, none, unknown, 0.0).any()
    assert not recomputed(requests, rare, none, unknown, 0.0).any()
    assert recomputed(requests, rare, none, unknown, 20.0).sum() == 7_000
    assert recomputed(requests, rare, np.where(some, 1.0, 0.0), unknown, np.nan).sum() == 7_000
    # Nobody tells of preemptions: so many at once nobody drafts.
    assert recomputed(requests, rare, unknown, unknown, np.nan).sum() == 7_000
    assert not recomputed(requests, seldom, unknown, unknown, np.nan).any()
    # The engine's own word counts.
    assert recomputed(requests, often, none, np.where(some, 5.0, np.nan), 0.0).sum() == 500


@needs_captures
def test_drafts_of_a_real_engine_are_not_computed_again(tmp_path: Path) -> None:
    trace_path = tmp_path / "trace.parquet"
    ingest([CAPTURES / "vllm-cpu" / "run5-dense-ngram-spec"], trace_path, config=Config(), options=Options())
    with Trace(str(trace_path), threads=1) as trace:
        diagnose(trace, Config())
        assert trace.rows("SELECT 1 FROM steps WHERE decode_tokens > decode_requests")
        assert not trace.rows("SELECT 1 FROM bill_lines WHERE component = 'recompute'")


# -- cost model -----------------------------------------------------------------------------------

Floats = NDArray[np.float64]
BASE, PREFILL = np.array([0.01, 1e-4, 3e-3, 2e-5]), np.array([5e-4, 1e-4, 1e-8])


def features(n: int, seed: int = 0) -> tuple[Floats, Floats, Floats]:
    """Steps as they come, and what they cost without noise."""
    make = np.random.default_rng(seed)
    drafts = np.where(make.random(n) < 0.3, make.integers(0, 50, n), 0)
    base = np.column_stack([np.ones(n), make.integers(0, 64, n), make.random(n), drafts])
    tokens = np.where(make.random(n) < 0.3, make.integers(1, 2048, n), 0)
    prefill = np.column_stack(
        [(tokens > 0) * make.integers(1, 4, n), tokens, tokens * make.integers(0, 8000, n)]
    )
    base, prefill = base.astype(np.float64), prefill.astype(np.float64)
    return base, prefill, base @ BASE + prefill @ PREFILL


@pytest.mark.parametrize("n", [MIN_FIT_STEPS, 1000, 100_000])
def test_the_cost_model_is_exact_without_noise(n: int) -> None:
    base, prefill, tile = features(n)
    model = fit(base, prefill, tile)
    assert model is not None
    np.testing.assert_allclose(model.base, BASE, rtol=1e-6)
    np.testing.assert_allclose(model.prefill, PREFILL, rtol=1e-6)
    assert model.error < 1e-9 and model.explained > 1 - 1e-9 and model.spread == pytest.approx(1)


@pytest.mark.parametrize("seed", range(3))
def test_the_cost_model_is_robust(seed: int) -> None:
    """5 % of the steps take 100 times as long."""
    base, prefill, clean = features(2000, seed)
    make = np.random.default_rng(seed + 100)
    tile = clean * make.lognormal(0, 0.05, len(clean)) * np.where(make.random(len(clean)) < 0.05, 100, 1)
    model = fit(base, prefill, tile)
    assert model is not None
    np.testing.assert_allclose(base @ model.base + prefill @ model.prefill, clean, rtol=0.06)
    assert (model.base >= 0).all() and (model.prefill >= 0).all()
    for part in model.split(base, prefill, tile):
        assert (part >= 0).all()
    np.testing.assert_allclose(sum(model.split(base, prefill, tile)), tile, rtol=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(MIN_FIT_STEPS, 200))
def test_the_cost_model_is_never_negative(seed: int, n: int) -> None:
    """Also where more work seems to take less time, and where columns say nothing."""
    make = np.random.default_rng(seed)
    base, prefill, _ = features(n, seed)
    kept = make.random(7) < 0.6
    base, prefill = base * kept[:4], prefill * kept[4:]
    tile = make.lognormal(-4, 2, n) * (make.random(n) < 0.9)
    model = fit(base, prefill, tile)
    if np.count_nonzero(tile) < MIN_FIT_STEPS:
        assert model is None
        return
    assert model is not None and model.spread >= 1
    assert (model.base >= 0).all() and (model.prefill >= 0).all()
    parts = model.split(base, prefill, tile)
    assert all((part >= 0).all() and np.isfinite(part).all() for part in parts)
    np.testing.assert_allclose(sum(parts), tile, rtol=1e-9, atol=1e-15)


def test_steps_of_which_nothing_is_left_do_not_spoil_the_cost_model() -> None:
    """What remains of a step after its ranks' waits may be next to nothing; relative errors there say nothing."""
    base, prefill, clean = features(2000)
    tile = np.where(np.arange(2000) % 10 == 0, 1e-18, clean)
    model = fit(base, prefill, tile)
    assert model is not None and model.usable and model.error < 0.05
    np.testing.assert_allclose(base @ model.base + prefill @ model.prefill, clean, rtol=0.05)


def test_a_cost_model_that_fits_badly_explains_nothing() -> None:
    base, prefill, _ = features(2000)
    tile = np.random.default_rng(1).lognormal(-4, 4, 2000)
    model = fit(base, prefill, tile)
    assert model is not None and not model.usable and 0.5 < model.error <= 1
    parts = model.split(base, prefill, tile)
    assert not parts[0].any() and not parts[1].any()
    np.testing.assert_array_equal(parts[2], tile)


def test_the_cost_model_of_too_little() -> None:
    base, prefill, tile = features(MIN_FIT_STEPS - 1)
    assert fit(base, prefill, tile) is None
    base, prefill, tile = features(100)
    assert fit(base, prefill, np.zeros(100)) is None
    constant = fit(np.ones((100, 4)), np.zeros((100, 3)), np.full(100, 0.02))
    assert constant is not None and constant.base.sum() == pytest.approx(0.02) and not constant.prefill.any()
    nothing = fit(np.zeros((100, 4)), np.zeros((100, 3)), tile)
    assert nothing is not None
    np.testing.assert_array_equal(nothing.split(np.zeros((100, 4)), np.zeros((100, 3)), tile)[2], tile)


# -- places ---------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    gaps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12),
    asked=st.lists(st.integers(-5, 140), min_size=2, max_size=2),
)
def test_two_look_ups_give_the_busy_time_between(gaps: list[tuple[int, int]], asked: list[int]) -> None:
    """Against counting nanosecond by nanosecond; steps may be empty and idle time may lie between them."""
    bounds = np.cumsum(np.array(gaps).ravel())
    start, end = bounds[0::2], bounds[1::2]
    zero = np.zeros(len(start))
    steps = Steps(START_NS + start, START_NS + end, *([zero] * (len(fields(Steps)) - 2)))
    busy = np.concatenate([[0], np.cumsum(end - start)])
    low, high = sorted(asked)

    def at(ns: int) -> float:
        place = Place(steps, np.array([START_NS + ns]))
        index, share = int(place.index[0]), float(place.share[0])
        return float(busy[index] + share * (busy[index + 1] - busy[index]))

    expected = sum(1 for ns in range(low, high) if any(s <= ns < e for s, e in zip(start, end, strict=True)))
    assert at(high) - at(low) == pytest.approx(expected)


# -- scale ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("every_ns", [0, MS], ids=["one time", "one after another"])
def test_four_times_the_requests_take_nothing_like_sixteen_times_the_time(
    tmp_path: Path, every_ns: int
) -> None:
    def cpu_seconds(n: int) -> float:
        arrival = START_NS + np.arange(n) * every_ns
        requests = REQUESTS.batch(
            {
                "instance": "a",
                "engine": 0,
                "observer": "engine",
                "status": "ok",
                "request_key": [f"{i}" for i in range(n)],
                "request_id": "same",
                "arrival_ns": pa.array(arrival),
                "ttft_ns": pa.array(np.arange(n) % 97 * MS + 50 * MS),
                "e2e_ns": S,
                "queue_ns": MS,
                "prefill_ns": 10 * MS,
                "prompt_tokens": pa.array(np.where(np.arange(n) % 50 == 0, 5000, 100)),
                "output_tokens": 10,
                "preemptions": pa.array((np.arange(n) % 7 == 0).astype(np.int64)),
            }
        )
        steps = [
            step(i * 20 * MS, prefill_tokens=i % 3 * 100, prefill_requests=i % 3, kv_usage=0.95)
            for i in range(300)
        ]
        with aligned(tmp_path / str(n), {"requests": requests, "iterations": steps}) as trace:
            began = time.process_time()
            write_ledger(trace, {}, (), None)
            write_coupling(trace)
            return time.process_time() - began

    assert cpu_seconds(24_000) < 9 * max(min(cpu_seconds(6_000), cpu_seconds(6_001)), 0.05)
