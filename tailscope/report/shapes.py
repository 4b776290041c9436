"""Prompt length by answer length: where requests are, and where they are slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tailscope.model import Diagnosis
from tailscope.report.columns import few_digits
from tailscope.report.html import Html, table
from tailscope.report.parts import behind, chart, choice, lacking, section
from tailscope.units import seconds

#: Cells in the table behind the map, those with most requests.
MOST_ROWS = 40
SHOWN = (
    ("slow", "share with a TTFT above their class's p95"),
    ("ttft", "TTFT p50"),
    ("e2e", "E2E p50"),
    ("n", "requests"),
)


def shapes_section(diagnosis: Diagnosis) -> Html:
    cells = list(diagnosis.trace.get("shapes", ()))
    if not cells:
        return section(
            "shapes",
            "Prompt and answer lengths",
            None,
            lacking(
                "No request has both of its lengths, and a latency.",
                "OpenTelemetry spans or a client's log with token counts would show which shapes of requests are slow.",
            ),
        )
    n = sum(c["n"] for c in cells)
    most = max(cells, key=lambda c: c["n"])
    slowest = max(cells, key=lambda c: (c["slow"], c["n"]))
    lead = f"Most requests ({most['n'] / n:.0%} of {n:,}) have prompts of {_range(most['prompt_tokens'])} and answers of {_range(most['output_tokens'])} tokens."
    says = (
        f"Of the TTFTs above their class's p95 {slowest['share_of_slow']:.0%} are of prompts of {_range(slowest['prompt_tokens'])} with answers of "
        f"{_range(slowest['output_tokens'])} tokens, which {slowest['n'] / n:.0%} of requests have."
        if slowest["slow"]
        else "No TTFT lies above its class's p95."
    )
    return section(
        "shapes",
        "Prompt and answer lengths",
        lead,
        chart(
            "shapes",
            "Latency by prompt and answer length",
            says,
            choice("shapes-what", "Colour", list(SHOWN), "slow"),
            height=380,
        ),
        behind("Numbers behind this chart", _table(cells)),
    )


def _range(limits: Sequence[int]) -> str:
    return f"{limits[0]:,}-{limits[1] - 1:,}"


def _table(cells: Sequence[Mapping[str, Any]]) -> Html:
    kept = sorted(cells, key=lambda c: -c["n"])[:MOST_ROWS]
    rows = [
        (
            _range(c["prompt_tokens"]),
            _range(c["output_tokens"]),
            f"{c['n']:,}",
            f"{c['slow'] / c['n']:.0%}",
            *(seconds(c[m][q]) for m in ("ttft", "e2e") for q in ("p50_s", "p95_s")),
        )
        for c in kept
    ]
    caption = "Lengths in tokens" + (
        f"; the {MOST_ROWS} cells with most requests of {len(cells)}" if len(cells) > MOST_ROWS else ""
    )
    return table(caption, ("prompt", "answer", "n", "slow", "TTFT p50", "p95", "E2E p50", "p95"), rows)


def data(diagnosis: Diagnosis) -> dict[str, list[Any]]:
    cells = diagnosis.trace.get("shapes", ())
    return {
        "prompt": [c["prompt_tokens"][0] for c in cells],
        "output": [c["output_tokens"][0] for c in cells],
        "n": [c["n"] for c in cells],
        "slow": [few_digits(c["slow"] / c["n"]) for c in cells],
        "ttft": [few_digits(c["ttft"]["p50_s"]) if c["ttft"]["p50_s"] is not None else None for c in cells],
        "e2e": [few_digits(c["e2e"]["p50_s"]) if c["e2e"]["p50_s"] is not None else None for c in cells],
    }
