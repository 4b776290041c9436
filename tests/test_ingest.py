from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake import Fake, Row, add, files_in, request, stored, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailscope import ingest as module
from tailscope import registry
from tailscope.config import Config, SourceRule
from tailscope.errors import BadInput, TailscopeError, UsageError
from tailscope.ingest import Outcome
from tailscope.parts import Stored
from tailscope.schema import SOURCES, TABLES
from tailscope.source import Options
from tailscope.store import Trace


@pytest.fixture(autouse=True)
def only_the_fake_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "collectors", lambda: (Fake(),))


def status(outcomes: list[Outcome]) -> dict[str, str]:
    """File name -> what became of it, and why."""
    return {Path(o.path).name: f"{o.status} {o.message}".strip() for o in outcomes}


# -- outcomes ------------------------------------------------------------------------------------------


def test_every_file_has_an_outcome(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write(folder / "good", request(1), {"table": "iterations", "end_ns": 5})
    (folder / "gone wrong").write_text("FAKE\n{not JSON\n" + json.dumps(request(2)) + "\n")
    write(folder / "bad", request(3), {"raise": "BadInput"})
    shutil.copy(folder / "good", folder / "same again")
    (folder / "empty").touch()
    (folder / "blank").write_text(" \n\t\n")
    (folder / "photo.jpg").write_bytes(bytes(range(256)))
    calls: list[tuple[str, int, int]] = []
    outcomes = module.ingest(
        [folder],
        tmp_path / "t",
        config=Config(),
        options=Options(),
        report=lambda outcome, done, total: calls.append((outcome.path, done, total)),
    )
    assert status(outcomes) == {
        "good": "ingested",
        "gone wrong": "ingested",
        "bad": f"failed {folder / 'bad'}, line 3: nothing in it can be used",
        "same again": "known already in the trace",
        "empty": "skipped empty",
        "blank": "skipped empty",
        "photo.jpg": "skipped not recognised as telemetry",
    }
    assert calls == [(o.path, number, 7) for number, o in enumerate(outcomes, 1)]
    assert {Path(o.path).name: o.stored for o in outcomes if o.kind == "fake" and o.status == "ingested"} == {
        "good": Stored({"requests": 1, "iterations": 1}),
        "gone wrong": Stored({"requests": 1}),
    }
    assert stored(tmp_path / "t", "SELECT request_key FROM requests ORDER BY ALL") == ["r1", "r2"]
    sql = "SELECT parse_filename(path), rows, rows_rejected, reject_reasons, first_ns, last_ns FROM sources ORDER BY 1"
    assert stored(tmp_path / "t", sql) == [
        ("gone wrong", 1, 1, {"not JSON": 1}, 1002, 1002),
        ("good", 2, 0, {}, 5, 1001),
    ]


def test_a_bug_in_a_collector_is_raised_and_costs_only_its_source(tmp_path: Path) -> None:
    write(tmp_path / "in" / "1", request(1))
    write(tmp_path / "in" / "2", request(2), {"raise": "bug"})
    write(tmp_path / "in" / "3", request(3))
    with pytest.raises(RuntimeError, match="bug"):
        add(tmp_path / "t", tmp_path / "in")
    assert stored(tmp_path / "t", "SELECT request_key FROM requests") == ["r1"]
    assert not list((tmp_path / "t").glob("*/.*.tmp"))


def test_a_source_may_hold_nothing(tmp_path: Path) -> None:
    """It is a source nevertheless, and known the next time."""
    nothing = write(tmp_path / "f")
    assert status(add(tmp_path / "t", nothing)) == {"f": "ingested"}
    assert status(add(tmp_path / "t", nothing)) == {"f": "known already in the trace"}
    assert stored(tmp_path / "t", "SELECT rows, first_ns FROM sources") == [(0, None)]


def test_the_epoch_is_a_time_too(tmp_path: Path) -> None:
    path = write(tmp_path / "f", *(request(n, arrival_ns=ns) for n, ns in enumerate([0, 5, None])))
    add(tmp_path / "t", path)
    assert stored(tmp_path / "t", "SELECT first_ns, last_ns FROM sources") == [(0, 5)]


# -- what is given -------------------------------------------------------------------------------------


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    good = write(tmp_path / "good", request(1))
    for gone in (tmp_path / "gone", good / "below"):
        with pytest.raises(
            UsageError, match=r"gone: no such file or folder|below: cannot be read: Not a directory"
        ):
            add(tmp_path / "t", good, gone)
    assert not (tmp_path / "t").exists()


def test_a_trace_is_no_telemetry(tmp_path: Path) -> None:
    add(tmp_path / "t.parquet", write(tmp_path / "f", request(1)))
    with pytest.raises(
        UsageError, match=r"t\.parquet: is a trace already; tailscope reads traces with diagnose"
    ):
        add(tmp_path / "other", tmp_path / "t.parquet")
    (part,) = (tmp_path / "t.parquet" / "requests").iterdir()
    assert status(add(tmp_path / "other", part)) == {part.name: "skipped not recognised as telemetry"}


@pytest.mark.parametrize("output", ["t.parquet", "run1/t.parquet", "deep/er/t.parquet", "t", "run1/t"])
def test_the_output_may_lie_in_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    write(tmp_path / "run1" / "f", request(1))
    monkeypatch.chdir(tmp_path)
    assert status(add(Path(output), tmp_path)) == {"f": "ingested"}
    assert status(add(tmp_path / output, Path())) == {"f": "known already in the trace"}


def test_a_file_given_twice_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "in" / "f", request(1))
    (tmp_path / "in" / "link").symlink_to("f")
    assert len(add(tmp_path / "t", path, tmp_path / "in", tmp_path / "in" / ".." / "in" / "f")) == 1


def test_what_is_no_regular_file_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "in"
    write(folder / "good", request(1))
    write(tmp_path / "elsewhere" / "other", request(2))
    os.mkfifo(folder / "pipe")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "round").symlink_to(folder)
    (folder / "folder").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(folder)  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        outcomes = add(tmp_path / "t", folder)
    assert status(outcomes) == {
        "good": "ingested",
        **dict.fromkeys(("pipe", "dangling", "loop", "socket"), "skipped not a regular file"),
        **dict.fromkeys(("round", "folder"), "skipped a link to a folder; name it to have it read"),
    }
    assert status(add(tmp_path / "t", folder / "pipe")) == {"pipe": "skipped not a regular file"}
    assert status(add(tmp_path / "t", folder / "folder")) == {"other": "ingested"}


def test_a_file_that_cannot_be_read_is_one_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whatever step: the head, the hash, the rows. The others are read."""
    folder = tmp_path / "in"
    write(folder / "bad", request(1))
    write(folder / "good", request(2))
    opened = Counter[str]()
    open_file = Path.open
    for step, reason in enumerate(["Permission denied", "No such file or directory", "Input/output error"]):
        number = {"Permission denied": 13, "No such file or directory": 2, "Input/output error": 5}[reason]

        def refuse(self: Path, *a: Any, step: int = step, number: int = number, **k: Any) -> Any:
            opened[self.name] += 1
            if self.name == "bad" and opened["bad"] == step + 1:
                raise OSError(number, os.strerror(number))
            return open_file(self, *a, **k)

        opened.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", refuse)
            outcomes = add(tmp_path / f"t{step}", folder)
        assert status(outcomes) == {
            "bad": f"failed {folder / 'bad'}: cannot be read: {reason}",
            "good": "ingested",
        }
        assert stored(tmp_path / f"t{step}", "SELECT request_key FROM requests") == ["r2"]


def test_what_one_may_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (tmp_path / "t").mkdir(mode=0)
    if os.access(tmp_path / "t", os.R_OK):
        pytest.skip("root reads everything")
    (tmp_path / "t").rmdir()
    write(folder / "closed file", request(1)).chmod(0)
    write(folder / "closed folder" / "f", request(2)).parent.chmod(0)
    write(folder / "good", request(3))
    try:
        assert status(add(tmp_path / "t", folder)) == {
            "closed file": f"failed {folder / 'closed file'}: cannot be read: Permission denied",
            "closed folder": f"failed {folder / 'closed folder'}: cannot be read: Permission denied",
            "good": "ingested",
        }
        with pytest.raises(UsageError, match=r"closed folder/f: cannot be read: Permission denied"):
            add(tmp_path / "t", folder / "closed folder" / "f")
        before = files_in(tmp_path / "t")
        for closed in (tmp_path / "t", *(tmp_path / "t").glob("*/")):
            closed.chmod(0o500)
        with pytest.raises(TailscopeError, match="no permission to write there"):
            add(tmp_path / "t", write(tmp_path / "new", request(4)))
        assert files_in(tmp_path / "t") == before
    finally:
        for closed in (folder / "closed folder", tmp_path / "t", *(tmp_path / "t").glob("*/")):
            closed.chmod(0o700)


@pytest.mark.parametrize(
    "name", [b"new\nline", b"\x1b[31mred", b'it\'s "q"', b"\xff\xfe", b"[a]*?", "ß漢".encode()]
)
def test_a_file_of_any_name(tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / os.fsdecode(name)
    write(folder / os.fsdecode(name), request(1))
    (outcome,) = add(tmp_path / "t", folder)
    shown = name.decode("utf-8", "replace")
    assert (outcome.status, outcome.path) == ("ingested", f"{tmp_path}/{shown}/{shown}")
    assert stored(tmp_path / "t", "SELECT path, folder FROM sources") == [(outcome.path, shown)]
    assert stored(tmp_path / "t", "SELECT instance FROM requests") == [shown]
    with pytest.raises(UsageError) as caught:
        add(tmp_path / "t", folder / "gone")
    assert str(caught.value).encode()


def test_many_small_files_are_stored_together(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(1500):
        write(folder / f"{number:05}", request(number))
    outcomes = add(tmp_path / "t", folder)
    assert {(o.status, o.stored.rows["requests"]) for o in outcomes} == {("ingested", 1)}
    assert len(list((tmp_path / "t").glob("*/*.parquet"))) == 4  # two commits
    assert stored(tmp_path / "t", "SELECT count(*), count(DISTINCT source) FROM requests") == [(1500, 1500)]
    before = files_in(tmp_path / "t")
    assert {o.status for o in add(tmp_path / "t", folder)} == {"known"}
    assert files_in(tmp_path / "t") == before


# -- known content -------------------------------------------------------------------------------------


def test_content_and_not_the_file_is_known(tmp_path: Path) -> None:
    path = write(tmp_path / "f", request(1), {"table": "tokens", "time_ns": 1})
    add(tmp_path / "t", path)
    before = files_in(tmp_path / "t")
    packed = tmp_path / "other.name"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert set(status(add(tmp_path / "t", path, packed)).values()) == {"known already in the trace"}
    assert files_in(tmp_path / "t") == before


def test_a_grown_file_adds_its_new_rows(tmp_path: Path) -> None:
    rows = [
        row
        for n in range(40)
        for row in (
            request(n),
            {"table": "tokens", "request_key": f"r{n}", "seq": 0, "time_ns": n},
            {"table": "iterations", "iteration": n, "end_ns": n},
            {"table": "schedule", "request_key": f"r{n}", "iteration_first": n},
            {"table": "events", "time_ns": n, "kind": "abort"},
            {"table": "metrics", "series": "s", "time_ns": n, "value": n},
            {"table": "expert_load", "step": n, "tokens": n},
        )
    ]
    for name, count in (("first", 140), ("whole", 280)):
        (outcome,) = add(tmp_path / "t", write(tmp_path / name, *rows[:count]))
    assert outcome.stored.duplicate == 140
    assert set(outcome.stored.rows.values()) == {20}
    for table in outcome.stored.rows:
        assert stored(tmp_path / "t", f"SELECT count(*) FROM {table}") == [40]


def test_one_damaged_trace_is_not_blamed_on_the_files(tmp_path: Path) -> None:
    trace = tmp_path / "t"
    add(trace, write(tmp_path / "1", request(1)))
    (part,) = (trace / "sources").iterdir()
    part.write_bytes(b"damaged")
    with pytest.raises(BadInput, match="table sources: cannot be read"):
        add(trace, write(tmp_path / "2", request(2)))


ROWS = st.lists(
    st.one_of(
        st.builds(
            lambda key, at, model: {
                "table": "requests",
                "request_key": key,
                "arrival_ns": at,
                "model": model,
            },
            st.sampled_from(["a", "b", None]),
            st.sampled_from([1, 2, None]),
            st.sampled_from(["m", None]),
        ),
        st.builds(lambda at: {"table": "iterations", "end_ns": at}, st.sampled_from([1, 2, None])),
        st.builds(lambda s: {"table": "schedule", "request_key": s}, st.sampled_from(["a", "b"])),
        st.builds(lambda at: {"table": "rank_events", "start_ns": at}, st.sampled_from([1, 2])),
    ),
    max_size=6,
)


def contents(trace: Path) -> dict[str, Counter[Any]]:
    found = {}
    with Trace(trace) as opened:
        for table in TABLES:
            counts = {"path", "rows", "rows_duplicate", "rows_conflicting"}
            gone = counts if table is SOURCES else {*table.provenance}
            rows = opened.rows(f'FROM "{table.name}"')
            found[table.name] = Counter(repr({k: v for k, v in row.items() if k not in gone}) for row in rows)
    return found


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(files=st.lists(ROWS, min_size=2, max_size=3), data=st.data())
def test_the_order_of_sources_does_not_matter(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[Row]], data: st.DataObject
) -> None:
    """In one call or one each. Sources that repeat a row are another matter: repeats in the first are kept."""
    folder = tmp_path_factory.mktemp("order")
    unique = [list({json.dumps(row): row for row in rows}.values()) for rows in files]
    paths = [write(folder / "in" / str(n), *rows) for n, rows in enumerate(unique)]
    order = data.draw(st.sampled_from(list(itertools.permutations(paths))))
    add(folder / "together", *paths)
    for path in order:
        add(folder / "alone", path)
    add(folder / "turned", *order)
    assert contents(folder / "together") == contents(folder / "alone") == contents(folder / "turned")


# -- where rows belong ---------------------------------------------------------------------------------


def instances(trace: Path) -> dict[str, str]:
    return dict(stored(trace, "SELECT request_key, instance FROM requests"))


def test_an_instance_given_for_all_holds_for_all(tmp_path: Path) -> None:
    path = write(tmp_path / "f", request(1), request(2, instance="named"))
    add(tmp_path / "t", path, instance="mine", config=Config(sources=(SourceRule("*", "rule"),)))
    assert set(instances(tmp_path / "t").values()) == {"mine"}
    assert stored(tmp_path / "t", "SELECT instance, instances FROM sources") == [("mine", ["mine"])]


def test_a_rule_of_the_configuration_comes_before_what_the_source_names(tmp_path: Path) -> None:
    for number, name in enumerate(["a/engine0/x", "a/engine1/x", "b/x"]):
        write(tmp_path / name, request(number, instance="named"))
    rules = (SourceRule("*/engine0/*", "zero"), SourceRule("*/engine?/*", "other"))
    add(tmp_path / "t", tmp_path / "a", tmp_path / "b", config=Config(sources=rules))
    assert instances(tmp_path / "t") == {"r0": "zero", "r1": "other", "r2": "named"}


def test_a_folder_of_runs_is_an_instance_a_run(tmp_path: Path) -> None:
    for number, name in enumerate(
        ["run1/f", "run1/otlp/f", "run2/f", "nothing/run3/f", "nothing/run3/deep/er/f"]
    ):
        write(tmp_path / "runs" / name, request(number))
    (tmp_path / "runs" / "README").write_text("no telemetry")
    add(tmp_path / "t", tmp_path / "runs")
    assert instances(tmp_path / "t") == {
        "r0": "run1",
        "r1": "run1",
        "r2": "run2",
        "r3": "nothing/run3",
        "r4": "nothing/run3",
    }


def test_folders_of_one_name_are_two_instances(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "a" / "logs" / "f", request(1))
    write(tmp_path / "runs" / "b" / "logs" / "f", request(2))
    add(tmp_path / "t", tmp_path / "runs")
    assert instances(tmp_path / "t") == {"r1": "a/logs", "r2": "b/logs"}


def test_a_folder_that_holds_telemetry_itself_is_one_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "run" / "f", request(1))
    write(tmp_path / "run" / "otlp" / "f", request(2))
    add(tmp_path / "t", tmp_path / "run")
    assert set(instances(tmp_path / "t").values()) == {"run"}
    monkeypatch.chdir(tmp_path / "run")
    add(tmp_path / "t2", Path())
    add(tmp_path / "t3", Path("f"))
    assert set((instances(tmp_path / "t2") | instances(tmp_path / "t3")).values()) == {"run"}


def test_what_names_no_instance_joins_the_one_named_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "1" / "client", request(1))
    write(tmp_path / "runs" / "1" / "metrics", request(2, instance="h:8000"))
    write(tmp_path / "runs" / "2" / "client", request(3))
    write(tmp_path / "runs" / "2" / "m0", request(4, instance="h:8000"))
    write(tmp_path / "runs" / "2" / "m1", request(5, instance="h:8001"), request(6))
    add(tmp_path / "t", tmp_path / "runs")
    assert instances(tmp_path / "t") == {
        "r1": "h:8000",
        "r2": "h:8000",
        "r3": "2",
        "r4": "h:8000",
        "r5": "h:8001",
        "r6": "2",
    }
