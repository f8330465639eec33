"""YAML by the core schema of YAML 1.2, strict about keys.

PyYAML follows YAML 1.1, where `3e-4` is text, `on` is true, `007` is octal and `2024-01-01` is a date. Here the first
is a number and the others are text. A mapping's keys must be text, each written once, and an alias stands for a single
value: one that stands for its own parent, or for a list of aliases of lists, would have no end.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml import MarkedYAMLError, YAMLError

__all__ = ["MarkedYAMLError", "YAMLError", "dump", "load"]


def load(text: str) -> Any:
    """The value of a document: mappings, lists, text, numbers, booleans, None.

    Raises:
        YAMLError: not valid YAML; a `MarkedYAMLError` knows the line.
        ValueError: an explicit tag on a value that does not fit it, or an integer of thousands of digits.
    """
    return yaml.load(text, Loader=_Loader)


def dump(value: Any, *, flow: bool = False) -> str:
    """Text that `load` reads back to an equal value.

    Args:
        flow: in one line, with braces and brackets.
    """
    return yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=flow,
        width=10**6,  # a folded line would be hard to search for
    ).removesuffix("...\n")


_CORE_SCHEMA = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][0-9]*)",
    "float": r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


_DEEPEST = 32  # far below what would exhaust the stack


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema; a mapping's keys are text, each written once."""

    yaml_implicit_resolvers: dict = {}
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        mark: Any = event.start_mark
        self._depth += 1
        if self._depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem="it is nested too deeply", problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent) and not isinstance(node, yaml.ScalarNode):
            problem = f"the alias `*{event.anchor}` stands for more than a single value, which must be written out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                problem = f"the key `{key}` is not text"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            if key in lines:
                problem = f"the key `{key}` is in line {lines[key]} already"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            lines[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the text that `_Loader` would take for something else."""

    yaml_implicit_resolvers: dict = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern in _CORE_SCHEMA.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), None)
