"""What the readers of client files share: tolerant JSON, checked values and growing batches of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
import pyarrow as pa

from tailscope.schema import REQUESTS, TOKENS, Table
from tailscope.source import Tally

#: Rows after which a batch is yielded.
BATCH = 50_000
#: No request has more tokens; it also keeps sums of counts inside int64.
#: No request takes longer, in ns, some three years: sums of an instant and of durations stay inside int64.
MOST_NS = 10**17
MAX_TOKENS = 1 << 31

#: Columns of `requests` a client file can fill. The others stay NULL.
CLIENT_COLUMNS = (
    "request_key", "request_id", "trace_id", "file_row", "observer", "model", "adapter", "klass", "arrival_ns",
    "intended_ns", "first_token_ns", "last_token_ns", "finished_ns", "ttft_ns", "e2e_ns", "prompt_tokens",
    "cached_tokens", "output_tokens", "max_tokens", "status",
)  # fmt: skip


def loads(data: bytes) -> Any:
    """The JSON value, or None where there is none.

    Python's own parser is asked second: it takes the NaN, Infinity and lone surrogates that clients in
    Python write.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return json.loads(data.decode("utf-8-sig", "replace"))
        except (ValueError, RecursionError):
            return None


def text(value: object) -> str | None:
    """A string Arrow can hold, or None: lone surrogates are replaced."""
    if not isinstance(value, str) or not value:
        return None
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


class Values:
    """Checks values of one record. What cannot be true is left NULL and counted."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self.where = ""

    def blank(self, reason: str, count: int = 1) -> None:
        self._tally.blank(reason, self.where, count)

    def tokens(self, value: object, name: str) -> int | None:
        """A number of tokens; `name` is our own word for it."""
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_TOKENS:
            return value
        self.blank(f"{name} not a number of tokens")
        return None

    def duration(self, value: object, name: str, unit_ns: int, limit_ns: int = MOST_NS) -> int | None:
        """Nanoseconds of a duration given in units of `unit_ns`, at most `limit_ns`."""
        if value is None:
            return None
        # The comparison is false for NaN, and guards the product against overflow.
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= limit_ns:
            ns = value * unit_ns if isinstance(value, int) else round(value * unit_ns)
            if ns <= limit_ns:
                return ns
        self.blank(f"{name} not a duration")
        return None


class Rows:
    """Rows of `requests` and `tokens` on their way into Arrow tables of bounded size."""

    def __init__(self) -> None:
        self.stored = 0
        self._requests: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._seqs: list[int] = []
        self._times: list[int] = []
        self._counts: list[int | None] = []

    def request(self, row: dict[str, Any]) -> None:
        self.stored += 1
        self._requests.append(row)

    def tokens(self, key: str, seqs: Sequence[int], times: list[int], counts: list[int | None]) -> None:
        self._keys.extend([key] * len(times))
        self._seqs.extend(seqs)
        self._times.extend(times)
        self._counts.extend(counts)

    def full(self) -> Iterator[tuple[Table, pa.Table]]:
        """The tables that have reached their size."""
        if len(self._requests) >= BATCH:
            yield from self._take_requests()
        if len(self._times) >= BATCH:
            yield from self._take_tokens()

    def rest(self) -> Iterator[tuple[Table, pa.Table]]:
        if self._requests:
            yield from self._take_requests()
        if self._times:
            yield from self._take_tokens()

    def _take_requests(self) -> Iterator[tuple[Table, pa.Table]]:
        rows, self._requests = self._requests, []
        columns = {name: [row.get(name) for row in rows] for name in CLIENT_COLUMNS}
        yield from _slices(REQUESTS, REQUESTS.batch(columns))

    def _take_tokens(self) -> Iterator[tuple[Table, pa.Table]]:
        columns = {
            "request_key": self._keys,
            "seq": self._seqs,
            "time_ns": self._times,
            "count": self._counts,
        }
        self._keys, self._seqs, self._times, self._counts = [], [], [], []
        yield from _slices(TOKENS, TOKENS.batch(columns))


def _slices(table: Table, rows: pa.Table) -> Iterator[tuple[Table, pa.Table]]:
    """One line can hold millions of chunks; what is yielded stays small."""
    for start in range(0, rows.num_rows, BATCH):
        yield table, rows.slice(start, BATCH)
