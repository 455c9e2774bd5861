"""Teacher-forced log-probs against the sampler, against whole sequences, by hand, and in memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import CONFIG, FAST_COMPILE, C, N

from dash_jax.logprobs import completion_logprobs


@functools.cache
def scorer(temperature, chunk, config=CONFIG):
    score = functools.partial(completion_logprobs, config=config, temperature=temperature, chunk=chunk)
    return jax.jit(
        lambda params, prompts, prompt_lengths, tokens: score(
            params, prompts=prompts, prompt_lengths=prompt_lengths, tokens=tokens
        ),
        compiler_options=FAST_COMPILE,
    )


def rollout_of(temperature, **options):
    """Samples that end at different lengths, behind prompts whose padding is not zero."""
    prompts, lengths = tiny.prompts_of([8, 3, 5, 1], 3, rest=9)
    samples, _ = tiny.sample(prompts, lengths, temperature=temperature, eos_ids=(4, 11, 30), **options)
    assert len(np.unique(samples.lengths)) > 2
    return prompts, lengths, samples


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_they_are_the_samplers_own_and_those_of_whole_sequences(temperature):
    prompts, lengths, samples = rollout_of(temperature)
    logprobs, entropy = scorer(temperature, 7)(tiny.params(), prompts, lengths, samples.tokens)
    mask = np.arange(C) < samples.lengths[..., None]
    assert np.abs(np.asarray(logprobs) - samples.logprobs)[mask].max() < 1e-5
    chosen, slow_entropy = tiny.slow_logprobs(tiny.params(), prompts, lengths, samples.tokens, temperature)
    np.testing.assert_allclose(
        np.asarray(logprobs), chosen, atol=1e-5
    )  # beyond the lengths too: they are finite
    np.testing.assert_allclose(np.asarray(entropy), slow_entropy, atol=1e-5)


def test_in_bfloat16_they_differ_from_the_samplers_by_little_more_than_in_float32():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    prompts, lengths, samples = rollout_of(1.0, config=config)
    learner, _ = scorer(1.0, 7, config)(tiny.params(), prompts, lengths, samples.tokens)
    exact, _ = scorer(1.0, 7)(tiny.params(), prompts, lengths, samples.tokens)
    mask = np.arange(C) < samples.lengths[..., None]
    gap, rounding = (np.abs(np.asarray(x) - samples.logprobs)[mask].mean() for x in (learner, exact))
    assert gap < rounding / 3


def test_lag_0_fits_best_case_33():
    prompts, lengths, samples = rollout_of(1.0)
    logprobs = np.asarray(scorer(1.0, 7)(tiny.params(), prompts, lengths, samples.tokens)[0])
    full = samples.lengths == C
    sampler, learner = samples.logprobs[full], logprobs[full]

    def agreement(lag):
        return np.corrcoef(sampler[:, 2:-2].ravel(), learner[:, 2 + lag : C - 2 + lag].ravel())[0, 1]

    assert agreement(0) > 0.9999
    assert all(agreement(lag) < 0.9 for lag in (-2, -1, 1, 2))


def test_three_tokens_scored_by_hand_case_33():
    # Behind id i comes id j with probability TABLE[i, j]; the prompt is [2, 1] and padding.
    table = np.full((8, 8), 1 / 8)
    table[1] = [0.5, 0.25, 0.125, 0.125, 0, 0, 0, 0]
    table[3] = [0.7, 0.1, 0.1, 0.1, 0, 0, 0, 0]
    table[0] = [0.2, 0.2, 0.6, 0, 0, 0, 0, 0]
    with np.errstate(divide="ignore"):
        params = tiny.markov(np.maximum(np.log(table), -80))
    prompts, tokens = np.array([[2, 1, 3]], np.int32), np.array([[[3, 0, 2]]], np.int32)
    logprobs, entropy = scorer(1.0, 2, tiny.MARKOV)(params, prompts, np.array([2], np.int32), tokens)
    np.testing.assert_allclose(np.exp(logprobs)[0, 0], [0.125, 0.7, 0.6], rtol=1e-5)
    by_hand = [0.5 * np.log(2) + 0.25 * np.log(4) + 2 * 0.125 * np.log(8)]
    by_hand += [-0.7 * np.log(0.7) - 0.3 * np.log(0.1), -0.4 * np.log(0.2) - 0.6 * np.log(0.6)]
    np.testing.assert_allclose(np.asarray(entropy)[0, 0], by_hand, rtol=1e-5)
    # At temperature 1/2 probabilities are squared and normalised.
    logprobs, _ = scorer(0.5, 2, tiny.MARKOV)(params, prompts, np.array([2], np.int32), tokens)
    squared = [0.125**2 / 0.34375, 0.49 / 0.52, 0.36 / 0.44]
    np.testing.assert_allclose(np.exp(logprobs)[0, 0], squared, rtol=1e-5)


def test_chunks_change_neither_values_nor_gradients():
    prompts, lengths, samples = rollout_of(1.0)
    # The 6 positions of one row: at once; by 4, of which the last two are padding; by 1 (values only).
    prompts, lengths, tokens = map(jnp.asarray, (prompts[:1], lengths[:1], samples.tokens[:1, :1]))
    coefficients = jnp.asarray(np.random.default_rng(0).normal(size=tokens.shape), jnp.float32)

    def results(chunk):
        def value(params):
            logprobs, entropy = completion_logprobs(
                params, CONFIG, prompts, lengths, tokens, temperature=0.6, chunk=chunk
            )
            return (coefficients * logprobs).sum(), (logprobs, entropy)

        return jax.jit(jax.grad(value, has_aux=True), compiler_options=FAST_COMPILE)(tiny.params())

    def assert_close(got, expected):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5), got, expected)

    whole, four = results(512), results(4)
    assert_close(four, whole)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(whole))
    assert_close(scorer(0.6, 1)(tiny.params(), prompts, lengths, tokens), whole[1])


def test_ids_that_the_tokenizer_lacks_have_no_probability():
    prompts, lengths, samples = rollout_of(1.0)
    tokens = samples.tokens.copy()
    tokens[0, 0, 0], tokens[1, 1, 1] = CONFIG.known_ids, CONFIG.vocab_size - 1
    score = scorer(1.0, 7)
    logprobs = np.asarray(score(tiny.params(), prompts, lengths, tokens)[0])
    assert logprobs[0, 0, 0] < -1e29
    assert logprobs[1, 1, 1] < -1e29
    everything = np.broadcast_to(np.arange(CONFIG.vocab_size, dtype=np.int32), (N, 40))
    total = 0.0
    for token in everything.T:
        first = np.broadcast_to(token[:, None, None], tokens.shape)
        total += np.exp(np.asarray(score(tiny.params(), prompts, lengths, first)[0])[:, 0, 0])
    np.testing.assert_allclose(total, 1, rtol=1e-5)


def largest_array(closed, least_rank=0):
    """(elements, shape) of the largest intermediate of a jaxpr, inner ones included."""
    found = (0, ())
    for equation in closed.eqns:
        for variable in equation.outvars:
            shape = variable.aval.shape
            if len(shape) >= least_rank:
                found = max(found, (int(np.prod(shape)), shape))
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found = max(found, largest_array(inner, least_rank))
    return found


@pytest.mark.parametrize("remat", ["full", "none"])
def test_the_logits_of_all_positions_never_exist(remat):
    config = dataclasses.replace(CONFIG, vocab_size=600, known_ids=600, remat=remat)
    S, samples, positions = 2, 4, 32
    params = tiny.weights(config, 0)
    prompts, lengths = jnp.zeros((S, 4), jnp.int32), jnp.full(S, 4, jnp.int32)
    tokens = jnp.zeros((S, samples, positions), jnp.int32)

    def largest(chunk):
        def value(params):
            logprobs, entropy = completion_logprobs(
                params, config, prompts, lengths, tokens, temperature=0.6, chunk=chunk
            )
            return logprobs.sum(), entropy

        return largest_array(jax.make_jaxpr(jax.value_and_grad(value, has_aux=True))(params).jaxpr)[0]

    whole = S * samples * positions * config.vocab_size
    assert largest(chunk=32) < whole / 2
    assert largest(chunk=512) >= whole  # the test sees them where they are
