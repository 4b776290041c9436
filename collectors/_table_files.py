"""Tables of any make as batches of text: CSV, JSON lines and Parquet, read in pieces of bounded size.

A value is text or NULL here; what it means is for the reader of the batches to say.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from tailscope.errors import BadInput
from tailscope.source import HEAD, MAX_LINE, Source

PARQUET_MAGIC = b"PAR1"
#: Bytes parsed at a time. A row of CSV cannot be longer than that.
BLOCK = 16 << 20
ROWS = 65_536
#: Rows looked at to say what a table is.
SAMPLE = 200
SAMPLE_BYTES = 8 << 20
#: Column of row numbers beside those of the file. No file has it: NUL is no character of a name.
ROW = "\0row"
#: Columns shown in a message.
SHOWN = 20

DELIMITERS = ",;\t|"
#: What a line holds that holds nothing.
_BLANK = DELIMITERS + ' "\r\n'
#: Rows that are looked through for the line on which a quote opens.
MOST_ROWS = 1_000_000
UNEVEN = "row with another number of cells than the header"
UNCLOSED = "line lost in a row whose quote is not closed, or too late"
#: A header's cell: a name, not a sentence and not a value.
_NAME = re.compile(r"[^\W\d][\w .\-/()%\[\]:#]{0,99}")
#: Half of a pair of surrogates in JSON, which no parser that is strict takes; whole pairs are kept.
_SURROGATES = re.compile(rb"(\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|\\u[dD][89a-fA-F][0-9a-fA-F]{2}")

Kind = Literal["csv", "jsonl", "parquet"]


@dataclass(frozen=True)
class Sample:
    """What a table is and how it begins: its columns in order, and its first rows as text by column.

    `timestamps` are columns of Parquet that hold instants, whatever their unit there.
    """

    kind: Kind
    columns: tuple[str, ...]
    rows: tuple[dict[str, str], ...]
    delimiter: str = ","
    timestamps: tuple[str, ...] = ()
    #: Lines of CSV up to and with the header.
    header_lines: int = 1

    def values(self, column: str) -> list[str]:
        return [value for row in self.rows if (value := row.get(column, "").strip())]


def sample(source: Source, sure: bool = False) -> Sample | None:
    """How the file begins, if it is a table; None if it is not.

    Where someone says that it is a table (`sure`), its header may hold anything.
    """
    head = source.head()
    if head.startswith(PARQUET_MAGIC):
        return _sample_parquet(source)
    text = head.decode("utf-8", "replace")
    if "\0" in text.partition("\n")[0]:
        return None
    if text.lstrip().startswith("{"):
        return _sample_lines(source)
    size = HEAD
    if len(head) == HEAD and text.lstrip(_BLANK).count("\n") < 2:
        # A header, or the row after it, that is longer than what is looked at to recognise a file.
        size = SAMPLE_BYTES
        with Source(source.path).open() as stream:
            head = stream.read(size)
        text = head.decode("utf-8", "replace")
        if sure and len(head) == size and "\n" not in text.lstrip(_BLANK):
            raise BadInput("its first line is longer than 8 MiB, which is no header")
    whole = text.rpartition("\n")[0] if len(head) == size else text
    return _sample_csv(whole or text, sure)


def _sample_lines(source: Source) -> Sample | None:
    """The first lines whole: one with a prompt in it may be longer than what is looked at to recognise a file."""
    rows = []
    left = SAMPLE_BYTES
    with Source(source.path).open() as stream:
        for _ in range(SAMPLE):
            line = stream.readline(left)
            left -= len(line)
            if not left or not line:
                break
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(record, dict):
                rows.append(_flat(record))
    if not rows:
        return None
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    return Sample("jsonl", columns, tuple(rows)) if len(columns) > 1 else None


def _flat(record: dict[str, Any], prefix: str = "", depth: int = 0) -> dict[str, str]:
    """Keys of nested objects are joined by dots; lists are no values of a request."""
    flat: dict[str, str] = {}
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and depth < 4:
            flat |= _flat(value, f"{name}.", depth + 1)
        elif value is None or isinstance(value, (str, int, float)):
            flat[name] = "" if value is None else str(value)
    return flat


def _sample_csv(text: str, sure: bool) -> Sample | None:
    # Spreadsheets begin with rows that hold nothing.
    blank = 0
    while text and not text.partition("\n")[0].strip(_BLANK):
        text, blank = text.partition("\n")[2], blank + 1
    lines = text.splitlines()
    if not lines or (len(lines) < 2 and not sure):
        return None
    for delimiter in sorted(DELIMITERS, key=lambda d: -lines[0].count(d)):
        try:
            rows = list(csv.reader(io.StringIO(text), delimiter=delimiter))[: SAMPLE + 1]
        except csv.Error:
            continue
        rows = [row for row in rows if row]
        names = [name.strip() for name in rows[0]] if rows else []
        # An index that pandas wrote has no name.
        if len(names) < 2 or not (sure or all(_NAME.fullmatch(name) for name in names if name)):
            continue
        body = [row for row in rows[1:] if len(row) == len(names)]
        # A log with commas in it is not a table.
        if sure or (body and 2 * len(body) >= len(rows) - 1):
            return Sample(
                "csv",
                tuple(names),
                tuple(dict(zip(names, row, strict=True)) for row in body),
                delimiter,
                header_lines=blank + 1,
            )
    return None


def _sample_parquet(source: Source) -> Sample | None:
    try:
        with pq.ParquetFile(source.path) as file:
            first = next(file.iter_batches(batch_size=SAMPLE), None)
            schema = file.schema_arrow
    except (pa.ArrowException, OSError, ValueError):
        return None
    if len(set(schema.names)) < len(schema.names):
        raise BadInput(
            "a column is there twice", todo="Write the table with a name of its own for each column"
        )
    empty = pa.RecordBatch.from_pylist([], schema=schema)
    table = _flattened(first if first is not None else empty)
    if len(set(table.schema.names)) < len(table.schema.names):
        raise BadInput("a column has the name of a field of another one, with a dot between")
    stamps = tuple(f.name for f in table.schema if pa.types.is_timestamp(f.type) or pa.types.is_date(f.type))
    simple = [f.name for f in table.schema if not pa.types.is_nested(f.type)]
    texts = {name: _texts(table[name]) for name in simple}
    rows = [
        {name: values[i] for name, values in texts.items() if values[i] is not None}
        for i in range(table.num_rows)
    ]
    return Sample("parquet", tuple(simple), tuple(rows), timestamps=stamps)


def _texts(column: Any) -> list[Any]:
    """A column's values as texts; None where it holds what no text can be made of."""
    try:
        return [None if value is None else str(value) for value in column.to_pylist()]
    except (pa.ArrowException, ValueError, OverflowError):
        return [None] * len(column)


def _flattened(batch: pa.RecordBatch) -> pa.Table:
    """Structs become columns whose names are joined by dots."""
    table = pa.Table.from_batches([batch])
    while any(pa.types.is_struct(f.type) for f in table.schema):
        table = table.flatten()
    return table


def batches(source: Source, found: Sample, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The columns `wanted` as text, and ROW, the number of the row from 1 (JSON: of the line), in pieces.

    JSON lines give one column, `line`. What cannot be read is counted in the source's tally. Raises BadInput where the
    rest of the file cannot be read.
    """
    if found.kind == "csv":
        return _csv(source, found, wanted)
    if found.kind == "jsonl":
        return _lines(source)
    return _parquet(source, wanted)


def _csv(source: Source, found: Sample, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
    broken: list[int] = []
    swallowed: list[int] = []

    def reject(row: int, lines: int) -> None:
        """A row that is no row, and the lines that went with it."""
        if lines > 1:
            where = _line_of(source, found, row) if not swallowed else ""
            swallowed.append(row)
            source.tally.reject(UNCLOSED, where, lines)
        else:
            source.tally.reject(UNEVEN, f"row {row:,}")

    def leave_out(row: Any) -> Literal["skip", "error"]:
        # The header is row 1.
        broken.append(row.number - found.header_lines)
        reject(broken[-1], 1 + (row.text or "").rstrip("\r\n").count("\n"))
        return "skip"

    names = list(found.columns)
    kept = [name for name in dict.fromkeys(wanted) if name in names]
    with source.open() as stream:
        counted = _Counted(stream)
        try:
            reader = pa_csv.open_csv(
                cast(Any, pa.PythonFile(counted, mode="r")),
                read_options=pa_csv.ReadOptions(
                    block_size=BLOCK, use_threads=False, column_names=names, skip_rows=found.header_lines
                ),
                parse_options=pa_csv.ParseOptions(
                    delimiter=found.delimiter, newlines_in_values=True, invalid_row_handler=leave_out
                ),
                convert_options=pa_csv.ConvertOptions(
                    include_columns=kept,
                    column_types={name: pa.string() for name in kept},
                    strings_can_be_null=False,
                ),
            )
            done = 0
            for batch in reader:
                numbers, done = _numbers(done, batch.num_rows, broken)
                rows = _with_rows(batch, numbers)
                lines = _rows_inside(batch, found)
                for place in np.flatnonzero(lines).tolist():
                    reject(int(numbers[place]), 1 + int(lines[place]))
                yield rows.filter(pa.array(lines == 0)) if lines.any() else rows
            inside = counted.lines - found.header_lines - max(done, *broken, 0)
            if inside > 0 and not swallowed:
                source.tally.note(
                    f"{inside:,} lines are inside of quoted values: if no value has line breaks of its own, a quote is not closed, "
                    "and these lines are lost."
                )
        except pa.ArrowException as error:
            where = f"after row {done:,}" if "done" in locals() else ""
            raise BadInput(f"cannot be read as CSV: {_first_line(error)}", where=where) from error


def _rows_inside(batch: pa.RecordBatch, found: Sample) -> Any:
    """How many lines each row has swallowed: line breaks in a value that holds as many delimiters as rows do, or half of it."""
    most = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        inside: Any = pc.utf8_rtrim(column, "\r\n")
        breaks, delimiters = (
            pc.count_substring(inside, text).to_numpy(zero_copy_only=False)
            for text in ("\n", found.delimiter)
        )
        rows = 2 * delimiters >= breaks * (len(found.columns) - 1)
        most = np.maximum(most, np.where(rows, breaks, 0))
    return most


def _line_of(source: Source, found: Sample, row: int) -> str:
    """On which line of the file a row begins, else its number: a value may have lines of its own."""
    if row <= MOST_ROWS:
        with (
            Source(source.path).open() as stream,
            io.TextIOWrapper(cast(Any, _Unicode(stream)), newline="") as text,
        ):
            reader = csv.reader(text, delimiter=found.delimiter)
            try:
                for _ in range(found.header_lines):
                    next(reader)
                rows = 0
                while rows < row - 1:
                    rows += bool(next(reader))
            except (csv.Error, StopIteration):
                return f"row {row:,}"
            return f"line {reader.line_num + 1:,}, where it opens"
    return f"row {row:,}"


def _numbers(done: int, count: int, broken: Sequence[int]) -> tuple[Any, int]:
    """Numbers of the next `count` rows after row `done`, leaving out the broken ones."""
    span = np.arange(done + 1, done + 1 + count + len(broken))
    numbers = span[~np.isin(span, broken)][:count] if broken else span
    return numbers, int(numbers[-1]) if count else done


def _lines(source: Source) -> Iterator[pa.RecordBatch]:
    """Pieces of whole lines, split by Arrow: no line is touched by Python."""
    done = 0
    with source.open() as stream:
        text = _Unicode(stream)
        rest = b""
        while True:
            piece = text.read(BLOCK)
            block = rest + piece
            if piece:
                block, newline, rest = block.rpartition(b"\n")
                if not newline:
                    if len(rest) > MAX_LINE:
                        raise BadInput("line longer than 64 MiB", where=f"line {done + 1:,}")
                    continue
            if block:
                if b"\\ud" in block or b"\\uD" in block:
                    block = _SURROGATES.sub(lambda match: match[1] or b"\\ufffd", block)
                for line in _split(block):
                    numbers = np.arange(done + 1, done + 1 + len(line))
                    done += len(line)
                    yield _with_rows(pa.RecordBatch.from_arrays([line], names=["line"]), numbers)
            if not piece:
                return


def _split(block: bytes) -> Iterator[pa.Array[Any]]:
    lines: Any = pc.split_pattern(pa.array([block], pa.large_binary()), "\n")
    flat = lines.flatten().cast(pa.large_string())
    for start in range(0, len(flat), ROWS):
        yield flat.slice(start, ROWS)


def _parquet(source: Source, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
    done = 0
    try:
        with pq.ParquetFile(source.path) as file:
            names = file.schema_arrow.names
            roots = [n for n in names if any(w == n or w.startswith(f"{n}.") for w in wanted)]
            for batch in file.iter_batches(batch_size=ROWS, columns=roots):
                table = _flattened(batch)
                kept = [name for name in dict.fromkeys(wanted) if name in table.schema.names]
                arrays = [_as_text(table, name) for name in kept]
                numbers = np.arange(done + 1, done + 1 + batch.num_rows)
                done += batch.num_rows
                yield _with_rows(pa.RecordBatch.from_arrays(arrays, names=kept), numbers)
    except (pa.ArrowException, OSError) as error:
        raise BadInput(
            f"cannot be read as Parquet: {_first_line(error)}", where=f"after row {done:,}"
        ) from error


def _as_text(table: pa.Table, name: str) -> pa.Array[Any]:
    column: Any = table[name].combine_chunks()
    kind = column.type
    if pa.types.is_nested(kind):
        raise BadInput("holds lists, not one value a request", where=f"column {name}")
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        column = pa.array([None if v is None else v.decode("utf-8", "replace") for v in column.to_pylist()])
    text: pa.Array[Any] = column.cast(pa.string())
    return text


def _with_rows(batch: pa.RecordBatch, numbers: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [*batch.columns, pa.array(numbers, pa.int64())], names=[*batch.schema.names, ROW]
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class _Unicode(io.RawIOBase):
    """A stream whose bytes are valid UTF-8: what is not is replaced, as everywhere else."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ready = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        if size is None or size < 0:
            size = BLOCK
        while not self._ready:
            raw = self._stream.read(size)
            self._ready = self._decoder.decode(raw, final=not raw).encode()
            if not raw and not self._ready:
                return b""
        piece, self._ready = self._ready[:size], self._ready[size:]
        return piece


class _Counted(_Unicode):
    """Counts the lines that hold anything and end."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._last = b"\n"
        self.lines = 0

    def read(self, size: int = -1, /) -> bytes:
        piece = super().read(size)
        text = (self._last + piece).replace(b"\r", b"")
        ends = np.frombuffer(text, np.uint8) == ord("\n")
        self.lines += int((ends[1:] & ~ends[:-1]).sum())
        self._last = text[-1:]
        return piece
