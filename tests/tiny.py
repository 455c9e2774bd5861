"""A tiny model with weights that make every token and position matter, and a plain-Python sampler.

Tests of the core share its shapes, so that each function is compiled once for all of them.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from dash_jax import model, sampling
from dash_jax.model import ModelConfig
from dash_jax.problems import Problem
from dash_jax.sharding import AXES

CONFIG = ModelConfig(
    vocab_size=40, known_ids=37, hidden_size=32, layers=2, heads=4, kv_heads=2, head_size=8, mlp_size=48,
    qkv_bias=True,
)  # fmt: skip
N, P, G, C = 4, 8, 3, 6  # prompts, their padded width, samples of each, their limit
MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2)]
NO_EOS = -1
FAST_COMPILE = {"xla_backend_optimization_level": 0}
TRAINING = sampling.Rule()


def weights(config, seed):
    """Logits of a few units, norms and biases that are not the identity."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name, noise = jax.tree_util.keystr(path), rng.normal(size=leaf.shape)
        scale = 0.1 if "norm" in name else 0.3 if "embedding" in name else 0.25
        return jnp.asarray(scale * noise + ("norm" in name), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, model.weight_axes(config)[0])


def fast_jit():
    """A context in which `jax.jit` compiles in half the time, with fewer optimisations."""
    return mock.patch.object(jax, "jit", functools.partial(jax.jit, compiler_options=FAST_COMPILE))


@functools.cache
def params(seed=0):
    return weights(CONFIG, seed)


def mesh_of(data, fsdp, tensor):
    """A mesh over the first data × fsdp × tensor devices."""
    devices = jax.devices()[: data * fsdp * tensor]
    return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def prompts_of(lengths, seed, width=P, rest=0):
    """Random prompts; the ids behind their lengths are `rest`."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, CONFIG.known_ids, (len(lengths), width)).astype(np.int32)
    lengths = np.asarray(lengths, np.int32)
    return np.where(np.arange(width) < lengths[:, None], tokens, np.int32(rest)), lengths


def problems_of(lengths, seed=0):
    """Problems with those prompts, under ids that are not their places."""
    prompts, _ = prompts_of(lengths, seed)
    return [
        Problem(id=10 * n + 3, task="test", prompt="", answer="", prompt_ids=tuple(map(int, row[:length])))
        for n, (row, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


_keys = jax.jit(sampling.sample_keys, static_argnums=2)


def sample(
    prompts,
    lengths,
    *,
    seed=0,
    eos_ids=(NO_EOS,) * 3,
    temperature=1.0,
    rule=TRAINING,
    past=None,
    config=CONFIG,
):
    """`sampling.sample` of the tiny model in the shapes above; (samples as NumPy, buffers)."""
    keys = _keys(jax.random.key(seed), np.arange(N), G)
    past = sampling.empty_past(config, N, G, C) if past is None else past
    samples, past = sampling.sample(
        params(), jnp.asarray(prompts), jnp.asarray(lengths), keys, jnp.asarray(eos_ids, jnp.int32),
        jnp.float32(temperature), past, config=config, rule=rule,
    )  # fmt: skip
    return jax.tree.map(np.asarray, samples), past


@functools.partial(jax.jit, static_argnames="config")
def full_logits(params, tokens, config=CONFIG):
    """Logits at every position of whole sequences [R, T], without context or cache: [R, T, V]."""
    tokens = tokens[:, None]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1])[None, None], tokens.shape)
    hidden, _ = model.forward(params, config, tokens, positions)
    return model.logits(params, config, hidden)[:, 0]


def log_softmax(logits):
    """In float64."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def sequences(prompts, prompt_lengths, tokens):
    """Rows [N × G, P + C]: each prompt without its padding, its completion, then zeros."""
    rows = np.zeros((tokens.shape[0], tokens.shape[1], prompts.shape[1] + tokens.shape[2]), np.int32)
    for n, length in enumerate(prompt_lengths):
        rows[n, :, :length] = prompts[n, :length]
        rows[n, :, length : length + tokens.shape[2]] = tokens[n]
    return rows.reshape(-1, rows.shape[-1])


def slow_logprobs(params, prompts, prompt_lengths, tokens, temperature):
    """Log-probs and entropies [N, G, C] of completions, by one pass over each whole sequence."""
    logits = full_logits(params, jnp.asarray(sequences(prompts, prompt_lengths, tokens)))
    logprobs = log_softmax(np.asarray(logits, np.float64) / temperature)
    logprobs = logprobs.reshape(*tokens.shape[:2], *logprobs.shape[1:])
    chosen, entropy = np.zeros(tokens.shape), np.zeros(tokens.shape)
    for n, g, c in np.ndindex(tokens.shape):
        of_token = logprobs[n, g, prompt_lengths[n] + c - 1]  # predicted by the token before
        chosen[n, g, c] = of_token[tokens[n, g, c]]
        entropy[n, g, c] = -(np.exp(of_token) * of_token).sum()
    return chosen, entropy


MARKOV = ModelConfig(
    vocab_size=8, known_ids=8, hidden_size=8, layers=2, heads=1, kv_heads=1, head_size=8, mlp_size=8,
    tied=False, norm_epsilon=0.0, remat="none",
)  # fmt: skip


def markov(table):
    """Weights of MARKOV under which the logits behind token i are row i of `table`, whatever came before.

    One-hot embeddings, layers that add nothing; the final norm makes e_i into sqrt(8) e_i.
    """
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), model.weight_axes(MARKOV)[0])
    head = (np.asarray(table) / np.sqrt(8)).astype(np.float32)
    weights = zeros | {
        "embedding": np.eye(8, dtype=np.float32),
        "final_norm": np.ones(8, np.float32),
        "head": head,
    }
    return jax.tree.map(jnp.asarray, weights)
