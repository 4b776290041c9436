"""GPUs stand idle because their hosts have not launched anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
from scipy import stats

from tailscope.model import (
    Decision,
    Evidence,
    Finding,
    Party,
    Remedy,
    Rows,
    Rule,
    Threshold,
    severity_of,
    summed_up,
)

from . import _tails
from ._tails import Row

#: Fewer steps show no growth with the batch.
GROWS_STEPS = 20


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows:
        return Decision("no-data", RULE.missing)
    decisions = [
        together(list(group), limits)
        for _, group in groupby(
            rows, key=lambda r: (r["on_gpu"], r["window"], r["instance"], r["window"] is None and r["engine"])
        )
    ]
    return summed_up(decisions, RULE.missing)


def together(ranks: Sequence[Row], limits: Mapping[str, float]) -> Decision:
    """What the ranks of one window say, or the steps of one engine."""
    steps = min(r["steps"] for r in ranks)
    by_share = sorted(ranks, key=lambda r: r["share"])
    most, middle = by_share[-1], by_share[(len(by_share) - 1) // 2]
    what = "waits for its host" if most["on_gpu"] else "lies between steps"
    if steps < limits["steps"]:
        return Decision(
            "no-data", f"{_tails.counted(steps, 'step')}, of which {most['share']:.0%} {what}: too few"
        )
    if most["share"] >= limits["idle"]:
        if (
            len(ranks) > 1
            and by_share[0]["share"] < limits["alike"] * most["share"]
            and middle["share"] < limits["idle"]
        ):
            return Decision(
                "clear",
                f"only the GPU of rank {most['rank']} waits for its host ({most['share']:.0%} of a step): one rank's host, not the engine",
            )
        if middle["share"] >= limits["idle"]:
            return Decision(
                "found",
                f"{middle['share']:.0%} of a step {what}",
                (finding(ranks, middle, float(middle["share"]), False, limits),),
            )
    long_share = max(float(r["long_ns"] / r["total_ns"]) for r in ranks)
    rarely = max(ranks, key=lambda r: r["long_ns"] / r["total_ns"])
    if long_share >= limits["rare"] and rarely["long_steps"] >= limits["gaps"]:
        return Decision(
            "found",
            f"{rarely['long_steps']} long gaps make {long_share:.0%} of the steps' time",
            (finding(ranks, rarely, long_share, True, limits),),
        )
    if most["share"] >= limits["idle"]:
        return Decision(
            "clear",
            f"{by_share[0]['share']:.0%} to {most['share']:.0%} of a step {what} on {len(ranks)} ranks, {middle['share']:.0%} on the "
            "middle one: ranks differ, and straggler-rank judges whether the others wait for it",
        )
    return Decision("clear", f"at most {most['share']:.0%} of a usual step {what}")


def finding(
    ranks: Sequence[Row], row: Row, share: float, is_rare: bool, limits: Mapping[str, float]
) -> Finding:
    """`row`: the rank that stands for all; `is_rare`: few long gaps instead of one in each step."""
    engines = {r["engine"] for r in ranks}
    # Where the engines of an instance are alike it is not one of them.
    culprit = (
        Party("instance", str(row["instance"]), {"engines": sorted(e for e in engines if e is not None)})
        if len(engines) > 1
        else Party("engine", _tails.engine_name(row), {"instance": row["instance"]})
    )
    ms = 1e6
    counter: list[Evidence] = []
    where = "before it begins" if row["gap_share"] >= row["share"] / 2 else "inside of it, between kernels"
    evidence = [
        Evidence(
            f"{row['long_steps']} of {row['steps']} steps have a gap of up to {row['longest_ns'] / ms:.3g} ms before something is launched, while "
            f"requests wait; a usual step takes {row['usual_ns'] / ms:.3g} ms: few long gaps, as garbage collection makes them"
            if is_rare
            else f"in the median step nothing is launched for {row['idle_ns'] / ms:.3g} of {row['usual_ns'] / ms:.3g} ms, most of it {where}; "
            f"{row['steps']} steps",
            {
                k: row[k]
                for k in ("share", "gap_share", "idle_ns", "usual_ns", "steps", "long_steps", "longest_ns")
            },
        )
    ]
    if len(ranks) > 1:
        least, most = min(r["share"] for r in ranks), max(r["share"] for r in ranks)
        are_alike = least >= limits["alike"] * most
        spread = Evidence(
            f"{len(ranks)} ranks{' alike' if are_alike else ''}: {least:.0%} to {most:.0%}",
            {"share_by_rank": {str(r["rank"]): r["share"] for r in ranks}},
        )
        (evidence if are_alike else counter).append(spread)
    if row["kernels"] and row["launches"]:
        how = (
            "few graphs: what keeps them is before the step"
            if row["launches"] * 10 <= row["kernels"]
            else "one by one: no CUDA graph holds them"
        )
        evidence.append(
            Evidence(
                f"{row['kernels']:,.0f} kernels a step in {row['launches']:,.0f} launches, {how}",
                {"kernels": row["kernels"], "launches": row["launches"], "cpu_step_ns": row["cpu_step_ns"]},
            )
        )
    growth = grows(row["by_batch"])
    if growth is not None:
        slope_us, p_value = growth
        sentence = (
            f"idle time grows by {slope_us:.3g} us for each request in the batch"
            if slope_us > 0
            else "idle time does not grow with the batch"
        )
        is_sure = p_value <= limits["chance"] and slope_us > 0
        (evidence if is_sure else counter).append(
            Evidence(
                f"{sentence} (Theil-Sen; Spearman p = {p_value:.2g})",
                {"slope_us": slope_us, "p_value": p_value},
            )
        )
    if row["on_gpu"]:
        counter.append(
            Evidence(
                "the profile has Python stacks: with them launching takes several times as long as without"
                if row["with_stack"]
                else "a profiler slows launches down: without it the share is lower"
            )
        )
    what = "Few long gaps leave" if is_rare else "Its host leaves"
    owner = f"{culprit.kind} {culprit.id}"
    who = f"the GPU{'s' * (len(ranks) > 1)} of {owner}" if row["on_gpu"] else owner
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity_of(share),
        basis="measured",
        title=f"{what} {who} idle for {share:.0%} of {'the steps' if is_rare else 'a step'}",
        culprit=culprit,
        victims=(),
        share_of_tail=None,
        window_ns=None,
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=(*GC, *RULE.remedies) if is_rare else RULE.remedies,
        confirm_by=RULE.confirm_by,
    )


def grows(by_batch: Sequence[Row] | None) -> tuple[float, float] | None:
    """Slope of idle time on decoding requests, in microseconds, and how likely such an order is by chance."""
    if not by_batch or len(by_batch) < GROWS_STEPS:
        return None
    requests = np.array([row["decode_requests"] for row in by_batch], np.float64)
    idle_us = np.array([row["idle_ns"] for row in by_batch], np.float64) / 1e3
    if len(np.unique(requests)) < 3 or idle_us.min() == idle_us.max():
        return None
    slope = float(stats.theilslopes(idle_us, requests).slope)
    return slope, float(stats.spearmanr(requests, idle_us).pvalue)


GC = (
    Remedy(
        "See whether Python's garbage collector makes the gaps",
        "VLLM_GC_DEBUG=1",
        "vLLM V1, since about 0.11",
        "A line in the log for each collection",
    ),
)
RULE = Rule(
    name="host-bound",
    summary="GPUs stand idle because their hosts have not launched anything.",
    why=(
        "Between two steps the scheduler, the input batch and the tokenizer run in Python, and each kernel outside of a graph "
        "is launched by it. Where that takes longer than the GPU computes, a faster GPU changes nothing."
    ),
    needs=("iterations",),
    missing="needs a torch profile with kernels and their launches, or steps whose start and end are measured",
    thresholds=(
        Threshold("steps", 8, "steps", "Fewer say what a step was, not what steps are."),
        Threshold(
            "idle",
            0.2,
            "of a step",
            "Some microseconds lie between any two steps; a fifth is lost throughput.",
        ),
        Threshold("alike", 0.5, "x the most", "Where one rank alone waits for its host, it is that host."),
        Threshold(
            "much", 5, "x the usual gap", "A gap that is so much longer than others has a cause of its own."
        ),
        Threshold(
            "rare", 0.1, "of the time", "Rare gaps that cost less than a tenth of the time are no bound."
        ),
        Threshold(
            "capped",
            3,
            "x the usual step",
            "Time in which the engine had nothing to do is none of its steps': it counts as no more.",
        ),
        Threshold("gaps", 2, "gaps", "One long gap may be anything."),
        Threshold("chance", 0.01, "", "Against an order of idle times and batches by chance."),
    ),
    remedies=(
        Remedy(
            "Replay CUDA graphs instead of launching kernels one by one",
            'remove --enforce-eager; --compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE"}\'',
            "vLLM V1; the mode by name since about 0.11",
            "A longer start, and memory for the graphs",
        ),
        Remedy(
            "Schedule the next batch while one runs",
            "--async-scheduling",
            "vLLM V1; on by default where supported since 0.14",
            "Some features do not go with it",
        ),
        Remedy(
            "Give the engine core and the workers cores of their own",
            "CPU requests and limits of the pod, numactl or taskset; performance governor",
            "any",
            "Cores that others lack",
        ),
        Remedy(
            "Move tokenising and answering out of the way",
            "--api-server-count 4",
            "vLLM V1, since 0.9",
            "A process each; the console's statistics are off",
        ),
        Remedy(
            "Send fewer, larger pieces to clients",
            "--stream-interval 4",
            "vLLM V1, since 0.10",
            "Clients see tokens in groups",
        ),
    ),
    confirm_by=(
        "With nvidia-smi dmon: SM activity stays below the share of time that steps run",
        "Profile without stacks (torch_profiler_with_stack=false), once with --enforce-eager and once without: the gaps shrink",
    ),
    decide=decide,
)
