"""What a run leaves behind and shows: metrics.jsonl, samples.jsonl, and the console.

Steps count from 0 in the files; the console shows how many are done, 1/100 after step 0.
"""

from __future__ import annotations

import enum
import json
import logging
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, BinaryIO

import jax
from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

_log = logging.getLogger(__name__)

# What the console shows of a metrics line, where the line has it: key, words around the number.
_FIGURES = (
    ("reward", "reward {:.3f}"),
    ("accuracy", "accuracy {:.3f}"),
    ("eval_accuracy", "held-out {:.3f}"),
    ("kept_share", "kept {:4.0%}"),
    ("length", "length {:.1f}"),
    ("truncated", "truncated {:.1%}"),
    ("entropy", "entropy {:.3f}"),
    ("gradient_norm", "grad {:.3g}"),
    ("kl", "kl {:.3g}"),
    ("tokens_per_second", "{:,.0f} tok/s"),
)
PHASES = ("sampling", "reward", "learning", "evaluation", "other")  # metrics keys seconds_<phase>


class Tracker:
    """Context manager around the training loop; `log` once a step, `samples` as one likes.

    Lines of `first_step` and later steps, which a killed run wrote after its last checkpoint, are cut
    from the files first. So every step has exactly one line of metrics, if a step is logged before the
    checkpoint that holds it is saved.

    While it is open, warnings of the standard library's `logging` go to its console, above the bar, and
    not to the handlers that wrote to a console before.
    """

    def __init__(
        self,
        run_dir: str | pathlib.Path,
        total_steps: int,
        first_step: int,
        title: str,
        *,
        console: Console | None = None,
    ) -> None:
        self._run_dir = pathlib.Path(run_dir)
        self._total, self._first, self._title = total_steps, first_step, title
        self._first_process = jax.process_index() == 0  # it alone writes and shows
        self._console = console or Console(quiet=not self._first_process)

    def __enter__(self) -> Tracker:
        self._metrics, self._samples = self._open("metrics.jsonl"), self._open("samples.jsonl")
        self._live: Live | None = None
        handler: logging.Handler
        if self._console.is_terminal:
            self._start_bar()
            handler = RichHandler(console=self._console, show_path=False)
        else:
            self._print(f"{self._title}: {self._first} of {self._total} steps are done")
            handler = logging.StreamHandler(self._console.file)
            handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        handler.setLevel(logging.WARNING)
        root = logging.getLogger()
        self._handlers = root.handlers
        root.handlers = [*(old for old in self._handlers if not _is_console(old)), handler]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger().handlers = self._handlers
        if self._live:
            self._live.stop()
        self._metrics.close()
        self._samples.close()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The one line of a step. Numbers may be Python, NumPy or JAX scalars."""
        line = _plain({"step": step, **metrics})
        _append(self._metrics, [line])
        if self._live:
            self._figures.plain = describe(line)
            self._progress.update(self._task, completed=step + 1)
        else:
            width = len(str(self._total))
            self._print(f"step {step + 1:{width}}/{self._total} | {describe(line)}")

    def samples(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Completions for people to read, one a line, with prompt, text, answer, reward, advantage ..."""
        _append(self._samples, ({"step": step, **record} for record in records))

    def _open(self, name: str) -> BinaryIO:
        if not self._first_process:
            return open(os.devnull, "wb")
        self._run_dir.mkdir(parents=True, exist_ok=True)
        return _open_cut(self._run_dir / name, self._first)

    def _start_bar(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            speed_estimate_period=3600,  # seconds: a step may last minutes
            expand=True,
        )
        self._task = self._progress.add_task(self._title, total=self._total, completed=self._first)
        self._figures = Text("", style="dim")
        self._live = Live(Group(self._progress, self._figures), console=self._console, refresh_per_second=4)
        self._live.start()

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def describe(line: Mapping[str, Any]) -> str:
    """A metrics line in words."""
    parts = [words.format(_number(line[key])) for key, words in _FIGURES if key in line]
    phases = [f"{phase} {_number(line[key]):.1f}" for phase in PHASES if (key := f"seconds_{phase}") in line]
    if "seconds" in line:
        parts.append(f"{_number(line['seconds']):.1f} s" + (": " if phases else "") + ", ".join(phases))
    return " | ".join(parts)


def _is_console(handler: logging.Handler) -> bool:
    return isinstance(handler, RichHandler) or type(handler) is logging.StreamHandler


def read_lines(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """All lines of a JSON Lines file of ours, none if there is no file.

    A line that is no JSON record (the last one of a run that was killed while writing it) is left out and
    logged.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    lines = []
    for number, text in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            line = json.loads(text) if text else None
        except ValueError:
            line = text
        if isinstance(line, dict):
            lines.append(line)
        elif line is not None:
            _log.warning("%s:%d: half-written line is left out", path, number)
    return lines


def _open_cut(path: pathlib.Path, first_step: int) -> BinaryIO:
    """Opens for appending, after the lines of `first_step` and later ones were cut in one move."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        _append(file, (line for line in read_lines(path) if line["step"] < first_step))
        os.fsync(file.fileno())
    temporary.replace(path)
    return path.open("ab")


def _append(file: BinaryIO, lines: Iterable[Mapping[str, Any]]) -> None:
    for line in lines:
        text = json.dumps(_plain(line), ensure_ascii=False, allow_nan=False)
        # A lone surrogate has no UTF-8; backslashreplace makes the JSON escape of it.
        file.write(text.encode("utf-8", "backslashreplace") + b"\n")
        file.flush()


def _plain(value: Any) -> Any:
    """What JSON can hold: array scalars as numbers, NaN and infinities as None."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _number(value: float | None) -> float:
    return math.nan if value is None else value
