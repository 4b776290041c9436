"""What clients wrote of their requests: a JSON line each with the times of its chunks, or `vllm bench serve`'s result.

The client's clock is its own; it alone knows of requests that were refused, given up or aborted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tailscope.sim.emit.front_end import FrontEnd, client_id, mono, response_id
from tailscope.sim.outcome import (
    ABORTED,
    OK,
    REJECTED,
    START_NS,
    TIMEOUT,
    UNFINISHED,
    Floats,
    Ints,
    Outcome,
    ns,
)

MICROSECOND = 1_000


@dataclass(frozen=True)
class Calls:
    """Calls of an instance's clients, an array element each; n answers of one call are one element.

    `answers`: requests of each call, in the order of their choices. `chunk_*`: every chunk the clients had, by call, then
    time: since its call was sent, µs. `end_us`: when the client was done or left; -1: it never was. `accepted`: the
    server took it on while the client was there.
    """

    sent_ns: Ints
    sent_s: Floats
    answers: list[list[int]]
    status: Ints
    end_us: Ints
    accepted: NDArray[np.bool_]
    chunk_call: Ints
    chunk_choice: Ints
    chunk_us: Ints

    def __len__(self) -> int:
        return len(self.answers)

    @cached_property
    def first_chunk(self) -> Ints:
        """Where each call's chunks begin; one element more than calls."""
        return np.searchsorted(self.chunk_call, np.arange(len(self) + 1))


def instances_of_calls(outcome: Outcome) -> Ints:
    """Of each request: the instance among `Outcome.instances` whose clients sent it.

    What no engine saw was refused by an API server, which its event tells, or waited before all of them; of that the
    instances get one each in turn.
    """
    requests, names = outcome.requests, outcome.instances()
    number = np.array([names.index(engine.instance) for engine in outcome.engines], np.int64)
    engine = np.where(requests.engine >= 0, requests.engine, requests.prefill_engine)
    refused = {e.time_s: e.engine for e in outcome.events if e.kind == "rejection" and e.engine is not None}
    for i in np.flatnonzero((engine < 0) & (requests.status == REJECTED)).tolist():
        engine[i] = refused.get(float(requests.arrival_s[i]), -1)
    turn = np.arange(len(requests)) % len(names)
    found = np.where(engine >= 0, number[np.maximum(engine, 0)], turn)
    several = np.array([load.n > 1 for load in outcome.scenario.loads])[requests.load]
    first: dict[str, int] = {}
    # A call is one line, wherever its answers come from.
    for i in np.flatnonzero(several).tolist():
        found[i] = first.setdefault(requests.id[i], int(found[i]))
    return found


def calls(outcome: Outcome, views: list[FrontEnd], instance: int) -> Calls:
    """Calls of the clients of the `instance`-th of `Outcome.instances`; `views` are all front ends of the world."""
    requests, network = outcome.requests, outcome.scenario.telemetry.network_s
    members = np.flatnonzero(instances_of_calls(outcome) == instance)
    number: dict[str, int] = {}
    answers: list[list[int]] = []
    for request in members.tolist():
        name = requests.id[request]
        if outcome.scenario.loads[int(requests.load[request])].n == 1 or name not in number:
            number[name] = len(answers)
            answers.append([])
        answers[number[name]].append(request)
    call, choice = np.full(len(requests), -1), np.zeros(len(requests), np.int64)
    for i, those in enumerate(answers):
        call[those], choice[those] = i, range(len(those))
    first = np.array([those[0] for those in answers], np.int64)
    sent_s = requests.sent_s[first]
    # The whole call goes on until the last of its answers.
    end_s, status = np.full(len(answers), -np.inf), np.full(len(answers), OK)
    np.maximum.at(end_s, call[members], np.nan_to_num(_ends(outcome)[members], nan=np.inf))
    np.maximum.at(status, call[members], requests.status[members])
    given, shown = _outputs(views)
    kept = call[given] >= 0
    given, time = given[kept], shown[kept] + network
    since = np.floor((time - sent_s[call[given]]) * 1e6).astype(np.int64)
    order = np.lexsort((choice[given], since, call[given]))
    unknown = np.isinf(end_s)
    end_us = np.floor(np.where(unknown, 0, end_s - sent_s) * 1e6).astype(np.int64)
    sent_ns = ns(sent_s + outcome.scenario.telemetry.client_offset_s)
    given = given[order]
    accepted = (requests.arrival_s[first] < end_s) & (status != REJECTED)
    found = Calls(
        sent_ns=sent_ns,
        sent_s=sent_s,
        answers=answers,
        status=status,
        end_us=np.where(unknown, -1, end_us),
        accepted=accepted,
        chunk_call=call[given],
        chunk_choice=choice[given],
        chunk_us=since[order],
    )
    return _while_there(found)


def _ends(outcome: Outcome) -> Floats:
    """When each request was over for its client, by the one true clock."""
    requests, network = outcome.requests, outcome.scenario.telemetry.network_s
    refused = np.where(np.isnan(requests.arrival_s), requests.sent_s, requests.arrival_s) + network
    # Who aborts has just had a chunk, which came over the network.
    left = requests.left_s + np.where(requests.status == ABORTED, network, 0.0)
    return np.where(
        requests.status == OK,
        requests.finished_s + network,
        np.where(requests.status == REJECTED, refused, left),
    )


def _outputs(views: list[FrontEnd]) -> tuple[Ints, Floats]:
    """(request, time the front end had it) of each token that is on its way to a client."""
    requests: list[Ints] = []
    times: list[Floats] = []
    for view in views:
        # What a prefill instance gives goes to the router.
        if view.role != "prefill":
            requests.append(view.stays.request[view.output_stay])
            times.append(view.shown_s)
    if not requests:
        return np.zeros(0, np.int64), np.zeros(0)
    return np.concatenate(requests), np.concatenate(times)


def _while_there(found: Calls) -> Calls:
    """Without the chunks that came when the client was gone already."""
    end = found.end_us[found.chunk_call]
    kept = (end < 0) | (found.chunk_us <= end)
    call = found.chunk_call[kept]
    answered = np.bincount(call, minlength=len(found)) > 0
    return replace(
        found,
        accepted=found.accepted | answered,
        chunk_call=call,
        chunk_choice=found.chunk_choice[kept],
        chunk_us=found.chunk_us[kept],
    )


# -- a line a request --------------------------------------------------------------------------------


def write_log(outcome: Outcome, found: Calls, path: Path) -> None:
    with path.open("wb") as file:
        for i in range(len(found)):
            file.write(orjson.dumps(_line(outcome, found, i)) + b"\n")


def _line(outcome: Outcome, found: Calls, i: int) -> dict[str, Any]:
    requests, those = outcome.requests, found.answers[i]
    request, status, end = those[0], int(found.status[i]), int(found.end_us[i])
    name, prompt, limit = requests.id[request], int(requests.prompt[request]), int(requests.planned[request])
    line: dict[str, Any] = {
        "client_request_id": client_id(name),
        "x_request_id_sent": True,
        "path": "/v1/completions",
        "prompt_tokens_sent": prompt,
        "max_tokens": limit,
        "n": len(those),
        "traceparent": None,
        "send_unix_ns": int(found.sent_ns[i]),
        "send_mono_ns": round(float(mono(found.sent_s[i])) * 1e9),
    }
    chunks = list(_chunks(found, i))
    if status == REJECTED:
        line |= {"status": 503, "resp_x_request_id": client_id(name), "error_body": '{"error":{"code":503}}'}
    elif found.accepted[i]:
        line |= {"status": 200, "resp_x_request_id": client_id(name)}
    if chunks:
        line["response_id"] = response_id(name)
    if status == OK:
        output = int(requests.output[those].sum())
        line["finish_reason"] = "length" if output >= limit * len(those) else "stop"
        line["usage"] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": int(requests.cached[request])},
        }
        line["done_us"] = end
    elif status == ABORTED:
        line["client_aborted_us"] = end
    elif status == TIMEOUT:
        line["exception"] = "TimeoutError()"
    return line | ({"end_us": end} if end >= 0 else {}) | {"chunks_us_ntok": chunks}


def _chunks(found: Calls, i: int) -> Iterator[list[int]]:
    """A client takes differences of the tokens so far, which the server counts by choice."""
    begin, end = found.first_chunk[i : i + 2].tolist()
    before, so_far = 0, [0] * len(found.answers[i])
    for us, choice in zip(
        found.chunk_us[begin:end].tolist(), found.chunk_choice[begin:end].tolist(), strict=True
    ):
        so_far[choice] += 1
        yield [us, so_far[choice] - before, choice] if choice else [us, so_far[choice] - before]
        before = so_far[choice]


# -- vllm bench serve --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """The arrays of a result by call, seconds; 0 where nothing was measured. `gaps`: between chunks, by call."""

    date: str
    start: Floats
    ttft: Floats
    latency: Floats
    gaps: list[list[float]]


def bench(outcome: Outcome, found: Calls) -> Bench:
    start = mono(found.sent_s)
    first, last = found.first_chunk[:-1], found.first_chunk[1:]
    us = np.append(found.chunk_us, 0)
    ttft = np.where(last > first, us[np.minimum(first, len(us) - 1)] / 1e6, 0.0)
    latency = np.where(found.status == OK, found.end_us / 1e6, 0.0)
    gaps = [
        (np.diff(found.chunk_us[a:b]) / 1e6).tolist()
        for a, b in zip(first.tolist(), last.tolist(), strict=True)
    ]
    over = float((found.sent_s + np.maximum(found.end_us, 0) / 1e6).max(initial=0.0))
    written = floor(over + outcome.scenario.telemetry.client_offset_s)
    date = f"{datetime.fromtimestamp(START_NS // 10**9 + written, UTC):%Y%m%d-%H%M%S}"
    return Bench(date, start, ttft, latency, gaps)


#: What the client writes of a failed request, by status.
ERRORS = {
    ABORTED: "ClientDisconnect",
    TIMEOUT: "TimeoutError: request timed out",
    REJECTED: "Service Unavailable",
    UNFINISHED: "ClientPayloadError",
}


def write_bench(outcome: Outcome, found: Calls, path: Path) -> None:
    requests, result = outcome.requests, bench(outcome, found)
    output = [int(requests.output[those].sum()) for those in found.answers]
    ok = found.status == OK
    path.write_bytes(
        orjson.dumps(
            {
                "date": result.date,
                "endpoint_type": "openai",
                "backend": "openai",
                "label": None,
                "model_id": outcome.scenario.model,
                "tokenizer_id": outcome.scenario.model,
                "num_prompts": len(found),
                "request_rate": "inf",
                "burstiness": 1.0,
                "max_concurrency": None,
                "completed": int(ok.sum()),
                "failed": int((~ok).sum()),
                "input_lens": [int(requests.prompt[those[0]]) for those in found.answers],
                "output_lens": [n if good else 0 for n, good in zip(output, ok.tolist(), strict=True)],
                "ttfts": result.ttft.tolist(),
                "itls": result.gaps,
                "latencies": result.latency.tolist(),
                "start_times": result.start.tolist(),
                "errors": [ERRORS.get(status, "") for status in found.status.tolist()],
            }
        )
    )
