"""config.json of a Hugging Face folder: what the model is, what is refused, and how it is written.

What transformers computes from the same file is the measure. A setting that changes
the computation and is not implemented is refused by name, never ignored.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any, Literal, NoReturn

from dash_jax.errors import UserError
from dash_jax.model import ModelConfig
from dash_jax.rope import Rope

# What transformers assumes of each family where config.json says nothing.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}

_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_ROPE_KEYS = {
    "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate",
}  # fmt: skip


def read(folder: str | pathlib.Path) -> dict[str, Any]:
    path = pathlib.Path(folder) / "config.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a Hugging Face folder with config.json") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); mend the file") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: holds a {type(tree).__name__}; it must be a JSON object")
    return tree


def parse(
    tree: dict[str, Any],
    where: str,
    *,
    known_ids: int,
    dtype: str,
    remat: Literal["none", "dots", "full"],
    max_needed_positions: int | None,
) -> ModelConfig:
    """The model that `tree` describes, `tied` as its flag says. `where` starts every message."""
    family = str(tree.get("model_type"))
    if family not in _FAMILIES:
        _Settings(tree, where).refuse("model_type", f"supported are {', '.join(_FAMILIES)}")
    c = _Settings({**_FAMILIES[family], **tree}, where)
    _refuse_unsupported(c)
    hidden_size, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    kv_heads, head_size = c.whole("num_key_value_heads", heads), c.whole("head_dim", hidden_size // heads)
    vocab_size, max_positions = c.whole("vocab_size"), c.whole("max_position_embeddings")
    if heads % kv_heads:
        c.refuse("num_key_value_heads", f"it must divide num_attention_heads={heads}")
    if head_size % 2:
        c.refuse("head_dim", f"rotary embedding needs an even head size, not {head_size}")
    if known_ids > vocab_size:
        c.refuse("vocab_size", f"the tokenizer has {known_ids} ids, more than the embedding has rows")
    if max_needed_positions is not None and max_needed_positions > max_positions:
        c.refuse("max_position_embeddings", f"{max_needed_positions} are needed; lower the token limits")
    attention_bias = family != "qwen2" and c.flag("attention_bias")
    return ModelConfig(
        vocab_size=vocab_size,
        known_ids=known_ids,
        hidden_size=hidden_size,
        layers=c.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        mlp_size=c.whole("intermediate_size"),
        tied=c.flag("tie_word_embeddings"),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=attention_bias,
        mlp_bias=family == "llama" and c.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        norm_epsilon=c.number("rms_norm_eps", 1e-6),
        rope=_rope(_rope_settings(c), max_positions),
        max_positions=max_positions,
        dtype=dtype,
        remat=remat,
    )


def generate(config: ModelConfig) -> dict[str, Any]:
    """config.json of a model that came from no folder: Qwen2 if only qkv has biases, else Llama."""
    qwen2 = config.qkv_bias and not config.out_bias and not config.mlp_bias
    llama = config.qkv_bias == config.out_bias
    if config.qk_norm or config.rope.kind != "default" or not (qwen2 or llama):
        raise UserError(f"{config} is neither Llama nor Qwen2; give the folder that it came from as source")
    biases = {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    return {
        "architectures": ["Qwen2ForCausalLM" if qwen2 else "LlamaForCausalLM"],
        "model_type": "qwen2" if qwen2 else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.mlp_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        # Else transformers takes ids that this model's tokenizer may use for something else.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **({} if qwen2 else biases),
    }


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Typed access to a JSON object; null counts as absent."""

    tree: dict[str, Any]
    where: str

    def refuse(self, key: str, mend: str) -> NoReturn:
        value = json.dumps(self.tree[key]) if key in self.tree else "(absent)"
        raise UserError(f"{self.where}: {key}={value}: {mend}")

    def whole(self, key: str, default: int | None = None) -> int:
        value: Any = default if self.tree.get(key) is None else self.tree[key]
        if type(value) is not int or value <= 0:
            self.refuse(key, "it must be a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value: Any = default if self.tree.get(key) is None else self.tree[key]
        if type(value) not in (int, float) or not 0 < value < math.inf:
            self.refuse(key, "it must be a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.tree.get(key) or False
        if value not in (True, False):
            self.refuse(key, "it must be true or false")
        return bool(value)


def _refuse_unsupported(c: _Settings) -> None:
    if c.tree.get("quantization_config"):
        c.refuse("quantization_config", "dequantize the checkpoint to bfloat16 first")
    if c.tree.get("hidden_act", "silu") != "silu":
        c.refuse("hidden_act", "only silu is implemented")
    if c.tree.get("partial_rotary_factor") not in (None, 1):
        c.refuse("partial_rotary_factor", "only the rotation of whole heads is implemented")
    if c.flag("use_sliding_window"):
        c.refuse("use_sliding_window", "only full attention is implemented")
    if set(c.tree.get("layer_types") or ()) - {"full_attention"}:
        c.refuse("layer_types", "only full_attention is implemented")


def _rope_settings(c: _Settings) -> _Settings:
    """The union of `rope_parameters` (transformers 5), `rope_scaling` and `rope_theta` (transformers 4)."""
    merged: dict[str, Any] = {}
    top_level = {key: c.tree.get(key) for key in ("rope_theta", "original_max_position_embeddings")}
    for settings in (top_level, c.tree.get("rope_scaling") or {}, c.tree.get("rope_parameters") or {}):
        if not isinstance(settings, dict):
            raise UserError(f"{c.where}: rope settings {json.dumps(settings)} must be a JSON object")
        for key, value in settings.items():
            name = "rope_type" if key == "type" else key
            if name not in _ROPE_KEYS and (name, value) != ("partial_rotary_factor", 1):
                raise UserError(f"{c.where}: rope setting {key}={json.dumps(value)} is not implemented")
            if value is not None and merged.setdefault(name, value) != value:
                raise UserError(f"{c.where}: {name} is both {merged[name]} and {value}; remove one of them")
    return _Settings(merged, c.where)


def _rope(r: _Settings, max_positions: int) -> Rope:
    kind = r.tree.get("rope_type", "default")
    if kind not in _ROPE_KINDS:
        r.refuse("rope_type", f"supported are {', '.join(_ROPE_KINDS)}")
    theta = r.number("rope_theta", 10_000.0)
    if kind == "default":
        return Rope(theta=theta)
    original = r.whole("original_max_position_embeddings", max_positions)
    factor = r.number("factor", max_positions / original if kind == "yarn" else None)
    if kind == "linear":
        return Rope("linear", theta, factor)
    if kind == "dynamic":  # transformers keeps the original positions in max_position_embeddings
        return Rope("dynamic", theta, factor, max_positions)
    if kind == "llama3":
        low, high = r.number("low_freq_factor"), r.number("high_freq_factor")
        if high <= low:
            r.refuse("high_freq_factor", f"it must be above low_freq_factor={low}")
        return Rope("llama3", theta, factor, original, low, high)
    return Rope(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_positions=original,
        beta_fast=r.number("beta_fast", 32.0),
        beta_slow=r.number("beta_slow", 1.0),
        attention_factor=r.number("attention_factor", _yarn_attention_factor(r, factor)),
        truncate=bool(r.tree.get("truncate", True)),
    )


def _yarn_attention_factor(r: _Settings, factor: float) -> float:
    """arXiv 2309.00071, equation 22, or DeepSeek's ratio of two of them."""

    def attention_factor(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if r.tree.get("mscale") and r.tree.get("mscale_all_dim"):
        return attention_factor(r.number("mscale")) / attention_factor(r.number("mscale_all_dim"))
    return attention_factor(1.0)
