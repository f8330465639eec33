"""`pipeline.schedule=search`: the search of a configuration, and where its answer is kept.

An answer is looked for in the run's folder first, so that a run goes on with the schedule that it began with, then in a
cache that all runs of a user share, and is searched for if it is in neither.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshsys.config import Config
from meshsys.cost_file import read_costs
from meshsys.errors import ConfigError
from meshsys.files import write_whole
from schedules.actions import Schedule, ScheduleError, from_csv, to_csv
from schedules.search import ALGORITHM, Question, search
from schedules.ticks import timeline
from schedules.validate import validate

__all__ = ["RECORD", "searched"]

RECORD = "search.json"
"""The file in a run's folder: the question, its answer and the schedule as CSV."""

_OPTIONS = {
    "ranks": "mesh.axes.pipe",
    "microbatches": "pipeline.microbatches",
    "chunks": "pipeline.chunks",
    "memory_cap": "pipeline.search.memory_cap",
    "seconds": "pipeline.search.seconds",
}


def searched(config: Config) -> tuple[Schedule, str]:
    """The schedule that a configuration asks for at its costs, and its record, for `RECORD` in the run's folder.

    Raises:
        ConfigError: options that allow no schedule.
    """
    question = _question(config)
    asked = _said(question)
    name = hashlib.sha256(json.dumps([ALGORITHM, asked], sort_keys=True).encode()).hexdigest()
    cache = _cache_folder() / f"{name}.json"
    for path in (config.run_dir / RECORD, cache):
        kept = _kept(path, asked)
        if kept is not None:
            return kept
    print(f"searching for a schedule, pipeline.search.seconds={question.seconds:g}", file=sys.stderr, flush=True)
    answer = search(question)
    record = {
        "question": asked,
        "method": answer.method,
        "optimal": answer.optimal,
        "makespan": answer.makespan,
        "lower_bound": answer.lower_bound,
        "schedule": to_csv(answer.schedule, timeline(answer.schedule)),
    }
    text = json.dumps(record, indent=2) + "\n"
    with suppress(OSError, ConfigError):  # without a cache the next run searches again
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_whole(cache, text)
    return answer.schedule, text


def _question(config: Config) -> Question:
    pipeline, asked = config.pipeline, config.pipeline.search
    ranks = config.mesh.axes.pipe
    if pipeline.group is not None:
        raise ConfigError(f"pipeline.group={pipeline.group} has no meaning for pipeline.schedule=search; leave it out")
    try:
        return Question(
            ranks=ranks,
            microbatches=pipeline.microbatches,
            costs=read_costs(pipeline.costs, "pipeline.costs"),
            memory_cap=ranks if asked.memory_cap is None else asked.memory_cap,
            chunks=1 if pipeline.chunks is None else pipeline.chunks,
            seconds=asked.seconds,
        )
    except ScheduleError as error:
        option, equals, rest = str(error).partition("=")
        if option in _OPTIONS:
            raise ConfigError(f"{_OPTIONS[option]}={rest}") from None
        raise ConfigError(f"pipeline.costs={pipeline.costs}: {error}") from None


def _said(question: Question) -> dict[str, Any]:
    """The question as JSON has it, so that it compares with one that was read."""
    return json.loads(json.dumps({**asdict(question), "costs": json.loads(question.costs.to_json())}))


def _kept(path: Path, asked: dict[str, Any]) -> tuple[Schedule, str] | None:
    """The record in a file if it answers this question; damage is as good as absence."""
    try:
        text = path.read_text(encoding="utf-8")
        record = json.loads(text)
        if not isinstance(record, dict) or record.get("question") != asked:
            return None
        schedule = from_csv(record["schedule"], "search")
        validate(schedule, microbatches=asked["microbatches"])
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return schedule, text


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path("~", ".cache")
    return Path(os.path.expanduser(base), "meshsys", "schedules")
