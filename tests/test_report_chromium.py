"""The page in Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import drawn, in_chromium, opened
from real import EXAMPLE

from tailscope.align import Scope
from tailscope.config import Config
from tailscope.ingest import ingest
from tailscope.report.build import report
from tailscope.source import Options
from tailscope.store import Trace

pytestmark = in_chromium


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    ingest([EXAMPLE], folder / "trace.parquet", config=Config(), options=Options())
    with Trace(folder / "trace.parquet") as trace:
        _, page = report(trace, Config(), Scope())
    (folder / "page.html").write_text(page, encoding="utf-8")
    return folder / "page.html"


def test_opens_without_an_error(example: Path) -> None:
    with opened(example) as (page, said):
        drawn(page)
        assert page.locator("#findings details[open]").count() == 1
        assert page.locator(".js-plotly-plot").count() > 0
    assert said == []
