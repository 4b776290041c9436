"""Requests of a better priority wait behind those of a lower one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tailscope.model import Decision, Evidence, Finding, Party, Remedy, Rows, Rule, Threshold, severity_of

from . import _prefill, _tails

Row = Mapping[str, Any]

#: How the inversion comes about.
IN_THE_QUEUE, BY_THOSE_WHO_RUN, BY_PREEMPTION = "in the queue", "by those who run", "by preemption"


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows:
        return Decision("no-data", RULE.missing)
    known = [row for row in rows if row["n"] >= limits["requests"]]
    if not known:
        return Decision(
            "inconclusive",
            f"fewer than {limits['requests']:.0f} requests of any priority that has lower ones",
        )
    hurt = [row for row in known if is_felt(row, limits)]
    if not hurt:
        return Decision("clear", quiet(known))
    by_level = {row["level"]: [r for r in hurt if r["level"] == row["level"]] for row in hurt}
    findings = tuple(found(sorted(group, key=share, reverse=True)) for group in by_level.values())
    return Decision("found", "requests wait behind others of a lower priority", findings)


def quiet(rows: Sequence[Row]) -> str:
    overtaken = sum(row["overtaken_requests"] for row in rows if row["metric"] == "TTFT")
    requests = sum(row["n"] for row in rows if row["metric"] == "TTFT")
    return (
        f"{overtaken:,} of {requests:,} requests with a better priority saw a lower one go first, and none waited long for it"
        if overtaken
        else f"none of {requests:,} requests with a better priority saw a lower one go first, or waited long for what one held"
    )


def share(row: Row) -> float:
    return _tails.share_of(row["inverted_s"], row["excess_s"])


def is_felt(row: Row, limits: Mapping[str, float]) -> bool:
    """Whether waiting behind lower priorities is a real part of what makes the slow ones slow."""
    if not row["excess_s"] or row["excess_s"] <= 0 or row["inverted_s"] is None:
        return False
    if row["hit"] < limits["hit"] * row["n"]:
        return False
    return share(row) >= limits["share"] and row["inverted_s"] >= limits["slowdown"] * (row["p50_s"] or 0.0)


def kind(row: Row) -> str:
    if row["preempted_s"] > max(row["behind_s"], row["held_s"]):
        return BY_PREEMPTION
    return IN_THE_QUEUE if row["behind_s"] >= row["held_s"] / 2 else BY_THOSE_WHO_RUN


def found(hurt: Sequence[Row]) -> Finding:
    """`hurt`: rows of one priority, the worst metric first."""
    worst = hurt[0]
    how = kind(worst)
    lower = priorities(worst["lower_first"], worst["lower_last"])
    mine = priorities(worst["priority"], worst["last_priority"])
    broken = any(c["slo_broken"] for r in hurt for c in r["classes"] or ())
    did = {
        IN_THE_QUEUE: f"wait while the scheduler takes those of {lower} first",
        BY_THOSE_WHO_RUN: f"wait for what running requests of {lower} hold",
        BY_PREEMPTION: f"are preempted while requests of {lower} go on running",
    }[how]
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity_of(share(worst), broken),
        basis="inferred",
        title=f"Requests of {mine} {did}",
        culprit=party(worst["lower_tenant"], worst["lower_tenants"], worst["lower_klass"], lower),
        victims=(
            Party(
                "class",
                worst["klass"],
                {"metric": worst["metric"], "priority": worst["priority"], "requests": worst["n"]}
                | ({"tenant": worst["tenant"]} if worst["tenant"] and worst["tenants"] == 1 else {}),
            ),
        ),
        share_of_tail=share(worst),
        window_ns=(worst["first_ns"], worst["last_ns"]),
        evidence=tuple(evidence(hurt, mine, lower)),
        counter_evidence=tuple(counter(worst, how)),
        remedies=remedies(worst, how),
        confirm_by=RULE.confirm_by,
        claims=_tails.QUEUED,
        explains={f"{c['klass']}\t{r['metric']}": c["seconds"] for r in hurt for c in r["classes"] or ()},
    )


def priorities(first: int, last: int) -> str:
    return f"priority {first}" if first == last else f"priorities {first} to {last}"


def party(tenant: str | None, tenants: int, klass: str, named: str) -> Party:
    """The lower ones: their tenant where they have one, else the class of the longest of them."""
    detail = {"priority": named.partition(" ")[2]}
    return Party("tenant", tenant, detail) if tenant and tenants == 1 else Party("class", klass, detail)


def evidence(hurt: Sequence[Row], mine: str, lower: str) -> list[Evidence]:
    worst = hurt[0]
    told = [
        Evidence(
            f"{r['metric']} of {mine}: {r['inverted_s']:.3g} s of the {r['excess_s']:.3g} s by which its slow requests ({r['tail_rule']}, "
            f"{r['slow_n']:,} of {r['n']:,}) exceed its median {r['p50_s']:.3g} s was spent behind {lower}",
            {k: r[k] for k in ("metric", "inverted_s", "excess_s", "p50_s", "n", "slow_n")},
        )
        for r in hurt
    ]
    if worst["overtaken_requests"]:
        told.append(
            Evidence(
                f"while {worst['overtaken_requests']:,} of them queued, requests of {lower} were scheduled, up to {worst['most_overtaken']:,} "
                f"during one wait; the slow ones waited {worst['behind_s']:.3g} s (mean) after one got what would have been their place",
                {k: worst[k] for k in ("overtaken_requests", "most_overtaken", "behind_s")},
            )
        )
    if worst["held_s"] > 0:
        told.append(
            Evidence(
                f"of what the slow ones queued for (slots, KV cache, token budget), {lower} held a part worth {worst['held_s']:.3g} s",
                {k: worst[k] for k in ("held_s", "budget_s")},
            )
        )
    if worst["preempted_requests"]:
        told.append(
            Evidence(
                f"{worst['preempted_requests']:,} of them were preempted while {lower} ran",
                {"preempted_requests": worst["preempted_requests"], "preempted_s": worst["preempted_s"]},
            )
        )
    if worst["policy"]:
        told.append(Evidence(f"the server's log says --scheduling-policy {worst['policy']}"))
    return told


def counter(row: Row, how: str) -> list[Evidence]:
    told = []
    if not row["policy"]:
        told.append(
            Evidence(
                "no log says which scheduling policy the server runs: that it keeps no priorities is read off its order"
            )
        )
    if row["policy"] == "priority" and how == IN_THE_QUEUE:
        told.append(
            Evidence(
                "the server schedules by priority: priorities may be lost before it (gateway, client), or be reversed"
            )
        )
    if how == BY_THOSE_WHO_RUN:
        told.append(
            Evidence(
                "who runs already is not interrupted for a better priority: no order of the queue changes this"
            )
        )
    return told or [
        Evidence("a batch made one step ahead cannot hold who came meanwhile: that much was not counted")
    ]


def remedies(row: Row, how: str) -> tuple[Remedy, ...]:
    policy, cap, chunk, threshold, pool = RULE.remedies
    if how == BY_THOSE_WHO_RUN:
        first = (threshold, chunk) if row["budget_s"] > row["held_s"] / 2 else ()
        return (*first, cap, pool)
    if row["policy"] == "priority":
        return (cap, pool)
    return (policy, cap, pool)


RULE = Rule(
    name="priority-inversion",
    summary="Requests of a better priority wait behind those of a lower one.",
    why=(
        "vLLM reads `priority` only under --scheduling-policy priority; under the default, fcfs, who came first goes first, and "
        "who came last is preempted. Even by priority only the queue is ordered: a slot, or a long prompt's chunk, is not taken back."
    ),
    needs=("waits_behind",),
    missing=(
        "needs requests of more than one priority, whose engine is known: vLLM's spans do not tell it, so name an attribute "
        "that does in [attributes] of tailscope.toml"
    ),
    thresholds=(
        _tails.SHARE,
        _prefill.SLOWDOWN,
        Threshold("hit", 0.01, "0-1", "What fewer than one in a hundred requests waits for moves no p99."),
        Threshold("requests", 20, "", "Below it nobody can say what a priority's tail is."),
    ),
    remedies=(
        Remedy(
            "Let the scheduler keep priorities",
            "--scheduling-policy priority (lower numbers are served first)",
            "vLLM V1; fcfs by default, which ignores `priority`",
            "Low priorities wait longer, for ever under overload; those that run are preempted first when the cache is full",
        ),
        Remedy(
            "Cap how many requests of the low priority are in flight, so that slots and cache are left",
            "gateway or client concurrency limit",
            "any",
            "The low priority queues at the gateway; slots may stay empty",
        ),
        _prefill.SMALLER_STEPS,
        Remedy(
            "Cap what one long prompt may take of a step, leaving budget for others",
            "--long-prefill-token-threshold, for example a quarter of the budget",
            "vLLM V1; 0 (off) by default",
            "TTFT of long prompts rises",
        ),
        Remedy(
            "Serve the low priority on instances of its own",
            "router configuration",
            "any",
            "More instances, less sharing of capacity",
        ),
    ),
    confirm_by=(
        "Stop the low priority for ten minutes: the better one's queue time (vllm:request_queue_time_seconds) falls to a step",
        "After the change, no request of a lower priority is scheduled while a better one is queued",
    ),
    decide=decide,
)
