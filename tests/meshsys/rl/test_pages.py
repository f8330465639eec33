"""What docs/rewards.md and docs/environments.md show does what they say."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Annotated

import pytest

from meshsys import yaml_core
from meshsys.config_file import FromList, Section
from meshsys.rl.environments import EnvironmentConfig, environment_maker
from meshsys.rl.environments.rack import read_moves, solve
from meshsys.rl.environments.rack.instances import RackOptions, make_instance
from meshsys.rl.prompt import Prompt
from meshsys.rl.rewards import RewardConfig, RewardPoolConfig
from meshsys.rl.rewards.config import KINDS as REWARDS
from meshsys.rl.rewards.registry import make_rewards
from meshsys.rl.tasks.config import KINDS as TASKS
from meshsys.rl.tasks.config import TaskConfig

DOCS = Path(__file__).parents[3] / "docs"


class _Sections(Section):
    tasks: Annotated[tuple[TaskConfig, ...], FromList] = ()
    rewards: Annotated[tuple[RewardConfig, ...], FromList] = ()
    environment: EnvironmentConfig | None = None


def blocks(page: str) -> list[str]:
    """What is indented by four, each block by itself."""
    found = re.findall(r"(?:^ {4}.*\n(?:\n+(?= {4}))?)+", (DOCS / page).read_text(), re.MULTILINE)
    return [textwrap.dedent(block) for block in found]


@pytest.mark.parametrize("page", ["rewards.md", "environments.md"])
def test_the_configuration_is_valid(page: str):
    (shown,) = [block for text in blocks(page) for block in [text[text.find("rl:\n") :]] if "rl:\n" in text]
    sections = _Sections.model_validate(yaml_core.load(shown)["rl"])
    assert sections.tasks


def test_the_reward_of_ones_own(tmp_path: Path):
    (source,) = [block for block in blocks("rewards.md") if "def short" in block]
    (tmp_path / "my_rewards.py").write_text(source)
    (reward,) = make_rewards([RewardConfig(kind=f"python:{tmp_path / 'my_rewards.py'}:short")], (), "rl.rewards")
    assert [reward(Prompt("a/0", "?", answer="four"), "x" * size) for size in (15, 16)] == [1.0, 0.0]


def test_the_environment_of_ones_own(tmp_path: Path):
    (source,) = [block[: block.find("rl:\n")] for block in blocks("environments.md") if "class Guess" in block]
    (tmp_path / "guess.py").write_text(source)
    config = EnvironmentConfig(kind=f"python:{tmp_path / 'guess.py'}:Guess", options={"largest": 20})
    game = environment_maker(config)()
    assert game.reset(Prompt("a/0", "?", answer="7")) == "Guess a number up to 20."
    assert [tuple(game.step(guess)) for guess in ("8", " 7\n")] == [("No.", 0.0, False), ("Right.", 1.0, True)]


def test_the_rack_is_that_of_seed_0():
    instance = make_instance(RackOptions(), 0)
    (shown,) = [block for block in blocks("environments.md") if "row\\column" in block]
    assert shown.startswith(instance.rack.text(instance.start))
    assert read_moves(shown) == solve(instance.rack, instance.start)


def test_all_kinds_and_keys_are_listed():
    rewards, environments = (DOCS / "rewards.md").read_text(), (DOCS / "environments.md").read_text()
    for name in [
        *REWARDS,
        *TASKS,
        *TaskConfig.model_fields,
        *RewardConfig.model_fields,
        *RewardPoolConfig.model_fields,
    ]:
        assert re.search(rf"`{name}\b", rewards), name
    for name in EnvironmentConfig.model_fields:
        assert f"| `{name}` |" in environments, name
