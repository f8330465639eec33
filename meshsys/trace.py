"""A run's measured steps as a trace for ui.perfetto.dev."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshsys.config import load_config
from meshsys.cost_file import read_costs
from meshsys.errors import ConfigError
from meshsys.files import write_whole
from meshsys.planner.plan import Plan
from meshsys.planner.text import schedule_of
from meshsys.report.history import read_history
from schedules.actions import ScheduleError
from schedules.perfetto import rank_names, trace_events, trace_file
from schedules.simulate import simulate

__all__ = ["write_trace"]

_ABOUT = {
    "steps": "measured: each step lasts as long as it took; what is between steps is left out",
    "actions": "not measured: the schedule's lock-step times at pipeline.costs, stretched to the measured step, "
    "which also has the collectives of the gradients and the optimizer",
}


def write_trace(run_dir: Path, drawn: int) -> Path:
    """Writes `trace.json` into a run's folder, and returns its path.

    Reads `config.yaml`, `plan.json` and `metrics.jsonl`. Every step is a slice; the last `drawn` ones show their
    actions as well.

    Raises:
        ConfigError: the folder is not a run, or has no plan or no measured step.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} is not a run: it has no config.yaml; give a folder that `meshsys train` wrote")
    config = load_config(run_dir / "config.yaml")
    try:
        plan = Plan.from_json((run_dir / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{run_dir} has no plan.json that can be read; `meshsys train` writes it") from None
    history = read_history(run_dir / "metrics.jsonl")
    steps = [(step, time) for step, time in zip(history.steps, history.of("step_seconds"), strict=True) if time > 0]
    if not steps:
        raise ConfigError(f"{run_dir}/metrics.jsonl has no measured step; train one first")
    costs = read_costs(config.pipeline.costs, "pipeline.costs")
    schedule = schedule_of(plan)
    try:
        found = simulate(schedule, costs)
    except ScheduleError as error:
        raise ConfigError(f"pipeline.costs={config.pipeline.costs}: {error}") from None

    def events() -> Iterator[dict[str, Any]]:
        ranks = schedule.ranks
        yield from rank_names(ranks)
        yield {"ph": "M", "pid": 0, "tid": ranks, "name": "thread_name", "args": {"name": "steps"}}
        yield {"ph": "M", "pid": 0, "tid": ranks, "name": "thread_sort_index", "args": {"sort_index": -1}}
        clock = 0.0
        for position, (step, seconds) in enumerate(steps):
            length = 1e6 * seconds
            loss = history.of("loss")[history.steps.index(step)]
            args = {"step": step, **({"loss": loss} if math.isfinite(loss) else {})}
            yield {"ph": "X", "pid": 0, "tid": ranks, "name": f"step {step}", "ts": clock, "dur": length, "args": args}
            if position >= len(steps) - drawn and found.makespan:
                yield from trace_events(schedule, found, length / found.makespan, clock, step)
            clock += length

    path = run_dir / "trace.json"
    write_whole(path, trace_file(events(), {"run": config.run.name, "schedule": schedule.name, **_ABOUT}))
    return path
