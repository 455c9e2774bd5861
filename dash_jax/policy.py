"""What every verb starts from: mesh, tokenizer, model and weights, as the config names them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from dash_jax import model, weights
from dash_jax.config import Config, check_positions
from dash_jax.errors import UserError
from dash_jax.model import ModelConfig
from dash_jax.sharding import make_mesh
from dash_jax.tokenization import Tokenizer, load_tokenizer


class Policy(NamedTuple):
    mesh: Mesh
    tokenizer: Tokenizer
    model: ModelConfig
    stop_ids: tuple[int, ...]  # end-of-sequence tokens and those of rollout.stop


def describe(config: Config) -> Policy:
    """All but the weights: settings that do not fit the model are refused here, before memory is taken."""
    tokenizer = load_tokenizer(config)
    if config.model.path is None:
        shape = _built_in(config, tokenizer)
    else:
        shape = weights.model_config(
            config.model.path,
            known_ids=tokenizer.vocab_size,
            dtype=config.model.dtype,
            remat=config.model.remat,
            max_needed_positions=config.rollout.max_prompt_tokens + config.rollout.max_new_tokens,
        )
        check_positions(config, shape.max_positions, f"{config.model.path}/config.json")
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    return Policy(mesh, tokenizer, shape, _stop_ids(config, tokenizer))


def starting_weights(config: Config, policy: Policy) -> dict[str, Any]:
    """Float32 weights on the mesh: those of model.path, or random ones that follow from the seed."""
    if config.model.path is not None:
        return weights.load(config.model.path, policy.model, policy.mesh)
    initialise = jax.jit(
        lambda key: model.init(policy.model, key),
        out_shardings=model.weight_shardings(policy.model, policy.mesh),
    )
    return initialise(jax.random.key(config.seed))


def _stop_ids(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = list(tokenizer.eos_ids)
    for text in config.rollout.stop:
        *encoded, _ = tokenizer.encode_completion(text)
        if len(encoded) != 1:
            raise UserError(f"rollout.stop: {text!r} is {len(encoded)} tokens; give texts of one token each")
        ids += encoded
    return tuple(dict.fromkeys(ids))


def _built_in(config: Config, tokenizer: Tokenizer) -> ModelConfig:
    shape = config.model
    return ModelConfig(
        vocab_size=tokenizer.vocab_size,
        known_ids=tokenizer.vocab_size,
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.hidden_size // shape.heads,
        mlp_size=shape.mlp_size,
        max_positions=shape.max_positions,
        dtype=shape.dtype,
        remat=shape.remat,
    )
