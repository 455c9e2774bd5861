"""Makes the golden checkpoints: random tiny models, saved by transformers, with its own float32 logits.

    python tests/golden/make.py        (needs torch; the folders beside this file are its output)

transformers is the only oracle. It initialises biases to 0 and norms to 1, which hides
wrong handling; so every tensor is drawn at random here, and some norms have a large
epsilon. Positions go beyond the original ones where the rope type extends them.
"""

import pathlib
import shutil

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

FOLDER = pathlib.Path(__file__).parent
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ROWS, POSITIONS = 2, 48


def rope(kind: str, **settings: float | bool) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


VARIANTS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True, rms_norm_eps=0.1),
    "llama_untied": LlamaConfig(**SHAPE, head_dim=16),
    "llama_biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama_llama3": LlamaConfig(
        **SHAPE,
        **rope(
            "llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama_linear": LlamaConfig(**SHAPE, **rope("linear", factor=4.0)),
    "llama_yarn": LlamaConfig(
        **SHAPE, **rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0)
    ),
    "llama_dynamic": LlamaConfig(**SHAPE, **rope("dynamic", factor=4.0)),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2_tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16, rms_norm_eps=0.05),
    "qwen3_biases": Qwen3Config(**SHAPE, head_dim=16, attention_bias=True, tie_word_embeddings=True),
    "qwen2_bf16_sharded": Qwen2Config(**SHAPE),
}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Outputs of matrix products stay near unit size; biases and norms are far from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.named_parameters()):
            values = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                values = 1 + 0.3 * values
            elif tensor.ndim == 1 or "embed" in name:
                values = 0.5 * values
            else:
                values = 1.5 * values / tensor.shape[1] ** 0.5
            tensor.copy_(values)


def make(name: str, config: PreTrainedConfig, seed: int) -> None:
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    bf16 = "bf16" in name
    config.dtype = torch.bfloat16 if bf16 else torch.float32
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise(model, seed)
    model.save_pretrained(folder, max_shard_size="20KB" if "sharded" in name else "5GB")
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (ROWS, POSITIONS))
    with torch.no_grad():
        logits = model.float()(torch.from_numpy(tokens)).logits
    np.savez_compressed(folder / "logits.npz", tokens=tokens.astype(np.int32), logits=logits.numpy())


if __name__ == "__main__":
    for seed, (name, config) in enumerate(VARIANTS.items()):
        make(name, config, seed)
