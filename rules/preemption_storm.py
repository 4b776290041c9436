"""The KV cache runs out, running requests are thrown out and computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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

from . import _alerts, _kv, _pauses, _tails


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows:
        return Decision("no-data", RULE.missing)
    trace = rows[0]
    if not trace["known_requests"]:
        return without_requests(trace)
    if not trace["preempted_requests"]:
        return Decision("clear", f"none of {trace['known_requests']} requests was preempted")
    bars = _kv.Bars(limits["share"], limits["hit"], limits["slowdown"], limits["queue_only"])
    hurt = _kv.hurt_by_cache(rows, bars)
    if not _kv.is_storm(hurt, bars):
        return Decision(
            "clear",
            f"{trace['preempted_requests']} of {trace['known_requests']} requests were preempted, "
            f"stalled for {trace['stalled_s'] or 0:.3g} s in all: too little to make a tail",
        )
    return Decision(
        "found", f"{trace['preempted_requests']} requests preempted", (finding(trace, hurt, limits),)
    )


def sized(trace: Mapping[str, Any]) -> tuple[Remedy, ...]:
    """The remedies, those that let fewer requests run with this trace's own numbers."""
    fewer, watermark, *rest = RULE.remedies
    if not trace["running_when_full"]:
        return RULE.remedies
    now = f" (now {trace['max_num_seqs']})" if trace["max_num_seqs"] else ""
    cost = fewer.cost
    if trace["came"]:
        # Who would not have run would have waited: request-seconds beyond the limit, for each that came meanwhile.
        cost += f"; here by about {(trace['over_s'] or 0) / trace['came']:.2g} s for each of the {trace['came']:,} requests that came meanwhile"
        if trace["longest_s"]:
            cost += f", for stalls of up to {trace['longest_s']:.3g} s"
    kept_out = max(1.0, 0.02 * trace["running_when_full"])
    fewer = replace(fewer, flag=f"--max-num-seqs {trace['running_when_full']:.0f}{now}", cost=cost)
    watermark = replace(
        watermark,
        cost=f"Keeps about {kept_out:.0f} of the {trace['running_when_full']:.0f} requests out that ran when the cache was full; {watermark.cost[0].lower()}{watermark.cost[1:]}",
    )
    return (fewer, watermark, *rest)


def spent(row: Mapping[str, Any]) -> str:
    parts = {
        "preempted": row["preempted_s"],
        "of steps that computed again": row["recompute_s"],
        "queued for KV cache": row["queued_s"],
    }
    return " and ".join(f"{seconds:.3g} s {what}" for what, seconds in parts.items() if seconds > 0)


def without_requests(trace: Mapping[str, Any]) -> Decision:
    """Only steps and counters: that it happened is known, perhaps when, not to whom nor what it cost."""
    counts = [c for c in (trace["counter_increase"], trace["step_preemptions"]) if c is not None]
    early, storms = trace["early_preemptions"] or 0, trace["storms"] or []
    when = ""
    if storms:
        first = storms[0]
        when = f", in {_tails.counted(len(storms), 'storm')}, the first from {_pauses.clock(first['first_ns'])} for {first['seconds']:.3g} s"
    if not counts and not early:
        return Decision("no-data", RULE.missing)
    if max(counts, default=0) == 0 and early:
        return Decision(
            "inconclusive",
            f"fewer requests ran than should have, by {early:.0f}, in a full KV cache{when}: preempted, or aborted by clients "
            "without a trace; the stat logger would tell",
        )
    if max(counts) == 0:
        return Decision("clear", "no preemption was counted")
    return Decision(
        "inconclusive",
        f"{max(counts):.0f} preemptions were counted{when}, but no source says which requests: spans do not, the stat logger does",
    )


def is_livelock(storm: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    """Whether requests were thrown out again and again while next to none came to its end."""
    return bool(
        storm["preempted"] >= limits["many"]
        and storm["finished"] <= limits["progress"] * storm["preempted"]
        and (storm["again_tokens"] or 0) >= limits["again"] * (storm["tokens"] or 1)
    )


def storm_evidence(trace: Mapping[str, Any]) -> list[Evidence]:
    """When it was: one sentence a storm, the hardest ones."""
    storms = trace["storms"] or []
    chosen = sorted(sorted(storms, key=lambda s: -s["preempted"])[:3], key=lambda s: s["first_ns"])
    told = []
    for storm in chosen:
        where = f" on {storm['instance']}/{storm['engine']}" if trace["engines"] > 1 else ""
        rate = storm["preempted"] / max(storm["seconds"], 1.0)
        ahead = ""
        if storm["untold"] and storm["untold_s"] > storm["early"]:
            ahead = (
                f"; {storm['early']:.0f} of them are seen as fewer running requests than should be, {storm['untold_s'] / storm['early']:.2g} s "
                "(mean) before the engine told of it"
            )
        told.append(
            Evidence(
                f"from {_pauses.clock(storm['first_ns'])}{where} for {storm['seconds']:.3g} s: {storm['preempted']:.0f} preemptions, "
                f"{rate:.2g} a second, while {storm['finished']:,.0f} requests finished{ahead}",
                dict(storm),
            )
        )
    if len(storms) > len(chosen):
        told.append(Evidence(f"and {len(storms) - len(chosen)} more storms", {"storms": len(storms)}))
    return told


def wasted(trace: Mapping[str, Any]) -> Evidence | None:
    """What was computed twice, of all that was computed: as the steps tell, else as the victims' lengths do."""
    if trace["again_tokens"]:
        text = (
            f"{trace['again_tokens']:,.0f} tokens were computed again, {trace['again_tokens'] / max(trace['tokens'] or 1, 1):.0%} of those "
            "computed in the storms"
        )
        return Evidence(text, {"again_tokens": trace["again_tokens"], "tokens": trace["tokens"]})
    if not trace["lost_tokens"] or not trace["useful_tokens"]:
        return None
    return Evidence(
        f"about {trace['lost_tokens']:,.0f} tokens were thrown away, {trace['lost_tokens'] / trace['useful_tokens']:.0%} of all that was "
        "asked for, by the victims' lengths; the prefix cache may have spared some",
        {"lost_tokens": trace["lost_tokens"], "useful_tokens": trace["useful_tokens"]},
    )


def finding(
    trace: Mapping[str, Any], hurt: Sequence[Mapping[str, Any]], limits: Mapping[str, float]
) -> Finding:
    """One for all storms, though they may be apart in time: what they cost is known together, the cache is too small in all of
    them, and the remedies are the same. When each was is evidence."""
    worst = max(hurt, key=_kv.share)
    first, last = trace["squeeze_first_ns"] or trace["first_ns"], trace["squeeze_last_ns"] or trace["last_ns"]
    seconds = max((last - first) / 1e9, 1e-9)
    storms = trace["storms"] or []
    livelocks = [storm for storm in storms if is_livelock(storm, limits)]
    if storms:
        seconds = max(sum(storm["seconds"] for storm in storms), 1.0)
    evidence = [
        Evidence(
            f"{r['klass']} {r['metric']}: {spent(r)} of {r['excess_s']:.3g} s excess ({r['tail_rule']})",
            {k: r[k] for k in ("klass", "metric", "preempted_s", "recompute_s", "queued_s", "excess_s")},
        )
        for r in sorted(hurt, key=_kv.share, reverse=True)
    ]
    evidence.append(
        Evidence(
            f"{trace['preempted_requests']} of {trace['known_requests']} requests preempted, {trace['preemptions']} times in all, "
            f"{trace['once']} of them once, at most {trace['most']}x each: {trace['preemptions'] / seconds:.2g} a second while it lasted",
            {k: trace[k] for k in ("preempted_requests", "known_requests", "preemptions", "once", "most")},
        )
    )
    evidence += storm_evidence(trace)
    if (waste := wasted(trace)) is not None:
        evidence.append(waste)
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
    elif trace["once"] >= limits["healthy"] * trace["preempted_requests"] and not livelocks:
        counter.append(
            Evidence(
                f"{trace['once']} of {trace['preempted_requests']} were preempted only once, as in a healthy engine: no livelock",
                {"once": trace["once"]},
            )
        )
    if trace["counter_increase"] is not None:
        counter.append(
            Evidence(
                f"the engine's counter rose by {trace['counter_increase']:.0f}; it counts a preemption with the victim's next "
                "token, so after the stall, and never where the client has left before",
                {"counter_increase": trace["counter_increase"]},
            )
        )
    victims = {r["klass"]: r for r in sorted(hurt, key=_kv.share)}
    title = f"KV cache ran out: {trace['preempted_requests']} requests were preempted and computed again"
    if livelocks:
        title += ", over and over, and next to none came to its end (livelock)"
    elif worst["queued_s"] > _kv.caused(worst) / 2:
        title += " while others waited for it"
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity_of(_kv.share(worst), any(r["slo_broken"] for r in hurt)),
        basis="inferred",
        title=title,
        culprit=Party("class", trace["holder"], {"held": "most of the KV cache meanwhile"})
        if trace["holder"]
        else Party("engine", "scheduler"),
        victims=tuple(
            Party("class", k, {"metric": r["metric"], "preempted": trace["preempted_requests"]})
            for k, r in victims.items()
        ),
        share_of_tail=_kv.share(worst),
        window_ns=(first, last),
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=sized(trace),
        confirm_by=RULE.confirm_by,
        explains={f"{r['klass']}\t{r['metric']}": _kv.caused(r) for r in hurt},
        claims=_kv.CACHE,
    )


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
        _kv.HIT,
        _kv.QUEUE_ONLY,
        _kv.SHARE,
        _kv.SLOWDOWN,
        Threshold("windows", 100, "storms", "The hardest are told of; more of them say nothing new."),
        Threshold(
            "healthy",
            0.9,
            "of victims",
            "In a healthy engine 95 % of those preempted are so once, and at most 4 times.",
        ),
        Threshold("many", 10, "preemptions", "A few are no livelock, whatever happens meanwhile."),
        Threshold(
            "progress", 0.1, "requests each", "In a livelock next to nobody finishes for those thrown out."
        ),
        Threshold("again", 0.5, "of tokens", "In a livelock most of what is computed was computed before."),
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
        _kv.MORE_CACHE,
        _kv.FEWER_TOKENS,
        _kv.ADD,
    ),
    confirm_by=(
        "Replay the window with --max-num-seqs at the number of requests that ran when the cache was 90 % full: "
        "preemptions go to 0 and the longest token gap falls to the longest step",
        "Watch rate(vllm:num_preemptions_total[1m]) together with vllm:kv_cache_usage_perc and vllm:num_requests_waiting",
    ),
    decide=decide,
    alerts=(
        _alerts.found(
            "PreemptionStorm", "preemption-storm", "The KV cache runs out and requests are preempted"
        ),
        Alert(
            "PreemptionStorm",
            "warning",
            "5m",
            "{{ $labels.instance }} preempts running requests: {{ $value | humanizePercentage }} of those that finish were preempted "
            "more than once",
            (
                Signal(
                    f'1 - rate(vllm:request_num_preemptions_bucket{{le=~"1|1\\\\.0"}}{_alerts.WINDOW}) '
                    f"/ ignoring (le) rate(vllm:request_num_preemptions_count{_alerts.WINDOW})",
                    "> $hit",
                    f"and increase(vllm:num_preemptions_total{_alerts.WINDOW}) >= $many",
                ),
            ),
            panel=Panel(
                "engine",
                "Requests preempted more than once",
                "percentunit",
                "{{instance}} {{engine}}",
                "Share of the requests that finish: each of them stood still and was computed again, so above the line the cache is too small.",
            ),
        ),
        Alert(
            "PreemptionStorm",
            "warning",
            "5m",
            "{{ $labels.instance }} preempts running requests: {{ $value | humanize }} times for each request that finishes",
            (
                Signal(
                    f"rate(vllm:num_preemptions_total{_alerts.WINDOW}) / {_alerts.FINISHED}",
                    "> $each",
                    f"and increase(vllm:num_preemptions_total{_alerts.WINDOW}) >= $many",
                ),
            ),
            thresholds=(
                Threshold(
                    "each",
                    0.1,
                    "a finished request",
                    "One in ten stands still for seconds; healthy engines preempt a few in a hundred, once each.",
                ),
            ),
            panel=Panel(
                "engine",
                "Preemptions for each finished request",
                "none",
                "{{instance}} {{engine}}",
                "How often running requests are thrown out of the KV cache: short peaks come with bursts, a plateau is a cache too small.",
            ),
        ),
    ),
)
