"""A run that is killed and resumed is the run that was not, bit for bit. Real processes, real SIGKILL."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

# Six problems, four a step: the second step crosses the border of the first epoch.
_CONFIG = """
model: {hidden_size: 16, layers: 2, heads: 2, kv_heads: 1, mlp_size: 32, max_positions: 64}
task: {arithmetic: {levels: [1], train_size: 6, test_size: 4}}
rollout: {prompts: 4, group_size: 4, max_prompt_tokens: 8, max_new_tokens: 8, temperature: 1.2}
algorithm: {advantage: group_mean, filter: false, kl_coefficient: 0.1}
learner: {micro_batch: 8, shapes: 2}
optimizer: {learning_rate: 1e-2, schedule: linear, warmup_steps: 2}
train: {steps: 6, save_every: 2, log_samples: 1}
"""

# Runs the command line and kills the process at call NUMBER of FUNCTION, before or after it.
_KILLER = """
import importlib, os, signal, sys
module, function, number, moment = sys.argv[1:5]
owner = importlib.import_module(module)
*path, name = function.split(".")
for part in path:
    owner = getattr(owner, part)
original, calls = getattr(owner, name), 0
def deadly(*args, **kwargs):
    global calls
    calls += 1
    if calls == int(number) and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = original(*args, **kwargs)
    if calls == int(number):
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(owner, name, deadly)
from dash_jax.cli import main
sys.exit(main(sys.argv[5:]))
"""


def _environment(folder):
    """One device; compiled programs are shared by the processes, which are many and short."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", **cache}


def _train(folder, run, *killer):
    command = [sys.executable, "-c", _KILLER, *killer] if killer else [sys.executable, "-m", "dash_jax"]
    command += ["train", str(folder / "config.yaml"), f"run={folder / run}"]
    done = subprocess.run(
        command, env=_environment(folder), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == (-9 if killer else 0), done.stderr
    return done.stdout + done.stderr


def _last_state(run):
    """Every array of the newest checkpoint, by path."""
    folder = run / "checkpoints" / "6" / "state"
    handler = ocp.PyTreeCheckpointHandler()
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(folder).tree)
    tree = handler.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _lines(run, name="metrics.jsonl"):
    lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    (folder / "config.yaml").write_text(_CONFIG)
    _train(folder, "straight")
    return folder


def test_killed_in_the_middle_of_steps_and_of_a_save(straight):
    folder, run = straight, straight / "killed"
    # In the first save, when the arrays are there but the seal is not: nothing to resume from yet.
    _train(folder, "killed", "dash_jax.checkpoint", "_seal", "1", "before")
    # After the update of step 3, before its line: steps 0 and 1 are in the checkpoint, step 2 is done again.
    _train(folder, "killed", "dash_jax.learning", "Learning.step", "4", "after")
    # In the second process's next save, while the older checkpoint stands.
    output = _train(folder, "killed", "dash_jax.checkpoint", "_seal", "1", "before")
    assert "2 of 6 steps are done" in output
    output = _train(folder, "killed")
    assert "2 of 6 steps are done" in output
    assert "half-written checkpoint is skipped" in output

    expected, got = _last_state(straight / "straight"), _last_state(run)
    assert expected.keys() == got.keys()
    assert any("reference" in path for path in got), "the reference policy is part of the state"
    for path, leaf in expected.items():
        assert leaf.tobytes() == got[path].tobytes(), path
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert _lines(straight / "straight", name) == _lines(run, name)


def test_a_finished_run_does_nothing_more(straight):
    before = (straight / "straight" / "metrics.jsonl").read_bytes()
    assert "6 of 6 steps are done" in _train(straight, "straight")
    assert (straight / "straight" / "metrics.jsonl").read_bytes() == before


def test_another_config_is_refused(straight):
    command = [sys.executable, "-m", "dash_jax", "train", str(straight / "config.yaml")]
    command += [f"run={straight / 'straight'}", "optimizer.learning_rate=1e-3"]
    done = subprocess.run(
        command, env=_environment(straight), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    assert "the run began with optimizer.learning_rate=0.01, now it is" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
