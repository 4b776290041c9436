"""Worlds of several tenants: one that is noisy, in three ways, and those in which one only looks like it."""

from __future__ import annotations

from dataclasses import replace

from families import COUPLED, MIXED, Family, Rng, chat, engine, long_prompts, uniform, world
from queues import too_much

from tailscope.sim.scenario import Cause, Load, Scenario, Sizes

TENANTS = ("acme", "bolt", "cord")
NOISY = Cause("noisy-tenant", "tenant:bulk", ("<512",), {"loads": ["bulk"]})
#: The same by its slots, against slots for all: where nobody queues for one its answers make larger batches alone, and a
#: batch's normal cost is nobody's blame.
HOLDS_SLOTS = replace(NOISY, without={"engine": {"max_num_seqs": 1_024}})


def several(rng: Rng, rate: float, **changes: object) -> list[Load]:
    """The same kind of chat from several tenants."""
    one = chat(rng, rate, **changes)
    count = int(rng.integers(2, 4))
    return [replace(one, name=name, tenant=name, rate=one.rate / count) for name in TENANTS[:count]]


def by_prefill(rng: Rng, strength: float) -> Scenario:
    """A tenant whose prompts are long, now and then; the more of them the noisier."""
    bulk = replace(long_prompts(rng, strength), name="bulk", tenant="bulk")
    without = {"loads": ["bulk"]}
    causes = (NOISY, replace(COUPLED, without=without), replace(MIXED, without=without))
    return world(rng, *several(rng, uniform(rng, 5, 12)), bulk, causes=causes)


def by_flood(rng: Rng, strength: float) -> Scenario:
    """A tenant that sends all it has at once, prompts of some hundred tokens as those of the others are, several times."""
    times: list[float] = []
    for _ in range(int(rng.integers(3, 7))):
        start = float(rng.uniform(5, 140))
        count = int(strength * uniform(rng, 80, 160))
        times += [start + float(t) for t in rng.uniform(0, 0.5, count)]
    bulk = Load(
        "bulk",
        arrivals="at",
        times_s=tuple(sorted(times)),
        tenant="bulk",
        prompt_tokens=Sizes(uniform(rng, 200, 400), 0.3, 8, 500),
        output_tokens=Sizes(30, 0.4, 4, 100),
    )
    one = world(rng, *several(rng, uniform(rng, 5, 12)), bulk)
    return replace(one, causes=(NOISY, *too_much(one)))


def by_slots(rng: Rng, strength: float) -> Scenario:
    """A tenant whose long answers take the slots."""
    slots = int(rng.integers(24, 48))
    bulk = Load(
        "bulk",
        arrivals="bursty",
        burst_sigma=0.8,
        burst_s=float(rng.uniform(8, 20)),
        rate=0.04 * slots * strength,
        tenant="bulk",
        prompt_tokens=Sizes(200, 0.3, 8, 500),
        output_tokens=Sizes(uniform(rng, 900, 1_400), 0.2, 400, 1_900),
    )
    made = engine(rng, max_num_seqs=slots)
    causes = (
        HOLDS_SLOTS,
        # The same by the answers that hold the slots, and by the queue that lasts.
        replace(HOLDS_SLOTS, rule="long-output", culprit="class:<512|reasoning"),
        replace(HOLDS_SLOTS, rule="queue-saturation", culprit=None),
    )
    return world(rng, *several(rng, uniform(rng, 4, 7)), bulk, engine=made, causes=causes)


def big_and_harmless(rng: Rng, _: float) -> Scenario:
    """A tenant with most of the requests, whose prompts and answers cost next to nothing."""
    loads = several(rng, uniform(rng, 3, 6))
    bulk = Load(
        "bulk",
        rate=uniform(rng, 8, 14),
        tenant="bulk",
        prompt_tokens=Sizes(uniform(rng, 150, 300), 0.4, 8, 500),
        output_tokens=Sizes(3, 0.3, 2, 6),
    )
    one = world(rng, *loads, bulk)
    cheap = replace(one.cost, prefill_token=1e-6, attention=1e-11, prefill_request=1e-6, frontend=0.0002)
    return replace(one, cost=cheap)


def without_bulk(one: Scenario) -> Scenario:
    return replace(one, loads=tuple(load for load in one.loads if load.name != "bulk"))


def together(rng: Rng, _: float) -> Scenario:
    """Tenants as large as each other, all in the same strong bursts: there is too much, and nobody's more than others'."""
    bursts = {"arrivals": "bursty", "burst_sigma": 1.0, "burst_s": float(rng.uniform(4, 12))}
    loads = several(rng, uniform(rng, 14, 24), common_load="day", **bursts)
    one = world(rng, *loads, engine=engine(rng, max_num_seqs=int(rng.choice([32, 64, 128]))))
    return replace(one, causes=too_much(one))


def hurts_itself(rng: Rng, _: float) -> Scenario:
    """A tenant that waits for its own slots, while all others are served first: but in most of these worlds the others wait as
    well, since who runs keeps its slot whatever its priority."""
    bulk = Load(
        "bulk",
        arrivals="bursty",
        burst_sigma=0.8,
        burst_s=10.0,
        rate=uniform(rng, 4, 8),
        tenant="bulk",
        priority=10,
        prompt_tokens=Sizes(100, 0.3, 8, 500),
        output_tokens=Sizes(uniform(rng, 120, 250), 0.4, 20, 600),
    )
    made = engine(rng, max_num_seqs=int(rng.integers(32, 64)), policy="priority")
    causes = (
        HOLDS_SLOTS,
        replace(HOLDS_SLOTS, rule="priority-inversion"),
        replace(HOLDS_SLOTS, rule="queue-saturation", culprit=None),
    )
    return world(rng, *several(rng, uniform(rng, 3, 6)), bulk, engine=made, causes=causes)


def sole(rng: Rng, _: float) -> Scenario:
    """One tenant alone, who sends everything, long prompts too."""
    documents = replace(long_prompts(rng, 1.0), tenant="acme")
    return world(rng, chat(rng, tenant="acme"), documents, causes=(COUPLED, MIXED))


SUSPECT = {"noisy-tenant": without_bulk}
FAMILIES: tuple[Family, ...] = (
    Family("noisy prefill", "fault", by_prefill, "one tenant's long prompts", (0.5, 1, 3)),
    Family("noisy flood", "fault", by_flood, "one tenant's floods of short prompts", (0.3, 1, 3)),
    Family("noisy slots", "fault", by_slots, "one tenant's answers take the slots", (1, 1.6)),
    Family("big tenant", "decoy", big_and_harmless, "one tenant with most of the requests", suspects=SUSPECT),
    Family("tenants together", "decoy", together, "equal tenants in the same bursts"),
    Family("tenant by itself", "fault", hurts_itself, "a tenant that waits most for its own requests"),
    Family("one tenant", "fault", sole, "one tenant who sends everything"),
)
