"""The `meshsys` command.

What a command needs is imported when it runs: `--help` stays fast, and JAX starts only after the fake devices that a
configuration asks for are set up.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from meshsys.errors import ConfigError
from schedules.actions import Schedule, ScheduleError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code.

    0 when it is done, 1 after a training step that is not finite, 2 after a mistake of the user's (one line on
    standard error), 130 after Ctrl-C, 141 when the reader of the output has gone.
    """
    try:
        args = _parse(sys.argv[1:] if argv is None else argv)
        code = args.run_command(args)
        sys.stdout.flush()
    except (ConfigError, ScheduleError) as error:
        print(f"meshsys: error: {_one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Python flushes standard output once more as it exits, and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code or 0


def _one_line(message: str) -> str:
    """Without line breaks, and without what could steer a terminal."""
    words = " ".join(message.split())
    return words if words.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)


# Commands


def _train(args: argparse.Namespace) -> int:
    from meshsys.config import load_config

    config = load_config(args.config, args.overrides)

    from meshsys.train import train

    return train(config)


def _plan(args: argparse.Namespace) -> None:
    from meshsys.config import load_config

    config = load_config(args.config, args.overrides)

    from meshsys.planner import describe, make_plan

    plan = make_plan(config)
    print(plan.to_json() if args.json else describe(plan))


def _generate(args: argparse.Namespace) -> None:
    run = _run_folder(args.run)

    from meshsys.generate import generate

    pieces = generate(run, args.prompt, max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def _report(args: argparse.Namespace) -> None:
    run = _run_folder(args.run)

    from meshsys.report import write_report

    print(write_report(run))


def _schedule_list(args: argparse.Namespace) -> None:
    from schedules import families

    width = max(map(len, families.names()))
    for name in families.names():
        family = families.describe(name)
        print(f"{name:{width}}  {family.summary}\n{'':{width}}  {family.source}")


def _schedule_show(args: argparse.Namespace) -> None:
    from schedules import render
    from schedules.actions import to_csv
    from schedules.ticks import timeline

    schedule = _read_schedule(args) if args.name.startswith("csv:") else _make_schedule(args)
    if args.format == "csv":
        picture = to_csv(schedule, timeline(schedule))
    elif args.format == "svg":
        picture = render.svg(schedule)
    else:
        picture = render.text(schedule, shutil.get_terminal_size().columns)
    print(picture.rstrip("\n"))


def _make_schedule(args: argparse.Namespace) -> Schedule:
    from schedules import families
    from schedules.validate import validate

    families.describe(args.name)  # a name that does not exist is the better thing to report
    for option in ("stages", "microbatches"):
        if getattr(args, option) is None:
            raise ConfigError(f"--{option} is missing; say how many, as in --{option} 4")
    schedule = families.make(args.name, ranks=args.stages, microbatches=args.microbatches, chunks=args.chunks)
    validate(schedule)
    return schedule


def _read_schedule(args: argparse.Namespace) -> Schedule:
    from schedules.actions import from_csv
    from schedules.validate import validate

    path = Path(os.path.expanduser(args.name.removeprefix("csv:")))
    try:
        schedule = from_csv(path.read_text(encoding="utf-8"), path.name)
        validate(schedule)
    except OSError as error:
        raise ConfigError(f"{args.name} cannot be read: {error.strerror}; give the path of a CSV file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{args.name} is not text; give the path of a CSV file") from None
    except ScheduleError as error:
        raise ScheduleError(f"{args.name}: {error}") from None
    held = {"stages": schedule.ranks, "microbatches": schedule.microbatches, "chunks": schedule.chunks}
    for option, number in held.items():
        if getattr(args, option) not in (None, number):
            raise ConfigError(f"--{option}={getattr(args, option)}, but {args.name} has {number}; leave the option out")
    return schedule


def _run_folder(name: str) -> Path:
    """A run by its folder, or by its name under `runs/`."""
    runs = Path("runs")
    for folder in (Path(name), runs / name):
        if folder.is_dir():
            return folder
    near = difflib.get_close_matches(name, [folder.name for folder in runs.glob("*/")], 1)
    hint = f"did you mean {runs / near[0]}?" if near else "give a folder that `meshsys train` wrote"
    raise ConfigError(f"the run {name} does not exist; {hint}")


# Arguments


class _Parser(argparse.ArgumentParser):
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


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse takes positional arguments in one go: after `plan CONFIG --json`, overrides are left over.
    options = [word for word in rest if word.startswith("-")]
    if rest and (options or "overrides" not in args):
        parser.error(f"unrecognized: {' '.join(options or rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _parser() -> _Parser:
    parser = _Parser(prog="meshsys", description="Train language models on torus meshes.", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    train = _command(commands, "train", _train, "train a configuration; resumes where its run stopped")
    plan = _command(commands, "plan", _plan, "show devices, stages, schedule and memory, without training")
    plan.add_argument("--json", action="store_true", help="as JSON")
    for command in (train, plan):
        command.add_argument("config", metavar="CONFIG", help="a YAML file, such as configs/quickstart.yaml")
        command.add_argument(
            "overrides", metavar="key=value", nargs="*", default=(), help="overrides, as train.steps=100"
        )

    schedule = commands.add_parser("schedule", help="list or show pipeline schedules", allow_abbrev=False)
    views = schedule.add_subparsers(metavar="list|show", required=True)
    _command(views, "list", _schedule_list, "the schedules that have a name")
    show = _command(views, "show", _schedule_show, "one schedule, tick by tick")
    show.add_argument("name", metavar="NAME", help="a name that `schedule list` prints, or csv:PATH")
    show.add_argument("--stages", metavar="P", type=_number(int, 1), help="ranks of the pipe axis")
    show.add_argument("--microbatches", metavar="M", type=_number(int, 1))
    show.add_argument(
        "--chunks", metavar="V", type=_number(int, 1), help="stages a rank (default: the schedule's own)"
    )
    show.add_argument("--format", choices=("text", "csv", "svg"), default="text")

    generate = _command(commands, "generate", _generate, "continue a text with a trained model")
    generate.add_argument("--prompt", metavar="TEXT", type=_unicode, required=True)
    generate.add_argument("--max-tokens", metavar="N", type=_number(int, 1, 1 << 20), default=64)
    generate.add_argument(
        "--temperature", metavar="T", type=_number(float, 0, 1e30), default=0.0, help="0 takes the likeliest"
    )
    generate.add_argument("--seed", metavar="S", type=_number(int, 0, 2**31 - 1), default=0)
    report = _command(commands, "report", _report, "write a run's report.html again, and print its path")
    for command in (generate, report):
        command.add_argument("run", metavar="RUN", help="a run's folder, or its name under runs/")
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], about: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False)
    command.set_defaults(run_command=run)
    return command


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid Unicode; write it in UTF-8") from None
    return text


def _number(kind: type[int] | type[float], least: int, most: float = float("inf")) -> Callable[[str], float]:
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
