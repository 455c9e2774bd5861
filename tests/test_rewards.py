"""One grade for each completion, whatever the grader does."""

import logging
import math

import graders
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_jax.errors import RunError
from dash_jax.problems import Grade
from dash_jax.rewards import judge, scores


def _score(texts):
    completions = graders.completions(texts)
    verdicts = [judge(graders.Task(), completion) for completion in completions]
    return scores("test", completions, verdicts, busy_seconds=0.5)


def test_failures_keep_their_place_case_52(caplog):
    with caplog.at_level(logging.WARNING):
        _, grades, failures, _ = _score(["1", "x", "0", "key", "1"])
    assert [grade.reward for grade in grades[::2]] == [1.0, 0.0, 1.0]
    assert all(math.isnan(grades[i].reward) and not grades[i].correct for i in (1, 3))
    assert failures == {"ValueError": 1, "KeyError": 1}
    assert "2 of 5 completions were not graded" in caplog.text
    assert "could not convert string to float: 'x' (problem 1 file:1)" in caplog.text


def test_a_grader_that_always_fails_stops_the_run_case_52():
    with pytest.raises(
        RunError, match=r"all 3 completions \(2 ValueError, 1 KeyError\).*ValueError: could not"
    ):
        _score(["x", "key", "y"])


def test_no_grade_and_no_finite_reward_are_failures_case_2():
    _, grades, failures, _ = _score(["none", "nan", "inf", "1"])
    assert [math.isnan(grade.reward) for grade in grades] == [True, True, True, False]
    assert failures == {"AttributeError": 1, "ValueError": 2}


@given(st.lists(st.sampled_from(["0", "1", "x", "none", "nan", "key"]), max_size=12))
def test_exactly_one_grade_for_each_completion_case_52(texts):
    good = sum(text in ("0", "1") for text in texts)
    if texts and not good:
        with pytest.raises(RunError):
            _score(texts)
        return
    _, grades, failures, _ = _score(texts)
    assert len(grades) == len(texts)
    assert sum(failures.values()) == len(texts) - good
    for text, grade in zip(texts, grades, strict=True):
        assert grade.reward == float(text) if text in ("0", "1") else math.isnan(grade.reward)


def test_grades_become_plain_values():
    class Task(graders.Task):
        def grade(self, problem, text, finish):
            return Grade(np.float32(0.5), np.True_, text)

    (grade,) = (judge(Task(), completion) for completion in graders.completions(["a"]))
    assert grade == (0.5, True, "a")
    assert [type(value) for value in grade] == [float, bool, str]


def test_a_shifted_batch_is_a_bug_of_the_caller():
    with pytest.raises(ValueError, match="zip"):
        scores("test", graders.completions(["1"]), [], busy_seconds=0.0)


def test_an_interrupt_is_not_a_failed_grade():
    class Interrupted(graders.Task):
        def grade(self, problem, text, finish):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(Interrupted(), *graders.completions(["1"]))
