"""How many tokens the experts of each rank get: an even share by chance, and a hot expert's beyond it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tailscope.sim.outcome import Floats, Ints
from tailscope.sim.scenario import Ranks

#: What seeds begin with, so that hot experts and tokens are drawn from streams of their own.
HOT_STREAM, TOKEN_STREAM = 2, 3
#: Least share of its even load that a rank gets: weights are read whatever the tokens.
LEAST_LOAD = 0.05


class Experts:
    """The experts of an instance, which lie on its ranks in order; without `moe` there are none."""

    def __init__(self, settings: Ranks, ranks: int, seed: tuple[int, ...], *, moe: bool) -> None:
        self.settings, self.ranks, self.seed, self.moe = settings, ranks, seed, moe

    def hottest(self, k: int) -> int:
        """The expert that gets most tokens in step k; the same in all layers."""
        every = self.settings.hot_steps
        rng = np.random.default_rng([HOT_STREAM, *self.seed, k // every if every else 0])
        return int(rng.integers(self.settings.experts))

    def rank_of(self, expert: int) -> int:
        return expert * self.ranks // self.settings.experts

    def shares(self, k: int) -> Floats:
        """Expected share of step k's tokens by expert."""
        # A token goes to an expert once at most.
        hottest = min(1 / self.settings.experts + self.settings.hot, 1 / self.settings.topk)
        shares = np.full(self.settings.experts, (1 - hottest) / max(self.settings.experts - 1, 1))
        shares[self.hottest(k)] = hottest
        return shares

    def load(self, first: int, drawn: Floats) -> Floats:
        """What the experts of each rank get, over an even share: multinomial, in its normal approximation.

        `drawn`: steps × layers × ranks, standard normal, of consecutive steps from `first` on.
        """
        parts, every = [], self.settings.hot_steps or len(drawn)
        for low, high in blocks(first, first + len(drawn), every):
            share = np.zeros(self.ranks)
            for expert, part in enumerate(self.shares(low)):
                share[self.rank_of(expert)] += part
            some, root = drawn[low - first : high - first], np.sqrt(share)
            # Shares sum to one, so the ranks' deviations sum to none.
            deviation = root * (some - root * (some @ root)[..., None]) / np.sqrt(self.settings.routed)
            parts.append(np.maximum((share + deviation) * self.ranks, LEAST_LOAD))
        return np.concatenate(parts)

    def tokens(self, first: int, by_rank: Ints) -> Ints:
        """Tokens of each expert: steps × layers × experts. `by_rank`: of each rank, steps × layers × ranks."""
        found = np.zeros((*by_rank.shape[:2], self.settings.experts), np.int64)
        ranks = np.array([self.rank_of(e) for e in range(self.settings.experts)])
        for step, of_step in enumerate(by_rank):
            rng = np.random.default_rng([TOKEN_STREAM, *self.seed, first + step])
            shares = self.shares(first + step)
            for rank in range(self.ranks):
                mine = shares[ranks == rank]
                found[step][:, ranks == rank] = rng.multinomial(of_step[:, rank], mine / mine.sum())
        return found


def blocks(first: int, stop: int, every: int) -> list[tuple[int, int]]:
    """From `first` to before `stop`, cut at the multiples of `every`."""
    edges = np.unique([first, *range((first // every + 1) * every, stop, every), stop]).tolist()
    return list(pairwise(edges))
