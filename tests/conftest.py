"""Every test runs under strict JAX, on 8 fake CPU devices, with shape checks, on the same examples."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Level 0: the programs are tiny and many, and most of the time of the tests is compilation.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

import hypothesis
import jax
from jaxtyping import install_import_hook

# Fresh examples in each run would find, once in hundreds of runs, weights for which rounding alone moves a
# log-prob above a tolerance, and a suite that passed would fail unchanged.
hypothesis.settings.register_profile("deterministic", derandomize=True)
hypothesis.settings.load_profile("deterministic")

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

_CHECKED = ("advantages", "batching", "learner", "logprobs", "losses", "model", "sampling")
_hook = install_import_hook([f"dash_jax.{name}" for name in _CHECKED], "beartype.beartype")
_hook.__enter__()
