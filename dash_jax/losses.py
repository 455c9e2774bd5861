"""Token losses: `(logprobs[B,T], ..., mask[B,T]) -> (sum, aux)`, pure functions of arrays.

Every loss here returns an already weighted sum

    sum_i w_i sum_t m_it l_it          B rows i, T completion positions t

and divides by nothing: the weights `w` (from `row_weights`) hold the denominator of the whole
optimizer batch. So a batch may be cut into micro-batches of any size, order and padding, and
the sums of the pieces, and their gradients, add up to those of the whole.

What the arguments are, everywhere:

    logprobs      [B, T]  log pi(token), nats, at the sampling temperature; what is differentiated
    advantages    [B]     one number a completion; constant (stop_gradient)
    mask          [B, T]  bool, from `completion_mask`: the sampled tokens, the EOS among them
    weights       [B]     from `row_weights`; constant (stop_gradient)

Entry t of every [B, T] array is about the same token, completion token t. Floats are of one
type, float32 in training. Masked entries may hold anything, NaN and infinities too: they reach
neither the loss nor the gradient.

`aux` maps names to pairs (sum, count) over unmasked tokens, unweighted, to be added up over
micro-batches and divided once, for the log.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int

Scalar = Float[Array, ""]
Aux = dict[str, tuple[Scalar, Scalar]]


def policy_gradient(
    logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    weights: Float[Array, " B"],
) -> tuple[Scalar, Aux]:
    """The on-policy loss, REINFORCE with a baseline:

        l_it = -A_i log pi(y_it)

    DASH (arXiv 2505.17218) with one optimizer step a rollout: there the clipped surrogate has ratio
    1 everywhere and this very gradient, -A grad log pi, at the price of one more input. Its value
    means nothing by itself: it may fall or rise while the policy improves. `aux` is empty.
    """
    logprobs = _zero_where_masked(logprobs, mask)
    advantages_B1 = jax.lax.stop_gradient(advantages)[:, None]
    return _weighted_sum(-advantages_B1 * logprobs, mask, weights), {}


def clipped_surrogate(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    weights: Float[Array, " B"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Scalar, Aux]:
    """The surrogate of PPO (arXiv 1707.06347, equation 7) as GRPO uses it (arXiv 2402.03300):

        r_it = exp(log pi(y_it) - log pi_old(y_it))
        l_it = -min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i)

    `clip_high > clip_low` is the "clip higher" of DAPO (arXiv 2503.14476) and ProRL (2507.12507).

    Args:
        old_logprobs: of the policy that sampled, at the sampling temperature; constant (stop_gradient).
            Pass `logprobs` itself for the on-policy step: value -A, gradient of `policy_gradient`.

    Returns:
        The sum, and `clipped`: on how many tokens the clip took the gradient away, that is A > 0
        and r > 1 + clip_high, or A < 0 and r < 1 - clip_low.
    """
    logprobs = _zero_where_masked(logprobs, mask)
    old_logprobs = jax.lax.stop_gradient(old_logprobs)
    advantages_B1 = jax.lax.stop_gradient(advantages)[:, None]

    ratio = jnp.exp(logprobs - old_logprobs)
    kept_ratio = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = -jnp.minimum(ratio * advantages_B1, kept_ratio * advantages_B1)

    clipped = ((advantages_B1 > 0) & (ratio > 1.0 + clip_high)) | (
        (advantages_B1 < 0) & (ratio < 1.0 - clip_low)
    )
    return _weighted_sum(loss, mask, weights), {"clipped": _sum_and_count(clipped.astype(loss.dtype), mask)}


def kl_penalty(
    logprobs: Float[Array, "B T"],
    reference_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    weights: Float[Array, " B"],
    estimator: Literal["k1", "k2", "k3"],
) -> tuple[Scalar, Aux]:
    """Estimates of KL(pi || pi_ref) from the sampled tokens, in nats (Schulman, "Approximating KL
    Divergence", joschu.net/blog/kl-approx.html), with d = log pi_ref(y_it) - log pi(y_it):

        k1 = -d              k2 = d^2 / 2              k3 = exp(d) - d - 1

    As values k1 and k3 are unbiased. As losses, which is what they are here, another thing counts:
    the expected gradient of k1 is zero, that of k2 is the gradient of KL(pi || pi_ref), and that of
    k3, which the papers of GRPO and DASH use (coefficient 0.04 there), is that of KL(pi_ref || pi).
    All of this on tokens sampled from pi.

    Args:
        reference_logprobs: at the temperature of `logprobs`; constant (stop_gradient).

    Returns:
        The sum, without a coefficient, and `kl_k1` and `kl_k3` for the log.
    """
    logprobs = _zero_where_masked(logprobs, mask)
    d = jax.lax.stop_gradient(reference_logprobs) - logprobs
    estimates = {"k1": -d, "k2": 0.5 * jnp.square(d), "k3": jnp.expm1(d) - d}
    return _weighted_sum(estimates[estimator], mask, weights), {
        "kl_k1": _sum_and_count(estimates["k1"], mask),
        "kl_k3": _sum_and_count(estimates["k3"], mask),
    }


def row_weights(
    lengths: Int[ArrayLike, " B"],
    counted: Bool[ArrayLike, " B"],
    *,
    aggregation: Literal["token_mean", "sequence_mean", "constant"],
    max_length: int,
) -> Float[Array, " B"]:
    """The weights with which the sums above become the loss of a whole optimizer batch:

        token_mean       w_i = 1 / (number of tokens of all counted rows)
        sequence_mean    w_i = 1 / (number of counted rows × length_i)
        constant         w_i = 1 / (number of counted rows × max_length)

    token_mean is the aggregation of DAPO (arXiv 2503.14476), sequence_mean that of GRPO
    (arXiv 2402.03300), constant that of Dr. GRPO (arXiv 2503.20783) and of the DASH scripts.

    Args:
        lengths: tokens of each row of the optimizer batch, before it is cut into micro-batches.
        counted: the rows that the denominator holds. A row that is counted need not be computed:
            one with advantage 0 has no policy gradient, and leaving it out changes nothing.
        max_length: the limit on completion lengths, used by `constant` only.

    Returns:
        float32; 0 for rows that are not counted or are empty, so all zeros when none is left.
    """
    lengths_B = jnp.asarray(lengths).astype(jnp.float32)  # as int32 rows × length could overflow
    counted_B = jnp.asarray(counted) & (lengths_B > 0)
    rows = jnp.sum(counted_B, dtype=jnp.float32)
    denominators_B = {
        "token_mean": jnp.full_like(lengths_B, jnp.sum(jnp.where(counted_B, lengths_B, 0.0))),
        "sequence_mean": rows * lengths_B,
        "constant": jnp.full_like(lengths_B, rows * max_length),
    }[aggregation]
    return jnp.where(counted_B, 1.0 / denominators_B, 0.0)


def completion_mask(lengths: Int[Array, "*rows"], width: int) -> Bool[Array, "*rows T"]:
    """True at the first `lengths` of `width` positions.

    Lengths are the only source: no token id tells padding apart, where the padding id is that of
    the end of sequence, say. The EOS that was sampled is within its row's length, and trained.
    """
    positions = jax.lax.broadcasted_iota(lengths.dtype, (*lengths.shape, width), lengths.ndim)
    return positions < lengths[..., None]


def _zero_where_masked(logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    # Before any arithmetic with what is differentiated. The selection at the end is enough for the
    # value, but backwards it sends 0 through the arithmetic of masked entries, and 0 × inf is NaN.
    return jnp.where(mask, logprobs, 0.0)


def _weighted_sum(loss: Float[Array, "B T"], mask: Bool[Array, "B T"], weights: Float[Array, " B"]) -> Scalar:
    return jnp.sum(jax.lax.stop_gradient(weights) * jnp.sum(jnp.where(mask, loss, 0.0), axis=1))


def _sum_and_count(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> tuple[Scalar, Scalar]:
    return jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask, dtype=values.dtype)
