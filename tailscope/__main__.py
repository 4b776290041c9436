"""`python -m tailscope` and the `tailscope` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; a TailscopeError becomes its sentence and exit status, a bug keeps its traceback."""
    from tailscope.cli import app
    from tailscope.errors import TailscopeError
    from tailscope.safe import printable

    try:
        app()
    except TailscopeError as error:
        print(f"tailscope: {printable(str(error), 2000)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


if __name__ == "__main__":
    main()
