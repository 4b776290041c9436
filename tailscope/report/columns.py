"""Columns of numbers for a page: few digits, no NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tailscope.safe import printable
from tailscope.store import Trace

#: Longest name on a page.
MOST_NAME = 200

#: A table as the page gets it: name -> values, all of one length.
Columns = dict[str, list[Any]]


def columns(trace: Trace, sql: str, parameters: Mapping[str, Any] | None = None) -> Columns:
    """A result's columns, floats with four significant digits; but places in time, `at`, as they are."""
    cursor = trace.connection.execute(sql, dict(parameters or {}))
    names = [column[0] for column in cursor.description or []]
    rows = cursor.fetchall()
    values = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    return {name: column if name == "at" else short(column) for name, column in values.items()}


def short(values: Iterable[Any]) -> list[Any]:
    return [few_digits(value) if isinstance(value, float) else value for value in values]


def few_digits(value: float, digits: int = 4) -> float | int | None:
    """With so many significant digits; a whole number without its fraction, which costs two characters."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def shown_name(value: Any) -> str:
    """Anybody's name as a script gets it: without characters that nobody sees."""
    return "" if value is None else printable(str(value), MOST_NAME)


def numbered(values: Iterable[Any]) -> tuple[list[Any], list[int]]:
    """The distinct values in order of appearance, and the place of each value among them."""
    places: dict[Any, int] = {}
    numbers = [places.setdefault(value, len(places)) for value in values]
    return list(places), numbers
