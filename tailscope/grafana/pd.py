"""Prefill and decode apart: what waits for a KV transfer, at which stage, and how transfers go."""

from __future__ import annotations

from tailscope.grafana.board import Board, Chart, Query, Row
from tailscope.grafana.queries import RATE, WINDOW, quantile

PLACE = "instance, engine"
ENGINE = "{{instance}} {{engine}}"


def board() -> Board:
    return Board(
        "pd",
        "tailscope: PD",
        "Prefill and decode on different engines: vLLM's metrics of KV transfers, and what waits for them. No metric knows the "
        "hand-off of one request, so its share of a TTFT is the diagnosis's to tell.",
        (Row("Waiting", _waiting()), Row("Transfers", _transfers()), Row("What is fetched", _fetched())),
        servers=("vllm:num_requests_running", "instance"),
        changes=True,
    )


def _waiting() -> tuple[Chart, ...]:
    return (
        Chart(
            "KV fetches by stage",
            "none",
            "On decode engines: waiting_to_start wants more connections, in_progress a faster link, completed_waiting room in the batch (0.33 and later).",
            (
                Query(
                    "sum by (instance, stage) (vllm:num_requests_kv_fetch_by_stage)",
                    "{{instance}}: {{stage}}",
                ),
            ),
            kind="stacked",
        ),
        Chart(
            "Deferred requests",
            "none",
            "Requests that wait for something else than room, on a decode engine mostly for their KV: they count as waiting (0.20.2 and later).",
            (
                Query(
                    'sum by (instance, engine) (vllm:num_requests_waiting_by_reason{reason="deferred"})',
                    ENGINE,
                ),
            ),
        ),
        Chart(
            "Queue time, p99",
            "s",
            "On a decode engine it holds the hand-off of the KV: high there with an empty prefill queue, it is the transfer.",
            (Query(quantile(0.99, "vllm:request_queue_time_seconds", PLACE), ENGINE),),
        ),
        Chart(
            "SGLang: requests by stage of the hand-off",
            "none",
            "Bootstrap and inflight queues are the prefill engine's, prealloc and transfer the decode engine's: the one that grows is the bottleneck.",
            tuple(
                Query(
                    f"sum by (instance) (sglang:num_{stage}_queue_reqs)",
                    f"{{{{instance}}}}: {stage.replace('_', ' ')}",
                )
                for stage in ("prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer")
            ),
        ),
    )


def _transfers() -> tuple[Chart, ...]:
    def timed(connector: str, title: str) -> Chart:
        histogram = f"vllm:{connector}_xfer_time_seconds"
        return Chart(
            title,
            "s",
            "Time of one transfer, of which a request has several: a p99 that leaves the median behind is a link that is shared or late.",
            tuple(
                Query(quantile(q, histogram, PLACE), f"{ENGINE}, {name}")
                for q, name in ((0.99, "p99"), (0.5, "p50"))
            ),
        )

    return (
        timed("nixl", "Transfer time (NIXL)"),
        timed("mooncake", "Transfer time (Mooncake)"),
        Chart(
            "Time to post a transfer (NIXL), p99",
            "s",
            "What the worker spends on handing a transfer over: it is taken from the engine's steps.",
            (Query(quantile(0.99, "vllm:nixl_post_time_seconds", PLACE), ENGINE),),
        ),
        Chart(
            "Bytes transferred",
            "Bps",
            "KV moved each second: level at the link's speed with requests waiting, the link is full.",
            tuple(
                Query(
                    f"sum by (instance) (rate(vllm:{connector}_bytes_transferred_sum[{RATE}]))",
                    f"{{{{instance}}}}, {connector}",
                )
                for connector in ("nixl", "mooncake")
            ),
        ),
        Chart(
            "Failed and expired transfers",
            "none",
            "In the window: a failure is a prompt that is computed again or refused, an expiry (on the prefill engine) KV that nobody fetched in time.",
            (
                Query(
                    f"sum by (instance) (increase(vllm:nixl_num_failed_transfers_total[{WINDOW}]))",
                    "{{instance}}, failed",
                ),
                Query(
                    f"sum by (instance) (increase(vllm:nixl_num_kv_expired_reqs_total[{WINDOW}]))",
                    "{{instance}}, expired",
                ),
            ),
        ),
    )


def _fetched() -> tuple[Chart, ...]:
    hits, queries = (
        f"sum by (instance) (rate(vllm:external_prefix_cache_{what}_total[{WINDOW}]))"
        for what in ("hits", "queries")
    )
    fetched = f'sum by (instance) (rate(vllm:prompt_tokens_by_source_total{{source="external_kv_transfer"}}[{WINDOW}]))'
    return (
        Chart(
            "Share of prompt tokens that were fetched",
            "percentunit",
            "On a decode engine near 1: what is missing was computed here, in steps that answers wait for (0.16 and later).",
            (
                Query(
                    f"{fetched}\n/ (sum by (instance) (rate(vllm:prompt_tokens_by_source_total[{WINDOW}])) > 0)",
                    "{{instance}}",
                ),
            ),
        ),
        Chart(
            "Hit rate of the connector's cache",
            "percentunit",
            "Share of the tokens asked of other engines or stores that were there: a fall there is prefill here.",
            (Query(f"{hits}\n/ ({queries} > 0)", "{{instance}}"),),
        ),
    )
