"""The `meshsys schedule ...` commands.

What a command needs is imported when it runs: `--help` stays fast.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from meshsys.arguments import add_config, command, number
from meshsys.errors import ConfigError
from meshsys.files import writable, write_whole
from meshsys.search_command import add_search_command
from meshsys.timeline_text import by_rank, rank_table
from schedules.actions import Schedule, ScheduleError, split_backward
from schedules.costs import Costs
from schedules.simulate import Timing

__all__ = ["add_schedule_commands"]


def add_schedule_commands(commands: Any) -> None:
    """Adds `schedule` and what follows it to the parser's commands."""
    about = "list, show, simulate, search or measure schedules"
    schedule = commands.add_parser("schedule", help=about, allow_abbrev=False)
    views = schedule.add_subparsers(metavar="list|show|simulate|search|measure", required=True)
    command(views, "list", _schedule_list, "the schedules that have a name")

    show = command(views, "show", _schedule_show, "one schedule, tick by tick")
    _add_schedule(show)
    add_costs(show)
    show.set_defaults(timing=None)
    show.add_argument(
        "--format",
        choices=("text", "csv", "svg", "perfetto"),
        default="text",
        help="svg draws ticks, or with --costs or --timing in time; perfetto is a trace for ui.perfetto.dev",
    )

    simulation = command(views, "simulate", _schedule_simulate, "makespan, bubbles and memory for given costs")
    _add_schedule(simulation)
    add_costs(simulation)
    simulation.add_argument("--json", action="store_true", help="as JSON")

    add_search_command(views, add_costs)

    measurement = command(views, "measure", _schedule_measure, "time each action of a model, and write a cost file")
    add_config(measurement)
    measurement.add_argument("--out", metavar="FILE", help="the cost file (default: standard output)")
    measurement.add_argument("--rounds", metavar="N", type=number(int, 1, 1000), default=7, help="samples of a median")


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    """The arguments of `_schedule`."""
    parser.add_argument("name", metavar="NAME", help="a name that `schedule list` prints, or csv:PATH")
    parser.add_argument("--stages", metavar="P", type=number(int, 1), help="ranks of the pipe axis")
    parser.add_argument("--microbatches", metavar="M", type=number(int, 1))
    parser.add_argument(
        "--chunks", metavar="V", type=number(int, 1), help="stages a rank (default: the schedule's own)"
    )
    parser.add_argument("--group", metavar="K", type=number(int, 1), help="microbatches in a group, for kfkb")
    parser.add_argument(
        "--memory-cap", metavar="A", type=number(float, 1), help="microbatch activations a rank, for cross_region"
    )
    parser.add_argument("--split", action="store_true", help="cut full backwards B into I and W, as training does")


def add_costs(parser: argparse.ArgumentParser) -> None:
    """`--costs`, as `meshsys.cost_file.read_costs` takes it, and `--timing`."""
    parser.add_argument(
        "--costs", metavar="COSTS", default="", help="times, as F=1,I=1,W=1,R=0,send=0 (the default), or a cost file"
    )
    parser.add_argument(
        "--timing",
        choices=("lockstep", "asynchronous"),
        default="lockstep",
        help="every tick waits for its slowest rank, as in the compiled program, or ranks run freely",
    )


def _schedule_list(args: argparse.Namespace) -> None:
    from schedules import families

    every = families.names() + families.names(flush=False)
    width = max(map(len, every))
    for name in every:
        family = families.describe(name)
        print(f"{name:{width}}  {family.summary}\n{'':{width}}  {family.source}")


def _schedule_show(args: argparse.Namespace) -> None:
    from meshsys.cost_file import read_costs
    from schedules import perfetto, render
    from schedules.actions import to_csv
    from schedules.simulate import simulate
    from schedules.ticks import timeline

    costs = read_costs(args.costs, "--costs")
    timing: Timing = args.timing or "lockstep"
    schedule = _schedule(args, costs)
    if args.format == "csv":
        picture = to_csv(schedule, timeline(schedule))
    elif args.format == "svg":
        in_time = args.timing or args.costs
        picture = render.svg_in_time(schedule, simulate(schedule, costs, timing)) if in_time else render.svg(schedule)
    elif args.format == "perfetto":
        picture = perfetto.perfetto(schedule, simulate(schedule, costs, timing), {"timing": timing})
    else:
        picture = render.text(schedule, shutil.get_terminal_size().columns)
    print(picture.rstrip("\n"))


def _schedule_simulate(args: argparse.Namespace) -> None:
    import json

    from meshsys.cost_file import read_costs
    from schedules.simulate import simulate

    costs = read_costs(args.costs, "--costs")
    schedule = _schedule(args, costs)
    found = simulate(schedule, costs, args.timing)
    if args.json:
        sizes = {"stages": schedule.ranks, "microbatches": schedule.microbatches, "chunks": schedule.chunks}
        times = {"makespan": found.makespan, "bubble_fraction": found.bubble_fraction}
        print(json.dumps({"name": schedule.name, **sizes, "timing": args.timing, **times, **by_rank(found)}, indent=2))
        return
    print(f"{schedule.name}, {args.timing}: {schedule.ranks} ranks, {schedule.microbatches} microbatches")
    print(f"makespan         {found.makespan:.6g}")
    print(f"bubble_fraction  {found.bubble_fraction:.4f}\n")
    print(rank_table(found))


def _schedule_measure(args: argparse.Namespace) -> None:
    from meshsys.config import load_config

    config = load_config(args.config, args.overrides)
    out = None if args.out is None else writable(args.out, "--out")

    if config.pipeline.remat == "auto":
        raise ConfigError(
            "pipeline.remat=auto chooses by times such as these; measure with pipeline.remat=none and "
            "pipeline.activation_memory=null"
        )

    from meshsys.assemble import assemble
    from meshsys.measure import measure

    measured = measure(assemble(config), args.rounds)
    if out is None:
        print(measured.to_json(), end="")
        return
    write_whole(out, measured.to_json(), "--out")
    print(measured.describe())


def _schedule(args: argparse.Namespace, costs: Costs) -> Schedule:
    """The validated schedule that the arguments of `_add_schedule` name; some families are made for the costs."""
    schedule = _read_schedule(args) if args.name.startswith("csv:") else _make_schedule(args, costs)
    return split_backward(schedule) if args.split else schedule


def _make_schedule(args: argparse.Namespace, costs: Costs) -> Schedule:
    from schedules import families
    from schedules.validate import validate

    family = families.describe(args.name)  # a name that does not exist is the better thing to report
    for option in ("stages", "microbatches"):
        if getattr(args, option) is None:
            raise ConfigError(f"--{option} is missing; say how many, as in --{option} 4")
    schedule = families.make(
        args.name,
        ranks=args.stages,
        microbatches=args.microbatches,
        chunks=args.chunks,
        group=args.group,
        costs=costs if family.takes_costs else None,
        memory_cap=args.memory_cap,
    )
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
    for option, value in (("group", args.group), ("memory-cap", args.memory_cap)):
        if value is not None:
            raise ConfigError(f"--{option}={value}, but the order of {args.name} is given; leave the option out")
    held = {"stages": schedule.ranks, "microbatches": schedule.microbatches, "chunks": schedule.chunks}
    for option, count in held.items():
        if getattr(args, option) not in (None, count):
            raise ConfigError(f"--{option}={getattr(args, option)}, but {args.name} has {count}; leave the option out")
    return schedule
