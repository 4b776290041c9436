"""Rows that were accepted and are not yet parts of a trace: an append-only journal, synced for many at once.

A journal is a folder of segments. A segment is a sequence of frames: magic, length and CRC-32 of the rest, and an Arrow
IPC stream of the rows of one table, whose metadata names it. `append` gives a future that is done once the frame is on
the disk; frames that wait for that are synced together. What lies behind the last synced frame of a writer that died was
accepted by nobody, and is cut off where it is not whole.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import pyarrow as pa

from tailscope.layout import sync
from tailscope.schema import BY_NAME, Table
from tailscope.source import Tally

MAGIC = b"TSJ1"
_HEADER = struct.Struct("<4sII")
#: What rows came from, in a frame's metadata, beside the table's name.
TABLE, TALLY = b"tailscope.table", b"tailscope.tally"
#: Frames wait this long for others to be synced with.
GATHER_S = 0.01
#: A segment is closed, so that parts are made of it, when it is this old or large.
SEGMENT_S, SEGMENT_BYTES = 10.0, 64 << 20
#: Bytes that may wait to be synced; beyond them whoever sends must wait.
MOST_WAITING = 64 << 20
OPEN, CLOSED, DAMAGED = ".open", ".arrow", ".damaged"
_NAME = re.compile(r"(\w+)-(\d{19})-[0-9a-f]{8}")


class Busy(Exception):
    """More is given than can be written."""


@dataclass
class JournalState:
    """What a journal did; read by others, so that every field is set at once."""

    waiting_bytes: int = 0
    #: Why the last write failed; empty while it works.
    failure: str = ""


@dataclass
class _Entry:
    frame: bytes
    done: Future[None]


class Journal:
    """Writes segments `NAME-<unix ns>-<token>` into a folder, by a thread of its own. Call `close` at the end."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        segment_s: float = SEGMENT_S,
        segment_bytes: int = SEGMENT_BYTES,
        most_waiting: int = MOST_WAITING,
        on_sync: Callable[[float], object] = lambda _: None,
    ) -> None:
        self.state = JournalState()
        self._on_sync = on_sync
        self._folder, self._name = folder, name
        self._segment_s, self._segment_bytes, self._most_waiting = segment_s, segment_bytes, most_waiting
        self._file: int | None = None
        self._path = folder
        self._size = 0
        self._opened_s = 0.0
        self._waiting: list[_Entry] = []
        self._changed = threading.Condition()
        self._closing = False
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name=f"journal {name}", daemon=True)
        self._thread.start()

    def append(self, tables: Mapping[str, pa.Table], tally: Tally | None = None) -> Future[None]:
        """Write rows by name of their table; done when they are on the disk. Raises Busy."""
        # What was counted is counted with the first of them, once.
        tallies = itertools.chain([tally], itertools.repeat(None))
        frames = b"".join(
            _frame(BY_NAME[name], rows, counted)
            for (name, rows), counted in zip(tables.items(), tallies, strict=False)
        )
        entry = _Entry(frames, Future())
        # Whoever waits for it may give up; it is written all the same.
        entry.done.set_running_or_notify_cancel()
        with self._changed:
            waiting = self.state.waiting_bytes
            # One alone is written whatever its size: it would come again and again.
            if self._closing or (waiting and waiting + len(frames) > self._most_waiting):
                raise Busy
            self.state.waiting_bytes += len(frames)
            self._waiting.append(entry)
            self._changed.notify()
        return entry.done

    def close(self) -> None:
        """Write what waits, and close the segment."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not (self._waiting or self._closing):
                    self._changed.wait(timeout=self._until_rotation())
                if self._waiting and not self._closing and GATHER_S:
                    self._changed.wait_for(lambda: self._closing, timeout=GATHER_S)
                entries, self._waiting = self._waiting, []
                closing = self._closing
            if entries:
                self._write(entries)
            if self._file is not None and (closing or self._until_rotation() == 0):
                self._close_segment()
            if closing and not entries:
                return

    def _until_rotation(self) -> float | None:
        if self._file is None:
            return None
        if self._size >= self._segment_bytes:
            return 0.0
        return max(0.0, self._opened_s + self._segment_s - time.monotonic())

    def _write(self, entries: list[_Entry]) -> None:
        began = time.monotonic()
        data = b"".join(entry.frame for entry in entries)
        failure: OSError | None = None
        try:
            if self._file is not None and self._is_gone():
                self._close_segment()
            if self._file is None:
                self._open_segment()
            assert self._file is not None
            _write_all(self._file, data)
            os.fdatasync(self._file)
            self._size += len(data)
            self.state.failure = ""
        except OSError as error:
            failure = error
            self.state.failure = error.strerror or str(error)
            self._take_back()
        self._on_sync(time.monotonic() - began)
        with self._changed:
            self.state.waiting_bytes -= len(data)
        for entry in entries:
            if failure is None:
                entry.done.set_result(None)
            else:
                entry.done.set_exception(failure)

    def _take_back(self) -> None:
        """What nobody was told is there must not be there after a restart either, nor lie between what is."""
        if self._file is None:
            return
        try:
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)
        except OSError:
            self._close_segment()

    def _is_gone(self) -> bool:
        """Whether somebody removed the segment: what is written to it now would be nowhere."""
        assert self._file is not None
        return not os.fstat(self._file).st_nlink

    def _open_segment(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / f"{self._name}-{time.time_ns():019d}-{token_hex(4)}{OPEN}"
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._size, self._opened_s = 0, time.monotonic()
        sync(self._folder)

    def _close_segment(self) -> None:
        assert self._file is not None
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._file = None
        # One that cannot be closed now is closed at the next start; one that somebody removed is gone.
        with contextlib.suppress(OSError):
            if self._size:
                self._path.rename(self._path.with_suffix(CLOSED))
            else:
                self._path.unlink()


class Damaged(Exception):
    """A segment that cannot be read to its end; the text says why."""


@dataclass(frozen=True)
class Segment:
    """A closed segment; `created_s` is the unix time of its name."""

    path: Path
    name: str
    created_s: float

    def frames(self) -> Iterator[tuple[Table, pa.Table, Tally]]:
        """Table, rows and what was counted with them, of each whole frame. Raises Damaged behind the last of them where more
        follows."""
        whole = 0
        with self.path.open("rb") as file:
            for payload in _payloads(file.read):
                yield _rows(payload)
                whole += _HEADER.size + len(payload)
            size = os.fstat(file.fileno()).st_size
        if whole < size:
            raise Damaged(f"{size - whole:,} bytes from byte {whole:,} on are no whole frame")

    def set_aside(self) -> Path:
        """Rename it, so that it is tried no more and somebody may look at it."""
        return self.path.rename(self.path.with_suffix(DAMAGED))


def _rows(payload: bytes) -> tuple[Table, pa.Table, Tally]:
    try:
        with pa.ipc.open_stream(pa.py_buffer(payload)) as stream:
            metadata = stream.schema.metadata or {}
            rows = stream.read_all().replace_schema_metadata(None)
        rows.validate()
        table, tally = BY_NAME[metadata[TABLE].decode()], _tally(metadata.get(TALLY, b"{}"))
    except (pa.ArrowException, KeyError, ValueError, TypeError, AttributeError) as error:
        raise Damaged("a frame is no table of rows") from error
    if rows.schema != table.arrow:
        # Of another version of tailscope, or of nobody's.
        raise Damaged(f"rows are not those of the table {table.name}")
    return table, rows, tally


def recover(folder: Path, name: str) -> tuple[int, list[Path]]:
    """Close the segments of a writer that died. Returns the bytes cut off at their ends, of a frame that was not whole and that nobody
    was told was accepted; and files with what stood from a place on that is damaged though frames follow it."""
    cut, aside = 0, []
    for path in folder.glob(f"{name}-*{OPEN}"):
        with path.open("r+b") as file:
            whole = sum(_HEADER.size + len(payload) for payload in _payloads(file.read))
            file.seek(whole)
            rest = file.read()
            if rest.find(MAGIC, 1) < 0:
                cut += len(rest)
            else:
                aside.append(path.with_suffix(DAMAGED))
                with aside[-1].open("wb") as damaged:
                    damaged.write(rest)
                    os.fsync(damaged.fileno())
            file.truncate(whole)
            os.fsync(file.fileno())
        if whole:
            path.rename(path.with_suffix(CLOSED))
        else:
            path.unlink()
    return cut, aside


def segments(folder: Path) -> list[Segment]:
    """Closed segments, oldest first."""
    found = []
    for path in folder.glob(f"*{CLOSED}"):
        if match := _NAME.fullmatch(path.stem):
            found.append(Segment(path, match[1], int(match[2]) / 1e9))
    return sorted(found, key=lambda segment: segment.created_s)


def is_disk_full(error: BaseException | None) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # DuckDB and Arrow say it in words.
    return error is not None and os.strerror(errno.ENOSPC) in str(error)


def size_of(folder: Path) -> int:
    """Bytes of all segments."""
    total = 0
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _frame(table: Table, rows: pa.Table, tally: Tally | None) -> bytes:
    counted = {
        "rejected": tally.rejected,
        "skipped": tally.skipped,
        "blanked": tally.blanked,
        "notes": tally.notes,
    } if tally else {}  # fmt: skip
    metadata = {TABLE: table.name.encode(), TALLY: json.dumps(counted).encode()}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema.with_metadata(metadata)) as stream:
        stream.write_table(rows)
    payload = sink.getvalue().to_pybytes()
    return _HEADER.pack(MAGIC, len(payload), zlib.crc32(payload)) + payload


def _payloads(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Payloads of the whole frames from the start on."""
    while len(header := read(_HEADER.size)) == _HEADER.size:
        magic, length, checksum = _HEADER.unpack(header)
        if magic != MAGIC:
            return
        payload = read(length)
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        yield payload


def _tally(counted: bytes) -> Tally:
    raw = json.loads(counted)
    tally = Tally()
    for name in ("rejected", "skipped", "blanked"):
        getattr(tally, name).update(raw.get(name, {}))
    tally.notes.extend(raw.get("notes", []))
    return tally


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
