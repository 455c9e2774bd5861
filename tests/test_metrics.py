"""pass@k against enumeration and the bootstrap against the normal approximation."""

import itertools
import math

import numpy as np
import pytest

from dash_jax import metrics


def test_case_55_pass_at_k_by_hand():
    assert [metrics.pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]


def test_pass_at_k_equals_enumeration():
    for n in range(1, 7):
        for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
            draws = list(itertools.combinations(range(n), k))  # samples 0 .. correct - 1 are correct
            hits = sum(any(sample < correct for sample in draw) for draw in draws)
            assert metrics.pass_at_k(n, correct, k) == pytest.approx(hits / len(draws), abs=1e-12)


def test_pass_at_k_of_many_samples_is_finite():
    assert metrics.pass_at_k(100_000, 1, 1000) == pytest.approx(0.01, rel=1e-9)


@pytest.mark.parametrize(("n", "correct", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0), (0, 0, 1)])
def test_pass_at_k_refuses_what_has_no_meaning(n, correct, k):
    with pytest.raises(ValueError, match=f"n={n}, correct={correct}, k={k}"):
        metrics.pass_at_k(n, correct, k)


def test_case_55_mean_over_problems_and_omission():
    assert metrics.mean_pass_at_k([(4, 1), (4, 0), (2, 2)], 2) == pytest.approx(0.5)
    assert metrics.mean_pass_at_k([(4, 1), (3, 1)], 4) is None
    assert metrics.mean_pass_at_k([], 1) is None


def test_case_55_one_sample_has_an_interval():
    assert metrics.confidence_interval([0.25], seed=0) == (0.25, 0.25)


def test_confidence_interval_is_that_of_the_mean():
    values = np.random.default_rng(1).random(400) < 0.3
    low, high = metrics.confidence_interval(values.tolist(), seed=2)
    standard_error = values.std(ddof=1) / math.sqrt(400)
    assert low == pytest.approx(values.mean() - 1.96 * standard_error, abs=0.2 * standard_error)
    assert high == pytest.approx(values.mean() + 1.96 * standard_error, abs=0.2 * standard_error)


def test_confidence_interval_grows_with_its_level_and_follows_its_seed():
    values = [0.0, 0.3, 0.5, 1.0, 0.25]
    narrow = metrics.confidence_interval(values, seed=0, level=0.5)
    wide = metrics.confidence_interval(values, seed=0, level=0.99)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
    assert metrics.confidence_interval(values, seed=0, level=0.99) == wide
    with pytest.raises(ValueError, match="no values"):
        metrics.confidence_interval([], seed=0)
