"""How a trace lies on disk: which files of it count, one writer at a time, and what to say when it cannot be."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa

from tailscope.errors import BadInput, TailscopeError
from tailscope.scan import first_line
from tailscope.schema import SOURCES

#: A part of ours. The first group is the id of its commit.
PART_NAME = re.compile(r"part-([0-9a-f]{16})-\d{4,}\.parquet")
#: A temporary part of another machine is as good as abandoned after this time.
ABANDONED_S = 86_400


def temporary_name(token: str, number: int) -> str:
    return f".{token}-{number:04d}-{os.getpid()}-{socket.gethostname()}.tmp"


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
            ours = PART_NAME.fullmatch(part.name)
            hidden = any(name.startswith((".", "_")) for name in part.relative_to(folder).parts)
            if not hidden and (ours[1] in committed if ours else part.is_file()):
                parts.append(part)
        if parts:
            tables[folder.name] = parts
    return tables


def commits(root: Path) -> set[str]:
    names = (PART_NAME.fullmatch(p.name) for p in root.glob(f"{SOURCES.name}/part-*.parquet"))
    return {name[1] for name in names if name}


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
    for part in root.glob("*/.*.tmp"):
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
