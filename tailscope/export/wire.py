"""Protobuf messages for many rows at once: a message is the same fields for every row, as columns of bytes.

A field is a `Part`: a matrix with a row of bytes for each message, of which the first `size` count. Lengths and most numbers are
varints of a fixed width, padded by bytes that carry no bits, which the format allows and readers take; so all rows of a
field lie below each other, and only strings and fields that some rows lack leave gaps, which are closed at the end.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.stats import Floats, Ints

Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]

VARINT, FIXED64, LENGTH = 0, 1, 2
#: Bytes of a length: messages of up to 16,383 bytes.
LENGTH_BYTES = 2
LONGEST = (1 << 7 * LENGTH_BYTES) - 1


class Part(NamedTuple):
    """`data` has a row for each message, or one that all share; `size` is how many bytes of a row count, None where all do."""

    data: Bytes
    size: Ints | None = None

    @property
    def width(self) -> int:
        return int(self.data.shape[1])

    @property
    def sizes(self) -> Ints | int:
        return self.width if self.size is None else self.size

    def where(self, there: Mask | None) -> Part:
        """The part in those messages only."""
        return self if there is None else Part(self.data, np.where(there, self.sizes, 0))


def plain_varint(value: int) -> bytes:
    """The shortest form."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def tag(number: int, kind: int) -> bytes:
    return plain_varint(number << 3 | kind)


def constant(data: bytes) -> Part:
    return Part(np.frombuffer(data, np.uint8)[None, :])


def varint(number: int, values: Ints, width: int) -> Part:
    """A field of numbers of at least 0 and of at most `width` times 7 bits."""
    head = tag(number, VARINT)
    data = np.empty((len(values), len(head) + width), np.uint8)
    data[:, : len(head)] = np.frombuffer(head, np.uint8)
    _padded(values, data[:, len(head) :])
    return Part(data)


def _padded(values: Ints, into: Bytes) -> None:
    left = values.astype(np.uint64)
    width = into.shape[1]
    for i in range(width):
        into[:, i] = (left & np.uint64(0x7F)) | np.uint64(0x80 if i < width - 1 else 0)
        left = left >> np.uint64(7)


def signed(number: int, values: Ints) -> Part:
    """An int64 field: negative numbers take ten bytes, and so do all here."""
    return varint(number, values.astype(np.int64).view(np.uint64).astype(np.uint64), 10)


def double(number: int, values: Floats) -> Part:
    head = tag(number, FIXED64)
    data = np.empty((len(values), len(head) + 8), np.uint8)
    data[:, : len(head)] = np.frombuffer(head, np.uint8)
    data[:, len(head) :] = np.ascontiguousarray(values, "<f8").view(np.uint8).reshape(-1, 8)
    return Part(data)


def string(number: int, values: Any) -> list[Part]:
    """A field of UTF-8, in those messages where `values`, an Arrow array, is not NULL."""
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    values = values.cast(pa.large_string())
    _, offsets_buffer, data_buffer = values.buffers()
    n = len(values)
    if n == 0:
        return []
    offsets = np.frombuffer(offsets_buffer, np.int64)[values.offset : values.offset + n + 1]
    size = np.diff(offsets)
    there = np.asarray(values.is_valid())
    size = np.where(there, size, 0)
    width = int(size.max())
    text = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.zeros(0, np.uint8)
    if width and len(text):
        place = offsets[:-1, None] + np.arange(width)
        data = text[np.minimum(place, len(text) - 1)]
    else:
        data = np.zeros((n, width), np.uint8)
    return [Part(head.data, head.size).where(there) for head in (_head(number, size),)] + [Part(data, size)]


def _head(number: int, size: Ints) -> Part:
    if len(size) and int(size.max()) > LONGEST:
        raise ValueError(f"a message of {int(size.max())} bytes is longer than its length can say")
    head = tag(number, LENGTH)
    data = np.empty((len(size), len(head) + LENGTH_BYTES), np.uint8)
    data[:, : len(head)] = np.frombuffer(head, np.uint8)
    _padded(size, data[:, len(head) :])
    return Part(data)


def message(number: int, parts: Sequence[Part], there: Mask | None = None) -> list[Part]:
    """A field that is a message of these fields, in those rows where it is `there`."""
    total: Ints | int = sum((part.sizes for part in parts), start=0)
    head = _head(number, np.asarray([total] if isinstance(total, int) else total, np.int64))
    return [part.where(there) for part in (head, *parts)]


def flatten(parts: Sequence[Part], n: int) -> bytes:
    """The bytes of `n` rows, one after the other."""
    if not n or not parts:
        return b""
    widths = [part.width for part in parts]
    data = np.empty((n, sum(widths)), np.uint8)
    counts = np.ones(data.shape, bool) if any(part.size is not None for part in parts) else None
    at = 0
    for part, width in zip(parts, widths, strict=True):
        data[:, at : at + width] = part.data
        if counts is not None and part.size is not None:
            counts[:, at : at + width] = np.arange(width) < part.size[:, None]
        at += width
    return (data if counts is None else data[counts]).tobytes()


# -- one at a time, for what is rare ---------------------------------------------------------------


def one(number: int, value: int | float | str | bytes) -> bytes:
    """A field of a single message: a number, a text, or a message that is written already."""
    if isinstance(value, int):
        return tag(number, VARINT) + plain_varint(int(value) & (1 << 64) - 1)
    if isinstance(value, float):
        return tag(number, FIXED64) + struct.pack("<d", value)
    data = value.encode("utf-8", "replace") if isinstance(value, str) else value
    return tag(number, LENGTH) + plain_varint(len(data)) + data


def one_fixed64(number: int, value: int) -> bytes:
    return tag(number, FIXED64) + value.to_bytes(8, "little")
