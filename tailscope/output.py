"""Files that take the place of others as a whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tailscope.errors import UsageError


def no_folder(output: Path, example: str) -> None:
    """Raises UsageError, with the name `example` for a file, where `output` is none: before anything is worked for."""
    if output.is_dir():
        raise UsageError(f"{output}: is a folder; name a file, for example {output / example}")
    if str(output) == "-":
        raise UsageError(f"-: is no file; name one, for example {example}, or /dev/stdout")


@contextmanager
def replacing(output: Path) -> Iterator[Path]:
    """A path to write to, which becomes `output` in the end: somebody may have the file before it open, or read it at any moment.

    A link stays one, and what is no file, such as a pipe or a device, is written to as it is. Nothing is left behind
    where that fails or is interrupted. Raises UsageError where it cannot be written.
    """
    try:
        place = output.resolve()
        if place.exists() and not place.is_file():
            yield place
            return
        number, name = tempfile.mkstemp(prefix=f".{place.name[:100]}.", suffix=".part", dir=place.parent)
        os.close(number)
        part = Path(name)
        try:
            yield part
            part.chmod(0o666 & ~_umask() if not place.exists() else place.stat().st_mode & 0o777)
            part.replace(place)
        finally:
            with suppress(OSError):
                part.unlink()
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from error


def _umask() -> int:
    """Of this process; there is no other way to ask. Commands that write a file have no other threads that do."""
    umask = os.umask(0)
    os.umask(umask)
    return umask
