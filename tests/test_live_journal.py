"""The journal: what was acknowledged is there after any end, and what is damaged is cut off."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as config
from hypothesis import strategies as st

from tailscope.live import journal as journals
from tailscope.live.journal import Busy, Journal, recover, segments
from tailscope.schema import REQUESTS
from tailscope.source import Tally


def rows(*ids: str) -> pa.Table:
    return REQUESTS.batch({"request_id": list(ids)})


def ids_in(folder: Path) -> list[str | None]:
    return [
        v for s in segments(folder) for _, table, _ in s.frames() for v in table["request_id"].to_pylist()
    ]


def test_rows_and_what_was_counted_come_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "spans")
    tally = Tally()
    tally.reject("span has no start time", "span 1", 3)
    tally.note("instants are derived")
    journal.append({"requests": rows("a", "b")}, tally).result()
    journal.append({"requests": rows("c")}).result()
    journal.close()

    [segment] = segments(tmp_path)
    frames = list(segment.frames())
    assert [table.name for table, _, _ in frames] == ["requests", "requests"]
    assert frames[0][1].schema == REQUESTS.arrow
    assert ids_in(tmp_path) == ["a", "b", "c"]
    assert frames[0][2].rejected == {"span has no start time": 3}
    assert frames[0][2].notes == ["instants are derived"]


def test_what_is_acknowledged_is_on_the_disk_before_the_segment_is_closed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "spans")
    journal.append({"requests": rows("a")}).result()
    [path] = tmp_path.glob("*.open")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / path.name).write_bytes(path.read_bytes())
    assert recover(copy, "spans") == (0, [])
    assert ids_in(copy) == ["a"]
    journal.close()


@config(deadline=None)
@given(cut=st.integers(0, 3_000), flip=st.none() | st.integers(0, 3_000))
def test_a_torn_end_costs_only_frames_that_are_not_whole(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int | None
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    frames = [journals._frame(REQUESTS, rows(name), None) for name in "abc"]
    data = bytearray(b"".join(frames))[: max(0, sum(map(len, frames)) - cut)]
    if flip is not None and flip < len(data):
        data[-1 - flip] ^= 0xFF
    (folder / "spans-0000000000000000001-aaaaaaaa.open").write_bytes(data)

    lost, aside = recover(folder, "spans")

    kept = ids_in(folder)
    assert kept == list("abc")[: len(kept)]
    cut_off = bytes(data[sum(map(len, frames[: len(kept)])) :])
    assert lost + sum(path.stat().st_size for path in aside) == len(cut_off)
    # Frames behind one that is damaged were acknowledged: they are not called lost, and nothing of them goes.
    assert [path.read_bytes() for path in aside] == ([cut_off] if journals.MAGIC in cut_off[1:] else [])
    damaged_from = len(data) - 1 - flip if flip is not None and flip < len(data) else len(data)
    whole = [i for i in range(3) if sum(map(len, frames[: i + 1])) <= damaged_from]
    assert len(kept) == len(whole)


def test_segments_are_closed_by_age_and_by_size(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "spans", segment_bytes=1)
    for name in "abc":
        journal.append({"requests": rows(name)}).result()
    journal.close()
    assert len(segments(tmp_path)) == 3
    assert ids_in(tmp_path) == ["a", "b", "c"]


def test_more_than_can_wait_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, sync = threading.Event(), os.fdatasync

    def wait(file: int) -> None:
        assert slow.wait(10)
        sync(file)

    monkeypatch.setattr(os, "fdatasync", wait)
    journal = Journal(tmp_path, "spans", most_waiting=10)
    # One alone is taken, however large.
    first = journal.append({"requests": rows("a")})
    with pytest.raises(Busy):
        journal.append({"requests": rows("b")})
    slow.set()
    first.result()
    journal.close()
    with pytest.raises(Busy):
        journal.append({"requests": rows("c")})
    assert ids_in(tmp_path) == ["a"]


def test_a_full_disk_fails_what_waits_leaves_nothing_half_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, "spans")
    journal.append({"requests": rows("a")}).result()
    write, full = os.write, True

    def write_half(file: int, data: memoryview) -> int:
        if not full:
            return write(file, data)
        if len(data) > 100:
            return write(file, data[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write_half)
    failed = journal.append({"requests": rows("lost")})
    with pytest.raises(OSError, match="No space"):
        failed.result()
    assert journal.state.failure
    full = False
    journal.append({"requests": rows("b")}).result()
    journal.close()
    assert ids_in(tmp_path) == ["a", "b"]
    assert not journal.state.failure
