"""DASH: sample one big batch, drop what carries no gradient, learn from the rest in one step.

The loop reads as the algorithm does. GRPO is the same loop with other settings: a rollout
as small as the optimizer batch, and no filter.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from dash_jax.checkpoint import Checkpoints, check_same_run, write_config
from dash_jax.config import Config
from dash_jax.errors import RunError
from dash_jax.evaluate import evaluate, held_out
from dash_jax.grading import Graders
from dash_jax.learning import Learning
from dash_jax.model import ModelConfig, matrix_weights
from dash_jax.policy import describe
from dash_jax.problems import Finish, Grade
from dash_jax.rewards import Scores
from dash_jax.rollout import chunk_prompts, padded_width, roll_out, sampler_weights, step_key
from dash_jax.tasks import load_task
from dash_jax.tasks.order import batch_of
from dash_jax.timing import Clock
from dash_jax.tokenization import encode_problems
from dash_jax.tracker import Tracker
from dash_jax.types import Rollout


def train(config: Config) -> None:
    """Trains in `config.run`, from its newest checkpoint if there is one."""
    task = load_task(config.task, config.seed)
    policy = describe(config)
    limit = config.rollout.max_prompt_tokens
    problems, _ = encode_problems(task.train(), policy.tokenizer, chat=task.chat, max_prompt_tokens=limit)
    # Refuse now, not in the first step, what a step would refuse.
    batch_of(0, config.rollout.prompts, len(problems), config.seed)
    sizes = (config.rollout.group_size, config.rollout.max_new_tokens, config.rollout.memory_gb)
    chunk_prompts(policy.model, padded_width(limit), *sizes)
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
            batch = [problems[i] for i in batch_of(step, config.rollout.prompts, len(problems), config.seed)]
            weights = sampler_weights(state.params, policy)
            rollout = roll_out(
                weights, policy, batch, step_key(config.seed, "train", step),
                group_size=config.rollout.group_size, max_new_tokens=config.rollout.max_new_tokens,
                temperature=config.rollout.temperature, memory_gb=config.rollout.memory_gb,
                max_rows=config.rollout.max_rows, engine=config.rollout.engine,
                on_ended=graders.submit,
            )  # fmt: skip
            del weights  # they may be the buffers that the update donates
            clock.lap("sampling")

            scores = graders.collect()  # most of it was graded while the others were sampled
            rewards = np.array([grade.reward for grade in scores.grades], np.float32)
            rewards = rewards.reshape(rollout.lengths.shape)
            clock.lap("reward")

            state, advantages, learned = learning.step(state, rollout, rewards)
            if not np.isfinite(learned["gradient_norm"]):
                raise RunError(f"step {step}: the gradient is not finite; resume with a lower learning rate")
            clock.lap("learning")

            line = _rollout_metrics(rollout, rewards, scores.grades) | learned
            line["ungraded"] = sum(scores.failures.values())
            line["grading_busy_seconds"] = scores.busy_seconds
            line["flops"] = _flops(policy.model, rollout, learned["computed_tokens"])
            clock.lap("other")
            if tests and (step + 1) % config.train.eval_every == 0:
                weights = sampler_weights(state.params, policy)
                line["eval_accuracy"] = evaluate(weights, policy, graders, tests, config).accuracy
                del weights
                clock.lap("evaluation")
            seconds = clock.seconds()
            line["tokens_per_second"] = float(rollout.lengths.sum()) / seconds["seconds_sampling"]
            tracker.log(step, line | seconds)
            records = _records(scores, rollout, advantages)
            tracker.samples(step, records[: config.train.log_samples])
            # After the log, so that no step behind a checkpoint lacks its line. Its seconds are the next
            # step's.
            if (step + 1) % config.train.save_every == 0 or step + 1 == config.train.steps:
                checkpoints.save(step + 1, state, {"step": step + 1})
            clock.lap("other")
    checkpoints.close()


def _rollout_metrics(rollout: Rollout, rewards: np.ndarray, grades: list[Grade]) -> dict[str, float]:
    """Means over the completions; those without a reward stay out of `reward`."""
    return {
        "reward": float(np.nanmean(rewards)),
        "accuracy": float(np.mean([grade.correct for grade in grades])),
        "length": float(np.mean(rollout.lengths)),
        "truncated": float(np.mean(np.asarray(rollout.finish) == Finish.LENGTH)),
    }


def _flops(described: ModelConfig, rollout: Rollout, computed_tokens: float) -> float:
    """Of the matrix products with weights: 2 a weight and token forward, 6 forward and backward.

    Padding of the learner counts, recomputation, attention and the sampler's idle rows do not.
    """
    sampled = float(rollout.lengths.sum() + rollout.prompt_lengths.sum())
    return matrix_weights(described) * (2 * sampled + 6 * computed_tokens)


def _records(scores: Scores, rollout: Rollout, advantages: np.ndarray) -> list[dict[str, Any]]:
    """What samples.jsonl shows of each completion."""
    return [
        {
            "problem": problem.id, "prompt": problem.prompt, "text": text, "answer": problem.answer,
            "extracted": grade.extracted, "reward": grade.reward, "advantage": advantage,
            "finish": finish.name.lower(), "tokens": tokens,
        }
        for (problem, text, finish), grade, advantage, tokens in zip(
            scores.completions, scores.grades, advantages.reshape(-1).tolist(),
            rollout.lengths.reshape(-1).tolist(), strict=True,
        )
    ]  # fmt: skip
