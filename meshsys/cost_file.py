"""Costs as a user names them: in words, or by the path of a cost file."""

from __future__ import annotations

import os
from pathlib import Path

from meshsys.errors import ConfigError
from schedules.costs import Costs

__all__ = ["read_costs"]


def read_costs(text: str | None, option: str) -> Costs:
    """Reads `F=1,I=1.3,W=0.7`, or the JSON file that `meshsys schedule measure` wrote.

    Args:
        text: None for costs of one unit each.
        option: what the user set to `text`, for messages: `--costs`, or a configuration's key.

    Raises:
        ConfigError: a file that cannot be read, or what is no cost.
    """
    if text is None:
        return Costs()
    path = Path(os.path.expanduser(text))
    try:
        if not text or ("=" in text and not os.path.isfile(path)):
            return Costs.parse(text)
        return Costs.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{option}={text} cannot be read: {error.strerror}; give a cost file, or times as in F=1,I=1,W=1"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{option}={text} is not text; give the path of a JSON file") from None
    except ValueError as error:
        said = "" if str(error).startswith("costs ") else f"={text}"
        raise ConfigError(f"{option}{said}: {error}") from None
