"""Tasks for the tests of grading. Grading processes import this module, so it imports little."""

import math
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

from dash_jax import config
from dash_jax.problems import Completion, Finish, Grade, Problem
from dash_jax.tasks import load_task


class Task:
    name = "test"
    chat = False

    def train(self):
        return []

    test = train

    def grade(self, problem, text, finish):
        """Does what `text` says: a number is the reward."""
        match text:
            case "none":
                return None
            case "nan":
                return Grade(math.nan, False, None)
            case "unpicklable":
                return Grade(1.0, True, lambda: None)
            case "key":
                raise KeyError(text)
            case "hang":
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
                    signal.signal(number, signal.SIG_IGN)
                while True:
                    time.sleep(60)
            case "exit":
                os._exit(3)
            case "sys.exit":
                sys.exit(4)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "process":
                return Grade(1.0, True, f"{os.getpid()} {multiprocessing.current_process().daemon}")
            case "problem":
                return Grade(float(finish), True, problem.answer)
        return Grade(float(text), text == "1", text)


class Real(Task):
    """What a process has imported when it has the task that a config names."""

    def __init__(self):
        self.inner = load_task(config.Config().task, 0)

    def grade(self, problem, text, finish):
        self.inner.grade(problem, text, finish)
        return Grade(0.0, False, " ".join(sys.modules))


class Marking(Task):
    """Leaves a file for each grade, with the id of its process, or of the program that it has started."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def grade(self, problem, text, finish):
        path = self.folder / f"{problem.id}"
        pid = subprocess.Popen(["sleep", "1000"]).pid if text == "hang with a program" else os.getpid()
        path.with_suffix(".tmp").write_text(str(pid))
        path.with_suffix(".tmp").rename(path)
        return super().grade(problem, "hang", finish) if "hang" in text else Grade(1.0, True, text)


def completions(texts):
    return [
        Completion(
            Problem(id=i, task="test", prompt="?", answer=f"{i}", source=f"file:{i}"), text, Finish.EOS
        )
        for i, text in enumerate(texts)
    ]
