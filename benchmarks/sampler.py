"""The sampler alone, by rows: tokens/s, and its share of what the machine's matrix products reach.

    python benchmarks/sampler.py --model S [--dtype bfloat16] [--rows 8,32,128,512] [--json FILE]

Eight completions a prompt, as in step.py. Median and fastest of `--repeats` rollouts of the same completions;
the limits are measured between them, the best counts. The FLOPs are those of the products with weights, 2 a
weight and token of prompts and completions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import limits
from rich.console import Console
from rich.progress import track
from rich.table import Table
from workload import numbers, random_policy, random_problems, workload_parser, write

from dash_jax import model
from dash_jax.rollout import roll_out, sampler_weights, step_key


def main() -> None:
    parser = workload_parser(__doc__)
    parser.add_argument("--rows", type=numbers, default="8,32,128,512", help="completions at once")
    options = parser.parse_args()

    results = run(options)
    show(options, results)
    write(options, results)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    policy = random_policy(options, "full")
    params = jax.jit(lambda key: model.init(policy.model, key))(jax.random.key(0))
    weights = sampler_weights(params, policy)
    results = []
    for rows in track(options.rows, description=f"model {options.model}", console=Console(stderr=True)):
        options.prompts = max(rows // options.group_size, 1)
        problems = random_problems(options, policy, 0)
        seconds, machine = [], []
        for _ in range(options.repeats + 1):  # the first compiles
            start = time.perf_counter()
            rollout = roll_out(
                weights, policy, problems, step_key(0, "train", 0), group_size=rows // options.prompts,
                max_new_tokens=options.new_tokens, temperature=1.0, memory_gb=8.0,
            )  # fmt: skip
            seconds.append(time.perf_counter() - start)
            machine.append(limits.measure())
        tokens, prompts = float(rollout.lengths.sum()), float(rollout.prompt_lengths.sum())
        flops = 2 * model.matrix_weights(policy.model) * (tokens + prompts)
        results.append({
            "rows": rows, "tokens_per_s": tokens / statistics.median(seconds[1:]),
            "fastest_tokens_per_s": tokens / min(seconds[1:]),
            "fastest_gflops": flops / min(seconds[1:]) / 1e9, "limits": limits.best(machine),
        })  # fmt: skip
    return results


def show(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    table = Table(
        title=f"sampling, model {options.model}, {options.dtype}, jax {jax.__version__}",
        caption=limits.words(limits.best([result["limits"] for result in results])),
    )
    for column in ("rows", "median, tokens/s", "fastest", "GFLOP/s", "of limit"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            str(result["rows"]),
            f"{result['tokens_per_s']:,.0f}",
            f"{result['fastest_tokens_per_s']:,.0f}",
            f"{result['fastest_gflops']:.0f}",
            f"{result['fastest_gflops'] / result['limits'][options.dtype]:.0%}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
