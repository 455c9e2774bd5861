"""Mesh and the one table that says which logical axis is split over which mesh axis.

Weights and optimizer moments are split over `fsdp` × `tensor`, rows of a batch
over `data` × `fsdp`. A dimension that its mesh axes do not divide stays whole on
every device, which is always right and costs memory only.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dash_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")

# Logical axis of a weight or activation -> mesh axes.
RULES: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "batch": ("data", "fsdp"),
}


def make_mesh(data: int | None = None, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A data × fsdp × tensor mesh over all devices; `data=None` takes what the others leave."""
    devices = jax.device_count()
    if data is None:
        data = max(devices // (fsdp * tensor), 1)
    if data * fsdp * tensor != devices:
        raise UserError(
            f"mesh.data={data} × mesh.fsdp={fsdp} × mesh.tensor={tensor} is {data * fsdp * tensor}, "
            f"but there are {devices} devices; set them so that the product is {devices}"
        )
    return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec(
    mesh: Mesh | jax.sharding.AbstractMesh, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> PartitionSpec:
    """The partition of an array whose dimensions bear the logical names `axes`."""

    def split(size: int, axis: str | None) -> tuple[str, ...] | None:
        names = RULES.get(axis or "", ())
        ways = math.prod(mesh.shape[name] for name in names)
        return names if ways > 1 and size % ways == 0 else None

    return PartitionSpec(*map(split, shape, axes))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins the partition of an activation where a mesh is set (`jax.set_mesh`), else does nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec(mesh, x.shape, axes))


def row_ways(mesh: Mesh) -> int:
    """Over how many devices the rows of a batch are split."""
    return math.prod(mesh.shape[name] for name in RULES["batch"])


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def split_rows(mesh: Mesh, tree: Any, axis: int) -> Any:
    """Shardings that split dimension `axis` of every leaf over the batch axes of the mesh."""

    def of(leaf: jax.Array) -> NamedSharding:
        axes = [None] * leaf.ndim
        axes[axis] = "batch"  # type: ignore[call-overload]
        return NamedSharding(mesh, spec(mesh, leaf.shape, tuple(axes)))

    return jax.tree.map(of, tree)
