"""One rank's collectives in order, and pairs of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
UNKNOWN = -1


@dataclass(frozen=True)
class Sequence:
    """One rank's collectives on one group in order, arrays of one length; `kind` and `seq` are UNKNOWN where not told."""

    index: Ints
    kind: Ints
    seq: Ints
    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True)
class Match:
    """Positions in two sequences that are one collective, and what could not be matched."""

    one: Ints
    other: Ints
    offset_ns: float
    unmatched: int


def nothing() -> Ints:
    return np.empty(0, np.int64)
