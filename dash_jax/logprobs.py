"""Teacher-forced log-probs and entropies of completions.

The learner and the reference use this; the sampler's own log-probs are the same numbers,
since all of them run `model.forward`'s computation and divide the logits by the sampling
temperature before the softmax.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dash_jax import model
from dash_jax.model import Context, KeyValues, ModelConfig


def completion_logprobs(
    params: dict[str, Any],
    config: ModelConfig,
    prompts: Int[Array, "S P"],
    prompt_lengths: Int[Array, " S"],
    tokens: Int[Array, "S G C"],
    positions: Int[Array, "S G C"] | None = None,
    segments: Int[Array, "S G C"] | None = None,
    *,
    temperature: float,
    chunk: int,
) -> tuple[Float[Array, "S G C"], Float[Array, "S G C"]]:
    """log p(token | prompt, tokens before it) and the entropy of that distribution, in nats, float32.

    The prompt is computed once for its G rows. A row is one completion or, with `segments` (which
    completion a token belongs to) and `positions` (its place in it), several one behind the other. Values
    of padding are finite and mean nothing. Logits exist for about `chunk` positions at a time and are
    computed again in the backward pass, so [S, G, C, V] never does.
    """
    S, G, C = tokens.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(C)[None, None], (S, G, C))
    of_prompts = jnp.broadcast_to(jnp.arange(prompts.shape[1])[None, None], (S, 1, prompts.shape[1]))
    hidden, own = model.forward(params, config, prompts[:, None], of_prompts)
    last = jnp.maximum(prompt_lengths - 1, 0)[:, None, None, None]
    first = jnp.broadcast_to(jnp.take_along_axis(hidden, last, axis=2), (S, G, C, config.hidden_size))

    context = Context(KeyValues(own.k[:, :, 0], own.v[:, :, 0]), prompt_lengths)
    behind = prompt_lengths[:, None, None] + positions
    hidden, _ = model.forward(params, config, tokens, behind, context, segments)
    # The state at a token predicts the next one; the prompt's last state predicts a completion's first.
    before = jnp.pad(hidden[:, :, :-1], [(0, 0), (0, 0), (1, 0), (0, 0)])
    hidden = jnp.where(jnp.broadcast_to(positions[..., None] == 0, before.shape), first, before)

    def score(chunk: tuple[Float[Array, "S G c D"], Int[Array, "S G c"]]) -> tuple[jax.Array, jax.Array]:
        return _score(model.logits(params, config, chunk[0]) / temperature, chunk[1])

    # Chunks run along positions, so that rows may be split over devices.
    width = min(max(chunk // (S * G), 1), C)
    chunks = -(-C // width)
    logprobs, entropies = jax.lax.map(
        jax.checkpoint(score),
        (_split_positions(hidden, chunks, width), _split_positions(tokens, chunks, width)),
    )
    return _join_positions(logprobs, C), _join_positions(entropies, C)


def _score(
    logits: Float[Array, "S G c V"], tokens: Int[Array, "S G c"]
) -> tuple[Float[Array, "S G c"], Float[Array, "S G c"]]:
    peak = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    shifted = logits - peak
    mass = jnp.exp(shifted)
    total = mass.sum(axis=-1)
    logprob = jnp.take_along_axis(shifted, tokens[..., None], axis=-1)[..., 0] - jnp.log(total)
    entropy = jnp.log(total) - (mass * shifted).sum(axis=-1) / total
    return logprob, jax.lax.stop_gradient(entropy)


def _split_positions(x: jax.Array, chunks: int, width: int) -> jax.Array:
    """[S, G, C, ...] -> [chunks, S, G, width, ...], padded."""
    pad = chunks * width - x.shape[2]
    x = jnp.pad(x, [(0, 0), (0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 3))
    return jnp.moveaxis(x.reshape(*x.shape[:2], chunks, width, *x.shape[3:]), 2, 0)


def _join_positions(x: Float[Array, "chunks S G width"], positions: int) -> Float[Array, "S G C"]:
    return jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1)[:, :, :positions]
