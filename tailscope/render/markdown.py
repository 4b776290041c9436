"""What the terminal shows as Markdown for tickets and pull requests: the same sentences in the same order.

Every text may come from a trace. It is escaped so that CommonMark and GitHub show it as it is: no markup, no HTML, no link, no
mention of a person, an issue or a team.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tailscope.render import words
from tailscope.render.parts import Heading, Item, Lead, Told, cells_of
from tailscope.safe import printable

#: GitHub takes comments of 65,536 characters, and the one who posts it may add some.
MOST_CHARACTERS = 60_000
#: Sections that are folded: they say what was looked at, not what was found.
FOLDED = (words.RULES, words.TRUST, words.MISSING, "Not tested", "Notes")
#: Space of no width. It parts what GitHub would link: @person, #1, GH-1, :smile:, https://, www., a@b.
APART = "\u200b"

_SPACES = re.compile(" {2,}")
_NUMBERED = re.compile(r"\d{1,2}\. ")
_MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")
#: What would begin a list, a rule or a heading.
_AT_START = re.compile(r"^(\d{1,9})([.)])(?=\s|$)|^()([-+=])(?=\s|$|[-=\s]*$)|^()(#)")
_LINKED = re.compile(
    r"@(?=\w)|#(?=\d)|(?i:\bgh-)(?=\d)|(?<=:)(?=[a-z0-9_+-]*[a-z][a-z0-9_+-]*:)|(?<=:)(?=//)|(?i:\bwww)(?=\.)"
)


def escaped(text: str, begins_block: bool = True) -> str:
    """Text that Markdown shows as a terminal does, but for spaces, of which it shows one."""
    text = _SPACES.sub(" ", printable(text, len(text)).strip())
    text = _LINKED.sub(lambda found: found[0] + APART, text)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _MARKUP.sub(r"\\\g<0>", text)
    if not begins_block:
        return text
    return _AT_START.sub(lambda found: f"{found[1] or ''}\\{found[2] or found[4] or found[6]}", text)


def render(parts: Iterable[RenderableType]) -> str:
    """The report, at most `MOST_CHARACTERS` long: where it would be longer it ends after what fits, and says so."""
    blocks: list[str] = []
    size = 0
    for block in _folded(_blocks(parts)):
        size += len(block) + 2
        if size > MOST_CHARACTERS:
            blocks.append(
                "**The report is longer than a comment may be.** All of it: `--format text` or `json`."
            )
            break
        blocks.append(block)
    return "\n\n".join(blocks) + "\n"


def _folded(blocks: Iterator[tuple[str | None, str]]) -> Iterator[str]:
    """The blocks, sections that are folded as one block each, so that none is left open where the report ends."""
    inside: list[str] = []
    for title, block in blocks:
        if title is not None and inside:
            yield _details(inside)
            inside = []
        if title in FOLDED:
            inside = [block]
        elif inside:
            inside.append(block)
        else:
            yield block
    if inside:
        yield _details(inside)


def _details(blocks: list[str]) -> str:
    if any("- **FAIL**" in block for block in blocks):
        return "\n\n".join(blocks)
    title = blocks[0].removeprefix("### ")
    return "\n\n".join([f"<details><summary>{title}</summary>", *blocks[1:], "</details>"])


def _blocks(parts: Iterable[RenderableType]) -> Iterator[tuple[str | None, str]]:
    """Blocks of Markdown, each with the title it begins a section with."""
    lines: list[str] = []
    for part in parts:
        line = _line(part)
        if line is not None:
            lines.append(line)
            continue
        if lines:
            yield None, "\n".join(lines)
            lines = []
        if isinstance(part, Heading):
            yield part.plain, f"### {escaped(part.plain)}"
        elif isinstance(part, Told):
            # A finding ends the section before it, and none follows it but the next with a heading.
            yield "", "\n\n".join(_finding(part))
        elif isinstance(part, Lead):
            yield (
                None,
                f"**{part.word}** {escaped(part.sentence)}" if part.word else f"**{escaped(part.sentence)}**",
            )
        elif isinstance(part, Table):
            yield None, _table(*cells_of(part))
        elif isinstance(part, Text):
            if part.plain.strip():
                yield None, escaped(part.plain)
        else:
            raise TypeError(f"no Markdown for {type(part).__name__}")
    if lines:
        yield None, "\n".join(lines)


def _line(part: RenderableType) -> str | None:
    """A line of a list, where the part is one."""
    if isinstance(part, Item):
        return f"- {escaped(part.text)}"
    if isinstance(part, Text) and part.plain.startswith("  ") and part.plain.strip():
        return f"- {_with_bold(part)}"
    return None


def _with_bold(text: Text) -> str:
    """A line of which some words are bold. They stand apart from others by spaces, so that asterisks are seen as markup."""
    bold = sorted((span.start, span.end) for span in text.spans if "bold" in str(span.style))
    written, at = [], 0
    for start, end in bold:
        written += [escaped(text.plain[at:start]), f"**{escaped(text.plain[start:end])}**"]
        at = end
    return " ".join(filter(None, [*written, escaped(text.plain[at:])]))


def _finding(told: Told) -> Iterator[str]:
    yield f"### {told.number}. {told.severity.upper()}: {escaped(told.title)}"
    yield f"{escaped(told.about)}" + (f"; {escaped(told.same_as)}" if told.same_as else "")
    lines = []
    for label, texts in told.rows:
        if len(texts) == 1:
            lines.append(f"- **{label}**: {escaped(texts[0])}")
            continue
        lines.append(f"- **{label}**")
        lines += [f"  {_nested(text)}" for text in texts]
    if lines:
        yield "\n".join(lines)


def _nested(text: str) -> str:
    """A line of a list in a list; remedies come with their number."""
    number = _NUMBERED.match(text)
    return f"{number[0]}{escaped(text[number.end() :])}" if number else f"- {escaped(text)}"


def _table(header: list[str], rows: Iterator[list[str]]) -> str:
    written = [[escaped(cell, begins_block=False) for cell in cells] for cells in (header, *rows)]
    written.insert(1, ["---"] * len(header))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in written)
