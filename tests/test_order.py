"""The order of problems: epochs are permutations, batches never repeat, nothing depends on history."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_jax.errors import UserError
from dash_jax.tasks.order import batch_of, permutation

_SIZES = st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))


@given(sizes=_SIZES, seed=st.integers(0, 2**31 - 1), epochs=st.integers(1, 4))
def test_every_epoch_is_a_permutation_across_borders_case_20(sizes, seed, epochs):
    size, batch = sizes
    steps = -(-epochs * size // batch)
    walk = [index for step in range(steps) for index in batch_of(step, batch, size, seed)]
    for epoch in range(epochs):
        assert sorted(walk[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(sizes=_SIZES, seed=st.integers(0, 1000), step=st.integers(0, 2000))
def test_no_batch_holds_a_problem_twice_case_20(sizes, seed, step):
    size, batch = sizes
    indices = batch_of(step, batch, size, seed)
    assert len(indices) == len(set(indices)) == batch


def test_every_problem_comes_g_times_an_epoch_case_20():
    ids = [index for step in range(5) for index in batch_of(step, 8, 20, seed=3) for _ in range(4)]
    assert sorted(ids) == sorted([*range(20)] * 8)  # 5 steps of 8 prompts are two epochs of 20


@pytest.mark.parametrize("size", [20, 33, 9])
@pytest.mark.parametrize("cuts", [[50], [20, 21], [99]])
def test_resumed_runs_go_on_where_they_stopped_case_40(size, cuts):
    from dash_jax.tasks import order

    straight = [batch_of(step, 8, size, seed=5) for step in range(100)]
    resumed = []
    for begin, end in zip([0, *cuts], [*cuts, 100], strict=True):
        order._epoch.cache_clear()  # as a new process
        resumed += [batch_of(step, 8, size, seed=5) for step in range(begin, end)]
    assert resumed == straight


def test_epochs_and_seeds_differ_case_40():
    epochs = [batch_of(step, 50, 50, seed=0) for step in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert batch_of(0, 50, 50, seed=1) != epochs[0]


def test_the_order_never_changes_between_versions():
    # If this fails, runs that were started with an older version cannot be resumed.
    assert permutation(8, "epoch", 0, 0).tolist() == [0, 1, 5, 2, 6, 3, 4, 7]


@given(st.integers(0, 200), st.integers())
def test_permutation_holds_every_number_once(size, key):
    assert np.array_equal(np.sort(permutation(size, key)), np.arange(size))


def test_a_batch_above_the_number_of_problems_is_refused():
    with pytest.raises(UserError, match=r"a batch of 9 is above the 8 .* lower rollout.prompts"):
        batch_of(0, 9, 8, seed=0)
