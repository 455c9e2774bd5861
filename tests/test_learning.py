"""From graded rollouts to optimizer steps: windows, filter, denominators, and that rows stay rows."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIG, C, G, N, P

from dash_jax import config as configuration
from dash_jax import learner, learning, losses, policy
from dash_jax.problems import Finish
from dash_jax.types import Rollout

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


def config_of(*, prompts=N, optimizer_batch=None, micro_batch=G, share_prompt=True, shapes=2, **algorithm):
    return configuration.from_dict({
        "rollout": {
            "prompts": prompts, "group_size": G, "max_prompt_tokens": P, "max_new_tokens": C,
            "temperature": 0.6,
        },
        "algorithm": {"loss": "clipped", "advantage": "group_mean", **algorithm},
        "learner": {
            "optimizer_batch": optimizer_batch, "micro_batch": micro_batch, "share_prompt": share_prompt,
            "shapes": shapes,
        },
        "optimizer": {"learning_rate": 0.0005},
    })  # fmt: skip


def policy_of():
    return policy.Policy(tiny.mesh_of(1, 1, 1), None, CONFIG, (4,))


def numbered(lengths, finish=None):
    """A rollout whose tokens, log-probs and prompts all tell the row: n × G + g."""
    lengths = np.asarray(lengths, np.int32)
    finish = np.full(lengths.shape, Finish.EOS) if finish is None else np.asarray(finish)
    prompts = len(lengths)
    row = np.arange(prompts * G).reshape(prompts, G)
    mask = np.arange(C) < lengths[..., None]
    return Rollout(
        problem_ids=np.arange(prompts, dtype=np.int32),
        prompts=(np.arange(prompts)[:, None] + np.zeros((1, P))).astype(np.int32),
        prompt_lengths=np.arange(prompts, dtype=np.int32) % P + 1,
        tokens=np.where(mask, row[..., None], 0).astype(np.int32),
        logprobs=np.where(mask, -row[..., None] - np.arange(C) / 8, 0).astype(np.float32),
        lengths=lengths,
        finish=finish.astype(np.int32),
    )


class Recorder:
    """Stands in for `learner.make_update`: keeps the batches, counts the steps."""

    def __init__(self, monkeypatch):
        self.batches = []
        monkeypatch.setattr(learner, "make_update", lambda *args: self.update)

    def update(self, state, batches):
        self.batches.append(batches)
        value = float(len(self.batches))
        same = dict.fromkeys(("loss", "gradient_norm", "logprob_gap", "learned_tokens"), value)
        return state + 1, same


def rows_of(batches):
    """(completion id, fields) of every completion in the micro-batches."""
    for batch in batches:
        for index in zip(*np.nonzero((batch.completion_ids >= 0) & (batch.positions == 0)), strict=True):
            *row, start = index
            here = np.flatnonzero(batch.completion_ids[tuple(row)] == batch.completion_ids[index])
            assert batch.positions[(*row, here)].tolist() == list(range(len(here)))
            assert here.tolist() == list(range(start, start + len(here)))
            yield int(batch.completion_ids[index]), types.SimpleNamespace(
                prompt=batch.prompts[index[:2]], prompt_length=batch.prompt_lengths[index[:2]],
                **{name: getattr(batch, name)[(*row, here)] for name in (
                    "tokens", "logprobs", "advantages", "weights"
                )},
            )  # fmt: skip


@pytest.mark.parametrize("prompts_a_step", [1, 2, 4])
@pytest.mark.parametrize("share_prompt", [True, False])
def test_windows_are_optimizer_steps_in_the_order_of_the_rollout_case_19(
    monkeypatch, prompts_a_step, share_prompt
):
    recorder = Recorder(monkeypatch)
    config = config_of(optimizer_batch=prompts_a_step * G, share_prompt=share_prompt)
    rng = np.random.default_rng(0)
    rollout = numbered(rng.integers(1, C + 1, (N, G)))
    rewards = np.array([[1, 0, 0], [0, 0, 0], [1, 1, 0.5], [0, np.nan, 1]], np.float32)
    state, advantages, metrics = learning.Learning(config, policy_of()).step(0, rollout, rewards)

    expected = np.array([[2, -1, -1], [0, 0, 0], [0.5, 0.5, -1], [-1.5, 0, 1.5]]) / 3
    np.testing.assert_allclose(advantages, expected, atol=1e-6)
    steps = N // prompts_a_step
    assert state == len(recorder.batches) == steps
    seen = set()
    for step, batches in enumerate(recorder.batches):
        total = rollout.lengths[step * prompts_a_step : (step + 1) * prompts_a_step].sum()
        for row_id, row in rows_of(batches):
            n, g = divmod(step * prompts_a_step * G + row_id, G)
            seen.add((n, g))
            length = rollout.lengths[n, g]
            assert row.tokens.tolist() == [n * G + g] * length
            np.testing.assert_array_equal(row.logprobs, rollout.logprobs[n, g, :length])
            assert (row.advantages == advantages[n, g]).all()
            assert (row.prompt == n).all()
            assert row.prompt_length == rollout.prompt_lengths[n]
            # The denominator is that of the window: all its tokens, those of filtered rows too.
            np.testing.assert_allclose(row.weights, 1 / total, rtol=1e-6)
    assert seen == {(n, g) for n, g in np.ndindex(N, G) if advantages[n, g] != 0}
    assert metrics["kept_share"] == pytest.approx(8 / 12)
    assert metrics["loss"] == pytest.approx(np.mean(np.arange(1, steps + 1)))
    assert metrics["logprob_gap"] == steps  # a maximum is not averaged
    assert 0 < metrics["padding_share"] < 1


def test_a_window_without_signal_is_a_step_all_the_same(monkeypatch):
    recorder = Recorder(monkeypatch)
    config = config_of(optimizer_batch=2 * G)
    rewards = np.array([[1, 1, 1], [0, 0, 0], [1, 0, 1], [0, 0, 0]], np.float32)
    state, _, metrics = learning.Learning(config, policy_of()).step(0, numbered(np.full((N, G), 3)), rewards)
    assert state == 2
    shapes = [jax.tree.map(np.shape, batches) for batches in recorder.batches]
    assert shapes[0] == shapes[1]  # one compilation for both
    assert [sum(1 for _ in rows_of(batches)) for batches in recorder.batches] == [0, 3]
    assert metrics["kept_share"] == 3 / 12


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_which_rows_are_kept_and_what_the_loss_is_divided_by_case_14(data):
    def grid(elements):
        return np.array([[data.draw(elements) for _ in range(G)] for _ in range(N)])

    lengths, cut = grid(st.integers(1, C)), grid(st.booleans())
    advantages = grid(st.sampled_from([0.0, 0.1, -0.1, 1.0, -1.0])).astype(np.float32)
    options = {
        "mask_truncated": data.draw(st.booleans()),
        "aggregation": data.draw(st.sampled_from(AGGREGATIONS)),
    } | data.draw(st.sampled_from([
        {"filter": False}, {"filter": True}, {"filter": True, "filter_threshold": 0.1},
        {"filter": True, "denominator": "kept"},
    ]))  # fmt: skip
    rollout = numbered(lengths, np.where(cut, Finish.LENGTH, Finish.EOS))
    batches = learning.learning_batch(rollout, advantages, config_of(**options), multiple_of=1)

    counted = ~cut if options["mask_truncated"] else np.ones((N, G), bool)
    kept = counted.copy()
    if options["filter"]:
        kept &= np.abs(advantages) > np.float32(options.get("filter_threshold", 0.0))
    if options.get("denominator") == "kept":
        counted = kept
    rows = dict(rows_of(batches))
    assert set(rows) == set(np.flatnonzero(kept))
    for row_id, row in rows.items():
        length = lengths.reshape(-1)[row_id]
        expected = {
            "token_mean": lengths[counted].sum(),
            "sequence_mean": counted.sum() * length,
            "constant": counted.sum() * C,
        }[options["aggregation"]]
        assert row.weights == pytest.approx(1 / expected, rel=1e-5)


def test_a_masked_row_does_not_dilute_the_loss_case_14():
    # Two rows, one of them cut: the loss is that of the other alone.
    lengths, advantages = np.array([[2, C, C]]), np.array([[1.0, -1.0, 0.0]], np.float32)
    finish = [[Finish.EOS, Finish.LENGTH, Finish.LENGTH]]
    for aggregation, expected in (("token_mean", 1 / 2), ("sequence_mean", 1 / 2), ("constant", 1 / C)):
        config = config_of(prompts=1, mask_truncated=True, aggregation=aggregation)
        batches = learning.learning_batch(numbered(lengths, finish), advantages, config, multiple_of=1)
        ((row_id, row),) = rows_of(batches)
        assert row_id == 0
        assert row.weights == pytest.approx(expected)


def test_rows_meet_their_own_advantages_inside_the_loss_case_19(monkeypatch):
    rng = np.random.default_rng(0)
    rollout = numbered(rng.integers(1, C + 1, (N, G)))
    advantages = (np.arange(N * G).reshape(N, G) + 0.5).astype(np.float32)
    seen = []

    def score(params, *, prompts, tokens, **_):
        return tokens.astype(jnp.float32), jnp.zeros(tokens.shape)  # the "log-prob" of a token is its row

    def surrogate(logprobs, old_logprobs, advantages, mask, *, weights, **_):
        seen.append((logprobs, old_logprobs, advantages, mask, weights))
        return jnp.float32(0), {"clipped": (jnp.float32(0), jnp.float32(0))}

    monkeypatch.setattr(learner, "completion_logprobs", score)
    monkeypatch.setattr(losses, "clipped_surrogate", surrogate)
    objective = learner.Objective(loss="clipped")
    for share_prompt, micro_batch in ((True, 6), (False, 2), (False, 5)):
        config = config_of(share_prompt=share_prompt, micro_batch=micro_batch, aggregation="sequence_mean")
        batches = learning.learning_batch(rollout, advantages, config, multiple_of=1)
        seen.clear()
        for bucket in batches:
            for m in range(len(bucket.tokens)):
                batch = jax.tree.map(lambda leaf, m=m: jnp.asarray(leaf[m]), bucket)
                learner.loss({}, None, batch, config=CONFIG, objective=objective)
        rows = []
        for logprobs, old, of_row, mask, weights in (map(np.asarray, call) for call in seen):
            assert logprobs.shape == old.shape == mask.shape == (len(of_row), 1)
            for row in np.unique((of_row[mask[:, 0]] - 0.5).astype(int)):
                rows.append(row)
                here = mask[:, 0] & (of_row == row + 0.5)
                length = rollout.lengths.reshape(-1)[row]
                assert here.sum() == length
                assert (logprobs[here] == row).all()
                np.testing.assert_array_equal(old[here, 0], rollout.logprobs.reshape(-1, C)[row, :length])
                np.testing.assert_allclose(weights[here], 1 / (12 * length), rtol=1e-6)
        assert sorted(rows) == list(range(N * G))


@functools.cache
def _started():
    """Two optimizer steps a rollout, on real samples."""
    config = config_of(optimizer_batch=2 * G, micro_batch=2 * G, shapes=1)
    where = policy_of()
    with tiny.fast_jit():
        learn = learning.Learning(config, where)
    params = jax.tree.map(jnp.copy, tiny.params())
    state = learner.init_state(params, learn.optimizer, keep_reference=False)
    places = learner.state_shardings(where.mesh, CONFIG, learn.optimizer, keep_reference=False)
    return learn, jax.device_put(state, places)


def test_what_is_rewarded_becomes_likelier():
    learn, state = _started()
    prompts, lengths = tiny.prompts_of([8, 3, 5, 1], 0)
    samples, _ = tiny.sample(prompts, lengths, temperature=0.6, eos_ids=(4, 4, 4))
    rollout = Rollout(np.arange(N, dtype=np.int32), prompts, lengths, *samples)
    rewards = np.zeros((N, G), np.float32)
    rewards[[0, 1, 2], [0, 1, 2]] = 1  # the last group carries no signal
    mask = np.arange(C) < rollout.lengths[..., None]

    def total(params):
        logprobs, _ = tiny.slow_logprobs(params, prompts, lengths, rollout.tokens, 0.6)
        return (logprobs * mask).sum(axis=-1)

    before = total(tiny.params())
    state, advantages, first = learn.step(state, rollout, rewards)
    assert state.step == 2
    assert first["logprob_gap"] > 0.01  # the second window is off-policy
    assert first["update_skipped"] == 0
    assert first["kept_share"] == 9 / 12
    assert np.isfinite(list(first.values())).all()
    change = total(state.params) - before
    # What the loss promises: rows gain in proportion to their advantages, not each row by itself.
    assert (advantages * change).sum() > 1
    assert state.reference is None
