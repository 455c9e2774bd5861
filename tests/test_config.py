"""The settings: what is read, what is refused and how, and that each of them is used."""

import dataclasses
import pathlib
import re

import pytest
import yaml

from dash_jax import config as configuration
from dash_jax.config import Config
from dash_jax.errors import UserError

_ROOT = pathlib.Path(__file__).parents[1]


def _keys(section, prefix=""):
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _keys(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _refusal(*overrides, path=None):
    with pytest.raises(UserError) as error:
        configuration.load(path, overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_file_and_overrides_and_back(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("rollout: {prompts: 4}\noptimizer:\n  learning_rate: 3e-6\n")
    loaded = configuration.load(path, ["rollout.group_size=4", "optimizer.clip_norm=2", "model.path=null"])
    assert (loaded.rollout.prompts, loaded.rollout.group_size) == (4, 4)
    assert loaded.optimizer.learning_rate == 3e-6
    assert loaded.optimizer.clip_norm == 2.0
    assert configuration.from_dict(yaml.safe_load(configuration.to_yaml(loaded))) == loaded


def test_the_tree_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().rollout.prompts = 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.group_sise=4", "rollout.group_sise: unknown key; did you mean rollout.group_size?"),
        ("rolout.group_size=4", "rolout: unknown key; did you mean rollout?"),
        ("zebra=1", "zebra: unknown key; the top level has run, seed, model"),
        ("rollout.prompts=many", "rollout.prompts='many': input should be a valid integer"),
        ("rollout.prompts=2.5", "rollout.prompts=2.5: input should be a valid integer"),
        ("rollout.prompts=true", "rollout.prompts=True: input should be a valid integer"),
        ("rollout.prompts=0", "rollout.prompts=0: input should be greater than 0"),
        ("rollout.temperature=0", "rollout.temperature=0: input should be greater than or equal to 0.001"),
        ("rollout.temperature=.nan", "rollout.temperature=nan: input should be a finite number"),
        ("rollout=3", "rollout=3: input should be an object"),
        ("rollout.prompts.x=3", "rollout.prompts=a section: input should be a valid integer"),
        ("algorithm.filter=maybe", "algorithm.filter='maybe': input should be a valid boolean"),
        ("algorithm.kl_estimator=k4", "algorithm.kl_estimator='k4': input should be 'k1', 'k2' or 'k3'"),
        ("task.math.train=a.jsonl", "task.math.train='a.jsonl': input should be a valid array"),
        ("seed=-1", "seed=-1: input should be greater than or equal to 0"),
        # settings that contradict each other
        ("rollout.group_size=1", "a group of one has no baseline; set rollout.group_size to 2 or more"),
        ("learner.optimizer_batch=12", "splits a group: set a multiple of rollout.group_size=8"),
        ("learner.optimizer_batch=96", "does not divide the rollout"),
        ("learner.optimizer_batch=128", "algorithm.loss=policy_gradient with 2 optimizer steps a rollout"),
        ("learner.micro_batch=4", "set a multiple of rollout.group_size=8, or share_prompt=false"),
        (
            "rollout.max_prompt_tokens=1000",
            "is above the model's 1024 positions (model.max_positions); lower",
        ),
        ("eval.pass_at=[0]", "eval.pass_at holds 0"),
        ("task.arithmetic.levels=[6]", "task.arithmetic.levels=[6]"),
        ("model.kv_heads=3", "model.kv_heads=3 does not divide model.heads=4"),
        ("model.hidden_size=100", "model.hidden_size=100 is not a multiple of 2 × model.heads=8"),
        ("prompts", "override 'prompts': write section.key=value"),
        ("=3", "override '=3': write section.key=value"),
        ("run.x=[", "override 'run.x=[':"),
    ],
)
def test_refusals_name_the_key_and_the_mend(override, words):
    assert words in _refusal(override)


def test_more_contradictions():
    both = ("algorithm.filter=false", "algorithm.denominator=kept")
    assert "algorithm.denominator=kept needs algorithm.filter=true" in _refusal(*both)
    nothing = ("eval.samples=0", "eval.greedy=false")
    assert "leaves nothing to evaluate" in _refusal(*nothing)
    no_place = ("task.kind=math", "task.math.template=Solve")
    assert "has no {question}" in _refusal(*no_place)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"rollout: [1", "bad.yaml: line 1"),
        (b"rollout: {prompts: 1}\nrollout: {prompts: 2}\n", "key 'rollout' stands twice"),
        (b"- 1\n", "holds a list; a config is"),
        (b"run: \xff\n", "give a UTF-8 YAML file"),
    ],
)
def test_files_that_are_no_config(tmp_path, content, words):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    message = _refusal(path=path)
    assert words in message
    assert "bad.yaml" in message


def test_a_missing_file():
    assert "none.yaml: no such config file" in _refusal(path="none.yaml")


def test_every_key_is_read_by_something():
    """By attribute access outside of config.py; a key that nothing reads would be a lie."""
    code = "".join(p.read_text() for p in (_ROOT / "dash_jax").rglob("*.py") if p.name != "config.py")
    properties = {"learner.optimizer_batch": ".optimizer_batch"}
    unread = [
        key
        for key in _keys(Config())
        if not re.search(rf"\.{properties.get(key, key).split('.')[-1]}\b", code)
    ]
    assert not unread


def test_every_key_is_documented():
    """docs/configuration.md is the default tree as `dash-jax config` prints it; it also freezes the keys."""
    text = (_ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert configuration.to_yaml(Config()) in text


@pytest.mark.parametrize("path", sorted((_ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.name)
def test_every_config_loads(path):
    configuration.load(path)
    head = path.read_text().split("\n\n")[0]
    assert "dash-jax" in head or "launch/" in head, "a config opens with the command that runs it"
