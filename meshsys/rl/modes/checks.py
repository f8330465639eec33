"""What an algorithm needs, and a mode cannot give."""

from __future__ import annotations

from meshsys.errors import ConfigError
from meshsys.rl.algorithm_config import Recipe
from meshsys.rl.config import RlConfig

__all__ = ["check_mode"]


def check_mode(config: RlConfig, recipe: Recipe) -> None:
    """Raises a `ConfigError` for an algorithm that does not go with the mode."""
    mode = config.mode
    if mode == "alternate":
        return
    if recipe.dynamic_sampling:
        raise ConfigError(
            f"rl.mode={mode} learns from groups before all are known, and rl.algorithm.name={recipe.name} replaces "
            "groups of equal scores; set rl.algorithm.dynamic_sampling=false, or rl.mode=alternate"
        )
    if mode == "overlap" and config.environment:
        raise ConfigError(
            "rl.mode=overlap carries responses over an update, and rl.environment.kind="
            f"{config.environment.kind} plays in turns; set rl.mode=alternate, or periodic"
        )
    if mode == "periodic":
        _check_periodic(config, recipe)
    elif recipe.importance.mode == "none":
        raise ConfigError(
            "rl.mode=overlap learns from tokens of older policies, and rl.algorithm.importance.mode=none does not "
            "correct for that; set it to truncate or mask"
        )
    elif config.sampling.tolerance is not None:
        raise ConfigError(
            f"rl.sampling.tolerance={config.sampling.tolerance:g} does not go with rl.mode=overlap, where policies of "
            "sampler and trainer differ; leave it out"
        )


def _check_periodic(config: RlConfig, recipe: Recipe) -> None:
    for option in ("minibatches", "epochs"):
        if (value := getattr(config, option)) > 1:
            raise ConfigError(
                f"rl.{option}={value}, but rl.mode=periodic makes one update of a step; set it to 1, or "
                "rl.mode=alternate"
            )
    if recipe.whole:
        raise ConfigError(
            f"rl.algorithm.name={recipe.name} compares all responses of a step, and rl.mode=periodic learns from "
            "groups as they come; set rl.mode=alternate, or another algorithm, as grpo, dr_grpo, gspo, cispo or rloo"
        )
