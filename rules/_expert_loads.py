"""What recordings of experts' tokens, and engines' own balancedness, say: how uneven experts are loaded, at an unknown cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailscope.model import Decision, Evidence, Finding, Party, Rule

Row = Mapping[str, Any]


def load_decision(rule: Rule, load: Row, uneven: float) -> Decision:
    """Without profiles: how uneven experts are loaded, from `uneven` on at a cost that is unknown."""
    by_rank = load["rank_ratio"] is not None
    ratio = load["rank_ratio"] if by_rank else load["expert_ratio"]
    worst = load["rank_ratio_worst"] if by_rank else load["expert_ratio"]
    chance = load["rank_by_chance"] if by_rank else load["expert_by_chance"]
    if ratio is None:
        return Decision(
            "inconclusive",
            "tokens by slot are recorded, but not which experts all slots hold, and nothing says how many ranks there are: neither "
            "experts nor ranks can be compared",
        )
    of = "ranks" if by_rank else "experts"
    if ratio < uneven or worst <= chance:
        return Decision("clear", f"{of} are loaded evenly: {ratio:.2f} x the mean tokens on the busiest")
    place, name = place_of(load, by_rank)
    found = Finding(
        rule=rule.name,
        status="inconclusive",
        severity="low",
        basis="measured" if load["placement"] == "recorded" or not by_rank else "inferred",
        title=f"{name} gets {worst:.1f} x the mean tokens, at a cost that is unknown",
        culprit=place,
        victims=(),
        share_of_tail=None,
        window_ns=None,
        evidence=tuple(load_evidence(load)),
        counter_evidence=(
            Evidence(
                "no profile of the ranks says whether time follows tokens: decode may wait for weights alone"
            ),
            *estimate_limits(load),
        ),
        confirm_by=rule.confirm_by,
    )
    return Decision(
        "inconclusive",
        f"{of} are loaded unevenly, {ratio:.2f} x the mean on the busiest, but without profiles of the ranks nothing says what that costs",
        (found,),
    )


def balance_decision(balance: Row, uneven: float) -> Decision:
    """Balancedness that an engine reports of itself: mean over max, 1 is even."""
    ratio = 1 / balance["usual"]
    if balance["name"] == "log:eplb_balancedness":
        meaning = "tokens of a rank summed over layers, which hides what single layers are"
    else:
        meaning = "mean of the layers of a pass; one with few tokens is uneven by chance"
    if ratio < uneven:
        return Decision("clear", f"the engine reports a balancedness of {balance['usual']:.2f} ({meaning})")
    return Decision(
        "inconclusive",
        f"the engine reports a balancedness of {balance['usual']:.2f} ({meaning}): the busiest rank gets {ratio:.2f} x the mean tokens, but "
        "without profiles of the ranks nothing says what that costs",
    )


def place_of(load: Row, by_rank: bool) -> tuple[Party, str]:
    layer = load["rank_layer"] if by_rank else load["expert_layer"]
    what = f"rank {load['rank']}" if by_rank else f"expert {load['expert']}"
    name = f"layer {layer}, {what}"
    return Party("expert", name, {"instance": load["instance"]}), name[0].upper() + name[1:]


def load_evidence(load: Row) -> list[Evidence]:
    """What a recording of experts' tokens says: unevenness, how it moves, what another placement would give."""
    evidence = []
    if load["expert_ratio"] is not None:
        evidence.append(
            Evidence(
                f"recorded: of {load['experts']} experts the busiest of a layer gets {load['expert_ratio_median']:.1f} x the mean tokens "
                f"(median of {load['layers']} layers), expert {load['expert']} of layer {load['expert_layer']} {load['expert_ratio']:.1f} x "
                f"(by chance at most {load['expert_by_chance']:.2f})",
                {k: load[k] for k in ("expert_ratio", "expert_ratio_median", "expert_by_chance", "tokens")},
            )
        )
    if load["rank_ratio"] is not None:
        basis = {
            "recorded": "as they are placed",
            "contiguous": "if experts are placed in their order, which is assumed",
        }[load["placement"]]
        text = (
            f"recorded: of {load['ranks']} ranks, {basis}, the busiest gets {load['rank_ratio']:.2f} x the mean tokens, in layer "
            f"{load['rank_layer']} {load['rank_ratio_worst']:.2f} x (by chance at most {load['rank_by_chance']:.2f})"
        )
        if load["pass_ratio"] is not None:
            text += f"; in single passes {load['pass_ratio']:.2f} x, of which chance alone gives {load['pass_by_chance']:.2f}"
        evidence.append(
            Evidence(text, {k: load[k] for k in ("rank_ratio", "rank_ratio_worst", "pass_ratio")})
        )
    if load["correlation"]:
        first, last = load["correlation"][0], load["correlation"][-1]
        evidence.append(
            Evidence(
                f"recorded: from one of {load['windows']} windows to the next the order of the experts stays with a rank correlation of "
                f"{first:.2f}, from the first to the last {last:.2f}; {load['overlap'][0]:.0%} of the busiest eighth stay in it",
                {"correlation": load["correlation"], "overlap": load["overlap"]},
            )
        )
    for gain in load["gains"] or []:
        spare = f"{gain['spare']} spare slots" if gain["spare"] else "no spare slots"
        evidence.append(
            Evidence(
                f"estimate, placed by one window and scored on the next, {spare}: the busiest rank would get {gain['after']:.2f} x the mean "
                f"instead of {gain['before']:.2f} x; with a placement {len(gain['after_age'])} windows old {gain['after_age'][-1]:.2f} x",
                dict(gain),
            )
        )
    return evidence


def estimate_limits(load: Row | None) -> list[Evidence]:
    """What the estimate of another placement leaves out, where there is one."""
    if not load or not load["gains"]:
        return []
    text = "the estimates count tokens: memory of copies, the cost of moving experts and copies that share unevenly are not in them"
    return [Evidence(text)]
