"""Metric series: their identity, and their samples written on change plus a heartbeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from tailscope.model import request_key
from tailscope.schema import METRICS, SERIES, Table
from tailscope.source import Tally

#: A sample equal to the last one is written only if that long has passed since the last written one.
HEARTBEAT_NS = 60_000_000_000
BATCH = 50_000
#: Series remembered. A file with more loses only the leaving out of unchanged samples.
MAX_SERIES = 500_000

#: Types whose values never fall while the process that counts lives.
_CUMULATIVE = ("counter", "histogram", "summary")


def series_id(name: str, labels: Mapping[str, str]) -> str:
    """`series.series` of a name with these labels.

    The label `instance` is left out: the column of that name says it, and a series has one identity on
    every instance.
    """
    items = sorted(item for item in labels.items() if item[0] != "instance")
    return request_key("series", name, *(part for item in items for part in item))


def engine_of(labels: Mapping[str, str]) -> int | None:
    """The data-parallel rank a series is of."""
    for label in ("engine", "dp_rank"):
        text = labels.get(label, "")
        if text.isascii() and text.isdigit() and len(text) < 10:
            return int(text)
    return None


def printed(text: bytes, limit: float, tally: Tally, where: str) -> float | None:
    """A value that a line prints, from 0 to `limit`; None, and counted, where it is anything else."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value <= limit:
        return value
    tally.blank("value is negative, too large or not a number", where)
    return None


class Series:
    """One series and its last sample."""

    __slots__ = (
        "counts", "cumulative", "engine", "fell", "id", "instance", "labels", "le", "name", "page", "seen_ns",
        "type", "value", "written_ns",
    )  # fmt: skip

    def __init__(self, name: str, labels: dict[str, str], kind: str) -> None:
        self.id = series_id(name, labels)
        self.name, self.type = name, kind
        #: Dropped once the row of `series` is written.
        self.labels: dict[str, str] | None = labels
        self.instance = labels.get("instance") or None
        self.engine = engine_of(labels)
        quantile = kind == "summary" and "quantile" in labels
        self.cumulative = (kind in _CUMULATIVE and not quantile) or (
            kind == "unknown" and name.endswith("_total")
        )
        self.page = -1
        self.seen_ns: int | None = None
        self.written_ns: int | None = None
        self.value: float | None = None
        self.le: Sequence[float] | None = None
        self.counts: Sequence[float] | None = None
        self.fell = False


class SampleWriter:
    """Rows of `metrics` and `series`. A sample that says nothing new is left out and counted."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._known: dict[tuple[str, str | None], Series] = {}
        self._series: list[Series] = []
        self._labels: list[list[tuple[str, str]]] = []
        self._rows: list[
            tuple[Series, int | None, float | None, Sequence[float] | None, Sequence[float] | None]
        ]
        self._rows = []
        self._unchanged = 0
        self._fell = 0
        self.written = 0

    def series(self, name: str, labels: dict[str, str], kind: str) -> Series:
        new = Series(name, labels, kind)
        if len(self._known) >= MAX_SERIES:
            self._known.clear()
        return self._known.setdefault((new.id, new.instance), new)

    def add(
        self,
        series: Series,
        page: int,
        time_ns: int | None,
        value: float | None,
        where: str,
        le: Sequence[float] | None = None,
        counts: Sequence[float] | None = None,
    ) -> None:
        """A sample found in scrape number `page`."""
        if series.page == page and series.seen_ns == time_ns:
            self._tally.reject("series repeated in one scrape", where)
            return
        later = series.seen_ns is not None and time_ns is not None and time_ns > series.seen_ns
        if later and series.cumulative and not series.fell:
            series.fell = _fell(series, value, counts)
            self._fell += series.fell
        same = later and series.value == value and series.counts == counts and series.le == le
        series.page, series.seen_ns = page, time_ns
        if same and time_ns is not None and time_ns - (series.written_ns or 0) < HEARTBEAT_NS:
            self._unchanged += 1
            return
        series.value, series.le, series.counts = value, le, counts
        series.written_ns = time_ns
        if series.labels is not None:
            self._series.append(series)
            self._labels.append(sorted(series.labels.items()))
            series.labels = None
        self._rows.append((series, time_ns, value, le, counts))

    @property
    def full(self) -> bool:
        return len(self._rows) >= BATCH

    def take(self) -> Iterator[tuple[Table, pa.Table]]:
        """What was added since the last call."""
        if self._series:
            new = self._series
            yield (
                SERIES,
                SERIES.batch(
                    {
                        "instance": [s.instance for s in new],
                        "engine": [s.engine for s in new],
                        "series": [s.id for s in new],
                        "name": [s.name for s in new],
                        "type": [s.type for s in new],
                        "labels": self._labels,
                    }
                ),
            )
        if self._rows:
            rows = self._rows
            yield (
                METRICS,
                METRICS.batch(
                    {
                        "instance": [row[0].instance for row in rows],
                        "engine": [row[0].engine for row in rows],
                        "time_ns": [row[1] for row in rows],
                        "series": [row[0].id for row in rows],
                        "value": [row[2] for row in rows],
                        "le": [row[3] for row in rows],
                        "counts": [row[4] for row in rows],
                    }
                ),
            )
        self.written += len(self._rows)
        self._series, self._labels, self._rows = [], [], []

    def finish(self) -> Iterator[tuple[Table, pa.Table]]:
        """The rest, and what a reader must know of all since the last call."""
        yield from self.take()
        if self._unchanged:
            self._tally.skip("sample unchanged since the last scrape", self._unchanged)
        if self._fell:
            self._tally.note(
                f"{self._fell} counter and histogram series went down between two scrapes, "
                "as they do when a server restarts"
            )
        self._unchanged = self._fell = 0


def _fell(series: Series, value: float | None, counts: Sequence[float] | None) -> bool:
    if counts and series.counts:
        return counts[-1] < series.counts[-1]
    return value is not None and series.value is not None and value < series.value
