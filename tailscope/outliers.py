"""How many of the largest values are of another kind than the tail below them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tailscope.stats import Floats

#: At most so many of the largest values are looked at.
MOST = 50
#: Values below a gap that say how the tail goes on there, from so many to so many: few of them are of the tail for certain,
#: many say it well.
REFERENCES = (20, 100)
#: With fewer nothing is said.
LEAST = 30


@dataclass(frozen=True)
class Outliers:
    """`count` of the largest values lie apart from the others. `p_value`: how likely so wide a gap is, for all counts tried,
    where all are of one tail. `tail`: the exponent of the power law that the tail below is like; large ones are thin."""

    count: int
    p_value: float
    tail: float


def beyond_tail(values: Floats, least: float = 0.0) -> Outliers | None:
    """The number of largest values between which and the rest the gap is the least likely; None where too few are known.

    `values`: positive, any order, of one shape. Where the tail is a power law, the spacings of the logarithms of its values in
    order, each times its rank, are independent and exponential of one mean (Renyi 1953), the reciprocal of its exponent (Hill
    1975). Of that the r-th, over the mean of those below it, is F-distributed with 2 and 2 n degrees of freedom: the gap below
    the r largest, as in Wheatley and Sornette (2015) with the inner spacings left out, which say nothing where there is a body
    and a tail. Tries r = 1, 2, ... at prices whose reciprocals sum to 1.

    A tail that few values belong to ends in a body, whose spacings are narrow, and there is a gap where it does. So of all
    numbers of references the one that makes the gap the likeliest counts, and nothing below `least` is an outlier: what is
    apart from the body, but not from the tail, is the tail.
    """
    order = np.sort(np.log(values[values > 0]))[::-1]
    spacings = np.arange(1, len(order)) * -np.diff(order)
    sums = np.concatenate([[0.0], np.cumsum(spacings)])
    most = len(spacings) - LEAST
    if most < 1:
        return None
    found = Outliers(0, 1.0, 1 / max(float(spacings[: REFERENCES[1]].mean()), 1e-12))
    large = int((np.exp(order) >= least).sum())
    for r in range(1, min(MOST, most, large) + 1):
        n = np.arange(REFERENCES[0], min(REFERENCES[1], len(spacings) - r) + 1)
        means = np.maximum((sums[r + n] - sums[r]) / n, 1e-12)
        chances = (1 + spacings[r - 1] / means / n) ** -n
        likeliest = int(np.argmax(chances))
        p_value = float(min(1.0, chances[likeliest] * r * (r + 1)))
        if p_value < found.p_value:
            found = Outliers(r, p_value, 1 / float(means[likeliest]))
    return found
