"""Labelled worlds of the KV cache and of engines that stand still: storms apart in time, requests thrown out again and again,
requests that queue for room, pauses by reason, requests let go together."""

from __future__ import annotations

from dataclasses import replace

from families import (
    ROOMY,
    Family,
    Rng,
    chat,
    cost,
    engine,
    short_of_cache,
    stopped,
    telemetry,
    uniform,
    with_room,
    world,
)

from tailscope.sim.engine import simulate
from tailscope.sim.scenario import Cause, Fault, Load, Scenario, Sizes

STORM = Cause("preemption-storm", None, (), ROOMY)
PRESSURE = Cause("kv-pressure", None, (), ROOMY)


def writing(rng: Rng, rate: float | None = None, **changes: object) -> Load:
    """Short prompts with long answers, whose cache grows while they run."""
    return chat(
        rng,
        rate or uniform(rng, 4, 9),
        output_tokens=Sizes(uniform(rng, 250, 450), 0.4, 50, 900),
        **changes,
    )


def storms_apart(rng: Rng, strength: float) -> Scenario:
    """Twice, some half a minute apart, more comes than fits; between them there is room."""
    quiet = writing(rng, uniform(rng, 2, 4), arrivals="poisson")
    length = float(rng.uniform(10, 20))
    waves = tuple(
        replace(quiet, name=("early", "late")[i], rate=quiet.rate * 2, from_s=at, to_s=at + length)
        for i, at in enumerate((float(rng.uniform(15, 30)), float(rng.uniform(90, 110))))
    )
    one = world(rng, quiet, *waves, engine=engine(rng, max_model_len=1_408))
    return replace(short_of_cache(one, 0.03 * strength), causes=(STORM, PRESSURE))


def thrashing(rng: Rng, strength: float) -> Scenario:
    """Many short prompts are let in, whose answers grow to several times the cache: all are thrown out, over and over."""
    count = int(rng.integers(60, 100))
    burst = Load(
        "batch",
        arrivals="at",
        times_s=tuple(40.0 + 0.001 * i for i in range(count)),
        prompt_tokens=Sizes(uniform(rng, 60, 150), 0.3, 8, 300),
        output_tokens=Sizes(uniform(rng, 500, 800), 0.1, 300, 1_000),
    )
    made = engine(rng, max_model_len=1_408, kv_blocks=int(count * 25 / strength), enable_prefix_caching=False)
    return world(rng, chat(rng, uniform(rng, 2, 4)), burst, engine=made, causes=(STORM, PRESSURE))


def pressed(rng: Rng, strength: float) -> Scenario:
    """A watermark keeps those that run from being thrown out: what does not fit waits."""
    made = engine(rng, max_model_len=1_408, watermark=float(rng.uniform(0.05, 0.1)))
    one = world(rng, writing(rng), engine=made)
    return replace(short_of_cache(one, 0.01 * strength), causes=(PRESSURE, STORM))


def head_too_large(rng: Rng, strength: float) -> Scenario:
    """Now and then a prompt that needs a third of the cache: all behind it wait until there is room for it."""
    large = Load(
        "reports",
        rate=0.05 * strength,
        prompt_tokens=Sizes(7_000, 0.1, 6_000, 7_900),
        output_tokens=Sizes(60, 0.4, 8, 200),
    )
    one = world(rng, writing(rng), large, engine=engine(rng, max_model_len=8_200))
    # Prefill is cheap on this machine, so that a long one holds up few by what it computes.
    cheap = replace(one.cost, prefill_token=1e-6, attention=1e-11, prefill_request=0.0001)
    alone: dict[str, object] = {"loads": ["reports"]}
    beside = (
        Cause("hol-coupling", "class:<8k", ("<512",), alone),
        Cause("size-ratio", None, ("<512",), alone),
    )
    return replace(short_of_cache(replace(one, cost=cheap), 0.02), causes=(PRESSURE, STORM, *beside))


def stop(rng: Rng, strength: float) -> Scenario:
    """One to three stops of the engine for a reason that its log tells."""
    reason = str(rng.choice(["profiler", "eplb", "unknown"]))
    times = sorted(float(t) for t in rng.uniform(15, 135, int(rng.integers(1, 4))))
    faults = tuple(
        Fault(
            "pause",
            f"stop {i}",
            from_s=t,
            length_s=strength * float(rng.uniform(0.7, 1.4)),
            reason=reason,  # type: ignore[arg-type]
        )
        for i, t in enumerate(times)
    )
    return world(rng, chat(rng), faults=faults, causes=stopped(*faults))


def held_at_gateway(rng: Rng, strength: float) -> Scenario:
    """A gateway that lets nothing through for some seconds, and then all that has come."""
    times = sorted(float(t) for t in rng.uniform(15, 135, int(rng.integers(2, 5))))
    faults = tuple(
        Fault("gateway-hold", f"hold {i}", from_s=t, length_s=strength * float(rng.uniform(0.7, 1.4)))
        for i, t in enumerate(times)
    )
    names = {"faults": [fault.name for fault in faults]}
    held = tuple(Cause(rule, None, (), names) for rule in ("coincident-release", "upstream-wait"))
    return world(rng, chat(rng), faults=faults, telemetry=telemetry(rng, client=True), causes=held)


# -- decoys ------------------------------------------------------------------------------------


def full_but_enough(rng: Rng, _: float) -> Scenario:
    """A cache that is nearly full for long, and never too small."""
    one = with_room(world(rng, writing(rng, arrivals="poisson"), engine=engine(rng, max_model_len=1_408)))
    held = simulate(one).engines[0].steps.kv_usage.max() * (one.engine.kv_blocks - 1)
    return replace(one, engine=replace(one.engine, kv_blocks=int(held / 0.985) + 2))


def full_of_prefixes(rng: Rng, _: float) -> Scenario:
    """A cache full of prefixes that nobody uses just now: they go when room is needed."""
    agents = Load(
        "agents",
        rate=uniform(rng, 0.5, 1.5),
        prompt_tokens=Sizes(1_900, 0.0),
        output_tokens=Sizes(60, 0.4, 4, 200),
        prefix_tokens=1_792,
        prefixes=40,
    )
    one = world(rng, chat(rng), agents, engine=engine(rng, kv_blocks=4_000, max_model_len=4_096))
    return replace(one, cost=replace(one.cost, prefill_token=1e-6, attention=1e-11, stair=0))


def short_stops(rng: Rng, _: float) -> Scenario:
    """Stops so short, and so few, that nobody can tell."""
    faults = tuple(
        Fault("pause", f"stop {i}", from_s=float(t), length_s=float(rng.uniform(0.03, 0.06)))
        for i, t in enumerate(sorted(rng.uniform(15, 135, 2)))
    )
    return world(rng, chat(rng, output_tokens=Sizes(80, 0.5, 4, 400)), faults=faults, causes=stopped(*faults))


def bursts_of_calls(rng: Rng, _: float) -> Scenario:
    """Clients that send twenty requests at once, which are answered together because they came together."""
    at = sorted(float(t) for t in rng.uniform(5, 145, 12))
    burst = Load(
        "batches",
        arrivals="at",
        times_s=tuple(t + 0.0005 * i for t in at for i in range(int(rng.integers(8, 20)))),
        prompt_tokens=Sizes(120, 0.3, 8, 300),
        output_tokens=Sizes(60, 0.5, 4, 200),
    )
    return world(
        rng,
        chat(rng, uniform(rng, 2, 5)),
        burst,
        cost=replace(cost(rng), prefill_token=2e-5, frontend=0.0002),
    )


FAMILIES: tuple[Family, ...] = (
    Family("storms apart", "fault", storms_apart, "two squeezes of the cache, apart in time", (1, 3)),
    Family("thrashing", "fault", thrashing, "requests thrown out of the cache over and over", (1, 2)),
    Family("kv-pressure", "fault", pressed, "requests that queue for the cache", (1, 3, 6)),
    Family("head too large", "fault", head_too_large, "prompts that wait for a third of the cache", (1, 2)),
    Family("stop", "fault", stop, "one to three stops, some of them logged", (0.5, 1.5, 4)),
    Family("held at gateway", "fault", held_at_gateway, "a gateway that holds what comes", (2, 5)),
    Family("full but enough", "decoy", full_but_enough, "a cache that is nearly full and large enough"),
    Family("full of prefixes", "decoy", full_of_prefixes, "a cache full of prefixes that can go"),
    Family("short stops", "fault", short_stops, "stops that nobody can tell"),
    Family("bursts of calls", "decoy", bursts_of_calls, "requests that come together"),
)
