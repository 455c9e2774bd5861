"""Accuracy on held-out problems: greedy and sampled, pass@k, confidence interval, every completion."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dash_jax import metrics
from dash_jax.config import Config
from dash_jax.grading import Graders
from dash_jax.policy import Policy
from dash_jax.problems import Completion, Problem
from dash_jax.rollout import roll_out, step_key
from dash_jax.sampling import Rule
from dash_jax.tasks import Task
from dash_jax.tokenization import encode_problems


class Evaluation(NamedTuple):
    """`summary` is what `dash-jax eval` writes as JSON; `completions` is one record a completion."""

    summary: dict[str, Any]
    completions: list[dict[str, Any]]

    @property
    def accuracy(self) -> float:
        """The greedy accuracy where there is one, else the sampled one."""
        greedy = self.summary["accuracy_greedy"]
        return self.summary["accuracy_sampled"] if greedy is None else greedy


def held_out(config: Config, task: Task, policy: Policy) -> list[Problem]:
    problems = task.test()[: config.eval.problems]
    limit = config.rollout.max_prompt_tokens
    return encode_problems(problems, policy.tokenizer, chat=task.chat, max_prompt_tokens=limit)[0]


def evaluate(
    weights: dict[str, Any],
    policy: Policy,
    graders: Graders,
    problems: Sequence[Problem],
    config: Config,
    on_completions: Callable[[int], None] = lambda completions: None,
) -> Evaluation:
    """Completes and grades every problem, once greedily and `eval.samples` times by sampling.

    `weights` are the sampler's (`rollout.sampler_weights`). The same seed draws the same completions,
    so two checkpoints are compared on equal terms. `on_completions` is told how many have been sampled.
    """
    settings = config.eval
    kinds = [("greedy", 1, Rule(greedy=True))] if settings.greedy else []
    if settings.samples:
        kinds.append(("sampled", settings.samples, Rule(top_k=settings.top_k, top_p=settings.top_p)))

    summary: dict[str, Any] = {"problems": len(problems), "samples": settings.samples, "seed": config.seed}
    completions: list[dict[str, Any]] = []
    summary |= {f"{name}_{kind}": None for kind in ("greedy", "sampled") for name in ("accuracy", "interval")}
    summary["pass_at"] = {}
    for kind, count, rule in kinds:
        sampled = len(completions)

        def on_ended(indices: Sequence[int], ended: Sequence[Completion]) -> None:
            nonlocal sampled
            graders.submit(indices, ended)
            sampled += len(ended)
            on_completions(sampled)

        rollout = roll_out(
            weights, policy, problems, step_key(config.seed, "eval", 0),
            group_size=count, max_new_tokens=config.rollout.max_new_tokens, temperature=settings.temperature,
            memory_gb=config.rollout.memory_gb, engine=config.rollout.engine, rule=rule, on_ended=on_ended,
        )  # fmt: skip
        scores = graders.collect()
        correct = np.array([grade.correct for grade in scores.grades]).reshape(len(problems), count)
        summary[f"accuracy_{kind}"] = float(correct.mean())
        solved = correct.mean(axis=1).tolist()
        summary[f"interval_{kind}"] = metrics.confidence_interval(solved, seed=config.seed)
        if kind == "sampled":
            counts = [(count, int(row.sum())) for row in correct]
            passes = {str(k): metrics.mean_pass_at_k(counts, k) for k in settings.pass_at}
            summary["pass_at"] = {k: value for k, value in passes.items() if value is not None}
        for (problem, text, finish), grade, length in zip(
            scores.completions, scores.grades, rollout.lengths.reshape(-1).tolist(), strict=True
        ):
            completions.append({
                "id": problem.id, "source": problem.source, "kind": kind, "prompt": problem.prompt,
                "completion": text, "answer": problem.answer, "extracted": grade.extracted,
                "correct": grade.correct, "reward": grade.reward, "finish": finish.name.lower(),
                "tokens": length,
            })  # fmt: skip
    summary["mean_length"] = float(np.mean([row["tokens"] for row in completions]))
    summary["truncated"] = float(np.mean([row["finish"] == "length" for row in completions]))
    return Evaluation(summary, completions)


def write(evaluation: Evaluation, folder: pathlib.Path, name: str) -> pathlib.Path:
    """`<name>.json` with the summary and `<name>.jsonl` with every completion and its verdict."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(_finite(row), ensure_ascii=False) + "\n" for row in evaluation.completions)
    (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    path = folder / f"{name}.json"
    path.write_text(json.dumps(evaluation.summary, indent=2) + "\n", encoding="utf-8")
    return path


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """A completion that could not be graded has reward NaN, which JSON has not."""
    return row | ({"reward": None} if row["reward"] != row["reward"] else {})
