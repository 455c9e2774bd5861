"""Loading and saving against transformers: golden logits, refusals, round trips, placement, memory."""

import dataclasses
import functools
import json
import os
import pathlib
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

from dash_jax import hf_config, hf_tensors, model, rope, weights
from dash_jax.errors import UserError
from dash_jax.model import Context, KeyValues, ModelConfig
from dash_jax.sharding import AXES, make_mesh
from dash_jax.tokenization import CharacterTokenizer, HuggingFaceTokenizer

GOLDEN = pathlib.Path(__file__).parent / "golden"
VARIANTS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
REFERENCE = pathlib.Path(__file__).parents[2] / "shared/reference/smollm2_reference.json"
ARGUMENTS = {"known_ids": 64, "dtype": "float32", "remat": "none", "max_needed_positions": None}

FAST_COMPILE = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 12):  # a third of the time again; the option is gone in later ones
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False
forward = jax.jit(model.forward, static_argnums=1, compiler_options=FAST_COMPILE)


def one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)


def read_config(folder, **changes) -> ModelConfig:
    return weights.model_config(folder, **(ARGUMENTS | changes))


def load(folder, mesh=None):
    config = read_config(folder)
    return weights.load(folder, config, mesh or one_device()), config


@functools.cache
def loaded(name):
    """A golden model on the default device and off the mesh, which compiles less."""
    params, config = load(GOLDEN / name)
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), params), config


def golden(name):
    with np.load(GOLDEN / name / "logits.npz") as arrays:
        return arrays["tokens"], arrays["logits"]


def positions_of(tokens):
    return jnp.asarray(np.broadcast_to(np.arange(tokens.shape[-1], dtype=np.int32), tokens.shape))


def prefill_logits(params, config, tokens):
    hidden, _ = forward(params, config, tokens[:, None], positions_of(tokens)[:, None])
    return np.asarray(model.logits(params, config, hidden[:, 0]))


def assert_same_logits(ours, theirs):
    """1e-4 in the logits, and 1e-6 in KL(theirs, ours) at every position."""
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
    ours, theirs = (x - np.logaddexp.reduce(x, -1, np.float64, keepdims=True) for x in (ours, theirs))
    assert (np.exp(theirs) * (theirs - ours)).sum(axis=-1).max() < 1e-6


def assert_same_parameters(ours, theirs):
    """Bit for bit, and the same config."""
    assert ours[1] == theirs[1]
    jax.tree.map(np.testing.assert_array_equal, ours[0], theirs[0])


# --- Golden logits of transformers -------------------------------------------------------------

LENGTHS, STEPS = (
    np.array([17, 21], np.int32),
    26,
)  # two prompts of different length, each continued by 26 tokens


def continuations(x):
    return np.stack([row[length : length + STEPS] for row, length in zip(x, LENGTHS, strict=True)])


@functools.partial(jax.jit, static_argnums=1, compiler_options=FAST_COMPILE)
def three_ways(params, config, tokens, completions):
    """Logits of prefill, of completions against the prompts in one pass, and of decoding them step by step.

    The context is the prefill of all tokens: what lies beyond LENGTHS must not be seen.
    """
    N, G, C = completions.shape
    whole, own = model.forward(params, config, tokens[:, None], positions_of(tokens)[:, None])
    context = Context(KeyValues(own.k[:, :, 0], own.v[:, :, 0]), jnp.asarray(LENGTHS))
    positions = LENGTHS[:, None, None] + positions_of(completions)
    at_once, _ = model.forward(params, config, completions, positions, context)

    prompts = model.unstack(context.layers, config.layers)
    layered = {**params, "layers": model.unstack(params["layers"], config.layers)}

    rotations = rope.rotation(config.rope, config.head_size, jnp.arange(tokens.shape[1] + C))

    def step(past, slot):
        token, position = completions[:, :, slot], jnp.broadcast_to(LENGTHS[:, None] + slot, (N, G))
        hidden, past = model.decode_step(
            layered, config, token, position, prompts, context.lengths, past, slot,
            jnp.zeros((N, G), jnp.int32), rotations,
        )  # fmt: skip
        return past, hidden

    k = jnp.full((N, G, config.kv_heads, config.head_size, C), 1e3)  # what is not written must not be seen
    past = [KeyValues(k, k.swapaxes(-1, -2))] * config.layers
    _, stepwise = jax.lax.scan(step, past, jnp.arange(C, dtype=jnp.int32))
    ways = whole[:, 0], at_once, jnp.moveaxis(stepwise, 0, 2)
    return tuple(model.logits(params, config, hidden) for hidden in ways)


@functools.cache
def computed(name):
    params, config = loaded(name)
    tokens = jnp.asarray(golden(name)[0])
    completions = jnp.asarray(np.repeat(continuations(tokens)[:, None], 2, axis=1))
    return tuple(map(np.asarray, three_ways(params, config, tokens, completions)))


def test_the_golden_files_are_all_there():
    assert len(VARIANTS) == 12
    assert sum(file.stat().st_size for file in GOLDEN.rglob("*")) < 1.5e6


@pytest.mark.parametrize("name", VARIANTS)
def test_prefill_gives_the_logits_of_transformers(name):
    ours, _, _ = computed(name)
    assert_same_logits(ours, golden(name)[1])


@pytest.mark.parametrize("name", VARIANTS)
def test_completions_against_a_shared_prompt_give_the_logits_of_transformers(name):
    _, ours, _ = computed(name)
    for sample in (0, 1):
        assert_same_logits(ours[:, sample], continuations(golden(name)[1]))


@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_step_by_step_gives_the_logits_of_transformers(name):
    _, _, ours = computed(name)
    for sample in (0, 1):
        assert_same_logits(ours[:, sample], continuations(golden(name)[1]))


def test_padding_of_the_prompt_changes_nothing():
    """Hidden states of completions behind prompts padded to 28 with id 3, and of the unpadded whole."""
    tokens, _ = golden("qwen2")
    params, config = loaded("qwen2")
    starts = LENGTHS[:, None]
    prompts = np.where(np.arange(28) < starts, tokens[:, :28], 3).astype(np.int32)[:, None]
    _, own = forward(params, config, prompts, positions_of(prompts))
    context = Context(KeyValues(own.k[:, :, 0], own.v[:, :, 0]), jnp.asarray(LENGTHS))
    inputs = continuations(tokens)[:, None]
    hidden, _ = forward(params, config, inputs, starts[:, None] + positions_of(inputs), context)
    whole, _ = forward(params, config, tokens[:, None], positions_of(tokens)[:, None])
    np.testing.assert_allclose(hidden[:, 0], continuations(np.asarray(whole[:, 0])), atol=1e-5, rtol=0)


def test_ids_that_the_tokenizer_lacks_get_no_probability():
    params, config = loaded("llama")
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(5, 32)), jnp.float32)
    everything = model.logits(params, config, hidden)
    known = model.logits(params, read_config(GOLDEN / "llama", known_ids=60), hidden)
    np.testing.assert_array_equal(known[:, :60], everything[:, :60])
    assert (jax.nn.softmax(known)[:, 60:] == 0).all()
    assert np.isfinite(known).all()


# --- Placement -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama_biases", (2, 2, 2)),
        ("qwen3_biases", (1, 8, 1)),
        ("qwen2_bf16_sharded", (1, 2, 4)),
    ],
)
def test_placement_on_a_mesh_changes_no_bit(name, shape):
    single, config = loaded(name)
    mesh = make_mesh(*shape)
    placed, _ = load(GOLDEN / name, mesh)
    jax.tree.map(np.testing.assert_array_equal, placed, single)
    expected = model.weight_shardings(config, mesh)
    right = jax.tree.map(
        lambda leaf, where: leaf.sharding.is_equivalent_to(where, leaf.ndim), placed, expected
    )
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
    limits = {"known_ids": 1, "max_needed_positions": None}
    config = weights.model_config(folder, dtype="float32", remat="none", **limits)
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
    """Two layers of three 32 MB tensors: holding a stack, or a tensor twice, would be seen."""
    D, F, L, V = 1024, 8192, 2, 64
    tree = json.loads((GOLDEN / "llama/config.json").read_text())
    tree |= {"hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "vocab_size": V}
    tree |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for layer in range(L):
        of_layer = {
            **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (D,)),
            **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (64, D)),
            **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (F, D)),
            "self_attn.o_proj": (D, 64),
            "mlp.down_proj": (D, F),
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


# --- config.json ---------------------------------------------------------------------------------


def edited(tmp_path, name, **changes) -> pathlib.Path:
    """A copy of a golden folder with other settings in config.json; None removes one."""
    folder = tmp_path / name
    shutil.copytree(GOLDEN / name, folder)
    tree = json.loads((folder / "config.json").read_text()) | changes
    tree = {key: value for key, value in tree.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


def refused(match, folder, **arguments):
    with pytest.raises(UserError, match=match) as caught:
        read_config(folder, **arguments)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("llama", {"model_type": "mistral"}, 'model_type="mistral": supported are llama, qwen2, qwen3'),
        ("llama", {"model_type": None}, r"model_type=\(absent\)"),
        ("llama", {"hidden_act": "gelu"}, 'hidden_act="gelu"'),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config=.*gptq"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"hidden_size": None}, r"hidden_size=\(absent\): it must be a positive whole number"),
        ("llama", {"num_hidden_layers": 2.0}, "num_hidden_layers=2.0"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3: it must divide"),
        ("llama", {"head_dim": 7}, "head_dim=7"),
        ("llama", {"rms_norm_eps": "1e-6"}, 'rms_norm_eps="1e-6": it must be a positive number'),
        ("llama", {"attention_bias": "yes"}, 'attention_bias="yes": it must be true or false'),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32}, "use_sliding_window=true"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types=.*sliding_attention",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "longrope"}},
            'rope_type="longrope": supported are default',
        ),
        (
            "llama",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "full_attention=.* not impl",
        ),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, r"factor=\(absent\)"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "attn_factor": 2.0}},
            "attn_factor=2.0 is not impl",
        ),
        (
            "llama",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 is not impl",
        ),
        ("llama", {"rope_scaling": "linear"}, 'rope settings "linear" must be'),
        ("llama", {"rope_theta": 5e5}, "rope_theta is both 500000.0 and 10000.0"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type is both linear and default"),
        (
            "llama_llama3",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 2,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "high_freq_factor=4: it must be above",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, name, changes, match):
    refused(match, edited(tmp_path, name, **changes))


def test_limits_that_do_not_fit_the_model_are_refused():
    refused("vocab_size=64: the tokenizer has 65 ids", GOLDEN / "llama", known_ids=65)
    for name in ("llama", "llama_dynamic"):
        assert read_config(GOLDEN / name, max_needed_positions=64).max_positions == 64
        refused("max_position_embeddings=64: 65 are needed", GOLDEN / name, max_needed_positions=65)


def test_unreadable_folders_are_refused(tmp_path):
    refused("no such file", tmp_path)
    for text, match in (("{", "cannot be read as JSON"), ("[]", "holds a list")):
        (tmp_path / "config.json").write_text(text)
        refused(match, tmp_path)
    shutil.copy(GOLDEN / "llama/config.json", tmp_path)
    refused("holds neither model.safetensors nor", tmp_path)


def test_settings_that_are_absent_mean_what_transformers_takes_them_for(tmp_path):
    tree = json.loads((GOLDEN / "qwen3/config.json").read_text())
    for family, kv_heads, head_size in (("llama", 8, 16), ("qwen2", 32, 4), ("qwen3", 32, 128)):
        absent = {"num_key_value_heads", "head_dim", "rope_parameters", "rms_norm_eps", "tie_word_embeddings"}
        kept = {key: value for key, value in tree.items() if key not in absent}
        kept |= {
            "model_type": family,
            "hidden_size": 128,
            "num_attention_heads": 8 if family == "llama" else 32,
        }
        config = hf_config.parse(kept, "here", **ARGUMENTS)
        assert (config.kv_heads, config.head_size, config.rope.theta) == (kv_heads, head_size, 10_000.0)
        assert (config.norm_epsilon, config.tied) == (1e-6, False)


ROPES = {
    "default": {"rope_theta": 5e5},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 5e5,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, own attention factor": {
        "factor": 4.0,
        "attention_factor": 0.7,
        "original_max_position_embeddings": 128,
    },
    "yarn, mscale": {
        "factor": 40.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 32,
    },
    "yarn, one mscale": {"factor": 4.0, "mscale": 1.2, "original_max_position_embeddings": 128},
    "yarn, betas": {
        "factor": 4.0,
        "beta_fast": 20.0,
        "beta_slow": 2.5,
        "original_max_position_embeddings": 99,
    },
    "yarn, not truncated": {"factor": 4.0, "truncate": False, "original_max_position_embeddings": 99},
    "yarn, no original": {"factor": 4.0},
    "yarn, tiny original": {"factor": 4.0, "original_max_position_embeddings": 2},
    "yarn, equal bounds": {"factor": 4.0, "truncate": False, "beta_fast": 2.0, "beta_slow": 2.0},
    "yarn, small factor": {"factor": 1.0, "original_max_position_embeddings": 128},
}


@pytest.mark.parametrize("style", ["transformers 5", "transformers 4"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_equals_that_of_transformers(name, style):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": name.split(",")[0], "rope_theta": 10_000.0, **ROPES[name]}
    tree = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), 256)
    tree |= {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
    }
    if style == "transformers 4":
        theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
        tree |= {"rope_theta": theta, "rope_scaling": None if kind == "default" else {"type": kind, **rope}}
    else:
        tree["rope_parameters"] = rope
    config = hf_config.parse(json.loads(json.dumps(tree)), "here", **ARGUMENTS)
    ours, scale = rope.rotation_frequencies(config.rope, config.head_size)
    theirs = transformers.LlamaConfig(**{key: value for key, value in tree.items() if key != "model_type"})
    kind = theirs.rope_parameters["rope_type"]
    formula = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    expected, expected_scale = formula(theirs)
    np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-6)
    assert scale == pytest.approx(expected_scale, rel=1e-6)


# --- Tensors -------------------------------------------------------------------------------------

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def edited_tensors(tmp_path, name, change, **config_changes) -> pathlib.Path:
    folder = edited(tmp_path, name, **config_changes)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_folder_without_head_is_tied_whatever_its_flag_says(tmp_path, caplog):
    """bug case 46: tied without head, tied with an equal head, untied (above), head bias (below)."""
    assert read_config(GOLDEN / "qwen2_tied").tied
    assert not caplog.records
    folder = edited(tmp_path, "qwen2_tied", tie_word_embeddings=False)
    assert_same_parameters(load(folder), loaded("qwen2_tied"))
    assert "tie_word_embeddings=false but lm_head.weight is missing" in caplog.text


def test_a_tied_folder_may_hold_an_equal_head(tmp_path, caplog):
    folder = edited_tensors(tmp_path, "qwen2_tied", lambda t: t.update({HEAD: t[EMBEDDING].copy()}))
    assert_same_parameters(load(folder), loaded("qwen2_tied"))
    assert "tie_word_embeddings=true but lm_head.weight is there" in caplog.text


def change_last_value(tensors):
    tensors[HEAD] = tensors[EMBEDDING].copy()
    tensors[HEAD][-1, -1] += 0.01


def rename(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def drop(key):
    return lambda tensors: tensors.pop(key)


def replace(key, make):
    return lambda tensors: tensors.update({key: make(tensors[key])})


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        (
            "qwen2_tied",
            change_last_value,
            "lm_head.weight differs from model.embed_tokens.weight.*=true",
        ),
        (
            "qwen2",
            lambda t: t.update({"lm_head.bias": np.zeros(64, np.float32)}),
            r"lm_head.bias \(64,\) is no weight",
        ),
        ("qwen2", drop(Q), r"layers.1.self_attn.q_proj.weight \(32, 32\) is missing"),
        ("qwen2", drop("model.layers.0.self_attn.k_proj.bias"), r"k_proj.bias \(16,\) is missing"),
        ("llama", rename(Q, "layers.1.self_attn.q_proj.weight"), r"model.layers.1.* \(32, 32\) is missing"),
        (
            "llama",
            replace(Q, lambda x: x[:-1]),
            r"q_proj.weight is \(31, 32\), but config.json makes it \(32, 32\)",
        ),
        ("llama", replace(EMBEDDING, lambda x: x[:60]), r"embed_tokens.weight is \(60, 32\).*\(64, 32\)"),
        ("llama", replace(Q, lambda x: x.astype(np.int8)), r"q_proj.weight \(32, 32\) is I8; convert it"),
        (
            "llama_biases",
            lambda t: t.update({"a": t[Q]}),
            r"model.safetensors: a \(32, 32\) is no weight of this model",
        ),
    ],
)
def test_tensors_that_are_not_the_models_are_refused(tmp_path, name, change, match):
    folder = edited_tensors(tmp_path, name, change)
    with pytest.raises(UserError, match=match) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_buffers_of_old_folders_are_left_alone(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = edited_tensors(tmp_path, "llama", lambda t: t.update({name: np.ones(4, np.float32)}))
    assert_same_parameters(load(folder), loaded("llama"))


def test_float16_is_read(tmp_path):
    tensors = {}

    def halve(loaded):
        tensors.update({key: value.astype(np.float16) for key, value in loaded.items()})
        loaded.update(tensors)

    params, _ = load(edited_tensors(tmp_path, "llama", halve))
    np.testing.assert_array_equal(params["embedding"], tensors[EMBEDDING].astype(np.float32))


def test_files_that_contradict_the_index_are_refused(tmp_path):
    def folder(number):
        return edited(tmp_path / str(number), "qwen2_bf16_sharded")

    def refuses(folder, match):
        with pytest.raises(UserError, match=match):
            load(folder)

    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    twice = folder(1)
    save_file(load_file(twice / second) | {EMBEDDING: load_file(twice / first)[EMBEDDING]}, twice / second)
    refuses(twice, rf"{second}: {EMBEDDING} \(64, 32\) is in {first} too")
    unlisted = folder(2)
    save_file(load_file(unlisted / second) | {"more": np.zeros(2, np.float32)}, unlisted / second)
    refuses(unlisted, rf"{second}: more \(2,\) is not listed there")
    lost = folder(3)
    tensors = load_file(lost / first)
    tensors.pop(EMBEDDING)
    save_file(tensors, lost / first)
    refuses(lost, rf"{first}: {EMBEDDING} is missing, though")
    (lost / second).unlink()
    refuses(lost, rf"{second}: no whole safetensors file")
    doubled = folder(4)
    index = doubled / "model.safetensors.index.json"
    index.write_text(
        index.read_text().replace('"weight_map": {', f'"weight_map": {{"{EMBEDDING}": "{first}",')
    )
    refuses(doubled, f"index.json: cannot be read as JSON .{EMBEDDING} stands twice")
    index.write_text("[]")
    refuses(doubled, "index.json: holds a list")
    both = folder(5)
    shutil.copy(GOLDEN / "qwen2/model.safetensors", both)
    refuses(both, "model.safetensors: stands beside model.safetensors.index.json")


def test_a_cut_file_is_refused(tmp_path):
    folder = edited(tmp_path, "llama")
    whole = (folder / "model.safetensors").read_bytes()
    for size in (4, 100, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"model.safetensors: no whole safetensors file"):
            load(folder)


# --- Saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_biases", "qwen3_biases", "qwen2_bf16_sharded"])
def test_what_is_saved_is_loaded_again(tmp_path, name, monkeypatch):
    monkeypatch.setattr(hf_tensors, "_FILE_BYTES", 30_000)
    params, config = loaded(name)
    if name == "llama_biases":
        params = jax.device_put(params, model.weight_shardings(config, make_mesh(2, 2, 2)))
    weights.save(tmp_path / "out", params, config, source=GOLDEN / name)
    assert_same_parameters(load(tmp_path / "out"), loaded(name))
    assert len(list((tmp_path / "out").glob("model-0000*.safetensors"))) > 1
    assert {file.name for file in tmp_path.iterdir()} == {"out"}
    dtypes = {tensor.dtype for tensor in hf_tensors.find(tmp_path / "out").values()}
    assert dtypes == {"BF16" if "bf16" in name else "F32"}


def test_a_dtype_can_be_asked_for(tmp_path):
    params, config = loaded("qwen2")
    weights.save(tmp_path / "out", params, config, source=GOLDEN / "qwen2", dtype="bfloat16")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    rounded = jax.tree.map(
        lambda leaf: np.asarray(leaf).astype(ml_dtypes.bfloat16).astype(np.float32), params
    )
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "out")[0], rounded)


def test_generation_config_and_tokenizer_come_along(tmp_path):
    folder = edited(tmp_path, "llama", torch_dtype="float32")
    (folder / "notes.txt").write_text("mine")
    params, config = load(folder)
    (tmp_path / "out").mkdir()  # an empty folder may be there
    tokenizer = CharacterTokenizer()
    weights.save(tmp_path / "out", params, config, source=folder, tokenizer=tokenizer, dtype="bfloat16")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    name = "generation_config.json"
    assert (tmp_path / "out" / name).read_text() == (folder / name).read_text()
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"
    copy = HuggingFaceTokenizer(tmp_path / "out")
    assert copy.encode("12+9=") == tokenizer.encode("12+9=")
    assert copy.decode(tokenizer.encode_completion("a\nb ~")) == "a\nb ~"
    assert (copy.eos_ids[0], copy.pad_id) == (tokenizer.eos_ids[0], tokenizer.pad_id)


def test_a_save_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    params, config = loaded("llama")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    for path in (tmp_path / "full", tmp_path / "full/file"):
        with pytest.raises(UserError, match="exists and is not an empty folder"):
            weights.save(path, params, config, source=None)
    with pytest.raises(UserError, match=r"qwen2/config.json: another model than"):
        weights.save(tmp_path / "out", params, config, source=GOLDEN / "qwen2")
    qwen3 = read_config(GOLDEN / "qwen3")
    with pytest.raises(UserError, match="neither Llama nor Qwen2"):
        weights.save(tmp_path / "out", params, qwen3, source=None)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "_save_generation_config", full_disk)
    with pytest.raises(UserError, match=r"out: cannot be written .*No space left"):
        weights.save(tmp_path / "out", params, config, source=None)
    assert [file.name for file in tmp_path.iterdir()] == ["full"]


# --- transformers, live --------------------------------------------------------------------------


def transformers_logits(folder, tokens):
    import torch
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return theirs(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


@pytest.mark.parametrize("name", ["llama_biases", "llama_yarn", "qwen2_tied", "qwen3_biases"])
def test_transformers_loads_what_is_saved_and_agrees(tmp_path, name):
    pytest.importorskip("torch")
    tokens, expected = golden(name)
    source = edited(tmp_path, name, tie_word_embeddings=False)  # wrong for two of them
    weights.save(tmp_path / "out", *loaded(name), source=source)
    np.testing.assert_allclose(transformers_logits(tmp_path / "out", tokens), expected, atol=1e-4)


BUILT_IN = ModelConfig(
    vocab_size=50,
    known_ids=50,
    hidden_size=48,
    layers=3,
    heads=6,
    kv_heads=3,
    head_size=8,
    mlp_size=40,
    remat="none",
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qkv_bias": True, "tied": False},
        {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "norm_epsilon": 1e-5, "head_size": 12},
    ],
)
def test_a_built_in_model_is_saved_and_transformers_agrees(tmp_path, changes):
    config = dataclasses.replace(BUILT_IN, **changes)
    rng, (shapes, _) = np.random.default_rng(0), model.weight_axes(config)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape), np.float32), shapes)
    weights.save(tmp_path / "out", params, config, source=None)
    again = read_config(tmp_path / "out", known_ids=50)
    assert_same_parameters((weights.load(tmp_path / "out", again, one_device()), again), (params, config))
    pytest.importorskip("torch")
    tokens = rng.integers(0, 50, (2, 20), np.int32)
    assert_same_logits(prefill_logits(params, config, tokens), transformers_logits(tmp_path / "out", tokens))


# --- A real model --------------------------------------------------------------------------------


@pytest.mark.skipif("DASH_JAX_SMOLLM2" not in os.environ, reason="DASH_JAX_SMOLLM2 names no folder")
@pytest.mark.skipif(not REFERENCE.exists(), reason="no reference file beside the repository")
def test_smollm2_gives_the_log_probs_and_greedy_tokens_of_transformers():
    cases = json.loads(REFERENCE.read_text())["cases"]
    folder = os.environ["DASH_JAX_SMOLLM2"]
    config = read_config(folder, known_ids=49_152, max_needed_positions=128)
    params = weights.load(folder, config, one_device())
    differences = []
    for case in cases:
        prompt, greedy = case["input_ids"], case["greedy_ids"]
        tokens = np.zeros((1, 96), np.int32)
        tokens[0, : len(prompt) + len(greedy)] = prompt + greedy
        logprobs = jax.nn.log_softmax(prefill_logits(params, config, tokens)[0])
        chosen = np.take_along_axis(np.asarray(logprobs)[:-1], tokens[0, 1:, None], axis=1)[:, 0]
        expected = np.array(case["prompt_logprobs"] + case["greedy_logprobs"])
        differences.append(np.abs(chosen[: len(expected)] - expected).max())
        assert np.asarray(logprobs).argmax(axis=-1)[len(prompt) - 1 :][: len(greedy)].tolist() == greedy
        for token, logprob in case["first_top8"]:
            assert float(logprobs[len(prompt) - 1, token]) == pytest.approx(logprob, abs=1e-3)
    print(f"largest difference of log-probs {max(differences):.1e}")
    assert max(differences) < 1e-3
