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
from workload import DTYPES

_SIZE = 1024


def main() -> None:
    table = Table(title=f"{jax.device_count()} {jax.devices()[0].device_kind}, jax {jax.__version__}")
    table.add_column("")
    table.add_column("fastest", justify="right")
    limits = measure()
    for dtype in DTYPES:
        table.add_row(f"{_SIZE}² matrix product, {dtype}", f"{limits[dtype]:,.0f} GFLOP/s")
    table.add_row("copy, read and written", f"{limits['copy']:,.1f} GB/s")
    Console().print(table)


def measure() -> dict[str, float]:
    """GFLOP/s of products by dtype, GB/s of a copy."""
    return {dtype: product_gflops(dtype) for dtype in DTYPES} | {"copy": copy_gigabytes()}


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(limits[name] for limits in rounds) for name in rounds[0]}


def words(limits: dict[str, float]) -> str:
    """The limits as the caption of a table."""
    products = ", ".join(f"{limits[dtype]:,.0f} {dtype}" for dtype in DTYPES)
    return f"limits: {_SIZE}² products, GFLOP/s: {products}; copy, GB/s: {limits['copy']:,.1f}"


def product_gflops(dtype: str) -> float:
    """GFLOP/s of a square product with float32 sums."""
    a = jnp.ones((_SIZE, _SIZE), dtype)
    return 2 * _SIZE**3 / fastest(lambda: _multiply(a)) / 1e9


def copy_gigabytes() -> float:
    """GB/s, bytes read plus bytes written, of 256 MB into a buffer that exists."""
    a = jnp.ones(64 * 2**20, jnp.float32)
    seconds = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        a = jax.block_until_ready(_copy(a))
        seconds = min(seconds, time.perf_counter() - start)
    return 2 * a.nbytes / seconds / 1e9


_multiply = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=jnp.float32))
_copy = jax.jit(lambda a: a + 1.0, donate_argnums=0)  # into itself, as donated caches are


def fastest(run: Callable[[], Any], repeats: int = 20) -> float:
    """Seconds of the fastest of some calls, after one that compiles."""
    jax.block_until_ready(run())
    seconds = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds = min(seconds, time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
