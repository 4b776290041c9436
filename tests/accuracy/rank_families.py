"""Labelled worlds of ranks: what is wrong with one, or looks as if it were, and who may be named for it.

A world is a run of 40 to 80 steps of 2 to 16 ranks, profiled from its first step to its last. The seed draws everything that
a family does not name: ranks and hosts, layers, work and its spread, transfers, emitters of several kinds. How far the
hosts' clocks are apart is given, so that each offset has as many worlds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from tailscope.sim.ranks import RankWorld
from tailscope.sim.scenario import Cost, Engine, Fault, Load, Ranks, Scenario, Telemetry

Rng = np.random.Generator
#: fault: somebody is to be named. decoy: nobody is. blind: a fault that the profiles cannot show, so that nothing can be said.
Kind = Literal["fault", "decoy", "blind"]

#: By how much clocks of hosts are apart, at most, ms.
OFFSETS_MS = (0.0, 0.1, 0.5, 2.0, 20.0)
#: Of a healthy cluster: how much clocks gain, ppm.
DRIFT_PPM = 3.0
SIZES, SIZE_SHARES = (2, 3, 4, 6, 8, 12, 16), (0.15, 0.1, 0.25, 0.1, 0.25, 0.05, 0.1)

#: Rule -> culprits that are right, written kind:id with * for whatever; None: whoever.
Parties = dict[str, frozenset[str] | None]


@dataclass(frozen=True)
class Labelled:
    """A world with who is to be named (any of `right` will do) and who may be (`tolerated`).

    `places`: collectives of a step before which the fault makes somebody late; `healthy`: the settings without it, where a
    replay of the steps tells how late that is.
    """

    scenario: Scenario
    right: Parties = field(default_factory=dict)
    tolerated: Parties = field(default_factory=dict)
    places: int = 0
    healthy: Scenario | None = None


@dataclass(frozen=True)
class Family:
    """`make(rng, offset_ms)` is a world. `unbarred`: why it does not count for the bar of culprits, if so; `unclocked`: for that
    of clocks."""

    name: str
    kind: Kind
    why: str
    make: Callable[[Rng, float], Labelled]
    unbarred: str = ""
    unclocked: str = ""

    def world(self, offset_ms: float, seed: int) -> Labelled:
        rng = np.random.default_rng([seed, round(1000 * offset_ms), *self.name.encode()])
        made = self.make(rng, offset_ms)
        return replace(made, scenario=replace(made.scenario, name=f"{self.name} {offset_ms:g} {seed}"))


# -- what all worlds have ----------------------------------------------------------------------


def uniform(rng: Rng, low: float, high: float) -> float:
    """Uniform in the logarithm."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def loads(rng: Rng, engines: int, **changes: Any) -> tuple[Load, ...]:
    """Requests that come in the first quarter of a second and take 30 to 70 tokens."""
    n = int(rng.integers(3, 9)) * engines
    made = Load(
        "chat",
        arrivals="at",
        times_s=tuple(np.sort(rng.uniform(0, 0.25, n)).tolist()),
        # Of engines that step together even a short prefill of one holds up the others.
        prompts=tuple(rng.integers(20, 40 if engines > 1 else 200, n).tolist()),
        outputs=tuple(rng.integers(30, 70, n).tolist()),
    )
    return (replace(made, **changes),)


def clocks(rng: Rng, ranks: int, offset_ms: float, drift_ppm: float = DRIFT_PPM) -> dict[str, Any]:
    """Hosts of one rank each, or of several; each host with a clock of its own."""
    per_host = int(rng.choice([n for n in (1, 1, 2, 4) if ranks % n == 0 and n < ranks]))
    hosts = ranks // per_host
    offset = rng.uniform(-offset_ms, offset_ms, hosts) / 1e3
    drift = rng.uniform(-drift_ppm, drift_ppm, hosts) * (offset_ms > 0)
    by_rank = np.repeat(np.arange(hosts), per_host)
    return {
        "hosts": hosts,
        "offset_s": tuple(offset[by_rank].tolist()),
        "drift_ppm": tuple(drift[by_rank].tolist()),
    }


def world(rng: Rng, offset_ms: float, shape: str = "any", **changes: Any) -> Scenario:
    """A healthy world. `shape`: dense (one engine's tensor parallelism), experts (data-parallel engines of one rank), nested
    (of several ranks), exchange (experts by all-to-all), any (of the first three)."""
    if shape == "any":
        shape = str(rng.choice(["dense", "experts", "nested"], p=[0.4, 0.35, 0.25]))
    n = int(rng.choice(SIZES, p=SIZE_SHARES))
    if shape == "nested":
        n = int(rng.choice([4, 4, 8, 16]))
        tp = int(rng.choice([t for t in (2, 4) if t < n]))
    else:
        tp = n if shape == "dense" else 1
    if shape == "exchange":
        # As in vLLM, which thereby gives all ranks an instant in common.
        n, changes = max(n, 3), {"coordinate": bool(rng.random() < 0.7), **changes}
    moe, engines = shape != "dense", n // tp
    scale = uniform(rng, 0.5, 2.0)
    settings = Ranks(
        tensor_parallel=tp,
        layers=int(rng.integers(2, 5)),
        experts=int(max(n, rng.choice([16, 32]))),
        topk=int(rng.choice([2, 4])),
        attention_share=float(rng.uniform(0.3, 0.6)),
        spread=float(rng.uniform(0.01, 0.06)),
        transfer_s=uniform(rng, 2e-5, 2e-4),
        straggle_s=uniform(rng, 3e-6, 2e-5),
        bandwidth_gb_s=uniform(rng, 20, 200) if rng.random() < 0.7 or shape == "exchange" else 0.0,
        leave_bias_s=bias(rng, n, 5e-6) if rng.random() < 0.5 else (),
        exchange="all-to-all" if shape == "exchange" else "all-gather",
        follow=float(rng.uniform(0.0, 1.0)),
        stamp_jitter_s=uniform(rng, 5e-7, 5e-6) if rng.random() < 0.5 else 0.0,
        emitter=emitter(rng, shape),
        **clocks(rng, n, offset_ms),
    )
    of_ranks = {k: changes.pop(k) for k in list(changes) if hasattr(settings, k)}
    made = Scenario(
        loads(rng, engines),
        seed=int(rng.integers(1 << 31)),
        duration_s=1.0,
        engine=Engine(data_parallel=engines, moe=moe),
        cost=Cost(
            step=0.006 * scale,
            decode_request=0.0001 * scale,
            prefill_token=1e-5,
            noise=float(rng.uniform(0.02, 0.1)),
        ),
        ranks=replace(settings, **of_ranks),
        telemetry=Telemetry(profile=((0.0, 60.0),)),
    )
    return replace(made, **changes)


def emitter(rng: Rng, shape: str) -> Any:
    """Whose profiles these are, of those that show such ranks."""
    others = ("deepep-ll", "deepep-ht") if shape == "exchange" else ("custom", "graph")
    return ("gloo", "nccl", *others)[int(4 * rng.random())]


def bias(rng: Rng, ranks: int, most_s: float) -> tuple[float, ...]:
    """How late ranks leave, as in a ring: the further from a first one, the later."""
    place = (np.arange(ranks) + int(rng.integers(ranks))) % ranks
    return tuple((most_s * place / max(ranks - 1, 1)).tolist())


def count(scenario: Scenario) -> int:
    return scenario.ranks.tensor_parallel * scenario.engine.data_parallel


def any_rank(rng: Rng, scenario: Scenario) -> int:
    return int(rng.integers(count(scenario)))


def with_fault(
    scenario: Scenario, fault: Fault, right: Parties, tolerated: Parties | None = None, phases: int = 1
) -> Labelled:
    faulty = replace(scenario, faults=(fault,))
    return Labelled(faulty, right, tolerated or {}, phases * scenario.ranks.layers, scenario)


def rank_is(rank: int) -> frozenset[str]:
    return frozenset({f"rank:{rank}"})


def engine_of(scenario: Scenario, rank: int) -> frozenset[str]:
    """The engine of a rank, as rules call it that judge engines."""
    engine = rank // scenario.ranks.tensor_parallel
    return frozenset({f"engine:{engine}", f"engine:*/{engine}"})


# -- ranks that are late -----------------------------------------------------------------------


def slow_rank(phase: str | None, shape: str = "any") -> Callable[[Rng, float], Labelled]:
    """A rank whose work of a phase (attention; expert: what comes after it; None: all) takes longer."""

    def make(rng: Rng, offset_ms: float) -> Labelled:
        scenario = world(rng, offset_ms, shape)
        named = "mlp" if phase == "expert" and not scenario.engine.moe else phase
        rank = any_rank(rng, scenario)
        fault = Fault("slow-rank", rank=rank, factor=uniform(rng, 1.4, 3.0), phase=named)
        return with_fault(scenario, fault, {"straggler-rank": rank_is(rank)}, phases=1 if named else 2)

    return make


def transient(rng: Rng, offset_ms: float) -> Labelled:
    scenario = world(rng, offset_ms)
    rank = any_rank(rng, scenario)
    layer = int(rng.integers(scenario.ranks.layers))
    often = float(rng.uniform(0.06, 0.2))
    # Of a layer's part, so that it is half a step or more.
    factor = 1 + float(rng.uniform(0.6, 1.5)) * scenario.ranks.layers / scenario.ranks.attention_share
    fault = Fault("slow-rank", rank=rank, phase="attention", layers=(layer,), often=often, factor=factor)
    made = with_fault(scenario, fault, {"straggler-rank": rank_is(rank)})
    return replace(made, places=1)


def hot_expert(rng: Rng, offset_ms: float) -> Labelled:
    """The tokens are told: by the splits of an all-to-all, or by the table of expert loads."""
    scenario = world(rng, offset_ms, "exchange", follow=float(rng.uniform(0.7, 1.0)), hot_steps=0)
    n, settings = count(scenario), scenario.ranks
    hot = min(float(rng.uniform(0.6, 2.0)) / n, 1 / settings.topk - 1 / settings.experts)
    # As few as a batch of some tens of tokens has: without differences by chance a hot rank looks like a slow one.
    routed = round(uniform(rng, 60, 400))
    made = replace(
        scenario,
        # What a dispatch tells is what the experts work on, to the token.
        ranks=replace(settings, hot=hot, routed=routed, exact_rows=True),
        telemetry=replace(scenario.telemetry, expert_load=True),
    )
    ranks = RankWorld(made, "w", 0, made.seed)
    expert = ranks.hot_expert(0)
    rank = ranks.rank_of(expert)
    right: Parties = {
        "hot-expert": frozenset({f"rank:{rank}", f"expert:*rank {rank}", f"expert:*expert {expert}"})
    }
    # DeepEP's kernels tell no tokens: there the rank is late, and why is open.
    if settings.emitter.startswith("deepep"):
        right = {**right, "straggler-rank": rank_is(rank)}
    healthy = replace(scenario, ranks=replace(settings, routed=routed, exact_rows=True))
    return Labelled(made, right, {"straggler-rank": rank_is(rank)}, settings.layers, healthy)


def slow_link(side: str) -> Callable[[Rng, float], Labelled]:
    def make(rng: Rng, offset_ms: float) -> Labelled:
        scenario = world(rng, offset_ms, "exchange", bandwidth_gb_s=uniform(rng, 5, 50))
        rank, peer = (int(r) for r in rng.choice(count(scenario), 2, replace=False))
        fault = Fault("slow-link", rank=rank, factor=uniform(rng, 4, 20))
        names = {f"link:{rank}→"}
        if side == "destination":
            fault, names = replace(fault, side="destination"), {f"link:→{rank}"}
        if side == "pair":
            # Which sender a late receiver waits for, no profile says.
            fault, names = replace(fault, peer=peer), {f"link:{rank}→{peer}", f"link:→{peer}"}
        return with_fault(scenario, fault, {"slow-link": frozenset(names)}, phases=2)

    return make


def slow_group(rng: Rng, offset_ms: float) -> Labelled:
    """A ring that is slow for a third of the time: it is compared with itself."""
    scenario = world(rng, offset_ms)
    ranks = any_rank(rng, scenario)
    from_s = float(rng.uniform(0.15, 0.35))
    to_s = from_s + float(rng.uniform(0.15, 0.25))
    fault = Fault("slow-link", rank=ranks, factor=uniform(rng, 5, 20), from_s=from_s, to_s=to_s)
    return with_fault(scenario, fault, {"slow-link": None}, phases=2)


def slow_host(rng: Rng, offset_ms: float) -> Labelled:
    scenario = world(rng, offset_ms)
    rank = any_rank(rng, scenario)
    step = scenario.cost.step
    fault = Fault(
        "host-slow", rank=rank, length_s=step * float(rng.uniform(0.1, 0.4)), per_request_s=step * float(rng.uniform(0.01, 0.05))
    )  # fmt: skip
    right: Parties = {"straggler-rank": rank_is(rank), "host-bound": rank_is(rank)}
    return with_fault(scenario, fault, right, {"host-bound": engine_of(scenario, rank)}, phases=2)


def collected(rng: Rng, offset_ms: float) -> Labelled:
    """One rank's garbage collections."""
    scenario = world(rng, offset_ms)
    rank = any_rank(rng, scenario)
    length = scenario.cost.step * float(rng.uniform(0.7, 2.5))
    every = max(float(rng.uniform(0.06, 0.15)), 2 * length)
    fault = Fault("host-slow", rank=rank, length_s=length, every_s=every)
    right: Parties = {name: rank_is(rank) for name in ("straggler-rank", "host-bound", "periodic-pause")}
    tolerated: Parties = {"host-bound": engine_of(scenario, rank), "periodic-pause": None}
    return replace(with_fault(scenario, fault, right, tolerated), places=1)


def slow_hosts(rng: Rng, offset_ms: float) -> Labelled:
    """All hosts launch late, so that no rank waits for another."""
    scenario = world(rng, offset_ms)
    if scenario.ranks.emitter == "gloo":
        # A profile of a CPU does not tell waiting from idling.
        scenario = replace(scenario, ranks=replace(scenario.ranks, emitter="nccl"))
    step = scenario.cost.step
    fault = Fault(
        "host-slow", all_ranks=True, length_s=step * float(rng.uniform(0.3, 0.8)), per_request_s=step * float(rng.uniform(0.02, 0.1))
    )  # fmt: skip
    return with_fault(scenario, fault, {"host-bound": None}, phases=2)


def coupled(rng: Rng, offset_ms: float) -> Labelled:
    """One engine prefills while those beside it decode, or have nothing to do."""
    scenario = world(rng, offset_ms, str(rng.choice(["experts", "nested"])))
    engines, tp = scenario.engine.data_parallel, scenario.ranks.tensor_parallel
    chosen, n = int(rng.integers(engines)), 12 * engines
    prompts = np.where(
        np.arange(n) % engines == chosen, rng.integers(1_500, 4_000, n), rng.integers(10, 40, n)
    )
    made = loads(
        rng, engines,
        times_s=tuple(np.sort(rng.uniform(0, 0.6, n)).tolist()),
        prompts=tuple(prompts.tolist()), outputs=tuple(rng.integers(10, 30, n).tolist()),
    )  # fmt: skip
    faulty = replace(scenario, loads=made, cost=replace(scenario.cost, prefill_token=3e-5))
    of_engine = frozenset(f"rank:{rank}" for rank in range(chosen * tp, chosen * tp + tp))
    # Requests go to the engine with least to do, so that now and then another one prefills.
    names = engine_of(scenario, chosen * tp) | of_engine | {"engine:whichever prefills"}
    return Labelled(
        faulty,
        {"dp-coupling": names},
        {"straggler-rank": of_engine, "hol-coupling": None},
        scenario.ranks.layers,
    )


# -- what only looks like it -------------------------------------------------------------------


def clean(rng: Rng, offset_ms: float) -> Labelled:
    return Labelled(world(rng, offset_ms, str(rng.choice(["dense", "experts", "nested", "exchange"]))))


def rotating(rng: Rng, offset_ms: float) -> Labelled:
    """Much lateness, each time another's: routing, or noise of the hosts."""
    return Labelled(world(rng, offset_ms, spread=float(rng.uniform(0.15, 0.4))))


def common_load(rng: Rng, offset_ms: float) -> Labelled:
    """Batches of very different sizes, the same for all ranks."""
    scenario = world(rng, offset_ms, "dense")
    n = int(rng.integers(30, 60))
    times = np.sort(rng.choice(rng.uniform(0, 0.5, 4), n) + rng.uniform(0, 0.02, n))
    made = loads(
        rng, 1, times_s=tuple(times.tolist()), prompts=tuple(np.exp(rng.uniform(3, 8, n)).astype(int).tolist()),
        outputs=tuple(rng.integers(2, 40, n).tolist()),
    )  # fmt: skip
    return Labelled(replace(scenario, loads=made), tolerated={"hol-coupling": None})


def uneven_leaving(rng: Rng, offset_ms: float) -> Labelled:
    """A ring's order, which every collective shows alike."""
    scenario = world(rng, offset_ms)
    biased = replace(scenario.ranks, leave_bias_s=bias(rng, count(scenario), float(rng.uniform(5e-6, 2e-5))))
    return Labelled(replace(scenario, ranks=biased))


def drifting(rng: Rng, offset_ms: float) -> Labelled:
    scenario = world(rng, offset_ms)
    of_hosts = clocks(rng, count(scenario), max(offset_ms, 0.01), drift_ppm=float(rng.uniform(20, 100)))
    return Labelled(replace(scenario, ranks=replace(scenario.ranks, **of_hosts)))


def stepping(rng: Rng, offset_ms: float) -> Labelled:
    """A host's clock is set while the profilers run."""
    scenario = world(rng, offset_ms)
    host = int(rng.integers(scenario.ranks.hosts))
    jump = float(rng.choice([-1, 1])) * uniform(rng, 1e-4, 3e-3)
    steps = ((host, float(rng.uniform(0.1, 0.4)), jump),)
    return Labelled(replace(scenario, ranks=replace(scenario.ranks, clock_steps=steps)))


# -- profiles that tell less -------------------------------------------------------------------


def missing(rng: Rng, offset_ms: float) -> Labelled:
    """The slow rank has no profile: whoever seems late among the others is not it."""
    made = slow_rank(None)(rng, offset_ms)
    while count(made.scenario) < 3:
        made = slow_rank(None)(rng, offset_ms)
    rank = made.scenario.faults[0].rank
    telemetry = replace(made.scenario.telemetry, profile_missing=(rank,))
    return Labelled(replace(made.scenario, telemetry=telemetry))


def damaged(rng: Rng, offset_ms: float) -> Labelled:
    made = slow_rank(None)(rng, offset_ms)
    telemetry = replace(made.scenario.telemetry, profile_dropped=float(rng.uniform(0.02, 0.3)))
    return replace(made, scenario=replace(made.scenario, telemetry=telemetry))


FAMILIES = (
    Family("slow experts", "fault", "a rank's experts (or dense layers) take longer", slow_rank("expert")),
    Family("slow attention", "fault", "a rank's attention takes longer", slow_rank("attention")),
    Family("slow rank", "fault", "all of a rank's work takes longer", slow_rank(None)),
    Family("slow at times", "fault", "a rank loses half a step now and then", transient),
    Family("slow in a group", "fault", "a rank of a tensor-parallel group within an expert-parallel world", slow_rank("expert", "nested")),
    Family("waits handed on", "fault", "the same in attention: its group comes late to the others only because it waited", slow_rank("attention", "nested")),
    Family("hot expert", "fault", "an expert gets more tokens than others; where no tokens are told, its rank is late", hot_expert),
    Family("slow source", "fault", "what one rank sends in an all-to-all takes longer", slow_link("source")),
    Family("slow destination", "fault", "what one rank receives in an all-to-all takes longer", slow_link("destination")),
    Family("slow pair", "fault", "what one rank sends to another takes longer", slow_link("pair")),
    Family("slow group", "fault", "a ring is slow for a part of the time", slow_group),
    Family("slow host", "fault", "one rank's kernels are launched late", slow_host),
    Family("collections", "fault", "one rank's host stands still now and then", collected),
    Family("slow hosts", "fault", "all ranks' kernels are launched late", slow_hosts, unbarred="no rank waits for another, so that how well clocks are known decides nothing"),
    Family("dp coupling", "fault", "one engine's prefill holds up those beside it", coupled),
    Family("clean", "decoy", "nothing wrong", clean),
    Family("rotating", "decoy", "much lateness, each time another's", rotating),
    Family("common load", "decoy", "batches of very different sizes, alike for all", common_load),
    Family("uneven leaving", "decoy", "ranks leave collectives in one order always", uneven_leaving),
    Family("drifting clocks", "decoy", "clocks that gain up to 100 ppm", drifting),
    Family("clock set", "decoy", "a host's clock is set while profiled", stepping, unclocked="a clock that is set has no one offset"),
    Family("missing rank", "blind", "the slow rank has no profile", missing),
    Family("damaged", "fault", "a slow rank, and profiles that lost events", damaged, unbarred="with up to three of ten events lost, to abstain is right as well"),
)  # fmt: skip


def replayed(world_with: RankWorld, made: Labelled) -> tuple[float, float]:
    """(s by which the fault makes somebody late, on average, at each collective that it bears on, in the steps that it bears
    on; share of all steps' time that it costs): by replaying the steps of the same run without it."""
    assert made.healthy is not None
    healthy = RankWorld(made.healthy, world_with.instance, 0, made.healthy.seed)
    rows = zip(world_with.starts, world_with.costs, world_with.tokens, world_with.requests, strict=True)
    without = np.array([healthy.step(k, *row)[0] for k, row in enumerate(rows)])
    took = world_with.timelines(0, len(without)).duration_s
    longer = took - without
    struck = longer[longer > 1e-6]
    return float(struck.mean() / made.places) if len(struck) else 0.0, float(longer.sum() / took.sum())
