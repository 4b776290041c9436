"""The tour's commands print what it shows, and its pictures' pages say what their texts say."""

from __future__ import annotations

from pathlib import Path

import tour


def test_the_tour_is_true(tmp_path: Path) -> None:
    assert not tour.stale(tmp_path), "docs/tour.md is out of date; see python tests/tour.py --check"


def test_a_line_that_is_not_printed_is_found() -> None:
    assert tour._of_text("one\n…\nthree\n", ["zero", "one", "two", "three"]) == []
    assert tour._of_text("three\none\n", ["one", "three"]) == ["not printed, or not there: one"]
