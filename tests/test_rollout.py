"""Where device meets host: chunks, fillers, order, texts. The sampler itself is mostly a stand-in here."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from tiny import CONFIG, C, G

from dash_jax import config as configuration
from dash_jax import learning, model, rollout, sampling
from dash_jax.engine import Ended
from dash_jax.errors import UserError
from dash_jax.model import KeyValues
from dash_jax.policy import Policy
from dash_jax.problems import Finish, Problem


class Letters:
    """Ids 3, 4, 5 are a, b and ab; decoding drops 2, the end of sequence."""

    vocab_size = CONFIG.known_ids
    eos_ids = (2,)

    def decode(self, ids):
        return "".join({2: "", 3: "a", 4: "b", 5: "ab"}.get(token, "?") for token in ids)

    def encode(self, text):
        ids = []
        while text:
            piece = next(piece for piece in ("ab", "a", "b") if text.startswith(piece))
            ids.append({"a": 3, "b": 4, "ab": 5}[piece])
            text = text[len(piece) :]
        return ids


def policy_on(shape=(1, 1, 1), config=CONFIG):
    return Policy(tiny.mesh_of(*shape), Letters(), config, (2,))


def problems_of(lengths):
    return [
        Problem(id=100 + n, task="test", prompt="", answer="", prompt_ids=(n % 30 + 1,) * length)
        for n, length in enumerate(lengths)
    ]


def bytes_of_one(width, config=CONFIG):
    """What `chunk_prompts` has to make room for, counted on the arrays themselves."""
    past = jax.eval_shape(lambda: sampling.empty_past(config, 1, G, C))
    head = (config.layers, G, config.kv_heads)  # a group of 3 may be spread over 3 slots, each with a prompt
    prompt = KeyValues(np.zeros((*head, config.head_size, width)), np.zeros((*head, width, config.head_size)))
    caches = sum(leaf.size for leaf in jax.tree.leaves((past, prompt))) * jnp.dtype(config.dtype).itemsize
    return 2 * caches + G * 4 * config.vocab_size * 4


@pytest.fixture
def calls(monkeypatch):
    """Replaces the engine: token c of sample g of a prompt [x, ...] is x + g + c. Keeps what it is given."""
    seen = []

    def generate(sampler, prompts, lengths, keys, *, engine, capacity, on_ended):
        assert keys.shape == (len(prompts), G)
        assert (sampler.eos_ids.tolist(), float(sampler.temperature), sampler.limit) == ([2], 0.5, C)
        seen.append((prompts, lengths, capacity))
        n, g, c = np.indices((len(prompts), G, C))
        tokens = (prompts[:, 0][n] + g + c).astype(np.int32)
        lengths, finish = C - g[..., 0], np.full((len(prompts), G), Finish.EOS)
        ids = np.arange(finish.size)[::-1]
        flat = (field.reshape(-1, *field.shape[2:])[ids] for field in (tokens, lengths, finish))
        on_ended(Ended(ids, *flat))
        return sampling.Samples(tokens, tokens * -0.5, lengths, finish)

    monkeypatch.setattr(rollout, "generate", generate)
    return seen


def roll_out(problems, *, shape=(1, 1, 1), fitting=100, **options):
    width = rollout.padded_width(max(len(problem.prompt_ids) for problem in problems))
    memory = (fitting + 0.5) * bytes_of_one(width) / 2**30
    return rollout.roll_out(
        {}, policy_on(shape), problems, rollout.step_key(0, "train", 0), group_size=G, max_new_tokens=C,
        temperature=0.5, memory_gb=memory, **options,
    )  # fmt: skip


# --- widths and memory --------------------------------------------------------------------------


@given(st.integers(1, 5000))
def test_widths_are_few_and_waste_little(longest):
    width = rollout.padded_width(longest)
    assert width >= longest
    assert width == 8 or (width - longest) / width < 1 / 3
    assert width in {8 * 2**i for i in range(12)} | {12 * 2**i for i in range(12)}
    assert rollout.padded_width(longest + 1) >= width
    assert rollout.padded_width(width) == width


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_many_prompts_as_fit_the_memory(dtype):
    config = dataclasses.replace(CONFIG, dtype=dtype)
    for fitting in (1, 2, 17):
        for spare, expected in ((0.01, fitting), (-0.01, fitting - 1)):
            budget = (fitting + spare) * bytes_of_one(12, config) / 2**30
            if expected:
                assert rollout.chunk_prompts(config, 12, G, C, budget) == expected


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_sampled(calls):
    with pytest.raises(UserError) as error:
        roll_out(problems_of([4, 2]), fitting=0)
    message = re.fullmatch(
        r"rollout.memory_gb=\S+: one prompt with 3 samples of 6 tokens takes (\S+) GB; "
        r"raise it, or lower the group size or rollout.max_new_tokens",
        str(error.value),
    )
    assert float(message[1]) == pytest.approx(bytes_of_one(8) / 2**30, rel=0.01)
    assert not calls


# --- to the engine and back ---------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "fitting"), [((1, 1, 1), 4), ((2, 2, 2), 1)])
def test_the_rollout_lies_in_the_order_of_the_problems(calls, shape, fitting):
    lengths = [3, 8, 1, 5, 8]
    got = roll_out(problems_of(lengths), shape=shape, fitting=fitting)
    ((_, seen_lengths, capacity),) = calls
    assert capacity == fitting  # on each device
    assert seen_lengths.tolist() == lengths
    assert got.problem_ids.tolist() == [100 + n for n in range(5)]
    assert got.prompt_lengths.tolist() == lengths
    n, g, c = np.indices((5, G, C))
    np.testing.assert_array_equal(got.tokens, n + 1 + g + c)
    np.testing.assert_array_equal(got.logprobs, got.tokens * -0.5)
    np.testing.assert_array_equal(got.lengths, C - g[..., 0])
    for leaf in jax.tree.leaves(got):
        assert isinstance(leaf, np.ndarray)
        assert len(leaf) == 5


def test_prompts_are_padded_on_the_right(calls):
    got = roll_out(problems_of([9, 2]))
    assert got.prompts.tolist() == [[1] * 9 + [0] * 3, [2] * 2 + [0] * 10]
    np.testing.assert_array_equal(calls[0][0], got.prompts)


# --- texts and ids ------------------------------------------------------------------------------


def test_texts_are_of_the_tokens_within_the_lengths(monkeypatch):
    ended = Ended(
        np.array([4, 0, 3]),
        tokens=np.array([[3, 4, 2, 3], [5, 2, 4, 4], [0, 5, 5, 5]]),
        lengths=np.array([3, 2, 1]),
        finish=np.array([Finish.EOS, Finish.EOS, Finish.LENGTH]),
    )
    monkeypatch.setattr(rollout, "generate", lambda *_, on_ended, **__: on_ended(ended) or ([],) * 4)
    problems, seen = problems_of([1, 1]), []
    roll_out(problems, on_ended=lambda *ended: seen.append(ended))
    ((indices, completions),) = seen
    assert indices == [4, 0, 3]
    assert completions == [
        (problems[1], "ab", Finish.EOS),
        (problems[0], "ab", Finish.EOS),
        (problems[1], "?", Finish.LENGTH),
    ]


def test_ids_are_never_encoded_again_case_34(calls, monkeypatch):
    # a and b, sampled as two tokens, read "ab", which encodes to one.
    got = roll_out(problems_of([1, 1]))
    tokens = np.zeros((2, G, C), np.int32)
    tokens[..., :3] = [3, 4, 2]
    got = dataclasses.replace(got, tokens=tokens, lengths=np.full((2, G), 3, np.int32))
    letters = policy_on().tokenizer
    assert letters.decode([3, 4, 2]) == "ab"
    assert letters.encode("ab") == [5]
    monkeypatch.setattr(Letters, "encode", None)  # nobody may even try
    settings = configuration.from_dict({
        "rollout": {"prompts": 2, "group_size": G, "max_prompt_tokens": 8, "max_new_tokens": C},
        "learner": {"micro_batch": 6, "shapes": 1},
    })  # fmt: skip
    advantages = np.array([[1, -1, 2], [0.5, 1, -1.5]], np.float32)
    (batch,) = learning.learning_batch(got, advantages, settings, multiple_of=1)
    kept = batch.completion_ids >= 0
    assert np.bincount(batch.completion_ids[kept]).tolist() == [3] * 6
    where = batch.completion_ids[kept], batch.positions[kept]
    np.testing.assert_array_equal(batch.tokens[kept], tokens.reshape(6, C)[where])
    np.testing.assert_array_equal(batch.logprobs[kept], got.logprobs.reshape(6, C)[where])


# --- the sampler's weights ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2)])
def test_the_samplers_weights_are_cast_and_whole_but_for_tensor(shape):
    policy = policy_on(shape, dataclasses.replace(CONFIG, dtype="bfloat16"))
    weights = rollout.sampler_weights(tiny.params(), policy)
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        assert leaf.dtype == (jnp.bfloat16 if model.is_matrix(path) else jnp.float32)
        used = {axis for axis in jax.tree.leaves(tuple(leaf.sharding.spec)) if axis is not None}
        assert used <= {"tensor"}, path  # never gathered again, token by token
        assert np.prod(leaf.sharding.shard_shape(leaf.shape)) == leaf.size // (shape[2] if used else 1)
    assert "tensor" in str(weights["layers"]["qkv"].sharding.spec) or shape[2] == 1
    jax.tree.map(
        lambda got, want: np.testing.assert_array_equal(got, want.astype(got.dtype)),
        weights,
        tiny.params(),
    )
