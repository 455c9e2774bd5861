"""Where the seconds of a step go."""

from __future__ import annotations

import collections
import time


class Clock:
    """Splits time into named phases.

    >>> clock = Clock()
    >>> clock.lap("sampling")
    >>> sorted(clock.seconds())
    ['seconds', 'seconds_sampling']
    """

    def __init__(self) -> None:
        self._phases: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Adds the time since the last lap to a phase. Device work counts where its result is waited for."""
        now = time.perf_counter()
        self._phases[phase] += now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """`seconds_<phase>` and their sum `seconds` since the last call, which begins anew."""
        phases = {f"seconds_{phase}": seconds for phase, seconds in self._phases.items()}
        self._phases.clear()
        return {"seconds": sum(phases.values()), **phases}
