"""What a step costs, with the noise of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np

from tailscope.sim.scenario import Cost
from tailscope.sim.scheduler import Batch

#: Random factors are drawn so many at a time.
DRAWN = 1024


def prefill_seconds(cost: Cost, tokens: Any, requests: Any, attention: Any) -> Any:
    """What `tokens` of `requests` cost in a step, attending to `attention` token² before them: numbers, or arrays alike."""
    if cost.stair:
        tokens = -(-tokens // cost.stair) * cost.stair
    return cost.prefill_token * tokens + cost.prefill_request * requests + cost.attention * attention


class StepCost:
    """Seconds of an engine's steps by `scenario.Cost`. `key`: seeds its noise."""

    def __init__(self, cost: Cost, key: Sequence[int]) -> None:
        self.cost = cost
        self._rng = np.random.default_rng([0x57E9, *key])
        self._factors: list[tuple[float, float]] = []

    def of(self, batch: Batch, factor: float = 1.0) -> tuple[float, float, float]:
        """What a batch costs without its prefill, its prefill, and by a chance that no batch explains."""
        if not self._factors:
            self._factors = self._draw()
        base = self.base(batch.decodes, batch.context)
        requests = batch.prefill_requests + batch.recompute_requests
        prefill = 0.0
        if requests:
            tokens = batch.prefill_tokens + batch.recompute_tokens
            prefill = prefill_seconds(self.cost, tokens, requests, batch.attention)
        noise, heavy = self._factors.pop()
        noise = factor * noise ** sqrt(self.cost.step / (base + prefill))
        return base * noise, prefill * noise, (heavy - 1.0) * (base + prefill) * noise

    def base(self, decodes: int, context: int) -> float:
        c = self.cost
        if c.cache_tokens and context > c.cache_tokens:
            context = c.cache_tokens + round((context - c.cache_tokens) * c.cache_factor)
        return c.step + c.decode_request * decodes + c.context_token * context

    def _draw(self) -> list[tuple[float, float]]:
        c = self.cost
        noise = np.exp(self._rng.normal(0.0, c.noise, DRAWN))
        struck = self._rng.random(DRAWN) < c.heavy_share
        heavy = np.where(struck, 1.0 + self._rng.pareto(c.heavy_alpha, DRAWN), 1.0)
        return list(zip(noise.tolist(), heavy.tolist(), strict=True))
