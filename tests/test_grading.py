"""One grade for each completion, in order, whatever the graders do; and no process that is left over."""

import math
import multiprocessing
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import graders
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_jax import engine, rollout
from dash_jax.config import Engine
from dash_jax.errors import RunError, UserError
from dash_jax.grading import Graders
from dash_jax.policy import Policy

_PATIENCE = 60.0  # of a test, for what must happen sooner or later


@pytest.fixture(scope="module")
def pool():
    with Graders(graders.Task(), workers=2, seconds=1.0) as pool:
        yield pool


def _grade(pool, texts):
    pool.submit(range(len(texts)), graders.completions(texts))
    return pool.collect()


def _gone(pid):
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if "\nState:\tZ" in pathlib.Path(f"/proc/{pid}/status").read_text():
            return True  # ended; whoever inherited it has not asked yet
        time.sleep(0.02)
    return False


# --- grades -------------------------------------------------------------------------------------

_KINDS = {
    "key": "KeyError",
    "x": "ValueError",
    "nan": "ValueError",
    "none": "AttributeError",
    "unpicklable": "TypeError",
    "hang": "timeout",
    "exit": "died",
    "sys.exit": "died",
    "crash": "died",
}


def _check(scores, texts):
    assert [completion.text for completion in scores.completions] == texts
    assert [completion.problem.id for completion in scores.completions] == list(range(len(texts)))
    expected: dict[str, int] = {}
    for text, grade in zip(texts, scores.grades, strict=True):
        if text in _KINDS:
            expected[_KINDS[text]] = expected.get(_KINDS[text], 0) + 1
            assert math.isnan(grade.reward)
            assert not grade.correct
        else:
            assert grade == (float(text), text == "1", text)
    assert scores.failures == expected


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.sampled_from(["0", "1", "2.5", "x", "nan", "none", "key", "unpicklable"]), max_size=30),
    seed=st.randoms(use_true_random=False),
    parts=st.integers(1, 5),
)
def test_order_and_count_are_those_of_the_completions(pool, texts, seed, parts):
    texts = [*texts, "1"]  # at least one is graded
    completions, indices = graders.completions(texts), list(range(len(texts)))
    seed.shuffle(indices)
    for part in range(parts):
        mine = indices[part::parts]
        pool.submit(mine, [completions[index] for index in mine])
    _check(pool.collect(), texts)


def test_graders_that_hang_or_end_their_process_cost_their_own_reward_only(pool):
    texts = ["0", "1"] * 200 + ["hang", "exit", "sys.exit", "crash", "crash"]  # cheap: some come in chunks
    random.Random(0).shuffle(texts)
    scores = _grade(pool, texts)
    _check(scores, texts)
    assert scores.busy_seconds >= 1.0, "the time until the kill counts"
    _check(_grade(pool, ["1", "0"] * 20), ["1", "0"] * 20)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "hang",
            r"all 2 completions \(2 timeout\); mend it; the first: timeout: no grade within 1 s \(problem 0",
        ),
        ("crash", r"2 died.*died: its process ended: SIGSEGV \(problem 0 file:0\)"),
        ("exit", r"died: its process ended: exit code 3"),
        ("key", r"task test: .*2 KeyError"),
    ],
)
def test_a_grader_that_always_fails_stops_the_run_case_52(pool, text, words):
    with pytest.raises(RunError, match=words):
        _grade(pool, [text, text])
    _check(_grade(pool, ["1"]), ["1"])


def test_the_grader_gets_the_problem_and_the_finish(pool):
    scores = _grade(pool, ["problem"] * 5)
    assert [grade.extracted for grade in scores.grades] == ["0", "1", "2", "3", "4"]
    assert {grade.reward for grade in scores.grades} == {1.0}


def test_nothing_is_no_batch(pool):
    assert pool.collect()[:3] == ([], [], {})


def test_bugs_of_the_caller_are_not_hidden(pool):
    with pytest.raises(ValueError, match="zip"):
        pool.submit([0], [])
    pool.submit([0], graders.completions(["1"]))
    with pytest.raises(ValueError, match="completion 0 is submitted twice"):
        pool.submit([0], graders.completions(["1"]))
    pool.collect()


# --- processes ----------------------------------------------------------------------------------


def test_processes_know_no_jax():
    with Graders(graders.Real(), workers=1, seconds=60.0) as pool:
        modules = _grade(pool, ["5"]).grades[0].extracted.split()
    assert "dash_jax.tasks.math_problems" in modules
    assert not {"jax", "jaxlib", "flax", "transformers", "datasets"} & set(modules)


def test_no_process_is_left_after_the_run():
    before = set(multiprocessing.active_children())
    with Graders(graders.Task(), workers=2, seconds=60.0) as pool:
        said = {grade.extracted for grade in _grade(pool, ["process"] * 8).grades}
        assert {text.split()[1] for text in said} == {"True"}, "daemons"
        pool.submit(range(2), graders.completions(["hang", "hang"]))
    assert set(multiprocessing.active_children()) <= before
    assert all(_gone(int(text.split()[0])) for text in said)


def test_a_kill_ends_what_the_grader_has_started(tmp_path):
    with Graders(graders.Marking(tmp_path), workers=1, seconds=1.0) as pool:
        assert _grade(pool, ["hang with a program", "1"]).failures == {"timeout": 1}
        assert _gone(int((tmp_path / "0").read_text()))


def test_an_error_of_the_run_does_not_wait_for_graders():
    def run():
        with Graders(graders.Task(), workers=1, seconds=1e6) as pool:
            pool.submit([0], graders.completions(["hang"]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()


# A shell starts what it puts in the background with SIGINT ignored; these shall hear it all the same.
_HANGING = """
import signal, sys
import graders
from dash_jax.grading import Graders
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Graders(graders.Marking(sys.argv[1]), workers=1, seconds=1e6) as pool:
        pool.submit([0], graders.completions(["hang"]))
        pool.collect()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_leaves_no_orphans(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(_HANGING)
    path = os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as run:  # fmt: skip
        mark, end = tmp_path / "0", time.monotonic() + _PATIENCE
        while not mark.exists() and time.monotonic() < end and run.poll() is None:
            time.sleep(0.02)
        os.killpg(run.pid, number)  # as a terminal does
        try:
            _, words = run.communicate(timeout=_PATIENCE)  # until the last process has closed standard error
        finally:
            run.kill()  # else leaving the block would wait for it forever
    assert run.returncode == -number
    assert words.count("Traceback") == (number == signal.SIGINT), words
    assert _gone(int(mark.read_text()))


def test_a_process_that_does_not_start_stops_the_run(tmp_path):
    script = tmp_path / "no_guard.py"
    script.write_text(_HANGING.replace('if __name__ == "__main__":', "if True:"))
    path = os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=_PATIENCE, check=False,
    )  # fmt: skip
    assert "RunError: task test: a grading process did not start (exit code 1;" in done.stderr


def test_a_task_that_cannot_be_sent_is_refused():
    class Local(graders.Task):
        pass

    with pytest.raises(UserError, match="define its class at the top level of a module"):
        Graders(Local(), workers=1, seconds=1.0)


# --- while the sampler goes on ------------------------------------------------------------------


class _Numbers:
    def decode(self, ids):
        return " ".join(map(str, ids))


def test_grading_begins_before_sampling_ends(tmp_path, monkeypatch):
    """The third segment waits for the first grade: without overlap it would wait in vain."""
    policy = Policy(tiny.mesh_of(1, 1, 1), _Numbers(), tiny.CONFIG, (4, 9, 11, 13))
    problems = tiny.problems_of([5, 8, 2, 7])
    decode, segments = engine.Sampler.decode, []

    def patient_decode(self, batch, steps):
        segments.append(bool(list(tmp_path.iterdir())))
        end = time.monotonic() + _PATIENCE
        while len(segments) == 3 and not segments[-1] and time.monotonic() < end:
            time.sleep(0.01)
            segments[-1] = any(path.suffix == "" for path in tmp_path.iterdir())
        return decode(self, batch, steps)

    monkeypatch.setattr(engine.Sampler, "decode", patient_decode)
    with Graders(graders.Marking(tmp_path), workers=1, seconds=60.0) as pool:
        got = rollout.roll_out(
            rollout.sampler_weights(tiny.params(), policy), policy, problems,
            rollout.step_key(0, "train", 0), group_size=tiny.G, max_new_tokens=12, temperature=1.0,
            memory_gb=1.0, engine=Engine(segment_tokens=2), on_ended=pool.submit,
        )  # fmt: skip
        scores = pool.collect()
    assert len(segments) > 3
    assert segments[2]
    assert (got.lengths < 3).any(), "some have ended before the third segment"
    tokens, lengths = got.tokens.reshape(-1, 12), got.lengths.reshape(-1)
    for place, (problem, text, finish) in enumerate(scores.completions):
        assert problem == problems[place // tiny.G]
        assert text == scores.grades[place].extracted == _Numbers().decode(tokens[place, : lengths[place]])
        assert finish == got.finish.reshape(-1)[place]
