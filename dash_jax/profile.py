"""Where a training step spends its time: a trace for TensorBoard or XProf, and a table of its largest costs.

The step is repeated with a learning rate too small to change a weight, so that it samples the same
completions every time and the traced one compiles nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
import shutil
import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
from rich.table import Table

from dash_jax.checkpoint import Checkpoints
from dash_jax.config import Config
from dash_jax.grading import Graders
from dash_jax.learning import Learning
from dash_jax.policy import describe
from dash_jax.tasks import load_task
from dash_jax.timing import Clock
from dash_jax.trainer import take_step, training_problems

_WARM_UP = (
    2  # steps: the first compiles, the second what the sampler's buffers of the first were not there for
)
_CONTAINERS = ("while", "conditional", "call")  # only their contents take time
_PROGRAMS = {
    "jit__begin": "sampling: prefill",
    "jit_begin": "sampling: prefill",
    "jit_decode": "sampling: decode",
    "jit__move": "sampling: compaction",
    "jit_update": "learning",
}


class Cost(NamedTuple):
    """Example: `Cost("learning", "backward gate_up/dot_general f32[256,2048]", seconds=1.2, calls=64)`"""

    program: str
    what: str
    seconds: float
    calls: int


class Profile(NamedTuple):
    """`costs` are sorted, largest first; `busy` are the seconds in which at least one operation ran."""

    folder: pathlib.Path
    phases: dict[str, float]
    costs: list[Cost]
    busy: float


def profile(config: Config) -> Profile:
    """Traces one step of `config.run` from its newest checkpoint or, where there is none, from the start.

    Writes into `config.run`/profile and nowhere else; an earlier trace there is replaced.
    """
    still = dataclasses.replace(config.optimizer, learning_rate=1e-30, warmup_steps=0)
    config = dataclasses.replace(config, optimizer=still)
    task = load_task(config.task, config.seed)
    policy = describe(config)
    problems = training_problems(config, task, policy)
    learning = Learning(config, policy)
    run = pathlib.Path(config.run)
    state, step = learning.start(Checkpoints(run / "checkpoints", keep=config.train.keep_checkpoints))
    clock = Clock()
    with Graders(task, workers=config.reward.workers, seconds=config.reward.seconds) as graders:
        for _ in range(_WARM_UP):
            state, _ = take_step(state, step, problems, learning, policy, graders, config, clock)
        clock.seconds()
        folder = run / "profile"
        shutil.rmtree(folder, ignore_errors=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a Python call a microsecond would hide what is looked for
        with jax.profiler.trace(str(folder), profiler_options=options):
            state, _ = take_step(state, step, problems, learning, policy, graders, config, clock)
            jax.block_until_ready(state)
    events = list(_events(folder))
    return Profile(folder, clock.seconds(), _costs(events, _meanings()), _covered(events))


class _Event(NamedTuple):
    module: str
    op: str
    start: float  # seconds
    end: float


def _events(folder: pathlib.Path) -> Iterable[_Event]:
    """The operations of compiled programs in a trace, on host threads (CPU) or device streams."""
    (file,) = folder.glob("plugins/profile/*/*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    with warnings.catch_warnings():
        # Of how JAX defines the type of `event.stats`; as an error it would end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        for event in (event for plane in planes for line in plane.lines for event in line.events):
            stats = dict(event.stats)
            op = str(stats.get("hlo_op", "while"))  # no operation, like a loop, takes no time of its own
            if not op.startswith(_CONTAINERS):
                start = event.start_ns / 1e9
                yield _Event(str(stats.get("hlo_module", "")), op, start, start + event.duration_ns / 1e9)


def _meanings() -> dict[tuple[str, str], str]:
    """(module, operation) -> where in the model it comes from and the shape of its result."""
    meanings = {}
    for executable in jax.devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            for match in _INSTRUCTION.finditer(module.to_string()):
                op, shape, name = match.groups()
                meanings[module.name, op] = f"{_shortened(name)} {shape}"
    return meanings


_INSTRUCTION = re.compile(r'%([\w.-]+) = (\w+\[[\d,]*\])\S* .*?metadata=\{op_name="([^"]*)"')
_NOISE = re.compile(
    r"^(jit\(.*\)|while|body|cond|branch_\d+_fun|eval_jaxpr|closed_call|checkpoint|(layers|Block)(\._linear)?)$"
)


def _shortened(name: str) -> str:
    """`jit(update)/while/body/transpose(jvp(Decoder))/layers/gate_up/dot` -> `backward gate_up/dot`"""
    parts = [part for part in name.split("/") if not _NOISE.match(part)]
    direction = "recomputed " if "rematted" in name else "backward " if "transpose(" in name else ""
    return direction + "/".join(
        [part for part in parts if "jvp(" not in part and "rematted" not in part][-2:]
    )


def _costs(events: Sequence[_Event], meanings: dict[tuple[str, str], str]) -> list[Cost]:
    seconds: collections.defaultdict[tuple[str, str], float] = collections.defaultdict(float)
    calls: collections.Counter[tuple[str, str]] = collections.Counter()
    for event in events:
        what = meanings.get((event.module, event.op), re.sub(r"[.\d]+$", "", event.op))
        key = _PROGRAMS.get(event.module, event.module), what
        seconds[key] += event.end - event.start
        calls[key] += 1
    costs = [Cost(*key, total, calls[key]) for key, total in seconds.items()]
    return sorted(costs, key=lambda cost: -cost.seconds)


def _covered(events: Sequence[_Event]) -> float:
    """Seconds in which at least one event is under way."""
    covered, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        covered += max(event.end - max(event.start, reached), 0.0)
        reached = max(reached, event.end)
    return covered


def table(result: Profile, rows: int = 10) -> Table:
    """The largest costs. Shares are of the seconds of all operations, which may run side by side."""
    total = sum(cost.seconds for cost in result.costs)
    wall = result.phases["seconds"]
    phases = ", ".join(
        f"{name.removeprefix('seconds_')} {seconds:.2f}"
        for name, seconds in result.phases.items() if name != "seconds"
    )  # fmt: skip
    shown = Table(
        title=f"one step: {wall:.2f} s ({phases}); operations ran in {result.busy / wall:.0%} of it",
        caption=f"the {rows} largest of {len(result.costs)} kinds of operation, {total:.2f} s in all",
    )
    for column in ("program", "operation", "seconds", "share", "calls"):
        shown.add_column(column, justify="left" if column in ("program", "operation") else "right")
    for cost in result.costs[:rows]:
        shown.add_row(
            cost.program, cost.what, f"{cost.seconds:.3f}", f"{cost.seconds / total:.1%}", f"{cost.calls:,}"
        )
    return shown
