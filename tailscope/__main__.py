"""`python -m tailscope` and the `tailscope` command."""

from __future__ import annotations

import errno
import os
import sys


def main() -> None:
    """Run the command line; a TailscopeError becomes its sentence and exit status, a bug keeps its traceback."""
    # Our matrices are narrow: on a busy host its threads wait for each other at full load. Read when NumPy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    from tailscope.cli import app
    from tailscope.errors import TailscopeError
    from tailscope.safe import printable

    _writable_streams()
    try:
        app()
    except TailscopeError as error:
        print(f"tailscope: {printable(str(error), 2000)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        # DuckDB says so where Ctrl-C came while a query ran.
        if "Query interrupted" not in str(error):
            raise
        sys.exit(130)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        print(f"tailscope: cannot write the output: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _writable_streams() -> None:
    """Output that the locale cannot encode is escaped; output to a closed stream is dropped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
