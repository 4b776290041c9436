"""Some experts, and so some ranks, get more tokens than others, and the rest waits for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tailscope.model import (
    Decision,
    Evidence,
    Finding,
    Party,
    Remedy,
    Rows,
    Rule,
    Severity,
    Threshold,
    summed_up,
)
from tailscope.units import ms

from ._expert_loads import Row, balance_decision, estimate_limits, load_decision, load_evidence
from ._ranks import unprofiled
from ._tails import WAITING, Part, part_of, severity_by

#: Layers and ranks that are named.
NAMED = 5


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    loads = [{"instance": r["instance"], **r["load"]} for r in rows if r["told_by"] == "load"]
    balances = [{"instance": r["instance"], **r["balance"]} for r in rows if r["told_by"] == "balance"]
    decisions = [window_decision(r, loads, limits) for r in rows if r["told_by"] == "work"]
    if not decisions:
        decisions = [load_decision(RULE, load, limits["uneven"]) for load in loads]
    if not decisions:
        decisions = [balance_decision(balance, limits["uneven"]) for balance in balances]
    return summed_up(decisions, RULE.missing)


def window_decision(window: Row, loads: Sequence[Row], limits: Mapping[str, float]) -> Decision:
    """What one window of profiles says: whether the ranks' expert work differs, with their tokens, and what that costs."""
    if window["rounds"] < limits["rounds"]:
        return Decision("inconclusive", f"only {window['rounds']} passes through experts are profiled")
    if not window["step_ns"]:
        return Decision("inconclusive", "all collectives are at one time: the profiles are damaged")
    share = window["lost_ns"] / window["step_ns"]
    if share < limits["share"]:
        return Decision(
            "clear",
            f"that ranks differ in expert work costs {share:.1%} of the steps' time at most",
        )
    if not window["told_rounds"]:
        return untold(window, limits["share"])
    if window["ns_per_token"] is None or not window["unlike_ns"] or window["unlike_ns"] <= 0:
        return Decision(
            "inconclusive",
            f"ranks differ in expert work by {share:.0%} of the steps' time, but tokens vary too little to say whether they "
            "are why",
        )
    unlike, saved = window["unlike_ns"] / window["step_ns"], window["saved_ns"] / window["step_ns"]
    if unlike < limits["share"]:
        return Decision(
            "clear",
            f"what ranks differ by in tokens, or always, costs {unlike:.1%} of the steps' time: the rest is chance",
        )
    low, middle, high = (min(window[name], 1.0) for name in ("explained_low", "explained", "explained_high"))
    if high < limits["explains"]:
        return Decision("clear", not_the_tokens(window, unlike, middle))
    if low < limits["explains"]:
        return Decision(
            "inconclusive",
            f"ranks differ in expert work by {unlike:.0%} of the steps' time; tokens explain between {max(low, 0):.0%} and "
            f"{high:.0%} of that, which does not decide",
        )
    most = window["most_saved_ns"] / window["step_ns"]
    if most < limits["share"]:
        return Decision("clear", f"even loads would save {most:.1%} of the steps' time at most")
    if saved < limits["share"]:
        return Decision(
            "inconclusive",
            f"even loads would save {saved:.1%} of the steps' time, or up to {most:.1%}: whether that is worth it tokens do not decide",
        )
    load = next((one for one in loads if one["instance"] == window["instance"]), None)
    found = hot(window, load, saved, (low, middle, high))
    return Decision("found", found.title, (found,))


def untold(window: Row, least: float) -> Decision:
    """Without tokens: whether ranks differ by more than chance, which is all that can be said."""
    moving_ns = max(window["lost_ns"] - window["lasting_ns"], 0)
    share = (window["lasting_ns"] + window["follows"] * moving_ns) / window["step_ns"]
    if share < least:
        return Decision(
            "clear",
            f"that ranks differ in expert work costs {share:.1%} of the steps' time, beside what is chance from pass to pass",
        )
    return Decision(
        "inconclusive",
        f"ranks differ in expert work by {share:.0%} of the steps' time, but neither the dispatches nor a recording say "
        "how many tokens each got",
    )


def not_the_tokens(window: Row, share: float, middle: float) -> str:
    return (
        f"ranks differ in expert work by {share:.0%} of the steps' time, but that does not follow their tokens, which explain "
        f"{max(middle, 0):.0%} of it: balancing experts would not help"
    )


def hot(window: Row, load: Row | None, saved: float, shares: tuple[float, float, float]) -> Finding:
    tail = tail_of(window)
    severity = severity_by(saved, tail)
    ratio = window["most"] / window["mean_tokens"]
    stays = min(1.0, window["fixed_tokens"] / max(window["most"] - window["mean_tokens"], 1e-9))
    culprit, name = who(window, load)
    recorded = bool(window["recorded"])
    evidence = [
        Evidence(
            f"waiting for the rank with most expert work costs {ms(window['lost_ns'])} of {ms(window['step_ns'])} of "
            f"steps; with even tokens {ms(window['saved_ns'])} of it would go away ({saved:.0%})",
            {"lost_ns": window["lost_ns"], "saved_ns": window["saved_ns"], "step_ns": window["step_ns"]},
        ),
        Evidence(
            f"the busiest rank gets {ratio:.2f} x the mean tokens; that explains {shares[1]:.0%} "
            f"({shares[0]:.0%} to {shares[2]:.0%}) of what ranks differ by",
            {
                "max_over_mean": ratio,
                "explained": shares[1],
                "explained_low": shares[0],
                "explained_high": shares[2],
            },
        ),
        per_token(window, recorded),
        *(layer_evidence(place) for place in window["places"][:NAMED]),
    ]
    if load:
        evidence += load_evidence(load)
    counter = []
    if not recorded:
        lasting = "stays on the same ranks" if stays >= 0.5 else "moves from pass to pass"
        text = f"{stays:.0%} of the unevenness {lasting}"
        if stays >= 0.5:
            evidence.append(Evidence(text, {"stays": stays}))
        else:
            counter.append(
                Evidence(f"{text}: only spare copies and larger batches even that out", {"stays": stays})
            )
    else:
        text = "tokens are those of a recording at another time than the profiles"
        counter.append(Evidence(text, {"recorded": True}))
    counter += estimate_limits(load)
    counter += unprofiled(window)
    victims = [
        Party("rank", str(r["rank"]), {"idle_s": round(r["idle_ns"] / 1e9, 6)})
        for r in (window["idle"] or [])
        if r["idle_ns"] > 0 and not (culprit.kind == "rank" and str(r["rank"]) == culprit.id)
    ][:8]
    if tail:
        victims.append(tail.victim)
        evidence.append(tail.evidence("waiting for it"))
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity,
        basis="inferred" if recorded else "measured",
        title=f"{name} gets {ratio_of(window):.1f} x the mean tokens, and {window['ranks'] - 1} ranks wait for its experts",
        culprit=culprit,
        victims=tuple(victims),
        share_of_tail=tail.share if tail else None,
        window_ns=(window["first_ns"], window["last_ns"]),
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=remedies(severity, load, recorded or stays >= 0.5),
        confirm_by=RULE.confirm_by,
        claims=WAITING,
        explains=tail.explains if tail else {},
        standing=saved,
    )


def who(window: Row, load: Row | None) -> tuple[Party, str]:
    """The rank that is busiest in most of what is lost, else the layer and rank that cost most; the expert where it is known."""
    cost: Counter[int] = Counter()
    for place in window["places"]:
        cost[place["rank"]] += max(place["own_ns"] - place["others_ns"], 0)
    top = window["places"][0]
    detail: dict[str, Any] = {"world": window["world"]}
    if load and load["expert"] is not None and load["expert_ratio"] > load["expert_by_chance"]:
        detail |= {"hottest_layer": load["expert_layer"], "hottest_expert": load["expert"]}
    rank, most = cost.most_common(1)[0]
    layers = [p["layer"] for p in window["places"] if p["rank"] == rank and p["layer"] is not None]
    if len(window["places"]) == 1 or most >= 0.5 * cost.total():
        return Party("rank", str(rank), {**detail, "layers": sorted(layers)}), f"Rank {rank}"
    where = "" if top["layer"] is None else f"layer {top['layer']}, "
    name = f"{where}rank {top['rank']}"
    return Party("expert", name, detail), name[0].upper() + name[1:]


def ratio_of(window: Row) -> float:
    return float(window["places"][0]["ratio"] or window["most"] / window["mean_tokens"])


def per_token(window: Row, recorded: bool) -> Evidence:
    each, error = window["ns_per_token"], window["ns_per_token_margin"]
    data = {"ns_per_token": each, "ns_per_token_margin": error}
    if window["bent"]:
        return Evidence(
            f"the busiest's expert work grows by {each:.3g} ns (± {error:.2g}) with each token, over time; that of the "
            f"others, which get fewer, by {window['others_ns_per_token']:.3g} ns: few tokens take as long as the weights do",
            {**data, "others_ns_per_token": window["others_ns_per_token"]},
        )
    grows, told_by = (
        f"{each:.3g} ns (± {error:.2g}) with each token",
        "as each rank's part of them changes from pass to pass",
    )
    if recorded:
        grows = f"{ms(each)} (± {error / 1e6:.2g}) with each even share of tokens"
    if not window["by_itself"]:
        told_by = "by how ranks differ from layer to layer, or those that are not the busiest from each other"
    text = f"expert work grows by {grows}, {told_by}: not by how the busiest differs from the others, which a slow device would explain as well"
    return Evidence(text, data)


def layer_evidence(place: Row) -> Evidence:
    where = "experts" if place["layer"] is None else f"layer {place['layer']}"
    return Evidence(
        f"{where}: rank {place['rank']} gets {place['ratio']:.2f} x the mean tokens; its experts take "
        f"{ms(place['own_ns'])}, the others' {ms(place['others_ns'])}",
        dict(place),
    )


def tail_of(window: Row) -> Part | None:
    """What of a class's tail is waiting for hot experts: of the wait that late ranks caused, at most all."""
    return part_of(window, (window["saved_ns"] or 0) / window["all_own_ns"]) if window["all_own_ns"] else None


def remedies(severity: Severity, load: Row | None, stays: bool) -> tuple[Remedy, ...]:
    """Those that fit: what stays can be placed once; what moves needs copies or larger batches."""
    once, balancer, spare, batch = RULE.remedies
    best = min((load or {}).get("gains") or [], key=lambda gain: gain["after"], default=None)
    if best and best["spare"]:
        spare = replace(
            spare,
            do=f"{spare.do}: {best['spare']} would leave {best['after']:.2f} x the mean on the busiest rank",
            flag=spare.flag.replace("32", str(best["spare"])),
        )
    fitting = (once, balancer, spare) if stays else (batch, spare, balancer)
    return fitting if severity != "low" else fitting[:2]


RULE = Rule(
    name="hot-expert",
    summary="Some experts get more tokens than others, and all ranks wait for theirs.",
    why=(
        "In an expert-parallel layer every rank waits for the one whose experts got most tokens, so one hot expert slows all. "
        "Averages over ranks and over layers hide it; a slow device looks the same unless time is held against tokens."
    ),
    needs=(),
    missing="needs profiles of ranks with expert parallelism, a recording of experts' tokens, or a log with balancedness",
    thresholds=(
        Threshold(
            "share",
            0.05,
            "0-1",
            "Less than a twentieth of the steps' time is not worth moving experts for.",
        ),
        Threshold(
            "explains",
            0.5,
            "0-1",
            "Where tokens explain less than half of the difference, something else is the larger cause.",
        ),
        Threshold("rounds", 20, "", "Fewer passes through experts than twenty give no slope to trust."),
        Threshold(
            "bends",
            3,
            "x error",
            "Two slopes that differ by three times their error are two: time does not grow evenly with tokens.",
        ),
        Threshold(
            "uneven",
            1.2,
            "x",
            "A fifth more tokens than the mean costs at most a fifth of the expert work, itself part of a step.",
        ),
    ),
    remedies=(
        Remedy(
            "Place the experts by a recording of their loads",
            "--init-expert-location RECORDING.pt, recorded with --expert-distribution-recorder-mode stat",
            "SGLang with expert parallelism",
            "a restart; good for as long as loads stay alike",
        ),
        Remedy(
            "Let the engine place experts anew as loads move",
            'vLLM --enable-eplb --eplb-config \'{"window_size": 1000, "step_interval": 3000}\'; SGLang --enable-eplb',
            "vLLM and SGLang with expert parallelism",
            "a pause or slower steps each time experts move",
        ),
        Remedy(
            "Give the busiest experts copies on other ranks",
            "vLLM --eplb-config '{\"num_redundant_experts\": 32}'; SGLang --ep-num-redundant-experts 32",
            "vLLM and SGLang with EPLB",
            "memory of the copies' weights in every layer, so less KV cache",
        ),
        Remedy(
            "Let batches be larger, so that tokens even out within a step",
            "--max-num-batched-tokens; SGLang --chunked-prefill-size",
            "vLLM and SGLang, all versions",
            "longer steps",
        ),
    ),
    confirm_by=(
        "Profile again with the experts placed anew: the rank that was busiest should come as early as the others",
        "Record experts' tokens beside the profile: SGLang /start_expert_distribution_record; vLLM "
        "--eplb-config '{\"log_balancedness\": true}'",
    ),
    decide=decide,
    dashboard="ranks",
)
