"""One optimizer step: scan over micro-batches, add gradients, update once.

`MicroBatches.weights` carry the denominator of the whole optimizer batch, so gradients
are plain sums: over micro-batches here, over devices by the compiler. How the batch is
cut, ordered or padded cannot change them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Shaped

from dash_jax import losses, model
from dash_jax.logprobs import completion_logprobs
from dash_jax.model import ModelConfig
from dash_jax.sharding import replicated, split_rows
from dash_jax.types import MicroBatches, TrainState

Metrics = dict[str, Float[Array, ""]]
Update = Callable[[TrainState, tuple[MicroBatches, ...]], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised. The loss is `loss` + kl_coefficient × KL(policy | reference)."""

    loss: Literal["policy_gradient", "clipped"] = "policy_gradient"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    temperature: float = 1.0
    logprob_chunk: int = 512


def make_optimizer(
    learning_rate: float,
    *,
    schedule: Literal["constant", "linear", "cosine"],
    warmup_steps: int,
    total_steps: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    clip_norm: float,
) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip. Its step count, hence the learning rate, is in the optimizer state."""
    after = max(total_steps - warmup_steps, 1)
    decay = {
        "constant": optax.constant_schedule(learning_rate),
        "linear": optax.linear_schedule(learning_rate, 0.0, after),
        "cosine": optax.cosine_decay_schedule(learning_rate, after),
    }[schedule]
    if warmup_steps:
        # The first step already moves: step i of the warm-up has (i + 1) / (warmup_steps + 1) of the peak.
        start = learning_rate / (warmup_steps + 1)
        decay = optax.join_schedules(
            [optax.linear_schedule(start, learning_rate, warmup_steps), decay], [warmup_steps]
        )
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(decay, beta1, beta2, epsilon, weight_decay=weight_decay, mask=_decayed),
    )


def _decayed(params: dict[str, Any]) -> dict[str, Any]:
    """Weight decay is for matrices: not for norms and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: model.is_matrix(path), params)


def init_state(
    params: dict[str, Any], optimizer: optax.GradientTransformation, *, keep_reference: bool
) -> TrainState:
    """The state before the first step; the reference is the policy itself. Jit it with `state_shardings`."""
    reference = jax.tree.map(jnp.copy, params) if keep_reference else None
    return TrainState(step=jnp.int32(0), params=params, optimizer=optimizer.init(params), reference=reference)


def state_shardings(
    mesh: Mesh, config: ModelConfig, optimizer: optax.GradientTransformation, *, keep_reference: bool
) -> TrainState:
    """Where each leaf of the state lies: moments and reference like the weights, scalars everywhere."""
    of_weights = model.weight_shardings(config, mesh)
    abstract = jax.eval_shape(optimizer.init, model.weight_axes(config)[0])
    of_optimizer = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        abstract,
        of_weights,
        transform_non_params=lambda _: replicated(mesh),
    )
    everywhere: Any = replicated(mesh)
    return TrainState(everywhere, of_weights, of_optimizer, of_weights if keep_reference else None)


def make_update(
    config: ModelConfig, objective: Objective, optimizer: optax.GradientTransformation, mesh: Mesh
) -> Update:
    """The jitted `update(state, batches) -> (state, metrics)`; `state` is donated.

    Rows are split over the mesh's batch axes, so S of every batch must be a multiple of `row_ways(mesh)`.
    """
    state = state_shardings(mesh, config, optimizer, keep_reference=objective.kl_coefficient > 0)
    step = functools.partial(update, config=config, objective=objective, optimizer=optimizer)
    compiled = jax.jit(step, out_shardings=(state, replicated(mesh)), donate_argnums=0)

    def place_and_update(state: TrainState, batches: tuple[MicroBatches, ...]) -> tuple[TrainState, Metrics]:
        with jax.set_mesh(mesh):
            return compiled(state, jax.device_put(batches, split_rows(mesh, batches, axis=1)))

    return place_and_update


def update(
    state: TrainState,
    batches: tuple[MicroBatches, ...],
    *,
    config: ModelConfig,
    objective: Objective,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Metrics]:
    """One optimizer step on all micro-batches of all length buckets.

    A batch without a single row, or a gradient that is not finite, leaves weights and moments
    as they are (metric `update_skipped`); the step is counted.

    Metrics, over all tokens that were computed: `loss`, `gradient_norm`, `entropy`, `logprob_gap`
    (largest |learner - sampler| log-prob), `learned_tokens`, and where they mean something `kl` (k3
    estimate) and `clipped` (share).
    """
    gradient, sums, gap = accumulate(
        state.params, state.reference, batches, config=config, objective=objective
    )
    norm = optax.tree.norm(gradient)
    usable = jnp.isfinite(norm) & (sums["tokens"] > 0)

    def apply(state: TrainState) -> TrainState:
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of its integer count
            changes, moments = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, changes)
        return dataclasses.replace(state, params=params, optimizer=moments)

    state = jax.lax.cond(usable, apply, lambda state: state, state)
    tokens = jnp.maximum(sums["tokens"], 1.0)
    metrics = {
        "loss": sums["loss"],
        "gradient_norm": norm,
        "entropy": sums["entropy"] / tokens,
        "logprob_gap": gap,
        "learned_tokens": sums["tokens"],
        "update_skipped": (~usable).astype(jnp.float32),
    }
    if objective.kl_coefficient > 0:
        metrics["kl"] = sums["kl"] / tokens
    if objective.loss == "clipped":
        metrics["clipped"] = sums["clipped"] / tokens
    return dataclasses.replace(state, step=state.step + 1), metrics


def accumulate(
    params: dict[str, Any],
    reference: dict[str, Any] | None,
    batches: tuple[MicroBatches, ...],
    *,
    config: ModelConfig,
    objective: Objective,
) -> tuple[dict[str, Any], Metrics, Float[Array, ""]]:
    """Gradient, metric sums and the largest log-prob gap over all micro-batches, in float32."""
    differentiate = jax.value_and_grad(
        functools.partial(loss, config=config, objective=objective), has_aux=True
    )

    def add(carry: Any, batch: MicroBatches) -> tuple[Any, None]:
        def compute(carry: Any) -> Any:
            gradient, sums, gap = carry
            (value, (new_sums, new_gap)), new_gradient = differentiate(params, reference, batch)
            new_sums = {"loss": value, **new_sums}
            return (
                *jax.tree.map(jnp.add, (gradient, sums), (new_gradient, new_sums)),
                jnp.maximum(gap, new_gap),
            )

        # The number of micro-batches is a compiled constant; those that the filter left empty cost nothing.
        return jax.lax.cond((batch.completion_ids >= 0).any(), compute, lambda carry: carry, carry), None

    zero = jnp.float32(0)
    sums = {"loss": zero, "tokens": zero, "entropy": zero, "kl": zero, "clipped": zero}
    carry = (jax.tree.map(jnp.zeros_like, params), sums, zero)
    for bucket in batches:
        carry, _ = jax.lax.scan(add, carry, bucket)
    return carry


def loss(
    params: dict[str, Any],
    reference: dict[str, Any] | None,
    batch: MicroBatches,
    *,
    config: ModelConfig,
    objective: Objective,
) -> tuple[Float[Array, ""], tuple[Metrics, Float[Array, ""]]]:
    """The share of one micro-batch (fields without the M axis) in the loss, metric sums, log-prob gap."""
    score = functools.partial(
        completion_logprobs,
        config=config,
        prompts=batch.prompts,
        prompt_lengths=batch.prompt_lengths,
        tokens=batch.tokens,
        positions=batch.positions,
        segments=batch.completion_ids,
        temperature=objective.temperature,
        chunk=objective.logprob_chunk,
    )
    # A token's weight is that of its completion, so every token may stand for itself, as a row of length 1.
    logprobs, entropy = map(_alone, score(params))
    mask, sampled = _alone(batch.completion_ids >= 0), _alone(batch.logprobs)
    advantages, weights = batch.advantages.reshape(-1), batch.weights.reshape(-1)
    tokens = mask.sum(dtype=jnp.float32)
    sums = {"tokens": tokens, "entropy": jnp.where(mask, entropy, 0.0).sum(), "kl": jnp.float32(0)}

    if objective.loss == "policy_gradient":
        value, _ = losses.policy_gradient(logprobs, advantages, mask, weights=weights)
        sums["clipped"] = jnp.float32(0)
    else:
        value, aux = losses.clipped_surrogate(
            logprobs, sampled, advantages, mask,
            weights=weights, clip_low=objective.clip_low, clip_high=objective.clip_high,
        )  # fmt: skip
        sums["clipped"] = aux["clipped"][0]
    if objective.kl_coefficient > 0:
        assert reference is not None, "a KL penalty needs the reference that `init_state` can keep"
        target = jax.lax.stop_gradient(_alone(score(reference)[0]))
        penalty, aux = losses.kl_penalty(
            logprobs, target, mask, weights=weights, estimator=objective.kl_estimator
        )
        value = value + objective.kl_coefficient * penalty
        sums["kl"] = aux["kl_k3"][0]
    gap = jnp.where(mask, jnp.abs(jax.lax.stop_gradient(logprobs) - sampled), 0.0).max()
    return value, (sums, gap)


def _alone(x: Shaped[Array, "S R W"]) -> Shaped[Array, "tokens 1"]:
    return x.reshape(-1, 1)
