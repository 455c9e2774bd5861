"""The sampler alone, by rows: tokens/s, and its share of what the machine's matrix products reach.

    python benchmarks/sampler.py --model S [--dtype bfloat16] [--rows 8,32,128,512] [--json FILE]

Eight completions a prompt, as in step.py; fastest and median of `--repeats` rollouts, the limit measured
between them. The FLOPs are those of the products with weights, 2 a weight and token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import jax
from limits import product_gflops
from rich.console import Console
from rich.progress import track
from rich.table import Table
from workload import random_policy, random_problems, workload_parser

from dash_jax import model
from dash_jax.rollout import roll_out, sampler_weights, step_key


def main() -> None:
    parser = workload_parser(__doc__)
    parser.add_argument("--rows", default="8,32,128,512", help="completions at once")
    options = parser.parse_args()

    results = run(options)
    show(options, results)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"options": vars(options), "results": results}, file, indent=2)


def run(options: argparse.Namespace) -> list[dict[str, float]]:
    policy = random_policy(options, "full")
    params = jax.jit(lambda key: model.init(policy.model, key))(jax.random.key(0))
    weights = sampler_weights(params, policy)
    results = []
    for rows in track([int(rows) for rows in options.rows.split(",")], console=Console(stderr=True)):
        options.prompts = max(rows // options.group_size, 1)
        group_size = rows // options.prompts
        problems = random_problems(options, policy, 0)
        rates, limits = [], []
        for repeat in range(options.repeats + 1):
            start = time.perf_counter()
            rollout = roll_out(
                weights, policy, problems, step_key(0, "train", repeat), group_size=group_size,
                max_new_tokens=options.new_tokens, temperature=1.0, memory_gb=8.0,
            )  # fmt: skip
            rates.append(float(rollout.lengths.sum()) / (time.perf_counter() - start))
            limits.append(product_gflops(options.dtype))
        gflops = 2 * model.matrix_weights(policy.model) * max(rates[1:]) / 1e9
        results.append({
            "rows": rows, "tokens_per_s": max(rates[1:]), "median_tokens_per_s": statistics.median(rates[1:]),
            "gflops": gflops, "limit_gflops": max(limits),
        })  # fmt: skip
    return results


def show(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    table = Table(title=f"sampling, model {options.model}, {options.dtype}, jax {jax.__version__}")
    for column in ("rows", "tokens/s", "median", "GFLOP/s", "limit", "share"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            str(result["rows"]),
            f"{result['tokens_per_s']:,.0f}",
            f"{result['median_tokens_per_s']:,.0f}",
            f"{result['gflops']:.0f}",
            f"{result['limit_gflops']:.0f}",
            f"{result['gflops'] / result['limit_gflops']:.0%}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
