"""What each class's prefill takes of the engines' time, for what a pool of its own would have to do."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tailscope.ledger.bills import Ledger
from tailscope.store import Trace, schema_of

_SCHEMA = schema_of(
    {
        "instance": pa.string(),
        "klass": pa.string(),
        "prefill_s": pa.float64(),
        "busy_s": pa.float64(),
        "span_s": pa.float64(),
        "engines": pa.int64(),
    }
)


def write_class_work(trace: Trace, ledger: Ledger) -> None:
    """Fill `class_work`: of each instance and class the engine-seconds of its prefill (seconds); beside them those of all
    steps, how long the steps lasted, and of how many engines. Requests that nobody saw finish are of no class. After bills."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for (instance, _), time in ledger.times.items():
        busy, steps = float(time.busy[-1]), time.steps
        span = float(steps.end_ns[-1] - steps.start_ns[0]) / 1e9 if len(steps.end_ns) else 0.0
        for klass, sums in zip(ledger.culprits, time.prefill_by, strict=True):
            nothing = {"prefill_s": 0.0, "busy_s": 0.0, "span_s": 0.0, "engines": 0}
            row = rows.setdefault((instance, klass), {"instance": instance, "klass": klass, **nothing})
            row["prefill_s"] += max(float(sums[-1]), 0.0)
            row["busy_s"] += busy
            row["span_s"] = max(row["span_s"], span)
            row["engines"] += 1
    trace.create("class_work", pa.Table.from_pylist(list(rows.values()), schema=_SCHEMA))
