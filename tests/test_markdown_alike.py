"""The terminal, JSON, Markdown, annotations and the page say the same findings in the same order and words, with numbers to three digits."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from real import EXAMPLE, ROOT
from rich.console import Console
from rich.table import Table
from test_markdown import one_space, shown

from tailscope.align import Scope
from tailscope.config import Config, parse_slo
from tailscope.ingest import ingest
from tailscope.model import Diagnosis
from tailscope.render import github, markdown, text
from tailscope.render.as_json import as_dict
from tailscope.render.parts import Told, cells_of
from tailscope.render.words import sentence
from tailscope.report.build import report
from tailscope.safe import printable
from tailscope.sim.engine import simulate
from tailscope.sim.scenario_file import load
from tailscope.sim.written import write
from tailscope.source import Options
from tailscope.store import Trace

#: Captures of real servers, and simulated ones with faults that those do not have.
SEEN = {
    "mixed-load": EXAMPLE,
    "moe-straggler": ROOT / "examples" / "moe-straggler",
    "scheduled": ROOT / "tests" / "captures" / "scheduled",
    **{
        name: ROOT / "examples" / "scenarios" / f"{name}.toml"
        for name in ("healthy", "kv-squeeze", "slow-rank", "closed-loop-pause")
    },
}
CONFIG = Config(slos=(parse_slo("<512:ttft_p99_s=0.5"),))


class Words(HTMLParser):
    """What a reader of a page reads."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.hidden += tag in ("script", "style")
        # Words of blocks stand apart, those of one sentence do not.
        if tag not in ("span", "a", "b", "code", "strong", "em"):
            self.texts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.texts.append(data)


@dataclass
class Said:
    diagnosis: Diagnosis
    terminal: str
    markdown: str
    annotations: str
    page: str

    @property
    def told(self) -> list[Told]:
        return list(text.told(self.diagnosis.findings))


@pytest.fixture(scope="module", params=SEEN)
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Said:
    source: Path = SEEN[request.param]
    trace = tmp_path_factory.mktemp(request.param) / "trace.parquet"
    if source.suffix == ".toml":
        list(write(simulate(load(source)), trace=trace, raw=None, truth=None))
    else:
        ingest([source], trace, config=Config(), options=Options())
    with Trace(trace) as opened:
        diagnosis, html = report(opened, CONFIG, Scope())
    out = io.StringIO()
    text.render(diagnosis, Console(file=out, width=10_000, highlight=False, markup=False, emoji=False))
    words = Words()
    words.feed(html)
    return Said(
        diagnosis,
        one_space(out.getvalue().replace("\n", " ")),
        " ".join(shown(markdown.render(text.parts(diagnosis)))[0]),
        github.of_diagnosis(diagnosis).replace("%25", "%").replace("%3A", ":").replace("%2C", ","),
        re.sub(r"\s+", " ", "".join(words.texts)),
    )


def in_order(sentences: Sequence[str], where: str) -> None:
    at = 0
    for told in sentences:
        # What has a number of its own in a list has it as markup.
        told = re.sub(r"^\d\. ", "", one_space(told))
        found = where.find(told, at)
        assert found >= 0, f"{told!r} is not there, or not in its place"
        at = found + len(told)


def sentences(told: Sequence[Told]) -> Iterator[str]:
    for entry in told:
        yield entry.title
        yield entry.about
        yield from (said for _, texts in entry.rows for said in texts)


def test_findings_are_the_same_everywhere(said: Said) -> None:
    verdict = text.lead(said.diagnosis)
    expected = [verdict.word, verdict.sentence, *sentences(said.told)]
    in_order(expected, said.terminal)
    in_order(expected, said.markdown)
    in_order([verdict.sentence, *(entry.title for entry in said.told)], said.page)
    for entry, finding in zip(said.told, said.diagnosis.findings, strict=True):
        texts = [e.text for e in (*finding.evidence, *finding.counter_evidence)]
        in_order([entry.title, entry.about, *map(sentence, texts)], said.page)
    document = as_dict(said.diagnosis)
    assert [(f["rule"], f["severity"], sentence(f["title"])) for f in document["findings"]] == [
        (entry.rule, entry.severity, entry.title) for entry in said.told
    ]
    commands = [line.split(" title=")[1].split("::")[0] for line in said.annotations.splitlines()]
    assert commands[1:] == [f"{e.number}. {e.severity.upper()} {e.title}" for e in said.told]


def test_rules_and_trust_are_told_in_one_order(said: Said) -> None:
    checks = [check.reason for check in said.diagnosis.checks]
    trust = [entry.detail for entry in said.diagnosis.trust]
    for where in (said.terminal, said.markdown):
        in_order([sentence(reason) for reason in checks], where)
        in_order([sentence(detail) for detail in trust], where)
    for texts in (checks, trust):
        assert not [entry for entry in texts if one_space(sentence(entry)) not in said.page]


def test_quantiles_are_the_same_everywhere(said: Said) -> None:
    (table, *_) = [part for part in text.parts(said.diagnosis) if isinstance(part, Table)]
    for row in cells_of(table)[1]:
        cells = [one_space(cell) for cell in row if cell.strip()]
        in_order(cells, said.terminal)
        in_order(cells, said.markdown)
        in_order([cell for cell in cells if re.fullmatch(r"[\d.,]+ (s|ms|µs)", cell)], said.page)


#: A number with what it counts or measures behind it, and not a part of a name, a flag, a time of day or another number.
NUMBER = re.compile(
    r"(?<![\w.,:=/\-])(\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)(?= ?(?:s|ms|µs|ns|%|x|MB|GB|/s|requests/s|tokens/s|request-seconds|points)(?![\w/]))"
)


def too_exact(where: str) -> list[str]:
    found = []
    for match in NUMBER.finditer(where):
        mantissa = match[1].split("e")[0].replace(",", "")
        digits = (mantissa.rstrip("0") if "." not in mantissa else mantissa).replace(".", "").lstrip("0")
        if len(digits) > 3 or "e+" in match[1]:
            found.append(where[max(match.start() - 40, 0) : match.end() + 20])
    return found


def test_numbers_have_units_and_three_digits_at_most(said: Said) -> None:
    for where in (said.terminal, said.markdown, said.annotations, said.page):
        assert not too_exact(where)


def test_the_test_finds_numbers_that_are_too_exact() -> None:
    assert too_exact("834 ms of 1750 ms; 1,750 s, 3 s") == []
    assert len(too_exact("of 861.5 ms, 1302 ms and 1.2e+03 s")) == 3


def test_nothing_is_told_by_colour_alone(said: Said) -> None:
    """What is printed here has no colours: severities and broken objectives are words."""
    for entry in said.told:
        assert f"{entry.number}. {entry.severity.upper()} {entry.title}" in said.terminal
    for row in said.diagnosis.classes:
        if row.slo_broken:
            assert f"broken {printable(row.klass)} {row.metric}" in said.terminal
            assert f"broken {printable(row.klass)} {row.metric}" in said.markdown
