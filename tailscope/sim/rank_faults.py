"""What a fault does to a step's ranks: factors of work and transfers, and time in which nothing is launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tailscope.sim.outcome import Floats
from tailscope.sim.scenario import Fault

KINDS = ("slow-rank", "slow-link", "host-slow")


class Slow(NamedTuple):
    """What applies in a step. None: as ever.

    Factors of work (`work`: layers × 2 × ranks), of the transfers of all (`everyone`: layers × 2), of the engines' own
    (`engines`: layers × engines), of what each rank sends to each (`pairs`: layers × 2 × senders × receivers). Seconds
    before each piece of work in which its host launches nothing (layers × 2 × ranks): `idle` by fault of a rank, `held`
    on all ranks alike.
    """

    work: Floats | None = None
    everyone: Floats | None = None
    engines: Floats | None = None
    pairs: Floats | None = None
    idle: Floats | None = None
    held: Floats | None = None

    @property
    def has_ranks(self) -> bool:
        return self.work is not None or self.idle is not None

    @property
    def has_links(self) -> bool:
        return self.everyone is not None or self.pairs is not None

    def without_ranks(self) -> Slow:
        return self._replace(work=None, idle=None)

    def without_links(self) -> Slow:
        return self._replace(everyone=None, engines=None, pairs=None)

    def both(self, other: Slow) -> Slow:
        return Slow(
            product(self.work, other.work),
            product(self.everyone, other.everyone),
            product(self.engines, other.engines),
            product(self.pairs, other.pairs),
            total(self.idle, other.idle),
            total(self.held, other.held),
        )


NOTHING_SLOW = Slow()


def product(one: Floats | None, other: Floats | None) -> Floats | None:
    if one is None or other is None:
        return other if one is None else one
    return one * other


def total(one: Floats | None, other: Floats | None) -> Floats | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


@dataclass(frozen=True)
class Shape:
    """Of a world's ranks what a fault needs to know. `phases`: of the two pieces of work of a layer; `meetings`: of the
    two collectives of all ranks."""

    layers: int
    ranks: int
    tp: int
    phases: Sequence[str | None]
    meetings: Sequence[str]
    all_to_all: bool

    def rows(self, fault: Fault) -> list[int]:
        return list(fault.layers) if fault.layers else list(range(self.layers))

    def slowed_by(self, fault: Fault) -> Slow:
        """What a fault does to every step in which it applies. Of host-slow: where it strikes, as `struck` has it."""
        return {"slow-rank": self._slow_rank, "slow-link": self._slow_link}.get(fault.kind, self._struck)(
            fault
        )

    def _pieces(self, fault: Fault, usual: float, value: float) -> Floats:
        """`value` for the pieces of work of a fault's rank, phase and layers, `usual` for the others."""
        pieces = np.full((self.layers, 2, self.ranks), usual)
        for column, phase in enumerate(self.phases):
            if fault.phase in (None, phase):
                pieces[self.rows(fault), column, slice(None) if fault.all_ranks else fault.rank] = value
        return pieces

    def _slow_rank(self, fault: Fault) -> Slow:
        return Slow(work=self._pieces(fault, 1.0, fault.factor))

    def _struck(self, fault: Fault) -> Slow:
        """A share of one second for each piece of work, so that those of a rank make a second."""
        pieces = self._pieces(fault, 0.0, 1.0)
        return _waits(fault, pieces / pieces.sum(axis=(0, 1)).max())

    def _slow_link(self, fault: Fault) -> Slow:
        everyone = np.ones((self.layers, 2))
        engines = np.ones((self.layers, self.ranks // self.tp))
        rows = self.rows(fault)
        for column, phase in enumerate(self.meetings):
            if fault.phase in (None, phase):
                everyone[rows, column] = fault.factor
        if fault.phase in (None, "collective"):
            engines[rows, fault.rank // self.tp] = fault.factor
        if not self.all_to_all:
            return Slow(everyone=everyone, engines=engines)
        pairs = np.ones((self.layers, 2, self.ranks, self.ranks))
        peers: int | slice = slice(None) if fault.peer is None else fault.peer
        place = (fault.rank, peers) if fault.side == "source" else (peers, fault.rank)
        pairs[:, :, *place] = everyone[:, :, None] if fault.peer is None else everyone
        # What a rank has for itself is not sent.
        pairs[:, :, range(self.ranks), range(self.ranks)] = 1.0
        return Slow(engines=engines, pairs=pairs)

    def pause(self, fault: Fault, number: int) -> Slow:
        """The pause `number` of a host: before one piece of work, another each time."""
        rows = self.rows(fault)
        column = self.phases.index(fault.phase) if fault.phase else number // len(rows) % 2
        pieces = np.zeros((self.layers, 2, self.ranks))
        pieces[rows[number % len(rows)], column, slice(None) if fault.all_ranks else fault.rank] = (
            fault.length_s
        )
        return _waits(fault, pieces)


def _waits(fault: Fault, seconds: Floats) -> Slow:
    return Slow(held=seconds) if fault.all_ranks else Slow(idle=seconds)
