"""A config.json as a `ModelConfig`, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.pretrained.families import FAMILIES, Family, architecture
from models.pretrained.keys import Keys
from models.pretrained.source import PretrainedError
from models.pretrained.tensor_files import read_json

__all__ = ["Described", "config_keys", "read_config"]

FACTS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "initializer_range")
"""Keys that say nothing of the network, and are kept."""


@dataclass(frozen=True)
class Described:
    """What a config.json says.

    Attributes:
        family: of which the model is.
        interleaved: rotary dimensions lie in pairs in the file.
        wrapped: the model is the text part of one that sees images.
        facts: see `models.pretrained.source.WeightSource`.
    """

    config: ModelConfig
    family: Family
    interleaved: bool
    wrapped: bool
    facts: Mapping[str, Any]


def read_config(file: Path) -> Described:
    """Reads a config.json.

    Raises:
        PretrainedError: it cannot be read, or says something that this decoder is not.
    """
    values = read_json(file)
    if quantization := values.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise PretrainedError(f"{file}: quantization_config is of {method}; give the weights before quantisation")
    wrapped = values.get("model_type") == "gemma3"
    keys = _text_of(Keys(file, values, {})) if wrapped else Keys(file, values, {})
    kind = keys.take("model_type", str)
    family = FAMILIES.get(kind)
    if family is None:
        raise keys.wrong("model_type", f"is not supported; {', '.join(FAMILIES)} are, and gemma3's text part")
    named = keys.take("architectures", list, None) if "architectures" in keys else None
    if named and family.causal not in named:
        raise keys.wrong("architectures", f"has no {family.causal}, the model with an output layer")
    keys = keys.with_defaults(family.defaults)
    try:
        config = family.read(keys)
    except PretrainedError:
        raise
    except ValueError as error:
        raise PretrainedError(f"{file}: {error}") from None
    interleaved = config.latent is not None and bool(keys.any("rope_interleave") in (True, None))
    facts = {name: value for name in FACTS if (value := keys.any(name)) is not None} | {"model_type": kind}
    return Described(config, family, interleaved, wrapped, facts)


def _text_of(keys: Keys) -> Keys:
    """The keys of the text part."""
    for name in ("model_type architectures transformers_version torch_dtype dtype vision_config mm_tokens_per_image "
                 "boi_token_index eoi_token_index image_token_index initializer_range bos_token_id eos_token_id "
                 "pad_token_id tie_word_embeddings quantization_config use_cache _name_or_path").split():  # fmt: skip
        keys.any(name)
    text = keys.below("text_config")
    if text is None:
        raise keys.wrong("text_config", "is no mapping; give it the text part's keys")
    keys.finish("model_type gemma3")
    return text


def config_keys(config: ModelConfig, facts: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """The keys of a config.json that describes the architecture: of the family that facts name, or the plainest.

    Raises:
        PretrainedError: no family is like it.
    """
    first = FAMILIES.get(str(facts.get("model_type")))
    nearest: tuple[list[str], str] | None = None
    for family in [*([first] if first else []), *FAMILIES.values()]:
        written = family.write(config)
        lost = _lost(family, written, config)
        if lost == []:
            others = {name: facts[name] for name in FACTS if name in facts}
            return family, {**written, "dtype": config.param_dtype, "torch_dtype": config.param_dtype, **others}
        if lost and (nearest is None or len(lost) < len(nearest[0])):
            nearest = lost, family.model_type
    assert nearest is not None  # Llama's keys can always be read
    lost, name = nearest
    raise PretrainedError(
        f"no family of models that transformers has is like this one; {name} has no {', '.join(lost)}"
    )


def _lost(family: Family, written: dict[str, Any], config: ModelConfig) -> list[str] | None:
    """What is another when the keys are read again, as `model.option=value`; None where they cannot be read."""
    try:
        read = family.read(Keys(Path("config.json"), written, family.defaults))
    except ValueError:
        return None
    found = architecture(read)
    return [f"model.{name}={_shown(value)}" for name, value in architecture(config).items() if found[name] != value]


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | int | float | str) else str(value)
