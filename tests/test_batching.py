"""Packing: every kept row is there once, with all that belongs to it, in as few micro-batches as can be."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_jax import batching, losses
from dash_jax.types import Rollout

PROMPT_WIDTH = 3


@dataclasses.dataclass(frozen=True)
class Batch:
    rollout: Rollout
    advantages: np.ndarray
    weights: np.ndarray
    keep: np.ndarray

    def pack(self, *, buckets, **options):
        lengths = batching.bucket_widths(self.rollout.tokens.shape[2], buckets)
        return batching.pack(
            self.rollout, self.advantages, self.weights, self.keep, lengths=lengths, **options
        )


def batch_of(lengths, keep, limit):
    """A batch in which every number tells which row, and which token of it, it belongs to."""
    lengths, keep = np.array(lengths, np.int32), np.array(keep, bool)
    prompts, group = lengths.shape
    row_ids = np.arange(prompts * group).reshape(prompts, group)
    tokens = np.where(
        np.arange(limit) < lengths[..., None], row_ids[..., None] * 100 + np.arange(limit) + 1, 0
    )
    problems = np.arange(prompts, dtype=np.int32)
    rollout = Rollout(
        problem_ids=problems + 1000,
        prompts=(problems[:, None] + 7) * np.ones(PROMPT_WIDTH, np.int32),
        prompt_lengths=problems % PROMPT_WIDTH + 1,
        tokens=tokens.astype(np.int32),
        logprobs=(tokens / -1000).astype(np.float32),
        lengths=lengths,
        finish=np.ones_like(lengths),
    )
    return Batch(rollout, row_ids + 0.25, row_ids + 0.5, keep)


@st.composite
def batches(draw):
    prompts, group, limit = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 40))

    def grid(elements):
        return draw(
            st.lists(st.lists(elements, min_size=group, max_size=group), min_size=prompts, max_size=prompts)
        )

    return batch_of(grid(st.integers(1, limit)), grid(st.booleans()), limit)


layouts = st.fixed_dictionaries(
    {
        "rows_per_micro_batch": st.integers(1, 10),
        "share_prompt": st.booleans(),
        "buckets": st.integers(1, 4),
        "multiple_of": st.integers(1, 3),
    }
)


def rows_in(packed):
    """All rows of all micro-batches: id -> everything that stands in its place, padding cut off."""
    found = {}
    for bucket in packed:
        for m, s, g in zip(*np.nonzero(bucket.row_ids >= 0), strict=True):
            row_id, length = int(bucket.row_ids[m, s, g]), int(bucket.lengths[m, s, g])
            assert row_id not in found
            found[row_id] = (
                length,
                bucket.tokens[m, s, g, :length].tolist(),
                bucket.logprobs[m, s, g, :length].tolist(),
                float(bucket.advantages[m, s, g]),
                float(bucket.weights[m, s, g]),
                bucket.prompts[m, s].tolist(),
                int(bucket.prompt_lengths[m, s]),
            )
    return found


@settings(max_examples=80, deadline=None)
@given(batches(), layouts)
def test_case_19_every_kept_row_is_there_once_with_its_own_fields(batch, options):
    rollout, group = batch.rollout, batch.keep.shape[1]
    expected = {}
    for n, g in zip(*np.nonzero(batch.keep), strict=True):
        length = int(rollout.lengths[n, g])
        expected[int(n * group + g)] = (
            length,
            rollout.tokens[n, g, :length].tolist(),
            rollout.logprobs[n, g, :length].tolist(),
            float(batch.advantages[n, g]),
            float(batch.weights[n, g]),
            rollout.prompts[n].tolist(),
            int(rollout.prompt_lengths[n]),
        )
    assert rows_in(batch.pack(**options)) == expected


@settings(max_examples=80, deadline=None)
@given(batches(), layouts)
def test_shapes_depend_on_sizes_only_and_micro_batches_are_filled(batch, options):
    packed = batch.pack(**options)
    rows_per_slot = batch.keep.shape[1] if options["share_prompt"] else 1
    longest = np.where(batch.keep, batch.rollout.lengths, 0).reshape(-1, rows_per_slot).max(axis=1)
    narrower = 0
    for bucket, width in zip(
        packed, batching.bucket_widths(batch.rollout.tokens.shape[2], options["buckets"]), strict=True
    ):
        micro_batches, slots, rows = bucket.row_ids.shape
        assert rows == rows_per_slot
        assert slots % options["multiple_of"] == 0
        assert 0 <= slots * rows - options["rows_per_micro_batch"] < rows * options["multiple_of"]
        assert micro_batches == math.ceil(len(longest) / slots)
        assert bucket.tokens.shape == bucket.logprobs.shape == (micro_batches, slots, rows, width)
        assert bucket.prompts.shape == (micro_batches, slots, PROMPT_WIDTH)

        # As few as the slots of this bucket need, full but for the last, in front, sorted by length.
        members = np.sort(longest[(longest > narrower) & (longest <= width)])
        used = (bucket.row_ids >= 0).any(axis=2).ravel()
        assert used.tolist() == [True] * len(members) + [False] * (used.size - len(members))
        assert bucket.lengths.max(axis=2).ravel()[used].tolist() == members.tolist()
        narrower = width


@settings(max_examples=40, deadline=None)
@given(batches(), layouts)
def test_both_layouts_hold_the_same_rows(batch, options):
    assert rows_in(batch.pack(**{**options, "share_prompt": True})) == rows_in(
        batch.pack(**{**options, "share_prompt": False})
    )


def test_rollout_of_jax_arrays_packs_alike():
    batch = batch_of(LENGTHS, KEEP, 16)
    on_device = dataclasses.replace(batch, rollout=jax.tree.map(jnp.asarray, batch.rollout))
    options = {"rows_per_micro_batch": 2, "share_prompt": True, "buckets": 2}
    packed = on_device.pack(**options)
    assert rows_in(packed) == rows_in(batch.pack(**options))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(packed))


@settings(max_examples=40, deadline=None)
@given(batches(), layouts)
def test_slots_without_a_row_are_blank(batch, options):
    for bucket in batch.pack(**options):
        empty = bucket.row_ids < 0
        for field in (bucket.tokens, bucket.lengths, bucket.logprobs, bucket.advantages, bucket.weights):
            assert not field[empty].any()
        assert not bucket.prompts[empty.all(axis=2)].any()
        assert (bucket.prompt_lengths[empty.all(axis=2)] == 1).all()
        assert {field.dtype.name for field in vars(bucket).values()} == {"int32", "float32"}


LENGTHS = [[3, 9], [2, 16], [5, 12]]
KEEP = [[True, True], [True, False], [True, True]]


def test_shared_prompt_layout_by_hand():
    packed = batch_of(LENGTHS, KEEP, 16).pack(rows_per_micro_batch=2, share_prompt=True, buckets=2)
    assert [bucket.row_ids.tolist() for bucket in packed] == [
        [[[2, -1]], [[-1, -1]], [[-1, -1]]],
        [[[1, 0]], [[5, 4]], [[-1, -1]]],
    ]
    assert [bucket.lengths.tolist() for bucket in packed] == [
        [[[2, 0]], [[0, 0]], [[0, 0]]],
        [[[9, 3]], [[12, 5]], [[0, 0]]],
    ]
    # Three micro-batches are not empty, with 3 + 2 × 8, 3 + 2 × 16 and 3 + 2 × 16 positions; the prompts
    # of the three slots hold 2, 1 and 3 tokens.
    assert batching.padding_report(packed) == (2 + 2 + 1 + 9 + 3 + 3 + 12 + 5, 19 + 35 + 35)


def test_plain_layout_by_hand():
    packed = batch_of(LENGTHS, KEEP, 16).pack(rows_per_micro_batch=2, share_prompt=False, buckets=2)
    assert [bucket.row_ids[..., 0].tolist() for bucket in packed] == [
        [[2, 0], [4, -1], [-1, -1]],
        [[1, 5], [-1, -1], [-1, -1]],
    ]
    # Prompts count for each row: 2 + 1 + 3 and 1 + 3; two micro-batches of 2 × (3 + 8), one of 2 × (3 + 16).
    assert batching.padding_report(packed) == (6 + 2 + 3 + 5 + 4 + 9 + 12, 22 + 22 + 38)


@pytest.mark.parametrize("share_prompt", [True, False])
def test_case_17_nothing_kept_gives_the_same_shapes_without_rows(share_prompt):
    options = {"rows_per_micro_batch": 4, "share_prompt": share_prompt, "buckets": 2}
    full = batch_of(LENGTHS, np.ones((3, 2)), 16).pack(**options)
    nothing = batch_of(LENGTHS, np.zeros((3, 2)), 16).pack(**options)
    for a, b in zip(full, nothing, strict=True):
        assert [field.shape for field in vars(a).values()] == [field.shape for field in vars(b).values()]
    assert rows_in(nothing) == {}
    assert batching.padding_report(nothing) == (0, 0)


@pytest.mark.parametrize("share_prompt", [True, False])
def test_case_23_padding_id_in_prompt_and_completion_survives(share_prompt):
    batch = batch_of([[2]], [[True]], 4)
    # The end of sequence, padding and a token of the prompt are all id 0.
    batch.rollout.prompts[:] = [[5, 0, 6]]
    batch.rollout.tokens[:] = [[[8, 0, 0, 0]]]
    (bucket,) = batch.pack(rows_per_micro_batch=1, share_prompt=share_prompt, buckets=1)
    assert bucket.prompts.tolist() == [[[5, 0, 6]]]
    assert (bucket.lengths.tolist(), bucket.tokens.tolist()) == ([[[2]]], [[[[8, 0, 0, 0]]]])
    assert losses.completion_mask(jnp.asarray(bucket.lengths), 4).sum() == 2


def test_case_33_log_probs_stay_beside_their_tokens():
    batch = batch_of(LENGTHS, KEEP, 16)
    for bucket in batch.pack(rows_per_micro_batch=2, share_prompt=True, buckets=2):
        np.testing.assert_allclose(bucket.logprobs, bucket.tokens / -1000, rtol=1e-6)


def test_shared_prompts_compute_fewer_tokens():
    batch = batch_of(np.full((4, 4), 8), np.ones((4, 4)), 8)
    shared, plain = (
        batching.padding_report(batch.pack(rows_per_micro_batch=4, share_prompt=share, buckets=1))[1]
        for share in (True, False)
    )
    assert (shared, plain) == (4 * (3 + 4 * 8), 16 * (3 + 8))


def test_bucket_widths():
    assert batching.bucket_widths(64, 3) == (16, 32, 64)
    assert batching.bucket_widths(100, 4) == (13, 25, 50, 100)
    assert batching.bucket_widths(12, 3) == (8, 12)
    assert batching.bucket_widths(5, 3) == (5,)
    assert batching.bucket_widths(64, 1) == (64,)


@pytest.mark.parametrize("lengths", [(8,), (16, 8), (8, 8, 16), (8, 32)])
def test_widths_must_ascend_to_the_limit(lengths):
    batch = batch_of(LENGTHS, KEEP, 16)
    with pytest.raises(ValueError, match="the last the rollout's 16"):
        batching.pack(
            batch.rollout,
            batch.advantages,
            batch.weights,
            batch.keep,
            rows_per_micro_batch=2,
            share_prompt=True,
            lengths=lengths,
        )
