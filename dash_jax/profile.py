"""Where a training step spends its time: a trace for TensorBoard or XProf, and a table of its largest costs.

The step is repeated with a learning rate too small to change a weight, so that it samples the same
completions every time and the traced one compiles nothing.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pathlib
import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from rich.table import Table

from dash_jax.checkpoint import Checkpoints
from dash_jax.config import Config
from dash_jax.errors import RunError
from dash_jax.grading import Graders
from dash_jax.learning import Learning
from dash_jax.policy import describe
from dash_jax.tasks import load_task
from dash_jax.timing import Clock
from dash_jax.tracker import PHASES
from dash_jax.trainer import take_step, training_problems

# The first step compiles, the second what the sampler's buffers of the first were not there for.
_WARM_UP = 2
_COMPILATION_CACHE = "jax_enable_compilation_cache"  # an attribute that not every JAX's stubs know
_CONTAINERS = ("while", "conditional", "call")  # opcodes: only what they contain takes time
_PROGRAMS = {"jit_begin": "prefill", "jit__move": "compaction", "jit_update": ""}  # where names say little


class Cost(NamedTuple):
    """Example: `Cost("learning", "backward gate_up/dot_general f32[256,2048]", seconds=1.2, calls=64)`"""

    phase: str  # with the program behind it, "sampling: decode", where a phase has several
    what: str
    seconds: float
    calls: int


class Profile(NamedTuple):
    """`costs` are sorted, largest first; `busy` are the seconds in which at least one operation ran."""

    folder: pathlib.Path
    phases: dict[str, float]
    costs: list[Cost]
    busy: float
    kept: float  # share of the completions that the filter left to the learner


@contextlib.contextmanager
def _everything_compiled_here() -> Iterator[None]:
    """No compilation cache: a program that comes from it has another id in the trace than its module has."""
    before = getattr(jax.config, _COMPILATION_CACHE)
    jax.config.update(_COMPILATION_CACHE, False)
    try:
        yield
    finally:
        jax.config.update(_COMPILATION_CACHE, before)


@_everything_compiled_here()
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
    folder = run / "profile"
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a Python call a microsecond would hide what is looked for
    clock = Clock()
    state, step = learning.start(Checkpoints(run / "checkpoints", keep=config.train.keep_checkpoints))
    with Graders(task, workers=config.reward.workers, seconds=config.reward.seconds) as graders:
        for _ in range(_WARM_UP):
            state, _ = take_step(state, step, problems, learning, policy, graders, config, clock)
        shutil.rmtree(folder, ignore_errors=True)
        with jax.profiler.trace(str(folder), profiler_options=options):
            clock.lap("other")
            clock.seconds()
            with jax.profiler.StepTraceAnnotation("step", step_num=step):
                state, done = take_step(state, step, problems, learning, policy, graders, config, clock)
                jax.block_until_ready(state)
    meanings = _meanings()
    events, phases = _read(folder, {key for key, what in meanings.items() if not what})
    if not events:
        raise RunError(
            f"{folder}: the trace names no operation of {jax.default_backend()}; XProf may show more"
        )
    costs = _costs(events, phases, meanings)
    return Profile(folder, clock.seconds(), costs, _covered(events), done.learned["kept_share"])


class _Event(NamedTuple):
    module: str
    program: int  # its id: programs for different shapes have one name
    op: str
    start: float  # seconds
    end: float


class _Span(NamedTuple):
    phase: str
    start: float
    end: float


def _read(folder: pathlib.Path, containers: Collection[tuple[int, str]]) -> tuple[list[_Event], list[_Span]]:
    """The operations of compiled programs in a trace, on host threads (CPU) or device streams; the phases.

    Loops and branches are left out, what they run counts. What a device does outside of an operation, like
    a copy from the host, has the name of its kernel.
    """
    (file,) = folder.glob("plugins/profile/*/*.xplane.pb")
    events, phases = [], []
    with warnings.catch_warnings():
        # Of how JAX defines the type of `event.stats`; as an error it would end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                on_device = plane.name.startswith("/device:") and line.name.startswith("Stream")
                for event in line.events:
                    stats: dict[str, Any] = dict(event.stats)
                    start, end = event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9
                    op = str(stats.get("hlo_op", event.name if on_device else ""))
                    if event.name in PHASES:
                        phases.append(_Span(event.name, start, end))
                    module, program = str(stats.get("hlo_module", "")), int(stats.get("program_id", 0))
                    if op and (program, op) not in containers:
                        events.append(_Event(module, program, op, start, end))
    return events, phases


def _meanings() -> dict[tuple[int, str], str]:
    """(program, operation) -> where in the model it comes from and the shape of its (first) result; "" for
    a loop or a branch."""
    meanings = {}
    for executable in jax.devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            program = _id(module.as_serialized_hlo_module_proto())
            for match in _INSTRUCTION.finditer(module.to_string()):
                op, shape, opcode, name = match.groups()
                what = f"{_shortened(name or '') or _kind(op)} {shape}"
                meanings[program, op] = "" if opcode in _CONTAINERS else what
    return meanings


_INSTRUCTION = re.compile(
    r"%([\w.-]+) = "
    r"\(*(\w+\[[\d,]*\])[^\n]*? ([a-z][\w-]*)\("  # shape, a tuple's parts behind it, opcode
    r'[^\n]*?(?:metadata=\{op_name="([^"]*)"|$)',
    re.MULTILINE,
)
_NOISE = re.compile(
    r"^(jit\(.*|while|body|cond|branch_\d+_fun|eval_jaxpr|closed_call|checkpoint|(layers|Block)(\._linear)?|)$"
)


def _id(module: bytes) -> int:
    """Field 5 of a serialized HloModuleProto; all before it are texts and messages. 0 if there is none."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = module[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(module):
        tag = number()
        if tag & 7 != 2:
            return number() if tag >> 3 == 5 else 0
        length = number()
        at += length
    return 0


def _kind(op: str) -> str:
    return re.sub(r"[.\d]+$", "", op)


def _shortened(name: str) -> str:
    """`jit(update)/while/body/transpose(jvp(Decoder))/layers/gate_up/dot` -> `backward gate_up/dot`"""
    direction = "recomputed " if "rematted" in name else "backward " if "transpose(" in name else ""
    parts = [re.sub(r"^(vmap\()+([^)]*)\)+$", r"\2", part) for part in name.split("/")]
    parts = [part for part in parts if not (_NOISE.match(part) or "jvp(" in part or "rematted" in part)]
    return direction + "/".join(parts[-2:]) if parts else ""


def _costs(
    events: Sequence[_Event], phases: Sequence[_Span], meanings: dict[tuple[int, str], str]
) -> list[Cost]:
    seconds: collections.defaultdict[tuple[str, str], float] = collections.defaultdict(float)
    calls: collections.Counter[tuple[str, str]] = collections.Counter()
    for event in events:
        phase = next((span.phase for span in phases if span.start <= event.start < span.end), "other")
        program = _PROGRAMS.get(event.module, event.module.removeprefix("jit_").strip("_"))
        what = meanings.get((event.program, event.op), _kind(event.op))
        key = f"{phase}: {program}" if program else phase, what
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
        title=f"one step: {wall:.2f} s ({phases}); operations ran in {result.busy / wall:.0%} of it; "
        f"{result.kept:.0%} of the completions kept",
        caption=f"the {rows} largest of {len(result.costs)} kinds of operation, {total:.2f} s in all",
    )
    for column in ("phase", "operation", "seconds", "share", "calls"):
        shown.add_column(column, justify="left" if column in ("phase", "operation") else "right")
    for cost in result.costs[:rows]:
        shown.add_row(
            cost.phase, cost.what, f"{cost.seconds:.3f}", f"{cost.seconds / total:.1%}", f"{cost.calls:,}"
        )
    return shown
