"""Where the seconds of a step go."""

from __future__ import annotations

import time


class Clock:
    """Splits the time since its creation into named phases.

    >>> clock = Clock(); clock.lap("sampling"); sorted(clock.seconds())
    ['seconds', 'seconds_sampling']
    """

    def __init__(self) -> None:
        self._phases: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Ends the phase that is named. Device work counts where its result is waited for."""
        now = time.perf_counter()
        self._phases[phase] = now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        phases = {f"seconds_{phase}": seconds for phase, seconds in self._phases.items()}
        return {"seconds": self._last - self._start, **phases}
