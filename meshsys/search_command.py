"""`meshsys schedule search`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from meshsys.arguments import command, number
from meshsys.errors import ConfigError
from meshsys.files import writable, write_whole
from meshsys.timeline_text import by_rank, rank_table
from schedules.actions import ScheduleError

__all__ = ["add_search_command"]

_OPTIONS = {"ranks": "--stages", "microbatches": "--microbatches", "chunks": "--chunks"}


def add_search_command(views: Any, add_costs: Any) -> None:
    """Adds `search` to the schedule commands; `add_costs` adds their `--costs` and `--timing`."""
    search = command(views, "search", _schedule_search, "the best schedule for given costs within a memory cap")
    search.add_argument("--stages", metavar="P", type=number(int, 1), required=True, help="ranks of the pipe axis")
    search.add_argument("--microbatches", metavar="M", type=number(int, 1), required=True)
    search.add_argument("--chunks", metavar="V", type=number(int, 1), default=1, help="stages a rank (default: 1)")
    search.add_argument(
        "--memory-cap",
        metavar="A",
        type=number(float, 1),
        help="microbatch activations that a rank may hold (default: P, as many as 1f1b)",
    )
    add_costs(search)
    search.add_argument("--seconds", metavar="S", type=number(float, 1, 1e6), default=30.0, help="effort (default: 30)")
    search.add_argument("--seed", metavar="N", type=number(int, 0, 2**31 - 1), default=0)
    search.add_argument("--out", metavar="CSV", help="a file to write the schedule to")
    search.add_argument("--json", action="store_true", help="as JSON")


def _schedule_search(args: argparse.Namespace) -> None:
    from meshsys.cost_file import read_costs
    from schedules.actions import to_csv
    from schedules.search import Question, search
    from schedules.ticks import timeline

    costs = read_costs(args.costs, "--costs")
    cap = args.stages if args.memory_cap is None else args.memory_cap
    try:
        question = Question(
            args.stages, args.microbatches, costs, cap, args.timing, args.chunks, args.seconds, args.seed
        )
    except ScheduleError as error:
        option, _, rest = str(error).partition("=")  # it begins with the number that is out of range
        raise ConfigError(f"{_OPTIONS[option]}={rest}" if option in _OPTIONS else str(error)) from None
    out = None if args.out is None else writable(args.out, "--out")
    answer = search(question)
    if answer.note is not None:
        print(answer.note, file=sys.stderr)
    if out is not None:
        write_whole(out, to_csv(answer.schedule, timeline(answer.schedule)), "--out")
    found = answer.timeline
    figures: dict[str, Any] = {
        "makespan": found.makespan,
        "lower_bound": answer.lower_bound,
        "optimal": answer.optimal,
        "method": answer.method,
        "bubble_fraction": found.bubble_fraction,
    }
    if args.json:
        asked = {
            "stages": question.ranks,
            "microbatches": question.microbatches,
            "chunks": question.chunks,
            "timing": question.timing,
            "memory_cap": question.memory_cap,
            "costs": json.loads(question.costs.to_json()),
            "seconds": question.seconds,
            "seed": question.seed,
        }
        print(json.dumps({**asked, **figures, **by_rank(found)}, indent=2))
        return
    proved = "proved optimal" if answer.optimal else "not proved optimal"
    print(
        f"search, {question.timing}: {question.ranks} ranks, {question.microbatches} microbatches, "
        f"at most {question.memory_cap:g} activations a rank"
    )
    print(f"makespan         {found.makespan:.6g}")
    print(f"lower_bound      {answer.lower_bound:.6g}")
    print(f"method           {answer.method}, {proved}")
    print(f"bubble_fraction  {found.bubble_fraction:.4f}\n")
    print(rank_table(found))
