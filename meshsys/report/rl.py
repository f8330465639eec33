"""What the page says of a run of `meshsys rl` in place of a loss curve: rewards, lengths, phases, responses."""

from __future__ import annotations

import math
import statistics
import unicodedata
from collections.abc import Sequence
from html import escape

from meshsys.report.charts import line_chart, lines_chart, number_text, smooth
from meshsys.report.history import History
from meshsys.report.phases import phases
from meshsys.report.samples import Sample
from meshsys.report.tables import table

__all__ = ["rl_facts", "rl_sections"]

_MOST_CHARACTERS = 1500  # of a prompt or response

_RESPONSES = (
    ("Tokens of a response, on average", "response_tokens_mean"),
    ("Responses that ended by themselves", "stopped_fraction"),
    ("Groups whose responses are all worth the same", "zero_variance_groups"),
    ("Games that were a success", "success"),
    ("Turns of a game, on average", "turns_mean"),
)
_UPDATES = (
    ("Loss", "loss"),
    ("Gradient norm", "grad_norm"),
    ("Learning rate", "learning_rate"),
    ("Penalty's distance from the reference", "kl"),
    ("Policy's distance from before the step", "update_kl"),
    ("Tokens whose ratio was clipped", "clip_fraction"),
    ("Largest ratio", "ratio_max"),
    ("Entropy", "entropy"),
    ("Values: mean distance from what came", "value_error"),
    ("Values: share of the variance that they explain", "explained_variance"),
    ("Sampler and trainer: largest difference of a log-probability", "sampler_logprob_error"),
    ("Effective share of the importance weights", "importance_ess"),
)
_FAILURES = (
    ("reward_errors", "rewards raised, or gave no finite number"),
    ("reward_timeouts", "responses took too long to judge"),
    ("reward_crashes", "responses ended the process that judged them"),
)


def rl_facts(history: History, steps: int) -> list[tuple[str, str, str]]:
    """Names, values and remarks for the head of the page.

    Args:
        steps: of the whole run.
    """
    rewards = [value for value in history.of("reward_mean") if math.isfinite(value)]
    done = history.steps[-1] if history.steps else 0
    speeds = [speed for speed in history.of("tokens_per_s")[len(history.steps) // 2 :] if math.isfinite(speed)]
    tokens = sum(count for count in history.of("tokens") if math.isfinite(count))
    return [
        ("reward", number_text(rewards[-1] if rewards else math.nan), f"at first {_first(rewards)}"),
        ("steps", f"{done:,}", f"of {steps:,}"),
        ("tokens/s", number_text(statistics.median(speeds) if speeds else math.nan), "sampling, median"),
        ("tokens sampled", number_text(tokens), ""),
    ]


def rl_sections(history: History, samples: Sequence[Sample]) -> list[str]:
    """HTML of the sections that come first."""
    return [_rewards(history), _charts("Updates", history, _UPDATES), phases(history), _transcripts(samples)]


def _first(rewards: Sequence[float]) -> str:
    return number_text(rewards[0] if rewards else math.nan)


def _rewards(history: History) -> str:
    steps, rewards = history.steps, history.of("reward_mean")
    average = smooth(rewards, len(steps) // 20) if len(steps) > 40 else None
    chart = line_chart("Reward", steps, rewards, width=1056, height=320, average=average)
    failures = [f"{count:,.0f} {words}" for name, words in _FAILURES if (count := _sum(history, name))]
    told = f" Of rewards that failed, {'; '.join(failures)}; these count as 0." if failures else ""
    return (
        f"<h2>Reward</h2><p>The mean over the responses of each step.{told}</p>"
        f'<div class="wide">{chart}</div>{_each_reward(history)}{_row(history, _RESPONSES)}'
    )


def _each_reward(history: History) -> str:
    """A chart of all rewards, where there is more than one: of the steps that have them all."""
    names = [name for name in history.series if name.startswith("reward/")]
    places = [i for i in range(len(history.steps)) if all(math.isfinite(history.of(name)[i]) for name in names)]
    if len(names) < 2 or not places:
        return ""
    lines = {name.partition("/")[2]: [history.of(name)[i] for i in places] for name in names}
    at = [history.steps[i] for i in places]
    chart = lines_chart("Each reward", "step", at, lines, width=1056, height=220)
    return f'<h3>Each reward, before it is weighted</h3><div class="wide">{chart}</div>'


def _charts(title: str, history: History, charts: Sequence[tuple[str, str]]) -> str:
    return f"<h2>{title}</h2>{_row(history, charts)}"


def _row(history: History, charts: Sequence[tuple[str, str]]) -> str:
    """Small charts, of what the run recorded."""
    found = "".join(
        f"<div><h3>{label}</h3>{line_chart(label, history.steps, history.of(name), width=340, height=170)}</div>"
        for label, name in charts
        if any(map(math.isfinite, history.of(name)))
    )
    return f'<div class="row">{found}</div>' if found else '<p class="none">Nothing yet.</p>'


def _sum(history: History, name: str) -> float:
    return sum(value for value in history.of(name) if math.isfinite(value))


def _transcripts(samples: Sequence[Sample]) -> str:
    if not samples:
        return '<h2>Responses</h2><p class="none">None were kept.</p>'
    rows = [
        [
            f"{sample.step:,}",
            _said(sample.prompt),
            _said(sample.response) + ("" if sample.has_stopped else '<small class="cut">cut off</small>'),
            _said(sample.answer),
            f"{sample.tokens:,}",
            number_text(sample.reward),
        ]
        for sample in samples
    ]
    head = ["#step", "prompt", "response", "answer", "#tokens", "#reward"]
    return f"<h2>Responses</h2><p>Of the first steps and of the last.</p>{table(head, rows)}"


def _said(text: str) -> str:
    more = len(text) - _MOST_CHARACTERS
    end = f'<small class="cut">{more:,} more characters</small>' if more > 0 else ""
    return f'<div class="said">{escape(_visible(text[:_MOST_CHARACTERS]))}</div>{end}'


def _visible(text: str) -> str:
    """Control characters, and what no file can hold, as \\x.. and \\u.... ."""
    kinds = ("Cc", "Cs", "Cn", "Co")
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in kinds and char not in "\n\t" else char
        for char in text
    )
