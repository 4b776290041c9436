"""A timeline as JSON in Chrome's trace event format, which Perfetto and others read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import orjson
import pyarrow as pa

from tailscope.export.timeline import Batch, Counters, Mark, Slices, Timeline, arrow
from tailscope.render.words import sentence
from tailscope.safe import printable
from tailscope.scan import connect
from tailscope.stats import Ints

CATEGORY = "tailscope"


class Writer:
    """Writes one event a line. `ts` and `dur` are microseconds since the timeline's first event."""

    def __init__(self, out: BinaryIO) -> None:
        self.out = out
        self.slices = 0
        self.counters = 0
        # Rows become JSON in DuckDB, which escapes every text; nothing of a trace is ever read from there.
        self.con = connect({"threads": 1})

    def write(self, timeline: Timeline) -> None:
        self.first_ns = timeline.first_ns
        root = np.zeros(len(timeline.tracks.all) + 1, np.int64)
        self.names = [""] * len(root)
        about = {"tailscope": "docs/export.md", "first_unix_ns": str(timeline.first_ns)}
        self.out.write(b'{"displayTimeUnit":"ms","otherData":' + orjson.dumps(about) + b',"traceEvents":[\n')
        lines = []
        for rank, track in enumerate(timeline.tracks.all):
            root[track.id] = track.id if track.parent is None else root[track.parent]
            self.names[track.id] = printable(track.name)
            pid = int(root[track.id])
            kind, of = ("process", {}) if track.parent is None else ("thread", {"tid": track.id})
            for key, value in (
                ("name", {"name": printable(track.name)}),
                ("sort_index", {"sort_index": rank}),
            ):
                lines.append({"ph": "M", "pid": pid, **of, "name": f"{kind}_{key}", "args": value})
        self.root = root
        self.out.write(b",\n".join(map(orjson.dumps, lines)))
        for batch in timeline.batches:
            for text in self._batch(batch, list(timeline.names.known)):
                self.out.write(b",\n" + text)
        self.out.write(b"\n]}\n")
        self.con.close()

    def _batch(self, batch: Batch, names: list[str]) -> Iterator[bytes]:
        if isinstance(batch, Slices):
            self.slices += batch.count
            yield from self._slices(batch, names)
        elif isinstance(batch, Counters):
            self.counters += batch.count
            rows = {**self._place(batch.track, batch.time), "v": batch.value}
            named = pa.array(self.names).take(pa.array(batch.track, pa.int64()))
            yield from self._lines(
                {**rows, "name": named}, "{ph: 'C', pid: pid, tid: tid, ts: ts, name: name, args: {value: v}}"
            )
        else:
            self.slices += len(batch)
            for mark in batch:
                yield from self._mark(mark)

    def _place(self, track: Ints, time: Ints) -> dict[str, Any]:
        return {"tid": track, "pid": self.root[track], "ts": (time - self.first_ns) / 1e3}

    def _slices(self, batch: Slices, names: list[str]) -> Iterator[bytes]:
        text = pa.array(names)
        args = {f"a{i}": values for i, values in enumerate(batch.args.values())}
        fields = ", ".join(f'"{name}": a{i}' for i, name in enumerate(batch.args))
        shape = "{ph: 'X', pid: pid, tid: tid, ts: ts, dur: dur, cat: '" + CATEGORY + "', name: name"
        for start, end, name, there, more in (
            (batch.start, batch.end, batch.name, batch.there, True),
            *((inner.start, inner.end, inner.name, inner.there, False) for inner in batch.inner),
        ):
            rows = {
                **self._place(batch.track, start),
                "dur": (end - start) / 1e3,
                "name": text.take(pa.array(name, pa.int64())),
                "there": np.ones(len(start), bool) if there is None else there,
                **(args if more else {}),
            }
            yield from self._lines(
                rows, shape + (f", args: {{{fields}}}}}" if more and args else "}"), "there"
            )

    def _lines(self, rows: dict[str, Any], shape: str, where: str = "true") -> Iterator[bytes]:
        self.con.register("rows", arrow(**rows))
        try:
            for (text,) in self.con.execute(
                f"SELECT string_agg(to_json({shape}), ',\n') FROM rows WHERE {where} HAVING count(*) > 0"
            ).fetchall():
                yield text.encode()
        finally:
            self.con.unregister("rows")

    def _mark(self, mark: Mark) -> Iterator[bytes]:
        ts = (mark.start - self.first_ns) / 1e3
        place = {"pid": int(self.root[mark.track]), "tid": mark.track, "ts": ts, "cat": CATEGORY}
        args = {
            name: sentence(value) if isinstance(value, str) else value for name, value in mark.args.items()
        }
        event: dict[str, Any] = {**place, "name": sentence(mark.name), "args": args}
        # An arrow ends on slices only, and on no instant.
        if mark.end is None and not (mark.begins or mark.ends):
            event |= {"ph": "i", "s": "t"}
        else:
            event |= {"ph": "X", "dur": 0 if mark.end is None else (mark.end - mark.start) / 1e3}
        yield orjson.dumps(event)
        for phase, numbers in (("s", mark.begins), ("f", mark.ends)):
            for number in numbers:
                flow = {**place, "ph": phase, "id": number, "name": "makes wait"}
                yield orjson.dumps(flow | ({"bp": "e"} if phase == "f" else {}))
