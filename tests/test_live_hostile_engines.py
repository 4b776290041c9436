"""Engines that hang, lie or change: what becomes of their scrapes, and that a good one beside them is scraped on."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from test_live_server import PAGE, Running, a_page, call, engine, settings, wait_for

from tailscope.live import scrape as scraping
from tailscope.live.journal import Busy, Journal
from tailscope.live.scrape import MOST_LINES, MOST_SHOWN, Scraper
from tailscope.live.settings import Scrape
from tailscope.schema import METRICS, SERIES
from tailscope.source import Options
from tailscope.store import Trace

Answer = Callable[[BaseHTTPRequestHandler], None]


def answers(body: bytes, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def hang(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(1.5)


def dribble(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for byte in PAGE.encode():
        time.sleep(0.05)
        handler.wfile.write(bytes([byte]))


def heads(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    for number in range(20_000):
        handler.send_header(f"X-{number}", "y" * 100)
    handler.end_headers()


def negative(handler: BaseHTTPRequestHandler) -> None:
    """A counter that is none, and falls below zero."""
    text = '# TYPE vllm:num_preemptions_total gauge\nvllm:num_preemptions_total{{engine="0"}} {}\n'
    answers(text.format(-next(NUMBERS)).encode())(handler)


def numbers() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


NUMBERS = numbers()
RANKS = "# TYPE vllm:num_requests_running gauge\n" + "".join(
    f'vllm:num_requests_running{{engine="{i}"}} 1\n' for i in range(20_000)
)
STRANGE: dict[str, tuple[Answer, str]] = {
    "hangs": (hang, "timeout"),
    "dribbles": (dribble, "timeout"),
    "many heads": (heads, "broken"),
    "bomb": (answers(gzip.compress(bytes(200_000_000), 9), Content_Encoding="gzip"), "too large"),
    "no gzip": (answers(PAGE.encode(), Content_Encoding="gzip"), "broken"),
    "brotli": (answers(b"x", Content_Encoding="br"), "broken"),
    "large": (answers(b"x" * (33 << 20)), "too large"),
    "series": (answers(b"".join(b'a{b="%d"} 1\n' % i for i in range(MOST_LINES + 1))), "too large"),
    "ranks": (answers(RANKS.encode()), "good"),
    "negative": (negative, "good"),
    "binary": (answers(bytes(range(256)) * 100), "no metrics"),
    "html": (answers(b"<html>\n<body>\n</html>\n"), "no metrics"),
    "empty": (answers(b""), "no metrics"),
    "help": (answers(b"# HELP vllm:a " + b"x" * (1 << 20) + b"\n" + PAGE.encode()), "good"),
    "gzip": (answers(gzip.compress(PAGE.encode()[:40]) + gzip.compress(PAGE.encode()[40:]), Content_Encoding="gzip"), "good"),
    "fine": (a_page, "good"),
}  # fmt: skip


def test_a_strange_engine_harms_no_other(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        where = {name: stack.enter_context(engine(answer)) for name, (answer, _) in STRANGE.items()}
        scrape = [{"targets": list(where.values()), "every": "1s", "timeout": "1s"}]
        server = Running(settings(tmp_path, scrape=scrape))
        stack.callback(server.stop)

        def outcomes() -> dict[str, Counter[str]]:
            found: dict[str, Counter[str]] = {}
            for outcome, server_, count in re.findall(
                r'tailscope_scrapes_total\{outcome="(.*?)",server="(.*?)"\} (\S+)',
                call(server.url("/metrics"))[1].decode(),
            ):
                found.setdefault(server_, Counter())[outcome] += int(float(count))
            return found

        wait_for(lambda: len(outcomes()) == len(where) and outcomes()[where["fine"]]["good"] >= 2)
        found = outcomes()
        for name, (_, expected) in STRANGE.items():
            # Everything is slow on a busy machine.
            assert found[where[name]][expected] > 0, (name, found[where[name]])
            assert set(found[where[name]]) <= {expected, "timeout"}, (name, found[where[name]])
        text = call(server.url("/metrics"))[1].decode()
        ranks = re.findall(rf'tailscope_requests_running\{{engine="\d+",server="{where["ranks"]}"\}}', text)
        assert 0 < len(ranks) <= MOST_SHOWN
        assert call(server.url("/readyz"))[0] == 200
        assert not [text for text in server.said if "died" in text]
    with Trace(tmp_path / "t.parquet") as trace:
        names = trace.rows("SELECT DISTINCT instance FROM metrics WHERE value IS NOT NULL")
        assert {row["instance"] for row in names} >= {where["fine"], where["gzip"], where["help"]}
        orphans = "SELECT count(*) AS n FROM metrics WHERE series NOT IN (SELECT series FROM series)"
        assert trace.rows(orphans) == [{"n": 0}]


def of_pages(*pages: str, monkeypatch: pytest.MonkeyPatch, journal: Journal) -> Scraper:
    """A scraper that was given these pages of one engine, one after the other."""
    from tailscope.live.targets import Target

    scraper = Scraper([], journal, Options())
    made = scraping._Engine(Target("http://a/metrics", "a"), Options())

    async def scrape() -> None:
        for text in pages:

            async def page(*_: object, text: str = text) -> bytes:
                return text.encode()

            monkeypatch.setattr(scraping, "_page", page)
            try:
                await scraper._scrape(made, Scrape(), None)  # type: ignore[arg-type]
            except scraping._Failed as why:
                scraper.report.problems.append(str(why))

    asyncio.run(scrape())
    return scraper


def read(folder: Path) -> dict[str, list[dict[str, object]]]:
    from tailscope.live.journal import segments

    found: dict[str, list[dict[str, object]]] = {METRICS.name: [], SERIES.name: []}
    for segment in segments(folder):
        for table, rows, _ in segment.frames():
            found[table.name] += rows.to_pylist()
    return found


def test_types_that_change_and_names_that_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gauge = "# TYPE vllm:x gauge\nvllm:x 1\n"
    histogram = '# TYPE vllm:x histogram\nvllm:x_bucket{le="1"} 1\nvllm:x_bucket{le="+Inf"} 2\nvllm:x_sum 1\nvllm:x_count 2\n'
    twins = '# TYPE vllm:y counter\nvllm:y_total 3\nvllm:y 4\nvllm:y_total 5\nvllm:z{a="\\n\\"\\\\"} 1 # {trace_id="b"} 1 2\n'
    with_exemplar = 'vllm:x_bucket{le="+Inf"} 2 # {a="} 1 # {"} 1\n# EOF\n'
    journal = Journal(tmp_path, "pages")
    pages = (gauge, histogram, gauge, gauge + histogram, twins, with_exemplar, gauge)
    scraper = of_pages(*pages, monkeypatch=monkeypatch, journal=journal)
    journal.close()
    assert set(scraper.report.problems) <= {"no metrics"}
    found = read(tmp_path)
    told = {row["series"]: row["name"] for row in found[SERIES.name]}
    assert all(row["series"] in told for row in found[METRICS.name])
    assert {"vllm:x", "vllm:y_total", "vllm:z"} <= set(told.values())


def test_series_of_a_page_that_could_not_be_written_are_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, "pages")
    append, calls = journal.append, iter([Busy()])

    def failing(*arguments: object) -> object:
        for error in calls:
            raise error
        return append(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(journal, "append", failing)
    scraper = of_pages(PAGE, PAGE, monkeypatch=monkeypatch, journal=journal)
    journal.close()
    assert scraper.report.problems == ["busy"]
    assert len(read(tmp_path)[SERIES.name]) == 2


def test_an_engine_whose_series_are_always_others_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraping, "MOST_SERIES", 2000)
    journal = Journal(tmp_path, "pages")
    pages = ["".join(f'vllm:a{{b="{i}-{j}"}} 1\n' for j in range(1000)) for i in range(20)]
    of_pages(*pages[:4], monkeypatch=monkeypatch, journal=journal)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    of_pages(*pages, monkeypatch=monkeypatch, journal=journal)
    journal.close()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 20, f"{grown:.0f} MB"
    assert len(read(tmp_path)[SERIES.name]) == 24_000


def test_series_of_an_engine_that_is_gone_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tailscope.live.server import Server

    server = Server(settings(tmp_path))
    report = scraping.Report(up={"a": True, "b": True}, seconds={"a": 1.0})
    report.scrapes["a", "good"] = report.scrapes["b", "good"] = 1
    report.shown = {("running", "a", "0"): 1.0, ("preemptions", "a", "0"): 5.0, ("running", "b", ""): 2.0}
    server._on_scraped(report)
    server._on_scraped(scraping.Report(gone=["a"]))
    servers = {s.labels.get("server") for family in server.health.registry.collect() for s in family.samples}
    assert servers == {None, "b"}
    assert not server._engines
