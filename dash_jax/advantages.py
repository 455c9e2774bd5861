"""Group-relative advantages, and which completions carry a gradient at all.

Rewards come from graders and may be NaN or infinite where a grader failed. Such a
completion neither learns nor counts: its group's statistics go over the others.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float


def group_advantages(
    rewards: Float[ArrayLike, "N G"], *, scale_by_std: bool, epsilon: float = 1e-4
) -> Float[Array, "N G"]:
    """How much better a completion is than its group.

        A_i = r_i - mean(r)                            scale_by_std=False
        A_i = (r_i - mean(r)) / (std(r) + epsilon)     scale_by_std=True

    Mean and std are those of the finite rewards of the group; std is the unbiased one
    (n - 1), as in the code of GRPO (arXiv 2402.03300, in TRL) and of DASH (arXiv 2505.17218).
    Without the division this is Dr. GRPO (arXiv 2503.20783).

    Args:
        rewards: one group a row, in any unit; NaN and infinities stand for "not graded".
        scale_by_std: divide by the standard deviation; |A| then stays below sqrt(G).
        epsilon: added to the std, greater than 0, in the unit of the rewards.

    Returns:
        float32. Exactly 0.0, so that `carries_signal` may test against 0, where the reward is not
        finite, in groups with fewer than two finite rewards, and in groups of equal rewards.
    """
    rewards_NG = jnp.asarray(rewards, jnp.float32)
    finite_NG = jnp.isfinite(rewards_NG)
    count_N1 = jnp.sum(finite_NG, axis=1, keepdims=True, dtype=jnp.float32)

    # The mean of three times 0.1 is not 0.1 in floating point. Measured from the group's
    # lowest reward, equal rewards are zeros, and their mean is exactly zero. So is a lone reward.
    lowest_N1 = jnp.min(rewards_NG, axis=1, keepdims=True, where=finite_NG, initial=jnp.inf)
    above_NG = jnp.where(finite_NG, rewards_NG - lowest_N1, 0.0)
    mean_N1 = jnp.sum(above_NG, axis=1, keepdims=True) / jnp.maximum(count_N1, 1.0)
    centred_NG = jnp.where(finite_NG, above_NG - mean_N1, 0.0)
    if not scale_by_std:
        return centred_NG

    variance_N1 = jnp.sum(jnp.square(centred_NG), axis=1, keepdims=True) / jnp.maximum(count_N1 - 1.0, 1.0)
    return centred_NG / (jnp.sqrt(variance_N1) + epsilon)


def carries_signal(advantages: Float[ArrayLike, "*batch"], threshold: float) -> Bool[Array, "*batch"]:
    """|A| > threshold, strictly: the gradient filter of DASH (arXiv 2505.17218, section 3).

    With threshold 0 what fails has no policy gradient at all, so dropping it changes nothing but
    the time a step takes (and the KL penalty, where one is on).
    """
    return jnp.abs(jnp.asarray(advantages)) > threshold
