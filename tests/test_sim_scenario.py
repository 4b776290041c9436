"""Scenario files: what they may say, and the words for what they may not."""

from __future__ import annotations

import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real import ROOT

from tailscope.errors import TailscopeError, UsageError
from tailscope.sim import scenario as model
from tailscope.sim.scenario import Cause, Load, Scenario, Sizes
from tailscope.sim.scenario_file import load, parse, without
from tailscope.sim.scenario_limits import RANGES, READ_BY

EXAMPLES = sorted((ROOT / "examples" / "scenarios").glob("*.toml"))
KINDS = [kind for kind in vars(model).values() if isinstance(kind, type) and is_dataclass(kind)]
A = '[[load]]\nname = "a"\n'


def read(text: str, base: Path = ROOT) -> Scenario:
    return parse(tomllib.loads(text), base, "w.toml")


def test_examples_are_found() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_is_read_and_its_causes_can_be_taken_away(path: Path) -> None:
    scenario = load(path)
    assert scenario.name == path.stem
    for cause in scenario.causes:
        changed = without(scenario, cause)
        assert changed.seed == scenario.seed
        assert changed != scenario
        assert cause not in changed.causes


def test_defaults_are_those_of_the_dataclasses() -> None:
    assert read(A) == Scenario(loads=(Load("a"),))


def test_a_file_is_its_scenarios_name(tmp_path: Path) -> None:
    path = tmp_path / "night.toml"
    path.write_text(A, encoding="utf-8")
    assert load(path).name == "night"
    path.write_text('name = "day"\n' + A, encoding="utf-8")
    assert load(path).name == "day"


def test_everything_is_read_into_its_type() -> None:
    scenario = read(
        """
        seed = 7
        duration_s = 60
        tolerated = ["x"]
        [engine]
        policy = "priority"
        kv_blocks = 4000
        watermark = 0
        [ranks]
        tensor_parallel = 2
        offset_s = [0, -1]
        [gateway]
        max_queue = 0
        [telemetry]
        profile = [[1, 2], [10, 0.5]]
        client_offset_s = -3
        [[load]]
        name = "a"
        priority = -1
        prompt_tokens = 100
        output_tokens = { median = 20, sigma = 1, most = 50 }
        [[load]]
        name = "b"
        arrivals = "at"
        times_s = [3, 1.5]
        prompts = [10, 20]
        output_tokens = { values = [1, 2] }
        [[fault]]
        kind = "pause"
        [[fault]]
        kind = "pause"
        [[fault]]
        kind = "slow-rank"
        name = "pause-3"
        layers = [0, 3]
        [[cause]]
        rule = "r"
        victims = ["class:<512"]
        without = { loads = ["b"], faults = ["pause-2"], cost = { step = 1 } }
        """
    )
    assert scenario.duration_s == 60.0 and type(scenario.duration_s) is float
    assert scenario.tolerated == ("x",)
    assert scenario.ranks.offset_s == (0.0, -1.0)
    assert scenario.gateway.max_in_flight is None and scenario.gateway.max_queue == 0
    assert scenario.telemetry.profile == ((1.0, 2.0), (10.0, 0.5))
    a, b = scenario.loads
    assert a.prompt_tokens == Sizes(100.0) and a.output_tokens == Sizes(20.0, 1.0, 1, 50)
    assert b.times_s == (3.0, 1.5) and b.prompts == (10, 20) and b.output_tokens == Sizes(values=(1, 2))
    assert [fault.name for fault in scenario.faults] == ["pause", "pause-2", "pause-3"]
    changed = without(scenario, scenario.causes[0])
    assert changed.loads == (a,)
    assert [fault.name for fault in changed.faults] == ["pause", "pause-3"]
    assert changed.cost.step == 1.0 and type(changed.cost.step) is float
    assert changed.engine == scenario.engine


def test_overrides_may_come_without_a_cause() -> None:
    scenario = read(A)
    assert without(scenario, {"engine": {"kv_blocks": 5000}}).engine.kv_blocks == 5000
    assert without(scenario, {}) == scenario
    with pytest.raises(
        UsageError, match=r"^without\.engine kv_block: unknown key; did you mean kv_blocks\?$"
    ):
        without(scenario, {"engine": {"kv_block": 5000}})
    with pytest.raises(UsageError, match=r"^without: \[engine\] kv_blocks: 9 usable blocks cannot hold"):
        without(scenario, Cause("r", without={"engine": {"kv_blocks": 10}}))


def test_what_is_said_of_fields_is_of_fields_there_are() -> None:
    known = {f"{kind.__name__}.{field.name}" for kind in KINDS for field in fields(kind)}
    assert RANGES.keys() <= known
    for kind, (by, keys) in READ_BY.items():
        assert {f"{kind.__name__}.{key}" for key in (by, *keys)} <= known


def test_every_default_is_in_its_range() -> None:
    for kind in KINDS:
        for field in fields(kind):
            allowed = RANGES.get(f"{kind.__name__}.{field.name}")
            if allowed and isinstance(field.default, (int, float)):
                assert field.default in allowed, f"{kind.__name__}.{field.name}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "[[load]]: is missing: a world needs at least one kind of clients"),
        ("load = 3", "load: write it as [[load]], not as 3"),
        ("load = [1]", "load: write it as [[load]], not as a list"),
        ("[[load]]", "[[load]] 1 name: is missing"),
        ('[[load]]\nname = ""', "[[load]] 1 name: must be a text of one line, not ''"),
        ('[[load]]\nname = "a\\n"', r"[[load]] 1 name: must be a text of one line, not 'a\n'"),
        (A + A, "[[load]]: two have the name 'a'; names tell them apart"),
        (A + "rat = 1", "[[load]] 1 rat: unknown key; did you mean rate?"),
        ("sed = 1\n" + A, "sed: unknown key; did you mean seed?"),
        (
            "zzz = 1\n" + A,
            "zzz: unknown key; known are cause, cost, duration_s, engine, fault, gateway, load, model, name, ranks, "
            "seed, telemetry, tolerated",
        ),
        ("engine = 1\n" + A, "[engine]: must be a table, not 1"),
        ("seed = true\n" + A, "seed: must be a whole number from 0, not true"),
        ("seed = 1.5\n" + A, "seed: must be a whole number from 0, not 1.5"),
        ("seed = -1\n" + A, "seed: must be a whole number from 0, not -1"),
        ("duration_s = 0\n" + A, "duration_s: must be a number above 0 to 604800, not 0"),
        ("duration_s = nan\n" + A, "duration_s: must be a number above 0 to 604800, not nan"),
        ("tolerated = 'x'\n" + A, "tolerated: must be a list, not 'x'"),
        ("tolerated = [1]\n" + A, "tolerated[1]: must be a text of one line, not 1"),
        (A + "rate = 0", "[[load]] 1 rate: must be a number above 0, not 0"),
        (A + "rate = 'fast'", "[[load]] 1 rate: must be a number above 0, not 'fast'"),
        (A + "rate = inf", "[[load]] 1 rate: must be a number up to 1e+12, not inf"),
        (
            A + "rate = 0x" + "f" * 4000,
            "[[load]] 1 rate: must be a number up to 1e+12, not one that large",
        ),
        (A + "rate = 1e9", "[[load]] 1 rate: gives more than 5000000 requests; lower it, or duration_s"),
        (A + "rate = 2020-01-01", "[[load]] 1 rate: must be a number above 0, not date"),
        (A + "timeout_s = -1", "[[load]] 1 timeout_s: must be a number above 0, not -1"),
        (A + "abort_share = 1.1", "[[load]] 1 abort_share: must be a number from 0 to 1, not 1.1"),
        (A + "priority = nan", "[[load]] 1 priority: must be a whole number, not nan"),
        (A + "n = 0", "[[load]] 1 n: must be a whole number from 1 to 1024, not 0"),
        (A + "users = 3", "[[load]] 1 users: is for arrivals = closed only, not poisson"),
        (
            A + "arrivals = 'closed'\nrate = 1",
            "[[load]] 1 rate: is for arrivals = poisson or bursty or regular only, not closed",
        ),
        (
            A + "arrivals = 'posson'",
            "[[load]] 1 arrivals: must be one of poisson, bursty, regular, closed, trace, at, not 'posson'; did you "
            "mean poisson?",
        ),
        (A + "arrivals = 'trace'", "[[load]] 1 trace: is missing: arrivals = trace needs a file"),
        (
            A + "arrivals = 'trace'\ntrace = 'no.csv'",
            "[[load]] 1 trace: no file nowhere/no.csv; paths are relative to the scenario file",
        ),
        (A + "arrivals = 'at'", "[[load]] 1 times_s: is missing: arrivals = at needs the instants"),
        (
            A + "arrivals = 'at'\ntimes_s = [1, -1]",
            "[[load]] 1 times_s[2]: must be a number from 0, not -1",
        ),
        (
            A + "arrivals = 'at'\ntimes_s = [120]",
            "[[load]] 1 times_s: none is from 0 s to before 120 s: it would never send",
        ),
        (
            A + "arrivals = 'at'\ntimes_s = [1]\nprompts = [1, 2]",
            "[[load]] 1 prompts: has 2 entries, but times_s has 1",
        ),
        (
            A + "from_s = 5\nto_s = 5",
            "[[load]] 1 from_s: 5 s is not before its end, 5 s: it would never send",
        ),
        (
            A
            + "arrivals = 'bursty'\nburst_s = 0.01\n[[load]]\nname = 'b'\n[telemetry]\n[cost]\n[ranks]\n[gateway]",
            None,
        ),
        (
            "duration_s = 9000\n" + A + "arrivals = 'bursty'\nburst_s = 0.01",
            "[[load]] 1 burst_s: 0.01 s is too short for 9000 s of bursts",
        ),
        (
            A
            + "arrivals = 'bursty'\ncommon_load = 'x'\n[[load]]\nname = 'b'\narrivals = 'bursty'\ncommon_load = 'x'\nburst_s = 3",
            "[[load]] 1 burst_s: must be one in all loads of common_load = x: 10 or 3",
        ),
        (
            A + "prompt_tokens = 0",
            "[[load]] 1 prompt_tokens: must be a number from 1, {median = …} or {values = […]}, not 0",
        ),
        (A + "prompt_tokens = 2000000", None),
        (
            A + "prompt_tokens = {mean = 3}",
            "[[load]] 1 prompt_tokens mean: unknown key; did you mean median?",
        ),
        (
            A + "prompt_tokens = {median = 0}",
            "[[load]] 1 prompt_tokens median: must be a number above 0, not 0",
        ),
        (
            A + "prompt_tokens = {least = 5, most = 4}",
            "[[load]] 1 prompt_tokens: `least`, 5, is above `most`, 4",
        ),
        (
            A + "prompt_tokens = {values = []}",
            "[[load]] 1 prompt_tokens: give `values` one or more sizes and no other key, or leave it out",
        ),
        (
            A + "prompt_tokens = {values = [3], sigma = 1}",
            "[[load]] 1 prompt_tokens: give `values` one or more sizes and no other key, or leave it out",
        ),
        (
            A + "[engine]\nkv_blocks = 2048",
            "[engine] kv_blocks: 2047 usable blocks cannot hold one request of max_model_len = 32768 tokens, which "
            "takes 2048 of 16; give more blocks or lower max_model_len",
        ),
        (A + "[engine]\nkv_blocks = 2049", None),
        (
            A + "[engine]\nmax_num_batched_tokens = 64",
            "[engine] max_num_batched_tokens: must be max_num_seqs, 256, or more, not 64",
        ),
        (A + "[engine]\nblock_size = 0", "[engine] block_size: must be a whole number from 1, not 0"),
        (A + "[engine]\nmoe = 1", "[engine] moe: must be true or false, not 1"),
        (A + "[cost]\nstep = 0", "[cost] step: must be a number above 0, not 0"),
        (A + "[cost]\nhost_gap = -0.1", "[cost] host_gap: must be a number from 0, not -0.1"),
        (A + "[ranks]\ntopk = 17", "[ranks] topk: must be at most experts, 16, not 17"),
        (A + "[ranks]\nrouted = 0", "[ranks] routed: must be a whole number from 1, not 0"),
        (A + "[ranks]\nhosts = 2", "[ranks] hosts: must be at most the number of ranks, 1, not 2"),
        (A + "[ranks]\noffset_s = [0, 0]", "[ranks] offset_s: has 2 entries, but there are 1 ranks"),
        (
            A + "[engine]\nmoe = true\n[ranks]\ntensor_parallel = 32",
            "[ranks] experts: must be at least the number of ranks, 32, not 16",
        ),
        (
            A + "[ranks]\ntensor_parallel = 2\n[engine]\ndata_parallel = 2",
            "[engine] data_parallel: engines without experts do not wait for each other; set moe = true, or write them "
            "as replicas",
        ),
        (
            A + "[telemetry]\nprofile = [[1]]",
            "[telemetry] profile[1]: must be a list of 2, not of 1",
        ),
        (
            A + "[telemetry]\nprofile = [[1, 0]]",
            "[telemetry] profile[1]: is [from, seconds], and must last above 0 seconds",
        ),
        (A + "[[fault]]", "[[fault]] 1 kind: is missing"),
        (
            A + "[[fault]]\nkind = 'pause'\nfactor = 2",
            "[[fault]] 1 factor: is for kind = slow-rank or slow-link or slow-replica only, not pause",
        ),
        (
            A + "[[fault]]\nkind = 'pause'\nname = 'x'\n[[fault]]\nkind = 'pause'\nname = 'x'",
            "[[fault]]: two have the name 'x'; names tell them apart",
        ),
        (
            A + "[[fault]]\nkind = 'pause'\nreplica = 1",
            "[[fault]] 1 replica: there is no replica 1; the last is 0",
        ),
        (
            A + "[[fault]]\nkind = 'pause'\nlength_s = 2\nevery_s = 2",
            "[[fault]] 1 every_s: must be above length_s, 2, not 2",
        ),
        (
            A + "[[fault]]\nkind = 'pause'\nfrom_s = 2\nto_s = 1",
            "[[fault]] 1 to_s: must be above from_s, 2, not 1",
        ),
        (
            A + "[[fault]]\nkind = 'slow-rank'",
            "[[fault]] 1 kind: slow-rank needs ranks that wait for each other: tensor_parallel above 1, or "
            "data_parallel with moe",
        ),
        (
            A + "[ranks]\ntensor_parallel = 2\n[[fault]]\nkind = 'slow-rank'\nrank = 2",
            "[[fault]] 1 rank: there is no rank 2; the last of 2 is 1",
        ),
        (
            A + "[ranks]\ntensor_parallel = 2\n[[fault]]\nkind = 'slow-rank'\nlayers = [4]",
            "[[fault]] 1 layers: must be below the number of layers, 4",
        ),
        (
            A + "[ranks]\ntensor_parallel = 2\n[[fault]]\nkind = 'slow-rank'\nphase = 'atention'",
            "[[fault]] 1 phase: must be one of attention, mlp, not 'atention'; did you mean attention?",
        ),
        (A + "[[cause]]", "[[cause]] 1 rule: is missing"),
        (
            A + "[[cause]]\nrule = 'r'\nculprit = '<8k'",
            "[[cause]] 1: culprits and victims are written kind:id, as class:<512 or rank:1, not '<8k'",
        ),
        (
            A + "[[cause]]\nrule = 'r'\nwithout = 3",
            "[[cause]] 1 without: must be a table, not 3",
        ),
        (
            A + "[[cause]]\nrule = 'r'\nwithout = {load = ['a']}",
            "[[cause]] 1 without.load: unknown key; did you mean loads?",
        ),
        (
            A + "[[load]]\nname = 'long'\n[[cause]]\nrule = 'r'\nwithout = {loads = ['lon']}",
            "[[cause]] 1 without.loads: there is no 'lon'; did you mean long?; known are a, long",
        ),
        (
            A + "[[cause]]\nrule = 'r'\nwithout = {loads = 'a'}",
            "[[cause]] 1 without.loads: must be a list, not 'a'",
        ),
        (
            A + "[[cause]]\nrule = 'r'\nwithout = {loads = ['a']}",
            "[[cause]] 1 without.loads: leaves no load in the world",
        ),
        (
            A + "[[cause]]\nrule = 'r'\nwithout = {faults = ['x']}",
            "[[cause]] 1 without.faults: there is no 'x'; known are none",
        ),
        (
            A + "[[cause]]\nrule = 'r'\nwithout = {telemetry = {scrape_s = 0}}",
            "[[cause]] 1 without.telemetry scrape_s: must be a number from 0.01, not 0",
        ),
        (
            A + "[[cause]]\nrule = 'r'\nwithout = {engine = {max_num_seqs = 4096}}",
            "[[cause]] 1 without: [engine] max_num_batched_tokens: must be max_num_seqs, 4096, or more, not 2048",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str | None) -> None:
    """None: it is right, as a neighbour of what is wrong."""
    if message is None:
        read(text)
        return
    with pytest.raises(UsageError) as caught:
        read(text, Path("nowhere"))
    assert str(caught.value) == f"w.toml: {message}"


def test_a_name_too_long_for_the_file_system_is_a_missing_file() -> None:
    with pytest.raises(UsageError, match=r"^w\.toml: \[\[load\]\] 1 trace: no file .{100}…; paths"):
        read(f"{A}arrivals = 'trace'\ntrace = '{'x' * 999}'")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = ", "not valid TOML: Invalid value"),
        (b"\xff", "not valid TOML: 'utf-8' codec can't decode"),
        (b"seed = " + b"9" * 5000, "not valid TOML: Exceeds the limit"),
    ],
)
def test_a_file_that_is_no_toml(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "w.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the scenario: No such file or directory$"):
        load(tmp_path / "none.toml")


WORDS = sorted({field.name for kind in KINDS for field in fields(kind)} | {"load", "fault", "cause"})
CHOICES = ["closed", "trace", "at", "bursty", "pause", "slow-rank", "a", "class:x", "fcfs"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 2, -1, 10**400, 1e300])
    | st.floats()
    | st.text()
    | st.sampled_from(CHOICES)
    | st.dates()
)
JUNK: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(), inner, max_size=4)
    ),
    max_leaves=12,
)
TABLES = {
    name: st.dictionaries(st.sampled_from([field.name for field in fields(kind)]), JUNK, max_size=3)
    for name, kind in [(kind.__name__.lower(), kind) for kind in KINDS]
}


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Junk that often gets past the first checks: tables with real keys, loads with names."""
    document: dict[str, Any] = draw(st.dictionaries(st.sampled_from(WORDS) | st.text(), JUNK, max_size=2))
    for name in ("engine", "cost", "ranks", "gateway", "telemetry"):
        if draw(st.booleans()):
            document[name] = draw(TABLES[name])
    for name, required in (("load", "name"), ("fault", "kind"), ("cause", "rule")):
        if name == "load" or draw(st.booleans()):
            entries = draw(st.lists(TABLES[name], min_size=1, max_size=2))
            document[name] = [{required: draw(st.sampled_from(CHOICES)), **entry} for entry in entries]
    return document


@given(documents())
@settings(max_examples=300, deadline=None)
def test_any_document_is_read_or_refused_in_our_words(document: dict[str, Any]) -> None:
    try:
        scenario = parse(document, Path("nowhere"), "w.toml")
    except TailscopeError as error:
        assert str(error).startswith("w.toml: ")
        assert len(str(error)) < 800
    else:
        assert scenario.loads
