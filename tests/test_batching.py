"""Packing: every kept row is there once, with all that belongs to it, in as few micro-batches as can be."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_jax import batching
from dash_jax.types import Rollout

PROMPT_WIDTH = 3


@dataclasses.dataclass(frozen=True)
class Batch:
    rollout: Rollout
    advantages: np.ndarray
    weights: np.ndarray
    keep: np.ndarray

    def pack(self, **options):
        return batching.pack(self.rollout, self.advantages, self.weights, self.keep, **options)


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
        "shapes": st.integers(1, 4),
        "multiple_of": st.integers(1, 3),
    }
)


def rows_in(packed):
    """All completions of all micro-batches: id -> everything that stands in its place."""
    found = {}
    for shape in packed:
        for m, s, r, start in zip(
            *np.nonzero((shape.completion_ids >= 0) & (shape.positions == 0)), strict=True
        ):
            row_id = int(shape.completion_ids[m, s, r, start])
            assert row_id not in found
            here = np.flatnonzero(shape.completion_ids[m, s, r] == row_id)
            length = len(here)
            assert here.tolist() == list(range(start, start + length))
            assert shape.positions[m, s, r, here].tolist() == list(range(length))
            for field in (shape.advantages, shape.weights):
                assert len(set(field[m, s, r, here])) == 1
            found[row_id] = (
                length,
                shape.tokens[m, s, r, here].tolist(),
                shape.logprobs[m, s, r, here].tolist(),
                float(shape.advantages[m, s, r, start]),
                float(shape.weights[m, s, r, start]),
                shape.prompts[m, s].tolist(),
                int(shape.prompt_lengths[m, s]),
            )
    tokens = sum(int((shape.completion_ids >= 0).sum()) for shape in packed)
    assert tokens == sum(length for length, *_ in found.values())
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
def test_shapes_depend_on_sizes_only_and_micro_batches_are_filled_in_front(batch, options):
    packed = batch.pack(**options)
    prompts, group = batch.keep.shape
    share, limit = options["share_prompt"], batch.rollout.tokens.shape[2]
    ladder = batching.slot_shapes(group, limit, options["shapes"], share_prompt=share)
    for shape, (rows, width) in zip(packed, ladder, strict=True):
        micro_batches, slots = shape.prompt_lengths.shape
        assert slots % options["multiple_of"] == 0
        assert 0 <= slots * rows - options["rows_per_micro_batch"] < rows * options["multiple_of"]
        assert micro_batches == math.ceil(prompts * (math.ceil(group / rows) if share else group) / slots)
        assert shape.tokens.shape == (micro_batches, slots, rows, width)
        assert shape.prompts.shape == (micro_batches, slots, PROMPT_WIDTH)
        used = (shape.completion_ids >= 0).any(axis=(2, 3)).ravel()
        assert used.tolist() == sorted(used, reverse=True)


@settings(max_examples=80, deadline=None)
@given(batches(), layouts)
def test_no_two_rows_of_a_group_would_fit_into_one(batch, options):
    packed = batch.pack(**{**options, "share_prompt": True})
    filled = {}
    for shape in packed:
        for m, s, r in zip(*np.nonzero((shape.completion_ids >= 0).any(axis=3)), strict=True):
            ids = shape.completion_ids[m, s, r]
            filled.setdefault(int(ids[0]) // batch.keep.shape[1], []).append(int((ids >= 0).sum()))
    for rows in filled.values():
        assert sum(sorted(rows)[:2]) > batch.rollout.tokens.shape[2] or len(rows) == 1


@settings(max_examples=40, deadline=None)
@given(batches(), layouts)
def test_both_layouts_hold_the_same_rows(batch, options):
    assert rows_in(batch.pack(**{**options, "share_prompt": True})) == rows_in(
        batch.pack(**{**options, "share_prompt": False})
    )


def test_rollout_of_jax_arrays_packs_alike():
    batch = batch_of(LENGTHS, KEEP, 16)
    on_device = dataclasses.replace(batch, rollout=jax.tree.map(jnp.asarray, batch.rollout))
    options = {"rows_per_micro_batch": 2, "share_prompt": True, "shapes": 2}
    packed = on_device.pack(**options)
    assert rows_in(packed) == rows_in(batch.pack(**options))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(packed))


@settings(max_examples=40, deadline=None)
@given(batches(), layouts)
def test_slots_without_a_row_are_blank(batch, options):
    for shape in batch.pack(**options):
        empty = shape.completion_ids < 0
        for name in ("tokens", "positions", "logprobs", "advantages", "weights"):
            assert not getattr(shape, name)[empty].any()
        assert not shape.prompts[empty.all(axis=(2, 3))].any()
        assert (shape.prompt_lengths[empty.all(axis=(2, 3))] == 1).all()
        assert {field.dtype.name for field in vars(shape).values()} == {"int32", "float32"}


LENGTHS = [[3, 9], [2, 16], [5, 12]]
KEEP = [[True, True], [True, False], [True, True]]


def spans(shape):
    """Of each micro-batch, slot and row the completions in it, with their lengths."""
    return [
        [
            [[(int(i), int((row == i).sum())) for i in dict.fromkeys(row[row >= 0].tolist())] for row in slot]
            for slot in micro_batch
        ]
        for micro_batch in shape.completion_ids
    ]


def test_shared_prompt_layout_by_hand():
    # 9 + 3 fit into a row of 16, 12 + 5 do not: with one shape each group takes a slot of two rows.
    (shape,) = batch_of(LENGTHS, KEEP, 16).pack(rows_per_micro_batch=2, share_prompt=True, shapes=1)
    assert spans(shape) == [[[[(1, 9), (0, 3)], []]], [[[(2, 2)], []]], [[[(5, 12)], [(4, 5)]]]]
    # With two shapes, two rows and one, a row alone takes a slot of one; two of those are a micro-batch.
    two, one = batch_of(LENGTHS, KEEP, 16).pack(rows_per_micro_batch=2, share_prompt=True, shapes=2)
    assert spans(two) == [[[[(5, 12)], [(4, 5)]]], [[[], []]], [[[], []]]]
    assert spans(one) == [[[[(1, 9), (0, 3)]], [[(2, 2)]]], [[[]], [[]]], [[[]], [[]]]]
    # Two micro-batches are not empty, with 3 + 2 × 16 and 2 × (3 + 16) positions; the slots' prompts hold
    # 3, 1 and 2 tokens.
    assert batching.padding_report((two, one)) == (3 + 17 + 1 + 12 + 2 + 2, 35 + 38)


def test_plain_layout_by_hand():
    wide, narrow = batch_of(LENGTHS, KEEP, 16).pack(rows_per_micro_batch=2, share_prompt=False, shapes=2)
    assert spans(wide)[:1] == [[[[(1, 9)]], [[(5, 12)]]]]
    assert spans(narrow)[:2] == [[[[(0, 3)]], [[(2, 2)]]], [[[(4, 5)]], [[]]]]
    # Prompts count for each completion: 1 + 3 and 1 + 2 + 3; one micro-batch has 2 × (3 + 16) positions, two
    # have 2 × (3 + 8).
    assert batching.padding_report((wide, narrow)) == (4 + 9 + 12 + 6 + 3 + 2 + 5, 38 + 22 + 22)


@pytest.mark.parametrize("share_prompt", [True, False])
def test_case_17_nothing_kept_gives_the_same_shapes_without_rows(share_prompt):
    options = {"rows_per_micro_batch": 4, "share_prompt": share_prompt, "shapes": 2}
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
    (shape,) = batch.pack(rows_per_micro_batch=1, share_prompt=share_prompt, shapes=1)
    assert shape.prompts.tolist() == [[[5, 0, 6]]]
    assert shape.tokens.tolist() == [[[[8, 0, 0, 0]]]]
    assert shape.completion_ids.tolist() == [[[[0, 0, -1, -1]]]]


def test_case_33_log_probs_stay_beside_their_tokens():
    batch = batch_of(LENGTHS, KEEP, 16)
    for bucket in batch.pack(rows_per_micro_batch=2, share_prompt=True, shapes=2):
        np.testing.assert_allclose(bucket.logprobs, bucket.tokens / -1000, rtol=1e-6)


def test_shared_prompts_compute_fewer_tokens():
    batch = batch_of(np.full((4, 4), 8), np.ones((4, 4)), 8)
    shared, plain = (
        batching.padding_report(batch.pack(rows_per_micro_batch=4, share_prompt=share, shapes=1))[1]
        for share in (True, False)
    )
    assert (shared, plain) == (4 * (3 + 4 * 8), 16 * (3 + 8))


def test_slot_shapes():
    shapes = batching.slot_shapes
    assert shapes(8, 64, 3, share_prompt=True) == ((8, 64), (2, 64), (1, 64))
    assert shapes(8, 64, 1, share_prompt=True) == ((8, 64),)
    assert shapes(2, 64, 3, share_prompt=True) == ((2, 64), (1, 64))
    assert shapes(8, 100, 4, share_prompt=False) == ((1, 100), (1, 50), (1, 25), (1, 13))
    assert shapes(8, 12, 3, share_prompt=False) == ((1, 12), (1, 8))
    assert shapes(8, 5, 3, share_prompt=False) == ((1, 5),)


@given(rows=st.integers(1, 12), group=st.integers(1, 12), prompt=st.integers(1, 100), count=st.integers(1, 3))
def test_the_slots_of_a_group_are_the_cheapest(rows, group, prompt, count):
    ladder = batching.slot_shapes(group, 10, count, share_prompt=True)
    tokens, chosen = batching._cheapest(rows, prompt, ladder)
    assert sum(shape.rows for shape in chosen) >= rows
    assert tokens == sum(prompt + shape.rows * shape.width for shape in chosen)
    for shape in ladder:  # no single shape does better
        assert tokens <= math.ceil(rows / shape.rows) * (prompt + shape.rows * shape.width)
