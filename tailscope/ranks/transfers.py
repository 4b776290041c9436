"""How long a collective's transfer took, against those of its kind and size, and whether that or waiting is most of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from tailscope.ranks.clocks import spread
from tailscope.ranks.sequence import UNKNOWN, Floats, Ints

#: Below this many transfers of a kind and size there is no usual one.
FEW_ROUNDS = 8
#: A transfer counts as slow beyond so many deviations from those of its size.
SLOW_DEVIATIONS = 5.0
#: Rounds of a kind that foretell those of another size, and how many of them are looked at.
ENOUGH_ROUNDS, MOST_FITTED = 32, 2_000
#: The quantile that the line goes through, and how often it is fitted anew.
LOWER, QUANTILE_PASSES = 0.25, 30
#: A line that fewer rounds lie so close to tells nothing: protocols change with the size.
LIES_WITHIN, MOST_LIE = 0.3, 0.6
#: A usual transfer so many times what other sizes foretell is that of a slow time. Their line leaves so much of a size open.
FAR_ABOVE, SIZES_SPREAD = 1.6, 0.1
#: It is a slow time if so many of the rounds of other sizes beside are far above theirs.
SLOW_BESIDE = 0.5
#: Slow times are few and long: of a size's transfers in their order, runs of long ones and of short ones are at most so many
#: of those that chance would make.
FEW_RUNS = 0.25
#: Of all ranks' time in a collective the share that is waiting, from which skew dominates, and up to which the transfer does.
SKEW_DOMINATED, TRANSFER_DOMINATED = 2 / 3, 1 / 3
#: What a collective's time is mostly (vLLM's RFC 52777 has these four).
VERDICTS = ("transfer", "skew", "mixed", "inconclusive")


def size_class(bytes_in: Floats) -> Floats:
    """Eighths of the binary logarithm of the bytes, UNKNOWN where these are: sizes within an eighth of each other are alike."""
    return np.asarray(np.where(bytes_in > 0, np.round(8 * np.log2(np.maximum(bytes_in, 1.0))), UNKNOWN))


def against_usual(kind: Floats, size: Floats, transfer: Floats, skew: Floats) -> tuple[Floats, Floats]:
    """(usual, slow) of each round's transfer, ns; all arrays are of one value a round, `size` is that of `size_class`.

    `usual`: the median of transfers of its kind and size, of the half of the rounds whose ranks came together most,
    where there are enough; where those of a size are of two lengths, each for a time, that of the shorter; where that is far above what other sizes of the kind foretell, and so are rounds of those at
    the time, or there are too few, what they foretell; so too for rounds in the middle of slow ones; NaN where nothing does. `slow`: what a transfer took beyond, where that
    is beyond their spread and half of it.
    """
    usual, slow = np.full(len(transfer), np.nan), np.zeros(len(transfer))
    for one in np.unique(kind):
        rounds = np.flatnonzero(kind == one)
        foretold = _foretold(size[rounds], transfer[rounds])
        sizes, of_size = np.unique(size[rounds], return_inverse=True)
        of_size = of_size.reshape(-1)
        least = np.array([foretold(value) for value in sizes])
        with np.errstate(invalid="ignore"):
            far_above = transfer[rounds] > FAR_ABOVE * least[of_size]
        beside = _beside(of_size, far_above)
        order = np.argsort(of_size, kind="stable")
        for which, places in enumerate(np.split(order, np.flatnonzero(np.diff(of_size[order])) + 1)):
            members = rounds[places]
            values = transfer[members]
            few = len(values) < FEW_ROUNDS
            if few and np.isnan(least[which]):
                continue
            # Those that came together most; not those whose skew is less than their transfer, which long ones would be.
            base = (
                values if len(values) < 2 * FEW_ROUNDS else values[skew[members] <= np.median(skew[members])]
            )
            middle = float(np.median(base))
            deviation = spread(base - middle)
            if (lower := None if few else _lower_mode(values, float(least[which]))) and lower[0] < middle:
                middle, deviation = lower
            if few or (middle > FAR_ABOVE * least[which] and beside[which] >= SLOW_BESIDE):
                middle, deviation = float(least[which]), SIZES_SPREAD * float(least[which])
            usual[members] = middle
            beyond = values > middle + max(SLOW_DEVIATIONS * deviation, 0.5 * middle)
            slow[members[beyond]] = values[beyond] - middle
        grown = _grown(slow[rounds] > 0, far_above)
        usual[rounds[grown]] = least[of_size[grown]]
        slow[rounds[grown]] = transfer[rounds[grown]] - usual[rounds[grown]]
    return usual, slow


def _grown(slow: NDArray[np.bool_], far_above: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rounds that are slow because those before and after are: far above what other sizes foretell, in a run of such of
    which half and more are slow for their own size (hysteresis, as Canny 1986 follows edges)."""
    either = slow | far_above
    run = np.cumsum(np.concatenate([[True], either[1:] != either[:-1]])) - 1
    share = np.bincount(run, weights=slow) / np.bincount(run)
    return np.asarray(far_above & ~slow & (share[run] >= SLOW_BESIDE))


def _lower_mode(values: Floats, foretold: float) -> tuple[float, float] | None:
    """(middle, deviation) of the shorter ones where transfers of a size, in their order, are of two lengths, each for some
    time; else None. Parted where the variance between the two, in logarithms, is largest (Otsu 1979); that they come
    in runs is what tells a slow time from two kinds of one size (Wald and Wolfowitz 1940). Few shorter ones will do where they
    take what other sizes foretell."""
    logs = np.log(np.maximum(values, 1.0))
    ordered = np.sort(logs)
    n, below = len(ordered), np.arange(1, len(ordered))
    sums = np.cumsum(ordered)
    apart = (sums[-1] - sums[:-1]) / (n - below) - sums[:-1] / below
    shorter = int(np.argmax(below * (n - below) * apart**2)) + 1
    is_long = logs > ordered[shorter - 1]
    longer = int(is_long.sum())
    if longer < FEW_ROUNDS:
        return None
    middle = float(np.median(values[~is_long]))
    deviation = spread(values[~is_long] - middle)
    if n - longer < FEW_ROUNDS:
        if not middle <= FAR_ABOVE * foretold:
            return None
        deviation = max(deviation, SIZES_SPREAD * foretold)
    runs = 1 + int(np.sum(is_long[1:] != is_long[:-1]))
    by_chance = 2 * longer * (n - longer) / n + 1
    clear_of = max(FAR_ABOVE * middle, middle + SLOW_DEVIATIONS * deviation)
    if runs > FEW_RUNS * by_chance or float(np.min(values[is_long])) < clear_of:
        return None
    return middle, deviation


def _beside(of_size: Ints, far_above: NDArray[np.bool_]) -> Floats:
    """For each size, of the rounds of other sizes right before and after its own the share that is far above the usual: what
    is slow because of the time is so for any size then."""
    first = np.flatnonzero(np.concatenate([[True], np.diff(of_size) != 0]))
    before, after = first[1:] - 1, first[1:]
    # A run of rounds of one size has a neighbour on each side.
    runs = np.concatenate([of_size[after], of_size[before]])
    neighbours = np.concatenate([far_above[before], far_above[after]])
    count = np.bincount(runs, minlength=int(of_size.max()) + 1)
    return np.asarray(np.bincount(runs, weights=neighbours, minlength=len(count)) / np.maximum(count, 1))


def _foretold(size: Floats, transfer: Floats) -> Callable[[float], float]:
    """Transfer by class of size: a latency and a time per byte, through the lower quarter of the rounds, by quantile
    regression (Koenker and Bassett 1978; iteratively reweighted): what is slow for a while does not move that."""
    known = np.flatnonzero(size >= 0)
    known = known[:: max(1, len(known) // MOST_FITTED)]
    bytes_in = 2.0 ** (size[known] / 8)
    if len(known) < ENOUGH_ROUNDS or np.ptp(bytes_in) < bytes_in.min():
        return lambda _: np.nan
    features = np.stack([np.ones(len(known)), bytes_in / bytes_in.max()], axis=1)
    values, weights = transfer[known], np.ones(len(known))
    least = 1e-3 * float(np.median(values)) + 1.0
    for _ in range(QUANTILE_PASSES):
        root = np.sqrt(weights)
        line, _ = nnls(features * root[:, None], values * root)
        apart = values - features @ line
        weights = np.where(apart > 0, LOWER, 1 - LOWER) / np.maximum(np.abs(apart), least)
    if np.mean(np.abs(apart) <= LIES_WITHIN * (features @ line)) < MOST_LIE:
        return lambda _: np.nan
    return lambda of: float(line @ [1.0, 2.0 ** (of / 8) / bytes_in.max()]) if of >= 0 else np.nan


def verdicts(stay: Floats, wait: Floats, transfer: Floats, error_ns: float) -> NDArray[np.int64]:
    """Index into VERDICTS of each round. `stay`, `wait`: ranks x rounds, NaN where a rank has no part; `error_ns`: of a wait.

    Waiting is known twice: by the clocks, and as what each stay is longer than the shortest. Where these differ by more
    than the clocks' error and half of the larger, nothing is known.
    """
    with np.errstate(invalid="ignore"):
        stayed = np.nanmean(stay, axis=0)
        waited, without_clocks = np.nanmean(wait, axis=0), stayed - transfer
    share = without_clocks / np.maximum(stayed, 1.0)
    told = np.select([share >= SKEW_DOMINATED, share <= TRANSFER_DOMINATED], [1, 0], 2)
    most = np.maximum(waited, without_clocks)
    apart = np.abs(waited - without_clocks) > np.maximum(error_ns, 0.5 * most)
    # A difference that is small beside the stay changes no verdict.
    apart &= np.abs(waited - without_clocks) > 0.1 * stayed
    return np.asarray(np.where(apart | ~np.isfinite(stayed), 3, told))
