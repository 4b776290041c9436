"""Listens for HTTP: so many connections at once that files can be opened still, and none that says nothing for long."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
from collections.abc import Sequence

from aiohttp import web

from tailscope.live.settings import Address

#: A connection that sends no whole head of a request, or ends no handshake, for so long is closed.
IDLE_S = 30.0
#: Connections of a listener, and the share of the process's file descriptors that they may be.
MOST, SHARE = 2_000, 0.25
#: File descriptors that are asked for; the usual limit of 1,024 is of the days of select().
FILES = 16_384


class _Refusal(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def listen(
    stack: contextlib.AsyncExitStack,
    routes: Sequence[web.RouteDef],
    where: Address,
    tls: ssl.SSLContext | None,
) -> int:
    """Serve until the stack is left; the port. Raises OSError where it cannot."""
    app = web.Application()
    app.add_routes(routes)
    # Bodies are unpacked by us, with a limit.
    runner = web.AppRunner(app, access_log=None, auto_decompress=False, keepalive_timeout=IDLE_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    most = min(MOST, int(SHARE * files()))
    accept = runner.server
    assert accept is not None

    def connection() -> asyncio.BaseProtocol:
        return accept() if len(accept.connections) < most else _Refusal()

    server = await asyncio.get_running_loop().create_server(
        connection, where.host, where.port, ssl=tls, ssl_handshake_timeout=IDLE_S if tls else None
    )
    stack.callback(server.close)
    port: int = server.sockets[0].getsockname()[1]
    return port


def files() -> int:
    """File descriptors that this process may have, as many as it can get up to FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return FILES if soft == resource.RLIM_INFINITY else soft
