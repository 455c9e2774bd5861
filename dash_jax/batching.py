"""From a rollout to micro-batches: drop what carries no signal, sort the rest by length, pack it.

Host side, NumPy. Whatever survives, the shapes stay the same, so that one compiled learner serves
the whole run: every bucket of completion lengths has as many micro-batches as the whole batch
could need. Filled ones come first, and the learner skips the empty ones behind them.

What this does not do: the last micro-batch of each bucket may be partly empty, and nothing is
moved up to a longer bucket to fill it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from dash_jax.types import MicroBatches, Rollout

_SHORTEST_BUCKET = 8  # below it the prompt is most of the work, and there is little to save


def bucket_widths(limit: int, buckets: int) -> tuple[int, ...]:
    """The completion widths that micro-batches are padded to: limit, limit/2, limit/4 ..., ascending.

    Rounded up, none below 8 (or the limit, where that is less), none twice.

    Example: `bucket_widths(100, 3) == (25, 50, 100)`, `bucket_widths(12, 3) == (8, 12)`
    """
    shortest = min(_SHORTEST_BUCKET, limit)
    return tuple(sorted({max(shortest, math.ceil(limit / 2**halvings)) for halvings in range(buckets)}))


def pack(
    rollout: Rollout,
    advantages: Float[np.ndarray, "N G"],
    weights: Float[np.ndarray, "N G"],
    keep: Bool[np.ndarray, "N G"],
    *,
    rows_per_micro_batch: int,
    share_prompt: bool,
    lengths: tuple[int, ...],
    multiple_of: int = 1,
) -> tuple[MicroBatches, ...]:
    """Lays the kept rows into one `MicroBatches` a bucket of completion lengths.

    A slot is a prompt with the rows that share it: with `share_prompt` the kept rows of a group,
    without it a single row. It goes to the bucket of its longest row. Within a bucket slots are
    sorted by that length, within a slot rows are, longest first.

    Example, two groups of two, of which three rows are kept, lengths [[3, 9], [2, -]], buckets of
    8 and 16 and one slot a micro-batch: with `share_prompt` bucket 8 holds row_ids [[2, -1]] and
    bucket 16 holds [[1, 0]]; without it bucket 8 holds [[2]], [[0]] and bucket 16 holds [[1]].

    Args:
        rollout: its `lengths`, `prompts` and so on may be NumPy or JAX arrays.
        weights: of `losses.row_weights`, made over the whole optimizer batch.
        keep: which rows to learn from.
        rows_per_micro_batch: rows that one backward pass holds; a multiple of G with `share_prompt`.
        lengths: of `bucket_widths`; the last is the completion width of the rollout.
        multiple_of: slots in a micro-batch are rounded up to it: the devices that share them out.

    Returns:
        NumPy records with M = the micro-batches that all slots together would need. Slots without
        a row have zeros in all fields, -1 in `row_ids`, and prompts of length 1, not 0, so that no
        attention goes over nothing.
    """
    group_size, limit = rollout.tokens.shape[1:]
    if list(lengths) != sorted(set(lengths)) or lengths[-1] != limit:
        raise ValueError(f"lengths={lengths}: give ascending widths, the last the rollout's {limit}")

    rows_per_slot = group_size if share_prompt else 1
    slots = math.ceil(rows_per_micro_batch / (rows_per_slot * multiple_of)) * multiple_of
    micro_batches = math.ceil(keep.size / rows_per_slot / slots)

    rollout = jax.tree.map(np.asarray, rollout)
    slot_rows, slot_lengths = _fill_slots(keep, np.asarray(rollout.lengths), rows_per_slot)
    slot_buckets = np.searchsorted(lengths, slot_lengths)

    packed = []
    for bucket, width in enumerate(lengths):
        members = slot_rows[slot_buckets == bucket]
        row_ids = np.full((micro_batches * slots, rows_per_slot), -1, np.int32)
        row_ids[: len(members)] = members
        row_ids_MSG = row_ids.reshape(micro_batches, slots, rows_per_slot)
        packed.append(_gather(row_ids_MSG, rollout, advantages, weights, width))
    return tuple(packed)


def padding_report(batches: tuple[MicroBatches, ...]) -> tuple[int, int]:
    """(useful, computed): token positions that hold a token, and all that the learner goes through.

    Only micro-batches with a row count, since the learner skips the others. A prompt counts once
    for each slot, as it is computed.
    """
    useful = computed = 0
    for batch in batches:
        slot_used_MS = (batch.row_ids >= 0).any(axis=2)
        useful += int(batch.prompt_lengths[slot_used_MS].sum()) + int(batch.lengths.sum())
        slots, prompt_width = batch.prompts.shape[1:]
        rows, width = batch.tokens.shape[2:]
        computed += int(slot_used_MS.any(axis=1).sum()) * slots * (prompt_width + rows * width)
    return useful, computed


def _fill_slots(
    keep: Bool[np.ndarray, "N G"], lengths: Int[np.ndarray, "N G"], rows_per_slot: int
) -> tuple[Int[np.ndarray, "X R"], Int[np.ndarray, " X"]]:
    """The row ids of each slot that has any, longest first and -1 behind, and its longest length."""
    row_ids = np.where(keep, np.arange(keep.size).reshape(keep.shape), -1).reshape(-1, rows_per_slot)
    row_lengths = np.where(keep, lengths, -1).reshape(-1, rows_per_slot)

    longest_first = np.argsort(-row_lengths, axis=1, kind="stable")
    row_ids = np.take_along_axis(row_ids, longest_first, axis=1)

    slot_lengths = row_lengths.max(axis=1)
    order = np.argsort(slot_lengths, kind="stable")
    order = order[slot_lengths[order] >= 0]
    return row_ids[order], slot_lengths[order]


def _gather(
    row_ids: Int[np.ndarray, "M S R"],
    rollout: Rollout,
    advantages: Float[np.ndarray, "N G"],
    weights: Float[np.ndarray, "N G"],
    width: int,
) -> MicroBatches:
    """Every field of the rows through the one index `row_ids`, so that none can get out of step."""

    def rows(field: Any, dtype: type) -> np.ndarray:
        return _take(field.reshape(-1, *field.shape[2:]), row_ids, dtype)

    group_size = rollout.tokens.shape[1]
    problems_MS = row_ids[..., 0] // group_size  # the rows of a slot share a prompt; -1 stays -1
    prompt_lengths_MS = _take(rollout.prompt_lengths, problems_MS, np.int32)
    fields: dict[str, Any] = {  # NumPy arrays, where the record is annotated with jax.Array
        "prompts": _take(rollout.prompts, problems_MS, np.int32),
        "prompt_lengths": np.where(problems_MS < 0, np.int32(1), prompt_lengths_MS),
        "tokens": rows(rollout.tokens[..., :width], np.int32),
        "lengths": rows(rollout.lengths, np.int32),
        "logprobs": rows(rollout.logprobs[..., :width], np.float32),
        "advantages": rows(advantages, np.float32),
        "weights": rows(weights, np.float32),
        "row_ids": row_ids,
    }
    return MicroBatches(**fields)


def _take(values: Any, index: Int[np.ndarray, "*any"], dtype: type) -> np.ndarray:
    """`values[index]`, zeros where the index is -1."""
    taken = values[index].astype(dtype)
    taken[index < 0] = 0
    return taken
