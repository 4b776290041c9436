"""The API server before an engine: alone a request is quick, among many it is as late as all."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import pytest

from tailscope.sim.api_server import ApiServer


def through(arrivals: Sequence[float], seconds: float) -> list[float]:
    """When each of the requests is through."""
    heap: list[tuple[float, int, Callable[[float], None]]] = []

    def at(time: float, what: Callable[[float], None]) -> None:
        heapq.heappush(heap, (time, next(numbers), what))

    numbers = iter(range(1_000_000))
    done: dict[int, float] = {}
    front = ApiServer(seconds, at)
    for i, arrival in enumerate(arrivals):
        at(arrival, lambda now, i=i: front.take(now, lambda then, i=i: done.__setitem__(i, then)))  # type: ignore[misc]
    while heap:
        now, _, what = heapq.heappop(heap)
        what(now)
    assert list(done) == sorted(done)
    return [done[i] for i in range(len(arrivals))]


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        ([1.0], [1.1]),
        ([1.0, 2.0], [1.1, 2.1]),
        ([1.0, 1.0, 1.0], [1.3, 1.3, 1.3]),
        # The second comes when half of the first is done: they share until that one is through.
        ([1.0, 1.05], [1.15, 1.2]),
        ([1.0, 1.05, 5.0], [1.15, 1.2, 5.1]),
    ],
)
def test_shared(arrivals: list[float], expected: list[float]) -> None:
    assert through(arrivals, 0.1) == pytest.approx(expected)


def test_free() -> None:
    assert through([1.0, 1.0, 2.0], 0.0) == [1.0, 1.0, 2.0]
