"""Numbers as a person reads them."""

from __future__ import annotations

from tailscope.units import amount as amount
from tailscope.units import percent as percent
from tailscope.units import seconds as seconds
