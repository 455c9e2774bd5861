"""Answers: taking them out of a text, and comparing them with the gold answer.

Two answers are equal when they are the same text after `trim`, or the same
number. Numbers are compared exactly, as fractions, and nothing is ever
evaluated: `2^10` is a text, not 1024. A percent sign is not counted (`50%` is
the number 50), nor is a dollar sign; other units make an answer a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\$?(?:(?P<whole>{_DECIMAL})(?:/(?P<below>{_DECIMAL}))?"
    r"|\\frac\{(?P<top>-?[0-9]+)\}\{(?P<bottom>-?[0-9]+)\})\s*%?"
)
# A minus after a digit or a bracket is an operator: "9-5" ends with 5.
_NUMBER_IN_TEXT = re.compile(rf"(?:(?<![0-9)\]}}])[-\u2212])?\$?(?:{_DECIMAL})(?:/(?:{_DECIMAL}))?")
_LONGEST_NUMBER = 200  # characters; int() of very long texts is slow, or refused by Python
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # \{ and \} are no braces
_MARK = "####"


def extract(text: str, rule: str) -> str | None:
    """The answer in `text` by a rule of `config.Math`, trimmed, or None where there is none.

    What stands before the last `</think>` is reasoning, not an answer.

    >>> extract(r"so \\boxed{5}, no: \\boxed{\\frac{1}{2}}.", "boxed")
    '\\\\frac{1}{2}'
    """
    answer = _RULES[rule](text.rpartition("</think>")[2])
    return trim(answer) or None if answer is not None else None


def matches(gold: str, answer: str | None) -> bool:
    """Whether two answers are the same text or the same number. None matches nothing."""
    if answer is None:
        return False
    if trim(gold) == trim(answer):
        return True
    value = number(gold)
    return value is not None and value == number(answer)


def number(text: str) -> Fraction | None:
    """The exact value of a text that is one number, else None.

    Integers, decimals, thousands commas, `a/b` and `\\frac{a}{b}`, with sign, `$` or `%`.
    There are no exponents: the integer in 1e999999999 would fill the memory.

    >>> number("$1,234.50")
    Fraction(2469, 2)
    """
    text = trim(text)
    found = _NUMBER.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if found is None:
        return None
    top, bottom = (
        Fraction((part or "1").replace(",", ""))
        for part in (found["whole"] or found["top"], found["below"] or found["bottom"])
    )
    if bottom == 0:
        return None
    return top / bottom * (-1 if found["sign"] == "-" else 1)


def trim(text: str) -> str:
    r"""The text without what means nothing: blanks, `$` and full stops at its ends, LaTeX spacing anywhere.

    `\dfrac12` becomes `\frac{1}{2}`, and an answer that is all `\text{...}` loses that.
    """
    text = text.replace("\u2212", "-").replace("{,}", ",")
    text = re.sub(r"\\[!,;:]", "", text)  # thin spaces, as in 10,\!000
    text = re.sub(r"\\([$%])", r"\1", text)
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\frac([0-9])([0-9])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\s+", " ", text).strip(" $").rstrip(" $.")
    worded = re.fullmatch(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", text)
    return worded[1].strip(" $").rstrip(" $.") if worded else text


def after_mark(text: str, mark: str = _MARK) -> str | None:
    """The rest of the line after the last `mark`."""
    _, found, rest = text.rpartition(mark)
    return rest.lstrip(" ").partition("\n")[0] if found else None


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed` holds, braces matched; None when that one is never closed.

    `\boxed 7` without braces is taken up to the next blank or `$`.
    """
    _, found, rest = text.rpartition(r"\boxed")
    if not found:
        return None
    if not rest.startswith("{"):
        bare = re.match(r"\s+([^\s$]+)", rest)
        return bare[1] if bare else None
    depth = 0
    for brace in _BRACE.finditer(rest):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return rest[1 : brace.start()]
    return None


def last_number(text: str) -> str | None:
    """The last number of a text, as it is written there."""
    found = _NUMBER_IN_TEXT.findall(text)
    return found[-1] if found else None


def first_line(text: str) -> str:
    """The first line that is not empty: after it, few-shot completions make up a next question."""
    return text.strip().partition("\n")[0]


_RULES: dict[str, Callable[[str], str | None]] = {
    "whole": lambda text: text,
    "boxed": last_boxed,
    "hash": after_mark,
    "last_number": last_number,
    "first_line": first_line,
}
