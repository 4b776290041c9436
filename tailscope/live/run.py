"""Runs a server until a signal ends it, and reads its configuration again on another."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from tailscope.errors import UsageError
from tailscope.live.access import access_of
from tailscope.live.server import Server
from tailscope.live.settings import Serve, load


def serve(
    settings: Serve, config_path: Path | None, for_s: float | None, say: Callable[[str], object]
) -> Server:
    """Run until SIGINT or SIGTERM, or for `for_s` seconds; returns what ran. SIGHUP reads `config_path` again and goes on
    with it, or, where it has an error, as before. Raises UsageError."""
    return asyncio.run(_run(settings, config_path, for_s, say))


async def _run(
    settings: Serve, config_path: Path | None, for_s: float | None, say: Callable[[str], object]
) -> Server:
    loop = asyncio.get_running_loop()
    now = settings, _text_of(config_path)
    before: tuple[Serve, bytes | None] | None = None  # what ran until the configuration was read again
    changed: tuple[Serve, bytes | None] | None = None
    ended = False
    server = Server(*now, say)

    def reload() -> None:
        nonlocal changed
        if config_path is None:
            return
        try:
            changed = load(config_path), _text_of(config_path)
            access_of(changed[0])
        except UsageError as error:
            changed = None
            stays(error)
        else:
            server.stop()

    def stays(error: UsageError) -> None:
        server.health.reloads.labels("error").inc()
        say(f"{error}. The configuration stays as it was")

    def end() -> None:
        nonlocal changed, ended
        changed, ended = None, True
        server.stop()

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, end)
    loop.add_signal_handler(signal.SIGHUP, reload)
    if for_s is not None:
        loop.call_later(for_s, end)
    while True:
        try:
            await _run_one(server, reloaded=before is not None)
        except UsageError as error:
            if before is None or ended:
                raise
            # It can be read but not be run, for example because a port is taken.
            stays(error)
            now, before, changed = before, None, None
        else:
            if changed is None:
                return server
            now, before, changed = changed, now, None
        # Counts of tailscope's own go on.
        server = Server(*now, say, server.health)


async def _run_one(server: Server, reloaded: bool) -> None:
    running = asyncio.create_task(server.run())
    started = asyncio.create_task(server.started.wait())
    await asyncio.wait([running, started], return_when=asyncio.FIRST_COMPLETED)
    if started.done() and reloaded:
        server.health.reloads.labels("good").inc()
        server.say("configuration read again")
    started.cancel()
    await running


def _text_of(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
