"""What `tailscope serve` bears: `python tests/benchmarks/live.py [--seconds N] [--engines N]`.

Spans by OTLP/HTTP as fast as they are answered, on one core, protocol, disk and all; then engines scraped every five seconds;
then both. Prints rates, the CPU time of each process, what a look at /metrics takes meanwhile, memory at the start and the
end, and the difference between what was sent and what is in the trace.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from live_load import Engines, Exports, Sent, send

from tailscope.store import Trace

CONFIG = """
[attributes]
tenant = "acme.tenant"

[slo."<512"]
ttft_p99_s = 0.7

[serve]
trace = "t.parquet"
listen = "127.0.0.1:{metrics}"
otlp_grpc = false
otlp_http = "127.0.0.1:{otlp}"
every = "{every}"
"""
SCRAPE = """
[[serve.scrape]]
targets = {targets}
every = "5s"
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Server:
    def __init__(self, folder: Path, targets: list[str], core: int | None, every: str) -> None:
        self.metrics, self.otlp = free_ports(2)
        text = CONFIG.format(metrics=self.metrics, otlp=self.otlp, every=every)
        if targets:
            text += SCRAPE.format(targets=targets)
        folder.mkdir()
        self.trace = folder / "t.parquet"
        (folder / "tailscope.toml").write_text(text)
        command = [
            sys.executable,
            "-P",
            "-m",
            "tailscope",
            "serve",
            "--config",
            str(folder / "tailscope.toml"),
        ]
        if core is not None:
            command = ["taskset", "-c", str(core), *command]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    async def ready(self) -> None:
        async with aiohttp.ClientSession() as session:
            for _ in range(600):
                try:
                    async with session.get(f"http://127.0.0.1:{self.metrics}/readyz") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)
        raise SystemExit("serve did not start")

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds by process: the receiver first, then its children in the order they were started."""
        root = psutil.Process(self.process.pid)
        children = sorted(root.children(recursive=True), key=lambda p: p.create_time())
        names = ["receiver", *(f"child {child.pid}" for child in children)]
        found: dict[str, float] = {}
        for name, process in zip(names, [root, *children], strict=True):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            found[name] = found.get(name, 0.0) + times.user + times.system
        # Looks that have ended count with the process that waited for them.
        times = root.cpu_times()
        found["looks"] = times.children_user + times.children_system
        return found

    def memory_mb(self) -> float:
        root = psutil.Process(self.process.pid)
        total = 0
        for process in [root, *root.children(recursive=True)]:
            try:
                total += process.memory_full_info().uss
            except psutil.Error:
                continue
        return total / 1e6

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(120)


async def watch_memory(server: Server, stop: asyncio.Event) -> list[float]:
    """MB, every few seconds."""
    megabytes = []
    while not stop.is_set():
        megabytes.append(server.memory_mb())
        await asyncio.sleep(5.0)
    return megabytes


async def look_at_metrics(port: int, stop: asyncio.Event) -> list[float]:
    seconds = []
    async with aiohttp.ClientSession() as session:
        while not stop.is_set():
            began = time.monotonic()
            async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
                await response.read()
            seconds.append(time.monotonic() - began)
            await asyncio.sleep(1.0)
    return seconds


async def measure(
    name: str,
    folder: Path,
    seconds: float,
    spans: bool,
    engines: int,
    rate: float | None,
    core: int | None,
    every: str,
) -> None:
    async with Engines(engines) as fleet:
        server = Server(folder / name, fleet.targets if engines else [], core, every)
        try:
            await server.ready()
            await asyncio.sleep(2.0)
            before, served = server.cpu_s(), fleet.served
            began = time.monotonic()
            stop = asyncio.Event()
            looking = asyncio.create_task(look_at_metrics(server.metrics, stop))
            watching = asyncio.create_task(watch_memory(server, stop))
            exports = Exports()
            sent = Sent()
            if spans:
                url = f"http://127.0.0.1:{server.otlp}/v1/traces"
                sent = await send(url, exports, seconds, rate)
            else:
                await asyncio.sleep(seconds)
            wall = time.monotonic() - began
            stop.set()
            looks, megabytes = await looking, await watching
            after = server.cpu_s()
            used = {k: (after[k] - before.get(k, 0.0)) / wall for k in after}
        finally:
            server.stop()
        scraped = (fleet.served - served) / wall if engines else 0.0
    with Trace(server.trace) as trace:
        stored = trace.count("requests")
        samples = trace.count("metrics")
    given = sum(512 for _ in sent.acknowledged)
    shares = ", ".join(f"{k} {v:.2f}" for k, v in sorted(used.items()) if v >= 0.005)
    print(f"{name}: {wall:.0f} s; cores: {shares}; all {sum(used.values()):.2f}")
    if spans:
        quantiles = np.quantile(sent.seconds, [0.5, 0.99]) * 1e3
        print(
            f"  {given / wall:,.0f} spans/s acknowledged, answers p50 {quantiles[0]:.0f} ms, p99 {quantiles[1]:.0f} ms; "
            f"refused {sent.refused}, lost {sent.lost}; stored {stored:,} of {given:,} acknowledged"
        )
    if engines:
        print(f"  {scraped:.1f} pages/s of {engines} engines, {samples:,} samples stored")
    if looks:
        print(
            f"  /metrics p50 {np.median(looks) * 1e3:.0f} ms, p99 {np.quantile(looks, 0.99) * 1e3:.0f}, worst {max(looks) * 1e3:.0f} ms"
        )
    tenths = [f"{part.mean():,.0f}" for part in np.array_split(megabytes, min(10, len(megabytes)))]
    print(f"  memory, MB, mean of each tenth of the time: {', '.join(tenths)} (unique to the processes)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument(
        "--rate", type=float, help="spans a second; as fast as they are answered if not given"
    )
    parser.add_argument("--every", default="30s", help="time between looks of the rules")
    parser.add_argument("--only", choices=["spans", "engines", "both"])
    arguments = parser.parse_args()
    one_core = 0 if os.cpu_count() and (os.cpu_count() or 1) > 1 else None
    with tempfile.TemporaryDirectory(prefix="tailscope-bench-") as name:
        folder = Path(name)
        kinds = {
            "spans": (True, 0, arguments.rate, one_core),
            "engines": (False, arguments.engines, None, None),
            "both": (True, arguments.engines, arguments.rate or 10_000.0, None),
        }
        for kind, (spans, engines, rate, core) in kinds.items():
            if arguments.only in (None, kind):
                asyncio.run(
                    measure(kind, folder, arguments.seconds, spans, engines, rate, core, arguments.every)
                )


if __name__ == "__main__":
    main()
