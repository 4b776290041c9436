"""Findings on a timeline: a mark each, in the words of the terminal, and arrows from those who made others wait to those who did."""

from __future__ import annotations

import numpy as np

from tailscope.export.span import Span
from tailscope.export.timeline import Mark, Tracks
from tailscope.model import Diagnosis
from tailscope.render.text import lead, told

#: Findings that get a track. More would push everything else off the screen.
MOST_FINDINGS = 50


def marks(diagnosis: Diagnosis, span: Span, tracks: Tracks) -> list[Mark]:
    """A track of their own for the findings, each on a line of its own, as their times overlap."""
    verdict = lead(diagnosis)
    root = tracks.add("findings", about=verdict.sentence)
    found = [Mark(root, f"{verdict.word}: {verdict.sentence}", span.first_ns)]
    for entry, finding in zip(told(diagnosis.findings), diagnosis.findings[:MOST_FINDINGS], strict=False):
        track = tracks.add(f"{entry.number}. {entry.severity.upper()} {entry.rule}", root)
        args: dict[str, str | int | float] = {"finding": entry.about}
        for label, texts in entry.rows:
            for i, text in enumerate(texts):
                args[label if i == 0 else f"{label} {i + 1}"] = text
        if entry.same_as:
            args["same"] = entry.same_as
        if finding.window_ns is None:
            found.append(Mark(track, entry.title, span.first_ns, None, {**args, "time": "all of it"}))
            continue
        first, last = (int(np.clip(ns, span.first_ns, span.last_ns)) for ns in finding.window_ns)
        outside = finding.window_ns[1] < span.first_ns or finding.window_ns[0] > span.last_ns
        if outside:
            args["outside"] = "not in the time that is shown"
        found.append(Mark(track, entry.title, first, None if outside else max(last, first + 1), args))
    return found
