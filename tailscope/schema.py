"""Every table of a trace, declared once: Parquet schema, DuckDB view and reference page come from here.

Times (`*_ns`) are int64 nanoseconds since the Unix epoch, durations (`*_ns` too) int64 nanoseconds,
tokens int64. Unknown is NULL, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import pyarrow as pa

#: Written into every Parquet file. Raised when a reader of the old number would misread the new files;
#: a new column or table does not raise it.
SCHEMA_VERSION = 1

INT = pa.int64()
FLOAT = pa.float64()
TEXT = pa.string()
BOOL = pa.bool_()


@dataclass(frozen=True)
class Column:
    name: str
    type: pa.DataType
    unit: str
    doc: str


@dataclass(frozen=True)
class Table:
    """A table of the trace.

    `sort` orders the rows inside a part. `time` is the column that says when, if there is one.
    `identity` says whether a row that another source already gave, equal in all but `provenance`,
    is stored once.
    """

    name: str
    row: str
    columns: tuple[Column, ...]
    sort: tuple[str, ...]
    time: str | None = None
    identity: bool = True
    provenance: tuple[str, ...] = field(default=("source", "file_row"))

    @cached_property
    def arrow(self) -> pa.Schema:
        return pa.schema([pa.field(column.name, column.type) for column in self.columns])

    def batch(self, columns: dict[str, Any]) -> pa.Table:
        """An Arrow table of exactly this schema from lists, arrays or scalars by column name.

        Missing columns become NULL, a scalar is repeated. Raises KeyError for a name the table
        does not have and pyarrow.ArrowInvalid, which names the column, for a value that does not fit it.
        """
        unknown = columns.keys() - set(self.arrow.names)
        if unknown:
            raise KeyError(f"table {self.name} has no column {', '.join(sorted(unknown))}")
        rows = next((len(v) for v in columns.values() if isinstance(v, (list, pa.Array, pa.ChunkedArray))), 0)
        arrays: list[Any] = []
        for column in self.columns:
            value, kind = columns.get(column.name), cast(Any, column.type)
            try:
                if isinstance(value, (pa.Array, pa.ChunkedArray)):
                    arrays.append(value if value.type == kind else value.cast(kind))
                elif isinstance(value, list):
                    arrays.append(pa.array(value, type=kind))
                elif value is None:
                    arrays.append(pa.nulls(rows, type=kind))
                else:
                    arrays.append(pa.repeat(pa.scalar(value, type=kind), rows))
            except (pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError) as error:
                raise pa.ArrowInvalid(f"{self.name}.{column.name}: {error}") from error
            if len(arrays[-1]) != rows:
                raise pa.ArrowInvalid(f"{self.name}.{column.name}: {len(arrays[-1])} values for {rows} rows")
        return pa.Table.from_arrays(arrays, schema=self.arrow)


def _instance(engine: bool = True) -> tuple[Column, ...]:
    columns = [Column("instance", TEXT, "", "API endpoint the row belongs to.")]
    if engine:
        columns.append(
            Column(
                "engine", INT, "", "Data-parallel rank in the instance; NULL when the source does not say."
            )
        )
    columns.append(Column("source", TEXT, "", "Row of `sources` this row was read from."))
    return tuple(columns)


def _place() -> tuple[Column, ...]:
    """Where a rank runs and what its part of the model is."""
    return (
        Column("host", TEXT, "", "Host name."),
        Column("dp", INT, "", "Data-parallel coordinate."),
        Column("pp", INT, "", "Pipeline-parallel coordinate."),
        Column("tp", INT, "", "Tensor-parallel coordinate."),
        Column("ep", INT, "", "Expert-parallel coordinate."),
    )


REQUESTS = Table(
    "requests",
    "request as one observer saw it",
    (
        *_instance(),
        Column(
            "request_key",
            TEXT,
            "",
            "Identity of this row: a hash of source kind, trace and span id, else of observer, request id, "
            "arrival and index.",
        ),
        Column("request_id", TEXT, "", "Id the observer knew the request by. Not unique: client ids repeat."),
        Column("trace_id", TEXT, "hex", "OpenTelemetry trace id, lower-case hex."),
        Column("span_id", TEXT, "hex", "OpenTelemetry span id, lower-case hex."),
        Column("file_row", INT, "", "Row or record number in the source, from 1."),
        Column("observer", TEXT, "", "Who measured: client, gateway or engine."),
        Column("role", TEXT, "", "What the engine did for it: both, prefill or decode."),
        Column("model", TEXT, "", "Model name."),
        Column("adapter", TEXT, "", "LoRA adapter name."),
        Column("tenant", TEXT, "", "Tenant, from the attribute the configuration names."),
        Column("priority", INT, "", "Scheduling priority; lower is served first."),
        Column(
            "klass", TEXT, "", "Class the source itself names; NULL lets the configuration's classes decide."
        ),
        Column("arrival_ns", INT, "ns", "Arrival at (client: departure to) the observer."),
        Column("intended_ns", INT, "ns", "When the client meant to send it; NULL where it does not say."),
        Column("queued_ns", INT, "ns", "Entered the scheduler's queue."),
        Column("scheduled_ns", INT, "ns", "First scheduled."),
        Column("first_token_ns", INT, "ns", "First token out."),
        Column("last_token_ns", INT, "ns", "Last token out."),
        Column("finished_ns", INT, "ns", "Finished, as the observer saw it."),
        Column("queue_ns", INT, "ns", "Time queued, as the emitter measured it on its own clock."),
        Column("prefill_ns", INT, "ns", "First scheduled to first token, as the emitter measured it."),
        Column("decode_ns", INT, "ns", "First to last token, as the emitter measured it."),
        Column("ttft_ns", INT, "ns", "Time to first token, as the emitter measured it."),
        Column("e2e_ns", INT, "ns", "End-to-end latency, as the emitter measured it."),
        Column("prompt_tokens", INT, "tokens", "Prompt length, cached tokens included."),
        Column("cached_tokens", INT, "tokens", "Prompt tokens found in the prefix cache."),
        Column("output_tokens", INT, "tokens", "Tokens generated."),
        Column("max_tokens", INT, "tokens", "Limit the request asked for."),
        Column("preemptions", INT, "", "How often the scheduler preempted it."),
        Column("kv_transfer_ns", INT, "ns", "Time spent handing over KV cache between instances."),
        Column("status", TEXT, "", "ok, error, timeout, rejected, aborted or unfinished."),
    ),
    sort=("instance", "arrival_ns"),
    time="arrival_ns",
)

TOKENS = Table(
    "tokens",
    "output chunk",
    (
        *_instance(),
        Column("request_key", TEXT, "", "Row of `requests` the chunk belongs to."),
        Column("seq", INT, "", "Position of the chunk in the response, from 0."),
        Column("time_ns", INT, "ns", "When the observer had the chunk."),
        Column("count", INT, "tokens", "Tokens in the chunk."),
    ),
    sort=("instance", "request_key", "seq"),
    time="time_ns",
)

ITERATIONS = Table(
    "iterations",
    "engine step",
    (
        *_instance(),
        Column("iteration", INT, "", "Index the engine gave the step; restarts with the engine."),
        Column(
            "rank", INT, "", "Rank whose profile shows the step; NULL where the engine itself told of it."
        ),
        Column("start_ns", INT, "ns", "Start of the step, where it was measured."),
        Column("end_ns", INT, "ns", "End of the step."),
        Column(
            "elapsed_ns",
            INT,
            "ns",
            "Time the engine reports for the step. vLLM's is the wait for the model's result: a lower bound.",
        ),
        Column(
            "time_error_ns", INT, "ns", "Bound on the error of start_ns and end_ns; NULL means negligible."
        ),
        Column(
            "end_basis", TEXT, "", "How end_ns is known: measured, receipt (by the front end) or derived."
        ),
        Column("prefill_requests", INT, "", "Requests with prompt tokens in the step."),
        Column("prefill_tokens", INT, "tokens", "Prompt tokens computed in the step."),
        Column("decode_requests", INT, "", "Requests decoding in the step."),
        Column("decode_tokens", INT, "tokens", "Tokens scheduled for decoding requests, drafts included."),
        Column("recompute_tokens", INT, "tokens", "Tokens computed again after a preemption."),
        Column("running", INT, "", "Running requests after the step."),
        Column("waiting", INT, "", "Waiting requests after the step, without the deferred ones."),
        Column(
            "deferred", INT, "", "Requests that cannot be scheduled yet for a reason other than capacity."
        ),
        Column("kv_usage", FLOAT, "0-1", "Share of KV cache blocks in use after the step."),
        Column(
            "preempted",
            INT,
            "",
            "Preemptions reported with the step. vLLM reports one with the victim's next output, so late.",
        ),
        Column("is_dummy", BOOL, "", "A step without work, run to keep data-parallel ranks together."),
        Column(
            "blocked",
            TEXT,
            "",
            "What kept the head of the queue out of the step, where the scheduler itself told: budget, slots, kv or other; "
            "NULL where nobody waited or nothing says.",
        ),
    ),
    sort=("instance", "engine", "end_ns"),
    time="end_ns",
)

SCHEDULE = Table(
    "schedule",
    "run of steps in which a request's phase and tokens per step do not change",
    (
        *_instance(),
        Column("iteration_first", INT, "", "First step of the run."),
        Column("iteration_last", INT, "", "Last step of the run."),
        Column("first_end_ns", INT, "ns", "End of the run's first step; tells engines' restarts apart."),
        Column("last_end_ns", INT, "ns", "End of its last step."),
        Column("request_key", TEXT, "", "Row of `requests`; NULL until aligned."),
        Column("request_id", TEXT, "", "Id that spans and stat loggers know the request by. Not unique."),
        Column("stay", INT, "", "Number of the request in its source: tells requests of one id apart."),
        Column("phase", TEXT, "", "prefill, decode or recompute."),
        Column(
            "tokens", INT, "tokens", "Tokens given to the request in each step; 0 for a running one left out."
        ),
        Column("computed_before", INT, "tokens", "Tokens computed before the run's first step."),
        Column(
            "fetch_ns",
            INT,
            "ns",
            "When it had begun to wait, before the run, for KV cache from elsewhere; NULL where it had not.",
        ),
        Column("fetched_ns", INT, "ns", "When the scheduler knew that this cache was there."),
    ),
    sort=("instance", "engine", "iteration_first"),
    time="first_end_ns",
)

PROFILES = Table(
    "profiles",
    "profile of a rank: the time from its first event to its last",
    (
        *_instance(),
        Column("world", TEXT, "", "Torch world the rank belongs to; may span instances."),
        Column("rank", INT, "", "Rank in the world, unique over data parallelism; NULL when nothing says."),
        Column("world_size", INT, "", "Ranks in the world, as the profile says."),
        *_place(),
        Column("backend", TEXT, "", "Backend of the collectives: nccl, gloo and so on."),
        Column("groups", pa.map_(TEXT, pa.list_(INT)), "", "Ranks of each process group, by its name."),
        Column("first_ns", INT, "ns", "Start of the first event."),
        Column("last_ns", INT, "ns", "End of the last event."),
        Column("exported_ns", INT, "ns", "When the file was written, by its name."),
        Column("steps", INT, "", "Annotated steps in it."),
        Column("captures", INT, "", "Graph captures in it; a profile of captures has no steps."),
        Column("events", INT, "", "Rows of `rank_events`."),
    ),
    sort=("world", "rank", "first_ns"),
    time="first_ns",
    identity=False,
)

RANK_EVENTS = Table(
    "rank_events",
    "op on a rank",
    (
        *_instance(),
        Column("world", TEXT, "", "Torch world the rank belongs to; may span instances."),
        Column("rank", INT, "", "Rank in the world, unique over data parallelism."),
        *_place(),
        Column("step", INT, "", "Step on this rank, counted from 0 at the start of the profile."),
        Column("layer", INT, "", "Model layer, as annotated, else counted by attention ops."),
        Column("phase", TEXT, "", "dispatch, expert, combine, router, attention, moe, collective and so on."),
        Column("name", TEXT, "", "Name of the op or kernel."),
        Column("category", TEXT, "", "Profiler category."),
        Column("stream", INT, "", "Stream or thread."),
        Column("start_ns", INT, "ns", "Start."),
        Column("duration_ns", INT, "ns", "Duration."),
        Column("launch_ns", INT, "ns", "When the CPU launched it, for what ran on a GPU."),
        Column(
            "collective",
            TEXT,
            "",
            "Kind of collective, on the one row that stands for a rank's part in it: the kernel, or gloo's transfer.",
        ),
        Column("group", TEXT, "", "Process group."),
        Column("group_size", INT, "", "Ranks in the group."),
        Column("seq", INT, "", "Sequence number of the collective in its group."),
        Column("bytes_in", INT, "bytes", "Bytes given into the collective."),
        Column("bytes_out", INT, "bytes", "Bytes got out of it."),
        Column("in_split", pa.list_(INT), "", "Rows sent to each rank of the group."),
        Column("out_split", pa.list_(INT), "", "Rows received from each rank of the group."),
        Column("tokens", INT, "tokens", "Tokens received in a dispatch or combine."),
        Column("dtype", TEXT, "", "Element type of a collective, as the profiler names it."),
        Column("input_dims", TEXT, "JSON", "Shapes of the inputs."),
    ),
    sort=("world", "rank", "start_ns"),
    time="start_ns",
    identity=False,
)

EXPERT_LOAD = Table(
    "expert_load",
    "rank x layer x expert x step",
    (
        *_instance(),
        Column("world", TEXT, "", "Torch world."),
        Column("step", INT, "", "Forward pass or step of one recording."),
        Column("rank", INT, "", "Rank in the world that counted the tokens; NULL where ranks are summed."),
        Column("layer", INT, "", "Model layer."),
        Column("expert", INT, "", "Logical expert, from 0."),
        Column(
            "slot",
            INT,
            "",
            "Place of a copy of the expert among those of all ranks, in their order, from 0; NULL where copies are summed.",
        ),
        Column(
            "tokens",
            INT,
            "tokens",
            "Tokens routed to the expert. Zeros are left out, but for the last expert's or slot's, which says how many "
            "there are.",
        ),
        Column("recorded_ns", INT, "ns", "When the recording was written; its steps came before."),
    ),
    sort=("world", "rank", "step"),
)

METRICS = Table(
    "metrics",
    "sample of a series",
    (
        *_instance(),
        Column("time_ns", INT, "ns", "Time of the scrape; NULL when the source does not say."),
        Column("series", TEXT, "", "Row of `series`."),
        Column("value", FLOAT, "", "Value of a counter or gauge; sum of a histogram's observations."),
        Column("le", pa.list_(FLOAT), "", "Upper bounds of a histogram's buckets, the last one +Inf."),
        Column("counts", pa.list_(FLOAT), "", "Cumulative counts of the buckets, as scraped."),
    ),
    sort=("instance", "series", "time_ns"),
    time="time_ns",
)

SERIES = Table(
    "series",
    "metric name x labels",
    (
        *_instance(),
        Column("series", TEXT, "", "Identity: a hash of instance-independent name and labels."),
        Column(
            "name",
            TEXT,
            "",
            "Metric name, without _bucket, _sum or _count; older and other exporters' names as vLLM V1 has them.",
        ),
        Column("type", TEXT, "", "counter, gauge, histogram, summary or unknown."),
        Column("labels", pa.map_(TEXT, TEXT), "", "Labels, sorted by name."),
    ),
    sort=("instance", "name"),
)

EVENTS = Table(
    "events",
    "instant that explains",
    (
        *_instance(),
        Column("time_ns", INT, "ns", "When it happened."),
        Column("time_error_ns", INT, "ns", "Bound on the error of time_ns."),
        Column(
            "kind",
            TEXT,
            "",
            "preemption, abort, rejection, kv_transfer, lease_expiry, eplb, jit, graph_fallback, restart, config "
            "or injected.",
        ),
        Column("request_key", TEXT, "", "Row of `requests`; NULL until aligned."),
        Column(
            "request_id", TEXT, "", "Id that spans and stat loggers know the request by, where it is told."
        ),
        Column("rank", INT, "", "Rank it happened on."),
        Column("detail", TEXT, "", "What the source said, in short."),
    ),
    sort=("instance", "time_ns"),
    time="time_ns",
)

SOURCES = Table(
    "sources",
    "ingested source",
    (
        Column("instance", TEXT, "", "Instance given to rows for which the source named none."),
        Column("source", TEXT, "", "Identity: start of the content hash."),
        Column("kind", TEXT, "", "Collector that read it."),
        Column("path", TEXT, "", "Path as given."),
        Column("content_hash", TEXT, "hex", "BLAKE2b over those of each 4 MiB of the uncompressed content."),
        Column("collector", TEXT, "", "Collector that read it."),
        Column("version", TEXT, "", "Version of the collector's mapping."),
        Column("clock", TEXT, "", "Clock of its times: wall, monotonic, perf_counter, profiler or log."),
        Column("offset_ns", INT, "ns", "Added to the source's own times to give Unix time."),
        Column("offset_error_ns", INT, "ns", "Bound on the error of offset_ns."),
        Column("rows", INT, "", "Rows stored."),
        Column("rows_rejected", INT, "", "Records that could not be used."),
        Column("reject_reasons", pa.map_(TEXT, INT), "", "Records rejected, by reason."),
        Column("values_blanked", INT, "", "Values left NULL in rows that were kept."),
        Column("blank_reasons", pa.map_(TEXT, INT), "", "Values left NULL, by reason."),
        Column("rows_skipped", INT, "", "Valid records that are not telemetry of ours."),
        Column("skip_reasons", pa.map_(TEXT, INT), "", "Records skipped, by reason."),
        Column("rows_duplicate", INT, "", "Rows another source had given already, stored once."),
        Column("rows_conflicting", INT, "", "Rows with the key of a stored row but other content; kept."),
        Column("notes", pa.list_(TEXT), "", "What a reader of these rows must know."),
        Column("instances", pa.list_(TEXT), "", "Instances the source itself named."),
        Column("folder", TEXT, "", "Ingested folder; joins sources that name no instance."),
        Column("first_ns", INT, "ns", "Earliest time in its rows."),
        Column("last_ns", INT, "ns", "Latest time in its rows."),
    ),
    sort=("source",),
)

TABLES: tuple[Table, ...] = (
    REQUESTS,
    TOKENS,
    ITERATIONS,
    SCHEDULE,
    PROFILES,
    RANK_EVENTS,
    EXPERT_LOAD,
    METRICS,
    SERIES,
    EVENTS,
    SOURCES,
)
BY_NAME: dict[str, Table] = {table.name: table for table in TABLES}

#: `phase` of `rank_events`.
PHASES = ("dispatch", "expert", "combine", "router", "attention", "moe", "collective", "eplb", "capture")
#: Categories of torch's profiler for what runs on a GPU.
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
OBSERVERS = ("client", "gateway", "engine")
STATUSES = ("ok", "error", "timeout", "rejected", "aborted", "unfinished")
