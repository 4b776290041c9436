"""What must fit in a scenario whose keys are right by themselves."""

from __future__ import annotations

from tailscope.sim.rank_places import places_of
from tailscope.sim.scenario import Fault, Load, Scenario, end_s
from tailscope.sim.scenario_limits import WEEK_S
from tailscope.sim.scenario_words import fail, shown, similar

#: A load that would send more is a mistake of units; it would not fit in memory either.
MOST_REQUESTS = 5_000_000
#: Ranks times layers of an instance: each has numbers of its own in every step.
MOST_PIECES = 16_384
#: A collective between two steps takes so long.
LEAST_GAP_S = 1e-4


def check(scenario: Scenario) -> None:
    """Raises UsageError where fields that are right by themselves do not go together."""
    _check_engine(scenario)
    _check_ranks(scenario)
    _unique("[[load]]", [load.name for load in scenario.loads])
    _unique("[[fault]]", [fault.name for fault in scenario.faults])
    for i, load in enumerate(scenario.loads, 1):
        _check_load(scenario, load, f"[[load]] {i}")
    for i, fault in enumerate(scenario.faults, 1):
        _check_fault(scenario, fault, f"[[fault]] {i}")
    for i, (from_s, length_s) in enumerate(scenario.telemetry.profile, 1):
        if not length_s:
            fail(f"[telemetry] profile[{i}]", "is [from, seconds], and must last above 0 seconds")
        if from_s + length_s > 2 * WEEK_S:
            fail(f"[telemetry] profile[{i}]", f"ends after {2 * WEEK_S:,.0f} s, when no world lasts")


def _check_engine(scenario: Scenario) -> None:
    engine = scenario.engine
    # As vLLM counts: one block of the cache is its null block, and the watermark's share stays free.
    usable = (engine.kv_blocks - 1) - int(engine.watermark * (engine.kv_blocks - 1))
    needed = -(-engine.max_model_len // engine.block_size)
    if usable < needed:
        fail(
            "[engine] kv_blocks",
            f"{usable} usable blocks cannot hold one request of max_model_len = {engine.max_model_len} tokens, "
            f"which takes {needed} of {engine.block_size}; give more blocks or lower max_model_len",
        )
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        fail(
            "[engine] max_num_batched_tokens",
            f"must be max_num_seqs, {engine.max_num_seqs}, or more, not {engine.max_num_batched_tokens}",
        )


def _rank_count(scenario: Scenario) -> int:
    """Ranks of one instance."""
    return scenario.ranks.tensor_parallel * scenario.engine.data_parallel


def _check_ranks(scenario: Scenario) -> None:
    ranks, engine, count = scenario.ranks, scenario.engine, _rank_count(scenario)
    if count * ranks.layers > MOST_PIECES:
        fail(
            "[ranks]",
            f"{count} ranks of {ranks.layers} layers are more than {MOST_PIECES} pieces of work in a step",
        )
    if ranks.topk > ranks.experts:
        fail("[ranks] topk", f"must be at most experts, {ranks.experts}, not {ranks.topk}")
    if scenario.engine.moe and ranks.experts < count:
        fail("[ranks] experts", f"must be at least the number of ranks, {count}, not {ranks.experts}")
    if ranks.tensor_parallel > 1 and engine.data_parallel > 1 and not scenario.engine.moe:
        fail(
            "[engine] data_parallel",
            "engines without experts do not wait for each other; set moe = true, or write them as replicas",
        )
    if ranks.hosts > count:
        fail("[ranks] hosts", f"must be at most the number of ranks, {count}, not {ranks.hosts}")
    for key in ("offset_s", "drift_ppm", "leave_bias_s"):
        if len(getattr(ranks, key)) > count:
            fail(f"[ranks] {key}", f"has {len(getattr(ranks, key))} entries, but there are {count} ranks")
    for i, (host, at_s, _) in enumerate(ranks.clock_steps, 1):
        if not 0 <= host < ranks.hosts or at_s < 0:
            fail(
                f"[ranks] clock_steps[{i}]",
                f"is [host, second, jump]: hosts are 0 to {ranks.hosts - 1}, seconds 0 or more",
            )
    if ranks.coordinate and not (engine.moe and scenario.cost.host_gap >= LEAST_GAP_S):
        fail("[ranks] coordinate", f"is for moe = true, in a host_gap of {LEAST_GAP_S:g} s or more")
    if ranks.exchange == "all-to-all" and not engine.moe:
        fail("[ranks] exchange", "all-to-all is between experts; set moe = true in [engine]")
    if ranks.emitter.startswith("deepep") and ranks.exchange != "all-to-all":
        fail("[ranks] emitter", f"{ranks.emitter} exchanges tokens of experts; set exchange = all-to-all")
    if ranks.emitter in ("custom", "graph") and ranks.exchange == "all-to-all":
        fail(
            "[ranks] emitter",
            f"{ranks.emitter} gathers and scatters; for all-to-all take gloo, nccl or deepep-…",
        )
    for rank in scenario.telemetry.profile_missing:
        if rank >= count:
            fail(
                "[telemetry] profile_missing", f"there is no rank {rank}; the last of {count} is {count - 1}"
            )


def _check_load(scenario: Scenario, load: Load, place: str) -> None:
    end = end_s(load, scenario.duration_s)
    if load.from_s >= end:
        fail(f"{place} from_s", f"{load.from_s:g} s is not before its end, {end:g} s: it would never send")
    if load.arrivals == "at" and not load.times_s:
        fail(f"{place} times_s", "is missing: arrivals = at needs the instants")
    if load.times_s and not any(load.from_s <= time < end for time in load.times_s):
        fail(f"{place} times_s", f"none is from {load.from_s:g} s to before {end:g} s: it would never send")
    for key in ("prompts", "outputs"):
        given = len(getattr(load, key))
        if given not in (0, len(load.times_s)):
            fail(f"{place} {key}", f"has {given} entries, but times_s has {len(load.times_s)}")
    if (
        load.arrivals in ("poisson", "bursty", "regular")
        and load.n * load.rate * (end - load.from_s) > MOST_REQUESTS
    ):
        fail(f"{place} rate", f"gives more than {MOST_REQUESTS} requests; lower it, or duration_s")
    # The process is laid out over the whole world in parts of burst_s.
    if load.arrivals == "bursty" and scenario.duration_s / load.burst_s * 20 > MOST_REQUESTS:
        fail(f"{place} burst_s", f"{load.burst_s:g} s is too short for {scenario.duration_s:g} s of bursts")
    for other in scenario.loads:
        if load.common_load and other.common_load == load.common_load and other.burst_s != load.burst_s:
            fail(
                f"{place} burst_s",
                f"must be one in all loads of common_load = {load.common_load}: {load.burst_s:g} or {other.burst_s:g}",
            )


def _check_fault(scenario: Scenario, fault: Fault, place: str) -> None:
    engine = scenario.engine
    if fault.to_s is not None and fault.to_s <= fault.from_s:
        fail(f"{place} to_s", f"must be above from_s, {fault.from_s:g}, not {fault.to_s:g}")
    if fault.replica >= engine.replicas + engine.prefill_replicas:
        fail(
            f"{place} replica",
            f"there is no replica {fault.replica}; the last is {engine.replicas + engine.prefill_replicas - 1}",
        )
    if fault.kind in ("slow-rank", "slow-link", "host-slow"):
        _check_rank_fault(scenario, fault, place)
    if fault.every_s is not None and fault.every_s <= fault.length_s:
        fail(f"{place} every_s", f"must be above length_s, {fault.length_s:g}, not {fault.every_s:g}")


def _check_rank_fault(scenario: Scenario, fault: Fault, place: str) -> None:
    ranks, count = scenario.ranks, _rank_count(scenario)
    if ranks.tensor_parallel == 1 and not (scenario.engine.moe and count > 1):
        fail(
            f"{place} kind",
            f"{fault.kind} needs ranks that wait for each other: tensor_parallel above 1, or data_parallel with moe",
        )
    if fault.rank >= count:
        fail(f"{place} rank", f"there is no rank {fault.rank}; the last of {count} is {count - 1}")
    if fault.peer is not None or fault.side == "destination":
        key = "side" if fault.peer is None else "peer"
        if ranks.exchange != "all-to-all":
            fail(f"{place} {key}", "is of exchange = all-to-all: a ring is slow for all of its ranks")
        if fault.peer is not None and (fault.peer >= count or fault.peer == fault.rank):
            fail(f"{place} peer", f"must be another rank than {fault.rank}, up to {count - 1}")
    if any(layer >= ranks.layers for layer in fault.layers):
        fail(f"{place} layers", f"must be below the number of layers, {ranks.layers}")
    phases = [p.phase if fault.kind == "slow-link" else p.after for p in places_of(scenario)]
    known = list(dict.fromkeys(phase for phase in phases if phase))
    if fault.phase is not None and fault.phase not in known:
        what = f"must be one of {', '.join(known)}, not {shown(fault.phase)}"
        fail(f"{place} phase", what + similar(fault.phase, known))


def _unique(place: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            fail(place, f"two have the name {shown(name)}; names tell them apart")
