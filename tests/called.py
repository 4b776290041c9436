"""The command line in this process: what it prints and its status, without what a process of its own takes to start."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest

from tailscope.__main__ import main


def called(*args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = ["tailscope", *map(str, args)]
    # Kept here: a wrapper that nobody has any more closes what it wrote to.
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    status: int | str | None = 0
    with pytest.MonkeyPatch.context() as patch, chdir(cwd or Path.cwd()):
        patch.setenv("NO_COLOR", "1")
        patch.setenv("COLUMNS", "140")
        patch.setattr(sys, "argv", command)
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        # Typer puts one of its own there.
        patch.setattr(sys, "excepthook", sys.excepthook)
        try:
            main()
        except SystemExit as end:
            status = end.code
    assert status is None or isinstance(status, int), status
    said = [stream.buffer.getvalue().decode() for stream in streams]
    return subprocess.CompletedProcess(command, status or 0, *said)
