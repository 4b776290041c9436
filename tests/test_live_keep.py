"""The keeper: rows of the journal are in the trace once, whatever dies when; parts become few, old ones go."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from tailscope import layout
from tailscope.errors import TailscopeError
from tailscope.layout import partition_of, visible_parts
from tailscope.live import keep as keeping
from tailscope.live.journal import Segment, _frame, segments
from tailscope.live.keep import Keeper
from tailscope.schema import METRICS, REQUESTS, SERIES, Table
from tailscope.source import Tally
from tailscope.store import Trace

KINDS = {"spans": ("otlp", "1"), "pages": ("vllm_metrics", "1")}
HOUR_NS = 3_600_000_000_000
NOW_NS = 1_800_000_000_000_000_000


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(keeping, "time", SimpleNamespace(time=lambda: NOW_NS / 1e9))
    yield


class World:
    def __init__(self, root: Path, **settings: float) -> None:
        self.root, self.journal = root, root / ".journal"
        self.journal.mkdir(parents=True)
        self.keeper = Keeper(root, self.journal, KINDS, **settings)  # type: ignore[arg-type]
        self.number = 0

    def segment(self, *keys: str, at_ns: int = NOW_NS, instance: str | None = "a", rejected: int = 0) -> Path:
        rows = REQUESTS.batch(
            {
                "request_key": list(keys),
                "instance": [instance] * len(keys),
                "arrival_ns": [at_ns + i for i in range(len(keys))],
                "status": ["ok"] * len(keys),
            }
        )
        tally = Tally()
        tally.rejected["bad"] = rejected
        return self.write("spans", at_ns, (REQUESTS, rows, tally))

    def write(self, name: str, at_ns: int, *frames: tuple[Table, pa.Table, Tally | None]) -> Path:
        self.number += 1
        path = self.journal / f"{name}-{at_ns + self.number:019d}-{self.number:08x}.arrow"
        path.write_bytes(b"".join(_frame(*frame) for frame in frames))
        return path

    def keys(self) -> list[str]:
        with Trace(self.root) as trace:
            return [row["request_key"] for row in trace.rows("SELECT request_key FROM requests ORDER BY 1")]

    def sources(self) -> list[dict[str, object]]:
        with Trace(self.root) as trace:
            return trace.rows("SELECT * FROM sources ORDER BY first_ns, source")


def test_rows_become_parts_of_the_hour_and_the_journal_is_emptied(tmp_path: Path) -> None:
    world = World(tmp_path / "t.parquet")
    world.segment("a", "b", rejected=2)
    world.segment("c", at_ns=NOW_NS + 10, instance=None)
    kept = world.keeper.round()
    assert (kept.segments, kept.rows["requests"]) == (2, 3)
    assert not segments(world.journal)
    assert world.keys() == ["a", "b", "c"]
    [first, second] = world.sources()
    assert (first["kind"], first["rows"], first["rows_rejected"], first["instances"]) == ("otlp", 2, 2, ["a"])
    assert second["folder"] == keeping.FOLDER
    # Where one instance is named, what names none is of that one.
    with Trace(world.root) as trace:
        assert trace.rows("SELECT DISTINCT instance FROM requests") == [{"instance": "a"}]
    parts = [p for found in visible_parts(world.root).values() for p in found]
    assert {p.parent.name for p in parts} == {partition_of(NOW_NS / 1e9)}


def test_rows_sent_again_are_stored_once_also_over_the_hour(tmp_path: Path) -> None:
    world = World(tmp_path / "t.parquet")
    early = NOW_NS - HOUR_NS
    world.segment("a", at_ns=early)
    world.keeper.round()
    rows = REQUESTS.batch({"request_key": ["a"], "instance": ["a"], "arrival_ns": [early], "status": ["ok"]})
    world.write("spans", NOW_NS, (REQUESTS, rows, None))
    assert world.keeper.round().duplicates == 1
    assert world.keys() == ["a"]


def test_a_segment_that_was_committed_before_its_file_went_is_not_stored_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path / "t.parquet")
    path = world.segment("a", "b")
    data = path.read_bytes()
    world.keeper.round()
    path.write_bytes(data)
    assert world.keeper.round().rows.get("requests", 0) == 0
    assert world.keys() == ["a", "b"]
    assert len(world.sources()) == 1
    assert not segments(world.journal)


def test_many_commits_become_one_with_the_same_rows_and_counts(tmp_path: Path) -> None:
    world = World(tmp_path / "t.parquet", many_commits=3)
    for key in "abc":
        world.segment(key, rejected=1)
        world.write(
            "pages",
            NOW_NS,
            (SERIES, SERIES.batch({"series": ["s"], "name": ["n"], "labels": [[("k", "v")]]}), None),
            (
                METRICS,
                METRICS.batch({"series": ["s"], "time_ns": [NOW_NS + world.number], "value": [1.0]}),
                None,
            ),
        )
        kept = world.keeper.round()
    assert kept.partitions_merged == 1
    with Trace(world.root) as trace:
        assert trace.warnings == []
        assert trace.rows("SELECT count(*) AS n, count(DISTINCT source) AS s FROM requests") == [
            {"n": 3, "s": 1}
        ]
        assert trace.count("metrics") == 3
        assert trace.rows("SELECT labels FROM series") == [{"labels": {"k": "v"}}]
        joined = "SELECT s.kind AS kind, count(*) AS n FROM requests JOIN sources s USING (source) GROUP BY 1"
        assert trace.rows(joined) == [{"kind": "otlp", "n": 3}]
    by_kind = {row["kind"]: row for row in world.sources()}
    assert by_kind["otlp"]["rows_rejected"] == 3
    assert by_kind["otlp"]["reject_reasons"] == {"bad": 3}
    assert {name: len(parts) for name, parts in visible_parts(world.root).items()} == {
        "metrics": 1, "requests": 1, "series": 1, "sources": 1,
    }  # fmt: skip


@pytest.mark.parametrize("steps", range(6))
def test_a_merge_that_dies_anywhere_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    world = World(tmp_path / "t.parquet", many_commits=2, grace_s=0.0)
    world.segment("a")
    world.keeper.round()
    world.segment("b")
    left = steps
    rename = Path.rename

    class Died(Exception):
        pass

    def rename_or_die(self: Path, target: Path) -> Path:
        nonlocal left
        # Renames of the commit itself come first: two.
        if left == 0:
            raise Died
        left -= 1
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_or_die)
    with contextlib.suppress(Died):
        world.keeper.round()
    monkeypatch.setattr(Path, "rename", rename)
    if steps >= 2:
        assert world.keys() == ["a", "b"]
    Keeper(world.root, world.journal, KINDS, many_commits=2, grace_s=0.0).round()
    assert world.keys() == ["a", "b"]
    world.segment("c")
    Keeper(world.root, world.journal, KINDS, many_commits=100, grace_s=0.0).round()
    assert world.keys() == ["a", "b", "c"]


def test_what_was_merged_stays_for_its_readers_and_then_goes(tmp_path: Path) -> None:
    world = World(tmp_path / "t.parquet", many_commits=2, grace_s=3600.0)
    world.segment("a")
    world.keeper.round()
    world.segment("b")
    world.keeper.round()
    before = set(world.root.rglob("part-*.parquet"))
    for key in "cde":
        world.segment(key)
        world.keeper.round()
    assert before <= set(world.root.rglob("part-*.parquet"))
    world.keeper._grace_s = -1e12
    world.keeper.round()
    on_disk = set(world.root.rglob("part-*.parquet"))
    assert on_disk == {p for found in visible_parts(world.root).values() for p in found}
    assert not list(world.root.glob(layout.DROPPED))
    assert world.keys() == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("aged", [1, 2])
def test_what_was_merged_twice_does_not_come_back(tmp_path: Path, aged: int) -> None:
    world = World(tmp_path / "t.parquet", many_commits=2, grace_s=600.0)
    for key in "ab":
        world.segment(key)
        world.keeper.round()
    world.segment("c")
    world.keeper.round()
    # As when the hour has passed: the commit that was made of two goes into another one.
    world.keeper._merged.clear()
    world.segment("d")
    world.keeper.round()
    records = sorted(world.root.glob(layout.DROPPED), key=lambda path: path.stat().st_mtime_ns)
    assert len(records) == 2
    for number, record in enumerate(records[:aged]):
        then = record.stat().st_mtime - 700 + number
        os.utime(record, (then, then))
    world.keeper.round()
    assert world.keys() == ["a", "b", "c", "d"]
    assert len(list(world.root.glob(layout.DROPPED))) == 2 - aged
    with Trace(world.root) as trace:
        assert trace.rows("SELECT count(*) AS n FROM requests") == [{"n": 4}]


def test_partitions_go_by_age_and_by_size_but_never_the_current_one(tmp_path: Path) -> None:
    world = World(tmp_path / "t.parquet", most_age_s=2.5 * 3600, grace_s=-1e12)
    for hours in range(5):
        world.segment(f"h{hours}", at_ns=NOW_NS - hours * HOUR_NS)
    # What is 2.5 hours old may lie in the fourth.
    assert world.keeper.round().partitions_dropped == 1
    assert world.keys() == ["h0", "h1", "h2", "h3"]
    small = Keeper(world.root, world.journal, KINDS, most_bytes=1, grace_s=-1e12)
    assert small.round().partitions_dropped == 3
    assert world.keys() == ["h0"]
    assert {p.name for p in (world.root / "requests").iterdir()} == {partition_of(NOW_NS / 1e9)}


def test_a_reader_of_late_arrivals_leaves_old_partitions_out(tmp_path: Path) -> None:
    world = World(tmp_path / "t.parquet")
    for hours in range(5):
        world.segment(f"h{hours}", at_ns=NOW_NS - hours * HOUR_NS)
    world.keeper.round()
    with Trace(world.root, since_ns=NOW_NS) as trace:
        assert len(trace.files["requests"]) == 2
    with Trace(world.root) as trace:
        assert len(trace.files["requests"]) == 5


def test_a_full_disk_leaves_the_segment_and_the_next_round_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path / "t.parquet")
    world.segment("a")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(TailscopeError, match="no space left"):
            world.keeper.round()
    assert segments(world.journal)
    world.keeper.round()
    assert world.keys() == ["a"]


def test_segments_are_read_oldest_first(tmp_path: Path) -> None:
    world = World(tmp_path / "t.parquet")
    world.segment("late", at_ns=NOW_NS)
    world.segment("early", at_ns=NOW_NS - 5)
    found: list[Segment] = segments(world.journal)
    assert [s.created_s for s in found] == sorted(s.created_s for s in found)
