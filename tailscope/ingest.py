"""Files in, a trace out: recognise, read, say where each row belongs, store, and account for every record."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from tailscope import registry
from tailscope.config import Config
from tailscope.errors import BadInput, UsageError
from tailscope.model import Collector
from tailscope.parts import Placement, Stored, TraceWriter
from tailscope.schema import BY_NAME
from tailscope.source import HEAD, Options, Source, Tally, files_below

SOURCE_ID_DIGITS = 16

Status = Literal["ingested", "known", "skipped", "failed"]
KNOWN = "already in the trace"
UNREADABLE = "cannot be read"
#: Columns of a table that a message names.
SHOWN_COLUMNS = 6


@dataclass
class Outcome:
    """What became of one file."""

    path: str
    status: Status
    message: str = ""
    kind: str = ""
    stored: Stored = field(default_factory=Stored)
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True)
class _File:
    """A file found; `problem` says why it is not read, `collector` what reads it otherwise."""

    path: Path
    display: str
    folder: str
    collector: Collector | None
    problem: str = ""


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

    `report(outcome, done, total)` is called after each file. Small files are stored many at once, so that
    `outcome.stored` is only complete on return. Raises UsageError for a path that does not exist,
    TailscopeError when the trace cannot be written.
    """
    files: dict[str, _File] = {}
    run = _run_of(paths)
    names = Counter(path.resolve().name for path in set(paths))
    for path in paths:
        # hostA/logs and hostB/logs are two.
        root = path.resolve()
        label = root.name if names[root.name] == 1 else f"{root.parent.name}/{root.name}"
        for file in _find(path, output, run, label, options):
            files.setdefault(os.path.realpath(file.path), file)
    outcomes: list[Outcome] = []
    with TraceWriter(output) as writer:
        task = _Ingest(writer, config, options, instance)
        try:
            for number, file in enumerate(files.values(), 1):
                outcomes.append(task.add(file))
                if writer.full:
                    task.store()
                report(outcomes[-1], number, len(files))
        finally:
            task.store()
    return outcomes


class _Ingest:
    """Reads files into a writer, and commits when there is enough of them."""

    def __init__(self, writer: TraceWriter, config: Config, options: Options, instance: str | None) -> None:
        self._writer, self._config, self._options, self._instance = writer, config, options, instance
        self._unstored: dict[str, Outcome] = {}

    def add(self, file: _File) -> Outcome:
        if file.collector is None:
            status: Status = "failed" if file.problem.startswith(UNREADABLE) else "skipped"
            message = f"{file.display}: {file.problem}" if status == "failed" else file.problem
            return Outcome(file.display, status, message)
        rules = [rule for rule in self._config.sources if fnmatch(file.display, rule.path)]
        rank = next((rule.rank for rule in rules if rule.rank is not None), self._options.rank)
        source = Source(file.path, file.display, replace(self._options, rank=rank))
        try:
            content_hash = source.content_hash()
        except OSError as error:
            return _failed(file, source, error)
        source_id = content_hash[:SOURCE_ID_DIGITS]
        if self._writer.knows(source_id):
            message = KNOWN
            if self._options.rank is not None or self._options.python_stacks or self._options.mapping:
                message += " as it was read then (--rank, --python-stacks and --map need a new trace)"
            return Outcome(file.display, "known", message, file.collector.name)
        given = self._instance or next((rule.instance for rule in rules if rule.instance), None)
        placed = Placement(given, file.folder)
        self._writer.begin(source_id)
        try:
            for table, rows in file.collector.read(source):
                self._writer.write(table, placed.place(table, rows))
        except (BadInput, OSError) as error:
            self._writer.abandon()
            return _failed(file, source, error)
        self._writer.finish(_source_row(file, file.collector, source, content_hash, placed))
        outcome = Outcome(file.display, "ingested", "", file.collector.name, tally=source.tally)
        self._unstored[source_id] = outcome
        return outcome

    def store(self) -> None:
        """Commit, and say of each outcome what was stored."""
        stored = self._writer.commit()
        for source_id, outcome in self._unstored.items():
            if source_id in stored:
                outcome.stored = stored[source_id]
            else:
                outcome.status, outcome.message = "known", KNOWN
        self._unstored = {}


def _failed(file: _File, source: Source, error: BadInput | OSError) -> Outcome:
    if isinstance(error, OSError):
        message = f"{file.display}: {UNREADABLE}: {error.strerror or error}"
    elif error.path:
        message = str(error)
    else:
        message = str(BadInput(error.what, path=file.display, where=error.where, todo=error.todo))
    kind = file.collector.name if file.collector else ""
    return Outcome(file.display, "failed", message, kind, tally=source.tally)


def _source_row(
    file: _File, collector: Collector, source: Source, content_hash: str, placed: Placement
) -> dict[str, Any]:
    return {
        "instance": placed.given or file.folder,
        "kind": collector.name,
        "path": file.display,
        "content_hash": content_hash,
        "collector": collector.name,
        "version": collector.version,
        "clock": source.clock,
        "offset_ns": source.offset_ns,
        "offset_error_ns": source.offset_error_ns,
        **source.tally.columns,
        "instances": sorted(placed.named),
        "folder": file.folder,
        "first_ns": placed.first_ns,
        "last_ns": placed.last_ns,
    }


def _run_of(paths: Sequence[Path]) -> str | None:
    """The folder whose pieces are named one by one, files among them, so that they belong to one run."""
    parents = {path.resolve().parent for path in paths}
    if len(paths) > 1 and len(parents) == 1 and any(path.is_file() for path in paths):
        return _text(parents.pop().name) or "/"
    return None


def _find(path: Path, output: Path, run: str | None, label: str, options: Options) -> Iterable[_File]:
    try:
        path.stat()
    except FileNotFoundError as error:
        raise UsageError(f"{_text(path)}: no such file or folder") from error
    except OSError as error:
        raise UsageError(f"{_text(path)}: {UNREADABLE}: {error.strerror}") from error
    if path.is_dir() and any(any((path / table).glob("*.parquet")) for table in BY_NAME):
        raise UsageError(f"{_text(path)}: is a trace already; tailscope reads traces with diagnose and query")
    target = output.resolve()
    files = [p for p in files_below(path) if not p.parent.resolve().is_relative_to(target)]
    recognised = {p: _recognise(p, by_mapping=options.mapping is not None) for p in files}
    telemetry_folders = {p.parent for p, (collector, _) in recognised.items() if collector}
    for file, (collector, problem) in recognised.items():
        folder = run or _folder(path, file, telemetry_folders, label)
        yield _File(file, _text(file), folder, collector, problem)


def _recognise(path: Path, by_mapping: bool) -> tuple[Collector | None, str]:
    """The collector for a file, or why there is none. A mapping says what all files of a call are."""
    source = Source(path)
    try:
        if path.is_dir():
            return (
                None,
                "a link to a folder; name it to have it read"
                if path.is_symlink()
                else f"{UNREADABLE}: Permission denied",
            )
        if not path.is_file():
            return None, "not a regular file"
        with source.open() as stream:
            head = stream.read(HEAD)
    except OSError as error:
        return None, f"{UNREADABLE}: {error.strerror or error}"
    if not head.strip():
        # Compressed data that gives nothing may be damaged from the start.
        damage = next(iter(source.tally.rejected), "")
        return None, f"{UNREADABLE}: {damage}" if damage else "empty"
    if by_mapping:
        return registry.table_collector(), ""
    collector = next((c for c in registry.collectors() if c.recognises(head, source.name)), None)
    return collector, "" if collector else _unknown(source)


def _unknown(source: Source) -> str:
    """What a file is that no collector knows. A table may be a log of requests, if someone says what its columns mean."""
    collector = registry.table_collector()
    try:
        table = collector.table_of(source) if collector else None
    except BadInput as error:
        return str(error)
    if table is None:
        return "not recognised as telemetry"
    names = ", ".join(map(repr, table.columns[:SHOWN_COLUMNS]))
    more = len(table.columns) - SHOWN_COLUMNS
    return (
        f"a table of {len(table.columns)} columns ({names}{f' and {more} more' if more > 0 else ''}); if a row of it "
        "is a request, ingest it with --map and a mapping, which --guess-map begins"
    )


def _folder(root: Path, file: Path, telemetry_folders: set[Path], label: str) -> str:
    """The folder that stands for an instance: the topmost one on the way to `file` that holds telemetry itself.

    A run's folder with sub-folders is one instance; a folder of runs is one instance a run. It is named as
    seen from `root`, which itself is called `label`, so that a/logs and b/logs are two.
    """
    if not root.is_dir():
        return _text(file.parent.resolve().name) or "/"
    way = [folder for folder in reversed(file.parents) if folder.is_relative_to(root)]
    top = next((f for f in way if f in telemetry_folders), file.parent)
    return _text(label if top == root else top.relative_to(root)) or "/"


def _text(path: Path | str) -> str:
    """A path as Unicode: file names are bytes and need not be valid."""
    return os.fsencode(path).decode("utf-8", "replace")
