"""The learner alone, by size of the micro-batch: seconds forward and backward, memory, share of the limit.

    python benchmarks/learner.py --model S [--dtype bfloat16] [--micro-batches 4,8,16,32] [--remat dots]
        [--json FILE]

128 completions of 128 tokens behind 16 prompts of 48, as in step.py, without the optimizer. A micro-batch
that holds no whole groups computes the prompt for each completion. Median and fastest of `--repeats`; the
limits are measured between them, the best counts. The FLOPs are those of the products with weights, 6 a
weight and token of prompts and completions, each prompt once. Temporary memory is what the compiler plans
beside weights, gradients and batch; that of all logits at once is shown to compare. The peak is that of the
process until then, limits and earlier micro-batches included.
"""

from __future__ import annotations

import argparse
import functools
import resource
import statistics
import time
from typing import Any

import jax
import limits
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from workload import PROMPT_TOKENS, numbers, random_policy, workload_parser, write

from dash_jax import config, learner, model
from dash_jax.learning import learning_batch
from dash_jax.types import Rollout


def main() -> None:
    parser = workload_parser(__doc__)
    parser.add_argument(
        "--micro-batches", type=numbers, default="4,8,16,32", help="completions a backward pass"
    )
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="dots")
    options = parser.parse_args()
    if options.mean_length:
        parser.error("--mean-length: here all completions are at the limit")

    results = run(options)
    show(options, results)
    write(options, results)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    policy = random_policy(options, options.remat)
    params = jax.jit(lambda key: model.init(policy.model, key))(jax.random.key(0))
    rollout = random_rollout(options, policy.model.vocab_size)
    tokens = float(rollout.lengths.sum() + rollout.prompt_lengths.sum())
    flops = 6 * model.matrix_weights(policy.model) * tokens
    accumulate = functools.partial(learner.accumulate, config=policy.model, objective=learner.Objective())
    results = []
    sizes = track(options.micro_batches, description=f"model {options.model}", console=Console(stderr=True))
    for rows in sizes:
        settings = config.from_dict({
            "rollout": {
                "prompts": options.prompts, "group_size": options.group_size,
                "max_prompt_tokens": PROMPT_TOKENS, "max_new_tokens": options.new_tokens,
            },
            "algorithm": {"filter": False},
            "learner": {
                "micro_batch": rows, "shapes": 1, "share_prompt": rows % options.group_size == 0,
            },
        })  # fmt: skip
        advantages = np.random.default_rng(0).normal(size=rollout.lengths.shape).astype(np.float32)
        batches = jax.device_put(learning_batch(rollout, advantages, settings, multiple_of=1))
        compiled = jax.jit(accumulate).lower(params, None, batches).compile()
        seconds, machine = [], []
        for _ in range(options.repeats + 1):  # the first touches the memory
            start = time.perf_counter()
            jax.block_until_ready(compiled(params, None, batches))
            seconds.append(time.perf_counter() - start)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            machine.append(limits.measure())
        results.append({
            "micro_batch": rows, "seconds": statistics.median(seconds[1:]),
            "fastest_seconds": min(seconds[1:]), "fastest_gflops": flops / min(seconds[1:]) / 1e9,
            "limits": limits.best(machine),
            "temporary_mb": compiled.memory_analysis().temp_size_in_bytes / 2**20,
            "all_logits_mb": rows * options.new_tokens * policy.model.vocab_size * 4 / 2**20,
            "peak_rss_mb": peak / 1024,
        })  # fmt: skip
    return results


def random_rollout(options: argparse.Namespace, vocabulary: int) -> Rollout:
    shape = (options.prompts, options.group_size)
    ids = np.random.default_rng(0)
    fields: Any = {
        "problem_ids": np.arange(options.prompts, dtype=np.int32),
        "prompts": ids.integers(3, vocabulary, (options.prompts, PROMPT_TOKENS), np.int32),
        "prompt_lengths": np.full(options.prompts, PROMPT_TOKENS, np.int32),
        "tokens": ids.integers(3, vocabulary, (*shape, options.new_tokens), np.int32),
        "logprobs": np.full((*shape, options.new_tokens), -np.log(vocabulary), np.float32),
        "lengths": np.full(shape, options.new_tokens, np.int32),
        "finish": np.zeros(shape, np.int32),
    }
    return Rollout(**fields)


def show(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    table = Table(
        title=f"learning, model {options.model}, {options.dtype}, remat {options.remat}, "
        f"jax {jax.__version__}",
        caption=limits.words(limits.best([result["limits"] for result in results])),
    )
    for column in (
        "rows", "median, s", "fastest", "GFLOP/s", "of limit", "temp, MB", "logits, MB", "peak, MB",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            str(result["micro_batch"]),
            f"{result['seconds']:.2f}",
            f"{result['fastest_seconds']:.2f}",
            f"{result['fastest_gflops']:.0f}",
            f"{result['fastest_gflops'] / result['limits'][options.dtype]:.0%}",
            f"{result['temporary_mb']:,.0f}",
            f"{result['all_logits_mb']:,.0f}",
            f"{result['peak_rss_mb']:,.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
