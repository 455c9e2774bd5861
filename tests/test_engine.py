"""The engine against the plain sampler, with every switch; and what it does to the rows."""

import dataclasses
import functools

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIG, G

from dash_jax import engine, rollout
from dash_jax.config import Engine
from dash_jax.policy import Policy

PROMPTS, LIMIT, SEGMENT = 7, 10, 3
PLAIN = Engine(segment_tokens=0)
ALL = Engine(segment_tokens=SEGMENT)
SWITCHES = ("share_prefix", "grow_cache", "compact", "refill")


class _Ids:
    """A tokenizer whose texts are the ids themselves."""

    decode = staticmethod(tuple)


@functools.cache
def weights_on(shape):
    return rollout.sampler_weights(tiny.params(), Policy(tiny.mesh_of(*shape), None, CONFIG, ()))


def roll_out(
    problems, settings, *, fitting=PROMPTS, eos_ids=(4, 9, 11, 13), shape=(1, 1, 1), seed=0, **options
):
    """`fitting` prompts at once on a device. Prompts of 8 tokens or less are padded to 8."""
    policy = Policy(tiny.mesh_of(*shape), _Ids(), CONFIG, tuple(eos_ids))
    one = 1 / rollout.chunk_prompts(CONFIG, 8, G, LIMIT, 1.0)
    return rollout.roll_out(
        weights_on(shape), policy, problems, rollout.step_key(seed, "train", 0), group_size=G,
        max_new_tokens=LIMIT, temperature=1.0, memory_gb=(fitting + 0.5) * one, engine=settings, **options,
    )  # fmt: skip


def assert_same(got, expected):
    for name in ("problem_ids", "prompts", "prompt_lengths", "tokens", "lengths", "finish"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=2e-5)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=PROMPTS, max_size=PROMPTS),
    seed=st.integers(0, 2**31 - 1),
    eos_ids=st.lists(st.integers(0, CONFIG.known_ids - 1), min_size=4, max_size=4),
    fitting=st.sampled_from([2, PROMPTS]),
    off=st.sampled_from([None, *SWITCHES]),
)
def test_every_switch_gives_the_plain_samples(lengths, seed, eos_ids, fitting, off):
    problems = tiny.problems_of(lengths, seed)
    switched = dataclasses.replace(ALL, **({off: False} if off else {}))
    got = roll_out(problems, switched, fitting=fitting, eos_ids=eos_ids, seed=seed)
    assert_same(got, roll_out(problems, PLAIN, eos_ids=eos_ids, seed=seed))


@pytest.mark.parametrize("shape", tiny.MESHES)
def test_devices_rearrange_their_own_rows(shape):
    problems = tiny.problems_of([5, 8, 2, 7, 1, 4, 3])
    assert_same(roll_out(problems, ALL, fitting=1, shape=shape), roll_out(problems, PLAIN))


def test_one_token_and_no_tokens_to_wait_for():
    problems = tiny.problems_of([5, 8, 2])
    everything_ends = range(CONFIG.known_ids)
    got = roll_out(problems, ALL, fitting=1, eos_ids=everything_ends)
    assert (got.lengths == 1).all()
    assert_same(got, roll_out(problems, PLAIN, fitting=1, eos_ids=everything_ends))


@pytest.fixture
def trace(monkeypatch):
    """(live rows, rows, width of the cache) of every segment, and prompts of every prefill."""
    segments, prefills = [], []
    decode, begin = engine.Sampler.decode, engine.Sampler.begin

    def spy_decode(self, batch, steps):
        segments.append((int((~batch.rows.done).sum()), batch.rows.done.size, batch.past[0].k.shape[-1]))
        return decode(self, batch, steps)

    def spy_begin(self, prompts, lengths, keys):
        prefills.append((int((lengths > 0).sum()), len(lengths)))
        return begin(self, prompts, lengths, keys)

    monkeypatch.setattr(engine.Sampler, "decode", spy_decode)
    monkeypatch.setattr(engine.Sampler, "begin", spy_begin)
    return segments, prefills


LENGTHS = [5, 8, 2, 7, 1, 4, 3]


def test_the_cache_grows_with_the_oldest_sample(trace):
    roll_out(tiny.problems_of(LENGTHS), dataclasses.replace(ALL, compact=False), eos_ids=())
    assert [width for _, _, width in trace[0]] == [3, 6, 9]
    trace[0].clear()
    roll_out(tiny.problems_of(LENGTHS), dataclasses.replace(ALL, compact=False, grow_cache=False), eos_ids=())
    assert [width for _, _, width in trace[0]] == [LIMIT] * 3


def test_samples_that_go_on_move_together(trace):
    got = roll_out(tiny.problems_of(LENGTHS), ALL, eos_ids=range(12))
    rows = [rows for _, rows, _ in trace[0]]
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < rows[0] == PROMPTS * G
    for (live, rows, _), sampled in zip(trace[0], (1, 4, 7), strict=False):
        assert live == (got.lengths > sampled).sum() <= rows
    trace[0].clear()
    roll_out(tiny.problems_of(LENGTHS), dataclasses.replace(ALL, compact=False), eos_ids=range(12))
    assert {rows for _, rows, _ in trace[0]} == {PROMPTS * G}


def test_waiting_prompts_take_the_rows_of_finished_samples(trace):
    refilled = roll_out(tiny.problems_of(LENGTHS), ALL, fitting=2, eos_ids=range(8))
    segments, prefills = list(trace[0]), list(trace[1])
    assert sum(real for real, _ in prefills) == PROMPTS
    assert max(rows for _, rows, _ in segments) == 2 * G
    trace[0].clear()
    no_refill = dataclasses.replace(ALL, refill=False)
    chunked = roll_out(tiny.problems_of(LENGTHS), no_refill, fitting=2, eos_ids=range(8))
    assert_same(refilled, chunked)
    assert len(segments) < len(trace[0])


@pytest.mark.parametrize(
    ("prompts", "shape", "fitting", "sizes"),
    [
        (5, (1, 1, 1), 100, [5]),
        (5, (1, 1, 1), 4, [3, 3]),  # as equal as can be: one filler, not 4 + 1
        (5, (1, 1, 1), 2, [2, 2, 2]),
        (5, (2, 2, 2), 100, [8]),  # a multiple of the 4 devices that share the rows
        (7, (2, 2, 2), 1, [4, 4]),  # the budget is each device's
    ],
)
def test_without_refill_chunks_are_equal_and_filled_up(trace, prompts, shape, fitting, sizes):
    roll_out(
        tiny.problems_of(LENGTHS[:prompts]), dataclasses.replace(ALL, refill=False),
        shape=shape, fitting=fitting,
    )  # fmt: skip
    assert [size for _, size in trace[1]] == sizes
    assert sum(real for real, _ in trace[1]) == prompts


@pytest.mark.parametrize("off", [None, "share_prefix", "refill"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_every_completion_is_handed_over_once_and_early(trace, off, shape):
    problems, parts = tiny.problems_of(LENGTHS), []

    def on_ended(indices, completions):
        parts.append((len(trace[0]), indices, completions))

    switched = dataclasses.replace(ALL, **({off: False} if off else {}))
    got = roll_out(problems, switched, fitting=2, shape=shape, on_ended=on_ended)
    tokens, lengths, finish = got.tokens.reshape(-1, LIMIT), got.lengths.reshape(-1), got.finish.reshape(-1)
    assert sorted(index for _, indices, _ in parts for index in indices) == list(range(PROMPTS * G))
    for _, indices, completions in parts:
        for index, (problem, ids, ended) in zip(indices, completions, strict=True):
            assert problem is problems[index // G]
            assert ids == tuple(tokens[index, : lengths[index]])
            assert ended == finish[index]
    segments = [segments for segments, _, _ in parts]
    assert segments == sorted(segments)
    assert segments[0] <= 2, "as soon as the segment behind it is under way"


@settings(max_examples=100, deadline=None)
@given(data=st.data(), group_size=st.integers(1, 9), ways=st.sampled_from([1, 2]), refill=st.booleans())
def test_arranging_keeps_every_sample_once_and_a_slot_to_one_prompt(data, group_size, ways, refill):
    room = data.draw(st.integers(1, 5))
    shapes = engine._shapes(room, group_size, refill=refill)
    assert shapes[0][0] * shapes[0][1] == max(slots * rows for slots, rows in shapes)
    assert shapes[0][0] * shapes[0][1] >= room * group_size
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    groups = rng.permutation(ways * room).reshape(ways, room)  # each device has its own prompts
    ids = groups[:, :, None] * group_size + np.arange(group_size)
    ids = np.where(rng.random(ids.shape) < data.draw(st.sampled_from([0.0, 0.5, 0.9])), -1, ids)
    split = data.draw(st.integers(0, room))
    old, new = ids[:, :split], ids[:, split:]
    moved, sources = engine._arrange(old, new, group_size, shapes)
    assert moved.shape[1:] in shapes
    for device in range(ways):
        assert sorted(moved[device][moved[device] >= 0]) == sorted(ids[device][ids[device] >= 0])
        present = ids[device].reshape(-1)
        here = moved[device] >= 0
        np.testing.assert_array_equal(present[sources[device][here]], moved[device][here])
        for slot in moved[device]:
            assert len({sample // group_size for sample in slot[slot >= 0]}) <= 1
