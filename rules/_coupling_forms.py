"""The three forms of head-of-line coupling, what speaks for each beside the mechanism, and what to do about it.

compute: others' chunk makes the step longer that a request waits behind or decodes in. admission: the chunk takes the
token budget, so that it stays in the queue. prefill-prefill: the chunk shares the steps of its own prefill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from tailscope.model import Evidence, Remedy, Severity

from . import _prefill, _tails

Row = Mapping[str, Any]

#: Form -> how a finding's title goes on.
FORMS = {
    "compute": "whose chunks make their steps long",
    "admission": "which takes the token budget they queue for",
    "prefill-prefill": "which shares the steps of their own prefill",
}
SECONDS = {"compute": "compute_s", "admission": "admission_s", "prefill-prefill": "shared_s"}
LOWER: Mapping[Severity, Severity] = {"high": "medium", "medium": "low", "low": "low"}

PRIORITY = Remedy(
    "Serve short requests first",
    "--scheduling-policy priority, and `priority` in the request body (lower is served first)",
    "vLLM V1",
    "Orders admission, and whom to preempt: a chunk that runs is not interrupted; long requests may starve",
)
SPLIT = Remedy(
    "Send long prompts to instances of their own",
    "router configuration",
    "any",
    "More instances, less sharing of capacity",
)
#: A smaller budget shortens the steps; a prompt that takes all of it keeps others out as long as before.
REMEDIES: Mapping[str, tuple[Remedy, ...]] = {
    "compute": (_prefill.SMALLER_STEPS, _prefill.CAPPED_CHUNK, PRIORITY, SPLIT, _prefill.SEPARATE),
    "admission": (_prefill.CAPPED_CHUNK, PRIORITY, SPLIT, _prefill.SEPARATE),
    "prefill-prefill": (_prefill.CAPPED_CHUNK, PRIORITY, SPLIT, _prefill.SEPARATE),
}


def form_of(hurt: Sequence[Row]) -> str:
    """The form of most of the time blamed up to the first token, where that is hurt: after it there is only one."""
    row = next((r for r in hurt if r["metric"] == "TTFT"), hurt[0])
    return max(FORMS, key=lambda form: float(row[SECONDS[form]] or 0.0))


def parts(row: Row) -> Evidence:
    """How the blamed time of a victim divides among the forms."""
    words = {
        "compute_s": "in steps made longer (compute)",
        "admission_s": "queued while the token budget was taken (admission)",
        "shared_s": "in the steps of its own prefill (prefill-prefill)",
    }
    found = [
        f"{row[name]:.3g} s {what}" for name, what in words.items() if row[name] >= 0.01 * row["blamed_s"]
    ]
    shown = ", ".join(found)
    if len(found) < 2:
        shown = f"all of it {words[max(words, key=lambda name: float(row[name]))]}"
    return Evidence(
        f"of the {row['blamed_s']:.3g} s of {row['victim']} {row['metric']}: {shown}",
        {name: row[name] for name in words},
    )


@dataclass(frozen=True)
class Said:
    """A piece of evidence, and whether it is for or against."""

    evidence: Evidence
    speaks_for: bool


def dose(row: Row, limits: Mapping[str, float]) -> Said | None:
    """Whether TTFT grows with the culprit's prefill tokens in a fixed window after arrival."""
    if row["rho_low"] is None:
        return None
    levels = [
        f"{what} {row[name]:.3g} s"
        for what, name in (("none", "none_s"), ("below the median dose", "little_s"), ("above", "much_s"))
        if row[name] is not None
    ]
    text = (
        f"dose and response: {row['victim']} TTFT by the {row['culprit']} prefill tokens in the {row['window_s']:.2g} s after arrival: "
        f"{', '.join(levels)} (Spearman {row['rho']:.2g}, 95 % interval {row['rho_low']:.2g} to {row['rho_high']:.2g})"
    )
    data = {k: row[k] for k in ("rho", "rho_low", "rho_high", "dosed", "none_s", "little_s", "much_s")}
    if row["rho_high"] < limits["dose"]:
        return Said(Evidence(f"no {text}", data), False)
    return Said(Evidence(text, data), True) if row["rho_low"] > 0 else None


def order(row: Row) -> Said | None:
    """Whether the effect ends when the prefill ends."""
    if row["during_s"] is None or row["after_s"] is None or row["other_s"] is None:
        return None
    text = (
        f"{row['victim']} TTFT p50 was {row['during_s']:.3g} s for arrivals while such a prefill ran, {row['after_s']:.3g} s for as long "
        f"after it, {row['other_s']:.3g} s else"
    )
    data = {k: row[k] for k in ("during", "after", "during_s", "after_s", "other_s")}
    harm, left = row["during_s"] - row["other_s"], row["after_s"] - row["other_s"]
    if harm <= 0:
        return Said(Evidence(f"time order: {text}: no slower beside it", data), False)
    if left > harm / 2:
        return Said(Evidence(f"time order: {text}: the harm outlasts the prefill", data), False)
    return Said(Evidence(f"time order: {text}", data), True)


def remedies(form: str, hurt: Sequence[Row], limits: Mapping[str, float]) -> tuple[Remedy, ...]:
    """The form's remedies, with what they would do in this trace. Shorter steps too where they are a real part of a tail."""
    row = hurt[0]
    chosen = REMEDIES[form]
    if form != "compute" and any(r["compute_s"] >= limits["share"] * r["excess_s"] for r in hurt):
        chosen = (chosen[0], _prefill.SMALLER_STEPS, *chosen[1:])
    return tuple(_with_effect(remedy, row) for remedy in _prefill.sized(chosen, row["budget"]))


def _with_effect(remedy: Remedy, row: Row) -> Remedy:
    step = _step(row)
    if step is None:
        return remedy
    base, prefill, tokens = step
    if remedy.do == _prefill.SMALLER_STEPS.do:
        effect = f"the longest step with prefill becomes about {base + prefill / 2:.3g} s instead of {base + prefill:.3g} s"
        return replace(
            remedy, do=f"{remedy.do}: {effect}", cost=f"{remedy.cost}{_steps_cost(row, tokens, 2)}"
        )
    if remedy == _prefill.CAPPED_CHUNK:
        effect = f"with a quarter of {_tails.rounded(tokens)} its chunk takes about {prefill / 4:.3g} s of a step instead of {prefill:.3g} s"
        return replace(
            remedy, do=f"{remedy.do}: {effect}", cost=f"{remedy.cost}{_steps_cost(row, tokens, 4)}"
        )
    if remedy in (SPLIT, _prefill.SEPARATE):
        effect = f"{row['victim']} {row['metric']} tail up to {row['blamed_s']:.3g} s shorter"
        return replace(remedy, do=f"{remedy.do}: {effect}")
    return remedy


def _step(row: Row) -> tuple[float, float, float] | None:
    """Of the longest step with prefill: seconds without it, seconds of it, tokens."""
    if not row["chunk_tokens"] or not row["chunk_prefill_s"]:
        return None
    return row["chunk_base_s"], row["chunk_prefill_s"], row["chunk_tokens"]


def _steps_cost(row: Row, tokens: float, parts_of: int) -> str:
    """What so much smaller chunks cost the culprit: each step more costs what a step costs without prefill."""
    if not row["culprit_tokens"] or not row["culprit_ttft_s"]:
        return ""
    now, then = ceil(row["culprit_tokens"] / tokens), ceil(parts_of * row["culprit_tokens"] / tokens)
    extra = (then - now) * (row["usual_step_s"] or row["chunk_base_s"])
    return f": by about {extra:.2g} s for a median {row['culprit']} prompt ({then:,} steps instead of {now:,}), {row['culprit_ttft_s']:.3g} s now"


def confirm_by(row: Row) -> tuple[str, ...]:
    step = _step(row)
    if step is None:
        return ()
    return (
        f"The longest step with prefill, now {step[0] + step[1]:.3g} s, is what to watch beside {row['victim']} {row['metric']} p99",
    )
