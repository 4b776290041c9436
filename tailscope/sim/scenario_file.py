"""Reads a scenario from TOML. The dataclasses of `scenario` say which keys there are, and of which types.

What a type cannot say stands in `scenario_limits`, of single keys, and in `scenario_checks`, of several.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from tailscope.errors import UsageError
from tailscope.safe import printable
from tailscope.sim.scenario import Cause, Fault, Load, Scenario, Sizes
from tailscope.sim.scenario_checks import check
from tailscope.sim.scenario_limits import FROM_1, RANGES, READ_BY, Range
from tailscope.sim.scenario_words import fail, inside, limits, short, shown, similar, unknown

#: "class:<512", "rank:1".
PARTY = re.compile(r"[a-z]+:.+")


def load(path: Path) -> Scenario:
    """Read a scenario file; one that gives no name is called after its file. Raises UsageError naming file and key."""
    try:
        if not path.is_file() and path.exists():
            raise UsageError(f"{path}: not a file; a scenario is one TOML file")
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot read the scenario: {error.strerror}") from error
    # ValueError: not TOML, not UTF-8, or a number of more digits than Python reads.
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error
    scenario = parse(document, path.parent, str(path))
    return scenario if "name" in document else replace(scenario, name=printable(path.stem, 100))


def parse(document: Mapping[str, Any], base: Path, where: str) -> Scenario:
    """The scenario of a TOML document. `base`: the folder of its traces; `where`: what messages call the document."""
    with inside(where):
        values = {}
        known = _document_keys()
        for key, raw in document.items():
            if key not in known:
                unknown(key, key, known)
            values[known[key]] = _top(known[key], key, raw)
        if not values.get("loads"):
            fail("[[load]]", "is missing: a world needs at least one kind of clients")
        values["loads"] = tuple(_with_trace(i, load, base) for i, load in enumerate(values["loads"], 1))
        values["faults"] = _named(values.get("faults", ()))
        scenario = Scenario(**values)
        check(scenario)
        for i, cause in enumerate(scenario.causes, 1):
            _check_cause(scenario, cause, f"[[cause]] {i}")
        return scenario


def without(scenario: Scenario, cause: Cause | Mapping[str, Any]) -> Scenario:
    """The same world, same seed, with a cause's `without` applied: loads and faults left out, settings replaced.

    The result no longer lists the cause. Raises UsageError if the overrides do not fit the scenario.
    """
    overrides = cause.without if isinstance(cause, Cause) else cause
    changed = _apply(scenario, overrides, "without")
    with inside("without"):
        check(changed)
    return replace(changed, causes=tuple(c for c in changed.causes if c is not cause))


# -- from TOML's values to the fields' types --------------------------------------------------------------


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _element(hint: Any) -> Any:
    """The dataclass of an array of tables, such as `tuple[Load, ...]`; None for other types."""
    arguments = typing.get_args(hint)
    return arguments[0] if typing.get_origin(hint) is tuple and is_dataclass(arguments[0]) else None


@functools.cache
def _document_keys() -> dict[str, str]:
    """Key of the document -> field: an array of tables is called after one of them, [[load]]."""
    return {
        field.removesuffix("s") if _element(hint) else field: field
        for field, hint in _hints(Scenario).items()
    }


def _top(field: str, key: str, raw: Any) -> Any:
    hint = _hints(Scenario)[field]
    kind = _element(hint)
    if kind is None:
        return _value(hint, raw, f"[{key}]" if is_dataclass(hint) else key, _range(Scenario, field))
    if not isinstance(raw, list) or not all(isinstance(entry, Mapping) for entry in raw):
        fail(key, f"write it as [[{key}]], not as {shown(raw)}")
    return tuple(_record(kind, entry, f"[[{key}]] {i}") for i, entry in enumerate(raw, 1))


def _record(kind: type, raw: Any, place: str) -> Any:
    values = _fields(kind, raw, place)
    for field in fields(kind):
        if field.default is MISSING and field.default_factory is MISSING and field.name not in values:
            fail(f"{place} {field.name}", "is missing")
    record = kind(**values)
    if kind in READ_BY:
        by, keys = READ_BY[kind]
        chosen = getattr(record, by)
        for key in values:
            if chosen not in keys.get(key, (chosen,)):
                fail(f"{place} {key}", f"is for {by} = {' or '.join(keys[key])} only, not {chosen}")
    return record


def _fields(kind: type, raw: Any, place: str) -> dict[str, Any]:
    """The given fields of a dataclass, each of its type and in its range."""
    if not isinstance(raw, Mapping):
        fail(place, f"must be a table, not {shown(raw)}")
    hints = _hints(kind)
    for key in raw:
        if key not in hints:
            unknown(f"{place} {short(str(key))}", key, hints)
    return {key: _value(hints[key], value, f"{place} {key}", _range(kind, key)) for key, value in raw.items()}


def _range(kind: type, field: str) -> Range:
    return RANGES.get(f"{kind.__name__}.{field}", Range())


def _value(hint: Any, raw: Any, place: str, allowed: Range) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        # TOML has no null: a key that is left out is None.
        (hint,) = (kind for kind in arguments if kind is not type(None))
        return _value(hint, raw, place, allowed)
    if origin is typing.Literal:
        if not isinstance(raw, str) or raw not in arguments:
            fail(place, f"must be one of {', '.join(arguments)}, not {shown(raw)}{similar(raw, arguments)}")
        return raw
    if origin is tuple:
        return _tuple(arguments, raw, place, allowed)
    if hint is Sizes:
        return _sizes(raw, place)
    if origin is dict:
        return dict(raw) if isinstance(raw, Mapping) else fail(place, f"must be a table, not {shown(raw)}")
    if is_dataclass(hint):
        return _record(typing.cast(type, hint), raw, place)
    return _scalar(hint, raw, place, allowed)


def _scalar(hint: Any, raw: Any, place: str, allowed: Range) -> Any:
    if hint is bool:
        return raw if isinstance(raw, bool) else fail(place, f"must be true or false, not {shown(raw)}")
    if hint is str:
        # Names come back in logs and reports, so they are of one line.
        if not isinstance(raw, str) or not 0 < len(raw) <= 1000 or not raw.isprintable():
            fail(place, f"must be a text of one line, not {shown(raw)}")
        return raw
    if hint is int:
        if type(raw) is not int or raw not in allowed:
            fail(place, f"must be a whole number{limits(raw, allowed)}, not {shown(raw)}")
        return raw
    if hint is float:
        if type(raw) not in (int, float) or raw not in allowed:
            fail(place, f"must be a number{limits(raw, allowed)}, not {shown(raw)}")
        return float(raw)
    raise TypeError(f"no reader for {hint}")


def _tuple(arguments: tuple[Any, ...], raw: Any, place: str, allowed: Range) -> tuple[Any, ...]:
    if not isinstance(raw, Sequence) or isinstance(raw, (str, bytes)):
        fail(place, f"must be a list, not {shown(raw)}")
    if arguments[-1] is Ellipsis:
        return tuple(_value(arguments[0], v, f"{place}[{i}]", allowed) for i, v in enumerate(raw, 1))
    if len(raw) != len(arguments):
        fail(place, f"must be a list of {len(arguments)}, not of {len(raw)}")
    return tuple(
        _value(hint, v, f"{place}[{i}]", allowed)
        for i, (hint, v) in enumerate(zip(arguments, raw, strict=True), 1)
    )


def _sizes(raw: Any, place: str) -> Sizes:
    if not isinstance(raw, Mapping):
        if type(raw) not in (int, float) or raw not in FROM_1:
            fail(
                place,
                f"must be a number{limits(raw, FROM_1)}, {{median = …}} or {{values = […]}}, not {shown(raw)}",
            )
        return Sizes(median=float(raw), most=max(Sizes.most, math.ceil(raw)))
    values = _fields(Sizes, raw, place)
    if "values" in values and (len(values) > 1 or not values["values"]):
        fail(place, "give `values` one or more sizes and no other key, or leave it out")
    sizes = Sizes(**values)
    if sizes.least > sizes.most:
        fail(place, f"`least`, {sizes.least}, is above `most`, {sizes.most}")
    return sizes


# -- names, traces, and worlds without a cause --------------------------------------------------------------


def _with_trace(number: int, load: Load, base: Path) -> Load:
    """The load with its trace's path as seen from here, not from the scenario file."""
    place = f"[[load]] {number} trace"
    if load.arrivals == "trace" and load.trace is None:
        fail(place, "is missing: arrivals = trace needs a file")
    if load.trace is None:
        return load
    path = base / load.trace
    try:
        found = path.is_file()
    except (OSError, ValueError):  # such as a name that is too long for the file system
        found = False
    if not found:
        fail(place, f"no file {short(str(path))}; paths are relative to the scenario file")
    return replace(load, trace=str(path))


def _named(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Faults without a name are called after their kind: pause, pause-2, …"""
    faults = tuple(faults)
    taken = {fault.name for fault in faults}
    named = []
    for fault in faults:
        name, number = fault.name or fault.kind, 1
        while not fault.name and name in taken:
            number += 1
            name = f"{fault.kind}-{number}"
        taken.add(name)
        named.append(replace(fault, name=name))
    return tuple(named)


def _check_cause(scenario: Scenario, cause: Cause, place: str) -> None:
    for party in filter(None, (cause.culprit, *cause.victims)):
        if not PARTY.fullmatch(party):
            fail(
                place,
                f"culprits and victims are written kind:id, as class:<512 or rank:1, not {shown(party)}",
            )
    changed = _apply(scenario, cause.without, f"{place} without")
    with inside(f"{place} without"):
        check(changed)


def _apply(scenario: Scenario, overrides: Mapping[str, Any], place: str) -> Scenario:
    tables = [field for field, hint in _hints(Scenario).items() if is_dataclass(hint)]
    changes: dict[str, Any] = {}
    for key, raw in overrides.items():
        if key in ("loads", "faults"):
            changes[key] = _left_out(getattr(scenario, key), raw, f"{place}.{key}")
        elif key in tables:
            table = getattr(scenario, key)
            changes[key] = replace(table, **_fields(type(table), raw, f"{place}.{key}"))
        else:
            unknown(f"{place}.{short(str(key))}", key, ["loads", "faults", *tables])
    if changes.get("loads") == ():
        fail(f"{place}.loads", "leaves no load in the world")
    return replace(scenario, **changes)


def _left_out(entries: tuple[Any, ...], raw: Any, place: str) -> tuple[Any, ...]:
    names = _tuple((str, Ellipsis), raw, place, Range())
    known = [entry.name for entry in entries]
    for name in names:
        if name not in known:
            fail(
                place,
                f"there is no {shown(name)}{similar(name, known)}; known are {', '.join(known) or 'none'}",
            )
    return tuple(entry for entry in entries if entry.name not in names)
