"""Shares of the worlds played, held against the bars that they have to keep with 95 % certainty; and how pages show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from scipy.stats import beta

Side = Literal["lower", "upper"]
SURE = 0.95


def bound(hits: float, n: float, side: Side) -> float:
    """One-sided 95 % bound of a share (Clopper and Pearson 1934), also of a number that is not whole."""
    if side == "lower":
        return float(beta.ppf(1 - SURE, hits, n - hits + 1)) if hits > 0 else 0.0
    return float(beta.ppf(SURE, hits + 1, n - hits)) if hits < n else 1.0


def effective(hits: Sequence[int], n: Sequence[int]) -> float:
    """What things seen in clusters are worth as a number of independent ones (Korn and Graubard 1998).

    `hits`, `n`: of each cluster. From how the clusters differ; where they do not, each counts as one, since nothing tells
    what is in it apart.
    """
    found, of = np.asarray(hits, float), np.asarray(n, float)
    share = found.sum() / of.sum()
    beyond = found - share * of
    variance = len(of) / max(len(of) - 1, 1) * float((beyond**2).sum()) / of.sum() ** 2
    if not variance:
        return float(len(of))
    return float(min(share * (1 - share) / variance, of.sum()))


def bar(name: str, hits: int, n: int, limit: float, side: Side, worth: float | None = None) -> dict[str, Any]:
    """A share that must be at least `limit` by its lower bound, or at most by its upper one. `worth`: how many of the n are
    independent, where not all are. `opposite`: the bound to the other side, which shows a bar to be broken."""
    least = side == "lower"
    worth = n if worth is None else worth
    low, high = (bound(hits / n * worth, worth, s) for s in ("lower", "upper")) if n else (0.0, 1.0)
    return {
        "bar": name,
        "n": n,
        "hits": hits,
        "value": hits / max(n, 1),
        "bound": low if least else high,
        "opposite": high if least else low,
        "limit": limit,
        "side": side,
        "holds": low >= limit if least else high <= limit,
    }


def beside(name: str, hits: int, n: int) -> dict[str, Any]:
    """A share that is told, and has no bar."""
    return {"bar": name, "n": n, "value": hits / max(n, 1)}


def broken(result: Mapping[str, Any]) -> list[str]:
    """Bars that the worlds played show to be broken, 95 % sure."""
    return [
        row["bar"]
        for row in result["bars"]
        if "limit" in row
        and (row["opposite"] < row["limit"] if row["side"] == "lower" else row["opposite"] > row["limit"])
    ]


def bars_table(result: Mapping[str, Any]) -> str:
    rows = []
    for row in result["bars"]:
        share = (row["bar"], f"{row['n']:,}", f"{row['value']:.1%}")
        if "limit" not in row:
            rows.append((*share, "", "", ""))
            continue
        limit = f"{'≥' if row['side'] == 'lower' else '≤'} {row['limit']:.0%}"
        rows.append((*share, f"{row['bound']:.1%}", limit, "holds" if row["holds"] else "not shown"))
    return grid(("", "n", "share", "95 % bound", "bar", ""), rows)


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
