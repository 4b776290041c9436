"""Worlds that have more to do than they can, and some that only look like it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from families import ROOMY, Family, Rng, chat, cost, engine, stopped, telemetry, uniform, world
from queues import OVERLOADED

from tailscope.sim.engine import simulate
from tailscope.sim.scenario import Cause, Engine, Fault, Load, Scenario, Sizes

#: Seconds for which an engine is flooded to see what it can, and of those how many count.
FLOODED_S, COUNTED_S = 40.0, 20.0


def bound_by(rng: Rng, *bounds: str) -> tuple[str, Engine, Load]:
    """An engine and a load that together are bound by what a step computes, by slots, or by the KV cache."""
    bound = str(rng.choice(bounds))
    load = chat(rng, arrivals="poisson")
    if bound == "compute":
        prompts = Sizes(uniform(rng, 250, 450), 0.3, 64, 500)
        made = engine(rng, max_num_seqs=256, max_num_batched_tokens=int(rng.choice([1_024, 2_048])))
        return bound, made, replace(load, prompt_tokens=prompts, output_tokens=Sizes(20.0, 0.4, 4, 60))
    outputs = Sizes(uniform(rng, 100, 250), 0.4, 20, 600)
    load = replace(load, output_tokens=outputs)
    if bound == "slots":
        return bound, engine(rng, max_num_seqs=int(rng.choice([16, 24, 32]))), load
    return bound, engine(rng, max_model_len=1_408, kv_blocks=int(rng.integers(500, 900))), load


def capacity(one: Scenario) -> float:
    """Requests a second that the first load's engine serves when it never runs out of them."""
    flood = replace(one.loads[0], arrivals="closed", users=600, think_s=0.0)
    outcome = simulate(replace(one, loads=(flood,), duration_s=FLOODED_S, faults=(), causes=()))
    done = outcome.requests.last_token_s
    return float(((done > COUNTED_S) & (done < FLOODED_S)).sum() / (FLOODED_S - COUNTED_S))


#: A cache that is too small for a burst preempts, and that is a fault of its own.
HARMLESS = ("compute", "slots")


def at_load(rng: Rng, share: float, *bounds: str) -> Scenario:
    """A world that is offered `share` of what it can serve. Where its cache is the limit, preemptions say so too."""
    bound, made, load = bound_by(rng, *bounds)
    one = world(rng, load, engine=made, cost=cost(rng))
    storm = (Cause("preemption-storm", None, ("<512",), ROOMY),) if bound == "kv" else ()
    return replace(one, loads=(replace(load, rate=share * capacity(one)),), causes=storm)


def overloaded(rng: Rng, strength: float) -> Scenario:
    one = at_load(rng, strength, *HARMLESS, "kv")
    return replace(one, causes=(OVERLOADED, *one.causes))


def rush_hour(rng: Rng, strength: float) -> Scenario:
    """A load that its engine can serve, and for a minute or two `strength` of what it can."""
    one = at_load(rng, 1.0, *HARMLESS, "kv")
    rate = one.loads[0].rate
    from_s, length_s = float(rng.uniform(20, 40)), float(rng.uniform(60, 90))
    usual = replace(one.loads[0], rate=0.5 * rate)
    more = replace(usual, name="rush", rate=(strength - 0.5) * rate, from_s=from_s, to_s=from_s + length_s)
    return replace(one, loads=(usual, more), causes=(OVERLOADED, *one.causes))


# -- decoys ------------------------------------------------------------------------------------


def busy(rng: Rng, _: float) -> Scenario:
    return at_load(rng, float(rng.uniform(0.55, 0.8)), *HARMLESS)


def short_burst(rng: Rng, _: float) -> Scenario:
    """A healthy load, and now and then some dozens of requests at once, which are served within seconds."""
    one = at_load(rng, float(rng.uniform(0.3, 0.5)), *HARMLESS)
    load = one.loads[0]
    spare = load.rate / 0.4
    times = np.concatenate([np.full(int(spare * rng.uniform(2, 5)), t) for t in rng.uniform(10, 140, 3)])
    burst = replace(load, name="burst", arrivals="at", times_s=tuple(float(t) for t in np.sort(times)))
    return replace(one, loads=(load, burst))


def full_house(rng: Rng, _: float) -> Scenario:
    """Clients that send again as soon as they are answered: as many as there are, whatever the engine can."""
    _bound, made, load = bound_by(rng, *HARMLESS)
    users = (
        int(made.max_num_seqs * rng.uniform(1.2, 2.5))
        if made.max_num_seqs <= 32
        else int(rng.integers(60, 200))
    )
    return world(rng, replace(load, arrivals="closed", users=users, think_s=0.0), engine=made)


def after_a_pause(rng: Rng, _: float) -> Scenario:
    """An engine that stands still once, and then serves what came meanwhile."""
    one = at_load(rng, float(rng.uniform(0.4, 0.6)), *HARMLESS)
    stall = Fault("pause", "stall", from_s=60.0, length_s=float(rng.uniform(5, 15)), reason="unknown")
    return replace(one, faults=(stall,), telemetry=telemetry(rng), causes=stopped(stall))


FAMILIES: tuple[Family, ...] = (
    Family("overload", "fault", overloaded, "more requests than can be served", (0.9, 1.05, 1.2, 1.5)),
    Family("rush hour", "fault", rush_hour, "more than can be served for a minute or two", (1.3, 1.8)),
    Family("busy", "decoy", busy, "a healthy load of 55 to 80 % of what can be served"),
    Family("short bursts", "decoy", short_burst, "bursts that are served within seconds"),
    Family("full house", "decoy", full_house, "a closed loop, whose queue is its clients"),
    Family("after a pause", "fault", after_a_pause, "a backlog that a pause left"),
)
