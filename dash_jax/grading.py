"""Grading in processes of its own, while the sampler goes on.

A thread deals the completions out to the processes and takes the verdicts back, so that nobody else waits
for a grader: `submit` returns at once. It also keeps the time. A grader that takes too long is killed from
outside, whatever it does; one that ends its process (a crash, `os._exit`) is the same. That completion is
counted as a failure, a new process goes on with the others.

Cheap grades travel in chunks, of as many as take a tenth of a second together. Nobody knows which one of a
chunk has killed the process or used up the time; so then each of them is graded again, alone, and only
what fails alone is a failure. A grader must hence not mind being asked twice.

The processes know the task and no JAX. They are daemons, in sessions of their own: Ctrl-C does not reach
them, a kill also ends the programs that a grader has started (with `subprocess`; `multiprocessing` refuses
that to daemons), and when the training process is gone, so are they. A grader that holds Python's lock
forever, inside a C extension, is the exception to the last. Nothing here limits memory or isolates what
a grader runs.
"""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from dash_jax.errors import RunError, UserError
from dash_jax.problems import Completion, Grade
from dash_jax.rewards import Failure, Scores, judge, scores
from dash_jax.tasks import Task

_SPAWN = multiprocessing.get_context("spawn")  # JAX has threads: a fork could deadlock
_START_SECONDS = 120.0  # for a process to start and import the task's module
_CHUNK_SECONDS = 0.1
_LARGEST_CHUNK = 256


class Graders:
    """A context manager around a run: its grading processes start once, in the background.

        with Graders(task, workers=2, seconds=10.0) as graders:
            graders.submit([1, 0], [Completion(problem, "#21", Finish.EOS), Completion(...)])
            scores = graders.collect()

    Args:
      task: is pickled once; the processes have a copy as it is now.
      workers: number of processes.
      seconds: wall-clock time that one grade may take.
    """

    def __init__(self, task: Task, *, workers: int, seconds: float) -> None:
        self._name, self._count, self._seconds = task.name, workers, seconds
        self._task = _pickled(task)
        self._workers: list[_Worker] = []
        self._bell, self._rope = _SPAWN.Pipe(duplex=False)  # wakes the thread
        self._graded, self._graded_seconds = 0, 0.0  # the thread's alone; failures do not count
        # What both threads touch, under the lock of `_changed`.
        self._changed = threading.Condition()
        self._completions: dict[int, Completion] = {}
        self._verdicts: dict[int, Grade | Failure] = {}
        self._waiting: collections.deque[int] = collections.deque()
        self._alone: collections.deque[int] = collections.deque()  # to be graded in a chunk of one
        self._busy_seconds = 0.0
        self._closing = False

    def __enter__(self) -> Graders:
        for _ in range(self._count):
            self._workers.append(_Worker(self._task))
        self._threads = ThreadPoolExecutor(1, "grading")
        self._supervisor = self._threads.submit(self._supervise)
        self._supervisor.add_done_callback(self._wake)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._rope.send_bytes(b"")
        self._threads.shutdown()
        self._rope.close()
        self._bell.close()

    def submit(self, indices: Sequence[int], completions: Sequence[Completion]) -> None:
        """Hands completions over to be graded, each with its place in what `collect` returns."""
        with self._changed:
            for index, completion in zip(indices, completions, strict=True):
                if index in self._completions:
                    raise ValueError(f"completion {index} is submitted twice")
                self._completions[index] = completion
                self._waiting.append(index)
        self._rope.send_bytes(b"")

    def collect(self) -> Scores:
        """Waits for the grades of all that was submitted since the last call; they must be 0 ... n - 1.

        Raises RunError when all of them failed, or when no grading process starts.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._verdicts) == len(self._completions) or self._supervisor.done()
            )
            if self._supervisor.done():
                self._supervisor.result()  # raises what it has ended with
            places = range(len(self._completions))
            completions = [self._completions[index] for index in places]
            verdicts = [self._verdicts[index] for index in places]
            busy_seconds, self._busy_seconds = self._busy_seconds, 0.0
            self._completions.clear()
            self._verdicts.clear()
        return scores(self._name, completions, verdicts, busy_seconds=busy_seconds)

    # --- the thread ---

    def _supervise(self) -> None:
        try:
            while not self._closing:
                for worker in self._workers:
                    if worker.ready and not worker.chunk:
                        self._hand_out(worker)
                connections = [worker.connection for worker in self._workers]
                deadlines = [end for worker in self._workers if (end := self._deadline(worker)) is not None]
                patience = max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None
                heard = wait([self._bell, *connections], patience)
                if self._bell in heard:
                    self._bell.recv_bytes()
                for worker in list(self._workers):
                    end = self._deadline(worker)
                    if worker.connection in heard:
                        self._hear(worker)
                    elif end is not None and end <= time.monotonic():
                        self._replace(worker, "timeout")
        finally:
            for worker in self._workers:
                worker.end()

    def _deadline(self, worker: _Worker) -> float | None:
        """None for a worker that has nothing to do."""
        if worker.ready:
            return worker.since + self._seconds if worker.chunk else None
        return worker.since + _START_SECONDS

    def _hand_out(self, worker: _Worker) -> None:
        chunk_seconds = min(_CHUNK_SECONDS, self._seconds / 10)
        # Before the first grade nothing is known: one.
        size = int(chunk_seconds * self._graded / max(self._graded_seconds, 1e-9))
        size = min(max(size, 1), _LARGEST_CHUNK)
        with self._changed:
            if self._alone:
                worker.chunk = [self._alone.popleft()]
            else:
                worker.chunk = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
            completions = [self._completions[index] for index in worker.chunk]
        worker.since = time.monotonic()
        if not completions:
            return
        try:
            worker.connection.send(completions)
        except OSError:  # it has died while it had nothing to do, and will be heard of
            with self._changed:
                self._alone.extend(worker.chunk)
            worker.chunk = []

    def _hear(self, worker: _Worker) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            self._replace(worker, "died")
            return
        if not worker.ready:
            worker.ready = True
            return
        verdicts, seconds = message
        self._graded += len(verdicts)
        self._graded_seconds += seconds
        with self._changed:
            self._verdicts.update(zip(worker.chunk, verdicts, strict=True))
            self._busy_seconds += seconds
            self._changed.notify_all()
        worker.chunk = []

    def _replace(self, worker: _Worker, kind: str) -> None:
        how = worker.end(patience=1.0 if kind == "died" else 0.0)
        if not worker.ready:
            raise RunError(
                f"task {self._name}: a grading process did not start ({how}; its own words, if any, stand "
                "above). It imports the task's module, and the script that runs, whose work must stand "
                'under `if __name__ == "__main__":`'
            )
        message = f"no grade within {self._seconds:g} s" if kind == "timeout" else f"its process ended: {how}"
        with self._changed:
            if worker.chunk:
                self._busy_seconds += time.monotonic() - worker.since
            if len(worker.chunk) == 1:
                self._verdicts[worker.chunk[0]] = Failure(kind, message)
                self._changed.notify_all()
            else:
                self._alone.extend(worker.chunk)
        self._workers[self._workers.index(worker)] = _Worker(self._task)

    def _wake(self, _: Any) -> None:
        with self._changed:
            self._changed.notify_all()


class _Worker:
    """One grading process, seen from outside."""

    def __init__(self, task: bytes) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(
            target=_work, args=(theirs, task), name="dash-jax-grading", daemon=True
        )
        # It inherits the mask, so that Ctrl-C is ours alone from its first moment on.
        resource_tracker.ensure_running()  # else `start` does that, which would lift the mask
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        self.ready = False  # it has said its first word, None
        self.chunk: list[int] = []  # what it grades now
        self.since = time.monotonic()  # when it was last given something to do

    def end(self, *, patience: float = 0.0) -> str:
        """Kills the process and all of its session, unless it ends by itself in time. How it has ended."""
        assert self._process.pid is not None
        if not self.connection.closed:
            self.connection.close()
            wait([self._process.sentinel], patience)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # no session of its own, or empty
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
        code = self._process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _pickled(task: Task) -> bytes:
    try:
        return pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"task {task.name}: cannot be sent to the grading processes ({error}); define its class at the "
            "top level of a module, and keep open files, locks and lambdas out of its attributes"
        ) from None


def _work(connection: Connection, pickled: bytes) -> None:
    """What a grading process does: in its main thread, since graders may use signals."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    task = pickle.loads(pickled)
    with contextlib.suppress(EOFError, ConnectionError):  # the run is over
        connection.send(None)
        while True:
            completions = connection.recv()
            start = time.monotonic()
            verdicts = [judge(task, completion) for completion in completions]
            connection.send((verdicts, time.monotonic() - start))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
