"""From a graded rollout to optimizer steps: advantages, filter, denominators, packing, update.

The host's side of the learner. The filter and the denominators look at the whole optimizer
batch, before it is cut into micro-batches.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from dash_jax import learner, model
from dash_jax.advantages import carries_signal, group_advantages
from dash_jax.batching import pack, padding_report
from dash_jax.checkpoint import Checkpoints
from dash_jax.config import Config, Optimizer, Schedule
from dash_jax.losses import row_weights
from dash_jax.policy import Policy, starting_weights
from dash_jax.problems import Finish
from dash_jax.sharding import row_ways
from dash_jax.types import MicroBatches, Rollout, TrainState


def make_optimizer(
    settings: Optimizer, learning_rate: float, schedule: Schedule, total_steps: int
) -> optax.GradientTransformation:
    return learner.make_optimizer(
        learning_rate,
        schedule=schedule,
        warmup_steps=settings.warmup_steps,
        total_steps=total_steps,
        beta1=settings.beta1,
        beta2=settings.beta2,
        epsilon=settings.epsilon,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
    )


def start(
    config: Config,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    checkpoints: Checkpoints,
    *,
    keep_reference: bool,
) -> tuple[TrainState, int]:
    """The state to go on from, and the number of training steps behind it."""
    shardings = learner.state_shardings(policy.mesh, policy.model, optimizer, keep_reference=keep_reference)

    def make(params: dict[str, Any]) -> TrainState:
        return learner.init_state(params, optimizer, keep_reference=keep_reference)

    newest = checkpoints.latest()
    if newest is None:
        return jax.jit(make, out_shardings=shardings)(starting_weights(config, policy)), 0
    abstract = jax.eval_shape(make, model.weight_axes(policy.model)[0])
    like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)
    state, host = checkpoints.restore(newest, like)
    return state, host["step"]


class Learning:
    """The learner of one config: graded rollouts in, optimizer steps out."""

    def __init__(self, config: Config, policy: Policy):
        self._config, self._policy = config, policy
        algorithm = config.algorithm
        total_steps = config.train.steps * config.updates_per_step
        optimizer = config.optimizer
        self.optimizer = make_optimizer(optimizer, optimizer.learning_rate, optimizer.schedule, total_steps)
        objective = learner.Objective(
            loss=algorithm.loss,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            kl_coefficient=algorithm.kl_coefficient,
            kl_estimator=algorithm.kl_estimator,
            temperature=config.rollout.temperature,
            logprob_chunk=config.learner.logprob_chunk,
        )
        self._keep_reference = algorithm.kl_coefficient > 0
        self._update = learner.make_update(policy.model, objective, self.optimizer, policy.mesh)

    def start(self, checkpoints: Checkpoints) -> tuple[TrainState, int]:
        keep = self._keep_reference
        return start(self._config, self._policy, self.optimizer, checkpoints, keep_reference=keep)

    def step(
        self, state: TrainState, rollout: Rollout, rewards: np.ndarray
    ) -> tuple[TrainState, np.ndarray, dict[str, float]]:
        """One optimizer step for every `optimizer_batch` completions, in the order of the rollout.

        `rewards` is float[N, G], NaN where there is none. Returns the state, the advantages [N, G]
        and metrics: means over the optimizer steps, weighted by nothing, as each is one step, but of
        `logprob_gap` the largest and of tokens the sum.
        """
        config, ways = self._config, row_ways(self._policy.mesh)
        scale_by_std = config.algorithm.advantage == "group_mean_std"
        advantages = np.asarray(group_advantages(rewards, scale_by_std=scale_by_std))
        prompts = config.optimizer_batch // config.rollout.group_size
        steps = []
        for start in range(0, len(rewards), prompts):
            part = slice(start, start + prompts)
            window = jax.tree.map(lambda leaf, part=part: leaf[part], rollout)
            batches = learning_batch(window, advantages[part], config, multiple_of=ways)
            state, metrics = self._update(state, batches)
            useful, computed = padding_report(batches)
            kept = sum(int(((batch.completion_ids >= 0) & (batch.positions == 0)).sum()) for batch in batches)
            steps.append(
                {name: float(value) for name, value in metrics.items()}
                | {"kept_share": kept / config.optimizer_batch}
                | {"padding_share": 1 - useful / computed if computed else 0.0}
                | {"computed_tokens": float(computed)}
            )
        means = {name: float(np.mean([step[name] for step in steps])) for name in steps[0]}
        means["logprob_gap"] = max(step["logprob_gap"] for step in steps)
        for name in ("computed_tokens", "learned_tokens"):
            means[name] = sum(step[name] for step in steps)
        return state, advantages, means


def learning_batch(
    rollout: Rollout, advantages: np.ndarray, config: Config, *, multiple_of: int
) -> tuple[MicroBatches, ...]:
    """The micro-batches of one optimizer step: filtered, weighted, packed. `advantages` is float[N, G]."""
    algorithm, limit = config.algorithm, config.rollout.max_new_tokens
    lengths = np.asarray(rollout.lengths)
    counted = np.ones(lengths.shape, bool)
    if algorithm.mask_truncated:
        counted &= np.asarray(rollout.finish) != Finish.LENGTH
    keep = counted.copy()
    if algorithm.filter:
        keep &= np.asarray(carries_signal(advantages, algorithm.filter_threshold))
    if algorithm.denominator == "kept":
        counted &= keep
    weights = row_weights(
        lengths.reshape(-1), counted.reshape(-1), aggregation=algorithm.aggregation, max_length=limit
    )
    return pack(
        rollout,
        advantages,
        np.asarray(weights).reshape(lengths.shape),
        keep,
        rows_per_micro_batch=config.learner.micro_batch,
        share_prompt=config.learner.share_prompt,
        shapes=config.learner.shapes,
        multiple_of=multiple_of,
    )
