"""Numbers as a person reads them: at most three significant digits, and the unit that fits."""

from __future__ import annotations

from datetime import UTC, datetime


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    size = abs(value)
    if size < 1e-9:
        return "0 s"
    if size >= 100:
        return f"{amount(value)} s"
    if size >= 1:
        return f"{value:.3g} s"
    if size >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} µs"


def ms(ns: float) -> str:
    """Of what is compared in milliseconds: however short, but from a second on in seconds."""
    return seconds(ns / 1e9) if abs(ns) >= 1e9 else f"{ns / 1e6:.3g} ms"


def amount(value: float) -> str:
    """A number without exponent."""
    short = f"{value:.3g}"
    return f"{float(short):,.0f}" if "e+" in short or abs(float(short)) >= 1000 else short


def clock(ns: int, short: bool = False) -> str:
    """Time of day, UTC, of ns since 1970: to the second, and what is `short` to the millisecond."""
    moment = datetime.fromtimestamp(ns / 1e9, UTC)
    return moment.time().isoformat(timespec="milliseconds" if short else "seconds")


def percent(share: float, sign: bool = False) -> str:
    """To a tenth of a percent, which is too much for a hundred and more."""
    plus = "+" if sign else ""
    return f"{share:{plus}.0%}" if abs(share) >= 0.9995 else f"{share:{plus}.1%}"
