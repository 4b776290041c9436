"""`serve` killed at any moment: what it had acknowledged is in the trace after the next start, once, and all of it can be read.

`TAILSCOPE_KILLS` says how often; a hundred times is what a release is held to.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from live_load import Exports, send

from tailscope.store import Trace

KILLS = int(os.environ.get("TAILSCOPE_KILLS", "3"))
CONFIG = """
[serve]
trace = "t.parquet"
listen = false
otlp_grpc = false
otlp_http = "127.0.0.1:{port}"
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tailscope", "serve", "--config", str(folder / "tailscope.toml")],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            assert process.stderr is not None
            raise AssertionError(process.stderr.read().decode())
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.02)
    raise AssertionError("did not start")


def test_what_was_acknowledged_is_there_after_any_kill(tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    chance = random.Random(seed)
    port = free_port()
    (tmp_path / "tailscope.toml").write_text(CONFIG.format(port=port))
    exports = Exports(batch=16)
    acknowledged: list[int] = []
    for _ in range(KILLS):
        process = start(tmp_path, port)
        moment = chance.uniform(0.0, 3.0)

        async def load(process: subprocess.Popen[bytes], moment: float) -> list[int]:
            sending = asyncio.create_task(send(f"http://127.0.0.1:{port}/v1/traces", exports, moment + 0.3))
            await asyncio.sleep(moment)
            # The keeper of the trace is killed with it, wherever it is.
            os.killpg(process.pid, signal.SIGKILL)
            return (await sending).acknowledged

        acknowledged += asyncio.run(load(process, moment))
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
    last = start(tmp_path, port)
    last.send_signal(signal.SIGINT)
    assert last.wait(60) == 0
    with Trace(tmp_path / "t.parquet") as trace:
        found = [row["request_id"] for row in trace.rows("SELECT request_id FROM requests")]
        assert trace.warnings == []
    assert len(found) == len(set(found)), f"stored twice, seed {seed}"
    missing = {name for number in acknowledged for name in exports.ids(number)} - set(found)
    assert not missing, f"{len(missing)} acknowledged spans are lost, seed {seed}"
    assert acknowledged
    assert not list((tmp_path / "t.parquet" / ".journal").iterdir())
