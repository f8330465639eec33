"""Parts of the command line that every group of commands uses."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from typing import Any, NoReturn

from meshsys.errors import ConfigError

__all__ = ["Parser", "add_config", "command", "number"]


class Parser(argparse.ArgumentParser):
    """Reports one line and no usage; names the nearest choice."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    # argparse has no public hook here, and its own message lists the choices in a form of each Python version's own.
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            near = difflib.get_close_matches(str(value), choices, 1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"{value} is not a choice; {hint}")


def command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], about: str
) -> argparse.ArgumentParser:
    """Adds one command; `run` takes the parsed arguments and gives the exit code, None for 0."""
    parser = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False)
    parser.set_defaults(run_command=run)
    return parser


def add_config(parser: argparse.ArgumentParser) -> None:
    """The arguments CONFIG [key=value ...], as `load_config` takes them."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, such as configs/quickstart.yaml")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=(), help="overrides, as train.steps=100")


def number(kind: type[int] | type[float], least: int, most: float = float("inf")) -> Callable[[str], float]:
    """The `type` of an argument that is a number from `least` to `most`."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not least <= value < float("inf"):
            what = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text} must be {what} of at least {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text} must be at most {most}")
        return value

    return convert
