"""Blame by tenant: waiting divided among the tenants whose load it was, and tokens in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.model import Diagnosis
from tailscope.sim.engine import simulate
from tailscope.sim.scenario import Cost, Engine, Load, Scenario, Sizes, Telemetry
from tailscope.sim.written import tables, write_trace
from tailscope.store import Trace

QUIET = Cost(noise=0.0)
CHAT = Load("acme", rate=6.0, tenant="acme", prompt_tokens=Sizes(200), output_tokens=Sizes(40))
BULK = Load(
    "bulk", arrivals="regular", rate=0.1, tenant="bulk", prompt_tokens=Sizes(12_000), output_tokens=Sizes(20)
)


def world(*loads: Load, **changes: Any) -> Scenario:
    settings: dict[str, Any] = {
        "engine": Engine(kv_blocks=20_000),
        "cost": QUIET,
        "telemetry": Telemetry(client=False),
        "duration_s": 60.0,
        "seed": 7,
        **changes,
    }
    return Scenario(loads, **settings)


@pytest.fixture
def diagnosed(tmp_path: Path) -> Iterator[Any]:
    opened: list[Trace] = []

    def play(scenario: Scenario) -> tuple[Trace, Diagnosis]:
        path = tmp_path / f"{len(opened)}.parquet"
        write_trace(tables(simulate(scenario)), path)
        trace = Trace(str(path), threads=1)
        opened.append(trace)
        return trace, diagnose(trace, Config())

    yield play
    for trace in opened:
        trace.__exit__(None, None, None)


def named(diagnosis: Diagnosis, rule: str) -> list[str]:
    return [f.culprit.id for f in diagnosis.findings if f.rule == rule and f.status == "found"]


def test_a_tenants_long_prompts_are_blamed_on_it_and_by_no_more_than_the_bills_say(diagnosed: Any) -> None:
    trace, diagnosis = diagnosed(world(CHAT, BULK))
    assert named(diagnosis, "noisy-tenant") == ["bulk"]
    (blame,) = trace.rows("SELECT * FROM tenant_blame WHERE culprit = 'bulk' AND metric = 'TTFT'")
    # Here the tenant is a class as well, whose blame the ledger has by class.
    (by_class,) = trace.rows(
        "SELECT sum(excess_s) AS s FROM excess WHERE klass = '<512' AND metric = 'TTFT' AND culprit = '<32k'"
    )
    assert blame["blamed_s"] == pytest.approx(by_class["s"], rel=0.15)
    assert 0 < blame["blamed_s"] <= blame["excess_s"]
    assert blame["victims"] == ["acme"]


def test_what_is_divided_is_the_bill(diagnosed: Any) -> None:
    """What all tenants together are blamed for in a tail is what its bills have of these components."""
    trace, _ = diagnosed(world(CHAT, BULK))
    (blame,) = trace.rows("SELECT * FROM tenant_blame WHERE culprit = 'bulk' AND metric = 'TTFT'")
    (billed,) = trace.rows(
        "SELECT sum(tail_s) AS s FROM excess WHERE klass = '<512' AND metric = 'TTFT' AND component IN "
        "('others_prefill_before', 'others_prefill_in_prefill', 'queue_budget', 'queue_slots', 'queue_kv')"
    )
    assert blame["suspect_tail_s"] + blame["rest_tail_s"] == pytest.approx(billed["s"], rel=0.05)


def test_tokens_in_flight(diagnosed: Any) -> None:
    """Two requests of 100 + 20 and 300 + 30 tokens that overlap, of one tenant, beside nothing of the other's."""
    both = Load(
        "acme", arrivals="at", times_s=(1.0, 1.01), prompts=(100, 300), outputs=(20, 30), tenant="acme"
    )
    late = Load("bolt", arrivals="at", times_s=(30.0,), prompts=(50,), outputs=(5,), tenant="bolt")
    trace, _ = diagnosed(world(both, late))
    rows = {row["tenant"]: row for row in trace.rows("SELECT * FROM tenants")}
    assert rows["acme"]["peak_tokens"] == 450
    assert rows["acme"]["peak_share"] == 1
    assert rows["bolt"]["peak_tokens"] == 55
    assert rows["bolt"]["tenants"] == 2


def test_tenants_beyond_the_largest_count_together_and_are_nobody_to_blame(diagnosed: Any) -> None:
    loads = [
        Load(f"t{i}", rate=0.5, tenant=f"t{i}", prompt_tokens=Sizes(200 + 10 * i), output_tokens=Sizes(20))
        for i in range(12)
    ]
    trace, diagnosis = diagnosed(world(*loads, duration_s=30.0))
    assert trace.rows("SELECT count(*) AS n, any_value(tenants) AS tenants FROM tenants") == [
        {"n": 7, "tenants": 8}
    ]
    assert named(diagnosis, "noisy-tenant") == []


def test_one_tenant_is_none_to_compare(diagnosed: Any) -> None:
    trace, diagnosis = diagnosed(world(CHAT))
    assert trace.rows("SELECT * FROM tenants") == []
    assert [c.status for c in diagnosis.checks if c.rule == "noisy-tenant"] == ["no-data"]


def test_engines_that_are_not_told_apart_count_by_their_part(diagnosed: Any) -> None:
    """With two engines and requests that name none, the blame is still a part of the bills."""
    trace, diagnosis = diagnosed(
        world(CHAT, BULK, engine=Engine(kv_blocks=20_000, data_parallel=2), telemetry=Telemetry(client=False))
    )
    assert named(diagnosis, "noisy-tenant") in (["bulk"], [])
    for row in trace.rows("SELECT * FROM tenant_blame WHERE excess_s > 0"):
        assert row["blamed_s"] <= row["excess_s"] * 1.05


def test_hostile_names_stay_names(diagnosed: Any) -> None:
    hostile = "'; DROP TABLE joined; --\n\x1b[31m"
    loads = (CHAT, Load("bulk", arrivals="regular", rate=0.1, tenant=hostile, prompt_tokens=Sizes(12_000)))
    _, diagnosis = diagnosed(world(*loads))
    assert named(diagnosis, "noisy-tenant") == [hostile]


def test_who_asked_to_be_served_after_others_blames_none_of_them_for_slots(diagnosed: Any) -> None:
    few = Engine(kv_blocks=20_000, max_num_seqs=8, policy="priority")
    holds = Load("holds", rate=1.0, tenant="holds", prompt_tokens=Sizes(200), output_tokens=Sizes(800))
    waits = Load("waits", rate=2.0, tenant="waits", prompt_tokens=Sizes(200), output_tokens=Sizes(10))
    asked = {}
    for priority in (0, 5):
        trace, diagnosis = diagnosed(world(holds, replace(waits, priority=priority), engine=few))
        asked[priority] = trace.rows(
            "SELECT sum(slots) AS s FROM tenant_blame WHERE culprit = 'holds' AND metric = 'TTFT'"
        )[0]["s"]
        long = trace.rows("SELECT count(*) AS n FROM held_up WHERE holder = 'long answers' AND ns > 0")[0][
            "n"
        ]
        assert (named(diagnosis, "noisy-tenant"), bool(long)) == (
            (["holds"], True) if not priority else ([], False)
        )
    assert asked[0] > 0 and not asked[5]


def test_slow_requests_that_wait_at_once_are_one_spell(diagnosed: Any) -> None:
    """Twenty-four that queue behind one another's long prompt, three times: the tail has three spells, not its number."""
    long = Load(
        "bulk",
        arrivals="at",
        times_s=(10.0, 30.0, 50.0),
        prompts=(12_000,) * 3,
        outputs=(2,) * 3,
        tenant="bulk",
    )
    trace, _ = diagnosed(world(CHAT, long))
    (blame,) = trace.rows(
        "SELECT tail_n, spells FROM tenant_blame WHERE culprit = 'bulk' AND metric = 'TTFT'"
    )
    assert blame["tail_n"] > 6
    assert 3 <= blame["spells"] < blame["tail_n"]
