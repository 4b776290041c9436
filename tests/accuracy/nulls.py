"""Worlds in which nothing is to be found: how often the tests fire in them, how often an interval holds the truth.

Each function plays the world of a seed and returns plain values: what the test said, and what the world was like. The true
p99s of `WINDOWS` were pooled over other seeds; after a change of the simulator `python tests/accuracy/nulls.py` prints
them anew, and `summarise` says when that is due.
"""

from __future__ import annotations

import importlib
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from families import cost, engine, uniform
from numpy.typing import NDArray
from pairs import pair_null
from scipy.signal import lfilter
from scipy.special import ndtri
from scipy.stats import binomtest

from tailscope import registry, stats
from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.ledger.coupling import Victims, exposure
from tailscope.sim.engine import simulate
from tailscope.sim.outcome import EngineOutcome, Outcome, Requests, Runs, Steps, ns
from tailscope.sim.ranks import RankWorld
from tailscope.sim.scenario import Cost, Engine, Load, Ranks, Scenario, Sizes, Telemetry
from tailscope.sim.tables_ranks import profile_tables
from tailscope.sim.written import write_trace
from tailscope.store import Trace

Floats = NDArray[np.float64]
Result = dict[str, Any]

#: Levels at which tests are counted; the bar is for the first.
LEVELS = (0.05, 0.01)
#: Between these a nominal 5 % is what it says, and from this on a nominal 95 %.
FIRES, COVERS = (0.03, 0.065), 0.93
#: Pairs of windows alike in which `compare` may call a change; intervals of it that hold the truth; changes of a fifth that are called.
CALLED, HOLDS, SEEN = 0.06, 0.90, 0.80
#: Pooled p99s this many standard errors off are out of date: they have errors of their own, and a few windows with the
#: worst bursts hold most of what lies above. Fewer worlds say nothing of it.
STALE, STALE_WORLDS = 6.0, 30


# -- one pool's requests, another pool's prefills -------------------------------------------------


def pools(seed: int) -> tuple[Scenario, Scenario, dict[str, float]]:
    """Short requests in one pool, long ones in another that has nothing to do with it, both in the bursts of one load."""
    rng = np.random.default_rng([seed, 101])
    duration, sigma, burst = float(rng.uniform(120, 300)), float(rng.uniform(0.3, 1.2)), uniform(rng, 3, 40)
    rate, long_rate, prompt = uniform(rng, 4, 14), uniform(rng, 0.1, 1.0), uniform(rng, 3_000, 20_000)
    costs, engines = [cost(rng), cost(rng)], [engine(rng), engine(rng)]
    prefill_s = costs[1].prefill_token * prompt + costs[1].attention * prompt**2 / 2
    # A pool that is overloaded all the time exposes everybody.
    long_rate = min(long_rate, 0.6 / prefill_s)
    bursts: dict[str, Any] = {
        "arrivals": "bursty", "burst_sigma": sigma, "burst_s": burst, "common_load": "day",
    }  # fmt: skip
    prompts, outputs = Sizes(uniform(rng, 100, 300), 0.5, 8, 1_500), Sizes(uniform(rng, 15, 60), 0.5, 2, 400)
    short = Load("chat", rate=rate, prompt_tokens=prompts, output_tokens=outputs, **bursts)
    answers = Sizes(uniform(rng, 10, 40), 0.5, 2, 300)
    documents = Sizes(prompt, 0.3, 1_000, 31_000)
    long = Load("documents", rate=long_rate, prompt_tokens=documents, output_tokens=answers, **bursts)
    victims, culprits = (
        Scenario((load,), seed=seed, duration_s=duration, engine=e, cost=c)
        for load, e, c in zip((short, long), engines, costs, strict=True)
    )
    regime = {
        "duration_s": duration, "sigma": sigma, "burst_s": burst, "rate": rate, "long_rate": long_rate,
        "prompt": prompt, "utilisation": long_rate * prefill_s, "budget": engines[0].max_num_batched_tokens,
        "scale": costs[0].step / 0.006, "async": engines[0].async_scheduling,
    }  # fmt: skip
    return victims, culprits, regime


def exposure_null(seed: int) -> Result:
    """The exposure test of coupling where two pools share bursts of load and nothing else."""
    of_victims, of_culprits, regime = pools(seed)
    short, long = simulate(of_victims).requests, simulate(of_culprits).requests
    seen = np.isfinite(short.finished_s)
    prefilled = np.isfinite(long.first_token_s)
    victims = Victims(
        ns(short.arrival_s[seen]),
        (short.first_shown_s - short.arrival_s)[seen],
        ns(short.finished_s[seen]),
        short.prompt[seen].astype(np.float64),
    )
    effect = exposure(victims, ns(long.scheduled_s[prefilled]), ns(long.first_token_s[prefilled]))
    return {"test": "exposure", "seed": seed, "p": None if effect is None else effect.p_value, **regime}


# -- a limit that is the true p99 -----------------------------------------------------------------

SLOW_STEPS = Cost(
    step=0.012, decode_request=1e-4, context_token=4e-8, prefill_token=6e-5, prefill_request=4e-4, host_gap=4e-4
)  # fmt: skip
HEAVY_TAILS = Cost(
    step=0.012, decode_request=1e-4, prefill_token=6e-5, prefill_request=4e-4, heavy_share=0.005, heavy_alpha=2.2
)  # fmt: skip


def chat(rate: float, output: int = 12, sigma: float | None = None, burst_s: float = 0.0) -> Load:
    load = Load(
        "chat", rate=rate, prompt_tokens=Sizes(150, 0.5, 8, 1_500), output_tokens=Sizes(output, 0.5, 2, 10 * output)
    )  # fmt: skip
    return load if sigma is None else replace(load, arrivals="bursty", burst_sigma=sigma, burst_s=burst_s)


DOCUMENTS = Load(
    "documents", rate=0.12, prompt_tokens=Sizes(9_000, 0.3, 4_000, 31_000), output_tokens=Sizes(20, 0.5, 2, 100)
)  # fmt: skip
#: What is measured in a window of some minutes, from hardly any bursts to such that no window shows what they do.
WINDOWS: Mapping[str, Scenario] = {
    "Poisson": Scenario((chat(16),), duration_s=240, cost=SLOW_STEPS),
    "Poisson, heavy tails": Scenario((chat(24),), duration_s=200, cost=HEAVY_TAILS),
    "mild bursts": Scenario((chat(25, 6, 0.25, 2),), duration_s=300, cost=SLOW_STEPS),
    "bursts": Scenario((chat(16, 12, 0.5, 12),), duration_s=300, cost=SLOW_STEPS),
    "slow bursts": Scenario((chat(12, 12, 0.4, 40),), duration_s=300, cost=SLOW_STEPS),
    "behind long prompts": Scenario((chat(14), DOCUMENTS), duration_s=240, cost=SLOW_STEPS),
}
METRICS = ("TTFT", "E2E")
POOLED_SEEDS = range(1, 440, 2)
#: Window -> p99 of TTFT and of E2E, s, over `POOLED_SEEDS`: none of those that report.
TRUE_P99_S: Mapping[str, tuple[float, float]] = {
    "Poisson": (0.09504, 0.64546),
    "Poisson, heavy tails": (0.11563, 0.73754),
    "mild bursts": (0.12850, 0.44177),
    "bursts": (0.16776, 0.96916),
    "slow bursts": (0.10064, 0.66198),
    "behind long prompts": (0.89451, 1.45853),
}


@lru_cache(maxsize=1)
def window(name: str, seed: int) -> tuple[NDArray[np.int64], tuple[Floats, Floats]]:
    """Arrivals, and both metrics, of the chat requests of a window."""
    q = simulate(replace(WINDOWS[name], seed=seed)).requests
    chats = (q.load == 0) & np.isfinite(q.finished_s)
    arrival = q.arrival_s[chats]
    return ns(arrival), (q.first_shown_s[chats] - arrival, q.finished_s[chats] - arrival)


def exceeds_null(seed: int) -> Result:
    """Whether an objective at the true p99 is called broken; each world asks for one metric."""
    name, metric = list(WINDOWS)[seed // 2 % len(WINDOWS)], seed // 2 // len(WINDOWS) % 2
    times_ns, values = window(name, seed)
    above = values[metric] > TRUE_P99_S[name][metric]
    said = stats.exceeds(above, times_ns, 0.99)
    return {
        "test": "exceeds", "seed": seed, "window": name, "metric": METRICS[metric], "fired": said is True,
        "decided": said is not None, "above": int(above.sum()), "n": len(above),
    }  # fmt: skip


def interval_null(seed: int) -> Result:
    """Whether the interval of p99 holds the true one, by metric; None where too few samples forbid to state it."""
    name = list(WINDOWS)[seed // 2 % len(WINDOWS)]
    times_ns, metrics = window(name, seed)
    covers: dict[str, bool | None] = {}
    for metric, values, truth in zip(METRICS, metrics, TRUE_P99_S[name], strict=True):
        # As the ledger states it.
        n_eff = stats.quantile_samples(values, 0.99, times_ns)
        interval = (
            stats.quantile_interval(values, 0.99, n_eff) if stats.allows_quantile(0.99, n_eff) else None
        )
        covers[metric] = None if interval is None else bool(interval[0] <= truth <= interval[1])
    return {"test": "interval", "seed": seed, "window": name, **covers}


def window_null(seed: int) -> Result:
    """What both say of one window, which is played once."""
    return {"test": "window", "seed": seed, "parts": [exceeds_null(seed), interval_null(seed)]}


def pooled(name: str) -> tuple[float, float]:
    values = [window(name, seed)[1] for seed in POOLED_SEEDS]
    ttft, e2e = (float(np.quantile(np.concatenate(each), 0.99)) for each in zip(*values, strict=True))
    return ttft, e2e


# -- latencies that come in bursts -----------------------------------------------------------------

#: Correlation of one request's load with the next one's.
PHIS = (0.98, 0.9, 0.0)
BURSTS_COVER = 0.90


def autoregressive(seed: int, phi: float) -> tuple[NDArray[np.int64], Floats, float]:
    """(arrivals, latencies, their true p99): log-normal latencies of which a share of the variance follows a load that is an
    AR(1) over requests; in half of the worlds the load moves arrivals too."""
    rng = np.random.default_rng([seed, 505, round(100 * phi)])
    n = round(uniform(rng, 2_000, 60_000))
    share, sigma = float(rng.choice([0.3, 0.5, 0.8, 1.0])), float(rng.uniform(0.3, 1.2))
    shocks = rng.standard_normal(n) * np.sqrt(1 - phi**2)
    shocks[0] = rng.standard_normal()
    load: Floats = np.asarray(lfilter([1.0], [1.0, -phi], shocks))
    mixed = np.sqrt(share) * load + np.sqrt(1 - share) * rng.standard_normal(n)
    gaps = rng.exponential(0.1, n) * np.exp(-rng.choice([0.0, 0.7]) * load)
    return ns(np.cumsum(gaps)), np.exp(sigma * mixed), float(np.exp(sigma * ndtri(0.99)))


def bursts_null(seed: int) -> Result:
    """What is said in bursts of load, of a window for each of `PHIS`."""
    return {"test": "window", "seed": seed, "parts": [burst_null(seed, phi) for phi in PHIS]}


def burst_null(seed: int, phi: float) -> Result:
    """Whether the interval of p99 holds the true one; None where too few samples forbid to state it."""
    times_ns, values, truth = autoregressive(seed, phi)
    n_eff = stats.quantile_samples(values, 0.99, times_ns)
    interval = stats.quantile_interval(values, 0.99, n_eff) if stats.allows_quantile(0.99, n_eff) else None
    covers = None if interval is None else bool(interval[0] <= truth <= interval[1])
    return {"test": "bursts", "seed": seed, "phi": phi, "n": len(values), "covers": covers}


# -- ranks that are alike -------------------------------------------------------------------------

STRAGGLER, STRAGGLER_SQL = next(
    (rule, sql) for rule, sql in registry.rules() if rule.name == "straggler-rank"
)
by_chance: Callable[..., float] = importlib.import_module(STRAGGLER.decide.__module__).by_chance


def alike(seed: int) -> tuple[Outcome, dict[str, float]]:
    """Steps of two to eight ranks whose work differs by chance alone, on hosts whose clocks are apart."""
    rng = np.random.default_rng([seed, 404])
    ranks, moe = int(rng.integers(2, 9)), bool(rng.random() < 0.5)
    tp = int(rng.choice([t for t in (1, 2, ranks) if ranks % t == 0])) if moe else ranks
    hosts = int(rng.choice([1, 2, ranks] if ranks in (4, 6, 8) else [1, ranks]))
    offsets, drifts = (np.repeat(rng.normal(0, scale, hosts), ranks // hosts) for scale in (0.005, 20))
    steps, step_s = int(uniform(rng, 6, 80)), uniform(rng, 0.004, 0.025)
    settings = Ranks(
        tp,
        # As many experts on each rank.
        experts=ranks * -(-16 // ranks),
        layers=int(rng.integers(2, 7)),
        hosts=hosts,
        offset_s=tuple(map(float, offsets)) if hosts > 1 else (),
        drift_ppm=tuple(map(float, drifts)) if hosts > 1 else (),
        emitter="nccl" if rng.random() < 0.5 else "gloo",
        spread=uniform(rng, 0.01, 0.15),
    )
    engines = ranks // tp
    scenario = Scenario(
        (), seed=seed, engine=Engine(data_parallel=engines, moe=moe), ranks=settings,
        telemetry=Telemetry(profile=((0.0, 100.0),)),
    )  # fmt: skip
    empty: dict[str, Any] = {"Ints": np.zeros(0, np.int64), "Floats": np.zeros(0)}
    nobody = Requests(**{name: empty.get(kind, []) for name, kind in Requests.__annotations__.items()})
    outcome = Outcome(scenario, nobody, [])
    world = outcome.worlds["a"] = RankWorld(scenario, "a", 0, seed)
    durations, now = [], 0.0
    for k in range(steps):
        durations.append(world.step(k, now, [step_s * float(np.exp(rng.normal(0, 0.2)))] * engines)[0])
        now += durations[-1] + 0.0002
    start = np.array(world.starts)
    columns: dict[str, Any] = {name: np.zeros(steps, np.int64) for name in Steps.__annotations__}
    columns |= {"dummy": np.zeros(steps, bool), "start_s": start, "end_s": start + np.array(durations)}
    columns |= {"decode_requests": np.full(steps, 8), "decode_tokens": np.full(steps, 8)}
    runs: dict[str, Any] = {
        name: np.zeros(0, bool if name == "gives" else np.int64) for name in Runs.__annotations__
    }
    outcome.engines += [EngineOutcome("a", e, "both", Steps(**columns), Runs(**runs)) for e in range(engines)]
    regime = {
        "ranks": ranks, "moe": moe, "tp": tp, "hosts": hosts, "steps": steps, "step_s": step_s,
        "layers": settings.layers, "spread": settings.spread, "metadata": settings.emitter == "nccl",
    }  # fmt: skip
    return outcome, regime


def straggler_null(seed: int) -> Result:
    """How likely the straggler rule calls the lead of the rank that it picks, where all are alike."""
    outcome, regime = alike(seed)
    folder = Path(tempfile.mkdtemp(prefix="tailscope-null-"))
    try:
        write_trace(profile_tables(outcome), folder / "trace.parquet")
        with Trace(str(folder / "trace.parquet"), threads=1) as trace:
            diagnose(trace, Config())
            limits = {name: limit for name, limit in STRAGGLER.limits.items() if f"${name}" in STRAGGLER_SQL}
            rows = trace.rows(STRAGGLER_SQL, limits)
    finally:
        shutil.rmtree(folder)
    worst = max(rows, key=lambda r: (r["own_ns"], r["decided_ns"]))
    return {"test": "straggler", "seed": seed, "p": by_chance(rows, worst), **regime}


# -- all of them ----------------------------------------------------------------------------------

TESTS: tuple[Callable[[int], Result], ...] = (
    exposure_null, window_null, bursts_null, straggler_null, pair_null,
)  # fmt: skip
NAMES = {
    "exposure": "hol-coupling without steps: unrelated pools in common bursts",
    "exceeds": "objective broken: the limit is the true p99",
    "straggler": "straggler-rank: ranks that are alike",
}


def share_of(name: str, hits: int, n: int, bar: str, low: float, high: float, **more: Any) -> Result:
    """A row of the summary: a share with its 95 % interval (Clopper and Pearson 1934), and whether all of that lies within
    `low` and `high`."""
    exact = binomtest(hits, n).proportion_ci(0.95, method="exact")
    interval = float(exact.low), float(exact.high)
    return {
        "name": name, "n": n, "share": hits / n, "low": interval[0], "high": interval[1], "bar": bar,
        "holds": low <= interval[0] and interval[1] <= high, **more,
    }  # fmt: skip


def summarise(results: Sequence[Result]) -> list[Result]:
    """A row for each kind of test among the results: how often it fires, at 0.05 and (`share_01`) at 0.01.

    A test that could not be made has not fired. Raises ValueError where the true p99s are out of date.
    """
    results = [part for r in results for part in r.get("parts", [r])]
    _check_truth([r for r in results if r["test"] == "exceeds"])
    rows = []
    for test, name in NAMES.items():
        own = [r for r in results if r["test"] == test]
        if not own:
            continue
        if test == "exceeds":
            counts = [sum(r["fired"] for r in own), None]
        else:
            counts = [sum(r["p"] is not None and r["p"] <= level for r in own) for level in LEVELS]
        share_01 = None if counts[1] is None else counts[1] / len(own)
        bar = f"{FIRES[0]:.1%}–{FIRES[1]:.1%}"
        rows.append(share_of(name, counts[0] or 0, len(own), bar, *FIRES, share_01=share_01))
    stated = [r[m] for r in results if r["test"] == "interval" for m in METRICS if r[m] is not None]
    if stated:
        name = "interval of p99 holds the true one, where it is stated"
        rows.append(share_of(name, sum(stated), len(stated), f"≥ {COVERS:.0%}", COVERS, 1.0, share_01=None))
    for phi in sorted({r["phi"] for r in results if r["test"] == "bursts"}):
        own = [r["covers"] for r in results if r["test"] == "bursts" and r["phi"] == phi]
        stated = [covers for covers in own if covers is not None]
        if stated:
            name, bar = f"interval of p99 in AR({phi:g}) bursts, where it is stated", f"≥ {BURSTS_COVER:.0%}"
            of_all: Result = {"share_01": None, "of": len(own)}
            rows.append(share_of(name, sum(stated), len(stated), bar, BURSTS_COVER, 1.0, **of_all))
    return rows + _pairs([r for r in results if r["test"] == "pair"])


def _pairs(results: Sequence[Result]) -> list[Result]:
    """What `compare` calls, and whether its intervals hold the truth."""
    if not results:
        return []
    called = sum(r["called"] for r in results)
    high = f"≤ {CALLED:.0%}"
    rows = [
        share_of(
            "compare: a change is called, and none is there",
            called,
            len(results),
            high,
            0.0,
            CALLED,
            share_01=None,
        )
    ]
    ample = [r for r in results if r["ample"]]
    if ample:
        seen, name = (
            sum(r["slower_called"] for r in ample),
            "compare: a fifth longer is called, with ample data",
        )
        rows.append(share_of(name, seen, len(ample), f"≥ {SEEN:.0%}", SEEN, 1.0, share_01=None))
        wrong, name = sum(r["faster_called"] for r in results), "compare: a fifth longer is called faster"
        rows.append(share_of(name, wrong, len(results), "≤ 1%", 0.0, 0.01, share_01=None))
    for key, name in (
        ("p99_covers", "compare: interval of p99 holds the true one, where it is stated"),
        ("delta_covers", "compare: interval of the change of p99 holds none, where none is"),
    ):
        covers = [hit for r in results for hit in r[key]]
        if covers:
            bar = f"≥ {HOLDS:.0%}"
            rows.append(share_of(name, sum(covers), len(covers), bar, HOLDS, 1.0, share_01=None))
    return rows


def _check_truth(results: Sequence[Result]) -> None:
    """The true p99 is where one in a hundred of all requests lies above it."""
    for name in WINDOWS:
        for metric in METRICS:
            worlds = [r for r in results if (r["window"], r["metric"]) == (name, metric)]
            if len(worlds) < STALE_WORLDS:
                continue
            above, n = (np.array([r[key] for r in worlds], np.float64) for key in ("above", "n"))
            off = (above - 0.01 * n) / n.mean()
            if abs(off.mean()) > STALE * off.std(ddof=1) / np.sqrt(len(off)):
                raise ValueError(
                    f"the true p99 of {metric} in {name!r} is out of date: {above.sum() / n.sum():.2%} lie above it; "
                    "python tests/accuracy/nulls.py prints it anew"
                )


if __name__ == "__main__":
    with multiprocessing.Pool() as pool:
        for known, p99 in zip(WINDOWS, pool.map(pooled, WINDOWS, chunksize=1), strict=True):
            print(f'    "{known}": ({p99[0]:.5f}, {p99[1]:.5f}),')
