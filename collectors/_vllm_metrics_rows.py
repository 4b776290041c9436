"""From parsed samples to rows: what a sample is part of, its stored name, and histograms put together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import pyarrow as pa
from prometheus_client.parser import text_string_to_metric_families

from tailscope.errors import BadInput
from tailscope.schema import Table
from tailscope.source import Options, Tally

from ._ids import stored_request_id
from ._metric_names import CLIENT_LABELS, CONCEPT_OF, RAY_PREFIXES, RENAMED, RUNTIME_PREFIXES
from ._series import SampleWriter, Series

#: Metric names and types remembered.
MAX_NAMES = 100_000

VALUE, BUCKET, SUM, COUNT = range(4)
_PARTS = (("_bucket", BUCKET), ("_sum", SUM), ("_count", COUNT), ("_gsum", SUM), ("_gcount", COUNT))
_TYPES = {kind: kind for kind in ("counter", "gauge", "histogram", "summary")}
_TYPES |= {"info": "gauge", "stateset": "gauge"}

REPEATED = "series repeated in one scrape"
NOT_FINITE = "value is NaN or infinite"
INCOMPLETE = "histogram is incomplete"
BAD_TIME = "time of the sample cannot be true"


class Unusable(Exception):
    """A series that cannot be used; the reason is the whole message."""


class Foreign(Exception):
    """A series that is valid but not telemetry of ours; the reason is the whole message."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the values of a scraped series go."""

    series: Series
    part: int = VALUE
    bound: float = math.nan


@dataclass(slots=True)
class _Histogram:
    """What was read of a histogram of one time."""

    series: Series
    page: int
    time_ns: int | None
    where: str
    buckets: list[tuple[float, float]] = field(default_factory=list)
    sum: float | None = None
    count: float | None = None


class Families:
    """Names and types known so far; decides what a sample is part of and under which name it is stored."""

    def __init__(self) -> None:
        self.types: dict[str, str] = {}
        self.names: set[str] = set()

    def declare(self, line: bytes) -> None:
        """Take a `# TYPE` line. Raises ValueError."""
        try:
            (family,) = text_string_to_metric_families(line.decode("utf-8") + "\n")
        except Exception as error:  # the library's parser fails in many ways on a damaged line
            raise ValueError from error
        self.know(family.name)
        # Prometheus's /federate declares even buckets as untyped: as good as no type.
        if family.type != "unknown" and len(self.types) < MAX_NAMES:
            self.types.setdefault(family.name, family.type)

    def infer(self, name: str) -> None:
        """Take the name of a sample whose bound says that it is a bucket."""
        if name not in self.types:
            base = name.removesuffix("_bucket")
            self.types.setdefault(base, "histogram")
            self.know(base)

    def know(self, name: str) -> None:
        if len(self.names) < MAX_NAMES:
            self.names.add(name)

    def part(self, name: str, bounded: bool) -> tuple[str, int, str]:
        """Name of the series a sample's name is part of, which part, and the type."""
        kind = self.types.get(name)
        for suffix, part in _PARTS if kind is None else ():
            base = name.removesuffix(suffix)
            of = self.types.get(base) if base != name else None
            if of == "summary":
                return name, VALUE, "summary"
            if of in ("histogram", "gaugehistogram") and (part != BUCKET or bounded):
                return base, part, _TYPES.get(of, "unknown")
        for suffix in ("_total", "_info"):
            kind = kind or self.types.get(name.removesuffix(suffix))
        return name, VALUE, _TYPES.get(kind or "", "unknown")

    def canonical(self, name: str) -> str:
        """vLLM V1's name of the measurement.

        Where the page has that name too, the old one stays: vLLM 0.10 exports some measurements under
        both, and as one series each would count twice.
        """
        prefix = next((p for p in RAY_PREFIXES if name.startswith(p)), None)
        plain = name if prefix is None else "vllm:" + name.removeprefix(prefix)
        if plain != name and plain in self.names:
            return name
        renamed = RENAMED.get(plain, plain)
        if renamed == plain:
            return plain
        spellings = [renamed]
        if prefix is not None:
            spellings.append(prefix + renamed.removeprefix("vllm:"))
        return plain if any(s in self.names for s in spellings) else renamed


class Reader:
    """Takes samples, scrape by scrape, and hands rows to a SampleWriter."""

    def __init__(self, families: Families, options: Options, tally: Tally) -> None:
        self.tally, self.families = tally, families
        self.writer = SampleWriter(tally)
        self._hash_ids = options.hash_ids
        self._open: dict[tuple[int, int | None], _Histogram] = {}

    def target(self, name: str, labels: Mapping[str, str]) -> Target:
        """Raises Unusable or Foreign."""
        if name.startswith(RUNTIME_PREFIXES):
            raise Foreign("metric of the exporting process itself")
        if name.endswith("_created"):
            raise Foreign("_created timestamp")
        if any(label.lower().replace("-", "_") in CLIENT_LABELS for label in labels):
            raise Foreign("series labelled with client data")
        if "le" in labels and name.endswith("_bucket"):
            self.families.infer(name)
        family, part, kind = self.families.part(name, "le" in labels)
        stored = dict(labels)
        bound = math.nan
        if part == BUCKET:
            try:
                bound = float(stored.pop("le"))
            except ValueError:
                bound = math.nan
            if math.isnan(bound):
                raise Unusable("bucket bound is not a number")
        if self._hash_ids and "request_id" in stored:
            stored["request_id"] = stored_request_id(stored["request_id"], True)
        canonical = self.families.canonical(family)
        if canonical != family:
            stored["__scraped_name__"] = family
        if concept := CONCEPT_OF.get(canonical):
            stored["__concept__"] = concept
        return Target(self.writer.series(canonical, stored, kind), part, bound)

    def add(self, target: Target, page: int, time_ns: int | None, value: float, where: str) -> None:
        """Take a sample of the scrape numbered `page`."""
        series, part = target.series, target.part
        if part == VALUE:
            if not math.isfinite(value):
                if series.type == "summary" and not series.cumulative:
                    self.tally.skip("summary quantile without observations")
                else:
                    self.tally.reject(NOT_FINITE, where)
            elif value < 0 and series.cumulative:
                self.tally.reject("counter below zero", where)
            else:
                self.writer.add(series, page, time_ns, value, where)
            return
        key = (id(series), time_ns)
        histogram = self._open.get(key)
        if histogram is None:
            histogram = self._open[key] = _Histogram(series, page, time_ns, where)
        if part == BUCKET:
            histogram.buckets.append((target.bound, value))
            return
        if (histogram.sum if part == SUM else histogram.count) is not None:
            self.tally.reject(REPEATED, where)
            return
        if part == SUM:
            histogram.sum = value
        else:
            histogram.count = value
        # Servers write the buckets before the last other part: with that it is complete and need not
        # be held until the scrape ends.
        if None in (histogram.sum, histogram.count) or not histogram.buckets:
            return
        if max(histogram.buckets)[0] == math.inf:
            del self._open[key]
            self._close(histogram)

    def end_page(self, expected: frozenset[int] = frozenset((SUM, COUNT))) -> None:
        """No more samples of these times will come. `expected` are the parts each histogram should have."""
        for histogram in sorted(self._open.values(), key=lambda h: h.time_ns or 0):
            if COUNT in expected and histogram.count is None:
                self.tally.reject(INCOMPLETE, histogram.where)
                continue
            if SUM in expected and histogram.sum is None:
                self.tally.blank("histogram without a usable sum", histogram.where)
            self._close(histogram)
        self._open.clear()

    def _close(self, h: _Histogram) -> None:
        h.buckets.sort()
        le = [bucket[0] for bucket in h.buckets]
        counts = [bucket[1] for bucket in h.buckets]
        if reason := _flaw(le, counts, h.series):
            self.tally.reject(reason, h.where)
            return
        if h.count is not None and h.count != counts[-1]:
            self.tally.blank("count differs from the +Inf bucket", h.where)
        if h.sum is not None and not math.isfinite(h.sum):
            self.tally.blank("histogram without a usable sum", h.where)
            h.sum = None
        self.writer.add(h.series, h.page, h.time_ns, h.sum, h.where, le, counts)

    def finish(self) -> Iterator[tuple[Table, pa.Table]]:
        yield from self.writer.finish()
        if not self.writer.written:
            raise BadInput(
                "holds no metric sample that can be used",
                todo="Save the text of the server's /metrics, or Prometheus's answer to a query for it",
            )


def _flaw(le: list[float], counts: list[float], series: Series) -> str | None:
    """Why the buckets cannot be a histogram."""
    if not le or le[-1] != math.inf:
        return INCOMPLETE
    if any(a == b for a, b in pairwise(le)):
        return REPEATED
    if not all(map(math.isfinite, counts)):
        return NOT_FINITE
    if counts[0] < 0 or any(a > b for a, b in pairwise(counts)):
        return "bucket counts are not cumulative"
    # After a restart a server may have other bounds, but then it counts from zero.
    shrunk = series.le and series.counts and len(le) < len(series.le) and set(le) < set(series.le)
    if shrunk and series.counts and counts[-1] >= series.counts[-1]:
        return INCOMPLETE
    return None
