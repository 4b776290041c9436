"""The simulated engine does what vLLM's scheduler does, step by step, and the truth about it adds up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailscope.errors import UsageError
from tailscope.sim.engine import simulate
from tailscope.sim.outcome import (
    ABORTED,
    BY_KV,
    BY_SLOTS,
    DECODE,
    OK,
    PREFILL,
    RECOMPUTE,
    REJECTED,
    TIMEOUT,
    Outcome,
)
from tailscope.sim.scenario import Cost, Engine, Fault, Gateway, Load, Ranks, Scenario, Sizes, Telemetry
from tailscope.sim.scenario_file import without
from tailscope.sim.truth import bills

#: A step of 10 ms, and 1 ms for each thousand prefill tokens; nothing random, nothing else.
PLAIN = Cost(
    step=0.010, decode_request=0.0, context_token=0.0, prefill_token=1e-6, prefill_request=0.0, attention=0.0,
    noise=0.0, host_gap=0.0, frontend=1e-6, output=0.0,
)  # fmt: skip
SYNC = Engine(
    async_scheduling=False, enable_prefix_caching=False, max_num_batched_tokens=2048, max_num_seqs=8
)


def at(*requests: tuple[float, int, int], name: str = "a", **more: Any) -> Load:
    """(instant, prompt, output) of each request."""
    times, prompts, outputs = zip(*requests, strict=True)
    return Load(name, "at", times_s=times, prompts=prompts, outputs=outputs, **more)


def play(*loads: Load, engine: Engine = SYNC, cost: Cost = PLAIN, **more: Any) -> Outcome:
    more.setdefault("telemetry", Telemetry(network_s=0.0))
    return simulate(
        Scenario(loads, engine=engine, cost=cost, duration_s=more.pop("duration_s", 10.0), **more)
    )


def chunks(outcome: Outcome, request: int, phase: int = PREFILL) -> list[tuple[int, int]]:
    """(step, tokens) of a request's prefill on the first engine."""
    r = outcome.engines[0].runs
    mine = (r.request == request) & (r.phase == phase) & (r.tokens > 0)
    return [(int(s), int(t)) for s, t in zip(r.first[mine], r.tokens[mine], strict=True)]


# -- order and budget ----------------------------------------------------------------------------


def test_a_long_prompt_is_chunked_by_what_the_budget_leaves() -> None:
    outcome = play(at((0.0, 100, 50), (0.1, 5000, 2)))
    assert [tokens for _, tokens in chunks(outcome, 1)] == [2047, 2047, 906], "the decode has its token first"
    steps = outcome.engines[0].steps
    assert (steps.prefill_tokens + steps.decode_tokens).max() == 2048


def test_one_request_may_be_held_to_a_part_of_the_budget() -> None:
    engine = replace(SYNC, long_prefill_token_threshold=500)
    outcome = play(at((0.0, 100, 50), (0.1, 1200, 2), (0.1, 100, 2)), engine=engine)
    assert [tokens for _, tokens in chunks(outcome, 1)] == [500, 500, 200]
    assert chunks(outcome, 2)[0][0] <= chunks(outcome, 1)[1][0], "there is room for the short one beside it"
    alone = play(at((0.0, 1200, 2)), engine=engine)
    assert [tokens for _, tokens in chunks(alone, 0)] == [1200], "one that is alone takes all there is"


def test_first_come_first_served_or_by_priority() -> None:
    one = replace(SYNC, max_num_seqs=1)
    early, late = at((0.0, 10, 5), name="early", priority=5), at((0.001, 10, 5), (0.002, 10, 5), name="late")
    assert list(np.argsort(play(early, late, engine=one).requests.scheduled_s)) == [0, 1, 2]
    # One is running when a more urgent one and a less urgent one wait.
    loads = (
        at((0.0, 10, 5), name="first"),
        at((0.001, 10, 5), name="bulk", priority=9),
        at((0.002, 10, 5), name="now"),
    )
    assert list(np.argsort(play(*loads, engine=one).requests.scheduled_s)) == [0, 1, 2]
    assert list(np.argsort(play(*loads, engine=replace(one, policy="priority")).requests.scheduled_s)) == [
        0,
        2,
        1,
    ]


def test_slots_are_kept() -> None:
    outcome = play(at(*[(0.0, 10, 20)] * 20), engine=replace(SYNC, max_num_seqs=4))
    steps = outcome.engines[0].steps
    assert steps.running.max() == 4 and steps.waiting.max() == 16
    assert set(steps.blocked[steps.waiting > 0]) == {BY_SLOTS}


def test_a_head_that_does_not_fit_stops_admission() -> None:
    """Behind it a small one waits, though it would fit."""
    engine = replace(SYNC, kv_blocks=101, block_size=16, max_model_len=1600)
    outcome = play(at((0.0, 800, 100), (0.001, 1000, 5), (0.002, 16, 5)), engine=engine)
    q = outcome.requests
    assert q.scheduled_s[1] >= q.last_token_s[0] and q.scheduled_s[2] >= q.scheduled_s[1]
    assert (outcome.engines[0].steps.blocked == BY_KV).any()
    free = play(at((0.0, 800, 100), (0.002, 16, 5)), engine=engine)
    assert free.requests.scheduled_s[1] < 0.02


@pytest.mark.parametrize(("asynchronous", "later"), [(False, 1), (True, 2)])
def test_a_request_that_comes_in_a_step_runs_in_the_next_or_with_lead_in_the_one_after(
    asynchronous: bool, later: int
) -> None:
    engine = replace(SYNC, async_scheduling=asynchronous)
    outcome = play(at((0.0, 10, 50), (0.105, 10, 5)), engine=engine)
    end = outcome.engines[0].steps.end_s
    during = int(np.searchsorted(end, 0.105))
    assert chunks(outcome, 1)[0][0] == during + later
    q = outcome.requests
    assert q.queued_s[1] == end[during] == q.scheduled_s[1], "queued and scheduled when that step ends"


# -- KV cache ------------------------------------------------------------------------------------

#: Two answers of 400 tokens fit, not three.
TIGHT = replace(SYNC, kv_blocks=66, block_size=16, max_model_len=1024)


def test_the_last_one_is_preempted_and_computed_again() -> None:
    outcome = play(at((0.0, 100, 400), (0.0, 100, 400), (0.0, 100, 400)), engine=TIGHT)
    q = outcome.requests
    assert list(q.preemptions > 0) == [False, False, True]
    [(step, tokens), *_] = chunks(outcome, 2, RECOMPUTE)
    given = outcome.engines[0].runs
    before = (given.request == 2) & given.gives & (given.last < step)
    assert tokens == 100 + int((given.last - given.first + 1)[before].sum()), (
        "its prompt and its answer so far"
    )
    assert q.output[2] == 400 and (q.status == OK).all()
    assert q.scheduled_s[2] < 0.02, "it keeps its first scheduling"
    steps = outcome.engines[0].steps
    assert steps.preempted.sum() == q.preemptions.sum() == steps.preempted_told.sum()
    assert np.flatnonzero(steps.preempted_told)[0] >= np.flatnonzero(steps.preempted)[0]


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    outcome = play(at(*[(0.0, 100, 400)] * 6), engine=TIGHT)
    steps, runs = outcome.engines[0].steps, outcome.engines[0].runs
    first = {int(r): int(runs.first[runs.request == r].min()) for r in range(6)}
    assert not {k for k in first.values() if steps.preempted[k]}


def test_the_least_urgent_is_preempted() -> None:
    loads = (at((0.0, 100, 400), name="bulk", priority=9), at((0.0, 100, 400), (0.0, 100, 400), name="now"))
    q = play(*loads, engine=replace(TIGHT, policy="priority")).requests
    assert [bool(p) for p in q.preemptions] == [True, False, False]


def test_a_watermark_keeps_blocks_free_when_admitting() -> None:
    loads = at((0.0, 100, 400), (0.0, 100, 400), (0.0, 100, 400))
    plain = play(loads, engine=TIGHT).requests
    kept = play(loads, engine=replace(TIGHT, watermark=0.75)).requests
    assert plain.preemptions.sum() > 0 and kept.preemptions.sum() == 0


def test_a_common_beginning_is_computed_once() -> None:
    load = at((0.0, 500, 5), (1.0, 500, 5), (2.0, 500, 5), prefix_tokens=330)
    assert list(play(load).requests.cached) == [0, 0, 0]
    cached = play(load, engine=replace(SYNC, enable_prefix_caching=True)).requests.cached
    assert list(cached) == [0, 320, 320], "whole blocks of 16"


def test_a_common_beginning_is_lost_when_its_blocks_are_needed() -> None:
    engine = replace(SYNC, enable_prefix_caching=True, kv_blocks=65, max_model_len=1024)
    load = at((0.0, 500, 5), (2.0, 500, 5), prefix_tokens=330)
    assert list(play(load, engine=engine).requests.cached) == [0, 320]
    between = at((1.0, 1010, 5), name="between")
    assert list(play(load, between, engine=engine).requests.cached) == [0, 0, 0]


def test_beginnings_shared_to_different_lengths_are_given_back_whole() -> None:
    """Requests shorter than the common beginning share a part of it, and longer ones make it longer."""
    engine = replace(
        SYNC,
        enable_prefix_caching=True,
        kv_blocks=3_000,
        max_model_len=8_000,
        long_prefill_token_threshold=256,
    )
    times = (0.0, 0.5, 0.6, 0.7, 3.0)
    loads = [
        at((t, prompt, 20), name=f"l{i}", prefix_tokens=min(prompt - 1, 3_200))
        for i, (t, prompt) in enumerate(zip(times, (1_601, 3_201, 6_401, 400, 3_300), strict=True))
    ]
    steps = play(*loads, engine=engine).engines[0].steps
    assert steps.kv_usage[-1] <= 0.15, "nothing is pinned that nobody uses"


def test_a_pair_serves_in_order_and_holds_what_is_not_sent() -> None:
    engine = replace(
        SYNC,
        prefill_replicas=1,
        max_num_seqs=1,
        kv_blocks=400,
        kv_transfer_latency_s=0.05,
        max_model_len=2048,
    )
    q = play(at(*[(0.0, 100, 30)] * 5), engine=engine).requests
    assert list(np.argsort(q.scheduled_s, kind="stable")) == [0, 1, 2, 3, 4]
    slow = replace(engine, max_num_seqs=8, kv_blocks=130, kv_transfer_latency_s=2.0)
    q = play(at((0.0, 1900, 2), (0.1, 1900, 2)), engine=slow).requests
    first, second = play(at((0.0, 1900, 2), (0.1, 1900, 2)), engine=slow).engines[-1].steps.end_s[[0, -1]]
    assert second > first + 2.0, "the second prefill waits until the first one's blocks have been sent"


def test_a_world_that_stands_still_or_never_ends_is_said_in_a_sentence() -> None:
    pair = replace(
        SYNC, prefill_replicas=1, max_num_seqs=1, kv_blocks=34, max_model_len=512, max_num_batched_tokens=64
    )
    with pytest.raises(UsageError, match="stands still for ever"):
        play(at(*[(0.0, 200, 250)] * 4), engine=pair)
    with pytest.raises(UsageError, match="not over"):
        play(at((0.0, 10, 5)), faults=(Fault("pause", from_s=0.0, length_s=1e6),))


def test_pauses_that_overlap_do_not_add_up() -> None:
    pauses = tuple(Fault("pause", from_s=t, length_s=5.0) for t in (2.0, 2.0, 4.0))
    steps = play(Load("a", rate=20), cost=Cost(), faults=pauses).engines[0].steps
    assert steps.pause_s.sum() == pytest.approx(7.0)


def test_a_refused_user_comes_back_later() -> None:
    load = Load("a", "closed", users=2, think_s=0.0)
    q = play(load, gateway=Gateway(max_in_flight=1, max_queue=0), duration_s=1.0).requests
    assert 10 < len(q) < 300 and (q.status == REJECTED).any()


def test_all_blocks_come_back() -> None:
    """The simulator checks it itself at the end of every world."""
    load = Load(
        "a",
        rate=30,
        timeout_s=0.7,
        abort_share=0.3,
        prefix_tokens=64,
        prefixes=3,
        output_tokens=Sizes(60, 0.5),
    )
    outcome = play(load, engine=replace(TIGHT, enable_prefix_caching=True), cost=Cost())
    assert {OK, ABORTED, TIMEOUT} <= set(outcome.requests.status)


# -- several engines -------------------------------------------------------------------------------


def test_engines_with_experts_step_together_and_idle_ones_compute_dummies() -> None:
    engine = replace(SYNC, data_parallel=2, moe=True)
    outcome = play(at((0.0, 3000, 50)), engine=engine)
    one, two = (e.steps for e in outcome.engines)
    assert len(one) == len(two) > 50 and (one.end_s == two.end_s).all()
    assert not one.dummy.any() and two.dummy.all()


def test_a_pair_hands_over_its_cache() -> None:
    engine = replace(SYNC, prefill_replicas=1, kv_transfer_latency_s=0.2, kv_transfer_tokens_per_s=10_000)
    outcome = play(at((0.0, 1000, 20)), engine=engine)
    q = outcome.requests
    prefill, decode = outcome.engines[q.prefill_engine[0]], outcome.engines[q.engine[0]]
    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert prefill.steps.prefill_tokens.sum() == 1000 and decode.steps.prefill_tokens.sum() == 1
    assert q.kv_transfer_s[0] == pytest.approx(0.3)
    assert q.scheduled_s[0] - q.queued_s[0] >= 0.3, "queue time holds the hand-over"
    assert q.output[0] == 20


@pytest.mark.parametrize("routing", ["round-robin", "least-loaded"])
def test_requests_are_spread_over_replicas(routing: Literal["round-robin", "least-loaded"]) -> None:
    outcome = play(Load("a", rate=20), engine=Engine(replicas=3, routing=routing), cost=Cost())
    share = np.bincount(outcome.requests.engine) / len(outcome.requests)
    assert (share > 0.2).all()


# -- clients ---------------------------------------------------------------------------------------


def test_a_gateway_lets_so_many_through() -> None:
    outcome = play(Load("a", rate=40), cost=Cost(), gateway=Gateway(max_in_flight=5, max_queue=10))
    q = outcome.requests
    assert (q.status == REJECTED).any() and set(q.status) == {OK, REJECTED}
    edges = np.concatenate([q.arrival_s[q.status == OK], q.finished_s[q.status == OK]])
    change = np.repeat([1, -1], (q.status == OK).sum())
    assert np.cumsum(change[np.lexsort((change, edges))]).max() <= 5
    assert (q.sent_s <= q.arrival_s)[q.status == OK].all()


def test_an_api_server_refuses_what_it_cannot_queue() -> None:
    outcome = play(Load("a", rate=60), engine=replace(SYNC, max_num_seqs=2, max_num_queued_reqs=3))
    assert (outcome.requests.status == REJECTED).any() and outcome.engines[0].steps.waiting.max() <= 3 + 1
    assert {event.kind for event in outcome.events} == {"rejection"}


def test_users_of_a_closed_loop_wait_for_their_answers() -> None:
    outcome = play(Load("a", "closed", users=5, think_s=0.1), cost=Cost())
    q = outcome.requests
    edges = np.concatenate([q.sent_s, q.finished_s])
    change = np.repeat([1, -1], len(q))
    assert len(q) > 30 and np.cumsum(change[np.argsort(edges, kind="stable")]).max() == 5


def test_a_stall_stops_a_closed_loop_and_not_an_open_one() -> None:
    stall = Fault("pause", from_s=4.0, length_s=3.0)
    for load, sends in ((Load("a", "closed", users=5, think_s=0.1), False), (Load("a", rate=20), True)):
        q = play(load, cost=Cost(), faults=(stall,)).requests
        assert bool(((q.sent_s > 4.5) & (q.sent_s < 6.9)).any()) is sends


def test_who_leaves_has_no_end() -> None:
    q = play(Load("a", rate=20, abort_share=0.5), cost=Cost()).requests
    gone = q.status == ABORTED
    assert gone.any() and np.isnan(q.finished_s[gone]).all() and np.isfinite(q.left_s[gone]).all()
    assert np.isnan(q.first_shown_s[gone]).any(), "some leave before their first token"
    assert (q.output[gone] <= q.planned[gone]).all()


# -- faults and counterfactuals --------------------------------------------------------------------


def test_a_slow_rank_makes_steps_longer_by_what_is_booked_to_it() -> None:
    scenario = Scenario(
        (Load("a", rate=5),), engine=SYNC, ranks=Ranks(tensor_parallel=4), faults=(Fault("slow-rank", "slow", rank=2, factor=2),),
        duration_s=5.0,
    )  # fmt: skip
    slow, healthy = (
        simulate(s).engines[0].steps for s in (scenario, without(scenario, {"faults": ["slow"]}))
    )
    assert slow.straggler_s.min() > 0 and not healthy.straggler_s.any()
    assert np.median(slow.end_s - slow.start_s - slow.straggler_s) == pytest.approx(
        np.median(healthy.end_s - healthy.start_s), rel=0.05
    )


def test_a_pause_lasts_as_long_as_it_says() -> None:
    outcome = play(
        Load("a", rate=20), cost=Cost(), faults=(Fault("pause", from_s=2.0, length_s=0.5, every_s=3.0),)
    )
    assert outcome.engines[0].steps.pause_s.sum() == pytest.approx(0.5 * 3)


def test_a_load_left_out_leaves_the_others_as_they_were() -> None:
    scenario = Scenario((Load("a", rate=5), Load("b", rate=1, prompt_tokens=Sizes(8000))), duration_s=20.0)
    both, alone = simulate(scenario).requests, simulate(without(scenario, {"loads": ["b"]})).requests
    mine = both.load == 0
    assert (both.sent_s[mine] == alone.sent_s).all() and (both.prompt[mine] == alone.prompt).all()


def test_the_same_seed_is_the_same_world() -> None:
    scenario = Scenario((Load("a", rate=10), Load("c", "closed")), duration_s=20.0, seed=3)
    one, two = simulate(scenario), simulate(scenario)
    assert (one.engines[0].steps.end_s == two.engines[0].steps.end_s).all()
    assert one.requests.id == two.requests.id
    other = simulate(replace(scenario, seed=4))
    assert len(other.requests) != len(one.requests) or (other.requests.sent_s != one.requests.sent_s).any()


# -- whatever the world, it adds up ----------------------------------------------------------------

engines = st.builds(
    Engine,
    replicas=st.integers(1, 2),
    data_parallel=st.integers(1, 2),
    max_num_batched_tokens=st.sampled_from([64, 256, 2048]),
    max_num_seqs=st.sampled_from([3, 16, 64]),
    kv_blocks=st.sampled_from([140, 200, 5000]),
    max_model_len=st.just(2048),
    long_prefill_token_threshold=st.sampled_from([0, 50]),
    policy=st.sampled_from(["fcfs", "priority"]),
    async_scheduling=st.booleans(),
    enable_prefix_caching=st.booleans(),
    watermark=st.sampled_from([0.0, 0.05]),
    reserve_full_isl=st.booleans(),
    prefill_replicas=st.sampled_from([0, 0, 0, 1]),
    routing=st.sampled_from(["round-robin", "least-loaded"]),
)
loads = st.builds(
    Load,
    name=st.just("a"),
    rate=st.sampled_from([2.0, 20.0]),
    prompt_tokens=st.builds(Sizes, median=st.sampled_from([30.0, 700.0]), sigma=st.just(0.8)),
    output_tokens=st.builds(Sizes, median=st.sampled_from([2.0, 60.0]), sigma=st.just(0.8)),
    prefix_tokens=st.sampled_from([0, 100]),
    timeout_s=st.sampled_from([None, 1.0]),
    abort_share=st.sampled_from([0.0, 0.3]),
    priority=st.integers(0, 2),
)


@settings(max_examples=60, deadline=None)
@given(engines, loads, loads, st.integers(0, 1000))
def test_every_world_adds_up(engine: Engine, one: Load, two: Load, seed: int) -> None:
    cost = Cost(stair=64, heavy_share=0.05)
    scenario = Scenario((one, replace(two, name="b")), engine=engine, cost=cost, seed=seed, duration_s=4.0)
    try:
        outcome = simulate(scenario)
    except UsageError as error:
        # Fetched cache of requests that wait behind one which does not fit beside it: a pair's alone, and said.
        assert engine.prefill_replicas and engine.kv_blocks < 5000 and "stands still for ever" in str(error)
        return
    q = outcome.requests
    assert set(q.status) <= {OK, ABORTED, TIMEOUT, REJECTED}, "nobody is left over"
    assert (q.output[q.status == OK] == q.planned[q.status == OK]).all()
    for engine_outcome in outcome.engines:
        check_steps(engine_outcome, engine)
    made = bills(outcome)
    total = np.sum(list(made.lines.values()), axis=0) if made.lines else np.zeros(len(q))
    assert np.allclose(total[made.billed], made.e2e_s[made.billed], atol=1e-9)
    assert all((s >= 0).all() for s in made.lines.values())
    before = np.sum([s for (place, _, _), s in made.lines.items() if place != "decode"], axis=0)
    assert np.allclose(
        np.asarray(before)[..., made.billed] if made.billed.any() else [], made.ttft_s[made.billed], atol=1e-9
    )


def check_steps(outcome: Any, engine: Engine) -> None:
    s, r = outcome.steps, outcome.runs
    if not len(s):
        return
    tokens = s.prefill_tokens + s.decode_tokens + s.recompute_tokens
    assert tokens.max() <= engine.max_num_batched_tokens and s.running.max() <= engine.max_num_seqs
    assert s.kv_usage.min() >= 0 and s.kv_usage.max() <= 1
    assert (s.start_s[1:] >= s.end_s[:-1] - 1e-12).all() and (s.scheduled_s <= s.start_s).all()
    parts = s.base_s + s.prefill_s + s.straggler_s + s.transfer_s + s.pause_s + s.chance_s
    assert np.allclose(parts, s.end_s - s.start_s)
    for phase, column in (
        (PREFILL, s.prefill_tokens),
        (RECOMPUTE, s.recompute_tokens),
        (DECODE, s.decode_tokens),
    ):
        chosen = (r.phase == phase) & (r.tokens > 0)
        change = np.zeros(len(s) + 1)
        np.add.at(change, r.first[chosen], r.tokens[chosen])
        np.add.at(change, r.last[chosen] + 1, -r.tokens[chosen])
        assert (np.cumsum(change)[:-1] == column).all()


def test_a_gateway_that_holds_lets_all_go_together() -> None:
    hold = Fault("gateway-hold", from_s=1.0, length_s=2.0)
    load = at((0.5, 100, 5), (1.5, 100, 5), (2.5, 100, 5), (3.5, 100, 5))
    outcome, free = play(load, faults=(hold,)), play(load)
    q = outcome.requests
    assert q.sent_s == pytest.approx([0.5, 1.5, 2.5, 3.5])
    assert q.arrival_s == pytest.approx([0.5, 3.0, 3.0, 3.5])
    assert free.requests.arrival_s == pytest.approx([0.5, 1.5, 2.5, 3.5])


def test_who_leaves_while_the_gateway_holds_never_reaches_an_engine() -> None:
    hold = Fault("gateway-hold", from_s=1.0, length_s=4.0)
    impatient = at((1.5, 100, 5), (4.5, 100, 5), timeout_s=1.0)
    outcome = play(impatient, faults=(hold,), gateway=Gateway(max_in_flight=1))
    q = outcome.requests
    assert np.isnan(q.arrival_s[0])
    assert q.left_s[0] == pytest.approx(2.5)
    assert q.arrival_s[1] == pytest.approx(5.0)
    assert np.isfinite(q.finished_s[1])
