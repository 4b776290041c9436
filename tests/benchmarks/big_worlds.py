"""Big synthetic traces with the structure of real ones, made by array operations: steps, who was in them, and when."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.parts import SourceWriter
from tailscope.schema import ITERATIONS, REQUESTS, SCHEDULE, TOKENS

BUDGET = 2048
START_NS = 1_795_000_000_000_000_000


def write_world(
    trace: Path, requests: int, iterations: int, engines: int = 4, seed: int = 0, told: bool = False
) -> None:
    """A trace of `requests` request spans over `iterations` engine steps, 2 % of the prompts long.

    `told`: with the schedule and the times of every fourth token, of answers of some 200 tokens.
    """
    for engine in range(engines):
        with SourceWriter(trace, f"{engine:016x}") as writer:
            _write_engine(
                writer,
                requests // engines,
                iterations // engines,
                engine,
                np.random.default_rng((seed, engine)),
                told,
            )
            writer.commit(
                {"kind": "synthetic", "path": f"engine{engine}", "folder": "world", "instances": ["world"]}
            )


def _write_engine(
    writer: SourceWriter, n: int, steps: int, engine: int, random: np.random.Generator, told: bool
) -> None:
    prompt = np.clip(random.lognormal(5.0, 0.8, n), 8, 1500).astype(np.int64)
    long = random.random(n) < 0.02
    prompt[long] = random.integers(3000, 16000, long.sum())
    output = np.clip(random.lognormal(5.0 if told else 4.0, 0.8, n), 1, 800).astype(np.int64)
    chunks = -(-prompt // BUDGET)
    last = steps - int((chunks + output).max()) - 1
    first_step = np.sort(random.integers(1, max(last, 2), n))
    first_token_step = np.minimum(first_step + chunks - 1, steps - 1)
    end_step = np.minimum(first_token_step + output - 1, steps - 1)

    prefill_tokens = np.zeros(steps, np.int64)
    prefill_requests = np.zeros(steps, np.int64)
    for chunk in range(int(chunks.max())):
        running = chunks > chunk
        step = np.minimum(first_step[running] + chunk, steps - 1)
        size = np.minimum(prompt[running] - chunk * BUDGET, BUDGET)
        prefill_tokens += np.bincount(step, weights=size, minlength=steps).astype(np.int64)
        prefill_requests += np.bincount(step, minlength=steps)
    decoding = np.cumsum(
        np.bincount(first_token_step, minlength=steps + 1) - np.bincount(end_step, minlength=steps + 1)
    )[:steps]
    seconds = (0.012 + 4e-5 * decoding + 9e-5 * prefill_tokens) * random.lognormal(0, 0.05, steps)
    end_ns = START_NS + np.cumsum((seconds * 1e9).astype(np.int64))
    start_ns = end_ns - (seconds * 1e9).astype(np.int64)

    for low in range(0, steps, 100_000):
        part = slice(low, low + 100_000)
        writer.write(
            ITERATIONS,
            ITERATIONS.batch(
                {
                    "instance": "world",
                    "engine": engine,
                    "iteration": pa.array(np.arange(steps)[part]),
                    "end_ns": pa.array(end_ns[part]),
                    "elapsed_ns": pa.array((end_ns - start_ns)[part]),
                    "end_basis": "receipt",
                    "prefill_requests": pa.array(prefill_requests[part]),
                    "prefill_tokens": pa.array(prefill_tokens[part]),
                    "decode_requests": pa.array(decoding[part]),
                    "decode_tokens": pa.array(decoding[part]),
                    "running": pa.array((decoding + prefill_requests)[part]),
                    "waiting": 0,
                    "deferred": 0,
                    "kv_usage": pa.array(np.minimum(decoding / 256, 1.0)[part]),
                    "preempted": 0,
                    "is_dummy": False,
                }
            ),
        )
    front = (random.exponential(0.003, n) * 1e9).astype(np.int64)
    arrival = (
        start_ns[first_step] - (random.random(n) * seconds[first_step - 1] * 1e9).astype(np.int64) - front
    )
    first_token, finished = end_ns[first_token_step], end_ns[end_step]
    for low in range(0, n, 100_000):
        part = slice(low, low + 100_000)
        ids = [_key(engine, i) for i in range(low, min(low + 100_000, n))]
        writer.write(
            REQUESTS,
            REQUESTS.batch(
                {
                    "instance": "world",
                    "engine": engine,
                    "request_key": ids,
                    "request_id": [f"cmpl-{i}-0" for i in ids],
                    "trace_id": [i * 2 for i in ids],
                    "span_id": ids,
                    "observer": "engine",
                    "arrival_ns": pa.array(arrival[part]),
                    "finished_ns": pa.array(finished[part]),
                    "queue_ns": pa.array(np.full(n, 20_000)[part]),
                    "prefill_ns": pa.array((first_token - start_ns[first_step])[part]),
                    "decode_ns": pa.array((finished - first_token)[part]),
                    "ttft_ns": pa.array((first_token - arrival)[part]),
                    "e2e_ns": pa.array((finished - arrival)[part]),
                    "prompt_tokens": pa.array(prompt[part]),
                    "cached_tokens": 0,
                    "output_tokens": pa.array(output[part]),
                    "preemptions": 0,
                    "status": "ok",
                }
            ),
        )
    if told:
        _write_tokens(writer, engine, first_token_step, end_step, end_ns)
        _write_schedule(writer, engine, prompt, chunks, first_step, first_token_step, end_step, end_ns)


def _key(engine: int, request: int) -> str:
    return f"{engine:02x}{request:014x}"


def _write_tokens(
    writer: SourceWriter,
    engine: int,
    first_token_step: NDArray[np.int64],
    end_step: NDArray[np.int64],
    end_ns: NDArray[np.int64],
) -> None:
    each = 4
    for low in range(0, len(first_token_step), 2_000):
        part = slice(low, low + 2_000)
        counts = (end_step[part] - first_token_step[part]) // each + 1
        seq = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        at = np.repeat(first_token_step[part], counts) + each * seq
        keys = pa.array([_key(engine, low + i) for i in range(len(counts))], pa.string())
        writer.write(
            TOKENS,
            TOKENS.batch(
                {
                    "instance": "world",
                    "engine": engine,
                    "request_key": keys.take(pa.array(np.repeat(np.arange(len(counts)), counts), pa.int64())),
                    "seq": pa.array(seq),
                    "time_ns": pa.array(end_ns[at]),
                    "count": each,
                }
            ),
        )


def _write_schedule(
    writer: SourceWriter,
    engine: int,
    prompt: NDArray[np.int64],
    chunks: NDArray[np.int64],
    first_step: NDArray[np.int64],
    first_token_step: NDArray[np.int64],
    end_step: NDArray[np.int64],
    end_ns: NDArray[np.int64],
) -> None:
    """A run for each chunk of a prompt, one for its answer."""
    for low in range(0, len(prompt), 25_000):
        rows = np.arange(low, min(low + 25_000, len(prompt)))
        of_chunk = np.repeat(rows, chunks[rows])
        number = np.arange(len(of_chunk)) - np.repeat(np.cumsum(chunks[rows]) - chunks[rows], chunks[rows])
        step = np.minimum(first_step[of_chunk] + number, first_token_step[of_chunk])
        answered = rows[end_step[rows] > first_token_step[rows]]
        first = np.concatenate([step, first_token_step[answered] + 1])
        last = np.concatenate([step, end_step[answered]])
        request = np.concatenate([of_chunk, answered])
        size = np.minimum(prompt[of_chunk] - number * BUDGET, BUDGET)
        ids = pa.array([f"cmpl-{_key(engine, int(i))}-0" for i in rows], pa.string())
        phase = pa.array(["prefill", "decode"]).take(
            pa.array(np.arange(len(first)) >= len(step)).cast(pa.int64())
        )
        writer.write(
            SCHEDULE,
            SCHEDULE.batch(
                {
                    "instance": "world",
                    "engine": engine,
                    "iteration_first": pa.array(first),
                    "iteration_last": pa.array(last),
                    "first_end_ns": pa.array(end_ns[first]),
                    "last_end_ns": pa.array(end_ns[last]),
                    "request_id": ids.take(pa.array(request - low)),
                    "stay": pa.array(request),
                    "phase": phase,
                    "tokens": pa.array(np.concatenate([size, np.ones(len(answered), np.int64)])),
                    "computed_before": pa.array(np.concatenate([number * BUDGET, prompt[answered]])),
                }
            ),
        )
