"""Requests with long answers hold the slots or the KV cache that others queue for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tailscope.model import Decision, Evidence, Finding, Party, Remedy, Rows, Rule, Threshold, severity_of

from . import _prefill, _tails

#: A cache that is at most so full while requests queue for slots has room for more of them.
ROOM = 0.8


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows:
        return Decision("no-data", RULE.missing)
    trace = rows[0]
    if not trace["known_answers"]:
        return Decision("no-data", RULE.missing)
    if not trace["has_steps"]:
        return Decision(
            "inconclusive" if trace["long_answers"] else "clear",
            "no iterations at the requests' time: what they queued for is not known"
            if trace["long_answers"]
            else f"no answer is {trace['long_from']:.0f} tokens or longer: there are no long ones",
        )
    if not trace["long_answers"]:
        return Decision("clear", f"no answer is {trace['long_from']:.0f} tokens or longer")
    if not trace["waiters"]:
        return Decision(
            "clear", f"nobody queued for what the {trace['long_answers']:,} answers of that length held"
        )
    hurt = [row for row in rows if is_felt(row, limits)]
    if not hurt:
        return Decision(
            "clear",
            f"{trace['long_answers']:,} long answers held {trace['long_wait_s']:.3g} s of the {trace['wait_s']:.3g} s that others "
            "queued for slots or KV cache: too little to make a tail",
        )
    if trace["long_within_s"] < limits["apart"] * trace["long_e2e_s"]:
        return Decision(
            "inconclusive",
            f"the {trace['long_answers']:,} long answers held what others queued for, but were asked for within "
            f"{trace['long_within_s']:.3g} s: one burst, and whether their length or their number did it cannot be told",
        )
    finding = found(sorted(hurt, key=share, reverse=True))
    return Decision("found", "long answers hold what others queue for", (finding,))


def share(row: Mapping[str, Any]) -> float:
    return _tails.share_of(row["long_s"], row["excess_s"])


def is_felt(row: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    """Whether what long answers held is a real part of an excess, and was waited for by more than a handful."""
    if not row["excess_s"] or row["excess_s"] <= 0 or row["hit"] < limits["hit"] * row["n"]:
        return False
    # The wait as a whole is what is felt; the long answers' part of it is a share of what was held.
    waited = max(row["queued_s"], row["long_s"])
    return share(row) >= limits["share"] and waited >= limits["slowdown"] * (row["p50_s"] or 0.0)


def found(hurt: Sequence[Mapping[str, Any]]) -> Finding:
    """`hurt`: rows of classes and metrics, the worst first."""
    worst = hurt[0]
    by_slots = worst["long_slots_s"] >= worst["long_s"] / 2
    what = "slots" if by_slots else "KV cache"
    evidence = [
        Evidence(
            f"{r['klass']} {r['metric']}: {r['long_s']:.3g} s of {r['excess_s']:.3g} s excess ({r['tail_rule']}) was spent queued "
            f"for {what} that answers of {r['long_from']:.0f} tokens and more held",
            {k: r[k] for k in ("klass", "metric", "long_s", "queued_s", "excess_s")},
        )
        for r in hurt[:6]
    ]
    evidence.append(
        Evidence(
            f"{worst['long_answers']:,} of {worst['requests']:,} answers are that long (median {worst['long_tokens']:,.0f} tokens, of all "
            f"{worst['median_tokens']:,.0f}); they took {worst['long_share'] or 0:.0%} of all decode time, and {worst['long_wait_s'] / worst['wait_s']:.0%} "
            f"of what others queued for",
            {
                k: worst[k]
                for k in ("long_answers", "requests", "long_tokens", "long_share", "long_wait_s", "wait_s")
            },
        )
    )
    if worst["steps"]:
        evidence.append(
            Evidence(
                f"up to {worst['running'] or 0:,} requests ran while up to {worst['waiting'] or 0:,} waited; the KV cache was then "
                f"{worst['kv_usage'] or 0:.0%} full (median)",
                {k: worst[k] for k in ("running", "waiting", "kv_usage", "max_num_seqs")},
            )
        )
    counter = [
        Evidence(
            f"the rest of that wait, {1 - worst['long_wait_s'] / worst['wait_s']:.0%}, was for what answers of ordinary length held: "
            "without the long ones it would be shorter, not gone"
        )
    ]
    if worst["queued_s"] > worst["long_s"] * 2:
        counter.append(
            Evidence("most of the queueing was for what ordinary answers held: look at the load as well")
        )
    tenant = worst["tenant"] if worst["tenants"] == 1 else None
    victims = {r["klass"]: r for r in reversed(hurt)}
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity_of(share(worst), any(r["slo_broken"] for r in hurt)),
        basis="inferred",
        title=f"Answers of {worst['long_from']:.0f} tokens and more hold the {what} that requests of class "
        f"{' and '.join(dict.fromkeys(r['klass'] for r in hurt))} queue for",
        culprit=Party(
            "class",
            worst["holder"],
            {"answers": worst["holder_answers"], "tokens_from": worst["long_from"]}
            | ({"tenant": tenant} if tenant else {}),
        ),
        victims=tuple(Party("class", k, {"metric": r["metric"]}) for k, r in victims.items()),
        share_of_tail=share(worst),
        window_ns=(worst["first_ns"], worst["last_ns"]),
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=remedies(worst, by_slots),
        confirm_by=RULE.confirm_by,
        claims=_tails.QUEUED,
        explains={f"{r['klass']}\t{r['metric']}": r["long_s"] for r in hurt},
    )


def remedies(row: Mapping[str, Any], by_slots: bool) -> tuple[Remedy, ...]:
    """Least invasive first, with this trace's own numbers: more slots only where the cache has room for them."""
    cap, slots, *rest = RULE.remedies
    cap = replace(cap, flag=f"max_tokens {row['long_from']:.0f} in the request body, or the gateway's cap")
    if not by_slots or row["kv_usage"] is None or row["kv_usage"] > ROOM:
        return (cap, *rest)
    now = row["max_num_seqs"] or row["running"]
    if now:
        fit = int(now * ROOM / max(row["kv_usage"], 0.1))
        slots = replace(
            slots,
            flag=f"--max-num-seqs {max(fit, now + 1)} (now {now})",
            cost=f"{slots.cost}; the KV cache was {row['kv_usage']:.0%} full at {now} requests",
        )
    return (cap, slots, *rest)


RULE = Rule(
    name="long-output",
    summary="Long answers hold the slots or the KV cache that others queue for.",
    why=(
        "A request keeps its slot and its KV cache until its last token. A few answers of thousands of tokens keep them for "
        "minutes, and short requests queue for the few that are left, though the engine is not busy with prompts."
    ),
    needs=("class_rows",),
    missing="needs requests with their output tokens, and the engine's iterations",
    thresholds=(
        _tails.SHARE,
        _prefill.SLOWDOWN,
        Threshold(
            "apart",
            1.0,
            "x their E2E",
            "Long answers that all came before one of them was over are one burst, which holds all there is whatever its length.",
        ),
        Threshold("hit", 0.01, "0-1", "What fewer than one in a hundred requests waits for moves no p99."),
    ),
    remedies=(
        Remedy(
            "Cap how long an answer may get, for those who do not need more",
            "max_tokens in the request body, or the gateway's cap",
            "any; vLLM: --override-generation-config '{\"max_new_tokens\": N}' caps all requests",
            "Answers beyond it are cut off, with finish_reason length",
        ),
        Remedy(
            "Let more requests run at once, where the KV cache has room for them",
            "--max-num-seqs",
            "vLLM, all versions",
            "Steps get longer with the batch: ITL of all rises somewhat",
        ),
        Remedy(
            "Give the KV cache more room",
            "--gpu-memory-utilization 0.95, --kv-cache-dtype fp8",
            "vLLM, all versions; fp8 depends on the GPU",
            "Less headroom for activations; fp8 may cost accuracy",
        ),
        Remedy(
            "Serve those who wait for a short answer first",
            "--scheduling-policy priority, and `priority` in the request body (lower is served first)",
            "vLLM V1",
            "Orders the queue; who holds a slot keeps it",
        ),
        Remedy(
            "Send requests for long answers to instances of their own",
            "router configuration",
            "any",
            "More instances, less sharing of capacity",
        ),
    ),
    confirm_by=(
        "Cap max_tokens of the long class for ten minutes: vllm:num_requests_waiting falls to 0 and the short ones' TTFT with it",
        "Watch vllm:num_requests_running against --max-num-seqs and vllm:kv_cache_usage_perc while long answers come in",
    ),
    decide=decide,
)
