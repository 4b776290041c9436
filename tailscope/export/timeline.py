"""What a timeline consists of: tracks, and batches of slices, counters and marks on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.stats import Floats, Ints

Mask = NDArray[np.bool_]

#: Rows that are fetched, and written, at a time.
BATCH = 16_384
#: Characters of a text from a trace that a timeline shows.
MOST_CHARACTERS = 100

#: `shown(text)`: what of a text may be shown, without what a viewer would obey: controls, directions, invisible characters.
SHOWN = f"""
CREATE OR REPLACE TEMP MACRO shown(t) AS regexp_replace("left"(t, {MOST_CHARACTERS}),
    '[\\x00-\\x1f\\x7f-\\x9f\\x{{ad}}\\x{{61c}}\\x{{200b}}-\\x{{200f}}\\x{{2028}}-\\x{{202e}}\\x{{2060}}-\\x{{206f}}\\x{{feff}}]', '�', 'g')
"""


@dataclass(frozen=True)
class Track:
    """A line of the timeline. Tracks of one name under one parent are lanes of one. `unit`: of a counter."""

    id: int
    parent: int | None
    name: str
    unit: str | None = None
    about: str = ""


@dataclass(frozen=True)
class Inner:
    """A slice inside of each outer one, after those before it; missing where it is not `there`. `name`: index into names."""

    name: Ints
    start: Ints
    end: Ints
    there: Mask


@dataclass(frozen=True)
class Slices:
    """Slices by row, those of a track in order of their starts and apart from each other. `args`: Arrow arrays; NULL is left out."""

    track: Ints
    name: Ints
    start: Ints
    end: Ints
    args: Mapping[str, Any] = field(default_factory=dict)
    inner: Sequence[Inner] = ()
    there: Mask | None = None

    @property
    def count(self) -> int:
        outer = len(self.track) if self.there is None else int(self.there.sum())
        return outer + sum(int(inner.there.sum()) for inner in self.inner)


@dataclass(frozen=True)
class Counters:
    """Values of counters, those of a track in order of time."""

    track: Ints
    time: Ints
    value: Floats

    @property
    def count(self) -> int:
        return len(self.track)


@dataclass(frozen=True)
class Mark:
    """A slice that is one of few: a span, or an instant where it has no end. `begins` and `ends`: flows, by number."""

    track: int
    name: str
    start: int
    end: int | None = None
    args: Mapping[str, str | int | float] = field(default_factory=dict)
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


Batch = Slices | Counters | Sequence[Mark]


@dataclass
class Names:
    """Names that many slices have, by number."""

    known: dict[str, int] = field(default_factory=dict)

    def of(self, name: str) -> int:
        return self.known.setdefault(name, len(self.known))


@dataclass
class Tracks:
    """Tracks in the order in which they are shown, each after its parent."""

    all: list[Track] = field(default_factory=list)

    def add(self, name: str, parent: int | None = None, unit: str | None = None, about: str = "") -> int:
        self.all.append(Track(len(self.all) + 1, parent, name, unit, about))
        return self.all[-1].id


@dataclass
class Timeline:
    """All tracks are known before the first batch comes."""

    tracks: Tracks
    names: Names
    first_ns: int
    batches: Iterator[Batch]


def ints(values: Any) -> Ints:
    """A column of DuckDB's as int64, NULL as 0."""
    return np.asarray(np.ma.filled(np.ma.asarray(values), 0), np.int64)


def arrow(**columns: Any) -> Any:
    """Arrays as an Arrow table."""
    return pa.table(columns)
