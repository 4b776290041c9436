"""A fleet that sends: exports of spans at a rate, and engines with pages of metrics. Used by tests and benchmarks of `serve`."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

BATCH = 512
PROTOBUF = {"Content-Type": "application/x-protobuf"}


class Exports:
    """Exports of `BATCH` spans as vLLM's, each span with an id of its own; made by patching bytes, which costs next to
    nothing, so that what is measured is the receiver."""

    def __init__(self, tenants: int = 7, batch: int = BATCH) -> None:
        self._batch = batch
        self._numbers = itertools.count()
        message = ExportTraceServiceRequest()
        of_resource = message.resource_spans.add()
        item = of_resource.resource.attributes.add()
        item.key, item.value.string_value = "service.instance.id", "engine-0"
        scope = of_resource.scope_spans.add()
        for number in range(batch):
            span = scope.spans.add(
                name="llm_request",
                trace_id=b"TRACE000" + b"%08d" % number,
                span_id=b"%08d" % number,
                start_time_unix_nano=time.time_ns(),
                end_time_unix_nano=time.time_ns() + 1_000_000_000,
            )
            told: dict[str, str | int | float] = {
                "gen_ai.request.id": f"chatcmpl-TRACE000-{number:08d}",
                "gen_ai.latency.time_to_first_token": 0.1 + number / 1e4,
                "gen_ai.latency.e2e": 1.0 + number / 1e3,
                "gen_ai.latency.time_in_queue": 0.01,
                "gen_ai.latency.time_in_model_prefill": 0.08,
                "gen_ai.latency.time_in_model_decode": 0.9,
                "gen_ai.latency.time_in_model_inference": 0.98,
                "gen_ai.usage.prompt_tokens": 100 + 13 * number,
                "gen_ai.usage.completion_tokens": 100,
                "gen_ai.request.max_tokens": 200,
                "gen_ai.request.temperature": 1.0,
                "gen_ai.request.top_p": 1.0,
                "gen_ai.request.n": 1,
                "gen_ai.response.model": "model",
                "acme.tenant": f"tenant-{number % tenants}",
            }
            for key, value in told.items():
                item = span.attributes.add()
                item.key = key
                if isinstance(value, str):
                    item.value.string_value = value
                elif isinstance(value, int):
                    item.value.int_value = value
                else:
                    item.value.double_value = value
        self._pattern = message.SerializeToString()

    def next(self) -> tuple[int, bytes]:
        """(number of the export, its bytes); ids of its spans hold the number."""
        number = next(self._numbers)
        return number, self._pattern.replace(b"TRACE000", b"%08d" % number)

    def ids(self, number: int) -> list[str]:
        return [f"chatcmpl-{number:08d}-{i:08d}" for i in range(self._batch)]


@dataclass
class Sent:
    """What became of exports: numbers of those that were acknowledged, how many were refused or lost, and how long they took."""

    acknowledged: list[int] = field(default_factory=list)
    refused: int = 0
    lost: int = 0
    rejected_spans: int = 0
    seconds: list[float] = field(default_factory=list)


async def send(
    url: str, exports: Exports, seconds: float, spans_per_s: float | None = None, senders: int = 4
) -> Sent:
    """Send for so long, at a rate or as fast as they are answered."""
    sent = Sent()
    began = time.monotonic()
    turns = itertools.count()

    async def sender(session: aiohttp.ClientSession) -> None:
        while time.monotonic() - began < seconds:
            if spans_per_s is not None:
                due = began + next(turns) * BATCH / spans_per_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            number, body = exports.next()
            asked = time.monotonic()
            try:
                async with session.post(url, data=body, headers=PROTOBUF) as response:
                    answer = await response.read()
                    if response.status == 200:
                        sent.acknowledged.append(number)
                        partial = ExportTraceServiceResponse.FromString(answer).partial_success
                        sent.rejected_spans += partial.rejected_spans
                    else:
                        sent.refused += 1
                        await asyncio.sleep(0.05)
            except aiohttp.ClientError:
                sent.lost += 1
                await asyncio.sleep(0.05)
            sent.seconds.append(time.monotonic() - asked)

    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(sender(session) for _ in range(senders)))
    return sent


def page(series: int, step: int) -> bytes:
    """A page of some `series` samples, most of which change from step to step."""
    lines = [
        b"# TYPE vllm:num_requests_running gauge",
        b'vllm:num_requests_running{engine="0",model_name="m"} %d' % step,
    ]
    lines += [
        b"# TYPE vllm:kv_cache_usage_perc gauge",
        b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.%d' % (step % 10),
    ]
    edges = [
        b"0.001",
        b"0.01",
        b"0.1",
        b"0.25",
        b"0.5",
        b"1.0",
        b"2.5",
        b"5.0",
        b"10.0",
        b"20.0",
        b"40.0",
        b"80.0",
        b"+Inf",
    ]
    for number in range((series - 2) // (len(edges) + 2)):
        name = b"vllm:histogram_%d_seconds" % number
        lines.append(b"# TYPE %s histogram" % name)
        for place, edge in enumerate(edges):
            lines.append(
                b'%s_bucket{engine="0",le="%s",model_name="m"} %d' % (name, edge, step * (place + 1))
            )
        lines.append(b'%s_sum{engine="0",model_name="m"} %d' % (name, step * 7))
        lines.append(b'%s_count{engine="0",model_name="m"} %d' % (name, step * len(edges)))
    return b"\n".join([*lines, b""])


class Engines:
    """Many engines at one port, told apart by path; each answer is the next step's page. Use as a context manager."""

    def __init__(self, count: int, series: int = 570) -> None:
        self.count = count
        self.served = 0
        self._pages = [page(series, step) for step in range(64)]
        self._steps = itertools.count()

    async def __aenter__(self) -> Engines:
        async def answer(_: web.Request) -> web.Response:
            self.served += 1
            return web.Response(body=self._pages[next(self._steps) % 64])

        app = web.Application()
        app.router.add_get("/{engine}/metrics", answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port = self._runner.addresses[0][1]
        self.targets = [f"http://127.0.0.1:{port}/{n}/metrics" for n in range(self.count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


async def until(what: Callable[[], bool], seconds: float) -> bool:
    for _ in range(int(seconds / 0.05)):
        if what():
            return True
        await asyncio.sleep(0.05)
    return False
