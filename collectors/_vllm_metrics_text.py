"""Prometheus's text format and OpenMetrics, one page or a series of them.

A page lies on the disk as it was scraped, or after a line

    #@SCRAPE unix_ns=1795963213970335831 … status=200 …

The library's parser takes 20 µs for a line. From scrape to scrape a line differs in its numbers only, so
that the parser sees each distinct text before the numbers once, alone: a line it refuses costs no other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pyarrow as pa
from prometheus_client.parser import text_string_to_metric_families

from tailscope.schema import Table
from tailscope.source import CHUNK, INT64_MAX, Options, Source, Tally

from ._vllm_metrics_rows import BAD_TIME, MAX_NAMES, Families, Foreign, Reader, Target, Unusable

#: The parser's time grows with the square of a line's length, and no server writes such lines.
MAX_LINE = 16 << 10
#: Texts remembered.
MAX_REMEMBERED = 400_000
#: A timestamp below is in seconds (OpenMetrics), above in milliseconds (the older text format):
#: seconds until the year 5138, milliseconds since 1973.
SECONDS_BELOW = 1e11

_MARK = b"#@SCRAPE "
_TIME = re.compile(rb"#@SCRAPE unix_ns=([0-9]{1,19})(?:\s|\Z)")
_STATUS = re.compile(rb"\sstatus=(\S+)")
_SERIES = re.compile(rb'[^\s{]*+(?:\{(?:[^"}]++|"(?:[^"\\]++|\\.)*+")*+\})?')
_NAME = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*")

BAD_LINE = "line is not a sample"


def read_text(source: Source) -> Iterator[tuple[Table, pa.Table]]:
    tally = source.tally
    families, marked = _look_ahead(source)
    samples = _Samples(families, source.options, tally)
    page_time = source.modified_ns if source.modified_ns > 0 and not marked else None
    failed = False
    for number, line, whole in _lines(source, tally):
        if line.startswith(_MARK):
            samples.end_page()
            page_time, failed = _mark(line, number, tally)
        elif failed and not line.startswith(b"#"):
            continue  # what a failed scrape returned instead of samples; counted with its mark
        elif not (whole or line.startswith(b"#")):
            tally.reject("last line is cut off", f"line {number}")
        else:
            by_page = samples.take(line, page_time, f"line {number}", timed=not marked)
            if by_page and not marked:
                tally.note("time of the scrape is the file's modification time")
            if samples.reader.writer.full:
                yield from samples.reader.writer.take()
    samples.end_page()
    yield from samples.reader.finish()


class Pages:
    """The pages of one server, scraped again and again; what is known of one makes the next one cheap."""

    def __init__(self, options: Options, tally: Tally) -> None:
        self._samples = _Samples(Families(), options, tally)

    @property
    def known(self) -> int:
        """Distinct series seen so far."""
        return self._samples.known

    def read(self, page: bytes, time_ns: int) -> Iterator[tuple[Table, pa.Table]]:
        """Rows of a page that was scraped at `time_ns`. What cannot be used is counted in the tally."""
        samples, tally = self._samples, self._samples.reader.tally
        *lines, last = page.split(b"\n")
        if samples.is_new:
            _declare(lines, samples.reader.families)
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_LINE:
                tally.reject("line longer than 16 KiB", f"line {number}")
            elif line := line.strip():
                samples.take(line, time_ns, f"line {number}", timed=True)
        if last.strip():
            tally.reject("last line is cut off", f"line {len(lines) + 1}")
        samples.end_page()
        yield from samples.reader.writer.finish()


class _Samples:
    """Lines to samples of a Reader."""

    def __init__(self, families: Families, options: Options, tally: Tally) -> None:
        self.reader = Reader(families, options, tally)
        self._remembered: dict[bytes, Target | str] = {}
        self._declared: set[bytes] = set()
        self._page = 0

    @property
    def is_new(self) -> bool:
        return not self._remembered

    @property
    def known(self) -> int:
        return len(self._remembered)

    def end_page(self) -> None:
        self.reader.end_page()
        self._page += 1

    def take(self, line: bytes, page_time: int | None, where: str, timed: bool) -> bool:
        """Take a line of a page; without a time its own page has, where `timed`, a sample may have none either. Says whether
        it was a sample that took the page's time."""
        reader, tally = self.reader, self.reader.tally
        if line.startswith(b"#"):
            if line.startswith(b"# TYPE") and line not in self._declared:
                try:
                    reader.families.declare(line)
                    if len(self._declared) < MAX_NAMES:
                        self._declared.add(line)
                except ValueError:
                    tally.reject("TYPE line cannot be read", where)
            return False
        text, fields = _split(line)
        target = self._remembered.get(text)
        if target is None:
            try:
                target = _resolve(text, reader)
            except Foreign as why:
                target = str(why)
            except Unusable as why:
                tally.reject(str(why), where)
                return False
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[text] = target
        if isinstance(target, str):
            tally.skip(target)
            return False
        try:
            value = _number(fields[0])
            time_ns = page_time if len(fields) == 1 else _timestamp(*fields[1:])
        except (ValueError, IndexError, TypeError):
            tally.reject(BAD_LINE, where)
            return False
        if len(fields) == 2 and time_ns is None:
            tally.reject(BAD_TIME, where)
        elif not timed and time_ns is None:
            tally.reject("sample of a scrape without a time", where)
        else:
            reader.add(target, self._page, time_ns, value, where)
            return len(fields) == 1
        return False


def _lines(source: Source, tally: Tally | None) -> Iterator[tuple[int, bytes, bool]]:
    """(number from 1, line that is not blank, whether its end is there).

    A line cut off by the end of the file may hold half a number.
    """
    with source.open() as stream:
        number = 0
        while line := stream.readline(MAX_LINE):
            number += 1
            whole = line.endswith(b"\n")
            if not whole and len(line) == MAX_LINE:
                if tally is not None:
                    tally.reject("line longer than 16 KiB", f"line {number}")
                while (rest := stream.readline(CHUNK)) and not rest.endswith(b"\n"):
                    pass
                continue
            line = line.strip()
            if line:
                yield number, line, whole


def _look_ahead(source: Source) -> tuple[Families, bool]:
    """Names of the first scrape that has any, and whether scrapes are marked.

    What a sample is part of, and what it is called, depends on names that may come after it.
    """
    families, marked = Families(), False

    def first_page() -> Iterator[bytes]:
        nonlocal marked
        for _, line, _ in _lines(Source(source.path), None):
            if line.startswith(_MARK):
                if marked and families.names:
                    return
                marked = True
            yield line

    _declare(first_page(), families)
    return families, marked


def _declare(lines: Iterable[bytes], families: Families) -> None:
    """Names and types of a page."""
    buckets: set[str] = set()
    for line in lines:
        if line.startswith(b"# TYPE"):
            try:
                families.declare(line)
            except ValueError:
                continue  # counted when it is read
        elif match := _NAME.match(line):
            name = match[0].decode("ascii")
            families.know(name)
            if name.endswith("_bucket") and b'le="' in line and len(buckets) < MAX_NAMES:
                buckets.add(name)
    for name in buckets:
        families.infer(name)


def _mark(line: bytes, number: int, tally: Tally) -> tuple[int | None, bool]:
    """Time of the scrape that begins, and whether it failed."""
    status = _STATUS.search(line)
    if status is not None and status[1] != b"200":
        tally.reject("scrape failed", f"line {number}")
        return None, True
    match = _TIME.match(line)
    time_ns = int(match[1]) if match else 0
    if not 0 < time_ns <= INT64_MAX:
        tally.reject("scrape mark has no time", f"line {number}")
        return None, False
    return time_ns, False


def _split(line: bytes) -> tuple[bytes, list[bytes]]:
    """A sample line up to its numbers, and the numbers. An exemplar, which is per request, is left out."""
    if b" # {" in line and (series := _SERIES.match(line)):
        exemplar = line.find(b" # {", series.end())
        if exemplar >= 0:
            line = line[:exemplar]
    at = line.rfind(b"}") + 1
    if at:
        return line[:at], line[at:].split()
    text, *fields = line.split()
    return text, fields


def _resolve(text: bytes, reader: Reader) -> Target:
    """Raises Unusable or Foreign."""
    try:
        (family,) = text_string_to_metric_families(text.decode("utf-8") + " 1\n")
        (sample,) = family.samples
    except Exception as error:  # the library's parser fails in many ways on a damaged line
        raise Unusable(BAD_LINE) from error
    if sample.value != 1 or sample.timestamp is not None:
        raise Unusable(BAD_LINE)  # `text` has numbers of its own
    return reader.target(sample.name, sample.labels)


def _number(text: bytes) -> float:
    if b"_" in text:
        raise ValueError(text)  # Python's spelling, not Prometheus's
    return float(text)


def _timestamp(text: bytes) -> int | None:
    """Unix nanoseconds, None where it cannot be a time. Raises ValueError."""
    stamp = _number(text)
    if not 0 < stamp < 1e16:
        return None
    # Seconds to the microsecond: that far a double is exact.
    time_ns = round(stamp * 1e6) * 1000 if stamp < SECONDS_BELOW else round(stamp) * 1_000_000
    return time_ns if 0 < time_ns <= INT64_MAX else None
