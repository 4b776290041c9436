"""Labelled worlds: faults and decoys, each a function of strength and seed. The seed draws everything not named.

Costs of steps come from four families, of which the diagnosis' own model knows one. A fault has a strength; a decoy has
something that looks like a fault and is none. What a fault truly costs is measured by playing the world without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from queues import too_much

from tailscope.sim.engine import simulate
from tailscope.sim.scenario import (
    Cause,
    Cost,
    Engine,
    Fault,
    Gateway,
    Load,
    Ranks,
    Scenario,
    Sizes,
    Telemetry,
)
from tailscope.sim.written import costs

Rng = np.random.Generator
Kind = Literal["fault", "pair", "decoy"]


@dataclass(frozen=True)
class Family:
    """`make(rng, strength)` is a world; `strengths` are those played. `why`: what it is to show, for the report.

    `suspects`: by rule, a decoy without that at which the rule may point, but with all its load. Where that makes a p99
    5 % better after all, the world is no decoy for this rule.
    """

    name: str
    kind: Kind
    make: Callable[[Rng, float], Scenario]
    why: str
    strengths: tuple[float, ...] = (1.0,)
    suspects: Mapping[str, Callable[[Scenario], Scenario]] = field(default_factory=dict)

    def world(self, strength: float, seed: int) -> Scenario:
        # Each strength has worlds of its own: the same ones made worse would be so many fewer draws.
        rng = np.random.default_rng([seed, round(1000 * strength), *self.name.encode()])
        return replace(self.make(rng, strength), name=f"{self.name} {strength:g} {seed}")


# -- what all worlds have ----------------------------------------------------------------------


def uniform(rng: Rng, low: float, high: float) -> float:
    """Uniform in the logarithm."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def cost(rng: Rng) -> Cost:
    """A step's cost of a random scale, in one of four families: linear, tiles, cache effects, heavy tails."""
    scale = uniform(rng, 0.6, 2.0)
    base = Cost(
        step=0.006 * scale,
        decode_request=0.00005 * scale,
        context_token=2e-8 * scale,
        prefill_token=uniform(rng, 2e-5, 6e-5),
        prefill_request=0.0002 * scale,
        attention=uniform(rng, 3e-10, 3e-9),
        noise=float(rng.uniform(0.03, 0.12)),
    )
    shape = rng.integers(4)
    if shape == 1:
        return replace(base, stair=int(rng.choice([128, 256])))
    if shape == 2:
        return replace(
            base, cache_tokens=int(rng.integers(4_000, 20_000)), cache_factor=float(rng.uniform(2, 4))
        )
    if shape == 3:
        return replace(
            base, heavy_share=float(rng.uniform(0.002, 0.01)), heavy_alpha=float(rng.uniform(2.0, 3.0))
        )
    return base


def chat(rng: Rng, rate: float | None = None, **changes: object) -> Load:
    bursty = bool(rng.random() < 0.5)
    load = Load(
        "chat",
        arrivals="bursty" if bursty else "poisson",
        rate=rate or uniform(rng, 5, 12),
        prompt_tokens=Sizes(uniform(rng, 120, 250), 0.4, 8, 500),
        output_tokens=Sizes(uniform(rng, 50, 120), 0.5, 4, 600),
    )
    if bursty:
        load = replace(load, burst_sigma=float(rng.uniform(0.3, 0.7)), burst_s=float(rng.uniform(4, 15)))
    return replace(load, **changes)  # type: ignore[arg-type]


def engine(rng: Rng, **changes: object) -> Engine:
    budget = int(rng.choice([2048, 2048, 4096, 8192]))
    made = Engine(
        max_num_batched_tokens=budget,
        max_num_seqs=int(rng.choice([128, 256])),
        kv_blocks=20_000,
        async_scheduling=bool(rng.random() < 0.7),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def telemetry(rng: Rng, **changes: object) -> Telemetry:
    """Spans and a stat logger always; a client's log most times, its clock off some times."""
    offset = float(rng.normal(0, 2)) if rng.random() < 0.3 else 0.0
    made = Telemetry(client=bool(rng.random() < 0.7), client_offset_s=offset)
    return replace(made, **changes)  # type: ignore[arg-type]


def world(rng: Rng, *loads: Load, **parts: object) -> Scenario:
    settings: dict[str, object] = {
        "engine": engine(rng),
        "cost": cost(rng),
        "telemetry": telemetry(rng),
        "duration_s": 150.0,
        "seed": int(rng.integers(1 << 31)),
        **parts,
    }
    return Scenario(loads, **settings)  # type: ignore[arg-type]


# -- faults ------------------------------------------------------------------------------------


def long_prompts(rng: Rng, strength: float) -> Load:
    """Documents of some ten thousand tokens, a few a minute; below strength 1 shorter, above it more of them."""
    return Load(
        "documents",
        arrivals="poisson",
        rate=0.06 * max(strength, 1.0),
        prompt_tokens=Sizes(uniform(rng, 9_000, 22_000) * min(strength, 1.0), 0.3, 1_600, 31_000),
        output_tokens=Sizes(80, 0.4, 4, 300),
    )


COUPLED = Cause(
    "hol-coupling", "class:long", ("<512",), {"loads": ["documents"]}
)  # any class of prompts as long as those of `documents`
MIXED = Cause("size-ratio", None, ("<512",), {"loads": ["documents"]})  # the same, as a mix of sizes


def coupling(rng: Rng, strength: float) -> Scenario:
    return world(rng, chat(rng), long_prompts(rng, strength), causes=(COUPLED, MIXED))


#: Blocks that no world here fills.
ROOMY = {"engine": {"kv_blocks": 200_000}}


def short_of_cache(one: Scenario, share: float) -> Scenario:
    """The world with so small a KV cache that for `share` of the time more would be held than fits."""
    roomy = with_room(one)
    steps = simulate(roomy).engines[0].steps
    held = steps.kv_usage * (roomy.engine.kv_blocks - 1)
    order = np.argsort(held)
    over = 1 - np.cumsum((steps.end_s - steps.start_s)[order]) / (steps.end_s - steps.start_s).sum()
    blocks = int(held[order][np.searchsorted(-over, -share)]) + 1
    # One block is never used.
    least = -(-one.engine.max_model_len // one.engine.block_size) + 1
    return replace(one, engine=replace(one.engine, kv_blocks=max(blocks, least)))


def squeezed(rng: Rng, strength: float) -> Scenario:
    """Answers whose KV cache does not fit together, for a hundredth of the time at strength 1."""
    load = chat(rng, uniform(rng, 4, 9), output_tokens=Sizes(uniform(rng, 250, 450), 0.4, 50, 900))
    one = world(rng, load, engine=engine(rng, max_model_len=1_408))
    one = short_of_cache(one, 0.01 * strength)
    storm = Cause("preemption-storm", None, ("<512",), ROOMY)
    # What is computed again, and what does not fit at all, may queue for as long as the burst lasts.
    return replace(one, causes=(storm, *too_much(one)))


def ranked(rng: Rng) -> dict[str, object]:
    """An engine of two to four ranks, on hosts whose clocks differ, profiled for a while."""
    moe = bool(rng.random() < 0.5)
    ranks = int(rng.choice([2, 4]))
    hosts = int(rng.choice([1, 2]))
    offsets = np.repeat(rng.normal(0, 0.005, hosts), ranks // hosts)
    drifts = np.repeat(rng.normal(0, 20, hosts), ranks // hosts)
    settings = Ranks(
        tensor_parallel=1 if moe else ranks,
        layers=4,
        hosts=hosts,
        offset_s=tuple(float(o) for o in offsets) if hosts > 1 else (),
        drift_ppm=tuple(float(d) for d in drifts) if hosts > 1 else (),
        emitter="nccl" if rng.random() < 0.5 else "gloo",
        spread=float(rng.uniform(0.01, 0.05)),
    )
    made = engine(rng, data_parallel=ranks if moe else 1, moe=moe)
    # Only what is profiled is known to be a wait; a short world can be profiled whole.
    whole = bool(rng.random() < 0.5)
    window, duration = ((0.0, 60.0), 25.0) if whole else ((20.0, 4.0), 60.0)
    return {
        "ranks": settings,
        "engine": made,
        "telemetry": telemetry(rng, profile=(window,)),
        "duration_s": duration,
    }


def straggling(rng: Rng, strength: float) -> Scenario:
    parts = ranked(rng)
    made, settings = parts["engine"], parts["ranks"]
    assert isinstance(made, Engine) and isinstance(settings, Ranks)
    count = made.data_parallel * settings.tensor_parallel
    fault = Fault("slow-rank", "slow", rank=int(rng.integers(count)), factor=1 + strength)
    cause = Cause("straggler-rank", f"rank:{fault.rank}", (), {"faults": ["slow"]})
    return world(rng, chat(rng), faults=(fault,), causes=(cause,), **parts)


def paused(rng: Rng, strength: float) -> Scenario:
    """An engine that stands still every few seconds; at strength 1 for two hundredths of the time."""
    every = uniform(rng, 5, 20)
    fault = Fault(
        "pause",
        "beat",
        from_s=float(rng.uniform(0, every)),
        length_s=0.02 * strength * every * float(rng.uniform(0.7, 1.4)),
        every_s=every,
        reason=str(rng.choice(["eplb", "unknown", "unknown"])),  # type: ignore[arg-type]
    )
    beat = Cause("periodic-pause", None, (), {"faults": ["beat"]})
    return world(rng, chat(rng), faults=(fault,), causes=(beat, replace(beat, rule="coincident-release")))


#: Engines of a dense model would share nothing.
TOGETHER = Cause("dp-coupling", None, (), {"engine": {"moe": False}})


def in_step(rng: Rng, strength: float) -> Scenario:
    """Data-parallel engines of a mixture of experts, one of which now and then has a long prompt."""
    made = engine(rng, data_parallel=int(rng.choice([2, 4])), moe=True)
    documents = replace(
        long_prompts(rng, 1.0),
        rate=0.04 * strength,
        prompt_tokens=Sizes(uniform(rng, 6_000, 16_000), 0.3, 4_000, 31_000),
    )
    causes = (TOGETHER, COUPLED, MIXED)
    return world(rng, chat(rng, uniform(rng, 8, 16)), documents, engine=made, causes=causes)


# -- pairs -------------------------------------------------------------------------------------


def coupling_and_squeeze(rng: Rng, strength: float) -> Scenario:
    """Documents hold up the rest, and at other times the cache is too small for what the rest holds."""
    load = chat(rng, uniform(rng, 4, 9), output_tokens=Sizes(uniform(rng, 250, 450), 0.4, 50, 900))
    documents = replace(long_prompts(rng, 1.0), prompt_tokens=Sizes(6_000, 0.2, 4_000, 7_900))
    one = world(rng, load, documents, engine=engine(rng, max_model_len=8_200))
    storm = Cause("preemption-storm", None, ("<512",), ROOMY)
    return replace(short_of_cache(one, 0.02 * strength), causes=(COUPLED, MIXED, storm))


def in_lockstep(one: Scenario, cause: Cause) -> tuple[Cause, ...]:
    """Engines of a mixture of experts wait for whichever of them has prefill, for the same `cause`."""
    together = one.engine.moe and one.engine.data_parallel > 1
    return (replace(cause, rule="dp-coupling", culprit=None),) if together else ()


def coupling_and_straggler(rng: Rng, strength: float) -> Scenario:
    one = straggling(rng, strength)
    causes = (COUPLED, MIXED, *in_lockstep(one, COUPLED), *one.causes)
    one = replace(one, loads=(*one.loads, long_prompts(rng, 2 * strength)), causes=causes)
    # With a rank three times as slow the engine may be able to do less than is asked of it.
    return replace(one, causes=(*causes, *too_much(one)))


def squeeze_and_straggler(rng: Rng, strength: float) -> Scenario:
    parts = ranked(rng)
    made = parts["engine"]
    assert isinstance(made, Engine)
    parts["engine"] = replace(made, max_model_len=1_408)
    load = chat(rng, uniform(rng, 4, 9), output_tokens=Sizes(uniform(rng, 250, 450), 0.4, 50, 900))
    one = short_of_cache(world(rng, load, **parts), 0.05)
    fault = Fault("slow-rank", "slow", rank=1, factor=1 + strength)
    storm = Cause("preemption-storm", None, ("<512",), ROOMY)
    late = Cause("straggler-rank", "rank:1", (), {"faults": ["slow"]})
    # Twice as slow, the engine can do less than it is asked for with so small a cache.
    queue = Cause("queue-saturation", None, ("<512",), ROOMY)
    return replace(one, faults=(fault,), causes=(storm, late, queue, *in_lockstep(one, storm)))


def with_short_prompts(one: Scenario) -> Scenario:
    """As many requests with as long answers, whose prompts are as short as the first load's."""
    first = one.loads[0]
    return replace(
        one,
        loads=(
            first,
            *(replace(o, prompt_tokens=first.prompt_tokens, prefix_tokens=0) for o in one.loads[1:]),
        ),
    )


def with_room(one: Scenario) -> Scenario:
    return replace(one, engine=replace(one.engine, kv_blocks=200_000))


# -- decoys ------------------------------------------------------------------------------------


def healthy(rng: Rng, _: float) -> Scenario:
    return world(rng, chat(rng))


def common_load(rng: Rng, _: float) -> Scenario:
    """Long prompts that are almost all in the prefix cache, in the same bursts as the short ones."""
    together = {
        "arrivals": "bursty",
        "burst_sigma": 0.7,
        "burst_s": float(rng.uniform(4, 15)),
        "common_load": "day",
    }
    cached = Load(
        "agents",
        rate=uniform(rng, 0.3, 1.0),
        prompt_tokens=Sizes(2_560, 0.0),
        output_tokens=Sizes(80, 0.4, 4, 300),
        prefix_tokens=2_528,
        **together,  # type: ignore[arg-type]
    )
    one = world(rng, replace(chat(rng), **together), cached)  # type: ignore[arg-type]
    return replace(one, cost=replace(one.cost, attention=1e-10, stair=0))


def healthy_preemptions(rng: Rng, _: float) -> Scenario:
    """A cache that is full for a moment; a preemption or two that nobody feels."""
    one = squeezed(rng, 1.0)
    while simulate(with_room(one)).engines[0].steps.waiting.max():
        one = squeezed(rng, 1.0)  # has more to do than it can, whatever its cache
    for share in (1e-3, 3e-4, 1e-4, 3e-5):
        tried = short_of_cache(one, share)
        p99s = costs(simulate(tried), simulate(with_room(tried))).values()
        if max((p["with"] / p["without"] for metrics in p99s for p in metrics.values()), default=1.0) < 1.02:
            break
    return replace(tried, causes=())


def long_outputs(rng: Rng, _: float) -> Scenario:
    writer = Load(
        "writers",
        rate=0.3,
        tenant="writers",
        prompt_tokens=Sizes(200, 0.3, 8, 500),
        output_tokens=Sizes(1_500, 0.3, 600, 2_000),
    )
    return world(rng, chat(rng, tenant="chat"), writer)


#: A gateway that holds nobody back.
LET_IN = Cause("upstream-wait", None, (), {"gateway": {"max_in_flight": 100_000, "max_queue": 100_000}})


def at_the_gateway(rng: Rng, _: float) -> Scenario:
    load = chat(rng, uniform(rng, 15, 25))
    gateway = Gateway(max_in_flight=int(rng.integers(10, 20)), max_queue=int(rng.integers(10, 60)))
    return world(rng, load, gateway=gateway, telemetry=telemetry(rng, client=True), causes=(LET_IN,))


def stopped(*faults: Fault) -> tuple[Cause, ...]:
    """What pauses may be told as: the engine's, and by the requests that it lets go together."""
    names = [fault.name for fault in faults]
    return tuple(Cause(rule, None, (), {"faults": names}) for rule in ("pause", "coincident-release"))


def stall_in_closed_loop(rng: Rng, _: float) -> Scenario:
    load = chat(rng, arrivals="closed", users=int(rng.integers(8, 24)), think_s=float(rng.uniform(0.2, 1.0)))
    pause = Fault("pause", "stall", from_s=60.0, length_s=float(rng.uniform(2, 6)), reason="unknown")
    return world(rng, load, faults=(pause,), causes=stopped(pause))


def clocks_apart(rng: Rng, _: float) -> Scenario:
    parts = ranked(rng)
    settings = parts["ranks"]
    made = parts["engine"]
    assert isinstance(settings, Ranks) and isinstance(made, Engine)
    count = made.data_parallel * settings.tensor_parallel
    apart = replace(
        settings,
        hosts=count,
        offset_s=tuple(float(o) for o in rng.normal(0, 0.02, count)),
        drift_ppm=tuple(float(d) for d in rng.normal(0, 30, count)),
    )
    return world(rng, chat(rng), **{**parts, "ranks": apart})


def simply_long(rng: Rng, _: float) -> Scenario:
    """A class of long prompts and long answers, slow itself, whose small chunks hold up nobody."""
    load = Load(
        "reports",
        rate=0.15,
        prompt_tokens=Sizes(3_000, 0.2, 2_100, 5_000),
        output_tokens=Sizes(900, 0.2, 300, 1_500),
    )
    one = world(rng, chat(rng), load)
    # A step takes little longer for a chunk: prefill is cheap on this machine.
    cheap = replace(one.cost, prefill_token=1e-6, attention=1e-11, prefill_request=0.0001)
    return replace(one, cost=cheap)


def pauses_at_random(rng: Rng, _: float) -> Scenario:
    """An engine that stands still now and then, for about as long each time, but to no beat."""
    length = uniform(rng, 0.2, 1.5)
    times = np.sort(rng.uniform(2, 145, int(rng.integers(4, 16))))
    faults = tuple(
        Fault("pause", f"stop {i}", from_s=float(t), length_s=length * float(rng.uniform(0.9, 1.1)))
        for i, t in enumerate(times)
    )
    return world(rng, chat(rng), faults=faults, causes=stopped(*faults))


def heavy_steps(rng: Rng, _: float) -> Scenario:
    """Steps with a long tail of their own, by no batch and no beat."""
    one = world(rng, chat(rng))
    heavy = replace(
        one.cost, heavy_share=float(rng.uniform(0.005, 0.02)), heavy_alpha=float(rng.uniform(1.2, 2.0))
    )
    return replace(one, cost=heavy)


def regular_documents(rng: Rng, _: float) -> Scenario:
    """A long prompt every so many seconds, as exactly as a clock: a beat in the load, not in the engine."""
    every = uniform(rng, 5, 15)
    documents = replace(long_prompts(rng, 1.0), arrivals="regular", rate=1 / every)
    return world(rng, chat(rng), documents, causes=(COUPLED, MIXED))


def engines_apart(rng: Rng, _: float) -> Scenario:
    """Data-parallel engines of a dense model, which share nothing: a long prompt holds up its own engine alone."""
    made = engine(rng, data_parallel=int(rng.choice([2, 4])), moe=False)
    return world(
        rng, chat(rng, uniform(rng, 8, 16)), long_prompts(rng, 2.0), engine=made, causes=(COUPLED, MIXED)
    )


def engines_alike(rng: Rng, _: float) -> Scenario:
    """Engines of a mixture of experts with short prompts only: they wait for each other's, but for no long time."""
    made = engine(rng, data_parallel=int(rng.choice([2, 4])), moe=True)
    return world(rng, chat(rng, uniform(rng, 8, 16)), engine=made)


def new_shapes(rng: Rng, strength: float) -> Scenario:
    """An engine that compiles for each size of a batch when it first comes."""
    fault = Fault("first-shape", "cold", length_s=float(rng.uniform(0.5, 2.0)) * strength)
    cold = Cause("first-shape", None, (), {"faults": ["cold"]})
    return world(rng, chat(rng), faults=(fault,), causes=(cold, replace(cold, rule="coincident-release")))


def too_few(rng: Rng, _: float) -> Scenario:
    load = chat(rng, 0.5, arrivals="poisson", requests=int(rng.integers(6, 19)))
    return world(rng, load, replace(long_prompts(rng, 1.0), requests=2), duration_s=40.0)


#: Engines of a mixture of experts wait for whichever of them prefills, whatever else a world shows.
LOCKSTEP = {"dp-coupling": lambda one: replace(one, engine=replace(one.engine, moe=False))}
FAMILIES: tuple[Family, ...] = (
    Family("coupling", "fault", coupling, "short requests beside prefills of long ones", (0.2, 0.5, 1, 3)),
    Family("kv-squeeze", "fault", squeezed, "a KV cache too small for what runs", (1, 3, 6, 15)),
    Family(
        "straggler",
        "fault",
        straggling,
        "one rank slower, clocks of hosts apart",
        (0.1, 0.25, 0.6, 1.5),
        suspects=LOCKSTEP,
    ),
    Family("coupling + kv-squeeze", "pair", coupling_and_squeeze, "both at once", (1, 1.5)),
    Family("coupling + straggler", "pair", coupling_and_straggler, "both at once", (1, 2)),
    Family("kv-squeeze + straggler", "pair", squeeze_and_straggler, "both at once", (0.5, 1.5)),
    Family("healthy", "decoy", healthy, "nothing wrong"),
    Family(
        "common load",
        "decoy",
        common_load,
        "bursts of short and of long, cached prompts together",
        suspects={"hol-coupling": with_short_prompts},
    ),
    Family(
        "healthy preemptions",
        "decoy",
        healthy_preemptions,
        "a preemption or two that cost little",
        suspects={"preemption-storm": with_room},
    ),
    Family("long outputs", "decoy", long_outputs, "one tenant with answers ten times as long"),
    Family("gateway", "fault", at_the_gateway, "waiting and rejections moved to a gateway"),
    Family("closed loop", "fault", stall_in_closed_loop, "a stall that a closed loop hides"),
    Family("clocks apart", "decoy", clocks_apart, "every rank's clock off, no rank slow", suspects=LOCKSTEP),
    Family(
        "simply long",
        "decoy",
        simply_long,
        "a class that is slow itself and harms nobody",
        suspects={"hol-coupling": with_short_prompts},
    ),
    Family("too few", "decoy", too_few, "a dozen requests"),
    Family("paused", "fault", paused, "an engine that stops at a beat", (0.25, 0.5, 1, 2.5)),
    Family("pauses at random", "fault", pauses_at_random, "an engine that stops now and then"),
    Family("heavy steps", "decoy", heavy_steps, "steps with a long tail of their own"),
    Family("regular documents", "fault", regular_documents, "long prompts at a beat"),
    Family("engines in step", "fault", in_step, "engines that wait for another's long prompt", (1, 3)),
    Family("engines apart", "fault", engines_apart, "long prompts on engines that share nothing"),
    Family(
        "engines alike",
        "decoy",
        engines_alike,
        "engines in step, short prompts only",
        suspects=LOCKSTEP,
    ),
    Family("new shapes", "fault", new_shapes, "an engine that compiles while it serves", (0.1, 0.3)),
)
