"""Tokens that an engine computes again because a preemption threw them away.

vLLM's model runner V1 counts them as decode tokens, many for few requests; but so it counts the drafts of speculative
decoding. What is computed again is in a few steps for each preemption, drafts are in many.
"""

from __future__ import annotations

import numpy as np

from tailscope.stats import Floats
from tailscope.store import Trace

#: A preempted request is computed again in one step, or in some where the budget is shared or it is long.
STEPS_PER_PREEMPTION, TOKENS_PER_STEP = 2, 512
#: Where nobody tells of preemptions: in at most this share of the decode steps, and there at least so many tokens for
#: each request, more than anybody drafts.
RARE, MORE_THAN_DRAFTS = 0.05, 16


def write_told(trace: Trace) -> None:
    """Fill `told_recompute` with the steps of engines that say themselves what they computed again."""
    trace.connection.execute(
        """
        CREATE OR REPLACE TEMP TABLE told_recompute AS
        SELECT coalesce(instance, '') AS instance, engine, instant(end_ns) AS end_ns, sum(number(recompute_tokens)) AS tokens
        FROM iterations WHERE recompute_tokens IS NOT NULL AND rank IS NULL GROUP BY ALL
        """
    )


def steps_of_preemptions(preemptions: Floats, tokens: Floats) -> float:
    """In how many steps requests of so many preemptions and tokens can have been computed again; NaN if unknown."""
    if not np.isfinite(preemptions).any():
        return np.nan
    each = STEPS_PER_PREEMPTION + np.nan_to_num(tokens) / TOKENS_PER_STEP
    return float(np.nan_to_num(preemptions) @ each)


def recomputed(
    decode_requests: Floats, decode_tokens: Floats, preempted: Floats, told: Floats, most_steps: float
) -> Floats:
    """The tokens computed again in each step: as `told`, else extra decode tokens where these are no drafts.

    `preempted`: requests preempted in each step, NaN if unknown; `most_steps`: see `steps_of_preemptions`.
    """
    if np.isfinite(told).any():
        return np.maximum(np.nan_to_num(told), 0.0)
    extra = np.maximum(decode_tokens - decode_requests, 0.0)
    some = extra > 0
    by_steps = np.nansum(preempted) * (STEPS_PER_PREEMPTION + 1) if np.isfinite(preempted).any() else np.nan
    if np.isfinite(most_steps) or np.isfinite(by_steps):
        plausible = some.sum() <= np.nanmax([most_steps, by_steps])
    else:
        plausible = some.sum() <= RARE * (decode_requests > 0).sum() and bool(
            some.any() and np.median(extra[some] / decode_requests[some]) >= MORE_THAN_DRAFTS
        )
    return extra if plausible else np.zeros(len(extra))
