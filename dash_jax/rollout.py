"""Problems in, completions out: where the device's sampler meets the host.

A rollout of any number of prompts goes through the sampler in equal chunks, as large as the
memory budget allows and independent of the learner's micro-batches (DASH's preemptive sampling).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dash_jax import model, sampling
from dash_jax.model import ModelConfig
from dash_jax.policy import Policy
from dash_jax.sampling import Rule
from dash_jax.sharding import row_ways, split_rows
from dash_jax.types import Key, Problem, Rollout, UserError


def step_key(seed: int, stream: str, step: int) -> Key:
    """The random key of one rollout. Streams ("train", "eval") never share randomness."""
    key = jax.random.key(seed)
    for part in (*stream.encode(), step):
        key = jax.random.fold_in(key, part)
    return key


def sampler_weights(params: dict[str, Any], policy: Policy) -> dict[str, Any]:
    """Weights as decoding wants them, once a rollout: in the compute dtype, whole over `data` and `fsdp`."""

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
    rule: Rule = Rule(),  # noqa: B008 - frozen
    on_chunk: Callable[[int], None] = lambda prompts: None,
) -> Rollout:
    """Samples `group_size` completions of each problem; the result is in host memory (NumPy).

    Args:
      weights: from `sampler_weights`.
      key: from `step_key`; with it, what is sampled for a problem does not depend on the others.
      memory_gb: a chunk's caches and logits, per device.
      on_chunk: told the number of prompts done after each chunk.

    Raises UserError where not even one prompt fits the budget.
    """
    width = padded_width(max(len(problem.prompt_ids) for problem in problems))
    ways = row_ways(policy.mesh)
    fitting = chunk_prompts(policy.model, width, group_size, max_new_tokens, memory_gb) * ways
    chunks = math.ceil(len(problems) / fitting)
    size = math.ceil(len(problems) / chunks / ways) * ways
    eos_ids = jnp.asarray(policy.stop_ids, jnp.int32)

    parts = []
    with jax.set_mesh(policy.mesh):
        past = _empty_past(policy, size, group_size, max_new_tokens)
        for start in range(0, len(problems), size):
            chunk = problems[start : start + size]
            ids, prompts, lengths = _pad_prompts(chunk, size, width)
            rows = jax.device_put((prompts, lengths), split_rows(policy.mesh, (prompts, lengths), axis=0))
            keys = _keys(key, ids, group_size)
            samples, past = sampling.sample(
                weights, *rows, keys, eos_ids, jnp.float32(temperature), past, config=policy.model, rule=rule
            )
            parts.append([np.asarray(field)[: len(chunk)] for field in (ids, prompts, lengths, *samples)])
            on_chunk(start + len(chunk))
    joined: Any = map(np.concatenate, zip(*parts, strict=True))  # NumPy, where the record says jax.Array
    return Rollout(*joined)


def texts(rollout: Rollout, policy: Policy) -> list[str]:
    """The completions without special tokens, in the order of `rollout.tokens.reshape(N * G, C)`."""
    rows = rollout.tokens.reshape(-1, rollout.tokens.shape[-1])
    return [
        policy.tokenizer.decode(row[:length].tolist())
        for row, length in zip(rows, rollout.lengths.reshape(-1), strict=True)
    ]


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
    bytes_needed = (width + group_size * max_new_tokens) * per_token + group_size * logits
    fitting = int(memory_gb * 2**30 / bytes_needed)
    if not fitting:
        raise UserError(
            f"rollout.memory_gb={memory_gb:g}: one prompt with {group_size} samples of {max_new_tokens} "
            f"tokens takes {bytes_needed / 2**30:.3g} GB; raise it, or lower the group size or "
            "rollout.max_new_tokens"
        )
    return fitting


def _empty_past(policy: Policy, prompts: int, group_size: int, max_new_tokens: int) -> list[model.KeyValues]:
    make = functools.partial(sampling.empty_past, policy.model, prompts, group_size, max_new_tokens)
    return jax.jit(make, out_shardings=split_rows(policy.mesh, jax.eval_shape(make), axis=0))()


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(params: dict[str, Any], dtype: str) -> dict[str, Any]:
    return jax.tree.map(lambda weight: weight.astype(dtype), params)


_keys = jax.jit(sampling.sample_keys, static_argnames="group_size")


def _pad_prompts(
    problems: Sequence[Problem], rows: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Problem ids [rows], prompts [rows, width], lengths [rows]; rows beyond the problems have length 0."""
    ids, lengths = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    prompts = np.zeros((rows, width), np.int32)
    for row, problem in enumerate(problems):
        ids[row], lengths[row] = problem.id, len(problem.prompt_ids)
        prompts[row, : lengths[row]] = problem.prompt_ids
    return ids, prompts, lengths
