"""dash_jax: reinforcement learning with verifiable rewards for reasoning models, in JAX."""

__version__ = "0.1.0"
