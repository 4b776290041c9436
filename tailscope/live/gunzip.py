"""Unpacks gzip that may be anybody's: piece by piece, so that what unpacks to too much is never unpacked."""

from __future__ import annotations

from typing import Any

from isal import isal_zlib

ZLIB_ERRORS: Any = isal_zlib.error  # its stubs call it an instance
PIECE = 64 << 10
GZIP = 31  # as zlib's wbits


class TooLarge(Exception):
    """More comes out, or goes in, than is allowed."""


class NotGzip(Exception):
    """The text says what is wrong."""


class Gunzip:
    """Takes packed pieces, gives what they unpack to at the end. A body may have many members, one behind the other."""

    def __init__(self, most: int) -> None:
        self._most, self._packed = most, 0
        self._found = bytearray()
        self._inflate: Any = None

    def feed(self, piece: bytes) -> None:
        """Raises TooLarge or NotGzip."""
        self._packed += len(piece)
        # Members that are empty unpack to nothing, however many come.
        if self._packed > self._most:
            raise TooLarge
        try:
            while piece:
                if self._inflate is None:
                    self._inflate = isal_zlib.decompressobj(wbits=GZIP)
                self._take(piece)
                if not self._inflate.eof:
                    return
                piece, self._inflate = self._inflate.unused_data, None
        except ZLIB_ERRORS as error:
            raise NotGzip("the body is not gzip") from error

    def _take(self, piece: bytes) -> None:
        more = True
        while more and not self._inflate.eof:
            new = self._inflate.decompress(piece, PIECE)
            self._found += new
            if len(self._found) > self._most:
                raise TooLarge
            piece = self._inflate.unconsumed_tail
            # What is left of the output waits where all of the input was taken.
            more = bool(piece) or len(new) == PIECE

    def finish(self) -> bytes:
        """Raises NotGzip."""
        if self._inflate is not None or not self._packed:
            raise NotGzip("the gzip body ends early")
        return bytes(self._found)
