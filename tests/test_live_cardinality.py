"""A million tenants, classes, models: memory and series stay where the caps are."""

from __future__ import annotations

import resource

import numpy as np
import pyarrow as pa

from tailscope.config import Config
from tailscope.live.request_metrics import RequestMetrics
from tailscope.schema import REQUESTS

BATCH = 50_000


def rows(number: int) -> pa.Table:
    ids = np.char.add("tenant-", (np.arange(BATCH) + number * BATCH).astype(str))
    size = {"ttft_ns": [10**8] * BATCH, "e2e_ns": [10**9] * BATCH, "prompt_tokens": [100] * BATCH}
    named = {"tenant": ids.tolist(), "model": ids.tolist(), "klass": ids.tolist(), "trace_id": ids.tolist()}
    return REQUESTS.batch({**named, **size, "status": ["ok"] * BATCH})


def test_a_million_tenants_do_not_grow_memory_beyond_the_cap() -> None:
    metrics = RequestMetrics(Config(), tenants=50, label_sets=200)
    for number in range(4):
        metrics.add(rows(number))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(4, 20):
        metrics.add(rows(number))
    page = metrics.render(exemplars=True).decode()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 30, f"{grown:.0f} MB"
    assert page.count("tailscope_time_to_first_token_seconds_count{") == 201
    assert 'tailscope_label_values_capped_total{label="tenant"} 999950' in page
    counts = [
        float(line.split()[-1]) for line in page.splitlines() if line.startswith("tailscope_requests_total{")
    ]
    assert sum(counts) == 20 * BATCH
    metrics.close()


def test_names_of_megabytes_are_cut_before_they_are_copied() -> None:
    metrics = RequestMetrics(Config(), tenants=5, label_sets=20)
    metrics.add(rows(0))
    metrics.count()
    long = "\x1f" * 10_000_000
    tables = [
        REQUESTS.batch({"tenant": [long], "model": [long], "status": ["ok"], "ttft_ns": [10**8]})
        for _ in range(20)
    ]
    table = pa.concat_tables(tables)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics.add(table)
    page = metrics.render(exemplars=False)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 100, f"{grown:.0f} MB"  # of 400 MB
    assert max(map(len, page.splitlines())) < 1000
    metrics.close()
