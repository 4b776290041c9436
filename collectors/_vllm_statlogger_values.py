"""Values of stat-logger records, checked; those that cannot be true are counted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from tailscope.source import INT64_MAX, Tally

#: Longest duration and latest time, ns: int64, less what rounding of a float may add.
LIMIT_NS = 9.2e18

#: By name as by number of vLLM's FinishReason.
_STATUS: dict[str | int, str] = {
    **dict.fromkeys(("STOP", 0, "LENGTH", 1, "REPETITION", 4), "ok"),
    **dict.fromkeys(("ABORT", 2), "aborted"),
    **dict.fromkeys(("ERROR", 3), "error"),
}

Group = Mapping[str, Any]


class Values:
    """Reads fields of a record. An absent or null field is None; so is a wrong one, which is counted."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.where = ""

    def group(self, parent: Group, key: str) -> Group:
        value = parent.get(key)
        if isinstance(value, dict):
            return value
        if value is not None:
            self.tally.reject("stats are not an object", self.where)
        return {}

    def count(self, group: Group, key: str) -> int | None:
        value = group.get(key)
        if value is None:
            return None
        if is_number(value) and 0 <= value <= INT64_MAX and value == (count := int(value)):
            return count
        self.tally.blank("count is negative or not a whole number", self.where)
        return None

    def duration(self, group: Group, key: str, unit_ns: float = 1e9) -> int | None:
        duration = nanoseconds(value := group.get(key), unit_ns)
        if duration is None and value is not None:
            self.tally.blank("duration is negative or not a number", self.where)
        return duration

    def share(self, group: Group, key: str) -> float | None:
        value = group.get(key)
        if value is None:
            return None
        if is_number(value) and 0 <= value <= 1:
            return float(value)
        self.tally.blank("share is not between 0 and 1", self.where)
        return None

    def text(self, group: Group, key: str) -> str | None:
        value = group.get(key)
        if value is None:
            return None
        if isinstance(value, str):
            return utf8(value)
        self.tally.blank("value is not text", self.where)
        return None

    def status(self, group: Group, key: str) -> str | None:
        reason = group.get(key)
        if reason is None:
            return None
        status = None
        if isinstance(reason, str | int) and not isinstance(reason, bool):
            status = _STATUS.get(reason.upper() if isinstance(reason, str) else reason)
        if status is None:
            self.tally.blank("finish reason is not known", self.where)
        return status


def json_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line, Python's NaN and Infinity included; None if it is none."""
    line = line.strip()
    if not line.startswith(b"{"):
        return None
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def nanoseconds(value: Any, unit_ns: float = 1e9) -> int | None:
    """A duration; comparing leaves out NaN, infinity and what int64 cannot hold."""
    return round(value * unit_ns) if is_number(value) and 0 <= value < LIMIT_NS / unit_ns else None


def instant(seconds: Any) -> int | None:
    return nanoseconds(seconds) or None


def before(moment: int | None, duration: int | None) -> int | None:
    return None if moment is None or duration is None or duration >= moment else moment - duration


def utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def model_name(value: Any) -> str | None:
    """Name of the model. Of a path only the last part: the rest is the machine's."""
    if not isinstance(value, str) or not value.strip("/"):
        return None
    text = utf8(value)
    is_hub_name = text.count("/") <= 1 and text[0] not in "/.~"
    return text if is_hub_name else text.rstrip("/").rpartition("/")[2]
