"""Seconds of one DASH step, split into sampling and learning, on random weights.

    python benchmarks/step.py --model S [--json FILE]
    python benchmarks/step.py --model S --dtype bfloat16
    python benchmarks/step.py --model S --constant-groups 0.5     # half of the groups carry no signal
    python benchmarks/step.py --model S --mean-length 40          # answers end by themselves
    python benchmarks/step.py --model S --without grow_cache,compact

16 prompts of 48 tokens, 8 completions of exactly 128 tokens each (no end-of-sequence token), float32.
With `--mean-length` some ids of the vocabulary end a completion, so that lengths are geometric, cut at the
limit. With `--dtype bfloat16` products take bfloat16 and add in float32; everything else is float32. The
reward is a rule on token ids, so nothing but the sampler and the learner takes time. The median of
`--repeats` steps is printed and the fastest beside it; the first step, which compiles, is shown apart and the
second left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import statistics
import time
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from workload import PROMPT_TOKENS, random_policy, random_problems, workload_parser

from dash_jax import config, learner, model
from dash_jax.learning import Learning
from dash_jax.policy import Policy
from dash_jax.rollout import roll_out, sampler_weights, step_key
from dash_jax.timing import Clock
from dash_jax.types import TrainState


def main() -> None:
    parser = workload_parser(__doc__)
    parser.add_argument("--micro-batch", type=int, default=16, help="completions a backward pass")
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="dots")
    parser.add_argument("--shapes", type=int, default=1, help="of micro-batches")
    parser.add_argument("--constant-groups", type=float, default=0.0, help="share of groups to be filtered")
    parser.add_argument("--without", default="", help="switches of the engine to turn off, comma-separated")
    options = parser.parse_args()

    steps = run(options)
    result = summary(options, steps)
    show(result)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)


def run(options: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds by phase of `repeats + 2` steps; the first compiles, and the second what new lengths need."""
    settings = config.from_dict({
        "rollout": {
            "prompts": options.prompts, "group_size": options.group_size,
            "max_prompt_tokens": PROMPT_TOKENS, "max_new_tokens": options.new_tokens,
        },
        "algorithm": {"filter": options.constant_groups > 0},
        "learner": {"micro_batch": options.micro_batch, "shapes": options.shapes},
        "optimizer": {"learning_rate": 1e-6},
    })  # fmt: skip
    policy = random_policy(options, options.remat)
    off = [name for name in options.without.split(",") if name]
    engine = dataclasses.replace(settings.rollout.engine, **dict.fromkeys(off, False))
    state, learning = random_state(policy, settings)
    steps = []
    for step in track(
        range(options.repeats + 2), description=f"model {options.model}", console=Console(stderr=True)
    ):
        problems = random_problems(options, policy, step)
        clock = Clock()
        rollout = roll_out(
            sampler_weights(state.params, policy), policy, problems, step_key(0, "train", step),
            group_size=options.group_size, max_new_tokens=options.new_tokens, temperature=1.0, memory_gb=2.0,
            engine=engine,
        )  # fmt: skip
        clock.lap("sampling")
        rewards = (np.asarray(rollout.tokens) % 2 == 0).mean(axis=2, dtype=np.float32)
        rewards[: round(options.constant_groups * options.prompts)] = 1.0
        clock.lap("reward")
        state, _, _ = learning.step(state, rollout, rewards)
        clock.lap("learning")
        steps.append(clock.seconds() | {"tokens": float(rollout.lengths.sum())})
    return steps


def random_state(policy: Policy, settings: config.Config) -> tuple[TrainState, Learning]:
    learning = Learning(settings, policy)

    def make(key: jax.Array) -> TrainState:
        return learner.init_state(model.init(policy.model, key), learning.optimizer, keep_reference=False)

    shardings = learner.state_shardings(policy.mesh, policy.model, learning.optimizer, keep_reference=False)
    return jax.jit(make, out_shardings=shardings)(jax.random.key(0)), learning


def summary(options: argparse.Namespace, steps: list[dict[str, float]]) -> dict[str, Any]:
    timed = steps[2:]

    def middle(name: str) -> float:
        return statistics.median(step[name] for step in timed)

    return {
        "model": options.model,
        "options": vars(options),
        "sampling_tokens_per_s": middle("tokens") / middle("seconds_sampling"),
        "tokens": middle("tokens"),
        "step_seconds": middle("seconds"),
        "sampling_seconds": middle("seconds_sampling"),
        "learning_seconds": middle("seconds_learning"),
        "fastest_step_seconds": min(step["seconds"] for step in timed),
        "fastest_sampling_seconds": min(step["seconds_sampling"] for step in timed),
        "fastest_learning_seconds": min(step["seconds_learning"] for step in timed),
        "first_step_seconds": steps[0]["seconds"],
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "jax": jax.__version__,
        "devices": f"{jax.device_count()} {jax.devices()[0].device_kind}",
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def show(result: dict[str, Any]) -> None:
    dtype = result["options"]["dtype"]
    table = Table(
        title=f"one step, model {result['model']}, {dtype}, {result['devices']}, jax {result['jax']}"
    )
    for column in ("", "median", "fastest"):
        table.add_column(column, justify="left" if not column else "right")
    for phase in ("step", "sampling", "learning"):
        table.add_row(
            f"{phase}, s", f"{result[f'{phase}_seconds']:.2f}", f"{result[f'fastest_{phase}_seconds']:.2f}"
        )
    fastest = (
        result["sampling_tokens_per_s"] * result["sampling_seconds"] / result["fastest_sampling_seconds"]
    )
    table.add_row("sampling, tokens/s", f"{result['sampling_tokens_per_s']:,.0f}", f"{fastest:,.0f}")
    table.add_row("first step with compilation, s", f"{result['first_step_seconds']:.1f}", "")
    table.add_row("peak memory, MB", f"{result['peak_rss_mb']:,.0f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
