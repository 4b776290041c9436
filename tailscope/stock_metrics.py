"""vLLM's own metrics: in which versions each name exists, what it was called before, and where its buckets end.

By the releases that were read; between two of them nothing is known, so a name counts from the first one that has it.
"""

from __future__ import annotations

import re

from tailscope.errors import UsageError

Version = tuple[int, ...]

#: The first and the last release whose names are known.
OLDEST: Version = (0, 8)
NEWEST: Version = (0, 33)

#: Scraped name (of histograms without _bucket, _sum, _count) -> the first version known to have it.
SINCE: dict[str, Version] = {
    "vllm:num_requests_running": OLDEST,
    "vllm:num_requests_waiting": OLDEST,
    "vllm:num_requests_waiting_by_reason": (0, 20, 2),
    "vllm:kv_cache_usage_perc": OLDEST,
    "vllm:prefix_cache_queries_total": OLDEST,
    "vllm:prefix_cache_hits_total": OLDEST,
    "vllm:num_preemptions_total": OLDEST,
    "vllm:prompt_tokens_total": OLDEST,
    "vllm:generation_tokens_total": OLDEST,
    "vllm:request_success_total": OLDEST,
    "vllm:request_num_preemptions": (0, 30),
    "vllm:time_to_first_token_seconds": OLDEST,
    "vllm:inter_token_latency_seconds": OLDEST,
    "vllm:request_time_per_output_token_seconds": (0, 11),
    "vllm:e2e_request_latency_seconds": OLDEST,
    "vllm:request_queue_time_seconds": OLDEST,
    "vllm:request_prefill_time_seconds": OLDEST,
    "vllm:request_decode_time_seconds": OLDEST,
    "vllm:iteration_tokens_total": OLDEST,
    "vllm:prompt_tokens_by_source_total": (0, 16),
    "vllm:admission_rejections_total": (0, 33),
}

#: Likewise of what only a server with a KV connector has.
TRANSFERS: dict[str, Version] = {
    "vllm:external_prefix_cache_queries_total": (0, 12),
    "vllm:external_prefix_cache_hits_total": (0, 12),
    "vllm:nixl_xfer_time_seconds": (0, 12),
    "vllm:nixl_post_time_seconds": (0, 12),
    "vllm:nixl_bytes_transferred": (0, 12),
    "vllm:nixl_num_failed_transfers_total": (0, 12),
    "vllm:nixl_num_kv_expired_reqs_total": (0, 16),
    "vllm:mooncake_xfer_time_seconds": (0, 33),
    "vllm:mooncake_bytes_transferred": (0, 33),
    "vllm:num_requests_kv_fetch_by_stage": (0, 33),
}

#: Newest name -> what it was called in versions before the one named. 0.10 has both, the old one throughout.
FORMERLY: dict[str, tuple[str, Version]] = {
    "vllm:kv_cache_usage_perc": ("vllm:gpu_cache_usage_perc", (0, 11)),
    "vllm:prefix_cache_queries_total": ("vllm:gpu_prefix_cache_queries_total", (0, 11)),
    "vllm:prefix_cache_hits_total": ("vllm:gpu_prefix_cache_hits_total", (0, 11)),
    # Held the time between two outputs, not the mean of a request, for as long as it existed.
    "vllm:inter_token_latency_seconds": ("vllm:time_per_output_token_seconds", (0, 11)),
}

#: Metric -> the histogram that has it.
HISTOGRAMS = {
    "TTFT": "vllm:time_to_first_token_seconds",
    "ITL": "vllm:inter_token_latency_seconds",
    "TPOT": "vllm:request_time_per_output_token_seconds",
    "E2E": "vllm:e2e_request_latency_seconds",
}

_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
#: Upper ends of the finite buckets, unless a server was started with others (--custom-histogram-buckets).
EDGES: dict[str, tuple[float, ...]] = {
    "TTFT": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1),
        *(2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
    ),
    "ITL": _PER_TOKEN,
    "TPOT": _PER_TOKEN,
    "E2E": (
        *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
        *(120, 240, 480, 960, 1920, 7680),
    ),
}

_NAME = re.compile(r"vllm:\w+")
_SUFFIX = re.compile(r"_(?:bucket|sum|count)$")


def parse_version(text: str) -> Version:
    """`0.10` or `0.10.2`. Raises UsageError, also for versions older than any whose names are known."""
    if not re.fullmatch(r"v?\d{1,4}(\.\d{1,4}){1,2}", text):
        raise UsageError(f"--vllm-version {text!r}: write it as {written(NEWEST)} or {written((*NEWEST, 0))}")
    version = tuple(map(int, text.removeprefix("v").split(".")))
    if version < OLDEST:
        raise UsageError(f"--vllm-version {text}: names of metrics are known from {written(OLDEST)} on")
    return version


def written(version: Version) -> str:
    return ".".join(map(str, version))


def names(query: str) -> set[str]:
    """vLLM's metrics in PromQL, histograms without their suffixes."""
    return {name if name in SINCE else _SUFFIX.sub("", name) for name in _NAME.findall(query)}


def since(query: str) -> Version:
    """The first version that has all metrics of a query."""
    known = SINCE | TRANSFERS
    return max((known[name] for name in names(query)), default=OLDEST)


def spelled(query: str, version: Version) -> str:
    """A query by the names that a version has."""

    def then(found: re.Match[str]) -> str:
        base = _SUFFIX.sub("", found[0])
        name, (old, until) = next(
            ((n, FORMERLY[n]) for n in (found[0], base) if n in FORMERLY), ("", ("", (0,)))
        )
        return old + found[0].removeprefix(name) if version < until else found[0]

    return _NAME.sub(then, query)
