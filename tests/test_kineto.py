"""The torch_profiler collector's reading of Kineto's JSON, held against a plain `json.loads` of the same text."""

from __future__ import annotations

import gzip
import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailscope import registry
from tailscope.errors import BadInput
from tailscope.source import Options, Source, Tally

big_profile = import_module("benchmarks.big_profile")
kineto_json = import_module("tailscope.collectors._kineto_json")
kineto_names = import_module("tailscope.collectors._kineto_names")
kineto_spool = import_module("tailscope.collectors._kineto_spool")
PROFILER = next(c for c in registry.collectors() if c.name == "torch_profiler")

Event = dict[str, Any]
Rows = list[dict[str, Any]]
COLUMNS = ("category", "name", "thread", "start_ns", "duration_ns", "stream", "correlation")
UNWANTED = ("Trace", "python_function")
SLOW_IS_FINE = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@dataclass
class Text:
    """A source whose content is at hand."""

    content: bytes
    tally: Tally = field(default_factory=Tally)

    def open(self) -> io.BytesIO:
        return io.BytesIO(self.content)


@contextmanager
def sizes(piece: int, texts: int) -> Iterator[None]:
    """Reads that many bytes, and hands on that many events, at a time."""
    with mock.patch.object(kineto_json, "PIECE", piece), mock.patch.object(kineto_spool, "TEXTS", texts):
        yield


def spooled(
    folder: Path, content: bytes, *, python_stacks: bool = False
) -> tuple[Rows, dict[str, Any], Tally]:
    """(rows, metadata, tally) as the spool gives them."""
    text = Text(content)
    events = kineto_json.TraceEvents(text)
    with kineto_spool.Spool(folder, text.tally, python_stacks=python_stacks) as spool:
        any_kept = spool.fill(events)
        rows = (
            [row for table in spool.rows() for row in table.select(COLUMNS).to_pylist()] if any_kept else []
        )
    return rows, {k: v for k, v in events.metadata.items() if k != "traceEvents"}, text.tally


def nanoseconds(microseconds: Any) -> int | None:
    if not isinstance(microseconds, (int, float)):
        return None
    return int(microseconds) * 1_000 + round((microseconds - int(microseconds)) * 1_000)


def plain_rows(events: list[Any]) -> Rows:
    rows = []
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X" or event.get("cat") in UNWANTED:
            continue
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        duration = nanoseconds(event.get("dur"))
        rows.append(
            {
                "category": event.get("cat"),
                "name": event.get("name", ""),
                "thread": event.get("tid"),
                "start_ns": nanoseconds(event["ts"]),
                "duration_ns": None if duration is not None and duration < 0 else duration,
                "stream": args.get("stream"),
                "correlation": args.get("correlation"),
            }
        )
    return rows


# -- any trace, written in any way -------------------------------------------------------------

#: Names and texts that look like structure.
SNIPPETS = (
    "}, {",
    "},{",
    "} , {",
    "}]",
    "}],",
    "}]}",
    '"traceEvents": [',
    '"ph": "X"',
    "\\",
    '"',
    "{",
    "[",
    ",",
    "é😀",
    "\x00",
    "\n",
)
texts = (
    st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=4)), max_size=4)
    .map("".join)
    .filter(lambda text: not any("\ud800" <= character <= "\udfff" for character in text))
)
#: Looks like an event, and stands in the arguments of one.
inner_events = st.fixed_dictionaries(
    {"ph": st.sampled_from(("X", "M")), "name": texts, "ts": st.integers(0, 9)}
)
objects = st.one_of(st.dictionaries(texts, st.integers(-9, 9), max_size=2), inner_events)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(objects, max_size=4), st.dictionaries(texts, inner, max_size=3)
    ),
    max_leaves=6,
)
times = st.integers(0, 2**43 * 1_000 - 1).map(lambda ns: ns / 1_000)
whole = st.integers(-(2**63), 2**63 - 1)
arguments = st.one_of(
    st.fixed_dictionaries(
        {}, optional={"stream": whole, "correlation": whole, "Input Dims": values, "l": values}
    ),
    st.lists(values, max_size=2),
    texts,
)
spans = st.fixed_dictionaries(
    {"ph": st.just("X"), "ts": times},
    optional={
        "cat": st.sampled_from(
            ("cpu_op", "kernel", "user_annotation", "cuda_runtime", "python_function", "Trace")
        ),
        "name": texts,
        "pid": st.one_of(st.integers(0, 9), texts),
        "tid": whole,
        "dur": st.one_of(times, st.integers(-5, 5)),
        "args": arguments,
    },
)
#: Cut where the array is, and nowhere else.
plain_spans = spans.map(
    lambda span: {k: v for k, v in span.items() if k in ("ph", "ts", "cat", "tid", "dur")}
)
others = st.fixed_dictionaries(
    {"ph": st.sampled_from(("M", "i", "s", "f", "C", "b", "e"))},
    optional={"ts": values, "id": values, "args": values},
)
entries = st.one_of(spans, spans, others)
metadata = st.dictionaries(texts.filter(lambda key: key != "traceEvents"), values, max_size=3)


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def kineto(value: Any) -> str:
    """As Kineto lays out an event: fields on few lines, the arguments on their own."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value, ensure_ascii=False)
    fields = [f'"{key}": {json.dumps(v, ensure_ascii=False)}' for key, v in value.items() if key != "args"]
    if "args" in value:
        fields.append(f'"args": {json.dumps(value["args"], indent=2, ensure_ascii=False)}')
    return "{\n    " + ",\n    ".join(fields) + "\n  }"


def written(style: str, before: dict[str, Any], events: list[Any], after: dict[str, Any]) -> bytes:
    whole = {**before, "traceEvents": events, **after}
    if style == "compact":
        return compact(whole).encode()
    if style == "pretty":
        return json.dumps(whole, indent=2, ensure_ascii=False).encode()
    if style == "tabs":
        return json.dumps(whole, indent="\t").replace("\n", "\r\n").encode()
    if style == "json.dump":
        return json.dumps(whole).encode()
    head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in before.items())
    tail = "".join(f",\n  {json.dumps(key)}: {json.dumps(value)}" for key, value in after.items())
    body = ",\n  ".join(kineto(event) for event in events)
    return f'{{\n{head}  "traceEvents": [\n  {body}\n  ]{tail}\n}}\n'.encode()


styles = st.sampled_from(("compact", "pretty", "tabs", "json.dump", "kineto"))
pieces = st.sampled_from((1, 7, 64, 300, 8 << 20))


@SLOW_IS_FINE
@given(styles, metadata, st.lists(entries, max_size=8), metadata, pieces, st.sampled_from((1, 3, 16_384)))
def test_any_trace_gives_the_rows_that_a_plain_reading_gives(
    tmp_path_factory: pytest.TempPathFactory,
    style: str,
    before: dict[str, Any],
    events: list[Any],
    after: dict[str, Any],
    piece: int,
    texts: int,
) -> None:
    after = {key: value for key, value in after.items() if key not in before}
    content = written(style, before, events, after)
    read = json.loads(content)
    with sizes(piece, texts):
        rows, learned, tally = spooled(tmp_path_factory.getbasetemp(), content)
    assert rows == plain_rows(read["traceEvents"])
    assert learned == {**before, **after}
    assert not tally.rejected
    assert tally.skipped.total() == len(events) - len(rows)


@SLOW_IS_FINE
@given(
    styles,
    st.lists(
        st.one_of(plain_spans, st.sampled_from((None, 5, "x", [], [1], {}, {"a": 1}, {"ph": None}))),
        max_size=6,
    ),
    metadata,
    pieces,
)
def test_entries_that_are_no_events_cost_no_event_beside_them(
    tmp_path_factory: pytest.TempPathFactory, style: str, events: list[Any], after: dict[str, Any], piece: int
) -> None:
    # Behind an entry that is no object the array's end cannot be told from lists in the metadata.
    if events and not isinstance(events[-1], dict):
        after = {}
    content = written(style, {}, events, after)
    with sizes(piece, 16_384):
        rows, learned, tally = spooled(tmp_path_factory.getbasetemp(), content)
    expected = [e for e in events if isinstance(e, dict) and e.get("ph")]
    assert sorted(map(str, rows)) == sorted(map(str, plain_rows(expected)))
    assert learned == after
    assert tally.rejected.total() == len(events) - len(expected)


TRACE = written(
    "kineto",
    {"schemaVersion": 1, "distributedInfo": {"rank": 3, "pg_config": [{"pg_name": "0"}, {"pg_name": "1"}]}},
    [
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": f"op {i}",
            "pid": 1,
            "tid": 1,
            "ts": 10.125 * i,
            "dur": 1.5,
            "args": {"a": [{"b": i}, {"c": "}, {"}]},
        }
        for i in range(4)
    ],
    {"traceName": "x", "pg": [{"a": 1}, {"a": 2}], "baseTimeNanoseconds": 1_700_000_000_000_000_000},
)


@pytest.mark.parametrize("piece", [1, 64, 8 << 20])
def test_a_trace_cut_anywhere_gives_the_events_before_the_cut(tmp_path: Path, piece: int) -> None:
    whole = plain_rows(json.loads(TRACE)["traceEvents"])
    begin, array_ends = TRACE.index(b'"traceEvents": [') + 16, TRACE.index(b"\n  ],") + 4
    ends = [TRACE.index(f'"op {i}"'.encode()) for i in range(1, 4)] + [array_ends]
    step = 11 if piece > 99 else 23
    for size in range(0, len(TRACE.rstrip()), step):
        with sizes(piece, 2):
            if size < begin:
                with pytest.raises(BadInput):
                    spooled(tmp_path, TRACE[:size])
                continue
            rows, _, tally = spooled(tmp_path, TRACE[:size])
        assert rows == whole[: len(rows)]
        # An event is there as soon as its closing brace is; if not, it was cut and its beginning passed on already.
        assert len(rows) >= sum(end <= size for end in ends) - (piece < 99)
        assert tally.rejected
        assert tally.rejected.keys() <= {
            "file ends in the middle of the events",
            "file ends in the metadata after the events",
            # What is left of the event that the cut fell on.
            "event that is not valid JSON",
            "entry of traceEvents that is no event",
        }


@SLOW_IS_FINE
@given(st.lists(st.integers(0, 2**43 * 1_000 - 1), min_size=1, max_size=300))
def test_times_with_three_decimals_are_exact(
    tmp_path_factory: pytest.TempPathFactory, times_ns: list[int]
) -> None:
    events = ",".join(
        f'{{"ph":"X","cat":"cpu_op","name":"a","tid":1,"ts":{ns // 1_000}.{ns % 1_000:03d},"dur":{ns // 1_000}.{ns % 1_000:03d}}}'
        for ns in times_ns
    )
    rows, _, _ = spooled(tmp_path_factory.getbasetemp(), f'{{"traceEvents":[{events}]}}'.encode())
    assert [row["start_ns"] for row in rows] == times_ns
    assert [row["duration_ns"] for row in rows] == times_ns


def test_an_event_cut_in_pieces_far_into_a_long_trace(tmp_path: Path) -> None:
    cut = {
        "ph": "X",
        "name": "}, {",
        "ts": 1,
        "dur": 1,
        "args": {"l": [{"ph": "X", "name": "inner", "ts": 1}, {"a": 1}]},
    }
    events = [
        cut if i % 9_999 == 5 else {"ph": "X", "name": str(i), "ts": i, "dur": 1} for i in range(70_000)
    ]
    events[-1] = cut
    rows, _, tally = spooled(tmp_path, compact({"traceEvents": events}).encode())
    assert rows == plain_rows(events)
    assert not tally.rejected


def test_a_hundred_thousand_names(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": f"fused_moe_{i}", "ts": i, "dur": 1} for i in range(100_000)
    ]
    path = tmp_path / "rank0.json"
    path.write_text(compact({"traceEvents": events}))
    count = 0
    for table, batch in PROFILER.read(Source(path)):
        if table.name == "rank_events":
            assert set(batch["phase"].to_pylist()) == {"expert"}
            assert batch["name"].to_pylist() == [f"fused_moe_{count + i}" for i in range(batch.num_rows)]
            count += batch.num_rows
    assert count == 100_000


def test_python_stack_frames_are_read_when_asked_for(tmp_path: Path) -> None:
    events = [{"ph": "X", "cat": "python_function", "name": "<built-in>", "tid": 7, "ts": 1, "dur": 2}]
    content = compact({"traceEvents": events}).encode()
    assert spooled(tmp_path, content)[0] == []
    rows, _, tally = spooled(tmp_path, content, python_stacks=True)
    assert [row["name"] for row in rows] == ["<built-in>"]
    assert not tally.skipped


# -- the benchmark's generator -----------------------------------------------------------------


def read(path: Path, **options: Any) -> tuple[dict[str, Rows], Source]:
    source = Source(path, options=Options(**options))
    rows: dict[str, Rows] = {table.name: [] for table in PROFILER.tables}
    for table, batch in PROFILER.read(source):
        rows[table.name] += batch.to_pylist(maps_as_pydicts="strict")
    return rows, source


def test_generated_profile_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "rank1.1711964700000000000.pt.trace.json"
    big_profile.write_profile(path, 3_000, rank=1, ranks=4, layers=12)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    rows, source = read(path)
    launched = {e["args"]["correlation"]: e["ts"] for e in events if e["cat"] == "cuda_runtime"}
    steps = [e for e in events if e["name"].startswith("execute_")]
    assert len(rows["rank_events"]) == len(events)
    for row, event in zip(rows["rank_events"], events, strict=True):
        args = event["args"]
        elements = args.get("In msg nelems")
        on_gpu = event["cat"] == "kernel"
        launch = launched[args["correlation"]] if on_gpu else None
        asked = event["ts"] if launch is None else launch
        expected = {
            "rank": 1,
            "name": event["name"],
            "category": event["cat"],
            "start_ns": big_profile.BASE_NS + nanoseconds(event["ts"]),
            "duration_ns": nanoseconds(event["dur"]),
            "stream": args.get("stream", event["tid"]),
            "launch_ns": None if launch is None else big_profile.BASE_NS + nanoseconds(launch),
            "step": next(i for i, s in enumerate(steps) if s["ts"] <= asked < s["ts"] + s["dur"]),
            "collective": "all_reduce" if elements else None,
            "bytes_in": 2 * elements if elements else None,
            "bytes_out": 2 * elements if elements else None,
            "group": args.get("Process Group Name"),
            "group_size": 4 if elements else None,
            "seq": args.get("Seq"),
            "dtype": args.get("dtype"),
        }
        assert {key: row[key] for key in expected} == expected
    assert [i["decode_requests"] for i in rows["iterations"]] == [
        int(s["name"][:-1].rsplit("(")[-1]) for s in steps
    ]
    assert not source.tally.rejected
    assert source.tally.skipped == {"flow arrows": 2 * len(launched)}


# -- whose profile it is -----------------------------------------------------------------------

OP = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.5, "dur": 1}


@pytest.mark.parametrize(
    ("name", "told", "expected"),
    [
        # A data-parallel rank of a world that spans engines: the trace says the rank in it.
        ("dp1_pp0_tp0_dcp0_ep1_rank0.1795964128949263538.pt.trace.json.gz", {"rank": 1, "world_size": 2}, (1, 2, 1, 0, 0, 1)),
        # Its engine has a world of its own, so that every engine has a rank 0.
        ("dp1_pp0_tp0_dcp0_ep1_rank0.1795964128949263538.pt.trace.json.gz", {"rank": 0, "world_size": 2}, (2, 2, 1, 0, 0, 1)),
        ("dp1_pp0_tp1_dcp0_ep3_rank1.1795964128949263538.pt.trace.json.gz", {"rank": 1, "world_size": 2}, (3, 2, 1, 0, 1, 3)),
        ("rank3.1795964128949263538.pt.trace.json", {}, (3, None, None, None, None, None)),
        ("rank3.1795964128949263538.pt.trace.json", {"rank": 5}, (5, None, None, None, None, None)),
        ("worker0_step_12.1694128201545.pt.trace.json.gz", {}, (0, None, None, None, None, None)),
        ("rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", {"rank": "x"}, (34, None, None, None, None, None)),
        ("prefix-1700000000.5-TP-1-DP-0-EP-1.trace.json.gz", {"rank": 1, "world_size": 2}, (1, 2, 0, None, 1, 1)),
        ("trace.json", {"rank": -1, "world_size": True}, (9, None, None, None, None, None)),
        ("trace.json", {"rank": 0, "world_size": 1}, (0, 1, None, None, None, None)),
        # Numbers that no rank has.
        ("rank99999999999999999999.json", {}, (9, None, None, None, None, None)),
        ("dp99999999999999999999_tp1.json", {"rank": 2**40}, (9, None, None, None, 1, None)),
    ],
)  # fmt: skip
def test_rank(tmp_path: Path, name: str, told: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    content = compact({"distributedInfo": told, "traceEvents": [OP]}).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    rows, source = read(path, rank=9)
    (profile,) = rows["profiles"]
    (row,) = rows["rank_events"]
    columns = ("rank", "world_size", "dp", "pp", "tp", "ep")
    assert tuple(profile[c] for c in columns) == expected
    assert (row["rank"], row["engine"], row["tp"]) == (expected[0], expected[2], expected[4])
    assert "nothing says which rank" not in str(source.tally.notes)


def test_without_any_rank_the_caller_is_asked_for_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(compact({"traceEvents": [OP]}))
    rows, source = read(path)
    assert rows["profiles"][0]["rank"] is None
    assert "nothing says which rank this is a profile of: give --rank" in source.tally.notes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rank0.1795963333760291157.pt.trace.json", 1795963333760291157),
        ("worker1_step_12.1694128201556.pt.trace.json", 1694128201556000000),
        ("a.1694128201556123.pt.trace.json", 1694128201556123000),
        ("rank-34.Jul_15_10_52_41.1074.pt.trace.json", None),
    ],
)
def test_when_a_profile_was_written(name: str, expected: int | None) -> None:
    assert kineto_names.exported_ns(name) == expected


# -- when it was -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "ts", "start_ns", "clock"),
    [
        ({"baseTimeNanoseconds": 1_711_964_646_000_000_000}, 4458676416788.066, 1_716_423_322_416_788_066, "wall"),
        ({}, 1_661_203_462_598_738, 1_661_203_462_598_738_000, "wall"),
        ({"displayTimeUnit": "ns"}, 1_672_876_799_188_721.25, 1_672_876_799_188_721_250, "wall"),
        # Absolute already: a base would count twice.
        ({"baseTimeNanoseconds": 1_711_964_646_000_000_000}, 1_661_203_462_598_738, 1_661_203_462_598_738_000, "wall"),
        ({}, 100.5, 100_500, "profiler"),
        ({"baseTimeNanoseconds": 0}, 100.5, 100_500, "profiler"),
        ({"baseTimeNanoseconds": "1711964646000000000"}, 100.5, 100_500, "profiler"),
        ({"baseTimeNanoseconds": True}, 100.5, 100_500, "profiler"),
        ({"baseTimeNanoseconds": 2**63}, 100.5, 100_500, "profiler"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("after", [False, True])
def test_clock(
    tmp_path: Path, told: dict[str, Any], ts: float, start_ns: int, clock: str, after: bool
) -> None:
    path = tmp_path / "rank0.json"
    events = {"traceEvents": [{**OP, "ts": ts}]}
    path.write_text(compact({**events, **told} if after else {**told, **events}))
    rows, source = read(path)
    assert rows["rank_events"][0]["start_ns"] == start_ns
    assert (rows["profiles"][0]["first_ns"], rows["profiles"][0]["last_ns"]) == (start_ns, start_ns + 1_000)
    assert source.clock == clock
    noted = "times are not on the wall clock: the trace has no baseTimeNanoseconds" in source.tally.notes
    assert noted == (clock == "profiler")


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("execute_context_1(64)_generation_2(2)", (0, 1, 64, 2, 2)),
        ("execute_64_context_1(sq64sk64sqsq4096sqsk4096)_generation_0(sq0sk0sqsq0sqsk0)", (0, 1, 64, 0, 0)),
        ("execute_new_1_cached_3", (0, 1, None, 3, None)),
        ("step[EXTEND bs=2 toks=100]", (1, 2, 100, 0, 0)),
        ("step[DECODE bs=4]", (1, 0, 0, 4, 4)),
        ("step[MIXED bs=4 toks=9]", (1, None, None, None, None)),
        ("ProfilerStep#12", (2, None, None, None, None)),
        ("execute_context_99999999999999999999(64)_generation_2(2)", None),
        ("execute_new_" + "9" * 5_000 + "_cached_3", None),
        ("step[DECODE bs=99999999999999999999]", None),
        ("execute_step_3", None),
        ("xexecute_new_1_cached_3", None),
    ],
)
def test_step_names(name: str, expected: tuple[int | None, ...] | None) -> None:
    step = kineto_names.step_of(name)
    assert (step if step is None else tuple(vars(step).values())) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "send_recv"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "unknown"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)", "all_reduce"),
        ("void (anonymous namespace)::one_shot_all_reduce_kernel<c10::BFloat16, 16>(unsigned long*)", "all_reduce"),
        ("void deep_ep::legacy::intranode::dispatch<8, 768, 8192>(int4*)", "all_to_all"),
        ("void deep_ep::legacy::intranode::notify_dispatch<8>(int const*)", "barrier"),
        ("void deep_ep::legacy::intranode::cached_notify_combine<8>(void**)", None),
        ("void deep_ep::legacy::layout::get_dispatch_layout<256, 32, 256>(long const*)", None),
        ("void deep_ep::elastic::dispatch_copy_epilogue_impl<7168>(int4*)", None),
        ("void at::native::reduce_kernel<512, 1>(at::native::ReduceOp<float>)", None),
        ("fused_moe_kernel", None),
        ("_ZN4mori3moe24EpDispatchIntraNodeKernelI14__hip_bfloat16EEvv", "all_to_all"),
        ("void nixl_ep::ep_kernels::dispatch<true, 7168>(void*)", "all_to_all"),
        ("void deep_ep::elastic::combine_impl<7168>(int4*)", "all_to_all"),
        ("EpCombineSyncBarrier", "barrier"),
        ("EpDispatchCopyToStagingKernel", None),
    ],
)  # fmt: skip
def test_kernels_that_are_collectives(name: str, kind: str | None) -> None:
    assert kineto_names.kernel_collective(name) == kind


@pytest.mark.parametrize(
    "part", ["Ep", "EpDispatch", "EpCombine", "deep_ep::", "nixl_ep::", "ck_tile", "cu", "layer", "execute_1_context_1", "send"]
)  # fmt: skip
def test_names_made_to_be_slow_cost_no_more_than_others(part: str) -> None:
    """Ten times the length takes at most some thirty times as long, on a machine that does other things as well."""

    def cost(length: int) -> float:
        name = part * (length // len(part))
        began = time.process_time()
        for read in (kineto_names.executed_phase, kineto_names.annotated_phase, kineto_names.layer_of,
                     kineto_names.kernel_collective, kineto_names.collective_kind, kineto_names.step_of):  # fmt: skip
            getattr(read, "__wrapped__", read)(name)
        kineto_names.CACHE_WRITER.search(name)
        return time.process_time() - began

    assert cost(40_000) < 30 * max(min(cost(4_000) for _ in range(3)), 0.002)


def test_of_a_long_name_the_beginning_is_read() -> None:
    text = pa.array(["x" * 600 + "EpDispatchKernel", "EpDispatchKernel" + "x" * 600, "é" * 600])
    assert [len(name) for name in kineto_names.read_of(text).to_pylist()] == [512, 512, 512]
    assert [kineto_names.executed_phase(name) for name in kineto_names.read_of(text).to_pylist()] == [
        None,
        "dispatch",
        None,
    ]
