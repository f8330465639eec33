"""`meshsys cluster simulate`: policies compared on one workload."""

from __future__ import annotations

import argparse
import csv
import io
import json
from typing import TYPE_CHECKING, Any

from meshsys.arguments import command
from meshsys.errors import ConfigError
from meshsys.files import writable, write_whole

if TYPE_CHECKING:
    from meshsys.cluster.config import SimulationConfig
    from meshsys.cluster.metrics import Metrics
    from meshsys.cluster.simulator import Outcome
    from meshsys.cluster.workload import Workload

__all__ = ["add_simulate_command"]


def add_simulate_command(commands: Any) -> None:
    """Adds `simulate CONFIG` to the cluster commands."""
    parser = command(commands, "simulate", _simulate, "compare placement policies and queues on a workload of jobs")
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, such as configs/cluster_rfold.yaml")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=(), help="overrides, as workload.load=0.4")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--csv", metavar="FILE", help="a file to write the table to, one row a policy")
    parser.add_argument("--report", metavar="FILE", help="an HTML page to write, with charts and the torus over time")


def _simulate(args: argparse.Namespace) -> None:
    from meshsys.cluster.config import load_simulation
    from meshsys.cluster.metrics import measure
    from meshsys.cluster.simulator import make_pod, simulate
    from meshsys.cluster.workload import make_workload

    config = load_simulation(args.config, args.overrides)
    csv_file = None if args.csv is None else writable(args.csv, "--csv")
    report_file = None if args.report is None else writable(args.report, "--report")
    pod = make_pod(config.cluster)
    placements = _placements(config)
    workload = make_workload(config.workload, config.cluster)
    table = None if args.json else _Table([options.label for options in config.policies])
    if table is not None:
        print(_about(config, workload, pod.size))
        print(table.head(), flush=True)
    outcomes: list[Outcome] = []
    found: list[Metrics] = []
    for options, placement in zip(config.policies, placements, strict=True):
        try:
            outcome = simulate(config.cluster, workload, options, config.workload.elastic, placement)
        except ValueError as error:  # of `Pod.take`: the policy, which may be the user's, is wrong
            raise ConfigError(
                f"placement={options.placement} placed what cannot be placed: {error}; mend the policy"
            ) from error
        metrics = measure(outcome, options)
        found.append(metrics)
        outcomes.append(outcome)
        if table is not None:
            print(table.row(metrics), flush=True)
    if args.json:
        print(json.dumps({**_facts(config, workload, pod.size), "policies": [each.to_dict() for each in found]}))
    if csv_file is not None:
        write_whole(csv_file, _csv(found), "--csv")
    if report_file is not None:
        from meshsys.cluster.report import report_page

        write_whole(report_file, report_page(config, outcomes, found), "--report")


def _placements(config: SimulationConfig) -> list[Any]:
    """All policies, asked for before the first is simulated."""
    from meshsys.cluster import policies

    return [
        policies.get(options.placement, f"policies.{place}.placement") for place, options in enumerate(config.policies)
    ]


def _facts(config: SimulationConfig, workload: Workload, chips: int) -> dict[str, Any]:
    work = float((workload.size * workload.duration).sum()) / 3600
    return {
        "cluster": config.cluster.model_dump(),
        "workload": {
            **config.workload.model_dump(),
            "jobs": len(workload),
            "chip_hours": work,
            "offered_load": None if workload.backlog is not None or not workload.arrival[-1] else workload.load(chips),
        },
    }


def _about(config: SimulationConfig, workload: Workload, chips: int) -> str:
    cluster = config.cluster
    cubes = f" of cubes of {cluster.cube}, wiring {cluster.wiring}" if cluster.cube else ", no switches"
    if workload.backlog is not None:
        load = f"{workload.backlog} of them waiting at any time"
    elif workload.arrival[-1]:
        load = f"offered load {workload.load(chips):.3g}"
    else:
        load = "all at once"
    return f"{cluster.topology}{cubes}; {len(workload):,} jobs ({config.workload.generator}), {load}"


class _Table:
    """A line a policy, printed as they come."""

    def __init__(self, labels: list[str]):
        from meshsys.cluster.metrics import COLUMNS

        self._columns = COLUMNS
        self._first = max(len("policy"), *map(len, labels))
        self._widths = [max(len(heading), 7) for heading, _ in COLUMNS.values()]

    def head(self) -> str:
        headings = (
            f"{heading:>{width}}" for (heading, _), width in zip(self._columns.values(), self._widths, strict=True)
        )
        return "  ".join([f"{'policy':{self._first}}", *headings])

    def row(self, metrics: Metrics) -> str:
        row = metrics.row()
        cells = []
        for (name, (_, form)), width in zip(self._columns.items(), self._widths, strict=True):
            text = "-" if row[name] is None else format(row[name], form)
            cells.append(f"{text:>{width}}")
        return "  ".join([f"{metrics.name:{self._first}}", *cells])


def _csv(found: list[Metrics]) -> str:
    rows = [metrics.row() for metrics in found]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
