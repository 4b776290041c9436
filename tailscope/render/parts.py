"""What a report for people consists of beside tables: rich renderables that other outputs than a terminal know by their kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tailscope.model import Severity

SEVERITY_STYLE = {"high": "bold red", "medium": "bold yellow", "low": "bold cyan"}


class Heading(Text):
    def __init__(self, text: str) -> None:
        super().__init__(text, "bold underline")


class Lead(Text):
    """The verdict: its status in one word, and a sentence. Both are printable."""

    def __init__(self, word: str, style: str, sentence: str) -> None:
        super().__init__()
        self.word, self.sentence = word, sentence
        self.append(f"{word}  " if word else "", style).append(sentence, "bold")


class Item(Padding):
    """One of a list of sentences."""

    def __init__(self, text: str, style: str = "") -> None:
        super().__init__(Text(f"- {text}", style), (0, 0, 0, 2))
        self.text = text


@dataclass(frozen=True)
class Told:
    """A finding as people are told of it: all texts are printable.

    `about`: rule, status, basis and share. `rows`: label and sentences, in order; none where it is the `same` time that an
    earlier number explains.
    """

    number: int
    rule: str
    status: str
    severity: Severity
    title: str
    about: str
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    same: int | None = None

    @property
    def same_as(self) -> str:
        return "" if self.same is None else f"same time seen as {self.same}; in full with --format json"

    def __rich__(self) -> RenderableType:
        head = Text.assemble(
            (f"{self.number}. {self.severity.upper()}", SEVERITY_STYLE[self.severity]),
            (f"  {self.title}", "bold"),
            (f"  [{self.about}]", "dim"),
        )
        if self.same is not None:
            return head.append(f"  {self.same_as}", "dim")
        body = Table.grid(padding=(0, 1))
        body.add_column(style="dim", no_wrap=True, justify="right", min_width=12)
        body.add_column(overflow="fold")
        for label, texts in self.rows:
            for i, text in enumerate(texts):
                body.add_row("" if i else label, text)
        return Group(head, body)


def cells_of(table: Table) -> tuple[list[str], Iterator[list[str]]]:
    """A table's header and rows as plain text."""
    columns = [[_plain(cell) for cell in column.cells] for column in table.columns]
    return [_plain(column.header) for column in table.columns], map(list, zip(*columns, strict=True))


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)
