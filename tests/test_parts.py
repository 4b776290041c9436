from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake import files_in, stored

from tailscope import parts
from tailscope.errors import BadInput, TailscopeError
from tailscope.layout import visible_parts
from tailscope.parts import SourceWriter, Stored, TraceWriter
from tailscope.schema import ITERATIONS, METRICS, RANK_EVENTS, REQUESTS, SCHEDULE, SERIES, TOKENS, Table

Columns = dict[str, Any]


def identity(number: int) -> str:
    return f"{number:016x}"


def store(trace: Path, number: int, *batches: tuple[Table, Columns]) -> Stored:
    """Rows as a source of their own."""
    with SourceWriter(trace, identity(number)) as writer:
        for table, columns in batches:
            writer.write(table, table.batch(columns))
        return writer.commit({"path": str(number)})


def put(writer: TraceWriter, number: int, table: Table, columns: Columns) -> None:
    writer.begin(identity(number))
    writer.write(table, table.batch(columns))
    writer.finish({"path": str(number)})


def temporary(trace: Path) -> list[Path]:
    return list(trace.glob("*/.*.tmp"))


# -- what a part is like -----------------------------------------------------------------------------


def test_parts_are_sorted_compressed_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_ROWS", 1000)
    monkeypatch.setattr(parts, "ROW_GROUP_ROWS", 400)
    arrivals = [(i * 7919) % 2500 for i in range(2500)]
    with SourceWriter(tmp_path, identity(1)) as writer:
        for low in range(0, 2500, 100):
            batch = {"instance": "b", "arrival_ns": arrivals[low : low + 100]}
            writer.write(REQUESTS, REQUESTS.batch(batch))
        writer.commit({})
    found = [pq.ParquetFile(p) for p in sorted(tmp_path.glob("requests/*.parquet"))]
    assert [f.metadata.num_rows for f in found] == [1000, 1000, 500]
    for file in found:
        times: list[Any] = file.read()["arrival_ns"].to_pylist()
        assert times == sorted(times)
        group = file.metadata.row_group(0)
        assert group.num_rows <= 400
        columns = [group.column(i) for i in range(group.num_columns)]
        assert {c.compression for c in columns} == {"ZSTD"}
        assert all(c.statistics is not None for c in columns if c.path_in_schema == "arrival_ns")
    assert stored(tmp_path, "SELECT count(DISTINCT arrival_ns) FROM requests") == [2500]


def test_small_sources_share_parts_and_rows_know_their_source(tmp_path: Path) -> None:
    with TraceWriter(tmp_path) as writer:
        for number in range(300):
            put(writer, number, ITERATIONS, {"end_ns": [number, number + 1000]})
        assert not visible_parts(tmp_path)
        counts = writer.commit()
    assert len(list(tmp_path.glob("*/*.parquet"))) == 2
    assert counts[identity(7)] == Stored({"iterations": 2})
    sql = (
        "SELECT count(*) FROM iterations i JOIN sources s USING (source) WHERE i.end_ns % 1000 = s.path::INT"
    )
    assert stored(tmp_path, sql) == [600]
    assert stored(tmp_path, "SELECT DISTINCT rows FROM sources") == [2]


def test_a_writer_is_full_at_so_many_sources_or_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_ROWS", 10)
    monkeypatch.setattr(parts, "COMMIT_SOURCES", 3)
    with TraceWriter(tmp_path) as writer:
        for number, full in enumerate([False, False, True]):
            put(writer, number, ITERATIONS, {"end_ns": [number]})
            assert writer.full == full
        writer.commit()
        assert not writer.full
        put(writer, 9, ITERATIONS, {"end_ns": list(range(10))})
        assert writer.full
        assert writer.commit() == {identity(9): Stored({"iterations": 7}, duplicate=3)}
        assert writer.commit() == {}


def test_what_is_abandoned_or_not_committed_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_ROWS", 2)
    with TraceWriter(tmp_path) as writer:
        put(writer, 1, ITERATIONS, {"end_ns": [1, 2, 3]})
        writer.begin(identity(2))
        writer.write(ITERATIONS, ITERATIONS.batch({"end_ns": [4, 5, 6]}))
        writer.abandon()
        writer.commit()
        put(writer, 3, ITERATIONS, {"end_ns": [7, 8]})
    assert temporary(tmp_path) == []
    assert stored(tmp_path, "SELECT end_ns FROM iterations ORDER BY ALL") == [1, 2, 3]
    assert stored(tmp_path, "SELECT path FROM sources") == ["1"]


# -- rows the trace has --------------------------------------------------------------------------------


def test_a_row_of_another_source_is_stored_once(tmp_path: Path) -> None:
    rows: list[tuple[Table, Columns]] = [
        (REQUESTS, {"request_key": ["a", "b"], "arrival_ns": [1, 2], "file_row": [1, 2]}),
        (TOKENS, {"request_key": ["a", "a"], "seq": [0, 1], "time_ns": [5, None]}),
        (SCHEDULE, {"iteration_first": [1], "request_key": ["a"]}),
        (SERIES, {"series": ["s"], "name": ["n"], "labels": [[("x", "y"), ("z", None)]]}),
        (
            METRICS,
            {"series": ["s"], "time_ns": [1], "value": [float("nan")], "le": [[1.0]], "counts": [[2.0]]},
        ),
    ]
    assert store(tmp_path, 1, *rows).duplicate == 0
    moved = [(rows[0][0], rows[0][1] | {"file_row": [7, 8]}), *rows[1:]]
    assert store(tmp_path, 2, *moved) == Stored(
        {"requests": 0, "tokens": 0, "schedule": 0, "series": 0, "metrics": 0}, duplicate=7
    )
    grown = [(TOKENS, {"request_key": ["a"] * 3, "seq": [0, 1, 2], "time_ns": [5, None, 6]})]
    assert store(tmp_path, 3, *grown) == Stored({"tokens": 1}, duplicate=2)
    assert stored(tmp_path, "SELECT seq FROM tokens ORDER BY ALL") == [0, 1, 2]
    assert stored(tmp_path, "SELECT rows, rows_duplicate FROM sources ORDER BY source") == [
        (7, 0),
        (0, 7),
        (1, 2),
    ]


@pytest.mark.parametrize(
    ("table", "one", "other"),
    [
        (ITERATIONS, {"start_ns": 1}, {"elapsed_ns": 1}),
        (ITERATIONS, {"iteration": 0}, {"iteration": None}),
        (REQUESTS, {"model": "", "adapter": None}, {"model": None, "adapter": ""}),
        (METRICS, {"le": [1.0], "counts": [2.0, 3.0]}, {"le": [1.0, 2.0], "counts": [3.0]}),
        (METRICS, {"le": [1.0, 2.0]}, {"le": [2.0, 1.0]}),
        (METRICS, {"le": []}, {"le": None}),
        (METRICS, {"le": [None]}, {"le": []}),
        (SERIES, {"labels": []}, {"labels": None}),
        (SERIES, {"labels": [("a", "b")]}, {"labels": [("b", "a")]}),
        (SERIES, {"labels": [("a", None)]}, {"labels": []}),
    ],
)
def test_rows_that_differ_are_both_stored(tmp_path: Path, table: Table, one: Columns, other: Columns) -> None:
    def single(columns: Columns) -> Columns:
        return {"instance": ["i"], **{name: [value] for name, value in columns.items()}}

    store(tmp_path, 1, (table, single(one)))
    assert store(tmp_path, 2, (table, single(other))) == Stored({table.name: 1})
    assert store(tmp_path, 3, (table, single(one))).duplicate == 1


def test_ops_on_a_rank_have_no_identity(tmp_path: Path) -> None:
    for number in (1, 2):
        assert store(tmp_path, number, (RANK_EVENTS, {"start_ns": [5]})).duplicate == 0
    assert stored(tmp_path, "SELECT count(*) FROM rank_events") == [2]


def test_one_key_with_other_content_is_kept_and_counted(tmp_path: Path) -> None:
    store(tmp_path, 1, (REQUESTS, {"request_key": ["a", "b"], "arrival_ns": [5, 6], "status": "ok"}))
    new = {
        "request_key": ["a", "b", "c", None],
        "arrival_ns": [5, 6, 6, 6],
        "status": ["error", "ok", "ok", "ok"],
    }
    assert store(tmp_path, 2, (REQUESTS, new)) == Stored({"requests": 3}, duplicate=1, conflicting=1)
    assert stored(tmp_path, "SELECT count(*) FROM requests WHERE request_key = 'a'") == [2]
    assert stored(tmp_path, "SELECT rows_conflicting FROM sources ORDER BY source") == [0, 1]


def test_a_source_that_repeats_itself(tmp_path: Path) -> None:
    """A request has a key and counts once; of other rows, two alike are two."""
    rows = {"request_key": ["a", "a", "b", "b", None, None], "arrival_ns": [1, 1, 2, 3, 4, 4]}
    counts = store(tmp_path, 1, (REQUESTS, rows), (ITERATIONS, {"end_ns": [1, 1]}))
    assert counts == Stored({"requests": 5, "iterations": 2}, duplicate=1, conflicting=2)
    assert stored(tmp_path, "SELECT count(*) FROM requests WHERE request_key IS NULL") == [2]


def test_sources_of_one_commit_are_judged_against_each_other(tmp_path: Path) -> None:
    with TraceWriter(tmp_path) as writer:
        put(writer, 2, ITERATIONS, {"end_ns": [1, 1, 2]})
        put(writer, 1, ITERATIONS, {"end_ns": [1, 2, 3]})
        put(writer, 3, REQUESTS, {"request_key": ["a"], "arrival_ns": [1]})
        put(writer, 4, REQUESTS, {"request_key": ["a", "a"], "arrival_ns": [1, 2]})
        assert writer.commit() == {
            identity(2): Stored({"iterations": 3}),
            identity(1): Stored({"iterations": 1}, duplicate=2),
            identity(3): Stored({"requests": 1}, conflicting=1),
            identity(4): Stored({"requests": 1}, duplicate=1, conflicting=1),
        }
    assert stored(tmp_path, "SELECT end_ns FROM iterations ORDER BY ALL") == [1, 1, 2, 3]


def test_parts_of_an_older_schema_are_compared_too(tmp_path: Path) -> None:
    """A column added since is NULL in them, a narrower type the same value."""
    (tmp_path / "iterations").mkdir()
    old = pa.table({"END_NS": pa.array([1, 2], pa.int32()), "source": ["x", "x"], "gone": [1, 2]})
    pq.write_table(old, tmp_path / "iterations" / "old.parquet")
    assert store(tmp_path, 1, (ITERATIONS, {"end_ns": [2, 3]})) == Stored({"iterations": 1}, duplicate=1)


def spoil(part: Path) -> None:
    """Overwrite the data but not the footer."""
    size = part.stat().st_size
    with part.open("r+b") as file:
        file.seek(4)
        file.write(b"\xff" * (size // 4))


def test_stored_rows_of_another_time_are_not_read(tmp_path: Path) -> None:
    times = list(range(10_000))
    store(tmp_path, 1, (ITERATIONS, {"end_ns": times}))
    (part,) = tmp_path.glob("iterations/*.parquet")
    spoil(part)
    assert store(tmp_path, 2, (ITERATIONS, {"end_ns": [t + 50_000 for t in times]})).rows == {
        "iterations": 10_000
    }
    before = files_in(tmp_path)
    with pytest.raises(BadInput, match=r", table iterations: cannot be read: .*Remove the damaged part"):
        store(tmp_path, 3, (ITERATIONS, {"end_ns": [500]}))
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("name", ["a[1]b", "a*?b", 'it\'s "q"', "engine=7", "new\nline", "ünï"])
def test_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    for near in ("a1b", "axxb"):  # what the first two would match as patterns
        store(tmp_path / near / "t", 1, (ITERATIONS, {"end_ns": [2], "engine": [0]}))
    trace = tmp_path / name / "t"
    store(trace, 1, (ITERATIONS, {"end_ns": [1], "engine": [0]}))
    assert store(trace, 2, (ITERATIONS, {"end_ns": [1, 2], "engine": [0, 0]})).duplicate == 1
    assert stored(trace, "SELECT end_ns, engine FROM iterations ORDER BY ALL") == [(1, 0), (2, 0)]


# -- when it goes wrong --------------------------------------------------------------------------------


def fail(number: int) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_full_disk_during_a_source_costs_no_finished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_ROWS", 3)
    with TraceWriter(tmp_path) as writer:
        put(writer, 1, ITERATIONS, {"end_ns": [1]})
        writer.begin(identity(2))
        with (
            monkeypatch.context() as full,
            pytest.raises(TailscopeError, match="no space left on the device"),
        ):
            full.setattr(os, "fsync", fail(errno.ENOSPC))
            writer.write(ITERATIONS, ITERATIONS.batch({"end_ns": [2, 3, 4]}))
        writer.abandon()
        writer.commit()
    assert stored(tmp_path, "SELECT end_ns FROM iterations") == [1]
    assert temporary(tmp_path) == []


@pytest.mark.parametrize("stage", ["write", "publish"])
def test_a_commit_that_fails_leaves_the_trace_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    store(tmp_path, 1, (ITERATIONS, {"end_ns": [1]}))
    before = files_in(tmp_path)
    rename = Path.rename

    def half(self: Path, target: Path) -> Path:
        return rename(self, target) if self.parent.name != "sources" else fail(errno.ENOSPC)()

    with TraceWriter(tmp_path) as writer:
        put(writer, 2, ITERATIONS, {"end_ns": [2]})
        with (
            monkeypatch.context() as full,
            pytest.raises(TailscopeError, match="What was stored before is intact"),
        ):
            full.setattr(
                *((pq, "write_table", fail(errno.ENOSPC)) if stage == "write" else (Path, "rename", half))
            )
            writer.commit()
        assert files_in(tmp_path) == before
        assert writer.commit() == {}
        assert not writer.knows(identity(2))
        put(writer, 2, ITERATIONS, {"end_ns": [2]})
        assert writer.commit() == {identity(2): Stored({"iterations": 1})}


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EDQUOT, "no space left on the device"),
        (errno.EROFS, "no permission to write there. Choose another -o"),
        (errno.EFBIG, "cannot write: File too large"),
    ],
)
def test_one_message_says_why_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    monkeypatch.setattr(os, "fsync", fail(number))
    with pytest.raises(TailscopeError) as caught:
        store(tmp_path / "t", 1, (ITERATIONS, {"end_ns": [1]}))
    assert str(caught.value).startswith(f"{tmp_path / 't'}: {message}")
    assert caught.value.exit_code == 2
    assert temporary(tmp_path / "t") == []


def test_a_target_below_or_beside_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file", tmp_path / "file" / "t"):
        with pytest.raises(TailscopeError, match="exists and is not a trace directory"):
            store(target, 1, (ITERATIONS, {"end_ns": [1]}))
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "iterations").write_text("mine")
    with pytest.raises(TailscopeError, match="exists and is not a trace directory"):
        store(tmp_path / "t", 1, (ITERATIONS, {"end_ns": [1]}))


KILLED = """
import os, signal, sys
from pathlib import Path
from tailscope.parts import TraceWriter
from tailscope.schema import ITERATIONS, REQUESTS
rename = Path.rename
def until_sources(self, target):
    if self.parent.name == "sources":
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
Path.rename = until_sources
with TraceWriter(Path(sys.argv[1])) as writer:
    for number in (2, 3):
        writer.begin(f"{number:016x}")
        writer.write(ITERATIONS, ITERATIONS.batch({"end_ns": [number]}))
        writer.write(REQUESTS, REQUESTS.batch({"arrival_ns": [number]}))
        writer.finish({"path": "x"})
    writer.commit()
"""


def test_the_next_commit_of_any_source_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    store(tmp_path, 1, (ITERATIONS, {"end_ns": [1]}))
    done = subprocess.run([sys.executable, "-P", "-c", KILLED, tmp_path], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("iterations/part-*.parquet"))) == 2
    assert len(list(tmp_path.glob("sources/.*.tmp"))) == 1
    assert stored(tmp_path, "SELECT end_ns FROM iterations") == [1]
    assert store(tmp_path, 4, (ITERATIONS, {"end_ns": [2]})).duplicate == 0
    assert len(list(tmp_path.glob("iterations/*"))) == 2
    assert len(list(tmp_path.glob("requests/*"))) == 0
    assert temporary(tmp_path) == []


def test_temporary_parts_of_writers_that_no_longer_run_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder = tmp_path / "iterations"
    folder.mkdir()
    here = socket.gethostname()
    names = {
        "dead": f".0a0b0c0d-0001-{ended.pid}-{here}.tmp",
        "living": f".0a0b0c0d-0001-{os.getppid()}-{here}.tmp",
        "elsewhere": f".0a0b0c0d-0001-{ended.pid}-{here}-2.tmp",
        "elsewhere, long ago": f".0a0b0c0d-0002-{ended.pid}-{here}-2.tmp",
        "not ours": ".swap.tmp",
    }
    for name in names.values():
        (folder / name).write_text("x")
    os.utime(folder / names["elsewhere, long ago"], (0, time.time() - 2 * 86_400))
    store(tmp_path, 1, (ITERATIONS, {"end_ns": [1]}))
    left = {name for name in names if (folder / names[name]).exists()}
    assert left == {"living", "elsewhere", "not ours"}


# -- rivals --------------------------------------------------------------------------------------------


def test_a_source_that_another_writer_stored_meanwhile_is_left_out(tmp_path: Path) -> None:
    with TraceWriter(tmp_path) as slow:
        for number in (1, 2, 3):
            slow.begin(identity(number))
            slow.write(ITERATIONS, ITERATIONS.batch({"end_ns": [number]}))
            slow.write(RANK_EVENTS, RANK_EVENTS.batch({"start_ns": [number]}))
            slow.finish({"path": "slow"})
        store(tmp_path, 1, (ITERATIONS, {"end_ns": [1]}), (RANK_EVENTS, {"start_ns": [1]}))
        before = files_in(tmp_path)
        counts = slow.commit()
    assert counts == {identity(n): Stored({"iterations": 1, "rank_events": 1}) for n in (2, 3)}
    assert before.items() <= files_in(tmp_path).items()
    for sql in (
        "SELECT end_ns FROM iterations ORDER BY ALL",
        "SELECT start_ns FROM rank_events ORDER BY ALL",
    ):
        assert stored(tmp_path, sql) == [1, 2, 3]
    assert stored(tmp_path, "SELECT count(*) FROM sources") == [3]


def test_a_source_that_is_known_changes_nothing(tmp_path: Path) -> None:
    store(tmp_path, 1, (ITERATIONS, {"end_ns": [1]}))
    before = files_in(tmp_path)
    assert store(tmp_path, 1, (ITERATIONS, {"end_ns": [99]})) == Stored()
    assert files_in(tmp_path) == before


RIVAL = """
import sys
from pathlib import Path
from tailscope.parts import TraceWriter
from tailscope.schema import REQUESTS, TOKENS
trace, rival = Path(sys.argv[1]), int(sys.argv[2])
for start in range(rival, 12):
    with TraceWriter(trace) as writer:
        for number in {start, 11 - start, (start + 3) % 12}:
            if not writer.knows(f"{number:016x}"):
                writer.begin(f"{number:016x}")
                keys = [f"r{k}" for k in range(number * 10, number * 10 + 15)]
                writer.write(REQUESTS, REQUESTS.batch({"request_key": keys, "arrival_ns": list(range(15))}))
                writer.write(TOKENS, TOKENS.batch({"request_key": keys, "time_ns": 5}))
                writer.finish({})
        writer.commit()
"""


def test_rivals_store_each_row_once(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-P", "-c", RIVAL, tmp_path, str(n)]) for n in range(4)]
    assert [w.wait(timeout=120) for w in writers] == [0, 0, 0, 0]
    assert stored(tmp_path, "SELECT count(*), count(DISTINCT source) FROM sources") == [(12, 12)]
    # Ten rows of each source and the last five: r0 to r124, of which five in each neighbour's have another time.
    assert stored(tmp_path, "SELECT count(*), count(DISTINCT request_key) FROM tokens") == [(125, 125)]
    assert stored(tmp_path, "SELECT count(*) FROM requests") == [180]
    assert temporary(tmp_path) == []


# -- size ----------------------------------------------------------------------------------------------

LARGE = """
import sys
from pathlib import Path
import numpy as np, pyarrow as pa
from tailscope.parts import TraceWriter
from tailscope.schema import TOKENS
ROWS, STEP = 3_000_000, 50_000
def rows(low, source):
    keys = pa.array(np.char.mod("%016x", np.arange(low, low + STEP) // 100 * 2654435761 % (1 << 40)))
    return TOKENS.batch({"instance": "i", "request_key": keys, "seq": pa.array(np.arange(STEP) % 100),
                         "time_ns": pa.array(np.arange(low, low + STEP) * 1000), "count": 1})
def peak_kib():
    # Not ru_maxrss: a child's begins with the peak of the process that started it.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
with TraceWriter(Path(sys.argv[1])) as writer:
    writer.begin("0" * 16)
    writer.write(TOKENS, rows(100_000, 0))
    writer.finish({})
    writer.commit()
    before = peak_kib()
    writer.begin("1" * 16)
    for low in range(0, ROWS, STEP):
        writer.write(TOKENS, rows(low, 1))
    writer.finish({})
    stored = writer.commit()["1" * 16]
print(stored.rows["tokens"], stored.duplicate, (peak_kib() - before) // 1024)
"""


def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", LARGE, tmp_path], capture_output=True, text=True, check=True, timeout=120
    )
    rows, duplicate, grown_mib = map(int, done.stdout.split())
    assert (rows, duplicate) == (2_950_000, 50_000)
    assert grown_mib < 200
