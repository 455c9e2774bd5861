"""Settings as text: YAML files and `section.key=value` overrides in, commented YAML out.

Knows no key; what the keys are and may hold is said in `config`.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import yaml

from dash_jax.errors import UserError


def read_tree(path: str | pathlib.Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The sections and keys of a file (None: nothing), the overrides put over them; unchecked.

    Raises UserError with one line that names the file or the override, and the mend.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = parse_yaml(pathlib.Path(path).read_text(encoding="utf-8"), str(path)) or {}
        except FileNotFoundError:
            raise UserError(f"{path}: no such config file; see configs/ for examples") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read ({error}); give a UTF-8 YAML file") from None
        if not isinstance(tree, dict):
            raise UserError(
                f"{path}: holds a {type(tree).__name__}; a config is `section:` lines with keys below"
            )
    for override in overrides:
        _apply_override(tree, override)
    return tree


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}:{line} {error.problem}; mend the YAML") from None


def yaml_lines(section: Any, indent: int = 0) -> list[str]:
    """A section's keys with their values and, as comments, their descriptions."""
    lines = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        pad = "  " * indent
        if dataclasses.is_dataclass(value):
            lines += [f"{pad}{field.name}:\n", *yaml_lines(value, indent + 1)]
            continue
        text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
        text = text.removesuffix("...\n").strip()
        description = section.__pydantic_fields__[field.name].description
        lines.append(f"{pad}{field.name}: {text}" + (f"  # {description}" if description else "") + "\n")
    return lines


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(
            f"override {override!r}: write section.key=value, rollout.temperature=0.9 for instance"
        )
    *sections, name = key.split(".")
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise UserError(f"override {override!r}: {section} is a value, not a section")
    tree[name] = parse_yaml(text, f"override {override!r}")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with two mends: `1e-5` is a number, and a key that stands twice is refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} stands twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)
