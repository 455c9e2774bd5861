"""The learner's gradient against a slow one of single unpadded rows, and against itself cut up otherwise."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIG, FAST_COMPILE, G, N, P

from dash_jax import config as configuration
from dash_jax import learner, learning
from dash_jax.learner import Objective
from dash_jax.problems import Finish
from dash_jax.sharding import row_ways
from dash_jax.types import MicroBatches, Rollout

LIMIT, TEMPERATURE, BETA = 16, 0.6, 0.3
OBJECTIVES = {
    "clipped": Objective(loss="clipped", clip_high=0.3, temperature=TEMPERATURE),
    "clipped k1": Objective(
        loss="clipped", clip_high=0.3, temperature=TEMPERATURE, kl_coefficient=BETA, kl_estimator="k1"
    ),
    "k2": Objective(temperature=TEMPERATURE, kl_coefficient=BETA, kl_estimator="k2"),
    "k3": Objective(temperature=TEMPERATURE, kl_coefficient=BETA, kl_estimator="k3"),
}
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")

# Prompts and completions of 8 or 16 tokens together, so that the slow gradient compiles twice only.
PROMPT_LENGTHS = np.array([5, 3, 7, 4], np.int32)
LENGTHS = np.array([[3, 11, 3], [5, 13, 5], [1, 9, 1], [4, 12, 4]], np.int32)
CUT = np.array(
    [[0, 1, 0], [0, 1, 0], [0, 0, 0], [1, 0, 1]], bool
)  # by the limit, as far as the learner knows
ADVANTAGES = np.array([[1, -1, 0.5], [0, 0, 0], [-0.7, 1.2, -0.5], [2, 0, -2]], np.float32)


def reference():
    """Another policy, near enough that the KL penalty does not drown the rest of the loss."""
    return jax.tree.map(lambda x, y: 0.8 * x + 0.2 * y, tiny.params(), tiny.weights(CONFIG, 1))


@functools.cache
def rollout():
    """Off-policy: the log-probs are those of the policy and noise, some of it beyond the clip."""
    prompts, lengths = tiny.prompts_of(PROMPT_LENGTHS, 0, rest=9)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, CONFIG.known_ids, (N, G, LIMIT)).astype(np.int32)
    tokens[:, :, 0] = tokens[0, 0, LENGTHS[0, 0] - 1] = 0  # the padding id is a token like any other
    mask = np.arange(LIMIT) < LENGTHS[..., None]
    logprobs, _ = tiny.slow_logprobs(tiny.params(), prompts, lengths, tokens, TEMPERATURE)
    noisy = (logprobs + rng.normal(0, 0.3, logprobs.shape)).astype(np.float32)
    finish = np.where(CUT, Finish.LENGTH, Finish.EOS).astype(np.int32)
    return Rollout(
        np.arange(N, dtype=np.int32), prompts, lengths, np.where(mask, tokens, 0), np.where(mask, noisy, 0.0),
        LENGTHS, finish,
    )  # fmt: skip


def settings_of(
    *, aggregation="token_mean", mask_truncated=False, filter=True, denominator="all",
    micro_batch=6, share_prompt=True, shapes=1,
):  # fmt: skip
    return configuration.from_dict({
        "model": {"max_positions": 64},
        "rollout": {"prompts": N, "group_size": G, "max_prompt_tokens": P, "max_new_tokens": LIMIT},
        "algorithm": {
            "aggregation": aggregation, "mask_truncated": mask_truncated, "filter": filter,
            "denominator": denominator,
        },
        "learner": {"micro_batch": micro_batch, "share_prompt": share_prompt, "shapes": shapes},
    })  # fmt: skip


def batches_of(rollout_=None, advantages=ADVANTAGES, ways=1, **options):
    rollout_ = rollout() if rollout_ is None else rollout_
    batches = learning.learning_batch(rollout_, advantages, settings_of(**options), multiple_of=ways)
    return jax.tree.map(jnp.asarray, batches)


@functools.cache
def accumulator(name, config=CONFIG):
    objective = OBJECTIVES[name]
    run = functools.partial(learner.accumulate, config=config, objective=objective)
    return jax.jit(run, compiler_options=FAST_COMPILE)


@functools.cache
def gradient_and_sums(name, **options):
    keep = OBJECTIVES[name].kl_coefficient > 0
    return accumulator(name)(tiny.params(), reference() if keep else None, batches_of(**options))


def distance(got, expected):
    """Largest relative distance, of all leaves together and of any leaf to the largest leaf."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))
    norm = math.sqrt(sum(float(np.square(np.asarray(y, np.float64)).sum()) for _, y in pairs))
    return max(float(np.linalg.norm(np.asarray(x, np.float64) - y)) for x, y in pairs) / norm


# --- an independent slow gradient ---------------------------------------------------------------


def token_logprobs(params, sequence):
    """log p of tokens 1 ... of one unpadded sequence."""
    scores = jax.nn.log_softmax(tiny.full_logits(params, sequence[None])[0] / TEMPERATURE)
    return jnp.take_along_axis(scores[:-1], sequence[1:, None], axis=1)[:, 0]


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def logprobs_and_gradients(params, sequence):
    """Of every token with respect to every weight: leaves [T - 1, ...]."""
    values, pull = jax.vjp(lambda params: token_logprobs(params, sequence), params)
    return values, jax.vmap(lambda one: pull(one)[0])(jnp.eye(len(values)))


@functools.cache
def rows():
    """Each completion: policy's and reference's log-probs, gradient of the former, old log-probs, ..."""
    out, other = [], reference()
    for n, g in np.ndindex(N, G):
        start, length = PROMPT_LENGTHS[n], LENGTHS[n, g]
        ids = np.concatenate([rollout().prompts[n, :start], rollout().tokens[n, g, :length]])
        # Log-prob t of a sequence is about token t + 1.
        logprobs, gradients, of_reference = jax.tree.map(
            lambda leaf, start=start: np.asarray(leaf, np.float64)[start - 1 :],
            (*logprobs_and_gradients(tiny.params(), ids), logprobs_and_gradients(other, ids)[0]),
        )
        out.append({
            "logprobs": logprobs,
            "reference": of_reference,
            "gradients": gradients,
            "old": np.asarray(rollout().logprobs[n, g, :length], np.float64),
            "advantage": float(ADVANTAGES[n, g]),
            "cut": bool(CUT[n, g]),
        })  # fmt: skip
    return out


def token_loss(objective, logprob, old, advantage, reference):
    """Of one token, in plain Python floats."""
    if objective.loss == "policy_gradient":
        loss = -advantage * logprob
    else:
        ratio = math.exp(logprob - old)
        kept = min(max(ratio, 1 - objective.clip_low), 1 + objective.clip_high)
        loss = -min(ratio * advantage, kept * advantage)
    d = reference - logprob
    kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[objective.kl_estimator]
    return loss + objective.kl_coefficient * kl


def slow(objective, *, aggregation="token_mean", mask_truncated=False, filter=True, denominator="all"):
    """(gradient, loss): loops over rows and tokens; each token's loss is differentiated numerically."""
    kept = [not (mask_truncated and row["cut"]) and not (filter and row["advantage"] == 0) for row in rows()]
    counted = [
        keep if denominator == "kept" else not (mask_truncated and row["cut"])
        for keep, row in zip(kept, rows(), strict=True)
    ]
    lengths = [len(row["old"]) for row, count in zip(rows(), counted, strict=True) if count]
    gradient = jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:]), rows()[0]["gradients"])
    total, step = 0.0, 1e-6
    for row, keep in zip(rows(), kept, strict=True):
        if not keep:
            continue
        weight = {
            "token_mean": 1 / sum(lengths),
            "sequence_mean": 1 / len(lengths) / len(row["old"]),
            "constant": 1 / len(lengths) / LIMIT,
        }[aggregation]
        slopes = []
        for logprob, old, ref in zip(row["logprobs"], row["old"], row["reference"], strict=True):
            of = functools.partial(token_loss, objective, old=old, advantage=row["advantage"], reference=ref)
            total += weight * of(logprob)
            slopes.append(weight * (of(logprob + step) - of(logprob - step)) / (2 * step))
        gradient = jax.tree.map(
            lambda leaf, more, slopes=slopes: leaf + np.tensordot(np.array(slopes), more, axes=1),
            gradient, row["gradients"],
        )  # fmt: skip
    return gradient, total


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_of_single_unpadded_rows(name):
    worst = 0.0
    for aggregation in AGGREGATIONS:
        for mask_truncated in (False, True):
            for options in ({}, {"denominator": "kept"}, {"filter": False}):
                options = options | {"aggregation": aggregation, "mask_truncated": mask_truncated}
                gradient, sums, _ = gradient_and_sums(name, **options)
                expected, loss = slow(OBJECTIVES[name], **options)
                worst = max(worst, distance(gradient, expected))
                assert sums["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6), options
    assert worst < 1e-5
    assert optax.tree.norm(gradient) > 0.01


def test_sums_for_the_log():
    _, sums, gap = gradient_and_sums("clipped k1", filter=False)
    tokens = [(row, t) for row in rows() for t in range(len(row["old"]))]
    assert sums["tokens"] == len(tokens) == LENGTHS.sum()
    d = np.array([row["reference"][t] - row["logprobs"][t] for row, t in tokens])
    assert sums["kl"] == pytest.approx((np.exp(d) - 1 - d).sum(), rel=1e-5)
    change = np.array([row["logprobs"][t] - row["old"][t] for row, t in tokens])
    assert gap == pytest.approx(np.abs(change).max(), rel=1e-4)
    advantage = np.array([row["advantage"] for row, _ in tokens])
    ratio = np.exp(change)
    clipped = ((advantage > 0) & (ratio > 1.3)) | ((advantage < 0) & (ratio < 0.8))
    assert 5 < float(sums["clipped"]) == clipped.sum() < len(tokens) / 2
    entropy = tiny.slow_logprobs(
        tiny.params(), rollout().prompts, PROMPT_LENGTHS, rollout().tokens, TEMPERATURE
    )[1]
    mask = np.arange(LIMIT) < LENGTHS[..., None]
    assert sums["entropy"] == pytest.approx(entropy[mask].sum(), rel=1e-5)


# --- the same gradient, however the batch is cut ------------------------------------------------


def widened(width):
    prompts = np.pad(rollout().prompts, ((0, 0), (0, width - P)), constant_values=11)
    return dataclasses.replace(rollout(), prompts=prompts)


@pytest.mark.parametrize(
    ("options", "width", "shape"),
    [
        ({"micro_batch": 12}, 13, (1, N, G, LIMIT)),  # one micro-batch, prompts padded to 13
        ({"micro_batch": 3, "shapes": 2}, P, (4, 1, G, LIMIT)),  # and slots of one row
        # Each completion alone, in two widths.
        ({"micro_batch": 1, "share_prompt": False, "shapes": 2}, P, (12, 1, 1, LIMIT)),
    ],
)
@pytest.mark.parametrize("name", ["k3"])
def test_micro_batches_padding_and_sharing_change_nothing(name, options, width, shape):
    batches = batches_of(widened(width), **options)
    assert batches[0].tokens.shape == shape
    gradient, sums, gap = accumulator(name)(tiny.params(), reference(), batches)
    expected, expected_sums, expected_gap = gradient_and_sums(name)
    assert distance(gradient, expected) < 5e-6
    for key in sums:
        assert sums[key] == pytest.approx(float(expected_sums[key]), rel=1e-5), key
    assert gap == pytest.approx(float(expected_gap), rel=1e-4)


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(N)), st.permutations(range(G)), st.booleans())
def test_the_order_of_rows_and_micro_batches_changes_nothing(prompts, samples, reverse):
    def reorder(leaf):
        return leaf[prompts][:, samples] if leaf.shape[:2] == (N, G) else leaf[prompts]

    shuffled = jax.tree.map(reorder, rollout())
    batches = batches_of(shuffled, reorder(ADVANTAGES))
    if reverse:
        batches = jax.tree.map(lambda leaf: leaf[::-1], batches)
    gradient, _, _ = accumulator("k3")(tiny.params(), reference(), batches)
    assert distance(gradient, gradient_and_sums("k3")[0]) < 5e-6


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_filtering_changes_nothing_when_all_are_counted(aggregation):
    filtered, sums, _ = gradient_and_sums("clipped", aggregation=aggregation)
    whole, all_sums, _ = gradient_and_sums("clipped", aggregation=aggregation, filter=False)
    assert sums["tokens"] < all_sums["tokens"]
    assert distance(filtered, whole) < 1e-6
    kept, _, _ = gradient_and_sums("clipped", aggregation=aggregation, denominator="kept")
    assert distance(kept, whole) > 0.1  # another denominator: the test sees it


def test_masking_truncated_rows_equals_leaving_them_out():
    # Their tokens and advantages do not matter at all.
    other = dataclasses.replace(rollout(), tokens=np.where(CUT[..., None], 7, rollout().tokens))
    advantages = np.where(CUT, np.float32(50), ADVANTAGES)
    gradient, _, _ = accumulator("clipped")(
        tiny.params(), None, batches_of(other, advantages, mask_truncated=True)
    )
    assert distance(gradient, gradient_and_sums("clipped", mask_truncated=True)[0]) < 1e-6


def test_padding_reaches_nothing():
    # Whatever stands behind a completion or a prompt: NaN log-probs and other tokens.
    batch = batches_of()[0]
    beyond = np.asarray(batch.completion_ids) < 0
    behind = np.arange(P) >= np.asarray(batch.prompt_lengths)[..., None]
    spoilt = dataclasses.replace(
        batch,
        logprobs=jnp.where(beyond, jnp.nan, batch.logprobs),
        tokens=jnp.where(beyond, 23, batch.tokens),
        prompts=jnp.where(behind, 23, batch.prompts),
    )
    got, _, gap = accumulator("clipped")(tiny.params(), None, (spoilt,))
    expected, _, expected_gap = gradient_and_sums("clipped")
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert gap == expected_gap


def test_kl_is_zero_at_the_start_case_35():
    gradient, sums, _ = accumulator("k3")(tiny.params(), tiny.params(), batches_of())
    assert float(sums["kl"]) == 0.0  # at temperature 0.6; not only small
    without, loss = slow(dataclasses.replace(OBJECTIVES["k3"], kl_coefficient=0.0))
    assert distance(gradient, without) < 1e-5
    assert sums["loss"] == pytest.approx(loss, rel=1e-5)
    for name in ("k2", "clipped k1"):
        assert float(accumulator(name)(tiny.params(), tiny.params(), batches_of())[1]["kl"]) == 0.0


def test_expected_kl_gradients_case_36():
    # Two tokens with p = (.7, .3) under the policy and (.5, .5) under the reference; weights p make the
    # expectation exact. The true gradient in logit 1 is .177933.
    def table(*probabilities):
        logits = np.full((8, 8), -80.0)
        logits[:, :2] = np.log(probabilities)
        return tiny.markov(logits)

    batch = MicroBatches(
        prompts=jnp.full((1, 1), 5, jnp.int32), prompt_lengths=jnp.ones(1, jnp.int32),
        tokens=jnp.arange(2, dtype=jnp.int32).reshape(1, 2, 1), positions=jnp.zeros((1, 2, 1), jnp.int32),
        completion_ids=jnp.arange(2, dtype=jnp.int32).reshape(1, 2, 1), logprobs=jnp.zeros((1, 2, 1)),
        advantages=jnp.zeros((1, 2, 1)), weights=jnp.array([[[0.7], [0.3]]]),
    )  # fmt: skip

    def loss(params, estimator):
        objective = Objective(kl_coefficient=1.0, kl_estimator=estimator)
        return learner.loss(params, table(0.5, 0.5), batch, config=tiny.MARKOV, objective=objective)[0]

    gradients = jax.jit(
        lambda params: [jax.grad(loss)(params, name) for name in ("k1", "k2", "k3")],
        compiler_options=FAST_COMPILE,
    )(table(0.7, 0.3))
    # Token 5's row of the head; logit = sqrt(8) × head.
    of_logit = [float(gradient["head"][5, 0]) / math.sqrt(8) for gradient in gradients]
    np.testing.assert_allclose(of_logit, [0.0, 0.177933, 0.2], atol=1e-5)


def test_float32_sums_of_bfloat16_gradients():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    run = accumulator("clipped", config)
    batch = batches_of()[0]
    both, _, _ = run(tiny.params(), None, (batch,))

    def only(index):
        keep = jnp.arange(2) == index
        ids = jnp.where(keep[:, None, None, None], batch.completion_ids, -1)
        return run(tiny.params(), None, (dataclasses.replace(batch, completion_ids=ids),))[0]

    one, two = only(0), only(1)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(both))
    assert distance(jax.tree.map(lambda x, y: np.float64(x) + np.float64(y), one, two), both) < 1e-6
    # In between it is bfloat16, and some tokens cross the clip.
    assert 1e-3 < distance(both, gradient_and_sums("clipped")[0]) < 0.3
    assert min(optax.tree.norm(one), optax.tree.norm(two)) > 0.01


# --- the update ---------------------------------------------------------------------------------


def optimizer_of(**options):
    defaults = {
        "schedule": "constant", "warmup_steps": 0, "total_steps": 10, "beta1": 0.9, "beta2": 0.999,
        "epsilon": 1e-3, "weight_decay": 0.01, "clip_norm": 1.0,
    }  # fmt: skip
    return learner.make_optimizer(options.pop("learning_rate", 0.01), **(defaults | options))


@functools.cache
def updater(shape):
    """(state maker, update, batches) on a mesh: two or three micro-batches of four or eight rows."""
    mesh, optimizer = tiny.mesh_of(*shape), optimizer_of()
    with tiny.fast_jit():
        update = learner.make_update(CONFIG, OBJECTIVES["k3"], optimizer, mesh)
    where = learner.state_shardings(mesh, CONFIG, optimizer, keep_reference=True)

    def state():
        fresh = learner.init_state(jax.tree.map(jnp.copy, tiny.params()), optimizer, keep_reference=True)
        return jax.device_put(fresh.replace(reference=reference()), where)

    return state, update, batches_of(ways=row_ways(mesh), share_prompt=False, micro_batch=4)


def host(tree):
    return jax.tree.map(lambda leaf: np.array(leaf), tree)


@functools.cache
def single_device_step():
    state, update, batches = updater((1, 1, 1))
    return host(update(state(), batches))


def test_an_update_is_one_adam_step_on_the_whole_gradient():
    state, metrics = single_device_step()
    gradient, sums, _ = gradient_and_sums("k3")
    norm = float(optax.tree.norm(gradient))
    assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["loss"] == pytest.approx(float(sums["loss"]), rel=1e-5)
    assert metrics["kl"] == pytest.approx(float(sums["kl"] / sums["tokens"]), rel=1e-5)
    assert metrics["entropy"] == pytest.approx(float(sums["entropy"] / sums["tokens"]), rel=1e-5)
    assert metrics["learned_tokens"] == sums["tokens"]
    assert metrics["update_skipped"] == 0
    assert "clipped" not in metrics
    assert state.step == 1

    def adam(path, weight, slope):
        weight, slope = np.float64(weight), np.float64(slope) / max(1.0, norm)
        decay = 0.0 if path[-1].key.endswith(("norm", "bias")) else 0.01 * weight
        return weight - 0.01 * (slope / (np.abs(slope) + 1e-3) + decay)

    expected = jax.tree_util.tree_map_with_path(adam, tiny.params(), gradient)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), state.params, expected)
    jax.tree.map(np.testing.assert_array_equal, state.reference, host(reference()))


@pytest.mark.parametrize("shape", tiny.MESHES)
def test_devices_change_nothing(shape):
    state, update, batches = updater(shape)
    got, metrics = update(state(), batches)
    expected, expected_metrics = single_device_step()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6, rtol=1e-5), host(got), expected)
    for name in metrics:
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5, abs=1e-6), name
    # The new state lies where the old one did.
    where = learner.state_shardings(tiny.mesh_of(*shape), CONFIG, optimizer_of(), keep_reference=True)
    stayed = jax.tree.map(lambda leaf, place: leaf.sharding.is_equivalent_to(place, leaf.ndim), got, where)
    assert all(jax.tree.leaves(stayed))
    if shape[1] > 1:
        assert not got.params["embedding"].sharding.is_fully_replicated


def test_the_old_state_is_given_up():
    make, update, batches = updater((1, 1, 1))
    state = make()
    update(state, batches)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def skipped(batches):
    make, update, _ = updater((1, 1, 1))
    before = host(make())
    after, metrics = update(make(), batches)
    for name in ("params", "optimizer", "reference"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(before, name))
    assert after.step == 1
    assert metrics["update_skipped"] == 1
    return host(metrics)


def test_nothing_to_learn_from_changes_nothing_case_17():
    cut = dataclasses.replace(rollout(), finish=np.full((N, G), Finish.LENGTH, np.int32))
    batches = batches_of(cut, mask_truncated=True, share_prompt=False, micro_batch=4)
    metrics = skipped(batches)
    assert metrics["gradient_norm"] == metrics["loss"] == metrics["learned_tokens"] == 0
    assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    batch = updater((1, 1, 1))[2][0]
    spoilt = dataclasses.replace(batch, advantages=batch.advantages.at[0, 0, 0, 0].set(bad))
    assert not np.isfinite(skipped((spoilt,))["gradient_norm"])


def test_without_kl_there_is_no_reference():
    optimizer = optimizer_of()
    assert learner.init_state(tiny.params(), optimizer, keep_reference=False).reference is None
    places = learner.state_shardings(tiny.mesh_of(1, 1, 1), CONFIG, optimizer, keep_reference=False)
    assert places.reference is None
    kept = learner.init_state(tiny.params(), optimizer, keep_reference=True)
    jax.tree.map(np.testing.assert_array_equal, kept.reference, kept.params)


# --- the optimizer ------------------------------------------------------------------------------


def changes(optimizer, steps, state=None):
    """What each of `steps` steps on gradient 1 changes in a weight, and the state behind them."""
    params = {"w": jnp.zeros(())}
    state = optimizer.init(params) if state is None else state
    out = []
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(steps):
            change, state = optimizer.update({"w": jnp.ones(())}, state, params)
            out.append(float(change["w"]))
    return np.array(out), state


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1]),
        ("constant", 3, [0.25, 0.5, 0.75, 1, 1, 1]),
        ("linear", 0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("cosine", 2, [1 / 3, 2 / 3, 1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
    ],
)
def test_learning_rates(schedule, warmup, expected):
    # A constant gradient makes an Adam step one learning rate long.
    def make():
        return optimizer_of(
            learning_rate=1e-3, schedule=schedule, warmup_steps=warmup, total_steps=6, epsilon=1e-12,
            weight_decay=0.0,
        )  # fmt: skip

    straight, _ = changes(make(), 6)
    np.testing.assert_allclose(straight / -1e-3, expected, rtol=1e-4)
    # The rate comes from the count in the state: another optimizer goes on from it.
    first, state = changes(make(), 4)
    second, _ = changes(make(), 2, state)
    np.testing.assert_array_equal([*first, *second], straight)


def test_weight_decay_is_for_matrices_only():
    names = jax.tree.map(lambda _: 1.0, tiny.params()) | {"head": 1.0}
    params = jax.tree.map(jnp.float32, names)  # a number for each weight
    optimizer = optimizer_of(weight_decay=0.1)
    with jax.numpy_dtype_promotion("standard"):
        change, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    flat = {path[-1].key: float(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(change)}
    spared = {name for name, value in flat.items() if value == 0}
    assert spared == {"final_norm", "attention_norm", "mlp_norm", "qkv_bias"}
    assert flat["embedding"] == pytest.approx(-0.01 * 0.1)


def test_the_gradient_is_clipped_as_a_whole():
    optimizer = optimizer_of(epsilon=1e3, weight_decay=0.0, clip_norm=1.0)  # Adam as good as linear
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    with jax.numpy_dtype_promotion("standard"):
        long, _ = optimizer.update(
            {"a": jnp.float32(30), "b": jnp.float32(40)}, optimizer.init(params), params
        )
        short, _ = optimizer.update(
            {"a": jnp.float32(0.3), "b": jnp.float32(0.4)}, optimizer.init(params), params
        )
    assert float(long["a"]) == pytest.approx(-0.01 * 0.6 / 1e3, rel=1e-2)
    assert float(short["a"]) == pytest.approx(-0.01 * 0.3 / 1e3, rel=1e-2)


def test_float32_masters_take_tiny_steps_case_45():
    optimizer = optimizer_of(learning_rate=1e-6, total_steps=100, epsilon=1e-8, weight_decay=0.0)
    params = {"w": jnp.ones(())}

    def step(_, carry):
        params, state = carry
        with jax.numpy_dtype_promotion("standard"):
            change, state = optimizer.update({"w": jnp.ones(())}, state, params)
        return optax.apply_updates(params, change), state

    params, _ = jax.jit(lambda carry: jax.lax.fori_loop(0, 100, step, carry))(
        (params, optimizer.init(params))
    )
    assert 1 - float(params["w"]) == pytest.approx(1e-4, rel=0.05)  # in bfloat16 it would stay at 1
