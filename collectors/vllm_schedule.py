"""The schedule of a vLLM engine, as `examples/vllm/schedule_logger.py` writes it: which requests each step computed.

A line is a step and names the requests whose state changed with it. State is kept per engine process, rows are runs of
steps in which it stayed: a step costs what changed in it, however many requests it holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa

from tailscope.errors import BadInput
from tailscope.schema import EVENTS, ITERATIONS, SCHEDULE, Table
from tailscope.source import INT64_MAX, Source

from ._ids import stored_request_id
from ._vllm_statlogger_values import json_object, utf8

BATCH = 50_000
PHASES = ("prefill", "decode", "recompute")
#: More of anything nobody has: request numbers of all headers of a file add up.
MOST = 1 << 48
BLOCKED = ("budget", "slots", "kv", "other")
_BEGINS = re.compile(rb'\s*\{\s*"vllm_schedule"\s*:')
#: vLLM makes ids its own by eight random digits, and several answers to one call by a number before them.
_INTERNAL = re.compile(r"(?:[0-9]+_)?(.+)-[0-9a-f]{8}\Z", re.DOTALL)
LIMITS = ("max_num_batched_tokens", "max_num_seqs")
MALFORMED = "step is malformed"


@dataclass(frozen=True)
class VllmSchedule:
    name: ClassVar[str] = "vllm_schedule"
    version: ClassVar[str] = "1"
    reads: ClassVar[str] = (
        "JSON lines of the scheduler subclass in examples/vllm/schedule_logger.py (vllm serve --scheduler-cls): which "
        "requests each step computed, and how many tokens of each."
    )
    tables: ClassVar[tuple[Table, ...]] = (SCHEDULE, ITERATIONS, EVENTS)

    def recognises(self, head: bytes, name: str) -> bool:
        return any(_BEGINS.match(line) for line in head.split(b"\n"))

    def read(self, source: Source) -> Iterator[tuple[Table, pa.Table]]:
        return _Reader(source).read()


COLLECTOR = VllmSchedule()


class _Malformed(Exception):
    """A line that cannot be a step."""


@dataclass
class _Engine:
    """An engine process as its lines tell of it, from its first line on."""

    number: int | None = None
    suffix: bool = False
    #: Number in the source of the process's request 0.
    base: int = 0
    requests: dict[int, str] = field(default_factory=dict)
    #: request -> [phase, tokens, first step, its end, computed before], and where the run had to wait for KV cache from when to
    #: when.
    running: dict[int, list[int]] = field(default_factory=dict)
    #: Number, end and end on the monotonic clock of the last step.
    last: tuple[int, int, int] | None = None
    #: Whether it is known who runs; not after lost lines, until one names all.
    known: bool = True


class _Columns:
    """Rows of one table, column by column."""

    def __init__(self, table: Table, names: tuple[str, ...]) -> None:
        self.table, self.names = table, names
        self.rows: list[tuple[Any, ...]] = []

    def flush(self, at_least: int) -> Iterator[tuple[Table, pa.Table]]:
        if len(self.rows) >= at_least:
            columns = zip(self.names, zip(*self.rows, strict=True), strict=True)
            rows = {name: list(values) for name, values in columns}
            self.rows = []
            yield self.table, self.table.batch(rows)


class _Reader:
    def __init__(self, source: Source) -> None:
        self.source, self.tally = source, source.tally
        self.engine = _Engine()
        self.where, self.largest, self.lost = "", -1, 0
        #: Lines that could not be used since the last one that could: steps that are counted already.
        self.unusable = 0
        self.schedule = _Columns(
            SCHEDULE,
            (
                "engine", "iteration_first", "iteration_last", "first_end_ns", "last_end_ns", "request_id", "stay", "phase",
                "tokens", "computed_before", "fetch_ns", "fetched_ns",
            ),
        )  # fmt: skip
        self.steps = _Columns(
            ITERATIONS,
            (
                "engine", "iteration", "end_ns", "elapsed_ns", "end_basis", "prefill_requests", "prefill_tokens",
                "decode_requests", "decode_tokens", "recompute_tokens", "running", "waiting", "deferred", "kv_usage",
                "preempted", "is_dummy", "blocked",
            ),
        )  # fmt: skip
        self.events = _Columns(EVENTS, ("engine", "time_ns", "kind", "request_id", "detail"))
        self.settings: str | None = None

    def read(self) -> Iterator[tuple[Table, pa.Table]]:
        self.source.clock = "wall"
        headers = 0
        for number, line in self.source.lines():
            self.where = f"line {number}"
            record = json_object(line)
            if record is None:
                self.tally.reject("line is not a JSON object", self.where)
                self._lose()
            elif "vllm_schedule" in record:
                headers += 1
                self._begin(record, again=headers > 1)
            elif not headers:
                self.tally.reject("step before the line that says whose it is", self.where)
            else:
                try:
                    self._step(record)
                except (_Malformed, TypeError, ValueError, KeyError, IndexError):
                    self.tally.reject(MALFORMED, self.where)
                    self._lose()
                for rows in (self.schedule, self.steps, self.events):
                    yield from rows.flush(BATCH)
        if not headers:
            raise BadInput(
                "no schedule in the file",
                path=self.source.display,
                todo="Give JSON lines as examples/vllm/schedule_logger.py writes them",
            )
        self._close_all()
        for rows in (self.schedule, self.steps, self.events):
            yield from rows.flush(1)
        if self.lost:
            self.tally.note(
                f"the engine's logger left out {self.lost:,} steps because its writer did not keep up; who ran in them is "
                "not known"
            )

    # -- one process -----------------------------------------------------------------------------

    def _begin(self, header: dict[str, Any], again: bool) -> None:
        self._close_all()
        self.engine = _Engine(_count(header.get("engine")), header.get("suffix") is True, self.largest + 1)
        if header["vllm_schedule"] != 1:
            self.tally.note("the file is of a newer logger; what is new in it is not read")
        told = [f"{name}={limit}" for name in LIMITS if (limit := _count(header.get(name))) is not None]
        self.settings = ", ".join(told) or None

    def _lose(self) -> None:
        """What a line said is lost: who runs now is not known until a line names all."""
        self._close_all()
        self.engine.known = False
        self.unusable += 1

    def _close_all(self) -> None:
        for request in list(self.engine.running):
            self._close(request)

    def _close(self, request: int) -> None:
        """The request's state held until the last step."""
        engine = self.engine
        phase, tokens, first, first_end, before, *fetch = engine.running.pop(request)
        if engine.last is None:
            return  # the step that named it first could not be used
        last, last_end, _ = engine.last
        self.schedule.rows.append(
            (
                engine.number, first, last, first_end, last_end, engine.requests.get(request), engine.base + request,
                PHASES[phase], tokens, before, *(fetch or (None, None)),
            )
        )  # fmt: skip

    # -- one step --------------------------------------------------------------------------------

    def _step(self, record: dict[str, Any]) -> None:
        engine = self.engine
        number, end, elapsed, mono = self._time(record)
        states = [_state(state) for state in _list(record, "s")]
        gone, preempted = _counts(record, "x"), _counts(record, "p")
        if len({state[0] for state in states}) < len(states):
            raise _Malformed
        # All of a line is read before anything changes: what is damaged at its end says nothing.
        told = _told(record)
        fetches = self._fetches(record, mono)
        self._name(record)
        follows = engine.last is not None and number == engine.last[0] + 1
        if engine.last is not None and number <= engine.last[0]:
            raise _Malformed
        if engine.last is not None and not follows:
            lost = number - engine.last[0] - 1
            if record.get("lost"):
                self.lost += lost
            elif lost > self.unusable:
                self.tally.reject("step is missing", self.where, lost - self.unusable)
            self._lose()
        full = record.get("full") is True
        engine.known |= full
        if full:
            named = {state[0] for state in states}
            gone = [request for request in engine.running if request not in named]
        for request in gone:
            if request in engine.running:
                self._close(request)
        if engine.known:
            for request, phase, tokens, before in states:
                run = engine.running.get(request)
                if run is not None:
                    if run[:2] == [phase, tokens] and run[4] + tokens * (number - run[2]) == before:
                        continue
                    self._close(request)
                engine.running[request] = [phase, tokens, number, end, before, *fetches.get(request, ())]
        elif states:
            self.tally.blank("who was in the step is not known after lost lines", self.where)
        self._happened(record, end, elapsed, preempted)
        self._iteration(told, number, end, elapsed, len(preempted))
        engine.last, self.unusable = (number, end, mono), 0

    def _time(self, record: dict[str, Any]) -> tuple[int, int, int, int]:
        """(number, end on the wall clock, how long it took, end on the monotonic clock)"""
        number = record["n"]
        wall, begin, mono = record["t"]
        if not all(type(v) is int and 0 <= v <= INT64_MAX for v in (number, wall, begin, mono)):
            raise _Malformed
        end = wall + mono - begin
        if mono < begin or end > INT64_MAX:
            raise _Malformed
        last = self.engine.last
        follows = last is not None and number == last[0] + 1
        elapsed = mono - (max(begin, last[2]) if follows and last else begin)
        return number, end, max(elapsed, 0), mono

    def _fetches(self, record: dict[str, Any], mono: int) -> dict[int, tuple[int, int]]:
        """Requests that had to wait for KV cache from elsewhere before this step: from when to when, on the wall clock."""
        wall, begin, _ = record["t"]
        found = {}
        for entry in _list(record, "r"):
            if not (isinstance(entry, list) and len(entry) == 3 and all(type(v) is int for v in entry)):
                raise _Malformed
            request, began, known = entry
            if 0 <= began <= known <= mono and wall + began >= begin:
                found[request] = (wall + began - begin, wall + known - begin)
            else:
                self.tally.blank("wait for KV cache is no time before the step", self.where)
        return found

    def _name(self, record: dict[str, Any]) -> None:
        for entry in _list(record, "new"):
            request, name = entry[0], entry[1]
            if _count(request) is None or not isinstance(name, str):
                raise _Malformed
            name = utf8(name)
            if self.engine.suffix and (found := _INTERNAL.match(name)):
                name = found[1]
            self.engine.requests[request] = stored_request_id(name, self.source.options.hash_ids)
            self.largest = max(self.largest, self.engine.base + request)

    def _happened(self, record: dict[str, Any], end: int, elapsed: int, preempted: list[int]) -> None:
        engine, made = self.engine, record["t"][0]
        if self.settings:
            self.events.rows.append((engine.number, made, "config", None, self.settings))
            self.settings = None
        for request in preempted:
            name = engine.requests.get(request)
            self.events.rows.append((engine.number, made, "preemption", name, None))

    def _iteration(self, told: _Told, number: int, end: int, elapsed: int, preempted: int) -> None:
        prefills, prefill_tokens, decodes, decode_tokens, again, again_tokens = told.counts
        running, waiting, deferred = told.queue
        kv, blocked = told.kv, told.blocked
        if not (isinstance(kv, int | float) and 0 <= kv <= 1):
            if kv is not None:
                self.tally.blank("share is not between 0 and 1", self.where)
            kv = None
        self.steps.rows.append(
            (
                # As for a stat logger, what is computed again is generation.
                self.engine.number, number, end, elapsed, "measured", prefills, prefill_tokens, _sum(decodes, again),
                _sum(decode_tokens, again_tokens), again_tokens, running, waiting, deferred,
                None if kv is None else float(kv), preempted, False,
                blocked if blocked in BLOCKED else None,
            )
        )  # fmt: skip


@dataclass(frozen=True)
class _Told:
    """What a line says of its step beside who was in it."""

    counts: list[int | None]
    queue: list[int | None]
    kv: Any
    blocked: str | None


def _told(record: dict[str, Any]) -> _Told:
    blocked = record.get("b")
    return _Told(
        [*map(_count, _list(record, "c")), *[None] * 6][:6],
        [*map(_count, _list(record, "q")), *[None] * 3][:3],
        record.get("kv"),
        blocked if isinstance(blocked, str) else None,
    )


def _count(value: Any) -> int | None:
    """A number of things, or of one of them; sums of some stay inside int64."""
    return value if type(value) is int and 0 <= value < MOST else None


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None else a + (b or 0)


def _list(record: dict[str, Any], key: str) -> list[Any]:
    value = record.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _Malformed
    return value


def _counts(record: dict[str, Any], key: str) -> list[int]:
    values = _list(record, key)
    if not all(type(value) is int for value in values):
        raise _Malformed
    return values


def _state(entry: Any) -> tuple[int, int, int, int]:
    request, phase, tokens, before = entry
    if not (type(request) is type(phase) is type(tokens) is type(before) is int):
        raise _Malformed
    if not (0 <= request < MOST and 0 <= phase < len(PHASES) and 0 <= tokens < 1 << 40):
        raise _Malformed
    if not 0 <= before < 1 << 40:
        raise _Malformed
    return request, phase, tokens, before
