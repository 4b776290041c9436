"""The page in Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import browser, drawn, in_chromium, opened
from hostile import EVIL, spoil
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


def test_clicks_and_filters(example: Path) -> None:
    with opened(example) as (page, said):
        drawn(page)
        before = page.locator("#dist-says").text_content()
        page.select_option("#filter-class", index=1)
        assert page.locator("#filter-says").text_content().startswith("Shown: class")
        assert page.locator("#dist-says").text_content() != before
        shown = page.locator(".bar-row:visible").count()
        assert 0 < shown < page.locator(".bar-row").count()
        page.fill("#filter-from", "500")
        assert "UTC" in page.locator("#filter-says").text_content()
        page.click("#filter-reset")
        assert page.locator("#dist-says").text_content() == before
        # A finding's button narrows the page to what it speaks of.
        page.locator("button[data-finding='1']").click()
        assert page.locator("#filter-says").text_content().startswith("Shown: ")
        page.click("#filter-reset")
        for select in ("#dist-metric", "#times-metric", "#shapes-what", "#request"):
            page.select_option(select, index=1)
        page.locator("#findings a[data-request]").first.click()
        drawn(page)
    assert said == []


def test_a_link_opens_what_is_folded(example: Path) -> None:
    with opened(example) as (page, said):
        assert page.locator("#finding-2[open]").count() == 0
        page.evaluate("location.hash = '#finding-2'")
        page.wait_for_selector("#finding-2[open]")
    assert said == []


def test_works_by_keyboard(example: Path) -> None:
    with opened(example) as (page, said):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.locator("#finding-2 summary").focus()
        page.keyboard.press("Enter")
        assert page.locator("#finding-2[open]").count() == 1
        # Everything that takes the focus has a name.
        nameless = page.evaluate(
            "[...document.querySelectorAll('a,button,select,input:not([type=hidden])')]"
            ".filter(e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).length"
        )
        assert nameless == 0
    assert said == []


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(example: Path, dark: bool) -> None:
    with opened(example, dark=dark) as (page, said):
        drawn(page)
        colour = "getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(colour)
        page.click("#theme")
        assert page.evaluate(colour) != before
        assert page.locator("#theme").text_content() == ("Dark" if dark else "Light")
        drawn(page)
    assert said == []


def test_fits_a_phone(example: Path) -> None:
    with opened(example, width=390) as (page, said):
        drawn(page)
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert said == []


def test_names_run_nothing(tmp_path: Path) -> None:
    trace = tmp_path / '"><img src=x onerror=window.__pwned=1>.parquet'
    ingest([EXAMPLE], trace, config=Config(), options=Options())
    spoil(trace)
    with Trace(trace) as opened_trace:
        _, made = report(opened_trace, Config(), Scope())
    assert EVIL not in made and "<img" not in made and "window.__pwned=1</script>" not in made
    (tmp_path / "page.html").write_text(made, encoding="utf-8")
    with opened(tmp_path / "page.html") as (page, said):
        drawn(page)
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        for select in page.locator("select").all():
            options = select.locator("option").count()
            for i in range(min(options, 3)):
                select.select_option(index=i)
        page.click("#filter-reset")
        drawn(page)
        # Hovering shows texts that Plotly makes.
        for plot in page.locator(".js-plotly-plot").all():
            plot.scroll_into_view_if_needed()
            box = plot.bounding_box()
            for x in (0.3, 0.5, 0.7):
                page.mouse.move(box["x"] + box["width"] * x, box["y"] + box["height"] * 0.5)
        # They are there, as text: in tables, and in what Plotly draws.
        for place in ("#latency", "#blame", "#requests table", "#plot-waterfall", "#plot-dist"):
            assert "&lt;b&gt;" in page.locator(place).first.text_content()
        assert page.evaluate("window.__pwned") is None
        assert page.locator("img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 1440
    assert said == []


def test_prints_white_with_all_findings_open(example: Path) -> None:
    with opened(example, dark=True) as (page, said):
        drawn(page)
        assert page.pdf()[:4] == b"%PDF"
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        folded = page.locator("details.finding:not([open])").count()
        assert folded == 0 and not page.locator("nav").is_visible()
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.locator("details.finding:not([open])").count() > 0
        drawn(page)
    assert said == []


def test_is_readable_without_a_script(example: Path) -> None:
    with browser() as chromium:
        page = chromium.new_context(java_script_enabled=False).new_page()
        page.goto(example.as_uri())
        assert page.locator("#findings details[open]").is_visible()
        assert page.locator("#excess .bar").first.is_visible()
        assert page.locator("#plot-dist .waiting").is_visible()
        assert not page.locator("#filters").is_visible()
