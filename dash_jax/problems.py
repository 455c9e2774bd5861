"""What is asked, said and judged: texts and verdicts. Grading processes import this, so it knows no JAX."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple


class Finish(enum.IntEnum):
    """Why a completion ended."""

    LENGTH = 0  # cut by the token limit: it has no end-of-sequence token
    EOS = 1  # the last sampled token is an end-of-sequence token


@dataclasses.dataclass(frozen=True)
class Problem:
    """One question with a verifiable answer.

    Example: `Problem(id=7, task="arithmetic", prompt="12+9=", answer="21")`
    """

    id: int  # unique in its split and stable between runs: random keys are made from it
    task: str
    prompt: str
    answer: str
    solution: str | None = None  # a worked answer, for supervised warm starts
    source: str = ""  # where it came from, "file.jsonl:12", for error messages
    prompt_ids: tuple[int, ...] = ()  # filled once, by `tokenization.encode_problems`


class Completion(NamedTuple):
    """What a grader sees of one completion: its text is decoded without special tokens.

    Example: `Completion(problem, text="#21", finish=Finish.EOS)`
    """

    problem: Problem
    text: str
    finish: Finish


class Grade(NamedTuple):
    """The verdict on one completion. Example: `Grade(reward=1.0, correct=True, extracted="21")`"""

    reward: float
    correct: bool
    extracted: str | None  # the answer found in the text, None when there is none
