"""Ranks of mixtures of experts: who is waited for, findings of the rules on ranks, and how even experts are loaded."""

from __future__ import annotations

from tailscope.grafana.board import Board, Chart, Query, Row
from tailscope.grafana.of_rules import charts_of_rules, open_findings
from tailscope.grafana.queries import RATE, mean, quantile

RANK = "{{instance}} {{engine}}"


def board() -> Board:
    imbalance, wait = "sglang:dp_attention_token_imbalance_ratio", "sglang:dp_attention_sync_wait_seconds"
    return Board(
        "ranks",
        "tailscope: MoE ranks",
        "Which rank the others wait for, and whether experts are loaded evenly. Findings come from profiles and recordings that "
        "tailscope ingests; vLLM has no metrics of experts, so their balance is SGLang's where that is scraped.",
        (
            Row("Stragglers", (*charts_of_rules("ranks"), *open_findings("ranks"))),
            Row(
                "Data-parallel ranks of vLLM",
                (
                    Chart(
                        "Requests running by rank",
                        "none",
                        "Ranks of one model step together: the fullest one sets the pace of all, so lines apart are time lost.",
                        (Query("vllm:num_requests_running", RANK),),
                    ),
                    Chart(
                        "Prompt tokens by rank",
                        "suffix: tokens/s",
                        "A rank with a burst of prefill makes every other rank's step as long as its own.",
                        (Query(f"sum by (instance, engine) (rate(vllm:prompt_tokens_total[{RATE}]))", RANK),),
                    ),
                ),
            ),
            Row(
                "Ranks and experts of SGLang",
                (
                    Chart(
                        "Balance of experts",
                        "percentunit",
                        "Mean load of a layer's ranks over that of the fullest one: 1 is even, and 1 over the number of ranks is all on one.",
                        (
                            Query(
                                mean("sglang:eplb_balancedness", "instance, forward_mode"),
                                "{{instance}} {{forward_mode}}",
                            ),
                        ),
                    ),
                    Chart(
                        "Tokens by rank of experts",
                        "none",
                        "Rows are ranks: one that is always the darkest holds the hot experts and should give some away.",
                        (
                            Query(
                                f"sum by (le) (increase(sglang:eplb_gpu_physical_count_bucket[{RATE}]))",
                                "{{le}}",
                            ),
                        ),
                        kind="heatmap",
                    ),
                    Chart(
                        "Tokens of the fullest rank over the mean",
                        "none",
                        "Of data-parallel attention, mean and p99 of steps: 1 is even, 2 means that the step takes twice what it had to.",
                        (
                            Query(mean(imbalance, "instance"), "{{instance}}, mean"),
                            Query(quantile(0.99, imbalance, "instance"), "{{instance}}, p99"),
                        ),
                    ),
                    Chart(
                        "Wait of a rank for the others",
                        "s",
                        "Of data-parallel attention, p99: ranks that wait are early, so the straggler is the one that waits least.",
                        (Query(quantile(0.99, wait, "instance, dp_rank"), "{{instance}} {{dp_rank}}"),),
                    ),
                ),
            ),
        ),
    )
