"""What a user is told instead of a traceback."""

from __future__ import annotations


class TailscopeError(Exception):
    """One sentence for a person, and the exit status that goes with it."""

    exit_code = 2


class UsageError(TailscopeError):
    """The call itself cannot be carried out: a flag, a path or a configuration key is wrong."""


class BadInput(TailscopeError):
    """A file cannot be read as what it claims to be.

    `where` names the place inside the file (row, key, byte), `todo` what the reader can do about it.
    """

    def __init__(self, what: str, *, path: str = "", where: str = "", todo: str = "") -> None:
        self.what, self.path, self.where, self.todo = what, path, where, todo
        place = ", ".join(part for part in (path, where) if part)
        super().__init__(": ".join(part for part in (place, what) if part) + (f". {todo}" if todo else ""))


class QueryError(TailscopeError):
    """A statement given to `query` is not allowed, not valid, or ran out of time or memory."""
