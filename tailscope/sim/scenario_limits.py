"""What a scenario's types cannot say of single keys: the ranges of numbers, and which kinds read a key."""

from __future__ import annotations

import typing
from dataclasses import dataclass

from tailscope.sim.scenario import Fault, Load

#: Beyond it no count, size or time of a world means anything, and sums of them stay exact.
MOST = 1e12
WEEK_S = 604_800.0


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both inclusive; `above`: without `low` itself. As text it follows a noun."""

    low: float = 0.0
    high: float = MOST
    above: bool = False

    def __contains__(self, value: object) -> bool:
        number = typing.cast(float, value)
        return (self.low < number if self.above else self.low <= number) and number <= self.high

    def __str__(self) -> str:
        low = "" if self.low == -MOST else f" {'above' if self.above else 'from'} {self.low:g}"
        return low if self.high == MOST else f"{low} to {self.high:g}"


ABOVE_0, FROM_1, SHARE = Range(above=True), Range(1), Range(0, 1)
#: Such as clocks that may be behind, priorities below the usual one.
SIGNED = Range(-MOST)
#: What is laid out one by one in memory.
FEW, MANY = Range(1, 1024), Range(1, 1_000_000)

#: Numbers of other fields are 0 or more.
RANGES: dict[str, Range] = {
    "Scenario.duration_s": Range(0, WEEK_S, above=True),
    "Sizes.median": ABOVE_0,
    "Sizes.sigma": Range(0, 5),
    "Sizes.least": FROM_1,
    "Sizes.most": FROM_1,
    "Sizes.values": FROM_1,
    "Load.rate": ABOVE_0,
    # Above it the mean rate would be that of bursts too rare to ever be seen.
    "Load.burst_sigma": Range(0, 3),
    "Load.burst_s": Range(0.01),
    "Load.users": MANY,
    "Load.speed": ABOVE_0,
    "Load.prompts": FROM_1,
    "Load.outputs": FROM_1,
    "Load.requests": FROM_1,
    "Load.prefixes": MANY,
    "Load.priority": SIGNED,
    "Load.timeout_s": ABOVE_0,
    "Load.abort_share": SHARE,
    "Load.n": FEW,
    "Engine.replicas": FEW,
    "Engine.data_parallel": FEW,
    "Engine.max_num_batched_tokens": FROM_1,
    "Engine.max_num_seqs": FROM_1,
    "Engine.block_size": FROM_1,
    "Engine.kv_blocks": FROM_1,
    "Engine.max_model_len": Range(2, 10_000_000),
    "Engine.kv_transfer_latency_s": Range(0, 3_600),
    "Engine.watermark": SHARE,
    "Engine.prefill_replicas": Range(0, 1024),
    "Engine.kv_transfer_tokens_per_s": Range(1),
    "Engine.skew": SHARE,
    # Steps that cost nothing would never let time pass.
    "Cost.step": ABOVE_0,
    "Cost.noise": Range(0, 2),
    "Cost.heavy_share": SHARE,
    # A Pareto factor of alpha 1 or less has no mean.
    "Cost.heavy_alpha": Range(1, above=True),
    "Ranks.tensor_parallel": FEW,
    "Ranks.layers": Range(1, 256),
    "Ranks.experts": Range(1, 65_536),
    "Ranks.topk": FROM_1,
    "Ranks.routed": FROM_1,
    "Ranks.hot": SHARE,
    "Ranks.attention_share": SHARE,
    "Ranks.spread": Range(0, 2),
    "Ranks.hosts": FEW,
    "Ranks.offset_s": Range(-1e9, 1e9),
    "Ranks.drift_ppm": Range(-1e5, 1e5),
    "Ranks.bandwidth_gb_s": Range(0, 1e6),
    "Ranks.leave_bias_s": Range(0, 1),
    "Ranks.follow": SHARE,
    "Ranks.stamp_jitter_s": Range(0, 1),
    # Its three numbers are a host, an instant and a jump, which may be back.
    "Ranks.clock_steps": Range(-1e9, 1e9),
    "Gateway.max_in_flight": FROM_1,
    "Gateway.delay_s": Range(0, 3_600),
    "Fault.length_s": ABOVE_0,
    "Fault.every_s": Range(0.01),
    "Fault.factor": ABOVE_0,
    "Fault.often": Range(0, 1, above=True),
    "Fault.per_request_s": Range(0, 1),
    "Telemetry.profile_dropped": Range(0, 0.9),
    "Telemetry.scrape_s": Range(0.01),
    # Thirty years to either side are still times that a clock can show.
    "Telemetry.client_offset_s": Range(-1e9, 1e9),
    "Telemetry.network_s": Range(0, 3_600),
}

#: Keys that only some kinds read: with another kind they would be ignored, so they are refused.
READ_BY: dict[type, tuple[str, dict[str, tuple[str, ...]]]] = {
    Load: (
        "arrivals",
        {
            **dict.fromkeys(("burst_sigma", "burst_s", "common_load"), ("bursty",)),
            **dict.fromkeys(("users", "think_s"), ("closed",)),
            **dict.fromkeys(("trace", "speed"), ("trace",)),
            **dict.fromkeys(("times_s", "prompts", "outputs"), ("at",)),
            **dict.fromkeys(
                ("prompt_tokens", "output_tokens"), ("poisson", "bursty", "regular", "closed", "at")
            ),
            "rate": ("poisson", "bursty", "regular"),
            "n": ("poisson", "bursty", "regular", "trace", "at"),
        },
    ),
    Fault: (
        "kind",
        {
            **dict.fromkeys(("rank", "phase", "layers"), ("slow-rank", "slow-link", "host-slow")),
            "often": ("slow-rank", "slow-link", "host-slow", "left-out", "network"),
            **dict.fromkeys(("side", "peer"), ("slow-link",)),
            **dict.fromkeys(("all_ranks", "per_request_s"), ("host-slow",)),
            "every_s": ("pause", "host-slow", "left-out", "cache-loss", "gateway-hold"),
            "reason": ("pause", "first-shape"),
            "length_s": (
                "pause",
                "frontend",
                "host-slow",
                "first-shape",
                "left-out",
                "cache-loss",
                "network",
                "gateway-hold",
            ),
            "factor": ("slow-rank", "slow-link", "slow-replica"),
        },
    ),
}
