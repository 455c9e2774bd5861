"""The command line: `dash-jax <verb> CONFIG.yaml [section.key=value ...]`.

Exit code 0 when done, 1 for a run that failed, 2 for a bad config or input; both come with one
line that says what and the mend.
"""

from __future__ import annotations

import argparse
import logging
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import Progress, TimeElapsedColumn

from dash_jax import config as configuration
from dash_jax.errors import RunError, UserError

_EPILOG = """\
examples:
  dash-jax sft configs/quickstart.yaml                      warm start on worked solutions
  dash-jax train configs/quickstart.yaml optimizer.learning_rate=1e-4
  dash-jax eval configs/quickstart.yaml eval.samples=8      newest checkpoint of the run
  dash-jax export configs/quickstart.yaml --out my-model    a folder for transformers
  dash-jax config configs/quickstart.yaml                   every setting, with its meaning

A run that was stopped goes on where it was: give the same command again.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    # Settings may stand behind an option too, where argparse leaves them over.
    parser = _parser()
    options, left = parser.parse_known_args(arguments)
    settings = [
        one for one in left if "=" in one and not one.startswith("-") and hasattr(options, "overrides")
    ]
    if len(settings) < len(left):
        parser.error(f"unrecognized arguments: {' '.join(one for one in left if one not in settings)}")
    if settings:
        options.overrides = [*options.overrides, *settings]
    console = Console(stderr=True)
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    # A broken pipe or a missing accelerator is not a reason to print pages: errors of ours are one line.
    try:
        options.run(options)
    except UserError as error:
        print(f"dash-jax: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"dash-jax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dash-jax: stopped; the same command goes on from the newest checkpoint", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dash-jax",
        description="Reinforcement learning with verifiable rewards for language models: DASH, and GRPO.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    def verb(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        return sub

    def with_config(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        sub = verb(name, run, help)
        sub.add_argument("config", help="YAML file; see configs/")
        sub.add_argument(
            "overrides", nargs="*", metavar="section.key=value", help="settings that differ from the file"
        )
        return sub

    with_config(
        "train", _train, "train with DASH (or GRPO, by config) in the run directory; resumes by itself"
    )
    with_config("sft", _sft, "warm start on the task's worked solutions; writes RUN/sft/model for model.path")
    sub = with_config("eval", _eval, "accuracy on held-out problems, with every completion and its verdict")
    sub.add_argument(
        "--start", action="store_true", help="evaluate model.path, not the newest checkpoint of the run"
    )
    sub.add_argument(
        "--name", default="eval", help="write RUN/NAME.json and RUN/NAME.jsonl (default: %(default)s)"
    )
    sub = with_config("export", _export, "write the newest checkpoint as a Hugging Face folder")
    sub.add_argument("--out", required=True, metavar="DIR", help="folder to make")
    sub.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of the weights (default: as model.path has them)",
    )
    sub = with_config(
        "bench", _bench, "train DASH and GRPO from the same start, one after another, and compare"
    )
    sub.add_argument("--arms", metavar="A,B", help="some of grpo_paper,grpo_matched,dash_nofilter,dash")
    sub.add_argument("--seeds", default="0", metavar="0,1,2", help="(default: %(default)s)")
    sub.add_argument(
        "--target", type=float, default=0.8, help="held-out accuracy to reach (default: %(default)s)"
    )
    sub.add_argument(
        "--small-prompts",
        type=int,
        default=2,
        metavar="N",
        help="prompts an update of grpo_paper (default: 2)",
    )
    sub.add_argument(
        "--small-learning-rate",
        type=float,
        metavar="RATE",
        help="of grpo_paper (default: a third of optimizer.learning_rate, as in the paper)",
    )
    with_config(
        "profile", _profile, "trace one training step for TensorBoard or XProf; print its largest costs"
    )
    with_config("config", _config, "print the resolved config with the meaning of every key")
    sub = verb(
        "report", _report, "draw a run's learning curve; with two evaluations, print and write their summary"
    )
    sub.add_argument("directory", metavar="RUN", help="run directory, with metrics.jsonl")
    sub.add_argument("--before", metavar="JSON", help="evaluation before training")
    sub.add_argument("--after", metavar="JSON", help="evaluation after training")
    return parser


# The verbs import what they need themselves: `--help` and refusals of a config come without JAX's start-up.


def _train(options: argparse.Namespace) -> None:
    config = configuration.load(options.config, options.overrides)
    from dash_jax.trainer import train

    train(config)
    print(f"done: {config.run} (next: dash-jax eval {options.config}, dash-jax report {config.run})")


def _sft(options: argparse.Namespace) -> None:
    config = configuration.load(options.config, options.overrides)
    from dash_jax.sft import sft

    folder = sft(config)
    print(f"done: {folder} (next: dash-jax train {options.config} model.path={folder})")


def _eval(options: argparse.Namespace) -> None:
    config = configuration.load(options.config, options.overrides)
    if pathlib.Path(options.name).name != options.name:
        raise UserError(f"--name {options.name}: give the name of a file in the run directory, without /")
    from dash_jax import evaluate
    from dash_jax.grading import Graders
    from dash_jax.policy import describe
    from dash_jax.report import evaluation_table
    from dash_jax.rollout import sampler_weights
    from dash_jax.tasks import load_task

    task = load_task(config.task, config.seed)
    policy = describe(config)
    problems = evaluate.held_out(config, task, policy)
    params, origin = _weights(config, policy, start=options.start)
    console = Console(stderr=True)
    total = len(problems) * (config.eval.samples + config.eval.greedy)
    with (
        Graders(task, workers=config.reward.workers, seconds=config.reward.seconds) as graders,
        Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress,
    ):
        bar = progress.add_task(f"eval {origin}", total=total)
        result = evaluate.evaluate(
            sampler_weights(params, policy), policy, graders, problems, config,
            on_completions=lambda done: progress.update(bar, completed=done),
        )  # fmt: skip
    result.summary["model"] = origin
    path = evaluate.write(result, pathlib.Path(config.run), options.name)
    Console().print(evaluation_table({origin: result.summary}))
    print(f"completions and verdicts: {path.with_suffix('.jsonl')}")


def _export(options: argparse.Namespace) -> None:
    config = configuration.load(options.config, options.overrides)
    from dash_jax import weights
    from dash_jax.policy import describe

    policy = describe(config)
    params, origin = _weights(config, policy, needed=True)
    weights.save(
        options.out,
        params,
        policy.model,
        source=config.model.path,
        tokenizer=policy.tokenizer,
        dtype=options.dtype,
    )
    print(f"done: {options.out} holds {origin}")


def _bench(options: argparse.Namespace) -> None:
    config = configuration.load(options.config, options.overrides)
    from dash_jax.bench import bench

    if options.small_prompts < 1:
        raise UserError(f"--small-prompts {options.small_prompts}: give 1 or more")
    if options.small_learning_rate is not None and options.small_learning_rate <= 0:
        raise UserError(f"--small-learning-rate {options.small_learning_rate}: give a number above 0")
    if not re.fullmatch(r"\d+(,\d+)*", options.seeds):
        raise UserError(f"--seeds {options.seeds}: give whole numbers with commas, like 0,1,2")
    page = bench(
        config,
        names=options.arms.split(",") if options.arms else None,
        seeds=[int(seed) for seed in options.seeds.split(",")],
        target=options.target,
        small_prompts=options.small_prompts,
        small_learning_rate=options.small_learning_rate,
    )
    print(f"done: {page}, {page.with_suffix('.json')}")


def _profile(options: argparse.Namespace) -> None:
    config = configuration.load(options.config, options.overrides)
    from dash_jax.profile import profile, table

    console = Console(stderr=True)
    with console.status("three steps, of which the first compiles and the last is traced"):
        result = profile(config)
    Console().print(table(result))
    print(f"trace: {result.folder} (tensorboard --logdir {result.folder}, with tensorboard-plugin-profile)")


def _config(options: argparse.Namespace) -> None:
    print(configuration.to_yaml(configuration.load(options.config, options.overrides)), end="")


def _report(options: argparse.Namespace) -> None:
    if (options.before is None) != (options.after is None):
        raise UserError("report: give --before and --after together, or neither")
    from dash_jax import report

    run = pathlib.Path(options.directory)
    accuracies: dict[str, float] = {}
    if options.before is not None:
        summary = report.summary(run, pathlib.Path(options.before), pathlib.Path(options.after))
        accuracies = {name: summary[f"accuracy_{name}"] for name in ("before", "after")}
    print(f"learning curve: {report.learning_curve(run, **accuracies)}")


def _weights(
    config: configuration.Config, policy: Any, *, start: bool = False, needed: bool = False
) -> tuple[dict[str, Any], str]:
    """The newest checkpoint of the run, or the starting weights where there is none; and what they are."""
    import jax

    from dash_jax import model
    from dash_jax.checkpoint import Checkpoints
    from dash_jax.policy import starting_weights

    checkpoints = Checkpoints(pathlib.Path(config.run) / "checkpoints", keep=config.train.keep_checkpoints)
    newest = None if start else checkpoints.latest()
    if newest is None and needed:
        raise UserError(f"run={config.run}: there is no checkpoint in it; train first, or name another run")
    if newest is None:
        return starting_weights(config, policy), config.model.path or "random weights"
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        model.weight_axes(policy.model)[0],
        model.weight_shardings(policy.model, policy.mesh),
    )
    return checkpoints.restore_params(newest, like), f"{config.run} step {newest}"
