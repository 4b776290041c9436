"""Worlds about who gets in and who goes on: long answers that hold slots, priorities that are not kept, running requests that
get no tokens, prompts whose beginning is no longer in the cache; and what looks like each and harms nobody."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from families import COUPLED, MIXED, Family, Rng, chat, engine, long_prompts, uniform, world
from queues import too_much

from tailscope.sim.engine import simulate
from tailscope.sim.scenario import Cause, Fault, Load, Scenario, Sizes

#: More than run at once in any world here.
MANY = 1_024


def short_of_slots(one: Scenario, share: float) -> Scenario:
    """The world with so few slots that for `share` of the time more would run than have one."""
    steps = simulate(replace(one, engine=replace(one.engine, max_num_seqs=MANY))).engines[0].steps
    order = np.argsort(steps.running)
    over = 1 - np.cumsum((steps.end_s - steps.start_s)[order]) / (steps.end_s - steps.start_s).sum()
    slots = int(steps.running[order][np.searchsorted(-over, -share)])
    return replace(one, engine=replace(one.engine, max_num_seqs=max(slots, 4)))


def roomy(rng: Rng, **changes: object) -> dict[str, object]:
    """An engine whose cache is never full, with enough of a budget for as many slots as may be tried."""
    return {"engine": engine(rng, kv_blocks=200_000, **changes)}


# -- long answers ----------------------------------------------------------------------------------


def writers(rng: Rng, rate: float) -> Load:
    """Answers of one to some thousand tokens to ordinary prompts."""
    long = uniform(rng, 1_200, 4_000)
    return Load(
        "writers",
        arrivals="poisson",
        rate=rate,
        tenant="writers",
        prompt_tokens=Sizes(200, 0.3, 8, 500),
        output_tokens=Sizes(long, 0.3, 900, 8_000),
    )


def slots_held(rng: Rng, strength: float) -> Scenario:
    """Long answers in so few slots that others queue, for a fiftieth of the time at strength 1."""
    one = world(
        rng,
        chat(rng, uniform(rng, 5, 10), tenant="chat"),
        writers(rng, uniform(rng, 0.15, 0.4)),
        **roomy(rng),
    )
    without: dict[str, object] = {"loads": ["writers"]}
    causes = (
        Cause("long-output", "class:<512|reasoning", ("<512",), without),
        # Either holds slots that the other waits for.
        Cause("noisy-tenant", "tenant:writers|chat", ("<512",), without),
    )
    return replace(short_of_slots(one, 0.02 * strength), causes=causes)


def all_alike(rng: Rng, _: float) -> Scenario:
    """Too few slots for answers none of which is long: that is the load, not a long answer."""
    one = world(rng, chat(rng, uniform(rng, 8, 16)), **roomy(rng))
    one = short_of_slots(one, 0.05)
    return replace(one, causes=too_much(one))


def slots_full_of_short(rng: Rng, _: float) -> Scenario:
    """Bursts of short answers fill the slots; a few long answers are there, and hold hardly any of them."""
    busy = chat(
        rng, uniform(rng, 25, 40), arrivals="bursty", burst_sigma=0.8, burst_s=float(rng.uniform(4, 12))
    )
    few = replace(writers(rng, 0.02), tenant=None, requests=3)
    one = short_of_slots(world(rng, busy, few, **roomy(rng)), 0.03)
    return replace(one, causes=too_much(one))


def without_writers(one: Scenario) -> Scenario:
    return replace(one, loads=tuple(load for load in one.loads if load.name != "writers"))


# -- priorities ------------------------------------------------------------------------------------


def batch(rng: Rng, rate: float, priority: int, output: float = 300) -> Load:
    """Requests that can wait, in bursts."""
    return Load(
        "batch",
        arrivals="bursty",
        rate=rate,
        burst_sigma=0.8,
        burst_s=float(rng.uniform(4, 12)),
        tenant="batch",
        priority=priority,
        prompt_tokens=Sizes(uniform(rng, 150, 400), 0.4, 8, 500),
        output_tokens=Sizes(output, 0.4, 50, 2_000),
    )


def levels(rng: Rng) -> tuple[int, int]:
    """A better priority and a lower one; 0, which is not told, may be either."""
    better = int(rng.choice([-5, 0, 1]))
    return better, better + int(rng.choice([1, 5, 100]))


def not_kept(rng: Rng, strength: float) -> Scenario:
    """Priorities are sent to a server that serves first come, first served."""
    better, lower = levels(rng)
    users = chat(rng, uniform(rng, 4, 8), tenant="users", priority=better)
    one = world(rng, users, batch(rng, uniform(rng, 3, 8), lower), **roomy(rng))
    causes = (
        # Keeping priorities would order the queue alone: who waits for a slot that a lower one holds is not helped.
        Cause("priority-inversion", "tenant:batch", ("<512",), {"loads": ["batch"]}),
        # Some of these worlds have chats so short that the other answers are long beside them.
        Cause("long-output", "class:<512", ("<512",), {"loads": ["batch"]}),
        Cause("noisy-tenant", "tenant:batch", ("<512",), {"loads": ["batch"]}),
    )
    return replace(short_of_slots(one, 0.03 * strength), causes=causes)


def held_by_lower(rng: Rng, strength: float) -> Scenario:
    """Priorities are kept in the queue; but the slots are held by long answers of a lower one."""
    better, lower = levels(rng)
    users = chat(rng, uniform(rng, 4, 8), tenant="users", priority=better)
    jobs = batch(rng, uniform(rng, 0.4, 1.0), lower, uniform(rng, 1_000, 1_800))
    one = world(rng, users, jobs, **roomy(rng, policy="priority"))
    without: dict[str, object] = {"loads": ["batch"]}
    causes = (
        Cause("priority-inversion", "tenant:batch", ("<512",), without),
        Cause("long-output", "class:<512|reasoning", ("<512",), without),
        Cause("noisy-tenant", "tenant:batch", ("<512",), without),
    )
    return replace(short_of_slots(one, 0.03 * strength), causes=causes)


def kept(rng: Rng, _: float) -> Scenario:
    """Bursts of requests that can wait, and a server that lets them; their answers are short, so a slot is soon free, and their
    prompts cost next to nothing."""
    better, lower = levels(rng)
    users = chat(rng, uniform(rng, 4, 8), tenant="users", priority=better)
    jobs = replace(batch(rng, uniform(rng, 15, 30), lower), output_tokens=Sizes(10, 0.4, 2, 30))
    one = world(rng, users, jobs, **roomy(rng, policy="priority"))
    cheap = replace(one.cost, prefill_token=1e-6, attention=1e-11, prefill_request=1e-6, frontend=0.0002)
    return short_of_slots(replace(one, cost=cheap), 0.05)


def with_slots(one: Scenario) -> Scenario:
    return replace(one, engine=replace(one.engine, max_num_seqs=MANY))


def nobody_waits(rng: Rng, _: float) -> Scenario:
    """Priorities that are ignored, where nobody queues."""
    better, lower = levels(rng)
    users = chat(rng, uniform(rng, 4, 8), tenant="users", priority=better)
    return world(rng, users, batch(rng, uniform(rng, 2, 5), lower), **roomy(rng))


def lower_only_queues(rng: Rng, _: float) -> Scenario:
    """All slots are taken by the better priority itself: those of the lower one are few. Without tenants: the few do wait for
    the many."""
    better, lower = levels(rng)
    busy = chat(rng, uniform(rng, 15, 25), priority=better)
    few = replace(batch(rng, 0.2, lower, 60), arrivals="poisson", tenant=None)
    one = world(rng, busy, few, **roomy(rng))
    return short_of_slots(one, 0.04)


def without_batch(one: Scenario) -> Scenario:
    return replace(one, loads=tuple(load for load in one.loads if load.name != "batch"))


# -- running without tokens ------------------------------------------------------------------------


def left_out(rng: Rng, strength: float) -> Scenario:
    """A scheduler that now and then gives some of its running requests nothing; at strength 1 for two hundredths of the
    time."""
    every = uniform(rng, 8, 25)
    fault = Fault(
        "left-out",
        "nothing",
        from_s=float(rng.uniform(1, every)),
        every_s=every,
        length_s=0.02 * strength * every * float(rng.uniform(0.7, 1.4)),
        often=float(rng.uniform(0.2, 0.6)),
    )
    cause = Cause("starvation", None, ("<512",), {"faults": ["nothing"]})
    return world(rng, chat(rng), faults=(fault,), causes=(cause,))


def left_out_for_a_moment(rng: Rng, _: float) -> Scenario:
    """The same for two or three steps each time: less than a chunk of anybody's prompt."""
    fault = Fault("left-out", "moment", every_s=uniform(rng, 8, 25), length_s=0.015, often=0.4)
    return world(rng, chat(rng), faults=(fault,))


def turns_with_long_prompts(rng: Rng, _: float) -> Scenario:
    """Long prompts in small chunks, a slow machine, tokens far apart; everybody gets one a step."""
    one = world(rng, chat(rng, uniform(rng, 4, 7)), long_prompts(rng, 2.0), causes=(COUPLED, MIXED))
    return replace(one, engine=replace(one.engine, long_prefill_token_threshold=512))


# -- prompts that are in the cache, or no longer ---------------------------------------------------


def agents(rng: Rng, **changes: object) -> Load:
    """Prompts that begin as some others do, with a long common beginning."""
    prefix = int(uniform(rng, 800, 6_000)) // 16 * 16
    load = Load(
        "agents",
        rate=uniform(rng, 4, 8),
        tenant="agents",
        prompt_tokens=Sizes(prefix + 100, 0.02, prefix + 20, 8_000),
        output_tokens=Sizes(60, 0.4, 4, 300),
        prefix_tokens=prefix,
        prefixes=int(rng.integers(2, 9)),
    )
    return replace(load, **changes)  # type: ignore[arg-type]


def cache_lost(rng: Rng, strength: float) -> Scenario:
    """From some time on, or now and then, prompts find nothing in the cache; at strength 1 for a tenth of the time."""
    if rng.random() < 0.5:
        fault = Fault("cache-loss", "cleared", from_s=150 * (1 - min(0.1 * strength, 0.6)))
    else:
        every = uniform(rng, 30, 60)
        fault = Fault(
            "cache-loss",
            "cleared",
            from_s=float(rng.uniform(0.3, 0.7)) * every,
            every_s=every,
            length_s=min(0.1 * strength, 0.6) * every,
        )
    causes = (
        Cause("prefix-cache-loss", None, ("<8k",), {"faults": ["cleared"]}),
        # Those beside them wait for what is computed again, as for any long prompt.
        Cause("hol-coupling", "class:<2k|<8k", ("<512",), {"loads": ["agents"]}),
        Cause("noisy-tenant", "tenant:agents", ("<512",), {"loads": ["agents"]}),
        Cause("size-ratio", None, ("<512",), {"loads": ["agents"]}),
    )
    loads = (agents(rng), chat(rng, uniform(rng, 2, 5), tenant="chat"))
    one = world(rng, *loads, faults=(fault,), **roomy(rng))
    # What is computed again may be more than the engine can.
    return replace(one, causes=(*causes, *too_much(one)))


def unique_prompts(rng: Rng, _: float, tenant: str = "agents") -> Scenario:
    """Prompts that are as long come on top, and none begins as another: the hit rate falls, and nothing was lost."""
    load = agents(rng)
    new = replace(load, name="new", prefix_tokens=0, from_s=75.0, rate=load.rate / 4, tenant=tenant)
    return world(rng, load, new, **roomy(rng))


def new_tenant(rng: Rng, strength: float) -> Scenario:
    """The same of a tenant that is new: what it computes the others wait for."""
    noisy = Cause("noisy-tenant", "tenant:new", (), {"loads": ["new"]})
    return replace(unique_prompts(rng, strength, "new"), causes=(noisy,))


def cold_start(rng: Rng, _: float) -> Scenario:
    """Many common beginnings, each of which has to be computed once at first."""
    return world(rng, agents(rng, prefixes=int(rng.integers(40, 120))), **roomy(rng))


def never_cached(rng: Rng, _: float) -> Scenario:
    """A part of the prompts begins as others do, the others never; all the time the same."""
    load = agents(rng, rate=uniform(rng, 1, 2))
    return world(rng, load, replace(load, name="own", prefix_tokens=0), **roomy(rng))


FAMILIES: tuple[Family, ...] = (
    Family(
        "slots held", "fault", slots_held, "long answers hold the slots that others queue for", (0.6, 1, 3)
    ),
    Family("slots for all alike", "decoy", all_alike, "too few slots for answers that are all alike"),
    Family(
        "slots full of short answers",
        "decoy",
        slots_full_of_short,
        "bursts of short answers fill the slots, beside a few long ones",
        suspects={"long-output": without_writers},
    ),
    Family(
        "priorities not kept", "fault", not_kept, "priorities sent to a server that ignores them", (0.5, 1, 3)
    ),
    Family(
        "slots held by a lower priority",
        "fault",
        held_by_lower,
        "long answers of a lower priority hold the slots",
        (0.5, 1, 3),
    ),
    Family(
        "priorities kept",
        "decoy",
        kept,
        "a lower priority waits for a better one",
        suspects={"priority-inversion": with_slots},
    ),
    Family(
        "priorities, no queue",
        "decoy",
        nobody_waits,
        "priorities ignored where nobody queues",
        # Bursts of anybody's prompts are waited for, if hardly.
        suspects={"noisy-tenant": without_batch},
    ),
    Family(
        "queues for its own",
        "decoy",
        lower_only_queues,
        "a better priority queues for what it holds itself",
        suspects={"priority-inversion": without_batch},
    ),
    Family("left out", "fault", left_out, "running requests that get no tokens now and then", (0.5, 1, 3)),
    Family(
        "left out for a moment",
        "decoy",
        left_out_for_a_moment,
        "running requests left out of two steps or three",
    ),
    Family(
        "prompts in turns", "fault", turns_with_long_prompts, "long prompts in small chunks beside decodes"
    ),
    Family(
        "cache lost", "fault", cache_lost, "prompts whose beginning is no longer in the cache", (0.5, 1, 3)
    ),
    Family("unique prompts", "decoy", unique_prompts, "prompts that never repeat, on top of those that do"),
    Family("new tenant", "fault", new_tenant, "a new tenant whose prompts never repeat"),
    Family("cold start", "decoy", cold_start, "a prefix cache that fills at first"),
    Family("never cached", "decoy", never_cached, "prompts half of which never repeat, all the time"),
)
