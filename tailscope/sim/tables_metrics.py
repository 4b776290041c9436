"""The samples and series that scrapes, stat-logger records and statistics lines give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tailscope.model import request_key
from tailscope.schema import METRICS, SERIES, Table
from tailscope.sim.emit import log, prometheus
from tailscope.sim.emit.front_end import LOGGERS_S, FrontEnd, wall, whole_ns
from tailscope.sim.outcome import Ints, Outcome, ns

SECOND = 1_000_000_000
#: After so long a sample is stored though it says nothing new.
HEARTBEAT_NS = 60 * SECOND
#: The measurements that readers know of several engines.
CONCEPTS = {
    "vllm:time_to_first_token_seconds": "ttft",
    "vllm:inter_token_latency_seconds": "itl",
    "vllm:request_time_per_output_token_seconds": "tpot",
    "vllm:e2e_request_latency_seconds": "e2e",
    "vllm:request_queue_time_seconds": "queue",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_preemptions_total": "preemptions",
}
Columns = Mapping[str, Any]


class _Samples:
    """Rows of metrics and series of one source."""

    def __init__(self) -> None:
        self.samples: dict[str, list[Any]] = {
            n: [] for n in ("engine", "time_ns", "series", "value", "le", "counts")
        }
        self.series: dict[str, tuple[int | None, str, str, str, list[tuple[str, str]]]] = {}

    def add(
        self,
        name: str,
        kind: str,
        labels: dict[str, str],
        times: Sequence[int],
        values: Sequence[float],
        histogram: tuple[list[float], list[list[float]]] | None = None,
    ) -> None:
        items = sorted(labels.items())
        series = request_key("series", name, *(part for item in items for part in item))
        engine = int(labels["engine"]) if "engine" in labels else None
        if len(times):
            self.series.setdefault(series, (engine, series, name, kind, items))
        self.samples["engine"] += [engine] * len(times)
        self.samples["series"] += [series] * len(times)
        self.samples["time_ns"] += times
        self.samples["value"] += values
        bounds, counts = histogram or (None, list[Any]([None]) * len(times))
        self.samples["le"] += [bounds] * len(times)
        self.samples["counts"] += counts

    def tables(self) -> Iterator[tuple[Table, Columns]]:
        yield METRICS, self.samples
        rows = list(self.series.values())
        names = ("engine", "series", "name", "type", "labels")
        yield SERIES, {name: [row[i] for row in rows] for i, name in enumerate(names)}


def of_scrapes(outcome: Outcome, views: list[FrontEnd]) -> Iterator[tuple[Table, Columns]]:
    samples, at = _Samples(), ns(prometheus.scrapes_s(outcome))
    for one in prometheus.series(outcome, views):
        changed = np.diff(one.values, prepend=np.nan) != 0
        if one.kind == "histogram":
            changed[1:] |= (np.diff(one.counts, axis=0) != 0).any(axis=1)
        kept = _kept(at.tolist(), changed.tolist())
        labels = dict(one.labels)
        if concept := CONCEPTS.get(one.name):
            labels["__concept__"] = concept
        histogram = None
        if one.kind == "histogram":
            histogram = list(one.le), one.counts[kept].astype(np.float64).tolist()
        samples.add(one.name, one.kind, labels, at[kept].tolist(), one.values[kept].tolist(), histogram)
    yield from samples.tables()


def _kept(times: list[int], changed: list[bool]) -> list[int]:
    """Samples that are stored: those that say something new, and one a minute."""
    kept: list[int] = []
    for i, (time, new) in enumerate(zip(times, changed, strict=True)):
        if new or time - times[kept[-1]] >= HEARTBEAT_NS:
            kept.append(i)
    return kept


def of_records(view: FrontEnd, now: Ints, details: bool) -> Iterator[tuple[Table, Columns]]:
    """Counters of what the records count. Without iteration details they are the only place of the engine's state."""
    samples, labels, steps, kept = _Samples(), {"engine": str(view.engine)}, view.steps, view.reported
    if not details:
        for name, values in (
            ("vllm:num_requests_running", steps.running),
            ("vllm:num_requests_waiting", steps.waiting + steps.deferred),
            ("vllm:kv_cache_usage_perc", steps.kv_usage),
        ):
            shown = values[kept].astype(np.float64)
            new = np.diff(shown, prepend=np.nan) != 0
            samples.add(name, "gauge", labels, now[new].tolist(), shown[new].tolist())
    spoken = view.messages[kept] > 0
    counts = {f"prefix_cache_{n}": (view.admissions[n][kept], now) for n in ("queries", "hits")}
    counts |= {
        f"prefix_cache_preempted_{n}": (view.admissions[f"preempted_{n}"][kept], now)
        for n in ("queries", "hits")
    }
    counts["prompt_tokens_computed"] = view.prompts["computed"][kept][spoken], now[spoken]
    begun = int(whole_ns(wall(LOGGERS_S)))
    for name, (amounts, times) in counts.items():
        total = np.cumsum(amounts).astype(np.float64)
        if len(total) and total[0]:
            # A counter's first sample has no past; this one begins where the file does.
            total, times = np.append(0.0, total), np.append(begun, times)
        new = np.diff(total, prepend=np.nan) != 0
        samples.add(f"statlogger:{name}", "counter", labels, times[new].tolist(), total[new].tolist())
    yield from samples.tables()


def of_statistics(views: list[FrontEnd]) -> Iterator[tuple[Table, Columns]]:
    samples = _Samples()
    names = (
        ("prompt", "log:prompt_throughput_tokens_per_s", 1),
        ("generated", "log:generation_throughput_tokens_per_s", 1),
        ("running", "vllm:num_requests_running", 1),
        ("waiting", "vllm:num_requests_waiting", 1),
        ("preempted", "log:preemptions", 1),
        ("usage", "vllm:kv_cache_usage_perc", 100),
        ("hits", "log:prefix_cache_hit_rate", 100),
    )
    for one in log.summaries(views):
        at = int(log.second_ns(one["time_s"])) + SECOND // 2
        for key, name, divisor in names:
            if key != "preempted" or one[key]:
                samples.add(name, "gauge", {"engine": str(one["engine"])}, [at], [float(one[key]) / divisor])
    yield from samples.tables()
