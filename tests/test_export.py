"""Timelines of captures, read as Perfetto reads them, against what the trace's own tables say."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from called import called
from perfetto_reader import Read, Slice, read
from real import EXAMPLE, ROOT
from reports import HOSTILE
from test_cli import tailscope
from worlds import MS, START_NS, S, write

from tailscope.align import Scope
from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.errors import UsageError
from tailscope.export.arrows import CLAIMED, MOST_ARROWS
from tailscope.export.export import Written, export
from tailscope.export.requests import NOT_PARTED, SHOWN_AS
from tailscope.ingest import ingest
from tailscope.ledger.requests import load_requests
from tailscope.model import Diagnosis
from tailscope.render.text import told
from tailscope.source import Options
from tailscope.store import Trace

CAPTURED = {
    "mixed-load": EXAMPLE,
    "moe-straggler": ROOT / "examples" / "moe-straggler",
    "scheduled": ROOT / "tests" / "captures" / "scheduled",
}


class Case:
    """A capture, its diagnosis, and both timelines of it."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.path = folder / "trace.parquet"
        ingest([source], self.path, config=Config(), options=Options())
        self.trace = Trace(self.path)
        self.written = export(self.trace, Config(), Scope(), folder / "out.pftrace")
        export(self.trace, Config(), Scope(), folder / "out.json", format="chrome")
        self.read: Read = read(folder / "out.pftrace")
        self.json: list[dict[str, Any]] = json.loads((folder / "out.json").read_text())["traceEvents"]
        self.diagnosis: Diagnosis = diagnose(self.trace, Config())

    def rows(self, sql: str) -> list[dict[str, Any]]:
        return self.trace.rows(sql)

    def requests(self) -> list[Slice]:
        return [s for s in self.read.slices if "/requests " in self.read.path(s.track) and s.depth == 0]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return cache(lambda name: Case(CAPTURED[name], tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module", params=CAPTURED)
def case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(request.param)


def test_every_request_is_there_with_the_times_it_had(case: Case) -> None:
    shown = sorted((s.start, s.end, s.args.get("request")) for s in case.requests())
    expected = case.rows(
        "SELECT arrival_ns, arrival_ns + coalesce(e2e_ns, ttft_ns, 0) AS end_ns, request_id FROM joined ORDER BY ALL"
    )
    assert shown == [(r["arrival_ns"], r["end_ns"], r["request_id"]) for r in expected]


def test_parts_of_requests_are_those_that_are_billed(case: Case) -> None:
    names = dict(case.trace.connection.execute("SELECT rid, request_id FROM joined").fetchall())
    expected: Counter[tuple[Any, ...]] = Counter()
    for row in case.rows("SELECT DISTINCT instance, engine FROM joined WHERE billed"):
        own = load_requests(case.trace, row["instance"], row["engine"], ())
        for rid, arrival, *lengths in zip(
            own.rid.tolist(), own.arrival_ns.tolist(), *own.phases(), strict=True
        ):
            edges = arrival + np.cumsum([0, *map(int, lengths)])
            for name, start, end in zip(SHOWN_AS, edges[:-1], edges[1:], strict=True):
                if end > start:
                    expected[names[rid], name, int(start), int(end)] += 1
    found: Counter[tuple[Any, ...]] = Counter()
    for s in case.read.slices:
        if (
            s.parent is not None
            and s.name in (*SHOWN_AS, NOT_PARTED)
            and "/requests " in case.read.path(s.track)
            and s.parent.name == "request"
        ):
            name = "prefill" if s.name == NOT_PARTED else s.name
            found[s.parent.args["request"], name, s.start, s.end] += 1
    assert found == expected


def test_lanes_of_a_class_hold_that_class(case: Case) -> None:
    classes = {
        (r["request_id"], r["arrival_ns"]): r["klass"]
        for r in case.rows("SELECT request_id, arrival_ns, klass FROM joined")
    }
    for s in case.requests():
        assert case.read.path(s.track).endswith(f"/requests {classes[s.args.get('request'), s.start]}")


def test_steps_and_counters_are_those_of_the_engines(case: Case) -> None:
    for row in case.rows("SELECT DISTINCT instance, engine FROM steps"):
        engine = "engine" if row["engine"] is None else f"engine {row['engine']}"
        place = f"instance {row['instance']}/{engine}"
        steps = case.trace.connection.execute(
            "SELECT start_ns, end_ns, running, waiting, kv_usage, prefill_tokens, decode_tokens FROM steps "
            "WHERE instance = $instance AND engine IS NOT DISTINCT FROM $engine ORDER BY k",
            row,
        ).fetchall()
        assert [(s.start, s.end) for s in case.read.on(f"{place} steps")] == [step[:2] for step in steps]
        for name, column, factor in (("running", 2, 1), ("waiting", 3, 1), ("KV cache", 4, 100)):
            expected = [(step[1], step[column] * factor) for step in steps if step[column] is not None]
            assert case.read.counter(f"{place} {name}") == changes(expected)
        for name, column in (("prefill tokens", 5), ("decode tokens", 6)):
            expected = []
            for step, after in zip(steps, [*steps[1:], None], strict=True):
                expected.append((step[0], step[column]))
                # Nothing is held while the engine stands still.
                if after is None or after[0] > step[1]:
                    expected.append((step[1], 0))
            assert case.read.counter(f"{place} {name}") == changes(expected)


def changes(values: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Those that differ from the one before: a counter keeps its value."""
    return values[:1] + [value for before, value in pairwise(values) if value[1] != before[1]]


def test_findings_are_told_in_the_terminals_words_and_order(case: Case) -> None:
    # Tracks are in the order in which they are shown, slices in order of time.
    marks = sorted(
        (s for s in case.read.slices if case.read.path(s.track).startswith("findings/")),
        key=lambda s: s.track,
    )
    expected = list(told(case.diagnosis.findings))
    assert [s.name for s in marks] == [entry.title for entry in expected]
    for s, entry, finding in zip(marks, expected, case.diagnosis.findings, strict=True):
        assert case.read.path(s.track) == f"findings/{entry.number}. {entry.severity.upper()} {entry.rule}"
        told_there = [
            value for name, value in s.args.items() if name not in ("finding", "same", "outside", "time")
        ]
        assert told_there == [text for _, texts in entry.rows for text in texts]
        if finding.window_ns and "outside" not in s.args:
            assert finding.window_ns[0] <= s.start <= s.end <= finding.window_ns[1]  # type: ignore[operator]
    (verdict,) = [s for s in case.read.slices if case.read.path(s.track) == "findings"]
    assert verdict.name.startswith(
        f"{case.diagnosis.verdict.status.upper()}: {case.diagnosis.verdict.text[:100]}"
    )


def test_both_formats_say_the_same(case: Case) -> None:
    kinds = Counter(event["ph"] for event in case.json)
    assert kinds["C"] == case.written.counters == sum(map(len, case.read.counters.values()))
    assert kinds["s"] == kinds["f"] == len(case.read.flows)
    assert kinds["X"] + kinds["i"] == case.written.slices == len(case.read.slices)
    first = min(s.start for s in case.read.slices)
    from_json = Counter(
        (event["name"], round(event["ts"] * 1000), round(event["dur"] * 1000))
        for event in case.json
        if event["ph"] == "X"
    )
    ours = Counter((s.name, s.start - first, (s.end or 0) - s.start) for s in case.read.slices)
    assert not from_json - ours


# -- what is known of each capture ------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(cases: Callable[[str], Case]) -> Case:
    return cases("mixed-load")


@pytest.fixture(scope="module")
def straggler(cases: Callable[[str], Case]) -> Case:
    return cases("moe-straggler")


def request_of(own: Slice) -> Slice:
    return own if own.parent is None else request_of(own.parent)


def test_arrows_go_from_long_prefills_to_those_who_waited(mixed: Case) -> None:
    held = [(a, b) for a, b in mixed.read.flows if b.name == "waits for class <8k"]
    assert 50 <= len(held) <= MOST_ARROWS
    for cause, wait in held:
        assert cause.parent is not None and cause.parent.name == "prefill"
        culprit, victim = request_of(cause), request_of(wait)
        assert culprit.args["prompt_tokens"] >= 2048 > 512 > victim.args["prompt_tokens"]
        # The wait lies in the prefill that caused it, and begins no sooner.
        assert cause.start <= wait.start < wait.end <= cause.parent.end + 1  # type: ignore[operator]
    # The long prompts that were injected.
    assert {request_of(a).args["request"][:11] for a, _ in held} == {"cmpl-A-long", "cmpl-P-long"}


def test_longest_waits_are_shown_and_booked_as_the_bill_says(mixed: Case) -> None:
    booked = [b.args["booked_ms"] for _, b in mixed.read.flows if b.name == "waits for class <8k"]
    worst = mixed.rows(
        "SELECT sum(ns) / 1e6 AS ms FROM bill_lines l JOIN joined j ON j.rid = l.id "
        "WHERE l.culprit = '<8k' AND j.klass = '<512' GROUP BY l.id, l.place ORDER BY ms DESC LIMIT 1"
    )[0]["ms"]
    assert max(booked) == pytest.approx(worst)


def test_arrows_go_from_the_late_rank_to_the_one_that_waits(straggler: Case) -> None:
    late = [(a, b) for a, b in straggler.read.flows if a.name == "comes last"]
    assert late
    for cause, wait in late:
        assert straggler.read.path(cause.track) == "ranks/rank 1/collectives"
        assert straggler.read.path(wait.track) == "ranks/rank 0/collectives"
        assert cause.start == wait.start


def test_every_claim_of_a_rule_that_blames_requests_is_known() -> None:
    tails, cache = (import_module(f"tailscope.rules.{name}") for name in ("_tails", "_kv"))
    assert set(CLAIMED) == {tails.OTHERS_PREFILL, tails.QUEUED, tails.LEFT_OUT, cache.CACHE}


def test_waits_of_ranks_are_those_that_were_found(straggler: Case) -> None:
    for rank in (0, 1):
        waits = [s for s in straggler.read.on(f"ranks/rank {rank}/collectives") if s.name == "wait"]
        (expected,) = straggler.rows(
            f"SELECT sum(least(wait_ns, end_ns - start_ns))::BIGINT AS ns FROM rank_rounds WHERE rank = {rank}"
        )
        assert sum((s.end or 0) - s.start for s in waits) == expected["ns"]


# -- a part of it -----------------------------------------------------------------------------------


def exported(case: Case, folder: Path, scope: Scope | None = None, **more: Any) -> tuple[Written, Read]:
    out = folder / "part.pftrace"
    written = export(case.trace, Config(), scope or Scope(), out, **more)
    return written, read(out)


def test_more_than_fits_is_cut_about_the_worst_finding_and_said_so(mixed: Case, tmp_path: Path) -> None:
    written, found = exported(mixed, tmp_path, most=4_000)
    assert written.span.slices <= 4_000
    assert written.span.left_out is not None
    worst = mixed.diagnosis.findings[0].window_ns
    assert worst is not None
    assert written.span.first_ns <= (worst[0] + worst[1]) // 2 <= written.span.last_ns
    starts = [s.start for s in found.slices if not found.path(s.track).startswith("findings")]
    assert written.span.first_ns <= min(starts) and max(starts) <= written.span.last_ns
    assert re.search(
        r"^up to [\d,]+ slices and counter values are more than the 4,000 of one timeline: written is \S+ to \S+ UTC, around finding 1 "
        r"\([\d,]+\)\. For another part say --from and --to, up to \d+[smh] apart where it is as dense, or --last \d+[smh]; for more at "
        r"once, --most-slices$",
        written.span.left_out,
    )


def test_what_the_message_says_fits_does(mixed: Case, tmp_path: Path) -> None:
    written, _ = exported(mixed, tmp_path, most=4_000)
    last = re.search(r"--last (\d+)s", written.span.left_out or "")
    assert last
    end = mixed.rows("SELECT max(coalesce(finished_ns, arrival_ns)) AS ns FROM requests")[0]["ns"]
    again, _ = exported(mixed, tmp_path, Scope(from_ns=end - int(last[1]) * S), most=4_000)
    assert again.span.left_out is None


def test_a_moment_that_is_too_full_is_still_bounded(tmp_path: Path) -> None:
    rows = [
        {"instance": "a", "source": "s", "request_key": f"k{i}", "request_id": f"r{i}", "observer": "engine", "arrival_ns": START_NS + i, "ttft_ns": MS, "e2e_ns": S, "prompt_tokens": 9, "output_tokens": 9, "status": "ok"}
        for i in range(3_000)
    ]  # fmt: skip
    rows.append({**rows[0], "request_key": "late", "request_id": "late", "arrival_ns": START_NS + 3_600 * S})
    with Trace(write(tmp_path / "t", {"requests": rows})) as trace:
        written = export(trace, Config(), Scope(), tmp_path / "out.pftrace", most=1_000, with_findings=False)
    assert 0 < written.slices <= 1_000
    assert written.span.left_out


def test_class_and_window_are_kept_to(mixed: Case, tmp_path: Path) -> None:
    def classes(found: Read) -> set[str]:
        paths = [found.path(s.track).split("/")[-1] for s in found.slices]
        return {path for path in paths if path.startswith("requests ")}

    _, found = exported(mixed, tmp_path, Scope(klass="<8k"))
    assert classes(found) == {"requests <8k"}
    # Of a class that waits for another the other is shown, too.
    _, found = exported(mixed, tmp_path, Scope(klass="<512"))
    assert classes(found) == {"requests <8k", "requests <512"}
    assert found.flows
    start, end = 1_795_963_214 * S, 1_795_963_264 * S
    _, found = exported(mixed, tmp_path, Scope(start, end))
    starts = [s.start for s in found.slices if not found.path(s.track).startswith("findings")]
    assert start <= min(starts) and max(starts) < end


def test_without_findings_nothing_is_said_of_them(mixed: Case, tmp_path: Path) -> None:
    written, found = exported(mixed, tmp_path, with_findings=False)
    assert not found.flows
    assert not any(found.path(t).startswith("findings") for t in found.tracks)
    assert written.slices > 3_000


def test_the_same_trace_gives_the_same_file(mixed: Case, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    export(mixed.trace, Config(), Scope(), one)
    export(mixed.trace, Config(), Scope(), other)
    assert one.read_bytes() == other.read_bytes()


def test_nothing_to_show_is_said_and_leaves_no_file(mixed: Case, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="nothing with a time begins"):
        export(mixed.trace, Config(), Scope(from_ns=START_NS + 10**17), out)
    with pytest.raises(UsageError, match="cannot be written"):
        export(mixed.trace, Config(), Scope(), tmp_path / "no" / "such" / "folder")
    assert not list(tmp_path.iterdir())


def test_metrics_alone_have_no_timeline(tmp_path: Path) -> None:
    scraped = EXAMPLE / "metrics.txt.gz"
    ingest([scraped], tmp_path / "t.parquet", config=Config(), options=Options())
    with Trace(tmp_path / "t.parquet") as trace, pytest.raises(UsageError, match="tailscope report"):
        export(trace, Config(), Scope(), tmp_path / "out")


# -- hostile traces ---------------------------------------------------------------------------------


def test_hostile_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    requests = [
        {
            "instance": name, "source": "s", "request_key": f"k{i}", "request_id": name * 9, "observer": "engine", "tenant": name,
            "klass": name, "adapter": name, "arrival_ns": START_NS + i * MS, "queue_ns": MS, "prefill_ns": MS, "ttft_ns": 3 * MS,
            "e2e_ns": 9 * MS, "prompt_tokens": 9, "output_tokens": 9, "status": "ok",
        }
        for i, name in enumerate(HOSTILE)
    ]  # fmt: skip
    events = [
        {
            "instance": name,
            "source": "s",
            "time_ns": START_NS,
            "kind": name,
            "detail": name,
            "request_id": name,
        }
        for name in HOSTILE
    ]
    with Trace(write(tmp_path / "t", {"requests": requests, "events": events})) as trace:
        export(trace, Config(), Scope(), tmp_path / "out.pftrace")
        export(trace, Config(), Scope(), tmp_path / "out.json", format="chrome")
    found = read(tmp_path / "out.pftrace")
    texts = [s.name for s in found.slices] + [t.name for t in found.tracks.values()]
    texts += [value for s in found.slices for value in s.args.values() if isinstance(value, str)]
    assert all(text.isprintable() for text in texts)
    raw = (tmp_path / "out.json").read_bytes()
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", raw)
    events_read = json.loads(raw)["traceEvents"]
    assert {e["args"]["request"] for e in events_read if e["ph"] == "X" and e["name"] == "request"} == {
        s.args["request"] for s in found.slices if s.name == "request"
    }


def test_times_that_cannot_be_are_kept_in_order(tmp_path: Path) -> None:
    """Parts longer than the whole, no time to the first token, no end: all nest, and none is negative."""
    odd = [
        {"ttft_ns": 5 * MS, "e2e_ns": 9 * MS, "queue_ns": 50 * MS, "prefill_ns": 50 * MS},
        {"ttft_ns": 9 * MS, "e2e_ns": 5 * MS},
        {"e2e_ns": 5 * MS},
        {},
        {"ttft_ns": -1, "e2e_ns": -1, "queue_ns": -1},
        {"ttft_ns": 0, "e2e_ns": 0, "queue_ns": 0, "prefill_ns": 0},
        {"ttft_ns": 2**62, "e2e_ns": 2**62},
    ]
    rows = [
        {"instance": "a", "source": "s", "request_key": f"k{i}", "request_id": f"r{i}", "observer": "engine", "arrival_ns": START_NS, **row}
        for i, row in enumerate(odd * 3)
    ]  # fmt: skip
    with Trace(write(tmp_path / "t", {"requests": rows})) as trace:
        export(trace, Config(), Scope(), tmp_path / "out.pftrace")
    found = read(tmp_path / "out.pftrace")
    assert sum(s.depth == 0 and s.name.startswith("request") for s in found.slices) == len(rows)


# -- the command ------------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote_and_what_it_left_out(mixed: Case, tmp_path: Path) -> None:
    out = tmp_path / "a.pftrace"
    done = tailscope("export", "perfetto", mixed.path, "-o", out, "--most-slices", "4000")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"\S+a\.pftrace: [\d,]+ slices and [\d,]+ counter values on \d+ tracks, [\d.]+ MB; \d+ arrows: of each finding the 100 longest "
        r"waits at most\. Open it in https://ui\.perfetto\.dev\n",
        done.stdout,
    )
    assert done.stderr.startswith("tailscope: ") and "written is" in done.stderr
    read(out)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-o", "."], "is a folder; name a file"),
        (["-o", "out", "--class", "nobody"], "--class 'nobody'"),
        (["-o", "out", "--last", "soon"], "--last 'soon'"),
        (["-o", "out", "--from", "2030-01-01"], "nothing with a time begins"),
    ],
)
def test_a_mistake_is_one_sentence(mixed: Case, tmp_path: Path, args: list[str], message: str) -> None:
    done = called("export", "perfetto", mixed.path, *args, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
