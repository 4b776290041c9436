"""What scrapes of /metrics show, by vLLM 0.33's names, labels and bucket bounds.

Gauges are as the last message left them: a scrape during a long step sees those of the step before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from prometheus_client.utils import floatToGoString

from tailscope.sim.emit.front_end import BOOT_S, EPOCH_S, FrontEnd, mono, process_id
from tailscope.sim.outcome import Floats, Ints, Outcome, ns

Kind = Literal["counter", "gauge", "histogram"]

LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
PARAMS_N = (1, 2, 5, 10, 20)

HELP = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "num_requests_waiting_by_reason": "Number of waiting requests by reason.",
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
    "prefix_cache_queries_total": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits_total": "Prefix cache hits, in terms of number of cached tokens.",
    "num_preemptions_total": "Cumulative number of preemption from the engine.",
    "prompt_tokens_total": "Number of prefill tokens processed.",
    "prompt_tokens_by_source_total": "Number of prompt tokens by source.",
    "prompt_tokens_cached_total": "Number of cached prompt tokens (local + external).",
    "generation_tokens_total": "Number of generation tokens processed.",
    "request_success_total": "Count of successfully processed requests.",
    "admission_rejections_total": "Number of admission attempts rejected by a queue limit, by reason.",
    "request_prompt_tokens": "Number of prefill tokens processed.",
    "request_generation_tokens": "Number of generation tokens processed.",
    "iteration_tokens_total": "Histogram of number of tokens per engine_step.",
    "request_max_num_generation_tokens": "Histogram of maximum number of requested generation tokens.",
    "request_params_n": "Histogram of the n request parameter.",
    "request_params_max_tokens": "Histogram of the max_tokens request parameter.",
    "time_to_first_token_seconds": "Histogram of time to first token in seconds.",
    "inter_token_latency_seconds": "Histogram of inter-token latency in seconds.",
    "request_time_per_output_token_seconds": "Histogram of time_per_output_token_seconds per request.",
    "e2e_request_latency_seconds": "Histogram of e2e request latency in seconds.",
    "request_queue_time_seconds": "Histogram of time spent in WAITING phase for request.",
    "request_inference_time_seconds": "Histogram of time spent in RUNNING phase for request.",
    "request_prefill_time_seconds": "Histogram of time spent in PREFILL phase for request.",
    "request_decode_time_seconds": "Histogram of time spent in DECODE phase for request.",
    "request_num_preemptions": "Histogram of the number of times a request was preempted.",
    "request_prefill_kv_computed_tokens": "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
    "cache_config_info": "Information of the LLMEngine CacheConfig",
}


@dataclass(frozen=True)
class Series:
    """One series at every scrape: values of a counter or gauge; of a histogram the sums and, a row a scrape, the
    cumulative counts of the buckets up to `le`, the last one infinite."""

    name: str
    kind: Kind
    labels: dict[str, str]
    values: Floats
    le: tuple[float, ...] = ()
    counts: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))


def scrapes_s(outcome: Outcome) -> Floats:
    """When the endpoint is scraped: from the beginning until everything is over."""
    requests = outcome.requests
    times = [
        requests.finished_s,
        requests.left_s,
        requests.sent_s,
        *(e.steps.received_s for e in outcome.engines),
    ]
    last = max((float(np.nanmax(t)) for t in times if len(t) and not np.isnan(t).all()), default=0.0)
    every = outcome.scenario.telemetry.scrape_s
    return np.arange(0.0, last + 2 * every, every)


def series(outcome: Outcome, views: list[FrontEnd]) -> Iterator[Series]:
    """All series of one instance, those of a name together."""
    at = scrapes_s(outcome)
    by_engine = [list(_of_engine(outcome, view, at)) for view in views]
    for alike in zip(*by_engine, strict=True):
        # The series of one name that differ in another label too stand together for each engine.
        yield from alike
    yield from _rejections(outcome, views, at)


def write(outcome: Outcome, views: list[FrontEnd], path: Path) -> None:
    """Every scrape of one instance, each behind a line that says when it was."""
    pages = Pages(outcome, views)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for k, time_s in enumerate(pages.at.tolist()):
            text = pages.page(k)
            size = len(text.encode())
            unix, monotonic = int(ns(time_s)), round(float(mono(time_s)) * 1e9)
            file.write(
                f"#@SCRAPE unix_ns={unix} mono_ns={monotonic} dur_ms=1.000 status=200 bytes={size}\n{text}"
            )


class Pages:
    """What one instance shows at each scrape; `at` is when these are. The world may begin later than at its own time."""

    def __init__(self, outcome: Outcome, views: list[FrontEnd], later_s: float = 0.0) -> None:
        self.at = scrapes_s(outcome)
        found: dict[str, list[Series]] = {}
        for one in series(outcome, views):
            found.setdefault(one.name, []).append(one)
        # No two servers make their counters in the same microsecond.
        since = EPOCH_S + BOOT_S + process_id(views[0].instance) / 1e6 + later_s
        self._parts = [_Text(name, alike, since) for name, alike in found.items()]

    def page(self, k: int) -> str:
        return "".join(part.page(k) for part in self._parts)


class _Text:
    """The lines of one name. From scrape to scrape they differ in their numbers only."""

    def __init__(self, name: str, alike: list[Series], since_s: float) -> None:
        self.alike = alike
        kind = alike[0].kind
        meaning = HELP[name.removeprefix("vllm:")]
        self.head = f"# HELP {name} {meaning}\n# TYPE {name} {kind}\n"
        self.lines = [_lines(one) for one in alike]
        self.tail = ""
        if kind != "gauge":
            created = f"{name.removesuffix('_total') if kind == 'counter' else name}_created"
            self.tail = f"# HELP {created} {meaning}\n# TYPE {created} gauge\n"
            self.tail += "".join(f"{created}{_labels(one.labels)} {_number(since_s)}\n" for one in alike)

    def page(self, k: int) -> str:
        pieces = [self.head]
        for one, lines in zip(self.alike, self.lines, strict=True):
            numbers: list[float] = one.counts[k].tolist() if one.kind == "histogram" else []
            numbers = [*numbers, numbers[-1]] if numbers else numbers
            for line, number in zip(lines, [*numbers, float(one.values[k])], strict=True):
                pieces.append(f"{line} {_number(number)}\n")
        pieces.append(self.tail)
        return "".join(pieces)


def _lines(one: Series) -> list[str]:
    if one.kind != "histogram":
        return [f"{one.name}{_labels(one.labels)}"]
    buckets = [f"{one.name}_bucket{_labels({**one.labels, 'le': _number(le)})}" for le in one.le]
    return [*buckets, *(f"{one.name}_{part}{_labels(one.labels)}" for part in ("count", "sum"))]


def _labels(labels: dict[str, str]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items()))
    return f"{{{inside}}}"


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


# -- what the series of an engine are --------------------------------------------------------------


def _of_engine(outcome: Outcome, view: FrontEnd, at: Floats) -> Iterator[Series]:
    labels = {"model_name": outcome.scenario.model, "engine": str(view.engine)}
    heard = view.steps.received_s[view.reported]
    yield from _gauges(view, labels, at)

    def counter(name: str, amounts: Floats | Ints, times: Floats = heard, **more: str) -> Series:
        return Series(f"vllm:{name}", "counter", {**labels, **more}, _counted(times, amounts, at))

    kept, prompts, hits = view.reported, view.prompts, view.admissions["hits"]
    yield counter("prefix_cache_queries_total", view.admissions["queries"][kept])
    yield counter("prefix_cache_hits_total", hits[kept])
    # Told with the victim's next output, so only where a message has outputs.
    yield counter("num_preemptions_total", np.where(view.messages > 0, view.steps.preempted_told, 0)[kept])
    yield counter("prompt_tokens_total", prompts["total"][kept])
    yield counter("prompt_tokens_by_source_total", prompts["computed"][kept], source="local_compute")
    yield counter("prompt_tokens_by_source_total", prompts["cached"][kept], source="local_cache_hit")
    yield counter("prompt_tokens_by_source_total", prompts["external"][kept], source="external_kv_transfer")
    yield counter("prompt_tokens_cached_total", (prompts["cached"] + prompts["external"])[kept])
    yield counter("generation_tokens_total", view.generated[kept])
    ended = view.steps.received_s[view.last_step[view.told]]
    full = view.outputs[view.told] >= view.stays.max_tokens[view.told]
    for reason in ("stop", "length", "abort", "error", "repetition"):
        which = full if reason == "length" else ~full if reason == "stop" else np.zeros_like(full)
        yield counter("request_success_total", which.astype(np.int64), ended, finished_reason=reason)
    yield from _histograms(outcome, view, labels, at)
    yield Series("vllm:cache_config_info", "gauge", _cache_config(outcome, view), np.ones(len(at)))


def _gauges(view: FrontEnd, labels: dict[str, str], at: Floats) -> Iterator[Series]:
    steps, kept = view.steps, view.reported
    last = np.searchsorted(steps.received_s[kept], at, side="right")

    def gauge(name: str, values: Ints | Floats, **more: str) -> Series:
        seen = np.concatenate(([0.0], values[kept].astype(np.float64)))[last]
        return Series(f"vllm:{name}", "gauge", {**labels, **more}, seen)

    yield gauge("num_requests_running", steps.running)
    yield gauge("num_requests_waiting", steps.waiting + steps.deferred)
    yield gauge("num_requests_waiting_by_reason", steps.waiting, reason="capacity")
    yield gauge("num_requests_waiting_by_reason", steps.deferred, reason="deferred")
    yield gauge("kv_cache_usage_perc", steps.kv_usage)


def _histograms(outcome: Outcome, view: FrontEnd, labels: dict[str, str], at: Floats) -> Iterator[Series]:
    steps, stays, told, spent = view.steps, view.stays, view.told, view.durations
    ended = steps.received_s[view.last_step[told]]
    most = outcome.scenario.engine.max_model_len
    tokens = tuple(
        float(base * 10**power) for power in range(12) for base in (1, 2, 5) if base * 10**power <= most
    )

    def histogram(name: str, bounds: tuple[float, ...], times: Floats, values: Floats | Ints) -> Series:
        le = (*map(float, bounds), np.inf)
        sums, counts = _observed(times, values.astype(np.float64), le, at)
        return Series(f"vllm:{name}", "histogram", labels, sums, le, counts)

    computed = stays.prompt - stays.cached - stays.external
    yield histogram("request_prompt_tokens", tokens, ended, stays.prompt[told])
    yield histogram("request_generation_tokens", tokens, ended, view.outputs[told])
    spoken = np.flatnonzero(view.messages > 0)
    # Not what a step computed: a whole prompt is booked where it ends.
    booked = (view.prompts["computed"] + view.generated)[spoken]
    yield histogram("iteration_tokens_total", ITERATION, steps.received_s[spoken], booked)
    yield histogram("request_max_num_generation_tokens", tokens, ended, view.outputs[told])
    yield histogram("request_params_n", PARAMS_N, ended, np.ones(len(told)))
    yield histogram("request_params_max_tokens", tokens, ended, stays.max_tokens[told])
    yield histogram("time_to_first_token_seconds", TTFT, view.shown_s[view.output_first], view.ttft)
    yield histogram("inter_token_latency_seconds", ITL, view.shown_s[~view.output_first], view.itl)
    yield histogram("request_time_per_output_token_seconds", ITL, ended, spent["tpot"])
    yield histogram("e2e_request_latency_seconds", LATENCY, ended, spent["e2e"])
    yield histogram("request_queue_time_seconds", LATENCY, ended, spent["queued"])
    yield histogram("request_inference_time_seconds", LATENCY, ended, spent["inference"])
    yield histogram("request_prefill_time_seconds", LATENCY, ended, spent["prefill"])
    yield histogram("request_decode_time_seconds", LATENCY, ended, spent["decode"])
    yield histogram("request_num_preemptions", PREEMPTIONS, ended, stays.preemptions[told])
    yield histogram("request_prefill_kv_computed_tokens", tokens, ended, computed[told])


def _rejections(outcome: Outcome, views: list[FrontEnd], at: Floats) -> Iterator[Series]:
    """The API server's, of all its engines: no label says which."""
    engines = {view.index for view in views}
    for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
        times = [
            e.time_s
            for e in outcome.events
            if e.kind == "rejection" and e.detail == reason and e.engine in engines
        ]
        labels = {"model_name": outcome.scenario.model, "reason": reason}
        values = _counted(np.array(times, np.float64), np.ones(len(times)), at)
        yield Series("vllm:admission_rejections_total", "counter", labels, values)


def _counted(times: Floats, amounts: Floats | Ints, at: Floats) -> Floats:
    """What a counter shows at each scrape."""
    order = np.argsort(times, kind="stable")
    total = np.concatenate(([0.0], np.cumsum(amounts[order].astype(np.float64))))
    return total[np.searchsorted(times[order], at, side="right")]


def _observed(times: Floats, values: Floats, le: tuple[float, ...], at: Floats) -> tuple[Floats, Ints]:
    """Sums and cumulative bucket counts at each scrape."""
    order = np.argsort(times, kind="stable")
    times, values = times[order], values[order]
    sums = np.concatenate(([0.0], np.cumsum(values)))[np.searchsorted(times, at, side="right")]
    scrape, bucket = np.searchsorted(at, times), np.searchsorted(np.array(le), values)
    seen = scrape < len(at)
    cells = np.bincount(scrape[seen] * len(le) + bucket[seen], minlength=len(at) * len(le))
    counts = cells.reshape(len(at), len(le)).cumsum(axis=0).cumsum(axis=1)
    return sums, counts


def _cache_config(outcome: Outcome, view: FrontEnd) -> dict[str, str]:
    engine = outcome.scenario.engine
    return {
        "block_size": str(engine.block_size),
        "cache_dtype": "auto",
        "enable_prefix_caching": str(engine.enable_prefix_caching),
        "engine": str(view.engine),
        "gpu_memory_utilization": "0.92",
        "kv_cache_size_tokens": str(engine.kv_blocks * engine.block_size),
        "num_gpu_blocks": str(engine.kv_blocks),
        "num_gpu_blocks_override": str(engine.kv_blocks),
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": "None",
    }
