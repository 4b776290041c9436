"""The API server before an engine's queue: one process whose requests take turns, so that many at once are all late."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Then = Callable[[float], None]


class ApiServer:
    """Serves what it has side by side, each as fast as the others: asyncio's tasks go on in turns.

    `seconds`: what a request takes alone; of n that came together each takes n times as long. `at`: has something
    done at an instant of the world.
    """

    def __init__(self, seconds: float, at: Callable[[float, Then], None]) -> None:
        self._seconds, self._at = seconds, at
        #: (service at which it is done, number, what then) of each request in work.
        self._open: list[tuple[float, int, Then]] = []
        #: Service each request has had that was there all the time, and until when that is counted.
        self._given = self._since = 0.0
        self._count = self._plans = 0

    def take(self, now: float, then: Then) -> None:
        """A request comes in; `then` is called at the instant it is through."""
        self._work(now)
        self._count += 1
        heapq.heappush(self._open, (self._given + self._seconds, self._count, then))
        self._plan(now)

    def _work(self, now: float) -> None:
        self._given = self._given + (now - self._since) / len(self._open) if self._open else 0.0
        self._since = now

    def _plan(self, now: float) -> None:
        self._plans += 1
        plan = self._plans
        due = now + max(self._open[0][0] - self._given, 0.0) * len(self._open)
        self._at(due, lambda time: self._through(time) if plan == self._plans else None)

    def _through(self, now: float) -> None:
        # By now the first is through, whatever rounding says.
        self._given, self._since = self._open[0][0], now
        through = []
        while self._open and self._open[0][0] <= self._given:
            through.append(heapq.heappop(self._open)[2])
        if self._open:
            self._plan(now)
        for then in through:
            then(now)
