"""A diagnosis and a comparison as Markdown and as annotations: the terminal's words in its order, and nothing a trace says is markup."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from reports import HOSTILE, hostile

from tailscope.model import Diagnosis
from tailscope.render import github, markdown, text
from tailscope.render.parts import Item, Told
from tailscope.safe import printable

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
#: What the Markdown itself is made of.
OURS = {
    "heading",
    "paragraph",
    "bullet_list",
    "ordered_list",
    "list_item",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
}
DETAILS = re.compile(r"<details><summary>([A-Za-z ]+)</summary>|</details>")


def shown(source: str) -> tuple[list[str], set[str]]:
    """The texts that a reader sees, block by block, and the kinds of markup in them."""
    texts, kinds = [], set()

    def look(tokens: list[Token]) -> str:
        seen = ""
        for token in tokens:
            if token.type == "inline":
                texts.append(look(token.children or []).replace(markdown.APART, ""))
            elif token.type == "text":
                seen += token.content
            elif token.type == "html_block" and all(map(DETAILS.fullmatch, token.content.split("\n")[:-1])):
                texts.extend(filter(None, DETAILS.findall(token.content)))
            else:
                kinds.add(re.sub("_(open|close)$", "", token.type))
        return seen

    look(PARSER.parse(source))
    return texts, kinds


def one_space(text: str) -> str:
    return re.sub(" +", " ", text.strip())


@given(st.text(st.one_of(st.sampled_from(string.punctuation + " \nab1:/@#"), st.characters()), max_size=60))
def test_escaped_text_is_shown_as_it_is(name: str) -> None:
    told = one_space(printable(name))
    if not told:
        return
    texts, kinds = shown(f"- {markdown.escaped(told)}")
    assert (texts, kinds) == ([told], {"bullet_list", "list_item", "paragraph"})
    texts, kinds = shown(f"| a |\n| --- |\n| {markdown.escaped(told, begins_block=False)} |")
    assert texts == ["a", told]
    assert kinds <= OURS


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_in_a_trace_is_markup(name: str) -> None:
    source = markdown.render(text.parts(hostile(name)))
    _, kinds = shown(source)
    assert kinds <= OURS | {"strong"}
    assert "\x1b" not in source
    # What GitHub links without any markup.
    for pattern in (r"@\w", r"#\d", r"(?i)\bgh-\d", r"://", r"(?i)\bwww\.", r":smile:"):
        assert not re.search(pattern, source), pattern


@pytest.mark.parametrize("name", HOSTILE)
def test_markdown_has_the_words_of_the_terminal_in_their_order(name: str) -> None:
    diagnosis = hostile(name)
    texts, _ = shown(markdown.render(text.parts(diagnosis)))
    at = 0
    for told in text.told(diagnosis.findings):
        for sentence in (told.title, told.about, *(s for _, sentences in told.rows for s in sentences)):
            sentence = re.sub(r"^\d\. ", "", one_space(sentence))
            at = next(i for i, seen in enumerate(texts) if i >= at and sentence in seen)


def test_a_report_that_does_not_fit_says_so() -> None:
    source = markdown.render(text.parts(hostile("x" * 190, findings=100)))
    assert len(source) < 65_536
    assert source.rstrip().endswith("All of it: `--format text` or `json`.")
    assert source.count("<details>") == source.count("</details>")


def test_sections_fold_unless_something_failed() -> None:
    source = markdown.render(text.parts(hostile("a")))
    assert "<summary>Rules</summary>" in source
    assert "### Trust\n\n- **FAIL** join-coverage a" in source


# -- annotations ------------------------------------------------------------------------------------


def commands(diagnosis: Diagnosis) -> list[tuple[str, str, str]]:
    found = []
    for line in github.of_diagnosis(diagnosis).splitlines():
        match = re.fullmatch(r"::(error|warning|notice) title=([^:,]*)::(.*)", line)
        assert match, line
        title, message = (
            part.replace("%0A", "\n").replace("%3A", ":").replace("%2C", ",").replace("%25", "%")
            for part in match.groups()[1:]
        )
        found.append((match[1], title, message))
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_no_command_of_github(name: str) -> None:
    verdict, finding = commands(hostile(name))
    assert verdict == ("notice", "tailscope: found", f"Requests of class {printable(name)} wait.")
    assert finding[:2] == ("error", f"1. HIGH Requests of class {printable(name)} wait")
    assert f"evidence: {printable(name)} TTFT: 1 s of 2 s\n" in finding[2]


def test_more_findings_than_github_shows_are_counted() -> None:
    found = commands(hostile("a", findings=25))
    assert [title for level, title, _ in found if level == "error"][-1] == "and 16 more"
    assert len(found) == 11


def test_told_of_hostile_names_is_printable() -> None:
    for name in HOSTILE:
        for part in text.parts(hostile(name)):
            if isinstance(part, Told):
                texts = [part.title, part.about, *(s for _, sentences in part.rows for s in sentences)]
            elif isinstance(part, Item):
                texts = [part.text]
            else:
                continue
            assert all(entry.isprintable() for entry in texts)
