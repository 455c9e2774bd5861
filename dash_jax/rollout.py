"""Problems in, completions out: where the device's sampler meets the host.

A rollout of any number of prompts goes through the engine, as many at once as the memory budget
allows and independent of the learner's micro-batches (DASH's preemptive sampling).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dash_jax import model, sampling
from dash_jax.config import Engine
from dash_jax.engine import SLOTS_OF_A_GROUP, Ended, Sampler, generate
from dash_jax.errors import UserError
from dash_jax.model import ModelConfig
from dash_jax.policy import Policy
from dash_jax.problems import Completion, Finish, Problem
from dash_jax.sampling import Rule
from dash_jax.types import Key, Rollout

# Is given places in the order of `Rollout.tokens.reshape(N * G, C)`, and what was said there.
OnEnded = Callable[[Sequence[int], Sequence[Completion]], None]


def step_key(seed: int, stream: str, step: int) -> Key:
    """The random key of one rollout. Streams ("train", "eval") never share randomness."""
    key = jax.random.key(seed)
    for part in (*stream.encode(), step):
        key = jax.random.fold_in(key, part)
    return key


def sampler_weights(params: dict[str, Any], policy: Policy) -> dict[str, Any]:
    """Weights as decoding wants them, once a rollout: matrices in the compute dtype, as the learner rounds
    them, and all of them whole over `data` and `fsdp`.
    """

    def gathered(sharding: NamedSharding) -> NamedSharding:
        axes = (None if axis == "fsdp" else axis for axis in sharding.spec)  # one-axis tuples become names
        return NamedSharding(policy.mesh, PartitionSpec(*axes))

    shardings = jax.tree.map(gathered, model.weight_shardings(policy.model, policy.mesh))
    return jax.device_put(_cast(params, dtype=policy.model.dtype), shardings)


def roll_out(
    weights: dict[str, Any],
    policy: Policy,
    problems: Sequence[Problem],
    key: Key,
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    memory_gb: float,
    max_rows: int | None = None,
    engine: Engine = Engine(),  # noqa: B008 - frozen
    rule: Rule = Rule(),  # noqa: B008 - frozen
    on_ended: OnEnded | None = None,
) -> Rollout:
    """Samples `group_size` completions of each problem; the result is in host memory (NumPy).

    Args:
      weights: from `sampler_weights`.
      key: from `step_key`; with it, what is sampled for a problem does not depend on the others.
      memory_gb: for caches and logits of the samples under way, on each device.
      max_rows: samples under way at once on each device, but no less than one group.
      on_ended: given every completion once, soon after it has ended and while the others are sampled.

    Raises UserError where not even one prompt fits the budget.
    """
    width = padded_width(max(len(problem.prompt_ids) for problem in problems))
    ids, prompts, lengths = _pad_prompts(problems, width)
    sampler = Sampler(
        weights, policy.model, jnp.asarray(policy.stop_ids, jnp.int32), jnp.float32(temperature), rule,
        limit=max_new_tokens, mesh=policy.mesh,
    )  # fmt: skip
    with jax.set_mesh(policy.mesh):
        keys = _keys(key, ids, group_size)
    capacity = chunk_prompts(policy.model, width, group_size, max_new_tokens, memory_gb)
    if max_rows is not None:
        capacity = min(capacity, max(max_rows // group_size, 1))

    def hand_over(ended: Ended) -> None:
        if on_ended is not None:
            on_ended(ended.ids.tolist(), _read(ended, problems, policy, group_size))

    samples = generate(sampler, prompts, lengths, keys, engine=engine, capacity=capacity, on_ended=hand_over)
    fields: Any = (ids, prompts, lengths, *samples)  # NumPy, where the record says jax.Array
    return Rollout(*fields)


def padded_width(longest: int) -> int:
    """The next of 8, 12, 16, 24, 32, 48 ...: few widths, so few compilations, and at most 1/3 padding."""
    power = 8
    while power < longest:
        power *= 2
    return power * 3 // 4 if power > 8 and longest <= power * 3 // 4 else power


def chunk_prompts(
    config: ModelConfig, width: int, group_size: int, max_new_tokens: int, memory_gb: float
) -> int:
    """How many prompts, with all their samples, fit the budget of one device."""
    size = jnp.dtype(config.dtype).itemsize
    per_token = 2 * config.layers * config.kv_heads * config.head_size * size
    logits = 4 * config.vocab_size * 4  # the logits and the draw's passes over them, float32
    # Under refill a group may have its prompt in several slots; old and new caches meet when rows move.
    cached = 2 * (min(group_size, SLOTS_OF_A_GROUP) * width + group_size * max_new_tokens) * per_token
    bytes_needed = cached + group_size * logits
    fitting = int(memory_gb * 2**30 / bytes_needed)
    if not fitting:
        raise UserError(
            f"rollout.memory_gb={memory_gb:g}: one prompt with {group_size} samples of {max_new_tokens} "
            f"tokens takes {bytes_needed / 2**30:.3g} GB; raise it, or lower the group size or "
            "rollout.max_new_tokens"
        )
    return fitting


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(params: dict[str, Any], dtype: str) -> dict[str, Any]:
    return jax.tree_util.tree_map_with_path(
        lambda path, weight: weight.astype(dtype) if model.is_matrix(path) else weight, params
    )


_keys = jax.jit(sampling.sample_keys, static_argnames="group_size")


def _read(ended: Ended, problems: Sequence[Problem], policy: Policy, group_size: int) -> list[Completion]:
    return [
        Completion(problems[index // group_size], policy.tokenizer.decode(tokens[:length]), Finish(finish))
        for index, tokens, length, finish in zip(*(field.tolist() for field in ended), strict=True)
    ]


def _pad_prompts(problems: Sequence[Problem], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Problem ids [N], prompts [N, width] and their lengths [N]."""
    ids = np.array([problem.id for problem in problems], np.int32)
    lengths = np.array([len(problem.prompt_ids) for problem in problems], np.int32)
    prompts = np.zeros((len(problems), width), np.int32)
    for row, problem in zip(prompts, problems, strict=True):
        row[: len(problem.prompt_ids)] = problem.prompt_ids
    return ids, prompts, lengths
