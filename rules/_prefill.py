"""What rules about others' prefill have in common: how much of it is felt, and what makes it less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tailscope.model import Remedy, Threshold

SLOWDOWN = Threshold(
    "slowdown", 0.25, "x p50", "A tail slower by less than a quarter of the median is not felt."
)
GAP = Threshold(
    "gap",
    1.0,
    "x p50",
    "A chunk beside a decode is how chunked prefill works: less than a doubled gap is no stall.",
)
SMALLER_STEPS = Remedy(
    "Lower the token budget of a step, so that a chunk of a long prompt takes less time",
    "--max-num-batched-tokens, for example half of now",
    "vLLM V1, all versions, with chunked prefill (the default)",
    "Long prompts get more, smaller chunks: their TTFT rises, throughput falls somewhat",
)
CAPPED_CHUNK = Remedy(
    "Cap what one long prompt may take of a step, leaving room for short ones",
    "--long-prefill-token-threshold, for example a quarter of the budget",
    "vLLM V1; 0 (off) by default",
    "TTFT of long prompts rises",
)
SEPARATE = Remedy(
    "Separate prefill from decode",
    "--kv-transfer-config",
    "vLLM V1 with a KV connector (NIXL, Mooncake, LMCache)",
    "A second pool and a KV transfer for each request",
)


def sized(remedies: Sequence[Remedy], budget: int | None) -> tuple[Remedy, ...]:
    """The remedies, that of smaller steps with this trace's own budget of tokens."""
    if not budget:
        return tuple(remedies)
    own = replace(SMALLER_STEPS, flag=f"--max-num-batched-tokens {budget // 2} (now {budget})")
    return tuple(own if remedy == SMALLER_STEPS else remedy for remedy in remedies)
