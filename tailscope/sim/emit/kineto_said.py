"""What the events of a rank's profile say: shapes, c10d's metadata, and the columns of `rank_events` that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import orjson

from tailscope.sim.emit.kineto_forms import CALLS, NCCL
from tailscope.sim.emit.kineto_profile import Profile, Said
from tailscope.sim.outcome import Ints
from tailscope.sim.rank_places import ALL_TO_ALL, Place
from tailscope.sim.rank_transfers import HIDDEN

#: Width of an attention head: for shapes.
HEAD = 128
#: A batch's tokens, or in an all-to-all the rows to or from each rank.
Rows = int | tuple[int, ...]


class Saying:
    """Codes of what the events of a profile say.

    `tokens`: of the engine's batch; `part`: of the largest, to which those of all are padded, for each rank; both by step.
    `sent`, `received`: in an all-to-all the rows that this rank sends to each and gets from each, steps × layers × ranks.
    """

    def __init__(self, profile: Profile, tokens: Ints, part: Ints, sent: Ints, received: Ints) -> None:
        self.profile, self.world = profile, profile.world
        self.tokens, self.part, self.sent, self.received = tokens, part, sent, received

    def by_tokens(self, what: Callable[..., Said], *of: Any) -> Ints:
        """Codes of what the events of each step say, which differs by the batch's tokens alone."""
        codes = [
            self.profile.said.code((what.__name__, *of, *pair), partial(what, *of, *pair))
            for pair in zip(self.tokens.tolist(), self.part.tolist(), strict=True)
        ]
        return np.array(codes, np.int64)[:, None]

    def told(self, what: Callable[..., Said], place: Place) -> Ints:
        """Codes of what the events of a collective say: in an all-to-all each has rows of its own."""
        if place.kind != ALL_TO_ALL:
            return self.by_tokens(what, place)
        # What came for the experts goes back from them.
        rows = (self.sent, self.received) if place.phase == "dispatch" else (self.received, self.sent)
        given, got = (values.reshape(-1, values.shape[-1]).tolist() for values in rows)
        codes = [
            self.profile.said.code((what.__name__, place, *pair), partial(what, place, *pair))
            for pair in zip(map(tuple, given), map(tuple, got), strict=True)
        ]
        return np.array(codes, np.int64).reshape(self.sent.shape[:2])

    def _elements(self, place: Place, tokens: Rows, part: Rows) -> tuple[int, int]:
        """Elements that a rank gives into a collective and gets out of it."""
        if isinstance(tokens, tuple) or isinstance(part, tuple):
            return sum(_listed(tokens)) * HIDDEN, sum(_listed(part)) * HIDDEN
        if place.kind == "all_reduce":
            return tokens * HIDDEN, tokens * HIDDEN
        whole = part * self.world.ranks
        return (
            (part * HIDDEN, whole * HIDDEN) if place.kind == "all_gather" else (whole * HIDDEN, part * HIDDEN)
        )

    def op(self, place: Place, after: str, tokens: int, part: int) -> Said:
        if after == "attention":
            shape = [tokens, max(HIDDEN // HEAD // self.world.tp, 1), HEAD]
            return shaped([shape, shape, shape], ["float"] * 3)
        rows = part * self.world.ranks if after == "expert" else tokens
        return shaped([[rows, HIDDEN], [rows, HIDDEN]], ["float", "float"])

    def call(self, place: Place, tokens: Rows, part: Rows) -> Said:
        given, got = (n // HIDDEN for n in self._elements(place, tokens, part))
        if place.kind == ALL_TO_ALL:
            # alltoall_base_(output, input, group, output_split_sizes, input_split_sizes, async, timeout)
            splits = [str(list(_listed(rows))) for rows in (part, tokens)]
            said = shaped(
                [[got, HIDDEN], [given, HIDDEN], [], [], [], [], []],
                ["float", "float", "", "ScalarList", "ScalarList", "Scalar", "Scalar"],
            )
            return Said({**said.args, "Concrete Inputs": ["", "", "", *splits, "True", "-1"]}, said.columns)
        if place.kind == "all_reduce":
            return shaped([[[given, HIDDEN]], [], []], ["TensorList", "", ""])
        return shaped([[got, HIDDEN], [given, HIDDEN], []], ["float", "float", ""])

    def vllm(self, place: Place, tokens: int, part: int) -> Said:
        given, _ = self._elements(place, tokens, part)
        return shaped([[given // HIDDEN, HIDDEN], []], ["c10::BFloat16", ""])

    def gloo(self, place: Place, tokens: Rows, part: Rows) -> Said:
        given, got = self._elements(place, tokens, part)
        said = shaped([[given // HIDDEN, HIDDEN]], ["float"])
        size = 4 * given
        both: dict[str, Any] = {"bytes_in": size, "bytes_out": size if place.kind == "all_reduce" else None}
        if place.kind == ALL_TO_ALL:
            both |= {"bytes_out": 4 * got, **_splits(tokens, part)}
        return Said(said.args, {**said.columns, **both, "collective": place.kind, "dtype": "float"})

    def c10d(self, place: Place, tokens: Rows, part: Rows) -> Said:
        """c10d's metadata, as on the call and on its kernel."""
        given, got = self._elements(place, tokens, part)
        return Said(
            {
                "Collective name": CALLS[place.kind][2],
                "In msg nelems": given,
                "Out msg nelems": got,
                "Group size": self._group_size(place.everyone),
                "dtype": "BFloat16",
                "In split size": str(list(_listed(tokens))),
                "Out split size": str(list(_listed(part))),
                **group_args(self.profile, self.profile.group(place.everyone)),
            }
        )

    def _group_size(self, everyone: bool) -> int:
        return self.world.ranks if everyone else self.world.tp

    def nccl(self, place: Place, tokens: Rows, part: Rows) -> Said:
        told = self.c10d(place, tokens, part).args
        return Said(
            {"device": 0, "context": 1, "stream": NCCL, **told},
            {
                "collective": place.kind,
                "group": told["Process Group Name"],
                "group_size": told["Group size"],
                "bytes_in": 2 * told["In msg nelems"],
                "bytes_out": 2 * told["Out msg nelems"],
                "dtype": told["dtype"],
                **(_splits(tokens, part) if place.kind == ALL_TO_ALL else {}),
            },
        )

    def runs(self, stream: int, collective: str | None = None) -> Ints:
        """What a kernel says that c10d tells nothing of."""
        columns = {"collective": collective} if collective else {}
        where = partial(Said, {"device": 0, "context": 1, "stream": stream}, columns)
        return np.array(self.profile.said.code((stream, collective), where))


def group_args(profile: Profile, name: str) -> dict[str, Any]:
    """c10d's metadata of a process group."""
    return {
        "Process Group Name": name,
        "Process Group Description": "undefined",
        "Process Group Ranks": str(profile.groups()[name]),
    }


def _listed(rows: Rows) -> tuple[int, ...]:
    return rows if isinstance(rows, tuple) else ()


def _splits(given: Rows, got: Rows) -> dict[str, Any]:
    """Columns of an exchange that c10d's splits tell."""
    return {
        "in_split": list(_listed(given)),
        "out_split": list(_listed(got)),
        "tokens": sum(_listed(got)),
    }


def shaped(dims: list[Any], types: list[str]) -> Said:
    return Said({"Input type": types, "Input Dims": dims}, {"input_dims": orjson.dumps(dims).decode()})
