"""One replica is busier, or slower at equal work, than the others of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
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

from . import _alerts, _tails

Row = Mapping[str, Any]


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows:
        return Decision("no-data", RULE.missing)
    parts = [list(part) for _, part in groupby(rows, key=lambda r: (r["instance"], r["engine"]))]
    behind = [part for part in parts if is_behind(part[0], limits)]
    hurting = [(part, hurt) for part in behind if (hurt := felt(part, limits))]
    known = [(part, hurt, why(part[0], limits)) for part, hurt in hurting]
    findings = [finding(part[0], hurt, reason, limits) for part, hurt, reason in known if reason]
    if findings:
        return Decision("found", "replicas of one model are not alike", tuple(findings))
    if hurting:
        row = hurting[0][0][0]
        return Decision(
            "inconclusive",
            f"requests on {name(row)} are {row['slower'] - 1:.0%} slower than on its peers, but it gets no more load and is not slower "
            "at equal work",
        )
    worst = max((part[0] for part in parts), key=lambda row: row["slower"])
    return Decision(
        "clear",
        f"{name(worst)} is the slowest of {worst['peers'] + 1} replicas, by {worst['slower'] - 1:.0%} (p = {worst['p_value']:.2g}): "
        "too little, or no more than chance",
    )


def name(row: Row) -> str:
    return f"{row['instance']}/{row['engine']}" if row["of_several"] else str(row["instance"])


def is_behind(row: Row, limits: Mapping[str, float]) -> bool:
    """Whether its requests are slower than those of their class on its peers, in one part of the time as in another."""
    return bool(row["p_value"] <= limits["p_value"] and row["slower"] >= limits["slower"])


def share(row: Row) -> float:
    return _tails.share_of(row["lost_s"], row["excess_s"])


def felt(rows: Sequence[Row], limits: Mapping[str, float]) -> list[Row]:
    """The classes and metrics whose tail the replica is a real part of, the worst first."""
    hurt = [
        r
        for r in rows
        if r["lost_s"] is not None
        and (r["excess_s"] or 0.0) > 0
        and share(r) >= limits["share"]
        and r["lost_s"] >= limits["slowdown"] * (r["p50_s"] or 0.0)
    ]
    return sorted(hurt, key=share, reverse=True)


def why(row: Row, limits: Mapping[str, float]) -> str | None:
    """slow, load or cache, whichever is most of the difference; slow also where its steps are not known."""
    factors = {}
    if row["pace"] is not None and row["pace"] >= limits["pace"]:
        factors["slow"] = row["pace"]
    if row["load"] >= limits["load"] and row["load_p_value"] <= limits["p_value"]:
        factors["load"] = row["load"]
        lacks = (row["peers_cached"] or 0.0) - (row["cached"] or 0.0)
        if row["load_of"].startswith("prompt") and lacks >= limits["cache"]:
            return "cache"
    if factors:
        return max(factors, key=lambda key: factors[key])
    return "unknown steps" if row["pace"] is None and row["load"] < limits["load"] else None


def finding(row: Row, hurt: Sequence[Row], reason: str, limits: Mapping[str, float]) -> Finding:
    worst = hurt[0]
    kind = "engine" if row["of_several"] else "instance"
    evidence = [
        Evidence(
            f"{r['klass']} {r['metric']}: {r['lost_s']:.3g} s of {r['excess_s']:.3g} s excess ({r['tail_rule']}) would not be if its "
            f"requests were as on its peers; {r['tail_share']:.0%} of the tail is on it",
            {key: r[key] for key in ("klass", "metric", "lost_s", "excess_s", "tail_share")},
        )
        for r in hurt[:6]
    ]
    evidence.append(
        Evidence(
            f"its requests are {row['slower'] - 1:.0%} slower than those of the same class on {_tails.counted(row['peers'], 'peer')} at "
            f"the same time, in {row['slower_blocks']} of {row['blocks']} parts of the time (p = {row['p_value']:.2g})",
            {key: row[key] for key in ("slower", "p_value", "slower_blocks", "blocks", "peers")},
        )
    )
    evidence.append(
        Evidence(
            f"p99 {worst['metric']} of class {worst['klass']} is {worst['p99_s']:.3g} s on it and {worst['peers_p99_s']:.3g} s on its "
            "peers, which is what there is to gain",
            {key: worst[key] for key in ("p99_s", "peers_p99_s")},
        )
    )
    for_it, against = differences(row, reason)
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity_of(share(worst), any(r["slo_broken"] for r in hurt)),
        basis="inferred",
        title=title(row, reason),
        culprit=Party(kind, name(row), {"requests": row["requests"], "model": row["model"]}),
        victims=victims(hurt),
        share_of_tail=share(worst),
        window_ns=(row["first_ns"], row["last_ns"]),
        evidence=(*evidence, *for_it),
        counter_evidence=against,
        remedies=tuple(remedies(reason)),
        confirm_by=RULE.confirm_by,
        explains={f"{r['klass']}\t{r['metric']}": r["lost_s"] for r in hurt},
    )


def victims(hurt: Sequence[Row]) -> tuple[Party, ...]:
    worst = {row["klass"]: row["metric"] for row in reversed(hurt)}
    return tuple(
        Party("class", klass, {"metric": worst[klass]})
        for klass in dict.fromkeys(row["klass"] for row in hurt)
    )


def title(row: Row, reason: str) -> str:
    if reason == "slow":
        return f"Replica {name(row)} takes {row['pace'] - 1:.0%} longer than its peers for equal batches"
    if reason == "load":
        return f"Replica {name(row)} gets {row['load']:.3g}x the {row['load_of']} of its peers"
    if reason == "cache":
        return (
            f"Replica {name(row)} computes {row['load']:.3g}x the prompt tokens of its peers: it finds {row['cached']:.0%} of "
            f"them in its cache, they {row['peers_cached']:.0%}"
        )
    return f"Requests on replica {name(row)} are {row['slower'] - 1:.0%} slower than on its peers, with no more load"


def differences(row: Row, reason: str) -> tuple[list[Evidence], tuple[Evidence, ...]]:
    """What sets the replica apart, and what does not."""
    pace = Evidence(
        "no steps of it and its peers in like batches: whether its machine is slower is not known"
        if row["pace"] is None
        else f"for equal batches its steps take {row['pace']:.3g}x as long as its peers' ({row['pace_steps']:,} steps compared)",
        {key: row[key] for key in ("pace", "pace_steps")},
    )
    load = Evidence(
        f"it gets {row['load']:.3g}x the {row['load_of']} of its peers (p = {row['load_p_value']:.2g})",
        {key: row[key] for key in ("load", "load_p_value", "load_of")},
    )
    state = []
    for key, what in (("running", "requests run"), ("waiting", "wait")):
        if row[key] is not None:
            state.append(f"{row[key]:.3g} {what} on it, {row[f'peers_{key}']:.3g} on its peers")
    if row["kv_usage"] is not None:
        state.append(f"its KV cache is {row['kv_usage']:.0%} full, theirs {row['peers_kv_usage']:.0%}")
    beside = [Evidence(f"on average {'; '.join(state)}")] if state else []
    if reason in ("load", "cache"):
        return [load, *beside], (pace,)
    return [pace, *beside], (load,)


def remedies(reason: str) -> list[Remedy]:
    route, sticky, machine, weight = RULE.remedies
    if reason == "slow":
        return [weight, machine]
    if reason == "cache":
        return [sticky, route]
    if reason == "load":
        return [route, sticky]
    return [machine, weight]


RULE = Rule(
    name="replica-imbalance",
    summary="One replica is busier, or slower at equal work, than its peers.",
    why=(
        "A router sends each request to one replica and the tail is that of the worst one. Means over replicas, and their "
        "number of requests in all, show nothing of it."
    ),
    needs=("class_rows",),
    missing="needs requests of two or more replicas of a model (instances or engines), served at the same time",
    thresholds=(
        Threshold(
            "p_value", 0.01, "", "Loads are dealt out by chance: of a hundred fleets one may look uneven."
        ),
        Threshold("slower", 1.05, "x", "Replicas that differ by less than a twentieth are alike."),
        Threshold("pace", 1.05, "x", "Steps for equal batches vary by less between machines that are alike."),
        Threshold("load", 1.1, "x", "Round robin keeps loads within a tenth over minutes."),
        Threshold(
            "cache", 0.1, "0-1", "A smaller difference in cached prompt tokens is the mix of requests."
        ),
        _tails.SHARE,
        _tails.SLOWDOWN,
    ),
    remedies=(
        Remedy(
            "Route by load instead of in turn or by a fixed weight",
            "the router's policy: least requests (Envoy lb_policy LEAST_REQUEST), queue and KV scorers (llm-d), power of two",
            "any; within one vLLM the DP load balancer does it (--data-parallel-size without external load balancing)",
            "A router that knows the engines' load; prefix hits may fall",
        ),
        Remedy(
            "Bound what stickiness may cost: leave the favourite replica when it is busier than the others",
            "consistent hashing with bounded loads, or a weight for prefix affinity below that for load",
            "router configuration",
            "Some prompts are computed again elsewhere",
        ),
        Remedy(
            "Take the replica out and look at its machine: clocks, power cap, temperature, neighbours, PCIe width",
            "nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE",
            "NVIDIA GPUs",
            "One replica less meanwhile",
        ),
        Remedy(
            "Send it as much less as it is slower, until it is mended",
            "the router's weight of the replica",
            "any router with weights",
            "The others get more",
        ),
    ),
    confirm_by=(
        "Compare vllm:num_requests_running and vllm:num_requests_waiting between replicas, and their TTFT for one class",
        "Exchange two replicas in the router: if the slowness moves, it is the routing; if it stays, it is the machine",
    ),
    decide=decide,
    alerts=(
        _alerts.found(
            "ReplicaImbalance", "replica-imbalance", "One replica is busier or slower than its peers"
        ),
        Alert(
            "ReplicaImbalance",
            "warning",
            "5m",
            "{{ $value | humanize }} requests wait at {{ $labels.instance }} on average while a peer of it has none waiting",
            (
                Signal(
                    "avg_over_time(vllm:num_requests_waiting[15m])",
                    ">= $queued",
                    "and on (job, model_name) min by (job, model_name) (avg_over_time(vllm:num_requests_waiting[15m])) < $none",
                ),
            ),
            thresholds=(
                _alerts.QUEUED,
                Threshold(
                    "none", 0.1, "requests", "Nobody for nine tenths of the time: it had room to spare."
                ),
            ),
            panel=Panel(
                "engine",
                "Requests waiting by replica",
                "none",
                "{{instance}} {{engine}}",
                "Means of a quarter of an hour: one replica above the line while another lies at nothing is the router's doing.",
            ),
        ),
    ),
)
