"""Reads a scenario from TOML. The dataclasses of `scenario` say which keys there are, and of which types.

What stands here is only what a type cannot say: the numbers' ranges, which keys go together, and what must fit.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from tailscope.errors import UsageError
from tailscope.safe import printable
from tailscope.sim.ranks import places_of
from tailscope.sim.scenario import Cause, Fault, Load, Scenario, Sizes, end_s

#: A load that would send more is a mistake of units; it would not fit in memory either.
MOST_REQUESTS = 5_000_000
#: Ranks times layers of an instance: each has numbers of its own in every step.
MOST_PIECES = 16_384
#: Beyond it no count, size or time of a world means anything, and sums of them stay exact.
MOST = 1e12
WEEK_S = 604_800.0

#: "class:<512", "rank:1".
PARTY = re.compile(r"[a-z]+:.+")


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both inclusive; `above`: without `low` itself. As text it follows a noun."""

    low: float = 0.0
    high: float = MOST
    above: bool = False

    def __contains__(self, value: object) -> bool:
        number = typing.cast(float, value)
        return (self.low < number if self.above else self.low <= number) and number <= self.high

    def __str__(self) -> str:
        low = "" if self.low == -MOST else f" {'above' if self.above else 'from'} {self.low:g}"
        return low if self.high == MOST else f"{low} to {self.high:g}"


ABOVE_0, FROM_1, SHARE = Range(above=True), Range(1), Range(0, 1)
#: Such as clocks that may be behind, priorities below the usual one.
SIGNED = Range(-MOST)
#: What is laid out one by one in memory.
FEW, MANY = Range(1, 1024), Range(1, 1_000_000)

#: Numbers of other fields are 0 or more.
RANGES: dict[str, Range] = {
    "Scenario.duration_s": Range(0, WEEK_S, above=True),
    "Sizes.median": ABOVE_0,
    "Sizes.sigma": Range(0, 5),
    "Sizes.least": FROM_1,
    "Sizes.most": FROM_1,
    "Sizes.values": FROM_1,
    "Load.rate": ABOVE_0,
    # Above it the mean rate would be that of bursts too rare to ever be seen.
    "Load.burst_sigma": Range(0, 3),
    "Load.burst_s": Range(0.01),
    "Load.users": MANY,
    "Load.speed": ABOVE_0,
    "Load.prompts": FROM_1,
    "Load.outputs": FROM_1,
    "Load.requests": FROM_1,
    "Load.prefixes": MANY,
    "Load.priority": SIGNED,
    "Load.timeout_s": ABOVE_0,
    "Load.abort_share": SHARE,
    "Load.n": FEW,
    "Engine.replicas": FEW,
    "Engine.data_parallel": FEW,
    "Engine.max_num_batched_tokens": FROM_1,
    "Engine.max_num_seqs": FROM_1,
    "Engine.block_size": FROM_1,
    "Engine.kv_blocks": FROM_1,
    "Engine.max_model_len": Range(2, 10_000_000),
    "Engine.kv_transfer_latency_s": Range(0, 3_600),
    "Engine.watermark": SHARE,
    "Engine.prefill_replicas": Range(0, 1024),
    "Engine.kv_transfer_tokens_per_s": Range(1),
    # Steps that cost nothing would never let time pass.
    "Cost.step": ABOVE_0,
    "Cost.noise": Range(0, 2),
    "Cost.heavy_share": SHARE,
    # A Pareto factor of alpha 1 or less has no mean.
    "Cost.heavy_alpha": Range(1, above=True),
    "Ranks.tensor_parallel": FEW,
    "Ranks.layers": Range(1, 256),
    "Ranks.experts": Range(1, 65_536),
    "Ranks.topk": FROM_1,
    "Ranks.hot": SHARE,
    "Ranks.attention_share": SHARE,
    "Ranks.spread": Range(0, 2),
    "Ranks.hosts": FEW,
    "Ranks.offset_s": Range(-1e9, 1e9),
    "Ranks.drift_ppm": Range(-1e5, 1e5),
    "Ranks.bandwidth_gb_s": Range(0, 1e6),
    "Ranks.leave_bias_s": Range(0, 1),
    "Ranks.follow": SHARE,
    "Ranks.stamp_jitter_s": Range(0, 1),
    # Its three numbers are a host, an instant and a jump, which may be back.
    "Ranks.clock_steps": Range(-1e9, 1e9),
    "Gateway.max_in_flight": FROM_1,
    "Gateway.delay_s": Range(0, 3_600),
    "Fault.length_s": ABOVE_0,
    "Fault.every_s": Range(0.01),
    "Fault.factor": ABOVE_0,
    "Fault.often": Range(0, 1, above=True),
    "Fault.per_request_s": Range(0, 1),
    "Telemetry.profile_dropped": Range(0, 0.9),
    "Telemetry.scrape_s": Range(0.01),
    # Thirty years to either side are still times that a clock can show.
    "Telemetry.client_offset_s": Range(-1e9, 1e9),
    "Telemetry.network_s": Range(0, 3_600),
}

#: Keys that only some kinds read: with another kind they would be ignored, so they are refused.
READ_BY: dict[type, tuple[str, dict[str, tuple[str, ...]]]] = {
    Load: (
        "arrivals",
        {
            **dict.fromkeys(("burst_sigma", "burst_s", "common_load"), ("bursty",)),
            **dict.fromkeys(("users", "think_s"), ("closed",)),
            **dict.fromkeys(("trace", "speed"), ("trace",)),
            **dict.fromkeys(("times_s", "prompts", "outputs"), ("at",)),
            **dict.fromkeys(
                ("prompt_tokens", "output_tokens"), ("poisson", "bursty", "regular", "closed", "at")
            ),
            "rate": ("poisson", "bursty", "regular"),
            "n": ("poisson", "bursty", "regular", "trace", "at"),
        },
    ),
    Fault: (
        "kind",
        {
            **dict.fromkeys(("rank", "phase", "layers", "often"), ("slow-rank", "slow-link", "host-slow")),
            **dict.fromkeys(("side", "peer"), ("slow-link",)),
            **dict.fromkeys(("all_ranks", "per_request_s"), ("host-slow",)),
            "every_s": ("pause", "host-slow"),
            "reason": ("pause", "first-shape"),
            "length_s": ("pause", "frontend", "host-slow", "first-shape"),
            "factor": ("slow-rank", "slow-link", "slow-replica"),
        },
    ),
}


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
    with _inside(where):
        values = {}
        known = _document_keys()
        for key, raw in document.items():
            if key not in known:
                _unknown(key, key, known)
            values[known[key]] = _top(known[key], key, raw)
        if not values.get("loads"):
            _fail("[[load]]", "is missing: a world needs at least one kind of clients")
        values["loads"] = tuple(_with_trace(i, load, base) for i, load in enumerate(values["loads"], 1))
        values["faults"] = _named(values.get("faults", ()))
        scenario = Scenario(**values)
        _check(scenario)
        for i, cause in enumerate(scenario.causes, 1):
            _check_cause(scenario, cause, f"[[cause]] {i}")
        return scenario


def without(scenario: Scenario, cause: Cause | Mapping[str, Any]) -> Scenario:
    """The same world, same seed, with a cause's `without` applied: loads and faults left out, settings replaced.

    The result no longer lists the cause. Raises UsageError if the overrides do not fit the scenario.
    """
    overrides = cause.without if isinstance(cause, Cause) else cause
    changed = _apply(scenario, overrides, "without")
    with _inside("without"):
        _check(changed)
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
        _fail(key, f"write it as [[{key}]], not as {_shown(raw)}")
    return tuple(_record(kind, entry, f"[[{key}]] {i}") for i, entry in enumerate(raw, 1))


def _record(kind: type, raw: Any, place: str) -> Any:
    values = _fields(kind, raw, place)
    for field in fields(kind):
        if field.default is MISSING and field.default_factory is MISSING and field.name not in values:
            _fail(f"{place} {field.name}", "is missing")
    record = kind(**values)
    if kind in READ_BY:
        by, keys = READ_BY[kind]
        chosen = getattr(record, by)
        for key in values:
            if chosen not in keys.get(key, (chosen,)):
                _fail(f"{place} {key}", f"is for {by} = {' or '.join(keys[key])} only, not {chosen}")
    return record


def _fields(kind: type, raw: Any, place: str) -> dict[str, Any]:
    """The given fields of a dataclass, each of its type and in its range."""
    if not isinstance(raw, Mapping):
        _fail(place, f"must be a table, not {_shown(raw)}")
    hints = _hints(kind)
    for key in raw:
        if key not in hints:
            _unknown(f"{place} {_short(str(key))}", key, hints)
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
            _fail(
                place, f"must be one of {', '.join(arguments)}, not {_shown(raw)}{_similar(raw, arguments)}"
            )
        return raw
    if origin is tuple:
        return _tuple(arguments, raw, place, allowed)
    if hint is Sizes:
        return _sizes(raw, place)
    if origin is dict:
        return dict(raw) if isinstance(raw, Mapping) else _fail(place, f"must be a table, not {_shown(raw)}")
    if is_dataclass(hint):
        return _record(typing.cast(type, hint), raw, place)
    return _scalar(hint, raw, place, allowed)


def _scalar(hint: Any, raw: Any, place: str, allowed: Range) -> Any:
    if hint is bool:
        return raw if isinstance(raw, bool) else _fail(place, f"must be true or false, not {_shown(raw)}")
    if hint is str:
        # Names come back in logs and reports, so they are of one line.
        if not isinstance(raw, str) or not 0 < len(raw) <= 1000 or not raw.isprintable():
            _fail(place, f"must be a text of one line, not {_shown(raw)}")
        return raw
    if hint is int:
        if type(raw) is not int or raw not in allowed:
            _fail(place, f"must be a whole number{_limits(raw, allowed)}, not {_shown(raw)}")
        return raw
    if hint is float:
        if type(raw) not in (int, float) or raw not in allowed:
            _fail(place, f"must be a number{_limits(raw, allowed)}, not {_shown(raw)}")
        return float(raw)
    raise TypeError(f"no reader for {hint}")


def _tuple(arguments: tuple[Any, ...], raw: Any, place: str, allowed: Range) -> tuple[Any, ...]:
    if not isinstance(raw, Sequence) or isinstance(raw, (str, bytes)):
        _fail(place, f"must be a list, not {_shown(raw)}")
    if arguments[-1] is Ellipsis:
        return tuple(_value(arguments[0], v, f"{place}[{i}]", allowed) for i, v in enumerate(raw, 1))
    if len(raw) != len(arguments):
        _fail(place, f"must be a list of {len(arguments)}, not of {len(raw)}")
    return tuple(
        _value(hint, v, f"{place}[{i}]", allowed)
        for i, (hint, v) in enumerate(zip(arguments, raw, strict=True), 1)
    )


def _sizes(raw: Any, place: str) -> Sizes:
    if not isinstance(raw, Mapping):
        if type(raw) not in (int, float) or raw not in FROM_1:
            _fail(
                place,
                f"must be a number{_limits(raw, FROM_1)}, {{median = …}} or {{values = […]}}, not {_shown(raw)}",
            )
        return Sizes(median=float(raw), most=max(Sizes.most, math.ceil(raw)))
    values = _fields(Sizes, raw, place)
    if "values" in values and (len(values) > 1 or not values["values"]):
        _fail(place, "give `values` one or more sizes and no other key, or leave it out")
    sizes = Sizes(**values)
    if sizes.least > sizes.most:
        _fail(place, f"`least`, {sizes.least}, is above `most`, {sizes.most}")
    return sizes


# -- what must fit together -------------------------------------------------------------------------------


def _with_trace(number: int, load: Load, base: Path) -> Load:
    """The load with its trace's path as seen from here, not from the scenario file."""
    place = f"[[load]] {number} trace"
    if load.arrivals == "trace" and load.trace is None:
        _fail(place, "is missing: arrivals = trace needs a file")
    if load.trace is None:
        return load
    path = base / load.trace
    try:
        found = path.is_file()
    except (OSError, ValueError):  # such as a name that is too long for the file system
        found = False
    if not found:
        _fail(place, f"no file {_short(str(path))}; paths are relative to the scenario file")
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


def _check(scenario: Scenario) -> None:
    """Raises UsageError where fields that are right by themselves do not go together."""
    _check_engine(scenario)
    _check_ranks(scenario)
    _unique("[[load]]", [load.name for load in scenario.loads])
    _unique("[[fault]]", [fault.name for fault in scenario.faults])
    for i, load in enumerate(scenario.loads, 1):
        _check_load(scenario, load, f"[[load]] {i}")
    for i, fault in enumerate(scenario.faults, 1):
        _check_fault(scenario, fault, f"[[fault]] {i}")
    for i, (from_s, length_s) in enumerate(scenario.telemetry.profile, 1):
        if not length_s:
            _fail(f"[telemetry] profile[{i}]", "is [from, seconds], and must last above 0 seconds")
        if from_s + length_s > 2 * WEEK_S:
            _fail(f"[telemetry] profile[{i}]", f"ends after {2 * WEEK_S:,.0f} s, when no world lasts")


def _check_engine(scenario: Scenario) -> None:
    engine = scenario.engine
    # As vLLM counts: one block of the cache is its null block, and the watermark's share stays free.
    usable = (engine.kv_blocks - 1) - int(engine.watermark * (engine.kv_blocks - 1))
    needed = -(-engine.max_model_len // engine.block_size)
    if usable < needed:
        _fail(
            "[engine] kv_blocks",
            f"{usable} usable blocks cannot hold one request of max_model_len = {engine.max_model_len} tokens, "
            f"which takes {needed} of {engine.block_size}; give more blocks or lower max_model_len",
        )
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        _fail(
            "[engine] max_num_batched_tokens",
            f"must be max_num_seqs, {engine.max_num_seqs}, or more, not {engine.max_num_batched_tokens}",
        )


def _rank_count(scenario: Scenario) -> int:
    """Ranks of one instance."""
    return scenario.ranks.tensor_parallel * scenario.engine.data_parallel


def _check_ranks(scenario: Scenario) -> None:
    ranks, engine, count = scenario.ranks, scenario.engine, _rank_count(scenario)
    if count * ranks.layers > MOST_PIECES:
        _fail(
            "[ranks]",
            f"{count} ranks of {ranks.layers} layers are more than {MOST_PIECES} pieces of work in a step",
        )
    if ranks.topk > ranks.experts:
        _fail("[ranks] topk", f"must be at most experts, {ranks.experts}, not {ranks.topk}")
    if scenario.engine.moe and ranks.experts < count:
        _fail("[ranks] experts", f"must be at least the number of ranks, {count}, not {ranks.experts}")
    if ranks.tensor_parallel > 1 and engine.data_parallel > 1 and not scenario.engine.moe:
        _fail(
            "[engine] data_parallel",
            "engines without experts do not wait for each other; set moe = true, or write them as replicas",
        )
    if ranks.hosts > count:
        _fail("[ranks] hosts", f"must be at most the number of ranks, {count}, not {ranks.hosts}")
    for key in ("offset_s", "drift_ppm", "leave_bias_s"):
        if len(getattr(ranks, key)) > count:
            _fail(f"[ranks] {key}", f"has {len(getattr(ranks, key))} entries, but there are {count} ranks")
    for i, (host, at_s, _) in enumerate(ranks.clock_steps, 1):
        if not 0 <= host < ranks.hosts or at_s < 0:
            _fail(
                f"[ranks] clock_steps[{i}]",
                f"is [host, second, jump]: hosts are 0 to {ranks.hosts - 1}, seconds 0 or more",
            )
    if ranks.exchange == "all-to-all" and not engine.moe:
        _fail("[ranks] exchange", "all-to-all is between experts; set moe = true in [engine]")
    for rank in scenario.telemetry.profile_missing:
        if rank >= count:
            _fail(
                "[telemetry] profile_missing", f"there is no rank {rank}; the last of {count} is {count - 1}"
            )


def _check_load(scenario: Scenario, load: Load, place: str) -> None:
    end = end_s(load, scenario.duration_s)
    if load.from_s >= end:
        _fail(f"{place} from_s", f"{load.from_s:g} s is not before its end, {end:g} s: it would never send")
    if load.arrivals == "at" and not load.times_s:
        _fail(f"{place} times_s", "is missing: arrivals = at needs the instants")
    if load.times_s and not any(load.from_s <= time < end for time in load.times_s):
        _fail(f"{place} times_s", f"none is from {load.from_s:g} s to before {end:g} s: it would never send")
    for key in ("prompts", "outputs"):
        given = len(getattr(load, key))
        if given not in (0, len(load.times_s)):
            _fail(f"{place} {key}", f"has {given} entries, but times_s has {len(load.times_s)}")
    if (
        load.arrivals in ("poisson", "bursty", "regular")
        and load.n * load.rate * (end - load.from_s) > MOST_REQUESTS
    ):
        _fail(f"{place} rate", f"gives more than {MOST_REQUESTS} requests; lower it, or duration_s")
    # The process is laid out over the whole world in parts of burst_s.
    if load.arrivals == "bursty" and scenario.duration_s / load.burst_s * 20 > MOST_REQUESTS:
        _fail(f"{place} burst_s", f"{load.burst_s:g} s is too short for {scenario.duration_s:g} s of bursts")
    for other in scenario.loads:
        if load.common_load and other.common_load == load.common_load and other.burst_s != load.burst_s:
            _fail(
                f"{place} burst_s",
                f"must be one in all loads of common_load = {load.common_load}: {load.burst_s:g} or {other.burst_s:g}",
            )


def _check_fault(scenario: Scenario, fault: Fault, place: str) -> None:
    engine = scenario.engine
    if fault.to_s is not None and fault.to_s <= fault.from_s:
        _fail(f"{place} to_s", f"must be above from_s, {fault.from_s:g}, not {fault.to_s:g}")
    if fault.replica >= engine.replicas + engine.prefill_replicas:
        _fail(
            f"{place} replica",
            f"there is no replica {fault.replica}; the last is {engine.replicas + engine.prefill_replicas - 1}",
        )
    if fault.kind in ("slow-rank", "slow-link", "host-slow"):
        _check_rank_fault(scenario, fault, place)
    if fault.every_s is not None and fault.every_s <= fault.length_s:
        _fail(f"{place} every_s", f"must be above length_s, {fault.length_s:g}, not {fault.every_s:g}")


def _check_rank_fault(scenario: Scenario, fault: Fault, place: str) -> None:
    ranks, count = scenario.ranks, _rank_count(scenario)
    if ranks.tensor_parallel == 1 and not (scenario.engine.moe and count > 1):
        _fail(
            f"{place} kind",
            f"{fault.kind} needs ranks that wait for each other: tensor_parallel above 1, or data_parallel with moe",
        )
    if fault.rank >= count:
        _fail(f"{place} rank", f"there is no rank {fault.rank}; the last of {count} is {count - 1}")
    if fault.peer is not None or fault.side == "destination":
        key = "side" if fault.peer is None else "peer"
        if ranks.exchange != "all-to-all":
            _fail(f"{place} {key}", "is of exchange = all-to-all: a ring is slow for all of its ranks")
        if fault.peer is not None and (fault.peer >= count or fault.peer == fault.rank):
            _fail(f"{place} peer", f"must be another rank than {fault.rank}, up to {count - 1}")
    if any(layer >= ranks.layers for layer in fault.layers):
        _fail(f"{place} layers", f"must be below the number of layers, {ranks.layers}")
    phases = [p.phase if fault.kind == "slow-link" else p.after for p in places_of(scenario)]
    known = list(dict.fromkeys(phase for phase in phases if phase))
    if fault.phase is not None and fault.phase not in known:
        what = f"must be one of {', '.join(known)}, not {_shown(fault.phase)}"
        _fail(f"{place} phase", what + _similar(fault.phase, known))


def _check_cause(scenario: Scenario, cause: Cause, place: str) -> None:
    for party in filter(None, (cause.culprit, *cause.victims)):
        if not PARTY.fullmatch(party):
            _fail(
                place,
                f"culprits and victims are written kind:id, as class:<512 or rank:1, not {_shown(party)}",
            )
    changed = _apply(scenario, cause.without, f"{place} without")
    with _inside(f"{place} without"):
        _check(changed)


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
            _unknown(f"{place}.{_short(str(key))}", key, ["loads", "faults", *tables])
    if changes.get("loads") == ():
        _fail(f"{place}.loads", "leaves no load in the world")
    return replace(scenario, **changes)


def _left_out(entries: tuple[Any, ...], raw: Any, place: str) -> tuple[Any, ...]:
    names = _tuple((str, Ellipsis), raw, place, Range())
    known = [entry.name for entry in entries]
    for name in names:
        if name not in known:
            _fail(
                place,
                f"there is no {_shown(name)}{_similar(name, known)}; known are {', '.join(known) or 'none'}",
            )
    return tuple(entry for entry in entries if entry.name not in names)


def _unique(place: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            _fail(place, f"two have the name {_shown(name)}; names tell them apart")


# -- messages ---------------------------------------------------------------------------------------------


@contextmanager
def _inside(where: str) -> typing.Iterator[None]:
    """Puts before a message what it is about."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _fail(place: str, what: str) -> NoReturn:
    raise UsageError(f"{place}: {what}")


def _unknown(place: object, key: object, known: Iterable[str]) -> NoReturn:
    names = sorted(known)
    similar = _similar(key, names)
    raise UsageError(f"{_short(str(place))}: unknown key{similar or '; known are ' + ', '.join(names)}")


def _similar(word: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word)[:100], list(known), 1) if isinstance(word, str) else []
    return f"; did you mean {close[0]}?" if close else ""


def _limits(raw: Any, allowed: Range) -> str:
    """The range in words; the upper end that all numbers share is only named to who passes it."""
    return f" up to {MOST:g}" if type(raw) in (int, float) and raw > MOST else str(allowed)


def _shown(value: object) -> str:
    """What was found, in TOML's words and short."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) > MOST:
        return "one that large"
    if isinstance(value, (int, float, str)):
        return _short(repr(value))
    names = {Mapping: "a table", Sequence: "a list"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), type(value).__name__)


def _short(text: str, most: int = 100) -> str:
    return text if len(text) <= most else text[:most] + "…"
