"""The scheduler's logger of `examples/vllm`, on a scheduler that behaves as vLLM's does around a KV connector."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tailscope.config import Config
from tailscope.ingest import ingest
from tailscope.source import Options
from tailscope.store import Trace

LOGGER = Path(__file__).parent.parent / "examples" / "vllm" / "schedule_logger.py"


class Queue(list[Any]):
    def peek_request(self) -> Any:
        return self[0]


class Scheduler:
    """Two requests: one computes its prompt, the KV cache of the other is on its way for two batches."""

    def __init__(self, queue: str) -> None:
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0, data_parallel_rank=0)
        )
        self.cache_config = SimpleNamespace(block_size=16, num_gpu_blocks=100)
        self.kv_cache_manager = SimpleNamespace(
            usage=0.5, block_pool=SimpleNamespace(get_num_free_blocks=lambda: 9)
        )
        self.max_num_scheduled_tokens, self.max_num_running_reqs = 2048, 8
        self.connector = object()
        self.finished_recving_kv_req_ids: set[str] = set()
        self.own = request("own-00000000", 20, "RUNNING")
        self.handed = request("handed-11111111", 40, "WAITING_FOR_REMOTE_KVS")
        self.requests = {r.request_id: r for r in (self.own, self.handed)}
        self.running, self.waiting = [self.own], Queue()
        self.handing = Queue([self.handed])
        #: Where vLLM keeps it: by version.
        setattr(self, queue, self.handing)
        if queue == "kv_holding_waiting":
            self.deferred_waiting = {self.handed.request_id}
        self.batches = 0

    def schedule(self) -> Any:
        self.batches += 1
        if self.finished_recving_kv_req_ids:
            self.finished_recving_kv_req_ids.clear()
            self.handing.clear()
            if hasattr(self, "deferred_waiting"):
                self.deferred_waiting.clear()
            self.running.append(self.handed)
            self.handed.status = SimpleNamespace(name="RUNNING")
            return output(new=[(self.handed, 1, 39)], cached=[(self.own, 1)])
        return (
            output(new=[(self.own, 20, 0)])
            if self.batches == 1
            else output(cached=[(r, 1) for r in self.running])
        )

    def update_from_output(self, scheduler_output: Any) -> Any:
        if self.batches == 2:
            self.finished_recving_kv_req_ids.add(self.handed.request_id)
        return {}

    def shutdown(self) -> None:
        pass


def request(name: str, prompt: int, status: str) -> Any:
    return SimpleNamespace(
        request_id=name,
        num_prompt_tokens=prompt,
        num_tokens=prompt,
        num_computed_tokens=0,
        num_output_tokens=0,
        status=SimpleNamespace(name=status),
    )


def output(new: Any = (), cached: Any = ()) -> Any:
    given = {r.request_id: tokens for r, tokens, *_ in [*new, *cached]}
    return SimpleNamespace(
        preempted_req_ids=None,
        finished_req_ids=(),
        num_scheduled_tokens=given,
        total_num_scheduled_tokens=sum(given.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r.request_id, num_computed_tokens=before) for r, _, before in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r.request_id for r, _ in cached],
            num_computed_tokens=[20 for _ in cached],
            num_output_tokens=[1 for _ in cached],
        ),
    )


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, kind in (("async_scheduler", "AsyncScheduler"), ("scheduler", "Scheduler")):
        module: Any = ModuleType(f"vllm.v1.core.sched.{name}")
        setattr(module, kind, Scheduler)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("TAILSCOPE_SCHEDULE_DIR", str(tmp_path / "log"))
    spec = importlib.util.spec_from_file_location("schedule_logger", LOGGER)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize("queue", ["kv_holding_waiting", "skipped_waiting", "waiting"])
def test_who_waits_for_its_kv_cache_is_told_with_its_first_step(
    logger: ModuleType, tmp_path: Path, queue: str
) -> None:
    scheduler = logger.SyncScheduleLogger(queue)
    times = [time.monotonic_ns()]
    for _ in range(4):
        made = scheduler.schedule()
        time.sleep(0.002)
        scheduler.update_from_output(made)
        times.append(time.monotonic_ns())
    scheduler.shutdown()
    [file] = (tmp_path / "log").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("r") for line in lines[1:]].count(None) == 3
    [[number, since, until]] = lines[3]["r"]
    assert lines[3]["new"][0][:2] == [number, "handed-11111111"]
    assert times[0] <= since <= times[1] and times[1] <= until <= times[2]
    assert [line["q"] for line in lines[1:3]] == [[1, 1, 0] if queue == "waiting" else [1, 0, 1]] * 2

    trace_path = tmp_path / "trace.parquet"
    ingest([file], trace_path, config=Config(), options=Options())
    with Trace(str(trace_path)) as trace:
        rows = trace.rows(
            "SELECT request_id, fetch_ns, fetched_ns FROM schedule ORDER BY iteration_first, request_id"
        )
    waits = {(r["request_id"], r["fetched_ns"] - r["fetch_ns"]) for r in rows if r["fetch_ns"] is not None}
    assert waits == {("handed", until - since)}
