"""One whole line a step, whatever kills the run; a console that reads well as a bar and as a file."""

import io
import json
import logging
import math
import os
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from dash_jax.problems import Finish
from dash_jax.tracker import Tracker, describe, read_lines

_LINE = {
    "reward": 0.53125, "accuracy": 0.5, "kept_share": 0.625, "length": 41.25, "truncated": 0.03125,
    "entropy": 0.8312, "gradient_norm": 1.2345, "loss": 0.1, "tokens_per_second": 14213.4, "seconds": 3.44,
    "seconds_sampling": 1.9, "seconds_reward": 0.1, "seconds_learning": 1.24, "seconds_other": 0.2,
}  # fmt: skip
_SAMPLE = {"prompt": "12+9=", "text": " 21", "answer": "21", "extracted": None, "reward": 1.0}


def _tracker(run, first=0, total=100, terminal=False):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=110)
    return Tracker(run, total, first, "train", console=console), console.file


def _track(run, steps, first=0):
    tracker, out = _tracker(run, first)
    with tracker:
        for step in steps:
            tracker.log(step, _LINE)
            tracker.samples(step, [_SAMPLE, _SAMPLE])
    return out.getvalue()


def _steps(path):
    return [line["step"] for line in read_lines(path)]


def test_a_step_reads_well_in_a_file(tmp_path):
    first, line = _track(tmp_path, [7], first=7).splitlines()
    assert first == "train: 7 of 100 steps are done"
    assert line == (
        "step   8/100 | reward 0.531 | accuracy 0.500 | kept  62% | length 41.2 | truncated 3.1% | "
        "entropy 0.831 | grad 1.23 | 14,213 tok/s | 3.4 s: sampling 1.9, reward 0.1, learning 1.2, other 0.2"
    )
    assert "kl 0.0021 |" in describe({"kl": 0.0021, "tokens_per_second": 1.0})
    assert describe({"loss": 1.0, "seconds": 2.0}) == "2.0 s"
    assert "held-out 0.250" in describe({"eval_accuracy": 0.25})


def test_lines_hold_what_was_logged_and_no_nan(tmp_path):
    tracker, out = _tracker(tmp_path)
    text = 'two\nlines\u2028, "quotes" and \ud800'
    with tracker:
        tracker.log(0, {"reward": math.nan, "loss": np.float32(0.5), "tokens": jnp.int32(3), "kl": jnp.inf})
        tracker.samples(
            0, [{"text": text, "finish": Finish.EOS, "reward": math.nan, "advantage": np.float32(-1)}]
        )
    raw = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert raw == '{"step": 0, "reward": null, "loss": 0.5, "tokens": 3, "kl": null}\n'
    (line,) = read_lines(tmp_path / "samples.jsonl")
    assert line == {"step": 0, "text": text, "finish": "eos", "reward": None, "advantage": -1.0}
    assert "reward nan" in out.getvalue()


def test_a_resumed_run_cuts_what_was_logged_after_its_checkpoint(tmp_path):
    _track(tmp_path, range(10))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "rew')  # kill -9 while it is written
    _track(tmp_path, range(6, 9), first=6)
    assert _steps(tmp_path / "metrics.jsonl") == [*range(9)]
    assert _steps(tmp_path / "samples.jsonl") == [step for step in range(9) for _ in range(2)]
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "samples.jsonl"]
    _track(tmp_path, [0])
    assert _steps(tmp_path / "metrics.jsonl") == [0]


def test_a_line_that_is_whole_but_for_its_end_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}')
    _track(tmp_path, [2], first=2)
    assert _steps(tmp_path / "metrics.jsonl") == [0, 1, 2]


def test_half_lines_are_named(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1, "x": "\xe2')
    with caplog.at_level(logging.WARNING):
        assert read_lines(path) == [{"step": 0}]
    assert f"{path}:2: half-written line is left out" in caplog.text
    assert read_lines(tmp_path / "none.jsonl") == []


def test_a_killed_run_has_every_line_that_was_logged(tmp_path):
    program = (
        "import os, signal, sys; from dash_jax.tracker import Tracker\n"
        "with Tracker(sys.argv[1], 9, 0, 'train') as tracker:\n"
        "    for step in range(3): tracker.log(step, {}); tracker.samples(step, [{}])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, tmp_path], timeout=60, check=False, stdout=subprocess.PIPE
    )
    assert run.returncode == -signal.SIGKILL
    assert _steps(tmp_path / "metrics.jsonl") == _steps(tmp_path / "samples.jsonl") == [0, 1, 2]


def test_the_terminal_has_a_bar_with_the_latest_figures(tmp_path):
    tracker, out = _tracker(tmp_path, first=39, terminal=True)
    with tracker:
        tracker.log(39, _LINE)
        logging.getLogger("dash_jax.rewards").warning("2 of 5 [red]were[/] not graded")
    shown = Text.from_ansi(out.getvalue()).plain
    assert "40/100" in shown
    assert "reward 0.531" in shown
    assert "2 of 5 [red]were[/] not graded" in shown


@pytest.mark.parametrize("terminal", [False, True])
def test_warnings_go_to_its_console_alone_and_handlers_come_back(tmp_path, terminal):
    other = io.StringIO()
    root = logging.getLogger()
    before = root.handlers
    root.handlers = [*before, logging.StreamHandler(other), RichHandler(console=Console(file=other))]
    set_up = root.handlers
    tracker, out = _tracker(tmp_path, terminal=terminal)
    try:
        with tracker:
            logging.getLogger("dash_jax").warning("seen")
            logging.getLogger("dash_jax").info("not seen")
        assert root.handlers is set_up
    finally:
        root.handlers = before
    assert "seen" in out.getvalue()
    assert "not seen" not in out.getvalue()
    assert other.getvalue() == ""


def test_the_files_are_json_lines_for_others_too(tmp_path):
    _track(tmp_path, range(3))
    for name in "metrics.jsonl", "samples.jsonl":
        assert all(json.loads(line) for line in (tmp_path / name).read_text().splitlines())
