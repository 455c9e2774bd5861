"""Which problems a step trains on: a pure function of (seed, step), so a resumed run needs no saved state."""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np
from jaxtyping import Int

from dash_jax.errors import UserError


def permutation(size: int, *key: int | str) -> Int[np.ndarray, " size"]:
    """A random order of 0 ... size - 1 that depends on `key` alone.

    NumPy promises that the raw output of a bit generator never changes, but not
    that `Generator.permutation` stays; sorting raw output keeps runs
    reproducible over versions.
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    raw = np.random.PCG64(int.from_bytes(digest[:16], "big")).random_raw(size)
    return np.argsort(raw, kind="stable")


def batch_of(step: int, batch: int, size: int, seed: int) -> list[int]:
    """The indices of the `batch` problems, of `size`, that training step `step` (from 0) takes.

    The steps walk through epoch after epoch without a gap, and every epoch is a
    permutation: a batch on the border holds the last problems of one epoch and
    the first of the next. No batch holds a problem twice; two groups of one
    problem at one step would share their random keys, hence all their samples.

    Raises UserError when `batch` exceeds `size`.
    """
    if batch > size:
        raise UserError(
            f"a batch of {batch} is above the {size} training problems, so a step would take one twice; "
            "lower rollout.prompts (for `dash-jax sft`, sft.batch), or give more problems"
        )
    epoch, start = divmod(step * batch, size)
    indices = _epoch(epoch, batch, size, seed)[start : start + batch]
    if len(indices) < batch:
        indices = np.concatenate([indices, _epoch(epoch + 1, batch, size, seed)[: batch - len(indices)]])
    return indices.tolist()


@functools.lru_cache(maxsize=2)  # a step looks at two epochs at most
def _epoch(epoch: int, batch: int, size: int, seed: int) -> Int[np.ndarray, " size"]:
    """The order of one epoch: its permutation, but first what the border batch does not hold already.

    An epoch hence depends on the end of the one before. That chain starts anew
    where an epoch begins with a batch, every `batch / gcd(batch, size)` epochs;
    and with two batches in an epoch its end is never touched, one look back is enough.
    """
    first = epoch - epoch % (batch // math.gcd(batch, size))
    if 2 * batch <= size:
        first = max(first, epoch - 1)
    order = permutation(size, "epoch", seed, first)
    for number in range(first + 1, epoch + 1):
        shared = number * size % batch  # so many problems of the border batch are of the epoch before
        held = order[size - shared :]
        order = permutation(size, "epoch", seed, number)
        fresh = order[~np.isin(order, held)][: batch - shared] if shared else order[:0]
        order = np.concatenate([fresh, order[~np.isin(order, fresh)]])
    return order
