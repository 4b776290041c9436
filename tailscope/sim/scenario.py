"""What a simulated world consists of: engines, what a step costs, ranks, clients, faults, and what telemetry tells.

A scenario is one TOML file. Every field has a default but the loads; times are seconds, sizes tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Policy = Literal["fcfs", "priority"]
Arrivals = Literal["poisson", "bursty", "regular", "closed", "trace", "at"]


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens: log-normal about `median` (sigma 0: all alike), cut to [least, most]; or drawn from `values`."""

    median: float = 200.0
    sigma: float = 0.0
    least: int = 1
    most: int = 1_000_000
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class Load:
    """One kind of clients: when they send, how much they ask, how patient they are.

    `arrivals`: poisson and regular have `rate` a second; bursty multiplies a Poisson rate by an AR(1) process in the
    logarithm (`burst_sigma`, correlation time `burst_s`); closed has `users` who send again `think_s` after an answer;
    trace plays the arrivals and lengths of a file (Azure's CSV, Mooncake's JSONL or our own columns), `speed` times as
    fast; at sends at the instants of `times_s`, with `prompts` and `outputs` if given.
    `common_load`: loads with one such name share the burst process. `prefix_tokens` of each prompt are one of
    `prefixes` common beginnings. `timeout_s`: the client leaves after so long without its whole answer; `abort_share`
    leave at a random instant of their answer. `tenant` and a `priority` other than 0 are in the spans as `sim.tenant` and
    `sim.priority`, names for `[attributes]` in tailscope.toml; a trace written with `-o` has them without.
    """

    name: str
    arrivals: Arrivals = "poisson"
    rate: float = 1.0
    from_s: float = 0.0
    to_s: float | None = None
    burst_sigma: float = 0.8
    burst_s: float = 10.0
    common_load: str | None = None
    users: int = 8
    think_s: float = 1.0
    trace: str | None = None
    speed: float = 1.0
    times_s: tuple[float, ...] = ()
    prompts: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    requests: int | None = None
    prompt_tokens: Sizes = Sizes(200.0, 0.6)
    output_tokens: Sizes = Sizes(100.0, 0.6)
    prefix_tokens: int = 0
    prefixes: int = 1
    tenant: str | None = None
    priority: int = 0
    timeout_s: float | None = None
    abort_share: float = 0.0
    n: int = 1


@dataclass(frozen=True)
class Engine:
    """An engine of vLLM V1 and its flags; `replicas` of it, each an instance of `data_parallel` engines.

    `prefill_replicas`: so many more instances do the prefill and hand their KV cache over (`kv_transfer_*`); the
    replicas then only decode. `data_parallel` engines with `moe` run in lockstep and compute dummy batches when idle.
    `skew`: so large a share of the requests goes to the first replica, whatever the routing says; the rest as it says.
    """

    replicas: int = 1
    data_parallel: int = 1
    moe: bool = False
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    block_size: int = 16
    kv_blocks: int = 10_000
    max_model_len: int = 32_768
    long_prefill_token_threshold: int = 0
    policy: Policy = "fcfs"
    async_scheduling: bool = True
    enable_prefix_caching: bool = True
    watermark: float = 0.0
    reserve_full_isl: bool = True
    prefill_replicas: int = 0
    kv_transfer_latency_s: float = 0.002
    kv_transfer_tokens_per_s: float = 200_000.0
    routing: Literal["round-robin", "least-loaded"] = "round-robin"
    max_num_queued_reqs: int | None = None
    skew: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Seconds of a step: what of it is linear, what is not, and its noise.

    linear: step + decode_request·D + context_token·C + prefill_token·P + prefill_request·N + attention·A, D decoding
    requests with C tokens of context in all, P prefill tokens of N requests which attend to A token² before them.
    `stair`: prefill tokens are computed in tiles of so many (0: exactly). `cache_tokens`: beyond so much context of the
    batch each further token costs `cache_factor` times. `noise`: sigma of the log-normal factor of a step that does
    nothing else; it shrinks with the root of a longer step's length, as sums do. `heavy_share` of the steps take a
    Pareto factor (`heavy_alpha`) more. `host_gap`: between one step's end and the next's start; `frontend`: what a
    request takes alone in the API server before the engine's input, where n that come together take n times as long
    each; `output`: from a step's end to the API server's having its result.
    """

    step: float = 0.006
    decode_request: float = 0.00005
    context_token: float = 2e-8
    prefill_token: float = 0.00003
    prefill_request: float = 0.0002
    attention: float = 1e-9
    stair: int = 0
    cache_tokens: int = 0
    cache_factor: float = 3.0
    noise: float = 0.05
    heavy_share: float = 0.0
    heavy_alpha: float = 2.5
    host_gap: float = 0.0002
    frontend: float = 0.001
    output: float = 0.0005


@dataclass(frozen=True)
class Ranks:
    """The ranks of one engine's step; with the engine's `moe` the experts span all ranks of the instance.

    A step's modelled cost is the work of a rank: `attention_share` of it in attention, the rest in experts (or in the
    dense layer), over `layers`; the collectives between come on top. `spread`: sigma of each piece of work's factor.
    `hot`: share of the tokens beyond an even share that the hottest expert gets. Offsets and drifts count by rank.
    `emitter`: whose profiles the ranks write. gloo: of a CPU, no groups told. nccl: c10d's collectives, with group and number.
    custom: vLLM's own all-reduce and NCCL without metadata. graph: the same, steps of decodes alone replayed from a CUDA
    graph. deepep-ll, deepep-ht: DeepEP's low-latency and normal exchange, for exchange = all-to-all.

    A transfer takes `transfer_s`, and with `bandwidth_gb_s` (10⁹ bytes a second; 0: sizes do not count) the time of its
    bytes. `straggle_s`: how much later than it could a rank leaves a collective, at most, by chance; `leave_bias_s`: by
    rank, always, as in a ring. `exchange`: how tokens get to their experts and back; in all-to-all each rank leaves when
    it has its own part. `follow`: how the time of experts follows their tokens, from 0 (reading weights is all they
    do) to 1. `hot_steps`: steps after which another expert is the hottest (0: never). `routed`: (token, expert) pairs of a
    layer that chance acts on: the fewer, the more uneven loads are by chance. `exact_rows`: what ranks send to a rank's experts
    adds up to what these work on; without it each sender's few rows are rounded alone, all up or all down.
    `coordinate`: between steps data-parallel engines tell each other what they have, in an all-reduce of all ranks.
    `stamp_jitter_s`: how much later than it was a profile shows a start, at most. `clock_steps`: (host, second, seconds
    by which its clocks jump then).
    """

    tensor_parallel: int = 1
    layers: int = 4
    experts: int = 16
    topk: int = 2
    hot: float = 0.0
    attention_share: float = 0.4
    spread: float = 0.03
    transfer_s: float = 0.00008
    straggle_s: float = 0.00001
    hosts: int = 1
    offset_s: tuple[float, ...] = ()
    drift_ppm: tuple[float, ...] = ()
    emitter: Literal["gloo", "nccl", "custom", "graph", "deepep-ll", "deepep-ht"] = "gloo"
    bandwidth_gb_s: float = 0.0
    leave_bias_s: tuple[float, ...] = ()
    exchange: Literal["all-gather", "all-to-all"] = "all-gather"
    follow: float = 1.0
    hot_steps: int = 4_096
    routed: int = 2_048
    exact_rows: bool = False
    coordinate: bool = False
    stamp_jitter_s: float = 0.0
    clock_steps: tuple[tuple[int, float, float], ...] = ()


@dataclass(frozen=True)
class Gateway:
    """What stands before the engines: it lets `max_in_flight` requests through, queues `max_queue` and refuses the rest."""

    max_in_flight: int | None = None
    max_queue: int | None = None
    delay_s: float = 0.0


@dataclass(frozen=True)
class Fault:
    """Something wrong beside loads and settings, from `from_s` to `to_s`.

    pause: the engine of `replica` stands still for `length_s`, every `every_s` (once when None), as `reason` says in
    its log. slow-rank: the work of `rank` in `phase` (None: all) and `layers` takes `factor` times as long, in a share
    `often` of the steps. slow-link: what `rank` sends takes `factor` times as long. frontend: the API server takes
    `length_s` more before a request is queued. slow-replica: all steps of `replica` take `factor` times as long.

    A ring is as slow as its slowest link, so a slow-link holds up all in its group; in an all-to-all it does so with those
    who get something over it: all from `rank`, or with side = destination `rank` alone; with `peer` the pair only.
    host-slow: the host of `rank` (or with all_ranks of each) launches `phase` and `layers` late, by `length_s` a step and
    `per_request_s` for each request of its batch; with `every_s` it stands still for `length_s` every so often, as for a
    garbage collection. first-shape: the first step of each size of a batch takes `length_s` more, as for compiling or
    capturing a graph. network: a share `often` of the requests sent then is `length_s` longer on its way to the engines.

    left-out: the scheduler gives no tokens to a share `often` of its running requests, the same ones while it lasts; they
    keep their KV cache. cache-loss: no prompt finds its beginning in the prefix cache, as after a change of its salt or
    of what prompts begin with. Both last from `from_s` on, or with `every_s` for `length_s` every so often. gateway-hold: the
    gateway lets nothing through for `length_s`, every `every_s` (once when None), and then all that it held.
    """

    kind: Literal[
        "pause",
        "slow-rank",
        "slow-link",
        "frontend",
        "slow-replica",
        "host-slow",
        "first-shape",
        "left-out",
        "cache-loss",
        "network",
        "gateway-hold",
    ]
    name: str = ""
    from_s: float = 0.0
    to_s: float | None = None
    replica: int = 0
    length_s: float = 1.0
    every_s: float | None = None
    reason: Literal["profiler", "eplb", "jit", "unknown"] = "unknown"
    rank: int = 0
    factor: float = 1.5
    phase: str | None = None
    layers: tuple[int, ...] = ()
    often: float = 1.0
    side: Literal["source", "destination"] = "source"
    peer: int | None = None
    all_ranks: bool = False
    per_request_s: float = 0.0

    def holds_at(self, time_s: float) -> bool:
        return self.from_s <= time_s and (self.to_s is None or time_s < self.to_s)

    def is_on(self, time_s: float) -> bool:
        """Whether it holds, of a fault that with `every_s` does so for `length_s` every so often."""
        if not self.holds_at(time_s):
            return False
        return self.every_s is None or (time_s - self.from_s) % self.every_s < self.length_s


def end_s(spec: Load | Fault, duration_s: float) -> float:
    """When a load sends no more, or a fault is over, in a world whose clients send for `duration_s`."""
    return duration_s if spec.to_s is None else min(spec.to_s, duration_s)


@dataclass(frozen=True)
class Telemetry:
    """Which emitters there are, and how they are off.

    `profile`: windows (from, seconds) in which the ranks' profilers run. `client_offset_s`: what the clients' clock
    shows more than the engines'. `scrape_s`: seconds between two scrapes of /metrics. `client_format`: a line a request
    with the times of its chunks, or the result file of `vllm bench serve --save-detailed`. `profile_missing`: ranks
    whose profiles are lost. `profile_dropped`: share of what ran on a GPU, or of gloo's transfers, that the profiles lost,
    by buffers. `expert_load`: the trace has the tokens of each expert in the steps profiled (no file tells them).
    `schedule`: the engines' schedulers log which requests each step computes (examples/vllm/schedule_logger.py).
    `gateway`: the trace has the gateway's view of each request (no file tells it); `network_s` is then between client and
    gateway.
    """

    spans: bool = True
    stat_logger: bool = True
    log: bool = True
    iteration_details: bool = True
    metrics: bool = True
    scrape_s: float = 5.0
    client: bool = True
    client_offset_s: float = 0.0
    client_format: Literal["log", "vllm-bench"] = "log"
    network_s: float = 0.0005
    profile: tuple[tuple[float, float], ...] = ()
    profile_missing: tuple[int, ...] = ()
    profile_dropped: float = 0.0
    expert_load: bool = False
    schedule: bool = False
    gateway: bool = False


@dataclass(frozen=True)
class Cause:
    """What a diagnosis of the world should say: a rule, its culprit, and how the world is made without it.

    `without`: overrides, as {loads: [names to leave out], faults: [names to leave out], engine: {…}, cost: {…}, …}.
    """

    rule: str
    culprit: str | None = None
    victims: tuple[str, ...] = ()
    without: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    loads: tuple[Load, ...]
    name: str = "scenario"
    seed: int = 0
    #: Clients send until then; what they sent is served to its end.
    duration_s: float = 120.0
    model: str = "sim-8b"
    engine: Engine = Engine()
    cost: Cost = Cost()
    ranks: Ranks = Ranks()
    gateway: Gateway = Gateway()
    faults: tuple[Fault, ...] = ()
    telemetry: Telemetry = Telemetry()
    causes: tuple[Cause, ...] = ()
    #: Rules that may speak too: what follows from a cause, or is arguable.
    tolerated: tuple[str, ...] = ()
