"""Senders that are careless or hostile: what they are answered, and that nobody else notices.

One server for all: that it still works at the end is the last test.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import random
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from test_live_kill import free_port
from test_live_server import JSON, PROTOBUF, Running, call, ids_of, request, running, settings, wait_for

from tailscope.live import connections, intake, otlp_http
from tailscope.live.intake import Intake, Refused
from tailscope.live.otlp_grpc import SERVICE

MOST = 1_000_000
WAIT_S = 1.0
HOSTILE = '<script>alert(1)</script>\x1b[31m\u202e"\\\n\r\x1f\x00}é'
EXPECTED: set[str] = set()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "IDLE_S", WAIT_S)
        patch.setattr(otlp_http, "BODY_S", WAIT_S)
        running = Running(settings(folder, max_message="1MB"))
        try:
            yield running
        finally:
            running.stop()
    # Whatever came, what was acknowledged is there.
    found = set(ids_of(folder / "t.parquet"))
    assert found >= EXPECTED, EXPECTED - found


def post(server: Running, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
    return call(server.url("/v1/traces", "otlp_http"), body, headers)


def accepted(server: Running, name: str) -> bytes:
    EXPECTED.add(name)
    return request(name).SerializeToString()


@contextmanager
def connected(server: Running, key: str = "otlp_http") -> Iterator[socket.socket]:
    with closing(socket.create_connection(("127.0.0.1", server.server.ports[key]), timeout=10)) as found:
        yield found


def answer_of(found: socket.socket) -> bytes:
    data = b""
    while piece := found.recv(65536):
        data += piece
    return data


@contextmanager
def exporter(server: Running) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{server.server.ports['otlp_grpc']}") as channel:
        yield channel.unary_unary(f"/{SERVICE}/Export")


def trailing(error: Any) -> dict[str, bytes]:
    return dict(error.trailing_metadata())


def span(**fields: Any) -> dict[str, Any]:
    return {
        "name": "llm_request",
        "traceId": "5B8EFFF798038103D269B633813FC60C",
        "spanId": "EEE19B7EC3C1B174",
        "startTimeUnixNano": "1800000000000000000",
        "endTimeUnixNano": "1800000001000000000",
    } | fields


def document(*spans: Any, **fields: Any) -> bytes:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]} | fields).encode()


def named(name: str) -> list[dict[str, Any]]:
    return [{"key": "gen_ai.request.id", "value": {"stringValue": name}}]


def test_json_as_the_protocol_has_it(server: Running) -> None:
    kinds = ("application/json; charset=utf-8", "Application/JSON", 'application/json;charset="utf-8"')
    for number, kind in enumerate(kinds):
        name = f"json-{number}"
        EXPECTED.add(name)
        body = document(
            span(attributes=named(name), unknownField={"x": []}, spanId=f"{number + 1:016X}"), unknown=1
        )
        status, text, headers = post(server, body, {"Content-Type": kind})
        assert (status, json.loads(text), headers["Content-Type"].split(";")[0]) == (
            200,
            {},
            "application/json",
        )
    bad = span(endTimeUnixNano="1")
    partial = json.loads(post(server, document(bad), JSON)[1])["partialSuccess"]
    assert partial == {"rejectedSpans": "1", "errorMessage": "span ends before it starts"}
    status, text, _ = post(server, b"{", JSON)
    assert status == 400
    assert json.loads(text)["message"].startswith("not valid JSON")


# Without ids of their own tests are called by the time that gzip writes, and each process would have others.
@pytest.mark.parametrize(
    ("body", "headers"),
    [(b"", PROTOBUF), (b"{}", JSON), (gzip.compress(b""), PROTOBUF | {"Content-Encoding": "gzip"})],
    ids=["protobuf", "json", "gzip"],
)
def test_an_empty_export_is_a_success(server: Running, body: bytes, headers: dict[str, str]) -> None:
    assert post(server, body, headers)[0] == 200
    with exporter(server) as export:
        assert export(b"") == b""


def test_gzip_of_many_members_is_one_body(server: Running) -> None:
    data = accepted(server, "members")
    zipped = b"".join(gzip.compress(data[i : i + 50]) for i in range(0, len(data), 50))
    assert post(server, zipped, PROTOBUF | {"Content-Encoding": "gzip"})[0] == 200
    assert post(server, zipped + b"junk", PROTOBUF | {"Content-Encoding": "gzip"})[0] == 400
    assert post(server, zipped[:-4], PROTOBUF | {"Content-Encoding": "gzip"})[0] == 400
    bomb = gzip.compress(bytes(100_000)) * 20
    assert post(server, bomb, PROTOBUF | {"Content-Encoding": "gzip"})[0] == 413
    assert post(server, gzip.compress(b"") * 60_000, PROTOBUF | {"Content-Encoding": "gzip"})[0] == 413


def test_gzip_and_what_is_too_large_by_grpc(server: Running) -> None:
    with exporter(server) as export:
        assert export(accepted(server, "grpc-gzip"), compression=grpc.Compression.Gzip) == b""
        for compression in (None, grpc.Compression.Gzip):
            with pytest.raises(grpc.RpcError) as refused:
                export(bytes(100 * MOST if compression else 2 * MOST), compression=compression)
            # Without RetryInfo it is not sent again.
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "grpc-status-details-bin" not in trailing(refused.value)
        with pytest.raises(grpc.RpcError) as malformed:
            export(b"\xff\xff")
        assert malformed.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_who_must_wait_is_told_when_to_come_again(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def busy(self: Intake, *_: Any) -> None:
        raise Refused("more spans come than can be written", retry=True)

    monkeypatch.setattr(Intake, "spans", busy)
    status, body, headers = post(server, b"", PROTOBUF)
    assert (status, headers["Retry-After"], Status.FromString(body).code) == (503, "1", 14)
    with exporter(server) as export, pytest.raises(grpc.RpcError) as refused:
        export(b"")
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    details = Status.FromString(trailing(refused.value)["grpc-status-details-bin"])
    info = RetryInfo()
    assert details.code == 14
    assert details.details[0].Unpack(info)
    assert info.retry_delay.seconds == 1


def test_http_as_old_and_new_clients_speak_it(server: Running) -> None:
    head = "POST /v1/traces HTTP/{}\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n"
    with connected(server) as old:
        body = accepted(server, "http-1.0")
        old.sendall(head.format("1.0").encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert b" 200 " in answer_of(old).split(b"\r\n")[0]
    with connected(server) as polite:
        body = accepted(server, "expect")
        told = f"Expect: 100-continue\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        polite.sendall(head.format("1.1").encode() + told.encode())
        assert polite.recv(1000).startswith(b"HTTP/1.1 100 Continue")
        polite.sendall(body)
        assert answer_of(polite).startswith(b"HTTP/1.1 200 ")
    chunked = http.client.HTTPConnection("127.0.0.1", server.server.ports["otlp_http"], timeout=10)
    with closing(chunked):
        for number in range(3):  # on one connection
            body = accepted(server, f"chunked-{number}")
            pieces = iter([body[:7], body[7:]])
            chunked.request("POST", "/v1/traces", pieces, PROTOBUF, encode_chunked=True)
            response = chunked.getresponse()
            assert (response.status, response.read()) == (200, b"")


def test_idle_connections_hinder_nobody_and_are_closed(server: Running) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.server.ports["otlp_http"])) for _ in range(200)]
    try:
        assert post(server, accepted(server, "beside-idle"), PROTOBUF)[0] == 200
        idle[0].settimeout(WAIT_S + 2)
        assert idle[0].recv(1) == b""
    finally:
        for found in idle:
            found.close()


def test_more_connections_than_files_are_refused_and_nobody_else_notices(tmp_path: Path) -> None:
    port, shown = free_port(), free_port()
    (tmp_path / "tailscope.toml").write_text(
        f'[serve]\ntrace = "t.parquet"\nlisten = "127.0.0.1:{shown}"\notlp_grpc = false\notlp_http = "127.0.0.1:{port}"\n'
    )
    limited = (
        f"ulimit -n 128; exec {sys.executable} -P -m tailscope serve --config {tmp_path / 'tailscope.toml'}"
    )
    process = subprocess.Popen(["bash", "-c", limited], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: answers(port) and answers(shown))
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        time.sleep(2.5)
        assert call(f"http://127.0.0.1:{shown}/metrics")[0] == 200
        for found in crowd:
            found.close()
        body = request("after").SerializeToString()

        def taken() -> bool:  # the server notices some time that they are gone
            with contextlib.suppress(aiohttp.ClientError):
                return call(f"http://127.0.0.1:{port}/v1/traces", body, PROTOBUF)[0] == 200
            return False

        wait_for(taken)
        wait_for(lambda: call(f"http://127.0.0.1:{shown}/readyz")[0] == 200)
    finally:
        process.terminate()
        assert process.wait(30) == 0
    assert ids_of(tmp_path / "t.parquet") == ["after"]


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("key", ["otlp_http", "listen"])
def test_a_head_that_comes_slowly_is_cut_off(server: Running, key: str) -> None:
    with connected(server, key) as slow:
        slow.sendall(b"POST /v1/traces HTTP/1.1\r\n")
        began = time.monotonic()
        with pytest.raises(OSError):
            for _ in range(50):
                slow.sendall(b"X: y\r\n")
                slow.settimeout(0.2)
                try:
                    if not slow.recv(1):
                        raise ConnectionResetError
                except TimeoutError:
                    continue
        assert time.monotonic() - began < WAIT_S + 2


def test_a_body_that_comes_slowly_or_never_is_given_up(server: Running) -> None:
    head = b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n"
    with connected(server) as lying:
        lying.sendall(head + b"Content-Length: 1000\r\n\r\nabc")
        assert lying.recv(1000).startswith(b"HTTP/1.1 408 ")
    with connected(server) as half_closed:
        half_closed.sendall(head + b"Content-Length: 1000\r\n\r\nabc")
        half_closed.shutdown(socket.SHUT_WR)
        assert b"HTTP/1.1 200" not in answer_of(half_closed)
    with connected(server) as huge:
        huge.sendall(head + b"Content-Length: 99999999999999999999\r\n\r\nabc")
        assert b"HTTP/1.1 200" not in huge.recv(1000)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS where none is spoken
        b"\x00" * 5000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Type: application/x-protobuf\r\n\r\nzz\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: y\r\n" % i for i in range(20_000)) + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 50 + b"garbage\r\n\r\n",
    ],
    ids=["tls", "zeros", "version", "lengths", "chunk", "path", "heads", "pipelined"],
)  # fmt: skip
@pytest.mark.parametrize("key", ["otlp_http", "listen", "otlp_grpc"])
def test_garbage_ends_its_own_connection(server: Running, key: str, garbage: bytes) -> None:
    with connected(server, key) as found:
        try:
            found.sendall(garbage)
            found.shutdown(socket.SHUT_WR)
            data = answer_of(found)
        except OSError:
            data = b""
        assert b"Traceback" not in data


def test_documents_that_are_strange_are_refused_or_taken_for_what_can_be_used(server: Running) -> None:
    deep = b'{"resourceSpans":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    deep_value: Any = {"stringValue": "x"}
    for _ in range(200):
        deep_value = {"arrayValue": {"values": [deep_value]}}
    attribute = [{"key": "gen_ai.request.id", "value": deep_value}]
    for body in (
        deep, b'{"a":' * 50_000, b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"{}" * 2, b'{"resourceSpans":{}}',
        b'{"resourceSpans":[null,1,[],{"scopeSpans":[{"spans":[3,{}]}]}]}',
        document(span(startTimeUnixNano=10**400)), document(span(startTimeUnixNano="9" * 5000)),
        document(span(startTimeUnixNano=float("nan"), endTimeUnixNano=float("inf"))),
        document(span(startTimeUnixNano=-5)), document(span(startTimeUnixNano=2**63)), document(span(startTimeUnixNano=1e300)),
        document(span(traceId=7, spanId=[], name={}, attributes={}, status=[])),
        document(span(traceId="zz" * 16, spanId="é" * 16, attributes=attribute)),
        document(span(attributes=[{"key": "gen_ai.latency.e2e", "value": {"doubleValue": "NaN"}}])),
        document(span(attributes=[{"key": "gen_ai.usage.prompt_tokens", "value": {"intValue": "9" * 30}}])),
        document(span(attributes=[{"key": "gen_ai.request.id", "value": {"stringValue": "\ud800\udfff\ud800"}}])),
        b'{"resourceSpans":[{"resource":{"attributes":[{"key":"service.instance.id","value":{"stringValue":"\xff\xfe"}}]}}]}',
    ):  # fmt: skip
        status, text, _ = post(server, body, JSON)
        assert status in (200, 400), (status, body[:80])
        assert isinstance(json.loads(text), dict)


def test_damaged_protobuf_is_refused_and_never_an_error_of_ours(server: Running) -> None:
    chance = random.Random(5)
    good = request("damage").SerializeToString()
    for _ in range(150):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 5)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        cut = bytes(data[: chance.randrange(len(data)) if chance.random() < 0.3 else None])
        port = server.server.ports["otlp_http"]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("POST", "/v1/traces", cut, PROTOBUF)
        with closing(connection):
            assert connection.getresponse().status in (200, 400), cut.hex()
    unknown = bytes([15 << 3 | 2, 3]) + b"abc" + struct.pack("<BI", 14 << 3 | 5, 7)
    assert post(server, accepted(server, "unknown-fields") + unknown, PROTOBUF)[0] == 200


def test_times_of_all_centuries_are_kept_or_told(server: Running) -> None:
    names = {"y1970": 1, "y2200": 7_258_118_400_000_000_000, "last": 2**63 - 10}
    message = request(*names)
    for found, start in zip(message.resource_spans[0].scope_spans[0].spans, names.values(), strict=True):
        found.start_time_unix_nano, found.end_time_unix_nano = start, start + 1
    EXPECTED.update(names)
    assert post(server, message.SerializeToString(), PROTOBUF)[1] == b""
    message = request("beyond", "none")
    beyond, none = message.resource_spans[0].scope_spans[0].spans
    beyond.start_time_unix_nano = beyond.end_time_unix_nano = 2**64 - 1
    none.start_time_unix_nano = 0
    partial = ExportTraceServiceResponse.FromString(post(server, message.SerializeToString(), PROTOBUF)[1])
    assert partial.partial_success.rejected_spans == 2
    twice = accepted(server, "twice")
    assert {post(server, twice, PROTOBUF)[0] for _ in range(2)} == {200}


def test_names_are_inert_wherever_they_are_shown(server: Running) -> None:
    for number in range(3):
        told = {"acme.tenant": HOSTILE + "x" * 300_000, "gen_ai.response.model": HOSTILE, "dp_rank": HOSTILE}
        body = request(f"hostile-{number}", **told)
        body.resource_spans[0].resource.attributes[0].value.string_value = HOSTILE
        EXPECTED.add(f"hostile-{number}")
        assert post(server, body.SerializeToString(), PROTOBUF)[0] == 200
    strange = document(span(traceId="not hex " * 1000, attributes=[
        *named("strange-trace"), {"key": "gen_ai.latency.time_to_first_token", "value": {"doubleValue": 0.3}},
    ]))  # fmt: skip
    assert post(server, strange, JSON)[0] == 200
    text = call(server.url("/metrics"), headers={"Accept": "application/openmetrics-text"})[1].decode()
    families = list(openmetrics(text))  # type: ignore[no-untyped-call]
    tenants = {s.labels.get("tenant", "") for family in families for s in family.samples}
    assert any(HOSTILE.replace("\x1f", " ")[:20] in tenant for tenant in tenants)
    assert max(map(len, text.splitlines())) < 2000
    for family in families:
        for sample in family.samples:
            if sample.exemplar is not None:
                assert sum(len(k) + len(v) for k, v in sample.exemplar.labels.items()) <= 128
    page = call(server.url("/"))
    assert b"<script" not in page[1]
    assert "default-src 'none'" in page[2]["Content-Security-Policy"]


def test_senders_that_give_up_leave_the_journal_working(server: Running) -> None:
    body = request(*(f"gave-up-{i}" for i in range(50))).SerializeToString()
    with exporter(server) as export:
        for number in range(60):
            call_ = export.future(body)
            time.sleep(0.0005 * (number % 30))
            call_.cancel()
    for _ in range(20):
        with connected(server) as found:
            head = f"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\nContent-Length: {len(body)}\r\n\r\n"
            found.sendall(head.encode() + body)
    assert post(server, accepted(server, "after-who-gave-up"), PROTOBUF)[0] == 200


def test_senders_that_never_end_are_refused_before_the_memory_is_full(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MOST_COMING", 2_000_000)
    head = b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\nContent-Encoding: gzip\r\n"
    packed = gzip.compress(bytes(900_000))[:-8]
    with contextlib.ExitStack() as stack:
        endless = [stack.enter_context(connected(server)) for _ in range(4)]
        for found in endless:
            found.sendall(head + b"Content-Length: 10000\r\n\r\n" + packed)
        answers = Counter(found.recv(1000).split()[1] for found in endless)
        assert answers == {b"503": 2, b"408": 2}
    assert post(server, accepted(server, "after-endless"), PROTOBUF)[0] == 200


def test_it_still_works_and_has_counted(server: Running) -> None:
    status, text, _ = call(server.url("/metrics"))
    assert status == 200
    assert b'tailscope_requests_refused_total{protocol="http",reason="malformed"}' in text
    assert call(server.url("/readyz"))[0] == 200
    with exporter(server) as export:
        assert export(accepted(server, "last-by-grpc")) == b""
    assert post(server, accepted(server, "last-by-http"), PROTOBUF)[0] == 200


def test_tls_that_is_never_finished_hinders_nobody(tmp_path: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    command += [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(tmp_path / "k"),
        "-out",
        str(tmp_path / "c"),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl")
    with (
        running(settings(tmp_path, tls_cert_file="c", tls_key_file="k")) as secure,
        contextlib.ExitStack() as stack,
    ):
        for key in ("otlp_http", "listen", "otlp_grpc"):
            for begun in (b"", b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\n\r\n"):
                stack.enter_context(connected(secure, key)).sendall(begun)
        context = ssl.create_default_context(cafile=tmp_path / "c")
        for key, method in (("otlp_http", "POST"), ("listen", "GET")):
            port = secure.server.ports[key]
            path = "/v1/traces" if method == "POST" else "/metrics"
            client = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=context)
            with closing(client):
                client.request(method, path, request("tls").SerializeToString(), PROTOBUF)
                assert client.getresponse().status == 200
        credentials = grpc.ssl_channel_credentials((tmp_path / "c").read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{secure.server.ports['otlp_grpc']}", credentials) as channel:
            export: Any = channel.unary_unary(f"/{SERVICE}/Export")
            assert export(request("tls-grpc").SerializeToString(), timeout=5) == b""
        # Who speaks in the clear is refused.
        with pytest.raises(aiohttp.ClientError):
            call(f"http://127.0.0.1:{secure.server.ports['otlp_http']}/v1/traces", b"", PROTOBUF)
    assert ids_of(tmp_path / "t.parquet") == ["tls", "tls-grpc"]
