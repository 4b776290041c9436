"""The events of a Kineto trace as Arrow arrays of JSON texts, a piece of the file at a time.

A trace is one JSON object; its `traceEvents` array holds nearly all of it. The array is cut where `}` `,` `{` follow
each other, which is between events or, rarely, inside one (in a list of objects, in a name). An event that was cut
begins with a text that is no valid JSON, and texts that are valid can be read in no other way: so only what does not
parse, and what follows it, is looked at character by character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from tailscope.errors import BadInput
from tailscope.source import MAX_LINE, Source

START = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
CUT = re.compile(rb"\}\s*(?:,\s*\{|\])")
#: What comes next in an object, but never in a list.
MEMBER = re.compile(rb'\s*(?:\}|,\s*"(?:[^"\\]|\\.)*"\s*:)')
#: Small: what DuckDB needs to parse it is many times as much.
PIECE = 2 << 20
#: A longer event, or more metadata, is no telemetry that we know; it would only exhaust memory.
LONGEST = MAX_LINE
#: Characters decoded in search of the array's end. A real trace needs one event; nested lists need theirs.
MOST_LOOKED_AT = 1 << 30
#: Pieces that an event may have been cut in.
MOST_PIECES = 64
#: `RETURN` takes the place of the comma after an event. It is space in JSON, and no string may hold it: so where a
#: name was cut, its comma can be put back.
BRACE, COMMA, RETURN = b"{,\r"
SPACE = " \t\r\n"
#: Bytes after a bracket that mostly tell already whether it closes the array.
GLANCE = 4_096
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
                        self._tail(text[end:])
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
        if not self._learn(text[: found.start()] + b'"traceEvents":0}'):
            self._source.tally.reject("metadata before the events that is not valid JSON")
        held = text[found.end() :]
        while not held.strip() and (piece := stream.read(PIECE)):
            held = piece
        return held

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
        """Take in the metadata behind the array."""
        whole = '{"traceEvents":0' + text.decode("latin-1")
        try:
            _, used = LENIENT.raw_decode(whole)
        except json.JSONDecodeError as error:
            cut = _is_cut(error, whole)
            self._source.tally.reject(
                "file ends in the metadata after the events"
                if cut
                else "metadata after the events that is not valid JSON"
            )
            return
        except (ValueError, RecursionError):
            self._source.tally.reject("metadata after the events that is not valid JSON")
            return
        self._learn(whole[:used].encode("latin-1"))
        if whole[used:].strip():
            self._source.tally.reject("something follows the end of the trace")

    def _closes(self, stream: IO[bytes], text: bytes, cuts: Any, end: int) -> tuple[bool, bytes]:
        """Whether the bracket before `end` closes the array: what follows then completes the object.

        Returns the text too, to which more may have been read.
        """
        if _completes(text[end : end + GLANCE]) == "never":
            return False, text
        begins = [0, *cuts[cuts < end].tolist()][-MOST_PIECES:]
        self._looked_at += end - begins[-1]
        if self._looked_at > MOST_LOOKED_AT:
            raise BadInput("not a torch profiler trace: lists of objects nested in events without end")
        # A list within an event, or a name, can look like the end too.
        sure = any(_is_event(text[begin : end - 1]) for begin in reversed(begins))
        while True:
            found = _completes(text[end:])
            if found == "never" or (found == "broken" and not sure):
                return False, text
            if found == "more":
                return sure, text
            more = b"" if len(text) - end > LONGEST else stream.read(PIECE)
            if not more:
                return found == "whole" or (sure and b'"ph"' not in text[end:]), text
            text += more

    def _unfinished(self, text: bytes, cuts: Any) -> Iterator[pa.Array[Any]]:
        """The last events of a file whose array does not end with an event, or not at all."""
        last = int(cuts[-1]) if len(cuts) else 0
        used, tail = _entries(text[last:])
        if tail is None:
            self._source.tally.reject("file ends in the middle of the events")
        if used:
            # More than a comma behind it: an event was cut where that text begins.
            whole = tail is None and text[last + used :].strip(b", \t\r\n")
            yield from self._events(text if whole else text[: last + used], cuts)
        elif last:
            yield from self._events(text[:last], cuts[:-1], open_end=True)
        if tail is not None:
            self._tail(tail)

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
        codes[comma] = RETURN
        offsets: Any = np.concatenate([[0], cuts, [len(text)]]).astype(np.int32)
        texts: Any = pa.StringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(clean))
        try:
            texts.validate(full=True)
        except pa.ArrowInvalid:
            raw = texts.cast(pa.binary()).to_pylist()
            read = [text.decode("utf-8", "replace") for text in raw]
            odd = sum(text.encode() != was for text, was in zip(read, raw, strict=True))
            self._source.tally.blank("bytes that are not UTF-8, replaced", count=odd)
            texts = pa.array(read)
        yield texts


def _is_event(text: bytes) -> bool:
    try:
        read = LENIENT.decode(text.decode("latin-1"))
    except (ValueError, RecursionError):
        return False
    return isinstance(read, dict) and isinstance(read.get("ph"), str)


def _completes(tail: bytes) -> str:
    """Whether what follows a bracket completes the trace's object: `whole` or, if something comes after it, `more`;
    `short` where it ends too early to tell, `broken` where it is no JSON, `never` where the bracket was an inner one."""
    start = tail.lstrip()[:1]
    if start not in (b"", b",", b"}"):
        return "never"
    text = '{"traceEvents":0' + tail.decode("latin-1")
    try:
        _, used = LENIENT.raw_decode(text)
    except json.JSONDecodeError as error:
        if _is_cut(error, text):
            return "short"
        return "broken" if MEMBER.match(tail) else "never"
    except (ValueError, RecursionError):
        return "broken"
    after = text[used:].strip()
    if after.startswith(("}", ",", "]")):
        return "never"
    return "more" if after else "whole"


def _is_cut(error: json.JSONDecodeError, text: str) -> bool:
    """Whether the text is valid as far as it goes."""
    left = len(text.rstrip()) - error.pos
    # The error of a literal or an escape that was cut is said to be where it begins, that of a number at its "e+".
    begun = left <= len("-Infinity") and error.msg.startswith(("Expecting value", "Invalid"))
    return left <= len("e+") or begun or error.msg.startswith("Unterminated")


def _entries(text: bytes) -> tuple[int, bytes | None]:
    """Reads entries of the array: (where the last whole one ends, what follows the array).

    None for the latter where the text ends before, or the array could only end behind an event: that was
    looked for already.
    """
    entries = text.decode("latin-1")
    at, used, last = 0, 0, None
    while True:
        at = _after_space(entries, at)
        if entries.startswith("]", at) and not isinstance(last, dict):
            return used, text[at + 1 :]
        try:
            last, used = LENIENT.raw_decode(entries, at)
        except (ValueError, RecursionError):
            return used, None
        at = _after_space(entries, used)
        if entries.startswith(",", at):
            at, last = at + 1, None


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1] in tuple(SPACE):
        at += 1
    return at


class Mended(NamedTuple):
    """What texts hold that are no events as they stand: events, entries that are none, and how many texts that took."""

    events: list[str]
    others: int
    used: int


def mend(texts: list[str]) -> Mended | None:
    """What begins with the first of the texts, which is no event as it stands.

    An event cut in pieces is put together again; raw control characters and half surrogate pairs are let pass.
    None where nothing can be read; `used` is 0 where more texts are needed to tell.
    """
    joined = ""
    for used, text in enumerate(texts, 1):
        joined = _joined(joined, text) if used > 1 else text
        try:
            entries = LENIENT.decode(f"[{joined}]")
            events = [_strict(entry) for entry in entries if isinstance(entry, dict)]
        except json.JSONDecodeError as error:
            if not _is_cut(error, joined):
                return None
        except (ValueError, RecursionError):
            return None
        else:
            return Mended(events, len(entries) - len(events), used)
    return Mended([], 0, 0)


def _joined(before: str, after: str) -> str:
    """Two texts with the comma between them that cutting took."""
    end = len(before.rstrip(SPACE))
    space = before[end:]
    # With more than one the text was cut between objects, where a comma may stand anywhere.
    return before[:end] + (space.replace("\r", ",") if space.count("\r") == 1 else space + ",") + after


def _strict(event: dict[str, Any]) -> str:
    try:
        return orjson.dumps(event).decode()
    except (TypeError, ValueError):
        return json.dumps(event, ensure_ascii=False).encode("utf-8", "replace").decode()
