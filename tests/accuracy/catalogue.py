"""All families of labelled worlds: `FAMILIES` of every module families*.py here, so that adding one edits no index."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from families import Family

FAMILIES: tuple[Family, ...] = tuple(
    family
    for path in sorted(Path(__file__).parent.glob("families*.py"))
    for family in import_module(path.stem).FAMILIES
)
