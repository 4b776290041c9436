"""Where the real files lie that are too big, or not ours, to be part of the repository."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])

ROOT = Path(__file__).parent.parent
#: Shipped: one capture of a real vLLM.
EXAMPLE = ROOT / "examples" / "mixed-load"

_BESIDE = ROOT.parent / "shared"
#: All captures made for the project, and files made by others. Set the variables to use other folders.
CAPTURES = Path(os.environ.get("TAILSCOPE_CAPTURES", _BESIDE / "captures"))
CORPUS = Path(os.environ.get("TAILSCOPE_CORPUS", _BESIDE / "corpus"))


def _needs(folder: Path, variable: str, mark: pytest.MarkDecorator) -> list[pytest.MarkDecorator]:
    reason = f"{folder.name} folder not found; set {variable} to run"
    return [mark, pytest.mark.skipif(not folder.is_dir(), reason=reason)]


_captures = _needs(CAPTURES, "TAILSCOPE_CAPTURES", pytest.mark.captures)
_corpus = _needs(CORPUS, "TAILSCOPE_CORPUS", pytest.mark.corpus)


def needs_captures(test: Test) -> Test:
    marked: Test = _captures[0](_captures[1](test))
    return marked


def needs_corpus(test: Test) -> Test:
    marked: Test = _corpus[0](_corpus[1](test))
    return marked
