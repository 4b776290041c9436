"""A file to ingest: opened uncompressed whatever its name says, with a tally of what could not be used."""

from __future__ import annotations

import hashlib
import io
import os
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import tzinfo
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
from isal import isal_zlib

from tailscope.config import Attributes
from tailscope.mapping import Mapping

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
BOM = b"\xef\xbb\xbf"
CHUNK = 1 << 20
#: Compressed bytes read at a time.
COMPRESSED = 32 << 10
#: Uncompressed bytes at a time, small because damage costs the piece it lies in.
PIECE = 4 << 10
#: A longer line is not telemetry that we know; it would only exhaust memory.
MAX_LINE = 64 << 20
#: What a collector may look at to recognise its format.
HEAD = 64 << 10

#: Bytes of a digest; content hashed at a time, and how many of it beside each other.
DIGEST, HASHED, HASHED_BESIDE = 16, 4 << 20, 2

INT64_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class Options:
    """What the call and the configuration say about how to read."""

    attributes: Attributes = field(default_factory=Attributes)
    log_tz: tzinfo | None = None
    hash_ids: bool = False
    #: Rank of profiles that do not say it.
    rank: int | None = None
    python_stacks: bool = False
    #: What the columns of a table of requests mean.
    mapping: Mapping | None = None


@dataclass
class Tally:
    """What became of a source's records. Counts everything that was not stored, and why."""

    rejected: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    blanked: Counter[str] = field(default_factory=Counter)
    first_seen: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def reject(self, reason: str, where: str = "", count: int = 1) -> None:
        """Count a record that should have been telemetry but cannot be used.

        `reason` is one of few texts and holds nothing of the input; `where` says which row, and is
        kept for the first one.
        """
        self.rejected[reason] += count
        self.first_seen.setdefault(reason, where)

    def blank(self, reason: str, where: str = "", count: int = 1) -> None:
        """Count a value left NULL in a row that is kept, because it cannot be true (a negative duration)."""
        self.blanked[reason] += count
        self.first_seen.setdefault(reason, where)

    def skip(self, reason: str, count: int = 1) -> None:
        """Count a valid record that is not telemetry of ours (a start-up span, an access-log line)."""
        self.skipped[reason] += count

    def note(self, text: str) -> None:
        """Something a reader of the rows must know, said once."""
        if text not in self.notes:
            self.notes.append(text)

    def add(self, other: Tally) -> None:
        """Take in what another one counted and noted."""
        self.rejected.update(other.rejected)
        self.skipped.update(other.skipped)
        self.blanked.update(other.blanked)
        for text in other.notes:
            self.note(text)

    @property
    def columns(self) -> dict[str, Any]:
        """What `sources` says of it."""
        return {
            "rows_rejected": self.rejected.total(),
            "reject_reasons": sorted(self.rejected.items()),
            "rows_skipped": self.skipped.total(),
            "skip_reasons": sorted(self.skipped.items()),
            "values_blanked": self.blanked.total(),
            "blank_reasons": sorted(self.blanked.items()),
            "notes": self.notes,
        }


class Source:
    """One file. Collectors read it through `open`, `lines` or `read_all` and report through `tally`.

    A collector also says what it learned of the clock: `clock`, `offset_ns`, `offset_error_ns`.
    """

    def __init__(self, path: Path, display: str | None = None, options: Options | None = None) -> None:
        self.path = path
        self.display = display if display is not None else str(path)
        self.options = options or Options()
        self.tally = Tally()
        self.clock = "wall"
        self.offset_ns: int | None = None
        self.offset_error_ns: int | None = None

    @property
    def name(self) -> str:
        """File name without folders and without compression suffix."""
        name = self.path.name
        for suffix in (".gz", ".zst", ".zstd"):
            name = name.removesuffix(suffix)
        return name

    @property
    def modified_ns(self) -> int:
        """When the content was last written: gzip keeps that of the file it packed, which a copy does not change."""
        with self.path.open("rb") as file:
            head = file.read(8)
        if head.startswith(GZIP_MAGIC) and (packed_s := int.from_bytes(head[4:8], "little")):
            return packed_s * 1_000_000_000
        return self.path.stat().st_mtime_ns

    def open(self) -> IO[bytes]:
        """The uncompressed content, without a byte order mark. Compressed data that ends early or is damaged
        ends the stream; the tally then has a rejection that says so."""
        raw = self.path.open("rb", buffering=0)
        magic = raw.read(4)
        raw.seek(0)
        unpacked: io.RawIOBase = raw
        if magic.startswith(GZIP_MAGIC):
            unpacked = _Tolerant(_gunzip(raw), self.tally)
        elif magic == ZSTD_MAGIC:
            unpacked = _Tolerant(_unzstd(raw, self.path.stat().st_size), self.tally)
        stream = io.BufferedReader(unpacked, CHUNK)
        if stream.peek(len(BOM)).startswith(BOM):
            stream.read(len(BOM))
        return stream

    def head(self) -> bytes:
        """The first 64 KiB of the content; nothing is tallied."""
        probe = Source(self.path)
        with probe.open() as stream:
            return stream.read(HEAD)

    def content_hash(self) -> str:
        """BLAKE2b-128 over those of each 4 MiB of the uncompressed content, so that a file and its gz copy are one source.

        Pieces are hashed beside each other: a profile's hash would take a fifth of its ingest.
        """
        whole = hashlib.blake2b(digest_size=DIGEST)
        coming: deque[Future[bytes]] = deque()
        probe = Source(self.path)
        with probe.open() as stream, ThreadPoolExecutor(HASHED_BESIDE) as pool:
            while piece := stream.read(HASHED):
                coming.append(pool.submit(_digest, piece))
                if len(coming) > HASHED_BESIDE:
                    whole.update(coming.popleft().result())
            for digest in coming:
                whole.update(digest.result())
        return whole.hexdigest()

    def read_all(self) -> bytes:
        with self.open() as stream:
            return stream.read()

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(line number from 1, line without its end) for each line that is not blank.

        A line beyond 64 MiB is rejected and passed over.
        """
        with self.open() as stream:
            number = 0
            while line := stream.readline(MAX_LINE):
                number += 1
                if len(line) == MAX_LINE and not line.endswith(b"\n"):
                    self.tally.reject("line longer than 64 MiB", f"line {number}")
                    while (rest := stream.readline(CHUNK)) and not rest.endswith(b"\n"):
                        pass
                    continue
                line = line.strip()
                if line:
                    yield number, line


def _digest(piece: bytes) -> bytes:
    return hashlib.blake2b(piece, digest_size=DIGEST).digest()


DAMAGE: tuple[Any, ...] = (EOFError, OSError, zlib.error, isal_zlib.error)


class _Tolerant(io.RawIOBase):
    """Pieces of decompressed data as a stream. Damage ends it and is counted; what came before is kept."""

    def __init__(self, pieces: Iterator[bytes], tally: Tally) -> None:
        self._pieces, self._tally = pieces, tally
        self._piece = memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._piece:
            try:
                self._piece = memoryview(next(self._pieces))
            except StopIteration:
                return 0
            except DAMAGE as error:
                ended_early = isinstance(error, EOFError)
                reason = "compressed data ends early" if ended_early else "compressed data is damaged"
                self._tally.reject(reason, f"after {self._position:,} uncompressed bytes")
                self._pieces = iter(())
                return 0
        size = min(len(buffer), len(self._piece))
        buffer[:size] = self._piece[:size]
        self._piece = self._piece[size:]
        self._position += size
        return size


def _gunzip(raw: io.FileIO) -> Iterator[bytes]:
    """Members of a gzip file, decompressed in small steps so that an error loses little."""
    with raw:
        inflate = isal_zlib.decompressobj(wbits=31)
        fresh = True
        while compressed := raw.read(COMPRESSED):
            while compressed:
                if inflate.eof:
                    inflate, fresh = isal_zlib.decompressobj(wbits=31), True
                if fresh:
                    compressed = compressed.lstrip(b"\0")  # padding between members, as gzip allows
                    if not compressed:
                        break
                fresh = False
                yield inflate.decompress(compressed, PIECE)
                compressed = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
        while not (inflate.eof or fresh) and (piece := inflate.decompress(b"", PIECE)):
            yield piece
        if not (inflate.eof or fresh):
            raise EOFError


class _Sips(io.FileIO):
    """Reads little at a time: Arrow decompresses all it is given at once, and damage costs all of that."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(PIECE if size is None or size < 0 else min(size, PIECE)) or b""


def _unzstd(raw: io.FileIO, size: int) -> Iterator[bytes]:
    sips = cast(io.IOBase, _Sips(raw.fileno(), closefd=False))
    with raw, pa.CompressedInputStream(pa.PythonFile(sips, mode="r"), "zstd") as stream:
        while True:
            try:
                piece = stream.read(PIECE)
            except OSError as error:
                if raw.tell() >= size and "truncated" in str(error).lower():
                    raise EOFError from error
                raise
            if not piece:
                return
            yield piece


def files_below(path: Path) -> Iterator[Path]:
    """The files at or below `path`, sorted; hidden ones and trace directories are left out.

    Whatever else cannot be read as a file is among them, so that a caller can say so: pipes, links to
    folders, links to nothing, folders that cannot be listed.
    """
    if not path.is_dir():
        yield path
        return
    unlisted: list[OSError] = []
    for folder, folders, names in os.walk(path, onerror=unlisted.append):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and not f.endswith(".parquet"))
        links = [f for f in folders if Path(folder, f).is_symlink()]
        for name in sorted(names + links):
            if not name.startswith("."):
                yield Path(folder, name)
    yield from sorted(Path(error.filename) for error in unlisted)
