"""Latencies by class, tenant, priority, model and server, as Prometheus histograms.

vLLM's own have no class. Buckets are 1-2.5-5 steps where latencies of LLMs lie, and every objective's limit is an edge,
so that the share of requests that meet it is exact. What is added is counted by vectors, not row by row.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.align import CLASS_SQL, class_macro
from tailscope.config import Config
from tailscope.scan import connect
from tailscope.schema import REQUESTS

LABELS = ("class", "tenant", "priority", "model_name", "server")
#: Beyond the caps, whoever it is.
OTHER = "other"
#: Rows that wait are counted at once when they are so many: a call costs more than a row.
MOST_WAITING = 20_000
#: An exemplar's label may have 128 letters at most; what is no id of a trace links nowhere.
TRACE_ID = re.compile("[0-9a-f]{32}")
#: A label's value is cut to this length: names of a trace are anybody's text.
MOST_TEXT = 128


@dataclass(frozen=True)
class Latency:
    """A histogram: what it is called, of which metric of an objective, and how a row tells it."""

    name: str
    help: str
    slo: str | None
    sql: str
    edges: tuple[float, ...]


_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_TOKEN = (
    0.002,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_QUEUE = (0.001, 0.005, *_FIRST)

LATENCIES = (
    Latency("time_to_first_token", "From arrival to the first token.", "TTFT", "ttft_ns / 1e9", _FIRST),
    Latency(
        "time_per_output_token",
        "Mean time of the tokens after the first one of a request.",
        "TPOT",
        "CASE WHEN output_tokens > 1 THEN (e2e_ns - ttft_ns) / 1e9 / (output_tokens - 1) END",
        _TOKEN,
    ),
    Latency("e2e_request_latency", "From arrival to the last token.", "E2E", "e2e_ns / 1e9", _WHOLE),
    Latency(
        "request_queue_time", "From the scheduler's queue to first scheduled.", None, "queue_ns / 1e9", _QUEUE
    ),
    Latency(
        "request_prefill_time", "From first scheduled to the first token.", None, "prefill_ns / 1e9", _FIRST
    ),
    Latency("request_decode_time", "From the first to the last token.", None, "decode_ns / 1e9", _WHOLE),
)
_COUNTERS = {
    "prompt_tokens": ("Tokens of prompts, cached ones included.", "coalesce(prompt_tokens, 0)"),
    "output_tokens": ("Tokens generated.", "coalesce(output_tokens, 0)"),
    "token_seconds": (
        "Tokens held in the engine times how long; its rate is the mean number of tokens in flight.",
        "coalesce((coalesce(prompt_tokens, 0) + coalesce(output_tokens, 0) / 2.0) * e2e_ns / 1e9, 0)",
    ),
}


_SEPARATOR = "\x1f"
#: A name from a trace may hold the separator.
_LABEL_SQL = tuple(
    f"replace(left({sql}, {MOST_TEXT}), chr(31), ' ')"
    for sql in (
        CLASS_SQL,
        "coalesce(tenant, '')",
        "coalesce(priority::VARCHAR, '')",
        "coalesce(model, '')",
        "coalesce(instance, '')",
    )
)


class RequestMetrics:
    """Counts requests. Its methods may be called from any thread."""

    def __init__(self, config: Config, tenants: int, label_sets: int) -> None:
        self._lock = threading.Lock()
        self._arriving = threading.Lock()
        self._waiting: list[pa.Table] = []
        self._waiting_rows = 0
        self._config, self._tenants, self._label_sets = config, tenants, label_sets
        self._seen_tenants: set[str] = set()
        self._index: dict[tuple[str, ...], int] = {}
        self._statuses: Counter[tuple[int, str]] = Counter()
        self._edges = [_edges(latency, config) for latency in LATENCIES]
        size = label_sets + 1
        self._counts = [np.zeros((size, len(edges) + 1), np.int64) for edges in self._edges]
        self._sums = [np.zeros(size) for _ in LATENCIES]
        self._counters = {name: np.zeros(size) for name in _COUNTERS}
        #: (trace id, value) by latency, place and bucket.
        self._exemplars: dict[tuple[int, int, int], tuple[str, float]] = {}
        self._capped: dict[str, int] = {"tenant": 0, "label_set": 0}
        self._con = connect({"threads": 1, "memory_limit": "256MB"})
        self._con.execute(class_macro(config.classes))
        # DuckDB imports pandas with the first table it is given: half a second in which nobody should wait yet.
        self._told(REQUESTS.arrow.empty_table())

    def close(self) -> None:
        with self._lock:
            self._con.close()

    def add(self, rows: pa.Table) -> None:
        """Take requests, rows of the table of that name. They are counted some at once, by `count` or `render`."""
        # Whoever counts holds the other lock for as long as a query takes, and spans must not wait for that.
        with self._arriving:
            self._waiting.append(rows)
            self._waiting_rows += rows.num_rows
            many = self._waiting_rows >= MOST_WAITING
        if many:
            self.count()

    def count(self) -> None:
        """Count what waits."""
        with self._lock:
            self._count()

    def _count(self) -> None:
        with self._arriving:
            waiting, self._waiting, self._waiting_rows = self._waiting, [], 0
        if not waiting:
            return
        told = self._told(pa.concat_tables(waiting))
        where, status = self._places(told)
        for number, latency in enumerate(LATENCIES):
            self._observe(number, where, told[latency.name].to_numpy(), told["trace_id"])
        for name in _COUNTERS:
            np.add.at(self._counters[name], where, told[name].to_numpy())
        self._statuses.update(zip(where.tolist(), status, strict=True))

    def _told(self, rows: pa.Table) -> pa.Table:
        latencies = ", ".join(f"({latency.sql})::DOUBLE AS {latency.name}" for latency in LATENCIES)
        counters = ", ".join(f"({sql})::DOUBLE AS {name}" for name, (_, sql) in _COUNTERS.items())
        sql = f"""
            SELECT concat_ws(chr(31), {", ".join(_LABEL_SQL)}) AS labels, coalesce(status, 'ok') AS status,
                   coalesce(trace_id, '') AS trace_id, {latencies}, {counters}
            FROM new_rows
        """
        self._con.register("new_rows", rows)
        try:
            told: pa.Table = self._con.sql(sql).to_arrow_table()
            return told
        finally:
            self._con.unregister("new_rows")

    def _places(self, told: pa.Table) -> tuple[NDArray[np.int64], list[str]]:
        """Row of the counts that each request belongs to, and how it ended."""
        labels: Any = told["labels"].combine_chunks()
        labels = labels.dictionary_encode()
        places = np.array([self._place(text) for text in labels.dictionary.to_pylist()], np.int64)
        statuses: Any = told["status"].to_pylist()
        return places[labels.indices.to_numpy()], statuses

    def _place(self, text: str) -> int:
        klass, tenant, priority, model, server = text.split(_SEPARATOR)
        if tenant and tenant not in self._seen_tenants:
            if len(self._seen_tenants) >= self._tenants:
                self._capped["tenant"] += 1
                tenant = OTHER
            else:
                self._seen_tenants.add(tenant)
        labels: tuple[str, ...] = (klass, tenant, priority, model, server)
        if labels not in self._index and len(self._index) >= self._label_sets:
            self._capped["label_set"] += 1
            labels = (OTHER,) * len(LABELS)
        return self._index.setdefault(labels, len(self._index))

    def _observe(
        self, number: int, where: NDArray[np.int64], values: NDArray[np.float64], trace_ids: Any
    ) -> None:
        ok = np.flatnonzero(np.isfinite(values) & (values >= 0))
        places, values = where[ok], values[ok]
        counts = self._counts[number]
        buckets = np.searchsorted(self._edges[number], values)
        np.add.at(counts, (places, buckets), 1)
        np.add.at(self._sums[number], places, values)
        # One exemplar a bucket, the last of these rows: who was that slow.
        flat = places * counts.shape[1] + buckets
        _, last = np.unique(flat[::-1], return_index=True)
        for i in (len(flat) - 1 - last).tolist():
            trace_id = trace_ids[int(ok[i])].as_py()
            if TRACE_ID.fullmatch(trace_id):
                self._exemplars[number, int(places[i]), int(buckets[i])] = (trace_id, float(values[i]))

    def render(self, exemplars: bool) -> bytes:
        """The text of all series; exemplars are for OpenMetrics only.

        Tens of thousands of lines, which the library, with an object a line, takes seconds for.
        """
        with self._lock:
            self._count()
            lines: list[str] = []
            prefixes = [
                ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(LABELS, labels, strict=True))
                for labels in self._index
            ]
            for number, latency in enumerate(LATENCIES):
                self._render_histogram(lines, number, latency, prefixes, exemplars)
            _head(lines, "tailscope_requests", "counter", "Requests by how they ended.", exemplars)
            for (place, status), count in self._statuses.items():
                lines.append(
                    f'tailscope_requests_total{{{prefixes[place]},status="{_escaped(status)}"}} {count}'
                )
            for name, (text, _) in _COUNTERS.items():
                _head(lines, f"tailscope_{name}", "counter", text, exemplars)
                values = self._counters[name].tolist()
                lines += [
                    f"tailscope_{name}_total{{{prefix}}} {v}"
                    for prefix, v in zip(prefixes, values, strict=False)
                ]
            _head(lines, "tailscope_label_values_capped", "counter", "Values counted as `other`.", exemplars)
            lines += [
                f'tailscope_label_values_capped_total{{label="{k}"}} {v}' for k, v in self._capped.items()
            ]
        _head(lines, "tailscope_slo_seconds", "gauge", "Limit of an objective.", exemplars)
        lines += [
            f'tailscope_slo_seconds{{class="{_escaped(slo.klass)}",metric="{slo.metric.lower()}",quantile="{slo.quantile}"}} '
            f"{slo.limit_s}"
            for slo in self._config.slos
        ]
        return "\n".join([*lines, ""]).encode()

    def _render_histogram(
        self, lines: list[str], number: int, latency: Latency, prefixes: Sequence[str], exemplars: bool
    ) -> None:
        name = f"tailscope_{latency.name}_seconds"
        _head(lines, name, "histogram", latency.help, exemplars)
        edges = [*(f'le="{edge!r}"' for edge in self._edges[number].tolist()), 'le="+Inf"']
        cumulative = self._counts[number].cumsum(axis=1).tolist()
        for place, prefix in enumerate(prefixes):
            counts = cumulative[place]
            if not counts[-1]:
                continue
            for bucket, (edge, count) in enumerate(zip(edges, counts, strict=True)):
                line = f"{name}_bucket{{{prefix},{edge}}} {count}"
                if exemplars and (found := self._exemplars.get((number, place, bucket))):
                    line += f' # {{trace_id="{_escaped(found[0])}"}} {found[1]!r}'
                lines.append(line)
            lines.append(f"{name}_sum{{{prefix}}} {float(self._sums[number][place])!r}")
            lines.append(f"{name}_count{{{prefix}}} {counts[-1]}")


def _head(lines: list[str], name: str, kind: str, text: str, openmetrics: bool) -> None:
    name = name if openmetrics or kind != "counter" else f"{name}_total"
    lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _edges(latency: Latency, config: Config) -> NDArray[np.float64]:
    limits = [slo.limit_s for slo in config.slos if slo.metric == latency.slo]
    return np.array(sorted({*latency.edges, *limits}))
