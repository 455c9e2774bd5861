"""The sampler: prefill once per prompt, then decode all its samples under one `while_loop`.

Every sample has its own random key, made of (seed and step, problem id, sample index),
and every token a key made of that and its position. So what is sampled does not depend
on how many samples go through together, in which order, with how much padding or on how
many devices.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dash_jax import model
from dash_jax.model import KeyValues, ModelConfig
from dash_jax.problems import Finish
from dash_jax.rope import rotation
from dash_jax.types import Key

_BLOCK = 128  # tokens summed together in the first level of the inverse CDF


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the next token is chosen. Training leaves all off: the learner scores the full distribution."""

    greedy: bool = False
    top_k: int = 0
    top_p: float = 1.0


class Samples(NamedTuple):
    """See `types.Rollout`, whose fields these are."""

    tokens: Int[Array, "N G C"]
    logprobs: Float[Array, "N G C"]
    lengths: Int[Array, "N G"]
    finish: Int[Array, "N G"]


class Rows(NamedTuple):
    """Samples under way: X slots, each with a prompt and R samples of it."""

    keys: Key  # [X, R]
    token: Int[Array, "X R"]  # the last one sampled; decoding feeds it next
    lengths: Int[Array, "X R"]  # tokens sampled so far; 0 marks filler
    done: Bool[Array, "X R"]


class Prompts(NamedTuple):
    """The prompts of the slots: keys and values of each layer, without R axis."""

    layers: list[KeyValues]
    lengths: Int[Array, " X"]


class Decoded(NamedTuple):
    """What `decode` adds. Slots from `taken` on, and those of rows that are done, are zero."""

    tokens: Int[Array, "X R S"]
    logprobs: Float[Array, "X R S"]
    taken: Int[Array, ""]


def sample_keys(key: Key, problem_ids: Int[Array, " N"], group_size: int) -> Key:
    """One key a sample, [N, G]: `key`, of seed and step, folded with the problem id and the sample index."""

    def of(problem: Int[Array, ""], index: Int[Array, ""]) -> Key:
        return jax.random.fold_in(jax.random.fold_in(key, problem), index)

    indices = jnp.arange(group_size)
    return jax.vmap(lambda problem: jax.vmap(lambda index: of(problem, index))(indices))(problem_ids)


def empty_past(config: ModelConfig, prompts: int, group_size: int, max_new_tokens: int) -> list[KeyValues]:
    """Cache buffers for `sample`, one a layer. Any finite content will do: slots are written, then read."""
    shape = (prompts, group_size, config.kv_heads)
    k = (*shape, config.head_size, max_new_tokens)
    v = (*shape, max_new_tokens, config.head_size)
    return [KeyValues(jnp.zeros(k, config.dtype), jnp.zeros(v, config.dtype)) for _ in range(config.layers)]


@functools.partial(jax.jit, static_argnames=("config", "rule"), donate_argnames=("past",))
def sample(
    params: dict[str, Any],
    prompts: Int[Array, "N P"],
    prompt_lengths: Int[Array, " N"],
    keys: Key,
    eos_ids: Int[Array, " E"],
    temperature: Float[Array, ""],
    past: list[KeyValues],
    *,
    config: ModelConfig,
    rule: Rule = Rule(),
) -> tuple[Samples, list[KeyValues]]:
    """Samples G completions of each prompt, up to C tokens or the first end-of-sequence token, which is kept.

    Args:
      params: weights in the compute dtype.
      prompts, prompt_lengths: padded on the right; length 0 marks a row that is filler and is not sampled.
      keys: [N, G] from `sample_keys`.
      eos_ids: any of them ends a completion.
      temperature: divides the logits. Ignored by the greedy rule, whose log-probs are at temperature 1.
      past: from `empty_past`, which also gives G and C; donated, and returned for the next call.

    Returns:
      Samples (log-probs are of the full tempered distribution, whatever the rule) and the buffers of `past`.
    """
    limit = past[0].k.shape[-1]
    how: Any = {"config": config, "rule": rule, "limit": limit}
    context, rows, first = begin(params, prompts, prompt_lengths, keys, eos_ids, temperature, **how)
    tokens = jnp.where(rows.lengths > 0, rows.token, 0)
    decoded, rows, past = decode(
        params, context, rows, past, jnp.int32(0), eos_ids, temperature, steps=max(limit - 1, 1), **how
    )
    tokens = jnp.concatenate([tokens[:, :, None], decoded.tokens], axis=2)[:, :, :limit]
    logprobs = jnp.concatenate([first[:, :, None], decoded.logprobs], axis=2)[:, :, :limit]
    ended = _is_any(rows.token, eos_ids) & (rows.lengths > 0)
    finish = jnp.where(ended, int(Finish.EOS), int(Finish.LENGTH))
    return Samples(tokens, logprobs, rows.lengths, finish), past


def begin(
    params: dict[str, Any],
    prompts: Int[Array, "N P"],
    prompt_lengths: Int[Array, " N"],
    keys: Key,
    eos_ids: Int[Array, " E"],
    temperature: Float[Array, ""],
    *,
    config: ModelConfig,
    rule: Rule,
    limit: int,
) -> tuple[Prompts, Rows, Float[Array, "N G"]]:
    """Prefill, and the first token of every sample with its log-prob. Arguments as of `sample`."""
    context, hidden = _prefill(params, config, prompts, prompt_lengths)
    logits = model.logits(params, config, hidden)
    logits = jnp.broadcast_to(logits[:, None], (*keys.shape, config.vocab_size))
    filler = jnp.broadcast_to((prompt_lengths == 0)[:, None], keys.shape)
    token, logprob = _next_token(
        logits, keys=keys, position=jnp.zeros(keys.shape, jnp.int32), temperature=temperature, rule=rule
    )
    done = filler | _is_any(token, eos_ids) | (limit == 1)
    rows = Rows(keys, token, lengths=jnp.where(filler, 0, 1), done=done)
    return Prompts(context, prompt_lengths), rows, jnp.where(filler, 0.0, logprob)


def decode(
    params: dict[str, Any],
    prompts: Prompts,
    rows: Rows,
    past: list[KeyValues],
    slot: Int[Array, ""],
    eos_ids: Int[Array, " E"],
    temperature: Float[Array, ""],
    *,
    config: ModelConfig,
    rule: Rule,
    limit: int,
    steps: int,
) -> tuple[Decoded, Rows, list[KeyValues]]:
    """Up to `steps` more tokens of every row, until all rows are done.

    All rows write their next keys into the same slots, `slot` and up, however old they are: a row of n tokens
    has its own keys in the n - 1 slots before.
    """
    layers = {**params, "layers": model.unstack(params["layers"], config.layers)}
    rotations = rotation(config.rope, config.head_size, jnp.arange(prompts.layers[0].k.shape[-1] + limit))
    blank = jnp.zeros((*rows.token.shape, steps))
    start = (Decoded(blank.astype(jnp.int32), blank, jnp.int32(0)), rows, past)

    def unfinished(state: tuple[Decoded, Rows, list[KeyValues]]) -> Array:
        decoded, rows, _ = state
        return (decoded.taken < steps) & ~rows.done.all()

    def step(state: tuple[Decoded, Rows, list[KeyValues]]) -> tuple[Decoded, Rows, list[KeyValues]]:
        decoded, rows, past = state
        fed = jnp.maximum(rows.lengths - 1, 0)
        here = slot + decoded.taken
        hidden, past = model.decode_step(
            layers, config, rows.token, prompts.lengths[:, None] + fed, prompts.layers, prompts.lengths,
            past, here, here - fed, rotations,
        )  # fmt: skip
        token, logprob = _next_token(
            model.logits(params, config, hidden),
            keys=rows.keys, position=rows.lengths, temperature=temperature, rule=rule,
        )  # fmt: skip
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=decoded.taken, axis=2)
        decoded = Decoded(
            put(decoded.tokens, jnp.where(rows.done, 0, token)),
            put(decoded.logprobs, jnp.where(rows.done, 0.0, logprob)),
            decoded.taken + 1,
        )
        lengths = rows.lengths + (~rows.done).astype(jnp.int32)
        token = jnp.where(rows.done, rows.token, token)
        done = rows.done | _is_any(token, eos_ids) | (lengths == limit)
        return decoded, Rows(rows.keys, token, lengths, done), past

    return jax.lax.while_loop(unfinished, step, start)


def _prefill(
    params: dict[str, Any], config: ModelConfig, prompts: Int[Array, "N P"], prompt_lengths: Int[Array, " N"]
) -> tuple[list[KeyValues], Float[Array, "N D"]]:
    """Keys and values of the prompts, per layer and without G axis, and the hidden states at last tokens."""
    tokens = prompts[:, None]
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1])[None, None], tokens.shape)
    hidden, own = model.forward(params, config, tokens, positions)
    last = jnp.maximum(prompt_lengths - 1, 0)
    hidden = jnp.take_along_axis(hidden[:, 0], last[:, None, None], axis=1)[:, 0]
    return model.unstack(KeyValues(own.k[:, :, 0], own.v[:, :, 0]), config.layers), hidden


def _is_any(tokens: Int[Array, "N G"], ids: Int[Array, " E"]) -> Array:
    return (tokens[..., None] == ids[None, None, :]).any(axis=-1)


def _next_token(
    logits: Float[Array, "N G V"],
    *,
    keys: Key,
    position: Int[Array, "N G"],
    temperature: Float[Array, ""],
    rule: Rule,
) -> tuple[Int[Array, "N G"], Float[Array, "N G"]]:
    if rule.greedy:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return token, _logprob_of(logits, token)
    logits = logits / temperature
    uniforms = jax.vmap(jax.vmap(lambda key, at: _uniforms(jax.random.fold_in(key, at))))(keys, position)
    if not rule.top_k and rule.top_p == 1.0:
        return draw(logits, uniforms)
    token, _ = draw(_truncate(logits, rule), uniforms)
    return token, _logprob_of(logits, token)


def _uniforms(key: Key) -> Float[Array, " 2"]:
    """Amid float32's 2^23 steps: at exactly 0 the first token would be drawn, however improbable."""
    return jax.random.uniform(key, (2,)) + 2.0**-24


@jax.named_scope("draw")
def draw(
    logits: Float[Array, "*rows V"], uniforms: Float[Array, "*rows 2"]
) -> tuple[Int[Array, "*rows"], Float[Array, "*rows"]]:
    """An exact categorical draw by inverting the CDF in two levels, and its log-prob.

    The first uniform picks a block of 128 tokens by the blocks' sums of probability, the
    second a token in it. Two of them, because one float32 uniform has 23 bits only. That
    costs one pass over the vocabulary, where `random.categorical` needs V random numbers.
    Tokens of probability 0 are never drawn. Uniforms lie in (0, 1).
    """
    V = logits.shape[-1]
    peak = logits.max(axis=-1, keepdims=True)
    mass = jnp.exp(logits - peak)
    blocks = -(-V // _BLOCK)
    mass = jnp.pad(mass, [(0, 0)] * (mass.ndim - 1) + [(0, blocks * _BLOCK - V)])
    mass = mass.reshape(*mass.shape[:-1], blocks, _BLOCK)
    sums = mass.sum(axis=-1)
    block = _invert(sums, uniforms[..., 0])
    inside = jnp.take_along_axis(mass, block[..., None, None], axis=-2)[..., 0, :]
    token = block * _BLOCK + _invert(inside, uniforms[..., 1])
    chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return token, chosen - peak[..., 0] - jnp.log(sums.sum(axis=-1))


def _invert(mass: Float[Array, "*rows n"], uniform: Float[Array, "*rows"]) -> Int[Array, "*rows"]:
    """The first entry with mass at which the cumulative sum reaches uniform × total.

    Entries without mass are left out by name: a parallel cumulative sum rounds differently from entry
    to entry, so it may rise, or fall, where there is nothing to add.
    """
    reached = jnp.where(mass > 0, jnp.cumsum(mass, axis=-1), -1.0)
    target = uniform[..., None] * reached.max(axis=-1, keepdims=True)
    return jax.lax.argmax(reached >= target, reached.ndim - 1, jnp.int32)


def _logprob_of(logits: Float[Array, "*rows V"], token: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _truncate(logits: Float[Array, "*rows V"], rule: Rule) -> Float[Array, "*rows V"]:
    """Leaves the top_k most probable tokens, then the smallest set of those that holds top_p of the mass.

    Tokens as probable as the last one left stay too.
    """
    if rule.top_k:
        least = jax.lax.top_k(logits, min(rule.top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if rule.top_p < 1.0:
        logits = jnp.where(logits >= _nucleus_edge(logits, rule.top_p), logits, -jnp.inf)
    return logits


def _nucleus_edge(logits: Float[Array, "*rows V"], top_p: float) -> Float[Array, "*rows 1"]:
    """The least logit above which there is less than top_p of the mass, found by halving an interval.

    Forty passes over the vocabulary, until the ends are neighbours in float32, cost a fraction of one sort.
    """
    peak = logits.max(axis=-1, keepdims=True)
    mass = jnp.exp(logits - peak)
    enough = top_p * mass.sum(axis=-1, keepdims=True)

    def halve(_: Any, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) / 2
        above = jnp.where(logits > middle, mass, 0.0).sum(axis=-1, keepdims=True)
        return jnp.where(above < enough, low, middle), jnp.where(above < enough, middle, high)

    # Below peak - 104 a float32 probability is 0.
    return jax.lax.fori_loop(0, 40, halve, (peak - 104.0, peak))[1]
