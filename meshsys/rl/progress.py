"""What a person sees while a policy learns: the phase, rewards and speed, live on a terminal and in lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["RlProgress"]

_PLAIN_LINES = 20


class RlProgress:
    """Phase, reward, tokens/s and time left.

    Args:
        start, steps: steps taken already, and in the whole run.
    """

    def __init__(self, start: int, steps: int):
        self._console = Console(highlight=False, soft_wrap=True)
        self._start, self._steps, self._seconds = start, steps, 0.0
        self._live = self._console.is_terminal
        self._every = max(1, steps // _PLAIN_LINES)
        fields = "{task.fields[phase]:<9} reward {task.fields[reward]}  {task.fields[speed]} tokens/s"
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn(fields),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
        )
        self._task = self._bar.add_task("", total=steps, completed=start, phase="", reward="-", speed="-")

    def __enter__(self) -> RlProgress:
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
        """Shows what the run does now."""
        if self._live:
            self._bar.update(self._task, phase=name)

    def update(self, record: dict[str, Any]) -> None:
        """Shows a record of metrics.jsonl."""
        step, reward, speed = record["step"], f"{record['reward_mean']:.3f}", f"{record['tokens_per_s']:,.0f}"
        self._seconds += record["step_seconds"]
        if self._live:
            self._bar.update(self._task, completed=step, reward=reward, speed=speed)
        elif step % self._every == 0 or step in (self._steps, self._start + 1):
            left = (self._steps - step) * self._seconds / (step - self._start)
            length = record["response_tokens_mean"]
            self.say(
                f"step {step}/{self._steps}  reward {reward}  {length:.1f} tokens each  {speed} tokens/s  "
                f"{left:.0f} s left"
            )
