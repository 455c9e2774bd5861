"""Checkpoints come back to the bit on any mesh, and no kill or damaged file costs more than the newest one.

Run as a program, this file is the process that dies while it saves.
"""

import logging
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dash_jax import config as configuration
from dash_jax.checkpoint import Checkpoints, check_same_run, write_config
from dash_jax.errors import UserError
from dash_jax.sharding import make_mesh, spec
from dash_jax.types import TrainState

_AXES = {"embed": ("vocab", "embed"), "up": (None, "embed", "mlp"), "norm": (None,)}
_OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(1e-3, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
)


def _state(seed, reference=False):
    """Random bits and all special values, in both types that weights have."""
    generator = np.random.default_rng(seed)
    special = np.array([np.nan, np.inf, -0.0, 1e-45, 3e38, 1 / 3, 0, -1], np.float32)
    params = {
        "embed": generator.normal(size=(16, 8)).astype(np.float32),
        "up": generator.normal(size=(2, 8, 24)).astype(ml_dtypes.bfloat16),
        "norm": special,
    }
    params = jax.tree.map(jnp.asarray, params)
    moments = jax.tree.map(lambda leaf: leaf + leaf if leaf.size else leaf, _OPTIMIZER.init(params))
    copy = jax.tree.map(jnp.copy, params) if reference else None
    return TrainState(step=jnp.int32(seed), params=params, optimizer=moments, reference=copy)


def _like(state, mesh):
    """As the trainer describes a state: each leaf with its sharding on `mesh`."""

    def describe(path, leaf):
        axes = _AXES.get(getattr(path[-1], "key", ""), ())
        sharding = NamedSharding(mesh, spec(mesh, leaf.shape, axes) if axes else PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(describe, state)


def _place(state, mesh):
    return jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), state, _like(state, mesh))


def _assert_same(restored, state, mesh):
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for leaf, written, like in zip(*map(jax.tree.leaves, (restored, state, _like(state, mesh))), strict=True):
        assert leaf.dtype == written.dtype
        assert np.asarray(leaf).tobytes() == np.asarray(written).tobytes()
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(2, 2, 2)


@pytest.fixture
def checkpoints(tmp_path):
    manager = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield manager
    manager.close()


@pytest.mark.parametrize("reference", [False, True])
def test_everything_comes_back_to_the_bit_case_43(checkpoints, mesh, reference):
    assert checkpoints.latest() is None
    state = _place(_state(7, reference), mesh)
    checkpoints.save(7, state, {"step": 7, "cursor": [1, 2]})
    assert checkpoints.latest() == 7
    restored, host = checkpoints.restore(7, _like(state, mesh))
    _assert_same(restored, state, mesh)
    assert host == {"step": 7, "cursor": [1, 2]}
    assert (restored.reference is None) is not reference


def test_another_mesh_restores(checkpoints, mesh):
    state = _place(_state(1, reference=True), mesh)
    checkpoints.save(1, state, {})
    axes = (jax.sharding.AxisType.Auto,) * 3
    alone = jax.make_mesh((1, 1, 1), mesh.axis_names, devices=jax.devices()[:1], axis_types=axes)
    for other in make_mesh(1, 8, 1), make_mesh(4, 1, 2), alone:
        restored, _ = checkpoints.restore(1, _like(state, other))
        _assert_same(restored, state, other)


def test_weights_alone_take_no_memory_for_the_rest(checkpoints, mesh):
    state = _place(_state(1, reference=True), mesh)
    checkpoints.save(1, state, {})
    before = sum(array.nbytes for array in jax.live_arrays())
    params = checkpoints.restore_params(1, _like(state.params, mesh))
    taken = sum(array.nbytes for array in jax.live_arrays()) - before
    assert taken == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    _assert_same(params, state.params, mesh)


def test_old_checkpoints_go_and_repeated_ones_are_replaced(checkpoints, mesh):
    for step in 1, 2, 3, 3:
        checkpoints.save(step, _state(step), {})
    state = _state(30)
    checkpoints.save(3, state, {"again": True})
    assert sorted(os.listdir(checkpoints.directory)) == ["2", "3"]
    restored, host = checkpoints.restore(3, _like(state, mesh))
    _assert_same(restored, state, mesh)
    assert host == {"again": True}
    with pytest.raises(UserError, match="no checkpoint of step 1; there are: 2, 3"):
        checkpoints.restore(1, _like(state, mesh))


def _array_file(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("way", ["unsealed", "missing file", "cut file", "Orbax's temporary name"])
def test_a_half_written_newest_is_skipped_and_swept_up_case_44(checkpoints, mesh, caplog, way):
    for step in 1, 2, 3:
        checkpoints.save(step, _state(step), {})
    broken = checkpoints.directory / "3"
    if way == "unsealed":
        (broken / "files.json").unlink()
    elif way == "missing file":
        _array_file(broken).unlink()
    elif way == "cut file":
        _array_file(broken).write_bytes(b"")
    else:
        (broken / "files.json").unlink()
        broken = broken.rename(f"{broken}.orbax-checkpoint-tmp")
    with caplog.at_level(logging.WARNING):
        assert checkpoints.latest() == 2
    assert f"{broken}: half-written checkpoint is skipped" in caplog.text
    # Its number is free again, and it does not count among those that are kept.
    checkpoints.save(3, _state(33), {})
    assert sorted(os.listdir(checkpoints.directory)) == ["2", "3"]
    _assert_same(checkpoints.restore(3, _like(_state(33), mesh))[0], _state(33), mesh)


def test_every_changed_file_is_named_case_44(checkpoints, mesh):
    for step in 1, 2:
        checkpoints.save(step, _state(step), {})
    folder, like = checkpoints.directory / "2", _like(_state(2), mesh)
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "files.json"):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        message = rf"{folder}: .*the content of {path.relative_to(folder)} has changed.*delete this folder"
        with pytest.raises(UserError, match=message):
            checkpoints.restore(2, like)
        path.write_bytes(content)
    checkpoints.restore(2, like)
    shutil.rmtree(folder)
    assert checkpoints.latest() == 1


def test_the_only_checkpoint_is_not_thrown_away_when_it_is_damaged(checkpoints):
    checkpoints.save(1, _state(1), {})
    (checkpoints.directory / "1" / "files.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"1: the checkpoint is damaged \(files\.json is no JSON\)"):
        checkpoints.latest()


def _without_norm(state):
    return state.replace(params={name: leaf for name, leaf in state.params.items() if name != "norm"})


def _wider(state):
    return state.replace(params=state.params | {"embed": jnp.zeros((16, 12))})


def _in_float32(state):
    return state.replace(params=state.params | {"up": state.params["up"].astype(jnp.float32)})


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (_wider, r"params.embed is float32\[16, 8\] in the checkpoint and float32\[16, 12\] under"),
        (_in_float32, r"params.up is bfloat16\[2, 8, 24\] in the checkpoint and float32\[2, 8, 24\] under"),
        (_without_norm, r"params.norm is float32\[8\] in the checkpoint and absent under"),
        (
            lambda state: state.replace(reference=state.params),
            r"reference.embed is absent in the checkpoint and float32\[16, 8\] under",
        ),
    ],
)
def test_another_model_is_refused_with_the_first_difference(checkpoints, mesh, change, difference):
    checkpoints.save(1, _state(1), {})
    like = _like(change(_state(1)), mesh)
    mend = rf"; take the config that wrote it \({checkpoints.directory.parent}/config.yaml\)"
    with pytest.raises(UserError, match=f"{checkpoints.directory}/1: {difference} this config{mend}"):
        checkpoints.restore(1, like)
    if like.reference is None:
        with pytest.raises(UserError, match=difference):
            checkpoints.restore_params(1, like.params)


# Audit event and end of its path where the process dies; (step, seed) saved before, during; found after.
_MOMENTS = {
    "arrays are being written": ("open", "state.orbax-checkpoint-tmp/_METADATA", (1, 10), (2, 20), (1, 10)),
    "before Orbax's rename": ("os.rename", "2.orbax-checkpoint-tmp", (1, 10), (2, 20), (1, 10)),
    "before the seal": ("open", "files.json.tmp", (1, 10), (2, 20), (1, 10)),
    "while the old one is deleted": ("os.rmdir", "ocdbt.process_0", (1, 10), (2, 20), (2, 20)),
    "while a step is replaced": ("open", "files.json.tmp", (1, 10), (1, 20), (1, 10)),
}


def _die(directory, moment):
    """Saves twice and kills itself, as kill -9 does, at the moment that is named."""
    event, ending, before, during, _ = _MOMENTS[moment]
    checkpoints = Checkpoints(directory, keep=1)
    checkpoints.save(before[0], _state(before[1]), {"seed": before[1]})

    def watch(name, arguments):
        if name == event and str(arguments[0]).endswith(ending):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    checkpoints.save(during[0], _state(during[1]), {"seed": during[1]})


def _die_at_all_moments(root):
    """One process a moment, forked before JAX starts its threads; exits with the number that lived."""
    warnings.filterwarnings("ignore", message=r"os.fork\(\) was called")
    children = []
    for number, moment in enumerate(_MOMENTS):
        child = os.fork()
        if not child:
            _die(pathlib.Path(root) / str(number), moment)
            os._exit(0)
        children.append(child)
    sys.exit(sum(os.waitpid(child, 0)[1] != signal.SIGKILL for child in children))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The directory that each killed process left."""
    root = tmp_path_factory.mktemp("killed")
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[1]), "XLA_FLAGS": ""}
    subprocess.run([sys.executable, __file__, root], env=environment, timeout=120, check=True)
    return {moment: root / str(number) for number, moment in enumerate(_MOMENTS)}


@pytest.mark.parametrize("moment", _MOMENTS)
def test_a_killed_save_leaves_a_complete_checkpoint_case_44(killed, mesh, moment):
    *_, (step, seed) = _MOMENTS[moment]
    checkpoints = Checkpoints(killed[moment], keep=1)
    assert checkpoints.latest() == step
    restored, host = checkpoints.restore(step, _like(_state(seed), mesh))
    _assert_same(restored, _state(seed), mesh)
    assert host == {"seed": seed}
    checkpoints.save(3, _state(3), {})
    assert os.listdir(killed[moment]) == ["3"]
    checkpoints.close()


def _config(**sections):
    return configuration.from_dict(sections)


def _run_with_checkpoint(path, **sections):
    write_config(path, _config(**sections))
    (path / "checkpoints" / "1").mkdir(parents=True)
    return path


def test_a_run_goes_on_with_its_config_only(tmp_path):
    run = _run_with_checkpoint(tmp_path / "run")
    check_same_run(run, _config(), "train")
    changed = _config(rollout={"temperature": 0.5}, optimizer={"learning_rate": 2e-5})
    with pytest.raises(
        UserError,
        match=r"run/config.yaml: the run began with rollout.temperature=1.0, now it is .*=0.5; take",
    ):
        check_same_run(run, changed, "train")
    assert configuration.load(run / "config.yaml") == _config()


def test_what_leaves_results_alone_may_change_and_is_recorded(tmp_path):
    run = _run_with_checkpoint(tmp_path / "run")
    train = {"steps": 7, "save_every": 1, "keep_checkpoints": 1, "eval_every": 3, "log_samples": 0}
    changed = _config(
        run="elsewhere",
        train=train,
        mesh={"fsdp": 2},
        sft={"steps": 1},
        eval={"samples": 9},
        rollout={"memory_gb": 1.0},
    )
    check_same_run(run, changed, "train")
    write_config(run, changed)
    assert configuration.load(run / "config.yaml") == changed


def test_the_number_of_steps_belongs_to_a_decaying_learning_rate_case_41(tmp_path):
    run = _run_with_checkpoint(tmp_path / "run", optimizer={"schedule": "linear"}, train={"steps": 10})
    with pytest.raises(UserError, match=r"train.steps=10, now it is train.steps=20"):
        check_same_run(run, _config(optimizer={"schedule": "linear"}, train={"steps": 20}), "train")


def test_sft_is_bound_by_its_own_settings(tmp_path):
    base, steps, rate = _config(), _config(sft={"steps": 3}), _config(sft={"learning_rate": 0.5})
    other = _config(algorithm={"kl_coefficient": 0.1}, rollout={"prompts": 5})
    write_config(tmp_path, base)
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    check_same_run(tmp_path, steps, "sft")
    check_same_run(tmp_path, other, "sft")
    with pytest.raises(UserError, match=r"sft.learning_rate=0.001, now it is"):
        check_same_run(tmp_path, rate, "sft")


def test_a_run_without_a_checkpoint_binds_nobody(tmp_path):
    write_config(tmp_path, _config(seed=1))
    check_same_run(tmp_path, _config(seed=2), "train")


if __name__ == "__main__":
    _die_at_all_moments(sys.argv[1])
