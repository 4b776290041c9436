"""Engines by vLLM's own metrics: batches, queues, latency, KV cache."""

from __future__ import annotations

from tailscope import stock_metrics
from tailscope.grafana.board import Board, Chart, Query, Row
from tailscope.grafana.of_rules import charts_of_rules
from tailscope.grafana.queries import RATE, mean, of_every_version, quantile

PLACE = "instance, engine"
ENGINE = "{{instance}} {{engine}}"
TOKENS = "suffix: tokens/s"


def board() -> Board:
    return Board(
        "engine",
        "tailscope: engine",
        "vLLM's own metrics, which know no classes: batches, queues, KV cache and preemptions of each engine, with the thresholds "
        "of the alerts on them.",
        (
            Row("Batch", _batch()),
            Row("Queue", _queue()),
            Row("Latency of all requests", _latency()),
            Row("What alerts watch", charts_of_rules("engine")),
        ),
        servers=("vllm:num_requests_running", "instance"),
        changes=True,
    )


def _batch() -> tuple[Chart, ...]:
    iteration = "vllm:iteration_tokens_total"
    return (
        Chart(
            "Requests running",
            "none",
            "Size of the batch: at --max-num-seqs the next request waits whatever room the KV cache has.",
            (Query("vllm:num_requests_running", ENGINE),),
        ),
        Chart(
            "Composition: prompt and answer tokens",
            TOKENS,
            "What steps are made of: prompt tokens in bursts between answer tokens are what token gaps are made of. A prompt counts when it is done.",
            (
                Query(f"sum(rate(vllm:prompt_tokens_total[{RATE}]))", "prompt"),
                Query(f"sum(rate(vllm:generation_tokens_total[{RATE}]))", "answer"),
            ),
            kind="stacked",
        ),
        Chart(
            "Prompt tokens by where they came from",
            TOKENS,
            "Computed here, found in this engine's cache, or fetched from another one's: only the first cost steps (vLLM 0.16 and later).",
            (Query(f"sum by (source) (rate(vllm:prompt_tokens_by_source_total[{RATE}]))", "{{source}}"),),
            kind="stacked",
        ),
        Chart(
            "Tokens of an iteration",
            "short",
            "Steps by their number of tokens: a band at the top is steps full of prefill, which all that decode in them wait for.",
            (Query(f"sum by (le) (increase({iteration}_bucket[{RATE}]))", "{{le}}"),),
            kind="heatmap",
        ),
        Chart(
            "Tokens of an iteration, p99 and mean",
            "short",
            "A p99 far above the mean is a few long prompts in steps that are short otherwise: the budget of tokens bounds it.",
            (
                Query(quantile(0.99, iteration, PLACE), f"{ENGINE}, p99"),
                Query(mean(iteration, PLACE), f"{ENGINE}, mean"),
            ),
        ),
        Chart(
            "Iterations",
            "cps",
            "Steps with output each second: fewer with as many running means that each takes longer.",
            (Query(f"sum by ({PLACE}) (rate({iteration}_count[{RATE}]))", ENGINE),),
        ),
    )


def _queue() -> tuple[Chart, ...]:
    return (
        Chart(
            "Requests waiting",
            "none",
            "The scheduler's queue: it hides what waits in the API server before it.",
            (Query("vllm:num_requests_waiting", ENGINE),),
        ),
        Chart(
            "Queue by reason",
            "none",
            "capacity waits for room, deferred for something else such as a grammar or a KV transfer: only the first needs more engines (0.20.2 and later).",
            (
                Query(
                    "sum by (instance, engine, reason) (vllm:num_requests_waiting_by_reason)",
                    f"{ENGINE}: {{{{reason}}}}",
                ),
            ),
            kind="stacked",
        ),
        Chart(
            "Requests finished",
            "reqps",
            "By how they ended: requests that clients gave up on are in none of these, nor in any latency.",
            (
                Query(
                    f"sum by (finished_reason) (rate(vllm:request_success_total[{RATE}]))",
                    "{{finished_reason}}",
                ),
            ),
            kind="stacked",
        ),
        Chart(
            "Requests refused at the door",
            "reqps",
            "Answered with 503 since a limit of the queue was reached: they are in no latency (0.33 and later).",
            (
                Query(
                    f"sum by (instance, reason) (rate(vllm:admission_rejections_total[{RATE}]))",
                    "{{instance}}: {{reason}}",
                ),
            ),
        ),
    )


def _latency() -> tuple[Chart, ...]:
    seen = {
        "TTFT": "It holds the wait before the queue too, which no phase below does.",
        "ITL": "One sample an output: a preempted request's whole stall is one gap.",
        "E2E": "It follows the length of answers.",
    }
    return (
        *(
            Chart(
                f"{metric}, p99",
                "s",
                f"Of all requests of an engine, whatever their class: a tight class may break its objective unseen. {text}",
                (Query(of_every_version(quantile(0.99, stock_metrics.HISTOGRAMS[metric], PLACE)), ENGINE),),
            )
            for metric, text in seen.items()
        ),
        *(
            Chart(
                f"{phase.capitalize()} time, p99",
                "s",
                text,
                (Query(quantile(0.99, f"vllm:request_{phase}_time_seconds", PLACE), ENGINE),),
            )
            for phase, text in (
                ("queue", "From the queue to the first step; below 0.3 s the buckets tell nothing apart."),
                (
                    "prefill",
                    "From the first step to the first token: it holds others' prefill in the same steps.",
                ),
                ("decode", "From the first to the last token, with every preemption in between."),
            )
        ),
    )
