"""A profile's events as typed rows in a temporary Arrow file, so that memory does not grow with the profile.

What an event's row is to say depends on others that may stand anywhere in the file: the step around it, the call that
launched it, the base of all times at the very end. So all rows are written once, and read again when that is known;
only the few that say something of others are kept at hand (`told`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from tailscope.schema import GPU_CATEGORIES, PHASES
from tailscope.source import Tally

from . import _kineto_json as kineto_json
from . import _kineto_names as names

#: Untyped: the stubs of pyarrow know only some of what these functions take.
pc: Any = compute

#: Texts handed to a thread of DuckDB's at a time, and rows taken back.
TEXTS, ROWS = 16_384, 32_768
#: Starts kept of a table's worth of rows, to know when the profile was.
SAMPLED = 1_000
#: Rows left out that are counted at a time.
COUNTED = 1_000_000
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
#: µs to ns, NULL beyond what a table holds. Below 2^43 µs, where torch's times since its base lie, a float is right to
#: half a ns; its product is not.
_NS = (
    "CASE WHEN {0} BETWEEN -9e15 AND 9e15 "
    "THEN CAST(trunc({0}) AS BIGINT) * 1000 + CAST(round(({0} - trunc({0})) * 1000) AS BIGINT) END"
)
_TEXT_FIELDS: list[Any] = [("number", pa.int64()), ("event", pa.string())]
_TEXTS = pa.schema(_TEXT_FIELDS)
#: An annotation of a GPU's is on its tracks too.
_ON_GPU = ", ".join(f"'{category}'" for category in (*GPU_CATEGORIES, "gpu_user_annotation"))
_READ = f"""
SELECT number, e IS NULL AS broken, CASE WHEN e.ph IS NULL THEN event END AS unread, e.ph, e.cat AS category, coalesce(e.name, '') AS name, e.tid AS thread,
       coalesce(e.cat IN ({_ON_GPU}), false) AS on_gpu,
       coalesce(e.cat IN ('user_annotation', 'gpu_user_annotation'), false) AS annotation,
       {_NS.format("e.ts")} AS start_ns, {_NS.format("e.dur")} AS duration_ns,
       coalesce(e.ph = 'X' AND start_ns IS NOT NULL AND coalesce(e.cat, '') NOT IN {{unwanted}}, false) AS kept,
       e.args.stream, e.args.correlation, e.args.bytes, e.args."Input Dims" AS input_dims,
       -- What is said of a collective is read where it is looked at.
       CASE WHEN e.args."Collective name" IS NOT NULL OR starts_with(e.name, 'c10d::') OR starts_with(e.name, 'gloo:')
                 OR starts_with(e.name, 'nccl:') THEN json_extract(event, '$.args')::VARCHAR END AS args
FROM (SELECT number, event, TRY(json_transform(event, '{{shape}}')) AS e FROM texts)
"""
#: What c10d says of a collective, and the shapes and splits of what is exchanged, but for the number that tells it apart.
SAID = {
    "Collective name": "VARCHAR",
    "In msg nelems": "BIGINT",
    "Out msg nelems": "BIGINT",
    "In split size": "VARCHAR",
    "Out split size": "VARCHAR",
    "Group size": "BIGINT",
    "dtype": "VARCHAR",
    "Process Group Name": "VARCHAR",
    "Input Dims": "JSON",
    "Input type": "JSON",
    "Concrete Inputs": "JSON",
}
_SAY = f"""
SELECT to_json(TRY(json_transform(args, '{{{_quoted(SAID)}}}')))::VARCHAR AS said,
       CASE WHEN TRY(json_type(args, '$.Seq')) LIKE '%BIGINT'
            THEN coalesce(TRY(json_transform(args, '{{"Seq":"BIGINT"}}')).Seq, -1) ELSE -1 END AS seq
FROM at_hand
"""
_TOLD = [
    "number",
    "thread",
    "start_ns",
    "duration_ns",
    "correlation",
    "on_gpu",
    "annotation",
    "collective",
    "phase",
]
OTHER_EVENTS = {
    "M": "names of processes and threads",
    "i": "instants",
    "I": "instants",
    "C": "counters",
    "s": "flow arrows",
    "t": "flow arrows",
    "f": "flow arrows",
}
PHASE_INDEX = {phase: index for index, phase in enumerate(PHASES)}
ATTENTION = PHASE_INDEX["attention"]
NONE = -1


class Launches(NamedTuple):
    """Calls with a correlation, by it: when, in which thread, and whether the call launches something."""

    correlation: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    thread: NDArray[np.int64]
    is_launch: NDArray[np.bool_]


class Texts:
    """Different texts in the order in which they came; a code is a place among them, NONE for no text."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._places: dict[str, int] = {}

    def codes(self, column: Any) -> Any:
        encoded = column.combine_chunks().dictionary_encode()
        own = [self._place(text) for text in encoded.dictionary.to_pylist()]
        return pa.array(np.array([*own, NONE], np.int32)[np.asarray(pc.fill_null(encoded.indices, -1))])

    def _place(self, text: str) -> int:
        place = self._places.setdefault(text, len(self.texts))
        if place == len(self.texts):
            self.texts.append(text)
        return place

    def where(self, test: Callable[[str], Any]) -> NDArray[np.bool_]:
        """Which texts pass a test, and False at the end, for NONE."""
        return np.array([*(bool(test(text)) for text in self.texts), False])


class Spool:
    """Typed rows of the events that last. Use as a context manager; `folder` gets the temporary file.

    `told` has the rows of annotations, calls and collectives, their texts as codes, `launches` (correlation, time, thread, whether
    it is one) of all calls of the runtime that may be launches, `marks` (time, index of phase, on_gpu, thread) of all ops whose name tells
    a phase, and `attention` (time, correlation, name as a code) of attention's kernels; times are ns since the file's origin.
    """

    def __init__(self, folder: Path, tally: Tally, *, python_stacks: bool) -> None:
        self._path = folder / "events.arrow"
        #: Names of the rows in `told`, and what calls among them say, as JSON: the columns `name` and `said` count them.
        self.names, self.said = Texts(), Texts()
        self._aside = duckdb.connect()
        self._connection = duckdb.connect(config={"memory_limit": "256MB"})
        self._writer: pa.RecordBatchStreamWriter | None = None
        self._tally, self._python_stacks = tally, python_stacks
        #: Texts on their way through DuckDB, each array with the number of its first; how many texts were read.
        self._texts: deque[tuple[int, pa.Array[Any]]] = deque()
        self._read = 0
        self._all_read = False
        self._failure: Exception | None = None
        #: Rows that wait for texts not yet read.
        self._held: pa.Table | None = None
        #: Number of the last text that was a piece of an event.
        self._taken_to = 0
        self._spare = 0
        self._dropped: list[pa.Table] = []
        self._told: list[pa.Table] = []
        self._launches: list[pa.Table] = []
        self._marks: list[pa.Table] = []
        self._attention: list[pa.Table] = []
        self._starts: list[NDArray[np.int64]] = []

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: TracebackType | type[BaseException] | BaseException | None) -> None:
        self._connection.close()
        self._aside.close()
        if self._writer:
            self._writer.close()

    def fill(self, events: Iterable[pa.Array[Any]]) -> bool:
        """Take in all events, JSON texts; tally those that are not kept. False where none was kept."""
        for rows in self._parse(self._connection, self._numbered(events)):
            self._add(rows)
        if self._failure:
            raise self._failure
        if self._held:
            held, self._held = self._held, None
            self._add(held)
        if self._dropped:
            self._count()
        return self._finish()

    def _numbered(self, events: Iterable[pa.Array[Any]]) -> Iterator[pa.RecordBatch]:
        try:
            for texts in events:
                first = self._read + 1
                self._texts.append((first, texts))
                self._read += len(texts)
                numbers = pa.array(np.arange(first, first + len(texts)))
                yield from pa.Table.from_arrays([numbers, texts], schema=_TEXTS).to_batches(TEXTS)
        except Exception as error:
            # DuckDB would make another error of it.
            self._failure = error
        self._all_read = True

    def _parse(
        self, connection: duckdb.DuckDBPyConnection, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.Table]:
        texts = pa.RecordBatchReader.from_batches(_TEXTS, batches)
        connection.register("texts", texts)
        unwanted = "('Trace')" if self._python_stacks else "('Trace', 'python_function')"
        # DuckDB gives what each thread has; a table's worth of it is cheaper by the row.
        together: list[pa.RecordBatch] = []
        for batch in connection.sql(_READ.format(unwanted=unwanted, shape=_SHAPE)).to_arrow_reader(ROWS):
            together.append(batch)
            if sum(b.num_rows for b in together) >= ROWS:
                yield pa.Table.from_batches(together).combine_chunks()
                together = []
        if together:
            yield pa.Table.from_batches(together).combine_chunks()
        connection.unregister("texts")

    def _add(self, rows: pa.Table) -> None:
        if self._held:
            rows, self._held = pa.concat_tables([self._held, rows]), None
        if rows["unread"].null_count < rows.num_rows or rows["number"][0].as_py() <= self._taken_to:
            rows = self._mended(rows)
        if not rows.num_rows:
            return
        done = rows["number"][-1].as_py()
        while self._texts and self._texts[0][0] + len(self._texts[0][1]) <= done:
            self._texts.popleft()
        kept = rows.filter(rows["kept"])
        if kept.num_rows < rows.num_rows:
            self._drop(rows.filter(pc.invert(rows["kept"])))
        if kept.num_rows:
            self._write(kept.drop_columns(["broken", "unread", "ph", "kept"]))

    def _mended(self, rows: pa.Table) -> pa.Table:
        """The rows with events put together again that were cut in pieces; what is none is tallied and left out.

        A piece may look like an event, so all that an event takes is left out, in the next rows too. Rows that
        need texts not yet read are held back.
        """
        numbers = rows["number"].to_numpy()
        out = pc.is_valid(rows["unread"]).to_numpy(zero_copy_only=False) | (numbers <= self._taken_to)
        mended: list[tuple[int, str]] = []
        for index in np.flatnonzero(out & (numbers > self._taken_to)).tolist():
            number = int(numbers[index])
            if number <= self._taken_to:
                continue
            if not rows["broken"][index].as_py():
                self._tally.reject("entry of traceEvents that is no event", f"event {number:,}")
                continue
            pieces = self._texts_from(number)
            found = kineto_json.mend(pieces)
            if found and not found.used and len(pieces) < kineto_json.MOST_PIECES and not self._all_read:
                self._held = rows.slice(index)
                rows, out = rows.slice(0, index), out[:index]
                break
            if not found or not found.used:
                self._tally.reject("event that is not valid JSON", f"event {number:,}")
                continue
            if found.others:
                self._tally.reject("entry of traceEvents that is no event", f"event {number:,}", found.others)
            for place, event in enumerate(found.events):
                # Numbers tell events apart: of several in one text the others get some that no text has.
                self._spare -= place >= found.used
                mended.append((number + place if place < found.used else self._spare, event))
            self._taken_to = number + found.used - 1
            out[index : index + found.used] = True
        return pa.concat_tables([rows.filter(pa.array(~out)), *self._read_alone(mended)]).sort_by("number")

    def _texts_from(self, number: int) -> list[str]:
        """The texts of an event and those that follow, as many as an event may have been cut in."""
        found: list[Any] = []
        for first, texts in list(self._texts):
            if first + len(texts) > number and len(found) < kineto_json.MOST_PIECES:
                inside = max(number - first, 0)
                found += texts.slice(inside, kineto_json.MOST_PIECES - len(found)).to_pylist()
        return found

    def _read_alone(self, events: list[tuple[int, str]]) -> Iterator[pa.Table]:
        if not events:
            return
        batch = pa.RecordBatch.from_pydict(
            {"number": [n for n, _ in events], "event": [text for _, text in events]}, _TEXTS
        )
        with self._connection.cursor() as connection:
            for rows in self._parse(connection, iter([batch])):
                read = pc.is_valid(rows["ph"])
                if lost := rows.num_rows - pc.sum(read).as_py():
                    self._tally.reject("entry of traceEvents that is no event", count=lost)
                yield rows.filter(read)

    def _drop(self, dropped: pa.Table) -> None:
        self._dropped.append(dropped.select(["ph", "category", "number"]))
        if sum(rows.num_rows for rows in self._dropped) >= COUNTED:
            self._count()

    def _count(self) -> None:
        """Tally what was dropped, many at a time."""
        dropped, self._dropped = pa.concat_tables(self._dropped), []
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
        self._starts.append(rows["start_ns"].to_numpy()[:: max(1, rows.num_rows // SAMPLED)].copy())
        launches = pc.and_(pc.is_valid(rows["correlation"]), pc.invert(rows["on_gpu"]))
        self._launches.append(rows.select(["correlation", "start_ns", "thread", "launch"]).filter(launches))
        telling = pc.and_(pc.greater_equal(rows["phase"], 0), pc.invert(rows["annotation"]))
        self._marks.append(
            rows.select(["start_ns", "phase", "on_gpu", "layer_mark", "thread"]).filter(telling)
        )
        attention = pc.and_(pc.equal(rows["phase"], ATTENTION), pc.equal(rows["category"], "kernel"))
        kernels = rows.select(["start_ns", "correlation", "name"]).filter(attention)
        codes = self.names.codes(names.read_of(kernels["name"]))
        self._attention.append(kernels.drop_columns(["name"]).append_column("name", codes))
        self._told.append(self._coded(rows.filter(rows["at_hand"])))
        rows = rows.drop_columns(["args", "at_hand", "layer_mark", "launch"])
        if self._writer is None:
            self._writer = pa.ipc.new_stream(str(self._path), rows.schema)
        self._writer.write_table(rows.combine_chunks())

    def _coded(self, rows: pa.Table) -> pa.Table:
        """Rows at hand with codes for their texts: many, but few different ones."""
        self._aside.register("at_hand", rows.select(["args"]))
        calls = self._aside.sql(_SAY).to_arrow_table()
        self._aside.unregister("at_hand")
        return (
            rows.select(_TOLD)
            .append_column("name", self.names.codes(names.read_of(rows["name"])))
            .append_column("said", self.said.codes(calls["said"]))
            .append_column("seq", calls["seq"])
        )

    def _finish(self) -> bool:
        if self._writer is None:
            return False
        self._writer.close()
        self.told = pa.concat_tables(self._told).combine_chunks()
        self.marks = pa.concat_tables(self._marks).sort_by("start_ns")
        self.attention = pa.concat_tables(self._attention)
        launches = pa.concat_tables(self._launches)
        # The pieces would take as much again.
        self._told, self._marks, self._attention, self._launches = [], [], [], []
        order = np.lexsort((launches["start_ns"].to_numpy(), launches["correlation"].to_numpy()))
        threads = pc.fill_null(launches["thread"], NONE).to_numpy()
        self.launches = Launches(
            launches["correlation"].to_numpy()[order],
            launches["start_ns"].to_numpy()[order],
            threads[order],
            np.asarray(launches["launch"])[order],
        )
        self.starts = np.concatenate(self._starts)
        return True

    def keep_between(self, low_ns: int, high_ns: int, longest_ns: int) -> None:
        """Let no event at another time, and none that lasts longer, say anything of others."""

        def near(times: Any) -> Any:
            return pc.and_(pc.greater_equal(times, low_ns), pc.less_equal(times, high_ns))

        short = pc.less_equal(pc.fill_null(self.told["duration_ns"], 0), longest_ns)
        self.told = self.told.filter(pc.and_(near(self.told["start_ns"]), short))
        self.marks = self.marks.filter(near(self.marks["start_ns"]))
        self.attention = self.attention.filter(near(self.attention["start_ns"]))
        one = self.launches
        kept = (one.start_ns >= low_ns) & (one.start_ns <= high_ns)
        if not kept.all():
            self.launches = Launches(
                one.correlation[kept], one.start_ns[kept], one.thread[kept], one.is_launch[kept]
            )

    def launch_of(self, rows: pa.Table) -> NDArray[np.int64]:
        """Index in `launches` of what launched each row; NONE where nothing did, or nothing says."""
        correlation = np.asarray(pc.fill_null(rows["correlation"], NONE))
        on_gpu = np.asarray(rows["on_gpu"]) if "on_gpu" in rows.column_names else True
        known = self.launches.correlation
        if not len(known):
            return np.full(len(correlation), NONE)
        place = np.minimum(np.searchsorted(known, correlation), len(known) - 1)
        return np.where(on_gpu & (correlation >= 0) & (known[place] == correlation), place, NONE)

    def rows(self) -> Iterator[pa.Table]:
        """All rows that were kept, in the file's order."""
        with pa.OSFile(str(self._path), "rb") as file, pa.ipc.open_stream(file) as reader:
            for batch in reader:
                yield pa.Table.from_batches([batch])


def _with_meaning(rows: pa.Table) -> pa.Table:
    """Rows with what their names tell: `phase` and `collective` (indices, -1 for none), `layer` (-1), `layer_mark`, and
    whether the row is to be kept `at_hand`."""
    encoded = rows["name"].combine_chunks().dictionary_encode()
    texts: Any = names.read_of(encoded.dictionary)
    telling = pc.match_substring_regex(texts, names.TELLING, ignore_case=True).to_numpy(zero_copy_only=False)
    executed, annotated, layers, kinds = (np.full(len(texts), NONE, np.int16) for _ in range(4))
    marks, calls = np.zeros(len(texts), bool), np.zeros(len(texts), bool)
    launch = pc.match_substring_regex(texts, names.LAUNCH).to_numpy(zero_copy_only=False)
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
        .append_column("launch", pa.array(launch[which]))
        .append_column("at_hand", pa.array(annotation | calls[which] | (kind >= 0)))
    )
