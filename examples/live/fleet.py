"""A simulated fleet in real time: pages of /metrics that change, and spans that are sent when their requests end.

The world is known before it begins; what plays here is what its emitters show at each instant, later by the same time for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tailscope.live.otlp_grpc import SERVICE
from tailscope.sim.emit.front_end import front_ends, of_instance
from tailscope.sim.emit.otlp import export_of, merged, resource_of, span_of, start_ns
from tailscope.sim.emit.prometheus import Pages
from tailscope.sim.engine import simulate
from tailscope.sim.outcome import START_NS
from tailscope.sim.scenario import Scenario

#: Between two exports of an engine (`OTEL_BSP_SCHEDULE_DELAY`), and before a refused one is sent again.
EXPORT_S, RETRY_S = 1.0, 1.0
#: Between the fleet's being ready and the world's beginning.
LEAD_S = 1.0
#: What an export may take.
TIMEOUT_S = 10.0


@dataclass
class Sent:
    spans: int = 0
    refused: int = 0


class Fleet:
    """The instances of a scenario. Use as a context manager; then `targets` are where their pages are."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.sent = Sent()
        self.targets: list[str] = []
        self._outcome = simulate(scenario)
        self._began_s = time.time() + LEAD_S

    async def __aenter__(self) -> Fleet:
        async with contextlib.AsyncExitStack() as stack:
            views = front_ends(self._outcome)
            later_s = self._began_s - START_NS / 1e9
            self._pages: list[Pages] = []
            for number, instance in enumerate(self._outcome.instances()):
                pages = await asyncio.to_thread(Pages, self._outcome, of_instance(views, instance), later_s)
                self._pages.append(pages)
                app = web.Application()
                app.router.add_get("/metrics", partial(self._page, number))
                runner = web.AppRunner(app, access_log=None)
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                self.targets.append(f"127.0.0.1:{runner.addresses[0][1]}")
            self._views = views
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def now_s(self) -> float:
        """Seconds of the world."""
        return time.time() - self._began_s

    async def play(self, otlp: str) -> None:
        """Begin now, and send all spans to `otlp` as their requests end."""
        self._began_s = time.time() + LEAD_S
        async with grpc.aio.insecure_channel(otlp) as channel:
            await asyncio.gather(*(self._send(n, channel) for n in range(len(self.targets))))

    async def _page(self, number: int, _: web.Request) -> web.Response:
        pages = self._pages[number]
        shown = max(0, int(pages.at.searchsorted(self.now_s, side="right")) - 1)
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=pages.page(shown).encode(), headers={"Content-Type": kind})

    async def _send(self, number: int, channel: grpc.aio.Channel) -> None:
        views = of_instance(self._views, self._outcome.instances()[number])
        # Spans and pages of an engine are joined by the name under which it is scraped.
        resource = resource_of(views[0], self.targets[number])
        export: Any = channel.unary_unary(f"/{SERVICE}/Export")
        starts = {view.index: start_ns(view) for view in views}
        shift_ns = round(self._began_s * 1e9) - START_NS
        due: list[Span] = []
        next_s = 0.0
        for view, i in merged(views):
            while float(view.stays.finished_s[view.told[i]]) > next_s:
                await asyncio.sleep(max(0.0, next_s - self.now_s))
                await self._export(export, export_of(resource, due).SerializeToString(), len(due))
                due = []
                next_s += EXPORT_S
            span = span_of(self._outcome, view, i, int(starts[view.index][i]))
            span.start_time_unix_nano += shift_ns
            span.end_time_unix_nano += shift_ns
            due.append(span)
        await self._export(export, export_of(resource, due).SerializeToString(), len(due))

    async def _export(self, export: Any, message: bytes, spans: int) -> None:
        while spans:
            try:
                answer = await export(message, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                # As exporters do: what may pass is tried again.
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise
                self.sent.refused += 1
                await asyncio.sleep(RETRY_S)
            else:
                rejected = ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans
                self.sent.spans += spans - rejected
                return
