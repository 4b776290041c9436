"""Requests queue for room in the KV cache, though hardly any that run are thrown out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

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

from . import _alerts, _kv
from ._tails import Row


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows:
        return Decision("no-data", RULE.missing)
    trace = rows[0]
    if not trace["usage_steps"]:
        return without_steps(trace, limits)
    bars = _kv.Bars(limits["share"], limits["hit"], limits["slowdown"], limits["queue_only"])
    if _kv.is_storm(_kv.hurt_by_cache(rows, bars), bars):
        return Decision(
            "clear",
            f"{trace['preempted_requests']} requests were preempted: what the cache costs is told by preemption-storm",
        )
    hurt = [row for row in rows if _kv.felt(row, max(row["queued_s"], 0.0), bars)]
    if not hurt:
        waited = f"requests waited for it for {trace['full_waiting_s']:.3g} s, too little to make a tail"
        if not trace["full_waiting_s"]:
            waited = "nobody waited for it"
        return Decision(
            "clear", f"KV cache up to {trace['most_used']:.0%} full, and {waited}{heading(trace)}"
        )
    return Decision("found", "requests queue for KV cache", (finding(trace, hurt),))


def without_steps(trace: Row, limits: Mapping[str, float]) -> Decision:
    """Gauges alone say how full the cache was and that requests waited, not that they waited for it."""
    if not trace["samples"]:
        return Decision("no-data", RULE.missing)
    share = trace["full_samples"] / trace["samples"]
    if not trace["full_samples"]:
        return Decision(
            "clear", f"no scrape of {trace['samples']} saw the KV cache {limits['full']:.0%} full"
        )
    if not trace["gauge_waiting"]:
        return Decision("clear", f"the KV cache was full in {share:.0%} of the scrapes, and nobody waited")
    return Decision(
        "inconclusive",
        f"the KV cache was {limits['full']:.0%} full in {share:.0%} of the scrapes and up to {trace['gauge_waiting']:.0f} requests waited; "
        "without steps nothing says that they waited for it",
    )


def heading(trace: Row) -> str:
    """Where the use of the cache was going, if it grew all along (Theil 1950, Kendall's test)."""
    parts = trace["parts"] or []
    if len(parts) < 10:
        return ""
    time = np.array([part["time_ns"] for part in parts]) / 1e9
    used = np.array([part["used"] for part in parts])
    order, p_value = stats.kendalltau(time, used)
    slope = float(stats.theilslopes(used, time).slope)
    if not np.isfinite(p_value) or p_value > 0.001 or order < 0.5 or slope <= 0:
        return ""
    left_s = (1 - used[-1]) / slope
    return f"; its use grew all along, and at that rate it is full {left_s:.3g} s after the end"


def finding(trace: Row, hurt: Sequence[Row]) -> Finding:
    worst = max(hurt, key=queue_share)
    evidence = [
        Evidence(
            f"{r['klass']} {r['metric']}: {r['queued_s']:.3g} s queued for KV cache of {r['excess_s']:.3g} s excess ({r['tail_rule']})",
            {k: r[k] for k in ("klass", "metric", "queued_s", "excess_s")},
        )
        for r in sorted(hurt, key=queue_share, reverse=True)
    ]
    evidence.append(
        Evidence(
            f"the cache was up to {trace['most_used']:.0%} full, and for {trace['full_s']:.3g} s at least 90 %; for {trace['full_waiting_s']:.3g} s of that "
            f"requests waited, up to {trace['most_waiting'] or 0} of them",
            {k: trace[k] for k in ("most_used", "full_s", "full_waiting_s", "most_waiting")},
        )
    )
    is_head = trace["head_s"] > trace["full_waiting_s"]
    if trace["head_s"] > 0.1 * trace["full_waiting_s"] and trace["head_usage"] is not None:
        longest = max((r["longest_prompt"] or 0 for r in hurt), default=0)
        evidence.append(
            Evidence(
                f"for {trace['head_s']:.3g} s more requests waited and none was admitted at {trace['head_usage']:.0%} (median): the first in the "
                f"queue was too large for what was free, and those behind it wait too (longest prompt that waited {longest:,} tokens)",
                {k: trace[k] for k in ("head_s", "head_usage")},
            )
        )
    if trace["lead_s"] is not None and trace["lead_s"] > 0 and trace["episodes"]:
        evidence.append(
            Evidence(
                f"it told in advance: 90 % full {trace['lead_s']:.2g} s (median of {trace['episodes']}) before requests began to wait",
                {k: trace[k] for k in ("lead_s", "episodes")},
            )
        )
    if trace["holder"] and trace["all_held_s"]:
        text = f"{trace['holder']} held {trace['held_s'] / trace['all_held_s']:.0%} of the cache while others waited, by tokens"
        if trace["tenants"] and trace["tenants"] > 1 and trace["tenant_share"]:
            text += f"; of the tenants {trace['tenant']} held {trace['tenant_share']:.0%}"
        evidence.append(
            Evidence(
                text, {k: trace[k] for k in ("holder", "held_s", "all_held_s", "tenant", "tenant_share")}
            )
        )
    counter = []
    if trace["known_requests"]:
        counter.append(
            Evidence(
                f"{trace['preempted_requests']} of {trace['known_requests']} requests were preempted: those that run keep their cache",
                {k: trace[k] for k in ("preempted_requests", "known_requests")},
            )
        )
    elif trace["counter_increase"]:
        counter.append(
            Evidence(
                f"{trace['counter_increase']:.0f} preemptions were counted, of requests that nothing names: a part of the wait may be theirs",
                {"counter_increase": trace["counter_increase"]},
            )
        )
    else:
        counter.append(Evidence("no source says which requests were preempted: the stat logger does"))
    victims = {r["klass"]: r for r in sorted(hurt, key=queue_share)}
    title = "Requests queue for KV cache" + (
        ": the first in the queue does not fit, and holds up those behind it"
        if is_head
        else " while none is preempted"
        if not trace["preempted_requests"]
        else ""
    )
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity_of(queue_share(worst), any(r["slo_broken"] for r in hurt)),
        basis="inferred",
        title=title,
        culprit=Party("class", trace["holder"], {"held": "most of the KV cache meanwhile"})
        if trace["holder"]
        else Party("engine", "scheduler"),
        victims=tuple(
            Party("class", k, {"metric": r["metric"], "requests": r["waited_requests"]})
            for k, r in victims.items()
        ),
        share_of_tail=queue_share(worst),
        window_ns=(trace["first_ns"], trace["last_ns"]) if trace["first_ns"] is not None else None,
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=sized(trace, worst, is_head),
        confirm_by=RULE.confirm_by,
        explains={f"{r['klass']}\t{r['metric']}": r["queued_s"] for r in hurt},
        claims=_kv.CACHE,
    )


def queue_share(row: Row) -> float:
    return _kv.part(row, max(row["queued_s"], 0.0))


def sized(trace: Row, worst: Row, is_head: bool) -> tuple[Remedy, ...]:
    """The remedies, that of a larger cache with what this trace would have filled; for a head that does not fit that one last
    in which only the order changes first."""
    more = _kv.MORE_CACHE
    if trace["wanted"]:
        more = replace(
            more,
            do=f"Give the cache more memory: {trace['wanted']:.2g} x as much would have held what ran and waited (p99 of steps); "
            f"it would take up to {worst['queued_s']:.3g} s off the {worst['metric']} of {worst['klass']}'s tail",
        )
    rest = tuple(more if remedy == _kv.MORE_CACHE else remedy for remedy in RULE.remedies)
    return rest if is_head else tuple(remedy for remedy in rest if remedy != SHORT_FIRST)


SHORT_FIRST = Remedy(
    "Let those that fit pass the one that does not",
    "--scheduling-policy priority, and `priority` in the request body (lower is served first)",
    "vLLM V1",
    "Long prompts wait longer, for as long as short ones keep coming",
)
#: What its panels show.
IN_USE = "Mean share of the KV cache that is held: above the line while requests wait, the next thing is preemption."
#: What the alert means.
BEFORE_PREEMPTION = (
    "A warning, before anybody is preempted: requests wait for room in the KV cache, and the next answers that grow throw "
    "running ones out. A full cache with nobody waiting is none."
)

RULE = Rule(
    name="kv-pressure",
    summary="Requests queue for room in the KV cache; hardly any are preempted.",
    why=(
        "A request is admitted once its prompt fits the cache. A full cache, or a first in the queue that is too large for what "
        "is free, keeps all behind it waiting, though slots and compute are to be had; preemptions come next."
    ),
    needs=("class_rows",),
    missing="needs steps with kv_usage and waiting (a stat logger), or at least /metrics scraped while it happened",
    thresholds=(
        Threshold("full", 0.9, "0-1", "A cache as full as this has no room for a request of ordinary size."),
        Threshold(
            "parts", 30, "", "So many parts of the time show a trend, and are long enough to have a mean."
        ),
        _kv.HIT,
        _kv.QUEUE_ONLY,
        _kv.SHARE,
        _kv.SLOWDOWN,
    ),
    remedies=(
        SHORT_FIRST,
        Remedy(
            "Ask for shorter answers, or prompts, of the class that holds the cache",
            "max_tokens in the request body; a limit at the gateway",
            "any",
            "Answers are cut off",
        ),
        _kv.MORE_CACHE,
        _kv.FEWER_TOKENS,
        _kv.ADD,
    ),
    confirm_by=(
        'Watch vllm:kv_cache_usage_perc, vllm:num_requests_waiting_by_reason{reason="capacity"} and '
        "rate(vllm:num_preemptions_total[1m]): the queue goes when the use of the cache does",
        "Replay with a larger cache, or without the class that holds it: TTFT falls to that of requests that came while there was room",
    ),
    decide=decide,
    alerts=(
        Alert(
            "KvThrash",
            "warning",
            "2m",
            "The KV cache of {{ $labels.instance }} is {{ $value | humanizePercentage }} full and requests wait",
            tuple(
                Signal(
                    f"avg_over_time(vllm:kv_cache_usage_perc{_alerts.WINDOW})",
                    "> $full",
                    f"and {waiting} >= $queued",
                )
                for waiting in (_alerts.WAITING, _alerts.ALL_WAITING)
            ),
            BEFORE_PREEMPTION,
            thresholds=(_alerts.QUEUED,),
            panel=Panel(
                "engine",
                "KV cache in use",
                "percentunit",
                "{{instance}} {{engine}}",
                IN_USE,
            ),
        ),
        Alert(
            "KvThrash",
            "warning",
            "2m",
            "The KV cache of {{ $labels.server }} is {{ $value | humanizePercentage }} full and requests wait",
            (
                Signal(
                    f"avg_over_time(tailscope_kv_cache_usage_ratio{_alerts.WINDOW})",
                    "> $full",
                    f"and avg_over_time(tailscope_requests_waiting{_alerts.WINDOW}) >= $queued",
                ),
            ),
            BEFORE_PREEMPTION,
            thresholds=(_alerts.QUEUED,),
            panel=Panel(
                "fleet",
                "KV cache in use",
                "percentunit",
                "{{server}} {{engine}}",
                IN_USE,
            ),
        ),
    ),
)
