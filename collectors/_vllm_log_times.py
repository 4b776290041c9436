"""Times of a vLLM log: the year and zone that its lines lack, and when in their second the steps ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

SECOND = 1_000_000_000
#: A container runtime stamps a line when it reads it from the pipe: up to this much after it was written.
STAMP_LAG = 50_000_000
#: No vLLM log is older; an earlier file time is that of an archive, not of the log.
FIRST_RELEASE = datetime(2023, 6, 1, tzinfo=UTC)
#: Lines are written after the step by an event loop that has other work: the gap between two lines may fall
#: short of the second step's time by about this much (0.4 % of lines by more, on two busy cores).
JITTER = 5_000_000
#: Processes remembered. The steps of one beyond are narrowed by those waiting with them only.
MAX_CHAINS = 10_000


class Calendar:
    """Turns `MM-DD HH:MM:SS` into Unix time.

    The year is the latest in which the first line is not after the file was last written; it advances where
    December turns to January.
    """

    def __init__(self, modified_ns: int, now_ns: int, zone: tzinfo | None) -> None:
        self.zone: tzinfo = zone or UTC
        modified = datetime.fromtimestamp(modified_ns // SECOND, UTC)
        self.by_file = modified >= FIRST_RELEASE
        written = modified if self.by_file else datetime.fromtimestamp(now_ns // SECOND, UTC)
        self.limit = written + timedelta(days=1)
        self.first_year: int | None = None
        self.year = self._month = 0
        self._text = b""
        self._second: int | None = None

    def second(self, text: bytes) -> int | None:
        """First nanosecond of the second that a line names; None where that is no time."""
        if text != self._text:
            before, self._text = self._second, text
            self._second = self._read(text, before)
        return self._second

    def _read(self, text: bytes, before: int | None) -> int | None:
        month, day, hour, minute, second = (int(text[at : at + 2]) for at in (0, 3, 6, 9, 12))
        for year in self._years(month):
            try:
                moment = datetime(year, month, day, hour, minute, second, tzinfo=self.zone)
            except ValueError:
                continue
            if self.first_year is None and moment > self.limit:
                continue
            break
        else:
            return None
        if self.first_year is None:
            self.first_year = year
        self.year, self._month = year, month
        time = int(moment.timestamp()) * SECOND
        if before is not None and time < before - 1800 * SECOND:
            # Clocks were set back: of the hour that comes twice this is the second one.
            time = max(time, int(moment.replace(fold=1).timestamp()) * SECOND)
        return time

    def _years(self, month: int) -> Iterator[int]:
        if self.first_year is None:
            yield from range(self.limit.year, self.limit.year - 9, -1)  # 29 February may be 8 years back
        elif self._month == 12 and month == 1:
            yield self.year + 1
        elif self._month == 1 and month == 12 and self.year > self.first_year:
            yield self.year - 1  # a late line of the old year
        else:
            yield self.year

    @property
    def note(self) -> str:
        if self.first_year is None:
            return ""
        years = f"{self.first_year}" if self.year == self.first_year else f"{self.first_year} to {self.year}"
        return f"times are read as {self.zone} of {years}: " + (
            "the year is from the file's time"
            if self.by_file
            else "the year is a guess, the file has no time"
        )


def stamp(text: bytes) -> int | None:
    """Unix time, ns, of an RFC 3339 time stamp with up to nine decimals; None without a zone."""
    head, _, rest = text.decode("ascii").partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    offset = rest[len(digits) :]
    try:
        moment = datetime.fromisoformat(head + offset)
    except ValueError:
        return None
    return int(moment.timestamp()) * SECOND + int(digits.ljust(9, "0")) if moment.tzinfo else None


@dataclass(slots=True)
class Step:
    """An iteration line. Its end lies in [low, high], `elapsed` or more after that of the one before."""

    chain: Hashable
    low: int
    high: int
    elapsed: int
    row: dict[str, Any]


@dataclass(slots=True)
class _Chain:
    """One engine's lines: those waiting, and what was said of the last one given out."""

    steps: list[Step] = field(default_factory=list)
    low: int | None = None
    end: int | None = None


@dataclass
class Steps:
    """Steps in file order. Their ends are narrowed down from both sides by those of the same engine."""

    look_ahead: int = 1_000
    waiting: list[Step] = field(default_factory=list)
    chains: dict[Hashable, _Chain] = field(default_factory=dict)

    def add(self, step: Step) -> None:
        self.waiting.append(step)
        self.chains.setdefault(step.chain, _Chain()).steps.append(step)

    def take(self, last: bool = False) -> list[dict[str, Any]]:
        """The steps' rows, with their ends. Unless `last`, some steps stay behind to look ahead to."""
        count = len(self.waiting) if last else max(0, len(self.waiting) - self.look_ahead)
        given, self.waiting = self.waiting[:count], self.waiting[count:]
        for name, amount in Counter(step.chain for step in given).items():
            _narrow(self.chains[name], amount)
        if len(self.chains) > MAX_CHAINS:
            self.chains = {name: chain for name, chain in self.chains.items() if chain.steps}
        return [step.row for step in given]


def _narrow(chain: _Chain, amount: int) -> None:
    """Set the ends of a chain's first `amount` steps and take them off it."""
    lows: list[int] = []
    low = chain.low
    for step in chain.steps:
        bound = step.low if low is None else low + step.elapsed
        # A bound outside of the step's own second contradicts the line; the line is right.
        low = bound if step.low < bound < step.high else step.low
        lows.append(low)
    highs: list[int] = []
    bound = chain.steps[-1].high
    for step in reversed(chain.steps):
        high = bound if step.low < bound < step.high else step.high
        highs.append(high)
        bound = high - step.elapsed
    highs.reverse()
    for step, low, high in zip(chain.steps[:amount], lows, highs, strict=False):
        if low - high > 2 * JITTER:
            low, high = step.low, step.high
        end = (low + high) // 2
        if chain.end is not None and end < chain.end <= step.high:
            end = chain.end
        step.row["end_ns"] = end
        step.row["time_error_ns"] = max(abs(high - end), abs(end - low)) + JITTER
        chain.low, chain.end = low, end
    del chain.steps[:amount]
