"""A page in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_CHROMIUM = "Chromium is not installed (on Debian and Ubuntu: apt install chromium)"
#: A machine with other work takes its time.
PATIENCE_MS = 120_000
in_chromium = [pytest.mark.chromium, pytest.mark.skipif(not CHROMIUM, reason=NO_CHROMIUM)]


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


@contextmanager
def opened(path: Path, *, width: int = 1440, dark: bool = False) -> Iterator[tuple[Any, list[str]]]:
    """The page at `path`, ready, and what its console said that is an error, which grows."""
    with browser() as chromium:
        page = chromium.new_page(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
        )
        said: list[str] = []
        page.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))

        def dialog(asked: Any) -> None:
            said.append(f"dialog: {asked.message}")
            asked.dismiss()

        page.on("dialog", dialog)
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", lambda r: None if r.url.startswith("file:") else said.append(f"asked for {r.url}"))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        yield page, said


def drawn(page: Any) -> None:
    """Wait until every chart is drawn, or says that there is nothing to draw."""
    until(
        page,
        "[...document.querySelectorAll('[data-chart]')].every(e => e.dataset.drawn || e.dataset.nothing)",
    )


def until(page: Any, expression: str) -> None:
    """Wait for it to be true. Playwright's own way to wait evaluates text in the page, which its policy forbids."""
    for _ in range(PATIENCE_MS // 100):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"not within {PATIENCE_MS / 1000:g} s: {expression}")
