"""Prometheus's text format and OpenMetrics, one page or a series of them.

A page lies on the disk as it was scraped, or after a line

    #@SCRAPE unix_ns=1795963213970335831 … status=200 …

The library's parser takes 20 µs for a line. From scrape to scrape a line differs in its numbers only, so
that the parser sees each distinct text before the numbers once, alone: a line it refuses costs no other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pyarrow as pa
from prometheus_client.parser import text_string_to_metric_families

from tailscope.schema import Table
from tailscope.source import CHUNK, INT64_MAX, Source, Tally

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
    reader = Reader(source, families)
    writer = reader.writer
    remembered: dict[bytes, Target | str] = {}
    declared: set[bytes] = set()
    page, failed = 0, False
    page_time = source.modified_ns if source.modified_ns > 0 and not marked else None
    for number, line, whole in _lines(source, tally):
        if line.startswith(b"#"):
            if line.startswith(_MARK):
                reader.end_page()
                page += 1
                page_time, failed = _mark(line, number, tally)
            elif line.startswith(b"# TYPE") and line not in declared:
                try:
                    families.declare(line)
                    if len(declared) < MAX_NAMES:
                        declared.add(line)
                except ValueError:
                    tally.reject("TYPE line cannot be read", f"line {number}")
            continue
        if failed:
            continue  # what a failed scrape returned instead of samples; counted with its mark
        if not whole:
            tally.reject("last line is cut off", f"line {number}")
            continue
        text, fields = _split(line)
        target = remembered.get(text)
        if target is None:
            try:
                target = _resolve(text, reader)
            except Foreign as why:
                target = str(why)
            except Unusable as why:
                tally.reject(str(why), f"line {number}")
                continue
            if len(remembered) >= MAX_REMEMBERED:
                remembered.clear()
            remembered[text] = target
        if isinstance(target, str):
            tally.skip(target)
            continue
        try:
            value = _number(fields[0])
            time_ns = page_time if len(fields) == 1 else _timestamp(*fields[1:])
        except (ValueError, IndexError, TypeError):
            tally.reject(BAD_LINE, f"line {number}")
            continue
        if len(fields) == 2 and time_ns is None:
            tally.reject(BAD_TIME, f"line {number}")
        elif marked and time_ns is None:
            tally.reject("sample of a scrape without a time", f"line {number}")
        else:
            if not marked and len(fields) == 1:
                tally.note("time of the scrape is the file's modification time")
            reader.add(target, page, time_ns, value, f"line {number}")
            if writer.full:
                yield from writer.take()
    reader.end_page()
    yield from reader.finish()


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
    buckets: set[str] = set()
    for _, line, _ in _lines(Source(source.path), None):
        if line.startswith(_MARK):
            if marked and families.names:
                break
            marked = True
        elif line.startswith(b"# TYPE"):
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
    return families, marked


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
