"""Workloads: rates, bursts and sizes as asked, streams that do not touch each other, and traces read or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real import CORPUS, needs_corpus

from tailscope.errors import BadInput
from tailscope.sim.outcome import Floats
from tailscope.sim.scenario import Engine, Load, Scenario, Sizes
from tailscope.sim.workload import LEAVE_BEFORE_FIRST, Trace, Workload, make, read_trace

AZURE = CORPUS / "azure-llm" / "data"
MOONCAKE = CORPUS / "mooncake" / "FAST25-release" / "traces"


def world(*loads: Load, **settings: Any) -> Scenario:
    return Scenario(loads=loads, **{"seed": 5, "duration_s": 1000.0, **settings})


def sent(scenario: Scenario) -> Workload:
    return make(scenario)[0]


def of(workload: Workload, load: int, *but: str) -> dict[str, list[Any]]:
    """A load's requests, without their load's number. NaN as None, to be compared."""
    rows = workload.load == load
    columns = {f.name: getattr(workload, f.name)[rows].tolist() for f in fields(Workload)}
    return {
        name: [None if isinstance(v, float) and math.isnan(v) else v for v in values]
        for name, values in columns.items()
        if name not in ("load", *but)
    }


def dispersion(times: Floats, width_s: float, until_s: float) -> float:
    """Variance of the counts in windows over their mean: 1 for a Poisson process."""
    counts = np.histogram(times, np.arange(0, until_s + width_s / 2, width_s))[0]
    return float(counts.var() / counts.mean())


def correlation(a: Floats, b: Floats) -> float:
    grid = np.arange(0, 10_001, 5)
    return float(np.corrcoef(np.histogram(a, grid)[0], np.histogram(b, grid)[0])[0, 1])


# -- when ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_poisson_load_has_its_rate_and_exponential_gaps(seed: int) -> None:
    times = sent(world(Load("a", rate=5, from_s=100, to_s=900), seed=seed)).intended_s
    assert times[0] >= 100 and times[-1] < 900 and (np.diff(times) > 0).all()
    assert abs(len(times) - 4000) < 4 * math.sqrt(4000)
    gaps = np.diff(times) * 5
    # Kolmogorov's distance from the exponential distribution; its 0.1 % point is 1.95 / sqrt(n).
    distance = np.abs(np.arange(len(gaps)) / len(gaps) - (1 - np.exp(-np.sort(gaps)))).max()
    assert distance < 1.95 / math.sqrt(len(gaps))
    assert 0.8 < dispersion(times - 100, 2, 800) < 1.25


def test_a_regular_load_begins_at_once_and_ends_before_its_end() -> None:
    assert sent(world(Load("a", arrivals="regular", rate=4, from_s=1, to_s=2))).intended_s.tolist() == [
        1.0,
        1.25,
        1.5,
        1.75,
    ]
    # 0.1 + 0.1 + 0.1 is above 0.3: the end is still kept.
    assert len(sent(world(Load("a", arrivals="regular", rate=10, to_s=0.3)))) == 3


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0])
def test_a_bursty_load_has_the_mean_rate_and_the_bursts_asked_for(sigma: float) -> None:
    load = Load("a", arrivals="bursty", rate=10, burst_sigma=sigma, burst_s=2)
    times = sent(world(load, duration_s=20_000.0)).intended_s
    # The mean of the rate over T varies by rate² (e^sigma² - 1) 2 burst_s / T, and somewhat less.
    spread = 10 * math.sqrt((math.exp(sigma**2) - 1) * 2 * 2 / 20_000) + math.sqrt(10 / 20_000)
    assert abs(len(times) / 20_000 - 10) < 4 * spread
    # In windows of 0.5 s, far shorter than a burst, the rate hardly changes: 1 + mean count (e^sigma² - 1).
    expected = 1 + 5 * (math.exp(sigma**2) - 1)
    assert 0.75 * expected < dispersion(times, 0.5, 20_000) < 1.15 * expected


def test_a_burst_lasts_as_long_as_asked() -> None:
    load = Load("a", arrivals="bursty", rate=50, burst_sigma=0.5, burst_s=10)
    times = sent(world(load, duration_s=20_000.0)).intended_s
    x = np.log(np.histogram(times, np.arange(0, 20_001, 1.0))[0] + 0.5)
    x -= x.mean()
    near, far = (float((x[:-lag] * x[lag:]).mean()) for lag in (2, 12))
    assert abs(near / far - math.e) < 0.5


def test_loads_share_a_burst_process_only_by_its_name() -> None:
    bursty = Load("a", arrivals="bursty", rate=10, burst_sigma=1, burst_s=20, common_load="x")
    pair = world(
        bursty, replace(bursty, name="b"), replace(bursty, name="c", common_load=None), duration_s=10_000.0
    )
    workload = sent(pair)
    a, b, c = (workload.intended_s[workload.load == i] for i in range(3))
    assert correlation(a, b) > 0.8
    assert abs(correlation(a, c)) < 0.2
    assert len(np.intersect1d(a, b)) == 0


def test_instants_as_given_with_their_sizes() -> None:
    load = Load(
        "a", arrivals="at", times_s=(3.0, 1.0, 2000.0, 1.0), prompts=(30, 10, 9, 11), outputs=(3, 1, 9, 2)
    )
    workload = sent(world(load))
    assert workload.intended_s.tolist() == [1.0, 1.0, 3.0]
    assert workload.prompt.tolist() == [10, 11, 30]
    assert workload.output.tolist() == [1, 2, 3]
    assert workload.index.tolist() == [0, 1, 2]


def test_requests_are_in_order_and_ties_in_that_of_the_loads() -> None:
    regular = Load("b", arrivals="regular", rate=1)
    workload = sent(world(regular, replace(regular, name="a"), Load("c", rate=3)))
    assert (np.diff(workload.intended_s) >= 0).all()
    ties = workload.load[workload.load < 2]
    assert (ties.reshape(-1, 2) == [0, 1]).all()


def test_a_load_ends_with_its_number_of_requests() -> None:
    whole = sent(world(Load("a", rate=5)))
    assert of(sent(world(Load("a", rate=5, requests=7))), 0, "abort_after") == {
        name: values[:7] for name, values in of(whole, 0, "abort_after").items()
    }
    assert len(sent(world(Load("a", rate=5, requests=10**6)))) == len(whole)


# -- streams ------------------------------------------------------------------------------------------

MIXED = (
    Load("poisson", rate=2, abort_share=0.3, prefix_tokens=64, prefixes=3),
    Load("bursty", arrivals="bursty", rate=2, common_load="x", prefix_tokens=32),
    Load("other", arrivals="bursty", rate=2, common_load="x", timeout_s=9.0, priority=-1, n=2),
    Load("at", arrivals="at", times_s=(1.0, 2.0)),
    Load("closed", arrivals="closed"),
)


def test_the_same_scenario_is_the_same_workload() -> None:
    one, two = sent(world(*MIXED)), sent(world(*MIXED))
    for i in range(len(MIXED)):
        assert of(one, i) == of(two, i)
    assert of(one, 0) != of(sent(world(*MIXED, seed=6)), 0)


@pytest.mark.parametrize("left_out", range(len(MIXED)))
def test_a_load_that_is_left_out_changes_no_other(left_out: int) -> None:
    rest = [load for i, load in enumerate(MIXED) if i != left_out]
    whole, closed = make(world(*MIXED))
    less, closed_less = make(world(*rest))
    for i, load in enumerate(rest):
        was, now = of(whole, MIXED.index(load)), of(less, i)
        # The numbers of common beginnings shift; which requests share one does not.
        for columns in (was, now):
            columns["prefix"] = [prefix - min(columns["prefix"], default=0) for prefix in columns["prefix"]]
        assert was == now
        if load.arrivals == "closed":
            before, after = closed[MIXED.index(load)], closed_less[i]
            assert [before.draw()[:2] for _ in range(2000)] == [after.draw()[:2] for _ in range(2000)]
            assert [before.think() for _ in range(2000)] == [after.think() for _ in range(2000)]


def test_a_longer_world_begins_as_the_shorter_one() -> None:
    short, long = sent(world(*MIXED[:3])), sent(world(*MIXED[:3], duration_s=3000.0))
    for i in range(3):
        was, now = of(short, i), of(long, i)
        count = len(was["index"])
        assert count > 500
        assert was == {name: values[:count] for name, values in now.items()}


# -- what ---------------------------------------------------------------------------------------------


def test_lengths_are_log_normal_about_the_median_and_cut() -> None:
    load = Load("a", rate=20, prompt_tokens=Sizes(300, 0.5), output_tokens=Sizes(50, 1.0, least=20, most=200))
    workload = sent(world(load))
    logs = np.log(workload.prompt)
    assert abs(np.median(workload.prompt) / 300 - 1) < 0.03
    assert abs(logs.std() - 0.5) < 0.02
    assert (workload.output.min(), workload.output.max()) == (20, 200)
    assert abs(np.corrcoef(logs, workload.output)[0, 1]) < 0.04


def test_lengths_from_a_list_come_equally_often() -> None:
    workload = sent(world(Load("a", rate=20, prompt_tokens=Sizes(values=(7, 90)), output_tokens=Sizes(5))))
    assert set(workload.prompt.tolist()) == {7, 90}
    assert abs((workload.prompt == 7).mean() - 0.5) < 0.02
    assert set(workload.output.tolist()) == {5}


def test_prompt_and_output_fit_the_model() -> None:
    load = Load("a", rate=20, prompt_tokens=Sizes(100, 1.0), output_tokens=Sizes(100, 1.0), prefix_tokens=60)
    workload = sent(world(load, engine=Engine(max_model_len=128)))
    assert (workload.prompt <= 127).all() and (workload.output >= 1).all()
    assert (workload.prompt + workload.output <= 128).all()
    assert (workload.prefix_tokens < workload.prompt).all()
    assert ((workload.prefix == -1) == (workload.prefix_tokens == 0)).all()


def test_common_beginnings_belong_to_their_load() -> None:
    a = Load("a", rate=5, prefix_tokens=32, prefixes=3, prompt_tokens=Sizes(100))
    workload = sent(world(a, Load("none", rate=5), replace(a, name="b", prefixes=2)))
    found = [set(workload.prefix[workload.load == i].tolist()) for i in range(3)]
    assert found == [{0, 1, 2}, {-1}, {3, 4}]


def test_clients_leave_at_random_instants_of_their_answer() -> None:
    workload = sent(world(Load("a", rate=50, abort_share=0.4)))
    leaving = workload.abort_after[~np.isnan(workload.abort_after)]
    assert abs(len(leaving) / len(workload) - 0.4) < 0.01
    assert abs((leaving <= 0).mean() - LEAVE_BEFORE_FIRST) < 0.02
    within = leaving[leaving > 0]
    assert within.max() < 1 and abs(within.mean() - 0.5) < 0.02


def test_what_is_one_for_a_load() -> None:
    workload = sent(world(Load("a"), Load("b", timeout_s=9.0, priority=-2, n=3)))
    a, b = workload.load == 0, workload.load == 1
    assert np.isnan(workload.timeout_s[a]).all() and (workload.timeout_s[b] == 9).all()
    assert set(workload.priority[b].tolist()) == {-2} and set(workload.n[b].tolist()) == {3}
    assert np.isnan(workload.abort_after).all()


def test_a_closed_load_draws_and_thinks() -> None:
    load = Load("a", arrivals="closed", users=3, think_s=2.0, prompt_tokens=Sizes(300, 0.5), timeout_s=8.0)
    workload, closed = make(world(load))
    assert len(workload) == 0 and list(closed) == [0]
    shapes = [closed[0].draw() for _ in range(3000)]
    assert abs(np.median([shape[0] for shape in shapes]) / 300 - 1) < 0.05
    assert {shape[2:5] for shape in shapes} == {(-1, 0, 8.0)}
    assert all(type(value) is int for value in shapes[0][:4])
    pauses = np.array([closed[0].think() for _ in range(3000)])
    assert abs(pauses.mean() - 2) < 0.15 and abs(pauses.std() - 2) < 0.25


# -- traces -------------------------------------------------------------------------------------------


def trace_of(folder: Path, text: str) -> Trace:
    path = folder / "t"
    path.write_bytes(text.encode())
    return read_trace(path)


def test_azure_of_2023_and_2024(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:04.9799600,4808,10\r\n"
        "2023-11-16 18:17:03.9799600,110,0\r\n",
    )
    assert trace.arrival_s.tolist() == pytest.approx([1.0, 0.0], abs=2e-6)
    assert trace.prompt.tolist() == [4808, 110] and trace.output.tolist() == [10, 0]
    assert trace.prefix.tolist() == [-1, -1]
    later = trace_of(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.5+00:00,1,2\n2024-05-10 00:00:02.5+00:00,3,4\n",
    )
    assert later.arrival_s.tolist() == [0.0, 2.0]


def test_mooncake_shares_the_longest_run_that_others_have(tmp_path: Path) -> None:
    rows = [(0, [1, 2, 3]), (500, [1, 2, 4]), (1000, [1, 5]), (1500, [9]), (2000, [9, 8])]
    trace = trace_of(
        tmp_path,
        "".join(
            f'{{"timestamp": {at}, "input_length": {len(ids) * 512}, "output_length": 5, "hash_ids": {ids}}}\n'
            for at, ids in rows
        ),
    )
    assert trace.arrival_s.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert trace.prefix_tokens.tolist() == [1024, 1024, 512, 512, 512]
    assert trace.prefix.tolist() == [0, 0, 1, 2, 2]


def test_our_own_columns_in_any_order(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        "prefix,arrival_s,output_tokens,prompt_tokens,prefix_tokens\nsystem,2.5,10,200,64\n\n,3,11,201,\nsystem,4e0,1,9,64\n",
    )
    assert trace.arrival_s.tolist() == [2.5, 3.0, 4.0]
    assert trace.prompt.tolist() == [200, 201, 9] and trace.output.tolist() == [10, 11, 1]
    assert trace.prefix.tolist() == [0, -1, 0] and trace.prefix_tokens.tolist() == [64, 0, 64]


def test_a_trace_is_played_from_an_instant_faster_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = "".join(f"{i},{i * 10},{i % 3},{'p' if i % 2 else ''},{32 if i % 2 else ''}\n" for i in range(20))
    path.write_text("arrival_s,prompt_tokens,output_tokens,prefix,prefix_tokens\n" + rows, encoding="utf-8")
    load = Load("a", arrivals="trace", trace=str(path), speed=2, from_s=10, to_s=15)
    first = Load("first", rate=1, prefix_tokens=8, prefixes=4)
    workload = sent(world(first, load, engine=Engine(max_model_len=64)))
    played = of(workload, 1)
    assert played["intended_s"] == [10 + i / 2 for i in range(10)]
    assert played["prompt"] == [1, 10, 20, 30, 40, 50, 60, 63, 63, 63]
    assert played["output"] == [1, 1, 2, 1, 1, 2, 1, 1, 1, 1]
    assert played["prefix"] == [-1, 4, -1, 4, -1, 4, -1, 4, -1, 4]
    assert played["prefix_tokens"] == [0, 9, 0, 29, 0, 32, 0, 32, 0, 32]
    assert of(sent(world(replace(load, requests=2))), 0)["intended_s"] == [10.0, 10.5]


def test_a_trace_without_beginnings_takes_the_loads(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n1,100,1\n2,100,1\n", encoding="utf-8")
    workload = sent(world(Load("a", arrivals="trace", trace=str(path), prefix_tokens=16)))
    assert workload.prefix.tolist() == [0, 0] and workload.prefix_tokens.tolist() == [16, 16]


OWN = "arrival_s,prompt_tokens,output_tokens\n"
AZ = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
FORMS = (
    "The first row must be TIMESTAMP,ContextTokens,GeneratedTokens or arrival_s,prompt_tokens,output_tokens"
    "[,prefix,prefix_tokens]."
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f", row 1: not a trace we know. {FORMS}"),
        ("a,b\n1,2\n", f", row 1: not a trace we know. {FORMS}"),
        ("arrival_s,prompt_tokens,output_tokens,more\n", f", row 1: not a trace we know. {FORMS}"),
        (OWN, ": the trace has no requests"),
        (OWN + "1,2\n", ", row 2: 2 cells where the first row has 3"),
        (OWN + "1,2,3\nx,2,3\n", ", row 3: arrival_s is 'x', not a number of seconds from 0"),
        (OWN + "nan,2,3\n", ", row 2: arrival_s is 'nan', not a number of seconds from 0"),
        (OWN + "-1,2,3\n", ", row 2: arrival_s is '-1', not a number of seconds from 0"),
        (OWN + "1,2.5,3\n", ", row 2: prompt_tokens is '2.5', not a number of tokens"),
        (OWN + "1,2,\n", ", row 2: output_tokens is missing, not a number of tokens"),
        (OWN + "1,2,9999999999\n", ", row 2: output_tokens is '9999999999', not a number of tokens"),
        (OWN + f"1,{'9' * 99},1\n", f", row 2: prompt_tokens is '{'9' * 39}…, not a number of tokens"),
        (
            "arrival_s,prompt_tokens,output_tokens,prefix\n1,2,3,x\n",
            ", row 2: prefix_tokens is missing, not a number of tokens",
        ),
        (AZ + "yesterday,2,3\n", ", row 2: TIMESTAMP is 'yesterday', not a date and time"),
        (AZ + "2023-11-16 18:17:04,-2,3\n", ", row 2: ContextTokens is '-2', not a number of tokens"),
        ("{}\n", ", row 1: timestamp is missing, not a number of milliseconds from 0"),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 5}\n{"timestamp": 1',
            ", row 2: unexpected end of data: line 1 column 16 (char 15)",
        ),
        ('{"timestamp": true}', ", row 1: timestamp is True, not a number of milliseconds from 0"),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": true}',
            ", row 1: output_length is True, not a number of tokens",
        ),
        ('{"timestamp": 1, "hash_ids": [1, "x"]}', ", row 1: hash_ids is not a list of whole numbers"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}\n[]', ", row 2: not a JSON object"),
    ],
)
def test_a_bad_trace_is_refused_with_its_row(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        trace_of(tmp_path, text)
    assert str(caught.value) == f"{tmp_path / 't'}{message}"


def test_a_trace_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with pytest.raises(BadInput, match="cannot read the trace: No such file"):
        read_trace(path)
    path.write_bytes(b"arrival_s\xff")
    with pytest.raises(BadInput, match=r"t, byte 9: not a text in UTF-8$"):
        read_trace(path)


def test_a_trace_that_begins_too_late(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(OWN + "5000,1,1\n", encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        make(world(Load("a", arrivals="trace", trace=str(path))))
    assert str(caught.value) == (
        f"{path}: no request of the trace arrives before 1000 s of the world. Give a longer duration_s or to_s, or a "
        "higher speed."
    )


CELLS = st.text(max_size=8) | st.sampled_from(
    ["1", "0", "-1", "1e400", "2023-11-16 18:17:04", "0001-01-01", "9999-12-31 23:59:59-23:00"]
)
HEADS = st.sampled_from([OWN, AZ, OWN[:-1] + ",prefix,prefix_tokens\n", '{"timestamp": 1,', "{}\n", ""])


@given(HEADS, st.lists(st.lists(CELLS, min_size=2, max_size=5), max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, head: str, rows: list[list[str]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes((head + "\n".join(",".join(row) for row in rows)).encode())
    try:
        trace = read_trace(path)
    except BadInput:
        return
    assert np.isfinite(trace.arrival_s).all() and (trace.arrival_s >= 0).all()


@needs_corpus
@pytest.mark.parametrize(
    ("path", "rows", "length_s", "check"),
    [
        (AZURE / "AzureLLMInferenceTrace_code.csv", 8819, 3400, lambda t: t.prompt[0] == 4808),
        (AZURE / "AzureLLMInferenceTrace_conv.csv", 19366, 3400, lambda t: t.prompt[0] == 374),
        # All conversations begin alike, so all have a common beginning.
        (MOONCAKE / "conversation_trace.jsonl", 12031, 3500, lambda t: (t.prefix >= 0).all()),
        (MOONCAKE / "synthetic_trace.jsonl", 3993, 1000, lambda t: (t.prefix < 0).any()),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_real_traces(path: Path, rows: int, length_s: float, check: Callable[[Trace], bool]) -> None:
    trace = read_trace(path)
    assert len(trace.arrival_s) == rows
    assert trace.arrival_s.min() == 0 and length_s < trace.arrival_s.max() < length_s + 300
    assert check(trace)
    assert (trace.prefix_tokens <= trace.prompt + 512).all()
    workload = sent(world(Load("a", arrivals="trace", trace=str(path), speed=10), duration_s=60.0))
    assert len(workload) == (trace.arrival_s < 600).sum()
    assert (workload.prompt + workload.output <= 32_768).all() and (workload.output >= 1).all()
