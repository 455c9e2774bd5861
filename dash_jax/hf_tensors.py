"""Tensors of a Hugging Face folder: where they lie in its safetensors files, slices of them, new files."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dash_jax.errors import UserError

DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAPPED_BYTES = 4 * 2**20  # of a file, at a time
_FILE_BYTES = 4 * 2**30  # a larger model is split into several files


class Tensor(NamedTuple):
    """Where a tensor lies on disk."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """A slice in memory that the CPU backend takes over without a copy: aligned to 64 bytes."""
        index = tuple(slice(*part.indices(size)) for part, size in zip(index, self.shape, strict=True))
        shape = [part.stop - part.start for part in index]
        size = math.prod(shape) * np.dtype(DTYPES[self.dtype]).itemsize
        memory = np.empty(size + 64, np.uint8)
        start = -memory.ctypes.data % 64
        out = memory[start : start + size].view(DTYPES[self.dtype]).reshape(shape)
        for first, block in self._mapped(index[0]):
            out[first : first + len(block)] = block[(slice(None), *index[1:])]
        return out

    def equals(self, other: Tensor) -> bool:
        """The same shape and values."""
        pairs = zip(
            self._mapped(slice(0, self.shape[0])), other._mapped(slice(0, other.shape[0])), strict=False
        )
        return self.shape == other.shape and all(
            np.array_equal(a.astype(np.float32), b.astype(np.float32)) for (_, a), (_, b) in pairs
        )

    def _mapped(self, rows: slice) -> Iterator[tuple[int, np.ndarray]]:
        """Memory maps of some rows at a time: what was read of a map stays resident while the map lives."""
        row_values = math.prod(self.shape[1:])
        row_bytes = row_values * np.dtype(DTYPES[self.dtype]).itemsize
        step = max(_MAPPED_BYTES // (4 * row_values), 1)
        for first in range(rows.start, rows.stop, step):
            shape = (min(step, rows.stop - first), *self.shape[1:])
            offset = self.offset + first * row_bytes
            yield first - rows.start, np.memmap(self.file, DTYPES[self.dtype], "r", offset, shape)


def find(folder: str | pathlib.Path) -> dict[str, Tensor]:
    """All tensors of a folder by name, from the headers of its files."""
    single, index = pathlib.Path(folder) / _SINGLE, pathlib.Path(folder) / _INDEX
    if not index.exists():
        if not single.exists():
            raise UserError(f"{folder}: holds neither {_SINGLE} nor {_INDEX}; give a folder of safetensors")
        return _header(single)
    listed = _json(index, index.read_bytes()).get("weight_map", {})
    files = {name: pathlib.Path(folder) / name for name in sorted(set(listed.values()))}
    if single.exists() and _SINGLE not in files:
        raise UserError(f"{single}: stands beside {_INDEX}, which does not name it; remove one of the two")
    found: dict[str, Tensor] = {}
    for name, file in files.items():
        for key, tensor in _header(file).items():
            if key in found:
                raise UserError(f"{file}: {key} {tensor.shape} is in {found[key].file.name} too; remove one")
            if listed.get(key) != name:
                raise UserError(
                    f"{file}: {key} {tensor.shape} is not listed there by {_INDEX}; mend the index"
                )
            found[key] = tensor
    for key, name in listed.items():
        if key not in found:
            raise UserError(
                f"{files[name]}: {key} is missing, though {_INDEX} lists it there; fetch it again"
            )
    return found


def write(folder: pathlib.Path | None, sizes: dict[str, int], arrays: Iterable[np.ndarray]) -> None:
    """Writes arrays of the names and bytes `sizes`, a file's at a time; without a folder only draws them."""
    files: list[list[str]] = [[]]
    used = 0
    for key, size in sizes.items():
        if files[-1] and used + size > _FILE_BYTES:
            files.append([])
            used = 0
        files[-1].append(key)
        used += size
    stream, listed = iter(arrays), {}
    for number, keys in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else _SINGLE
        listed.update(dict.fromkeys(keys, name))
        contents = {key: next(stream) for key in keys}
        if folder is not None:
            save_file(contents, folder / name, metadata={"format": "pt"})
            (folder / name).chmod(folder.stat().st_mode & 0o666)  # it was readable by its owner only
    if folder is not None and len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": listed}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _header(file: pathlib.Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="numpy"):
            pass  # it has checked sizes, holes and overlaps
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            tree = _json(file, stream.read(length))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: no whole safetensors file ({error}); fetch it again") from None
    tree.pop("__metadata__", None)
    return {
        key: Tensor(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for key, entry in tree.items()
    }


def _json(file: pathlib.Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict(pairs)
        if len(tree) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)} stands twice")
        return tree

    try:
        tree = json.loads(text, object_pairs_hook=unique)
    except ValueError as error:
        raise UserError(f"{file}: cannot be read as JSON ({error}); fetch it again") from None
    if not isinstance(tree, dict):
        raise UserError(f"{file}: holds a {type(tree).__name__}; it must be a JSON object")
    return tree
