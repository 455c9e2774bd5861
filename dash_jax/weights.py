"""Hugging Face folders in and out: safetensors to sharded parameters and back.

`_parts` is the one table that says where a tensor of the file lies in our stacked
and fused weights; loading, checking and saving all read it. Every tensor of a folder
must be in that table, once and in the right shape, and every one of the table in the
folder.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from safetensors import SafetensorError

from dash_jax import hf_config, hf_tensors, model
from dash_jax.errors import UserError
from dash_jax.hf_tensors import Tensor
from dash_jax.model import ModelConfig
from dash_jax.tokenization import Tokenizer

_LOG = logging.getLogger(__name__)
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_RECOMPUTED = ".rotary_emb.inv_freq"  # in old Llama folders


def model_config(
    folder: str | pathlib.Path,
    *,
    known_ids: int,
    dtype: str,
    remat: Literal["none", "dots", "full"],
    max_needed_positions: int | None,
) -> ModelConfig:
    """The model in a Hugging Face folder, from its config.json and the names of its tensors.

    `known_ids` is the number of ids that the tokenizer has. The head is the embedding if the
    flag says so or if there is no other; `load` refuses a folder that contradicts its flag.
    """
    config = hf_config.parse(
        hf_config.read(folder),
        f"{folder}/config.json",
        known_ids=known_ids,
        dtype=dtype,
        remat=remat,
        max_needed_positions=max_needed_positions,
    )
    has_head = _HEAD in hf_tensors.find(folder)
    if config.tied == has_head:
        _LOG.warning(
            "%s: tie_word_embeddings=%s but %s is %s; the head is tied to the embedding",
            *(folder, str(config.tied).lower(), _HEAD, "there" if has_head else "missing"),
        )
    return dataclasses.replace(config, tied=config.tied or not has_head)


def load(folder: str | pathlib.Path, config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Float32 parameters, placed on the mesh.

    The weights are laid out as zeros and filled in place, one tensor of the folder at a time, so
    that a host never holds more than that tensor, in the file's precision, besides what is placed.
    """
    tensors, parts = hf_tensors.find(folder), _parts(config)
    _check(folder, config, tensors, parts)
    shardings = model.weight_shardings(config, mesh)
    shapes, _ = model.weight_axes(config)
    params = jax.jit(lambda: jax.tree.map(jnp.zeros_like, shapes), out_shardings=shardings)()
    for key, part in parts.items():
        group, placement = part.group(params), part.group(shardings)[part.weight]
        piece = _read(tensors[key], NamedSharding(mesh, part.file_spec(placement.spec)))
        group[part.weight] = _insert(
            group[part.weight], piece, part.start, dims=part.dims, order=part.order, placement=placement
        )
        # Wait, else the host runs ahead of the devices and holds many pieces; and touch JAX, which
        # gives the memory of a deleted piece back at its next call only.
        jax.block_until_ready(group[part.weight])
        del piece
        jax.device_put(np.int32(0))
    return params


def save(
    folder: str | pathlib.Path,
    params: dict[str, Any],
    config: ModelConfig,
    *,
    source: str | pathlib.Path | None,
    tokenizer: Tokenizer | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
) -> None:
    """Writes a Hugging Face folder; it appears complete or not at all.

    `source` is the folder that the model was loaded from, None for a built-in model. Its config,
    generation config and, unless `dtype` is given, precision are carried over. `tokenizer` adds its files.
    With several processes all of them call this, and the first one writes.
    """
    folder = pathlib.Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not an empty folder; give another one")
    tree = _output_config(config, source, dtype)
    if source is None and tokenizer is not None:
        tree |= {"eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.pad_id}
    if jax.process_index() != 0:
        _save_tensors(None, params, config, tree["dtype"])
        return
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        _save_tensors(partial, params, config, tree["dtype"])
        _dump(partial / "config.json", tree)
        _save_generation_config(partial, source, tree)
        if tokenizer is not None:
            tokenizer.save(partial)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{folder}: cannot be written ({error}); free some space or give another one"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Where a tensor of the folder lies in one of our weights.

    Its dimensions are taken apart into `dims`, put in our `order`, and stand at `offset` in the
    weight or, if weights are stacked, in layer `layer` of it. Example, values with K heads of size A:
    [K·A, D] in the folder, dims ((K, 1, A), (D,)), order (3, 0, 1, 2), which gives [D, K, 1, A],
    offset (0, 0, R + 1, 0), in qkv [L, D, K, R + 2, A].
    """

    weight: str
    dims: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    offset: tuple[int, ...]
    layer: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(dims) for dims in self.dims)

    @property
    def start(self) -> tuple[int, ...]:
        return self.offset if self.layer is None else (self.layer, *self.offset)

    def group(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The dict of `tree` that holds the weight."""
        return tree if self.layer is None else tree["layers"]

    def file_spec(self, ours: PartitionSpec) -> PartitionSpec:
        """The partition of the folder's tensor that fits ours: rows of heads are split as the heads are."""
        split = tuple(ours)[-len(self.order) :]
        first = np.cumsum([0, *map(len, self.dims)])
        leading = [
            at + next((i for i, n in enumerate(dims) if n > 1), 0)
            for at, dims in zip(first, self.dims, strict=False)
        ]
        return PartitionSpec(*(split[self.order.index(at)] for at in leading))


def _parts(config: ModelConfig) -> dict[str, _Part]:
    """Every tensor that the folder must hold."""
    D, V = config.hidden_size, config.vocab_size
    parts = {
        _EMBEDDING: _Part("embedding", ((V,), (D,)), (0, 1), (0, 0)),
        "model.norm.weight": _Part("final_norm", ((D,),), (0,), (0,)),
    }
    if not config.tied:
        parts[_HEAD] = _Part("head", ((V,), (D,)), (1, 0), (0, 0))
    of_layer = _layer_parts(config)
    for layer in range(config.layers):
        for name, part in of_layer.items():
            parts[f"model.layers.{layer}.{name}"] = dataclasses.replace(part, layer=layer)
    return parts


def _layer_parts(config: ModelConfig) -> dict[str, _Part]:
    D, K, R = config.hidden_size, config.kv_heads, config.queries_per_key
    A, F = config.head_size, config.mlp_size
    parts = {
        "input_layernorm.weight": _Part("attention_norm", ((D,),), (0,), (0,)),
        "self_attn.o_proj.weight": _Part("out", ((D,), (K, R, A)), (1, 2, 3, 0), (0, 0, 0, 0)),
        "post_attention_layernorm.weight": _Part("mlp_norm", ((D,),), (0,), (0,)),
        "mlp.down_proj.weight": _Part("down", ((D,), (F,)), (1, 0), (0, 0)),
    }
    for name, heads, at in (("q", R, 0), ("k", 1, R), ("v", 1, R + 1)):
        rows = (K, heads, A)
        parts[f"self_attn.{name}_proj.weight"] = _Part("qkv", (rows, (D,)), (3, 0, 1, 2), (0, 0, at, 0))
        if config.qkv_bias:
            parts[f"self_attn.{name}_proj.bias"] = _Part("qkv_bias", (rows,), (0, 1, 2), (0, at, 0))
    for at, name in enumerate(("gate", "up")):
        parts[f"mlp.{name}_proj.weight"] = _Part("gate_up", ((1, F), (D,)), (2, 0, 1), (0, at, 0))
        if config.mlp_bias:
            parts[f"mlp.{name}_proj.bias"] = _Part("gate_up_bias", ((1, F),), (0, 1), (at, 0))
    if config.qk_norm:
        parts["self_attn.q_norm.weight"] = _Part("q_norm", ((A,),), (0,), (0,))
        parts["self_attn.k_norm.weight"] = _Part("k_norm", ((A,),), (0,), (0,))
    if config.out_bias:
        parts["self_attn.o_proj.bias"] = _Part("out_bias", ((D,),), (0,), (0,))
    if config.mlp_bias:
        parts["mlp.down_proj.bias"] = _Part("down_bias", ((D,),), (0,), (0,))
    return parts


def _check(
    folder: str | pathlib.Path, config: ModelConfig, tensors: dict[str, Tensor], parts: dict[str, _Part]
) -> None:
    """Refuses a folder whose tensors are not those of the model."""
    tied_head = config.tied and _HEAD in tensors
    if tied_head:
        parts = {**parts, _HEAD: parts[_EMBEDDING]}
    for key, part in parts.items():
        if key not in tensors:
            raise UserError(f"{folder}: {key} {part.shape} is missing; config.json asks for it")
        file, dtype, shape, _ = tensors[key]
        if shape != part.shape:
            raise UserError(
                f"{file}: {key} is {shape}, but config.json makes it {part.shape}; mend config.json"
            )
        if dtype not in hf_tensors.DTYPES:
            raise UserError(
                f"{file}: {key} {shape} is {dtype}; convert it to one of {', '.join(hf_tensors.DTYPES)}"
            )
    for key, tensor in tensors.items():
        if key not in parts and not key.endswith(_RECOMPUTED):
            raise UserError(
                f"{tensor.file}: {key} {tensor.shape} is no weight of this model; mend config.json"
            )
    if tied_head and not tensors[_HEAD].equals(tensors[_EMBEDDING]):
        raise UserError(
            f"{tensors[_HEAD].file}: {_HEAD} differs from {_EMBEDDING}, "
            "but config.json says tie_word_embeddings=true; set it to false, or remove the tensor"
        )


@functools.partial(jax.jit, static_argnames=("dims", "order", "placement"), donate_argnames="weight")
def _insert(
    weight: Float[Array, "..."],
    piece: Float[Array, "..."],
    start: tuple[int, ...],
    *,
    dims: tuple[tuple[int, ...], ...],
    order: tuple[int, ...],
    placement: NamedSharding,
) -> Float[Array, "..."]:
    """Writes a tensor of the folder, cast and transposed, into a weight, in place."""
    piece = piece.reshape(sum(dims, ())).transpose(order).astype(weight.dtype)
    piece = piece.reshape((1,) * (weight.ndim - piece.ndim) + piece.shape)
    return jax.lax.with_sharding_constraint(jax.lax.dynamic_update_slice(weight, piece, start), placement)


@functools.partial(jax.jit, static_argnames=("dims", "order", "dtype"))
def _extract(
    weight: Float[Array, "..."],
    start: tuple[int, ...],
    *,
    dims: tuple[tuple[int, ...], ...],
    order: tuple[int, ...],
    dtype: str,
) -> Float[Array, "..."]:
    """The inverse of `_insert`."""
    sizes = tuple(sum(dims, ())[at] for at in order)
    piece = jax.lax.dynamic_slice(weight, start, (1,) * (weight.ndim - len(sizes)) + sizes).reshape(sizes)
    return piece.transpose(np.argsort(order)).reshape([math.prod(part) for part in dims]).astype(dtype)


def _read(tensor: Tensor, placement: NamedSharding) -> Float[Array, "..."]:
    """Places a tensor of the folder, as it is there; each process reads what its devices need, once."""
    pieces: dict[str, np.ndarray] = {}

    def piece(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        if str(index) not in pieces:
            pieces[str(index)] = tensor.read(index)
        return pieces[str(index)]

    return jax.make_array_from_callback(tensor.shape, placement, piece)


def _save_tensors(
    folder: pathlib.Path | None, params: dict[str, Any], config: ModelConfig, dtype: str
) -> None:
    parts = _parts(config)

    def arrays() -> Iterator[np.ndarray]:
        for part in parts.values():
            weight = part.group(params)[part.weight]
            array = _extract(weight, part.start, dims=part.dims, order=part.order, dtype=dtype)
            if not array.is_fully_addressable:
                array = multihost_utils.process_allgather(array, tiled=True)
            yield np.asarray(array)

    sizes = {key: math.prod(part.shape) * jnp.dtype(dtype).itemsize for key, part in parts.items()}
    hf_tensors.write(folder, sizes, arrays())


def _output_config(
    config: ModelConfig, source: str | pathlib.Path | None, dtype: str | None
) -> dict[str, Any]:
    """The config.json to write."""
    if source is None:
        tree = hf_config.generate(config)
    else:
        tree = hf_config.read(source)
        own = hf_config.parse(
            tree,
            f"{source}/config.json",
            known_ids=config.known_ids,
            dtype=config.dtype,
            remat=config.remat,
            max_needed_positions=None,
        )
        if dataclasses.replace(own, tied=config.tied, max_positions=config.max_positions) != config:
            raise UserError(
                f"{source}/config.json: another model than {config}; give the folder that it came from"
            )
    before = tree.get("dtype", tree.get("torch_dtype"))
    tree["dtype"] = dtype or (before if before in ("float32", "bfloat16") else "float32")
    if "torch_dtype" in tree:  # transformers 4
        tree["torch_dtype"] = tree["dtype"]
    tree["tie_word_embeddings"] = config.tied
    return tree


def _save_generation_config(
    folder: pathlib.Path, source: str | pathlib.Path | None, tree: dict[str, Any]
) -> None:
    name = "generation_config.json"
    if source is not None and (pathlib.Path(source) / name).exists():
        shutil.copyfile(pathlib.Path(source) / name, folder / name)
    else:
        _dump(folder / name, {key: tree.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")})


def _dump(path: pathlib.Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
