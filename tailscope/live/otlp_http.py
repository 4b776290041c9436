"""The OpenTelemetry protocol over HTTP, protobuf or JSON, plain or gzip, as its specification has it."""

from __future__ import annotations

import asyncio

from aiohttp import web
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from google.rpc.code_pb2 import Code
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)

from tailscope.live.access import Access
from tailscope.live.bodies import BODIES, PIECE, NotGzip, TooLarge
from tailscope.live.intake import RETRY_S, Intake, Refused

PATH = "/v1/traces"
PROTOBUF, JSON = "application/x-protobuf", "application/json"
#: A body that takes longer to come is given up.
BODY_S = 10.0


class _Wrong(Exception):
    """A request that cannot be an export. The status says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def routes(intake: Intake, access: Access, max_message: int) -> list[web.RouteDef]:
    async def export(request: web.Request) -> web.Response:
        is_json = request.content_type == JSON
        if not access.allows(request.headers.get("Authorization")):
            intake.refused("http", "unauthenticated", "", retry=False)
            return _failure(401, Code.UNAUTHENTICATED, "a bearer token is needed", is_json)
        try:
            message = await _body(request, max_message, intake)
            accepted = await intake.spans(message, is_json, "http")
        except _Wrong as wrong:
            intake.refused("http", "malformed", str(wrong), retry=False)
            return _failure(wrong.status, Code.INVALID_ARGUMENT, str(wrong), is_json)
        except Refused as why:
            if not why.retry:
                return _failure(400, Code.INVALID_ARGUMENT, str(why), is_json)
            response = _failure(503, Code.UNAVAILABLE, str(why), is_json)
            response.headers["Retry-After"] = str(int(RETRY_S))
            return response
        partial = ExportTracePartialSuccess(rejected_spans=accepted.rejected, error_message=accepted.why)
        return _answer(
            200, ExportTraceServiceResponse(partial_success=partial if accepted.rejected else None), is_json
        )

    async def other_signal(request: web.Request) -> web.Response:
        text = f"tailscope takes spans, at {PATH}; metrics are scraped"
        return _failure(404, Code.UNIMPLEMENTED, text, request.content_type == JSON)

    return [
        web.post(PATH, export),
        web.post("/v1/metrics", other_signal),
        web.post("/v1/logs", other_signal),
    ]


async def _body(request: web.Request, most: int, intake: Intake) -> bytes:
    """The body, unpacked. Raises _Wrong or Refused."""
    if request.content_type not in (PROTOBUF, JSON):
        raise _Wrong(415, f"Content-Type must be {PROTOBUF} or {JSON}")
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in BODIES:
        raise _Wrong(415, "Content-Encoding must be gzip or identity")
    body = BODIES[encoding](most)
    with intake.holding("http") as hold:
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in request.content.iter_chunked(PIECE):
                    body.feed(piece)
                    hold(body.size)
            return body.finish()
        except TimeoutError as error:
            raise _Wrong(408, f"the body did not come within {BODY_S:g} s") from error
        except TooLarge as error:
            raise _Wrong(413, f"the message is larger than {most:,} bytes") from error
        except NotGzip as error:
            raise _Wrong(400, str(error)) from error


def _failure(status: int, code: int, text: str, is_json: bool) -> web.Response:
    return _answer(status, Status(code=code, message=text), is_json)


def _answer(status: int, message: Message, is_json: bool) -> web.Response:
    if is_json:
        return web.Response(status=status, text=MessageToJson(message), content_type=JSON)
    return web.Response(status=status, body=message.SerializeToString(), content_type=PROTOBUF)
