"""What each switch of the rollout engine gains: tokens/s of the sampler with all, without one, with one only.

    python benchmarks/engine.py --model S [--mean-length 40] [--prompts 16] [--max-rows 64] [--json FILE]

The variants take turns, so that what else the machine does falls on all of them alike; medians are shown, and
the ratio to the sampler without the engine. Workload and lengths are those of step.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from typing import Any

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table
from workload import random_policy, random_problems, workload_parser

from dash_jax import model
from dash_jax.config import Engine
from dash_jax.policy import Policy
from dash_jax.rollout import roll_out, sampler_weights, step_key

SWITCHES = ("share_prefix", "grow_cache", "compact", "refill")


def main() -> None:
    parser = workload_parser(__doc__)
    parser.add_argument("--max-rows", type=int, help="samples under way at once; default: all")
    options = parser.parse_args()

    rates = run(options)
    show(options, rates)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"options": vars(options), "tokens_per_s": rates, "jax": jax.__version__}, file, indent=2
            )


def variants(options: argparse.Namespace) -> dict[str, Engine]:
    """The switches that can matter here: nothing is refilled unless rows are scarce."""
    names = SWITCHES if options.max_rows else SWITCHES[:-1]
    everything = Engine()
    nothing = dataclasses.replace(everything, **dict.fromkeys(SWITCHES, False))
    return {
        "plain": nothing,
        **{f"{name} only": dataclasses.replace(nothing, **{name: True}) for name in names},
        **{f"all but {name}": dataclasses.replace(everything, **{name: False}) for name in names},
        "all": everything,
    }


def run(options: argparse.Namespace) -> dict[str, float]:
    """Completion tokens a second of each variant, median over the repeats."""
    policy = random_policy(options, "full")
    params = jax.jit(lambda key: model.init(policy.model, key))(jax.random.key(0))
    weights = sampler_weights(params, policy)
    engines = variants(options)
    rates: dict[str, list[float]] = {name: [] for name in engines}
    rounds = range(options.repeats + 1)
    for round_ in track(rounds, description=f"model {options.model}", console=Console(stderr=True)):
        for name, engine in engines.items():
            # Twice the same samples: what a new course of lengths compiles does not count.
            once(policy, weights, engine, options, round_)
            start = time.perf_counter()
            tokens = once(policy, weights, engine, options, round_)
            rates[name].append(tokens / (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in rates.items()}


def once(policy: Policy, weights: Any, engine: Engine, options: argparse.Namespace, seed: int) -> float:
    rollout = roll_out(
        weights, policy, random_problems(options, policy, seed), step_key(0, "train", seed),
        group_size=options.group_size,
        max_new_tokens=options.new_tokens, temperature=1.0, memory_gb=8.0, max_rows=options.max_rows,
        engine=engine,
    )  # fmt: skip
    return float(rollout.lengths.sum())


def show(options: argparse.Namespace, rates: dict[str, float]) -> None:
    length = f"mean length {options.mean_length:g} of" if options.mean_length else "length"
    rows = f", {options.max_rows} rows at once" if options.max_rows else ""
    table = Table(
        title=f"sampling, model {options.model}, {options.dtype}, {options.prompts} × {options.group_size}, "
        f"{length} {options.new_tokens}{rows}, jax {jax.__version__}"
    )
    for column in ("engine", "tokens/s", "to plain"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name, rate in rates.items():
        table.add_row(name, f"{rate:,.0f}", f"{rate / rates['plain']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
