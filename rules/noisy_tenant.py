"""One tenant's load makes the requests of all others slow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tailscope.model import Decision, Evidence, Finding, Party, Remedy, Rows, Rule, Threshold, severity_of
from tailscope.stats import at_least

from . import _alerts, _prefill, _tails

Row = Mapping[str, Any]

#: What a tenant has that others wait for: column -> its name in a sentence, and the remedy that goes first.
MEANS = {
    "prefill_s": "its prefill in the same steps",
    "budget_s": "its prefill taking the token budget",
    "slots_s": "sequence slots it holds",
    "kv_s": "KV cache it holds",
}


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows:
        return Decision("no-data", RULE.missing)
    if not rows[0]["has_steps"]:
        return Decision(
            "inconclusive",
            "tenants are known, but no iterations at the requests' time say whose load was in whose steps",
        )
    judged = [row for row in rows if row["klass"] is not None]
    hurt = [row for row in judged if matters(row, limits)]
    noisy = [row for row in hurt if stands_out(row, limits) and takes_more(row, len(judged), limits)]
    always = [row for row in judged if row not in noisy and holds_up_all(row, limits)]
    findings = tuple(finding(group) for group in by_tenant(noisy, always))
    if findings:
        return Decision("found", "one tenant's load holds up the others", findings)
    if hurt:
        worst = max(hurt, key=share)
        if stands_out(worst, limits):
            why = f"{worst['tenant']!r} is large, but not waited for more than its part of the load says"
        else:
            why = (
                f"{worst['tenant']!r}, the worst, costs the others' {worst['metric']} tail only {times(worst):.2g}x what each other "
                "tenant does: the load is common"
            )
        return Decision("clear", f"tenants hold each other up, but {why}")
    return Decision("clear", "no tenant's load is a real part of the others' tail")


def by_tenant(noisy: Sequence[Row], always: Sequence[Row]) -> Iterator[list[Row]]:
    """The rows of each tenant, those whose tail it is before those that wait for it all the time."""
    for tenant in dict.fromkeys(str(row["tenant"]) for row in (*noisy, *always)):
        mine = [row for row in noisy if str(row["tenant"]) == tenant]
        if mine:
            yield sorted(mine, key=share, reverse=True)
        else:
            yield sorted((row for row in always if str(row["tenant"]) == tenant), key=level, reverse=True)


def level(row: Row) -> float:
    """The share of all the others' time, not only of their tail's, that they wait for the tenant."""
    return part(row["suspect_mean_s"], row["mean_s"])


def share(row: Row) -> float:
    return _tails.share_of(row["blamed_s"], row["excess_s"])


def times(row: Row) -> float:
    """How many times as long the tail waited for the tenant as for each of the others, their own among them."""
    return float(row["suspect_tail_s"] / max(row["rest_tail_s"], 1e-9))


def matters(row: Row, limits: Mapping[str, float]) -> bool:
    """Whether the tenant's load is a real part of an excess that is worth the name."""
    if not row["excess_s"] or row["excess_s"] <= 0:
        return False
    least = limits["gap"] if row["metric"] == "ITL" else limits["slowdown"]
    return share(row) >= limits["share"] and row["blamed_s"] >= least * (row["p50_s"] or 0.0)


def stands_out(row: Row, limits: Mapping[str, float]) -> bool:
    return times(row) >= limits["stands_out"]


def takes_more(row: Row, tried: int, limits: Mapping[str, float]) -> bool:
    """Whether it is waited for more than its part of the load alone would make others wait: something that is scarce, in
    bursts, or behind long prompts. Steps shared with whoever sends most are what a large tenant is. `tried`: of how many
    tenants, classes and metrics this was asked.

    By token, so that a tenant that sends nearly all of it can still be waited for more than its part."""
    scarce = row["budget_s"] + row["slots_s"] + row["kv_s"]
    others_tokens = (row["all_prefill_tokens"] or 0) - (row["prefill_tokens"] or 0)
    by_token = part(row["suspect_tail_s"], row["prefill_tokens"])
    others_by_token = part((row["tenants"] - 1) * row["rest_tail_s"], others_tokens)
    lift = by_token / max(others_by_token, 1e-12)
    lifted = lift >= limits["lift"] and by_chance(row) * tried <= limits["chance"]
    return bool(scarce >= row["blamed_s"] / 2 or lifted or row["prompt_ratio"] >= limits["longer"])


def by_chance(row: Row) -> float:
    """How likely the tail would wait for it as much as it did, if each time it waited for somebody in proportion to what all
    send. Who sends nearly all is all that a few slow requests met, and whoever of equal tenants came by chance is too."""
    waited = row["suspect_tail_s"] + (row["tenants"] - 1) * row["rest_tail_s"]
    usual = part(row["prefill_tokens"], row["all_prefill_tokens"])
    return at_least(part(row["suspect_tail_s"], waited) * row["spells"], row["spells"], usual)


def holds_up_all(row: Row, limits: Mapping[str, float]) -> bool:
    """Whether the others wait for it all the time, so that their tail is no slower than the rest: for what is scarce."""
    return (
        row["metric"] in ("TTFT", "E2E")
        and part(row["scarce_mean_s"], row["mean_s"]) >= limits["level"]
        and stands_out(row, limits)
    )


def finding(hurt: Sequence[Row]) -> Finding:
    """`hurt`: rows of one tenant, the worst first, one a class of victims and metric."""
    worst = hurt[0]
    means = sorted(MEANS, key=lambda name: -abs(worst[name]))
    in_tail = share(worst) >= RULE.limits["share"]
    others = worst["tenants"] - 1
    evidence = [
        Evidence(
            f"other tenants' {r['klass']} {r['metric']}: {r['blamed_s']:.3g} s of {r['excess_s']:.3g} s excess ({r['tail_rule']}) "
            f"is due to it: {spent(r)}",
            {k: r[k] for k in ("klass", "metric", "blamed_s", "excess_s", *MEANS)},
        )
        for r in hurt[:6]
        if in_tail
    ]
    if not in_tail:
        evidence.append(
            Evidence(
                f"other tenants' {worst['klass']} {worst['metric']}: {worst['suspect_mean_s']:.3g} s of the mean {worst['mean_s']:.3g} s "
                "is waited for it, in the tail and else",
                {k: worst[k] for k in ("klass", "metric", "suspect_mean_s", "mean_s")},
            )
        )
    evidence += [
        Evidence(
            f"in that tail a request waited {worst['suspect_tail_s']:.3g} s for it and {worst['rest_tail_s']:.3g} s for each of the "
            f"{_tails.counted(others, 'other tenant')}, its own among them",
            {k: worst[k] for k in ("suspect_tail_s", "rest_tail_s", "tenants")},
        ),
        Evidence(
            f"it had {part(worst['mean_tokens'], worst['all_mean_tokens']):.0%} of the tokens in flight on average (an equal part is "
            f"{1 / worst['tenants']:.0%}), at most {_tails.rounded(worst['peak_tokens'])} at once, {worst['peak_share']:.0%} of all then; "
            f"and {part(worst['prefill_tokens'], worst['all_prefill_tokens']):.0%} of the prefill",
            {k: worst[k] for k in ("mean_tokens", "peak_tokens", "peak_share", "prefill_tokens")},
        ),
    ]
    counter = []
    if worst["peak_share"] < 0.5:
        counter.append(
            Evidence("at its peak the others together had more tokens in flight than it"),
        )
    unexplained = worst["excess_s"] - worst["blamed_s"]
    if in_tail and share(worst) < 0.5:
        counter.append(
            Evidence(
                f"{unexplained:.3g} s of the {worst['excess_s']:.3g} s would be there without it",
                {"seconds": unexplained},
            )
        )
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity_of(share(worst) if in_tail else level(worst), any(r["slo_broken"] for r in hurt)),
        basis="inferred",
        title=f"Tenant {worst['tenant']} makes the requests of other tenants slow, by {MEANS[means[0]]}"
        + ("" if in_tail else ", all the time"),
        culprit=Party(
            "tenant",
            worst["tenant"],
            {
                "requests": worst["requests"],
                "peak_tokens_in_flight": worst["peak_tokens"],
                "share_at_peak": worst["peak_share"],
            },
        ),
        victims=tuple(
            Party("tenant", name, {"metric": worst["metric"], "class": worst["klass"]})
            for name in worst["victims"] or ()
        ),
        share_of_tail=share(worst) if in_tail else None,
        window_ns=(worst["first_ns"], worst["last_ns"]),
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=remedies(worst),
        confirm_by=RULE.confirm_by,
        claims=claims(worst),
        explains=explained(hurt) if in_tail else {},
    )


def explained(hurt: Sequence[Row]) -> dict[str, float]:
    """What of the classes' excess is due to it; where that is nothing, since others are few, what of the others' own, so that
    it is weighed whether they feel it."""
    of_class = {f"{r['klass']}\t{r['metric']}": r["class_s"] for r in hurt if r["class_s"] > 0}
    return of_class or {f"{r['klass']}\t{r['metric']}\tothers": r["blamed_s"] for r in hurt}


def claims(row: Row) -> str:
    """Others' prefill may be told of by other rules too; what is held is told of as the time it is waited for."""
    prefill = row["prefill_s"] + row["budget_s"]
    return _tails.OTHERS_PREFILL if prefill >= row["slots_s"] + row["kv_s"] else ""


def part(of: float, whole: float | None) -> float:
    return of / whole if whole else 0.0


def spent(row: Row) -> str:
    parts = [
        f"{row[name]:.3g} s {what}" for name, what in MEANS.items() if row[name] >= 0.02 * row["blamed_s"]
    ]
    return ", ".join(parts)


def remedies(row: Row) -> tuple[Remedy, ...]:
    """Those of the rule with this trace's own numbers, and a chunk's size only where prefill is what is waited for."""
    cap_at = min(2 * row["all_mean_tokens"] / row["tenants"], row["peak_tokens"] / 2)
    cap = replace(
        CAP,
        do=(
            f"{CAP.do}, for example at {_tails.rounded(cap_at)} (now up to {_tails.rounded(row['peak_tokens'])}); "
            f"the others' {row['metric']} becomes up to {max(row['blamed_s'], row['suspect_mean_s']):.3g} s shorter"
        ),
    )
    if row["prefill_s"] + row["budget_s"] < row["slots_s"] + row["kv_s"]:
        return (cap, PRIORITY, OWN_POOL)
    return (cap, PRIORITY, *_prefill.sized((_prefill.SMALLER_STEPS,), row["budget"]), OWN_POOL)


CAP = Remedy(
    "Cap each tenant's tokens in flight where requests enter",
    "gateway or router rate limit, in tokens and requests by tenant",
    "any; vLLM itself knows no tenants",
    "The capped tenant's requests queue, or are refused, at the gateway",
)
PRIORITY = Remedy(
    "Serve the other tenants' requests first",
    "--scheduling-policy priority, and `priority` in the request body (lower is served first), set by the gateway",
    "vLLM V1",
    "Orders admission, and whom to preempt: what runs is not interrupted; the tenant served last may starve",
)
OWN_POOL = Remedy(
    "Send the tenant to instances of its own",
    "router configuration",
    "any",
    "More instances, less sharing of capacity",
)

RULE = Rule(
    name="noisy-tenant",
    summary="One tenant's load makes the requests of all others slow.",
    why=(
        "Tenants of one engine share its steps, its slots and its KV cache, and vLLM serves whoever comes first: one that "
        "sends more than its part is waited for by all, and the class of requests alone does not show who it was."
    ),
    needs=("tenants",),
    missing=(
        "needs requests of at least two tenants: [attributes] tenant in tailscope.toml names the span attribute that tells them"
    ),
    thresholds=(
        _tails.SHARE,
        _prefill.SLOWDOWN,
        _prefill.GAP,
        Threshold(
            "stands_out",
            2.0,
            "x",
            "Equal tenants that burst by chance differ by less; where all burst together nobody is to blame.",
        ),
        Threshold(
            "lift",
            2.0,
            "x",
            "Who is waited for in proportion to what it sends is large, not noisy: by token it is the others' twice over.",
        ),
        Threshold(
            "chance",
            0.05,
            "0-1",
            "Of all tenants, classes and metrics that were tried, as rarely as a test at 95 % may be wrong: a tail of five that met "
            "the one who sends 96 % of all says nothing.",
        ),
        Threshold("longer", 4, "x", "Prompts a few times as long are what others wait behind."),
        Threshold("level", 0.3, "0-1", "A third of all the time: there is no tail where everybody waits."),
    ),
    remedies=(CAP, PRIORITY, _prefill.SMALLER_STEPS, OWN_POOL),
    confirm_by=(
        "Hold the tenant back at the gateway for ten minutes: the other tenants' tail falls by what is blamed on it",
        "Compare the other tenants' p99 in the minutes with and without the tenant: tailscope diagnose --from --to",
    ),
    decide=decide,
    alerts=(
        _alerts.found("NoisyTenant", "noisy-tenant", "One tenant's load makes the others' requests slow"),
    ),
)
