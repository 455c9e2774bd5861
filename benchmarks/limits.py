"""What the machine can do: matrix products and copies, in the same JAX as the rest.

    python benchmarks/limits.py

Fastest of a few repetitions, as other work on the machine only takes away.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

_SIZE = 1024


def main() -> None:
    table = Table(title=f"{jax.device_count()} {jax.devices()[0].device_kind}, jax {jax.__version__}")
    table.add_column("")
    table.add_column("fastest", justify="right")
    for dtype in ("float32", "bfloat16"):
        table.add_row(f"{_SIZE}² matrix product, {dtype}", f"{product_gflops(dtype):,.0f} GFLOP/s")
    table.add_row("copy, read and written", f"{copy_gigabytes():,.1f} GB/s")
    Console().print(table)


def product_gflops(dtype: str) -> float:
    """GFLOP/s of a square product with float32 sums."""
    a = jnp.ones((_SIZE, _SIZE), dtype)
    multiply = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=jnp.float32))
    return 2 * _SIZE**3 / fastest(lambda: multiply(a)) / 1e9


def copy_gigabytes() -> float:
    """GB/s, bytes read plus bytes written, of 256 MB into a buffer that exists."""
    a = jnp.ones(64 * 2**20, jnp.float32)
    add = jax.jit(lambda a: a + 1.0, donate_argnums=0)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        a = jax.block_until_ready(add(a))
        best = min(best, time.perf_counter() - start)
    return 2 * a.nbytes / best / 1e9


def fastest(run: Callable[[], Any], repeats: int = 20) -> float:
    """Seconds of the fastest of some calls, after one that compiles."""
    jax.block_until_ready(run())
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()
