"""One SELECT over a trace, with access to the trace's own files only, and its result as a table, CSV or JSON.

Hostile may be the statement, which people copy from elsewhere, and every value and column name of a trace.
Three fences stand one behind the other: the parser's type of the statement, its syntax tree (DuckDB takes
`WITH x AS (COPY ...)`, and has table functions that run a statement), and a connection that reaches no other
file.
"""

from __future__ import annotations

import datetime
import io
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from decimal import Decimal
from typing import Any, Literal, TextIO

import duckdb
import orjson
import pyarrow as pa
import pyarrow.csv as pc

from tailscope.align import CLASS_SQL, Scope, class_macro
from tailscope.config import Config
from tailscope.errors import QueryError, UsageError
from tailscope.safe import printable
from tailscope.scan import pattern, quote
from tailscope.schema import REQUESTS, SOURCES, TABLES
from tailscope.store import Trace, memory_bytes

#: Rows a table shows; more scroll away.
TABLE_ROWS = 200
BATCH_ROWS = 65_536

#: Nodes of a syntax tree that read. What else DuckDB takes in a WITH writes.
_READING_NODES = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
#: Table functions that may be used. Of the others, some read files, change settings or run a statement.
_TABLE_FUNCTIONS = {
    *("range", "generate_series", "repeat", "repeat_row", "unnest", "json_each", "json_tree"),
    *("query_table", "histogram", "histogram_values", "pragma_table_info", "pragma_version"),
    *("read_parquet", "parquet_scan", "parquet_schema", "parquet_metadata", "parquet_file_metadata"),
    *("duckdb_columns", "duckdb_functions", "duckdb_keywords", "duckdb_settings", "duckdb_tables"),
    *("parquet_kv_metadata", "duckdb_types", "duckdb_views"),
}
#: Types of statements that DuckDB uses for several keywords; the keyword tells more.
_LUMPED_TYPES = {"ALTER", "CALL", "DROP", "LOAD", "PRAGMA", "SET", "VACUUM"}
_INSTEAD = {
    "COPY": "; to have its result in a file, redirect --format csv or json",
    "EXPORT": "; copy the trace's folder instead",
    "SET": "; --memory-limit and --timeout set the limits",
}


def run(
    path: str,
    sql: str,
    *,
    memory_limit: str = "2GB",
    timeout_s: float = 60.0,
    threads: int | None = None,
    scope: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> pa.Table:
    """The rows of `sql`, one SELECT over the tables of the trace at `path`.

    `memory_limit` bounds what DuckDB works with and, apart from that, the result. `scope` may hold from_ns,
    to_ns, instance and klass: tables then have only the rows of that time, that instance and, in `requests`,
    that class. `sql` may use `class_of`, made from the classes of `config`.

    Raises QueryError when the statement is not allowed, not valid, or ran out of time or memory; UsageError
    for other arguments that make no sense; UsageError or BadInput when the trace cannot be read.
    """
    if not timeout_s > 0:
        raise UsageError(f"--timeout {timeout_s:g}: must be a positive number of seconds")
    if "\0" in sql:
        raise QueryError("the query holds a null character; remove it")
    if any("\ud800" <= c <= "\udfff" for c in sql):
        raise QueryError("the query is not valid UTF-8")
    with Trace(path, memory_limit=memory_limit, threads=threads) as trace:
        con = trace.connection
        con.execute(class_macro((config or Config()).classes))
        _narrow(trace, Scope(**(scope or {})))
        _fence(trace)
        # In a thread of its own, so that Ctrl-C is heard while DuckDB works.
        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(_rows, con, sql, memory_limit)
            try:
                return work.result(min(timeout_s, threading.TIMEOUT_MAX))
            except TimeoutError:
                _stop(con, work)
                raise QueryError(
                    f"the query was stopped after {timeout_s:g} s. Look at less (--from, --to, --instance), "
                    "aggregate earlier, or raise --timeout (timeout_s)"
                ) from None
            except KeyboardInterrupt:
                _stop(con, work)
                raise


def write(
    table: pa.Table,
    format: Literal["table", "csv", "json"],
    stream: TextIO,
    *,
    limit: int | None = TABLE_ROWS,
) -> None:
    """Write a result: `table` for people, at most `limit` rows, safe on terminals; the others for programs.

    CSV (RFC 4180): NULL is empty, an empty string is quoted, nested values are JSON. JSON: an array with an
    object a line; NaN and infinities are null. Both: times are ISO 8601, binary values hexadecimal.
    """
    if format == "csv":
        _write_csv(table, stream)
    elif format == "json":
        _write_json(table, stream)
    else:
        _write_table(table, stream, limit)


def _narrow(trace: Trace, scope: Scope) -> None:
    """Put views with only the rows inside `scope` in the place of the trace's own."""
    for table in TABLES:
        tests = []
        if table.time and scope.from_ns is not None:
            tests.append(f"{table.time} >= {int(scope.from_ns)}")
        if table.time and scope.to_ns is not None:
            tests.append(f"{table.time} < {int(scope.to_ns)}")
        if scope.instance is not None:
            wanted = quote(scope.instance)
            test = f"instance = {wanted}"
            if table is SOURCES:
                test = f"({test} OR list_contains(instances, {wanted}))"
            tests.append(test)
        if table is REQUESTS and scope.klass is not None:
            tests.append(f"{CLASS_SQL} = {quote(scope.klass)}")
        if tests:
            trace.connection.execute(
                f'CREATE OR REPLACE VIEW "{table.name}" AS '
                f"SELECT * FROM ({trace.view_sql(table)}) WHERE {' AND '.join(tests)}"
            )


def _fence(trace: Trace) -> None:
    """Leave the connection only the trace's files and its own folder to spill to, for good."""
    con = trace.connection
    # The views name a file by a pattern that matches it alone; DuckDB may check either.
    names = {name for files in trace.files.values() for file in files for name in (file, pattern(file))}
    files = ", ".join(quote(name) for name in sorted(names))
    con.execute(f"SET allowed_paths = [{files}]")
    con.execute("SET preserve_insertion_order = true")
    for setting in (
        "python_enable_replacements",
        "allow_persistent_secrets",
        "autoinstall_known_extensions",
        "autoload_known_extensions",
        "allow_community_extensions",
        "enable_external_access",
    ):
        con.execute(f"SET {setting} = false")
    con.execute("SET lock_configuration = true")


def _rows(con: duckdb.DuckDBPyConnection, sql: str, memory_limit: str) -> pa.Table:
    try:
        statement = _only_select(con, sql)
        _reads_only(con, sql)
        limit = memory_bytes(con)
        size, batches = 0, []
        with pa.RecordBatchReader.from_stream(con.sql(statement)) as reader:
            for batch in reader:
                size += batch.nbytes
                if size > limit:
                    raise QueryError(
                        f"the result is larger than {memory_limit}. Aggregate it, add a LIMIT, or raise "
                        "--memory-limit (memory_limit)"
                    )
                batches.append(batch)
            return pa.Table.from_batches(batches, schema=reader.schema)
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        # Once rows come, pyarrow reports DuckDB's errors as its own.
        raise _explained(error, memory_limit) from error


def _only_select(con: duckdb.DuckDBPyConnection, sql: str) -> duckdb.Statement:
    # This connection's own: to tell what IMPORT is, DuckDB reads files while it parses.
    statements = con.extract_statements(sql)
    if not statements:
        raise QueryError("the query is empty. Give one SELECT, for example: SELECT count(*) FROM requests")
    if len(statements) > 1:
        raise QueryError(f"the query holds {len(statements)} statements. Give exactly one SELECT")
    [statement] = statements
    try:
        kind = statement.type.name
    except ValueError:
        kind = "OTHER"  # A statement newer than DuckDB's own Python enumeration.
    if kind == "MULTI":
        raise QueryError("the query is a PIVOT that creates a type. Name the values: PIVOT t ON c IN (...)")
    if kind != "SELECT":
        keyword = re.match(r"[A-Za-z]+", statement.query.lstrip())
        if keyword and kind in {*_LUMPED_TYPES, "OTHER"}:
            kind = keyword[0].upper()
        article = "an" if kind[0] in "AEIOU" and kind != "USE" else "a"
        raise QueryError(
            f"the query is {article} {kind.replace('_', ' ')} statement. Only one SELECT can be run"
            + _INSTEAD.get(kind, "")
        )
    return statement


def _reads_only(con: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Refuse what has an effect inside a SELECT."""
    [(text,)] = con.execute("SELECT json_serialize_sql($sql)", {"sql": sql}).fetchall()
    try:
        tree = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise QueryError(
            "the query is nested too deeply to be checked. Write it flatter, with WITH"
        ) from error
    if tree.get("error"):
        raise QueryError(f"the query cannot be checked: {_first_lines(str(tree.get('error_message')))}")
    for node in _nodes(tree):
        kind = node.get("type")
        if isinstance(kind, str) and kind.endswith("_NODE") and kind not in _READING_NODES:
            name = kind.removesuffix("_NODE").removesuffix("_QUERY")
            raise QueryError(f"the query holds {name} inside WITH. Only SELECT can be run, there too")
        if kind == "TABLE_FUNCTION":
            name = str(node["function"]["function_name"])
            if name.lower() not in _TABLE_FUNCTIONS:
                raise QueryError(
                    f"the table function {name} cannot be used: a query reads the trace's own tables. "
                    f"They are {', '.join(t.name for t in TABLES)}"
                )


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            stack += node.values()
        elif isinstance(node, list):
            stack += node


def _stop(con: duckdb.DuckDBPyConnection, work: Future[pa.Table]) -> None:
    """Interrupt until it is heard: an interrupt between two of the connection's statements is lost."""
    while not work.done():
        con.interrupt()
        wait([work], 0.05)


def _explained(error: Exception, memory_limit: str) -> QueryError:
    text = str(error)
    if "Out of Memory Error" in text:
        return QueryError(
            f"the query needs more memory than {memory_limit}, though it may spill to disk. Look at less "
            "(--from, --to, --instance), aggregate earlier, or raise --memory-limit (memory_limit). "
            f"DuckDB says: {_first_lines(text)}"
        )
    if "Permission Error" in text:
        return QueryError(f"a query can read the trace's own files only. DuckDB says: {_first_lines(text)}")
    hint = ""
    if isinstance(error, (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException)):
        hint = f". Tables are {', '.join(t.name for t in TABLES)}; DESCRIBE requests lists the columns of one"
    return QueryError(f"the query failed: {_first_lines(text)}{hint}")


def _first_lines(text: str) -> str:
    """DuckDB's message up to the place in the statement: it names the candidates."""
    message = re.split(r"\n\s*\n|\nLINE \d+:", text.strip(), maxsplit=1)[0]
    return " ".join(message.split())[:1000].rstrip(".?")


def _write_csv(table: pa.Table, stream: TextIO) -> None:
    stream.write(",".join('"' + name.replace('"', '""') + '"' for name in table.column_names) + "\n")
    options = pc.WriteOptions(include_header=False)
    for batch in table.to_batches(max_chunksize=BATCH_ROWS):
        columns = [column if _is_plain(column.type) else _texts(column) for column in batch.columns]
        if len(columns) == 1 and columns[0].null_count:
            # Readers skip an empty line.
            columns = [_texts(columns[0]).fill_null("")]
        buffer = io.BytesIO()
        pc.write_csv(pa.RecordBatch.from_arrays(columns, names=table.column_names), buffer, options)
        stream.write(buffer.getvalue().decode())


def _write_json(table: pa.Table, stream: TextIO) -> None:
    names = _unique(table.column_names)
    separator = "[\n"
    for batch in table.to_batches(max_chunksize=BATCH_ROWS):
        columns = [_values(column) for column in batch.columns]
        for row in zip(*columns, strict=True):
            stream.write(separator + orjson.dumps(dict(zip(names, row, strict=True))).decode())
            separator = ",\n"
    stream.write("\n]\n" if separator == ",\n" else "[]\n")


def _write_table(table: pa.Table, stream: TextIO, limit: int | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = table if limit is None else table.slice(0, limit)
    # As wide as its content, as other tools print: folding 30 columns into a terminal's width helps nobody.
    console = Console(file=stream, highlight=False, width=1_000_000)
    rich = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    cells = []
    for name, column in zip(shown.column_names, shown.columns, strict=True):
        rich.add_column(
            Text(printable(name)), justify="right" if _is_number(column.type) else "left", no_wrap=True
        )
        texts = [text for chunk in column.chunks for text in _texts(chunk, _short).to_pylist()]
        cells.append([Text("NULL", "dim") if text is None else Text(printable(text)) for text in texts])
    for row in zip(*cells, strict=True):
        rich.add_row(*row)
    console.print(rich)
    left_out = table.num_rows - shown.num_rows
    if left_out:
        stream.write(f"{left_out:,} more rows left out; --format csv and --format json write them all\n")
    elif not table.num_rows:
        stream.write("no rows\n")


def _short(number: float) -> str:
    return f"{number:.3f}" if 1e6 <= abs(number) < 1e15 else f"{number:.6g}"


def _unique(names: list[str]) -> list[str]:
    """Names for the keys of an object: SELECT may give two columns one name."""
    taken: set[str] = set()
    unique = []
    for name in names:
        key, number = name, 1
        while key in taken:
            key, number = f"{name}_{number}", number + 1
        taken.add(key)
        unique.append(key)
    return unique


def _is_plain(kind: pa.DataType) -> bool:
    """Whether pyarrow's own CSV of the type is what we want."""
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return is_text or pa.types.is_boolean(kind) or _is_number(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _texts(column: pa.Array[Any], number: Callable[[float], str] = repr) -> pa.StringArray:
    def text(value: Any) -> str | None:
        if value is None or isinstance(value, str):
            return value
        return number(value) if isinstance(value, float) else orjson.dumps(value).decode()

    return pa.array([text(value) for value in _values(column)], pa.string())


def _values(column: pa.Array[Any]) -> list[Any]:
    """A column as values that JSON has, times as text."""
    convert = _converter(column.type)
    values: list[Any] = column.cast(_as_numbers(column.type)).to_pylist()  # type: ignore[misc]
    return [None if value is None else convert(value) for value in values] if convert else values


def _as_numbers(kind: pa.DataType) -> pa.DataType:
    """The type with whole numbers for times, which DuckDB lets exceed what Python's datetime holds."""
    if pa.types.is_timestamp(kind) or pa.types.is_time64(kind):
        return pa.int64()
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        return pa.int32()
    if pa.types.is_list(kind):
        return pa.list_(_as_numbers(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        of: pa.DataType = pa.list_(_as_numbers(kind.value_type), kind.list_size)
        return of
    if pa.types.is_map(kind):
        return pa.map_(_as_numbers(kind.key_type), _as_numbers(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _as_numbers(field.type)) for field in kind])
    return kind


def _converter(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Makes of a value of the type, after `_as_numbers`, one that orjson writes; None: it does as it is."""
    if pa.types.is_timestamp(kind):
        ticks = _TICKS[kind.unit]
        return lambda value: _timestamp(value, ticks, "Z" if kind.tz else "")
    if pa.types.is_time(kind):
        ticks = _TICKS[kind.unit]
        return lambda value: _clock(value * (10**9 // ticks))
    if pa.types.is_date32(kind):
        return lambda value: _day(value) or f"{value} days"
    if pa.types.is_decimal(kind):
        return _number
    if pa.types.is_map(kind):
        key, item = _converter(kind.key_type) or _same, _nullable(kind.item_type)
        if pa.types.is_string(kind.key_type):
            return lambda pairs: {key(k): item(v) for k, v in pairs}
        return lambda pairs: [[key(k), item(v)] for k, v in pairs]
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        each = _nullable(kind.value_type)
        return lambda values: [each(v) for v in values]
    if pa.types.is_struct(kind):
        members = {field.name: _nullable(field.type) for field in kind}
        return lambda value: {name: convert(value[name]) for name, convert in members.items()}
    simple = pa.types.is_primitive(kind) and not pa.types.is_interval(kind) and not pa.types.is_float16(kind)
    return None if simple or pa.types.is_string(kind) else _other


def _nullable(kind: pa.DataType) -> Callable[[Any], Any]:
    convert = _converter(kind)
    return _same if convert is None else lambda value: None if value is None else convert(value)


def _same(value: Any) -> Any:
    return value


def _number(value: Decimal) -> Any:
    """A decimal with all its digits: sums of integers have 128 bits."""
    return orjson.Fragment(format(value, "f"))


def _other(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, pa.MonthDayNano):
        return f"P{value.months}M{value.days}DT{_decimals(value.nanoseconds)}S"
    return value if isinstance(value, (str, int, float)) else str(value)


_TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def _timestamp(value: int, ticks: int, zone: str) -> str:
    if abs(value) == 2**63 - 1:
        return "infinity" if value > 0 else "-infinity"
    days, rest = divmod(value, 86400 * ticks)
    day = _day(days)
    return f"{day}T{_clock(rest * (10**9 // ticks))}{zone}" if day else f"{value}/{ticks} s"


def _day(days: int) -> str | None:
    """ISO date; None outside the years 1 to 9999."""
    ordinal = days + datetime.date(1970, 1, 1).toordinal()
    if not 1 <= ordinal <= datetime.date.max.toordinal():
        return None
    return datetime.date.fromordinal(ordinal).isoformat()


def _clock(nanoseconds: int) -> str:
    seconds, fraction = divmod(nanoseconds, 10**9)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{text}.{fraction:09}".rstrip("0") if fraction else text


def _decimals(nanoseconds: int) -> str:
    return format(Decimal(nanoseconds) / 10**9, "f")
