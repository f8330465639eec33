"""`model.pretrained`: architecture, tokenizer and first parameters of a run, from a model that others have trained."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from meshsys.config import Config
from meshsys.errors import ConfigError
from models import ModelConfig
from models.config import MoeConfig
from models.pretrained import PretrainedError, WeightSource, base_of, open_pretrained

__all__ = ["open_model", "with_pretrained"]

# What a run decides for itself, whatever the file says.
_OWN = ("dtype", "param_dtype", "dropout", "lora", "value_head", "pretrained")
_OWN_MOE = ("aux_loss", "z_loss", "bias_rate", "capacity_factor")


def open_model(config: Config) -> WeightSource | None:
    """The file or folder that `model.pretrained` names.

    Raises:
        ConfigError: it is absent, damaged, or another model than the decoder can be.
    """
    if not config.model.pretrained:
        return None
    try:
        return open_pretrained(Path(os.path.expanduser(config.model.pretrained)))
    except PretrainedError as error:
        raise ConfigError(f"model.pretrained={config.model.pretrained}: {error}") from None


def with_pretrained(config: Config) -> Config:
    """The configuration with the architecture that its file has, and with its tokenizer unless another is named.

    Raises:
        ConfigError: an option of the model is set, and the file has another value.
    """
    source = open_model(config)
    path = config.model.pretrained
    tokenizer = config.data.tokenizer or (str(base_of(Path(path).expanduser())) if source else "bytes")
    data = config.data.model_copy(update={"tokenizer": tokenizer})
    if source is None:
        return config.model_copy(update={"data": data})
    asked, held = config.model, source.config
    own: dict[str, Any] = {name: getattr(asked, name) for name in _OWN}
    if held.lora:
        if asked.lora not in (None, held.lora):
            raise ConfigError(
                f"model.lora={asked.lora} differs from the {held.lora} of model.pretrained={path}; leave it out"
            )
        own["lora"] = held.lora
    if asked.moe and not held.moe:
        raise ConfigError(f"model.moe is set, and model.pretrained={path} has no experts; leave it out")
    if asked.moe and held.moe:
        _check(asked.moe, held.moe, MoeConfig, _OWN_MOE, "model.moe", path)
        own["moe"] = dataclasses.replace(held.moe, **{name: getattr(asked.moe, name) for name in _OWN_MOE})
    _check(asked, held, ModelConfig, (*_OWN, *(("moe",) if "moe" in own else ())), "model", path)
    return config.model_copy(update={"data": data, "model": dataclasses.replace(held, **own)})


def _check(asked: Any, held: Any, kind: type, free: tuple[str, ...], where: str, path: str) -> None:
    """Refuses an option that is neither left at its default nor as in the file."""
    for one in dataclasses.fields(kind):
        value, other = getattr(asked, one.name), getattr(held, one.name)
        if one.name in free or value in (one.default, other):
            continue
        raise ConfigError(
            f"{where}.{one.name}={_shown(value)} differs from the {_shown(other)} of model.pretrained={path}; "
            "leave it out"
        )


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
