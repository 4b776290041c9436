"""Requests wait where neither running nor waiting counts them: in the API server, before the engine knows of them."""

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

from . import _alerts, _tails

Row = Mapping[str, Any]


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows or not rows[0]["with_phases"]:
        return Decision("no-data", RULE.missing)
    trace = rows[0]
    hurt = sorted((r for r in rows if matters(r, limits)), key=share, reverse=True)
    if (
        not hurt
        and not trace["counted_on"]
        and any(matters({**r, "frontend_s": r["told_s"], "long_waits": r["told_long"]}, limits) for r in rows)
    ):
        return Decision(
            "inconclusive",
            f"{_tails.counted(trace['told_long'], 'request')} spent more than {LONG_S:g} s before the engine's queue, but no step of the "
            "engine is known to have ended meanwhile: one long step, as of a long prompt, would do",
        )
    if not hurt:
        text = f"requests are typically {usual(trace)} in the API server before the engine has them, and no tail is longer by it"
        if trace["counted_on"]:
            return Decision("clear", text)
        return Decision(
            "inconclusive", f"{text}, as far as two clocks tell without steps that say what runs and waits"
        )
    if trace["counted_on"] and (trace["hidden_s"] or 0.0) < limits["counted"] * (trace["long_s"] or 0.0):
        return Decision(
            "inconclusive",
            f"{amount(trace['long_s'] or 0.0)} request-seconds lie between arrival and queue, but running and waiting leave only "
            f"{trace['hidden_s'] or 0.0:.3g} uncounted: the two clocks or the steps do not fit together",
        )
    return Decision("found", "requests wait where no gauge counts them", (finding(hurt),))


def usual(row: Row) -> str:
    seconds = row["usual_wait_s"] or 0.0
    return "less than 0.1 ms" if seconds < 1e-4 else f"{1e3 * seconds:.3g} ms"


def share(row: Row) -> float:
    return _tails.share_of(row["frontend_s"], row["excess_s"]) if row["excess_s"] else 0.0


def matters(row: Row, limits: Mapping[str, float]) -> bool:
    if not row["excess_s"] or row["excess_s"] <= 0 or not row["long_waits"]:
        return False
    return share(row) >= limits["share"] and row["frontend_s"] >= limits["slowdown"] * (row["p50_s"] or 0.0)


def finding(hurt: Sequence[Row]) -> Finding:
    worst = hurt[0]
    evidence = [
        Evidence(
            f"{r['klass']} {r['metric']}: {r['frontend_s']:.3g} s of {r['excess_s']:.3g} s excess ({r['tail_rule']}) is between the API "
            "server's having the request and the engine's queueing it",
            {key: r[key] for key in ("klass", "metric", "frontend_s", "excess_s")},
        )
        for r in hurt[:6]
    ]
    long_s = COUNTED_LONG_S if worst["counted_on"] else LONG_S
    evidence.append(
        Evidence(
            f"{worst['long_waits']:,} of {worst['waits']:,} requests spent more than {long_s:g} s there, up to {worst['longest_s']:.3g} s; "
            f"typically it is {usual(worst)}",
            {key: worst[key] for key in ("long_waits", "waits", "longest_s", "usual_wait_s")},
        )
    )
    counter = []
    if worst["counted_on"]:
        evidence.append(
            Evidence(
                f"up to {worst['most_hidden']:,} requests had arrived and were neither running nor waiting, while the engines knew of "
                f"{worst['known_then'] or 0.0:.3g} on average: {amount(worst['hidden_s'])} request-seconds that no gauge counts",
                {key: worst[key] for key in ("most_hidden", "known_then", "hidden_s")},
            )
        )
    else:
        counter.append(
            Evidence(
                "no steps that say what ran and waited: known only from TTFT less queue and prefill, which two clocks measured"
            )
        )
    if worst["by_prompt"] is not None:
        grows = worst["by_prompt"] >= GROWS
        text = f"the time there {'grows' if grows else 'does not grow'} with the prompt (r = {worst['by_prompt']:.2g})"
        text += ": tokenising" if grows else ": a busy process, rather than tokenising long prompts"
        (evidence if grows else counter).append(Evidence(text, {"by_prompt": worst["by_prompt"]}))
    names = {row["klass"]: row["metric"] for row in reversed(hurt)}
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity_of(share(worst), any(r["slo_broken"] for r in hurt)),
        basis="measured" if worst["counted_on"] else "inferred",
        title="Requests wait in the API server before the engine knows of them",
        culprit=Party(
            "process", "API server", {"on": worst["instance"] if worst["instances"] == 1 else None}
        ),
        victims=tuple(
            Party("class", klass, {"metric": names[klass]})
            for klass in dict.fromkeys(row["klass"] for row in hurt)
        ),
        share_of_tail=share(worst),
        window_ns=None if worst["first_ns"] is None else (worst["first_ns"], worst["last_ns"]),
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=RULE.remedies,
        confirm_by=RULE.confirm_by,
        explains={f"{r['klass']}\t{r['metric']}": r["frontend_s"] for r in hurt},
    )


#: Seconds before the engine's queue that are no mere hand-over, by two clocks alone and where steps say what runs and waits.
LONG_S, COUNTED_LONG_S = 0.1, 0.05
#: The correlation from which the prompt's length matters.
GROWS = 0.3

#: Over how long means of vLLM's histograms are taken for an alert.
MEANS = "[15m]"


def mean(histogram: str) -> str:
    """PromQL of a mean, in seconds."""
    return f"rate(vllm:{histogram}_seconds_sum{MEANS}) / rate(vllm:{histogram}_seconds_count{MEANS})"


RULE = Rule(
    name="hidden-queue",
    summary="Requests wait where neither running nor waiting counts them.",
    why=(
        "The API server renders, tokenises and hands over before the engine's queue begins. When it is busy requests pile "
        "up there, vllm:num_requests_waiting stays 0, and queue time too: only TTFT shows it."
    ),
    needs=("class_rows",),
    missing="needs requests with TTFT, queue and prefill time by the engine (spans), best with steps that tell running and waiting",
    thresholds=(
        Threshold(
            "long",
            LONG_S,
            "s",
            "Hand-over takes milliseconds; a step, which nobody books apart without steps, a tenth.",
        ),
        Threshold(
            "counted_long",
            COUNTED_LONG_S,
            "s",
            "With steps what a step takes is booked apart, and so long after an arrival running and waiting are asked for it.",
        ),
        Threshold(
            "counted",
            0.3,
            "0-1",
            "What bills call front end must be missing in the gauges too, but for what the bounds on clocks take off.",
        ),
        _tails.SHARE,
        Threshold(
            "slowdown", 0.25, "x p50", "A tail slower by less than a quarter of the median is not felt."
        ),
    ),
    remedies=(
        Remedy(
            "Give the API server cores of its own, and look at what else runs in it: logging of requests, tool parsers, plugins",
            "--disable-log-requests in versions that log by default; CPU limits of the pod",
            "vLLM, any",
            "cores",
        ),
        Remedy(
            "Render and tokenise in more threads",
            "--renderer-num-workers, for example 4",
            "vLLM 0.25 and later; 1 by default",
            "CPU cores; output is still handled in one thread",
        ),
        Remedy(
            "Run more API servers for the same engine",
            "--api-server-count, for example 4",
            "vLLM 0.9 and later",
            "CPU cores and memory; statistics are spread over the processes",
        ),
        Remedy(
            "Tokenise before the server: send token ids",
            "prompt as a list of token ids in /v1/completions",
            "vLLM, all versions",
            "The client needs the tokenizer and the chat template",
        ),
    ),
    confirm_by=(
        "Watch the API server's CPU: one core near 100 % while vllm:num_requests_waiting is 0",
        "Send the same prompts as token ids for ten minutes: TTFT falls to queue plus prefill if it was tokenising",
    ),
    decide=decide,
    alerts=(
        _alerts.found(
            "HiddenQueue", "hidden-queue", "Requests wait in the API server before the engine knows of them"
        ),
        Alert(
            "HiddenQueue",
            "warning",
            "10m",
            "Requests to {{ $labels.instance }} spend {{ $value | humanizeDuration }} on average before the engine's queue, which is empty",
            (
                Signal(
                    " - ".join(
                        mean(name)
                        for name in ("time_to_first_token", "request_queue_time", "request_prefill_time")
                    ),
                    "> $long",
                    # Means of requests that began and that ended meanwhile differ while a queue grows: then it is not hidden.
                    f"and avg_over_time(vllm:num_requests_waiting{MEANS}) < $queued\n"
                    f"and {mean('time_to_first_token')} > (1 + $slowdown) * ({mean('request_queue_time')} + {mean('request_prefill_time')})\n"
                    f"and increase(vllm:time_to_first_token_seconds_count{MEANS}) >= $least",
                ),
            ),
            thresholds=(
                _alerts.QUEUED,
                Threshold("least", 20, "requests", "Of fewer no mean says what is usual."),
            ),
            panel=Panel(
                "engine",
                "Time before the engine's queue",
                "s",
                "{{instance}} {{engine}}",
                "Mean TTFT less queue and prefill: what the API server takes before the engine knows of a request, near nothing when it keeps up.",
            ),
        ),
    ),
)
