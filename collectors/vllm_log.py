"""Logs of a vLLM server: iteration lines, the periodic statistics, and lines that explain a latency.

Only the fields named here are taken from a line. What a line quotes (prompts, ids, addresses, paths) comes
after a beginning that vLLM wrote, so that a message is matched from its first byte.
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from tailscope.errors import BadInput
from tailscope.schema import EVENTS, ITERATIONS, METRICS, SERIES, Table
from tailscope.source import INT64_MAX, Source

from ._ids import stored_request_id
from ._series import printed, series_id
from ._vllm_log_lines import (
    ABORT,
    ABORTED,
    AUTOTUNING,
    DEATH,
    ENGINE,
    EPLB,
    GAUGES,
    HEADER,
    INTERNAL,
    ITERATION,
    KV_SIZE,
    LIKELY,
    PROFILER,
    PROFILER_CALL,
    RANK,
    SETTING,
    START,
    UNTIMED,
    plain,
)
from ._vllm_log_lines import (
    EVENTS as EVENT_LINES,
)
from ._vllm_log_times import SECOND, STAMP_LAG, Calendar, Step, Steps, stamp

BATCH = 50_000
#: Characters of an event's detail, and of a list of aborted requests.
DETAIL, LIST = 200, 1 << 20
COUNTS = ("iteration", "prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens")
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class VllmLog:
    name: ClassVar[str] = "vllm_log"
    version: ClassVar[str] = "2"
    reads: ClassVar[str] = "Logs of a vLLM server, also with the prefixes of Docker, Kubernetes and journald."
    tables: ClassVar[tuple[Table, ...]] = (ITERATIONS, METRICS, SERIES, EVENTS)

    def recognises(self, head: bytes, name: str) -> bool:
        return any(HEADER.match(plain(line)) for line in head.split(b"\n"))

    def read(self, source: Source) -> Iterator[tuple[Table, pa.Table]]:
        return _Reader(source).read()


COLLECTOR = VllmLog()


@dataclass(slots=True)
class _Line:
    """Where and when a line was written: its time lies in [low, high]."""

    number: int
    process: bytes
    engine: int | None
    low: int
    high: int

    @property
    def middle(self) -> int:
        return (self.low + self.high) // 2


class _Reader:
    def __init__(self, source: Source) -> None:
        self.source, self.tally = source, source.tally
        self.calendar = Calendar(source.modified_ns, time.time_ns(), source.options.log_tz)
        self.steps = Steps()
        self.metrics: Rows = []
        self.events: Rows = []
        self.series: dict[str, dict[str, Any]] = {}
        #: Ids and events of the last aborts; a later line may say more of them.
        self.aborts: deque[tuple[str, dict[str, Any]]] = deque(maxlen=64)
        self.others = 0
        #: Span of the last line that had a time, and the events since that have none.
        self.last: tuple[int, int] | None = None
        self.untimed: list[tuple[str, str]] = []
        self.announced: Counter[str] = Counter()
        #: The engine died or was told to stop: what follows is said once, or no death.
        self.down = False
        self.has_steps = self.has_stamps = False

    def read(self) -> Iterator[tuple[Table, pa.Table]]:
        self.source.clock, self.source.offset_ns, self.source.offset_error_ns = "log", 0, SECOND
        is_log = False
        for number, line in self.source.lines():
            line = plain(line)
            header = HEADER.match(line)
            if header:
                is_log = True
                if not self._line(number, header, line[header.end() :]):
                    self.others += 1
                yield from self._flush(BATCH)
            elif not (UNTIMED.search(line) and self._without_time(line)):
                self.others += 1
        if self.others:
            self.tally.skip("other log line", self.others)
        if not is_log:
            raise BadInput(
                "no line in the form of vLLM's log",
                path=self.source.display,
                todo="Give what `vllm serve` writes to its standard output and error",
            )
        self._place_untimed(None)
        yield from self._flush(1, last=True)
        if self.series:
            yield _batch(SERIES, list(self.series.values()))
        self._notes()

    def _flush(self, at_least: int, last: bool = False) -> Iterator[tuple[Table, pa.Table]]:
        if len(self.steps.waiting) >= at_least:
            yield _batch(ITERATIONS, self.steps.take(last))
        if len(self.metrics) >= at_least:
            rows, self.metrics = self.metrics, []
            yield _batch(METRICS, rows)
        if len(self.events) >= at_least:
            rows, self.events = self.events, []
            yield _batch(EVENTS, rows)

    def _notes(self) -> None:
        if self.calendar.note:
            zone = "" if self.source.options.log_tz else "; --log-tz sets the zone"
            self.tally.note(self.calendar.note + zone)
        if self.has_stamps:
            self.tally.note("times are those that the container runtime put before the lines")
        if not self.has_steps:
            self.tally.note(
                "the log has no iteration lines; --enable-logging-iteration-details would add one per engine "
                "step, with its prompt and decode tokens and requests and its time"
            )

    # -- lines ---------------------------------------------------------------------------------

    def _line(self, number: int, header: re.Match[bytes], message: bytes) -> bool:
        """Take what a line of vLLM's says; False if it is of no interest."""
        stamped, process, level, written = header.groups()
        line = self._place(number, stamped, process, written)
        if line is not None:
            self._place_untimed(line.high)
            self.last = line.low, line.high
        if found := ENGINE.match(message):
            if line is None:
                self.tally.reject("time of the line is not a time", f"line {number}")
                return True
            if found[1]:
                line.engine = int(found[1])
            read = self._iteration if found[2] == b"Iteration(" else self._statistics
            read(line, message[found.start(2) :])
            return True
        return line is not None and self._event(line, level, message)

    def _place(self, number: int, stamped: bytes | None, process: bytes, written: bytes) -> _Line | None:
        at = stamp(stamped) if stamped else None
        if at is None:
            low = self.calendar.second(written) or 0
            high = low + SECOND
        else:
            self.has_stamps = True
            low, high = at - STAMP_LAG, at
        if not 0 < low < high <= INT64_MAX:
            return None
        rank = RANK.search(process) if process else None
        return _Line(number, process, int(rank[1]) if rank else None, low, high)

    def _iteration(self, line: _Line, message: bytes) -> None:
        found = ITERATION.match(message)
        if not found:
            self.tally.reject("iteration line cannot be read", f"line {line.number}")
            return
        self.has_steps = True
        *counts, elapsed_ms, dummy, percent = found.groups()
        elapsed = self._number(line, elapsed_ms, 9.2e12)
        elapsed_ns = None if elapsed is None else round(elapsed * 1e6)
        kv_usage = None
        if percent is not None and (share := self._number(line, percent, 100)) is not None:
            kv_usage = share / 100
        row: dict[str, Any] = {
            "engine": line.engine,
            **dict(zip(COUNTS, map(int, counts), strict=True)),
            "elapsed_ns": elapsed_ns,
            "kv_usage": kv_usage,
            # Versions that do not mark dummy steps do not log the KV usage either.
            "is_dummy": True if dummy else None if percent is None else False,
            "end_basis": "derived",
        }
        self.steps.add(Step((line.process, line.engine), line.low, line.high, elapsed_ns or 0, row))

    def _statistics(self, line: _Line, message: bytes) -> None:
        known = False
        for pattern, name, divisor in GAUGES:
            if not (found := pattern.search(message)):
                continue
            known = True
            value = self._number(line, found[1], 100 if divisor == 100 else 1e18)
            if value is None:
                continue
            self._gauge(line, name, value / divisor)
        if not known:
            self.tally.reject("statistics line cannot be read", f"line {line.number}")

    def _gauge(self, line: _Line, name: str, value: float) -> None:
        engine = line.engine
        labels = {} if engine is None else {"engine": str(engine)}
        series = series_id(name, labels)
        self.metrics.append({"engine": engine, "time_ns": line.middle, "series": series, "value": value})
        if series not in self.series:
            self.series[series] = {
                "engine": engine,
                "series": series,
                "name": name,
                "type": "gauge",
                "labels": list(labels.items()),
            }

    def _event(self, line: _Line, level: bytes, message: bytes) -> bool:
        if level in (b"ERROR", b"CRITICAL"):
            if self.down or not DEATH.search(message):
                return False
            self.down = True
            self._add(line, "restart", "engine died")
        elif found := ABORT.match(message):
            for request_id in filter(None, map(bytes.strip, found[1][:LIST].split(b","))):
                self._abort(line, request_id.decode("utf-8", "replace"))
        elif found := ABORTED.match(message):
            return self._name_abort(found[1].decode("utf-8", "replace"))
        elif LIKELY.match(message):
            return self._plain_event(line, message)
        elif found := START.match(message):
            self.down = False
            self._add(line, "restart", f"engine started, vLLM {found[1].decode()}")
        elif found := KV_SIZE.match(message):
            self._add(line, "config", f"kv_cache_size_tokens={found[1].decode().replace(',', '')}")
        elif message.startswith(b"non-default args: "):
            settings = ", ".join(
                f"{key.decode()}={value.decode()}" for key, value in SETTING.findall(message)
            )
            if not settings:
                return False
            self._add(line, "config", settings.replace("'", ""), limit=1_000)
        elif found := PROFILER.match(message):
            call = "start" if found[1] == b"Start" else "stop"
            self.announced[call] += 1
            self._add(line, "config", f"profiler {call}")
        else:
            self.down |= message.startswith(b"[shutdown] ")
            return False
        return True

    def _plain_event(self, line: _Line, message: bytes) -> bool:
        for kind, pattern in EVENT_LINES:
            if found := pattern.match(message):
                self._add(line, kind, " ".join(part.decode() for part in found.groups() if part))
                if kind == "eplb":
                    self._loads(line, message)
                return True
        return False

    def _loads(self, line: _Line, message: bytes) -> None:
        """Numbers of a line of the expert balancer's."""
        for pattern, name in EPLB:
            if (found := pattern.match(message)) and (
                value := self._number(line, found[1], 1e18)
            ) is not None:
                self._gauge(line, name, value)

    def _without_time(self, line: bytes) -> bool:
        if self.last is None:
            return False
        if found := AUTOTUNING.match(line):
            self.untimed.append(("jit", found[1].decode()))
            return True
        if not (found := PROFILER_CALL.search(line)):
            return False
        call = found[1].decode()
        if self.announced[call]:  # vLLM has said so, with a time, when the call came in
            self.announced[call] -= 1
            return False
        self.untimed.append(("config", f"profiler {call}"))
        return True

    def _place_untimed(self, until: int | None) -> None:
        """Events of lines without a time lie between the line before and the one after."""
        if self.untimed and self.last:
            low, high = self.last
            line = _Line(0, b"", None, low, max(high, until or 0))
            for kind, detail in self.untimed:
                self._add(line, kind, detail)
            self.untimed.clear()

    def _add(self, line: _Line, kind: str, detail: str, limit: int = DETAIL) -> dict[str, Any]:
        event = {
            "engine": line.engine,
            "time_ns": line.middle,
            "time_error_ns": (line.high - line.low) // 2,
            "kind": kind,
            "detail": detail[:limit],
        }
        self.events.append(event)
        return event

    def _abort(self, line: _Line, request_id: str) -> None:
        self.aborts.append((request_id, self._add(line, "abort", self._stored(request_id))))

    def _name_abort(self, request_id: str) -> bool:
        """Give an abort the client's id; only the line after it tells that from the engine's own."""
        for internal, event in self.aborts:
            if internal == request_id:
                return True
            if internal.startswith(request_id) and INTERNAL.fullmatch(internal, len(request_id)):
                event["detail"] = self._stored(request_id)
                return True
        return False

    def _stored(self, request_id: str) -> str:
        return stored_request_id(request_id, self.source.options.hash_ids)[:DETAIL]

    def _number(self, line: _Line, text: bytes, limit: float) -> float | None:
        return printed(text, limit, self.tally, f"line {line.number}")


def _batch(table: Table, rows: Rows) -> tuple[Table, pa.Table]:
    return table, table.batch({name: [row[name] for row in rows] for name in rows[0]})
