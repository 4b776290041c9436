"""Whether a load is closed, held back or open, and what scrapes, percentiles and clocks are worth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import MS, START_NS, Row, S, aligned, client, span, step

from tailscope.load_shape import Loop, loop_of
from tailscope.model import Trust
from tailscope.stats import Floats
from tailscope.trust_load import load_checks

# -- loads ----------------------------------------------------------------------------------------


def ns(seconds: Floats) -> Any:
    return START_NS + np.rint(seconds * 1e9).astype(np.int64)


def served(
    sent: Floats, seconds: Floats, limit: int | None = None, turnaround: float = 0.0
) -> tuple[Floats, Floats]:
    """When requests are sent and answered; with a limit each waits for one of so many in flight to end."""
    sent, ends = sent.copy(), np.empty(len(sent))
    slots: list[float] = []
    for i in range(len(sent)):
        if limit is not None and len(slots) == limit:
            slots.sort()
            sent[i] = max(sent[i], slots.pop(0) + turnaround)
        ends[i] = sent[i] + seconds[i]
        slots.append(float(ends[i]))
    return sent, ends


def latencies(rng: np.random.Generator, n: int) -> Floats:
    sigma = rng.choice([0.05, 0.3, 0.8])
    return np.asarray(rng.uniform(0.1, 8) * np.exp(sigma * rng.standard_normal(n)))


def poisson(rng: np.random.Generator, n: int) -> Floats:
    return np.asarray(np.cumsum(rng.exponential(1 / rng.uniform(0.3, 20), n)))


def bursty(rng: np.random.Generator, n: int) -> Floats:
    length = rng.uniform(5, 80)
    load = np.repeat(rng.standard_normal(int(n / length) + 2) * rng.uniform(0.3, 1.5), int(length) + 1)[:n]
    return np.asarray(np.cumsum(rng.exponential(1 / rng.uniform(0.5, 20), n) * np.exp(-load)))


def regular(rng: np.random.Generator, n: int) -> Floats:
    return np.asarray(np.arange(n) / rng.uniform(0.3, 20) + rng.normal(0, 1e-4, n)).clip(0)


def light(rng: np.random.Generator, n: int) -> Floats:
    return np.asarray(np.cumsum(rng.exponential(1 / rng.uniform(0.02, 0.2), n)))


def spikes(rng: np.random.Generator, n: int) -> Floats:
    """Many at once every so often, few between."""
    at = rng.integers(1, 12, n) * rng.uniform(10, 40) + rng.random(n) * 0.5
    return np.sort(np.where(rng.random(n) < 0.6, at, rng.random(n) * at.max()))


def said(loop: Loop) -> bool:
    return loop.kind == "closed" or loop.capped >= 0.05


@pytest.mark.parametrize("arrivals", [poisson, bursty, regular, light, spikes])
def test_an_open_load_is_not_called_closed(arrivals: Any) -> None:
    alarms = 0
    for seed in range(200):
        rng = np.random.default_rng([seed, 9])
        n = int(rng.integers(80, 1500))
        sent, ends = served(np.asarray(arrivals(rng, n)), latencies(rng, n))
        alarms += said(loop_of(ns(sent), ns(ends)))
    assert alarms <= 2


def test_clients_that_wait_for_answers_are_seen() -> None:
    """1 to 64 users who send again some milliseconds after an answer."""
    for seed in range(60):
        rng = np.random.default_rng([seed, 11])
        n, users = int(rng.integers(200, 1500)), int(np.exp(rng.uniform(0, np.log(64))))
        sent, ends = served(np.zeros(n), latencies(rng, n), users, turnaround=float(rng.uniform(0, 0.003)))
        loop = loop_of(ns(sent), ns(ends))
        assert loop.capped >= 0.5, (seed, users, loop)
        assert loop.limit == pytest.approx(users, abs=1)


def test_users_who_think_are_seen_while_it_matters() -> None:
    """Sixteen users, who think half as long as an answer takes."""
    found = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        free, sent, ends = list(rng.exponential(2.0, 16)), [], []
        for _ in range(1200):
            now = free.pop(int(np.argmin(free)))
            sent.append(now)
            ends.append(now + float(rng.lognormal(0.5, 0.3)))
            free.append(ends[-1] + float(rng.exponential(0.85)))
        loop = loop_of(ns(np.array(sent)), ns(np.array(ends)))
        found += loop.held > 0
    assert found >= 18


@pytest.mark.parametrize(("users", "think"), [(2, 0.5), (2, 1.0), (5, 0.5), (5, 1.0)])
def test_few_users_who_think_are_seen(users: int, think: float) -> None:
    """Who thinks at random, half or all of what an answer takes."""
    found = 0
    for seed in range(20):
        rng = np.random.default_rng([seed, users])
        free, sent, ends = list(rng.exponential(1.0, users)), [], []
        for _ in range(1000):
            now = free.pop(int(np.argmin(free)))
            sent.append(now)
            ends.append(now + float(rng.lognormal(-0.12, 0.5)))
            free.append(ends[-1] + float(rng.exponential(think)))
        found += loop_of(ns(np.array(sent)), ns(np.array(ends))).kind == "closed"
    assert found >= 18


def test_arrivals_more_even_than_chance_are_open() -> None:
    """They avoid the instants after an arrival, in which more is in flight, and wait for nobody."""
    closed = 0
    for seed in range(60):
        rng = np.random.default_rng([seed, 5])
        sent = np.cumsum(rng.gamma(4, 1 / float(rng.choice([4, 32])), int(rng.integers(200, 1500))))
        closed += loop_of(ns(sent), ns(sent + rng.lognormal(-0.12, 0.5, len(sent)))).kind == "closed"
    assert closed <= 1


def test_a_sweep_of_concurrency_is_closed_at_each_level() -> None:
    rng = np.random.default_rng(3)
    sent, ends = [np.zeros(0)], [np.zeros(0)]
    for users in (2, 8, 32):
        part = served(np.full(400, ends[-1].max(initial=0.0) + 5), latencies(rng, 400), users, 0.001)
        sent.append(part[0])
        ends.append(part[1])
    loop = loop_of(ns(np.concatenate(sent)), ns(np.concatenate(ends)))
    assert loop.capped > 0.8


def test_too_few_requests_tell_nothing() -> None:
    assert loop_of(ns(np.arange(59.0)), ns(np.arange(59.0) + 1)).kind == "unknown"


def test_requests_at_one_instant_are_no_crash() -> None:
    loop = loop_of(ns(np.zeros(100)), ns(np.zeros(100)))
    assert loop.held == 0


# -- checks ---------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "t"


def checked(place: Path, **tables: list[Row]) -> dict[str, Trust]:
    with aligned(place, tables) as trace:
        return {trust.check: trust for trust in load_checks(trace)}


def rows_of(sent: Floats, ends: Floats, make: Any = client, **columns: Any) -> list[Row]:
    times = zip(
        np.rint(sent * 1e9).astype(int).tolist(), np.rint(ends * 1e9).astype(int).tolist(), strict=True
    )
    return [make(f"r{i}", at, end - at, **columns) for i, (at, end) in enumerate(times)]


def test_a_closed_load_is_said_with_what_it_means(place: Path) -> None:
    rng = np.random.default_rng(0)
    sent, ends = served(np.zeros(400), latencies(rng, 400), 8, 0.002)
    trust = checked(place, requests=rows_of(sent, ends))["closed-loop"]
    assert trust.status == "warn"
    assert "clients wait for an answer before they send" in trust.detail
    assert "by 2 ms, with at most 8 in flight" in trust.detail
    assert "--request-rate without --max-concurrency" in trust.detail


def test_by_the_engines_view_it_may_be_a_gateway(place: Path) -> None:
    sent, ends = served(np.zeros(400), latencies(np.random.default_rng(0), 400), 8, 0.002)
    trust = checked(place, requests=rows_of(sent, ends, span))["closed-loop"]
    assert trust.status == "warn" and "a gateway's limit" in trust.detail


def test_an_open_load_passes(place: Path) -> None:
    rng = np.random.default_rng(1)
    sent, ends = served(poisson(rng, 400), latencies(rng, 400))
    found = checked(place, requests=rows_of(sent, ends))
    assert {check: trust.status for check, trust in found.items()} == {"closed-loop": "pass"}


def test_a_limit_that_shows_at_times_is_coordinated_omission(place: Path) -> None:
    """An open load at 4 a second, for a while at 40; the client keeps at most 20 in flight."""
    rng = np.random.default_rng(2)
    gaps = rng.exponential(0.25, 900)
    gaps[300:500] /= 10
    sent, ends = served(np.asarray(np.cumsum(gaps)), np.asarray(rng.lognormal(0.3, 0.3, 900)), 20, 0.001)
    trust = checked(place, requests=rows_of(sent, ends))["coordinated-omission"]
    assert trust.status == "warn" and "when one of 20 in flight ends" in trust.detail


@pytest.mark.parametrize(
    ("delay", "status", "part"),
    [
        (0.001, "pass", "adds 0.1% to the p99"),
        (0.2, "warn", "the p99 of E2E is 1 s from sending and 1.2 s from the intended instant"),
        (2.0, "fail", "up to 2 s later than it meant to: the p99 of E2E is 1 s from sending and 3 s"),
    ],
)
def test_what_the_client_meant_is_compared(place: Path, delay: float, status: str, part: str) -> None:
    sent = 0.5 * np.arange(1500.0)
    rows = rows_of(sent, sent + 1.0)
    for row in rows[::20]:
        row["intended_ns"] = row["arrival_ns"] - round(delay * S)
    for row in rows:
        row.setdefault("intended_ns", row["arrival_ns"])
    trust = checked(place, requests=rows)["coordinated-omission"]
    assert trust.status == status and part in trust.detail


def sample(seconds: float, value: float = 1.0) -> Row:
    return {"instance": "a", "series": "s", "time_ns": START_NS + round(seconds * 1e9), "value": value}


def queued_steps(every_s: float, seconds: float) -> list[Row]:
    """Steps of 50 ms for five minutes; every so often requests wait for some of them."""
    steps = []
    for i in range(6000):
        at = i * 0.05
        steps.append(step(round(at * 1e9), elapsed_ns=50 * MS, waiting=int(at % every_s < seconds)))
    return steps


def test_scrapes_that_miss_the_queues(place: Path) -> None:
    tables = {"iterations": queued_steps(20, 1.0), "metrics": [sample(t + 7) for t in range(0, 300, 15)]}
    trust = checked(place, **tables)["scrape-interval"]
    assert trust.status == "warn" and "scraped every 15 s" in trust.detail
    assert "of 15 times that requests queued (median 950 ms) lie between two scrapes" in trust.detail


def test_scrapes_that_see_the_queues(place: Path) -> None:
    tables = {"iterations": queued_steps(20, 5.0), "metrics": [sample(t) for t in range(300)]}
    assert checked(place, **tables)["scrape-interval"].status == "pass"
    quiet = {"iterations": queued_steps(20, 0.0), "metrics": [sample(t) for t in range(0, 300, 15)]}
    assert checked(place / "quiet", **quiet)["scrape-interval"].status == "pass"


def test_gauges_stand_still_in_long_steps(place: Path) -> None:
    steps = [step(i * 2 * S, elapsed_ns=2 * S) for i in range(1, 60)]
    trust = checked(place, iterations=steps, metrics=[sample(t) for t in range(0, 110, 2)])["scrape-interval"]
    assert trust.status == "warn" and "steps of more than 1 s" in trust.detail
    assert "scrape every second" not in trust.detail


def test_scrapes_alone_hide_what_is_shorter(place: Path) -> None:
    assert checked(place, metrics=[sample(t) for t in range(0, 300, 15)])["scrape-interval"].status == "warn"
    assert checked(place / "b", metrics=[sample(t) for t in range(300)]) == {}
    assert checked(place / "c", metrics=[sample(0)]) == {}


@pytest.mark.parametrize(
    ("name", "labels", "warns"),
    [
        ("http_request_duration_seconds", {"quantile": "0.99"}, True),
        ("job:ttft:p99", {}, True),
        ("vllm:e2e_latency_avg", {}, True),
        ("go_gc_duration_seconds", {"quantile": "1"}, False),
        ("vllm:avg_prompt_throughput_toks_per_s", {}, False),
        ("vllm:time_to_first_token_seconds", {"le": "1"}, False),
        ("sglang:inter_token_latency_seconds", {}, True),
    ],
)
def test_percentiles_made_elsewhere(place: Path, name: str, labels: dict[str, str], warns: bool) -> None:
    series = [{"instance": "a", "series": "s", "name": name, "type": "gauge", "labels": list(labels.items())}]
    found = checked(place, series=series)
    assert ("averaged-percentiles" in found) == warns
    if warns:
        assert found["averaged-percentiles"].status == "warn"


def test_a_clock_that_was_set(place: Path) -> None:
    rows = rows_of(np.arange(30.0), np.arange(30.0) + 0.4)
    assert "clock-steps" not in checked(place, requests=rows)
    rows[3]["finished_ns"] = rows[3]["arrival_ns"] - S
    rows[4]["finished_ns"] += 7 * S
    trust = checked(place / "b", requests=rows)["clock-steps"]
    assert trust.status == "warn" and trust.detail.startswith(
        "1 requests end or give a token before they begin"
    )
    assert "2 last" in trust.detail
