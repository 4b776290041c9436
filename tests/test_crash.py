"""What is left of a trace when writing it goes wrong: killed writers, full disks, read-only targets, rivals."""

from __future__ import annotations

import errno
import gzip
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from real import EXAMPLE

from tailscope import parts
from tailscope.config import Config
from tailscope.errors import TailscopeError
from tailscope.ingest import Outcome, ingest
from tailscope.source import Options
from tailscope.store import Trace

CLIENT = EXAMPLE / "client.jsonl.gz"
SPANS = EXAMPLE / "otlp" / "otlp_spans.pb.delim.gz"


def add(trace: Path, *sources: Path) -> list[Outcome]:
    return ingest(list(sources), trace, config=Config(), options=Options())


def rows(trace: Path, table: str = "requests") -> list[tuple[Any, ...]]:
    """All rows but for what tells where they came from, in an order of their own."""
    gone = "source, file_row" if table == "requests" else "source"
    with Trace(trace) as opened:
        relation = opened.connection.execute(f'SELECT * EXCLUDE ({gone}) FROM "{table}" ORDER BY ALL')
        return relation.fetchall()


def bytes_of(trace: Path) -> dict[str, bytes]:
    return {str(p.relative_to(trace)): p.read_bytes() for p in trace.rglob("*") if p.is_file()}


def temporary(trace: Path) -> list[Path]:
    return list(trace.glob("*/.*.tmp"))


#: Kills itself where `stage` says, while it ingests argv[1] into argv[2].
KILLED = """
import os, signal, sys
from pathlib import Path
from tailscope import parts
from tailscope.config import Config
from tailscope.ingest import ingest
from tailscope.source import Options
source, trace, stage = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
kill = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
if stage == "before the commit":
    parts.TraceWriter.commit = kill
elif stage == "with parts written":
    parts.TraceWriter._publish = kill
else:
    rename = Path.rename
    Path.rename = lambda self, target: kill() if self.parent.name == "sources" else rename(self, target)
ingest([source], trace, config=Config(), options=Options())
"""


@pytest.mark.parametrize(
    "stage", ["before the commit", "with parts written", "between the parts and the source"]
)
def test_a_killed_writer_leaves_nothing_half_visible(tmp_path: Path, stage: str) -> None:
    trace = tmp_path / "t.parquet"
    add(trace, SPANS)
    before = rows(trace)
    done = subprocess.run([sys.executable, "-P", "-c", KILLED, CLIENT, trace, stage], check=False)
    assert done.returncode == -signal.SIGKILL
    assert rows(trace) == before
    (outcome,) = add(trace, CLIENT)
    assert outcome.status == "ingested"
    assert outcome.stored.rows == {"requests": 223, "tokens": 23_594}
    assert len(rows(trace)) == len(before) + 223
    assert len(rows(trace, "tokens")) == 23_594
    assert temporary(trace) == []


def test_a_full_disk_is_one_message_and_costs_nothing_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "t.parquet"
    add(trace, SPANS)
    before = bytes_of(trace)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(TailscopeError, match="no space left on the device") as caught:
        add(trace, CLIENT)
    assert caught.value.exit_code == 2
    monkeypatch.undo()
    assert bytes_of(trace) == before
    (outcome,) = add(trace, CLIENT)
    assert outcome.status == "ingested"


def test_a_write_that_fails_for_real(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk."""
    script = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "from tailscope.__main__ import main\n"
        "sys.argv = ['tailscope', 'ingest', *sys.argv[1:]]\n"
        "main()\n"
    )
    trace = tmp_path / "t.parquet"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, CLIENT, "-o", trace], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tailscope: ")
    assert "Traceback" not in done.stderr
    assert temporary(trace) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_target_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(TailscopeError, match="no permission to write there"):
        add(tmp_path / "t.parquet", CLIENT)


def test_a_target_that_is_a_file(tmp_path: Path) -> None:
    target = tmp_path / "t.parquet"
    target.write_text("mine")
    with pytest.raises(TailscopeError, match="not a trace directory"):
        add(target, CLIENT)
    assert target.read_text() == "mine"


def test_several_writers_at_once_store_each_row_once(tmp_path: Path) -> None:
    trace = tmp_path / "t.parquet"
    command: list[str | Path] = [sys.executable, "-P", "-m", "tailscope", "ingest", "-o", trace]
    writers = [
        subprocess.Popen([*command, *sources], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for sources in ([CLIENT, SPANS], [SPANS, CLIENT], [EXAMPLE / "otlp"])
    ]
    for writer in writers:
        _, error = writer.communicate(timeout=120)
        assert writer.returncode == 0, error
    alone = tmp_path / "alone.parquet"
    add(alone, CLIENT, EXAMPLE / "otlp")
    assert len(rows(trace)) == len(rows(alone)) == 223 + 259
    assert len(rows(trace, "tokens")) == 23_594


def test_known_content_changes_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "t.parquet"
    add(trace, CLIENT)
    before = bytes_of(trace)
    plain = tmp_path / "renamed.txt"
    plain.write_bytes(gzip.decompress(CLIENT.read_bytes()))
    assert [o.status for o in add(trace, CLIENT, plain)] == ["known", "known"]
    assert bytes_of(trace) == before


def test_a_grown_file_adds_what_is_new(tmp_path: Path) -> None:
    lines = gzip.decompress((EXAMPLE / "statlogger_engine0_pid29933.jsonl.gz").read_bytes()).splitlines(
        keepends=True
    )
    short, whole = tmp_path / "short.jsonl", tmp_path / "whole.jsonl"
    short.write_bytes(b"".join(lines[:1500]))
    whole.write_bytes(b"".join(lines))
    grown, once = tmp_path / "grown.parquet", tmp_path / "once.parquet"
    add(grown, short)
    (outcome,) = add(grown, whole)
    add(once, whole)
    assert outcome.stored.duplicate > 1000
    for table in ("iterations", "requests"):
        assert len(rows(grown, table)) == len(rows(once, table))


def test_the_order_of_ingest_does_not_matter(tmp_path: Path) -> None:
    sources = [
        CLIENT,
        SPANS,
        EXAMPLE / "otlp" / "otlp_spans.jsonl.gz",
        EXAMPLE / "bench",
        EXAMPLE / "server.log.gz",
    ]
    one, other = tmp_path / "one.parquet", tmp_path / "other.parquet"
    for source in sources:
        add(one, source)
    for source in reversed(sources):
        add(other, source)
    with Trace(one) as trace:
        tables = [name for name in trace.files if name != "sources"]
    assert set(tables) == {"requests", "tokens", "iterations", "metrics", "series", "events"}
    for table in tables:
        with Trace(one) as a, Trace(other) as b:
            exclude = "source, file_row" if table == "requests" else "source"
            sql = f'SELECT * EXCLUDE ({exclude}) FROM "{table}" ORDER BY ALL'
            assert a.connection.execute(sql).fetchall() == b.connection.execute(sql).fetchall(), table


def test_a_key_with_other_content_is_kept_and_counted(tmp_path: Path) -> None:
    line = gzip.decompress((EXAMPLE / "otlp" / "otlp_spans.jsonl.gz").read_bytes()).splitlines()[-1]
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_bytes(line)
    second.write_bytes(line.replace(b'"32"', b'"31"'))
    trace = tmp_path / "t.parquet"
    (one,) = add(trace, first)
    (two,) = add(trace, second)
    assert (one.stored.conflicting, two.stored.conflicting) == (0, one.stored.rows["requests"])
    assert len(rows(trace)) == 2 * one.stored.rows["requests"]


def test_a_trace_of_a_newer_version_is_read_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "t.parquet"
    monkeypatch.setattr(parts, "SCHEMA_VERSION", 99)
    add(trace, CLIENT)
    monkeypatch.undo()
    with Trace(trace) as opened:
        assert len(opened.warnings) == 1
        assert "newer tailscope (schema 99" in opened.warnings[0]
        assert opened.count("requests") == 223


def test_folders_of_one_name_given_together_are_two_instances(tmp_path: Path) -> None:
    for host in ("a", "b"):
        (tmp_path / host / "logs").mkdir(parents=True)
        lines = gzip.decompress(CLIENT.read_bytes()).splitlines(keepends=True)
        (tmp_path / host / "logs" / "client.jsonl").write_bytes(
            b"".join(lines[:5] if host == "a" else lines[5:9])
        )
    trace = tmp_path / "t.parquet"
    add(trace, tmp_path / "a" / "logs", tmp_path / "b" / "logs")
    with Trace(trace) as opened:
        found = opened.rows(
            "SELECT instance, count(*) AS n FROM requests GROUP BY instance ORDER BY instance"
        )
    assert found == [{"instance": "a/logs", "n": 5}, {"instance": "b/logs", "n": 4}]
