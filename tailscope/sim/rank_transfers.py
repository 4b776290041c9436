"""How long the transfers of a step take, by the bytes of its messages, and who sends how much to whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tailscope.sim.outcome import Floats, Ints
from tailscope.sim.rank_faults import Slow
from tailscope.sim.scenario import Ranks

#: Width of the model, and bytes of an element: for sizes of messages.
HIDDEN, ELEMENT = 4_096, 2
ROW = float(HIDDEN * ELEMENT)


class Transfers:
    """Of an instance of `engines`; `moe`: with experts, to which an `all_to_all` takes tokens if there is one."""

    def __init__(self, settings: Ranks, engines: int, *, moe: bool, all_to_all: bool) -> None:
        self.settings, self.engines, self.tp = settings, engines, settings.tensor_parallel
        self.moe, self.all_to_all = moe, all_to_all
        one = np.full((settings.layers, 2), settings.transfer_s)
        self._latency = one[..., None] if all_to_all else one

    def seconds(
        self, tokens: Sequence[int], load: Floats | None, slow: Slow
    ) -> tuple[Floats, float | Floats]:
        """Of a step's transfers: of all ranks (layers × 2, in an all-to-all × ranks), of engines (one, or layers × engines).

        `tokens`: of each engine's batch; `load`: of the experts of each rank, layers × ranks.
        """
        everyone, own = self._latency, self.settings.transfer_s
        engines: float | Floats = own
        if self.settings.bandwidth_gb_s:
            of_all, of_engines = self._bytes(np.array(tokens, np.int64), load)
            second = self.settings.bandwidth_gb_s * 1e9
            everyone, engines = everyone + of_all / second, own + of_engines / second
        if slow.everyone is not None:
            everyone = everyone * slow.everyone
        return everyone, engines if slow.engines is None else engines * slow.engines

    def _bytes(self, tokens: Ints, load: Floats | None) -> tuple[Floats, Floats]:
        """Bytes of a step's messages, as `seconds` has their times."""
        if len(tokens) != self.engines:
            raise ValueError(
                f"where sizes count, a step must tell the tokens of {self.engines} engines, not of {len(tokens)}"
            )
        layers = self.settings.layers
        of_engines = np.broadcast_to(tokens * ROW, (layers, self.engines))
        if not self.moe:
            return np.full((layers, 2), tokens[0] * ROW), of_engines
        if self.all_to_all:
            assert load is not None
            rows = self.exchanged(tokens, load)
            return np.stack([rows.sum(axis=-2), rows.sum(axis=-1)], axis=1) * ROW, of_engines
        # Batches are padded to the largest.
        whole = -(-int(tokens.max()) // self.tp) * self.engines * self.tp
        return np.full((layers, 2), whole * ROW), of_engines

    def exchanged(self, tokens: Ints, load: Floats) -> Ints:
        """Rows that each rank sends to the experts of each: … × layers × senders × receivers.

        `tokens`: of the engines' batches (… × engines), which their ranks share; `load`: … × layers × ranks.
        """
        of_ranks = np.repeat(-(-tokens // self.tp), self.tp, axis=-1) * self.settings.topk
        share = load / load.sum(axis=-1, keepdims=True)
        if self.settings.exact_rows:
            # What is rounded off of one sender's rows is in the next one's, so that a rank's are right to one row.
            up_to = np.cumsum(of_ranks, axis=-1)[..., None, :, None] * share[..., None, :]
            return np.asarray(np.diff(np.rint(up_to), axis=-2, prepend=0.0), np.int64)
        return np.asarray(np.rint(of_ranks[..., None, :, None] * share[..., None, :]), np.int64)
