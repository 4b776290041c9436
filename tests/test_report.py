"""The page: what it says, and that nothing of a trace becomes markup."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from called import called
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


# -- the commands ------------------------------------------------------------------------------------


def tailscope(*args: str | Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "tailscope", *map(str, args)],
        capture_output=True,
        env={**os.environ, **env},
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "trace.parquet"
    ingest([EXAMPLE], path, config=Config(), options=Options())
    return path


def test_report_writes_what_diagnose_prints_as_html(trace: Path, tmp_path: Path) -> None:
    done = tailscope(
        "report", trace, "-o", tmp_path / "page.html", "--class", "<512", "--slo", "<512:ttft_p99_s=1"
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rb"FOUND: written to .*page.html \([0-9.]+ MB\)\s*", done.stdout)
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    # Also where the terminal speaks no UTF-8; and it trips --fail-on as any diagnosis.
    printed = tailscope(
        *(
            "diagnose",
            trace,
            "--format",
            "html",
            "--fail-on",
            "low",
            "--class",
            "<512",
            "--slo",
            "<512:ttft_p99_s=1",
        ),
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONIOENCODING="ascii",
    )
    assert printed.returncode == 3
    assert printed.stdout == (tmp_path / "page.html").read_bytes()
    assert "p99 &lt; 1 s" in printed.stdout.decode()


def test_what_cannot_be_written_is_one_message(trace: Path, tmp_path: Path) -> None:
    done = called("report", trace, "-o", tmp_path)
    assert done.returncode == 2 and "is a folder; name a file" in done.stderr
    done = called("report", trace, "-o", tmp_path / "no" / "page.html")
    assert done.returncode == 2 and "cannot be written: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_links_within_the_page_lead_somewhere(example: tuple[Diagnosis, str]) -> None:
    _, page = example
    anchors = set(re.findall(r'href="#([^"]+)"', page))
    assert anchors and anchors <= set(re.findall(r' id="([^"]+)"', page))
