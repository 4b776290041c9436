"""What happens to a request before an engine has it: shares of requests by their ids, and slow networks."""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from tailscope.sim.scenario import Fault


def place_of(request_id: str, purpose: str) -> float:
    """A number in [0, 1) that a request always has, whatever else there is in its world."""
    return crc32(f"{purpose}\0{request_id}".encode()) / 2**32


def delay_s(faults: Iterable[Fault], request_id: str, sent_s: float) -> float:
    """By how much the network faults make a request that is sent then come later."""
    return sum(
        fault.length_s
        for fault in faults
        if fault.kind == "network"
        and fault.holds_at(sent_s)
        and place_of(request_id, fault.name) < fault.often
    )
