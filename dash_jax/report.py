"""What came out of a run: the learning curve as a picture, before and after as a table and as JSON."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.console import Console
from rich.table import Column, Table

from dash_jax.errors import UserError
from dash_jax.tracker import PHASES, read_lines

# Okabe and Ito's colours, which colour-blind readers tell apart.
_BLUE, _ORANGE, _GREEN = "#0072B2", "#D55E00", "#009E73"
_PURPLE, _SKY, _GREY = "#CC79A7", "#56B4E9", "#7F7F7F"
PHASE_COLORS = dict(zip(PHASES, (_SKY, _PURPLE, _ORANGE, _GREEN, _GREY), strict=True))
_ABOVE: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 4, "frameon": False}


def learning_curve(
    run_dir: str | pathlib.Path, *, before: float | None = None, after: float | None = None
) -> pathlib.Path:
    """Draws run_dir/learning_curve.png from metrics.jsonl.

    `before` and `after` are held-out accuracies, drawn as dashed lines.
    """
    lines = _metrics(run_dir)
    figure = Figure(figsize=(9, 9), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True, height_ratios=(5, 3, 3))
    figure.suptitle(pathlib.Path(run_dir).resolve().name)
    _draw_scores(axes[0], lines, before, after)
    _draw_completions(axes[1], lines)
    _draw_seconds(axes[2], lines)
    for ax in axes:
        ax.grid(alpha=0.25)
        ax.spines["top"].set_visible(False)
    axes[-1].set_xlabel("training step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    path = pathlib.Path(run_dir) / "learning_curve.png"
    figure.savefig(path, dpi=130)
    return path


def summary(
    run_dir: str | pathlib.Path, before: str | pathlib.Path, after: str | pathlib.Path
) -> dict[str, Any]:
    """Compares two evaluations of the same held-out problems; writes run_dir/summary.json and prints a table.

    `before` and `after` are files that `dash-jax eval` wrote. `accuracy_before` and `accuracy_after` are
    those of greedy decoding where both have it, else of the sampled completions; `accuracy_kind` says which.
    """
    first, last = _evaluation(before), _evaluation(after)
    if first["problems"] != last["problems"]:
        raise UserError(
            f"{before} has {first['problems']} problems, {after} has {last['problems']}; "
            "evaluate both with the same eval.problems"
        )
    kinds = [kind for kind in ("greedy", "sampled") if _accuracy(first, kind) and _accuracy(last, kind)]
    if not kinds:
        raise UserError(
            f"{before} and {after} share neither greedy nor sampled accuracy; "
            "evaluate both with the same eval.greedy and eval.samples"
        )
    lines = _metrics(run_dir)
    result = {
        "accuracy_before": first[f"accuracy_{kinds[0]}"],
        "accuracy_after": last[f"accuracy_{kinds[0]}"],
        "accuracy_kind": kinds[0],
        "train_seconds": math.fsum(line["seconds"] for line in lines),
        "train_steps": len(lines),
        "seed": last["seed"],
        "before": first,
        "after": last,
    }
    path = pathlib.Path(run_dir) / "summary.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    table = evaluation_table({"before": first, "after": last})
    minutes, seconds = divmod(round(result["train_seconds"]), 60)
    table.caption = f"{len(lines)} training steps in {minutes} min {seconds} s, seed {last['seed']}"
    Console().print(table)
    return result


def evaluation_table(evaluations: Mapping[str, Mapping[str, Any]]) -> Table:
    """Evaluations side by side, each under its name; what none of them measured is left out."""
    table = Table("", *(Column(name, justify="right") for name in evaluations), title="held-out problems")

    def row(name: str, cells: list[str | None]) -> None:
        if any(cells):
            table.add_row(name, *(cell or "-" for cell in cells))

    each = list(evaluations.values())
    row("problems", [str(one["problems"]) for one in each])
    for kind in "greedy", "sampled":
        row(f"accuracy, {kind}", [_accuracy(one, kind) for one in each])
    for k in sorted(
        {k for one in each for k in one["pass_at"] if k != "1"}, key=int
    ):  # pass@1 is the accuracy
        row(f"pass@{k}", [f"{one['pass_at'][k]:.1%}" if k in one["pass_at"] else None for one in each])
    row("mean length", [f"{one['mean_length']:.1f} tokens" for one in each])
    row("truncated", [f"{one['truncated']:.1%}" for one in each])
    return table


def _evaluation(path: str | pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such evaluation; `dash-jax eval` writes one") from None
    except ValueError as error:
        raise UserError(f"{path}: is no JSON ({error}); give a file that `dash-jax eval` wrote") from None


def _metrics(run_dir: str | pathlib.Path) -> list[dict[str, Any]]:
    path = pathlib.Path(run_dir) / "metrics.jsonl"
    lines = read_lines(path)
    if not lines:
        raise UserError(f"{path}: no training step was logged there; run `dash-jax train` first")
    return lines


def _accuracy(evaluation: Mapping[str, Any], kind: str) -> str | None:
    """An accuracy with its confidence interval, "50.0% (44.1% to 55.9%)"; None where it was not measured."""
    value, interval = evaluation[f"accuracy_{kind}"], evaluation[f"interval_{kind}"]
    if value is None:
        return None
    return f"{value:.1%}" + (f" ({interval[0]:.1%} to {interval[1]:.1%})" if interval else "")


def _column(lines: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """One metric over the steps; NaN where it is absent or null."""
    return np.array([math.nan if line.get(key) is None else line[key] for line in lines], dtype=np.float64)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred mean of the values that are there over about a fifteenth of the run.

    At the start, which may be steep, the window shrinks and stays symmetric; at the end, which is
    flat if all went well, it is cut on one side, so that the last point is a mean too.
    """
    index = np.arange(len(values))
    half = np.minimum(len(values) // 30, index)
    there = np.isfinite(values)
    total = np.cumsum([0.0, *np.where(there, values, 0.0)])
    count = np.cumsum([0.0, *there])
    begin, end = index - half, np.minimum(index + half + 1, len(values))
    with np.errstate(invalid="ignore"):  # 0 / 0 where no value is there
        return (total[end] - total[begin]) / (count[end] - count[begin])


def _draw_line(ax: Axes, lines: Sequence[Mapping[str, Any]], key: str, label: str, color: str) -> None:
    """A metric, pale as measured and strong as smoothed."""
    steps, values = _column(lines, "step"), _column(lines, key)
    ax.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    marker = "o" if len(lines) == 1 else ""
    ax.plot(steps, _smooth(values), color=color, linewidth=2, label=label, marker=marker)


def _draw_scores(
    ax: Axes, lines: Sequence[Mapping[str, Any]], before: float | None, after: float | None
) -> None:
    if np.allclose(_column(lines, "reward"), _column(lines, "accuracy"), equal_nan=True):
        _draw_line(ax, lines, "accuracy", "training accuracy (= reward)", _BLUE)
    else:
        _draw_line(ax, lines, "reward", "training reward", _ORANGE)
        _draw_line(ax, lines, "accuracy", "training accuracy", _BLUE)
    evaluations = _column(lines, "eval_accuracy")
    if np.isfinite(evaluations).any():
        ax.plot(_column(lines, "step"), evaluations, "o", color="black", label="held-out accuracy")
    for value, name, color in (before, "before", _GREY), (after, "after", _GREEN):
        if value is not None:
            ax.axhline(value, linestyle="--", color=color, label=f"held-out, {name} training: {value:.1%}")
    ax.set_ylabel("accuracy, reward")
    ax.legend(loc="best", framealpha=0.9)


def _draw_completions(ax: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    _draw_line(ax, lines, "length", "mean length (left)", _BLUE)
    ax.set_ylabel("tokens a completion")
    ax.set_ylim(bottom=0)
    shares = ax.twinx()
    _draw_line(shares, lines, "kept_share", "kept by the filter (right)", _GREEN)
    _draw_line(shares, lines, "truncated", "cut by the limit (right)", _ORANGE)
    shares.set_ylabel("share of completions")
    shares.set_ylim(-0.02, 1.02)
    shares.yaxis.set_major_formatter(PercentFormatter(1.0))
    shares.spines["top"].set_visible(False)
    handles = [*ax.get_lines()[1::2], *shares.get_lines()[1::2]]
    ax.legend(handles=handles, **_ABOVE)


def _draw_seconds(ax: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    steps = _column(lines, "step")
    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    bottom = np.zeros(len(steps))
    for phase, color in PHASE_COLORS.items():
        top = bottom + np.nan_to_num(_column(lines, f"seconds_{phase}"))
        ax.stairs(top, edges, baseline=bottom, fill=True, color=color, alpha=0.85, label=phase)
        bottom = top
    ax.set_ylabel("seconds a step")
    # The first steps compile; they shall not flatten the others.
    usual = float(np.percentile(bottom, 90))
    ax.set_ylim(0, 1.05 * np.max(bottom) or 1)
    if np.max(bottom) > 3 * usual > 0:
        ax.set_ylim(0, 1.5 * usual)
        note = f"longest step, with compilation: {np.max(bottom):.1f} s"
        ax.text(0.99, 0.94, note, transform=ax.transAxes, ha="right", va="top")
    ax.legend(**_ABOVE)
