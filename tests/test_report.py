"""The page: what it says, and that nothing of a trace becomes markup."""

from __future__ import annotations

from pathlib import Path

import pytest
from real import EXAMPLE

from tailscope.align import Scope
from tailscope.config import Config
from tailscope.ingest import ingest
from tailscope.model import Diagnosis
from tailscope.render import words
from tailscope.report.build import report
from tailscope.report.html import el, text
from tailscope.source import Options
from tailscope.store import Trace


def made(path: Path, scope: Scope | None = None) -> tuple[Diagnosis, str]:
    with Trace(path) as trace:
        return report(trace, Config(), scope or Scope())


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[Diagnosis, str]:
    trace = tmp_path_factory.mktemp("example") / "trace.parquet"
    ingest([EXAMPLE], trace, config=Config(), options=Options())
    return made(trace)


def test_texts_are_escaped() -> None:
    assert el("p", "<img onerror=x>", title='"><script>') == (
        '<p title="&quot;&gt;&lt;script&gt;">&lt;img onerror=x&gt;</p>'
    )
    assert text("a\nb\u202e") == "a\\nb\\u202e"


def test_says_what_the_terminal_says(example: tuple[Diagnosis, str]) -> None:
    diagnosis, page = example
    assert text(diagnosis.verdict.text) in page
    titles = [page.index(text(f.title), page.index('id="findings"')) for f in diagnosis.findings]
    assert titles == sorted(titles) and titles
    for finding in diagnosis.findings:
        for told in (*finding.evidence, *finding.counter_evidence):
            assert text(told.text) in page
        assert text(words.about(finding)) in page
    for entry in diagnosis.trust:
        assert text(entry.detail) in page


def test_is_small_and_asks_for_nothing(example: tuple[Diagnosis, str]) -> None:
    _, page = example
    assert len(page.encode()) < 5_000_000
    assert "default-src 'none'" in page
    assert " src=" not in page.split("<script", 1)[0]
