# SPDX-License-Identifier: Apache-2.0
"""Scheduler classes for vLLM V1 that log which requests each engine step computes, for `tailscope ingest`.

    export PYTHONPATH=/where/this/file/is TAILSCOPE_SCHEDULE_DIR=/where/to/write
    vllm serve MODEL --scheduler-cls schedule_logger.ScheduleLogger

`ScheduleLogger` is for asynchronous scheduling, vLLM's default; with `--no-async-scheduling`, or where vLLM turns it
off, take `schedule_logger.SyncScheduleLogger`. Each engine process appends to a file of its own,
`schedule_engine<data-parallel rank>_pid<pid>.jsonl`, about 0.1 to 0.3 kB a step. No text, token or header is written: of
a request its id, its prompt's length and how many of its tokens each step computes.

It never holds up the engine: the scheduler's thread copies a few lists a step (tens of microseconds) and hands them to a
thread that compares, formats and writes them. If that one does not keep up, steps are left out and counted; if
anything here fails, logging stops and serving goes on. Written for vLLM 0.32; vLLM says that the scheduler's interface
is not public, so look at the log for "schedule logger" after an upgrade.

Lines: first what the engine is, then a step each.
    n      number of the step, from 0; as `iteration_index` of a stat logger, if no dummy steps come between
    t      [wall, monotonic] ns when the batch was made, monotonic ns when its result was there
    new    [[request, id, prompt tokens]] requests seen for the first time
    s      [[request, phase, tokens, computed before]] requests whose phase or tokens changed; phase 0 prefill, 1 decode,
           2 computing again after a preemption; tokens 0: running, and left out though it could have gone on
    x      requests no longer in the step; the rest go on as in the step before
    p      requests preempted while the batch was made
    r      [[request, since, until]] requests in `s` that had to wait for KV cache from elsewhere first, monotonic ns: from the
           making of a batch that began to fetch it to the step's result with which the scheduler knew that it was there
    c      requests and tokens of prefill, of decode, of computing again
    q, kv  running, waiting, deferred requests and share of the KV cache in use, after the step
    b      what kept the head of the queue out: budget, slots, kv (by the free blocks), other
    full   `s` names all requests in the step; so it does every 1,000 steps and after steps left out (`lost`)
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import threading
import time
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

VERSION = 1
#: Steps that may wait for the writer: at 256 requests a step some 20 MB.
WAITING = 1_000
KEYFRAME = 1_000
#: The writer flushes when it has nothing more to write, or after so many lines.
FLUSH = 200
#: So many waiting requests are looked at for KV cache on its way; no more fit the cache at once.
FETCHING = 1_000
PREFILL, DECODE, RECOMPUTE = range(3)

logger = logging.getLogger("vllm.schedule_logger")


class _Log:
    """The scheduler's side: copies what a step is, when it is made and when its result is there."""

    def __init__(self, scheduler: Any, folder: Path) -> None:
        config = scheduler.vllm_config
        engine = int(
            getattr(config.parallel_config, "data_parallel_index", config.parallel_config.data_parallel_rank)
        )
        path = folder / f"schedule_engine{engine}_pid{os.getpid()}.jsonl"
        header = {
            "vllm_schedule": VERSION,
            "engine": engine,
            "pid": os.getpid(),
            # vLLM makes ids its own by random digits at the end, unless told not to.
            "suffix": os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0")
            not in ("1", "true", "True"),
            "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
            "max_num_seqs": scheduler.max_num_running_reqs,
            "block_size": scheduler.cache_config.block_size,
            "kv_blocks": scheduler.cache_config.num_gpu_blocks,
        }
        self.writer = _Writer(path, header)
        self.made: deque[dict[str, Any]] = deque()
        self.n = 0
        self.preempted: list[str] = []
        #: id -> since when it waits for KV cache from elsewhere, monotonic ns; and of those who have it, until when they did.
        self.fetching: dict[str, int] = {}
        self.fetched: dict[str, tuple[int, int]] = {}
        logger.info("schedule logger: writing %s", path)

    def scheduled(self, scheduler: Any, output: Any, wall_ns: int, mono_ns: int) -> None:
        """After `schedule()`: numbers of computed tokens already include this batch."""
        self.preempted += output.preempted_req_ids or ()
        if scheduler.connector is not None:
            self._see_fetches(scheduler, mono_ns)
        if not output.total_num_scheduled_tokens:
            return
        given = output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        rows = list(
            zip(
                cached.req_ids,
                [given[request] for request in cached.req_ids],
                cached.num_computed_tokens,
                cached.num_output_tokens,
                strict=True,
            )
        )
        new, known = [], scheduler.requests
        for first in output.scheduled_new_reqs:
            request = known[first.req_id]
            # vLLM's second model runner sends those that come back after a preemption as new ones.
            rows.append(
                (first.req_id, given[first.req_id], first.num_computed_tokens, request.num_output_tokens)
            )
            new.append((first.req_id, request.num_prompt_tokens))
        if len(given) < len(scheduler.running):
            step = getattr(scheduler, "current_step", 0)
            rows += [
                (r.request_id, 0, r.num_computed_tokens, r.num_output_tokens + r.num_output_placeholders)
                for r in scheduler.running
                if r.request_id not in given and _could_go_on(r, step)
            ]
        self.made.append(
            {
                "output": output,
                "n": self.n,
                "t": [wall_ns, mono_ns],
                "rows": rows,
                "new": new,
                "preempted": self.preempted,
                "finished": list(output.finished_req_ids),
                "fetched": [(name, *self.fetched.pop(name)) for name in list(self.fetched) if name in given],
                "b": self._blocked(scheduler, output),
            }
        )
        self.n += 1
        self.preempted = []

    def _see_fetches(self, scheduler: Any, mono_ns: int) -> None:
        """After `schedule()`: which requests wait for KV cache from elsewhere now, and which no longer do."""
        # Where vLLM has no queue of its own for those who hold KV blocks, they stand first in the one they are in.
        queues = (
            getattr(scheduler, name, None) for name in ("kv_holding_waiting", "skipped_waiting", "waiting")
        )
        queue = next(found for found in queues if found is not None)
        waiting = {
            request.request_id
            for request in islice(queue, FETCHING)
            if request.status.name == "WAITING_FOR_REMOTE_KVS"
        }
        for name in self.fetching.keys() - waiting:
            # Whose load failed begins again, as one that was preempted may.
            self.fetched.setdefault(name, (self.fetching.pop(name), mono_ns))
        for name in waiting - self.fetching.keys() - self.fetched.keys():
            self.fetching[name] = mono_ns
        for gone in self.fetched.keys() - scheduler.requests.keys():
            del self.fetched[gone]

    def arrived(self, scheduler: Any) -> None:
        """After a step's result: whose KV cache the scheduler knows to be there."""
        now = time.monotonic_ns()
        for name in self.fetching.keys() & scheduler.finished_recving_kv_req_ids:
            self.fetched[name] = self.fetching.pop(name), now

    def _blocked(self, scheduler: Any, output: Any) -> str | None:
        """What kept the head of the queue out, by what can be seen afterwards."""
        if not scheduler.waiting:
            return None
        if output.preempted_req_ids:
            return "kv"
        if len(scheduler.running) >= scheduler.max_num_running_reqs:
            return "slots"
        if output.total_num_scheduled_tokens >= scheduler.max_num_scheduled_tokens:
            return "budget"
        head = scheduler.waiting.peek_request()
        need = -(-head.num_tokens // scheduler.cache_config.block_size)
        return "kv" if need > scheduler.kv_cache_manager.block_pool.get_num_free_blocks() else "other"

    def ended(self, output: Any, mono_ns: int) -> dict[str, Any] | None:
        """When the result of a batch is there: its record, or None for one that computed nothing."""
        while self.made:
            record = self.made.popleft()
            if record.pop("output") is output:
                record["t"].append(mono_ns)
                return record
            # A batch whose result never came: its step is missing in the log.
            self.writer.left_out = True
        return None

    def write(self, scheduler: Any, record: dict[str, Any]) -> None:
        record["q"] = [len(scheduler.running), *_waiting(scheduler)]
        record["kv"] = scheduler.kv_cache_manager.usage
        self.writer.put(record)


def _waiting(scheduler: Any) -> tuple[int, int]:
    """Waiting requests, without and with something else than room to wait for."""
    deferred = getattr(scheduler, "deferred_waiting", None)
    if deferred is None:
        return len(scheduler.waiting), len(getattr(scheduler, "skipped_waiting", ()))
    # Here they stay in the queues.
    return len(scheduler.waiting) + len(scheduler.kv_holding_waiting) - len(deferred), len(deferred)


def _could_go_on(request: Any, step: int) -> bool:
    """Whether a running request that got no tokens had something to compute: not if only its last result is still to
    come, nor if pipeline stages take turns and it is not its turn."""
    placeholders = request.num_output_placeholders
    if (
        placeholders
        and request.num_computed_tokens + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
    ):
        return False
    if step < getattr(request, "next_decode_eligible_step", 0):
        return False
    return request.num_tokens_with_spec + placeholders > request.num_computed_tokens


class _Writer:
    """The other thread: compares each step with the one before and writes what changed."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", encoding="utf-8")
        self.file.write(json.dumps(header) + "\n")
        self.file.flush()
        self.queue: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING)
        self.lost = 0
        #: Set by the scheduler's thread when a step is missing: the next line names all.
        self.left_out = False
        #: id -> number in the file, prompt's length; of requests that are in the engine.
        self.known: dict[str, tuple[int, int]] = {}
        self.requests = 0
        #: number -> phase, tokens, computed before the next step
        self.state: dict[int, tuple[int, int, int]] = {}
        self.since_full = KEYFRAME
        self.thread = threading.Thread(target=self._run, name="schedule-logger", daemon=True)
        self.thread.start()
        atexit.register(self.close)

    def put(self, record: dict[str, Any]) -> None:
        try:
            if self.left_out:
                record["left_out"], record["lost"] = True, self.lost
            self.queue.put_nowait(record)
            self.left_out = False
        except queue.Full:
            # Ids that were to be introduced are, with the next line.
            self.left_out = True
            self.lost += 1

    def close(self) -> None:
        if self.thread.is_alive():
            try:
                self.queue.put(None, timeout=1.0)
            except queue.Full:
                return
            self.thread.join(5.0)

    def _run(self) -> None:
        unflushed = 0
        try:
            while (record := self.queue.get()) is not None:
                self.file.write(json.dumps(self._line(record), separators=(",", ":")) + "\n")
                unflushed += 1
                if unflushed >= FLUSH or self.queue.empty():
                    self.file.flush()
                    unflushed = 0
            self.file.close()
        except Exception:
            logger.exception("schedule logger: stops writing; serving goes on")

    def _line(self, record: dict[str, Any]) -> dict[str, Any]:
        # Known ids are of requests in the engine: who is done is dropped here, after its last line.
        introduced = []
        prompts = dict(record["new"])
        full = self.since_full >= KEYFRAME or "left_out" in record
        self.since_full = 1 if full else self.since_full + 1
        counts = [0] * 6
        state: dict[int, tuple[int, int, int]] = {}
        said = []
        for name, tokens, computed, output in record["rows"]:
            if name not in self.known:
                # A prompt's length is unknown only where the line that had it was left out.
                self.known[name] = (self.requests, prompts.get(name, -1))
                introduced.append([self.requests, name, prompts.get(name)])
                self.requests += 1
            number, prompt = self.known[name]
            if output == 0:
                phase = PREFILL
            elif prompt >= 0 and computed < prompt + output - 1:
                phase = RECOMPUTE
            else:
                phase = DECODE
            if tokens:
                counts[2 * phase] += 1
                counts[2 * phase + 1] += tokens
            if full or self.state.get(number) != (phase, tokens, computed):
                said.append([number, phase, tokens, computed])
            state[number] = (phase, tokens, computed + tokens)
        line: dict[str, Any] = {"n": record["n"], "t": record["t"], "s": said, "c": counts, "q": record["q"]}
        line["kv"] = round(record["kv"], 6)
        if introduced:
            line["new"] = introduced
        if gone := [number for number in self.state if number not in state]:
            line["x"] = gone
        if lost := [self.known[name][0] for name in record["preempted"] if name in self.known]:
            line["p"] = lost
        if waited := [
            [self.known[name][0], since, until]
            for name, since, until in record["fetched"]
            if name in self.known
        ]:
            line["r"] = waited
        if record["b"]:
            line["b"] = record["b"]
        if full:
            line["full"] = True
        if record.get("lost"):
            line["lost"] = record["lost"]
        self.state = state
        for name in record["finished"]:
            self.known.pop(name, None)
        return line


class _Logging:
    """Goes before a scheduler class and logs what it does. What fails here turns logging off, never the engine."""

    _log: _Log | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        folder = os.environ.get("TAILSCOPE_SCHEDULE_DIR")
        if not folder:
            logger.warning("schedule logger: TAILSCOPE_SCHEDULE_DIR is not set, so nothing is logged")
            return
        try:
            self._log = _Log(self, Path(folder))
        except Exception:
            logger.exception("schedule logger: does not start; serving goes on")

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        wall_ns, mono_ns = time.time_ns(), time.monotonic_ns()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if self._log is not None:
            try:
                self._log.scheduled(self, output, wall_ns, mono_ns)
            except Exception:
                self._stop_logging()
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        record = None
        if self._log is not None and scheduler_output.total_num_scheduled_tokens:
            try:
                record = self._log.ended(scheduler_output, time.monotonic_ns())
            except Exception:
                self._stop_logging()
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self._log is not None and self._log.fetching:
            try:
                self._log.arrived(self)
            except Exception:
                self._stop_logging()
        if self._log is not None and record is not None:
            try:
                self._log.write(self, record)
            except Exception:
                self._stop_logging()
        return outputs

    def shutdown(self) -> None:
        if self._log is not None:
            self._log.writer.close()
        super().shutdown()  # type: ignore[misc]

    def _stop_logging(self) -> None:
        logger.exception("schedule logger: stops; serving goes on")
        self._log = None


class ScheduleLogger(_Logging, AsyncScheduler):
    """For asynchronous scheduling."""


class SyncScheduleLogger(_Logging, Scheduler):
    """For `--no-async-scheduling`."""
