"""Logs of an SGLang server: what it says of the balance of its experts. Other lines are counted and passed over.

Balancedness here is a pass's mean over its layers of (mean tokens of a rank / those of the busiest): 1 is even. vLLM's is of
tokens summed over layers, so the two have names of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from tailscope.errors import BadInput
from tailscope.schema import EVENTS, METRICS, SERIES, Table
from tailscope.source import Source

from ._series import printed, series_id
from ._vllm_log_lines import plain

SECOND = 1_000_000_000
BATCH = 50_000
#: Time, which may have milliseconds, and the ranks of the process.
HEADER = re.compile(
    rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d{1,6})?((?: (?:DP|PP|TP|EP|ATTN_CP|MOE_DP)\d{1,5})*)\] "
)
#: Beginnings of lines that no other program's log has in this form.
OURS = re.compile(
    rb"server_args=|(?:Prefill|Decode) batch|\[Expert Balancedness\]|\[EPLBManager\]|Load weight |KV Cache is allocated"
)
#: Both values, the first of each in its turn: `(?>…)` never goes back, so the time is linear in a line.
PASS = re.compile(
    rb"\[Expert Balancedness\] (?>.*?\bcurrent_pass_balancedness=)(?>([^\s]{1,40}) )(?>.*?\bgpu_physical_count_sum=)([^\s]{1,40})"
)
#: What is read of a line's message: those that are looked for have some 200 characters.
MOST_READ = 4_096
REBALANCE = re.compile(rb"\[EPLBManager\] (rebalance (?:start|end))(?: time=([\d.]{1,20}s))?")
DP = re.compile(rb" DP(\d{1,5})")
BALANCEDNESS, TOKENS = "log:sglang_expert_balancedness", "log:sglang_expert_tokens"

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class SglangLog:
    name: str = "sglang_log"
    version: str = "1"
    reads: str = (
        "Logs of an SGLang server: lines on the balance of its experts "
        "(`--expert-balancedness-report-mode server_log`) and on their rearrangement."
    )
    tables: tuple[Table, ...] = (METRICS, SERIES, EVENTS)

    def recognises(self, head: bytes, name: str) -> bool:
        for line in head.split(b"\n"):
            header = HEADER.match(plain(line))
            if header and (header[2] or OURS.match(plain(line), header.end())):
                return True
        return False

    def read(self, source: Source) -> Iterator[tuple[Table, pa.Table]]:
        return _Reader(source).read()


COLLECTOR = SglangLog()


class _Reader:
    def __init__(self, source: Source) -> None:
        self.source, self.tally = source, source.tally
        self.metrics: Rows = []
        self.events: Rows = []
        self.series: dict[str, dict[str, Any]] = {}

    def read(self) -> Iterator[tuple[Table, pa.Table]]:
        self.source.clock, self.source.offset_ns, self.source.offset_error_ns = "log", 0, SECOND
        is_log, others = False, 0
        for number, line in self.source.lines():
            line = plain(line)
            header = HEADER.match(line)
            is_log |= header is not None
            if header is None or not self._take(number, header, line[header.end() :][:MOST_READ]):
                others += 1
            if len(self.metrics) >= BATCH:
                yield self._batch(METRICS, self.metrics)
                self.metrics = []
        if not is_log:
            todo = "Give what the server writes to its standard output and error"
            raise BadInput("no line in the form of SGLang's log", path=self.source.display, todo=todo)
        if others:
            self.tally.skip("other log line", others)
        for table, rows in (
            (METRICS, self.metrics),
            (EVENTS, self.events),
            (SERIES, list(self.series.values())),
        ):
            if rows:
                yield self._batch(table, rows)
        if self.series or self.events:
            zone = self.source.options.log_tz
            self.tally.note(
                f"times are read as {zone or 'UTC'}" + ("" if zone else "; --log-tz sets the zone")
            )

    def _take(self, number: int, header: re.Match[bytes], message: bytes) -> bool:
        """Take what a line says of experts; False if it is of no interest."""
        counted, moved = PASS.match(message), REBALANCE.match(message)
        if not counted and not moved:
            if message.startswith(b"[Expert Balancedness]"):
                self.tally.reject("balancedness line cannot be read", f"line {number}")
                return True
            return False
        time_ns = self._time(header[1])
        if time_ns is None:
            self.tally.reject("time of the line is not a time", f"line {number}")
            return True
        dp = DP.search(header[2])
        place = {"engine": int(dp[1]) if dp else None, "time_ns": time_ns}
        if moved:
            detail = " ".join(part.decode() for part in moved.groups() if part)
            self.events.append({**place, "time_error_ns": SECOND // 2, "kind": "eplb", "detail": detail})
        elif counted:
            where = f"line {number}"
            tokens = printed(counted[2], 1e18, self.tally, where)
            # Without tokens a pass is called even.
            share = printed(counted[1], 1.0, self.tally, where) if tokens else None
            for name, value in ((BALANCEDNESS, share), (TOKENS, tokens)):
                if value is not None:
                    self._gauge(place, name, value)
        return True

    def _gauge(self, place: dict[str, Any], name: str, value: float) -> None:
        labels = {} if place["engine"] is None else {"engine": str(place["engine"])}
        series = series_id(name, labels)
        self.metrics.append({**place, "series": series, "value": value})
        about = {"engine": place["engine"], "series": series, "name": name, "type": "gauge"}
        self.series.setdefault(series, {**about, "labels": list(labels.items())})

    def _time(self, text: bytes) -> int | None:
        """The middle of the second that a line names."""
        try:
            moment = datetime.strptime(text.decode(), "%Y-%m-%d %H:%M:%S")
            seconds = int(moment.replace(tzinfo=self.source.options.log_tz or UTC).timestamp())
        except (ValueError, OverflowError):
            return None
        return seconds * SECOND + SECOND // 2 if 0 < seconds < 4_000_000_000 else None

    @staticmethod
    def _batch(table: Table, rows: Rows) -> tuple[Table, pa.Table]:
        return table, table.batch({name: [row[name] for row in rows] for name in rows[0]})
