"""What a person sees while a run goes on: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["TrainProgress"]

_PLAIN_LINES = 20


class TrainProgress:
    """Loss, tokens/s and time left of a training run.

    Args:
        start, steps: steps taken already, and in the whole run.
        quiet: show nothing.
    """

    def __init__(self, start: int, steps: int, *, quiet: bool = False):
        self._console = Console(highlight=False, soft_wrap=True, quiet=quiet)
        self._steps = steps
        self._start = start
        self._live = self._console.is_terminal and not quiet
        self._every = max(1, steps // _PLAIN_LINES)
        self._seconds = 0.0
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
        )
        self._task = self._bar.add_task("", total=steps, completed=start, loss="-", speed="-")

    def __enter__(self) -> TrainProgress:
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

    def update(self, record: dict[str, Any]) -> None:
        """Shows a record of metrics.jsonl."""
        step, loss, speed = record["step"], f"{record['loss']:.4f}", f"{record['tokens_per_s']:,.0f}"
        self._seconds += record["step_seconds"]
        if self._live:
            self._bar.update(self._task, completed=step, loss=loss, speed=speed)
        elif step % self._every == 0 or step == self._steps or step == self._start + 1:
            left = (self._steps - step) * self._seconds / (step - self._start)
            self.say(f"step {step}/{self._steps}  loss {loss}  {speed} tokens/s  {left:.0f} s left")
