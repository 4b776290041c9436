"""Prompts that were found in the prefix cache no longer are, and are computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tailscope.model import (
    Alert,
    Decision,
    Evidence,
    Finding,
    Panel,
    Party,
    Remedy,
    Rows,
    Rule,
    Signal,
    Threshold,
    severity_of,
)
from tailscope.units import amount

from . import _alerts, _prefill, _tails

Row = Mapping[str, Any]

#: With so much of the cache in use when prompts came, what they looked for was thrown out for others.
PRESSED = 0.8


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows:
        return Decision("no-data", RULE.missing)
    trace = rows[0]
    if not trace["known_requests"]:
        return by_counters(trace, limits)
    if not trace["groups"]:
        return Decision(
            "clear",
            "the prefix cache is off"
            if trace["disabled"]
            else f"{trace['hit_requests']:,} of {trace['known_requests']:,} requests found something in the prefix cache: too few of "
            "any tenant and class to see it change",
        )
    hurt = [row for row in rows if is_felt(row, limits)]
    if hurt:
        worst = sorted(hurt, key=share, reverse=True)
        return Decision("found", "prompts are no longer found in the prefix cache", (found(worst),))
    if not trace["bad_groups"]:
        came = (
            "; where the hit rate fell, other prompts came on top of those that are found"
            if trace["came_groups"]
            else ""
        )
        return Decision(
            "clear",
            f"{trace['good_share']:.0%} of the prompts of class {trace['group_klass']} are found in the prefix cache, at all times alike{came}",
        )
    return Decision(
        "clear",
        f"prompts of class {trace['group_klass']} were found in the cache less often for a while ({trace['bad_share']:.0%}, else "
        f"{trace['good_share']:.0%}), which cost no tail much",
    )


def by_counters(trace: Row, limits: Mapping[str, float]) -> Decision:
    """Only counters: whether the hit rate fell is known, not for whom, nor whether they would have been found."""
    before, after = trace["rate_before"], trace["rate_after"]
    if before is None or after is None:
        return Decision("no-data", RULE.missing)
    if after <= before - limits["fall"]:
        return Decision(
            "inconclusive",
            f"the hit rate fell from {before:.0%} to {after:.0%} between the halves of the scrapes, but no source says whose prompts "
            "were not found: the stat logger's finished_requests would",
        )
    return Decision("clear", f"the hit rate by /metrics was {before:.0%}, then {after:.0%}")


def excess(row: Row) -> float:
    """Seconds by which the slow requests exceed the median of good times."""
    return float(row["tail_s"] - row["good_p50_s"])


def share(row: Row) -> float:
    return _tails.share_of(row["lost_s"], excess(row))


def is_felt(row: Row, limits: Mapping[str, float]) -> bool:
    """Whether computing again is a real part of what makes the slow ones slow."""
    if row["tail_s"] is None or row["good_p50_s"] is None or excess(row) <= 0:
        return False
    if row["hit"] < limits["hit"] * row["known"]:
        return False
    return share(row) >= limits["share"] and row["lost_s"] >= limits["slowdown"] * row["good_p50_s"]


def found(hurt: Sequence[Row]) -> Finding:
    """`hurt`: rows of classes, the worst first."""
    worst = hurt[0]
    pressed = worst["bad_kv"] is not None and worst["bad_kv"] >= PRESSED
    group = f"{'tenant ' + worst['tenant'] + ', ' if worst['tenant'] else ''}class {worst['group_klass']}"
    evidence = [
        Evidence(
            f"{r['klass']} TTFT: {r['lost_s']:.3g} s of the {excess(r):.3g} s by which its slow requests ({r['tail_rule']}) exceed the "
            f"median of good times, {r['good_p50_s']:.3g} s, went to computing what was in the cache before",
            {k: r[k] for k in ("klass", "lost_s", "tail_s", "good_p50_s")},
        )
        for r in hurt[:6]
    ]
    evidence.append(
        Evidence(
            f"{group}: {worst['good_share']:.0%} of its prompts found their beginning ({worst['found_tokens']:,.0f} tokens) in the cache at "
            f"good times, {worst['bad_share']:.0%} of {worst['bad_requests']:,} at bad ones, in "
            f"{_tails.counted(worst['episodes'], 'episode')}{', the last one to the end' if worst['to_the_end'] else ''}; "
            f"{amount(worst['lost_tokens'])} tokens were computed that would have been found",
            {
                k: worst[k]
                for k in (
                    "good_share",
                    "bad_share",
                    "found_tokens",
                    "bad_requests",
                    "lost_tokens",
                    "episodes",
                )
            },
        )
    )
    if worst["bad_p50_s"] is not None:
        evidence.append(
            Evidence(
                f"{worst['klass']} TTFT p50 {worst['good_p50_s']:.3g} s at good times, {worst['bad_p50_s']:.3g} s at bad ones",
                {"good_p50_s": worst["good_p50_s"], "bad_p50_s": worst["bad_p50_s"]},
            )
        )
    if worst["bad_kv"] is not None and worst["good_kv"] is not None:
        evidence.append(
            Evidence(
                f"KV cache {worst['bad_kv']:.0%} in use when they came (mean), {worst['good_kv']:.0%} at good times"
                + (
                    ": what is not in use is thrown out"
                    if pressed
                    else ": it was not full, so nothing had to be thrown out"
                ),
                {"bad_kv": worst["bad_kv"], "good_kv": worst["good_kv"]},
            )
        )
    if worst["restarts"]:
        evidence.append(
            Evidence(f"the server was started {worst['restarts']}x shortly before: its cache was empty")
        )
    counter = [
        Evidence(
            "prompts are not kept, so that they begin as before is not known: prompts of the same tenant, class and length that "
            "no longer repeat would look the same"
        )
    ]
    one_instance = worst["instances"] > worst["bad_instances"] == 1
    if one_instance:
        culprit = Party("instance", worst["instance"], {"part": "prefix cache"})
    elif worst["tenant"]:
        culprit = Party(
            "tenant", worst["tenant"], {"class": worst["group_klass"], "part": "prompts no longer found"}
        )
    else:
        culprit = Party("class", worst["group_klass"], {"part": "prompts no longer found"})
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity_of(share(worst), any(r["slo_broken"] for r in hurt)),
        basis="inferred",
        title=f"Prompts of {group} are no longer found in the prefix cache and are computed again",
        culprit=culprit,
        victims=tuple(Party("class", r["klass"], {"metric": "TTFT", "requests": r["hit"]}) for r in hurt),
        share_of_tail=share(worst),
        window_ns=(worst["first_ns"], worst["last_ns"]),
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=remedies(worst, pressed),
        confirm_by=RULE.confirm_by,
        claims=_tails.OTHERS_PREFILL,
        explains={
            f"{r['klass']}\tTTFT": min(r["lost_s"], r["excess_s"]) for r in hurt if (r["excess_s"] or 0) > 0
        },
    )


def remedies(row: Row, pressed: bool) -> tuple[Remedy, ...]:
    same, route, memory, offload = RULE.remedies
    several = (route,) if row["instances"] > 1 else ()
    return (*several, memory, offload) if pressed else (same, *several, offload)


def hit_rate(window: str) -> str:
    """PromQL of the share of prompt tokens that were found in the cache."""
    return f"rate(vllm:prefix_cache_hits_total{window}) / rate(vllm:prefix_cache_queries_total{window})"


RULE = Rule(
    name="prefix-cache-loss",
    summary="Prompts that were found in the prefix cache no longer are.",
    why=(
        "Prompts that begin alike share the blocks of their beginning. When these are thrown out for others, when a restart empties "
        "the cache, or when something at the prompt's start changes, thousands of tokens a request are computed again."
    ),
    needs=("class_rows",),
    missing=(
        "needs cached tokens by request (the stat logger's finished_requests), or at least vllm:prefix_cache_hits_total and "
        "vllm:prefix_cache_queries_total scraped more than twice"
    ),
    thresholds=(
        _tails.SHARE,
        _prefill.SLOWDOWN,
        Threshold("hit", 0.01, "0-1", "What hits fewer than one in a hundred requests moves no p99."),
        Threshold("fall", 0.2, "0-1", "A hit rate that falls by less is what a changing mix does every day."),
    ),
    remedies=(
        Remedy(
            "Let prompts begin as they did: what changes (times, ids, names) belongs at their end; one cache_salt a tenant",
            "prompt template; `cache_salt` in the request body",
            "vLLM V1",
            "None",
        ),
        Remedy(
            "Send prompts that begin alike to one instance",
            "router configuration: prefix-aware or session routing",
            "llm-d, Dynamo, vLLM production-stack router",
            "Load is spread less evenly",
        ),
        Remedy(
            "Give the KV cache more room, so that less is thrown out",
            "--gpu-memory-utilization 0.95, --kv-cache-dtype fp8, or a lower --max-num-seqs",
            "vLLM, all versions; fp8 depends on the GPU",
            "Less headroom for activations; fp8 may cost accuracy; fewer requests run at once",
        ),
        Remedy(
            "Keep what is thrown out in the host's memory",
            "--kv-transfer-config with a connector that offloads (LMCache, OffloadingConnector)",
            "vLLM V1",
            "Host memory, and its bandwidth while blocks come back",
        ),
    ),
    confirm_by=(
        "Watch rate(vllm:prefix_cache_hits_total[1m]) / rate(vllm:prefix_cache_queries_total[1m]): it returns to where it was",
        "Replay one prompt twice within a second: the second's cached tokens are its length but for the last block",
    ),
    decide=decide,
    alerts=(
        _alerts.found(
            "PrefixCacheLoss", "prefix-cache-loss", "Prompts are no longer found in the prefix cache"
        ),
        Alert(
            "PrefixCacheLoss",
            "warning",
            "10m",
            "The prefix cache of {{ $labels.instance }} hits {{ $value | humanizePercentage }} of tokens less than in the six hours before",
            (
                Signal(
                    f"{hit_rate('[6h] offset 30m')} - {hit_rate('[30m]')}",
                    "> $fall",
                    "and increase(vllm:e2e_request_latency_seconds_count[30m]) >= $least",
                ),
            ),
            thresholds=(
                Threshold("least", 100, "requests", "A few conversations make a hit rate of their own."),
            ),
            last="30m",
            panel=Panel(
                "engine",
                "Fall of the prefix cache's hit rate",
                "percentunit",
                "{{instance}} {{engine}}",
                "Hit rate of the six hours before less that of the last half hour: above the line prompts that were cached are computed again.",
            ),
        ),
    ),
    panels=(
        Panel(
            "engine",
            "Prefix cache hit rate",
            "percentunit",
            "{{instance}} {{engine}}",
            "Share of prompt tokens that need no prefill: a step down is a changed template, another router, or a cache too small.",
            hit_rate(_alerts.WINDOW),
        ),
    ),
)
