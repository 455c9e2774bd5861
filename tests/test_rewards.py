"""One grade for each completion, whatever the grader does."""

import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_jax.rewards import score
from dash_jax.types import Finish, Grade, Problem, RunError


class _Task:
    """Grades "1" and "0"; everything else makes it fail in some way."""

    name = "test"
    chat = False

    def train(self):
        return []

    test = train

    def grade(self, problem, text, finish):
        if text == "none":
            return None
        if text == "nan":
            return Grade(math.nan, False, None)
        if text == "key":
            raise KeyError(text)
        return Grade(float(text), text == "1", text)


def _score(texts):
    problems = [
        Problem(id=i, task="test", prompt="?", answer="1", source=f"file:{i}") for i in range(len(texts))
    ]
    return score(_Task(), problems, texts, [Finish.EOS] * len(texts))


def test_failures_keep_their_place_case_52(caplog):
    with caplog.at_level(logging.WARNING):
        grades, failures = _score(["1", "x", "0", "key", "1"])
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
    grades, failures = _score(["none", "nan", "inf", "1"])
    assert [math.isnan(grade.reward) for grade in grades] == [True, True, True, False]
    assert failures == {"AttributeError": 1, "ValueError": 2}


@given(st.lists(st.sampled_from(["0", "1", "x", "none", "nan", "key"]), max_size=12))
def test_exactly_one_grade_for_each_completion_case_52(texts):
    good = sum(text in ("0", "1") for text in texts)
    if texts and not good:
        with pytest.raises(RunError):
            _score(texts)
        return
    grades, failures = _score(texts)
    assert len(grades) == len(texts)
    assert sum(failures.values()) == len(texts) - good
    for text, grade in zip(texts, grades, strict=True):
        assert grade.reward == float(text) if text in ("0", "1") else math.isnan(grade.reward)


def test_a_shifted_batch_is_a_bug_of_the_caller():
    problem = Problem(id=0, task="test", prompt="?", answer="1")
    with pytest.raises(ValueError, match="zip"):
        score(_Task(), [problem], ["1", "1"], [Finish.EOS])


def test_an_interrupt_is_not_a_failed_grade():
    class Interrupted(_Task):
        def grade(self, problem, text, finish):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(Interrupted(), [Problem(id=0, task="test", prompt="?", answer="1")], ["1"], [Finish.EOS])
