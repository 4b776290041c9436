"""Writes the files a simulated world leaves behind, a folder an instance, as its scenario's telemetry says."""

from __future__ import annotations

import os
from pathlib import Path

from tailscope.sim.emit import client, log, otlp, prometheus, schedule, stat_logger
from tailscope.sim.emit.front_end import EPOCH_S, FrontEnd, front_ends, of_instance
from tailscope.sim.outcome import Outcome

SPANS, LOG, METRICS, CLIENT, BENCH = (
    "otlp_spans.pb.delim",
    "server.log",
    "metrics.txt",
    "client.jsonl",
    "bench.json",
)


def write_files(outcome: Outcome, folder: Path) -> list[Path]:
    """Write all telemetry but the ranks' profiles below `folder`, and return the paths.

    The same outcome gives the same bytes and file times. Ingest `folder` itself: each folder in it is an instance.
    """
    views = front_ends(outcome)
    written: list[Path] = []
    for number, instance in enumerate(outcome.instances()):
        place = folder / instance
        place.mkdir(parents=True, exist_ok=True)
        written += _server(outcome, of_instance(views, instance), place)
        if outcome.scenario.telemetry.client:
            calls = client.calls(outcome, views, number)
            if not len(calls):
                continue
            if outcome.scenario.telemetry.client_format == "vllm-bench":
                written.append(place / BENCH)
                client.write_bench(outcome, calls, written[-1])
            else:
                written.append(place / CLIENT)
                client.write_log(outcome, calls, written[-1])
    # A log's lines have no year: that of the file's time is theirs.
    over = EPOCH_S + float(prometheus.scrapes_s(outcome)[-1])
    for path in written:
        os.utime(path, (over, over))
    return written


def _server(outcome: Outcome, views: list[FrontEnd], place: Path) -> list[Path]:
    telemetry = outcome.scenario.telemetry
    written: list[Path] = []
    if telemetry.spans and any(len(view.told) for view in views):
        written.append(place / SPANS)
        otlp.write(outcome, views, written[-1])
    if telemetry.log:
        written.append(place / LOG)
        log.write(outcome, views, written[-1])
    if telemetry.stat_logger:
        for view in views:
            written.append(place / stat_logger.file_name(view))
            stat_logger.write(outcome, view, written[-1])
    if telemetry.schedule:
        for view in views:
            written.append(place / schedule.file_name(view))
            schedule.write(outcome, view, written[-1])
    if telemetry.metrics:
        written.append(place / METRICS)
        prometheus.write(outcome, views, written[-1])
    return written
