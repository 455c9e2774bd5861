"""The common workload of the benchmarks: shapes, random weights, random prompts, lengths."""

from __future__ import annotations

import argparse
import json
from typing import Any

import jax
import numpy as np

from dash_jax import model
from dash_jax.policy import Policy
from dash_jax.problems import Problem
from dash_jax.sharding import make_mesh

SHAPES = {
    "S": {"hidden_size": 256, "layers": 8, "heads": 8, "kv_heads": 2, "mlp_size": 1024, "vocab_size": 4096},
    "M": {"hidden_size": 512, "layers": 12, "heads": 8, "kv_heads": 2, "mlp_size": 2048, "vocab_size": 32000},
}
PROMPT_TOKENS = 48
DTYPES = ("float32", "bfloat16")


def workload_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="S")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the matrix products")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--mean-length", type=float, help="of the completions; default: all at the limit")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    return parser


def numbers(text: str) -> list[int]:
    """`8,32` -> [8, 32], for options."""
    return [int(part) for part in text.split(",")]


def write(options: argparse.Namespace, results: Any) -> None:
    if options.json:
        document = {"options": vars(options), "results": results, "jax": jax.__version__}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)


def random_policy(options: argparse.Namespace, remat: str) -> Policy:
    shape = SHAPES[options.model]
    described = model.ModelConfig(
        **shape,
        known_ids=shape["vocab_size"],
        head_size=shape["hidden_size"] // shape["heads"],
        qkv_bias=True,
        dtype=options.dtype,
        remat=remat,  # type: ignore[arg-type]
    )
    # No id stops where every completion shall have the full length. No tokenizer: nothing is decoded.
    stop_ids = _ending_ids(options, described.vocab_size) if options.mean_length else (-1,)
    return Policy(make_mesh(), None, described, stop_ids=stop_ids)  # type: ignore[arg-type]


def random_problems(options: argparse.Namespace, policy: Policy, seed: int) -> list[Problem]:
    ids = np.random.default_rng(seed).integers(3, policy.model.vocab_size, (options.prompts, PROMPT_TOKENS))
    return [Problem(i, "random", "", "", prompt_ids=tuple(row)) for i, row in enumerate(ids.tolist())]


def _ending_ids(options: argparse.Namespace, vocabulary: int) -> tuple[int, ...]:
    """So many ids that a model which finds all tokens about alike ends after `mean_length` on average."""

    def mean(ids: int) -> float:
        share = ids / vocabulary
        return (1 - (1 - share) ** options.new_tokens) / share

    count = min(range(1, vocabulary), key=lambda ids: abs(mean(ids) - options.mean_length))
    return tuple(range(3, 3 + count))
