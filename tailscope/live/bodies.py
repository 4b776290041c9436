"""Bodies that may be anybody's, plain or gzip: taken piece by piece, so that what is or unpacks to too much is never held."""

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


class Plain:
    """Takes pieces of a body, gives all of it at the end; `size` is what is held of it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found = bytearray()

    @property
    def size(self) -> int:
        return len(self._found)

    def feed(self, piece: bytes) -> None:
        """Raises TooLarge."""
        if len(self._found) + len(piece) > self._most:
            raise TooLarge
        self._found += piece

    def finish(self) -> bytes:
        return bytes(self._found)


class Gunzip(Plain):
    """Takes packed pieces, gives what they unpack to. A body may have many members, one behind the other."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._packed = 0
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


#: What takes a body, by its Content-Encoding.
BODIES = {"identity": Plain, "": Plain, "gzip": Gunzip}
