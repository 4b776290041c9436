"""A simulated fleet as Prometheus sees it: tailscope's real exporter, a vLLM, and a server with a KV connector and SGLang's names.

Each scrape is the next moment of the simulation. `Prometheus` is Debian's, on a port of its own.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from aiohttp import web
from real import ROOT

from tailscope.alerts import Wanted, render
from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.live.access import Access
from tailscope.live.health import Health
from tailscope.live.pages import WatchMetrics, routes
from tailscope.live.request_metrics import RequestMetrics
from tailscope.live.watch import Hysteresis, Watch, Watched
from tailscope.registry import rules
from tailscope.render.as_json import as_dict
from tailscope.schema import REQUESTS
from tailscope.sim import scenario_file, written
from tailscope.sim.emit import prometheus as emitted
from tailscope.sim.emit.front_end import front_ends
from tailscope.sim.engine import simulate
from tailscope.store import Trace

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
#: Scrapes in which something happens, one a second.
SCRAPES = 9
SERVER = "vllm-0"
SAMPLE = re.compile(r"^(\w[\w:]*)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Fleet:
    """Serves three pages; `first` and `last` are the exporter's own, as Prometheus got them first and last."""

    def __init__(self, folder: Path, config: Config) -> None:
        scenario = scenario_file.load(ROOT / "examples" / "scenarios" / "long-prefills.toml")
        outcome = simulate(
            replace(scenario, duration_s=90.0, causes=(), telemetry=replace(scenario.telemetry, scrape_s=4.0))
        )
        tables = written.tables(outcome)
        written.write_trace(tables, folder / "trace.parquet")
        path = folder / "pages.txt"
        emitted.write(outcome, front_ends(outcome), path)
        self._pages = re.split(r"^#@SCRAPE .*\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        self._requests = self._spans(tables[REQUESTS.name])
        self.metrics, self.health = RequestMetrics(config, tenants=50, label_sets=200), Health()
        self.watch = Watch(folder / "trace.parquet", None, 300, 30, folder / "history.jsonl")
        self._diagnose(folder / "trace.parquet", config)
        self.health.registry.register(WatchMetrics(self.watch.state))
        self._exporter = routes(self.health.registry, self.metrics, self.watch, Access(), lambda: "")
        self.step = 0
        self.served: list[Samples] = []

    def _spans(self, table: pa.Table) -> pa.Table:
        """As spans tell them, by when they end; some fail."""
        table = table.filter(pc.and_(pc.is_valid(table["queue_ns"]), pc.is_valid(table["ttft_ns"]))).sort_by(
            "finished_ns"
        )
        status = ["error" if n % 50 == 0 else "ok" for n in range(len(table))]
        index = table.schema.get_field_index("status")
        table = table.set_column(index, table.schema.field(index), pa.array(status, table["status"].type))
        tenant = pa.array([f"tenant-{n % 3}" for n in range(len(table))], table["tenant"].type)
        index = table.schema.get_field_index("tenant")
        return table.set_column(index, table.schema.field(index), tenant)

    def _diagnose(self, trace: Path, config: Config) -> None:
        with Trace(trace) as opened:
            found = as_dict(diagnose(opened, config))
        # No profile here, so the rank that others wait for is made up.
        found["findings"].append(
            {
                "rule": "straggler-rank",
                "status": "found",
                "severity": "high",
                "title": "rank 3 is late",
                "culprit": {"kind": "rank", "id": "3", "instance": SERVER},
                "victims": [],
                "evidence": [{"text": "", "data": {"share_of_steps": 0.25}}],
            }
        )
        hysteresis = Hysteresis()
        for look in (1.0, 2.0):
            hysteresis.look(found["findings"], look)
        state: Watched = self.watch.state
        state.open, state.diagnosis = dict(hysteresis.open), found
        state.diagnosed_s, state.took_s = time.time(), 1.0

    def begin_step(self) -> None:
        """The next moment: requests end, an engine is scraped."""
        self.step += 1
        if self.step > SCRAPES:
            return
        n = len(self._requests)
        # Half of them before the first scrape, so that every series is there from the beginning.
        begin = 0 if self.step == 1 else n // 2 + (n - n // 2) * (self.step - 2) // (SCRAPES - 1)
        end = n // 2 + (n - n // 2) * (self.step - 1) // (SCRAPES - 1)
        self.metrics.add(self._requests.slice(begin, end - begin))
        health, place = self.health, (SERVER, "0")
        health.up.labels(SERVER).set(1)
        health.kv_usage.labels(*place).set(0.5)
        health.running.labels(*place).set(self.step)
        health.waiting.labels(*place).set(2)
        health.preemptions.labels(*place).inc()
        health.written.labels("requests").inc(99)
        health.rejected.labels("no time").inc(1)
        health.refused.labels("http", "busy").inc(1)
        health.journal_bytes.set(1000)
        health.trace_bytes.set(1_000_000)

    def page(self) -> str:
        return self._pages[6 + min(self.step, SCRAPES)]

    def connector(self) -> str:
        """What the simulation knows nothing of, with counters that rise evenly."""
        lines = (ROOT / "tests" / "watched_names.txt").read_text(encoding="utf-8").splitlines()
        made = []
        for line in lines:
            if line and not line.startswith("#"):
                name, _, each = line.rpartition(" ")
                made.append(f"{name} {float(each) * min(self.step, SCRAPES):g}")
        return "\n".join([*made, ""])

    def application(self) -> web.Application:
        @web.middleware
        async def noted(request: web.Request, handler: Any) -> web.StreamResponse:
            if request.path == "/metrics":
                self.begin_step()
            response: web.StreamResponse = await handler(request)
            if request.path == "/metrics" and isinstance(response, web.Response):
                body = response.body
                assert isinstance(body, bytes)
                self.served.append(parsed(body.decode()))
            return response

        async def engine(_: web.Request) -> web.Response:
            return web.Response(text=self.page())

        async def connector(_: web.Request) -> web.Response:
            return web.Response(text=self.connector())

        app = web.Application(middlewares=[noted])
        app.add_routes([*self._exporter, web.get("/vllm", engine), web.get("/connector", connector)])
        return app


def parsed(page: str) -> Samples:
    found: Samples = {}
    for line in page.splitlines():
        if (match := SAMPLE.match(line.partition(" # ")[0])) and not line.startswith("#"):
            found[match[1], frozenset(LABEL.findall(match[2] or ""))] = float(match[3])
    return found


def quantile_between(before: Samples, after: Samples, q: float, histogram: str, by: str) -> dict[str, float]:
    """Of what was observed between two pages: the bucket by its rank, and within it in proportion, as Prometheus does."""
    counts: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for (name, labels), value in after.items():
        if name == f"{histogram}_bucket":
            told = dict(labels)
            counts[told[by]][float(told["le"])] += value - before.get((name, labels), 0.0)
    found = {}
    for key, buckets in counts.items():
        edges = sorted(buckets)
        rank = q * buckets[math.inf]
        if not rank:
            continue
        place = next(i for i, edge in enumerate(edges) if buckets[edge] >= rank)
        if edges[place] == math.inf:
            found[key] = edges[-2]
            continue
        low, below = (edges[place - 1], buckets[edges[place - 1]]) if place else (0.0, 0.0)
        found[key] = low + (edges[place] - low) * (rank - below) / (buckets[edges[place]] - below)
    return found


class Prometheus:
    """A running server's answers."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(
            f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=20
        ) as answer:
            return json.load(answer)["data"]

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series now."""
        data = self.get("/api/v1/query", query=expr)
        assert data["resultType"] == "vector"
        return [(series["metric"], float(series["value"][1])) for series in data["result"]]


@contextmanager
def serving(app: web.Application) -> Iterator[int]:
    """The port of an application in a thread of its own."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, access_log=None)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield port
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.run_until_complete(runner.cleanup())
        loop.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def watched(folder: Path, fleet: Fleet, config: Config, past: str) -> Iterator[Prometheus]:
    """A Prometheus that has scraped all that happens; `past` is OpenMetrics of what it knows from before."""
    assert PROMETHEUS
    assert PROMTOOL
    (folder / "past.txt").write_text(past, encoding="utf-8")
    made = subprocess.run(
        [PROMTOOL, "tsdb", "create-blocks-from", "openmetrics", folder / "past.txt", folder / "data"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    text = render(config, [rule for rule, _ in rules()], Wanted())
    (folder / "rules.yaml").write_text(text.replace("interval: 60s", "interval: 1s"), encoding="utf-8")
    with serving(fleet.application()) as port:
        jobs = [
            {
                "job_name": name,
                "metrics_path": path,
                "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": {"instance": instance}}],
            }
            for name, path, instance in (
                ("tailscope", "/metrics", "tailscope"),
                ("vllm", "/vllm", SERVER),
                ("connector", "/connector", "vllm-pd"),
            )
        ]
        settings = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": jobs,
        }
        # JSON is YAML.
        (folder / "prometheus.yml").write_text(json.dumps(settings), encoding="utf-8")
        with _started(folder) as server:
            assert _until(lambda: fleet.step > SCRAPES + 2, 30), "Prometheus does not scrape"
            yield server


@contextmanager
def _started(folder: Path) -> Iterator[Prometheus]:
    port = free_port()
    command = [
        str(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert "err=" not in (folder / "prometheus.log").read_text(encoding="utf-8")


def _until(what: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.1)
    return False
