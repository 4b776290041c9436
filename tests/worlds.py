"""Small worlds for tests: tables from rows, and a vLLM-like engine whose every nanosecond is known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tailscope.align import Scope, align
from tailscope.config import Config
from tailscope.ledger.bills import Ledger
from tailscope.ledger.contrast import write_ledger
from tailscope.ledger.steps import Limits
from tailscope.model import ClassRow
from tailscope.ranks.compared import write_ranks
from tailscope.ranks.experts import write_expert_loads
from tailscope.schema import BY_NAME
from tailscope.store import Trace

#: A time that int64 holds and float64 does not, so that a detour through floats shows.
START_NS = 1_795_000_000_000_000_001
MS, S = 1_000_000, 1_000_000_000

Row = dict[str, Any]


def write(folder: Path, tables: Mapping[str, Sequence[Row] | pa.Table], parts: int = 1) -> Path:
    """Write a trace by hand, each table as `parts` files with every parts-th row."""
    for name, rows in tables.items():
        schema = BY_NAME[name].arrow
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows), schema=schema)
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        for part in range(parts):
            pq.write_table(table.take(np.arange(part, len(table), parts)), place / f"rows-{part}.parquet")
    return folder


@contextmanager
def aligned(
    folder: Path,
    tables: Mapping[str, Sequence[Row] | pa.Table],
    config: Config | None = None,
    scope: Scope | None = None,
    parts: int = 1,
) -> Iterator[Trace]:
    with Trace(write(folder, tables, parts), threads=1) as trace:
        align(trace, config or Config(), scope or Scope())
        write_ranks(trace, scope or Scope())
        write_expert_loads(trace, scope or Scope())
        yield trace


@dataclass(frozen=True)
class Billed:
    trace: Trace
    ledger: Ledger
    classes: list[ClassRow]

    def of(self, request_id: str) -> dict[tuple[str, str, str | None], int]:
        """(place, component, culprit) -> ns of one request's bill."""
        rows = self.trace.rows(
            "SELECT l.* FROM bill_lines l JOIN joined j ON j.rid = l.id WHERE j.request_id = $id",
            {"id": request_id},
        )
        return {(row["place"], row["component"], row["culprit"]): row["ns"] for row in rows}

    def total(self, component: str, request_id: str | None = None) -> int:
        """ns of a component, of one request or of all."""
        rows = self.trace.rows(
            "SELECT coalesce(sum(l.ns), 0)::BIGINT AS ns FROM bill_lines l JOIN joined j ON j.rid = l.id "
            "WHERE l.component = $component AND ($id IS NULL OR j.request_id = $id)",
            {"component": component, "id": request_id},
        )
        return int(rows[0]["ns"])

    def row(self, klass: str, metric: str) -> ClassRow:
        return next(row for row in self.classes if (row.klass, row.metric) == (klass, metric))


@contextmanager
def billed(
    folder: Path,
    tables: Mapping[str, Sequence[Row] | pa.Table],
    config: Config | None = None,
    parts: int = 1,
    budgets: dict[str, float] | None = None,
) -> Iterator[Billed]:
    """Aligned, billed and contrasted."""
    config = config or Config()
    with aligned(folder, tables, config, parts=parts) as trace:
        limits = {name: Limits(tokens) for name, tokens in (budgets or {}).items()}
        yield Billed(trace, *write_ledger(trace, limits, config.slos, None))


# -- rows ----------------------------------------------------------------------------------------


def span(request_id: str | None, arrival_ns: int, e2e_ns: int, **columns: Any) -> Row:
    """What an API server tells of a request."""
    ttft_ns = columns.setdefault("ttft_ns", e2e_ns // 2)
    return {
        "instance": "a",
        "request_key": f"span {request_id} {arrival_ns}",
        "request_id": request_id,
        "observer": "engine",
        "arrival_ns": START_NS + arrival_ns,
        "finished_ns": START_NS + arrival_ns + e2e_ns,
        "e2e_ns": e2e_ns,
        "queue_ns": 0,
        "prefill_ns": ttft_ns,
        "decode_ns": None if ttft_ns is None else e2e_ns - ttft_ns,
        "prompt_tokens": 100,
        "output_tokens": 10,
        "status": "ok",
        **columns,
    }


def core(request_id: str | None, arrival_ns: int, e2e_ns: int, **columns: Any) -> Row:
    """What a stat logger tells of it: no TTFT, but preemptions and cached tokens."""
    columns = {"engine": 0, "preemptions": 0, "cached_tokens": 0, "decode_ns": e2e_ns // 2, **columns}
    columns.setdefault("request_key", f"core {request_id} {arrival_ns}")
    return span(request_id, arrival_ns, e2e_ns, ttft_ns=None, prefill_ns=e2e_ns // 4, **columns)


def client(request_id: str | None, arrival_ns: int, e2e_ns: int, **columns: Any) -> Row:
    """What a client saw, with an observer's delay of 1 ms on either side of what the engine did."""
    columns.setdefault("request_key", f"client {request_id} {arrival_ns}")
    return {
        **span(request_id, arrival_ns, e2e_ns, **columns),
        "observer": "client",
        "queue_ns": None,
        "prefill_ns": None,
        "decode_ns": None,
    }


def step(end_ns: int, **columns: Any) -> Row:
    return {
        "instance": "a",
        "engine": 0,
        "end_ns": START_NS + end_ns,
        "prefill_requests": 0,
        "prefill_tokens": 0,
        "decode_requests": 1,
        "decode_tokens": 1,
        "running": 1,
        "waiting": 0,
        "deferred": 0,
        "kv_usage": 0.1,
        **columns,
    }


# -- an engine ------------------------------------------------------------------------------------


@dataclass
class Request:
    """One to be served. `aborted`: its client leaves after the prefill, so that no row tells of it."""

    id: str
    arrival_ns: int
    prompt: int
    output: int
    cached: int = 0
    aborted: bool = False
    #: Left out of the batch after so many output tokens, for so many steps, as by a preemption.
    preempted_after: int | None = None
    preempted_steps: int = 0

    computed: int = field(default=0, init=False)
    tokens_ns: list[int] = field(default_factory=list, init=False)
    queued_ns: int = field(default=0, init=False)
    scheduled_ns: int | None = field(default=None, init=False)
    out_for: int = field(default=0, init=False)


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, linear in what the model of the ledger knows."""

    step: float = 0.010
    decode: float = 0.0001
    prefill: float = 0.0002

    def base(self, decodes: int) -> float:
        return self.step + self.decode * decodes


@dataclass
class Served:
    """What became of the requests. The sums, in seconds by request, are known from who was in which step."""

    tables: dict[str, list[Row]]
    requests: list[Request]
    others_in_decode: dict[str, float]
    others_before: dict[str, float]
    preempted: dict[str, float]


def serve(
    requests: Iterable[Request],
    cost: Cost | None = None,
    *,
    budget: int = 2048,
    slots: int = 1_000,
    kv_full: tuple[int, int] = (0, 0),
    pause: tuple[int, float] | None = None,
) -> Served:
    """Serve first come, first served with chunked prefill, and tell of it as vLLM does.

    A request is read when the running step ends, admitted while there is budget, and decodes a token a step.
    Between the two instants `kv_full` nobody is admitted and the cache is full. `pause`: the first step that
    ends after this instant takes so many seconds more.
    """
    cost = cost or Cost()
    everyone = [replace(r) for r in sorted(requests, key=lambda r: (r.arrival_ns, r.id))]
    served = Served({}, everyone, defaultdict(float), defaultdict(float), defaultdict(float))
    coming, waiting, running, steps = list(everyone), list[Request](), list[Request](), list[Row]()
    now = 0
    while coming or waiting or running:
        if not running and not waiting:
            now = max(now, coming[0].arrival_ns)
        while coming and coming[0].arrival_ns <= now:
            coming[0].queued_ns = now
            waiting.append(coming.pop(0))
        full = kv_full[0] <= now < kv_full[1]
        out = [r for r in running if r.out_for > 0]
        decoding = [r for r in running if r.tokens_ns and not r.out_for]
        left = budget - len(decoding)
        prefills: list[tuple[Request, int]] = []
        for request in [r for r in running if not r.tokens_ns] + list(waiting):
            if left <= 0 or (request in waiting and (full or len(running) >= slots)):
                break
            if request in waiting:
                waiting.remove(request)
                running.append(request)
                request.scheduled_ns, request.computed = now, request.cached
            chunk = min(left, request.prompt - request.computed)
            prefills.append((request, chunk))
            left -= chunk
        tokens = sum(chunk for _, chunk in prefills)
        end = now + round((cost.base(len(decoding)) + cost.prefill * tokens) * S)
        if pause and end > pause[0]:
            end, pause = end + round(pause[1] * S), None
        for request in decoding:
            served.others_in_decode[request.id] += cost.prefill * tokens
        for request in out:
            served.preempted[request.id] += (end - now) / S
            request.out_for -= 1
        for request in coming:
            if request.arrival_ns < end:
                rest = (end - request.arrival_ns) / (end - now)
                served.others_before[request.id] += rest * cost.prefill * tokens
        for request, chunk in prefills:
            request.computed += chunk
            if request.computed >= request.prompt:
                request.tokens_ns.append(end)
        for request in decoding:
            request.tokens_ns.append(end)
            if len(request.tokens_ns) == request.preempted_after:
                request.out_for = request.preempted_steps
        running = [r for r in running if not (len(r.tokens_ns) >= r.output or (r.aborted and r.tokens_ns))]
        steps.append(
            step(
                end,
                elapsed_ns=end - now,
                iteration=len(steps),
                prefill_requests=len(prefills),
                prefill_tokens=tokens,
                decode_requests=len(decoding),
                decode_tokens=len(decoding),
                running=len(running),
                waiting=len(waiting),
                kv_usage=0.97 if full else min(0.85, sum(r.prompt for r in running) / 100_000),
            )
        )
        now = end
    served.tables.update(requests=[_told(r) for r in everyone if not r.aborted], iterations=steps)
    return served


def _told(request: Request) -> Row:
    first, last = request.tokens_ns[0], request.tokens_ns[-1]
    assert request.scheduled_ns is not None
    return span(
        request.id,
        request.arrival_ns,
        last - request.arrival_ns,
        ttft_ns=first - request.arrival_ns,
        queue_ns=request.scheduled_ns - request.queued_ns,
        prefill_ns=first - request.scheduled_ns,
        decode_ns=last - first,
        prompt_tokens=request.prompt,
        cached_tokens=request.cached,
        output_tokens=request.output,
        preemptions=int(request.preempted_after is not None),
        engine=0,
    )


def clients(requests: Iterable[Request], delay_ns: int = 2 * MS) -> dict[str, list[Row]]:
    """Rows of `requests` and of `tokens` of a client that sees everything `delay_ns` later."""
    rows, tokens = [], []
    for r in requests:
        if r.aborted:
            continue
        sent, first, last = r.arrival_ns - delay_ns, r.tokens_ns[0] + delay_ns, r.tokens_ns[-1] + delay_ns
        row = client(
            r.id, sent, last - sent, ttft_ns=first - sent, prompt_tokens=r.prompt, output_tokens=r.output
        )
        rows.append(row)
        tokens += chunks(row, [t + delay_ns for t in r.tokens_ns])
    return {"requests": rows, "tokens": tokens}


def chunks(row: Row, times_ns: Iterable[int], count: int = 1) -> list[Row]:
    """Rows of `tokens` for a row of `requests`, at times after START_NS."""
    return [
        {
            "instance": "a",
            "request_key": row["request_key"],
            "seq": i,
            "time_ns": START_NS + t,
            "count": count,
        }
        for i, t in enumerate(times_ns)
    ]
