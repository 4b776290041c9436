"""A mapping to begin with: what the columns of a table may mean by their names, for a person to correct."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from statistics import median

from tailscope.mapping import DURATIONS, INSTANTS, KEYS, OBSERVERS, STATUSES, UNITS_NS, unit_of
from tailscope.model import Sample
from tailscope.safe import printable

#: Keys with the names their columns have, as of words joined by underscores, the surest first. A column is used once.
NAMES: tuple[tuple[str, str], ...] = (
    ("ttft", r"ttft|time_to_first(_output)?_token|first_token_latency"),
    ("ttft", r"first_(token|byte|chunk)(?!_(ts|at|time))"),
    ("first_token", r"first_token|first_byte|first_chunk"),
    ("last_token", r"last_token|last_chunk"),
    ("queued", r"(en)?queued(_at|_ts)?"),
    ("scheduled", r"scheduled(_at|_ts)?"),
    ("queue", r"queue(ing|_time|_wait|_ns|_us|_ms|_s|$)|wait(ing)?(_time|_ns|_us|_ms|_s|$)"),
    ("prefill", r"prefill"),
    ("decode", r"decode|generation_time"),
    ("intended", r"intended|scheduled_(send|start)|targeted|due"),
    ("e2e", r"e2e|end_to_end|latency|duration|elapsed|total(_time|_ns|_us|_ms|_s|$)|response_time|request_time|took"),
    ("finished", r"finish(ed)?|end|ended|complet(ed|ion)_?(at|time|ts)|done|response_at"),
    ("arrival", r"arriv\w*|start\w*|beg[ai]n\w*|sent|send|submit\w*|receiv\w*|creat\w*|request_at|timestamp|ts|time|date"),
    ("cached_tokens", r"cache(d)?"),
    ("max_tokens", r"max_(new_|completion_|output_)?tokens"),
    ("prompt_tokens", r"(prompt|input|context|in)_(num_)?(tok|toks|len|length|tokens)|(prompt|input)_?tokens|isl|n_?prompt"),
    ("output_tokens", r"(output|completion|generat\w*|out|response)_(num_)?(tok|toks|len|length|tokens)|osl"),
    ("trace_id", r"trace_id|traceid"),
    ("id", r"request_id|req_id|requestid|x_request_id|correlation_id|uuid|id"),
    ("tenant", r"tenant|customer|app|application|org|organi[sz]ation|project|team|account"),
    ("class", r"class|tier|workload"),
    ("priority", r"priority"),
    ("adapter", r"adapter|lora"),
    ("model", r"model"),
    ("status", r"status|outcome|code|finish_reason|result"),
    ("instance", r"instance|pod|replica|server|backend|host"),
    ("preemptions", r"preempt"),
)  # fmt: skip
#: Names that are of texts, addresses and the like: never mapped, whatever else they say.
PRIVATE = re.compile(
    r"(^|_)(text|content|message|messages|body|header|headers|ip|addr|api_key|auth|email|user)(_|$)"
)
_SUFFIXES = (
    ("ns", r"_(ns|nanos\w*)$"),
    ("us", r"_(us|usec|micros\w*)$"),
    ("ms", r"_(ms|msec|millis\w*)$"),
    ("s", r"_(s|sec|secs|seconds)$"),
)  # fmt: skip
#: From here on durations without a unit in their name are taken to be in milliseconds.
LIKELY_MS = 100.0


def guess(table: Sample, name: str) -> str:
    """TOML that `tailscope.mapping` reads, with a comment wherever the file does not say it itself."""
    found = _assigned(table)
    lines = [
        f"# How to read {printable(name)}: a row is a request. Guessed from the names of its columns: correct it, then",
        "#   tailscope ingest LOG --map THIS_FILE",
        f'observer = "client"  # who measured: {", ".join(OBSERVERS)}',
        "",
        "[columns]",
    ]
    wall = "arrival" in found and bool(_unit(found["arrival"], table))
    for key in (key for key in KEYS if key in found):
        line = _line(key, found[key], table)
        if wall and key in INSTANTS and _unit(found[key], table) == "":
            # Two clocks in one file: only the time between two such columns means something.
            line = f"# {json.dumps(found[key])} is of another clock than arrival: durations can be the time between such columns,"
            line += f'\n#   as in queue = {{ from = {json.dumps(found[key])}, to = "…", unit = "s" }}'
        lines.append(line)
    if "arrival" not in found and not {"finished", "e2e"} <= found.keys():
        lines.append('# arrival = { column = "…", unit = "s" }  # needed, or both finished and e2e')
    absent = [key for key in KEYS if key not in found]
    lines += ["", f"# Not found: {', '.join(absent)}."]
    rest = [column for column in table.columns if column not in found.values()]
    if rest:
        lines.append(f"# Columns that are not used: {', '.join(map(printable, rest[:40]))}.")
    if "status" in found:
        lines += ["", "[status]", *_statuses(table.values(found["status"]))]
    return "\n".join(lines) + "\n"


def _assigned(table: Sample) -> dict[str, str]:
    free = {column: _words(column) for column in table.columns}
    found: dict[str, str] = {}
    for key, pattern in NAMES:
        for column, words in free.items():
            if key in found:
                break
            whole = re.search(rf"(^|_)({pattern})($|_|\d)", words)
            if (
                whole
                and not (PRIVATE.search(words) and key not in ("id", "trace_id"))
                and _fits(key, table, column)
            ):
                found[key] = column
                del free[column]
                break
    return found


def _words(column: str) -> str:
    """requestId, Request-ID and request.id are all request_id."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", column)
    return re.sub(r"\W+", "_", apart).strip("_").lower()


def _fits(key: str, table: Sample, column: str) -> bool:
    values = table.values(column)
    if key in INSTANTS:
        return column in table.timestamps or not values or unit_of(values) is not None
    if key in DURATIONS and unit_of(values):
        return False  # an instant, whatever its name says
    if key in DURATIONS or key.endswith("_tokens") or key == "preemptions":
        return not values or bool(_numbers(values))
    return True


def _numbers(values: Sequence[str]) -> list[float]:
    numbers = []
    for value in values:
        try:
            numbers.append(float(value))
        except ValueError:
            continue
    return numbers


def _line(key: str, column: str, table: Sample) -> str:
    quoted = json.dumps(column, ensure_ascii=True)
    values = table.values(column)
    if key in INSTANTS:
        unit = _unit(column, table)
        comment = "" if unit else '  # no Unix time: set the unit, and clock = "monotonic" above [columns]'
        return f'{key} = {{ column = {quoted}, unit = "{unit or _suffix(column) or "s"}" }}{comment}'
    if key in DURATIONS:
        named = _suffix(column)
        numbers = _numbers(values)
        unit = named or ("ms" if numbers and median(numbers) >= LIKELY_MS else "s")
        comment = "" if named else f"  # guessed: check the unit ({', '.join(UNITS_NS)})"
        return f'{key} = {{ column = {quoted}, unit = "{unit}" }}{comment}'
    return f"{key} = {quoted}"


def _unit(column: str, table: Sample) -> str | None:
    return unit_of(table.values(column), stamped=column in table.timestamps)


def _suffix(column: str) -> str:
    words = _words(column)
    return next((unit for unit, pattern in _SUFFIXES if re.search(pattern, words)), "")


def _statuses(values: Sequence[str]) -> list[str]:
    seen = list(dict.fromkeys(printable(value, 40) for value in values))[:12]
    return [
        f"# In the first rows: {', '.join(seen) or 'nothing'}. HTTP statuses and words such as ok, error, timeout, stop",
        "# and length are known; say here what others mean:",
        f'# {STATUSES[0]} = ["…"]    # and {", ".join(STATUSES[1:])}',
    ]
