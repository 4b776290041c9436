"""Answers of Prometheus's HTTP API to `query` and `query_range`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa

from tailscope.errors import BadInput
from tailscope.schema import Table
from tailscope.source import INT64_MAX, Source, Tally

from ._vllm_metrics_rows import BAD_TIME, COUNT, SUM, Families, Foreign, Reader, Target, Unusable

_ELEMENT = re.compile(r'\{\s*"metric"\s*:')
#: Places at which a damaged answer is taken up again. Each costs a look at all text before it.
MAX_DAMAGES = 100
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(slots=True)
class _Result:
    where: str
    name: str
    labels: dict[str, str]
    points: list[Any]
    native: int


def read_json(source: Source) -> Iterator[tuple[Table, pa.Table]]:
    tally = source.tally
    families = Families()
    results = []
    for number, element in enumerate(_elements(source), 1):
        result = _result(element, f"result {number}", tally)
        if result is not None:
            results.append(result)
            families.know(result.name)
            if result.name.endswith("_bucket") and "le" in result.labels:
                families.infer(result.name)
    reader = Reader(families, source.options, source.tally)
    # The series of a histogram are read together, so that only one histogram is held at a time.
    groups: dict[int, list[tuple[Target, _Result]]] = {}
    for result in results:
        try:
            target = reader.target(result.name, result.labels)
        except Foreign as why:
            tally.skip(str(why), len(result.points))
        except Unusable as why:
            tally.reject(str(why), result.where, len(result.points))
        else:
            groups.setdefault(id(target.series), []).append((target, result))
            if result.native:
                tally.skip("native histogram", result.native)
    for page, group in enumerate(groups.values()):
        for target, result in group:
            for point in result.points:
                _add(reader, target, page, point, result.where)
            if reader.writer.full:
                yield from reader.writer.take()
        # A query need not ask for all parts of a histogram.
        reader.end_page(frozenset((SUM, COUNT)) & {target.part for target, _ in group})
    yield from reader.finish()


def _result(element: Any, where: str, tally: Tally) -> _Result | None:
    metric = element.get("metric") if isinstance(element, dict) else None
    if not isinstance(metric, dict) or not all(isinstance(value, str) for value in metric.values()):
        tally.reject("element is not a series", where)
        return None
    labels = {_clean(name): _clean(value) for name, value in metric.items()}
    name = labels.pop("__name__", "")
    if not name:
        tally.skip("result of an expression, not a metric")
        return None
    points = element.get("values", [])
    if not isinstance(points, list):
        tally.reject("element is not a sample", where)
        points = []
    if "value" in element:
        points = [*points, element["value"]]
    native = element.get("histograms", [])
    count = len(native) if isinstance(native, list) else 0
    return _Result(where, name, labels, points, count + ("histogram" in element))


def _add(reader: Reader, target: Target, page: int, point: Any, where: str) -> None:
    match point:
        case [int() | float() as stamp, str() as text] if not isinstance(stamp, bool):
            pass
        case _:
            reader.tally.reject("element is not a sample", where)
            return
    try:
        value = float(text)
    except ValueError:
        reader.tally.reject("element is not a sample", where)
        return
    # Prometheus keeps milliseconds. A range that an int64 of nanoseconds cannot hold is no time.
    if not 0 < stamp <= INT64_MAX / 1e9:
        reader.tally.reject(BAD_TIME, where)
        return
    time_ns = round(stamp * 1000) * 1_000_000
    if not 0 < time_ns <= INT64_MAX:
        reader.tally.reject(BAD_TIME, where)
        return
    reader.add(target, page, time_ns, value, where)


def _elements(source: Source) -> Iterable[Any]:
    """The elements of an answer's `result`. Raises BadInput."""
    raw = source.read_all()
    try:
        answer = orjson.loads(raw)
    except ValueError:
        return _salvage(raw.decode("utf-8", "replace"), source.tally)
    if isinstance(answer, list):
        return answer
    if answer.get("status") == "error":
        raise BadInput(
            "Prometheus answered with an error instead of series",
            where="status",
            todo="Repeat the query and save its answer",
        )
    data = answer.get("data", answer)
    result = data.get("result") if isinstance(data, dict) else None
    if not isinstance(result, list) or data.get("resultType", "matrix") not in ("matrix", "vector"):
        raise BadInput(
            "the answer holds no series",
            where="resultType",
            todo="Query metrics by their names, as a matrix or a vector",
        )
    return result


def _salvage(text: str, tally: Tally) -> Iterator[Any]:
    """The elements of what is not JSON as a whole: cut off, damaged, or several answers in one file."""
    decoder = json.JSONDecoder()
    end, cut, damages = 0, False, 0
    for match in _ELEMENT.finditer(text):
        start = match.start()
        if start < end:
            continue
        try:
            element, end = decoder.raw_decode(text, start)
            cut = False
        except (ValueError, RecursionError) as error:
            # What was scanned is passed over, so that damage costs no second look.
            end, cut = max(start + 1, getattr(error, "pos", len(text))), True
            tally.reject("JSON is damaged or cut off", f"character {start + 1}")
            damages += 1
            if damages == MAX_DAMAGES:
                tally.note(f"reading stopped at the {MAX_DAMAGES}th damaged place")
                break
            continue
        yield element
    if not cut and not text[end:].lstrip().startswith("]"):
        tally.reject("JSON is damaged or cut off", f"character {len(text)}")


def _clean(text: str) -> str:
    return _SURROGATE.sub("\ufffd", text)
