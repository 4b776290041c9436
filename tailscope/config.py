"""`tailscope.toml`: one file, read by all commands, every key checked."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from tailscope.errors import UsageError

FILE_NAME = "tailscope.toml"
T = TypeVar("T")

#: Columns a `[[class]]` may test, with their kind of test.
CLASS_RANGES = ("prompt_tokens", "output_tokens", "max_tokens", "priority")
CLASS_VALUES = ("tenant", "model", "adapter", "instance")

SLO_KEYS = {
    f"{metric}_{quantile}_s": (metric.upper(), quantile)
    for metric in ("ttft", "itl", "tpot", "e2e")
    for quantile in ("p50", "p95", "p99")
}


@dataclass(frozen=True)
class RequestClass:
    """A named set of requests: half-open ranges [min, max) and exact values; all must hold."""

    name: str
    ranges: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


#: Used when the configuration names no class. `reasoning` comes first: first match wins.
DEFAULT_CLASSES: tuple[RequestClass, ...] = (
    RequestClass("reasoning", {"output_tokens": (2048, None)}),
    RequestClass("<512", {"prompt_tokens": (None, 512)}),
    RequestClass("<2k", {"prompt_tokens": (512, 2048)}),
    RequestClass("<8k", {"prompt_tokens": (2048, 8192)}),
    RequestClass("<32k", {"prompt_tokens": (8192, 32768)}),
    RequestClass("≥32k", {"prompt_tokens": (32768, None)}),
)


@dataclass(frozen=True)
class SourceRule:
    """`[[source]]`: files whose path matches the glob `path` belong to `instance`; profiles among them are of `rank`."""

    path: str
    instance: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Slo:
    """A latency objective: `quantile` of `metric` for the class stays below `limit_s`."""

    klass: str
    metric: str
    quantile: str
    limit_s: float


@dataclass(frozen=True)
class Attributes:
    """Names of the span attributes that carry what vLLM's own spans do not."""

    tenant: str | None = None
    priority: str | None = None
    klass: str | None = None
    model: str | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class Config:
    classes: tuple[RequestClass, ...] = DEFAULT_CLASSES
    slos: tuple[Slo, ...] = ()
    sources: tuple[SourceRule, ...] = ()
    attributes: Attributes = field(default_factory=Attributes)


def load(path: Path | None) -> Config:
    """Read a configuration file; without a path, `tailscope.toml` here if there is one, else defaults.

    Raises UsageError naming file and key for anything that is not understood.
    """
    if path is None:
        path = Path(FILE_NAME)
        if not path.is_file():
            return Config()
    return read(path, parse)


def read(path: Path, parse: Callable[[Mapping[str, Any]], T]) -> T:
    """What `parse` makes of a TOML file. Raises UsageError naming the file."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot read the configuration: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error
    try:
        return parse(raw)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def parse(raw: Mapping[str, Any]) -> Config:
    # What is in [serve] is the business of `tailscope serve`.
    known_keys(raw, {"class", "slo", "source", "attributes", "serve"}, "")
    classes = tuple(_request_class(entry, i) for i, entry in enumerate(tables_at(raw, "class")))
    names = [c.name for c in classes]
    if len(set(names)) < len(names):
        raise UsageError("[[class]]: two classes have the same name")
    slos: list[Slo] = []
    for klass, limits in table_at(raw, "slo").items():
        if not isinstance(limits, dict):
            raise UsageError(f"[slo.{klass}]: must be a table such as {{ ttft_p99_s = 2.0 }}")
        slos.extend(_slo(str(klass), key, limit) for key, limit in limits.items())
    sources = []
    for i, entry in enumerate(tables_at(raw, "source")):
        place = f"[[source]] {i + 1}"
        known_keys(entry, {"path", "instance", "rank"}, place)
        rank = entry.get("rank")
        if rank is not None and (type(rank) is not int or rank < 0):
            raise UsageError(f"{place} rank: must be a number from 0")
        instance = text_at(entry, "instance", place) if rank is None or "instance" in entry else None
        sources.append(SourceRule(text_at(entry, "path", place), instance, rank))
    # `class` in the file is `klass` in Python, where the word is taken.
    attributes = dict(table_at(raw, "attributes"))
    known_keys(attributes, {f.name for f in fields(Attributes)} - {"klass"} | {"class"}, "[attributes]")
    for key, value in attributes.items():
        if not isinstance(value, str) or not value:
            raise UsageError(f"[attributes] {key}: must be the name of a span attribute")
    if "class" in attributes:
        attributes["klass"] = attributes.pop("class")
    return Config(classes or DEFAULT_CLASSES, tuple(slos), tuple(sources), Attributes(**attributes))


def parse_slo(text: str) -> Slo:
    """`CLASS:ttft_p99_s=2.0`, as `--slo` takes it. Raises UsageError."""
    klass, colon, rest = text.rpartition(":")
    key, equals, limit = rest.partition("=")
    if not (colon and equals and klass):
        raise UsageError(f"--slo {text!r}: write CLASS:METRIC=SECONDS, for example '<512:ttft_p99_s=2.0'")
    try:
        return _slo(klass, key.strip(), float(limit))
    except ValueError:
        raise UsageError(f"--slo {text!r}: {limit!r} is not a number of seconds") from None


def _slo(klass: str, key: str, limit: Any) -> Slo:
    if key not in SLO_KEYS:
        raise UsageError(f"[slo.{klass}] {key}: unknown; use one of {', '.join(sorted(SLO_KEYS))}")
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit <= sys.float_info.max:
        raise UsageError(f"[slo.{klass}] {key}: must be a positive number of seconds")
    metric, quantile = SLO_KEYS[key]
    return Slo(klass, metric, quantile, float(limit))


def _request_class(entry: Mapping[str, Any], index: int) -> RequestClass:
    place = f"[[class]] {index + 1}"
    known_keys(entry, {"name", "where"}, place)
    name = text_at(entry, "name", place)
    ranges: dict[str, tuple[int | None, int | None]] = {}
    values: dict[str, tuple[str, ...]] = {}
    for key, test in table_at(entry, "where", place).items():
        if key in CLASS_RANGES:
            ranges[key] = _range(test, f"{place} where.{key}")
        elif key in CLASS_VALUES:
            wanted = [test] if isinstance(test, str) else test
            if not isinstance(wanted, list) or not wanted or not all(isinstance(v, str) for v in wanted):
                raise UsageError(f"{place} where.{key}: must be a string or a list of strings")
            values[key] = tuple(wanted)
        else:
            known = ", ".join(CLASS_RANGES + CLASS_VALUES)
            raise UsageError(f"{place} where.{key}: unknown; use one of {known}")
    return RequestClass(name, ranges, values)


def _range(test: Any, place: str) -> tuple[int | None, int | None]:
    if (
        not isinstance(test, list)
        or not 1 <= len(test) <= 2
        or not all(isinstance(v, int) and not isinstance(v, bool) for v in test)
    ):
        raise UsageError(f"{place}: must be [min] or [min, max], whole numbers; max is exclusive")
    low, high = test[0], test[1] if len(test) == 2 else None
    if high is not None and high <= low:
        raise UsageError(f"{place}: max must be above min")
    return low, high


def known_keys(entry: Mapping[str, Any], keys: set[str], place: str) -> None:
    for key in entry:
        if key not in keys:
            raise UsageError(f"{place} {key}: unknown key; known are {', '.join(sorted(keys))}".strip())


def table_at(raw: Mapping[str, Any], key: str, place: str = "") -> Mapping[str, Any]:
    value = raw.get(key, {})
    if not isinstance(value, dict):
        raise UsageError(f"{place} {key}: must be a table".strip())
    return value


def tables_at(raw: Mapping[str, Any], key: str, above: str = "") -> list[Mapping[str, Any]]:
    """The tables of an array; `above` is the table that has it."""
    value = raw.get(key, [])
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise UsageError(f"{above}{key}: write it as [[{above}{key}]]")
    return value


def text_at(entry: Mapping[str, Any], key: str, place: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise UsageError(f"{place} {key}: must be a string")
    return value
