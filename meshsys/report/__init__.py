"""A run as one self-contained page: losses or rewards, schedule, torus, memory.

What draws a plan needs JAX, and is imported when it does; charts and style are for pages that do without.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshsys.errors import ConfigError
from meshsys.files import write_whole

if TYPE_CHECKING:
    from meshsys.planner import Plan

__all__ = ["write_report"]

_FIRST_SAMPLES, _LAST_SAMPLES = 4, 12


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into a run's folder, and returns its path.

    Reads `config.yaml`, and as far as they are there `metrics.jsonl`, `plan.json` and `samples.jsonl`.

    Raises:
        ConfigError: the folder is not a run, or its configuration or plan is damaged.
    """
    from meshsys.config import load_config
    from meshsys.report.history import read_history
    from meshsys.report.page import page
    from meshsys.report.samples import read_samples

    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(
            f"{run_dir} is not a run: it has no config.yaml; give a folder that `meshsys train` or `meshsys rl` wrote"
        )
    config = load_config(run_dir / "config.yaml")
    samples = read_samples(run_dir / "samples.jsonl", _FIRST_SAMPLES, _LAST_SAMPLES)
    text = page(config, _read_plan(run_dir / "plan.json"), read_history(run_dir / "metrics.jsonl"), samples)
    path = run_dir / "report.html"
    write_whole(path, text)
    return path


def _read_plan(path: Path) -> Plan | None:
    from meshsys.planner import Plan

    if not path.is_file():
        return None
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ConfigError(f"{path} is not a plan; remove it, and `meshsys train` writes it again") from None
