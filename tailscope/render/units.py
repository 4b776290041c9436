"""Numbers as a person reads them."""

from __future__ import annotations


def seconds(value: float | None) -> str:
    """At most three significant digits, with the unit that fits."""
    if value is None:
        return "-"
    size = abs(value)
    if size < 1e-9:
        return "0 s"
    if size >= 100:
        return f"{value:,.0f} s"
    if size >= 1:
        return f"{value:.3g} s"
    if size >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} µs"
