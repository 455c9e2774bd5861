"""Group advantages and the gradient filter: hand-worked numbers, and a slow version to compare with."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_jax import advantages

NAN, INF = float("nan"), float("inf")
HALF_ROOT = math.sqrt(0.5)


def grouped(rewards, **options):
    return np.asarray(advantages.group_advantages(jnp.asarray(rewards, jnp.float32), **options))


def slow_advantages(rewards, scale_by_std, epsilon):
    """One group, in plain Python and float64."""
    finite = [r for r in rewards if math.isfinite(r)]
    if len(finite) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(finite) / len(finite)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in finite) / (len(finite) - 1))
    divisor = std + epsilon if scale_by_std else 1.0
    return [(r - mean) / divisor if math.isfinite(r) else 0.0 for r in rewards]


def test_reward_minus_group_mean():
    result = grouped([[1, 0, 0, 0], [2, 4, 6, 8]], scale_by_std=False)
    np.testing.assert_allclose(result, [[0.75, -0.25, -0.25, -0.25], [-3, -1, 1, 3]], rtol=1e-6)


def test_std_is_unbiased_and_epsilon_is_added():
    # Squared deviations 0.5625 + 3 * 0.0625 = 0.75, over n - 1 = 3: std 0.5.
    result = grouped([[1, 0, 0, 0]], scale_by_std=True)
    np.testing.assert_allclose(result, np.array([[0.75, -0.25, -0.25, -0.25]]) / 0.5001, rtol=1e-6)
    np.testing.assert_allclose(
        grouped([[0, 2]], scale_by_std=True, epsilon=1.0), [[-0.4142136, 0.4142136]], rtol=1e-6
    )


def test_groups_do_not_mix():
    together = grouped([[1, 0, 3], [50, 70, 10]], scale_by_std=True)
    np.testing.assert_array_equal(together[:1], grouped([[1, 0, 3]], scale_by_std=True))
    np.testing.assert_array_equal(together[1:], grouped([[50, 70, 10]], scale_by_std=True))


@pytest.mark.parametrize("scale_by_std", [True, False])
def test_case_1_group_of_one_has_no_advantage(scale_by_std):
    assert grouped([[1]], scale_by_std=scale_by_std) == 0.0


def test_case_2_statistics_go_over_finite_rewards():
    # The case states [-1, 0, 1] with the population std, 1. Ours is the unbiased one, as in the code
    # of DASH: sqrt((1 + 1) / (2 - 1)) = sqrt(2), so that the outer two get -+1 / sqrt(2) = -+0.7071.
    np.testing.assert_allclose(
        grouped([[1, NAN, 3]], scale_by_std=True, epsilon=1e-9), [[-HALF_ROOT, 0, HALF_ROOT]], rtol=1e-6
    )
    np.testing.assert_array_equal(grouped([[1, NAN, 3]], scale_by_std=False), [[-1, 0, 1]])
    np.testing.assert_array_equal(grouped([[INF, 2, -INF, 4]], scale_by_std=False), [[0, -1, 0, 1]])


@pytest.mark.parametrize("scale_by_std", [True, False])
def test_case_2_fewer_than_two_finite_rewards(scale_by_std):
    rewards = [[NAN, NAN, NAN], [NAN, 5, INF], [-INF, NAN, INF]]
    np.testing.assert_array_equal(grouped(rewards, scale_by_std=scale_by_std), np.zeros((3, 3)))


def test_case_3_one_success_in_a_group_stays_small():
    assert np.abs(grouped([[1, 0, 0, 0]], scale_by_std=True)).max() <= 10
    # The largest |A| there is: one against all, (n - 1) / sqrt(n).
    one_of_64 = np.eye(1, 64)
    assert np.abs(grouped(one_of_64, scale_by_std=True)).max() == pytest.approx(63 / 8, rel=1e-2)


def test_case_6_constant_rewards_are_dropped_whatever_their_value():
    result = grouped([[0.4, 0.4, 0.4, 0.4], [0, 1, 0, 1]], scale_by_std=True)
    np.testing.assert_array_equal(
        np.asarray(advantages.carries_signal(jnp.asarray(result), 0.0)), [[False] * 4, [True] * 4]
    )


@pytest.mark.parametrize("scale_by_std", [True, False])
@pytest.mark.parametrize("group_size", [2, 3, 6, 7, 10, 49])
def test_equal_rewards_are_exactly_zero(group_size, scale_by_std):
    values = np.array([0.1, 0.3, 0.7, -0.1, 1e-7, 1e6 + 0.1])  # the mean of seven times 0.1 is not 0.1
    rewards = np.broadcast_to(values[:, None], (6, group_size))
    np.testing.assert_array_equal(grouped(rewards, scale_by_std=scale_by_std), 0.0)
    with_a_failure = np.concatenate([rewards, np.full((6, 1), NAN)], axis=1)
    np.testing.assert_array_equal(grouped(with_a_failure, scale_by_std=scale_by_std), 0.0)


def test_numpy_and_jax_arrays_jit_and_dtype():
    rewards = np.array([[1.0, NAN, 3.0, 0.5], [0.0, 0.0, 1.0, 0.0]])
    eager = advantages.group_advantages(rewards, scale_by_std=True)
    jitted = jax.jit(lambda r: advantages.group_advantages(r, scale_by_std=True))(rewards.astype(np.float32))
    np.testing.assert_allclose(np.asarray(jitted), np.asarray(eager), rtol=1e-6)
    half = advantages.group_advantages(jnp.asarray(rewards, jnp.bfloat16), scale_by_std=True)
    assert eager.dtype == half.dtype == jnp.float32


rewards_of_two_groups = st.sampled_from([1, 2, 3, 7]).flatmap(  # few shapes: JAX compiles for each
    lambda group_size: st.lists(
        st.lists(
            st.one_of(st.sampled_from([0.0, 1.0, NAN, INF, -INF]), st.floats(-10, 10, width=32)),
            min_size=group_size,
            max_size=group_size,
        ),
        min_size=2,
        max_size=2,
    )
)


@settings(max_examples=60, deadline=None)
@given(rewards_of_two_groups, st.booleans(), st.sampled_from([1e-4, 0.1]))
def test_equals_the_slow_version(rewards, scale_by_std, epsilon):
    expected = [slow_advantages(group, scale_by_std, epsilon) for group in rewards]
    result = grouped(rewards, scale_by_std=scale_by_std, epsilon=epsilon)
    # The division by std + epsilon enlarges the rounding of float32, 1e-6 on rewards up to 10.
    tolerance = 2e-6 / epsilon if scale_by_std else 1e-5
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=tolerance)
    # Exact zeros are promised for equal rewards and for what is not finite.
    for got, group in zip(result, rewards, strict=True):
        finite = {r for r in group if math.isfinite(r)}
        assert not any(got[[len(finite) == 1 or not math.isfinite(r) for r in group]])


def test_signal_is_strictly_above_the_threshold():
    values = np.array([[-0.5, -0.25, 0.0], [0.25, 0.26, NAN]], np.float32)
    np.testing.assert_array_equal(
        np.asarray(advantages.carries_signal(values, 0.25)), [[True, False, False], [False, True, False]]
    )
    np.testing.assert_array_equal(
        np.asarray(advantages.carries_signal(values, 0.0)), [[True, True, False], [True, True, False]]
    )
