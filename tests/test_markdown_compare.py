"""A comparison and a sweep as Markdown and as annotations: what the terminal says, with the same exit status."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from called import called
from rich.table import Table
from rich.text import Text
from test_compare import requests, side
from test_markdown import one_space, shown

from tailscope.compare.pair import Comparison, compare
from tailscope.compare.sweep import sweep
from tailscope.config import Config
from tailscope.render import github, markdown
from tailscope.render.compare import comparison_parts, sweep_parts
from tailscope.render.parts import Item, Lead, cells_of


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("compare")
    return (
        requests(folder / "before", 1),
        requests(folder / "after", 2, short_s=0.4, long_s=1.0),
        requests(folder / "third", 3, rate=24.0),
    )


@pytest.fixture(scope="module")
def compared(traces: tuple[Path, Path, Path]) -> Comparison:
    return compare(side(traces[0]), side(traces[1]), Config())


def test_markdown_says_what_the_terminal_says(compared: Comparison) -> None:
    texts, _ = shown(markdown.render(comparison_parts(compared)))
    said, at = " ".join(map(one_space, texts)), 0
    for part in comparison_parts(compared):
        if isinstance(part, Lead):
            pieces = [part.word, part.sentence]
        elif isinstance(part, Item):
            pieces = [part.text]
        elif isinstance(part, Table):
            header, rows = cells_of(part)
            pieces = [*header, *(cell for row in rows for cell in row)]
        else:
            assert isinstance(part, Text)
            pieces = [part.plain]
        for piece in map(one_space, pieces):
            at = said.index(piece, at) + len(piece)


def test_what_got_slower_is_an_error_and_what_got_faster_a_notice(compared: Comparison) -> None:
    lines = github.of_comparison(compared).splitlines()
    assert lines[0].startswith("::warning title=tailscope%3A mixed::")
    called = [c for c in compared.changes if c.verdict in ("slower", "faster")]
    assert {c.verdict for c in called} == {"slower", "faster"}
    for change in called:
        level = "error" if change.verdict == "slower" else "notice"
        start = f"::{level} title={change.verdict}%3A {change.klass} {change.metric} {change.quantile}::"
        (line,) = [line for line in lines if line.startswith(start)]
        assert re.search(r": [\d.]+ m?s before, [\d.]+ m?s after, .*%25.*: (slower|faster)$", line)


def test_a_sweep_is_markdown_too(traces: tuple[Path, Path, Path]) -> None:
    found = sweep([side(path) for path in traces])
    texts, _ = shown(markdown.render(sweep_parts(found)))
    assert texts[0] == one_space(found.text)
    assert any(text.startswith("TTFT p50") for text in texts)
    assert github.of_sweep(found).startswith("::notice title=tailscope%3A sweep::")


@pytest.mark.parametrize("format", ["text", "json", "markdown", "github"])
def test_the_exit_status_is_the_same_in_every_format(traces: tuple[Path, Path, Path], format: str) -> None:
    done = called("compare", *traces[:2], "--fail-on-regression", "5%", "--format", format)
    assert done.returncode == 3, done.stderr
    if format == "github":
        assert all(line.startswith("::") for line in done.stdout.splitlines())
