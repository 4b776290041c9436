"""Files in, a trace out: recognise, read, say where each row belongs, store, and account for every record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from tailscope import registry
from tailscope.config import Config
from tailscope.errors import BadInput, UsageError
from tailscope.model import Collector
from tailscope.parts import SourceWriter, Stored, TraceWriter
from tailscope.schema import Table
from tailscope.source import Options, Source, Tally, files_below

SOURCE_ID_DIGITS = 16


@dataclass
class Outcome:
    """What became of one file."""

    path: str
    status: Literal["ingested", "known", "skipped", "failed"]
    message: str = ""
    kind: str = ""
    stored: Stored = field(default_factory=Stored)
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True)
class _File:
    path: Path
    display: str
    collector: Collector | None
    folder: str
    empty: bool = False


def ingest(
    paths: Sequence[Path],
    output: Path,
    *,
    config: Config,
    options: Options,
    instance: str | None = None,
    report: Callable[[Outcome, int, int], None] = lambda *_: None,
) -> list[Outcome]:
    """Read every file at or below `paths` into the trace `output`; content that it holds already changes nothing.

    `report(outcome, done, total)` is called after each file. Raises UsageError for a path that does not
    exist, TailscopeError when the trace cannot be written.
    """
    files = [file for path in paths for file in _find(path, output)]
    outcomes: list[Outcome] = []
    seen: set[Path] = set()
    for number, file in enumerate(files, 1):
        resolved = file.path.resolve()
        if resolved in seen:
            continue
        seen.add(resolved)
        outcomes.append(_ingest_file(file, output, config, options, instance))
        report(outcomes[-1], number, len(files))
    return outcomes


def _ingest_file(
    file: _File, output: Path, config: Config, options: Options, instance: str | None
) -> Outcome:
    if file.empty:
        return Outcome(file.display, "skipped", "empty")
    if file.collector is None:
        return Outcome(file.display, "skipped", "not recognised as telemetry")
    collector = file.collector
    source = Source(file.path, file.display, options)
    content_hash = source.content_hash()
    source_id = content_hash[:SOURCE_ID_DIGITS]
    if TraceWriter(output).knows(source_id):
        return Outcome(file.display, "known", "content is in the trace already", collector.name)
    given = instance or next((s.instance for s in config.sources if fnmatch(file.display, s.path)), None)
    placed = _Placement(given, file.folder)
    with SourceWriter(output, source_id) as writer:
        try:
            for table, rows in collector.read(source):
                writer.write(table, placed.place(table, rows))
        except BadInput as error:
            return Outcome(file.display, "failed", str(error), collector.name, tally=source.tally)
        tally = source.tally
        stored = writer.commit(
            {
                "instance": given or file.folder,
                "kind": collector.name,
                "path": file.display,
                "content_hash": content_hash,
                "collector": collector.name,
                "version": collector.version,
                "clock": source.clock,
                "offset_ns": source.offset_ns,
                "offset_error_ns": source.offset_error_ns,
                "rows_rejected": tally.rejected.total(),
                "reject_reasons": sorted(tally.rejected.items()),
                "rows_skipped": tally.skipped.total(),
                "skip_reasons": sorted(tally.skipped.items()),
                "values_blanked": tally.blanked.total(),
                "blank_reasons": sorted(tally.blanked.items()),
                "notes": tally.notes,
                "instances": sorted(placed.named),
                "folder": file.folder,
                "first_ns": placed.first_ns,
                "last_ns": placed.last_ns,
            }
        )
    return Outcome(file.display, "ingested", "", collector.name, stored, tally)


class _Placement:
    """Says which instance rows belong to, and remembers which ones the source named and when it was."""

    def __init__(self, given: str | None, folder: str) -> None:
        self._given, self._folder = given, folder
        self.named: set[str] = {given} if given else set()
        self.first_ns: int | None = None
        self.last_ns: int | None = None

    def place(self, table: Table, rows: pa.Table) -> pa.Table:
        index = rows.schema.get_field_index("instance")
        instances: Any = rows.column(index)
        if self._given:
            instances = pa.repeat(pa.scalar(self._given), rows.num_rows)
        else:
            self.named.update(v for v in instances.unique().to_pylist() if v is not None)
            instances = instances.fill_null(self._folder)
        if table.time:
            times: Any = pc.min_max(rows[table.time])
            low, high = times["min"].as_py(), times["max"].as_py()
            if low is not None:
                self.first_ns = low if self.first_ns is None else min(low, self.first_ns)
                self.last_ns = high if self.last_ns is None else max(high, self.last_ns)
        return rows.set_column(index, "instance", instances)


def _find(path: Path, output: Path) -> Iterable[_File]:
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    if path.is_dir() and any(path.glob("*/*.parquet")):
        raise UsageError(f"{path}: is a trace already; tailscope reads traces with diagnose and query")
    files = [p for p in files_below(path) if not p.is_relative_to(output)]
    recognised = {p: _recognise(p) for p in files}
    telemetry_folders = {p.parent for p, (collector, _) in recognised.items() if collector}
    for file, (collector, empty) in recognised.items():
        yield _File(file, str(file), collector, _folder(path, file, telemetry_folders), empty)


def _recognise(path: Path) -> tuple[Collector | None, bool]:
    try:
        head = Source(path).head()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if not head.strip():
        return None, True
    name = Source(path).name
    return next((c for c in registry.collectors() if c.recognises(head, name)), None), False


def _folder(root: Path, file: Path, telemetry_folders: set[Path]) -> str:
    """The folder that stands for an instance: the topmost one on the way to `file` that holds telemetry itself.

    A run's folder with sub-folders is one instance; a folder of runs is one instance a run.
    """
    if not root.is_dir():
        return file.resolve().parent.name or "/"
    way = [folder for folder in reversed(file.parents) if folder.is_relative_to(root)]
    return next((f for f in way if f in telemetry_folders), file.parent).resolve().name or "/"
