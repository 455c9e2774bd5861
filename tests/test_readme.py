"""What the README and the docstrings show is what happens."""

import contextlib
import doctest
import importlib
import io
import pathlib
import re
import subprocess

import jax
import pytest

from dash_jax import config as configuration
from dash_jax import config_yaml
from dash_jax.cli import main

_ROOT = pathlib.Path(__file__).parents[1]
_README = (_ROOT / "README.md").read_text(encoding="utf-8")
_WITH_EXAMPLES = sorted(
    str(path.relative_to(_ROOT).with_suffix("")).replace("/", ".")
    for path in (_ROOT / "dash_jax").rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


def test_the_snippet_prints_what_stands_below_it():
    code, output = re.search(r"```python\n(.*?)```\s+```\n(.*?)```", _README, re.DOTALL).groups()
    printed = io.StringIO()
    with jax.numpy_rank_promotion("allow"), contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == output


def test_the_config_of_the_readme_loads():
    for block in re.findall(r"```yaml\n(.*?)```", _README, re.DOTALL):
        configuration.from_dict(config_yaml.parse_yaml(block, "README.md"))


def test_every_verb_and_file_of_the_readme_exists(capsys):
    for verb in set(re.findall(r"^dash-jax (\w+)", _README, re.MULTILINE)):
        with pytest.raises(SystemExit) as exit_:
            main([verb, "--help"])
        assert exit_.value.code == 0
    links, scripts = r"\]\((?!http)([^)#]+)\)", r"bash (launch/[a-z_.]+)"
    for path in re.findall(links, _README) + re.findall(scripts, _README):
        assert (_ROOT / path).exists(), path


@pytest.mark.parametrize("name", _WITH_EXAMPLES)
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("script", sorted((_ROOT / "launch").glob("*.sh")), ids=lambda path: path.name)
def test_launch_scripts_are_bash(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_train_script_without_a_config_says_how_it_is_called():
    done = subprocess.run(
        ["bash", str(_ROOT / "launch" / "train.sh")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "usage: bash launch/train.sh CONFIG.yaml" in done.stderr
