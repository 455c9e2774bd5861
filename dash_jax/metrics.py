"""Numbers for the log and the evaluation table. Host side: Python floats and NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that one or more of k samples is correct, estimated without bias from n of them:

        1 - C(n - correct, k) / C(n, k)

    (Chen et al., arXiv 2107.03374, equation 1: k of the n samples drawn without replacement.)
    """
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(
            f"pass_at_k(n={n}, correct={correct}, k={k}): give 1 <= k <= n and 0 <= correct <= n"
        )
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float | None:
    """The mean of `pass_at_k` over problems, given as pairs (samples, correct samples).

    None where there is no such number: no problem, or one with fewer than k samples (the mean over
    the others would be that of another test set).
    """
    if not counts or any(n < k for n, _ in counts):
        return None
    return math.fsum(pass_at_k(n, correct, k) for n, correct in counts) / len(counts)


def confidence_interval(
    values: Sequence[float], *, seed: int, level: float = 0.95, resamples: int = 2000
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `values`, one value a problem.

    Problems are resampled, not single completions: those of one problem are not independent.
    One value alone gives an interval of no width, which says only that the spread is unknown.
    """
    if len(values) == 0:
        raise ValueError("confidence_interval of no values: give one value a problem")
    drawn = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    resampled_means = np.asarray(values, np.float64)[drawn].mean(axis=1)
    low, high = np.quantile(resampled_means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
