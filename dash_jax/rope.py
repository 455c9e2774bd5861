"""Rotary position embeddings: frequencies of all kinds that Hugging Face names, and the rotation."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Rotation = tuple[Float[Array, "*rows half"], Float[Array, "*rows half"]]  # cosine and sine


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding. `kind` is Hugging Face's rope_type."""

    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_positions: int = 0  # before the extension by `factor`
    low_frequency_factor: float = 1.0  # llama3
    high_frequency_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: scales cosine and sine
    truncate: bool = True  # yarn


def rotation_frequencies(rope: Rope, head_size: int) -> tuple[np.ndarray, float]:
    """Angle per position of each pair of channels [A/2], float32, and the scale of cosine and sine.

    Formulas: linear (arXiv 2306.15595), yarn (arXiv 2309.00071), llama3 (Llama 3.1's
    piecewise scaling). `dynamic` changes nothing up to `original_positions`, and
    `weights.model_config` refuses to go beyond.
    """
    exponents = np.arange(0, head_size, 2, dtype=np.float64) / head_size
    frequencies = rope.theta**-exponents
    scale = 1.0
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low, high = rope.low_frequency_factor, rope.high_frequency_factor
        smooth = np.clip((rope.original_positions / wavelengths - low) / (high - low), 0.0, 1.0)
        frequencies = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    elif rope.kind == "yarn":

        def channel(rotations: float) -> float:
            period = rope.original_positions / (rotations * 2 * math.pi)
            return head_size * math.log(period) / (2 * math.log(rope.theta))

        low, high = channel(rope.beta_fast), channel(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_size - 1)
        ramp = (np.arange(head_size // 2) - low) / ((high - low) or 0.001)
        keep = 1 - np.clip(ramp, 0.0, 1.0)
        frequencies = frequencies / rope.factor * (1 - keep) + frequencies * keep
        scale = rope.attention_factor
    return frequencies.astype(np.float32), scale


def rotation(rope: Rope, head_size: int, positions: Int[Array, "*rows"]) -> Rotation:
    """Cosines and sines of the rotary embedding at these positions."""
    frequencies, scale = rotation_frequencies(rope, head_size)
    angles = jnp.multiply.outer(positions.astype(jnp.float32), frequencies)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: Float[Array, "N G T *heads A"], rotation: Rotation) -> Float[Array, "N G T *heads A"]:
    """Rotates channel i with channel i + A/2, in float32."""
    heads = tuple(range(3, x.ndim - 1))
    cosine, sine = (jnp.expand_dims(part, heads) for part in rotation)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1).astype(x.dtype)
