"""Worlds of what happens before and beside an engine: gateways, networks, replicas, and the API server's front end."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from families import (
    COUPLED,
    LET_IN,
    MIXED,
    Family,
    Rng,
    chat,
    cost,
    engine,
    long_prompts,
    stopped,
    telemetry,
    uniform,
    world,
)  # fmt: skip

from tailscope.sim.scenario import Cause, Fault, Gateway, Scenario, Sizes

Routing = Literal["round-robin", "least-loaded"]

# -- before the engine -------------------------------------------------------------------------


def seen_at_the_gateway(rng: Rng, strength: float) -> Scenario:
    """A gateway whose limit is met in bursts; it tells of its requests itself. Strength 1: somewhat too low a limit."""
    load = chat(
        rng,
        uniform(rng, 10, 18),
        arrivals="bursty",
        burst_sigma=float(rng.uniform(0.4, 0.8)),
        burst_s=float(rng.uniform(4, 10)),
    )
    one = world(rng, load, telemetry=telemetry(rng, client=bool(rng.random() < 0.7), gateway=True))
    # What would run at once on an average, by Little's law: each token takes about a step.
    step = one.cost.step + 20 * one.cost.decode_request
    usual = load.rate * load.output_tokens.median * 1.13 * step
    limit = max(2, round(usual * float(rng.uniform(1.3, 1.7)) / strength))
    return replace(one, gateway=Gateway(max_in_flight=limit, max_queue=10_000), causes=(LET_IN,))


def slow_network(rng: Rng, strength: float) -> Scenario:
    """For a while some requests take long on their way in, as by packets that are sent again."""
    start, length = float(rng.uniform(10, 90)), float(rng.uniform(15, 40))
    fault = Fault(
        "network",
        "way",
        from_s=start,
        to_s=start + length,
        length_s=uniform(rng, 0.2, 1.0) * strength,
        often=float(rng.uniform(0.15, 1.0)),
    )
    cause = Cause("upstream-wait", None, (), {"faults": ["way"]})
    told = telemetry(rng, client=True, gateway=bool(rng.random() < 0.5))
    return world(rng, chat(rng), faults=(fault,), causes=(cause,), telemetry=told)


def far_away(rng: Rng, _: float) -> Scenario:
    """A long way between clients and engine, the same for all, clocks seconds apart, and an engine with a tail of its own."""
    told = telemetry(
        rng,
        client=True,
        client_offset_s=float(rng.normal(0, 5)),
        network_s=float(rng.uniform(0.02, 0.3)),
        gateway=bool(rng.random() < 0.5),
    )
    return world(
        rng,
        chat(rng),
        long_prompts(rng, 1.0),
        telemetry=told,
        causes=(COUPLED, MIXED),
    )


def roomy_gateway(rng: Rng, _: float) -> Scenario:
    """A gateway that is always passed at once, with its view of every request."""
    gateway = Gateway(max_in_flight=10_000, max_queue=0, delay_s=uniform(rng, 0.001, 0.05))
    return world(rng, chat(rng), gateway=gateway, telemetry=telemetry(rng, client=True, gateway=True))


# -- replicas ----------------------------------------------------------------------------------


def spread(rng: Rng, routing: Routing = "round-robin") -> Scenario:
    """Two to four replicas whose steps take longer with more to do: a decoding request costs enough for load to be felt."""
    replicas = int(rng.choice([2, 3, 4]))
    base = cost(rng)
    dear = replace(base, decode_request=base.step * float(rng.uniform(0.05, 0.1)))
    made = engine(rng, replicas=replicas, routing=routing)
    return world(rng, chat(rng, uniform(rng, 4, 6.5) * replicas), engine=made, cost=dear)


def skewed(rng: Rng, strength: float) -> Scenario:
    """A router that prefers one replica."""
    one = spread(rng)
    n = one.engine.replicas
    # Of what the others should get so large a share goes to the first.
    made = replace(one.engine, skew=min(0.9, 0.3 * strength * (1 - 1 / n)))
    even: dict[str, object] = {"engine": {"skew": 0.0}}
    causes = (
        Cause("replica-imbalance", "instance:vllm-0", (), even),
        # With so many of the requests it may be asked for more than it can.
        Cause("queue-saturation", "engine:vllm-0/0", (), even),
    )
    return replace(one, engine=made, causes=causes)


def slow_replica(rng: Rng, strength: float) -> Scenario:
    """One replica whose steps all take longer."""
    one = spread(rng, "least-loaded" if rng.random() < 0.5 else "round-robin")
    fault = Fault("slow-replica", "weak", replica=int(rng.integers(one.engine.replicas)), factor=1 + strength)
    alone: dict[str, object] = {"faults": ["weak"]}
    causes = (
        Cause("replica-imbalance", f"instance:vllm-{fault.replica}", (), alone),
        # With its share of the requests it may be asked for more than it can.
        Cause("queue-saturation", f"engine:vllm-{fault.replica}/0", (), alone),
    )
    return replace(one, faults=(fault,), causes=causes)


def by_chance(rng: Rng, _: float) -> Scenario:
    """Replicas alike, requests of very different sizes dealt out in turn: uneven by chance alone."""
    one = spread(rng, "round-robin" if rng.random() < 0.7 else "least-loaded")
    # Of answers: long prompts would hold up short ones, which is another fault.
    load = replace(one.loads[0], output_tokens=Sizes(uniform(rng, 50, 90), 1.0, 4, 1_500))
    return replace(one, loads=(load,))


def one_paused(rng: Rng, _: float) -> Scenario:
    """One of several replicas stands still once: it is no slower than the others, before or after."""
    one = spread(rng)
    stop = Fault("pause", "stop", from_s=float(rng.uniform(20, 120)), length_s=float(rng.uniform(1, 4)))
    return replace(one, faults=(stop,), causes=stopped(stop))


# -- front end ---------------------------------------------------------------------------------


def slow_front_end(rng: Rng, strength: float) -> Scenario:
    """An API server that takes long for a while before it hands requests over."""
    start, length = float(rng.uniform(10, 90)), float(rng.uniform(10, 40))
    fault = Fault(
        "frontend",
        "busy",
        from_s=start,
        to_s=start + length,
        length_s=uniform(rng, 0.2, 0.6) * strength,
    )
    cause = Cause("hidden-queue", None, (), {"faults": ["busy"]})
    return world(rng, chat(rng), faults=(fault,), causes=(cause,))


def crowded_front_end(rng: Rng, strength: float) -> Scenario:
    """An API server of one process, so busy with each request that those of a burst wait for it."""
    load = chat(
        rng,
        arrivals="bursty",
        burst_sigma=float(rng.uniform(0.5, 0.9)),
        burst_s=float(rng.uniform(4, 10)),
    )
    one = world(rng, load)
    busy = replace(one.cost, frontend=min(0.9, 0.45 * strength) / load.rate)
    cause = Cause("hidden-queue", None, (), {"cost": {"frontend": 0.001}})
    return replace(one, cost=busy, causes=(cause,))


def aborted_unseen(rng: Rng, _: float) -> Scenario:
    """Clients that leave: their requests are in the engine and in no span. Scrapes are far apart."""
    load = chat(rng, abort_share=float(rng.uniform(0.05, 0.3)))
    told = telemetry(rng, scrape_s=float(rng.choice([5.0, 15.0, 60.0])))
    return world(rng, load, telemetry=told)


FAMILIES: tuple[Family, ...] = (
    Family(
        "seen at the gateway",
        "fault",
        seen_at_the_gateway,
        "a gateway's limit met in bursts, its view known",
        (1, 1.3),
    ),
    Family("slow network", "fault", slow_network, "some requests long on their way in", (0.3, 1, 3)),
    Family("far away", "fault", far_away, "a long way, the same for all, and documents"),
    Family("roomy gateway", "decoy", roomy_gateway, "a gateway that holds nobody back"),
    Family("skewed routing", "fault", skewed, "a router that prefers one replica", (0.5, 1, 2)),
    Family("slow replica", "fault", slow_replica, "one replica slower at equal work", (0.1, 0.25, 0.6, 1.2)),
    Family("uneven by chance", "decoy", by_chance, "replicas alike, sizes of requests very different"),
    Family("one paused", "fault", one_paused, "one replica stands still once"),
    Family("slow front end", "fault", slow_front_end, "an API server slow for a while", (0.3, 1, 3)),
    Family("crowded front end", "fault", crowded_front_end, "an API server too busy for bursts", (0.6, 1)),
    Family("aborts unseen", "decoy", aborted_unseen, "requests in the engine that no span tells of"),
)
