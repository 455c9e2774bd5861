"""Tasks: where problems come from, and what a completion of one is worth."""

from __future__ import annotations

from typing import Protocol

from dash_jax import config
from dash_jax.problems import Finish, Grade, Problem
from dash_jax.tasks.arithmetic import ArithmeticTask
from dash_jax.tasks.math_problems import MathTask


class Task(Protocol):
    """Problems with verifiable answers. Whatever has these five members can be trained on."""

    @property
    def name(self) -> str: ...

    @property
    def chat(self) -> bool:
        """Whether prompts go through the tokenizer's chat template."""

    def train(self) -> list[Problem]:
        """The training problems, the same at every call; ids are unique. Raises UserError on bad data."""

    def test(self) -> list[Problem]:
        """The held-out problems, likewise."""

    def grade(self, problem: Problem, text: str, finish: Finish) -> Grade:
        """The worth of one completion, decoded without special tokens.

        A completion that the token limit cut has no answer, even when the right
        one stands in it somewhere: a model must not be paid for what it says in passing.
        """


def load_task(settings: config.Task, seed: int) -> Task:
    """The task that a config names. Data are read when `train` or `test` is called."""
    if settings.kind == "arithmetic":
        return ArithmeticTask(settings.arithmetic, seed)
    return MathTask(settings.math)
