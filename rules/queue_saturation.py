"""An engine is asked for more than it can serve: its queue grows for minutes, and latency is queueing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, sqrt
from typing import Any

from scipy import stats as distributions

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

#: What bounds an engine -> what it is called, and whose time other rules explain too.
BOUNDS = {
    "budget": ("the token budget of a step", _tails.OTHERS_PREFILL),
    "slots": ("the sequence slots", ""),
    "kv": ("the KV cache", ""),
}


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows:
        return Decision("no-data", RULE.missing)
    queue = rows[0]
    if not queue["told_waiting"]:
        return Decision("no-data", RULE.missing)
    if not queue["seconds"]:
        return near_the_knee(rows, limits) or Decision(
            "clear", "no engine had a queue for any length of time"
        )
    length = f"{queue['seconds']:.3g} s"
    if not lasts(queue, limits):
        return near_the_knee(rows, limits) or Decision(
            "clear",
            f"the longest queue lasted {length} and drained: a burst, not more than can be served"
            if queue["drained"]
            else f"the longest queue lasted {length}, too short to tell a burst from more than can be served",
        )
    if queue["longest_step_s"] >= limits["stall"] * queue["seconds"]:
        return Decision(
            "clear",
            f"the longest queue, of {length}, came with a step of {queue['longest_step_s']:.3g} s: it is what that left",
        )
    if is_closed(queue, limits):
        return Decision(
            "clear",
            f"{queue['in_system']:.0f} requests were in the engine all the time, a new one for each that was answered: a "
            "closed loop fills any engine, so its queue says nothing of overload",
        )
    hurt = [row for row in rows if share(row, limits) >= limits["share"]]
    if not hurt:
        return Decision("clear", f"a queue of {length} explains too little of any class's tail")
    return Decision("found", f"a queue for {length} without a break", (finding(rows, hurt, limits),))


def lasts(queue: Row, limits: Mapping[str, float]) -> bool:
    """Whether a queue stood for longer than bursts take to drain: so many times what a request takes."""
    least = max(limits["lasting"], limits["turnovers"] * (queue["service_s"] or 0.0))
    return bool(queue["seconds"] >= least)


def is_closed(queue: Row, limits: Mapping[str, float]) -> bool:
    """Whether as many requests were in the engine all along, and not because others were refused."""
    spread = queue["in_system_high"] - queue["in_system_low"]
    return bool(spread <= limits["steady"] * queue["in_system"] and not queue["rejected"])


def caused(row: Row) -> float:
    """Seconds of the excess that are queueing of requests that came in a lasting queue."""
    of_lasting = row["lasting_queued_s"] / row["all_queued_s"] if row["all_queued_s"] else 0.0
    return float(max(row["queue_s"], 0.0) * of_lasting)


def share(row: Row, limits: Mapping[str, float]) -> float:
    """The share of a class's excess that is queueing in a lasting queue; where that is too short to be felt, none."""
    return _part(row, caused(row), limits)


def near_the_knee(rows: Rows, limits: Mapping[str, float]) -> Decision | None:
    """No queue lasts, but the engine is asked for nearly all that it can, and queues come again and again."""
    engine = rows[0]
    used, queued = engine["utilisation"], engine["time_queued"]
    if (
        used is None
        or used < limits["knee"]
        or queued < limits["often"]
        or engine["queues"] < limits["again"]
    ):
        return None
    if engine["all_high"] - engine["all_low"] <= limits["steady"] * engine["all_mid"]:
        return None  # a closed loop
    bound, told = bound_by(engine, "all_")
    if bound == "kv":
        return None  # what that costs is preemptions, and told of as such
    parts = [(row, _part(row, max(row["queue_s"], 0.0), limits)) for row in rows]
    hurt = [(row, part) for row, part in parts if part >= limits["share"]]
    if not hurt:
        return None
    able = engine["arriving"] / used if engine["arriving"] else None
    evidence = [
        _sentence(row, max(row["queue_s"], 0.0)) for row, _ in sorted(hurt, key=lambda item: -item[1])[:4]
    ]
    evidence.append(
        Evidence(
            f"it computed {used:.0%} of the tokens a second that it computes while somebody waits, and somebody waited for "
            f"{queued:.0%} of the time, in {engine['queues']:,} queues of {engine['most_waiting']:,} at most",
            {key: engine[key] for key in ("utilisation", "time_queued", "queues", "most_waiting")},
        )
    )
    if able:
        evidence.append(
            Evidence(
                f"{engine['arriving']:.3g} requests a second came; at this mix about {able:.3g} is all it can",
                {"arriving": engine["arriving"], "capacity": able},
            )
        )
    finding = Finding(
        rule=RULE.name,
        status="found",
        severity=severity_of(max(part for _, part in hurt), any(row["slo_broken"] for row, _ in hurt)),
        basis="measured" if told else "inferred",
        title=f"Engine {_name(engine, 'busiest_')} is asked for {used:.0%} of what it can, and queues again and again"
        + (f" for {BOUNDS[bound][0]}" if bound else ""),
        culprit=Party("engine", _name(engine, "busiest_"), {"bound by": bound or "not known"}),
        victims=_victims([row for row, _ in hurt]),
        share_of_tail=max(part for _, part in hurt),
        window_ns=(engine["busiest_first_ns"], engine["busiest_last_ns"]),
        evidence=tuple(evidence),
        counter_evidence=(
            Evidence(
                "every queue drained: the engine can serve what comes on the whole, but not when more comes by chance"
            ),
        ),
        remedies=_remedies(engine, bound, engine["arriving"], able, engine["queued_kv_usage"], limits),
        confirm_by=RULE.confirm_by,
        claims=BOUNDS[bound][1] if bound else "",
        explains={f"{row['klass']}\t{row['metric']}": max(row["queue_s"], 0.0) for row, _ in hurt},
    )
    return Decision("found", f"asked for {used:.0%} of what it can", (finding,))


def finding(rows: Rows, hurt: Sequence[Row], limits: Mapping[str, float]) -> Finding:
    queue = rows[0]
    bound, told = bound_by(queue)
    mean, low, high = capacity(queue)
    name = _name(queue)
    ordered = sorted(hurt, key=lambda row: -share(row, limits))
    evidence = [_sentence(row, caused(row)) for row in ordered[:4]]
    evidence.append(
        Evidence(
            f"for {queue['growth_s']:.3g} s {queue['offered']:.3g} requests a second came and {queue['given']:.3g} were served; "
            f"{queue['peak']:,} waited at most, the queue stood for {queue['seconds']:.3g} s"
            + (" and then drained" if queue["drained"] else " and to the end"),
            {key: queue[key] for key in ("offered", "given", "growth_s", "peak", "seconds", "drained")},
        )
    )
    evidence.append(
        Evidence(
            f"the engine was busy for {queue['busy']:.0%} of that time, with {queue['running']} requests at most and the KV cache "
            f"{queue['kv_usage'] or 0:.0%} full; the head of the queue was kept out by {BOUNDS[bound][0] if bound else 'nothing that is told'}"
            + (", by the scheduler's own word" if told else ""),
            {key: queue[key] for key in ("busy", "running", "kv_usage", "budget_s", "slots_s", "kv_s")},
        )
    )
    evidence.append(_knee(queue, mean, low, high))
    counter = []
    if queue["drained"]:
        counter.append(
            Evidence(
                "the queue drained within the trace: more came for a while than could be served, not always"
            )
        )
    if high == float("inf"):
        counter.append(Evidence("too few windows with a queue for an interval of what the engine can serve"))
    if not counter:
        counter.append(
            Evidence(
                "clients that give up and try again count as new requests: what was offered may be less than it seems"
            )
        )
    worst = share(ordered[0], limits)
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity_of(worst, any(row["slo_broken"] for row in hurt)),
        basis="measured" if told else "inferred",
        title=f"Engine {name} is asked for more than it can serve: a queue for {queue['seconds']:.3g} s without a break"
        + (f", bound by {BOUNDS[bound][0]}" if bound else ""),
        culprit=Party("engine", name, {"bound by": bound or "not known"}),
        victims=_victims(ordered),
        share_of_tail=worst,
        window_ns=(queue["first_ns"], queue["last_ns"]),
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=_remedies(queue, bound, queue["offered"], mean, queue["kv_usage"], limits),
        confirm_by=RULE.confirm_by,
        claims=BOUNDS[bound][1] if bound else "",
        explains={f"{row['klass']}\t{row['metric']}": caused(row) for row in hurt},
    )


def bound_by(row: Row, of: str = "") -> tuple[str | None, bool]:
    """What kept the head of the queue out most, and whether the scheduler itself says so."""
    if not of and row["blocked_told"]:
        told = {name: row[f"by_{name}"] or 0 for name in BOUNDS}
        return max(told, key=lambda name: told[name]), True
    booked = {name: row[f"{of}{name}_s"] for name in BOUNDS}
    most = max(booked, key=lambda name: booked[name])
    return (most if booked[most] > 0 else None), False


def capacity(queue: Row) -> tuple[float, float, float]:
    """Requests a second served while there was a queue: mean and 95 % interval over windows, by Student's t."""
    mean, n = float(queue["capacity"]), queue["windows"]
    if n < 3 or queue["capacity_sd"] is None:
        return mean, 0.0, float("inf")
    half = float(distributions.t.ppf(0.975, n - 1)) * queue["capacity_sd"] / sqrt(n)
    return mean, max(0.0, mean - half), mean + half


def _knee(queue: Row, mean: float, low: float, high: float) -> Evidence:
    """Up to which load no queue stood, and what is served once one does: the knee lies between."""
    able = f"with a queue it served {mean:.3g} requests a second" + (
        f" (95 % interval {low:.3g} to {high:.3g})" if high < float("inf") else ""
    )
    data = {
        "capacity": mean,
        "low": low,
        "high": None if high == float("inf") else high,
        "carried": queue["carried"],
    }
    if not queue["quiet_windows"] or not queue["carried"]:
        return Evidence(
            f"{able}; the trace has no time without a queue, so the knee is not bracketed from below", data
        )
    carried = f"without a queue it carried up to {queue['carried']:.3g} a second, busy {queue['carried_busy']:.0%} of the time"
    if queue["carried"] < low:
        return Evidence(
            f"{able}; {carried}: the knee lies between {queue['carried']:.3g} and {high:.3g}", data
        )
    return Evidence(f"{able}; {carried}: the knee is about there", data)


def _part(row: Row, seconds: float, limits: Mapping[str, float]) -> float:
    if not row["excess_s"] or row["excess_s"] <= 0 or seconds < limits["slowdown"] * (row["p50_s"] or 0.0):
        return 0.0
    return float(min(1.0, seconds / row["excess_s"]))


def _sentence(row: Row, seconds: float) -> Evidence:
    return Evidence(
        f"{row['klass']} {row['metric']}: {seconds:.3g} s of {row['excess_s']:.3g} s excess ({row['tail_rule']}) is queueing",
        {"klass": row["klass"], "metric": row["metric"], "queue_s": seconds, "excess_s": row["excess_s"]},
    )


def _victims(rows: Sequence[Row]) -> tuple[Party, ...]:
    worst = {row["klass"]: row for row in reversed(rows)}
    return tuple(
        Party("class", klass, {"metric": worst[klass]["metric"], "queued": worst[klass]["queued_requests"]})
        for klass in dict.fromkeys(row["klass"] for row in rows)
    )


def _name(row: Row, of: str = "") -> str:
    instance, engine = row[f"{of}instance"], row[f"{of}engine"]
    return _tails.engine_name(
        {"instance": instance or "", "engine": engine, "instances": row["instances"]}
    ) or str(instance)


def _remedies(
    queue: Row,
    bound: str | None,
    offered: float | None,
    able: float | None,
    kv_usage: float | None,
    limits: Mapping[str, float],
) -> tuple[Remedy, ...]:
    """Refuse what cannot be served in time, then more of what binds, then more engines, with this trace's numbers."""
    refuse, limit, replicas = RULE.remedies[0], RULE.remedies[1], RULE.remedies[-1]
    if able:
        # The flag counts those that run as well.
        most = able * PATIENCE_S + (queue["most_running"] or 0)
        what = f"those that run, and {PATIENCE_S:g} s of {able:.3g} requests a second; times the data-parallel engines"
        refuse = replace(refuse, flag=f"--max-num-queued-reqs {most:.0f} ({what})")
    if able and offered:
        count = max(2, ceil(offered / (limits["headroom"] * able)))
        replicas = replace(
            replicas,
            do=f"{replicas.do}: {count} of them carry {offered:.3g} requests a second at {offered / (count * able):.0%} of what they can",
        )
    more = []
    if bound == "slots":
        now, kv = queue["max_num_seqs"] or queue["most_running"], kv_usage or 0.0
        most = int(now * min(4.0, 0.9 / kv)) if kv else 2 * now
        if most > now:
            more.append(replace(MORE_SLOTS, flag=f"--max-num-seqs {most} (now {now:.0f})"))
    elif bound == "budget":
        now = queue["max_num_batched_tokens"]
        more.append(
            replace(MORE_TOKENS, flag=f"--max-num-batched-tokens {2 * now} (now {now})")
            if now
            else MORE_TOKENS
        )
    elif bound == "kv":
        more.append(MORE_CACHE)
    return (refuse, limit, *more, replicas)


#: How long a request may wait for its turn before it had better be refused.
PATIENCE_S = 5.0
MORE_SLOTS = Remedy(
    "Let more requests run at once: the KV cache has room for them",
    "--max-num-seqs",
    "vLLM, all versions",
    "Larger batches: each token takes longer; preemptions once the cache is full",
)
MORE_TOKENS = Remedy(
    "Compute more tokens a step, where the GPU is not yet busy with them",
    "--max-num-batched-tokens",
    "vLLM V1, all versions",
    "Longer steps: gaps between tokens grow; nothing is won where steps already take as long as their tokens",
)
MORE_CACHE = Remedy(
    "Give the KV cache more memory",
    "--gpu-memory-utilization 0.95, --kv-cache-dtype fp8",
    "vLLM, all versions; fp8 depends on the GPU",
    "Less headroom for activations; fp8 may cost accuracy",
)

RULE = Rule(
    name="queue-saturation",
    summary="An engine is asked for more than it can serve, and latency is its queue.",
    why=(
        "A queue that gets more than is taken from it grows for as long as that lasts: nobody is slow, everybody waits. "
        "Close to that point chance alone makes queues. Averages over an hour hide both."
    ),
    needs=("class_rows", "steps"),
    missing=(
        "needs requests, and the engine's steps with the number of waiting requests (iteration details of the stat logger, or "
        "a scheduler's log)"
    ),
    thresholds=(
        Threshold("window", 5, "s", "What came and was served is counted by windows as long as this."),
        Threshold("lasting", 30, "s", "Bursts that are served within half a minute are no overload."),
        Threshold(
            "turnovers",
            5,
            "x",
            "A queue of long requests drains slowly: it must last for so many times what a request takes without waiting.",
        ),
        Threshold(
            "stall", 0.2, "0-1", "A step of a fifth of the queue's length left it: a pause, not the load."
        ),
        Threshold(
            "steady", 0.1, "0-1", "Requests in the engine that vary by less than a tenth are a closed loop's."
        ),
        Threshold(
            "knee", 0.8, "0-1", "From four fifths of what can be served on queues come by chance alone."
        ),
        Threshold(
            "often",
            0.2,
            "0-1",
            "Two dozen slots that are used to 80 % have a queue for a sixth of the time (Erlang C), to 90 % for almost half.",
        ),
        Threshold("again", 5, "", "Fewer queues than this are so many bursts, or one that is not over yet."),
        Threshold(
            "headroom", 0.7, "0-1", "To how much of what they can engines are loaded where queues stay short."
        ),
        _tails.SHARE,
        Threshold(
            "slowdown", 0.25, "x p50", "A tail slower by less than a quarter of the median is not felt."
        ),
    ),
    remedies=(
        Remedy(
            "Refuse what cannot be served in time: clients can go elsewhere, and those inside are served",
            "--max-num-queued-reqs, at what is served within the wait you allow",
            "vLLM 0.32; older versions have it at the gateway only",
            "Some requests get HTTP 503 at once instead of an answer too late",
        ),
        Remedy(
            "Limit how fast requests come",
            "rate limit or concurrency limit of the gateway",
            "any",
            "Requests wait, or are refused, at the gateway",
        ),
        Remedy(
            "Add engines",
            "router configuration, or --data-parallel-size",
            "any; vLLM V1",
            "A GPU each",
        ),
    ),
    confirm_by=(
        "Send 70 % of the load for ten minutes: the queue stays empty and TTFT falls to prefill alone",
        "Watch vllm:num_requests_waiting: it grows while more comes than rate(vllm:request_success_total[1m]) says is served",
    ),
    decide=decide,
    alerts=(
        _alerts.found("QueueSaturation", "queue-saturation", "An engine is asked for more than it can serve"),
        Alert(
            "QueueSaturation",
            "warning",
            "10m",
            "At the rate at which {{ $labels.instance }} finishes requests its queue takes {{ $value | humanizeDuration }} to be served",
            tuple(
                Signal(
                    f"{waiting} / {_alerts.FINISHED}",
                    "> $lasting",
                    f"and {waiting} > $slowdown * avg_over_time(vllm:num_requests_running{_alerts.WINDOW})",
                )
                for waiting in (_alerts.WAITING, _alerts.ALL_WAITING)
            ),
            panel=Panel(
                "engine",
                "Time to serve the queue",
                "s",
                "{{instance}} {{engine}}",
                "Requests waiting divided by the rate at which requests finish: what joins the queue now waits about so long.",
            ),
        ),
    ),
)
