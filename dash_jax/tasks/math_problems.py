"""Mathematics problems from JSON Lines files or `datasets` data sets, graded by their final answers."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from dash_jax import config
from dash_jax.errors import UserError
from dash_jax.problems import Finish, Grade, Problem
from dash_jax.tasks import answers

_FILE_ENDINGS = (".jsonl", ".json", ".ndjson")


class MathTask:
    """Problems as `config.Math` describes them. Problem ids count the rows of a split, from 0."""

    name = "math"

    def __init__(self, settings: config.Math):
        self._settings = settings
        self.chat = settings.chat

    def train(self) -> list[Problem]:
        return self._read("train", self._settings.train, self._settings.train_split)

    def test(self) -> list[Problem]:
        return self._read("test", self._settings.test, self._settings.test_split)

    def grade(self, problem: Problem, text: str, finish: Finish) -> Grade:
        """1 when the answer found by `answer_rule` equals the gold one, else 0.

        A completion that was cut gets 0. Under `first_line` an answer counts
        once its line has ended: whatever follows does not belong to it.
        """
        rule = self._settings.answer_rule
        answer = answers.extract(text, rule)
        finished = finish == Finish.EOS or (rule == "first_line" and "\n" in text.lstrip())
        correct = finished and answers.matches(problem.answer, answer)
        return Grade(reward=float(correct), correct=correct, extracted=answer)

    def _read(self, key: str, names: list[str], split: str) -> list[Problem]:
        if not names:
            raise UserError(
                f"task.math.{key}=[]: name one or more JSON Lines files, or a `datasets` data set"
            )
        sources = (
            _read_file(pathlib.Path(name))
            if name.endswith(_FILE_ENDINGS)
            else _read_dataset(name, self._settings.subset, split)
            for name in names
        )
        rows = itertools.islice(itertools.chain.from_iterable(sources), self._settings.limit)
        problems = [self._problem(index, row, source) for index, (source, row) in enumerate(rows)]
        if not problems:
            raise UserError(f"task.math.{key}={names}: no rows; give data with one problem a line")
        return problems

    def _problem(self, index: int, row: dict[str, Any], source: str) -> Problem:
        settings = self._settings
        question = _field(row, settings.question_field, "question_field", source)
        worked = _field(row, settings.answer_field, "answer_field", source)
        gold = answers.extract(worked, settings.gold_rule)
        if gold is None:
            raise UserError(
                f"{source}: no gold answer in field {settings.answer_field!r} = {_shorten(worked)} by "
                f"task.math.gold_rule={settings.gold_rule}; mend the row or set another rule or answer_field"
            )
        solution = settings.solution_field and _field(row, settings.solution_field, "solution_field", source)
        return Problem(
            id=index,
            task=self.name,
            prompt=settings.few_shot + settings.template.replace("{question}", question),
            answer=gold,
            solution=solution or None,
            source=source,
        )


def _field(row: dict[str, Any], name: str, key: str, source: str) -> str:
    """A field's text, of a number too; UserError when it is missing, empty or something else."""
    if name not in row:
        raise UserError(
            f"{source}: no field {name!r}; set task.math.{key} to one of {', '.join(map(repr, row))}"
        )
    value = row[name]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise UserError(f"{source}: field {name!r} is {_shorten(value)}; a text or a number is needed")
    if not value.strip():
        raise UserError(f"{source}: field {name!r} is empty; mend or remove the row")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UserError(
            f"{source}: field {name!r} holds half of a surrogate pair, which no tokenizer can read"
        )
    return value


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:40] + " ... " + text[-15:]


def _read_file(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(source, row) for each line of a JSON Lines file; blank lines are passed over."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _parse(line, f"{path}:{number}")
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; set task.math.train and task.math.test to files that exist"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a JSON Lines file") from None


def _parse(line: bytes, source: str) -> dict[str, Any]:
    try:
        # Numbers stay as they are written: 18.90 must not become 18.9, nor 1e16 a float.
        row = json.loads(line.decode("utf-8-sig"), parse_float=str, parse_int=str)
    except UnicodeDecodeError:
        raise UserError(f"{source}: not UTF-8; convert the file, with iconv for instance") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: not JSON ({error}); every line must hold one object") from None
    if not isinstance(row, dict):
        raise UserError(f"{source}: holds {_shorten(row)}; every line must be an object with named fields")
    return row


def _read_dataset(name: str, subset: str | None, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(source, row) for each row of a folder that `datasets` wrote, or of a data set found by name."""
    import datasets  # takes seconds, and most runs read files

    try:
        if (pathlib.Path(name) / "dataset_dict.json").exists() or (
            pathlib.Path(name) / "state.json"
        ).exists():
            data = datasets.load_from_disk(name)
            data = data[split] if isinstance(data, datasets.DatasetDict) else data
        else:
            data = datasets.load_dataset(name, subset, split=split)
    # ValueError: no such split or subset; OSError: no such folder, no network; RuntimeError: broken data
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{name}: `datasets` cannot load split {split!r} of it ({reason}); give a JSON Lines file "
            f"({', '.join(_FILE_ENDINGS)}), a folder written by `save_to_disk`, or go online"
        ) from None
    for index, row in enumerate(data):
        yield f"{name}[{split}]:{index}", row
