"""The `meshsys` command.

What a command needs is imported when it runs: `--help` stays fast, and JAX starts only after the fake devices that a
configuration asks for are set up.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from meshsys.arguments import Parser, add_config, command, number
from meshsys.cluster_commands import add_cluster_commands
from meshsys.errors import ConfigError
from meshsys.evaluate_command import add_evaluate_command
from meshsys.plan_command import add_plan_command
from meshsys.schedule_commands import add_schedule_commands
from schedules.actions import ScheduleError

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


def _trace(args: argparse.Namespace) -> None:
    run = _run_folder(args.run)

    from meshsys.trace import write_trace

    print(write_trace(run, args.steps))


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


def _parser() -> Parser:
    parser = Parser(prog="meshsys", description="Train language models on torus meshes.", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    add_config(command(commands, "train", _train, "train a configuration; resumes where its run stopped"))
    add_plan_command(commands)
    add_schedule_commands(commands)
    add_cluster_commands(commands)

    add_evaluate_command(commands)
    generate = command(commands, "generate", _generate, "continue a text with a trained model")
    generate.add_argument("--prompt", metavar="TEXT", type=_unicode, required=True)
    generate.add_argument("--max-tokens", metavar="N", type=number(int, 1, 1 << 20), default=64)
    generate.add_argument(
        "--temperature", metavar="T", type=number(float, 0, 1e30), default=0.0, help="0 takes the likeliest"
    )
    generate.add_argument("--seed", metavar="S", type=number(int, 0, 2**31 - 1), default=0)
    report = command(commands, "report", _report, "write a run's report.html again, and print its path")
    trace = command(commands, "trace", _trace, "write a run's measured steps as trace.json, for ui.perfetto.dev")
    about = "steps, the last ones, that show their actions"
    trace.add_argument("--steps", metavar="N", type=number(int, 0, 1 << 20), default=3, help=about)
    for taker in (generate, report, trace):
        taker.add_argument("run", metavar="RUN", help="a run's folder, or its name under runs/")
    return parser


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid Unicode; write it in UTF-8") from None
    return text
