"""docs/rl.md names every option and every metric, and what it shows is valid; so are the configurations."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from meshsys import yaml_core
from meshsys.config import Config, load_config
from meshsys.rl.algorithm_config import AlgorithmConfig, ImportanceConfig, KlConfig
from meshsys.rl.config import RlConfig, SamplingAxes, SamplingConfig
from meshsys.rl.speculative.config import SpeculativeConfig
from tests.meshsys.rl.test_rl_command import RECORDED, TIMES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "rl.md").read_text()


@pytest.mark.parametrize("section", [RlConfig, SamplingConfig, SamplingAxes, SpeculativeConfig, AlgorithmConfig])
def test_all_options_are_listed(section):
    for name in section.model_fields:
        assert re.search(rf"[`{{ .]{name}[`:.]", PAGE), name


@pytest.mark.parametrize(("prefix", "section"), [("kl", KlConfig), ("importance", ImportanceConfig)])
def test_all_options_of_an_algorithm_are_listed(prefix, section):
    for name in section.model_fields:
        assert f"`{prefix}.{name}`" in PAGE


def test_all_metrics_are_listed():
    for name in (RECORDED | TIMES) - {"step"}:
        assert f"`{'reward/NAME' if name.startswith('reward/') else name}`" in PAGE


def test_the_example_is_valid():
    (example,) = [block for block in re.findall(r"(?:^ {4}.*\n)+", PAGE, re.MULTILINE) if "run:" in block]
    assert Config.model_validate(yaml_core.load(textwrap.dedent(example))).rl is not None


@pytest.mark.parametrize("name", ["rl_quickstart", "rl_smollm2"])
def test_the_configurations_are_valid(name):
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    assert config.run.name == name and config.rl is not None
