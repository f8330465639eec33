"""Environments by name."""

from __future__ import annotations

from collections.abc import Callable

from meshsys.errors import ConfigError
from meshsys.rl.environments.base import Environment
from meshsys.rl.environments.config import EnvironmentConfig
from meshsys.rl.environments.rack import RackGame
from meshsys.rl.imported import import_function

__all__ = ["environment_maker"]


def environment_maker(config: EnvironmentConfig, option: str = "rl.environment") -> Callable[[], Environment]:
    """Makes environments; one has been made, to see that it can be.

    Args:
        option: where the environment stands in the configuration, for messages.

    Raises:
        ConfigError: there is no such class, or it does not take the options.
    """
    said = f"{option}.kind={config.kind}"
    made: Callable[..., Environment] = (
        RackGame if config.kind == "rack" else import_function(config.kind.removeprefix("python:"), said)
    )
    try:
        first = made(**config.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{said} cannot be made with {option}.options: {error}") from error
    missing = [name for name in ("reset", "step") if not callable(getattr(first, name, None))]
    if missing:
        raise ConfigError(f"{said} has no {' and no '.join(missing)}; it needs reset(prompt) and step(action)")
    return lambda: made(**config.options)
