"""A running server, whole: what it answers to senders of spans, what it scrapes, what it shows, what is in the trace."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text_format

from tailscope.live.otlp_grpc import SERVICE
from tailscope.live.server import Server
from tailscope.live.settings import Serve, parse
from tailscope.store import Trace

PROTOBUF = {"Content-Type": "application/x-protobuf"}
JSON = {"Content-Type": "application/json"}
PAGE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
"""


def request(*ids: str, **attributes: Any) -> ExportTraceServiceRequest:
    message = ExportTraceServiceRequest()
    of_resource = message.resource_spans.add()
    item = of_resource.resource.attributes.add()
    item.key, item.value.string_value = "service.instance.id", "engine-a"
    scope = of_resource.scope_spans.add()
    told: dict[str, Any] = {"gen_ai.latency.time_to_first_token": 0.4, "gen_ai.latency.e2e": 1.2} | {
        "gen_ai.usage.prompt_tokens": 300, "gen_ai.usage.completion_tokens": 5, "acme.tenant": "blue",
    } | attributes  # fmt: skip
    for number, name in enumerate(ids, 1):
        span = scope.spans.add(
            name="llm_request",
            trace_id=name.encode().rjust(16, b"x"),
            span_id=name.encode().rjust(8, b"x"),
            start_time_unix_nano=1_800_000_000_000_000_000 + number,
            end_time_unix_nano=1_800_000_002_000_000_000,
        )
        for key, value in {"gen_ai.request.id": name, **told}.items():
            item = span.attributes.add()
            item.key = key
            if isinstance(value, str):
                item.value.string_value = value
            elif isinstance(value, int):
                item.value.int_value = value
            else:
                item.value.double_value = value
    return message


def settings(folder: Path, **keys: Any) -> Serve:
    serve: dict[str, Any] = {
        "trace": "t.parquet",
        "listen": "127.0.0.1:0",
        "otlp_grpc": "127.0.0.1:0",
        "otlp_http": "127.0.0.1:0",
    } | keys
    raw = {
        "serve": serve,
        "attributes": {"tenant": "acme.tenant"},
        "slo": {"<512": {"ttft_p99_s": 0.7}},
    }
    return parse(raw, folder)


class Running:
    """A server in a thread of its own."""

    def __init__(self, serve: Serve) -> None:
        self.said: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(serve,), daemon=True)
        self._thread.start()
        assert self._started.wait(30)
        if self._failed is not None:
            raise self._failed

    def _run(self, serve: Serve) -> None:
        async def run() -> None:
            self.server = Server(serve, None, self.said.append)
            task = asyncio.create_task(self.server.run())
            started = asyncio.create_task(self.server.started.wait())
            await asyncio.wait([task, started], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task  # it failed: that is told before the start is
            self._started.set()
            await task

        try:
            self._loop.run_until_complete(run())
        except BaseException as error:
            self._failed = error
            self._started.set()

    def url(self, path: str, key: str = "listen") -> str:
        return f"http://127.0.0.1:{self.server.ports[key]}{path}"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self._failed is not None:
            raise self._failed


@contextmanager
def running(serve: Serve) -> Iterator[Running]:
    server = Running(serve)
    try:
        yield server
    finally:
        server.stop()


def call(
    url: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes, dict[str, str]]:
    async def go() -> tuple[int, bytes, dict[str, str]]:
        async with aiohttp.ClientSession(skip_auto_headers=["Content-Type"]) as session:
            method = "GET" if body is None else "POST"
            async with session.request(method, url, data=body, headers=headers) as response:
                return response.status, await response.read(), dict(response.headers)

    return asyncio.run(go())


@contextmanager
def engine(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()


def a_page(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(PAGE.encode())


def wait_for(what: Callable[[], bool], seconds: float = 20.0) -> None:
    event = threading.Event()
    for _ in range(int(seconds / 0.1)):
        if what():
            return
        event.wait(0.1)
    raise AssertionError("did not happen")


def ids_of(trace: Path) -> list[str]:
    with Trace(trace) as opened:
        return [row["request_id"] for row in opened.rows("SELECT request_id FROM requests ORDER BY 1")]


def test_spans_by_every_protocol_are_in_the_trace_when_it_stops(tmp_path: Path) -> None:
    with running(settings(tmp_path)) as server:
        url = server.url("/v1/traces", "otlp_http")
        status, body, headers = call(url, request("a").SerializeToString(), PROTOBUF)
        assert (status, body, headers["Content-Type"]) == (200, b"", "application/x-protobuf")
        zipped = gzip.compress(request("b").SerializeToString())
        assert call(url, zipped, PROTOBUF | {"Content-Encoding": "gzip"})[0] == 200
        span = {"name": "llm_request", "traceId": "0" * 31 + "1", "spanId": "0" * 15 + "1"}
        span |= {"startTimeUnixNano": "1800000000000000000", "endTimeUnixNano": "1800000001000000000"}
        span["attributes"] = [{"key": "gen_ai.request.id", "value": {"stringValue": "c"}}]  # type: ignore[assignment]
        document = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
        status, body, _ = call(url, json.dumps(document).encode(), JSON)
        assert (status, json.loads(body)) == (200, {})
        with grpc.insecure_channel(f"127.0.0.1:{server.server.ports['otlp_grpc']}") as channel:
            export: Any = channel.unary_unary(f"/{SERVICE}/Export")
            assert export(request("d").SerializeToString()) == b""
    assert ids_of(tmp_path / "t.parquet") == ["a", "b", "c", "d"]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_exporters_of_opentelemetry_are_content(tmp_path: Path, protocol: str) -> None:
    with running(settings(tmp_path)) as server:
        exporter: SpanExporter
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

            exporter = Grpc(f"127.0.0.1:{server.server.ports['otlp_grpc']}", insecure=True)
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

            exporter = Http(server.url("/v1/traces", "otlp_http"))
        provider = TracerProvider(resource=Resource({"service.instance.id": "engine-a"}))
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        with provider.get_tracer("t").start_as_current_span("llm_request") as span:
            span.set_attribute("gen_ai.request.id", "one")
        provider.shutdown()
    assert ids_of(tmp_path / "t.parquet") == ["one"]


def test_what_cannot_be_used_of_an_export_is_told_and_the_rest_is_kept(tmp_path: Path) -> None:
    message = request("good", "bad")
    message.resource_spans[0].scope_spans[0].spans[1].end_time_unix_nano = 5
    with running(settings(tmp_path)) as server:
        _, body, _ = call(server.url("/v1/traces", "otlp_http"), message.SerializeToString(), PROTOBUF)
        partial = ExportTraceServiceResponse.FromString(body).partial_success
        assert (partial.rejected_spans, partial.error_message) == (1, "span ends before it starts")
        _, page, _ = call(server.url("/metrics"))
        assert b'tailscope_rows_rejected_total{reason="span ends before it starts"} 1.0' in page
    assert ids_of(tmp_path / "t.parquet") == ["good"]


NO_EXPORTS = [
    (b"\xff\xff", PROTOBUF, 400),
    (b"{", JSON, 400),
    (b'{"resourceLogs": []}', JSON, 400),
    (b"not gzip", PROTOBUF | {"Content-Encoding": "gzip"}, 400),
    (gzip.compress(b"")[:-1], PROTOBUF | {"Content-Encoding": "gzip"}, 400),
    (b"x", {"Content-Type": "text/plain"}, 415),
    (b"x", PROTOBUF | {"Content-Encoding": "br"}, 415),
    (b"x" * 200_000, PROTOBUF, 413),
    (gzip.compress(bytes(200_000)), PROTOBUF | {"Content-Encoding": "gzip"}, 413),
]


def test_what_is_no_export_is_refused_for_good(tmp_path: Path) -> None:
    with running(settings(tmp_path, max_message="100kB")) as server:
        for number, (body, headers, status) in enumerate(NO_EXPORTS, 1):
            found, answer, _ = call(server.url("/v1/traces", "otlp_http"), body, headers)
            assert found == status, (body[:20], headers)
            if headers["Content-Type"] == "application/x-protobuf":
                assert Status.FromString(answer).message
            refused = f'tailscope_requests_refused_total{{protocol="http",reason="malformed"}} {number}.0'
            assert refused in call(server.url("/metrics"))[1].decode()


def test_metrics_by_class_are_what_was_sent(tmp_path: Path) -> None:
    with running(settings(tmp_path, tenants=1)) as server:
        url = server.url("/v1/traces", "otlp_http")
        call(url, request("a", "b").SerializeToString(), PROTOBUF)
        call(url, request("c", **{"acme.tenant": 'evil"\n\\'}).SerializeToString(), PROTOBUF)
        _, page, headers = call(server.url("/metrics"), headers={"Accept": "application/openmetrics-text"})
        assert headers["Content-Type"].startswith("application/openmetrics-text")
        found = {
            (sample.name, sample.labels.get("tenant"), sample.labels.get("le")): sample
            for family in openmetrics(page.decode())  # type: ignore[no-untyped-call]
            for sample in family.samples
            if family.name == "tailscope_time_to_first_token_seconds"
        }
        bucket = found[
            "tailscope_time_to_first_token_seconds_bucket", "blue", "0.7"
        ]  # an objective is an edge
        assert bucket.value == 2
        assert bucket.labels["class"] == "<512"
        assert bucket.labels["server"] == "engine-a"
        assert found["tailscope_time_to_first_token_seconds_bucket", "blue", "0.25"].value == 0
        exemplar = found["tailscope_time_to_first_token_seconds_bucket", "blue", "0.5"].exemplar
        assert exemplar is not None
        assert exemplar.labels == {"trace_id": (b"x" * 15 + b"b").hex()}
        assert found["tailscope_time_to_first_token_seconds_count", "other", None].value == 1
        plain = list(text_format(call(server.url("/metrics"))[1].decode()))
        [capped] = [f for f in plain if f.name == "tailscope_label_values_capped"]
        assert {s.labels["label"]: s.value for s in capped.samples} == {"tenant": 1, "label_set": 0}


def test_engines_are_scraped_and_what_is_none_is_told(tmp_path: Path) -> None:
    def html(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b"<html><body>Welcome</body></html>\n")

    def elsewhere(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", "http://127.0.0.1:1/")
        handler.end_headers()

    def cut(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        handler.wfile.write(PAGE.encode())

    with engine(a_page) as good, engine(html) as page, engine(elsewhere) as moved, engine(cut) as lying:
        targets = [good, page, moved, lying]
        serve = settings(tmp_path, scrape=[{"targets": targets, "every": "500ms"}])
        with running(serve) as server:

            def outcomes() -> dict[str, set[str]]:
                found: dict[str, set[str]] = {}
                for family in text_format(call(server.url("/metrics"))[1].decode()):
                    if family.name == "tailscope_scrapes":
                        for sample in family.samples:
                            found.setdefault(sample.labels["server"], set()).add(sample.labels["outcome"])
                return found

            wait_for(lambda: len(outcomes()) == 4)
            assert outcomes() == {
                good: {"good"},
                page: {"no metrics"},
                moved: {"redirect"},
                lying: {"broken"},
            }
            text = call(server.url("/metrics"))[1].decode()
            [usage] = [f for f in text_format(text) if f.name == "tailscope_kv_cache_usage_ratio"]
            assert [(s.labels, s.value) for s in usage.samples] == [({"server": good, "engine": "0"}, 0.5)]
            assert f'tailscope_up{{server="{page}"}} 0.0' in text
    with Trace(tmp_path / "t.parquet") as trace:
        rows = trace.rows("SELECT DISTINCT name FROM metrics JOIN series USING (series)")
        assert {row["name"] for row in rows} == {"vllm:kv_cache_usage_perc", "vllm:num_requests_running"}
        assert [r["instance"] for r in trace.rows("SELECT DISTINCT instance FROM metrics")] == [good]


def test_a_token_is_asked_for_everywhere_but_by_probes(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    with running(settings(tmp_path, bearer_token_file="token")) as server:
        url = server.url("/v1/traces", "otlp_http")
        message = request("a").SerializeToString()
        assert call(url, message, PROTOBUF)[0] == 401
        assert call(url, message, PROTOBUF | {"Authorization": "Bearer wrong"})[0] == 401
        assert call(url, message, PROTOBUF | {"Authorization": "Bearer s3cret"})[0] == 200
        assert call(server.url("/metrics"))[0] == 401
        assert call(server.url("/healthz"))[0] == 200
        with grpc.insecure_channel(f"127.0.0.1:{server.server.ports['otlp_grpc']}") as channel:
            export: Any = channel.unary_unary(f"/{SERVICE}/Export")
            with pytest.raises(grpc.RpcError) as refused:
                export(message)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            export(message, metadata=(("authorization", "Bearer s3cret"),))


def test_one_server_a_trace(tmp_path: Path) -> None:
    with running(settings(tmp_path)), pytest.raises(Exception, match="another tailscope serves this trace"):
        Running(settings(tmp_path))
