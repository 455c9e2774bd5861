"""Losses: hand-worked numbers, and values and gradients of a slow version with its own arithmetic."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_jax import losses

B, T = 3, 5
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
LOSSES = ("policy_gradient", "clipped_surrogate", "k1", "k2", "k3")


def f32(values):
    return jnp.asarray(values, jnp.float32)


def weights_of(lengths, counted=None, aggregation="token_mean", max_length=T):
    counted = np.ones(len(lengths), bool) if counted is None else np.asarray(counted)
    return losses.row_weights(
        np.asarray(lengths, np.int32), counted, aggregation=aggregation, max_length=max_length
    )


def mask_of(lengths, width=T):
    return losses.completion_mask(jnp.asarray(lengths, jnp.int32), width)


def evaluate(name, logprobs, other, advantages, mask, weights):
    """One call for all losses. `other` is old_logprobs or reference_logprobs."""
    if name == "policy_gradient":
        return losses.policy_gradient(logprobs, advantages, mask, weights=weights)
    if name == "clipped_surrogate":
        return losses.clipped_surrogate(
            logprobs, other, advantages, mask, weights=weights, clip_low=0.2, clip_high=0.3
        )
    return losses.kl_penalty(logprobs, other, mask, weights=weights, estimator=name)


@functools.cache
def compiled(name):
    return jax.jit(jax.value_and_grad(functools.partial(evaluate, name), has_aux=True))


def slow_token_loss(name, logprob, other, advantage):
    if name == "policy_gradient":
        return -advantage * logprob
    ratio = math.exp(logprob - other)
    if name == "clipped_surrogate":
        return -min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
    return {
        "k1": logprob - other,
        "k2": (logprob - other) ** 2 / 2,
        "k3": 1 / ratio - 1 + math.log(ratio),
    }[name]


def slow_loss_and_gradient(name, logprobs, other, advantages, lengths, weights):
    """Loops, float64, and gradients by central differences: no formula is shared with the code."""
    total, gradient, step = 0.0, np.zeros(logprobs.shape), 1e-6
    for i in range(len(lengths)):
        for t in range(lengths[i]):
            at = functools.partial(
                slow_token_loss, name, other=float(other[i, t]), advantage=float(advantages[i])
            )
            x = float(logprobs[i, t])
            total += weights[i] * at(x)
            gradient[i, t] = weights[i] * (at(x + step) - at(x - step)) / (2 * step)
    return total, gradient


def slow_weights(lengths, counted, aggregation, max_length):
    rows = [int(n) for n, c in zip(lengths, counted, strict=True) if c and n]
    weights = []
    for n, c in zip(lengths, counted, strict=True):
        if not (c and n):
            weights.append(0.0)
        elif aggregation == "token_mean":
            weights.append(1 / sum(rows))
        elif aggregation == "sequence_mean":
            weights.append(1 / len(rows) / int(n))
        else:
            weights.append(1 / len(rows) / max_length)
    return np.array(weights)


def random_batch(seed):
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(1.0, (B, T))
    return logprobs, logprobs + rng.normal(0, 0.4, (B, T)), rng.normal(size=B)


def assert_same(result, expected, rtol=1e-6):
    """Losses, aux and gradients of two calls of `compiled`."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-7), result, expected)


# Values and gradients


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, T), min_size=B, max_size=B),
    st.lists(st.booleans(), min_size=B, max_size=B),
    st.sampled_from(AGGREGATIONS),
)
def test_values_and_gradients_equal_the_slow_version(seed, lengths, counted, aggregation):
    logprobs, other, advantages = random_batch(seed)
    expected_weights = slow_weights(lengths, counted, aggregation, max_length=T)
    weights = weights_of(lengths, counted, aggregation)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-6)
    for name in LOSSES:
        (value, _), gradient = compiled(name)(
            f32(logprobs), f32(other), f32(advantages), mask_of(lengths), weights
        )
        expected = slow_loss_and_gradient(name, logprobs, other, advantages, lengths, expected_weights)
        np.testing.assert_allclose(value, expected[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(gradient, expected[1], rtol=1e-3, atol=1e-5)


def test_policy_gradient_by_hand():
    logprobs = f32([[-1, -2, -3], [-0.5, -4, -9]])
    # Weighted by 1/3: 2 × (1 + 2) - 1 × 0.5 over three tokens.
    value, aux = losses.policy_gradient(
        logprobs, f32([2, -1]), mask_of([2, 1], 3), weights=weights_of([2, 1])
    )
    assert value == pytest.approx(5.5 / 3)
    assert aux == {}


def test_clipped_surrogate_by_hand():
    ratios = [[1.5, 1.1, 0.5, 1.0], [1.5, 0.9, 0.5, 1.0]]
    value, aux = losses.clipped_surrogate(
        f32(np.log(ratios)),
        jnp.zeros((2, 4)),
        f32([1, -2]),
        mask_of([4, 4], 4),
        weights=f32([1, 10]),
        clip_low=0.2,
        clip_high=0.3,
    )
    # A = 1:  -min(1.5, 1.3) - 1.1 - min(0.5, 0.8) - 1 = -3.9
    # A = -2: the worse of the two again: 2 × (1.5 + 0.9 + 0.8 + 1) = 8.4
    assert value == pytest.approx(-3.9 + 84.0)
    # The clip acts on 1.5 with A = 1 and on 0.5 with A = -2.
    assert [float(x) for x in aux["clipped"]] == [2.0, 8.0]


def test_clipped_surrogate_on_policy_is_the_policy_gradient():
    logprobs, _, advantages = (f32(x) for x in random_batch(0))
    rest = (advantages, mask_of([5, 2, 3]), weights_of([5, 2, 3]))
    (value, aux), gradient = compiled("clipped_surrogate")(logprobs, logprobs, *rest)
    _, expected = compiled("policy_gradient")(logprobs, logprobs, *rest)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    assert value == pytest.approx(float(-(advantages * f32([5, 2, 3])).sum() / 10), rel=1e-5)
    assert aux["clipped"][0] == 0


def test_clip_removes_the_gradient_only_where_it_acts():
    logprobs = f32(np.log([[1.5, 1.1, 0.5], [1.5, 1.1, 0.5]]))
    rest = (jnp.zeros((2, 3)), f32([1, -1]), mask_of([3, 3], 3), f32([1, 1]))
    _, gradient = compiled("clipped_surrogate")(logprobs, *rest)
    np.testing.assert_allclose(gradient, [[0, -1.1, -0.5], [1.5, 1.1, 0]], rtol=1e-6)


def test_kl_estimators_by_hand():
    # d = log pi_ref - log pi = log 2 on the one token.
    arguments = (f32([[-2.0]]), f32([[-2 + math.log(2)]]), mask_of([1], 1))
    for estimator, expected in (("k1", -math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 1 - math.log(2))):
        value, aux = losses.kl_penalty(*arguments, weights=f32([10]), estimator=estimator)
        assert value == pytest.approx(10 * expected, rel=1e-5)
        # The log gets k1 and k3 unweighted, whichever is in the loss.
        assert [float(x) for x in aux["kl_k1"]] == pytest.approx([-math.log(2), 1])
        assert [float(x) for x in aux["kl_k3"]] == pytest.approx([1 - math.log(2), 1], rel=1e-5)


@pytest.mark.parametrize("name", ["clipped_surrogate", "k3"])
def test_only_logprobs_are_differentiated(name):
    logprobs, other, advantages = (f32(x) for x in random_batch(1))
    mask, weights = mask_of([5, 2, 3]), weights_of([5, 2, 3])
    gradients = jax.grad(lambda o, a, w: evaluate(name, logprobs, o, a, mask, w)[0], argnums=(0, 1, 2))(
        other, advantages, weights
    )
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


# Masks


@pytest.mark.parametrize("name", LOSSES)
def test_masked_row_equals_dropped_row(name):
    logprobs, other, advantages = (f32(x) for x in random_batch(2))
    masked = compiled(name)(logprobs, other, advantages, mask_of([4, 0, 3]), weights_of([4, 0, 3]))
    left = jnp.array([0, 2])
    dropped = compiled(name)(
        logprobs[left], other[left], advantages[left], mask_of([4, 3]), weights_of([4, 3])
    )
    assert_same(masked[0], dropped[0])
    np.testing.assert_allclose(masked[1][left], dropped[1], rtol=1e-6)
    np.testing.assert_array_equal(masked[1][1], np.zeros(T))


@pytest.mark.parametrize("name", LOSSES)
def test_padding_width_changes_nothing(name):
    logprobs, other, advantages = (f32(x) for x in random_batch(3))
    weights = weights_of([2, 3, 1])
    wide = compiled(name)(logprobs, other, advantages, mask_of([2, 3, 1]), weights)
    narrow = compiled(name)(logprobs[:, :3], other[:, :3], advantages, mask_of([2, 3, 1], 3), weights)
    assert_same(wide[0], narrow[0])


def test_case_15_mask_selects():
    # The token losses are [[1, 100], [1, -50]].
    value, _ = losses.policy_gradient(
        f32([[-1, -100], [-1, 50]]), f32([1, 1]), mask_of([1, 1], 2), weights=weights_of([1, 1])
    )
    assert value == 1.0


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_case_15_masked_entries_reach_neither_loss_nor_gradient(name, junk):
    logprobs, other, advantages = (f32(x) for x in random_batch(4))
    lengths = [4, 0, 2]
    mask, weights = mask_of(lengths), weights_of(lengths)
    expected = compiled(name)(logprobs, other, advantages, mask, weights)
    spoiled = (jnp.where(mask, logprobs, junk), jnp.where(mask, other, junk), advantages.at[1].set(junk))
    result = compiled(name)(*spoiled, mask, weights)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result))
    assert_same(result, expected)


def test_case_23_and_24_mask_comes_from_lengths():
    # "a EOS b c": up to and with the first EOS, which the padding id may equal.
    np.testing.assert_array_equal(mask_of([2, 4, 0], 4), [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    np.testing.assert_array_equal(mask_of([[1, 2]], 2), [[[1, 0], [1, 1]]])


def test_case_33_ratio_compares_the_same_token():
    logprobs = f32([[-0.1, -2.0, -0.5]])
    arguments = {"advantages": f32([1]), "mask": mask_of([3], 3), "weights": f32([1])}
    aligned = losses.clipped_surrogate(logprobs, logprobs, **arguments)
    shifted = losses.clipped_surrogate(logprobs, jnp.roll(logprobs, 1, axis=1), **arguments)
    assert (aligned[0], aligned[1]["clipped"][0]) == (-3.0, 0.0)
    # Off by one the ratios are exp([.4, -1.9, 1.5]), of which the first and the last are clipped.
    assert shifted[1]["clipped"][0] == 2.0


# Denominators


def test_row_weights_by_hand():
    lengths, counted = [2, 4, 3, 0], [True, True, False, True]
    by_hand = {
        "token_mean": [1 / 6, 1 / 6, 0, 0],
        "sequence_mean": [1 / 2 / 2, 1 / 2 / 4, 0, 0],
        "constant": [1 / 2 / 10, 1 / 2 / 10, 0, 0],
    }
    for aggregation, expected in by_hand.items():
        np.testing.assert_allclose(weights_of(lengths, counted, aggregation, 10), expected, rtol=1e-6)
        jitted = jax.jit(functools.partial(losses.row_weights, aggregation=aggregation, max_length=10))
        np.testing.assert_allclose(jitted(jnp.array(lengths), jnp.array(counted)), expected, rtol=1e-6)


def test_row_weights_do_not_overflow():
    # 65,536 rows of 65,536 tokens are 2^32, too many for int32.
    lengths, counted = np.full(2**16, 2**16, np.int32), np.ones(2**16, bool)
    for aggregation in AGGREGATIONS:
        weights = losses.row_weights(lengths, counted, aggregation=aggregation, max_length=2**16)
        np.testing.assert_array_equal(weights, np.full(2**16, 2.0**-32, np.float32))


@pytest.mark.parametrize("long", [900, 1000])
def test_case_11_and_12_one_denominator_for_all_micro_batches(long):
    short, width = (100, 900) if long == 900 else (10, 1000)
    weights = weights_of([short, long])
    total = 0.0
    for row, (length, mean_loss) in enumerate([(short, 2.0), (long, 0.5)]):
        value, _ = losses.policy_gradient(
            jnp.full((1, width), -mean_loss),
            f32([1]),
            mask_of([length], width),
            weights=weights[row : row + 1],
        )
        total += float(value)
    assert total == pytest.approx((2.0 * short + 0.5 * long) / (short + long), rel=1e-5)  # case 11: 0.65


@pytest.mark.parametrize("name", LOSSES)
def test_case_11_gradient_of_one_or_four_micro_batches(name):
    rng = np.random.default_rng(5)
    tokens, logits = jnp.asarray(rng.integers(0, 6, (4, T))), f32(rng.normal(size=6))
    other, advantages = f32(-rng.exponential(1.5, (4, T))), f32(rng.normal(size=4))
    lengths = [1, 5, 2, 4]
    mask = mask_of(lengths)

    @jax.jit
    @jax.grad
    def gradient(logits, tokens, *batch):
        return evaluate(name, jax.nn.log_softmax(logits)[tokens], *batch)[0]

    for aggregation in AGGREGATIONS:
        batch = (tokens, other, advantages, mask, weights_of(lengths, aggregation=aggregation))
        whole = gradient(logits, *batch)
        pieces = [gradient(logits, *(field[row : row + 1] for field in batch)) for row in (2, 0, 3, 1)]
        assert np.abs(whole).max() > 1e-3
        np.testing.assert_allclose(sum(pieces), whole, atol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_case_14_uncounted_row_does_not_dilute(aggregation):
    # A truncated row that is masked is in neither numerator nor denominator.
    both = weights_of([3, 5], [True, False], aggregation)
    value, _ = losses.policy_gradient(-jnp.ones((2, T)), f32([1, 1]), mask_of([3, 0]), weights=both)
    alone, _ = losses.policy_gradient(
        -jnp.ones((1, T)), f32([1]), mask_of([3]), weights=weights_of([3], aggregation=aggregation)
    )
    assert value == alone
    assert value == pytest.approx(3 / 5 if aggregation == "constant" else 1.0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_dropping_rows_without_advantage_changes_nothing_when_they_are_counted(aggregation):
    logprobs = f32(random_batch(6)[0])
    weights, mask = weights_of([2, 4, 5], aggregation=aggregation), mask_of([2, 4, 5])
    everything, _ = losses.policy_gradient(logprobs, f32([1.5, 0, -0.5]), mask, weights=weights)
    left = jnp.array([0, 2])
    kept, _ = losses.policy_gradient(logprobs[left], f32([1.5, -0.5]), mask[left], weights=weights[left])
    assert everything == pytest.approx(float(kept), rel=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_case_17_nothing_counted_is_finite(name, aggregation):
    logprobs, other, advantages = (f32(x) for x in random_batch(7))
    weights = weights_of([4, 2, 0], [False, False, True], aggregation)
    np.testing.assert_array_equal(weights, np.zeros(B))
    for lengths in ([0, 0, 0], [4, 2, 0]):
        (value, _), gradient = compiled(name)(logprobs, other, advantages, mask_of(lengths), weights)
        assert value == 0
        np.testing.assert_array_equal(gradient, np.zeros((B, T)))


# The KL penalty as a loss


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_case_35_kl_of_a_copy_is_exactly_zero(estimator):
    logprobs = f32(random_batch(8)[0])
    value, aux = losses.kl_penalty(
        logprobs, logprobs, mask_of([5, 3, 1]), weights=f32([1, 1, 1]), estimator=estimator
    )
    assert [float(x) for x in jax.tree.leaves((value, aux))] == [0, 0, 9, 0, 9]


def test_case_9_groups_without_signal_feel_the_kl_penalty_alone():
    logprobs, reference, _ = (f32(x) for x in random_batch(9))
    mask, weights = mask_of([5, 3, 1]), f32([1, 1, 1])

    def penalised(logprobs, coefficient):
        gain, _ = losses.policy_gradient(logprobs, jnp.zeros(B), mask, weights=weights)
        penalty, _ = losses.kl_penalty(logprobs, reference, mask, weights=weights, estimator="k3")
        return gain + coefficient * penalty

    _, pure = compiled("k3")(logprobs, reference, jnp.zeros(B), mask, weights)
    np.testing.assert_allclose(jax.grad(penalised)(logprobs, 0.04), 0.04 * pure, rtol=1e-5)


def test_case_36_expected_gradients_over_an_enumerated_vocabulary():
    """Both tokens as rows, weighted by their probability: an expectation without sampling error."""
    p, q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    logits, reference, mask = f32(np.log(p)), f32(np.log(q))[:, None], jnp.ones((2, 1), bool)

    def expected_gradient(loss):
        return float(jax.grad(lambda logits: loss(jax.nn.log_softmax(logits)[:, None]))(logits)[0])

    def as_loss(estimator):
        return expected_gradient(
            lambda logprobs: losses.kl_penalty(
                logprobs, reference, mask, weights=f32(p), estimator=estimator
            )[0]
        )

    def true_kl(logprobs):
        return jnp.sum(jnp.exp(logprobs) * (logprobs - reference))

    reward = f32(-np.log(p / q))  # k1, taken off the reward
    in_reward = expected_gradient(
        lambda logprobs: losses.policy_gradient(logprobs, reward, mask, weights=f32(p))[0]
    )
    assert expected_gradient(true_kl) == pytest.approx(0.177933, abs=1e-6)
    assert as_loss("k1") == pytest.approx(0.0, abs=1e-6)
    assert as_loss("k2") == pytest.approx(0.177933, abs=1e-6)
    assert as_loss("k3") == pytest.approx(0.2, abs=1e-6)
    assert in_reward == pytest.approx(0.177933, abs=1e-6)
