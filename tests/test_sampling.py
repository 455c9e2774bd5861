"""The sampler against exact probabilities, a plain-Python oracle without cache, and itself cut up."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIG, NO_EOS, C, G, N, P

from dash_jax import rollout, sampling
from dash_jax.policy import Policy
from dash_jax.problems import Finish, Problem
from dash_jax.sampling import Rule

TRAINING = Rule()
JITTED_DRAW = jax.jit(sampling.draw)
JITTED_NEXT = jax.jit(sampling._next_token, static_argnames="rule")
LAST_UNIFORM = 1 - 2.0**-24  # the largest that the sampler makes; the smallest is 2^-24


def f32(values):
    return jnp.asarray(values, jnp.float32)


def draw(logits, uniforms):
    """One distribution, many pairs of uniforms."""
    rows = jnp.broadcast_to(f32(logits), (len(uniforms), len(logits)))
    return jax.tree.map(np.asarray, JITTED_DRAW(rows, f32(uniforms)))


def next_token(logits, keys, *, position=0, temperature=1.0, rule=TRAINING):
    token, logprob = JITTED_NEXT(
        logits, keys=keys, position=jnp.full(keys.shape, position, jnp.int32),
        temperature=f32(temperature), rule=rule,
    )  # fmt: skip
    return np.asarray(token), np.asarray(logprob)


# --- draw ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [1, 5, 128, 129, 300])
def test_a_grid_of_uniforms_gives_every_token_its_probability(vocabulary):
    logits = np.random.default_rng(vocabulary).normal(0, 2, vocabulary)
    side = 160
    centres = (np.arange(side) + 0.5) / side
    token, logprob = draw(logits, np.stack(np.meshgrid(centres, centres), axis=-1).reshape(-1, 2))
    exact = np.exp(tiny.log_softmax(logits))
    share = np.bincount(token, minlength=vocabulary) / side**2
    # Each level of the inversion is off by less than one step of the grid.
    assert np.abs(share - exact).max() < 2 / side
    np.testing.assert_allclose(logprob, tiny.log_softmax(f32(logits))[token], atol=2e-6)


def test_draws_agree_with_random_categorical_in_distribution():
    vocabulary = 300
    count, logits = 40_000, f32(np.random.default_rng(vocabulary).normal(0, 1.5, vocabulary))
    uniforms = jax.vmap(sampling._uniforms)(jax.random.split(jax.random.key(1), count))
    ours = np.bincount(draw(logits, uniforms)[0], minlength=vocabulary)
    theirs = jax.random.categorical(jax.random.key(2), logits, shape=(count,))
    theirs = np.bincount(np.asarray(theirs), minlength=vocabulary)
    expected = np.exp(tiny.log_softmax(logits)) * count
    frequent = expected > 10
    counts = np.stack([ours, theirs, expected])
    counts = np.concatenate([counts[:, frequent], counts[:, ~frequent].sum(axis=1, keepdims=True)], axis=1)
    counts = counts[:, counts[2] > 0]
    for observed in counts[:2]:
        assert scipy.stats.chisquare(observed, counts[2] * observed.sum() / counts[2].sum()).pvalue > 1e-3
    assert scipy.stats.chi2_contingency(counts[:2]).pvalue > 1e-3


@settings(max_examples=60, deadline=None)
@given(data=st.data(), absent=st.sampled_from([-np.inf, -1e30, -200.0]))
def test_tokens_without_probability_are_never_drawn(data, absent):
    vocabulary, side = 300, 12
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = np.where(rng.random(vocabulary) < data.draw(st.sampled_from([0.3, 0.9, 0.99])), absent, 0.0)
    logits[rng.integers(vocabulary)] = 0.0
    logits = np.where(logits == 0.0, rng.normal(0, 3, vocabulary), logits)
    edges = [0.0, 2.0**-24, 2.0**-23, LAST_UNIFORM, 1 - 2.0**-23]
    ones = np.array(edges + rng.random(side - len(edges)).tolist(), np.float32)
    token, logprob = draw(logits, np.stack(np.meshgrid(ones, ones), axis=-1).reshape(-1, 2))
    assert (token < vocabulary).all()
    assert (logits[token] != absent).all()
    assert np.isfinite(logprob).all()


def test_rounding_of_a_long_cumulative_sum_draws_nothing_without_probability():
    # Above some hundred blocks XLA sums in a tree, so neighbours round differently and the cumulative
    # sum rises and falls where nothing is added. Uniforms on such places drew tokens of probability 0.
    blocks = 1187  # Qwen's vocabulary
    rng = np.random.default_rng(0)
    mass = np.where(rng.random(blocks) < 0.3, rng.random(blocks), 0.0).astype(np.float32)
    totals = np.asarray(jax.jit(lambda x: jnp.cumsum(x, axis=-1))(mass[None]))[0]
    places = np.flatnonzero((np.diff(totals) != 0) & (mass[1:] == 0)) + 1
    assert len(places), "the cumulative sum is exact here: find another case"
    logits = np.full((blocks, 128), -np.inf, np.float32)
    logits[:, 5] = np.log(np.maximum(mass, np.float32(1e-30)), where=mass > 0, out=logits[:, 5])
    near = totals[np.concatenate([places[:12], places[:12] - 1])] / totals[-1]
    near = np.concatenate([near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(1))])
    token, logprob = draw(logits.reshape(-1), np.stack([near, np.full_like(near, 0.5)], axis=1))
    assert np.isfinite(logprob).all()
    assert (mass[token // 128] > 0).all()
    assert (token % 128 == 5).all()


def test_uniforms_are_never_0_nor_1():
    uniforms = np.asarray(jax.vmap(sampling._uniforms)(jax.random.split(jax.random.key(0), 20_000)))
    assert (uniforms * 2.0**24 % 2 == 1).all()  # odd, so neither 0 nor 2^24
    assert uniforms.max() < 1
    assert abs(uniforms.mean() - 0.5) < 0.01
    assert np.float32(1 - 2.0**-23) + np.float32(2.0**-24) < 1  # the largest of random.uniform


# --- the next-token rule ------------------------------------------------------------------------


def keys_of(count, seed=0):
    return jax.random.split(jax.random.key(seed), (1, count))


def test_logprob_is_that_of_the_tempered_distribution_case_28():
    logits = jnp.broadcast_to(f32([2, 1, 0]), (1, 400, 3))
    token, logprob = next_token(logits, keys_of(400), temperature=0.6)
    assert set(token[0]) == {0, 1, 2}
    assert logprob[token == 0] == pytest.approx(-0.2026, abs=5e-5)  # not -0.4076, not -0.679
    np.testing.assert_allclose(logprob, tiny.log_softmax(np.array([2, 1, 0]) / 0.6)[token], atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Rule(top_p=0.79), {0, 1}),
        (Rule(top_p=0.81), {0, 1, 2}),
        (Rule(top_p=0.01), {0}),
        (Rule(top_k=3), {0, 1, 2}),
        (Rule(top_k=1), {0}),
        (Rule(top_k=9), {0, 1, 2, 3}),
        (Rule(top_k=2, top_p=0.6), {0}),  # of the two kept, 0 holds 0.625
        (Rule(top_k=3, top_p=0.6), {0, 1}),  # of the three kept, 0 holds 0.526
    ],
)
def test_top_k_and_top_p_keep_the_right_set_case_31(rule, kept):
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    order = [2, 0, 3, 1]  # the vocabulary is not sorted
    left = np.asarray(sampling._truncate(f32(logits[order]), rule))
    assert {order[i] for i in np.flatnonzero(np.isfinite(left))} == kept
    np.testing.assert_array_equal(left[np.isfinite(left)], f32(logits[order])[np.isfinite(left)])


def test_top_k_alone_does_not_drop_its_improbable_tokens():
    # With top_p off the mass in front of a token may round to 1.
    left = sampling._truncate(f32([0.0] * 40 + [-18.0]), Rule(top_k=41))
    assert np.isfinite(np.asarray(left)).all()


def test_truncated_draws_report_the_full_distribution_case_31():
    # The ratio to what the learner scores is 1, where renormalised log-probs give 0.8. Temperature comes
    # first: at 0.5 the probabilities are .685, .246, .062, .007.
    p = np.array([0.15, 0.5, 0.05, 0.3])
    cold = p**2 / (p**2).sum()
    logits = jnp.broadcast_to(f32(np.log(p)), (1, 400, 4))
    token, logprob = next_token(logits, keys_of(400), temperature=0.5, rule=Rule(top_p=0.8))
    assert set(token[0]) == {1, 3}
    np.testing.assert_allclose(np.exp(logprob), cold[token], rtol=1e-5)
    assert (token == 1).mean() == pytest.approx(cold[1] / (cold[1] + cold[3]), abs=0.08)


def test_keys_differ_between_steps_problems_and_samples_and_follow_from_them():
    def data(step, problems, group):
        keys = sampling.sample_keys(rollout.step_key(0, "train", step), jnp.asarray(problems), group)
        return np.asarray(jax.random.key_data(keys)).reshape(-1, 2)

    everything = np.concatenate([data(step, [0, 1, 7, 100], 3) for step in range(3)])
    assert len(np.unique(everything, axis=0)) == 36
    np.testing.assert_array_equal(
        data(1, [7, 0], 2), data(1, [0, 7], 3).reshape(2, 3, 2)[::-1, :2].reshape(-1, 2)
    )
    roots = [rollout.step_key(seed, name, 0) for seed in (0, 1) for name in ("train", "eval")]
    assert len({tuple(np.asarray(jax.random.key_data(key)).tolist()) for key in roots}) == 4


# --- the sampler against a plain-Python oracle --------------------------------------------------


def invert(probabilities, uniforms, hint):
    """The token at which two uniforms point, in float64. Within 1e-5 of a border `hint` may choose."""

    def index(mass, uniform):
        return int(np.searchsorted(np.cumsum(mass), uniform * mass.sum(), side="right"))

    blocks = np.pad(probabilities, (0, -len(probabilities) % 128)).reshape(-1, 128)
    near = set()
    for shift in (0.0, -1e-5, 1e-5):
        u, v = np.clip(np.asarray(uniforms, np.float64) + shift, 1e-9, 1 - 1e-9)
        block = index(blocks.sum(axis=1), u)
        near.add(block * 128 + index(blocks[block], v))
        if shift == 0.0:
            exact = block * 128 + index(blocks[block], v)
    return hint if hint in near else exact


@jax.jit
def uniforms_of(key, problem, index, position):
    for part in (problem, index, position):
        key = jax.random.fold_in(key, part)
    return jax.random.uniform(key, (2,)) + 2.0**-24


def slow_sample(prompts, lengths, *, seed, eos_ids, temperature, hints):
    """Token by token, each from a pass over the whole sequence; nothing is kept from one to the next."""
    rows = [[*map(int, prompts[n, : lengths[n]])] for n in range(N) for _ in range(G)]
    out = [[] for _ in rows]
    logprobs = [[] for _ in rows]
    key = jax.random.key(seed)
    for position in range(C):
        padded = np.zeros((N * G, P + C), np.int32)
        for i, row in enumerate(rows):
            padded[i, : len(row)] = row
        logits = np.asarray(tiny.full_logits(tiny.params(), jnp.asarray(padded)), np.float64)
        for i, row in enumerate(rows):
            if out[i] and out[i][-1] in eos_ids:
                continue
            n, g = divmod(i, G)
            uniforms = uniforms_of(key, n, g, position)
            scores = tiny.log_softmax(logits[i, len(row) - 1] / temperature)
            token = invert(np.exp(scores), uniforms, hints[n, g, position])
            row.append(token)
            out[i].append(token)
            logprobs[i].append(scores[token])
    return out, logprobs


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, P), min_size=N, max_size=N),
    seed=st.integers(0, 2**31 - 1),
    eos_ids=st.lists(st.integers(0, CONFIG.known_ids - 1), min_size=3, max_size=3),
    temperature=st.sampled_from([0.6, 1.0, 1.5]),
    rest=st.sampled_from([0, 5]),
)
def test_sampler_equals_an_oracle_without_cache_cases_23_24(lengths, seed, eos_ids, temperature, rest):
    prompts, lengths = tiny.prompts_of(lengths, seed, rest=rest)
    prompts[:, 0] = 0  # an id that is also the padding, and now and then the end of sequence
    got, _ = tiny.sample(prompts, lengths, seed=seed, eos_ids=eos_ids, temperature=temperature)
    tokens, logprobs = slow_sample(
        prompts, lengths, seed=seed, eos_ids=eos_ids, temperature=temperature, hints=got.tokens
    )
    for i in range(N * G):
        n, g = divmod(i, G)
        length = got.lengths[n, g]
        assert got.tokens[n, g, :length].tolist() == tokens[i]
        np.testing.assert_allclose(got.logprobs[n, g, :length], logprobs[i], atol=1e-5)
        assert not got.tokens[n, g, length:].any()
        assert not got.logprobs[n, g, length:].any()
        ended = tokens[i][-1] in eos_ids
        assert got.finish[n, g] == (Finish.EOS if ended else Finish.LENGTH)
        assert ended or length == C
        assert not set(tokens[i][:-1]) & set(eos_ids)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), eos_ids=st.lists(st.integers(0, 36), min_size=1, max_size=3))
def test_end_of_sequence_cuts_what_would_have_been_sampled_cases_23_24(seed, eos_ids):
    prompts, lengths = tiny.prompts_of([8, 3, 5, 1], seed)
    free, _ = tiny.sample(prompts, lengths, seed=seed)
    ended, _ = tiny.sample(prompts, lengths, seed=seed, eos_ids=(eos_ids * 3)[:3])
    assert (free.lengths == C).all()
    assert (free.finish == Finish.LENGTH).all()
    for n, g in np.ndindex(N, G):
        ends = np.flatnonzero(np.isin(free.tokens[n, g], eos_ids))
        length = ends[0] + 1 if len(ends) else C  # the end of sequence is kept, scored and counted
        assert ended.lengths[n, g] == length
        assert ended.finish[n, g] == (Finish.EOS if len(ends) else Finish.LENGTH)
        np.testing.assert_array_equal(
            ended.tokens[n, g], np.where(np.arange(C) < length, free.tokens[n, g], 0)
        )
        np.testing.assert_array_equal(
            ended.logprobs[n, g], np.where(np.arange(C) < length, free.logprobs[n, g], 0)
        )


def certain(*chain):
    """Logits by which every id of the chain is followed by the next."""
    table = np.zeros((8, 8))
    table[list(chain[:-1]), list(chain[1:])] = 60.0
    return table


def run_markov(table, prompts, lengths, eos_ids, past=None):
    past = sampling.empty_past(tiny.MARKOV, 2, 1, 4) if past is None else past
    keys = sampling.sample_keys(jax.random.key(0), jnp.arange(2), 1)
    prompts, lengths, eos_ids = (np.array(x, np.int32) for x in (prompts, lengths, eos_ids))
    samples, past = sampling.sample(
        tiny.markov(table), prompts, lengths, keys, eos_ids, np.float32(1), past, config=tiny.MARKOV
    )
    return jax.tree.map(lambda x: np.asarray(x)[:, 0].tolist(), samples), past


def test_a_chain_known_by_heart_cases_23_24():
    # 0 is the padding id and, first, an end of sequence too: it is kept once.
    table = certain(3, 4, 0, 5, 6, 7)
    (tokens, logprobs, lengths, finish), _ = run_markov(table, [[3, 0], [5, 0]], [1, 1], [0, 7])
    assert (tokens, lengths) == ([[4, 0, 0, 0], [6, 7, 0, 0]], [2, 2])
    assert finish == [Finish.EOS, Finish.EOS]
    np.testing.assert_allclose(logprobs, 0, atol=1e-6)
    # The same id inside a prompt is a token like any other: behind [3, 0] comes 5.
    (tokens, _, lengths, finish), _ = run_markov(table, [[3, 0], [0, 3]], [2, 1], [7, 7])
    assert (tokens, lengths) == ([[5, 6, 7, 0], [5, 6, 7, 0]], [3, 3])
    assert finish == [Finish.EOS, Finish.EOS]
    # An end of sequence in the last slot ends the completion; another token there does not.
    (tokens, _, lengths, finish), _ = run_markov(table, [[4, 0], [3, 0]], [1, 1], [7, 7])
    assert (tokens, lengths) == ([[0, 5, 6, 7], [4, 0, 5, 6]], [4, 4])
    assert finish == [Finish.EOS, Finish.LENGTH]


def test_when_every_first_token_ends_nothing_is_decoded():
    past = jax.tree.map(lambda x: jnp.full_like(x, 7.0), sampling.empty_past(tiny.MARKOV, 2, 1, 4))
    samples, end = run_markov(certain(3, 2), [[3, 3], [3, 3]], [1, 2], [2, 7], past)
    assert samples.tokens == [[2, 0, 0, 0]] * 2
    assert samples.finish == [Finish.EOS] * 2
    assert all((np.asarray(x) == 7.0).all() for x in jax.tree.leaves(end))


def test_decoding_stops_with_the_last_sample_and_leaves_later_slots_alone():
    def past():
        return jax.tree.map(lambda x: jnp.full_like(x, 7.0), sampling.empty_past(CONFIG, N, G, C))

    prompts, lengths = tiny.prompts_of([8, 3, 5, 1], 0)
    clean, _ = tiny.sample(prompts, lengths)
    for eos_ids in ([NO_EOS] * 3, clean.tokens[0, 0, :3], [*clean.tokens[:, :, 0].reshape(-1)[:3]]):
        samples, end = tiny.sample(prompts, lengths, eos_ids=eos_ids, past=past())
        steps = samples.lengths.max() - 1  # the first token comes from the prefill
        for layer in end:
            assert (np.asarray(layer.k)[..., steps:] == 7.0).all()
            assert (np.asarray(layer.v)[..., steps:, :] == 7.0).all()
            assert (np.asarray(layer.k)[..., :steps] != 7.0).all()
    # What the buffers held before does not matter.
    again, _ = tiny.sample(prompts, lengths, past=past())
    jax.tree.map(np.testing.assert_array_equal, again, clean)


def test_fillers_are_empty_and_change_nothing():
    prompts, lengths = tiny.prompts_of([8, 3, 5, 1], 0)
    full, _ = tiny.sample(prompts, lengths)
    some, _ = tiny.sample(prompts, np.where([True, False, True, False], lengths, np.int32(0)))
    for field, expected in zip(some, full, strict=True):
        np.testing.assert_array_equal(field[::2], expected[::2])
        assert not field[1::2].any()
    assert (some.finish[1::2] == Finish.LENGTH).all()


def test_greedy_takes_the_most_probable_token_untempered_case_30():
    prompts, lengths = tiny.prompts_of([8, 3, 5, 1], 0)
    got, _ = tiny.sample(prompts, lengths, temperature=0.0, rule=Rule(greedy=True))
    logits = tiny.full_logits(tiny.params(), jnp.asarray(tiny.sequences(prompts, lengths, got.tokens)))
    logprobs = tiny.log_softmax(logits).reshape(N, G, P + C, -1)
    for n, g, c in np.ndindex(N, G, C):
        of_token = logprobs[n, g, lengths[n] + c - 1]
        assert got.tokens[n, g, c] == of_token.argmax()
        assert got.logprobs[n, g, c] == pytest.approx(of_token.max(), abs=1e-5)
    assert (got.tokens == got.tokens[:, :1]).all()


# --- the same samples, however they go through --------------------------------------------------

LENGTHS = [5, 8, 2, 7, 1, 4]


@functools.cache
def policy_on(shape):
    policy = Policy(tiny.mesh_of(*shape), None, CONFIG, (4, 9))
    return policy, rollout.sampler_weights(tiny.params(), policy)


def roll_out(problems, *, shape=(1, 1, 1), group_size=G, chunk=8, step=0):
    """`chunk` prompts at a time on each device that rows are split over."""
    policy, weights = policy_on(shape)
    widest = rollout.padded_width(max(len(problem.prompt_ids) for problem in problems))
    one = 1 / rollout.chunk_prompts(CONFIG, widest, group_size, C, 1.0)  # GB
    return rollout.roll_out(
        weights, policy, problems, rollout.step_key(0, "train", step), group_size=group_size,
        max_new_tokens=C, temperature=1.0, memory_gb=(chunk + 0.5) * one,
    )  # fmt: skip


@functools.cache
def plain():
    return roll_out(tiny.problems_of(LENGTHS))


def assert_same(got, expected):
    for name in ("problem_ids", "prompt_lengths", "tokens", "lengths", "finish"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)


def test_groups_hold_distinct_completions_and_steps_differ_case_21():
    for row in plain().tokens:
        assert len({tuple(tokens) for tokens in row.tolist()}) > 1
    assert (plain().lengths < C).any(), "no completion ends early: the tests below see too little"
    again, other = roll_out(tiny.problems_of(LENGTHS)), roll_out(tiny.problems_of(LENGTHS), step=1)
    jax.tree.map(np.testing.assert_array_equal, again, plain())  # a resumed step: the same to the bit
    assert (other.tokens != plain().tokens).any(axis=(1, 2)).all()


def test_one_prompt_twice_is_two_problems_case_21():
    twins = [tiny.problems_of(LENGTHS)[0]] * 2
    twins[1] = Problem(id=99, task="test", prompt="", answer="", prompt_ids=twins[0].prompt_ids)
    got = roll_out([*twins, *tiny.problems_of(LENGTHS)[2:]])
    assert (got.tokens[0] != got.tokens[1]).any()


def test_samples_do_not_depend_on_the_order_of_prompts_and_on_chunks():
    order = [3, 0, 5, 1, 4, 2]
    shuffled = [tiny.problems_of(LENGTHS)[i] for i in order]
    assert_same(roll_out(shuffled), jax.tree.map(lambda leaf: leaf[order], plain()))
    assert_same(roll_out(tiny.problems_of(LENGTHS), chunk=2), plain())


def test_samples_do_not_depend_on_padding_and_a_smaller_group_is_the_beginning_of_a_larger_one():
    longer = Problem(id=77, task="test", prompt="", answer="", prompt_ids=(1,) * 11)
    got = roll_out([*tiny.problems_of(LENGTHS)[:5], longer], group_size=2)
    assert got.prompts.shape[1] == 12
    for name in ("tokens", "lengths", "finish"):
        np.testing.assert_array_equal(getattr(got, name)[:5], getattr(plain(), name)[:5, :2])
    np.testing.assert_allclose(got.logprobs[:5], plain().logprobs[:5, :2], atol=1e-5)


@pytest.mark.parametrize("shape", tiny.MESHES)
def test_samples_do_not_depend_on_the_devices(shape):
    got = roll_out(tiny.problems_of(LENGTHS), shape=shape)  # 6 prompts over 8 or 4 devices: two fillers
    assert_same(got, plain())


def test_lengths_and_finish_reasons_agree():
    ends = np.take_along_axis(plain().tokens, plain().lengths[..., None] - 1, axis=2)[..., 0]
    np.testing.assert_array_equal(plain().finish == Finish.EOS, np.isin(ends, [4, 9]))
    assert math.prod(plain().lengths.shape) == len(LENGTHS) * G
