"""Writes docs/schedules.md and its pictures, docs/schedules/*.svg, from the families themselves.

    python scripts/make_schedule_gallery.py [--check]

With --check nothing is written; it exits with 1 and names the files that are not what it would write.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# As a script, Python looks beside this file; the packages are one folder up.
sys.path.insert(0, str(ROOT))

from schedules import render  # noqa: E402
from schedules.actions import Kind, split_backward  # noqa: E402
from schedules.costs import Costs  # noqa: E402
from schedules.families import Family, describe, make, names  # noqa: E402
from schedules.simulate import simulate  # noqa: E402

RANKS, MICROBATCHES = 8, 32
PICTURED_RANKS, PICTURED_MICROBATCHES = 4, 8
NAMES = (*names(), *names(flush=False))

HEAD = f"""# Schedules

`pipeline.schedule` takes these names; `meshsys schedule show NAME --stages P --microbatches M` draws any size, `meshsys
schedule simulate` takes any costs. This page is written by `scripts/make_schedule_gallery.py`: the numbers are computed
and the pictures drawn from what the compiler runs.

A model is cut into stages, one or several (chunks) on each of P ranks, and a batch into M microbatches. F is a
forward, I the input gradient, W the weight gradient, B both at once. Pictures and numbers are of I and W apart, which
is how training runs unless `pipeline.split_backward` says otherwise.

## At {RANKS} ranks and {MICROBATCHES} microbatches

F, I and W of 1/P of the model take one unit each, so every rank has {3 * MICROBATCHES} units of work. A chunk of a
rank with two is half as long and half as large.

- *time*: in lock step, as the compiled program runs: a tick lasts as long as its slowest rank.
- *bubble*: the part of it that is not work.
- *fused*: the time with full backwards on ranks that run freely, as systems with a program a rank have it; empty for
  families that have no full backwards.
- *activations*: the most microbatches that a rank holds from F to W, of 1/P of the model. Every rank has buffers for
  as many as the busiest.
- *stash*: the most of them that are between I and W.

Of schedules without a flush, numbers and pictures are of one step among many: some of its microbatches began in
the step before, and gradients come one step late.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    check = parser.parse_args().check
    wanted = files()
    old = set((ROOT / "docs/schedules").glob("*.svg")) - set(wanted)
    stale = sorted(old | {path for path, text in wanted.items() if not path.exists() or path.read_text() != text})
    for path in stale:
        print(path.relative_to(ROOT))
        if check:
            continue
        if path in old:
            path.unlink()
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path])
    return 1 if check and stale else 0


def files() -> dict[Path, str]:
    """Every file of the gallery with its text."""
    found = {ROOT / "docs/schedules.md": page()}
    for name in NAMES:
        schedule = split_backward(make(name, ranks=PICTURED_RANKS, microbatches=PICTURED_MICROBATCHES))
        found[ROOT / f"docs/schedules/{name}.svg"] = render.svg(schedule, hover=False)
    return found


def page() -> str:
    rows = ["| schedule | ticks | time | bubble | fused | activations | stash |", "|---|--:|--:|--:|--:|--:|--:|"]
    rows += [_row(name) for name in NAMES]
    return HEAD + "\n".join(rows) + "\n\n" + "\n".join(_section(describe(name)) for name in NAMES)


def _row(name: str) -> str:
    whole = make(name, ranks=RANKS, microbatches=MICROBATCHES)
    costs = Costs.per_rank(whole)
    found = simulate(split_backward(whole), costs)
    ticks = round(found.makespan / costs.time(Kind.F, 0))
    fused = simulate(whole, costs, "asynchronous").makespan if any(a.kind is Kind.B for a in whole) else None
    cells = (
        f"[`{name}`](#{name})",
        str(ticks),
        f"{found.makespan:g}",
        f"{found.bubble_fraction:.1%}",
        "" if fused is None else f"{fused:g}",
        f"{max(found.peak_activations):g}",
        f"{max(found.peak_weight_stash):g}",
    )
    return f"| {' | '.join(cells)} |"


def _section(family: Family) -> str:
    paragraphs = inspect.cleandoc(family.build.__doc__ or "").split("\n\n")
    told = [one for one in paragraphs if not re.match(r"(Args|Returns|Raises|Attributes):", one)]
    options = "".join(
        f" `pipeline.{option}` ({default})."
        for option, default in (("chunks", family.chunks), ("group", family.group), ("costs", "a unit each"))
        if option in family.options
    )
    return "\n".join(
        [
            f"## {family.name}",
            "",
            f"*{family.source}*",
            "",
            *("\n\n".join(told).splitlines()),
            "",
            *([f"Options and their defaults:{options}", ""] if options else []),
            f"![{family.name} on {PICTURED_RANKS} ranks](schedules/{family.name}.svg)",
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
