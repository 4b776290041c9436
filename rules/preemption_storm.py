"""The KV cache runs out, running requests are thrown out and computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tailscope.model import Decision, Evidence, Finding, Party, Remedy, Rows, Rule, Threshold, severity_of


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows:
        return Decision("no-data", RULE.missing)
    trace = rows[0]
    if not trace["known_requests"]:
        return without_requests(trace)
    if not trace["preempted_requests"]:
        return Decision("clear", f"none of {trace['known_requests']} requests was preempted")
    hurt = [
        r
        for r in rows
        if r["excess_s"] and r["excess_s"] > 0 and share(r) >= limits["share"] and felt(r, limits)
    ]
    stalled = any(r["preempted_s"] > 0 or r["recompute_s"] >= limits["share"] * r["excess_s"] for r in hurt)
    if not hurt or (not stalled and trace["preempted_requests"] < limits["queue_only"]):
        return Decision(
            "clear",
            f"{trace['preempted_requests']} of {trace['known_requests']} requests were preempted, "
            f"stalled for {trace['stalled_s'] or 0:.3g} s in all: too little to make a tail",
        )
    return Decision(
        "found", f"{trace['preempted_requests']} requests preempted", tuple(findings(trace, hurt))
    )


def caused(row: Mapping[str, Any]) -> float:
    """Seconds of the excess that the victims stalled, others computed for them, or somebody queued for the cache."""
    return float(row["preempted_s"] + max(row["recompute_s"], 0.0) + max(row["queued_s"], 0.0))


def share(row: Mapping[str, Any]) -> float:
    return float(min(1.0, max(0.0, caused(row) / row["excess_s"])))


def sized(remedy: Remedy, trace: Mapping[str, Any]) -> Remedy:
    """The first remedy with this trace's own numbers."""
    if not trace["running_when_full"]:
        return remedy
    now = f" (now {trace['max_num_seqs']})" if trace["max_num_seqs"] else ""
    return replace(remedy, flag=f"--max-num-seqs {trace['running_when_full']:.0f}{now}")


def spent(row: Mapping[str, Any]) -> str:
    parts = {
        "preempted": row["preempted_s"],
        "of steps that computed again": row["recompute_s"],
        "queued for KV cache": row["queued_s"],
    }
    return " and ".join(f"{seconds:.3g} s {what}" for what, seconds in parts.items() if seconds > 0)


def felt(row: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    """Whether the cache cost the tail a noticeable part of the median, and not just a handful of requests."""
    if row["hit"] is not None and row["hit"] < limits["hit"] * row["n"]:
        return False
    return bool(caused(row) >= limits["slowdown"] * (row["p50_s"] or 0.0))


def without_requests(trace: Mapping[str, Any]) -> Decision:
    """Only counters: that it happened is known, not to whom nor what it cost."""
    counts = [c for c in (trace["counter_increase"], trace["step_preemptions"]) if c is not None]
    if not counts:
        return Decision("no-data", RULE.missing)
    if max(counts) == 0:
        return Decision("clear", "no preemption was counted")
    return Decision(
        "inconclusive",
        f"{max(counts):.0f} preemptions were counted, but no source says which requests: spans do not, the stat logger does",
    )


def findings(trace: Mapping[str, Any], hurt: Sequence[Mapping[str, Any]]) -> list[Finding]:
    worst = max(hurt, key=share)
    first, last = trace["squeeze_first_ns"] or trace["first_ns"], trace["squeeze_last_ns"] or trace["last_ns"]
    seconds = max((last - first) / 1e9, 1e-9)
    evidence = [
        Evidence(
            f"{r['klass']} {r['metric']}: {spent(r)} of {r['excess_s']:.3g} s excess ({r['tail_rule']})",
            {k: r[k] for k in ("klass", "metric", "preempted_s", "recompute_s", "queued_s", "excess_s")},
        )
        for r in sorted(hurt, key=share, reverse=True)
    ]
    evidence.append(
        Evidence(
            f"{trace['preempted_requests']} of {trace['known_requests']} requests preempted, {trace['preemptions']} times in all, "
            f"at most {trace['most']}x each: {trace['preemptions'] / seconds:.2g} a second while it lasted",
            {k: trace[k] for k in ("preempted_requests", "known_requests", "preemptions", "most")},
        )
    )
    if trace["stalled_requests"]:
        evidence.append(
            Evidence(
                f"{trace['stalled_requests']} of them stalled after their first token, {trace['stalled_s']:.3g} s in all, "
                f"{trace['longest_s']:.3g} s at most",
                {k: trace[k] for k in ("stalled_requests", "stalled_s", "longest_s")},
            )
        )
    if trace["kv_usage"] is not None:
        evidence.append(
            Evidence(
                f"KV cache up to {trace['kv_usage']:.0%} full; {trace['running_when_full'] or 0:.0f} requests ran when it was 90 % "
                f"full (median), up to {trace['waiting'] or 0} waited",
                {k: trace[k] for k in ("kv_usage", "waiting", "running_when_full")},
            )
        )
    counter = []
    if trace["most"] == 1:
        counter.append(Evidence("nobody was preempted twice: a squeeze that passed, not a livelock"))
    if trace["counter_increase"] is not None:
        counter.append(
            Evidence(
                f"the engine's counter rose by {trace['counter_increase']:.0f}; it counts a preemption with the victim's next "
                "token, so after the stall",
                {"counter_increase": trace["counter_increase"]},
            )
        )
    victims = {r["klass"]: r for r in sorted(hurt, key=share)}
    return [
        Finding(
            rule=RULE.name,
            status="found",
            severity=severity_of(share(worst), any(r["slo_broken"] for r in hurt)),
            basis="inferred",
            title=f"KV cache ran out: {trace['preempted_requests']} requests were preempted and computed again"
            + (" while others waited for it" if worst["queued_s"] > caused(worst) / 2 else ""),
            culprit=Party("class", trace["holder"], {"held": "most of the KV cache meanwhile"})
            if trace["holder"]
            else Party("engine", "scheduler"),
            victims=tuple(
                Party("class", k, {"metric": r["metric"], "preempted": trace["preempted_requests"]})
                for k, r in victims.items()
            ),
            share_of_tail=share(worst),
            window_ns=(first, last),
            evidence=tuple(evidence),
            counter_evidence=tuple(counter),
            remedies=(sized(RULE.remedies[0], trace), *RULE.remedies[1:]),
            confirm_by=RULE.confirm_by,
            explains={f"{r['klass']}\t{r['metric']}": caused(r) for r in hurt},
        )
    ]


RULE = Rule(
    name="preemption-storm",
    summary="The KV cache runs out; running requests are preempted and computed again.",
    why=(
        "vLLM preempts by throwing a request's KV cache away: it waits for blocks, then computes its prompt and its "
        "output so far again. The client sees a stream that stops for seconds; averages do not show it."
    ),
    needs=("class_rows",),
    missing=(
        "needs preemptions by request (the stat logger's finished_requests), or at least vllm:num_preemptions_total "
        "scraped more than once"
    ),
    thresholds=(
        Threshold("hit", 0.01, "0-1", "What hits fewer than one in a hundred requests moves no p99."),
        Threshold(
            "queue_only",
            3,
            "",
            "Where a tail only queued for the cache, one or two preemptions meanwhile are no storm.",
        ),
        Threshold("share", 0.1, "0-1", "A tenth of the excess: healthy preemption stays below it."),
        Threshold(
            "slowdown", 0.25, "x p50", "A tail slower by less than a quarter of the median is not felt."
        ),
    ),
    remedies=(
        Remedy(
            "Let fewer requests run at once, so that those that run keep their cache",
            "--max-num-seqs, at what ran when the cache was 90 % full",
            "vLLM, all versions",
            "Requests wait before they start instead of in the middle: TTFT rises, token gaps vanish",
        ),
        Remedy(
            "Keep some blocks free when admitting",
            "--watermark 0.02",
            "vLLM 0.32 has it (0.0 by default); older ones may not",
            "Measured elsewhere: preemptions -62 %, ITL p99 -54 %, TTFT p50 +80 %",
        ),
        Remedy(
            "Give the cache more memory",
            "--gpu-memory-utilization 0.95, --kv-cache-dtype fp8",
            "vLLM, all versions; fp8 depends on the GPU",
            "Less headroom for activations; fp8 may cost accuracy",
        ),
        Remedy(
            "Cap in-flight tokens where requests enter",
            "gateway or client concurrency limit",
            "any",
            "Requests queue, or are refused, at the gateway",
        ),
        Remedy("Add an instance", "router configuration", "any", "another GPU"),
    ),
    confirm_by=(
        "Replay the window with --max-num-seqs at the number of requests that ran when the cache was 90 % full: "
        "preemptions go to 0 and the longest token gap falls to the longest step",
        "Watch rate(vllm:num_preemptions_total[1m]) together with vllm:kv_cache_usage_perc and vllm:num_requests_waiting",
    ),
    decide=decide,
)
