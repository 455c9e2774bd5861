"""Checkpoints of the whole training state, and which config may go on with which run.

    runs/<name>/checkpoints/
        100/            one folder a step; Orbax writes it under a temporary name and renames it
            state/      the TrainState, readable on any mesh
            host/       the caller's dict as JSON
            files.json  written last: size and CRC-32 of every file
        100.old/        only while step 100 is being written again

A folder counts from the moment its `files.json` stands, and only while every file in it has
the recorded size. The CRCs are needed because Orbax checks its index but not the arrays: a
flipped bit in an array file is restored as another weight, without an error.

Orbax's CheckpointManager is left aside, although it can read these folders: it takes any
folder with a number for complete, counts it when it deletes old ones, skips in silence a
save at or below the newest step, and refuses to write a step again. Saving is synchronous:
the update donates the state, and an asynchronous save would need a second copy of it.

Random keys are not stored: they are functions of the seed and the step.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import logging
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from dash_jax.config import Config, load, to_yaml
from dash_jax.errors import UserError
from dash_jax.types import TrainState

_log = logging.getLogger(__name__)

_SEAL = "files.json"

# Keys that a resumed run may change; a name that ends in a dot is a section.
_MAY_DIFFER = (
    "run", "mesh.", "eval.", "rollout.memory_gb", "reward.workers", "train.save_every",
    "train.keep_checkpoints",
)  # fmt: skip
_MAY_DIFFER_OF_VERB = {
    "train": ("sft.", "train.eval_every", "train.log_samples"),
    "sft": ("train.", "reward.", "algorithm.", "learner.optimizer_batch", "optimizer.learning_rate",
            "optimizer.schedule", "rollout.prompts", "rollout.group_size", "rollout.temperature"),
}  # fmt: skip


class Checkpoints:
    """The checkpoints in `directory`, of which the newest `keep` stay.

    One process writes to a directory at a time (all processes of one run count as one); others may
    read. Every process of a run calls every method.
    """

    def __init__(self, directory: str | pathlib.Path, *, keep: int) -> None:
        self.directory = pathlib.Path(directory).absolute()
        self._keep = keep
        self._orbax = ocp.Checkpointer(ocp.CompositeCheckpointHandler())

    def save(self, step: int, state: TrainState, host: dict[str, Any]) -> None:
        """Returns when the checkpoint is on the disk; only then are older ones deleted.

        A step that is already there is replaced; the old one is moved aside and counts until the new
        one is complete.
        """
        folder = self.directory / str(step)
        if jax.process_index() == 0:
            self._make_room(folder)
        _wait_for_all(f"checkpoint {step} starts")
        items = {"state": ocp.args.StandardSave(state), "host": ocp.args.JsonSave(host)}
        self._orbax.save(folder, args=ocp.args.Composite(**items))
        if jax.process_index() == 0:
            _seal(folder)
            self._delete_old(step)
        _wait_for_all(f"checkpoint {step} is complete")

    def latest(self) -> int | None:
        """The newest complete step, None without any. Half-written ones above it are logged.

        UserError if all that were ever complete are damaged: to begin again would delete them.
        """
        newest = -1
        if jax.process_index() == 0:
            newest = max(self._complete(), default=-1)
            sealed = [folder for _, folder in sorted(self._folders()) if (folder / _SEAL).exists()]
            if newest < 0 and sealed:
                raise UserError(
                    f"{sealed[-1]}: the checkpoint is damaged ({_fault(sealed[-1])}) and there is no other; "
                    "restore it, or delete the folder to begin at step 0"
                )
            for step, folder in sorted(self._folders()):
                if step > newest:
                    _log.warning("%s: half-written checkpoint is skipped (%s)", folder, _fault(folder))
        if jax.process_count() > 1:
            newest = int(multihost_utils.broadcast_one_to_all(np.int32(newest)))
        return newest if newest >= 0 else None

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The state and the host dict of a step.

        `like` is a TrainState of `jax.ShapeDtypeStruct` with the shardings that the leaves shall have; the
        mesh may be another than the one that wrote the checkpoint.
        """
        folder = self._open(step)
        _check_alike(folder, _saved_leaves(folder), like)
        items = {"state": ocp.args.StandardRestore(like), "host": ocp.args.JsonRestore()}
        restored = self._orbax.restore(folder, args=ocp.args.Composite(**items))
        return restored.state, restored.host

    def restore_params(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """The weights alone: no memory is taken for optimizer and reference. `like` as in `restore`."""
        folder = self._open(step)
        tree = {"params": like}
        saved = {path: leaf for path, leaf in _saved_leaves(folder).items() if path.startswith("params.")}
        _check_alike(folder, saved, tree)
        how = ocp.checkpoint_utils.construct_restore_args(tree)
        args = ocp.args.PyTreeRestore(item=tree, restore_args=how, partial_restore=True)
        return ocp.PyTreeCheckpointHandler().restore(folder / "state", args=args)["params"]

    def close(self) -> None:
        self._orbax.close()

    def _folders(self) -> Iterator[tuple[int, pathlib.Path]]:
        """Everything in the directory whose name is a step, or a step with an ending."""
        if not self.directory.is_dir():
            return
        for folder in self.directory.iterdir():
            match = re.fullmatch(r"(\d+)(\..+)?", folder.name)
            if match and folder.is_dir():
                yield int(match[1]), folder

    def _complete(self) -> dict[int, pathlib.Path]:
        """The folder of each complete step: the one moved aside only when its successor is not complete."""
        folders = sorted(self._folders(), key=lambda found: found[1].suffix == "")
        return {step: folder for step, folder in folders if _fault(folder) is None}

    def _make_room(self, folder: pathlib.Path) -> None:
        """Before a save: sweeps up what killed runs left, and moves a complete `folder` aside."""
        self.directory.mkdir(parents=True, exist_ok=True)
        complete = self._complete().values()
        for _, found in list(self._folders()):
            if found not in complete:
                shutil.rmtree(found)
        if folder in complete:
            folder.rename(f"{folder}.old")

    def _delete_old(self, just_saved: int) -> None:
        kept = {*sorted(self._complete())[-self._keep :], just_saved}
        for step, folder in list(self._folders()):
            if step not in kept or folder.suffix:
                shutil.rmtree(folder)

    def _open(self, step: int) -> pathlib.Path:
        """The folder of a step, all of whose files are what was written."""
        complete = self._complete()
        folder = complete.get(step, self.directory / str(step))
        if not folder.is_dir():
            there = ", ".join(map(str, sorted(complete))) or "none"
            raise UserError(f"{self.directory}: no checkpoint of step {step}; there are: {there}")
        fault = _fault(folder) or _damage(folder)
        if fault:
            raise UserError(
                f"{folder}: the checkpoint is damaged ({fault}); delete this folder and start again, "
                "the run goes on from the checkpoint before it, if there is one"
            )
        return folder


def check_same_run(directory: str | pathlib.Path, config: Config, verb: Literal["train", "sft"]) -> None:
    """Refuses to go on in a run directory whose config.yaml differs in anything that changes results.

    The verb's number of steps may differ under a constant learning rate only. A run without a checkpoint has
    nothing to go on with, so its config.yaml binds nobody.
    """
    path = pathlib.Path(directory) / "config.yaml"
    if path.exists() and any(path.parent.glob("checkpoints/[0-9]*")):
        key = _first_difference(before := _flat(load(path)), now := _flat(config), verb)
        if key:
            raise UserError(
                f"{path}: the run began with {key}={before[key]}, now it is {key}={now[key]}; "
                "take the old value to go on with it, or set `run` to a new directory"
            )


def write_config(directory: str | pathlib.Path, config: Config) -> None:
    """The resolved config, as the run directory's config.yaml."""
    if jax.process_index() == 0:
        path = pathlib.Path(directory) / "config.yaml"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run={directory}: cannot be made ({error.strerror}); name another") from None
        temporary = path.with_name("config.yaml.tmp")
        temporary.write_text(to_yaml(config), encoding="utf-8")
        temporary.replace(path)


def _first_difference(before: dict[str, Any], now: dict[str, Any], verb: str) -> str | None:
    free = [*_MAY_DIFFER, *_MAY_DIFFER_OF_VERB[verb]]
    schedule = {"train": "optimizer.schedule", "sft": "sft.schedule"}[verb]
    if before[schedule] == "constant":
        free.append(f"{verb}.steps")
    for key, value in now.items():
        allowed = any(key == name or (name.endswith(".") and key.startswith(name)) for name in free)
        if before[key] != value and not allowed:
            return key
    return None


def _flat(section: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            values |= _flat(value, f"{prefix}{field.name}.")
        else:
            values[prefix + field.name] = value
    return values


def _saved_leaves(folder: pathlib.Path) -> dict[str, str]:
    """Path -> type and shape of every array in the checkpoint, without reading the arrays."""
    return _leaves(ocp.PyTreeCheckpointHandler().metadata(folder / "state").tree)


def _leaves(tree: Any) -> dict[str, str]:
    """Path -> "float32[8, 4]"."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def _check_alike(folder: pathlib.Path, saved: dict[str, str], like: Any) -> None:
    """Orbax would cast another type in silence, and its error on another shape names no mend."""
    wanted = _leaves(like)
    for path in [*wanted, *(path for path in saved if path not in wanted)]:
        there, here = saved.get(path, "absent"), wanted.get(path, "absent")
        if there != here:
            origin = folder.parent.parent / "config.yaml"
            raise UserError(
                f"{folder}: {path} is {there} in the checkpoint and {here} under this config; "
                f"take the config that wrote it ({origin}), or set `run` to a new directory"
            )


def _seal(folder: pathlib.Path) -> None:
    """Brings the folder to the disk, then marks it complete."""
    paths = sorted(folder.rglob("*"))
    files = [path for path in paths if path.is_file()]
    for path in [*paths, folder, folder.parent]:
        _flush(path)
    record = {
        str(path.relative_to(folder)): [path.stat().st_size, crc]
        for path, crc in zip(files, _checksums(files), strict=True)
    }
    temporary = folder / f"{_SEAL}.tmp"
    temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
    _flush(temporary)
    temporary.replace(folder / _SEAL)
    _flush(folder)


def _fault(folder: pathlib.Path) -> str | None:
    """Why a folder is not a complete checkpoint, from names and sizes alone."""
    try:
        record = json.loads((folder / _SEAL).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{_SEAL} is missing"
    except ValueError:
        return f"{_SEAL} is no JSON"
    for name, (size, _) in record.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def _damage(folder: pathlib.Path) -> str | None:
    """The first file whose content is not what was written. The processes of a run share the files."""
    record = json.loads((folder / _SEAL).read_text(encoding="utf-8"))
    names = sorted(record)[jax.process_index() :: jax.process_count()]
    for name, crc in zip(names, _checksums([folder / name for name in names]), strict=True):
        if crc != record[name][1]:
            return f"the content of {name} has changed"
    return None


def _checksums(files: list[pathlib.Path]) -> list[int]:
    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(_checksum, files))


def _checksum(path: pathlib.Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc


def _flush(path: pathlib.Path) -> None:
    """Forces a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _wait_for_all(where: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)
