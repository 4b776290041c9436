"""Scrapes engines, in a process of its own: pages of metrics become rows in a journal.

One slow engine must not hold up the others, and one that lies must not harm: each has its own time-out, a page its
largest size, redirects are not followed, and what is no page of metrics is counted as such.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import pyarrow as pa

from tailscope import registry
from tailscope.layout import partition_of
from tailscope.live.access import ca_context, read_token
from tailscope.live.bodies import BODIES, PIECE, NotGzip, TooLarge
from tailscope.live.journal import SEGMENT_S, Busy, Journal, is_disk_full
from tailscope.live.settings import Scrape
from tailscope.live.targets import REFRESH_S, Target, targets_of
from tailscope.safe import printable
from tailscope.schema import METRICS, SERIES
from tailscope.source import Options, Tally

#: Bytes of a page of one engine; vLLM's are some 100 kB.
MOST_PAGE = 32 << 20
ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
#: Lines of one, of which a new one takes 20 µs while all other engines wait; a data-parallel engine of 64 ranks has 40,000.
MOST_LINES = 100_000
#: Series of an engine that are known; one that always has others is begun anew.
MOST_SERIES = 200_000
#: Series of an engine that are shown live: four for each of its ranks and models.
MOST_SHOWN = 4 * 256
#: What became of a scrape.
GOOD, REFUSED, TIMEOUT, BAD_STATUS, REDIRECT, TOO_LARGE, NO_METRICS, BROKEN, BUSY, DISK = (
    "good", "refused", "timeout", "bad status", "redirect", "too large", "no metrics", "broken", "busy", "disk",
)  # fmt: skip
#: Gauges of an engine that are shown live, by the names the collector stores.
SHOWN = {
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
}


@dataclass
class Report:
    """What the scraper tells the server, some times a second."""

    scrapes: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    up: dict[str, bool] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    shown: dict[tuple[str, str, str], float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    #: Whether the last page could not be written for want of space; None where none was to be written.
    disk_full: bool | None = None


class _Failed(Exception):
    """A scrape that gave nothing; the text is the outcome."""


class _Engine:
    """One target and what is known of its pages."""

    def __init__(self, target: Target, options: Options) -> None:
        self.target = target
        self._options = options
        self._hour = ""
        self.tally = Tally()

    def forget(self) -> None:
        """Begin anew: names of series are told again with the next page."""
        self._hour = ""

    def rows(self, page: bytes, time_ns: int) -> dict[str, pa.Table]:
        # Names of series are told again in each partition, so that one of them can go without taking them along.
        # The journal's segment, whose age decides, may be older than the page.
        hour = partition_of(time_ns / 1e9 - 2 * SEGMENT_S)
        if hour != self._hour:
            self._hour = hour
            self._pages = registry.page_collector().pages(self._options, self.tally)
        found: dict[str, list[pa.Table]] = {}
        for table, batch in self._pages.read(page, time_ns):
            found.setdefault(table.name, []).append(_placed(batch, self.target.instance))
        if self._pages.known > MOST_SERIES:
            self.forget()
        return {name: pa.concat_tables(batches) for name, batches in found.items()}


class Scraper:
    """Scrapes what `scrapes` say, until cancelled."""

    def __init__(self, scrapes: Sequence[Scrape], journal: Journal, options: Options) -> None:
        self._scrapes, self._journal, self._options = scrapes, journal, options
        self._running: dict[str, asyncio.Task[None]] = {}
        self._names: dict[str, str] = {}
        #: (what, instance, engine) of a series that is shown live, by instance and series.
        self._shown: dict[str, dict[str, tuple[str, str, str]]] = {}
        self.report = Report()

    def take_report(self) -> Report:
        report, self.report = self.report, Report()
        return report

    async def run(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(_session(scrape)) for scrape in self._scrapes]
            try:
                while True:
                    await self._look_up(sessions)
                    await asyncio.sleep(REFRESH_S)
            finally:
                for task in self._running.values():
                    task.cancel()

    async def _look_up(self, sessions: Sequence[aiohttp.ClientSession]) -> None:
        """Begin to scrape what is new, stop with what is gone."""
        wanted: dict[str, tuple[Target, Scrape, aiohttp.ClientSession]] = {}
        for scrape, session in zip(self._scrapes, sessions, strict=True):
            targets, problems = await targets_of(scrape)
            self.report.problems += problems
            if problems:
                # What a broken file or a silent name server listed before is scraped on.
                for url in self._running:
                    wanted.setdefault(url, (Target(url, self._names[url]), scrape, session))
            wanted |= {target.url: (target, scrape, session) for target in targets}
        for url in self._running.keys() - wanted.keys():
            self._running.pop(url).cancel()
            name = self._names.pop(url)
            self.report.gone.append(name)
            self._shown.pop(name, None)
        for url, (target, scrape, session) in wanted.items():
            if url not in self._running:
                self._names[url] = target.instance
                self._running[url] = asyncio.create_task(self._follow(target, scrape, session))

    async def _follow(self, target: Target, scrape: Scrape, session: aiohttp.ClientSession) -> None:
        engine = _Engine(target, self._options)
        # Spread, so that 200 engines are not asked at one instant.
        due = time.monotonic() + random.random() * scrape.every_s
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = max(due + scrape.every_s, time.monotonic())
            began = time.monotonic()
            try:
                outcome = await self._scrape(engine, scrape, session)
            except _Failed as why:
                outcome = str(why)
            except Exception as error:
                # A page that we do not expect ends neither this engine's scrapes nor others'.
                outcome = BROKEN
                engine.forget()
                self.report.problems.append(f"{target.url}: {type(error).__name__}: {printable(str(error))}")
            report, name = self.report, target.instance
            report.scrapes[name, outcome] += 1
            report.seconds[name] = time.monotonic() - began
            report.up[name] = outcome == GOOD
            if outcome in (GOOD, DISK):
                report.disk_full = outcome == DISK
            report.rejected += engine.tally.rejected
            report.skipped += engine.tally.skipped
            engine.tally.rejected.clear()
            engine.tally.skipped.clear()
            engine.tally.blanked.clear()

    async def _scrape(self, engine: _Engine, scrape: Scrape, session: aiohttp.ClientSession) -> str:
        time_ns = time.time_ns()
        page = await _page(engine.target.url, scrape, session)
        if page.count(b"\n") > MOST_LINES:
            raise _Failed(TOO_LARGE)
        rows = engine.rows(page, time_ns)
        if not rows and not engine.tally.skipped:
            raise _Failed(NO_METRICS)
        self._show(engine.target.instance, rows)
        try:
            await asyncio.wrap_future(
                self._journal.append(rows or {METRICS.name: METRICS.arrow.empty_table()}, engine.tally)
            )
        except (Busy, OSError) as error:
            # Series that were told for the first time are in no journal.
            engine.forget()
            if isinstance(error, Busy):
                raise _Failed(BUSY) from error
            raise _Failed(DISK if is_disk_full(error) else BROKEN) from error
        return GOOD

    def _show(self, instance: str, rows: Mapping[str, pa.Table]) -> None:
        """Remember the last value of what is shown live."""
        known = self._shown.setdefault(instance, {})
        for row in rows[SERIES.name].to_pylist() if SERIES.name in rows else ():
            if (shown := SHOWN.get(row["name"])) and len(known) < MOST_SHOWN:
                engine = "" if row["engine"] is None else str(row["engine"])
                known[row["series"]] = (shown, instance, engine)
        if METRICS.name not in rows:
            return
        table = rows[METRICS.name]
        for series, value in zip(table["series"].to_pylist(), table["value"].to_pylist(), strict=True):
            if series and value is not None and (key := known.get(series)):
                self.report.shown[key] = value


def main(
    pipe: Connection,
    scrapes: Sequence[Scrape],
    folder: Path,
    name: str,
    options: Options,
    every_s: float = 1.0,
) -> None:
    """The process: scrapes until the pipe says stop or breaks, and reports through it."""
    journal = Journal(folder, name)
    try:
        asyncio.run(_serve(pipe, Scraper(scrapes, journal, options), every_s))
    finally:
        journal.close()


async def _serve(pipe: Connection, scraper: Scraper, every_s: float) -> None:
    task = asyncio.create_task(scraper.run())
    try:
        while not task.done():
            await asyncio.sleep(every_s)
            if pipe.poll():
                pipe.recv()
                return
            pipe.send(scraper.take_report())
        task.result()
    except (EOFError, BrokenPipeError):
        return
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _session(scrape: Scrape) -> aiohttp.ClientSession:
    headers = {"Accept": ACCEPT, "Accept-Encoding": "gzip", "User-Agent": "tailscope"}
    if scrape.bearer_token_file is not None:
        headers["Authorization"] = f"Bearer {read_token(scrape.bearer_token_file)}"
    context: ssl.SSLContext | bool = True
    if scrape.ca_file is not None:
        context = ca_context(scrape.ca_file)
    return aiohttp.ClientSession(
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=scrape.timeout_s),
        connector=aiohttp.TCPConnector(limit=0, ssl=context),
        cookie_jar=aiohttp.DummyCookieJar(),
        # Unpacked by us, with a limit.
        auto_decompress=False,
    )


async def _page(url: str, scrape: Scrape, session: aiohttp.ClientSession) -> bytes:
    """Raises _Failed."""
    try:
        async with session.get(url, allow_redirects=False) as response:
            if 300 <= response.status < 400:
                raise _Failed(REDIRECT)
            if response.status != 200:
                raise _Failed(BAD_STATUS)
            encoding = response.headers.get("Content-Encoding", "").strip().lower()
            if encoding not in BODIES:
                raise _Failed(BROKEN)  # nobody asked for it
            page = BODIES[encoding](MOST_PAGE)
            async for piece in response.content.iter_chunked(PIECE):
                page.feed(piece)
            return page.finish()
    except TooLarge as error:
        raise _Failed(TOO_LARGE) from error
    except TimeoutError as error:
        raise _Failed(TIMEOUT) from error
    except aiohttp.ClientConnectorError as error:
        raise _Failed(REFUSED) from error
    except (aiohttp.ClientError, NotGzip, ValueError, OSError) as error:
        raise _Failed(BROKEN) from error


def _placed(rows: pa.Table, instance: str) -> pa.Table:
    """Rows of a page are of the engine that was scraped, whatever its own labels say."""
    index = rows.schema.get_field_index("instance")
    return rows.set_column(index, "instance", pa.repeat(pa.scalar(instance), rows.num_rows))
