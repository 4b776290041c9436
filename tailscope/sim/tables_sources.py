"""The rows of `sources` that simulated files have."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def source_row(
    kind: str,
    instance: str,
    file: str,
    source: str,
    *,
    rows: int,
    clock: Mapping[str, Any],
    first_ns: int | None,
    last_ns: int | None,
    blanked: Mapping[str, int] = MappingProxyType({}),
    rows_duplicate: int = 0,
) -> dict[str, Any]:
    """What `ingest` says of a file, of which every record is used. It has its own id for a hash of its content."""
    return {
        "instance": instance,
        "source": source,
        "kind": kind,
        "path": f"{instance}/{file}",
        "content_hash": source,
        "collector": kind,
        "version": "1",
        **clock,
        "rows": rows,
        "rows_rejected": 0,
        "values_blanked": sum(blanked.values()),
        "blank_reasons": sorted(blanked.items()),
        "rows_duplicate": rows_duplicate,
        "rows_conflicting": 0,
        # Of all these files only spans say whose they are.
        "instances": [instance] if kind == "otlp" else [],
        "folder": instance,
        "first_ns": first_ns,
        "last_ns": last_ns,
    }
