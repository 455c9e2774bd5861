"""The order in which modules may import each other, and what the pure ones may import at all."""

import ast
import pathlib

import pytest

import dash_jax

_ROOT = pathlib.Path(dash_jax.__file__).parent

# From the bottom up: a module imports only from rows above its own in this list.
_ROWS = (
    {"errors", "problems", "types"},
    {"config_yaml", "rope"},
    {"config", "sharding", "timing", "losses", "advantages", "metrics"},
    {"batching", "model"},
    {"sampling", "logprobs"},
    {"learner"},
    {"tokenization", "tasks", "hf_config", "hf_tensors"},
    {"rewards", "weights"},
    {"policy", "checkpoint", "tracker", "grading"},
    {"engine", "report"},
    {"rollout"},
    {"learning", "evaluate"},
    {"sft", "trainer", "bench"},
    {"profile"},
    {"cli"},
    {"__main__"},
)
_PURE = (
    "rope",
    "sharding",
    "model",
    "sampling",
    "logprobs",
    "advantages",
    "losses",
    "batching",
    "metrics",
    "learner",
)
_ALLOWED_IN_PURE = {"jax", "flax", "optax", "jaxtyping", "numpy", "dash_jax"}


def _modules():
    for path in sorted(_ROOT.rglob("*.py")):
        parts = path.relative_to(_ROOT).with_suffix("").parts
        if parts != ("__init__",):
            yield parts[0], path


def _imports(path):
    """(package, module of ours or None) of every import, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0], [*alias.name.split("."), None][1]
        elif isinstance(node, ast.ImportFrom):
            package, *rest = (node.module or "").split(".")
            if package == "dash_jax" and not rest:
                for alias in node.names:
                    yield package, alias.name
            else:
                yield package, rest[0] if rest else None


def test_every_module_has_its_row():
    listed = set().union(*_ROWS)
    assert {name for name, _ in _modules()} == listed


@pytest.mark.parametrize(("name", "path"), list(_modules()), ids=lambda value: getattr(value, "name", value))
def test_imports_point_up(name, path):
    row = next(index for index, names in enumerate(_ROWS) if name in names)
    above = set().union(*_ROWS[:row]) | ({name} if name == "tasks" else set())
    ours = {module for package, module in _imports(path) if package == "dash_jax"} - {"__version__", None}
    assert ours <= above, f"{path.name} imports {sorted(ours - above)}, which stand at its level or below"


@pytest.mark.parametrize("name", _PURE)
def test_pure_modules_import_arrays_only(name):
    packages = {package for package, _ in _imports(_ROOT / f"{name}.py")}
    standard = {"__future__", "collections", "dataclasses", "functools", "math", "typing"}
    assert packages <= _ALLOWED_IN_PURE | standard
