"""A profile's events as typed rows in a temporary Arrow file, so that memory does not grow with the profile.

What an event's row is to say depends on others that may stand anywhere in the file: the step around it, the call that
launched it, the base of all times at the very end. So all rows are written once, and read again when that is known;
only the few that say something of others are kept at hand (`told`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailscope.collectors import _kineto_json as kineto_json
from tailscope.collectors import _kineto_names as names
from tailscope.source import Tally

#: Texts handed to a thread of DuckDB's at a time, and rows taken back.
TEXTS, ROWS = 16_384, 65_536
#: JSON key -> type. A value of another type is NULL; `args` of events of other kinds have other keys.
_FIELDS = {
    "ph": "VARCHAR",
    "cat": "VARCHAR",
    "name": "VARCHAR",
    "tid": "BIGINT",
    "ts": "DOUBLE",
    "dur": "DOUBLE",
}
_ARGS = {
    "stream": "BIGINT",
    "correlation": "BIGINT",
    "bytes": "BIGINT",
    "Collective name": "VARCHAR",
    "Input Dims": "VARCHAR",
}


def _quoted(fields: dict[str, str]) -> str:
    return ",".join(f'"{key}":"{kind}"' for key, kind in fields.items())


_SHAPE = f'{{{_quoted(_FIELDS)},"args":{{{_quoted(_ARGS)}}}}}'
#: µs to ns. Below 2^43 µs, where torch's times since its base lie, a float is right to half a ns; its product is not.
_NS = "TRY_CAST(trunc({0}) AS BIGINT) * 1000 + TRY_CAST(round(({0} - trunc({0})) * 1000) AS BIGINT)"
_TEXTS = pa.schema([("number", pa.int64()), ("event", pa.string())])
_READ = f"""
SELECT number, e IS NULL AS broken, CASE WHEN e.ph IS NULL THEN event END AS unread, e.ph, e.cat AS category, coalesce(e.name, '') AS name, e.tid AS thread,
       coalesce(e.cat IN ('kernel', 'gpu_memcpy', 'gpu_memset', 'gpu_user_annotation'), false) AS on_gpu,
       coalesce(e.cat IN ('user_annotation', 'gpu_user_annotation'), false) AS annotation,
       {_NS.format("e.ts")} AS start_ns, {_NS.format("e.dur")} AS duration_ns,
       coalesce(e.ph = 'X' AND start_ns IS NOT NULL AND coalesce(e.cat, '') NOT IN {{unwanted}}, false) AS kept,
       e.args.stream, e.args.correlation, e.args.bytes, e.args."Input Dims" AS input_dims,
       -- What is said of a collective is read where it is looked at.
       CASE WHEN e.args."Collective name" IS NOT NULL OR starts_with(e.name, 'c10d::') OR starts_with(e.name, 'gloo:')
                 OR starts_with(e.name, 'nccl:') THEN json_extract(event, '$.args')::VARCHAR END AS args
FROM (SELECT number, event, TRY(json_transform(event, '{{shape}}')) AS e FROM texts)
"""
OTHER_EVENTS = {
    "M": "names of processes and threads",
    "i": "instants",
    "I": "instants",
    "C": "counters",
    "s": "flow arrows",
    "t": "flow arrows",
    "f": "flow arrows",
}
PHASE_INDEX = {phase: index for index, phase in enumerate(names.PHASES)}
NONE = -1


class Spool:
    """Typed rows of the events that last. Use as a context manager; `folder` gets the temporary file.

    `told` has the rows of annotations, calls and collectives, `launches` (correlation, time) of all launches, and
    `marks` (time, index of phase, on_gpu) of all ops whose name tells a phase; times are ns since the file's origin.
    """

    def __init__(self, folder: Path, tally: Tally, *, python_stacks: bool) -> None:
        self._path = folder / "events.arrow"
        self._connection = duckdb.connect(config={"memory_limit": "256MB"})
        self._writer: pa.RecordBatchStreamWriter | None = None
        self._tally, self._python_stacks = tally, python_stacks
        self._unread: list[tuple[int, str, bool]] = []
        self._told: list[pa.Table] = []
        self._launches: list[pa.Table] = []
        self._marks: list[pa.Table] = []
        self._starts: list[pa.Array[Any]] = []

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: TracebackType | type[BaseException] | BaseException | None) -> None:
        self._connection.close()
        if self._writer:
            self._writer.close()

    def fill(self, events: Iterable[pa.Array[Any]]) -> bool:
        """Take in all events, JSON texts; tally those that are not kept. False where none was kept."""
        for rows in self._parse(_numbered(events)):
            self._add(rows)
        self._mend()
        return self._finish()

    def _parse(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        texts = pa.RecordBatchReader.from_batches(_TEXTS, batches)
        self._connection.register("texts", texts)
        unwanted = "('Trace')" if self._python_stacks else "('Trace', 'python_function')"
        for batch in self._connection.sql(_READ.format(unwanted=unwanted, shape=_SHAPE)).to_arrow_reader(ROWS):
            yield pa.Table.from_batches([batch])
        self._connection.unregister("texts")

    def _add(self, rows: pa.Table) -> None:
        unread = pc.is_valid(rows["unread"])
        if pc.any(unread).as_py():
            odd = rows.filter(unread)
            found = zip(*(odd[c].to_pylist() for c in ("number", "unread", "broken")), strict=True)
            for number, text, broken in found:
                if self._unread and number != self._unread[-1][0] + 1:
                    self._mend()
                self._unread.append((number, text, broken))
            rows = rows.filter(pc.invert(unread))
        kept = rows.filter(rows["kept"])
        if kept.num_rows < rows.num_rows:
            self._count(rows.filter(pc.invert(rows["kept"])))
        if kept.num_rows:
            self._write(kept.drop_columns(["broken", "unread", "ph", "kept"]))

    def _mend(self) -> None:
        """Put events together again that were cut in pieces, which stand in a row; what is none is tallied."""
        run, self._unread = self._unread, []
        mended: list[tuple[int, str]] = []
        at = 0
        while at < len(run):
            number, text, broken = run[at]
            event, used = None, 1
            if broken:
                pieces = [piece for _, piece, _ in run[at : at + kineto_json.MOST_PIECES]]
                event, used = kineto_json.mend(pieces)
            if event is not None:
                mended.append((number, event))
            else:
                what = "event that is not valid JSON" if broken else "entry of traceEvents that is no event"
                self._tally.reject(what, f"event {number:,}")
            at += used
        if mended:
            batch = pa.RecordBatch.from_pydict(
                {"number": [n for n, _ in mended], "event": [text for _, text in mended]}, schema=_TEXTS
            )
            for rows in self._parse(iter([batch])):
                read = pc.is_valid(rows["ph"])
                lost = rows.num_rows - pc.sum(read).as_py()
                if lost:
                    self._tally.reject("entry of traceEvents that is no event", count=lost)
                self._add(rows.filter(read))

    def _count(self, dropped: pa.Table) -> None:
        groups = dropped.group_by(["ph", "category"]).aggregate([("number", "count"), ("number", "min")])
        for group in groups.sort_by("number_min").to_pylist():
            kind, category, count = group["ph"], group["category"], group["number_count"]
            if kind != "X":
                self._tally.skip(OTHER_EVENTS.get(kind, "events of other kinds"), count)
            elif category == "Trace":
                self._tally.skip("the profiler's own span", count)
            elif category == "python_function" and not self._python_stacks:
                self._tally.skip("Python stack frames (--python-stacks reads them)", count)
            else:
                self._tally.reject("event without a time", f"event {group['number_min']:,}", count)

    def _write(self, rows: pa.Table) -> None:
        duration: Any = rows["duration_ns"]
        if duration.null_count:
            self._tally.blank("event without a duration", count=duration.null_count)
        if (shortest := pc.min(duration).as_py()) is not None and shortest < 0:
            negative = pc.less(duration, 0)
            self._tally.blank("negative duration", count=pc.sum(negative).as_py())
            index = rows.schema.get_field_index("duration_ns")
            rows = rows.set_column(index, "duration_ns", pc.if_else(negative, None, duration))
        rows = _with_meaning(rows)
        self._starts.append(rows["start_ns"].combine_chunks())
        launches = pc.and_(pc.is_valid(rows["correlation"]), pc.invert(rows["on_gpu"]))
        self._launches.append(rows.select(["correlation", "start_ns"]).filter(launches))
        telling = pc.and_(pc.greater_equal(rows["phase"], 0), pc.invert(rows["annotation"]))
        self._marks.append(rows.select(["start_ns", "phase", "on_gpu", "layer_mark"]).filter(telling))
        self._told.append(rows.filter(rows["at_hand"]))
        rows = rows.drop_columns(["args", "at_hand", "layer_mark"])
        if self._writer is None:
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._writer = pa.ipc.new_stream(str(self._path), rows.schema, options=options)
        self._writer.write_table(rows.combine_chunks())

    def _finish(self) -> bool:
        if self._writer is None:
            return False
        self._writer.close()
        self.told = pa.concat_tables(self._told).combine_chunks()
        self.marks = pa.concat_tables(self._marks).sort_by("start_ns")
        launches = pa.concat_tables(self._launches)
        correlation, launched = (launches[c].to_numpy() for c in ("correlation", "start_ns"))
        order = np.lexsort((launched, correlation))
        self.launches = correlation[order], launched[order]
        self.starts = np.concatenate([s.to_numpy() for s in self._starts])
        return True

    def launch_of(self, rows: pa.Table) -> Any:
        """When each row was launched, ns; masked where it was not, or nothing says."""
        correlation = np.asarray(pc.fill_null(rows["correlation"], NONE))
        known, launched = self.launches
        place = np.searchsorted(known, correlation)
        inside = np.minimum(place, max(len(known) - 1, 0))
        found = np.asarray(rows["on_gpu"]) & (correlation >= 0) & (place < len(known))
        if len(known):
            found &= known[inside] == correlation
            return np.ma.masked_array(launched[inside], ~found)
        return np.ma.masked_all(len(correlation), np.int64)

    def rows(self) -> Iterator[pa.Table]:
        """All rows that were kept, in the file's order."""
        with pa.ipc.open_stream(str(self._path)) as reader:
            for batch in reader:
                yield pa.Table.from_batches([batch])


def _numbered(events: Iterable[pa.Array[Any]]) -> Iterator[pa.RecordBatch]:
    read = 0
    for texts in events:
        numbers = pa.array(np.arange(read + 1, read + 1 + len(texts)))
        read += len(texts)
        yield from pa.Table.from_arrays([numbers, texts], schema=_TEXTS).to_batches(TEXTS)


def _with_meaning(rows: pa.Table) -> pa.Table:
    """Rows with what their names tell: `phase` and `collective` (indices, -1 for none), `layer` (-1), `layer_mark`, and
    whether the row is to be kept `at_hand`."""
    encoded = rows["name"].combine_chunks().dictionary_encode()
    texts: Any = encoded.dictionary
    telling = pc.match_substring_regex(texts, names.TELLING, ignore_case=True).to_numpy(zero_copy_only=False)
    executed, annotated, layers, kinds = (np.full(len(texts), NONE, np.int16) for _ in range(4))
    marks, calls = np.zeros(len(texts), bool), np.zeros(len(texts), bool)
    for index in np.flatnonzero(telling).tolist():
        name = texts[index].as_py()
        executed[index] = PHASE_INDEX.get(names.executed_phase(name) or "", NONE)
        annotated[index] = PHASE_INDEX.get(names.annotated_phase(name) or "", NONE)
        layer = names.layer_of(name)
        layers[index] = NONE if layer is None else layer
        kinds[index] = names.KIND_INDEX.get(names.kernel_collective(name) or "", NONE)
        marks[index] = bool(names.LAYER_MARK.match(name))
        calls[index] = bool(names.CALL.match(name) or names.CAPTURING.match(name))
    which = np.asarray(encoded.indices)
    on_gpu, annotation = np.asarray(rows["on_gpu"]), np.asarray(rows["annotation"])
    kind = np.where(on_gpu & ~annotation, kinds[which], NONE)
    return (
        rows.append_column("phase", pa.array(np.where(annotation, annotated[which], executed[which])))
        .append_column("layer", pa.array(layers[which]))
        .append_column("collective", pa.array(kind))
        .append_column("layer_mark", pa.array(marks[which] & ~on_gpu))
        .append_column("at_hand", pa.array(annotation | calls[which] | (kind >= 0)))
    )
