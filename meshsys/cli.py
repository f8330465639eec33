"""The `meshsys` command.

What a command needs is imported when it runs: `--help` stays fast, and JAX starts only after the fake devices that a
configuration asks for are set up.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from meshsys.arguments import Parser, add_config, command, number
from meshsys.cluster_commands import add_cluster_commands
from meshsys.errors import ConfigError
from meshsys.evaluate_command import add_evaluate_command
from meshsys.generate_command import add_generate_command
from meshsys.model_commands import add_model_commands
from meshsys.plan_command import add_plan_command
from meshsys.reshard_command import add_reshard_command
from meshsys.run_folder import run_folder
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


def _rl(args: argparse.Namespace) -> int:
    from meshsys.config import load_config

    config = load_config(args.config, args.overrides)

    from meshsys.rl.loop import run_rl

    return run_rl(config)


def _report(args: argparse.Namespace) -> None:
    run = run_folder(args.run)

    from meshsys.report import write_report

    print(write_report(run))


def _trace(args: argparse.Namespace) -> None:
    run = run_folder(args.run)

    from meshsys.trace import write_trace

    print(write_trace(run, args.steps))


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
    add_config(command(commands, "rl", _rl, "learn from rewards; resumes where its run stopped"))
    add_plan_command(commands)
    add_schedule_commands(commands)
    add_cluster_commands(commands)

    add_evaluate_command(commands)
    add_generate_command(commands)
    add_model_commands(commands)
    add_reshard_command(commands)
    report = command(commands, "report", _report, "write a run's report.html again, and print its path")
    trace = command(commands, "trace", _trace, "write a run's measured steps as trace.json, for ui.perfetto.dev")
    about = "steps, the last ones, that show their actions"
    trace.add_argument("--steps", metavar="N", type=number(int, 0, 1 << 20), default=3, help=about)
    for taker in (report, trace):
        taker.add_argument("run", metavar="RUN", help="a run's folder, or its name under runs/")
    return parser
