"""Finds rules and collectors: ours by looking in the two folders, others' through entry points."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.resources import files
from typing import cast

from tailscope.model import Collector, PageCollector, Rule, SpanCollector, TableCollector


def _modules(package: str) -> list[str]:
    path = import_module(package).__path__
    return sorted(f"{package}.{m.name}" for m in pkgutil.iter_modules(path) if not m.name.startswith("_"))


@cache
def collectors() -> tuple[Collector, ...]:
    """Every collector, ours first, in name order."""
    ours: list[Collector] = [import_module(name).COLLECTOR for name in _modules("tailscope.collectors")]
    theirs: list[Collector] = [entry.load() for entry in sorted(entry_points(group="tailscope.collectors"))]
    return tuple(ours + theirs)


def table_collector() -> TableCollector | None:
    """The collector that reads any table by a mapping, if one is installed."""
    return next((cast(TableCollector, c) for c in collectors() if hasattr(c, "table_of")), None)


def span_collector() -> SpanCollector:
    """The collector that reads OTLP requests as they come."""
    return next(cast(SpanCollector, c) for c in collectors() if hasattr(c, "receive"))


def page_collector() -> PageCollector:
    """The collector that reads pages of metrics as they are scraped."""
    return next(cast(PageCollector, c) for c in collectors() if hasattr(c, "pages"))


@cache
def rules() -> tuple[tuple[Rule, str], ...]:
    """Every rule with its query: (rule, SQL), ours first, in name order.

    Another package's entry point names a module with `RULE` and a `.sql` file beside it.
    """
    names = _modules("tailscope.rules")
    names += sorted(entry.module for entry in entry_points(group="tailscope.rules"))
    found = []
    for name in names:
        package, _, stem = name.rpartition(".")
        sql = files(package).joinpath(f"{stem}.sql").read_text(encoding="utf-8")
        found.append((import_module(name).RULE, sql))
    return tuple(found)
