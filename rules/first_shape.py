"""Batches of a shape that was not seen before take long: something is compiled or captured for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from tailscope.model import Decision, Evidence, Finding, Party, Remedy, Rows, Rule, Threshold, summed_up

from . import _tails
from ._tails import BEYOND_BATCH, Row


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    decisions = [lane_decision(row, limits) for row in rows]
    return summed_up(decisions, RULE.missing)


def lane_decision(lane: Row, limits: Mapping[str, float]) -> Decision:
    """What an engine, or some that step together, say."""
    if unknown := _tails.unknown_cost(lane):
        return unknown
    found = lane["found"] or []
    if not found:
        return Decision("clear", "no batch of a new shape takes much longer than it accounts for")
    chance = by_chance(lane["eras"])
    told = [step for step in found if step["told"]]
    new = [step for step in found if step["is_new"] and not step["is_start"]]
    is_rare = chance <= limits["chance"]
    if len(new) < limits["shapes"] or not is_rare:
        new = []
    start = [step for step in found if step["is_start"]]
    members = sorted(
        {step["start_ns"]: step for step in [*told, *new, *start]}.values(), key=lambda s: s["start_ns"]
    )
    if not members:
        return Decision(
            "clear",
            f"{len(found)} long step{'s' * (len(found) > 1)} of a new shape, as many as by chance (p = {chance:.2g})"
            if not is_rare
            else f"{len(found)} long step of a new shape: a single one may be anything",
        )
    tails = _tails.tails((step["hurt"] for step in members), lane["classes"])
    hurt = _tails.felt(tails, limits["share"], limits["slowdown"])
    what = f"{batches(members)} {why(members, 'a new shape')}" if told or new else "the first batch"
    longest_s = max(step["beyond_s"] for step in members)
    return Decision(
        "found",
        f"{what} took up to {longest_s:.3g} s longer than accounted for",
        (finding(lane, members, bool(told or new), chance, hurt),),
    )


def batches(members: Sequence[Row]) -> str:
    return f"{len(members):,} batch{'es' * (len(members) != 1)}"


def why(members: Sequence[Row], shape: str) -> str:
    """What sets long batches apart: that they are the first of their shape, or what the log says beside them."""
    firsts = sum(step["is_first"] for step in members)
    logged = "beside a compilation in the log"
    if not firsts:
        return logged
    return f"of {shape}" if firsts == len(members) else f"of {shape} or {logged}"


def by_chance(eras: Sequence[Row]) -> float:
    """How likely as many long steps are first of their shape if length and novelty have nothing to do with each other
    among steps about as early: the sum of hypergeometric counts, one an era."""
    at_all, seen = np.ones(1), 0
    for era in eras:
        most = min(era["firsts"], era["longs"])
        counts = stats.hypergeom.pmf(np.arange(most + 1), era["steps"], era["firsts"], era["longs"])
        at_all = np.convolve(at_all, counts)
        seen += era["both_n"]
    return float(min(1.0, at_all[seen:].sum())) if seen else 1.0


def finding(
    lane: Row, members: Sequence[Row], is_again: bool, chance: float, hurt: Sequence[_tails.Tail]
) -> Finding:
    """`is_again`: it happens beyond the first batch after a start."""
    name = _tails.engine_name(lane)
    worst = sorted(members, key=lambda step: -step["beyond_s"])
    evidence = []
    for step in worst[:5]:
        if not step["is_first"]:
            others = f"not the first of its shape, which takes {step['usual_s']:.3g} s (median of {step['alike']:,})"
        elif step["alike"] > 1:
            others = f"the {step['alike'] - 1:,} like it later {step['usual_s']:.3g} s (median)"
        else:
            others = "none like it came later"
        beside = f"; in the log: {step['told']}" if step["told"] else ""
        after = ", first after the start" if step["is_start"] else ""
        evidence.append(
            Evidence(
                f"{step['shape']}{after}: {step['tile_s']:.3g} s, {step['beyond_s']:.3g} s more than it accounts for; {others}{beside}",
                {
                    k: step[k]
                    for k in ("shape", "is_first", "tile_s", "beyond_s", "alike", "usual_s", "start_ns")
                },
            )
        )
    if hurt:
        evidence.append(Evidence(_tails.sentence(hurt, "what these steps took beyond their batches")))
    firsts, longs, both = (sum(era[k] for era in lane["eras"]) for k in ("firsts", "longs", "both_n"))
    test = Evidence(
        f"{both} of {longs} long steps are the first of their shape, {firsts:,} of all {lane['steps']:,} are: p = {chance:.2g} among "
        "steps about as early",
        {"first_and_long": both, "long": longs, "first": firsts, "p_value": chance},
    )
    counter = [] if chance <= 0.01 else [test]
    if chance <= 0.01:
        evidence.append(test)
    if not is_again:
        counter.append(Evidence("it happened once, at the start: whoever comes later does not meet it"))
    severity = _tails.severity(hurt)
    if not is_again and severity == "high":
        severity = "medium"
    total_s = sum(step["beyond_s"] for step in members)
    shapes = f"{'a shape' if len(members) == 1 else 'shapes'} it has not had before"
    title = (
        f"Engine {name} takes {total_s:.3g} s more for {batches(members)} {why(members, shapes)}"
        if is_again
        else f"The first batch after the start of engine {name} takes {total_s:.3g} s more than it accounts for"
    )
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity,
        basis="inferred",
        title=title,
        culprit=Party("engine", name, {"instance": lane["instance"]}),
        victims=_tails.victims(hurt),
        share_of_tail=hurt[0].share if hurt else None,
        window_ns=(members[0]["start_ns"], max(step["end_ns"] for step in members)),
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=RULE.remedies,
        confirm_by=RULE.confirm_by,
        explains=_tails.explains(hurt),
        claims=BEYOND_BATCH,
    )


RULE = Rule(
    name="first-shape",
    summary="Batches of a shape that was not seen before take long.",
    why=(
        "Kernels are compiled, tuned or captured for the shapes of batches. What was not made before traffic comes is made "
        "while a batch of that shape waits, and everybody in it: after a start, and again for each shape that is rare."
    ),
    needs=("step_costs",),
    missing="needs steps of an engine",
    thresholds=(
        Threshold(
            "times",
            2,
            "x the batch",
            "A step three times as long as its batch accounts for did something else.",
        ),
        Threshold("most", 200, "steps", "The longest of them are enough to say what it costs."),
        Threshold("shapes", 2, "shapes", "A single slow batch may be anything, unless the log says what."),
        Threshold(
            "chance", 0.001, "", "Against long steps being new ones by chance, among steps about as early."
        ),
        _tails.SHARE,
        _tails.SLOWDOWN,
    ),
    remedies=(
        Remedy(
            "Warm up before traffic: requests of all lengths and at all levels of concurrency, after each start",
            "readiness probe that waits for the warm-up",
            "any",
            "A longer start",
        ),
        Remedy(
            "Keep what was compiled",
            "VLLM_CACHE_ROOT, TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR on a volume that outlives the container",
            "vLLM V1",
            "A volume per model, version and GPU",
        ),
        Remedy(
            "Capture graphs for the sizes that traffic has",
            "--compilation-config '{\"cudagraph_capture_sizes\": [...]}'",
            "vLLM V1",
            "Memory, and a longer start, for each size",
        ),
        Remedy(
            "Compile for fixed sizes at the start",
            "--compilation-config '{\"compile_sizes\": [...]}'",
            "vLLM V1",
            "A much longer start",
        ),
    ),
    confirm_by=(
        "Send the same requests again to the running server: the steps are as short as others of their shape",
        "TORCH_LOGS=recompiles, or the profiler around the next rare shape, shows what is compiled",
    ),
    decide=decide,
)
