"""Files that take the place of others as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tailscope.errors import UsageError


def no_folder(output: Path, example: str) -> None:
    """Raises UsageError, with the name `example` for a file, where `output` is a folder: before anything is worked for."""
    if output.is_dir():
        raise UsageError(f"{output}: is a folder; name a file, for example {output / example}")


@contextmanager
def replacing(output: Path) -> Iterator[Path]:
    """A path to write to, which becomes `output` in the end: somebody may have the file before it open, or read it at any moment.

    Nothing is left behind where that fails or is interrupted. Raises UsageError where it cannot be written.
    """
    part = output.with_name(output.name + ".part")
    try:
        yield part
        part.replace(output)
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            part.unlink()
