"""What an engine's step costs: a robust, non-negative model of its duration from what was in the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailscope import stats
from tailscope.stats import Floats

#: Steps used for a fit. More do not change seven coefficients.
FIT_STEPS = 40_000
MIN_FIT_STEPS = 30
#: An engine that started again may be another one. From so many steps on its own are enough to tell what they cost.
EPOCH_STEPS = 300
ROUNDS = 25

#: A model that is off by more than half of most steps knows nothing.
USABLE_ERROR = 0.5
#: Steps shorter than this share of the usual one weigh no more than it: what remains of a step after all that is
#: known otherwise may be nothing.
SHORT = 0.5


@dataclass(frozen=True)
class CostModel:
    """Seconds a step takes: base (what it costs without prefill) + prefill.

    `spread` is the factor by which 95 % of the fitted steps stay below the model's multiple; a longer step
    has a cause the model does not know. `error` is the median error, as a share of the measured or the modelled
    duration, whichever is longer; `explained` the share of all step time the model accounts for, `steps` how many
    were fitted.
    """

    base: Floats
    prefill: Floats
    spread: float
    error: float
    explained: float
    steps: int

    @property
    def usable(self) -> bool:
        return self.error <= USABLE_ERROR

    def split(
        self, base_features: Floats, prefill_features: Floats, tile: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Each step's measured duration as (base, prefill, unexplained), summing to it exactly.

        Inside the model's usual spread the step's noise is shared in proportion; what lies beyond is unexplained, and
        all of it where the model fits badly.
        """
        if not self.usable:
            return np.zeros(len(tile)), np.zeros(len(tile)), np.maximum(tile, 0.0)
        base, prefill = base_features @ self.base, prefill_features @ self.prefill
        modelled = base + prefill
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.where(modelled > 0, np.minimum(tile / modelled, self.spread), 0.0)
        base, prefill = base * scale, prefill * scale
        return base, prefill, np.maximum(tile - base - prefill, 0.0)

    def prefill_bounds(
        self, base_features: Floats, prefill_features: Floats, tile: Floats
    ) -> tuple[Floats, Floats]:
        """The least and the most of each step that its prefill can be: no more of the noise than its model's error, or all
        that is beyond what the rest of the batch takes."""
        if not self.usable:
            return np.zeros(len(tile)), np.where(prefill_features[:, 1] > 0, tile, 0.0)
        base, prefill = base_features @ self.base, prefill_features @ self.prefill
        share = np.minimum(tile / np.maximum(base + prefill, 1e-12), 1.0)
        low = prefill * share * (1 - self.error)
        high = np.where(prefill > 0, np.maximum(tile - base * share * (1 - self.error), prefill * share), 0.0)
        return low, np.minimum(high, tile)


@dataclass(frozen=True)
class CostModels:
    """What an engine's steps cost: a model for each epoch of its configuration that has steps enough, and one of all steps
    for the others. `of_step`: the index of each step's model."""

    models: tuple[CostModel, ...]
    of_step: NDArray[np.intp]

    @property
    def usual(self) -> CostModel:
        """The model of most steps."""
        return self.models[int(np.argmax(np.bincount(self.of_step, minlength=len(self.models))))]

    @property
    def usable(self) -> bool:
        return self.usual.usable

    @property
    def usable_steps(self) -> NDArray[np.bool_]:
        """Of each step, whether its model knows what batches take."""
        return np.array([model.usable for model in self.models])[self.of_step]

    @property
    def error(self) -> float:
        return self._mean([model.error for model in self.models])

    @property
    def explained(self) -> float:
        return self._mean([model.explained for model in self.models])

    def _mean(self, values: list[float]) -> float:
        """Over all steps, each with its model's value."""
        return float(np.bincount(self.of_step, minlength=len(values)) @ values / max(len(self.of_step), 1))

    def split(
        self, base_features: Floats, prefill_features: Floats, tile: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """See `CostModel.split`."""
        parts = tuple(np.zeros(len(tile)) for _ in range(3))
        for number, model in enumerate(self.models):
            mine = self.of_step == number
            for part, values in zip(
                parts, model.split(base_features[mine], prefill_features[mine], tile[mine]), strict=True
            ):
                part[mine] = values
        return parts[0], parts[1], parts[2]

    def prefill_bounds(
        self, base_features: Floats, prefill_features: Floats, tile: Floats
    ) -> tuple[Floats, Floats]:
        """See `CostModel.prefill_bounds`."""
        low, high = np.zeros(len(tile)), np.zeros(len(tile))
        for number, model in enumerate(self.models):
            mine = self.of_step == number
            low[mine], high[mine] = model.prefill_bounds(
                base_features[mine], prefill_features[mine], tile[mine]
            )
        return low, high

    def prefill_seconds(self, features: Floats) -> Floats:
        """Seconds that each step's prefill takes by its model."""
        coefficients = np.array([model.prefill for model in self.models])
        return np.asarray((features * coefficients[self.of_step]).sum(axis=1))


def fit_epochs(
    base_features: Floats, prefill_features: Floats, tile: Floats, epoch: Floats
) -> CostModels | None:
    """A model for each epoch of at least EPOCH_STEPS steps, numbered in `epoch`, by `fit`; one of all steps for the rest."""
    of_step, models = np.full(len(tile), -1, np.intp), list[CostModel]()
    numbers, counts = np.unique(epoch, return_counts=True)
    for number in numbers[counts >= EPOCH_STEPS] if len(numbers) > 1 else ():
        mine = epoch == number
        model = fit(base_features[mine], prefill_features[mine], tile[mine])
        if model is not None:
            of_step[mine] = len(models)
            models.append(model)
    if (of_step < 0).any():
        model = fit(base_features, prefill_features, tile)
        if model is None:
            return None
        of_step[of_step < 0] = len(models)
        models.append(model)
    return CostModels(tuple(models), of_step)


def fit(base_features: Floats, prefill_features: Floats, tile: Floats) -> CostModel | None:
    """Fit by `stats.robust_fit`.

    Residuals are scaled by the root of the duration, so that long steps count, but not as their square. The second
    column of `prefill_features` is 0 in a step without prefill. None below MIN_FIT_STEPS steps.
    """
    usable = np.flatnonzero(tile > 0)
    if len(usable) < MIN_FIT_STEPS:
        return None
    has_prefill = prefill_features[usable, 1] > 0
    chosen = np.concatenate([_thinned(usable[has_prefill]), _thinned(usable[~has_prefill])])
    features = np.hstack([base_features[chosen], prefill_features[chosen]])
    y = tile[chosen]
    root = 1 / np.sqrt(np.maximum(y, SHORT * np.median(y)))
    coefficients = stats.robust_fit(features, y, root, ROUNDS)
    modelled = np.maximum(features @ coefficients, 1e-9)
    ratio = y / modelled
    split = base_features.shape[1]
    spread = float(np.clip(np.quantile(ratio, 0.95), 1.0, 3.0))
    return CostModel(
        base=coefficients[:split],
        prefill=coefficients[split:],
        spread=spread,
        error=float(np.median(np.abs(y - modelled) / np.maximum(y, modelled))),
        explained=float(np.minimum(y, modelled * spread).sum() / y.sum()),
        steps=len(chosen),
    )


def _thinned(index: NDArray[np.int64]) -> NDArray[np.int64]:
    """At most half of FIT_STEPS of them, evenly spaced, so that a fit is repeatable."""
    stride = max(1, -(-len(index) // (FIT_STEPS // 2)))
    return index[::stride]
