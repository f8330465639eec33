"""What a person sees while a run goes on: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["RunProgress"]

_PLAIN_LINES = 20


class RunProgress:
    """How far a run is, what its records say, and the time that is left.

    Args:
        start, steps: steps taken already, and in the whole run.
        say_of: what is shown of a record of metrics.jsonl.
        quiet: show nothing.
    """

    def __init__(self, start: int, steps: int, say_of: Callable[[dict[str, Any]], str], *, quiet: bool = False):
        self._console = Console(highlight=False, soft_wrap=True, quiet=quiet)
        self._start, self._steps, self._say_of = start, steps, say_of
        self._live = self._console.is_terminal and not quiet
        self._every = max(1, steps // _PLAIN_LINES)
        self._seconds = 0.0
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[phase]}{task.fields[said]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
        )
        self._task = self._bar.add_task("", total=steps, completed=start, phase="", said="")

    def __enter__(self) -> RunProgress:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        self._console.print(line, markup=False)

    def phase(self, name: str) -> None:
        """Shows on the bar what the run does now."""
        if self._live:
            self._bar.update(self._task, phase=f"{name:<9}")

    def update(self, record: dict[str, Any]) -> None:
        """Shows a record of metrics.jsonl, with its `step` and `step_seconds`."""
        step, said = record["step"], self._say_of(record)
        self._seconds += record["step_seconds"]
        if self._live:
            self._bar.update(self._task, completed=step, said=said)
        elif step % self._every == 0 or step in (self._steps, self._start + 1):
            left = (self._steps - step) * self._seconds / (step - self._start)
            self.say(f"step {step}/{self._steps}  {said}  {left:.0f} s left")
