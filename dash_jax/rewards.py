"""From completions to grades: one for each, in order, whatever the grader does."""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

from dash_jax.tasks import Task
from dash_jax.types import Finish, Grade, Problem, RunError

_log = logging.getLogger(__name__)


class Scores(NamedTuple):
    """Example: `Scores([Grade(1.0, True, "21"), Grade(nan, False, None)], failures={"ValueError": 1})`"""

    grades: list[Grade]
    failures: dict[str, int]  # completions without a reward, by the name of the exception


def score(
    task: Task, problems: Sequence[Problem], texts: Sequence[str], finishes: Sequence[Finish]
) -> Scores:
    """Grades completion i, `texts[i]`, as an answer to `problems[i]`.

    Where the grader raises, or returns a reward that is not finite, that
    completion's reward is NaN: it is counted in `failures`, gets advantage 0
    later and stays out of its group's statistics. Other completions are not touched.

    Raises RunError when not one completion could be graded: then the grader is
    broken, and a run without rewards would look like one that does not learn.
    """
    grades: list[Grade] = []
    failures: collections.Counter[str] = collections.Counter()
    first = ""
    for problem, text, finish in zip(problems, texts, finishes, strict=True):
        try:
            grade = task.grade(problem, text, finish)
            if not math.isfinite(grade.reward):
                raise ValueError(f"reward {grade.reward} is not finite")
        except Exception as error:  # noqa: BLE001 - a user's grader can raise anything; it is counted, not hidden
            failures[type(error).__name__] += 1
            first = first or f"{type(error).__name__}: {error} (problem {problem.id} {problem.source})"
            grade = Grade(reward=math.nan, correct=False, extracted=None)
        grades.append(grade)
    if failures:
        counts = ", ".join(f"{count} {name}" for name, count in failures.most_common())
        if failures.total() == len(grades):
            raise RunError(
                f"task {task.name}: grading failed for all {len(grades)} completions ({counts}); mend it; "
                f"the first: {first}"
            )
        _log.warning(
            "task %s: %d of %d completions were not graded (%s); the first: %s",
            task.name, failures.total(), len(grades), counts, first,
        )  # fmt: skip
    return Scores(grades, dict(failures))
