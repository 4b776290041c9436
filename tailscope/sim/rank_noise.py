"""What chance does to the ranks: by chunks of steps, each from a seed of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tailscope.sim.experts import Experts
from tailscope.sim.outcome import Floats
from tailscope.sim.scenario import Ranks

#: Steps whose random numbers are drawn together.
CHUNK = 256
#: What seeds begin with, so that chunks are drawn from a stream of their own.
WORK_STREAM = 1
#: Least share of `straggle_s` by which a rank leaves a collective after the transfer.
LEAST_STRAGGLE = 0.1


@dataclass(frozen=True)
class Noise:
    """What chance does in a chunk of steps; all but the first have a leading axis of steps."""

    number: int
    #: Share of a step's cost that each piece of work takes: layers × 2 × ranks.
    work: Floats
    #: What the experts of each rank get, over an even share: layers × ranks; None without experts.
    load: Floats | None
    #: How late ranks leave each collective, s: layers × places × ranks.
    straggle: Floats
    #: How late they begin each piece of work because of that: layers × 2 × ranks.
    before: Floats
    #: How late the last of an engine leaves its own collective: layers × engines.
    engine_late: Floats
    #: How late the last rank leaves the step.
    last_late: Floats
    #: By fault: below its `often` it applies.
    chance: Floats


def draw(settings: Ranks, experts: Experts, places: int, engines: int, faults: int, number: int) -> Noise:
    """The random numbers of steps from number × CHUNK on, whoever asks and when."""
    ranks = experts.ranks
    rng = np.random.default_rng([WORK_STREAM, *experts.seed, number])
    of_layers = (CHUNK, settings.layers)
    load = None
    work = np.exp(settings.spread * rng.standard_normal((*of_layers, 2, ranks)))
    work[:, :, 0] *= settings.attention_share / settings.layers
    work[:, :, 1] *= (1 - settings.attention_share) / settings.layers
    if experts.moe:
        load = experts.load(number * CHUNK, rng.standard_normal((*of_layers, ranks)))
        work[:, :, 1] *= load if settings.follow == 1.0 else 1.0 + settings.follow * (load - 1.0)
    straggle = rng.uniform(LEAST_STRAGGLE, 1.0, (*of_layers, places, ranks))
    straggle *= settings.straggle_s
    if settings.leave_bias_s:
        straggle[..., : len(settings.leave_bias_s)] += settings.leave_bias_s
    before = np.zeros((*of_layers, 2, ranks))
    before[:, :, 1] = straggle[:, :, -2]
    before[:, 1:, 0] = straggle[:, :-1, -1]
    by_engine = straggle[:, :, 0].reshape(*of_layers, engines, ranks // engines)
    return Noise(
        number,
        work,
        load,
        straggle,
        before,
        by_engine.max(axis=-1),
        np.asarray(straggle[:, -1, -1].max(axis=-1)),
        rng.random((CHUNK, faults)),
    )
