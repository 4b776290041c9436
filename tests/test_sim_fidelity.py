"""The simulator against a real vLLM: its requests replayed, with a cost that was fitted on other minutes of the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from real import CAPTURES, EXAMPLE, needs_captures
from sim_replay import Asked, Served, asked, replay, traced
from worlds import MS, START_NS, core, step, write

from tailscope.errors import UsageError
from tailscope.sim.fit import Features, cost_of, features_of, fit_cost
from tailscope.sim.scenario import Cost, Engine
from tailscope.store import Trace

RUN1 = "statlogger_engine0_pid29933.jsonl.gz"
#: As the server was started. It scheduled synchronously: nothing of a step is allocated before the one before is over.
ENGINE = Engine(
    max_num_batched_tokens=2048,
    max_num_seqs=48,
    block_size=32,
    kv_blocks=384,
    max_model_len=8192,
    async_scheduling=False,
)
#: Tokens that the requests of kind `pfx` have in common.
PREFIX = 256


@dataclass(frozen=True)
class Run1:
    """Phases A, short requests with a long prompt now and then, and B, a burst that does not fit into the KV cache."""

    cost: Cost
    both: Asked
    #: When the first request of B came, s.
    b_s: float

    def simulated(self, seed: int) -> Served:
        return replay(
            self.both, self.cost, ENGINE, seed, prefix_tokens=PREFIX, has_prefix=lambda id: "-pfx-" in id
        )


def run1(file: Path, folder: Path) -> Run1:
    """The cost is fitted on A alone. Between the phases the engine was idle for seconds."""
    with traced(file, folder) as trace:
        a, b, c = (first_arrival(trace, phase) for phase in "ABC")
        both = asked(trace, a, c)
        return Run1(fit_cost(trace, from_ns=a, to_ns=b), both, (b - both.start_ns) / 1e9)


def first_arrival(trace: Trace, phase: str) -> int:
    query = "SELECT min(arrival_ns) FROM requests WHERE contains(request_id, $1)"
    (first,) = trace.connection.execute(query, [f"-{phase}-"]).fetchone() or (None,)
    assert isinstance(first, int)
    return first


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Run1:
    return run1(EXAMPLE / RUN1, tmp_path_factory.mktemp("example"))


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Run1:
    return run1(CAPTURES / "vllm-cpu" / "run1-dense-mixed" / RUN1, tmp_path_factory.mktemp("run1"))


def check(run: Run1, seed: int) -> None:
    simulated = run.simulated(seed)
    for name, from_s in (("A and B", 0.0), ("B", run.b_s)):
        real, ours = run.both.served.within(from_s), simulated.within(from_s)
        print(f"\n{name}, vLLM:   {real}\n{name}, seed {seed}: {ours}")
        assert abs(ours.preempted - real.preempted) <= 6
        assert ours.steps == pytest.approx(real.steps, rel=0.10)
        assert ours.ttft(0.5) == pytest.approx(real.ttft(0.5), rel=0.20)
        assert ours.ttft(0.95) == pytest.approx(real.ttft(0.95), rel=0.20)


def test_example(example: Run1) -> None:
    real = example.both.served
    assert real.preempted == 29
    check(example, seed=0)
    # Not only as many: the scheduler picks its victims as vLLM does.
    victims = example.simulated(seed=0).preemptions > 0
    assert (victims & (real.preemptions > 0)).sum() >= 27


@needs_captures
@pytest.mark.parametrize("seed", range(1, 6))
def test_seeds(capture: Run1, seed: int) -> None:
    check(capture, seed)


def test_fitted_cost_is_that_of_the_steps(example: Run1) -> None:
    cost = example.cost
    # A step of one decode took 16 ms in the mean; a chunk of 2,048 tokens 0.8 s, and 1.7 s after 2,048 others.
    assert cost.step + cost.decode_request == pytest.approx(0.0165, rel=0.1)
    chunk = cost.step + cost.prefill_request + 2048 * cost.prefill_token
    assert chunk + cost.attention * 2048**2 / 2 == pytest.approx(0.8, rel=0.1)
    assert chunk + cost.attention * 2048**2 * 3 / 2 == pytest.approx(1.66, rel=0.1)
    # From the API server to the queue of an idle engine it took 5 to 8 ms.
    assert 0.005 < cost.frontend + cost.output < 0.008
    assert cost.host_gap == 0.0


def steps_of(cost: Cost, count: int, seed: int = 0) -> Features:
    """Random batches and what they cost."""
    rng = np.random.default_rng(seed)
    decodes = rng.integers(0, 64, count).astype(np.float64)
    prompts = (rng.integers(0, 4, count) * (rng.random(count) < 0.3)).astype(np.float64)
    tokens = prompts * rng.integers(10, 500, count)
    features = Features(
        seconds=np.ones(count),
        decode_requests=decodes,
        context_tokens=decodes * rng.integers(100, 4000, count),
        prefill_tokens=tokens,
        prefill_requests=prompts,
        attention=tokens * rng.integers(0, 3000, count),
    )
    parts = (cost.step, cost.decode_request, cost.context_token, cost.prefill_token, cost.prefill_request)
    seconds = features.matrix @ np.array([*parts, cost.attention])
    noise = rng.normal(0.0, cost.noise, count) * np.sqrt(cost.step / seconds)
    return Features(**{**vars(features), "seconds": seconds * np.exp(noise)})


def test_cost_is_recovered() -> None:
    true = Cost(noise=0.05)
    fitted = cost_of(steps_of(true, 60_000))
    for name in ("step", "decode_request", "context_token", "prefill_token", "prefill_request", "attention"):
        assert getattr(fitted, name) == pytest.approx(getattr(true, name), rel=0.1), name
    assert fitted.noise == pytest.approx(true.noise, rel=0.05)


def test_pauses_are_no_cost() -> None:
    true = Cost(noise=0.05)
    steps = steps_of(true, 2_000)
    steps.seconds[::200] += 5.0
    fitted = cost_of(steps)
    assert fitted.step == pytest.approx(true.step, rel=0.1)
    assert fitted.noise == pytest.approx(true.noise, rel=0.15)


def test_too_few_steps() -> None:
    with pytest.raises(UsageError, match=r"29 steps .* 30 are needed"):
        cost_of(steps_of(Cost(), 29))


@pytest.fixture
def two_prompts(tmp_path: Path) -> Iterator[Trace]:
    """Two requests in seven steps of 10 ms: prompts of 150 tokens, 50 of them cached, and 40, at 100 tokens a step."""
    batches = [(1, 100, 0), (1, 40, 1), (0, 0, 2), (0, 0, 2), (0, 0, 1), (0, 0, 1), (0, 0, 1)]
    steps = [
        step(
            10 * MS * (i + 1),
            iteration=i,
            prefill_requests=requests,
            prefill_tokens=tokens,
            decode_requests=decodes,
            decode_tokens=decodes,
            running=int(i < 6),
            source="statlogger",
        )
        for i, (requests, tokens, decodes) in enumerate(batches)
    ]
    # The log tells the same, to the second.
    logged = [{**row, "source": "log", "end_ns": START_NS, "time_error_ns": 1000 * MS} for row in steps]
    first = core("first", 0, 41 * MS, prompt_tokens=150, cached_tokens=50, output_tokens=4)
    second = core("second", 5 * MS, 66 * MS, prompt_tokens=40, output_tokens=6)
    for row, times in ((first, (1, 1, 10, 40)), (second, (9, 10, 20, 70))):
        for name, at in zip(("queued", "scheduled", "first_token", "last_token"), times, strict=True):
            row[f"{name}_ns"] = START_NS + at * MS
    tables = {"iterations": [*steps, *logged], "requests": [first, second]}
    with Trace(write(tmp_path / "t", tables)) as trace:
        yield trace


def test_features(two_prompts: Trace) -> None:
    features = features_of(two_prompts, None, None, "a", 0)
    # The first step has none before it that tells when it began.
    assert features.seconds == pytest.approx([0.01] * 6)
    assert features.prefill_tokens.tolist() == [40, 0, 0, 0, 0, 0]
    assert features.attention == pytest.approx([40 * 20, 0, 0, 0, 0, 0])
    # A decode attends to the prompt and to the answer so far.
    assert features.context_tokens == pytest.approx([151, 152 + 41, 153 + 42, 43, 44, 45])


def test_features_of_a_window(two_prompts: Trace) -> None:
    features = features_of(two_prompts, START_NS + 30 * MS, START_NS + 50 * MS, "a", 0)
    assert features.decode_requests.tolist() == [2, 2]


def test_engine_must_be_clear(two_prompts: Trace) -> None:
    with pytest.raises(UsageError, match=r"6 steps .* 30 are needed"):
        fit_cost(two_prompts)
    with pytest.raises(UsageError, match="0 engines match; the trace has steps of: a engine 0"):
        fit_cost(two_prompts, engine=1)
