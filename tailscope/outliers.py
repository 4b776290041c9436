"""How many of the largest values are of another kind than the tail below them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tailscope.stats import Floats

#: At most so many of the largest values are looked at.
MOST = 50
#: Values below a gap that say how the tail goes on there: few of them are of the tail for certain, many say it well.
REFERENCES = (30, 100)


@dataclass(frozen=True)
class Outliers:
    """`count` of the largest values lie apart from the others. `p_value`: how likely so wide a gap is, for all counts tried,
    where all are of one tail. `tail`: the exponent of the power law that the tail below is like; large ones are thin."""

    count: int
    p_value: float
    tail: float


def beyond_tail(values: Floats) -> Outliers | None:
    """The number of largest values between which and the rest the gap is the least likely; None where too few are known.

    `values`: positive, any order, of one shape. Where the tail is a power law, the spacings of the logarithms of its values in
    order, each times its rank, are independent and exponential of one mean (Renyi 1953). Of that the r-th, over the mean of
    those below it, is F-distributed with 2 and 2 n degrees of freedom: the gap below the r largest, as in Wheatley and
    Sornette (2015) with the inner spacings left out, which say nothing where there is a body and a tail. Tries r = 1, 2, ...
    at prices whose reciprocals sum to 1. The body of a lognormal is thinner than a power law, which makes the test careful.
    """
    order = np.sort(np.log(values[values > 0]))[::-1]
    spacings = np.arange(1, len(order)) * -np.diff(order)
    sums = np.concatenate([[0.0], np.cumsum(spacings)])
    found: Outliers | None = None
    for r in range(1, min(MOST, len(spacings) - REFERENCES[0]) + 1):
        p_value, mean = 0.0, 0.0
        for reference in REFERENCES:
            k = min(r + reference, len(spacings))
            mean = float(sums[k] - sums[r]) / (k - r)
            p_value = max(p_value, (1 + float(spacings[r - 1]) / max(mean, 1e-12) / (k - r)) ** -(k - r))
        p_value = min(1.0, p_value * r * (r + 1))
        if found is None or p_value < found.p_value:
            found = Outliers(r, p_value, 1 / max(mean, 1e-12))
    return found
