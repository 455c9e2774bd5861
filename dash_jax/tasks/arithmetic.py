r"""Generated sums with worked steps, for character-level models that learn in minutes.

The steps go column by column from the right, as at school. Each shows the
column's digits, then the carry (or, for minus, the borrow) that came in, which
the first column has not; after `=` stand the carry out and the digit:

    level 1   7+5=         7+5=12;#12
    level 2   85-47=       5-7=18;8-4-1=03;#38
    level 3   347+285=     7+5=12;4+8+1=13;3+2+1=06;#632
    level 4   7*86=        7*6=42;7*8+4=60;#602
    level 5   47+85-21=    7+5=12;4+8+1=13;2-1=01;3-2-0=01;1-0-0=01;#111

So every piece needs a look at two or three digits, and all pieces are alike.
Level 5 adds the third term to the first sum, whose digits stand after the `=`
signs. No intermediate or final result is negative.

With `few_shot` a problem is the last line of a short list instead, for models that
have read such lists, and the answer is what they put behind it:

    3 + 5 = 8            (three more such lines)
    7 + 6 =              solution " 13\n"
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import numpy as np
from jaxtyping import Int

from dash_jax import config
from dash_jax.errors import UserError
from dash_jax.problems import Finish, Grade, Problem
from dash_jax.tasks.answers import after_mark, extract, matches
from dash_jax.tasks.order import permutation

_OPERANDS = {1: (1, 9), 2: (10, 99), 3: (100, 999)}  # smallest and largest; level 5 chains those of level 2
_FEW_SHOT = "3 + 5 = 8\n12 - 4 = 8\n6 * 2 = 12\n9 + 1 = 10\n"
_IDS_A_LEVEL = 1_000_000  # more than any level has problems


class ArithmeticTask:
    """Two splits that share no problem, not even with its operands exchanged.

    Both are functions of (seed, sizes) alone, and the held-out split does not
    change with `train_size`. Levels take turns, so the first problems of a split
    are as mixed as the whole. A problem has the same id in every run.

    Raises UserError when a level has not as many problems as it shall give.
    """

    name = "arithmetic"
    chat = False

    def __init__(self, settings: config.Arithmetic, seed: int):
        self._settings, self._seed = settings, seed
        levels, total = settings.levels, settings.train_size + settings.test_size
        for turn, level in enumerate(levels):
            there, wanted = len(_problems(level)), len(range(turn, total, len(levels)))
            if wanted > there:
                raise UserError(
                    f"task.arithmetic: level {level} has {there} different problems, but levels={levels}, "
                    f"train_size={settings.train_size} and test_size={settings.test_size} need {wanted} "
                    f"of it; lower train_size + test_size to {there * len(levels)}, or set other levels"
                )

    def train(self) -> list[Problem]:
        return self._deal(self._settings.test_size, self._settings.train_size)

    def test(self) -> list[Problem]:
        return self._deal(0, self._settings.test_size)

    def grade(self, problem: Problem, text: str, finish: Finish) -> Grade:
        """1 for a finished completion whose last `#` is followed by the answer, alone in its line.

        A completion that was cut has no answer yet: reward 0, whatever it holds.
        """
        if self._settings.few_shot:
            answer = extract(text, "first_line")
            finished = finish == Finish.EOS or "\n" in text
            correct = finished and answer is not None and matches(problem.answer, answer)
            return Grade(reward=float(correct), correct=correct, extracted=answer)
        answer = after_mark(text, "#")
        correct = finish == Finish.EOS and answer == problem.answer
        return Grade(reward=float(correct), correct=correct, extracted=answer)

    def _deal(self, first: int, size: int) -> list[Problem]:
        """`size` problems from number `first` on of one long deal; the held-out ones are its beginning."""
        levels = self._settings.levels
        decks = [permutation(len(_problems(level)), "arithmetic", self._seed, level) for level in levels]
        places = [divmod(index, len(levels)) for index in range(first, first + size)]
        problems = [_problem(levels[turn], int(decks[turn][round_]), self._seed) for round_, turn in places]
        return [_as_list(problem) for problem in problems] if self._settings.few_shot else problems


@functools.cache
def _problems(level: int) -> Int[np.ndarray, "problems terms"]:
    """All problems of a level, each once: signed terms, those with a plus first; at level 4 two factors."""
    if level == 4:
        return np.array([(digit, other) for digit in range(2, 10) for other in range(10, 100)])
    if level == 5:
        a, b, c = (axis.ravel() for axis in np.mgrid[10:100, 10:100, 10:100])
        kinds = (
            np.stack([a, b, c], 1)[(a <= b) & (b <= c)],
            np.stack([a, b, -c], 1)[(a <= b) & (c <= a + b)],
            np.stack([a, -b, -c], 1)[(b <= c) & (b + c <= a)],
        )
        return np.concatenate(kinds)
    smallest, largest = _OPERANDS[level]
    small, large = np.triu_indices(largest - smallest + 1)
    small, large = small + smallest, large + smallest
    return np.concatenate([np.stack([large, small], 1), np.stack([large, -small], 1)])


def _problem(level: int, row: int, seed: int) -> Problem:
    terms: list[int] = _problems(level)[row].tolist()
    written = [terms[i] for i in permutation(len(terms), "terms", seed, level, row)]
    if min(_running_totals(written)) >= 0:  # else plus before minus, as the terms are stored
        terms = written
    if level == 4:
        prompt, total = f"{terms[0]}*{terms[1]}=", math.prod(terms)
        steps = _columns(terms[0], terms[1], "*")
    else:
        prompt, total = "".join(f"{term:+d}" for term in terms).removeprefix("+") + "=", sum(terms)
        totals = _running_totals(terms)
        steps = "".join(
            _columns(before, abs(term), "+" if term > 0 else "-")
            for before, term in zip(totals, terms[1:], strict=False)
        )
    return Problem(
        id=level * _IDS_A_LEVEL + row,
        task=ArithmeticTask.name,
        prompt=prompt,
        answer=str(total),
        solution=f"{steps}#{total}",
        source=f"arithmetic level {level}",
    )


def _as_list(problem: Problem) -> Problem:
    """The same sum as the last line of a list of sums."""
    spaced = re.sub(r"([-+*=])", r" \1 ", problem.prompt).rstrip()
    return dataclasses.replace(problem, prompt=_FEW_SHOT + spaced, solution=f" {problem.answer}\n")


def _running_totals(terms: list[int]) -> list[int]:
    return np.cumsum(terms).tolist()


def _columns(a: int, b: int, operator: str) -> str:
    """The worked columns of a + b, of a - b >= 0, or of a * b where one factor has one digit."""
    width = max(len(str(a)), len(str(b)))
    columns, carry = [], 0
    for place in range(width):
        x, y = a // 10**place % 10, b // 10**place % 10
        if operator == "*":  # the factor of one digit meets every column
            x, y = (a if a < 10 else x), (b if b < 10 else y)
        value = {"+": x + y + carry, "-": x - y - carry, "*": x * y + carry}[operator]
        came_in = f"{'-' if operator == '-' else '+'}{carry}" if place else ""
        carry = abs(value // 10)  # -1 for a borrow
        columns.append(f"{x}{operator}{y}{came_in}={carry}{value % 10};")
    return "".join(columns)
