"""Statistics on small results: intervals, effective sample sizes, permutation tests, bracketed quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.special import bdtrik, betainc, ndtr, ndtri

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: A quantile q needs this many effective samples beyond it before it is stated.
MIN_TAIL_SAMPLES = 10.0
CONFIDENCE = 0.95
#: Residuals beyond so many of their scales count linearly (Huber 1981).
HUBER = 1.345
#: With fewer expected the normal distribution is none of a count's (Cochran 1954).
FEW = 5.0
#: Parts of a window whose loads are compared: more would be shorter than a burst, fewer would say little.
LOAD_PARTS = 20


def effective_samples(values: Floats, times_ns: Ints) -> float:
    """Number of independent samples that `values`, in bursts over time, are worth: at most n, at least 1.

    As few as their autocorrelation says, or as the arrivals do. A load in bursts has as many independent parts as its
    arrivals show, whether or not this window's bursts reached the tail: in a calm window the values alone look like those
    of a service that is never slow. For a quantile, pass whether each value exceeds it: that is what its variance
    depends on, and heavy tails do not matter.
    """
    return (
        max(1.0, min(uncorrelated(values, times_ns), len(values) / _bunching(times_ns)))
        if len(values)
        else 0.0
    )


def _bunching(times_ns: Ints) -> float:
    """How many times as much the mean gap between arrivals varies from part to part as that of independent gaps would:
    an index of dispersion (Cox and Lewis 1966), 1 for Poisson and for regular arrivals, and where parts are too short."""
    gaps = np.diff(np.sort(times_ns)).astype(np.float64)
    size = len(gaps) // LOAD_PARTS
    variance = float(gaps.var()) if size >= 2 else 0.0
    if not variance > 0:
        return 1.0
    parts = gaps[: size * LOAD_PARTS].reshape(LOAD_PARTS, size).mean(axis=1)
    return max(1.0, float(parts.var(ddof=1)) * size / variance)


def uncorrelated(values: Floats, times_ns: Ints) -> float:
    """n divided by the integrated autocorrelation time of the values in time order (initial monotone sequence, Geyer
    1992): at most n, at least 1."""
    n = len(values)
    if n < 4 or values.max() == values.min():
        return float(n)
    pairs = _paired_autocorrelation(values, times_ns)
    negative = np.flatnonzero(pairs <= 0)
    positive = pairs[: negative[0]] if len(negative) else pairs
    inflation = max(1.0, 2.0 * float(np.minimum.accumulate(positive).sum()) - 1.0)
    return float(max(1.0, n / inflation))


def _paired_autocorrelation(values: Floats, times_ns: Ints) -> Floats:
    """Sums of the autocorrelations at lags 0 and 1, 2 and 3, and so on, of the values in time order; none where their
    differences are too small to square."""
    n = len(values)
    order = np.argsort(times_ns, kind="stable")
    centred = values[order] - values.mean()
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    autocovariance = np.fft.irfft(spectrum * np.conj(spectrum), size)[: n // 2]
    if not autocovariance[0] > 0:
        return np.empty(0)
    rho = autocovariance / autocovariance[0]
    return np.asarray(rho[: len(rho) // 2 * 2].reshape(-1, 2).sum(axis=1))


def quantile_samples(values: Floats, q: float, times_ns: Ints) -> float:
    """Number of independent samples that quantile q of `values` may count on: at most n, at least 1.

    As few as `effective_samples` of whether each exceeds it says, or as the values' ranks do. The few above a p99 show
    their own autocorrelation badly: where half of a latency's variance comes in bursts of fifty requests, an interval
    made of that alone holds the true p99 in 61 % of windows of 2,000.
    """
    exceeding = effective_samples((values > np.quantile(values, q)).astype(np.float64), times_ns)
    return min(exceeding, samples_by_ranks(len(values), q, rank_autocorrelation(values, times_ns)))


def rank_autocorrelation(values: Floats, times_ns: Ints) -> Floats:
    """Autocorrelation of the values' normal scores in time order, from lag 1 on for as long as it is more than chance, made
    monotone (after Geyer 1992)."""
    n = len(values)
    if n < 4 or values.max() == values.min():
        return np.empty(0)
    pairs = _paired_autocorrelation(np.asarray(ndtri(_ranks(values) * n / (n + 1))), times_ns)
    # The first pair is lag 0, which is 1, and lag 1.
    mean = np.concatenate([pairs[:1] - 1, pairs[1:] / 2])
    # By chance independent values have as much, and so many of them would add up.
    faint = np.flatnonzero(mean <= np.where(np.arange(len(mean)) == 0, 2.0, np.sqrt(2.0)) / np.sqrt(n))
    mean = np.minimum.accumulate(mean[: faint[0]] if len(faint) else mean)
    return np.concatenate([mean[:1], np.repeat(mean[1:], 2)])


def samples_by_ranks(n: int, q: float, lags: Floats) -> float:
    """What n values are worth for quantile q by the `lags` of `rank_autocorrelation`: at least 1.

    All ranks show how a service's load comes in bursts. What that does to an exceedance follows if the ranks at two times
    depend as those of two normal values do (a Gaussian copula, Sklar 1959); where slow ones cling together more than that,
    the exceedances themselves show it.
    """
    return max(1.0, n / (1 + 2 * float(np.interp(lags, *_exceedance_correlation(q)).sum()))) if n else 0.0


@lru_cache
def _exceedance_correlation(q: float) -> tuple[Floats, Floats]:
    """Correlations of two normal values, from 0 to 1, and those of whether each exceeds its quantile q: the integral of the
    bivariate density over the correlation (Plackett 1954), with its sine as the variable."""
    angle = np.linspace(0, np.pi / 2, 513)
    density = np.exp(-(ndtri(q) ** 2) / (1 + np.sin(angle)))
    integral = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return np.sin(angle), integral / integral[-1]


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


def share_interval(share: float, n_eff: float) -> tuple[float, float]:
    """95 % interval of a share seen in `n_eff` samples (Wilson 1927)."""
    z2 = float(ndtri(1 - (1 - CONFIDENCE) / 2)) ** 2
    centre = (share + z2 / (2 * n_eff)) / (1 + z2 / n_eff)
    half = np.sqrt(z2 * (share * (1 - share) / n_eff + z2 / (4 * n_eff**2))) / (1 + z2 / n_eff)
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))


def at_least(count: float, n: float, p: float) -> float:
    """Probability that of `n` independent samples, of which each counts with probability `p`, `count` or more do: the binomial
    tail through the incomplete beta function, as effective samples are no whole number."""
    return 1.0 if count <= 0 else float(betainc(count, max(n - count, 0.0) + 1, p))


def allows_quantile(q: float, n_eff: float) -> bool:
    """Whether enough effective samples lie beyond quantile q for it to be stated."""
    return n_eff * (1 - q) >= MIN_TAIL_SAMPLES


def exceeds(above: NDArray[np.bool_], times_ns: Ints, q: float) -> bool | None:
    """Whether quantile q lies above a limit that `above` says which values exceed: a one-sided test at 5 %. False where
    it lies below and enough samples say so, None where they do not decide.

    For a verdict of False the safe number of effective samples counts. For True it is the geometric mean of that and of
    what the values' own autocorrelation says, as the truth lies between: that misses what is slow, and a load in bursts
    bounds what it may have done. The share above is compared with 1 - q by its normal score (Rao 1948) where FEW or more
    are expected above, else by the binomial tail, mid-p (Lancaster 1961), through the incomplete beta function, as
    effective samples are no whole number. The tail alone, exact for independent values, fires too rarely here, since a
    window with many above seems to hold fewer effective samples.
    """
    values = above.astype(np.float64)
    safe, share, p = effective_samples(values, times_ns), float(above.mean()), 1 - q
    if share <= p:
        return False if allows_quantile(q, safe) else None
    n_eff = float(np.sqrt(safe * uncorrelated(values, times_ns)))
    if n_eff * p >= FEW:
        chance = float(ndtr((p - share) * np.sqrt(n_eff / (p * q))))
    else:
        k = share * n_eff
        # P(X >= k), and P(X > k); all of the samples may lie above.
        at_least, more = betainc(k, n_eff - k + 1, p), betainc(k + 1, n_eff - k, p) if k < n_eff else 0.0
        chance = float(at_least + more) / 2
    return True if chance < 1 - CONFIDENCE else None


def histogram_quantile(
    bounds: Sequence[float], counts: Sequence[float], q: float
) -> tuple[float, float | None] | None:
    """The bucket [low, high] in which quantile q of a histogram lies; high is None in the +Inf bucket.

    `bounds` are ascending upper bounds, the last +Inf; `counts` cumulative. Never a point: inside a
    bucket nothing is known. None for an empty histogram, or one that is damaged.
    """
    total = counts[-1] if counts else 0
    if len(bounds) != len(counts) or None in bounds or total is None or not total > 0:
        return None
    rank = q * total
    for i, count in enumerate(counts):
        if count >= rank and count > 0:
            low = 0.0 if i == 0 else float(bounds[i - 1])
            high = float(bounds[i])
            return low, (None if np.isinf(high) else high)
    return None


def robust_fit(features: Floats, values: Floats, root: Floats, rounds: int) -> Floats:
    """Non-negative coefficients of `values` on the columns of `features`: least squares (Lawson & Hanson 1974) with Huber
    weights, iterated (Huber 1981). Residuals are judged in units of 1 / `root`."""
    # Columns of one size: nnls stops on an absolute tolerance.
    size = np.maximum(np.abs(features).max(axis=0), 1e-12)
    scaled = features / size
    weight, coefficients = root, np.zeros(features.shape[1])
    for _ in range(rounds):
        previous = coefficients
        # The triangular factor holds all that the least-squares problem needs, in a few rows.
        weighted = np.column_stack([scaled * weight[:, None], values * weight])
        triangle: Floats = np.asarray(np.linalg.qr(weighted, mode="r"))
        coefficients, _norm = nnls(triangle[:, :-1], triangle[:, -1])
        residual = np.abs(values - scaled @ coefficients) * root
        scale = 1.4826 * float(np.median(residual)) or 1e-12
        weight = root * np.sqrt(np.minimum(1.0, HUBER * scale / np.maximum(residual, 1e-12)))
        if np.allclose(coefficients, previous, rtol=1e-4, atol=1e-12):
            break
    return np.asarray(coefficients / size)


def prefix_sums(values: Floats) -> Floats:
    """The sum of the values before each, and of all: one element more."""
    return np.concatenate([[0.0], np.cumsum(values)])


def active(first: NDArray[np.intp], beyond: NDArray[np.intp], values: Floats, n: int) -> Floats:
    """Sum of `values` over the intervals [first, beyond) that contain each of n steps."""
    change = np.bincount(first, weights=values, minlength=n + 1) - np.bincount(
        beyond, weights=values, minlength=n + 1
    )
    return np.asarray(np.cumsum(change)[:n])


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
    and Waugh 1933), so that a load which two unrelated pools share does not couple them. What is left is judged by
    ranks, since the latencies' tail hides an effect in means, and summed over each run of culprits; the sum of the runs
    is divided by the root of their squares. The null moves all culprits together by a random local shift (the
    circular-shift null of spike-train analysis). Without the division it fires too often: in a burst that both pools
    share runs are longer and latencies vary more, and a shift takes them out of it (on studentised permutation see
    Janssen 1997, Chung and Romano 2013). The difference is the coefficient of exposure beside the controls, in the unit
    of the latency. None below 5 exposed or unexposed.
    """
    if not len(times_ns) or not len(starts_ns):
        return None
    order = np.argsort(times_ns, kind="stable")
    times, values = times_ns[order] - times_ns.min(), latency[order]
    length = int(times[-1]) + window_ns + 1
    begins, ends = _runs(starts_ns - times_ns.min(), ends_ns - times_ns.min(), window_ns, length)
    if not len(begins):
        return None
    # Twice round the circle: what is moved beyond the end goes on at the start.
    twice = np.concatenate([times, times + length])

    def places(shift: int) -> tuple[Ints, Ints]:
        """Of each run moved by `shift`, the first request in it and the one after its last."""
        moved = (begins + shift) % length
        last = moved + (ends - begins)
        return np.searchsorted(twice, moved, side="left"), np.searchsorted(twice, last, side="right")

    low, high = places(0)
    edges = np.bincount(low, minlength=len(twice) + 1) - np.bincount(high, minlength=len(twice) + 1)
    exposed = np.asarray(np.cumsum(edges)[:-1].reshape(2, -1).any(axis=0), np.float64)
    count = int(exposed.sum())
    if count < 5 or len(values) - count < 5:
        return None
    explained = _additive_basis(controls[order])

    def unexplained(of: Floats) -> Floats:
        return np.asarray(of - explained @ (explained.T @ of))

    own = unexplained(exposed)
    if not own @ own > 1e-9 * count:
        return None  # the controls say who is exposed
    difference = float(own @ values / (own @ own))
    sums = np.concatenate([[0.0], np.cumsum(np.tile(unexplained(_ranks(values)), 2))])

    def statistic(shift: int) -> float:
        low, high = places(shift)
        by_run = sums[high] - sums[low]
        size = float(np.sqrt(by_run @ by_run))
        return float(by_run.sum()) / size if size > 1e-9 else 0.0  # equal latencies leave rounding alone

    observed = statistic(0)
    generator = np.random.default_rng(seed)
    reach = min(shift_ns, length // 2)
    # Shorter shifts leave most exposures as they are; much longer ones leave nothing of the load.
    least = min(max(window_ns, int(np.median(ends - begins - window_ns)) // 2), reach // 2)
    shifts = generator.integers(least, max(reach, least + 1), rounds) * generator.choice([-1, 1], rounds)
    null = np.array([statistic(int(s)) for s in shifts])
    # Sums in another order may differ in the last digit.
    p_value = (1 + int((null >= observed - 1e-9).sum())) / (1 + len(null))
    return ExposureEffect(count, len(values) - count, difference, p_value)


def _runs(starts: Ints, ends: Ints, window_ns: int, length: int) -> tuple[Ints, Ints]:
    """Begin and end of the runs in which an arrival is exposed to an interval, apart from each other on a circle.

    A run may begin before 0, and end there: it is that of the circle's end.
    """
    met = (ends >= 0) & (starts < length)
    begins, ends = np.maximum(starts[met], 0) - window_ns, np.minimum(ends[met], length - 1)
    order = np.argsort(begins, kind="stable")
    begins, reach = begins[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.concatenate([np.full(min(len(begins), 1), True), begins[1:] > reach[:-1]]))
    begins, ends = begins[first], reach[np.append(first, len(reach))[1:] - 1]
    # The last reaches round to the first ones.
    over = int(np.searchsorted(begins[:-1] + length, ends[-1:], side="right").sum())
    if over:
        ends[-1] = max(int(ends[-1]), int(ends[over - 1]) + length)
    begins, ends = begins[over:], ends[over:]
    return begins, np.minimum(ends, begins + length - 1)


def _additive_basis(controls: Floats) -> Floats:
    """Orthonormal columns that span a constant and cubic functions of each control's ranks."""
    n = len(controls)
    columns = [np.ones(n)]
    for control in controls.T:
        centred = 2 * _ranks(control) - 1
        columns += [centred, centred**2, centred**3]
    basis, sizes, _ = np.linalg.svd(np.column_stack(columns), full_matrices=False)
    return np.asarray(basis[:, sizes > 1e-9 * sizes[0]])


def _ranks(values: Floats) -> Floats:
    """Ranks as a share of the sample, equal values sharing theirs."""
    _, index, count = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray(((np.cumsum(count) - (count - 1) / 2) / len(values))[index])


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's rho and its 95 % interval, None where too few effective samples allow one."""

    rho: float | None
    low: float | None
    high: float | None
    n_eff: float


#: Effective samples from which a correlation's interval is more than a guess.
MIN_CORRELATED = 10


def rank_correlation(x: Floats, y: Floats, times_ns: Ints) -> RankCorrelation:
    """Spearman's correlation of two series observed together, and its interval by Fisher's transformation.

    The transformed value's variance is 1.06 / (n - 3) (Fieller, Hartley and Pearson 1957), with n the smaller of the two
    series' effective samples: by Bartlett (1946) what counts is the product of their autocorrelations, so that is the
    safe side. Two samples or fewer, or a series without variation: no rho.
    """
    if len(x) < 3 or x.max() == x.min() or y.max() == y.min():
        return RankCorrelation(None, None, None, float(len(x)))
    a, b = _ranks(x) - 0.5, _ranks(y) - 0.5
    a, b = a - a.mean(), b - b.mean()
    rho = float(np.clip((a @ b) / np.sqrt((a @ a) * (b @ b)), -1.0, 1.0))
    n_eff = min(uncorrelated(a, times_ns), uncorrelated(b, times_ns))
    if n_eff < MIN_CORRELATED:
        return RankCorrelation(rho, None, None, n_eff)
    width = 1.96 * np.sqrt(1.06 / (n_eff - 3))
    middle = np.arctanh(np.clip(rho, -0.999999, 0.999999))
    return RankCorrelation(rho, float(np.tanh(middle - width)), float(np.tanh(middle + width)), n_eff)


def change_point(values: Floats) -> tuple[int, float]:
    """(index, p) of the likeliest change of level: values from the index on differ from those before.

    Pettitt's test (1979) on ranks, with its approximate two-sided p-value; needs no distribution, and one outlier moves
    nothing. Fewer than two values: (0, 1.0).
    """
    n = len(values)
    if n < 2:
        return 0, 1.0
    statistic = np.cumsum(2 * n * _ranks(values) - (n + 1))[:-1]
    index = int(np.argmax(np.abs(statistic)))
    p = 2 * np.exp(-6 * float(statistic[index]) ** 2 / (n**3 + n**2))
    return index + 1, float(min(1.0, p))
