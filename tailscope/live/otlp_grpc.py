"""The OpenTelemetry protocol over gRPC, as its specification has it."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)

from tailscope.live.access import Access
from tailscope.live.intake import RETRY_S, Intake, Refused
from tailscope.live.settings import Address

#: A connection without a call is closed, which senders do not notice; one that does not say that it is HTTP/2, sooner.
IDLE_S, HANDSHAKE_S = 300, 10
SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


async def start(
    intake: Intake, where: Address, access: Access, max_message: int
) -> tuple[grpc.aio.Server, int]:
    """A server that listens, and its port. Raises RuntimeError where it cannot."""
    options = [
        ("grpc.max_receive_message_length", max_message),  # unpacked, too
        ("grpc.so_reuseport", 0),
        ("grpc.max_connection_idle_ms", 1000 * IDLE_S),
        ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_S),
    ]
    server = grpc.aio.server(options=options)

    async def export(message: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        if not access.allows(dict(context.invocation_metadata() or ()).get("authorization")):
            intake.refused("grpc", "unauthenticated", "", retry=False)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a bearer token is needed")
        try:
            accepted = await intake.spans(message, False, "grpc")
        except Refused as why:
            if not why.retry:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(why))
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(why), _retry(str(why)))
        partial = ExportTracePartialSuccess(rejected_spans=accepted.rejected, error_message=accepted.why)
        # Unset where all is well, as the protocol has it.
        response = ExportTraceServiceResponse(partial_success=partial if accepted.rejected else None)
        return response.SerializeToString()

    handler: Any = grpc.unary_unary_rpc_method_handler(export)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": handler}),))
    credentials = access.grpc_credentials()
    port = (
        server.add_secure_port(str(where), credentials)
        if credentials
        else server.add_insecure_port(str(where))
    )
    await server.start()
    return server, port


def _retry(text: str) -> tuple[tuple[str, bytes]]:
    """RetryInfo, which tells a client that and when it should send again."""
    info = AnyMessage()
    info.Pack(RetryInfo(retry_delay=Duration(seconds=int(RETRY_S))))
    status = Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message=text, details=[info])
    return (("grpc-status-details-bin", status.SerializeToString()),)
