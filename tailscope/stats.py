"""Statistics on small results: intervals, effective sample sizes, permutation tests, bracketed quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, bdtrik

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: A quantile q needs this many effective samples beyond it before it is stated.
MIN_TAIL_SAMPLES = 10.0
CONFIDENCE = 0.95


def effective_samples(values: Floats, times_ns: Ints) -> float:
    """Number of independent samples that `values`, in bursts over time, are worth.

    n divided by the integrated autocorrelation time of the values in time order (initial monotone
    sequence, Geyer 1992); at most n, at least 1. For a quantile, pass whether each value exceeds it: that is
    what its variance depends on, and heavy tails do not matter.
    """
    n = len(values)
    if n < 4 or values.max() == values.min():
        return float(n)
    order = np.argsort(times_ns, kind="stable")
    centred = values[order] - values.mean()
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    autocovariance = np.fft.irfft(spectrum * np.conj(spectrum), size)[: n // 2]
    if not autocovariance[0] > 0:  # differences too small to square
        return float(n)
    rho = autocovariance / autocovariance[0]
    pairs = rho[: len(rho) // 2 * 2].reshape(-1, 2).sum(axis=1)
    negative = np.flatnonzero(pairs <= 0)
    positive = pairs[: negative[0]] if len(negative) else pairs
    inflation = max(1.0, 2.0 * float(np.minimum.accumulate(positive).sum()) - 1.0)
    return float(max(1.0, n / inflation))


def quantile_interval(values: Floats, q: float, n_eff: float) -> tuple[float, float] | None:
    """Order-statistic (binomial) interval of quantile q at 95 %, widened to `n_eff` samples.

    Exact for independent samples; with fewer effective samples the ranks are those of a sample of that size.
    None where the interval would need an order statistic beyond the sample's.
    """
    n = round(n_eff)
    if n < 1:
        return None
    alpha = (1 - CONFIDENCE) / 2
    low, high = int(np.ceil(bdtrik(alpha, n, q))), int(np.ceil(bdtrik(1 - alpha, n, q))) + 1
    if low < 1 or high > n:
        return None
    ordered = np.sort(values)
    # Ranks of the effective sample, as positions in the whole one.
    place = np.array([(low - 0.5) / n, (high - 0.5) / n]) * len(ordered)
    index = np.clip(place.astype(int), 0, len(ordered) - 1)
    return float(ordered[index[0]]), float(ordered[index[1]])


def allows_quantile(q: float, n_eff: float) -> bool:
    """Whether enough effective samples lie beyond quantile q for it to be stated."""
    return n_eff * (1 - q) >= MIN_TAIL_SAMPLES


def exceeds(above: NDArray[np.bool_], times_ns: Ints, q: float) -> bool | None:
    """Whether quantile q lies above a limit that `above` says which values exceed: a one-sided binomial test at 5 % on
    the effective samples. False where it lies below and enough samples say so, None where they do not decide."""
    n_eff = max(1, round(effective_samples(above.astype(np.float64), times_ns)))
    share = float(above.mean())
    if share > 1 - q and float(bdtrc(round(share * n_eff) - 1, n_eff, 1 - q)) < 1 - CONFIDENCE:
        return True
    return False if share <= 1 - q and allows_quantile(q, n_eff) else None


def histogram_quantile(
    bounds: Sequence[float], counts: Sequence[float], q: float
) -> tuple[float, float | None] | None:
    """The bucket [low, high] in which quantile q of a histogram lies; high is None in the +Inf bucket.

    `bounds` are ascending upper bounds, the last +Inf; `counts` cumulative. Never a point: inside a
    bucket nothing is known. None for an empty histogram.
    """
    total = counts[-1] if counts else 0
    if not total > 0:
        return None
    rank = q * total
    for i, count in enumerate(counts):
        if count >= rank and count > 0:
            low = 0.0 if i == 0 else float(bounds[i - 1])
            high = float(bounds[i])
            return low, (None if np.isinf(high) else high)
    return None


@dataclass(frozen=True)
class ExposureEffect:
    """Mean difference in latency between exposed and unexposed victims, and how likely by chance."""

    exposed: int
    unexposed: int
    difference: float
    p_value: float


def exposure_test(
    times_ns: Ints,
    latency: Floats,
    starts_ns: Ints,
    ends_ns: Ints,
    *,
    window_ns: int,
    controls: Floats,
    rounds: int = 499,
    shift_ns: int = 30_000_000_000,
    seed: int = 0,
) -> ExposureEffect | None:
    """Whether requests that arrive shortly before or during a culprit's interval are slower, by local circular shifts.

    Exposure is a culprit running in a fixed window after the victim's arrival, not an overlap with the
    request, which would condition on the outcome. `controls` (requests x k) say what else makes a request slow, its own
    class's load above all: what a smooth additive function of them explains of the latency is taken off first (Frisch
    and Waugh 1933), so that a load which two unrelated pools share does not couple them. The null moves all culprit
    intervals together by a random local shift (the circular-shift null of spike-train analysis) and is judged by the
    ranks of the latencies, since their tail hides an effect in means. The difference is the coefficient of exposure
    beside the controls, in the unit of the latency. None below 5 exposed or unexposed.
    """
    if not len(times_ns) or not len(starts_ns):
        return None
    order = np.argsort(times_ns, kind="stable")
    times, values = times_ns[order], latency[order]
    first, length = int(times[0]), max(int(times[-1]) - int(times[0]) + window_ns, 1)
    met = (ends_ns >= first) & (starts_ns < first + length)
    starts = np.maximum(starts_ns[met], first)
    lasting = np.minimum(ends_ns[met], first + length - 1) - starts

    def exposed_by(shift: int) -> NDArray[np.bool_]:
        moved = (starts + shift - first) % length + first
        # What is moved beyond the end goes on at the start.
        moved = np.concatenate([moved, moved - length])
        return _exposed(times, moved, moved + np.tile(lasting, 2), window_ns)

    exposed = exposed_by(0)
    count = int(exposed.sum())
    if count < 5 or len(values) - count < 5:
        return None
    explained = _additive_basis(controls[order])

    def unexplained(of: Floats) -> Floats:
        return np.asarray(of - explained @ (explained.T @ of))

    own = unexplained(exposed.astype(np.float64))
    if not own @ own > 1e-9 * count:
        return None  # the controls say who is exposed
    difference = float(own @ values / (own @ own))
    ranks = unexplained(_ranks(values))
    observed = float(ranks @ exposed)
    generator = np.random.default_rng(seed)
    reach = min(shift_ns, length // 2)
    # Shorter shifts leave most exposures as they are; much longer ones leave nothing of the load.
    least = min(max(window_ns, int(np.median(lasting)) // 2), reach // 2)
    shifts = generator.integers(least, max(reach, least + 1), rounds) * generator.choice([-1, 1], rounds)
    null = np.array([float(ranks @ exposed_by(int(s))) for s in shifts])
    # Sums in another order may differ in the last digit.
    p_value = (1 + int((null >= observed - 1e-9).sum())) / (1 + len(null))
    return ExposureEffect(count, len(values) - count, difference, p_value)


def _additive_basis(controls: Floats) -> Floats:
    """Orthonormal columns that span a constant and cubic functions of each control's ranks."""
    n = len(controls)
    columns = [np.ones(n)]
    for control in controls.T:
        centred = 2 * _ranks(control) - 1
        columns += [centred, centred**2, centred**3]
    basis, sizes, _ = np.linalg.svd(np.column_stack(columns), full_matrices=False)
    return np.asarray(basis[:, sizes > 1e-9 * sizes[0]])


def _exposed(times: Ints, starts: Ints, ends: Ints, window_ns: int) -> NDArray[np.bool_]:
    """For each ascending time t, whether an interval touches [t, t + window]: linear after sorting."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends) if len(ends) else ends
    last = np.searchsorted(starts, times + window_ns, side="right") - 1
    hit = last >= 0
    result = np.zeros(len(times), dtype=bool)
    result[hit] = reach[last[hit]] >= times[hit]
    return result


def _ranks(values: Floats) -> Floats:
    """Ranks as a share of the sample, equal values sharing theirs."""
    _, index, count = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray(((np.cumsum(count) - (count - 1) / 2) / len(values))[index])
