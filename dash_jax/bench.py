"""DASH against GRPO: the same model from the same start on the same problems, several ways, timed.

Every arm is a `dash-jax train` of its own process, so that its memory and its compilation are its own. An
arm differs from the config in what `arms` says and in nothing else. Held-out accuracy is measured at the same
numbers of sampled completions, and its seconds do not count.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import scipy.stats
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from dash_jax.config import Config, to_yaml
from dash_jax.errors import RunError, UserError
from dash_jax.report import PHASE_COLORS
from dash_jax.tracker import PHASES, read_lines

_COUNTED = tuple(phase for phase in PHASES if phase != "evaluation")


def arms(
    config: Config, *, small_prompts: int, small_learning_rate: float | None = None
) -> dict[str, Config]:
    """The config, and what it is compared with.

    `grpo_paper` is the baseline of the DASH paper as its scripts run it: one update for each small sampling
    batch, no filter, a third of DASH's learning rate unless another is given. `grpo_matched` has DASH's
    optimizer batch, updates and learning rate, and samples a micro-batch at a time, without filter.
    `dash_nofilter` samples in one batch.
    """
    rollout, train = config.rollout, config.train
    if rollout.prompts % small_prompts:
        raise UserError(
            f"--small-prompts {small_prompts} does not divide rollout.prompts={rollout.prompts}; "
            "take a divisor"
        )
    if not train.eval_every or train.steps % train.eval_every:
        raise UserError(
            f"bench: train.eval_every={train.eval_every} must divide train.steps={train.steps}; "
            "the time to an accuracy is read off there"
        )
    split = rollout.prompts // small_prompts

    def changed(section: Any, **values: Any) -> Any:
        return dataclasses.replace(section, **values)

    def unfiltered(**sections: Any) -> Config:
        return changed(config, algorithm=changed(config.algorithm, filter=False), **sections)

    once = changed(train, save_every=train.steps)
    micro_batch = max(config.learner.micro_batch, rollout.group_size)
    return {
        "grpo_paper": unfiltered(
            rollout=changed(rollout, prompts=small_prompts),
            learner=changed(
                config.learner,
                optimizer_batch=None,
                micro_batch=min(micro_batch, small_prompts * rollout.group_size),
            ),
            optimizer=changed(
                config.optimizer,
                learning_rate=small_learning_rate or config.optimizer.learning_rate / 3,
            ),
            train=changed(
                train,
                steps=train.steps * split,
                eval_every=train.eval_every * split,
                save_every=train.steps * split,
            ),
        ),
        "grpo_matched": unfiltered(
            rollout=changed(rollout, max_rows=micro_batch, engine=changed(rollout.engine, refill=False)),
            train=once,
        ),
        "dash_nofilter": unfiltered(train=once),
        "dash": changed(config, train=once),
    }


def bench(
    config: Config,
    *,
    names: Sequence[str] | None,
    seeds: Sequence[int],
    target: float,
    small_prompts: int,
    small_learning_rate: float | None = None,
) -> pathlib.Path:
    """Runs the arms one after another; writes bench.json and bench.html into `config.run`, prints a table.

    What is finished already is not run again.
    """
    every = arms(config, small_prompts=small_prompts, small_learning_rate=small_learning_rate)
    unknown = [name for name in names or () if name not in every]
    if unknown:
        raise UserError(f"--arms: there is no {unknown[0]!r}; take of {', '.join(every)}")
    chosen = {name: every[name] for name in names or every}
    folder = pathlib.Path(config.run)
    console = Console(stderr=True)
    results = []
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        for seed in seeds:
            for name, arm in chosen.items():
                run = folder / f"{name}-{seed}"
                bar = progress.add_task(f"{name}, seed {seed}", total=arm.train.steps)

                def on_step(done: int, bar: Any = bar) -> None:
                    progress.update(bar, completed=done)

                rss = _train(dataclasses.replace(arm, run=str(run), seed=seed), run, on_step)
                results.append(
                    {"arm": name, "seed": seed, **measured(read_lines(run / "metrics.jsonl"), target, rss)}
                )
    document = {"config": config.run, "target": target, "seeds": list(seeds), "runs": results}
    (folder / "bench.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    page = folder / "bench.html"
    page.write_text(_page(document), encoding="utf-8")
    Console().print(table(document))
    return page


def measured(lines: Sequence[dict[str, Any]], target: float, peak_rss_mb: float) -> dict[str, Any]:
    """What one run took. Compilation is what the first step takes beyond the median step, told apart."""
    step_seconds = [_training_seconds(line) for line in lines]
    compile_seconds = max(step_seconds[0] - statistics.median(step_seconds), 0.0)
    curve, passed = [], -compile_seconds
    for line, seconds in zip(lines, step_seconds, strict=True):
        passed += seconds
        if "eval_accuracy" in line:
            curve.append((passed, float(line["eval_accuracy"])))
    phases = {phase: math.fsum(line.get(f"seconds_{phase}", 0.0) for line in lines) for phase in _COUNTED}
    return {
        "seconds_to_target": next((seconds for seconds, accuracy in curve if accuracy >= target), None),
        "seconds_total": passed,
        "seconds_compile": compile_seconds,
        "seconds_by_phase": phases,
        "kept_share": statistics.fmean(line["kept_share"] for line in lines),
        "padding_share": statistics.fmean(line["padding_share"] for line in lines),
        "flops": math.fsum(line["flops"] for line in lines),
        "updates": len(lines),
        "final_accuracy": curve[-1][1],
        "peak_rss_mb": peak_rss_mb,
        "curve": curve,
    }


def table(document: dict[str, Any]) -> Table:
    """Means over the seeds, an interval over them, and ratios to `dash`."""
    runs = document["runs"]
    names = list(dict.fromkeys(run["arm"] for run in runs))
    result = Table(title=f"seconds without compilation and evaluation; target {document['target']:.0%}")
    columns = (
        "arm",
        "to target",
        "× dash",
        "total",
        "sampling",
        "learning",
        "kept",
        "PFLOP",
        "final accuracy",
        "peak MB",
    )
    for column in columns:
        result.add_column(column, justify="left" if column == "arm" else "right")

    def reaching(name: str) -> list[float]:
        times = (run["seconds_to_target"] for run in runs if run["arm"] == name)
        return [seconds for seconds in times if seconds is not None]

    for name in names:
        mine = [run for run in runs if run["arm"] == name]

        def mean(read: Callable[[dict[str, Any]], float], mine: list[dict[str, Any]] = mine) -> float:
            return statistics.fmean(read(run) for run in mine)

        reached, of_dash = reaching(name), reaching("dash")
        to_target = f"{statistics.fmean(reached):.0f}" if reached else "never"
        if 0 < len(reached) < len(mine):
            to_target += f" ({len(reached)} of {len(mine)})"
        both = reached and of_dash
        result.add_row(
            name,
            to_target,
            f"{statistics.fmean(reached) / statistics.fmean(of_dash):.1f}" if both else "",
            f"{mean(lambda run: run['seconds_total']):.0f}",
            f"{mean(lambda run: run['seconds_by_phase']['sampling']):.0f}",
            f"{mean(lambda run: run['seconds_by_phase']['learning']):.0f}",
            f"{mean(lambda run: run['kept_share']):.0%}",
            f"{mean(lambda run: run['flops']) / 1e15:.3f}",
            _interval([run["final_accuracy"] for run in mine]),
            f"{mean(lambda run: run['peak_rss_mb']):.0f}",
        )
    return result


def _interval(values: Sequence[float]) -> str:
    """Mean ± the half-width of Student's 95 % interval."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.1%}"
    quantile = scipy.stats.t.ppf(0.975, len(values) - 1)
    return f"{mean:.1%} ± {100 * quantile * statistics.stdev(values) / math.sqrt(len(values)):.1f}"


def _training_seconds(line: dict[str, Any]) -> float:
    return math.fsum(line.get(f"seconds_{phase}", 0.0) for phase in _COUNTED)


def _train(config: Config, run: pathlib.Path, on_step: Callable[[int], None]) -> float:
    """Trains in a process of its own, or finds it done; its peak memory in MB."""
    done = run / "peak_rss_mb"
    if done.exists():
        on_step(config.train.steps)
        return float(done.read_text())
    run.parent.mkdir(parents=True, exist_ok=True)
    settings = run.parent / f"{run.name}.yaml"
    settings.write_text(to_yaml(config), encoding="utf-8")
    log = run.parent / f"{run.name}.log"
    command = [sys.executable, "-m", "dash_jax", "train", str(settings)]
    with (
        log.open("w", encoding="utf-8") as output,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        assert process.stdout is not None
        steps, last = 0, ""
        for line in process.stdout:
            output.write(line)
            last = line.strip() or last
            if line.startswith("step "):
                steps += 1
                on_step(steps)
        _, status, usage = os.wait4(process.pid, 0)  # for the memory, which Popen does not tell
    if status:
        raise RunError(f"{run.name} failed, see {log}: {last}")
    peak = usage.ru_maxrss / 1024
    done.write_text(f"{peak:.0f}\n")
    return peak


def _page(document: dict[str, Any]) -> str:
    """One self-contained file."""
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(table(document))
    text = html.escape(console.export_text())
    pictures = "".join(
        f'<img alt="{name}" src="data:image/svg+xml;base64,{base64.b64encode(picture).decode()}">'
        for name, picture in (
            ("accuracy against time", _accuracy_picture(document)),
            ("seconds by phase", _phase_picture(document)),
        )
    )  # fmt: skip
    return (
        "<!doctype html><meta charset='utf-8'><title>DASH against GRPO</title>"
        "<style>body{font-family:sans-serif;max-width:1000px;margin:2em auto}img{width:100%}</style>"
        f"<h1>DASH against GRPO</h1><pre>{text}</pre>{pictures}"
    )


def _accuracy_picture(document: dict[str, Any]) -> bytes:
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(run["arm"] for run in document["runs"]))
    for run in document["runs"]:
        label = run["arm"] if run["seed"] == document["seeds"][0] else None
        seconds, accuracies = zip(*run["curve"], strict=True)
        axes.plot(seconds, accuracies, ".-", color=f"C{names.index(run['arm'])}", label=label, alpha=0.8)
    axes.axhline(document["target"], color="black", linestyle=":", label="target")
    axes.set_xscale("log")
    axes.set_xlabel("seconds of training, without compilation and evaluation")
    axes.set_ylabel("held-out accuracy")
    axes.grid(alpha=0.25)
    axes.legend()
    return _svg(figure)


def _phase_picture(document: dict[str, Any]) -> bytes:
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(run["arm"] for run in document["runs"]))
    left = [0.0] * len(names)
    for phase in _COUNTED:
        seconds = [
            statistics.fmean(run["seconds_by_phase"][phase] for run in document["runs"] if run["arm"] == name)
            for name in names
        ]
        axes.barh(names, seconds, left=left, label=phase, color=PHASE_COLORS[phase])
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds for the same number of samples, compilation included")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return _svg(figure)


def _svg(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="svg")
    return file.getvalue()
