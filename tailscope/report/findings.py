"""The verdict and the findings on the page: the terminal's words, with what they speak of one click away."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tailscope.model import Diagnosis, Finding
from tailscope.render import words
from tailscope.report.html import Child, Html, el, table
from tailscope.report.parts import section
from tailscope.report.spoken_of import SpokenOf
from tailscope.units import seconds

#: A mark beside each word, so that colour is never all that tells them apart.
SEVERITY_MARK = {"high": "▲", "medium": "◆", "low": "●"}
STATUS_MARK = {"found": "▲", "nothing": "✓", "inconclusive": "?", "no-data": "–"}
#: Section -> how a finding links to it.
PANEL_TITLES = {
    "latency": "latency over time",
    "excess": "where the excess went",
    "blame": "who made whom wait",
    "requests": "the slow requests",
    "iterations": "the engine's steps",
    "shapes": "prompt and answer lengths",
    "ranks": "ranks and steps",
    "experts": "expert load",
}


def verdict(diagnosis: Diagnosis, when: str) -> Html:
    said = diagnosis.verdict
    counts = [
        (f"{diagnosis.trace['requests']:,}", "requests"),
        (f"{diagnosis.trace['steps']:,}", "engine steps"),
        (f"{len(diagnosis.findings):,}", "finding" if len(diagnosis.findings) == 1 else "findings"),
    ]
    if said.explained is not None:
        counts.append((f"{said.explained:.0%}", "explained, of the tails that findings name"))
    if when:
        counts.append((when, "looked at"))
    return el(
        "section",
        el("h2", "Verdict", cls="kicker", id="verdict-title"),
        el(
            "p",
            el("span", f"{STATUS_MARK[said.status]} {said.status.upper()}", cls=f"pill {said.status}"),
            " ",
            said.text,
            cls="verdict",
        ),
        el("p", words.scope(diagnosis), cls="scope"),
        [el("p", f"warning: {warning}", cls="warning") for warning in diagnosis.trace.get("warnings", ())],
        el("dl", [el("div", el("dd", value), el("dt", name)) for value, name in counts], cls="counts"),
        id="verdict",
        aria_labelledby="verdict-title",
    )


def findings(diagnosis: Diagnosis, spoken: Mapping[int, SpokenOf], there: Collection[str]) -> Html:
    """`there`: sections of the page."""
    if not diagnosis.findings:
        return section("findings", "Findings", "No rule found a cause. What each rule says is under Rules.")
    numbers = words.same_times(diagnosis.findings)
    found = sum(f.status == "found" for f in diagnosis.findings)
    open_ones = len(diagnosis.findings) - found
    lead = f"{found:,} found" + (f", {open_ones:,} that the data cannot decide" if open_ones else "")
    return section(
        "findings",
        "Findings",
        f"{lead}; the worst first. Open one for its evidence, what speaks against it, and what to change.",
        [
            _finding(number, finding, same, spoken.get(number, SpokenOf()), there)
            for number, (finding, same) in enumerate(zip(diagnosis.findings, numbers, strict=True), 1)
        ],
    )


def _finding(
    number: int, finding: Finding, same: int | None, spoken: SpokenOf, there: Collection[str]
) -> Html:
    head = el(
        "summary",
        el(
            "h3",
            el("span", f"{number}. ", cls="nth"),
            el(
                "span",
                f"{SEVERITY_MARK[finding.severity]} {finding.severity.upper()}",
                cls=f"badge {finding.severity}",
            ),
            " ",
            finding.title,
        ),
        el("p", words.about(finding), _share(finding), cls="about"),
        el("p", "same time seen as ", el("a", str(same), href=f"#finding-{same}"), cls="about")
        if same
        else None,
    )
    facts: dict[str, Child] = {
        label: texts[0] if label in ("cause", "waiting", "when") else _list(texts)
        for label, texts in words.rows(finding)
    }
    if finding.remedies:
        facts["change"] = _remedies(finding)
    return el(
        "details",
        head,
        el("dl", [[el("dt", name), el("dd", value)] for name, value in facts.items() if value], cls="facts"),
        _requests(spoken),
        _steps(spoken),
        _links(number, finding, spoken, there),
        id=f"finding-{number}",
        cls=f"finding {finding.severity} {finding.status}",
        open=number == 1,
    )


def _share(finding: Finding) -> Child:
    if finding.share_of_tail is None:
        return None
    width = f"width:{min(max(finding.share_of_tail, 0.0), 1.0):.1%}"
    return el("span", el("span", style=width), cls="share", aria_hidden="true")


def _list(texts: Sequence[str]) -> Html:
    return el("ul", [el("li", text) for text in texts])


def _remedies(finding: Finding) -> Html:
    """As `words.rows` has them, with the flags to copy."""
    return el(
        "ol",
        [
            el(
                "li",
                f"{r.do}: ",
                el("code", r.flag),
                f" ({r.versions}). ",
                el("span", f"Cost: {r.cost}", cls="cost"),
            )
            for r in finding.remedies
        ],
    )


def _requests(spoken: SpokenOf) -> Child:
    if not spoken.requests:
        return None
    rows = [
        (
            el("a", r["request_id"] or f"request {r['rid']}", href="#requests", data_request=r["rid"]),
            r["klass"],
            seconds(r["ttft_s"]),
            seconds(r["e2e_s"]),
        )
        for r in spoken.requests
    ]
    return table(
        "Slowest of those who waited, in its time, whatever made them slow",
        ("request", "class", "TTFT", "E2E"),
        rows,
        numbers=2,
    )


def _steps(spoken: SpokenOf) -> Child:
    if not spoken.steps:
        return None
    rows = [
        (
            s["at"],
            s["engine"],
            seconds(s["seconds"]),
            f"{s['prefill_tokens']:,}",
            f"{s['decode_requests']:,}",
        )
        for s in spoken.steps
    ]
    return table(
        "Longest steps of that time",
        ("ended, UTC", "engine", "took", "prefill tokens", "decoding"),
        rows,
        numbers=2,
    )


def _links(number: int, finding: Finding, spoken: SpokenOf, there: Collection[str]) -> Html:
    links = [
        el("li", el("a", PANEL_TITLES[name], href=f"#{name}")) for name in spoken.panels if name in there
    ]
    rule = el("li", el("span", "explained by "), el("code", f"tailscope rules {finding.rule}"))
    return el(
        "div",
        el("ul", links, rule, cls="links", aria_label=f"Where to look for finding {number}"),
        el(
            "button",
            "Filter the page to this time and class",
            type="button",
            cls="only-script",
            data_finding=number,
        )
        if spoken.filters
        else None,
        cls="see",
    )
