"""Anyone's log of requests, one row each, by a mapping that says what its columns mean.

The table is read as text and turned into times and numbers by DuckDB, a piece at a time: what cannot be a value is
left NULL and counted, whatever it is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from tailscope.errors import BadInput
from tailscope.mapping import INSTANTS, ISO, Field, Mapping, unit_of
from tailscope.model import request_key
from tailscope.schema import REQUESTS, Table
from tailscope.source import Source

from ._client_times import end_by_file_time
from ._ids import stored_request_id
from ._request_log_sql import cast, checked, column_of, literal, pointer, reason_of
from ._table_files import ROW, SHOWN, Sample, batches, sample

#: Rows of a batch that is yielded.
BATCH = 50_000
#: Beyond it DuckDB spills to a temporary folder.
MEMORY = "1GB"
#: Texts that mean "nothing": they are NULL, and not counted as damage.
NOTHING = ("", "null", "none", "nan", "n/a", "-")
#: Share of the first rows that must have a time for its unit to be judged.
LIKELY = 0.5
_NULL = "CAST(NULL AS BIGINT)"
SPACE = "chr(32) || chr(9) || chr(13) || chr(10)"


@dataclass(frozen=True)
class RequestLog:
    name: str = "request_log"
    version: str = "1"
    reads: str = (
        "Any CSV, JSON-lines or Parquet file with one row a request, with a mapping file that says what its "
        "columns mean (`ingest LOG --map mapping.toml`, docs/request-logs.md)."
    )
    tables: tuple[Table, ...] = (REQUESTS,)

    def recognises(self, head: bytes, name: str) -> bool:
        """Never: nothing in such a file says what it is. `--map` does."""
        return False

    def table_of(self, source: Source) -> Sample | None:
        """How the file begins if it is a table of any kind."""
        return sample(source)

    def read(self, source: Source) -> Iterator[tuple[Table, pa.Table]]:
        mapping = source.options.mapping
        if mapping is None:
            raise BadInput("needs a mapping", todo="Say what its columns mean with --map")
        found = sample(source, sure=True)
        if found is None:
            raise BadInput(
                "is not a table of requests",
                todo="Give CSV with a header, one JSON object a line, or Parquet (a JSON array: jq -c '.[]')",
            )
        _check_columns(mapping, found, source)
        _check_units(mapping, found)
        reader = _Reader(source, mapping, found)
        yield from reader.read()


COLLECTOR = RequestLog()


def _check_columns(mapping: Mapping, found: Sample, source: Source) -> None:
    names = list(found.columns)
    for key, field in mapping.fields.items():
        for column in field.columns:
            if column in names:
                if found.kind == "csv" and names.count(column) > 1:
                    raise BadInput(
                        f"columns.{key}: column {column!r} is there {names.count(column)} times",
                        where="header",
                    )
                continue
            has = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
            if found.kind == "jsonl":
                # A key may come later, such as that of an error.
                source.tally.note(
                    f"columns.{key}: none of the first {len(found.rows)} rows has {column!r}; they have {has}."
                )
                if key in ("arrival", "finished"):
                    raise BadInput(f"columns.{key}: no key {column!r}; the rows have {has}", where="line 1")
                continue
            raise BadInput(f"columns.{key}: no column {column!r}; the file has {has}", where="header")


def _check_units(mapping: Mapping, found: Sample) -> None:
    """A time in the wrong unit would put all requests into another century: the first rows say so."""
    for key, field in mapping.fields.items():
        if key not in INSTANTS and field.start is None:
            continue
        for column in field.columns:
            values = found.values(column)
            # A few odd values are no unit; they are left out, each for itself.
            if len(values) < LIKELY * len(found.rows):
                continue
            looks = unit_of(values, stamped=column in found.timestamps)
            where = f"columns.{key}, column {column!r}"
            if looks is None or looks == field.unit:
                continue
            if looks == ISO or field.unit == ISO:
                raise BadInput(
                    f"unit {field.unit!r} does not fit: the first rows hold "
                    + ("dates" if looks == ISO else "numbers"),
                    where=where,
                    todo=f'Write unit = "{looks or "s"}"' if looks else "",
                )
            if mapping.clock == "wall" and key in INSTANTS:
                if looks:
                    raise BadInput(
                        f"unit {field.unit!r} does not fit: as Unix time the first rows are in {looks!r}",
                        where=where,
                        todo=f'Write unit = "{looks}"',
                    )
                raise BadInput(
                    "the first rows are no Unix times in any unit",
                    where=where,
                    todo='For a clock that counts from elsewhere, such as a monotonic one, write clock = "monotonic"',
                )


class _Reader:
    """One file through DuckDB."""

    def __init__(self, source: Source, mapping: Mapping, found: Sample) -> None:
        self._source, self._mapping, self._found = source, mapping, found
        self._columns = [c for c in mapping.columns if c in found.columns or found.kind == "jsonl"]
        self._error: BadInput | None = None
        self._stored = 0
        self._offset = 0

    def read(self) -> Iterator[tuple[Table, pa.Table]]:
        if self._mapping.clock == "monotonic":
            self._place()
        instance = self._mapping.instance
        unordered = 0
        for batch in self._run(self._source, self._query()):
            batch = self._requests(batch)
            self._count(batch)
            good = batch.filter(pc.is_valid(batch["arrival_ns"]))
            self._stored += good.num_rows
            unordered += pc.sum(good["ttft_after_end"]).as_py() or 0
            if good.num_rows:
                yield REQUESTS, self._rows(good, instance)
        if not self._stored:
            nothing = (
                "none of its calls asks for a completion" if self._source.tally.skipped else "it has no rows"
            )
            reason, where = next(iter(self._source.tally.first_seen.items()), (nothing, ""))
            raise BadInput(f"no request can be used: {reason}", where=where)
        if unordered:
            self._source.tally.note(
                f"{unordered:,} of {self._stored:,} requests have a first token after their end: check the units of "
                "ttft, e2e, first_token and finished."
            )

    def _place(self) -> None:
        """A clock that counts from anywhere: the last instant was when the file was last written."""
        probe = Source(self._source.path, options=self._source.options)
        last = None
        for batch in self._run(probe, self._query()):
            for name in (name for name in batch.column_names if name.removesuffix("_ns") in INSTANTS):
                top = pc.max(batch[name]).as_py()
                last = top if last is None or (top is not None and top > last) else last
        if last is not None:
            self._offset = end_by_file_time(self._source) - last
            self._source.clock = "monotonic"
            self._source.offset_ns = self._offset

    def _run(self, source: Source, sql: str) -> Iterator[pa.Table]:
        with tempfile.TemporaryDirectory(prefix="tailscope-") as spill:
            config: dict[str, str | bool | int | float | list[str]] = {
                "threads": 2,
                "memory_limit": MEMORY,
                "temp_directory": spill,
            }
            with closing(duckdb.connect(config=config)) as con:
                try:
                    con.execute(f"SET TimeZone = {literal(self._zone())}")
                    con.register("given", self._given(source))
                    for batch in con.sql(sql).to_arrow_reader(BATCH):
                        yield pa.Table.from_batches([batch])
                except (duckdb.Error, pa.ArrowException) as error:
                    # Such as texts that are none, or a zone that it does not know.
                    what = (str(error).splitlines() or ["damaged"])[0][:160]
                    self._error = self._error or BadInput(f"cannot be read as the mapping says: {what}")
        if self._error is not None:
            if self._stored:
                source.tally.reject(f"rest of the file {self._error.what}", self._error.where)
            else:
                raise self._error

    def _zone(self) -> str:
        zone = self._mapping.zone or self._source.options.log_tz
        return "UTC" if zone is None else str(zone)

    def _given(self, source: Source) -> pa.RecordBatchReader:
        """The file's batches; damage ends them, and is told when they have been used."""
        columns = ["line"] if self._found.kind == "jsonl" else self._columns
        kind: Any = pa.large_string() if self._found.kind == "jsonl" else pa.string()
        # Names of DuckDB do not tell upper from lower case; those of files do.
        names = columns if columns == ["line"] else [self._column(name) for name in columns]
        schema = pa.schema([*((name, kind) for name in names), ("row_", pa.int64())])

        def pieces() -> Iterator[pa.RecordBatch]:
            try:
                for batch in batches(source, self._found, columns):
                    chosen = batch.select([*columns, ROW])
                    yield pa.RecordBatch.from_arrays(chosen.columns, names=schema.names).cast(schema)
            except BadInput as error:
                self._error = error

        return pa.RecordBatchReader.from_batches(schema, pieces())

    # -- the query ---------------------------------------------------------------------------------

    def _query(self) -> str:
        """Text to values, then what follows from them; `bad_*` mark values that are there and cannot be used."""
        fields = self._mapping.fields
        casts, parsed = [], ["row_ AS file_row", "broken"]
        for key, field in fields.items():
            casts.append(f"{cast(key, field, self._column, self._mapping)} AS {column_of(key)}")
            casts.append(f"{self._given_text(field)} AS has_{column_of(key)}")
            parsed += [f"{checked(key, self._mapping.clock)} AS {column_of(key)}", f"has_{column_of(key)}"]
        known = {column_of(key) for key in fields}

        def have(name: str) -> str:
            return name if name in known else _NULL

        arrival = f"coalesce({have('arrival_ns')}, {have('finished_ns')} - {have('e2e_ns')})"
        ttft = f"coalesce({have('ttft_ns')}, {have('first_token_ns')} - arrival_)"
        e2e = f"coalesce({have('e2e_ns')}, {have('finished_ns')} - arrival_)"
        first = f"coalesce({have('first_token_ns')}, arrival_ + {have('ttft_ns')})"
        finished = f"coalesce({have('finished_ns')}, arrival_ + {have('e2e_ns')})"
        shown = {
            "first_token_ns": first,
            "finished_ns": finished,
            "ttft_ns": f"CASE WHEN {ttft} >= 0 THEN {ttft} END",
            "e2e_ns": f"CASE WHEN {e2e} >= 0 THEN {e2e} END",
        }
        plain = sorted(known - shown.keys() - {"arrival_ns"})
        values = ", ".join(f"coalesce(CAST({name} AS VARCHAR), '')" for name in ("arrival_", *plain, *shown))
        content = f"md5(concat_ws(chr(31), {values}))"
        if "request_id" in known:
            content = f"CASE WHEN request_id IS NULL THEN {content} END"
        identity = (
            "concat_ws(chr(31), coalesce(request_id, ''), arrival_, " + "coalesce(content, ''))"
            if "request_id" in known
            else "concat_ws(chr(31), content, twin)"
        )
        # Rows of a log without ids that are equal in all else are requests of their own, in any order.
        twins = "" if "request_id" in known else ", row_number() OVER (PARTITION BY content) AS twin"
        return f"""
            WITH {self._texts()},
            cast_ AS (SELECT row_, broken, {", ".join(casts)} FROM texts),
            parsed AS (SELECT {", ".join(parsed)} FROM cast_),
            placed AS (SELECT *, {arrival} AS arrival_ FROM parsed),
            followed AS (
                SELECT file_row, broken, arrival_, {"".join(f"{name}, " for name in plain)}
                       {", ".join(f"{sql} AS {name}" for name, sql in shown.items())},
                       coalesce({ttft} < 0, false) AS bad_order_first, coalesce({e2e} < 0, false) AS bad_order_end,
                       {", ".join(f"has_{column_of(k)} AND {column_of(k)} IS NULL AS bad_{column_of(k)}" for k in fields)}
                FROM placed
            ),
            hashed AS (SELECT *, {content} AS content FROM followed),
            keyed AS (SELECT *{twins} FROM hashed)
            SELECT * EXCLUDE (content, arrival_), arrival_ AS arrival_ns, left(md5({identity}), 16) AS request_key,
                   coalesce(ttft_ns > e2e_ns, false) AS ttft_after_end
            FROM keyed {"" if "request_id" in known else "ORDER BY file_row"}
        """

    def _texts(self) -> str:
        """Steps that end in `texts`: each column's text, NULL where it says nothing; `broken` where a line is no JSON object.

        Each step is a projection of its own, so that DuckDB computes it once.
        """
        nothing = ", ".join(f"'{text}'" for text in NOTHING)
        columns = [self._column(c) for c in self._columns]
        cleaned = ", ".join(f"CASE WHEN lower({c}) NOT IN ({nothing}) THEN {c} END AS {c}" for c in columns)
        if self._found.kind != "jsonl":
            trimmed = ", ".join(f"trim({c}, {SPACE}) AS {c}" for c in columns)
            return f"""trimmed AS (SELECT row_, false AS broken, {trimmed} FROM given),
            texts AS (SELECT row_, broken, {cleaned} FROM trimmed)"""
        # A name with dots is a key of its own, or keys in each other.
        paths = list(dict.fromkeys(p for c in self._columns for p in (pointer([c]), pointer(c.split(".")))))
        listed = "[" + ", ".join(map(literal, paths)) + "]"

        def value(column: str) -> str:
            own, nested = paths.index(pointer([column])) + 1, paths.index(pointer(column.split("."))) + 1
            return f"found[{own}]" if own == nested else f"coalesce(found[{own}], found[{nested}])"

        trimmed = ", ".join(f"trim({value(c)}, {SPACE}) AS {self._column(c)}" for c in self._columns)
        # JSON that begins with a brace is an object.
        return f"""lines AS (SELECT row_, trim(line, {SPACE}) AS line FROM given),
            objects AS (SELECT row_, CASE WHEN line[1] = '{{' AND json_valid(line)
                                          THEN json_extract_string(line, {listed}) END AS found
                        FROM lines WHERE line <> ''),
            trimmed AS (SELECT row_, found IS NULL AS broken, {trimmed} FROM objects),
            texts AS (SELECT row_, broken, {cleaned} FROM trimmed)"""

    def _column(self, name: str) -> str:
        return f"c{self._columns.index(name)}" if name in self._columns else "CAST(NULL AS VARCHAR)"

    def _given_text(self, field: Field) -> str:
        return "(" + " AND ".join(f"{self._column(c)} IS NOT NULL" for c in field.columns) + ")"

    # -- what came of it ---------------------------------------------------------------------------

    def _requests(self, batch: pa.Table) -> pa.Table:
        """Without the calls that ask for no completion, such as probes, where there are paths that say so."""
        if "path" not in self._mapping.fields:
            return batch
        other = batch["bad_path"]
        if count := pc.sum(other).as_py():
            self._source.tally.skip("call asks for no completion", count)
            batch = batch.filter(pc.invert(other))
        return batch

    def _count(self, batch: pa.Table) -> None:
        tally = self._source.tally
        word = "line" if self._found.kind == "jsonl" else "row"

        def where(mask: Any) -> str:
            return f"{word} {batch['file_row'][pc.index(mask, True).as_py()].as_py():,}"

        broken = batch["broken"]
        if count := pc.sum(broken).as_py():
            tally.reject("not a complete JSON object", where(broken), count)
        lost: Any = pc.and_(pc.is_null(batch["arrival_ns"]), pc.invert(broken))
        if count := pc.sum(lost).as_py():
            tally.reject("arrival missing or not a time", where(lost), count)
        kept: Any = pc.is_valid(batch["arrival_ns"])
        reasons = {f"bad_{column_of(key)}": reason_of(key) for key in self._mapping.fields}
        reasons |= {"bad_order_first": "first token before arrival", "bad_order_end": "end before arrival"}
        for name, reason in reasons.items():
            bad: Any = pc.and_(batch[name], kept)
            if count := pc.sum(bad).as_py():
                tally.blank(reason, where(bad), count)

    def _rows(self, good: pa.Table, instance: str | None) -> pa.Table:
        columns: dict[str, Any] = {"request_key": good["request_key"], "file_row": good["file_row"]}
        for column in REQUESTS.arrow.names:
            if column in good.column_names and column not in columns:
                columns[column] = good[column]
        if self._offset:
            for name in INSTANTS:
                if f"{name}_ns" in columns:
                    columns[f"{name}_ns"] = pc.add(columns[f"{name}_ns"], self._offset)
        if self._source.options.hash_ids and "request_id" in columns:
            # As all collectors hash ids, so that those of client and engine still are equal.
            ids = columns["request_id"].to_pylist()
            hashed = stored_request_id if self._mapping.observer == "engine" else _hashed
            columns["request_id"] = [None if i is None else hashed(i, True) for i in ids]
        columns["observer"] = self._mapping.observer
        if instance is not None:
            columns["instance"] = instance
        return REQUESTS.batch(columns)


def _hashed(request_id: str, hash_ids: bool) -> str:
    """A client's id has no prompt index: digits at its end are its own."""
    return request_key("id", request_id) if hash_ids else request_id
