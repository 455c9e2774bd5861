"""Every test runs under strict JAX, on 8 fake CPU devices, with runtime shape checks."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

_CHECKED = ("advantages", "batching", "learner", "logprobs", "losses", "model", "sampling")
_hook = install_import_hook([f"dash_jax.{name}" for name in _CHECKED], "beartype.beartype")
_hook.__enter__()
