"""Pairs of windows of one service in which nothing changed, or in which everything takes a fifth longer: what `compare` says.

A queue with one server (Lindley 1952) whose arrivals come in bursts: the logarithm of their rate is an AR(1) process of one
second steps. Decode slows with the rate. `python tests/accuracy/pairs.py` prints the true p99s anew.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from tailscope.compare.blocks import Key, Sample, Values, changes, sample

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Regime:
    """How long a window is, s; AR(1) coefficient and sigma of the logarithm of the rate; sigma of service times. `ample`: enough
    data for a fifth to be seen."""

    duration_s: int
    phi: float = 0.0
    sigma: float = 0.0
    service: float = 0.5
    ample: bool = False


RATE, UTILISATION, WARM_UP_S = 6.0, 0.55, 200
LONGER = 1.2
REGIMES: Mapping[str, Regime] = {
    "Poisson": Regime(600, ample=True),
    "Poisson, heavy tails": Regime(600, service=1.1),
    "AR(0.9)": Regime(900, 0.9, 0.4),
    "AR(0.9), an hour": Regime(3600, 0.9, 0.2, ample=True),
    "AR(0.98), half an hour": Regime(1800, 0.98, 0.4),
    "AR(0.98), an hour": Regime(3600, 0.98, 0.3),
    "AR(0.98), two hours, mild": Regime(7200, 0.98, 0.1, ample=True),
}
#: p99 of TTFT, s, pooled over `POOLED_SEEDS`: none of those that report.
POOLED_SEEDS = range(1, 600, 2)
TRUE_P99_S: Mapping[str, float] = {
    "Poisson": 0.61306,
    "Poisson, heavy tails": 2.00228,
    "AR(0.9)": 6.33715,
    "AR(0.9), an hour": 0.83304,
    "AR(0.98), half an hour": 29.52328,
    "AR(0.98), an hour": 6.71662,
    "AR(0.98), two hours, mild": 0.65475,
}


def window(name: str, seed: int) -> tuple[NDArray[np.int64], dict[str, Floats], NDArray[np.bool_]]:
    """Arrivals, latencies by metric, and which requests are short, of one window."""
    regime = REGIMES[name]
    rng = np.random.default_rng([seed, 505])
    seconds = regime.duration_s + WARM_UP_S
    noise = rng.standard_normal(seconds) * np.sqrt(1 - regime.phi**2)
    noise[0] /= np.sqrt(1 - regime.phi**2)
    level = np.exp(regime.sigma * lfilter([1.0], [1.0, -regime.phi], noise) - regime.sigma**2 / 2)
    count = rng.poisson(RATE * level)
    arrival = np.sort(np.repeat(np.arange(seconds), count) + rng.random(count.sum()))
    mean = UTILISATION / RATE
    service = rng.lognormal(np.log(mean) - regime.service**2 / 2, regime.service, len(arrival))
    walk = np.concatenate([[0.0], np.cumsum(service[:-1] - np.diff(arrival))])
    queue = walk - np.minimum.accumulate(walk)
    per_token = (0.01 + 0.01 * level[arrival.astype(int)]) * np.exp(0.1 * rng.standard_normal(len(arrival)))
    tokens = rng.integers(5, 60, len(arrival))
    ttft = queue + service + 0.02
    kept = arrival >= WARM_UP_S
    short = rng.random(len(arrival)) < 0.7
    latencies = {"queue": queue, "TTFT": ttft, "TPOT": per_token, "E2E": ttft + per_token * tokens}
    times = ((arrival[kept] - WARM_UP_S) * 1e9).astype(np.int64)
    return times, {metric: values[kept] for metric, values in latencies.items()}, short[kept]


def side(name: str, seed: int, factor: float = 1.0) -> Sample:
    times, latencies, short = window(name, seed)
    values: dict[Key, Values] = {}
    for klass, own in (("short", short), ("long", ~short)):
        for metric, seconds in latencies.items():
            n = int(own.sum())
            values[klass, metric] = Values(seconds[own] * factor, times[own], np.ones(n), n)
    return sample(values, (0, REGIMES[name].duration_s * 10**9), seed)


def pair_null(seed: int) -> dict[str, Any]:
    """What is said of two windows alike, and of two the second of which takes a fifth longer."""
    name = list(REGIMES)[seed // 2 % len(REGIMES)]
    before, after = side(name, seed), side(name, seed + 1_000_000)
    same = changes(before, after)
    longer = changes(before, side(name, seed + 1_000_000, LONGER))
    stated = [c.interval for c in same if c.interval is not None and c.quantile == "p99"]
    p99 = [
        c.before_interval_s
        for c in same
        if c.before_interval_s is not None and (c.metric, c.quantile) == ("TTFT", "p99")
    ]
    truth = TRUE_P99_S.get(name)
    return {
        "test": "pair", "seed": seed, "regime": name, "blocks": min(before.blocks.count, after.blocks.count),
        "decided": any(c.interval is not None for c in same),
        "called": any(c.verdict in ("faster", "slower") for c in same),
        "delta_covers": [low <= 0 <= high for low, high in stated],
        "p99_covers": [] if truth is None else [low <= truth <= high for low, high in p99],
        "slower_called": any(c.verdict == "slower" for c in longer),
        "faster_called": any(c.verdict == "faster" for c in longer),
        "ample": REGIMES[name].ample,
    }  # fmt: skip


def pooled(name: str) -> float:
    return float(np.quantile(np.concatenate([window(name, seed)[1]["TTFT"] for seed in POOLED_SEEDS]), 0.99))


if __name__ == "__main__":
    with multiprocessing.Pool() as pool:
        for known, p99 in zip(REGIMES, pool.map(pooled, REGIMES, chunksize=1), strict=True):
            print(f'    "{known}": {p99:.5f},')
