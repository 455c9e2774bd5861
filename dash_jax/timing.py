"""Where the seconds of a step go."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator

import jax


class Clock:
    """Splits time into named phases.

    >>> clock = Clock()
    >>> with clock.phase("sampling"):
    ...     pass
    >>> clock.lap("other")
    >>> sorted(clock.seconds())
    ['seconds', 'seconds_other', 'seconds_sampling']
    """

    def __init__(self) -> None:
        self._phases: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Adds the time since the last lap to a phase. Device work counts where its result is waited for."""
        now = time.perf_counter()
        self._phases[phase] += now - self._last
        self._last = now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Ends with a lap of that name; in the trace of a profiler the block carries it too."""
        with jax.profiler.TraceAnnotation(name):
            yield
        self.lap(name)

    def seconds(self) -> dict[str, float]:
        """`seconds_<phase>` and their sum `seconds` since the last call, which begins anew."""
        phases = {f"seconds_{phase}": seconds for phase, seconds in self._phases.items()}
        self._phases.clear()
        return {"seconds": sum(phases.values()), **phases}
