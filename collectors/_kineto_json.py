"""The events of a Kineto trace as Arrow arrays of JSON texts, a piece of the file at a time.

A trace is one JSON object; its `traceEvents` array holds nearly all of it. The array is cut where `}` `,` `{` follow
each other, which is between events or, rarely, inside one (in a list of objects, in a name). What was cut
wrongly is no valid JSON, and valid pieces joined by commas can be read in no other way: so a cut that
parses is right, and only what does not parse is looked at character by character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import orjson
import pyarrow as pa

from tailscope.errors import BadInput
from tailscope.source import MAX_LINE, Source

START = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
CUT = re.compile(rb"\}\s*(?:,\s*\{|\])")
PIECE = 8 << 20
#: A longer event, or more metadata, is no telemetry that we know; it would only exhaust memory.
LONGEST = MAX_LINE
#: Characters decoded in search of the array's end. A real trace needs one event; nested lists need theirs.
MOST_LOOKED_AT = 1 << 30
#: Pieces that an event may have been cut in.
MOST_PIECES = 64
BRACE, COMMA, SPACE = b"{,\x20"
#: Accepts what strict JSON does not: raw control characters in strings.
LENIENT = json.JSONDecoder(strict=False)


class TraceEvents:
    """Iterates over the events as arrays of texts. `metadata` is complete after that.

    Raises BadInput where the file is no object, or has no `traceEvents`.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._looked_at = 0
        self.metadata: dict[str, Any] = {}

    def __iter__(self) -> Iterator[pa.Array[Any]]:
        with self._source.open() as stream:
            held = self._head(stream)
            if held.lstrip().startswith(b"]"):
                self._tail(held.lstrip()[1:] + stream.read(LONGEST))
                return
            while True:
                piece = stream.read(PIECE)
                text = held + piece
                ends = np.array([m.end() for m in CUT.finditer(text)], np.int64)
                codes = np.frombuffer(text, np.uint8)
                at_comma = codes[ends - 1] == BRACE
                cuts = ends[at_comma] - 1
                for end in ends[~at_comma]:
                    done, text = self._closes(stream, text, cuts, int(end))
                    if done:
                        yield from self._events(text[: end - 1], cuts[cuts < end])
                        return
                if not piece:
                    yield from self._unfinished(text, cuts)
                    return
                if len(cuts):
                    yield from self._events(text[: cuts[-1]], cuts[:-1], open_end=True)
                    held = text[cuts[-1] :]
                elif len(text) > LONGEST:
                    self._source.tally.reject("event longer than 64 MiB")
                    held = b""
                else:
                    held = text

    def _head(self, stream: IO[bytes]) -> bytes:
        """Reads up to the first event; returns what was read beyond it."""
        text = b""
        while not (found := START.search(text)):
            piece = stream.read(PIECE)
            if not piece or len(text) > LONGEST:
                what = "no traceEvents in it" if text.lstrip().startswith(b"{") else "not a JSON object"
                raise BadInput(f"not a torch profiler trace: {what}", todo="Export it with torch.profiler")
            text += piece
        self._learn(text[: found.start()] + b'"traceEvents":0}')
        return text[found.end() :]

    def _learn(self, text: bytes) -> bool:
        """Take in metadata; whether the text was a JSON object."""
        try:
            read = json.loads(text.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError):
            return False
        if not isinstance(read, dict):
            return False
        self.metadata = {**read, **self.metadata}
        return True

    def _tail(self, text: bytes) -> None:
        if not self._learn(b'{"traceEvents":0' + text):
            self._source.tally.reject("file ends in the metadata after the events")

    def _closes(self, stream: IO[bytes], text: bytes, cuts: Any, end: int) -> tuple[bool, bytes]:
        """Whether the bracket before `end` closes the array: what follows then completes the object.

        Returns the text too, to which more may have been read.
        """
        first = int(cuts[cuts < end].max(initial=0))
        self._looked_at += end - first
        if self._looked_at > MOST_LOOKED_AT:
            raise BadInput("not a torch profiler trace: lists of objects nested in events without end")
        try:
            event = LENIENT.decode(text[first : end - 1].decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return False, text
        if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
            return False, text
        whole = False
        while True:
            rest = '{"traceEvents":0' + text[end:].decode("utf-8", "replace")
            try:
                _, used = LENIENT.raw_decode(rest)
            except (ValueError, RecursionError):
                used = 0
            if used and rest[used:].strip():
                return False, text
            if whole or len(text) - end > LONGEST:
                if not used and b'"ph"' in text[end:]:
                    return False, text
                self._tail(text[end:])
                return True, text
            more = stream.read(PIECE)
            whole = not more
            text += more

    def _unfinished(self, text: bytes, cuts: Any) -> Iterator[pa.Array[Any]]:
        """The last events of a file that ends before the array does."""
        last = int(cuts[-1]) if len(cuts) else 0
        self._source.tally.reject("file ends in the middle of the events")
        try:
            LENIENT.decode(text[last:].decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            if last:
                yield from self._events(text[:last], cuts[:-1], open_end=True)
        else:
            yield from self._events(text, cuts)

    def _events(self, text: bytes, cuts: Any, open_end: bool = False) -> Iterator[pa.Array[Any]]:
        """Texts of events; `cuts` are where all but the first begin. With `open_end` a comma follows the last."""
        if not cuts.size and not text.strip():
            return
        clean = bytearray(text)
        codes = np.frombuffer(clean, np.uint8)
        starts = np.append(cuts, len(text)) if open_end else cuts
        comma = starts - 1
        while (other := codes[comma] != COMMA).any():
            comma[other] -= 1
        codes[comma] = SPACE
        offsets = np.concatenate([[0], cuts, [len(text)]]).astype(np.int32)
        texts: Any = pa.StringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(clean))
        try:
            texts.validate(full=True)
        except pa.ArrowInvalid:
            texts = pa.array([t.decode("utf-8", "replace") for t in texts.cast(pa.binary()).to_pylist()])
            self._source.tally.blank("bytes that are not UTF-8, replaced")
        yield texts


def mend(texts: list[str]) -> tuple[str | None, int]:
    """The event that begins with a text that is no JSON as it stands, and how many of the texts it takes.

    An event cut in pieces is put together again; raw control characters and half surrogate pairs are let pass.
    None where there is no such event: then one text is lost.
    """
    joined = ""
    for used, text in enumerate(texts, 1):
        joined += ("," if joined else "") + text
        try:
            event = LENIENT.decode(joined)
        except json.JSONDecodeError as error:
            cut = error.pos >= len(joined.rstrip()) or error.msg.startswith("Unterminated")
            if not cut:
                break
        except (ValueError, RecursionError):
            break
        else:
            return (_strict(event), used) if isinstance(event, dict) else (None, 1)
    return None, 1


def _strict(event: dict[str, Any]) -> str:
    try:
        return orjson.dumps(event).decode()
    except (TypeError, ValueError):
        return json.dumps(event, ensure_ascii=False).encode("utf-8", "replace").decode()
