"""DASH: sample one big batch, drop what carries no gradient, learn from the rest in one step.

The loop reads as the algorithm does. GRPO is the same loop with other settings: a rollout
as small as the optimizer batch, and no filter.
"""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

import numpy as np

from dash_jax.checkpoint import Checkpoints, check_same_run, write_config
from dash_jax.config import Config
from dash_jax.errors import RunError
from dash_jax.evaluate import evaluate, held_out
from dash_jax.grading import Graders
from dash_jax.learning import Learning
from dash_jax.model import ModelConfig, matrix_weights
from dash_jax.policy import Policy, describe
from dash_jax.problems import Finish, Problem
from dash_jax.rewards import Scores
from dash_jax.rollout import chunk_prompts, padded_width, roll_out, sampler_weights, step_key
from dash_jax.tasks import Task, load_task
from dash_jax.tasks.order import batch_of
from dash_jax.timing import Clock
from dash_jax.tokenization import encode_problems
from dash_jax.tracker import Tracker
from dash_jax.types import Rollout, TrainState


def train(config: Config) -> None:
    """Trains in `config.run`, from its newest checkpoint if there is one."""
    task = load_task(config.task, config.seed)
    policy = describe(config)
    problems = training_problems(config, task, policy)
    tests = held_out(config, task, policy) if config.train.eval_every else []
    check_same_run(config.run, config, "train")

    run = pathlib.Path(config.run)
    checkpoints = Checkpoints(run / "checkpoints", keep=config.train.keep_checkpoints)
    learning = Learning(config, policy)
    state, first = learning.start(checkpoints)
    write_config(run, config)
    with (
        Graders(task, workers=config.reward.workers, seconds=config.reward.seconds) as graders,
        Tracker(run, total_steps=config.train.steps, first_step=first, title="train") as tracker,
    ):
        clock = Clock()
        for step in range(first, config.train.steps):
            state, done = take_step(state, step, problems, learning, policy, graders, config, clock)
            line = _metrics(done, policy.model)
            clock.lap("other")
            if tests and (step + 1) % config.train.eval_every == 0:
                weights = sampler_weights(state.params, policy)
                line["eval_accuracy"] = evaluate(weights, policy, graders, tests, config).accuracy
                del weights
                clock.lap("evaluation")
            seconds = clock.seconds()
            line["tokens_per_second"] = float(done.rollout.lengths.sum()) / seconds["seconds_sampling"]
            tracker.log(step, line | seconds)
            tracker.samples(step, _records(done)[: config.train.log_samples])
            # After the log, so that no step behind a checkpoint lacks its line. Its seconds are the next
            # step's.
            if (step + 1) % config.train.save_every == 0 or step + 1 == config.train.steps:
                checkpoints.save(step + 1, state, {"step": step + 1})
            clock.lap("other")
    checkpoints.close()


def training_problems(config: Config, task: Task, policy: Policy) -> list[Problem]:
    """The encoded problems. Refuses now, not in the first step, what a step would refuse."""
    limit = config.rollout.max_prompt_tokens
    problems, _ = encode_problems(task.train(), policy.tokenizer, chat=task.chat, max_prompt_tokens=limit)
    batch_of(0, config.rollout.prompts, len(problems), config.seed)
    sizes = (config.rollout.group_size, config.rollout.max_new_tokens, config.rollout.memory_gb)
    chunk_prompts(policy.model, padded_width(limit), *sizes)
    return problems


class Step(NamedTuple):
    """What a step has sampled, [N, G] each, and what it has learned from that."""

    rollout: Rollout
    scores: Scores
    rewards: np.ndarray
    advantages: np.ndarray
    learned: dict[str, float]


def take_step(
    state: TrainState,
    step: int,
    problems: list[Problem],
    learning: Learning,
    policy: Policy,
    graders: Graders,
    config: Config,
    clock: Clock,
) -> tuple[TrainState, Step]:
    """One step of DASH; `state` is donated."""
    with clock.phase("sampling"):
        batch = [problems[i] for i in batch_of(step, config.rollout.prompts, len(problems), config.seed)]
        weights = sampler_weights(state.params, policy)
        rollout = roll_out(
            weights, policy, batch, step_key(config.seed, "train", step),
            group_size=config.rollout.group_size, max_new_tokens=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature, memory_gb=config.rollout.memory_gb,
            max_rows=config.rollout.max_rows, engine=config.rollout.engine, on_ended=graders.submit,
        )  # fmt: skip
        del weights  # they may be the buffers that the update donates

    with clock.phase("reward"):
        scores = graders.collect()  # most of it was graded while the others were sampled
        rewards = np.array([grade.reward for grade in scores.grades], np.float32)
        rewards = rewards.reshape(rollout.lengths.shape)

    with clock.phase("learning"):
        state, advantages, learned = learning.step(state, rollout, rewards)
        if not np.isfinite(learned["gradient_norm"]):
            raise RunError(f"step {step}: the gradient is not finite; resume with a lower learning rate")
    return state, Step(rollout, scores, rewards, advantages, learned)


def _metrics(done: Step, described: ModelConfig) -> dict[str, float]:
    """Means over the completions; those without a reward stay out of `reward`."""
    rollout, scores = done.rollout, done.scores
    return {
        "reward": float(np.nanmean(done.rewards)),
        "accuracy": float(np.mean([grade.correct for grade in scores.grades])),
        "length": float(np.mean(rollout.lengths)),
        "truncated": float(np.mean(np.asarray(rollout.finish) == Finish.LENGTH)),
        **done.learned,
        "ungraded": sum(scores.failures.values()),
        "grading_busy_seconds": scores.busy_seconds,
        "flops": _flops(described, rollout, done.learned["computed_tokens"]),
    }


def _flops(described: ModelConfig, rollout: Rollout, computed_tokens: float) -> float:
    """Of the matrix products with weights: 2 a weight and token forward, 6 forward and backward.

    Padding of the learner counts, recomputation, attention and the sampler's idle rows do not.
    """
    sampled = float(rollout.lengths.sum() + rollout.prompt_lengths.sum())
    return matrix_weights(described) * (2 * sampled + 6 * computed_tokens)


def _records(done: Step) -> list[dict[str, Any]]:
    """What samples.jsonl shows of each completion."""
    return [
        {
            "problem": problem.id, "prompt": problem.prompt, "text": text, "answer": problem.answer,
            "extracted": grade.extracted, "reward": grade.reward, "advantage": advantage,
            "finish": finish.name.lower(), "tokens": tokens,
        }
        for (problem, text, finish), grade, advantage, tokens in zip(
            done.scores.completions, done.scores.grades, done.advantages.reshape(-1).tolist(),
            done.rollout.lengths.reshape(-1).tolist(), strict=True,
        )
    ]  # fmt: skip
