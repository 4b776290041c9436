"""Request spans as vLLM's API server exports them: OTLP protobuf, each request behind its length.

A span is made when a request finishes, so that none tells of who left, timed out or was refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from tailscope.sim.emit.front_end import FrontEnd, digest, engine_id, process_id, wall
from tailscope.sim.outcome import Ints, Outcome, ns

#: Of the BatchSpanProcessor: seconds between exports, spans of one.
DELAY_S, MOST = 5.0, 512
SERVICE = "vllm"


#: vLLM's spans say neither; a gateway of the fleet's own adds them, under names that `[attributes]` gives to `ingest`.
TENANT, PRIORITY = "sim.tenant", "sim.priority"


def order(view: FrontEnd) -> Ints:
    """Places in `view.told` in the order in which their spans end."""
    return np.argsort(view.stays.finished_s[view.told], kind="stable")


def start_ns(view: FrontEnd) -> Ints:
    """Span starts of `view.told`: vLLM multiplies the float that is the arrival time."""
    return (wall(view.stays.arrival_s[view.told]) * 1e9).astype(np.int64)


def ids(outcome: Outcome, view: FrontEnd, request: int) -> tuple[bytes, bytes]:
    """Trace and span id. Children of one request (n > 1) come from one call, and differ by their place only."""
    name = outcome.scenario.name, outcome.scenario.seed, view.instance, request
    return digest("trace", *name, size=16), digest("span", *name, size=8)


def merged(views: list[FrontEnd]) -> list[tuple[FrontEnd, int]]:
    """All spans of an instance's engines in the order in which they end, as (front end, place in its `told`)."""
    ends = [
        (view.stays.finished_s[view.told[i]], v, i)
        for v, view in enumerate(views)
        for i in order(view).tolist()
    ]
    return [(views[v], i) for _, v, i in sorted(ends)]


def write(outcome: Outcome, views: list[FrontEnd], path: Path) -> None:
    """The spans of one instance."""
    resource = resource_of(views[0])
    with path.open("wb") as file:
        for spans in _batches(outcome, views):
            message = export_of(resource, spans).SerializeToString(deterministic=True)
            file.write(len(message).to_bytes(4, "big") + message)


def export_of(resource: Resource, spans: list[Span]) -> ExportTraceServiceRequest:
    scope = ScopeSpans(spans=spans)
    scope.scope.name = "vllm.tracing.otel"
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(resource=resource, scope_spans=[scope])])


def _batches(outcome: Outcome, views: list[FrontEnd]) -> Iterator[list[Span]]:
    batch: list[Span] = []
    due = 0
    starts = {view.index: start_ns(view) for view in views}
    for view, i in merged(views):
        end_s = float(view.stays.finished_s[view.told[i]])
        if batch and (end_s // DELAY_S > due or len(batch) == MOST):
            yield batch
            batch = []
        due = int(end_s // DELAY_S)
        batch.append(span_of(outcome, view, i, int(starts[view.index][i])))
    if batch:
        yield batch


def span_of(outcome: Outcome, view: FrontEnd, i: int, start: int) -> Span:
    """Of a place in `view.told` and its start."""
    stay = int(view.told[i])
    request = int(view.stays.request[stay])
    spent = {name: float(values[i]) for name, values in view.durations.items()}
    trace_id, span_id = ids(outcome, view, request)
    span = Span(
        trace_id=trace_id,
        span_id=span_id,
        name="llm_request",
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=start,
        # The end is read from the clock after the start was rounded to a double.
        end_time_unix_nano=max(start, int(ns(view.stays.finished_s[stay]))),
        flags=256,
    )
    span.status.SetInParent()
    requests = outcome.requests
    given: dict[str, float | int | str] = {
        "gen_ai.latency.time_to_first_token": spent["ttft"],
        "gen_ai.latency.e2e": spent["e2e"],
        "gen_ai.latency.time_in_queue": spent["queued"],
        "gen_ai.usage.prompt_tokens": int(view.stays.prompt[stay]),
        "gen_ai.usage.completion_tokens": int(view.outputs[stay]),
        "gen_ai.latency.time_in_model_prefill": spent["prefill"],
        "gen_ai.latency.time_in_model_decode": spent["decode"],
        "gen_ai.latency.time_in_model_inference": spent["inference"],
        "gen_ai.request.id": engine_id(requests.id[request]),
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": int(view.stays.max_tokens[stay]),
        "gen_ai.request.n": outcome.scenario.loads[int(requests.load[request])].n,
    }
    load = outcome.scenario.loads[int(requests.load[request])]
    if load.tenant is not None:
        given[TENANT] = load.tenant
    if load.priority:
        given[PRIORITY] = load.priority
    span.attributes.extend(KeyValue(key=key, value=_value(value)) for key, value in given.items())
    return span


def resource_of(view: FrontEnd, instance: str | None = None) -> Resource:
    """Who says it; `instance` is another name than its own."""
    given = {
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.version": "1.45.2",
        "service.instance.id": instance or view.instance,
        "service.name": SERVICE,
        "vllm.instrumenting_module_name": "vllm.llm_engine",
        "vllm.process_id": str(process_id(view.instance)),
    }
    return Resource(attributes=[KeyValue(key=key, value=_value(value)) for key, value in given.items()])


def _value(value: float | int | str) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    return AnyValue(double_value=value) if isinstance(value, float) else AnyValue(int_value=value)
