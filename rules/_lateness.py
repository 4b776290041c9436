"""What is said of a late rank: why its work takes longer, when, where, and what its lateness costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tailscope.model import Evidence
from tailscope.stats import allows_quantile, change_point, quantile_interval, uncorrelated
from tailscope.units import ms

from ._ranks import SHARE, Row

#: From so many times the others' tokens on load may be a cause.
MORE_LOAD = 1.2
#: Share of the extra work that tokens account for, from which load is the cause, and below which it is none.
LOAD, NO_LOAD = 0.7, 0.3
#: Fewer steps without more load than the others' do not tell what lateness is left in them.
FEW_STEPS = 5
#: A change of level is told of from so many steps, at this p, where lateness at least doubles or halves.
CHANGE_STEPS, CHANGE_P, CHANGE_RATIO = 20, 0.01, 2.0


def cause_of(late: Row) -> tuple[str, list[Evidence]]:
    """What makes the rank's work take longer: load, host, compute, or compute and load; and what says so."""
    phases = late["phases"] or []
    total = sum(phase["own_ns"] for phase in phases)
    idle = sum(phase["own_ns"] for phase in phases if phase["phase"] == "idle")
    if total and idle >= total / 2:
        text = "its GPU stands idle meanwhile: the host launches its work late"
        return "host", [Evidence(text, {"idle_ns": idle, "late_ns": total})]
    tokens, others, what = (
        late["tokens"],
        late["others_tokens"],
        "its experts got {:.2f} x the others' tokens there",
    )
    if phases and phases[0]["phase"] != "expert":
        # What an engine's own ranks compute beside the experts is its own batch.
        if (steps := late["unloaded_steps"] or 0) >= FEW_STEPS:
            share = late["unloaded_ns"] / max(late["unloaded_step_ns"], 1)
            if share < SHARE.value:
                text = (
                    f"in the {steps} steps in which its engine has no more to prefill than the others its lateness costs {share:.1%} of the "
                    "time: it is the load, the rank is not slow"
                )
                return "load", [Evidence(text, {"steps": steps, "share": share})]
        tokens, others = late["batch_tokens"], late["others_batch_tokens"]
        what = "its batches held {:.2f} x the others' tokens in those steps"
    if not tokens or not others:
        return "compute", []
    ratio = tokens / others
    text = what.format(ratio)
    top = phases[0] if phases else None
    if top is None or not top["others_ns"] or top["work_ns"] <= top["others_ns"]:
        return "compute", [Evidence(text, {"tokens_ratio": ratio})]
    slower = top["work_ns"] / top["others_ns"]
    explained = min(max((ratio - 1) / (slower - 1), 0.0), 1.0)
    cause, means = "compute and load", f"load accounts for {explained:.0%} of it"
    if ratio >= MORE_LOAD and explained >= LOAD:
        cause, means = "load", f"{means}, the rank is not slow"
    elif ratio < MORE_LOAD or explained <= NO_LOAD:
        cause, means = "compute", "load is no cause"
    data = {"tokens_ratio": ratio, "work_ratio": slower, "explained": explained}
    return cause, [Evidence(f"{text}, its work took {slower:.2f} x theirs: {means}", data)]


def over_time(late: Row) -> list[Evidence]:
    """When its lateness changed, and how large it is in the worst steps where there are enough to say."""
    by_step = np.array(late["own_by_step"] or [], float)
    found = []
    if len(by_step) >= CHANGE_STEPS:
        at, p = change_point(by_step)
        before, after = by_step[:at].mean(), by_step[at:].mean()
        if p < CHANGE_P and max(before, after) >= CHANGE_RATIO * min(before, after):
            text = f"its lateness changed at step {at} of {len(by_step)}: {ms(before)} a step before, {ms(after)} after (p = {p:.2g})"
            found.append(Evidence(text, {"step": at, "before_ns": before, "after_ns": after, "p": p}))
    n_eff = uncorrelated(by_step, np.arange(len(by_step))) if len(by_step) else 0.0
    interval = quantile_interval(by_step, 0.99, n_eff) if allows_quantile(0.99, n_eff) else None
    if interval is not None:
        p99 = float(np.quantile(by_step, 0.99))
        text = f"p99 of its lateness in a step {ms(p99)} ({interval[0] / 1e6:.3g} to {ms(interval[1])}, {n_eff:.0f} effective steps)"
        found.append(Evidence(text, {"p99_ns": p99, "interval_ns": list(interval), "n_eff": n_eff}))
    gaps = late["gaps"]
    if gaps:
        text = f"without its lateness the p50 ITL of {gaps['klass']} in those steps would be {gaps['p50_without_s'] * 1e3:.3g} ms instead of {gaps['p50_s'] * 1e3:.3g} ms"
        if allows_quantile(0.99, gaps["gaps"]):
            text += f", the p99 {gaps['p99_without_s'] * 1e3:.3g} instead of {gaps['p99_s'] * 1e3:.3g} ms"
        found.append(
            Evidence(
                text + f" ({gaps['gaps']} gaps; at most, other batches would have been scheduled)", dict(gaps)
            )
        )
    return found


def common_evidence(rows: Sequence[Row], late: Row, share: float) -> list[Evidence]:
    """What its lateness cost, how much of the time in collectives is waiting, and how sure the clocks are."""
    evidence = [
        Evidence(
            f"its own lateness cost {ms(late['own_ns'])} of {ms(late['step_ns'])} of steps ({share:.0%}); "
            + "the next rank's "
            + f"{ms(max((r['own_ns'] for r in rows if r['rank'] != late['rank']), default=0))}",
            {"own_ns": late["own_ns"], "step_ns": late["step_ns"]},
        )
    ]
    waited = sum(r["wait_ns"] for r in rows)
    in_all = waited + late["transfer_ns"] * len(rows)
    evidence.append(
        Evidence(
            f"of a rank's {in_all / 1e6 / len(rows):.3g} ms in collectives {waited / max(in_all, 1):.0%} is waiting for the last to "
            f"come, {1 - waited / max(in_all, 1):.0%} transfer",
            {"wait_ns": waited, "transfer_ns": late["transfer_ns"]},
        )
    )
    agreed = late["agreed_ns"] / late["decided_ns"] if late["decided_ns"] else 0.0
    evidence.append(
        Evidence(
            f"without any clock: where it is last it also leaves soonest, in {agreed:.0%} of the wait; two clocks together are known "
            f"to {ms(late['error_ns'])}",
            {"agreed": agreed, "error_ns": late["error_ns"]},
        )
    )
    return evidence


def others(waiting: Sequence[Row]) -> str:
    if len(waiting) == 1:
        return f"rank {waiting[0]['rank']} waits"
    return f"{len(waiting)} ranks wait"


def where(phases: Sequence[Row] | None) -> str:
    """The phase that the lateness comes from; none where it is spread over several."""
    if not phases:
        return "its own work"
    total = sum(phase["own_ns"] for phase in phases)
    top = phases[0]
    if top["own_ns"] < 0.5 * total or top["phase"] == "other":
        return "work in no single phase"
    return place_of(top["phase"], top["layers"] or [])


def place_of(phase: str, layers: Sequence[int]) -> str:
    name = {
        "expert": "expert compute",
        "attention": "attention",
        "router": "routing",
        "moe": "the MoE layers",
        "idle": "launches of its host",
    }.get(phase, "work in no single phase")
    if not layers:
        return name
    return f"{name} of layer {layers[0]}" if len(layers) == 1 else f"{name} of {len(layers)} layers"
