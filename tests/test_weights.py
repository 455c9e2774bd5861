"""Loading and saving against transformers: golden logits, refusals, round trips, placement, memory."""

import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from safetensors.numpy import load_file, save_file

from dash_jax import hf_config, hf_tensors, model, weights
from dash_jax.model import Context, KeyValues, ModelConfig
from dash_jax.sharding import AXES, make_mesh
from dash_jax.types import UserError

GOLDEN = pathlib.Path(__file__).parent / "golden"
VARIANTS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
REFERENCE = pathlib.Path(__file__).parents[2] / "shared/reference/smollm2_reference.json"
KNOWN_IDS = 64

FAST_COMPILE = {"xla_backend_optimization_level": 0}
forward = jax.jit(model.forward, static_argnums=1, compiler_options=FAST_COMPILE)
decode_step = jax.jit(model.decode_step, static_argnums=1, compiler_options=FAST_COMPILE)


def one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)


def read_config(folder, known_ids=KNOWN_IDS, max_needed_positions=None) -> ModelConfig:
    return weights.model_config(
        folder, known_ids=known_ids, dtype="float32", remat="none", max_needed_positions=max_needed_positions
    )


def load(folder, mesh=None):
    config = read_config(folder)
    return weights.load(folder, config, mesh or one_device()), config


def golden(name):
    with np.load(GOLDEN / name / "logits.npz") as arrays:
        return arrays["tokens"], arrays["logits"]


def positions_of(tokens):
    return np.broadcast_to(np.arange(tokens.shape[-1], dtype=np.int32), tokens.shape)


def prefill_logits(params, config, tokens):
    hidden, _ = forward(params, config, tokens[:, None], positions_of(tokens)[:, None])
    return np.asarray(model.logits(params, config, hidden[:, 0]))


def assert_same_logits(ours, theirs):
    """1e-4 in the logits, and 1e-6 in KL(theirs, ours) at every position."""
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
    ours, theirs = (x - np.logaddexp.reduce(x, -1, np.float64, keepdims=True) for x in (ours, theirs))
    assert (np.exp(theirs) * (theirs - ours)).sum(axis=-1).max() < 1e-6


# --- Golden logits of transformers -------------------------------------------------------------

LENGTHS, STEPS = [17, 21], 26  # two prompts of different length, each continued by 26 tokens
STARTS = np.array(LENGTHS, np.int32)[:, None]


def continuations(x):
    return np.stack([row[length : length + STEPS] for row, length in zip(x, LENGTHS, strict=True)])


@functools.cache
def prefilled(name):
    """Parameters, config, and all tokens as context: what lies beyond LENGTHS must not be seen."""
    params, config = load(GOLDEN / name)
    tokens, _ = golden(name)
    hidden, own = forward(params, config, tokens[:, None], positions_of(tokens)[:, None])
    shared = KeyValues(own.k[:, :, 0], own.v[:, :, 0])
    return params, config, hidden[:, 0], Context(shared, jnp.asarray(LENGTHS, jnp.int32))


def test_the_golden_files_are_all_there():
    assert len(VARIANTS) == 12
    assert sum(file.stat().st_size for file in GOLDEN.rglob("*")) < 1.5e6


@pytest.mark.parametrize("name", VARIANTS)
def test_prefill_gives_the_logits_of_transformers(name):
    params, config, hidden, _ = prefilled(name)
    assert_same_logits(np.asarray(model.logits(params, config, hidden)), golden(name)[1])


@pytest.mark.parametrize("name", VARIANTS)
def test_completions_against_a_shared_prompt_give_the_logits_of_transformers(name):
    tokens, expected = golden(name)
    params, config, _, context = prefilled(name)
    inputs = np.repeat(continuations(tokens)[:, None], 2, axis=1)
    hidden, _ = forward(params, config, inputs, STARTS[:, None] + positions_of(inputs), context)
    for sample in range(2):
        ours = np.asarray(model.logits(params, config, hidden[:, sample]))
        assert_same_logits(ours, continuations(expected))


@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_step_by_step_gives_the_logits_of_transformers(name):
    tokens, expected = golden(name)
    params, config, _, context = prefilled(name)
    steps = continuations(tokens)
    prompts = model.unstack(context.layers, config.layers)
    layered = {**params, "layers": model.unstack(params["layers"], config.layers)}
    # What is not written yet must not be seen.
    k = jnp.full((2, 1, config.kv_heads, config.head_size, STEPS), 1e3)
    past = [KeyValues(k, k.swapaxes(-1, -2))] * config.layers
    hidden = []
    for step in range(STEPS):
        token, slot = steps[:, step, None], np.int32(step)
        x, past = decode_step(
            layered, config, token, STARTS + slot, prompts, context.lengths, past, jnp.asarray(slot)
        )
        hidden.append(x[:, 0])
    ours = np.asarray(model.logits(params, config, jnp.stack(hidden, axis=1)))
    assert_same_logits(ours, continuations(expected))


def test_padding_of_the_prompt_changes_nothing():
    """Hidden states of completions behind prompts of 17 and 21 tokens, padded to 21 and to 28 with id 3."""
    tokens, _ = golden("qwen2")
    params, config, whole, _ = prefilled("qwen2")
    inputs = continuations(tokens)[:, None]
    expected = continuations(np.asarray(whole))
    for width in (21, 28):
        prompts = np.where(np.arange(width) < STARTS, tokens[:, :width], 3).astype(np.int32)[:, None]
        _, own = forward(params, config, prompts, positions_of(prompts))
        context = Context(KeyValues(own.k[:, :, 0], own.v[:, :, 0]), jnp.asarray(LENGTHS, jnp.int32))
        hidden, _ = forward(params, config, inputs, STARTS[:, None] + positions_of(inputs), context)
        np.testing.assert_allclose(hidden[:, 0], expected, atol=1e-5, rtol=0)


def test_ids_that_the_tokenizer_lacks_get_no_probability():
    tokens, expected = golden("llama")
    config = read_config(GOLDEN / "llama", known_ids=60)
    ours = prefill_logits(weights.load(GOLDEN / "llama", config, one_device()), config, tokens)
    np.testing.assert_allclose(ours[..., :60], expected[..., :60], atol=1e-4, rtol=0)
    assert (jax.nn.softmax(ours)[..., 60:] == 0).all()
    assert np.isfinite(ours).all()


# --- Placement -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("qwen3_biases", (2, 2, 2)),
        ("qwen2_bf16_sharded", (2, 2, 2)),
        ("llama_biases", (1, 8, 1)),
        ("llama_untied", (1, 4, 2)),
        ("qwen2", (1, 1, 8)),
        ("qwen2_tied", (8, 1, 1)),
    ],
)
def test_placement_on_a_mesh_changes_no_bit(name, shape):
    single, config = load(GOLDEN / name)
    mesh = make_mesh(*shape)
    placed, _ = load(GOLDEN / name, mesh)
    jax.tree.map(np.testing.assert_array_equal, placed, single)
    expected = model.weight_shardings(config, mesh)
    right = jax.tree.map(lambda leaf, where: leaf.sharding.is_equivalent_to(where, leaf.ndim), placed, expected)
    assert all(jax.tree.leaves(right))
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(placed))


_MEASURE = """
import gc, sys
from dash_jax import weights
from dash_jax.sharding import make_mesh
import jax

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def load(folder):
    config = weights.model_config(folder, known_ids=1, dtype="float32", remat="none", max_needed_positions=None)
    return weights.load(folder, config, make_mesh())

for folder in sys.argv[1:]:
    placed = sum(leaf.nbytes for leaf in jax.tree.leaves(load(folder)))  # compiles
    gc.collect()
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    params = load(folder)
    print((status("VmHWM") - before) / 2**20, placed / 2**20)
    del params
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory from /proc")
def test_loading_needs_less_than_one_and_a_half_tensors_beside_the_parameters(tmp_path):
    """Three layers of three 32 MB tensors: holding a stack, or a tensor twice, would be seen."""
    D, F, L, V = 1024, 8192, 3, 64
    tree = json.loads((GOLDEN / "llama/config.json").read_text())
    tree |= dict(hidden_size=D, intermediate_size=F, num_hidden_layers=L, vocab_size=V)
    tree |= dict(num_attention_heads=1, num_key_value_heads=1, head_dim=64)
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for layer in range(L):
        of_layer = {
            **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (D,)),
            **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (64, D)),
            **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (F, D)),
            **{"self_attn.o_proj": (D, 64), "mlp.down_proj": (D, F)},
        }
        shapes.update({f"model.layers.{layer}.{key}.weight": shape for key, shape in of_layer.items()})
    dtypes = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
    for name, dtype in dtypes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(tree))
        tensors = {key: np.ones(shape, dtype) for key, shape in shapes.items()}
        save_file(tensors, tmp_path / name / "model.safetensors")
    # A fixed threshold, else malloc keeps what was freed, and the second load hides in it.
    environment = {**os.environ, "XLA_FLAGS": "", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", _MEASURE, *(str(tmp_path / name) for name in dtypes)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for line in run.stdout.splitlines():
        peak, placed = map(float, line.split())
        print(f"placed {placed:.0f} MB, peak {peak - placed:.0f} MB above, largest tensor 32 MB")
        assert placed < peak < placed + 1.5 * 32
