"""The running server: listeners in one process, the scraper and the keeper of the trace in one each.

Spans are decoded, journaled and acknowledged here; pages of metrics are parsed in the scraper's process, so that the two
share nothing but the disk; parts are made of both journals in the keeper's. A process that dies is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import Counter

from tailscope import registry
from tailscope.errors import UsageError
from tailscope.live import connections, otlp_grpc, otlp_http, pages, scrape
from tailscope.live import journal as journals
from tailscope.live.access import access_of
from tailscope.live.health import Health
from tailscope.live.intake import Intake
from tailscope.live.journal import Journal, is_disk_full
from tailscope.live.keep import FAILURES, Keeper, Kept
from tailscope.live.request_metrics import RequestMetrics
from tailscope.live.settings import Address, Serve
from tailscope.live.watch import Watch
from tailscope.source import Options

#: Below a trace; nobody who reads the trace looks there.
JOURNAL, HISTORY, LOCK = ".journal", ".findings.jsonl", ".serving"
SPANS, PAGES = "spans", "pages"
#: How often the keeper looks for closed segments, and how often requests are counted.
KEEP_S, COUNT_S = 1.0, 1.0
#: Between a process's death and its next start.
RESTART_S = 1.0
#: What a graceful stop may take, and calls that are being answered.
GRPC_STOP_S = 2.0
STOP_S = 10.0


class Server:
    """Runs what `serve` says, until told to stop. `ports` are known once `started` is set."""

    def __init__(
        self,
        serve: Serve,
        config_text: bytes | None = None,
        say: Callable[[str], object] = print,
        health: Health | None = None,
    ) -> None:
        self.ports: dict[str, int] = {}
        self.started = asyncio.Event()
        self.health = health or Health()
        self.say = say
        self._serve, self._config_text = serve, config_text
        self._access = access_of(serve)
        self._folder = serve.trace / JOURNAL
        self._requests = RequestMetrics(serve.config, serve.tenants, serve.label_sets)
        self._stop = asyncio.Event()
        self._engines: dict[tuple[str, str, str], float] = {}
        self._trouble: dict[str, str] = {}
        self._watch: Watch | None = None

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        """Raises UsageError where it cannot listen or write."""
        serve = self._serve
        with _held(serve.trace):
            try:
                recovered = [journals.recover(self._folder, name) for name in (SPANS, PAGES)]
                journal = Journal(
                    self._folder,
                    SPANS,
                    segment_s=journals.SEGMENT_S,
                    on_sync=self.health.sync_seconds.observe,
                )
            except OSError as error:
                raise UsageError(f"{self._folder}: cannot write: {error.strerror}") from error
            if cut := sum(size for size, _ in recovered):
                self.say(
                    f"{cut:,} bytes of the journal were not whole and had been acknowledged to nobody: cut off"
                )
            for damaged in (path for _, aside in recovered for path in aside):
                self.say(
                    f"the journal is damaged, and rows that were acknowledged may be lost: see {damaged}"
                )
            options = Options(attributes=serve.config.attributes, hash_ids=serve.hash_ids)
            intake = Intake(journal, options, self.health, self._requests.add)
            async with contextlib.AsyncExitStack() as stack:
                stack.callback(self._requests.close)
                stack.callback(intake.close)
                stack.push_async_callback(asyncio.to_thread, journal.close)
                if serve.listen is not None:
                    config = self._config_text and stack.enter_context(_file_with(self._config_text))
                    self._watch = Watch(
                        serve.trace, config or None, serve.window_s, serve.every_s, serve.trace / HISTORY
                    )
                await self._listen(stack, intake)
                tasks = [asyncio.create_task(self._count())]
                tasks.append(asyncio.create_task(self._keep()))
                if serve.scrapes:
                    tasks.append(asyncio.create_task(self._scrape(options)))
                if self._watch is not None:
                    tasks.append(asyncio.create_task(self._watch.run()))
                self.started.set()
                stopping = asyncio.create_task(self._stop.wait())
                await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in [stopping, *tasks]:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
            # All is in the journal now; what is kept of it is kept before the end.
            await asyncio.to_thread(self._keep_rest)
            for result in results:
                if isinstance(result, Exception):
                    raise result

    def summary(self) -> str:
        """What was recorded, in a sentence."""
        rows = {labels["table"]: int(value) for labels, value in _samples(self.health.written)}
        lost = sum(int(value) for _, value in _samples(self.health.rejected))
        scrapes = [(labels["outcome"], int(value)) for labels, value in _samples(self.health.scrapes)]
        failed = sum(count for outcome, count in scrapes if outcome != scrape.GOOD)
        parts = [f"{count:,} rows of {table}" for table, count in sorted(rows.items()) if count]
        text = f"{self._serve.trace}: {', '.join(parts) or 'nothing'}"
        if lost:
            text += f"; {lost:,} records rejected"
        if failed:
            text += f"; {failed:,} of {sum(count for _, count in scrapes):,} scrapes failed"
        return text

    # -- listeners -----------------------------------------------------------------------------

    async def _listen(self, stack: contextlib.AsyncExitStack, intake: Intake) -> None:
        serve, access = self._serve, self._access
        if serve.otlp_grpc is not None:
            try:
                server, port = await otlp_grpc.start(intake, serve.otlp_grpc, access, serve.max_message)
            except RuntimeError as error:
                raise UsageError(
                    f"{serve.otlp_grpc}: cannot listen for OTLP/gRPC: the address is taken or not ours"
                ) from error
            stack.push_async_callback(server.stop, GRPC_STOP_S)
            self._said("otlp_grpc", "OTLP/gRPC", Address(serve.otlp_grpc.host, port))
        if serve.otlp_http is not None:
            found = otlp_http.routes(intake, access, serve.max_message)
            await self._listen_http(stack, "otlp_http", "OTLP/HTTP", serve.otlp_http, found)
        if serve.listen is not None:
            watched = pages.WatchMetrics(self._watch.state)  # type: ignore[union-attr]
            self.health.registry.register(watched)
            stack.callback(self.health.registry.unregister, watched)
            found = pages.routes(self.health.registry, self._requests, self._watch, access, self._not_ready)
            await self._listen_http(stack, "listen", "/metrics and status", serve.listen, found)

    async def _listen_http(
        self,
        stack: contextlib.AsyncExitStack,
        key: str,
        what: str,
        where: Address,
        found: Sequence[web.RouteDef],
    ) -> None:
        try:
            port = await connections.listen(stack, found, where, self._access.ssl_context())
        except OSError as error:
            raise UsageError(f"{where}: cannot listen for {what}: {error.strerror}") from error
        self._said(key, what, Address(where.host, port))

    def _said(self, key: str, what: str, where: Address) -> None:
        self.ports[key] = where.port
        self.say(f"{what} on {where}")

    def _not_ready(self) -> str:
        return "; ".join(self._trouble.values())

    # -- what goes on ---------------------------------------------------------------------------

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(COUNT_S)
            await asyncio.to_thread(self._requests.count)
            with contextlib.suppress(OSError):
                self.health.journal_bytes.set(await asyncio.to_thread(journals.size_of, self._folder))

    def _keeper(self) -> Keeper:
        versions = {SPANS: registry.span_collector(), PAGES: registry.page_collector()}
        kinds = {name: (collector.name, collector.version) for name, collector in versions.items()}
        serve = self._serve
        return Keeper(
            serve.trace, self._folder, kinds, most_age_s=serve.retention_s, most_bytes=serve.retention_bytes
        )

    def _keep_rest(self) -> None:
        try:
            self._kept(self._keeper().round())
        except FAILURES as error:
            self.say(f"{error}. What was acknowledged is in the journal and is kept at the next start")

    async def _keep(self) -> None:
        await self._supervise("keeper", _keep_main, (self._keeper(),), self._on_kept)

    async def _scrape(self, options: Options) -> None:
        await self._supervise(
            "scraper", scrape.main, (self._serve.scrapes, self._folder, PAGES, options), self._on_scraped
        )

    async def _supervise(
        self, part: str, main: Callable[..., object], arguments: tuple[Any, ...], on: Callable[[Any], object]
    ) -> None:
        """Run a process, take what it says, start it again where it dies."""
        context = multiprocessing.get_context("spawn")
        while True:
            try:
                process, ours = _started(context, main, arguments)
            except OSError as error:  # no memory, or no file descriptors: until there are
                self._trouble[part] = f"the {part} cannot be started: {error.strerror}"
                self.say(self._trouble[part])
                await asyncio.sleep(RESTART_S)
                continue
            try:
                while (message := await asyncio.to_thread(_received, ours)) is not _GONE:
                    if message is not None:
                        on(message)
            finally:
                await asyncio.shield(asyncio.to_thread(_end, process, ours))
            self.health.restarts.labels(part).inc()
            self._trouble[part] = f"the {part} died and is started again"
            self.say(self._trouble[part])
            if part == "scraper":
                with contextlib.suppress(OSError):  # what it left is closed at the next start
                    await asyncio.to_thread(journals.recover, self._folder, PAGES)
            await asyncio.sleep(RESTART_S)

    def _on_kept(self, message: Kept | NotKept) -> None:
        full = isinstance(message, NotKept) and message.disk_full
        self.health.set_disk_full("keeper", full)
        if isinstance(message, NotKept):
            if self._trouble.get("keeper") != message.why:
                self.say(message.why)
            self._trouble["keeper"] = message.why
        else:
            self._trouble.pop("keeper", None)
            self._kept(message)

    def _kept(self, kept: Kept) -> None:
        for table, count in kept.rows.items():
            self.health.written.labels(table).inc(count)
        for damage in kept.damaged:
            self.health.damaged.inc()
            self.say(damage)
        self.health.duplicates.inc(kept.duplicates)
        self.health.trace_bytes.set(kept.trace_bytes)
        self.health.trace_parts.set(kept.trace_parts)

    def _on_scraped(self, report: scrape.Report) -> None:
        health = self.health
        self._trouble.pop("scraper", None)
        for (server, outcome), count in report.scrapes.items():
            health.scrapes.labels(server, outcome).inc(count)
        for server, seconds in report.seconds.items():
            health.scrape_seconds.labels(server).set(seconds)
        for server, up in report.up.items():
            health.up.labels(server).set(up)
        for reason, count in report.rejected.items():
            health.rejected.labels(reason).inc(count)
        for reason, count in report.skipped.items():
            health.skipped.labels(reason).inc(count)
        gauges = {"kv_usage": health.kv_usage, "running": health.running, "waiting": health.waiting}
        for (what, server, engine), value in report.shown.items():
            if what in gauges:
                gauges[what].labels(server, engine).set(value)
            else:
                # A counter that fell began anew.
                before = self._engines.get((what, server, engine), value)
                health.preemptions.labels(server, engine).inc(
                    value - before if value >= before else max(0.0, value)
                )
                self._engines[what, server, engine] = value
        for server in report.gone:
            self._forget(server)
        for problem in dict.fromkeys(report.problems):
            self.say(problem)
        if report.disk_full is not None:
            health.set_disk_full("pages", report.disk_full)

    def _forget(self, server: str) -> None:
        """Series of an engine that is scraped no more: last values would stand there for ever."""
        health = self.health
        for metric in (
            health.up, health.scrape_seconds, health.scrapes, health.kv_usage, health.running, health.waiting, health.preemptions,
        ):  # fmt: skip
            shown = [sample.labels for family in metric.collect() for sample in family.samples]
            for labels in {tuple(found.values()) for found in shown if found["server"] == server}:
                metric.remove(*labels)
        for key in [key for key in self._engines if key[1] == server]:
            del self._engines[key]


@contextlib.contextmanager
def _file_with(text: bytes) -> Iterator[Path]:
    """The configuration as it is in use, whatever becomes of its file meanwhile."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="tailscope-")
        path = Path(folder.name, "tailscope.toml")
        path.write_bytes(text)
    except OSError as error:
        raise UsageError(f"{tempfile.gettempdir()}: cannot write: {error.strerror}") from error
    with folder:
        yield path


def _samples(metric: Counter) -> Iterator[tuple[dict[str, str], float]]:
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                yield sample.labels, sample.value


@dataclass(frozen=True)
class NotKept:
    """Why a round of the keeper failed. It is tried again; the rows are in the journal."""

    why: str
    disk_full: bool


def _started(
    context: SpawnContext, main: Callable[..., object], arguments: tuple[Any, ...]
) -> tuple[BaseProcess, Connection]:
    ours, theirs = context.Pipe()
    with theirs:
        process = context.Process(target=_as_child, args=(theirs, main, arguments), daemon=True)
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
        return process, ours


_GONE = object()


def _received(pipe: Connection) -> Any:
    """What a process says, None where it says nothing for a while, _GONE where it is no more."""
    try:
        return pipe.recv() if pipe.poll(0.5) else None
    except (EOFError, OSError):
        return _GONE


def _end(process: BaseProcess, pipe: Connection) -> None:
    with contextlib.suppress(OSError):
        pipe.send("stop")
    # What it says meanwhile must not block it.
    began = time.monotonic()
    while process.is_alive() and time.monotonic() - began < STOP_S:
        if _received(pipe) is _GONE:
            break
    process.join(STOP_S)
    if process.is_alive():
        process.kill()
        process.join()
    pipe.close()


def _as_child(pipe: Connection, main: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    # Ctrl-C is for the server, which then says so here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main(pipe, *arguments)


def _keep_main(pipe: Connection, keeper: Keeper) -> None:
    os.nice(5)
    while not pipe.poll(KEEP_S):
        try:
            message: Kept | NotKept = keeper.round()
        except FAILURES as error:
            message = NotKept(str(error), is_disk_full(error) or is_disk_full(error.__cause__))
        try:
            pipe.send(message)
        except OSError:
            return


@contextlib.contextmanager
def _held(trace: Path) -> Any:
    """One server a trace. Raises UsageError."""
    import fcntl

    try:
        trace.mkdir(parents=True, exist_ok=True)
        lock = (trace / LOCK).open("a")
    except OSError as error:
        raise UsageError(f"{trace}: cannot write: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"{trace}: another tailscope serves this trace") from error
        yield
