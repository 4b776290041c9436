"""The torch_profiler collector on profiles of vLLM, SGLang and training jobs; a plain reading of each file is the truth."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from real import CAPTURES, CORPUS, needs_captures, needs_corpus

from tailscope import registry
from tailscope.source import Options, Source

PROFILER = next(c for c in registry.collectors() if c.name == "torch_profiler")
INFERENCE = CORPUS / "tracelens" / "tests" / "traces" / "inference"
EVALS = CORPUS / "tracelens" / "evals" / "unit_tests_nv" / "moe"
HTA, DLRM = CORPUS / "hta", CORPUS / "param" / "dlrm_8ranks"
GLOO, VLLM = CAPTURES / "torch-gloo-moe" / "slow", CAPTURES / "vllm-cpu"
UNWANTED = ("Trace", "python_function")
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")

Rows = list[dict[str, Any]]


def read(path: Path, options: Options | None = None) -> tuple[dict[str, Rows], Source]:
    source = Source(path, options=options)
    assert PROFILER.recognises(source.head(), source.name)
    rows: dict[str, Rows] = {table.name: [] for table in PROFILER.tables}
    for table, batch in PROFILER.read(source):
        rows[table.name] += batch.to_pylist(maps_as_pydicts="strict")
    return rows, source


@cache
def plain(path: Path) -> dict[str, Any]:
    with gzip.open(path) as file:
        trace: dict[str, Any] = json.loads(file.read(), strict=False)
    return trace


def plain_events(path: Path) -> Rows:
    return [e for e in plain(path)["traceEvents"] if e["ph"] == "X" and e.get("cat") not in UNWANTED]


def nanoseconds(microseconds: float) -> int:
    return int(microseconds) * 1_000 + round((microseconds - int(microseconds)) * 1_000)


def collectives(rows: dict[str, Rows]) -> Rows:
    return sorted((r for r in rows["rank_events"] if r["collective"]), key=lambda r: int(r["start_ns"]))


def phases(rows: dict[str, Rows]) -> dict[str, int]:
    return dict(Counter(r["phase"] for r in rows["rank_events"] if r["phase"]))


def steps(rows: dict[str, Rows]) -> list[tuple[int | None, ...]]:
    names = ("prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens")
    return [tuple(step[name] for name in names) for step in rows["iterations"]]


def folder(root: Path) -> list[Path]:
    return sorted(root.rglob("*.json.gz"))


PROFILES = [
    *(pytest.param(p, marks=pytest.mark.corpus) for root in (HTA, DLRM, INFERENCE, EVALS) for p in folder(root)),
    *(pytest.param(p, marks=pytest.mark.captures) for p in [*folder(GLOO), *sorted(VLLM.glob("run*/profile/*.json.gz"))] if "async_llm" not in p.name),
]  # fmt: skip


def name_of(path: Any) -> str:
    return "/".join(path.parts[-2:]) if isinstance(path, Path) else ""


@pytest.mark.parametrize("path", PROFILES, ids=name_of)
def test_rows_are_those_of_a_plain_reading(path: Path) -> None:
    rows, source = read(path)
    events = plain_events(path)
    base = plain(path).get("baseTimeNanoseconds", 0) if events[0]["ts"] < 1e15 else 0
    expected = [
        (
            e.get("cat"),
            e.get("name", ""),
            base + nanoseconds(e["ts"]),
            nanoseconds(e["dur"]),
            e["args"]["stream"] if "stream" in e.get("args", {}) else e["tid"],
        )
        for e in events
    ]
    columns = ("category", "name", "start_ns", "duration_ns", "stream")
    found = [tuple(r[c] for c in columns) for r in rows["rank_events"]]
    # Threads of some traces have names, not numbers.
    numbers = [
        (*e[:4], e[4] if isinstance(e[4], int) else f[4]) for e, f in zip(expected, found, strict=True)
    ]
    assert found == numbers
    (profile,) = rows["profiles"]
    assert profile["events"] == len(events)
    assert profile["first_ns"] == min(e[2] for e in expected)
    assert profile["last_ns"] == max(e[2] + e[3] for e in expected)
    assert profile["steps"] == len(rows["iterations"])
    told = plain(path).get("distributedInfo") or {}
    assert (profile["world_size"], profile["backend"]) == (told.get("world_size"), told.get("backend"))
    assert not source.tally.rejected
    assert not source.tally.blanked
    assert source.tally.skipped.total() == len(plain(path)["traceEvents"]) - len(events)


# -- training jobs -----------------------------------------------------------------------------

SAMPLED = {"all_to_all": 4, "all_reduce": 4, "all_gather": 2}


@needs_corpus
@pytest.mark.parametrize(
    ("name", "rank", "world_size", "steps", "kinds"),
    [
        ("amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz", None, None, 2, {}),
        ("cpu_only/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", 34, 300, 1, {"all_reduce": 10}),
        ("cpu_only/05cd72f~rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", 34, 300, 5, {"all_reduce": 10}),
        ("distributed_info_unavailable/distributed_info_not_found.json.gz", None, None, 1, {}),
        ("large_integer_trace/rank-70.Mar_25_20_48_12.2861.pt.trace.json.gz", 70, None, 0, {"all_reduce": 1}),
        ("nccl_parser_config/nccl_data.json.gz", 0, 2, 3, {"all_reduce": 15, "broadcast": 6}),
        ("ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz", 0, 1, 5, {}),
        ("rank_non_gpu/rank_non_gpu.json.gz", 0, None, 1, {}),
        ("rank_unavailable/rank_not_found.json.gz", None, None, 1, {}),
        ("trace_filter/sampled_rank-0.json.gz", 0, 128, 2, SAMPLED),
        ("trace_filter/sampled_rank-1.json.gz", 1, 128, 2, SAMPLED),
        ("with_gpu_user_annotation/step_based_trace_2543932.json.gz", 0, None, 0, {}),
    ],
)
def test_whose_profile_it_is_and_what_it_holds(
    name: str, rank: int | None, world_size: int | None, steps: int, kinds: dict[str, int]
) -> None:
    rows, source = read(HTA / name)
    (profile,) = rows["profiles"]
    assert (profile["rank"], profile["world_size"], profile["steps"]) == (rank, world_size, steps)
    assert Counter(r["collective"] for r in collectives(rows)) == kinds
    assert source.clock == ("profiler" if "large_integer" in name else "wall")
    assert ("give --rank" in str(source.tally.notes)) == (rank is None)


@needs_corpus
def test_a_rank_that_only_the_caller_knows() -> None:
    rows, source = read(HTA / "rank_unavailable" / "rank_not_found.json.gz", Options(rank=4))
    assert {r["rank"] for r in rows["rank_events"]} == {4}
    assert "give --rank" not in str(source.tally.notes)


@needs_corpus
def test_kernels_that_carry_c10d_metadata() -> None:
    path = HTA / "nccl_parser_config" / "nccl_data.json.gz"
    kernels = [e for e in plain_events(path) if e["cat"] == "kernel" and "Collective name" in e["args"]]
    width = {"Float": 4, "Long": 8}
    expected = [
        (
            e["args"]["Process Group Name"],
            e["args"]["Group size"],
            e["args"]["In msg nelems"] * width[e["args"]["dtype"]],
            e["args"]["dtype"],
        )
        for e in sorted(kernels, key=lambda e: float(e["ts"]))
    ]
    found = collectives(read(path)[0])
    assert [(r["group"], r["group_size"], r["bytes_in"], r["dtype"]) for r in found] == expected
    assert {r["group"] for r in found} == {"0"}


@needs_corpus
@pytest.mark.parametrize("rank", [0, 1])
def test_kernels_whose_call_on_the_cpu_says_what_they_are(rank: int) -> None:
    path = HTA / "trace_filter" / f"sampled_rank-{rank}.json.gz"
    events = plain_events(path)
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if "Launch" in e["name"] and "correlation" in e["args"]
    }
    calls = [e for e in events if e["name"].startswith("nccl:")]
    found = {r["start_ns"]: r["collective"] for r in collectives(read(path)[0])}
    kernels = [e for e in events if e["cat"] == "kernel" and e["name"].startswith("ncclKernel")]
    assert len(found) == len(kernels) == 10
    spelled = {
        "nccl:all_to_all": "all_to_all",
        "nccl:all_reduce": "all_reduce",
        "nccl:_all_gather_base": "all_gather",
    }
    for kernel in kernels:
        asked = launches[kernel["args"]["correlation"]]
        (call,) = [c for c in calls if c["ts"] <= asked < c["ts"] + c["dur"]]
        assert found[nanoseconds(kernel["ts"])] == spelled[call["name"]]


@needs_corpus
def test_eight_ranks_of_a_recommender() -> None:
    first = []
    for rank in range(8):
        (path,) = DLRM.glob(f"worker{rank}_*.json.gz")
        rows, _ = read(path)
        (profile,) = rows["profiles"]
        assert (profile["rank"], profile["world_size"], profile["steps"]) == (rank, 8, 1)
        assert profile["exported_ns"] == int(path.name.split(".")[1]) * 1_000_000
        found = collectives(rows)
        reduces = [row["collective"] == "all_reduce" for row in found]
        assert {row["collective"] for row in found} == {"all_to_all", "all_reduce"}
        # Four exchanges of embeddings, then their gradients between the reductions of the others'.
        assert reduces == [False, False, False, False, True, False, True, True]
        assert {row["phase"] for row in found} == {"collective"}
        kernels = sorted(
            (e for e in plain_events(path) if e["name"].startswith("nccl") and e["cat"] == "kernel"),
            key=lambda e: float(e["ts"]),
        )
        assert [r["duration_ns"] for r in found] == [nanoseconds(e["dur"]) for e in kernels]
        first.append(found[0]["duration_ns"] // 1_000)
    assert first == [2146, 7635, 518, 6132, 4882, 4679, 514, 10]


# -- engines -----------------------------------------------------------------------------------


@needs_corpus
@pytest.mark.parametrize(
    ("name", "expected", "found_phases"),
    [
        ("vllm_prefilldecode_piecewise/graph_execution.json.gz", (9, 8155, 37, 37), {"attention": 120, "router": 96, "expert": 72}),
        ("vllm_decode_full/graph_execution.json.gz", (0, 0, 32, 32), {"attention": 48, "router": 96, "expert": 72}),
        ("sglang_prefilldecode/sglang_Qwen3-8B_prefilldecode.json.gz", (15, 15360, 0, 0), {"attention": 73}),
        ("sglang_decode/sglang_Qwen3-8B_decode.json.gz", (0, 0, 32, 32), {"attention": 109}),
    ],
)  # fmt: skip
def test_steps_of_engines(name: str, expected: tuple[int, ...], found_phases: dict[str, int]) -> None:
    rows, _ = read(INFERENCE / name)
    assert steps(rows) == [expected]
    assert {r["step"] for r in rows["rank_events"]} == {0}
    assert phases(rows) == found_phases
    assert not rows["events"]
    (annotation,) = [
        e
        for e in plain_events(INFERENCE / name)
        if e["name"].startswith("execute_") and e["cat"] == "user_annotation"
    ]
    (step,) = rows["iterations"]
    assert step["end_ns"] - step["start_ns"] == nanoseconds(annotation["dur"])


@needs_corpus
def test_layers_are_counted_by_attention_ops() -> None:
    name = "vllm_prefilldecode_piecewise/graph_execution.json.gz"
    attention = [
        e for e in plain_events(INFERENCE / name) if e["name"] == "vllm::unified_attention_with_output"
    ]
    rows = read(INFERENCE / name)[0]["rank_events"]
    marks = sorted(
        (r for r in rows if r["name"] == "vllm::unified_attention_with_output"),
        key=lambda r: int(r["start_ns"]),
    )
    assert [r["layer"] for r in marks] == list(range(len(attention)))
    assert {r["layer"] for r in rows} == {None, *range(len(attention))}


@needs_corpus
@pytest.mark.parametrize(
    ("name", "layers", "once"),
    [
        # 24 layers, of which every other attends within a window, by a kernel of its own.
        ("vllm_decode_full/graph_execution.json.gz", 24, ["_topk_forward", "_finalize_matmul_scatter_bf16", "_combined_routing_compute"]),
        ("vllm_prefilldecode_piecewise/graph_execution.json.gz", 24, ["_topk_forward", "kernel_unified_attention_2d"]),
        ("sglang_decode/sglang_Qwen3-8B_decode.json.gz", 36, ["paged_attention_ll4mi_QKV", "paged_attention_ll4mi_reduce", "act_and_mul_kernel"]),
        ("sglang_prefilldecode/sglang_Qwen3-8B_prefilldecode.json.gz", 36, ["FmhaBatchPrefillWithPagedKVCache", "act_and_mul_kernel"]),
    ],
)  # fmt: skip
def test_layers_of_kernels(name: str, layers: int, once: list[str]) -> None:
    """What runs once a layer is in each layer once, in order; a graph has one launch for all of it."""
    rows = read(INFERENCE / name)[0]["rank_events"]
    kernels = sorted((r for r in rows if r["category"] == "kernel"), key=lambda r: int(r["start_ns"]))
    for kernel in once:
        assert [r["layer"] for r in kernels if kernel in r["name"]] == list(range(layers))
    if "decode_full" in name:
        graph = Counter(r["launch_ns"] for r in kernels).most_common(1)[0]
        assert graph[1] > 400
        windows = [r["layer"] for r in kernels if r["name"] == "kernel_unified_attention_2d"]
        assert windows == list(range(0, 24, 2))


@needs_corpus
@pytest.mark.parametrize(
    ("name", "captured"),
    [
        ("vllm_decode_full/capture_traces/graph_capture_rank_0.1773709742341309550.pt.trace.json.gz", "capture_32_FULL"),
        ("vllm_prefilldecode_piecewise/capture_traces/graph_capture_rank_0.1773709679453551615.pt.trace.json.gz", "capture_8192_PIECEWISE"),
        ("sglang_decode/capture_traces/bs_32_rank0.json.gz", "capture_32_DECODE"),
    ],
)  # fmt: skip
def test_captures_of_graphs_are_no_steps(name: str, captured: str) -> None:
    rows, source = read(INFERENCE / name)
    (profile,) = rows["profiles"]
    assert not rows["iterations"]
    assert {r["step"] for r in rows["rank_events"]} == {None}
    assert [(e["kind"], e["detail"]) for e in rows["events"]] == [("jit", f"graph capture: {captured}")]
    assert (profile["rank"], profile["steps"], profile["captures"]) == (0, 0, 1)
    assert source.tally.notes == ["a profile of graph captures: it shows no step of the engine"]


@needs_corpus
@pytest.mark.parametrize("path", folder(EVALS), ids=name_of)
def test_annotated_experts(path: Path) -> None:
    events = plain_events(path)
    notes = [e for e in events if e["cat"] == "user_annotation"]
    asked_at = {
        e["args"]["correlation"]: e["ts"] for e in events if e["cat"] in ("cuda_runtime", "cuda_driver")
    }
    (thread,) = {e["tid"] for e in notes if e["name"].startswith("MoE[")}

    def around(event: dict[str, Any]) -> str | None:
        if event["cat"] not in ON_GPU and event["tid"] != thread:
            return None
        asked = asked_at[event["args"]["correlation"]] if event["cat"] in ON_GPU else event["ts"]
        names = [n["name"] for n in notes if n["ts"] <= asked < n["ts"] + n["dur"]]
        if any(name.startswith("expert_ffn[") for name in names):
            return "expert"
        return "moe" if any(name.startswith("MoE[") for name in names) else None

    rows = read(path)[0]["rank_events"]
    pairs = [
        (r["phase"], around(e))
        for r, e in zip(rows, events, strict=True)
        if e["cat"] != "gpu_user_annotation"
    ]
    assert [found for found, _ in pairs] == [expected for _, expected in pairs]
    assert {"moe", "expert"} <= {found for found, _ in pairs}


@needs_corpus
@needs_captures
def test_files_beside_profiles_are_none() -> None:
    beside = [*INFERENCE.rglob("execution_details.json"), *GLOO.glob("*.truth.json")]
    assert len(beside) == 7
    for path in beside:
        source = Source(path)
        assert not PROFILER.recognises(source.head(), source.name)


# -- our captures ------------------------------------------------------------------------------


@needs_captures
@pytest.mark.parametrize("rank", range(4))
def test_exchanges_of_experts_against_what_the_program_wrote_down(rank: int) -> None:
    rows, _ = read(GLOO / f"rank{rank}.pt.trace.json.gz")
    truth = json.loads((GLOO / f"rank{rank}.truth.json").read_text())
    (profile,) = rows["profiles"]
    assert (profile["rank"], profile["world_size"], profile["backend"]) == (rank, 4, "gloo")
    assert profile["groups"] == {"0": [0, 1, 2, 3], "1": [0, 1, 2, 3]}
    found = collectives(rows)
    assert Counter(r["collective"] for r in found) == {"all_to_all": 48, "all_reduce": 8, "barrier": 8}
    assert {r["phase"] for r in found if r["collective"] != "all_to_all"} == {"collective"}
    loads = [load for load in truth["loads"] if load["step"] >= 0]
    moved = [r for r in found if r["tokens"]]
    dispatches, combines = ([r for r in moved if r["phase"] == phase] for phase in ("dispatch", "combine"))
    assert len(moved) == len(dispatches) + len(combines)
    columns = ("step", "layer", "tokens", "out_split", "in_split")
    assert [tuple(r[c] for c in columns) for r in dispatches] == [
        (load["step"], load["layer"], load["recv_tokens"], load["recv_splits"], load["send_splits"])
        for load in loads
    ]
    assert [tuple(r[c] for c in columns) for r in combines] == [
        (load["step"], load["layer"], sum(load["send_splits"]), load["send_splits"], load["recv_splits"])
        for load in loads
    ]
    # 128 floats a token.
    assert [(r["bytes_in"], r["bytes_out"]) for r in dispatches] == [
        (512 * sum(load["send_splits"]), 512 * load["recv_tokens"]) for load in loads
    ]


@needs_captures
@pytest.mark.parametrize("rank", range(4))
def test_experts_that_were_slowed_down(rank: int) -> None:
    rows, _ = read(GLOO / f"rank{rank}.pt.trace.json.gz")
    experts = {r["step"]: r["duration_ns"] for r in rows["rank_events"] if r["name"] == "layer_1.experts"}
    assert sorted(experts) == list(range(8))
    slow = [step for step, duration in experts.items() if duration > 55_000_000]
    assert slow == ([2, 5] if rank == 2 else [])
    truth = json.loads((GLOO / f"rank{rank}.truth.json").read_text())
    written_down = [s["start_unix_ns"] for s in truth["steps"] if s["profiled"]]
    found = [r["start_ns"] for r in rows["rank_events"] if r["name"].startswith("execute_step_")]
    assert all(abs(a - b) < 200_000 for a, b in zip(found, written_down, strict=True))


RUN3 = VLLM / "run3-moe-dp2-ep2-patched" / "profile"


@needs_captures
@pytest.mark.parametrize("rank", [0, 1])
def test_data_parallel_ranks_of_one_world(rank: int) -> None:
    """Both files say rank 0 in their name; experts are spread over both ranks."""
    paths = sorted(RUN3.glob(f"dp{rank}_*.json.gz"))
    assert len(paths) == 2
    for path in paths:
        rows, _ = read(path)
        (profile,) = rows["profiles"]
        assert (profile["rank"], profile["world_size"], profile["dp"], profile["ep"]) == (rank, 2, rank, rank)
        assert {(r["rank"], r["engine"]) for r in rows["rank_events"]} == {(rank, rank)}
        assert len(rows["iterations"]) == 12
        # Per layer: hidden states, weights and ids of the chosen experts are gathered, results summed.
        one_layer = {("all_gather", "dispatch"): 3, ("all_reduce", "combine"): 1}
        for step in range(12):
            held = Counter(
                (r["collective"], r["phase"], r["layer"]) for r in collectives(rows) if r["step"] == step
            )
            expected: dict[tuple[str, str, int | None], int] = {
                (*key, layer): count for key, count in one_layer.items() for layer in range(4)
            }
            expected["all_reduce", "collective", None] = 1
            assert held == expected


@needs_captures
def test_tensor_parallel_ranks() -> None:
    for path in sorted((VLLM / "run2-moe-tp2" / "profile").glob("*.json.gz")):
        rows, _ = read(path)
        (profile,) = rows["profiles"]
        rank = int("_rank1." in path.name)
        assert (profile["rank"], profile["world_size"], profile["dp"], profile["tp"], profile["ep"]) == (
            rank,
            2,
            0,
            rank,
            rank,
        )
        assert Counter(r["collective"] for r in collectives(rows)) == {"all_reduce": 108, "all_gather": 12}
        assert {r["phase"] for r in collectives(rows)} == {"collective"}
        assert [s[:3] for s in steps(rows)][:3] == [(1, 64, 0), (8, 800, 1), (0, 0, 9)]


@needs_captures
@pytest.mark.parametrize(
    ("run", "count", "first", "attention"),
    [
        ("run1-dense-mixed", 91, [(1, 89, 0, 0), (0, 0, 1, 1)], 1068),
        ("run5-dense-ngram-spec", 4, [(1, 64, 0, 0), (5, 440, 1, 1)], 48),
    ],
)
def test_one_rank(run: str, count: int, first: list[tuple[int, ...]], attention: int) -> None:
    (path,) = (VLLM / run / "profile").glob("rank0.*.json.gz")
    rows, _ = read(path)
    annotations = [e for e in plain_events(path) if e["name"].startswith("execute_")]
    assert len(annotations) == count
    found = steps(rows)
    assert len(found) == count
    assert found[:2] == first
    assert phases(rows) == {"attention": attention}
    assert not collectives(rows)


@needs_captures
def test_the_front_end_s_profile_holds_nothing() -> None:
    (path,) = (VLLM / "run1-dense-mixed" / "profile").glob("*async_llm*.json.gz")
    rows, source = read(path)
    assert not any(rows.values())
    assert source.tally.notes == ["the profile holds no ops: no CPU or GPU activity was recorded"]
    assert not source.tally.rejected
