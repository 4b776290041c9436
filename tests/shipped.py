"""The dashboards as they are checked in."""

from __future__ import annotations

import json
import typing
from typing import Any

from tree import ROOT

SHIPPED = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "dashboards").glob("*.json")
}
SHOWN = [
    (f"{name}: {panel['title']}", panel)
    for name, made in SHIPPED.items()
    for panel in made["panels"]
    if panel["type"] != "row"
]
EXPRS = [(f"{place} {t['refId']}", panel, t["expr"]) for place, panel in SHOWN for t in panel["targets"]]


def panel_of(board: str, title: str) -> dict[str, Any]:
    [found] = [p for p in SHIPPED[board]["panels"] if p["title"] == title]
    return typing.cast("dict[str, Any]", found)
