"""From a rollout to micro-batches: drop what carries no signal, pack the rest tightly.

Host side, NumPy. The kept completions of a group are laid one behind the other into rows of the
completion limit, longest first, each into the first row with room; the rows of a group go into slots
that share its prompt. Slots have a few widths only, so that a few compiled shapes serve the whole
run: for each, as many micro-batches as the whole batch could need. Filled ones come first, and the
learner skips the empty ones behind them.

What this does not do: the last micro-batch of each shape may be partly empty.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from dash_jax.types import MicroBatches, Rollout

_NARROWEST = 8  # tokens; below it the prompt is most of the work, and there is little to save


class Shape(NamedTuple):
    """Of a slot: rows, and tokens of each."""

    rows: int
    width: int


Slot = list[list[tuple[int, int]]]  # rows of (completion id, its length)


def slot_shapes(group_size: int, limit: int, count: int, *, share_prompt: bool) -> tuple[Shape, ...]:
    """Up to `count` shapes, the largest first.

    With a shared prompt rows are those of a group, then a quarter of that, and so on; without it a slot is
    one completion, and its width is halved.

    Example: `slot_shapes(8, 100, 3, share_prompt=True)` has (8, 100), (2, 100), (1, 100) and without
    `share_prompt` (1, 100), (1, 50), (1, 25).
    """
    if share_prompt:
        shapes = (Shape(max(group_size // 4**i, 1), limit) for i in range(count))
    else:
        narrowest = min(_NARROWEST, limit)
        shapes = (Shape(1, max(math.ceil(limit / 2**i), narrowest)) for i in range(count))
    return tuple(dict.fromkeys(shapes))


def pack(
    rollout: Rollout,
    advantages: Float[np.ndarray, "N G"],
    weights: Float[np.ndarray, "N G"],
    keep: Bool[np.ndarray, "N G"],
    *,
    rows_per_micro_batch: int,
    share_prompt: bool,
    shapes: int,
    multiple_of: int = 1,
) -> tuple[MicroBatches, ...]:
    """Lays the kept completions into one `MicroBatches` a slot shape.

    Example, two groups of two, of which three completions are kept, lengths [[3, 9], [2, -]], limit 16, one
    shape: with `share_prompt` the slot of the first prompt has a row with 9 tokens of completion 1 and 3 of
    completion 0, and an empty one; that of the second a row with 2 tokens of completion 2, and an empty one.

    Args:
        rollout: its `lengths`, `prompts` and so on may be NumPy or JAX arrays.
        weights: of `losses.row_weights`, made over the whole optimizer batch.
        keep: which completions to learn from.
        rows_per_micro_batch: rows that one backward pass holds; a multiple of G with `share_prompt`.
        shapes: how many, see `slot_shapes`.
        multiple_of: slots in a micro-batch are rounded up to it: the devices that share them out.

    Returns:
        NumPy records with M = the micro-batches that the worst case would need. Prompts of empty slots
        have length 1, not 0, so that no attention goes over nothing.
    """
    rollout = jax.tree.map(np.asarray, rollout)
    N, G = keep.shape
    limit, prompt_width = rollout.tokens.shape[2], rollout.prompts.shape[1]
    ladder = slot_shapes(G, limit, shapes, share_prompt=share_prompt)
    lengths = rollout.lengths.reshape(N, G)
    slots: dict[Shape, list[Slot]] = {shape: [] for shape in ladder}
    for n in range(N):
        kept = [(n * G + int(g), int(lengths[n, g])) for g in np.flatnonzero(keep[n])]
        kept.sort(key=lambda completion: -completion[1])
        for shape, slot in _shared(kept, prompt_width, ladder) if share_prompt else _alone(kept, ladder):
            slots[shape].append(slot)

    packed = []
    for shape, members in slots.items():
        together = math.ceil(rows_per_micro_batch / (shape.rows * multiple_of)) * multiple_of
        most = N * (math.ceil(G / shape.rows) if share_prompt else G)
        sources = _sources(members, shape, math.ceil(most / together), together, limit)
        packed.append(_gather(sources, rollout, advantages, weights))
    return tuple(packed)


def padding_report(batches: tuple[MicroBatches, ...]) -> tuple[int, int]:
    """(useful, computed): token positions that hold a token, and all that the learner goes through.

    Only micro-batches with a token count, since the learner skips the others. A prompt counts once
    for each slot, as it is computed.
    """
    useful = computed = 0
    for batch in batches:
        filled = batch.completion_ids >= 0
        used = filled.any(axis=(2, 3))
        useful += int(batch.prompt_lengths[used].sum()) + int(filled.sum())
        _, slots, rows, width = filled.shape
        computed += int(used.any(axis=1).sum()) * slots * (batch.prompts.shape[2] + rows * width)
    return useful, computed


def _shared(
    kept: list[tuple[int, int]], prompt_width: int, ladder: tuple[Shape, ...]
) -> Iterator[tuple[Shape, Slot]]:
    """The completions of one prompt, longest first, as slots."""
    rows: Slot = []
    free: list[int] = []
    for completion in kept:
        length = completion[1]
        place = next((i for i, room in enumerate(free) if room >= length), len(rows))
        if place == len(rows):
            rows.append([])
            free.append(ladder[0].width)
        rows[place].append(completion)
        free[place] -= length
    start = 0
    for shape in _cheapest(len(rows), prompt_width, ladder)[1]:
        yield shape, rows[start : start + shape.rows]
        start += shape.rows


@functools.lru_cache(maxsize=4096)
def _cheapest(rows: int, prompt_width: int, ladder: tuple[Shape, ...]) -> tuple[int, tuple[Shape, ...]]:
    """(tokens computed, shapes) for so many rows. An empty row costs its width, one more slot a prompt."""
    if rows <= 0:
        return 0, ()
    options = []
    for shape in ladder:
        tokens, rest = _cheapest(rows - shape.rows, prompt_width, ladder)
        options.append((tokens + prompt_width + shape.rows * shape.width, (shape, *rest)))
    return min(options, key=lambda option: option[0])


def _alone(kept: list[tuple[int, int]], ladder: tuple[Shape, ...]) -> Iterator[tuple[Shape, Slot]]:
    """Each completion in the narrowest slot that holds it."""
    for completion in kept:
        yield min(shape for shape in ladder if shape.width >= completion[1]), [[completion]]


def _sources(
    members: list[Slot], shape: Shape, micro_batches: int, slots: int, limit: int
) -> Int[np.ndarray, "M S R W"]:
    """For every place the index of its token in the rollout's [N * G * C], -1 where there is none."""
    sources = np.full((micro_batches * slots, *shape), -1, np.int64)
    for slot, rows in enumerate(members):
        for row, completions in enumerate(rows):
            start = 0
            for completion, length in completions:
                sources[slot, row, start : start + length] = completion * limit + np.arange(length)
                start += length
    return sources.reshape(micro_batches, slots, *shape)


def _gather(
    sources: Int[np.ndarray, "M S R W"],
    rollout: Rollout,
    advantages: Float[np.ndarray, "N G"],
    weights: Float[np.ndarray, "N G"],
) -> MicroBatches:
    """Every field of the tokens through the one index `sources`, so that none can get out of step."""
    group_size, limit = rollout.tokens.shape[1:]
    ids = np.where(sources < 0, -1, sources // limit)
    problems = ids[:, :, 0, 0] // group_size  # the first row of a slot in use is; -1 stays -1
    prompt_lengths = _take(rollout.prompt_lengths, problems, np.int32)
    fields: dict[str, Any] = {  # NumPy arrays, where the record is annotated with jax.Array
        "prompts": _take(rollout.prompts, problems, np.int32),
        "prompt_lengths": np.where(problems < 0, np.int32(1), prompt_lengths),
        "tokens": _take(rollout.tokens.reshape(-1), sources, np.int32),
        "positions": np.where(sources < 0, 0, sources % limit).astype(np.int32),
        "completion_ids": ids.astype(np.int32),
        "logprobs": _take(rollout.logprobs.reshape(-1), sources, np.float32),
        "advantages": _take(advantages.reshape(-1), ids, np.float32),
        "weights": _take(weights.reshape(-1), ids, np.float32),
    }
    return MicroBatches(**fields)


def _take(values: Any, index: Int[np.ndarray, "*any"], dtype: type) -> np.ndarray:
    """`values[index]`, zeros where the index is -1."""
    taken = values[index].astype(dtype)
    taken[index < 0] = 0
    return taken
