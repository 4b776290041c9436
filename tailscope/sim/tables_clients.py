"""The rows that files of clients give: requests as their clients saw them, and chunks of their answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.model import request_key
from tailscope.schema import REQUESTS, TOKENS, Table
from tailscope.sim.emit import client
from tailscope.sim.emit.front_end import response_id, whole_ns
from tailscope.sim.on_the_way import delay_s
from tailscope.sim.outcome import ABORTED, OK, REJECTED, TIMEOUT, Ints, Outcome, ns

SECOND = 1_000_000_000
STATUS = {OK: "ok", ABORTED: "aborted", TIMEOUT: "timeout", REJECTED: "rejected"}
Columns = Mapping[str, Any]


def of_log(outcome: Outcome, calls: client.Calls) -> Iterator[tuple[Table, Columns]]:
    """Of a log: a row of requests for each answer that was asked for, and the chunks of it."""
    asked = np.array([len(those) for those in calls.answers])
    size = np.where(calls.accepted, asked, 1)
    base = np.cumsum(size) - size
    call = np.repeat(np.arange(len(calls)), size)
    choice = np.arange(len(call)) - base[call]
    row = base[calls.chunk_call] + calls.chunk_choice
    chunks = np.bincount(row, minlength=len(call))
    order = np.argsort(row, kind="stable")
    row, since = row[order], calls.chunk_us[order] * client.MICROSECOND
    begin = np.cumsum(chunks) - chunks
    output, known = _answered(outcome, calls, call, chunks)
    names = [response_id(outcome.requests.id[those[0]]) for those in calls.answers]
    sent = calls.sent_ns.tolist()
    keys = [
        request_key("client", names[i], sent[i], c)
        for i, c in zip(call.tolist(), choice.tolist(), strict=True)
    ]
    none = chunks == 0
    ends = np.append(since, 0)
    first, last = ends[np.minimum(begin, len(since))], ends[begin + chunks - 1]
    yield (
        REQUESTS,
        {
            **_call_columns(outcome, calls, call),
            "request_key": keys,
            "request_id": [names[i] for i in call.tolist()],
            "first_token_ns": pa.array(calls.sent_ns[call] + first, mask=none),
            "last_token_ns": pa.array(calls.sent_ns[call] + last, mask=none),
            "ttft_ns": pa.array(first, mask=none),
            "output_tokens": output,
        },
    )
    yield (
        TOKENS,
        {
            "request_key": pa.array(keys, pa.string()).take(row),
            "seq": np.arange(len(row)) - begin[row],
            "time_ns": calls.sent_ns[call[row]] + since,
            "count": pa.array(np.ones(len(row), np.int64), mask=~known[row]),
        },
    )


def of_gateway(outcome: Outcome, chosen: NDArray[np.bool_]) -> Iterator[tuple[Table, Columns]]:
    """The requests that are `chosen` as the gateway saw them, on the engines' clock. The network lies before it."""
    q, scenario = outcome.requests, outcome.scenario
    those = np.flatnonzero(chosen)
    late = np.array([delay_s(scenario.faults, q.id[i], float(q.sent_s[i])) for i in those])
    arrival = ns(q.sent_s[those] + scenario.telemetry.network_s + late)
    ok, shown = q.status[those] == OK, np.isfinite(q.first_shown_s[those])
    end = np.where(ok, q.finished_s[those], q.left_s[those])
    ended = np.isfinite(end)
    finished = np.maximum(ns(np.where(ended, end, 0.0)), arrival)
    first = np.maximum(ns(np.where(shown, q.first_shown_s[those], 0.0)), arrival)
    names = [response_id(q.id[i]) for i in those]
    yield (
        REQUESTS,
        {
            "request_key": [
                request_key("gateway", *row)
                for row in zip(names, arrival.tolist(), those.tolist(), strict=True)
            ],
            "request_id": names,
            "observer": "gateway",
            "arrival_ns": arrival,
            "first_token_ns": pa.array(first, mask=~shown),
            "finished_ns": pa.array(finished, mask=~ended),
            "ttft_ns": pa.array(first - arrival, mask=~shown),
            "e2e_ns": pa.array(finished - arrival, mask=~ended),
            "status": [STATUS.get(status, "unfinished") for status in q.status[those].tolist()],
        },
    )


def _call_columns(outcome: Outcome, calls: client.Calls, call: Ints) -> Columns:
    """Columns of requests that the answers of a call share, for rows of `call`."""
    requests = outcome.requests
    first = np.array([those[0] for those in calls.answers], np.int64)[call]
    ok, unknown = calls.status[call] == OK, calls.end_us[call] < 0
    e2e = calls.end_us[call] * client.MICROSECOND
    return {
        "file_row": call + 1,
        "observer": "client",
        "arrival_ns": calls.sent_ns[call],
        "finished_ns": pa.array(calls.sent_ns[call] + e2e, mask=unknown),
        "e2e_ns": pa.array(e2e, mask=unknown),
        "prompt_tokens": requests.prompt[first],
        "cached_tokens": pa.array(requests.cached[first], mask=~ok),
        "max_tokens": requests.planned[first],
        "status": [STATUS.get(status, "unfinished") for status in calls.status[call].tolist()],
    }


def blanked(outcome: Outcome, calls: client.Calls) -> dict[str, int]:
    """Chunks whose tokens a reader of the log cannot know."""
    unknown = ~_told(outcome, calls)
    count = int(np.bincount(calls.chunk_call, minlength=len(calls))[unknown].sum())
    return {"tokens per choice cannot be told": count} if count else {}


def _told(outcome: Outcome, calls: client.Calls) -> NDArray[np.bool_]:
    """Of each call: whether it is told which of its answers had which tokens; of several only the usage at the end
    tells."""
    output = np.array([int(outcome.requests.output[those].sum()) for those in calls.answers])
    alone = np.array([len(those) == 1 for those in calls.answers]) | ~calls.accepted
    chunks = np.bincount(calls.chunk_call, minlength=len(calls))
    return np.asarray(alone | ((calls.status == OK) & (chunks == output)))


def _answered(
    outcome: Outcome, calls: client.Calls, call: Ints, chunks: Ints
) -> tuple[pa.Array[Any], NDArray[np.bool_]]:
    """Output tokens of each row, and whether the tokens of its chunks are known."""
    output = np.array([int(outcome.requests.output[those].sum()) for those in calls.answers])
    known = _told(outcome, calls)[call]
    by_usage = (calls.status == OK) & (np.bincount(call, minlength=len(calls)) == 1)
    tokens = np.where(by_usage[call], output[call], chunks)
    return pa.array(tokens, mask=~known & (chunks > 0)), known


def bench_offset(result: client.Bench) -> int:
    """What makes Unix ns of the run's clock: its last answer had come when the date was written."""
    columns = result.start.tolist(), result.ttft.tolist(), result.gaps, result.latency.tolist()
    last: float = max(
        start + max(ttft + sum(gaps), spent) for start, ttft, gaps, spent in zip(*columns, strict=True)
    )
    written = datetime.strptime(result.date, "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
    return int(written.timestamp()) * SECOND - round(float(last) * SECOND)


def of_bench(
    outcome: Outcome, calls: client.Calls, result: client.Bench, offset: int
) -> Iterator[tuple[Table, Columns]]:
    ok, start, ttft = calls.status == OK, result.start.tolist(), result.ttft.tolist()
    arrival = [offset + round(s * SECOND) for s in start]
    keys = [request_key("client", result.date, repr(s), i) for i, s in enumerate(start)]
    chunks = np.diff(calls.first_chunk)
    times: list[int] = []
    for at, first, gaps in zip(arrival, ttft, result.gaps, strict=True):
        if first:
            # Rounded once each, so that rounding does not add up.
            times += [at + round(t * SECOND) for t in accumulate(gaps, initial=first)]
    yield REQUESTS, _bench_columns(outcome, calls, result, arrival, keys)
    row = np.repeat(np.arange(len(calls)), np.where(np.array(ttft) > 0, chunks, 0))
    output = np.array([int(outcome.requests.output[those].sum()) for those in calls.answers])
    known = (np.where(ok, output, 0) == chunks)[row]
    yield (
        TOKENS,
        {
            "request_key": pa.array(keys, pa.string()).take(row),
            "seq": np.arange(len(row)) - np.searchsorted(row, row),
            "time_ns": times,
            "count": pa.array(np.ones(len(row), np.int64), mask=~known),
        },
    )


def _bench_columns(
    outcome: Outcome, calls: client.Calls, result: client.Bench, arrival: list[int], keys: list[str]
) -> Columns:
    sent, requests = np.array(arrival), outcome.requests
    ok, some = calls.status == OK, result.ttft > 0
    ttft, e2e = whole_ns(result.ttft), whole_ns(result.latency)
    streamed = [whole_ns(sum([t, *gaps])) for t, gaps in zip(result.ttft.tolist(), result.gaps, strict=True)]
    output = np.array([int(requests.output[those].sum()) for those in calls.answers])
    failed = {TIMEOUT: "timeout", OK: "ok"}
    return {
        "request_key": keys,
        "file_row": np.arange(1, len(calls) + 1),
        "observer": "client",
        "model": outcome.scenario.model,
        "arrival_ns": sent,
        "first_token_ns": pa.array(sent + ttft, mask=~some),
        "last_token_ns": pa.array(sent + np.array(streamed, np.int64), mask=~some),
        "finished_ns": pa.array(sent + e2e, mask=~ok),
        "ttft_ns": pa.array(ttft, mask=~some),
        "e2e_ns": pa.array(e2e, mask=~ok),
        "prompt_tokens": [int(requests.prompt[those[0]]) for those in calls.answers],
        # A failed request has 0 where it measured nothing.
        "output_tokens": pa.array(np.where(ok, output, 0), mask=~ok & some),
        "status": [failed.get(status, "error") for status in calls.status.tolist()],
    }
