"""The try-out: a fleet, `tailscope serve` and Prometheus are started, a neighbour becomes noisy, and what is seen of it is told."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tailscope.errors import TailscopeError, UsageError
from tailscope.safe import printable
from tailscope.sim.scenario import Load, Scenario
from tailscope.sim.scenario_file import load

from . import parts
from .fleet import Fleet

HERE = Path(__file__).parent
NOISY, HEALTHY, CONFIG = "noisy-neighbour.toml", "busier-neighbour.toml", "tailscope.toml"
#: What rules look at, and how often: production's five minutes are longer than all of this.
WINDOW, EVERY = "60s", "5s"
#: How often we look, and how often a p99 is told.
POLL_S, TELL_S = 0.5, 15.0
#: After the decoy has stopped nothing may open for so long.
QUIET_S = 30.0


@dataclass
class Seen:
    """What happened; times are seconds of the world."""

    began_s: float
    ended_s: float
    #: Records of the history, each with `at_s`.
    changes: list[dict[str, Any]] = field(default_factory=list)
    #: (seconds, alert, what of, state)
    alerts: list[tuple[float, str, str, str]] = field(default_factory=list)
    #: before | during -> class -> (p99 TTFT, requests)
    p99: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)

    def first(self, change: str, culprit: str) -> dict[str, Any] | None:
        """The first finding of the culprit that opened or closed."""
        return next((c for c in self.changes if c["change"] == change and c["culprit"] == culprit), None)


def main(scenario: Path | None, healthy: bool, keep: bool, say: Callable[[str], object]) -> bool:
    """Run until it is told, or until Ctrl-C; False where what was injected was not found, or something else was."""
    world = load(scenario or HERE / (HEALTHY if healthy else NOISY))
    seen = asyncio.run(run(world, say, keep=keep))
    return seen is None or verdict(world, seen, say)


def verdict(world: Scenario, seen: Seen, say: Callable[[str], object]) -> bool:
    opened = [change for change in seen.changes if change["change"] == "opened"]
    if not world.causes:
        say(f"\nNothing was injected, and {len(opened) or 'no'} findings opened.")
        return not opened
    culprit = world.causes[0].culprit or ""
    found, closed = seen.first("opened", culprit), seen.first("closed", culprit)
    if found is None:
        say(f"\n{culprit} was injected, and no finding named it.")
        return False
    after = "" if closed is None else f", and closed {closed['at_s'] - seen.ended_s:.0f} s after it stopped"
    say(
        f"\n{culprit} was injected. The finding named it {found['at_s'] - seen.began_s:.0f} s after it began{after}."
    )
    others = [change["title"] for change in opened if change["culprit"] != culprit]
    for title in dict.fromkeys(others):
        say(f"Also found: {printable(title)}")
    return not others and closed is not None


async def run(
    world: Scenario,
    say: Callable[[str], object],
    *,
    keep: bool = False,
    window: str = WINDOW,
    every: str = EVERY,
    prometheus: str | None = shutil.which("prometheus"),
    enough: Callable[[Seen], bool] = lambda seen: False,
) -> Seen | None:
    """Until all is told or `enough` was seen; None where Ctrl-C or SIGTERM ended it. Nothing stays: no process, no port, no
    folder unless `keep`."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    folder = Path(tempfile.mkdtemp(prefix="tailscope-live-"))
    stopping = asyncio.create_task(stop.wait())
    try:
        story = asyncio.create_task(_Story(world, folder, say, window, every, prometheus, enough).run())
        await asyncio.wait([story, stopping], return_when=asyncio.FIRST_COMPLETED)
        if story.done():
            return story.result()
        say("\nstopping")
        story.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await story
        return None
    finally:
        stopping.cancel()
        if keep:
            say(
                f"\nkept: {folder}; look at it with: tailscope diagnose {folder / 'trace.parquet'} --config {folder / CONFIG}"
            )
        else:
            shutil.rmtree(folder, ignore_errors=True)
        # Only now: a signal that comes while the folder goes must not leave half of it.
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(name)


class _Story:
    def __init__(
        self,
        world: Scenario,
        folder: Path,
        say: Callable[[str], object],
        window: str,
        every: str,
        prometheus: str | None,
        enough: Callable[[Seen], bool],
    ) -> None:
        self._world, self._folder, self._print, self._enough = world, folder, say, enough
        self._window, self._every, self._prometheus = window, every, prometheus
        self._neighbours = [one for one in world.loads if one.from_s > 0]
        if not self._neighbours:
            raise UsageError("the scenario of a try-out needs a [[load]] with from_s: what becomes of it")
        self._seen = Seen(
            min(one.from_s for one in self._neighbours),
            max(world.duration_s if one.to_s is None else one.to_s for one in self._neighbours),
        )
        self._states: dict[tuple[str, str], str] = {}

    async def run(self) -> Seen:
        fleet = await asyncio.to_thread(Fleet, self._world)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(fleet)
            self._fleet = fleet
            self._http = await stack.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10))
            )
            config = parts.write_serve(
                self._folder,
                (HERE / CONFIG).read_text(encoding="utf-8"),
                fleet.targets,
                self._window,
                self._every,
            )
            log = self._folder / "serve.log"
            serve = await stack.enter_async_context(parts.running(parts.serve_command(config), log))
            self._serve = await parts.said(serve, log, r"/metrics and status on (\S+)")
            otlp = await parts.said(serve, log, r"OTLP/gRPC on (\S+)")
            self._alerts: str | None = None
            if self._prometheus is not None:
                parts.write_prometheus(self._folder, config, self._serve)
                log = self._folder / "prometheus.log"
                command = parts.prometheus_command(self._prometheus, self._folder)
                process = await stack.enter_async_context(parts.running(command, log))
                self._alerts = await parts.said(process, log, r'msg="Listening on" address=(\S+)')
                await self._calm()
            self._introduce()
            playing = asyncio.create_task(fleet.play(otlp))
            watching = asyncio.create_task(self._watch())
            ended = asyncio.create_task(serve.wait())
            tasks = [playing, watching, ended]
            try:
                while not watching.done():
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    if ended.done() and not watching.done():
                        raise TailscopeError(
                            "tailscope serve ended: " + (self._folder / "serve.log").read_text()[-500:]
                        )
                    if playing.done():
                        playing.result()
                        tasks = [watching, ended]
                watching.result()
            finally:
                for task in (playing, watching, ended):
                    task.cancel()
                await asyncio.gather(playing, watching, ended, return_exceptions=True)
        return self._seen

    # -- what is told ---------------------------------------------------------------------------

    def _introduce(self) -> None:
        tenants = sorted({one.tenant for one in self._world.loads if one.tenant})
        say = self._print
        say(
            f"fleet       {len(self._fleet.targets)} simulated engines, {', '.join(self._fleet.targets)}; tenants {', '.join(tenants)}"
        )
        say(
            f"serve       http://{self._serve}/ and /metrics; rules look at the last {self._window}, every {self._every}"
        )
        if self._alerts is None:
            say("Prometheus  is not installed (no `prometheus` on the PATH): alerts are not shown")
        else:
            say(
                f"Prometheus  http://{self._alerts}/alerts; the rules of `tailscope alerts`, but that an alert fires after {parts.HOLD} "
                "instead of minutes, and without burn rates, which compare hours"
            )
        say("")

    def _say(self, text: str) -> None:
        now = max(0, int(self._fleet.now_s))
        self._print(f"{now // 60}:{now % 60:02}  {text}")

    async def _watch(self) -> None:
        seen, culprit = self._seen, (self._world.causes[0].culprit or "") if self._world.causes else None
        while self._fleet.now_s < 0:
            await asyncio.sleep(0.1)
        self._say(f"the fleet runs; nothing is wrong until {seen.began_s:g} s")
        first = await self._buckets()
        await self._until(seen.began_s)
        start = await self._buckets()
        self._tell_p99("before", first, start)
        self._say(f"{', '.join(map(described, self._neighbours))}")
        latest, told = start, seen.began_s
        while self._fleet.now_s < seen.ended_s and not self._enough(seen):
            await self._until(min(told + TELL_S, seen.ended_s))
            now = await self._buckets()
            self._tell_p99("", latest, now)
            latest, told = now, told + TELL_S
        self._tell_p99("during", start, latest)
        if self._enough(seen):
            return
        self._say(f"{', '.join(one.name for one in self._neighbours)}: no more")
        while self._fleet.now_s < self._world.duration_s:
            await self._look()
            done = (
                self._fleet.now_s >= seen.ended_s + QUIET_S
                if culprit is None
                else seen.first("closed", culprit)
            )
            if done:
                break
            await asyncio.sleep(POLL_S)

    async def _until(self, time_s: float) -> None:
        while (left := time_s - self._fleet.now_s) > 0 and not self._enough(self._seen):
            await self._look()
            await asyncio.sleep(min(POLL_S, left))

    def _tell_p99(self, phase: str, before: parts.Buckets, after: parts.Buckets) -> None:
        found = parts.p99s(before, after)
        if phase:
            self._seen.p99[phase] = found
        when = {"before": "p99 TTFT so far", "during": "p99 TTFT meanwhile"}.get(
            phase, f"p99 TTFT of the last {TELL_S:g} s"
        )
        shown = (f"{printable(k)} {1e3 * s:,.0f} ms ({n:,} requests)" for k, (s, n) in sorted(found.items()))
        self._say(f"{when}: {', '.join(shown)}")

    # -- what is asked --------------------------------------------------------------------------

    async def _calm(self) -> None:
        """Wait until Prometheus has scraped, so that nothing is absent any more."""
        ready = f"http://{self._alerts}/api/v1/query?query=tailscope_build_info"
        for _ in range(int(parts.START_S / POLL_S)):
            async with self._http.get(ready) as response:
                known = response.status == 200 and (await response.json())["data"]["result"]
            if known and not await self._alerts_now():
                return
            await asyncio.sleep(POLL_S)
        raise TailscopeError(
            "Prometheus does not reach tailscope serve, or an alert is active before anything happens"
        )

    async def _alerts_now(self) -> list[dict[str, Any]] | None:
        async with self._http.get(f"http://{self._alerts}/api/v1/alerts") as response:
            # While it starts it answers 503.
            return (await response.json())["data"]["alerts"] if response.status == 200 else None

    async def _buckets(self) -> parts.Buckets:
        async with self._http.get(f"http://{self._serve}/metrics") as response:
            return parts.buckets_of(await response.text())

    async def _look(self) -> None:
        async with self._http.get(f"http://{self._serve}/api/history") as response:
            changes = await response.json()
        for change in changes[len(self._seen.changes) :]:
            self._seen.changes.append({**change, "at_s": self._fleet.now_s})
            title, severity = printable(change["title"]), change["severity"]
            self._say(f"finding {change['change']} ({severity}, {change['rule']}): {title}")
        if self._alerts is not None:
            self._alerted(await self._alerts_now() or [])

    def _alerted(self, alerts: list[dict[str, Any]]) -> None:
        told = ("class", "metric", "rule", "culprit", "victim", "server")
        now = {
            (
                alert["labels"]["alertname"],
                ", ".join(f"{name} {alert['labels'][name]}" for name in told if alert["labels"].get(name)),
            ): alert["state"]
            for alert in alerts
        }
        for key in {**self._states, **now}:
            state = now.get(key, "resolved")
            if state != self._states.get(key):
                self._seen.alerts.append((self._fleet.now_s, *key, state))
                self._say(f"alert {state}: {printable(key[0])} ({printable(key[1])})")
        self._states = now


def described(one: Load) -> str:
    """What becomes of it, in words."""
    size = one.prompt_tokens.median
    return f"tenant {one.tenant} begins to send {one.name}: {one.rate:g} a second, prompts of about {size:,.0f} tokens"
