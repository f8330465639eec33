"""Kinds of rewards, by cases that a reader can check."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import pytest

from meshsys.config_file import FromList, Section, load
from meshsys.errors import ConfigError
from meshsys.rl.environments.rack import Instance, Rack
from meshsys.rl.prompt import Prompt
from meshsys.rl.rewards import RewardConfig, RewardPool, RewardPoolConfig
from meshsys.rl.rewards.registry import make_rewards

TAGS = "<answer>(.*?)</answer>"
RACK = Prompt("rack/0", "", entry=Instance(Rack(2, (1, 2, 3)), bytes([3, 0, 0, 1, 2, 0]), 1).entry(), scorer="rack")


def judged(config: RewardConfig, prompt: Prompt, response: str):
    return make_rewards([config], (), "rl.rewards")[0](prompt, response)


@pytest.mark.parametrize(
    ("config", "answer", "response", "reward"),
    [
        (RewardConfig(kind="exact_match"), "18", " 18.0\n", 1.0),
        (RewardConfig(kind="exact_match"), "Paris", "paris", 1.0),
        (RewardConfig(kind="exact_match"), "18", "it is 18", 0.0),
        (RewardConfig(kind="exact_match", extract=TAGS), "18", "<answer>17</answer> no: <answer>\n18 </answer>", 1.0),
        (RewardConfig(kind="exact_match", extract=TAGS), "18", "18", 0.0),
        (RewardConfig(kind="gsm8k"), "18", "9 * 2 = 18\n#### $18.", 1.0),
        (RewardConfig(kind="gsm8k"), "18", "so 18 eggs", 1.0),
        (RewardConfig(kind="gsm8k"), "18", "#### 17\n18", 0.0),
        (RewardConfig(kind="gsm8k", extract=TAGS), "18", "17 <answer>$18 in all: 18</answer> 19", 1.0),
        (RewardConfig(kind="gsm8k", extract=TAGS), "18", "18", 0.0),
        (RewardConfig(kind="format", pattern=".*<answer>.*</answer>"), None, "a\nb <answer>\n</answer>", 1.0),
        (RewardConfig(kind="format", pattern=".*<answer>.*</answer>"), None, "<answer></answer> more", 0.0),
        (RewardConfig(kind="length", free_length=10, max_length=20), None, "x" * 10, 0.0),
        (RewardConfig(kind="length", free_length=10, max_length=20), None, "x" * 15, -0.5),
        (RewardConfig(kind="length", free_length=10, max_length=20), None, "x" * 99, -1.0),
        (RewardConfig(), "18", "18", 1.0),
        (RewardConfig(extract=TAGS), "18", "<answer>18</answer>", 1.0),
        (RewardConfig(kind="python:builtins:max", options={"key": len}), "", "", None),
    ],
)
def test_kinds(config: RewardConfig, answer: str | None, response: str, reward: float | None):
    if reward is not None:
        assert judged(config, Prompt("a/0", "?", answer=answer), response) == reward
    else:
        assert config.label == "max" and judged(config, "ab", "abc") == "abc"  # type: ignore[arg-type]


def test_an_answer_is_needed():
    with pytest.raises(ValueError, match="the prompt a/0 has no answer"):
        judged(RewardConfig(kind="exact_match"), Prompt("a/0", "?"), "18")


def test_racks():
    assert judged(RewardConfig(kind="rack"), RACK, "0,0 -> 1,2") == 1.0
    assert judged(RewardConfig(), RACK, "1,1 -> 0,1\n0,0 -> 1,2") == 0.5
    assert judged(RewardConfig(extract=TAGS), RACK, "1,1 -> 0,1? no: <answer>0,0 -> 1,2</answer>") == 1.0
    assert judged(RewardConfig(extract=TAGS), RACK, "0,0 -> 1,2") == 0.0


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("1/2", "the answer is $\\frac{1}{2}$", 1.0),
        ("\\frac{1}{2}", "\\boxed{0.5}", 1.0),
        ("2\\sqrt{2}", "$\\sqrt{8}$", 1.0),
        ("[1, 2)", "$[1,2)$", 1.0),
        ("1,234", "1234", 1.0),
        ("72", "#### 72", 1.0),
        ("72", "73", 0.0),
        ("72", "", 0.0),
        ("72", "no idea", 0.0),
    ],
)
def test_math_verify(answer: str, response: str, reward: float):
    pytest.importorskip("math_verify", reason="the extra `rl` is not installed")
    assert judged(RewardConfig(kind="math_verify"), Prompt("a/0", "?", answer=answer), response) == reward


def test_scorers_of_the_tasks_in_the_pool():
    """What math-verify takes too long for, and what a scorer of reasoning-gym raises on, costs no more than itself."""
    pytest.importorskip("reasoning_gym", reason="the extra `rl` is not installed")
    from meshsys.rl.tasks.config import TaskConfig
    from meshsys.rl.tasks.registry import open_task

    primes = open_task(TaskConfig(source="reasoning_gym:prime_factorization"), 0, chat=False)[0]
    math = Prompt("math/0", "?", answer="1/2", scorer="math_verify")
    samples = [
        (primes, str(primes.answer)),
        (primes, "seven"),
        (math, "0.5"),
        (math, "9^{9^{9^9}}!"),
        (RACK, "0,0->1,2"),
    ]
    config = RewardPoolConfig(workers=1, seconds=2.0)
    with RewardPool([RewardConfig()], config, scorers={"reasoning_gym", "math_verify", "rack"}) as pool:
        scores = pool.score(samples)
        assert scores.total.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0]
        assert scores.errors == 1 and "ValueError" in scores.failures[0].message


@pytest.mark.parametrize(("kind", "package"), [("reasoning_gym", "reasoning-gym"), ("math_verify", "math-verify")])
def test_the_packages_are_an_extra(kind: str, package: str, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(ConfigError, match=rf"rl.rewards.0.kind={kind} needs the package {package}; install it by"):
        make_rewards([RewardConfig(kind=kind)], (), "rl.rewards")


class _File(Section):
    rewards: Annotated[tuple[RewardConfig, ...], FromList]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: math_verif", "rewards.0.kind=math_verif is not a reward; did you mean math_verify?"),
        ("kind: format", "a reward of kind=format needs a pattern"),
        ("kind: format, pattern: '('", "rewards.0.pattern=( is not a regular expression: missing )"),
        ("extract: abc", "rewards.0.extract=abc has no group for the answer"),
        ("kind: length, extract: (.*), max_length: 9", "a reward of kind=length has no extract"),
        ("kind: gsm8k, options: {a: 1}", "a reward of kind=gsm8k has no options"),
        ("kind: length, max_length: 5, free_length: 5", "needs a max_length above free_length"),
        ("weight: .inf", "rewards.0.weight=.inf"),
        ("wait: 1", "did you mean rewards.0.weight?"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "file.yaml").write_text(f"rewards: [{{{text}}}]")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(_File, tmp_path / "file.yaml", example="rewards.0.weight=2")
