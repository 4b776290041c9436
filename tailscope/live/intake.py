"""What a receiver does with an export of spans, whatever the protocol: decode, journal, count."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from tailscope import registry
from tailscope.errors import BadInput
from tailscope.live.health import Health
from tailscope.live.journal import Busy, Journal, is_disk_full
from tailscope.schema import REQUESTS
from tailscope.source import Options, Tally

Protocol = Literal["grpc", "http"]
#: Decoding at once: it holds the interpreter's lock most of the time, so that more would only take turns.
DECODERS = 2
#: Bytes of exports being decoded; beyond them whoever sends must wait.
MOST_DECODING = 64 << 20
#: Bytes of exports that have not come whole; a thousand senders that never end must not fill the memory.
MOST_COMING = 256 << 20
#: When to try again.
RETRY_S = 1.0


@dataclass(frozen=True)
class Accepted:
    """`rejected` of the spans could not be used; `why`, for a person."""

    rejected: int = 0
    why: str = ""


class Refused(Exception):
    """An export that is not accepted. With `retry` the sender should send it again, later; else it is wrong."""

    def __init__(self, text: str, retry: bool) -> None:
        super().__init__(text)
        self.retry = retry


class Intake:
    """`spans` accepts exports. `on_rows` gets the rows of each that is on the disk."""

    def __init__(
        self, journal: Journal, options: Options, health: Health, on_rows: Callable[[pa.Table], object]
    ) -> None:
        self._journal, self._options, self._health, self._on_rows = journal, options, health, on_rows
        self._collector = registry.span_collector()
        self._pool = ThreadPoolExecutor(DECODERS, thread_name_prefix="decode")
        self._decoding = self._coming = 0

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    async def spans(self, message: bytes, is_json: bool, protocol: Protocol) -> Accepted:
        """Returns once the rows are on the disk. Raises Refused."""
        # A sender that gives up meanwhile does not undo what is on the disk, and it is counted.
        taken = asyncio.ensure_future(self._spans(message, is_json, protocol))
        taken.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(taken)

    async def _spans(self, message: bytes, is_json: bool, protocol: Protocol) -> Accepted:
        # One alone is decoded whatever its size: it would come again and again.
        if self._decoding and self._decoding + len(message) > MOST_DECODING:
            raise self.refused(protocol, "busy", "more spans come than can be written", retry=True)
        self._decoding += len(message)
        try:
            rows, tally = await asyncio.get_running_loop().run_in_executor(
                self._pool, self._decode, message, is_json
            )
        except BadInput as error:
            raise self.refused(protocol, "malformed", str(error), retry=False) from error
        finally:
            self._decoding -= len(message)
        try:
            await asyncio.wrap_future(self._journal.append({REQUESTS.name: rows}, tally))
        except Busy as error:
            raise self.refused(protocol, "busy", "more spans come than can be written", retry=True) from error
        except OSError as error:
            self._health.set_disk_full("spans", is_disk_full(error))
            why = f"the journal cannot be written: {error.strerror}"
            raise self.refused(protocol, "disk", why, retry=True) from error
        self._health.set_disk_full("spans", False)
        rejected = tally.rejected.total()
        self._health.spans.labels(protocol).inc(rows.num_rows + tally.skipped.total() + rejected)
        for reason, count in tally.rejected.items():
            self._health.rejected.labels(reason).inc(count)
        for reason, count in tally.skipped.items():
            self._health.skipped.labels(reason).inc(count)
        self._on_rows(rows)
        return Accepted(rejected, "; ".join(tally.rejected))

    @contextlib.contextmanager
    def holding(self, protocol: Protocol) -> Iterator[Callable[[int], None]]:
        """To be called with the bytes that are held of an export while it comes; raises Refused where all are too many."""
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            self._coming += size - held
            held = size
            if self._coming > MOST_COMING and self._coming > held:
                raise self.refused(protocol, "busy", "too many exports come at once", retry=True)

        try:
            yield hold
        finally:
            self._coming -= held

    def refused(self, protocol: Protocol, reason: str, text: str, retry: bool) -> Refused:
        """The refusal of an export, counted."""
        self._health.refused.labels(protocol, reason).inc()
        return Refused(text, retry)

    def _decode(self, message: bytes, is_json: bool) -> tuple[pa.Table, Tally]:
        tally = Tally()
        batches = [rows for _, rows in self._collector.receive(message, is_json, self._options, tally)]
        return pa.concat_tables(batches) if batches else REQUESTS.arrow.empty_table(), tally
