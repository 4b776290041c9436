"""Messages about a scenario: where, what, and what it may be."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from tailscope.errors import UsageError
from tailscope.sim.scenario_limits import MOST, Range


@contextmanager
def inside(where: str) -> typing.Iterator[None]:
    """Puts before a message what it is about."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def fail(place: str, what: str) -> NoReturn:
    raise UsageError(f"{place}: {what}")


def unknown(place: object, key: object, known: Iterable[str]) -> NoReturn:
    names = sorted(known)
    close = similar(key, names)
    raise UsageError(f"{short(str(place))}: unknown key{close or '; known are ' + ', '.join(names)}")


def similar(word: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word)[:100], list(known), 1) if isinstance(word, str) else []
    return f"; did you mean {close[0]}?" if close else ""


def limits(raw: Any, allowed: Range) -> str:
    """The range in words; the upper end that all numbers share is only named to who passes it."""
    return f" up to {MOST:g}" if type(raw) in (int, float) and raw > MOST else str(allowed)


def shown(value: object) -> str:
    """What was found, in TOML's words and short."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) > MOST:
        return "one that large"
    if isinstance(value, (int, float, str)):
        return short(repr(value))
    names = {Mapping: "a table", Sequence: "a list"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), type(value).__name__)


def short(text: str, most: int = 100) -> str:
    return text if len(text) <= most else text[:most] + "…"
