"""Ids, names and labels from traces are hostile text; this makes them safe to print."""

from __future__ import annotations


def printable(text: str, limit: int = 200) -> str:
    """`text` on one line with control, format and bidirectional characters escaped, at most `limit` long."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
