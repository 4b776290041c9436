"""Faults below a running server: a full disk, a journal that is damaged or removed, processes that are killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from google.rpc.status_pb2 import Status
from test_live_keep import NOW_NS, World
from test_live_server import (
    PROTOBUF,
    Running,
    a_page,
    call,
    engine,
    ids_of,
    request,
    running,
    settings,
    wait_for,
)

from tailscope.errors import UsageError
from tailscope.live import journal as journals
from tailscope.live import server as serving
from tailscope.live.journal import Journal
from tailscope.schema import METRICS, REQUESTS, SERIES
from tailscope.source import Tally
from tailscope.store import Trace


def sample(server: Running, name: str) -> str:
    lines = call(server.url("/metrics"))[1].decode().splitlines()
    return next((line.rsplit(" ", 1)[1] for line in lines if line.startswith(name)), "")


def sent(server: Running, name: str, **attributes: str) -> int:
    body = request(name, **attributes).SerializeToString()
    return call(server.url("/v1/traces", "otlp_http"), body, PROTOBUF)[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], capture_output=True).returncode:  # fmt: skip
        pytest.skip("cannot mount a file system here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_told_and_work_goes_on_when_there_is_space(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "SEGMENT_S", 0.5)
    acknowledged = []
    filler = small_disk / "filler"
    with engine(a_page) as target, running(settings(small_disk, scrape=[{"targets": [target], "every": "500ms"}])) as server:  # fmt: skip
        assert sent(server, "before") == 200
        wait_for(lambda: sample(server, 'tailscope_rows_written_total{table="requests"}') == "1.0")
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for number in range(30):
            body = request(f"full-{number}", **{"acme.tenant": "x" * 20_000}).SerializeToString()
            status, answer, headers = call(server.url("/v1/traces", "otlp_http"), body, PROTOBUF)
            if status == 200:  # what is left of a page
                acknowledged.append(f"full-{number}")
                continue
            assert (status, headers["Retry-After"]) == (503, "1")
            assert "No space left" in Status.FromString(answer).message
        assert sample(server, "tailscope_disk_full ") == "1.0"
        assert (
            'tailscope_requests_refused_total{protocol="http",reason="disk"}'
            in call(server.url("/metrics"))[1].decode()
        )
        wait_for(lambda: bool(sample(server, f'tailscope_scrapes_total{{outcome="disk",server="{target}"}}')))
        filler.unlink()
        assert sent(server, "after") == 200
        acknowledged += ["before", "after"]
        wait_for(lambda: sample(server, "tailscope_disk_full ") == "0.0")
        wait_for(lambda: call(server.url("/readyz"))[0] == 200)
    assert set(ids_of(small_disk / "t.parquet")) == set(acknowledged)
    with Trace(small_disk / "t.parquet") as trace:
        assert trace.warnings == []
        assert trace.rows(
            "SELECT count(*) AS n FROM metrics WHERE series NOT IN (SELECT series FROM series)"
        ) == [{"n": 0}]
    assert not list((small_disk / "t.parquet").glob("**/.*.tmp"))


def test_a_write_that_fails_half_way_leaves_no_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the half can be taken back or not."""
    journal = Journal(tmp_path, "spans")
    write, truncate = os.write, os.ftruncate
    rows = REQUESTS.batch({"request_key": ["a"], "status": ["ok"]})
    journal.append({"requests": rows}).result()
    for back in (True, False):

        def half(file: int, data: memoryview) -> int:
            if len(data) > 100:
                return write(file, data[:100])
            raise OSError(28, "No space left on device")

        def broken(*_: int) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "write", half)
        monkeypatch.setattr(os, "ftruncate", truncate if back else broken)
        future = journal.append({"requests": rows})
        with pytest.raises(OSError, match=r"No space|Input"):
            future.result(10)
        monkeypatch.undo()
        journal.append({"requests": rows}).result(10)
    journal.close()
    found = 0
    for segment in journals.segments(tmp_path):
        with contextlib.suppress(journals.Damaged):  # the half that could not be taken back is at the end
            for _ in segment.frames():
                found += 1
    assert found == 3


def test_whoever_gives_up_waiting_does_not_end_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "spans")
    rows = REQUESTS.batch({"request_key": ["a"], "status": ["ok"]})
    journal.append({"requests": rows}).cancel()
    journal.append({"requests": rows}).result(10)
    journal.close()


def test_a_journal_that_was_removed_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "SEGMENT_S", 0.5)
    with running(settings(tmp_path)) as server:
        assert sent(server, "lost with the folder") == 200
        shutil.rmtree(tmp_path / "t.parquet" / ".journal")
        assert sent(server, "later") == 200
        assert sample(server, "tailscope_disk_full ") == "0.0"
        wait_for(lambda: call(server.url("/readyz"))[0] == 200)
    assert ids_of(tmp_path / "t.parquet") == ["later"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    from types import SimpleNamespace

    from tailscope.live import keep

    monkeypatch.setattr(keep, "time", SimpleNamespace(time=lambda: NOW_NS / 1e9))
    return World(tmp_path / "t.parquet")


@pytest.mark.parametrize("damage", ["cut", "flipped", "junk behind", "other schema", "of nobody", "empty"])
def test_a_damaged_segment_is_set_aside_and_the_rest_goes_on(world: World, damage: str) -> None:
    rows = REQUESTS.batch(
        {"request_key": ["first"], "instance": ["a"], "arrival_ns": [NOW_NS], "status": ["ok"]}
    )
    other = rows.set_column(0, "zzz", rows.column(0)) if damage == "other schema" else rows
    path = world.write("spans", NOW_NS, (REQUESTS, rows, None), (REQUESTS, other, None))
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[:-5])
    elif damage == "flipped":
        path.write_bytes(data[: len(data) * 3 // 4] + b"?" + data[len(data) * 3 // 4 + 1 :])
    elif damage == "junk behind":
        path.write_bytes(data + b"junk")
    elif damage == "of nobody":
        path.rename(path.with_name(path.name.replace("spans", "others")))
    elif damage == "empty":
        path.write_bytes(b"")
    (world.journal / "notes.arrow").write_text("not a segment")
    world.segment("after", at_ns=NOW_NS + 5)
    kept = world.keeper.round()
    assert world.keys() == (["after"] if damage in ("of nobody", "empty") else ["after", "first"])
    assert len(kept.damaged) == (damage != "empty")
    assert len(list(world.journal.glob("*.damaged"))) == (damage != "empty")
    assert world.keeper.round().segments == 0


def test_what_was_counted_with_two_tables_is_counted_once(world: World) -> None:
    journal = Journal(world.journal, "pages")
    tally = Tally()
    tally.reject("bad")
    journal.append(
        {
            SERIES.name: SERIES.batch({"series": ["s"], "name": ["n"], "labels": [[]]}),
            METRICS.name: METRICS.batch({"series": ["s"], "time_ns": [NOW_NS], "value": [1.0]}),
        },
        tally,
    ).result(10)
    journal.close()
    world.keeper.round()
    assert [row["rows_rejected"] for row in world.sources()] == [1]


def test_processes_that_are_killed_are_started_again_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "RESTART_S", 0.5)
    monkeypatch.setattr(journals, "SEGMENT_S", 0.5)
    with engine(a_page) as target, running(settings(tmp_path, scrape=[{"targets": [target], "every": "500ms"}])) as server:  # fmt: skip
        good = f'tailscope_scrapes_total{{outcome="good",server="{target}"}}'
        wait_for(lambda: bool(sample(server, good)))
        assert sent(server, "before") == 200
        children = [
            child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())
        ]
        assert len(children) == 2
        for child in children:
            child.send_signal(signal.SIGKILL)
        wait_for(lambda: call(server.url("/readyz"))[0] == 503)
        assert sent(server, "between") == 200
        restarts = [f'tailscope_process_restarts_total{{part="{part}"}}' for part in ("keeper", "scraper")]
        wait_for(lambda: [sample(server, name) for name in restarts] == ["1.0", "1.0"])
        wait_for(lambda: call(server.url("/readyz"))[0] == 200)
        scrapes = float(sample(server, good))
        wait_for(lambda: float(sample(server, good)) > scrapes)
    assert ids_of(tmp_path / "t.parquet") == ["before", "between"]


def test_places_that_cannot_be_written_are_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "t.parquet").mkdir()
    (tmp_path / "t.parquet" / ".journal").write_text("x")
    for trace, problem in (
        ("file", "cannot write: File exists"),
        ("t.parquet", r"\.journal: cannot write: "),
    ):
        with pytest.raises(UsageError, match=problem):
            Running(settings(tmp_path, trace=trace))


def test_a_trace_is_read_while_it_is_written_and_merged(tmp_path: Path) -> None:
    world = World(tmp_path / "t.parquet", many_commits=3, grace_s=60.0)
    world.segment("0")
    world.keeper.round()
    stop = threading.Event()
    failed: list[BaseException] = []

    def write() -> None:
        number = 0
        try:
            while not stop.is_set():
                number += 1
                world.segment(f"{number}")
                world.keeper.round()
        except BaseException as error:
            failed.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        least = 0
        for _ in range(25):
            with Trace(world.root) as trace:
                [row] = trace.rows("SELECT count(*) AS n, count(DISTINCT request_key) AS d FROM requests")
                assert row["n"] == row["d"] >= least
                assert trace.warnings == []
                least = row["n"]
    finally:
        stop.set()
        writer.join()
    assert not failed
    assert least > 3
