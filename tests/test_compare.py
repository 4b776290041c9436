"""Comparing traces: what did not change is not called, a lighter load is no faster server, and a change is seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pyarrow as pa
import pytest
import worlds
from called import called
from numpy.typing import NDArray
from real import CAPTURES, EXAMPLE, needs_captures
from test_cli import tailscope

sys.path.insert(0, str(Path(__file__).parent / "accuracy"))

import pairs

from tailscope.align import Scope
from tailscope.compare.blocks import Blocks, Values, changes, sample
from tailscope.compare.pair import Comparison, compare
from tailscope.compare.read import Side, read
from tailscope.compare.sweep import sweep
from tailscope.config import Config, Slo
from tailscope.load_shape import loop_of
from tailscope.render.compare import comparison_json, schema, sweep_json
from tailscope.schema import BY_NAME
from tailscope.store import Trace

Floats = NDArray[np.float64]
S = 1_000_000_000


def requests(
    folder: Path,
    seed: int,
    *,
    rate: float = 12.0,
    long_share: float = 0.2,
    short_s: float = 0.2,
    long_s: float = 2.0,
    seconds: int = 400,
    failed: float = 0.0,
    prompt: int = 200,
    streamed: bool = True,
) -> Path:
    """A trace of a client's requests: short ones and long ones, each with a latency of its own that knows no load."""
    rng = np.random.default_rng(seed)
    n = rng.poisson(rate * seconds)
    arrival = np.sort(rng.integers(0, seconds * S, n)) + worlds.START_NS
    long = rng.random(n) < long_share
    ttft = np.where(long, long_s, short_s) * rng.lognormal(0, 0.3, n)
    e2e = ttft + 0.02 * 20 * rng.lognormal(0, 0.2, n)
    status = np.where(rng.random(n) < failed, "error", "ok")
    columns: dict[str, Any] = {
        "instance": ["a"] * n,
        "request_key": [f"{seed}-{i}" for i in range(n)],
        "observer": ["client"] * n,
        "arrival_ns": arrival,
        "ttft_ns": pa.array((ttft * 1e9).astype(np.int64), mask=np.full(n, not streamed)),
        "e2e_ns": (e2e * 1e9).astype(np.int64),
        "finished_ns": arrival + (e2e * 1e9).astype(np.int64),
        "prompt_tokens": np.where(long, 20_000, prompt),
        "output_tokens": np.full(n, 21),
        "status": status,
    }
    arrow = BY_NAME["requests"].arrow
    arrays = [pa.array(columns[f.name], f.type) if f.name in columns else pa.nulls(n, f.type) for f in arrow]
    return worlds.write(folder, {"requests": pa.Table.from_arrays(arrays, schema=arrow)})


def side(path: Path, config: Config | None = None) -> Side:
    with Trace(str(path), threads=1) as trace:
        return read(trace, config or Config(), Scope())


def compared(one: Path, other: Path, config: Config | None = None) -> Comparison:
    found = compare(side(one, config), side(other, config), config or Config())
    jsonschema.validate(json.loads(comparison_json(found, [])), schema())
    return found


def verdicts(found: Comparison) -> dict[tuple[str, str, str], str]:
    return {(c.klass, c.metric, c.quantile): c.verdict for c in found.changes}


# -- statistics -------------------------------------------------------------------------------------


def test_pairs_alike_are_rarely_called_and_a_fifth_mostly_is() -> None:
    """The full form is in `make accuracy`; here some of each regime."""
    played = [pairs.pair_null(seed) for seed in range(1, 29, 2)]
    assert sum(p["called"] for p in played) <= 3
    assert not any(p["faster_called"] for p in played)
    ample = [p for p in played if p["ample"]]
    assert sum(p["slower_called"] for p in ample) >= 0.9 * len(ample)
    covers = [hit for p in played for hit in p["delta_covers"]]
    assert sum(covers) >= 0.85 * len(covers)


def test_a_trace_against_itself_has_not_changed() -> None:
    one = pairs.side("Poisson", 1)
    found = [c for c in changes(one, one) if c.change is not None]
    assert found
    assert all(c.change == 0 and c.verdict in ("same", "cannot tell") for c in found)
    assert all(c.interval is not None and c.interval[0] <= 0 <= c.interval[1] for c in found)


def test_bursts_longer_than_a_tenth_of_the_trace_let_nothing_be_said() -> None:
    """Six bursts, one of them much slower: a thousand requests, six things that happened."""
    rng = np.random.default_rng(0)
    times = np.sort(np.concatenate([rng.integers(k * 100 * S, (k * 100 + 20) * S, 200) for k in range(6)]))
    level = np.repeat([1.0, 1.0, 5.0, 1.0, 2.0, 1.0], 200)

    def window(factor: float) -> Any:
        values = Values(factor * level * rng.lognormal(0, 0.05, 1200), times, np.ones(1200), 1200)
        return sample({("all", "TTFT"): values}, (0, 600 * S), 1)

    found = changes(window(1.0), window(1.5))
    assert {c.verdict for c in found} == {"cannot tell"}
    assert {c.reason for c in found} <= {"too-few-samples", "too-few-blocks"}


def test_blocks_of_independent_values_spread_as_the_mean_of_them_does() -> None:
    rng = np.random.default_rng(1)
    times = np.sort(rng.integers(0, 1000 * S, 20_000))
    blocks = Blocks((0, 1000 * S), 0.5, 3)
    values = rng.exponential(1.0, 20_000)
    estimate = blocks.ratio(blocks.per_slice(times, values), blocks.per_slice(times))
    assert estimate.point == pytest.approx(values.mean())
    assert np.std(estimate.deviations) == pytest.approx(1 / np.sqrt(20_000), rel=0.25)
    low, high = estimate.interval()
    assert low < 1.0 < high


def test_weights_move_a_quantile() -> None:
    values = Values(np.array([1.0, 2.0, 3.0, 4.0]), np.arange(4), np.array([1.0, 1.0, 1.0, 7.0]), 4)
    assert values.quantile(0.5) == 4.0
    assert Values(values.values_s, values.times_ns, np.ones(4), 4).quantile(0.5) == 2.5


# -- loops ------------------------------------------------------------------------------------------


def test_loops() -> None:
    rng = np.random.default_rng(2)
    arrival = np.sort(rng.integers(0, 300 * S, 1500))
    lasts: Floats = rng.exponential(2.0, 1500) * 1e9
    assert loop_of(arrival, arrival + lasts).kind == "open"
    # Each user asks again as soon as it is answered; with thinking, after a while.
    for users, think_s in ((8, 0.0), (3, 0.5)):
        starts, ends = [], []
        for _ in range(users):
            now = float(rng.uniform(0, 2))
            while now < 300:
                starts.append(now)
                now += rng.lognormal(0, 0.5)
                ends.append(now)
                now += think_s * rng.exponential()
        order = np.argsort(starts)
        begin: Floats = np.array(starts, np.float64)[order] * 1e9
        end: Floats = np.array(ends, np.float64)[order] * 1e9
        found = loop_of(begin.astype(np.int64), end)
        assert found.kind == "closed", think_s
        assert found.most <= users
    regular = np.arange(500, dtype=np.int64) * S
    lasts = 0.4e9 * rng.lognormal(0, 0.3, 500)
    assert loop_of(regular, np.asarray(regular + lasts, np.float64)).kind != "closed"
    assert loop_of(arrival[:10], (arrival[:10] + 1e9).astype(np.float64)).kind == "unknown"


# -- pairs ------------------------------------------------------------------------------------------


def test_the_same_service_twice(tmp_path: Path) -> None:
    found = compared(requests(tmp_path / "a", 1), requests(tmp_path / "b", 2))
    assert found.status in ("same", "cannot-tell")
    assert not [item for item in found.load if item.status == "differs"]
    assert found.common.matched_by == () or "class" in found.common.matched_by
    assert found.regressions(0.0) == []


def test_a_mix_of_fewer_long_requests_is_no_faster_server(tmp_path: Path) -> None:
    """Simpson: every class is a tenth slower, and the p95 of all of them falls."""
    before = requests(tmp_path / "a", 1, rate=3, long_share=0.1, seconds=1200)
    after = requests(tmp_path / "b", 2, rate=3, long_share=0.03, seconds=1200, short_s=0.22, long_s=2.2)
    found = compared(before, after)
    sides = [side(p).requests.metric("TTFT") for p in (before, after)]
    assert np.nanquantile(sides[1], 0.95) < np.nanquantile(sides[0], 0.95) / 2
    assert found.text.startswith("Not the same load: share of class ")
    assert "class" in found.common.matched_by
    assert not [key for key, verdict in verdicts(found).items() if verdict == "faster"]
    assert verdicts(found)["<512", "TTFT", "p50"] == "slower"


def test_mixes_too_far_apart_are_not_compared(tmp_path: Path) -> None:
    found = compared(
        requests(tmp_path / "a", 1, long_share=0.3), requests(tmp_path / "b", 2, long_share=0.02)
    )
    assert found.status == "not-comparable" and found.changes == ()
    assert found.as_observed


def test_within_a_class_longer_prompts_are_matched(tmp_path: Path) -> None:
    """All short prompts are four times as long: nothing of the class is alike."""
    found = compared(
        requests(tmp_path / "a", 1, long_share=0.0, prompt=100),
        requests(tmp_path / "b", 2, long_share=0.0, prompt=400, short_s=0.3),
    )
    assert found.status == "not-comparable"
    assert found.common.before_share == 0
    assert found.changes == () and found.as_observed
    assert found.regressions(0.0) == [], "what cannot be compared is no regression"


def test_a_slower_server_is_called_and_its_outcomes_told(tmp_path: Path) -> None:
    config = Config(slos=(Slo("<512", "TTFT", "p99", 0.4),))
    found = compared(
        requests(tmp_path / "a", 1, long_share=0.0),
        requests(tmp_path / "b", 2, long_share=0.0, short_s=0.26),
        config,
    )
    assert found.status == "regressed"
    p50 = next(c for c in found.changes if (c.metric, c.quantile) == ("TTFT", "p50"))
    assert p50.change == pytest.approx(0.3, abs=0.05)
    assert p50.p_slower_5 is not None and p50.p_slower_5 > 0.99
    assert p50.interval is not None and p50.interval[0] < 0.3 < p50.interval[1]
    attained = next(o for o in found.outcomes if o.name == "attained")
    # Log-normal of sigma 0.3: ln(0.4 / 0.2) and ln(0.4 / 0.26) in sigmas.
    assert attained.before == pytest.approx(0.990, abs=0.006)
    assert attained.after == pytest.approx(0.924, abs=0.015)
    assert attained.interval is not None and attained.interval[1] < 0
    assert len(found.regressions(0.05)) >= 1 and found.regressions(0.6) == []
    grown = {(p.klass, p.component): p.difference_s for p in found.bill}
    # All of TTFT is one phase here, as nothing says what it held.
    assert max(grown.values()) == pytest.approx(0.06 * np.exp(0.3**2 / 2), abs=0.012)


def test_more_failures_are_said(tmp_path: Path) -> None:
    found = compared(requests(tmp_path / "a", 1), requests(tmp_path / "b", 2, failed=0.2))
    assert any("failures differ" in note for note in found.notes)
    assert any(i.name == "error" and i.status == "differs" for i in found.load)


def test_half_the_rate_is_another_load(tmp_path: Path) -> None:
    found = compared(requests(tmp_path / "a", 1), requests(tmp_path / "b", 2, rate=6.0))
    assert found.text.startswith("Not the same load: arrivals")
    assert not [v for v in verdicts(found).values() if v in ("faster", "slower")]


def test_nothing_in_common(tmp_path: Path) -> None:
    found = compared(
        requests(tmp_path / "a", 1, long_share=0.0, seconds=60),
        requests(tmp_path / "b", 2, long_share=1.0, seconds=60),
    )
    assert found.status in ("not-comparable", "no-data", "cannot-tell")
    assert found.regressions(0.0) == []


# -- sweeps -----------------------------------------------------------------------------------------


def test_a_sweep_brackets_its_knee(tmp_path: Path) -> None:
    latency = {4.0: 0.20, 8.0: 0.21, 16.0: 0.22, 24.0: 0.6, 32.0: 1.5}
    paths = {
        rate: requests(tmp_path / f"{rate:g}", int(rate), rate=rate, long_share=0.0, short_s=s, seconds=200)
        for rate, s in latency.items()
    }
    found = sweep([side(paths[rate]) for rate in (16.0, 4.0, 32.0, 8.0, 24.0)])
    jsonschema.validate(json.loads(sweep_json(found)), schema())
    assert [round(p.load) for p in found.points] == sorted(round(p.load) for p in found.points)
    low, high = found.knee
    assert low == pytest.approx(16, rel=0.1) and high == pytest.approx(24, rel=0.1)
    assert "lies between" in found.text


def test_a_sweep_without_a_knee_says_so(tmp_path: Path) -> None:
    sides = [side(requests(tmp_path / f"{r}", r, rate=r, long_share=0.0, seconds=200)) for r in (4, 8, 16)]
    found = sweep(sides)
    assert found.knee[1] is None and found.saturates is None
    assert found.text.startswith("No knee up to ")


# -- the command ------------------------------------------------------------------------------------


def test_the_command_and_its_exit_status(tmp_path: Path) -> None:
    before = requests(tmp_path / "a", 1, long_share=0.0)
    after = requests(tmp_path / "b[red]\x1b[31m", 2, long_share=0.0, short_s=0.26)
    done = tailscope("compare", before, after)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("REGRESSED  ")
    assert "\x1b" not in done.stdout and "b[red]" in done.stdout
    for title in ("The same load?", "Latency", "What came out"):
        assert title in done.stdout
    assert tailscope("compare", before, after, "--fail-on-regression", "5%").returncode == 3
    assert called("compare", after, before, "--fail-on-regression", "5%").returncode == 0
    assert called("compare", before, after, "--fail-on-regression", "80%").returncode == 0
    shown = called("compare", before, after, "--format", "json", "--fail-on-regression", "5")
    assert shown.returncode == 3
    document = json.loads(shown.stdout)
    jsonschema.validate(document, schema())
    assert document["verdict"]["status"] == "regressed" and document["verdict"]["regressions"] >= 1
    assert document["verdict"]["tested"]


def test_what_was_not_tested_is_no_all_clear(tmp_path: Path) -> None:
    before = requests(tmp_path / "a", 1, long_share=0.0)
    # A metric of which one trace knows nothing.
    found = compared(before, requests(tmp_path / "b", 2, long_share=0.0, streamed=False))
    missing = {(u.metric, u.quantile): u.reason for u in found.untested}
    assert missing["TTFT", None] == missing["TPOT", None] == "not-after"
    assert missing["ITL", None] == "not-measured"
    assert {c.metric for c in found.changes if c.interval} == {"E2E"}
    done = called("compare", before, tmp_path / "b", "--fail-on-regression", "5%")
    assert done.returncode == 0
    assert "not tested for regressions:" in done.stderr
    assert "no values after: <512 TTFT, TPOT" in " ".join(done.stderr.split())
    # Too little of everything: there is nothing that a status of 0 could stand for.
    few = requests(tmp_path / "few", 3, seconds=2)
    done = tailscope("compare", few, few, "--fail-on-regression", "5%")
    assert done.returncode == 4 and "nothing was tested for regressions:" in done.stderr
    assert "not tested" in done.stdout and "no difference shown" not in done.stdout
    assert called("compare", few, few).returncode == 0
    document = json.loads(called("compare", few, few, "--format", "json").stdout)
    jsonschema.validate(document, schema())
    assert document["verdict"]["tested"] is False
    assert {u["reason"] for u in document["untested"]} >= {"too-few-samples"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["A"], "two traces"),
        (["A", "no-such.parquet"], "no such trace"),
        (["A", "A", "--fail-on-regression", "much"], "write a percentage"),
        (["A", "A", "A", "--fail-on-regression", "5%"], "needs two traces"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, args: list[str], message: str) -> None:
    trace = requests(tmp_path / "a", 1, seconds=10)
    done = called("compare", *[str(trace) if a == "A" else a for a in args])
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


# -- real files -------------------------------------------------------------------------------------


def test_the_example_against_itself(tmp_path: Path) -> None:
    assert called("ingest", EXAMPLE, "-o", tmp_path / "t.parquet").returncode == 0
    found = compared(tmp_path / "t.parquet", tmp_path / "t.parquet")
    assert found.status in ("same", "cannot-tell")
    assert {f.state for f in found.findings} == {"still"}
    assert {r.moved for r in found.ranges} == {"same bucket"}
    assert {(c.victim, c.culprit) for c in found.coupling}


def test_histograms_alone_are_ranges_and_nothing_is_called(tmp_path: Path) -> None:
    metrics = next(EXAMPLE.glob("**/metrics*"))
    assert called("ingest", metrics, "-o", tmp_path / "t.parquet").returncode == 0
    found = compared(tmp_path / "t.parquet", tmp_path / "t.parquet")
    assert found.ranges and not found.changes
    assert found.status == "cannot-tell"


@needs_captures
def test_runs_of_other_servers_are_not_compared_blindly(tmp_path: Path) -> None:
    for name in ("run1-dense-mixed", "run2-moe-tp2"):
        called("ingest", CAPTURES / "vllm-cpu" / name, "-o", tmp_path / name)
    found = compared(tmp_path / "run1-dense-mixed", tmp_path / "run2-moe-tp2")
    assert found.status in ("cannot-tell", "not-comparable")
    assert found.regressions(0.0) == []


def test_who_is_refused_at_once_is_in_flight_for_no_time() -> None:
    """A float knows today's instants to a hundred nanoseconds: no end comes before its start."""
    arrival = np.sort(np.random.default_rng(1).integers(0, 100 * S, 300)) + worlds.START_NS
    found = loop_of(arrival, arrival.astype(np.float64))
    assert found.kind != "closed" and found.mean_in_flight < 1e-3
