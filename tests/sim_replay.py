"""Plays what a real engine was asked through the simulator, to hold the two side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailscope.config import Config
from tailscope.ingest import ingest
from tailscope.sim.engine import simulate
from tailscope.sim.scenario import Cost, Engine, Load, Scenario, Telemetry
from tailscope.source import Options
from tailscope.store import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Served:
    """What became of some requests, by arrival, and the steps they were served in. Times in s from one instant."""

    arrival_s: Floats
    ttft_s: Floats
    preemptions: Ints
    step_end_s: Floats

    def within(self, from_s: float, to_s: float = np.inf) -> Served:
        """Those that arrived, and the steps that ended, in [from_s, to_s)."""
        mine = (self.arrival_s >= from_s) & (self.arrival_s < to_s)
        steps = (self.step_end_s >= from_s) & (self.step_end_s < to_s)
        return Served(self.arrival_s[mine], self.ttft_s[mine], self.preemptions[mine], self.step_end_s[steps])

    @property
    def preempted(self) -> int:
        return int((self.preemptions > 0).sum())

    @property
    def steps(self) -> int:
        return len(self.step_end_s)

    def ttft(self, q: float) -> float:
        return float(np.quantile(self.ttft_s, q))

    def __str__(self) -> str:
        times = f"TTFT p50 {self.ttft(0.5):.3f} s, p95 {self.ttft(0.95):.3f} s"
        return f"{len(self.ttft_s)} requests, {self.preempted} preempted, {self.steps} steps, {times}"


@dataclass(frozen=True)
class Asked:
    """What a real engine was asked in a window, and what became of it. `start_ns`: second 0 of `served`."""

    start_ns: int
    request_id: list[str]
    prompt: list[int]
    output: list[int]
    served: Served


@contextmanager
def traced(file: Path, folder: Path) -> Iterator[Trace]:
    """A trace of one file of telemetry."""
    ingest([file], folder / "trace", config=Config(), options=Options())
    with Trace(folder / "trace") as trace:
        yield trace


def asked(trace: Trace, from_ns: int, to_ns: int) -> Asked:
    """The requests that arrived in [from_ns, to_ns) and the steps that ended in it, of a trace of one engine."""
    rows = trace.connection.execute(
        """
        SELECT request_id, arrival_ns, (e2e_ns - decode_ns) / 1e9 AS ttft_s, prompt_tokens, output_tokens, preemptions
        FROM requests WHERE observer = 'engine' AND arrival_ns >= $from_ns AND arrival_ns < $to_ns
        ORDER BY arrival_ns, request_id
        """,
        {"from_ns": from_ns, "to_ns": to_ns},
    ).fetchnumpy()
    ends = trace.connection.execute(
        "SELECT end_ns FROM iterations WHERE end_ns >= $from_ns AND end_ns < $to_ns ORDER BY end_ns",
        {"from_ns": from_ns, "to_ns": to_ns},
    ).fetchnumpy()["end_ns"]
    arrival = np.asarray(rows["arrival_ns"], np.int64)
    start = int(arrival.min())
    served = Served(
        arrival_s=(arrival - start) / 1e9,
        ttft_s=np.asarray(rows["ttft_s"], np.float64),
        preemptions=np.asarray(rows["preemptions"], np.int64),
        step_end_s=(np.asarray(ends, np.int64) - start) / 1e9,
    )
    prompt, output = (
        np.asarray(rows[name], np.int64).tolist() for name in ("prompt_tokens", "output_tokens")
    )
    return Asked(start, [str(id) for id in rows["request_id"]], prompt, output, served)


def replay(
    real: Asked,
    cost: Cost,
    engine: Engine,
    seed: int,
    *,
    prefix_tokens: int = 0,
    has_prefix: Callable[[str], bool] = lambda _: False,
) -> Served:
    """The same requests, arriving when they did, in the simulator. Those of ids that `has_prefix` begin alike."""
    loads = []
    for prefixed in (False, True):
        mine = [i for i, id in enumerate(real.request_id) if has_prefix(id) == prefixed]
        loads.append(
            Load(
                "prefixed" if prefixed else "plain",
                arrivals="at",
                times_s=tuple(float(real.served.arrival_s[i]) for i in mine),
                prompts=tuple(real.prompt[i] for i in mine),
                outputs=tuple(real.output[i] for i in mine),
                prefix_tokens=prefix_tokens if prefixed else 0,
            )
        )
    scenario = Scenario(
        loads=tuple(load for load in loads if load.times_s),
        seed=seed,
        duration_s=float(real.served.arrival_s.max()) + 1.0,
        engine=engine,
        cost=cost,
        # Arrivals are the API server's own.
        telemetry=Telemetry(network_s=0.0),
    )
    outcome = simulate(scenario)
    requests, (simulated,) = outcome.requests, outcome.engines
    order = np.argsort(requests.arrival_s, kind="stable")
    return Served(
        arrival_s=requests.arrival_s[order],
        ttft_s=(requests.first_shown_s - requests.arrival_s)[order],
        preemptions=requests.preemptions[order],
        step_end_s=simulated.steps.end_s,
    )
