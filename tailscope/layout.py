"""How a trace lies on disk: which files of it count, one writer at a time, and what to say when it cannot be.

A commit's parts may lie in a partition, a folder below each table's that is named after the hour they were written
in. A file `.dropped-….json` takes commits out again: at once, or with the commit that holds their rows instead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import duckdb
import pyarrow as pa

from tailscope.errors import BadInput, TailscopeError
from tailscope.scan import first_line
from tailscope.schema import SOURCES

#: A part of ours. The first group is the id of its commit.
PART_NAME = re.compile(r"part-([0-9a-f]{16})-\d{4,}\.parquet")
#: A partition: an hour in UTC.
PARTITION = re.compile(r"\d{4}-\d\d-\d\dT\d\d")
DROPPED = ".dropped-*.json"
#: A temporary part of another machine is as good as abandoned after this time.
ABANDONED_S = 86_400


def temporary_name(token: str, number: int) -> str:
    return f".{token}-{number:04d}-{os.getpid()}-{socket.gethostname()}.tmp"


def part_name(commit_id: str, number: int) -> str:
    return f"part-{commit_id}-{number:04d}.parquet"


def commit_of(part: Path) -> str | None:
    """The commit that a part is named after; None for a part that we did not write."""
    name = PART_NAME.fullmatch(part.name)
    return name and name[1]


def visible_parts(root: Path, only: str = "*") -> dict[str, list[Path]]:
    """Table name -> Parquet files of a trace directory that count; `only` a table, if given.

    A part named after a commit counts if that commit's part of `sources` exists; a part of any other name
    always does. Hidden files and folders, and those that begin with an underscore, do not.
    """
    committed = commits(root)
    tables: dict[str, list[Path]] = {}
    for folder in sorted(p for p in root.glob(only) if p.is_dir() and not p.name.startswith((".", "_"))):
        parts = []
        for part in sorted(folder.rglob("*.parquet")):
            ours = commit_of(part)
            hidden = any(name.startswith((".", "_")) for name in part.relative_to(folder).parts)
            if not hidden and (ours in committed if ours else part.is_file()):
                parts.append(part)
        if parts:
            tables[folder.name] = parts
    return tables


def commits(root: Path) -> set[str]:
    named = _with_sources(root)
    return named - dropped(root, named)


def _with_sources(root: Path) -> set[str]:
    """Commits that have a part of `sources`, those that were taken out among them."""
    names = map(commit_of, root.glob(f"{SOURCES.name}/**/part-*.parquet"))
    return {name for name in names if name}


def dropped(root: Path, named: set[str] | None = None) -> set[str]:
    """Commits that were taken out; their files may still be there. `named` are those that have a part of `sources`, of
    which one that replaces others must be: without it, commits count whose replacement is yet to come."""
    out: set[str] = set()
    for path in root.glob(DROPPED):
        with contextlib.suppress(FileNotFoundError):
            entry = json.loads(path.read_bytes())
            if named is None or entry["by"] is None or entry["by"] in named:
                out.update(entry["commits"])
    return out


def drop(root: Path, commit_ids: Iterable[str], by: str | None = None) -> None:
    """Take commits out, `by` the commit that replaces them as soon as it is there. Called under the lock."""
    entry = {"by": by, "commits": sorted(commit_ids)}
    name = f".dropped-{by or secrets.token_hex(8)}.json"
    temporary = root / f"{name}.tmp"
    with temporary.open("wb") as file:
        file.write(json.dumps(entry).encode())
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(root / name)
    sync(root)


def remove_dropped(root: Path, older_than_s: float) -> None:
    """Files of commits that were taken out so long ago that nobody reads them any more. Called under the lock."""
    # Whoever replaced others may be replaced itself by now: what it replaced goes all the same, and goes first, since
    # without its own files they would count again.
    there, removed = _with_sources(root), False
    for path in sorted(root.glob(DROPPED), key=lambda path: path.stat().st_mtime_ns):
        if _age_s(path) < older_than_s:
            continue
        entry = json.loads(path.read_bytes())
        if entry["by"] is None or entry["by"] in there:
            for commit_id in entry["commits"]:
                # The part of `sources` goes last: without it the others are nobody's.
                for part in sorted(root.glob(f"*/**/part-{commit_id}-*.parquet"), key=_is_of_sources):
                    part.unlink(missing_ok=True)
        path.unlink()
        removed = True
    for folder in root.glob("*/*/") if removed else ():
        if PARTITION.fullmatch(folder.name) and not any(folder.iterdir()):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _is_of_sources(part: Path) -> bool:
    return SOURCES.name in part.parts[-3:-1]


def partition_of(time_s: float) -> str:
    """Name of the hour, in UTC, whose folder holds what is written then."""
    return time.strftime("%Y-%m-%dT%H", time.gmtime(time_s))


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """One commit at a time, so that two writers do not both store the same row."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def writable(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            todo = (
                "no space left on the device. What was stored before is intact; free space and ingest again"
            )
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            todo = "no permission to write there. Choose another -o"
        elif error.errno in (errno.EEXIST, errno.ENOTDIR):
            todo = "exists and is not a trace directory. Choose another -o"
        else:
            todo = f"cannot write: {error.strerror or error}"
        raise TailscopeError(f"{root}: {todo}") from error


@contextlib.contextmanager
def readable(root: Path, table: str) -> Iterator[None]:
    try:
        yield
    except (duckdb.BinderException, duckdb.CatalogException, duckdb.ParserException):
        raise  # our statement is wrong, not the file
    except (duckdb.Error, pa.ArrowException) as error:
        raise BadInput(
            f"cannot be read: {first_line(error)}",
            path=str(root),
            where=f"table {table}",
            todo="Remove the damaged part, or ingest into a new trace",
        ) from error


def remove_abandoned(root: Path) -> None:
    """Temporary parts of writers that no longer run."""
    for part in root.glob("*/**/.*.tmp"):
        _, _, pid, host = f"{part.stem}---".split("-", 3)
        ours = host.rstrip("-") == socket.gethostname()
        with contextlib.suppress(FileNotFoundError):
            if pid.isdecimal() and not _runs(int(pid)) if ours else _age_s(part) > ABANDONED_S:
                part.unlink()


def _age_s(part: Path) -> float:
    return time.time() - part.stat().st_mtime


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
