"""Texts of a request log's columns as values of `requests`, in SQL: NULL where a text is none."""

from __future__ import annotations

from collections.abc import Callable

from tailscope.mapping import DURATIONS, INSTANTS, ISO, NUMBERS, TEXTS, UNITS_NS, Field, Mapping

MAX_TOKENS = 1 << 31
#: No instant lies beyond it, in ns: sums with durations stay inside int64.
MAX_INSTANT = 4_000_000_000_000_000_000
#: No request takes longer, in ns: three years.
MAX_DURATION = 100_000_000_000_000_000

#: What a status column says where the mapping does not explain it: our own words, HTTP's, and finish reasons.
KNOWN_STATUSES = {
    **{name: name for name in ("ok", "error", "timeout", "rejected", "aborted", "unfinished")},
    **dict.fromkeys(("success", "successful", "succeeded", "completed", "stop", "length", "true"), "ok"),
    **dict.fromkeys(("failed", "failure", "errored", "false"), "error"),
    **dict.fromkeys(("abort", "cancelled", "canceled", "499"), "aborted"),
    **dict.fromkeys(("429", "503"), "rejected"),
    **dict.fromkeys(("408", "504"), "timeout"),
}

#: How vLLM begins the id of a call to each API, and how the API's path ends.
API_PREFIXES = {"chatcmpl-": "/chat/completions", "cmpl-": "/completions"}

NAMES = {"id": "request_id", "class": "klass"}


def column_of(key: str) -> str:
    """Column of `requests` that a key of the mapping fills."""
    return f"{key}_ns" if key in INSTANTS or key in DURATIONS else NAMES.get(key, key)


def reason_of(key: str) -> str:
    if key in INSTANTS:
        return f"{key} not a time"
    if key in DURATIONS:
        return f"{key} not a duration"
    if key in NUMBERS:
        return f"{key} not a whole number that can be"
    return "status without a meaning in [status]" if key == "status" else f"{key} not of 32 hex digits"


def cast(key: str, field: Field, column: Callable[[str], str], mapping: Mapping) -> str:
    """The value in SQL, NULL where the text is none; `_checked` then asks whether it can be."""
    text = column(field.column)
    if key == "status":
        return _status(text, mapping)
    if key == "trace_id":
        return f"lower({text})"
    if key == "path":
        return _prefix(text)
    if key == "id" and "path" in mapping.fields:
        # What the header said, as vLLM makes its id of it by the API.
        prefix = _prefix(column(mapping.fields["path"].column))
        own = " OR ".join(f"starts_with({text}, {literal(known)})" for known in API_PREFIXES)
        return f"CASE WHEN {own} THEN {text} ELSE coalesce({prefix}, '') || {text} END"
    if key in TEXTS:
        return text
    if key in NUMBERS:
        return f"TRY_CAST({text} AS DOUBLE)"
    if key in INSTANTS:
        return _instant(text, field.unit)
    if field.start is None:
        return _scaled(text, field.unit)
    return f"({_instant(text, field.unit)} - {_instant(column(field.start), field.unit)})"


def checked(key: str, clock: str) -> str:
    name = column_of(key)
    if key == "trace_id":
        return f"CASE WHEN regexp_full_match({name}, '[0-9a-f]{{32}}') THEN {name} END"
    if key in TEXTS:
        return name
    if key in NUMBERS:
        # A double is exact for all numbers that are allowed.
        low = 1 - MAX_TOKENS if key == "priority" else 0
        whole = f"{name} BETWEEN {low} AND {MAX_TOKENS - 1} AND {name} = trunc({name})"
        return f"CASE WHEN {whole} THEN CAST({name} AS BIGINT) END"
    # A wall clock that shows 0 was never set; any other may begin there.
    low, high = (int(clock == "wall"), MAX_INSTANT) if key in INSTANTS else (0, MAX_DURATION)
    return f"CASE WHEN {name} BETWEEN {low} AND {high} THEN {name} END"


def _decimal(text: str) -> str:
    return f"TRY_CAST({text} AS DECIMAL(28, 9))"


def _scaled(text: str, unit: str) -> str:
    """Nanoseconds, exactly: 19 digits before the point and 9 behind it, times at most 10^9, fit a DECIMAL(38)."""
    return f"TRY_CAST({_decimal(text)} * {UNITS_NS[unit]} AS BIGINT)"


def _instant(text: str, unit: str) -> str:
    if unit != ISO:
        return _scaled(text, unit)
    # DuckDB's own timestamps end at microseconds.
    seconds = f"TRY_CAST(regexp_replace({text}, '[.,][0-9]+', '') AS TIMESTAMPTZ)"
    fraction = f"CAST(rpad(regexp_extract({text}, '[.,]([0-9]{{1,9}})', 1), 9, '0') AS BIGINT)"
    return (
        f"CASE WHEN regexp_matches({text}, '^[0-9]{{4}}[-/]') AND isfinite({seconds}) "
        f"AND year({seconds}) BETWEEN 1970 AND 2200 "
        f"THEN epoch_us({seconds}) * 1000 + {fraction} END"
    )


def _status(text: str, mapping: Mapping) -> str:
    """The mapping's words first, then those that everyone uses, then classes of HTTP statuses."""
    words = {**KNOWN_STATUSES, **mapping.statuses}
    cases = "".join(f" WHEN {literal(word)} THEN '{status}'" for word, status in words.items())
    return (
        f"CASE lower({text}){cases} ELSE CASE WHEN regexp_full_match({text}, '2[0-9]{{2}}') THEN 'ok' "
        f"WHEN regexp_full_match({text}, '[45][0-9]{{2}}') THEN 'error' END END"
    )


def _prefix(path: str) -> str:
    """By the path of a call, query string or not, how its id begins; NULL where it asks for no completion."""
    cases = "".join(
        f" WHEN regexp_full_match({path}, {literal('[^?]*' + end + '/?([?].*)?')}) THEN {literal(prefix)}"
        for prefix, end in API_PREFIXES.items()
    )
    return f"CASE{cases} END"


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def pointer(keys: list[str]) -> str:
    """A JSON pointer (RFC 6901)."""
    return "".join("/" + key.replace("~", "~0").replace("/", "~1") for key in keys)
