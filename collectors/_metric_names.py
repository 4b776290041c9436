"""Names of the same measurement in other engines, generations and exporters. Data only."""

from __future__ import annotations

#: Prefixes under which vLLM's own names are exported by Ray, which also turns ":" into "_".
RAY_PREFIXES = ("ray_vllm:", "ray_vllm_")

#: Names of older vLLM, and the name under which vLLM V1 exports the same measurement.
RENAMED = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries": "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits": "vllm:prefix_cache_hits",
    "vllm:gpu_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    # Held the time between two outputs, not the mean of a request, for as long as it existed.
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
    "vllm:time_in_queue_requests": "vllm:request_queue_time_seconds",
}

#: Concept -> engine -> names. Same question, not same definition: SGLang's `itl` is smoothed over a
#: chunk, its old `time_per_output_token_seconds` is the running mean of a request at each chunk, its
#: `token_usage` is the fullest of several pools.
CONCEPTS: dict[str, dict[str, tuple[str, ...]]] = {
    "ttft": {
        "vllm": ("vllm:time_to_first_token_seconds",),
        "sglang": ("sglang:time_to_first_token_seconds",),
        "trtllm": ("trtllm_time_to_first_token_seconds",),
    },
    "itl": {
        "vllm": ("vllm:inter_token_latency_seconds",),
        "sglang": ("sglang:inter_token_latency_seconds",),
    },
    "tpot": {
        "vllm": ("vllm:request_time_per_output_token_seconds",),
        "sglang": ("sglang:request_time_per_output_token_seconds", "sglang:time_per_output_token_seconds"),
        "trtllm": ("trtllm_time_per_output_token_seconds",),
    },
    "e2e": {
        "vllm": ("vllm:e2e_request_latency_seconds",),
        "sglang": ("sglang:e2e_request_latency_seconds",),
        "trtllm": ("trtllm_e2e_request_latency_seconds",),
    },
    "queue": {
        "vllm": ("vllm:request_queue_time_seconds",),
        "sglang": ("sglang:queue_time_seconds",),
        "trtllm": ("trtllm_request_queue_time_seconds",),
    },
    "running": {
        "vllm": ("vllm:num_requests_running",),
        "sglang": ("sglang:num_running_reqs",),
        "trtllm": ("trtllm_num_requests_running",),
    },
    "waiting": {
        "vllm": ("vllm:num_requests_waiting",),
        "sglang": ("sglang:num_queue_reqs",),
        "trtllm": ("trtllm_num_requests_waiting",),
    },
    "kv_usage": {
        "vllm": ("vllm:kv_cache_usage_perc",),
        "sglang": ("sglang:token_usage",),
        "trtllm": ("trtllm_kv_cache_utilization",),
    },
    "preemptions": {
        "vllm": ("vllm:num_preemptions_total",),
        "sglang": ("sglang:num_retracted_requests_total",),
    },
}

CONCEPT_OF = {
    name: concept
    for concept, engines in CONCEPTS.items()
    for names in engines.values()
    for name in names
}  # fmt: skip

#: Beginnings of families that describe the exporting process, not the serving of requests.
RUNTIME_PREFIXES = ("python_", "process_", "go_", "promhttp_")

#: Labels whose values identify a client or hold what it sent; "-" and case do not matter.
CLIENT_LABELS = frozenset(
    (
        "client", "client_address", "client_addr", "client_host", "client_ip", "peer", "remote_addr",
        "remote_address", "remote_host", "remote_ip", "x_forwarded_for", "user_agent", "user_email",
        "authorization", "api_key", "hashed_api_key", "cookie", "prompt", "completion",
    )
)  # fmt: skip
