"""tailscope: who is slow in an LLM inference fleet, who waits for it, and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from tailscope.store import Trace

__version__ = "0.1.0"


def open(path: str | Path, **options: Any) -> Trace:
    """Open a trace for reading; see `tailscope.store.Trace`."""
    from tailscope.store import Trace

    return Trace(path, **options)


__all__ = ["__version__", "open"]
