"""Processes, files and numbers that the try-out is made of."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tailscope import alerts, registry
from tailscope import config as configuration
from tailscope.alert_objectives import INTERVAL_S
from tailscope.errors import TailscopeError

#: What a graceful end may take.
STOP_S = 20.0
#: What a process may take to listen.
START_S = 60.0
#: How often Prometheus scrapes and evaluates, and how long an alert's condition must hold here.
SCRAPE_S, HOLD = 2, "10s"

TTFT = "tailscope_time_to_first_token_seconds"
#: class -> end of a bucket -> requests up to there.
Buckets = dict[str, dict[float, float]]


@contextlib.asynccontextmanager
async def running(command: Sequence[str], log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of its own session, so that Ctrl-C reaches us alone; it is told to end, and waited for."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        await asyncio.shield(_end(process))


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            status = await process.wait()
    except TimeoutError:
        status = -signal.SIGKILL
    if status < 0:
        # It did not end by itself, so its children may be there still.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def said(process: asyncio.subprocess.Process, log: Path, pattern: str) -> str:
    """The address that its log tells. Raises TailscopeError where it ends without."""
    for _ in range(int(START_S / 0.1)):
        text = log.read_text(encoding="utf-8", errors="replace")
        if found := re.search(pattern, text):
            return found[1]
        if process.returncode is not None:
            break
        await asyncio.sleep(0.1)
    last = text.strip().splitlines()[-1:] or ["no word"]
    raise TailscopeError(f"{log.stem} did not start: {last[0]}")


def serve_command(config: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "tailscope", "serve", "--config", os.fspath(config)]


def prometheus_command(program: str, folder: Path) -> list[str]:
    return [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        "--web.listen-address=127.0.0.1:0",
    ]


def write_serve(folder: Path, config: str, targets: Sequence[str], window: str, every: str) -> Path:
    """tailscope.toml with `[serve]`, on ports that are free."""
    path = folder / "tailscope.toml"
    shown = ", ".join(f'"{target}"' for target in targets)
    path.write_text(
        f"""{config}
[serve]
trace = "trace.parquet"
listen = "127.0.0.1:0"
otlp_grpc = "127.0.0.1:0"
otlp_http = false
window = "{window}"
every = "{every}"

[[serve.scrape]]
targets = [{shown}]
every = "2s"
""",
        encoding="utf-8",
    )
    return path


def write_prometheus(folder: Path, config: Path, target: str) -> None:
    """prometheus.yml and rules.yaml."""
    made = alerts.render(
        configuration.load(config),
        [rule for rule, _ in registry.rules()],
        alerts.Wanted(trace="trace.parquet"),
    )
    rules = quickened(yaml.safe_load(made))
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules, allow_unicode=True), encoding="utf-8")
    document = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "tailscope", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(document), encoding="utf-8")


def quickened(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Alerting rules for minutes instead of days: evaluated often, held for seconds, and without those that look at hours to
    compare them with minutes. Limits and guards stay."""
    groups = []
    for group in rules["groups"]:
        kept = []
        for rule in group["rules"]:
            if "window" in rule.get("labels", {}):
                continue
            # Counts over an hour are sums of samples, of which there are more now.
            expr = rule["expr"].replace(f"{INTERVAL_S} * sum_over_time", f"{SCRAPE_S} * sum_over_time")
            kept.append({**rule, "expr": expr, **({"for": HOLD} if "for" in rule else {})})
        groups.append({**group, "interval": f"{SCRAPE_S}s", "rules": kept})
    return {"groups": groups}


def buckets_of(page: str) -> Buckets:
    """TTFT of each class, of all tenants and servers."""
    found: Buckets = {}
    for family in text_string_to_metric_families(page):
        if family.name == TTFT:
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    ends = found.setdefault(sample.labels["class"], {})
                    end = float(sample.labels["le"])
                    ends[end] = ends.get(end, 0.0) + sample.value
    return found


def p99s(before: Buckets, after: Buckets) -> dict[str, tuple[float, int]]:
    """class -> (p99, requests) of what came between, as `histogram_quantile` has it."""
    found = {}
    for klass, ends in after.items():
        counts = sorted((end, count - before.get(klass, {}).get(end, 0.0)) for end, count in ends.items())
        total = counts[-1][1]
        below, start = 0.0, 0.0
        for end, count in counts:
            if count >= 0.99 * total > 0:
                inside = (0.99 * total - below) / (count - below)
                found[klass] = (start if end == float("inf") else start + inside * (end - start), int(total))
                break
            below, start = count, end
    return found
