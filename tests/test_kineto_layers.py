"""Which attention kernel says where a layer begins."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import numpy as np
import pytest

_once_a_layer = import_module("tailscope.collectors._kineto_layers")._once_a_layer

WRITER, FLASH, COMBINE, PREPARE = range(4)


def chosen(*steps: Sequence[int]) -> list[list[int]]:
    """Of each step's kernels, in order, the names that count and where they stand."""
    names = np.array([name for step in steps for name in step], np.int64)
    step = np.repeat(np.arange(len(steps)), [len(s) for s in steps])
    shuffled = np.random.default_rng(0).permutation(len(names))
    writes = np.array([True, False, False, False, False])
    found = _once_a_layer(np.arange(len(names))[shuffled], step[shuffled], names[shuffled], writes)
    where = np.sort(shuffled[found])
    starts = np.cumsum([0, *(len(s) for s in steps)])
    return [[int(w - starts[k]) for w in where if starts[k] <= w < starts[k + 1]] for k in range(len(steps))]


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        pytest.param([WRITER, FLASH, COMBINE] * 3, [0, 3, 6], id="writer"),
        # A long prefill attends to its past in parts, as many as it takes.
        pytest.param([WRITER, FLASH, FLASH, WRITER, FLASH, FLASH], [0, 3], id="several of one kind in a layer"),
        pytest.param([PREPARE, *[FLASH, COMBINE] * 3], [1, 3, 5], id="no writer"),
        pytest.param([FLASH, FLASH, COMBINE] * 3, [2, 5, 8], id="one of the names is uneven"),
        pytest.param([*[FLASH, COMBINE] * 3, FLASH, *[FLASH, COMBINE] * 6], [0, 2, 4, 6, 7, 9, 11, 13, 15, 17], id="one was lost"),
        pytest.param([FLASH, COMBINE], [], id="nothing repeats"),
        pytest.param([], [], id="none"),
    ],
)  # fmt: skip
def test_one_kernel_counts_in_each_layer(kernels: list[int], expected: list[int]) -> None:
    assert chosen(kernels) == [expected]


def test_each_step_has_its_own() -> None:
    """Prefill and decode attend with different kernels."""
    assert chosen([FLASH, FLASH], [COMBINE, COMBINE, COMBINE], [WRITER, FLASH]) == [[0, 1], [0, 1, 2], [0]]
