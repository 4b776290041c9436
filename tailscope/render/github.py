"""Annotations that GitHub Actions shows beside a run: a line a finding, for a step that prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from tailscope.compare.pair import Comparison
from tailscope.compare.sweep import Sweep
from tailscope.model import Diagnosis
from tailscope.render.compare import change_line, finding_line
from tailscope.render.parts import Told
from tailscope.render.text import told
from tailscope.render.words import sentence
from tailscope.safe import printable

Level = Literal["error", "warning", "notice"]
LEVEL: dict[str, Level] = {"high": "error", "medium": "warning", "low": "notice"}
#: GitHub shows so many of each level of a step.
MOST_SHOWN = 10
#: Characters of an annotation and of its title; the other formats have all.
MOST_CHARACTERS, LONGEST_TITLE = 4000, 250
#: Rows of a finding that an annotation has room for.
SHOWN_ROWS = ("cause", "waiting", "when", "evidence", "against", "change")


class Annotation(NamedTuple):
    level: Level
    title: str
    lines: Sequence[str]


def of_diagnosis(diagnosis: Diagnosis) -> str:
    verdict = diagnosis.verdict
    level: Level = "notice" if verdict.status in ("found", "nothing") else "warning"
    return _written(
        [
            Annotation(level, f"tailscope: {verdict.status}", [sentence(verdict.text)]),
            *(_finding(entry) for entry in told(diagnosis.findings)),
        ]
    )


def of_comparison(found: Comparison) -> str:
    level: Level = "notice" if found.status in ("improved", "same") else "warning"
    annotations = [Annotation(level, f"tailscope: {found.status}", [sentence(found.text)])]
    for row in found.changes:
        if row.verdict in ("slower", "faster"):
            title = f"{row.verdict}: {printable(row.klass, 24)} {row.metric} {row.quantile}"
            annotations.append(
                Annotation("error" if row.verdict == "slower" else "notice", title, [change_line(row)])
            )
    for entry in found.findings:
        annotations.append(
            Annotation(
                "warning" if entry.state == "opened" else "notice",
                f"finding {entry.state}",
                [finding_line(entry)],
            )
        )
    return _written(annotations)


def of_sweep(found: Sweep) -> str:
    return _written([Annotation("notice", "tailscope: sweep", [sentence(found.text)])])


def _finding(entry: Told) -> Annotation:
    level = LEVEL[entry.severity] if entry.status == "found" else "notice"
    lines = [f"[{entry.about}]"] + ([entry.same_as] if entry.same_as else [])
    lines += [f"{label}: {text}" for label, texts in entry.rows if label in SHOWN_ROWS for text in texts]
    return Annotation(level, f"{entry.number}. {entry.severity.upper()} {entry.title}", lines)


def _written(annotations: Sequence[Annotation]) -> str:
    """A command a line, in order. Of a level with more than GitHub shows, the last one shown says how many are not."""
    left = Counter(entry.level for entry in annotations)
    shown: Counter[Level] = Counter()
    lines = []
    for entry in annotations:
        shown[entry.level] += 1
        left[entry.level] -= 1
        if shown[entry.level] == MOST_SHOWN and left[entry.level]:
            title = f"and {left[entry.level] + 1} more"
            entry = Annotation(entry.level, title, ["--format text, markdown and json have all of them."])
        if shown[entry.level] <= MOST_SHOWN:
            lines.append(_command(entry))
    return "\n".join(lines)


def _command(entry: Annotation) -> str:
    title, text = _cut(entry.title, LONGEST_TITLE), _cut("\n".join(entry.lines), MOST_CHARACTERS)
    return f"::{entry.level} title={_property(title)}::{_data(text)}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
