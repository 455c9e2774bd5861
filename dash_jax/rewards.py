"""From a completion to its verdict, whatever the grader does; and what a batch of verdicts amounts to."""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

from dash_jax.errors import RunError
from dash_jax.problems import Completion, Grade
from dash_jax.tasks import Task

_log = logging.getLogger(__name__)


class Failure(NamedTuple):
    """A completion that could not be graded. Example: `Failure("ValueError", "no number")`"""

    kind: str  # "timeout", "died", or the name of the exception
    message: str


class Scores(NamedTuple):
    """Item i of `grades` is the one of item i of `completions`.

    Where the grader failed, the reward is NaN: that completion gets advantage 0 later and stays out of its
    group's statistics. Other completions are not touched.
    """

    completions: list[Completion]
    grades: list[Grade]
    failures: dict[str, int]  # completions without a reward, by the kind of failure
    busy_seconds: float  # that grading took, summed over its processes


def judge(task: Task, completion: Completion) -> Grade | Failure:
    """The task's grade in plain Python values. A reward that is not finite is a failure like an exception."""
    try:
        grade = task.grade(*completion)
        plain = Grade(float(grade.reward), bool(grade.correct), grade.extracted)
        if not math.isfinite(plain.reward):
            raise ValueError(f"reward {plain.reward} is not finite")
        if not isinstance(plain.extracted, str | None):
            raise TypeError(f"extracted is a {type(plain.extracted).__name__}; a text or None is needed")
    except Exception as error:  # noqa: BLE001 - a user's grader can raise anything; it is counted, not hidden
        return Failure(type(error).__name__, str(error))
    return plain


def scores(
    task_name: str,
    completions: Sequence[Completion],
    verdicts: Sequence[Grade | Failure],
    *,
    busy_seconds: float,
) -> Scores:
    """Counts and logs the failures.

    Raises RunError when not one completion could be graded: then the grader is
    broken, and a run without rewards would look like one that does not learn.
    """
    grades: list[Grade] = []
    failures: collections.Counter[str] = collections.Counter()
    first = ""
    for (problem, _, _), verdict in zip(completions, verdicts, strict=True):
        if isinstance(verdict, Failure):
            failures[verdict.kind] += 1
            first = first or f"{verdict.kind}: {verdict.message} (problem {problem.id} {problem.source})"
            verdict = Grade(reward=math.nan, correct=False, extracted=None)
        grades.append(verdict)
    if failures:
        counts = ", ".join(f"{count} {kind}" for kind, count in failures.most_common())
        if failures.total() == len(grades):
            raise RunError(
                f"task {task_name}: grading failed for all {len(grades)} completions ({counts}); mend it; "
                f"the first: {first}"
            )
        _log.warning(
            "task %s: %d of %d completions were not graded (%s); the first: %s",
            task_name, failures.total(), len(grades), counts, first,
        )  # fmt: skip
    return Scores(list(completions), grades, dict(failures), busy_seconds)
