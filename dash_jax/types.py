"""The arrays that flow through one training step, in the order in which data meets them.

Shape legend, used in every signature and as name suffix in bodies (`logits_BTV`):

    N  prompts in a batch             B  rows: one prompt with one completion
    G  completions of one prompt      T  positions of a row
    P  prompt positions (padded)      C  completion positions (padded)
    M  micro-batches                  S  prompts in one micro-batch
    L  layers                         V  vocabulary
    D  hidden size                    F  MLP size
    H  query heads                    K  key/value heads        A  head size

Sequences are padded on the right and come with their lengths. A mask is always
made from lengths, never from token ids: the padding id may be a real token.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
from jaxtyping import Array, Float, Int


@flax.struct.dataclass
class Rollout:
    """Completions as they were sampled. Ids are never decoded and encoded again.

    Example, one prompt with two completions, end-of-sequence id 1:

        prompts            [[5, 6, 7, 0]]           prompt_lengths  [3]
        tokens             [[[8, 1, 0], [8, 9, 4]]]  lengths         [[2, 3]]
        logprobs           [[[-.1, -.2, 0], [-.1, -.9, -.3]]]
        finish             [[EOS, LENGTH]]           problem_ids     [7]

    `logprobs` are natural logarithms under the sampling temperature; slots at or
    beyond `lengths` hold padding and zeros.
    """

    problem_ids: Int[Array, " N"]
    prompts: Int[Array, "N P"]
    prompt_lengths: Int[Array, " N"]
    tokens: Int[Array, "N G C"]
    logprobs: Float[Array, "N G C"]
    lengths: Int[Array, "N G"]
    finish: Int[Array, "N G"]


@flax.struct.dataclass
class MicroBatches:
    """What one optimizer step learns from: M micro-batches of S slots, a slot being a prompt and R rows.

    A row is W tokens wide and holds whole completions of the prompt, one behind the other. All rows of
    a slot share one pass over the prompt; a completion sees its prompt and itself. Where
    `completion_ids` is -1 there is no token, and everything else is 0. A micro-batch without any token is
    skipped by the learner. With R == 1 and one completion a row this is the plain layout.

    `weights` already hold the denominator of the whole optimizer batch, so the loss is

        sum over tokens of weights * (the token's loss)

    whatever the number of micro-batches, their order or their padding.
    """

    prompts: Int[Array, "M S P"]
    prompt_lengths: Int[Array, "M S"]
    tokens: Int[Array, "M S R W"]
    positions: Int[Array, "M S R W"]  # of a token in its completion, from 0
    completion_ids: Int[Array, "M S R W"]  # n * G + g in the rollout
    logprobs: Float[Array, "M S R W"]  # of the sampler, at the sampling temperature
    advantages: Float[Array, "M S R W"]
    weights: Float[Array, "M S R W"]


@flax.struct.dataclass
class TrainState:
    """Everything that the learner changes. `reference` is None when the KL penalty is off."""

    step: Int[Array, ""]
    params: Any
    optimizer: Any
    reference: Any | None


Key = jax.Array
