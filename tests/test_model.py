"""The decoder against itself: gradients, meshes, dtypes. test_weights.py holds it against transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from dash_jax import model
from dash_jax.model import Context, KeyValues, ModelConfig
from dash_jax.sharding import make_mesh

CONFIG = ModelConfig(
    vocab_size=48,
    known_ids=40,
    hidden_size=32,
    layers=3,
    heads=4,
    kv_heads=2,
    head_size=8,
    mlp_size=40,
    tied=False,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    qk_norm=True,
    remat="none",
)
N, G, P, C = 8, 2, 6, 5
FAST_COMPILE = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 12):  # a third of the time again; the option is gone in later ones
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False


def make_params(config):
    rng, (shapes, _) = np.random.default_rng(0), model.weight_axes(config)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0.1, 0.3, leaf.shape), leaf.dtype), shapes)


PARAMS = make_params(CONFIG)
RNG = np.random.default_rng(1)
PROMPTS = jnp.asarray(RNG.integers(0, 40, (N, 1, P)), jnp.int32)
LENGTHS = jnp.asarray([6, 1, 3, 6, 2, 0, 5, 4], jnp.int32)  # 0: a row that is all padding
TOKENS = jnp.asarray(RNG.integers(0, 40, (N, G, C)), jnp.int32)
POSITIONS = jnp.broadcast_to(LENGTHS[:, None, None] + jnp.arange(C, dtype=jnp.int32)[None, None], (N, G, C))


def completion_hidden(params, config, prompts=PROMPTS, lengths=LENGTHS, tokens=TOKENS):
    """Hidden states of completions behind their prompts: prefill and teacher forcing together."""
    places = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32)[None, None], prompts.shape)
    _, own = model.forward(params, config, prompts, places)
    context = Context(KeyValues(own.k[:, :, 0], own.v[:, :, 0]), lengths)
    return model.forward(params, config, tokens, POSITIONS, context)[0]


def loss(params, config):
    """Minus the mean log-prob of each next token of the completions."""
    hidden = completion_hidden(params, config)[:, :, :-1]
    logprobs = jax.nn.log_softmax(model.logits(params, config, hidden))
    return -jnp.take_along_axis(logprobs, TOKENS[:, :, 1:, None], axis=-1).mean()


jitted_hidden = jax.jit(completion_hidden, static_argnums=1, compiler_options=FAST_COMPILE)
loss_and_gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1, compiler_options=FAST_COMPILE)


def test_gradients_are_finite_and_reach_every_weight():
    for path, leaf in jax.tree.leaves_with_path(loss_and_gradient(PARAMS, CONFIG)[1]):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 1e-6, path


def test_the_gradient_is_the_slope_of_the_loss():
    """Along its own direction, by central differences."""
    start, slope = jax.device_get((PARAMS, loss_and_gradient(PARAMS, CONFIG)[1]))
    squared = float(sum((leaf**2).sum() for leaf in jax.tree.leaves(slope)))
    step = 1e-2 / squared**0.5

    def moved(by):
        params = jax.tree.map(lambda leaf, direction: leaf + by * direction, start, slope)
        return float(loss_and_gradient(params, CONFIG)[0])

    assert (moved(step) - moved(-step)) / (2 * step) == pytest.approx(squared, rel=1e-2)


def test_rematerialisation_recomputes_and_changes_no_gradient():
    products, (_, expected) = {}, loss_and_gradient(PARAMS, CONFIG)
    for remat in ("none", "dots", "full"):
        config = dataclasses.replace(CONFIG, remat=remat)
        products[remat] = str(loss_and_gradient.trace(PARAMS, config).jaxpr).count("dot_general")
        _, ours = loss_and_gradient(PARAMS, config)
        close = jax.tree.map(lambda a, b: np.abs(a - b).max() < 1e-6, ours, expected)
        assert all(jax.tree.leaves(close)), remat
    assert products["none"] < products["dots"] < products["full"]


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_a_mesh_changes_nothing(shape):
    expected = jitted_hidden(PARAMS, CONFIG)
    mesh = make_mesh(*shape)
    placed = jax.device_put(PARAMS, model.weight_shardings(CONFIG, mesh))
    split = (
        placed["layers"]["qkv"].addressable_shards[0].data.size * mesh.shape["fsdp"] * mesh.shape["tensor"]
    )
    assert split == PARAMS["layers"]["qkv"].size
    with jax.set_mesh(mesh):
        hidden = jitted_hidden(placed, CONFIG)
    assert hidden.addressable_shards[0].data.shape[0] == N // (mesh.shape["data"] * mesh.shape["fsdp"])
    np.testing.assert_allclose(hidden, expected, atol=1e-5, rtol=0)


def test_a_row_depends_on_nothing_but_itself():
    """The same hidden states among other prompts, other samples of its prompt, and other padding."""
    n, g = 2, 1
    others = jnp.ones((N, G, C), bool).at[n, g].set(False)
    tokens = jnp.where(others, (TOKENS + 7) % 40, TOKENS)
    prompts = ((PROMPTS + 7) % 40).at[n, :, : LENGTHS[n]].set(PROMPTS[n, :, : LENGTHS[n]])
    before, after = jitted_hidden(PARAMS, CONFIG), jitted_hidden(PARAMS, CONFIG, prompts, LENGTHS, tokens)
    np.testing.assert_array_equal(before[n, g], after[n, g])
    assert (np.abs(before - after).max(axis=(2, 3)) > 1e-3)[others[:, :, 0]].all()


def test_a_position_sees_nothing_behind_it():
    changed = TOKENS.at[:, :, 3].add(1)
    before, after = jitted_hidden(PARAMS, CONFIG), jitted_hidden(PARAMS, CONFIG, PROMPTS, LENGTHS, changed)
    np.testing.assert_array_equal(before[:, :, :3], after[:, :, :3])
    assert (np.abs(before - after)[:, :, 3:].max(axis=-1) > 1e-3).all()


def test_bfloat16_products_have_float32_sums():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    hidden, expected = jitted_hidden(PARAMS, config), jitted_hidden(PARAMS, CONFIG)
    assert hidden.dtype == jnp.float32
    assert 1e-4 < np.abs(hidden - expected).max() < 0.1
    scores = model.logits(PARAMS, config, hidden)
    assert scores.dtype == jnp.float32
    rounded = (np.asarray(x.astype(jnp.bfloat16), np.float64) for x in (hidden, PARAMS["head"]))
    exact = np.matmul(*rounded)
    np.testing.assert_allclose(scores[..., :40], exact[..., :40], atol=1e-5)  # no rounding of the sums
    gradients = jax.eval_shape(lambda params: jax.grad(loss)(params, config), PARAMS)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradients))


def test_the_first_weights_are_small_matrices_zero_biases_and_unit_norms():
    weights = jax.jit(model.init, static_argnums=0, compiler_options=FAST_COMPILE)(CONFIG, jax.random.key(0))
    shapes, axes = model.weight_axes(CONFIG)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), weights) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), shapes
    )
    for path, leaf in jax.tree.leaves_with_path(weights):
        name = jax.tree_util.keystr(path)
        if "norm" in name or "bias" in name:
            assert (leaf == (1 if "norm" in name else 0)).all(), name
        else:
            assert float(leaf.std()) == pytest.approx(0.02, rel=0.1), name
    assert axes["layers"]["qkv"] == (None, "embed", "kv_heads", None, None)
    first, second, _ = weights["layers"]["qkv"]
    assert (first != second).any()


@pytest.mark.parametrize(
    ("tokens", "positions"),
    [
        (TOKENS[0], POSITIONS[0]),
        (TOKENS, POSITIONS[:, :1]),
        (TOKENS.astype(jnp.float32), POSITIONS),
        (TOKENS, POSITIONS.astype(jnp.float32)),
    ],
    ids=["rank", "shape", "float tokens", "float positions"],
)
def test_wrong_ranks_shapes_and_dtypes_are_refused(tokens, positions):
    with pytest.raises(TypeCheckError):
        model.forward(PARAMS, CONFIG, tokens, positions)
