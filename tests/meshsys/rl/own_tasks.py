"""Tasks and environments of a user's own."""

from __future__ import annotations

from meshsys.rl.environments import Step
from meshsys.rl.prompt import Prompt


def sums(*, seed: int, largest: int = 9):
    """An endless task of prompts with entries."""
    return _Sums(seed, largest)


class _Sums:
    def __init__(self, seed: int, largest: int) -> None:
        self._seed, self._largest = seed, largest

    def __getitem__(self, number: int) -> Prompt:
        a, b = (self._seed + number) % self._largest, number % 3
        return Prompt("", f"{a}+{b}=", answer=str(a + b), entry=(a, b))


def listed(*, seed: int):
    return [{"prompt": "a?", "answer": 1}, {"prompt": "b?", "answer": "two", "level": 3}]


def numbers(*, seed: int):
    return [1, 2]


def nothing(*, seed: int):
    return []


def no_sequence(*, seed: int):
    return seed


class Countdown:
    """Ends when the policy has said `stop`, or raises at `boom`; the prompt's text is the number of turns."""

    def __init__(self, *, reward: float = 1.0) -> None:
        self._reward = reward

    def reset(self, prompt: Prompt) -> str:
        if prompt.text == "bad":
            raise KeyError("no game")
        self._left = int(prompt.text)
        return f"{self._left} left"

    def step(self, action: str) -> Step:
        if "boom" in action:
            raise ValueError("boom")
        self._left -= 1
        return Step(f"{self._left} left", self._reward, self._left == 0 or "stop" in action)


class Ascii:
    """An action is worth its share of ASCII; a game in which all was ASCII is a success."""

    def reset(self, prompt: Prompt) -> str:
        self._all = True
        return prompt.text

    def step(self, action: str) -> Step:
        share = sum(letter.isascii() for letter in action) / max(len(action), 1)
        self._all &= share == 1
        return Step("more", share, False, self._all)


class NoEnvironment:
    def reset(self, prompt: Prompt) -> str:
        return ""
