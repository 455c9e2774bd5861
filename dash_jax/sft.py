"""Supervised warm start: the learner of `learner.py` on worked solutions instead of samples.

A solution is a completion with advantage 1, so the policy-gradient loss is its negative
log-likelihood, averaged over the completion tokens of the whole optimizer batch.
"""

from __future__ import annotations

import logging
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np

from dash_jax import learner, weights
from dash_jax.batching import pack, padding_report
from dash_jax.checkpoint import Checkpoints, check_same_run, write_config
from dash_jax.config import Config
from dash_jax.errors import UserError
from dash_jax.learning import make_optimizer, start
from dash_jax.losses import row_weights
from dash_jax.policy import Policy, describe
from dash_jax.problems import Finish, Problem
from dash_jax.rollout import padded_width
from dash_jax.sharding import row_ways
from dash_jax.tasks import load_task
from dash_jax.tasks.order import batch_of
from dash_jax.timing import Clock
from dash_jax.tokenization import encode_problems
from dash_jax.tracker import Tracker
from dash_jax.types import MicroBatches, Rollout

_log = logging.getLogger(__name__)


def sft(config: Config) -> pathlib.Path:
    """Trains in `<run>/sft`, from its newest checkpoint if any; returns the Hugging Face folder it writes."""
    task = load_task(config.task, config.seed)
    policy = describe(config)
    limit = config.rollout.max_prompt_tokens
    problems = task.train()[: config.sft.examples]
    problems, _ = encode_problems(problems, policy.tokenizer, chat=task.chat, max_prompt_tokens=limit)
    examples = _with_solutions(problems, policy, config.rollout.max_new_tokens)
    batch_of(0, config.sft.batch, len(examples), config.seed)  # refuses a batch above the examples now
    run = pathlib.Path(config.run) / "sft"
    check_same_run(run, config, "sft")

    optimizer = make_optimizer(
        config.optimizer, config.sft.learning_rate, config.sft.schedule, config.sft.steps
    )
    checkpoints = Checkpoints(run / "checkpoints", keep=config.train.keep_checkpoints)
    state, first = start(config, policy, optimizer, checkpoints, keep_reference=False)
    write_config(run, config)
    objective = learner.Objective(logprob_chunk=config.learner.logprob_chunk)
    update = learner.make_update(policy.model, objective, optimizer, policy.mesh)
    with Tracker(run, total_steps=config.sft.steps, first_step=first, title="sft") as tracker:
        clock = Clock()
        for step in range(first, config.sft.steps):
            chosen = [examples[i] for i in batch_of(step, config.sft.batch, len(examples), config.seed)]
            batches = _batches(chosen, config, multiple_of=row_ways(policy.mesh))
            state, metrics = update(state, batches)
            useful, computed = padding_report(batches)
            line = {
                name: float(metrics[name]) for name in ("loss", "gradient_norm", "entropy", "learned_tokens")
            }
            clock.lap("learning")
            tracker.log(step, line | {"padding_share": 1 - useful / computed} | clock.seconds())
            if (step + 1) % config.train.save_every == 0 or step + 1 == config.sft.steps:
                checkpoints.save(step + 1, state, {"step": step + 1})
            clock.lap("other")
    checkpoints.close()
    folder = run / "model"
    if first < config.sft.steps or not folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
        weights.save(folder, state.params, policy.model, source=config.model.path, tokenizer=policy.tokenizer)
    return folder


Example = tuple[Problem, list[int]]


def _with_solutions(problems: Sequence[Problem], policy: Policy, limit: int) -> list[Example]:
    """Problems with the ids of their solution, its end-of-sequence token included."""
    solved = [problem for problem in problems if problem.solution]
    if not solved:
        raise UserError(
            f"none of {len(problems)} training problems has a worked solution, which sft needs; "
            "set task.math.solution_field to the field that holds it"
        )
    examples = [(problem, policy.tokenizer.encode_completion(problem.solution or "")) for problem in solved]
    kept = [example for example in examples if len(example[1]) <= limit]
    longest = max(len(ids) for _, ids in examples)
    if not kept:
        raise UserError(
            f"rollout.max_new_tokens={limit} is below all {len(examples)} solutions; "
            f"the longest has {longest} tokens"
        )
    if len(kept) < len(problems):
        _log.warning(
            "sft: %d of %d problems have no solution, %d solutions are above rollout.max_new_tokens=%d "
            "(longest %d): left out",
            len(problems) - len(solved), len(problems), len(examples) - len(kept), limit, longest,
        )  # fmt: skip
    return kept


def _batches(examples: Sequence[Example], config: Config, *, multiple_of: int) -> tuple[MicroBatches, ...]:
    limit = config.rollout.max_new_tokens
    width = padded_width(max(len(problem.prompt_ids) for problem, _ in examples))
    lengths = np.array([len(ids) for _, ids in examples], np.int32)
    fields: dict[str, Any] = {  # NumPy arrays, where the record is annotated with jax.Array
        "problem_ids": np.array([problem.id for problem, _ in examples], np.int32),
        "prompts": _padded([problem.prompt_ids for problem, _ in examples], width),
        "prompt_lengths": np.array([len(problem.prompt_ids) for problem, _ in examples], np.int32),
        "tokens": _padded([ids for _, ids in examples], limit)[:, None],
        "logprobs": np.zeros((len(examples), 1, limit), np.float32),
        "lengths": lengths[:, None],
        "finish": np.full((len(examples), 1), Finish.EOS, np.int32),
    }
    every = np.ones((len(examples), 1), bool)
    weights = row_weights(lengths, every[:, 0], aggregation="token_mean", max_length=limit)
    return pack(
        Rollout(**fields),
        every.astype(np.float32),
        np.asarray(weights)[:, None],
        every,
        rows_per_micro_batch=config.learner.micro_batch,
        share_prompt=False,
        shapes=config.learner.shapes,
        multiple_of=multiple_of,
    )


def _padded(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    out = np.zeros((len(rows), width), np.int32)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out
