"""A mapping file: which columns of a table of requests say what, in which units. Every key is checked."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping as Keys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from tailscope.errors import UsageError

UNITS_NS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
#: Date and time of day; without an offset it is of the mapping's zone.
ISO = "iso8601"

INSTANTS = ("arrival", "intended", "queued", "scheduled", "first_token", "last_token", "finished")
DURATIONS = ("queue", "prefill", "decode", "ttft", "e2e", "kv_transfer")
NUMBERS = (
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "max_tokens",
    "preemptions",
    "priority",
    "engine",
)
TEXTS = ("id", "trace_id", "tenant", "class", "model", "adapter", "status", "instance", "path")
KEYS = INSTANTS + DURATIONS + NUMBERS + TEXTS

#: Unix times of telemetry lie between these, in seconds: from 2000 to 2103.
UNIX_S = (9.5e8, 4.2e9)

STATUSES = ("ok", "error", "timeout", "rejected", "aborted", "unfinished")
OBSERVERS = ("client", "gateway", "engine")
CLOCKS = ("wall", "monotonic")


@dataclass(frozen=True)
class Field:
    """Where one value comes from: `column`, in `unit` if it is a time; or the time from column `start` to `column`."""

    column: str
    unit: str = ""
    start: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,) if self.start is None else (self.start, self.column)


@dataclass(frozen=True)
class Mapping:
    """What the columns of a table of requests mean. `path` names the file it came from, for messages."""

    fields: Keys[str, Field]
    observer: str = "client"
    clock: str = "wall"
    zone: str | None = None
    instance: str | None = None
    #: Text in the status column (lower case) -> one of STATUSES.
    statuses: Keys[str, str] = field(default_factory=dict)
    path: str = "mapping"

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column it names, once, in the order of the file."""
        return tuple(dict.fromkeys(name for f in self.fields.values() for name in f.columns))


def load(path: Path) -> Mapping:
    """Read a mapping file. Raises UsageError naming file and key for anything that is not understood."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot read the mapping: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error
    try:
        return parse(raw, str(path))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def parse(raw: Keys[str, Any], path: str = "mapping") -> Mapping:
    """A mapping from its keys, as TOML gives them. Raises UsageError naming the key."""
    for key in raw:
        if key not in ("observer", "clock", "zone", "instance", "columns", "status"):
            hint = " under [columns]" if key in KEYS else ""
            raise UsageError(
                f"{key}: unknown key; known are clock, columns, instance, observer, status, zone"
                + (f"; {key} belongs{hint}" if hint else "")
            )
    observer = _one_of(raw, "observer", OBSERVERS, "client")
    clock = _one_of(raw, "clock", CLOCKS, "wall")
    zone = _text(raw, "zone")
    if zone is not None:
        _check_zone(zone)
    columns = raw.get("columns")
    if not isinstance(columns, dict) or not columns:
        raise UsageError("[columns] is missing: it says which column is what")
    fields = {key: _field(key, value) for key, value in columns.items()}
    if "path" in fields and "id" not in fields:
        raise UsageError("columns.path: needs columns.id, the X-Request-Id that the engine's id is made of")
    if "arrival" not in fields and not {"finished", "e2e"} <= fields.keys():
        raise UsageError("[columns] must have arrival, or both finished and e2e, from which it follows")
    instance = _text(raw, "instance")
    if instance is not None and "instance" in fields:
        raise UsageError("instance and columns.instance: give one of the two")
    statuses = _statuses(raw.get("status", {}))
    if statuses and "status" not in fields:
        raise UsageError("[status] needs columns.status, the column it explains")
    return Mapping(fields, observer, clock, zone, instance, statuses, path)


def unit_of(values: Sequence[str], stamped: bool = False) -> str | None:
    """The unit that makes Unix times of `values`: ISO for dates, "" for numbers that are none; None if nothing can be said."""
    if stamped:
        return ISO
    numbers = []
    dates = 0
    for value in values:
        try:
            numbers.append(float(value))
        except ValueError:
            dates += len(value) >= 10 and value[:4].isdigit() and value[4] in "-/"
    if dates and dates >= len(numbers):
        return ISO
    numbers = [n for n in numbers if n == n and abs(n) != float("inf")]
    if not numbers:
        return None
    middle = median(numbers)
    for unit, scale in UNITS_NS.items():
        if UNIX_S[0] <= middle * scale / 1e9 < UNIX_S[1]:
            return unit
    return ""


def _field(key: str, value: Any) -> Field:
    place = f"columns.{key}"
    if key not in KEYS:
        raise UsageError(f"{place}: unknown key; known are {', '.join(sorted(KEYS))}")
    timed = key in INSTANTS or key in DURATIONS
    if isinstance(value, str) and value:
        if timed:
            raise UsageError(
                f'{place}: needs a unit: write {{ column = "{value}", unit = "…" }} with {_units(key)}'
            )
        return Field(value)
    if not isinstance(value, dict):
        raise UsageError(f"{place}: must be the name of a column" + (" with a unit" if timed else ""))
    for name in value:
        if name not in ("column", "unit", "from", "to"):
            raise UsageError(f"{place}.{name}: unknown key; known are column, from, to, unit")
    unit = value.get("unit", "")
    between = "from" in value or "to" in value
    if between and (key not in DURATIONS or "column" in value or not {"from", "to"} <= value.keys()):
        raise UsageError(f"{place}: only a duration can be the time from one column to another, both named")
    names = [value.get(name) for name in (("from", "to") if between else ("column",))]
    if not all(isinstance(name, str) and name for name in names):
        raise UsageError(
            f"{place}: {' and '.join(('from', 'to') if between else ('column',))} must name a column"
        )
    if timed and unit == "":
        raise UsageError(f"{place}: needs a unit: {_units(key, between)}")
    if not timed and "unit" in value:
        raise UsageError(f"{place}: has no unit")
    if timed and unit not in UNITS_NS and not (unit == ISO and (key in INSTANTS or between)):
        raise UsageError(f"{place}: unit {unit!r} is unknown; use {_units(key, between)}")
    return Field(str(names[-1]), unit, str(names[0]) if between else None)


def _units(key: str, between: bool = False) -> str:
    return "s, ms, us or ns" + (f", or {ISO} for a date and time" if key in INSTANTS or between else "")


def _statuses(raw: Any) -> dict[str, str]:
    """`ok = ["200", "success"]`, turned round."""
    if not isinstance(raw, dict):
        raise UsageError('[status]: must be a table such as ok = ["200", "success"]')
    turned: dict[str, str] = {}
    for status, texts in raw.items():
        if status not in STATUSES:
            raise UsageError(f"status.{status}: unknown; use one of {', '.join(STATUSES)}")
        listed = texts if isinstance(texts, list) else [texts]
        for value in listed:
            if isinstance(value, bool) or not isinstance(value, (str, int)):
                raise UsageError(f"status.{status}: must be texts of the column, such as {status} = ['200']")
            if turned.setdefault(str(value).strip().lower(), status) != status:
                raise UsageError(f"status.{status}: {value!r} has two meanings")
    return turned


def _one_of(raw: Keys[str, Any], key: str, known: tuple[str, ...], default: str) -> str:
    value = raw.get(key, default)
    if value not in known:
        raise UsageError(f"{key}: {value!r} is unknown; use one of {', '.join(known)}")
    return str(value)


def _text(raw: Keys[str, Any], key: str) -> str | None:
    value = raw.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise UsageError(f"{key}: must be a text")
    return value


def _check_zone(zone: str) -> None:
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise UsageError(f"zone: {zone!r}: no such time zone; write for example Europe/Paris") from None
