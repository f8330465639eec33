"""YAML files with `section.key=value` overrides, checked into one frozen record of sections; for any kind of file.

Values are never converted between kinds: `layers: "4"`, `layers: 4.0` and `layers: true` are errors.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from meshsys import yaml_core
from meshsys.errors import ConfigError

__all__ = ["INT32_MAX", "Count", "FromList", "Label", "Section", "Text", "Torus", "load", "one_of", "show_value"]

INT32_MAX = 2**31 - 1  # steps and positions are int32 on the devices

Count = Annotated[int, Field(ge=1, le=INT32_MAX)]


def _without_zero_byte(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a zero byte, which no path can; remove it")
    return text


Text = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_without_zero_byte)]
# `mesh.topology: 8` and `run.name: 17` are numbers to YAML, and text to whoever wrote them.
Label = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


FromList = BeforeValidator(_as_tuple)  # YAML has lists only, and frozen sections hold tuples


def _is_a_torus(topology: str) -> str:
    if not re.fullmatch(r"([a-z][a-z0-9]*:)?[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})*(_twisted)?", topology):
        raise ValueError("is not a torus; write sizes joined by `x`, as in 8, 2x2x2 or v5p:4x4x4")
    return topology


Torus = Annotated[Label, AfterValidator(_is_a_torus)]


class Section(BaseModel):
    """A mapping of options; all that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


_Root = TypeVar("_Root", bound=Section)


def load(kind: type[_Root], path: str | Path, overrides: Sequence[str] = (), *, example: str) -> _Root:
    """Reads a YAML file and applies `section.key=value` overrides, whose values are YAML too.

    An item of a list of sections is named by its place, as in `policies.0.queue=easy`.

    Args:
        example: an override, for messages.

    Raises:
        ConfigError: the first problem, in one line, with the nearest valid name or the valid choices.
    """
    return _Loader(kind, example).load(Path(path), overrides)


def one_of(names: Collection[str], value: str, what: str) -> str:
    """The value of a field whose choices are names; for field validators."""
    if value not in names:
        near = difflib.get_close_matches(value, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"use {', '.join(names)}"
        raise ValueError(f"is not a {what}; {hint}")
    return value


def show_value(value: Any) -> str:
    """The value as a user would write it, in one line and at most 60 characters."""
    escaped = isinstance(value, str) and not value.isprintable()
    text = repr(value) if escaped else yaml_core.dump(value, flow=True).rstrip("\n")
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Items(dict[str, Any]):
    """The names below each item of a list of sections."""


class _Optional(dict[str, Any]):
    """The names below a section that may be null."""


def _tree(kind: Any) -> dict[str, Any]:
    """The names below a section, each with the names below it; a value has none."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: _tree(field.annotation) for name, field in kind.model_fields.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return {field.name: _tree(hints[field.name]) for field in dataclasses.fields(kind)}
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        below = next(filter(None, map(_tree, typing.get_args(kind))), {})
        return _Optional(below) if below else {}
    if typing.get_origin(kind) is tuple:
        below = _tree(typing.get_args(kind)[0])
        return _Items(below) if below else {}
    return {}


def _names(node: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
    if isinstance(node, _Items):
        prefix = (*prefix, "0")
    for name, below in node.items():
        yield (*prefix, name)
        yield from _names(below, (*prefix, name))


class _Loader:
    """Reads one kind of file; knows its names, so that errors can suggest them."""

    def __init__(self, kind: type[Section], example: str):
        self._kind, self._example = kind, example
        self._tree = _tree(kind)

    def load(self, path: Path, overrides: Sequence[str]) -> Any:
        raw = self._read(path)
        for override in overrides:
            self._apply(override, raw)
        try:
            return self._kind.model_validate(raw)
        except ValidationError as error:
            raise ConfigError(self._explain(error.errors())) from None

    # Reading

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            raw = yaml_core.load(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.y*ml")], 1)
            hint = f"; did you mean {path.with_name(near[0])}?" if near else "; give the path of a YAML file"
            raise ConfigError(f"the configuration file {path} does not exist{hint}") from None
        except OSError as error:
            reason = f"{error.strerror}; give the path of a YAML file"
            raise ConfigError(f"the configuration file {path} cannot be read: {reason}") from None
        except yaml_core.MarkedYAMLError as error:
            line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
            reason = f"{error.problem or error.context}; mend that line"
            raise ConfigError(f"{path}{line} is not valid YAML: {reason}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not valid YAML: byte {error.start} is not UTF-8; save it as UTF-8") from None
        except (yaml_core.YAMLError, ValueError) as error:
            raise ConfigError(f"{path} is not valid YAML: {error}; mend or remove that value") from None
        if not isinstance(raw, dict):
            held = "is empty" if raw is None else f"holds {show_value(raw)}"
            raise ConfigError(f"{path} {held}; write a mapping of sections: {', '.join(self._tree)}")
        return raw

    def _apply(self, override: str, raw: dict[str, Any]) -> None:
        """Sets one `section.key=value` in the mapping that the file gave."""
        dotted, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"the override `{override}` has no `=`; write section.key=value, as in {self._example}")
        *parents, key = path = dotted.strip().split(".")
        try:
            value = yaml_core.load(text)
        except (yaml_core.YAMLError, ValueError):
            value = text  # such as the glob `*.txt`, an alias to YAML
        for depth in range(len(path)):
            if not self._known(path[: depth + 1]):
                raise ConfigError(self._unknown(path, value, depth))
        node: Any = raw
        for depth, parent in enumerate(parents):
            wanted: type = list if self._is_list(path[: depth + 1]) else dict
            if isinstance(node, list):
                node = node[self._place(path, depth, node)]
            else:
                below = self._children(path[: depth + 1])
                if parent not in node or (node[parent] is None and isinstance(below, _Optional)):
                    node[parent] = wanted()
                node = node[parent]
            if not isinstance(node, wanted):
                raise ConfigError(self._not_a_mapping(path[: depth + 1], node))
        if isinstance(node, list):
            node[self._place(path, len(parents), node)] = value
        else:
            node[key] = value

    def _place(self, path: Sequence[str], depth: int, items: list[Any]) -> int:
        place = int(path[depth])
        if place >= len(items):
            where = ".".join(path[:depth])
            raise ConfigError(f"{'.'.join(path)}: {where} has {len(items)} items; count from 0, or add one to the file")
        return place

    # Explaining

    def _children(self, path: Sequence[str]) -> dict[str, Any]:
        """The names below a path that exists; below a list those of its items, whichever is named."""
        node = self._tree
        for name in path:
            node = node if isinstance(node, _Items) and name.isdecimal() else node[name]
        return node

    def _known(self, path: Sequence[str]) -> bool:
        *parent, name = path
        return name.isdecimal() if self._is_list(parent) else name in self._children(parent)

    def _is_list(self, path: Sequence[str]) -> bool:
        return isinstance(self._children(path), _Items) and not path[-1].isdecimal()

    def _unknown(self, path: Sequence[str], value: Any, depth: int) -> str:
        """`path[depth]` is the name that does not exist."""
        parent, name = path[:depth], path[depth]
        siblings = self._children(parent)
        where = ".".join(parent)
        said = f"{'.'.join(path)}={show_value(value)} is not an option"
        if parent and not siblings:
            return f"{said}; {where} holds a single value"
        if self._is_list(parent):
            return f"{said}; {where} is a list, name an item by its place, as in {where}.0.{next(iter(siblings))}"
        names = list(_names(self._tree))
        if "." in name and (*parent, *name.split(".")) in names:
            above, _, below = name.rpartition(".")
            return f"{said} as one key; write {below} below {above.replace('.', ' and ')}"
        elsewhere = [other for other in names if other[-1] == path[-1]]
        near = difflib.get_close_matches(name, siblings, 1)
        if near and not (elsewhere and name == path[-1]):
            nearest = (*parent, *near)
            whole = (*nearest, *path[depth + 1 :])
            guesses = [whole if whole in names else nearest]
        else:
            outermost = min(map(len, elsewhere), default=0)
            guesses = [other for other in elsewhere if len(other) == outermost]
        if guesses:
            return f"{said}; did you mean {' or '.join('.'.join(guess) for guess in guesses)}?"
        return f"{said}; {where or 'the file'} has {', '.join(siblings)}"

    def _not_a_mapping(self, path: Sequence[str], value: Any) -> str:
        below = self._children(path)
        said, names = f"{'.'.join(path)}={show_value(value)}", ", ".join(below)
        if self._is_list(path):
            return f"{said} is not a list of mappings; write items with the keys {names}"
        return f"{said} is not a mapping; give it keys ({names}), or leave it out for the defaults"

    def _explain(self, errors: Sequence[ErrorDetails]) -> str:
        # A name that does not exist is often why another is missing, so it goes first.
        first = min(errors, key=lambda error: error["type"] not in _UNKNOWN)
        more = len(errors) - 1
        also = f" (and {more} more {'problem' if more == 1 else 'problems'})" if more else ""
        return self._explain_one(first) + also

    def _explain_one(self, error: ErrorDetails) -> str:
        kind, value = error["type"], error["input"]
        context = {name: f"{it:g}" if isinstance(it, float) else it for name, it in error.get("ctx", {}).items()}
        path = [str(part) for part in error["loc"]]
        if kind in _UNKNOWN:
            return self._unknown(path, value, len(path) - 1)
        if kind == "missing":
            if path == ["run", "name"] or path == ["run"]:
                return "run.name is missing; give the run a name, as in run.name=quickstart"
            return f"{'.'.join(path)} is missing; write it"
        if kind in ("model_type", "dataclass_type", "tuple_type"):
            return self._not_a_mapping(path, value)
        if kind == "value_error" and isinstance(value, dict):
            return str(context["error"])  # about several options, and it names them
        reason = _EXPLANATIONS[kind].format(**context).replace("'", "") if kind in _EXPLANATIONS else error["msg"]
        if kind == "value_error":
            reason = str(context["error"])
        return f"{'.'.join(path)}={show_value(value)} {reason}"


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")

_EXPLANATIONS = {
    "int_type": "is not an integer; write one, as in 8",
    "int_from_float": "is not an integer; write one, as in 8",
    "float_type": "is not a number; write one, as in 0.1",
    "bool_type": "is neither true nor false; write one of them",
    "string_type": "is not text; write one value, in quotes",
    "string_too_short": "is empty; give it a value, or leave it out for the default",
    "string_too_long": "is too long; use at most {max_length} characters",
    "string_unicode": "is not valid Unicode; write it in UTF-8",
    "finite_number": "is not a finite number; write one, as in 0.1",
    "greater_than": "must be above {gt}; raise it",
    "greater_than_equal": "must be at least {ge}; raise it",
    "less_than_equal": "must be at most {le}; lower it",
    "literal_error": "is not a choice; use {expected}",
    "too_short": "is empty; write at least one item",
}
