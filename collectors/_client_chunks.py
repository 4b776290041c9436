"""Chunks of a streamed response as a load client writes them: [microseconds since send, tokens, choice]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ._client_rows import MAX_TOKENS, Values

MICROSECOND = 1_000


@dataclass
class Chunks:
    """Per chunk: ns since the request was sent (None: unusable), tokens (None: unknown), choice.

    `listed` is false where the record has no list of chunks, so that nothing is known of them.
    """

    since: list[int | None] = field(default_factory=list)
    tokens: list[int | None] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    listed: bool = True

    def by_choice(self) -> dict[int, Chunks]:
        split: dict[int, Chunks] = {}
        for since, count, choice in zip(self.since, self.tokens, self.choices, strict=True):
            own = split.get(choice)
            if own is None:
                own = split[choice] = Chunks(listed=self.listed)
            own.since.append(since)
            own.tokens.append(count)
            own.choices.append(choice)
        return split

    def total(self) -> int | None:
        if not self.listed or None in self.tokens:
            return None
        return sum(count for count in self.tokens if count)

    def ends(self) -> tuple[int | None, int | None]:
        """When the first and the last chunk with tokens came, in ns since send."""
        with_tokens = [since for since, count in zip(self.since, self.tokens, strict=True) if count != 0]
        return (with_tokens[0], with_tokens[-1]) if with_tokens else (None, None)

    def placed(self, arrival: int) -> tuple[list[int], list[int], list[int | None]]:
        """Positions, times and tokens of the chunks that have tokens: the role chunk of a chat has none.

        A chunk whose time is unusable is left out, and its position with it.
        """
        positions: list[int] = []
        times: list[int] = []
        tokens: list[int | None] = []
        position = 0
        for since, count in zip(self.since, self.tokens, strict=True):
            if count == 0:
                continue
            if since is not None:
                positions.append(position)
                times.append(arrival + since)
                tokens.append(count)
            position += 1
        return positions, times, tokens

    def untangle(self, total: int | None, values: Values) -> None:
        """Make the token counts those of each chunk's own choice, where several share a stream.

        The client takes differences of `usage.completion_tokens` from chunk to chunk, and vLLM counts that
        per choice; so the differences are summed again and taken per choice. Counts are believed only
        if they add up to the response's `total`; else they are unknown.
        """
        counts = [count for count in self.tokens if count is not None]
        if len(counts) < len(self.tokens):
            self.tokens = [None] * len(self.tokens)
            return
        for candidate in (counts, list(_per_choice(counts, self.choices))):
            if sum(candidate) == total and min(candidate, default=0) >= 0:
                self.tokens = list(candidate)
                return
        if counts:
            values.blank("tokens per choice cannot be told", len(counts))
        self.tokens = [None] * len(counts)

    def drop_negative(self, values: Values) -> None:
        for i, count in enumerate(self.tokens):
            if count is not None and count < 0:
                values.blank("tokens of a chunk not a number of tokens")
                self.tokens[i] = None


def _per_choice(counts: list[int], choices: list[int]) -> Iterator[int]:
    running = 0
    before: dict[int, int] = {}
    for count, choice in zip(counts, choices, strict=True):
        running += count
        yield running - before.get(choice, 0)
        before[choice] = running


def read_chunks(raw: object, end: int, values: Values) -> Chunks:
    """The chunks of a record; none can have come after `end`, in ns since send."""
    if not isinstance(raw, list):
        if raw is not None:
            values.blank("chunks_us_ntok not a list")
        return Chunks(listed=False)
    chunks = Chunks()
    last = 0
    for chunk in raw:
        # Nearly all are two plain integers in order, and files hold millions of them.
        if (
            type(chunk) is list
            and len(chunk) == 2
            and type(us := chunk[0]) is int
            and last <= (ns := us * MICROSECOND) <= end
            and type(count := chunk[1]) is int
            and 0 <= count < MAX_TOKENS
        ):
            last = ns
            chunks.since.append(ns)
            chunks.tokens.append(count)
            chunks.choices.append(0)
            continue
        since, tokens, choice = _checked(chunk, last, end, values)
        last = last if since is None else since
        chunks.since.append(since)
        chunks.tokens.append(tokens)
        chunks.choices.append(choice)
    return chunks


def _checked(chunk: object, last: int, end: int, values: Values) -> tuple[int | None, int | None, int]:
    us: Any = None
    count: Any = None
    choice: Any = None
    if isinstance(chunk, list) and 2 <= len(chunk) <= 3:
        us, count, choice = chunk if len(chunk) == 3 else (*chunk, 0)
    if type(choice) is not int or not 0 <= choice < MAX_TOKENS:
        values.blank("chunk not [microseconds, tokens, choice]")
        return None, None, 0
    since = None
    if not isinstance(us, (int, float)) or isinstance(us, bool) or not us >= 0:
        values.blank("chunk time not a duration")
    elif us > end or (ns := round(us * MICROSECOND)) > end:
        values.blank("chunk after the end of the response")
    elif ns < last:
        values.blank("chunk time goes back")
    else:
        since = ns
    if count is not None and (type(count) is not int or not -MAX_TOKENS < count < MAX_TOKENS):
        values.blank("tokens of a chunk not a number of tokens")
        count = None
    return since, count, choice
