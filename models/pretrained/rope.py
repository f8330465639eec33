"""Rotary positions in a config.json, both ways.

There are two spellings: `rope_theta` beside `rope_scaling`, and `rope_parameters`, which holds both. Read are either,
or both where they agree; written are both, as a reader that knows one would take its own default for the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from models.config import ModelConfig, RopeScaling
from models.pretrained.keys import Keys

__all__ = ["LocalRope", "Rope"]

Json = dict[str, Any]

# RopeScaling's option, transformers' key, its kind, and what its absence or a null stands for; `...`: it must be there.
_FIELDS: dict[str, tuple[tuple[str, str, type, Any], ...]] = {
    "linear": (("factor", "factor", float, ...),),
    "llama3": (
        ("factor", "factor", float, ...),
        ("low_frequency_factor", "low_freq_factor", float, ...),
        ("high_frequency_factor", "high_freq_factor", float, ...),
        ("original_length", "original_max_position_embeddings", int, None),
    ),
    "yarn": (
        ("factor", "factor", float, None),
        ("original_length", "original_max_position_embeddings", int, None),
        ("beta_fast", "beta_fast", float, 32.0),
        ("beta_slow", "beta_slow", float, 1.0),
        ("attention_factor", "attention_factor", float, 0.0),
        ("mscale", "mscale", float, 0.0),
        ("mscale_all_dim", "mscale_all_dim", float, 0.0),
        ("truncate", "truncate", bool, True),
    ),
}


@dataclass(frozen=True)
class Rope:
    """One rotary table for all layers."""

    def read(self, keys: Keys) -> Json:
        found = [_table(keys, below) for name in ("rope_parameters", "rope_scaling") if (below := keys.below(name))]
        scalings = [scaling for scaling, _ in found]
        if len(scalings) == 2 and scalings[0] != scalings[1]:
            raise keys.wrong("rope_scaling", "says another thing than rope_parameters; remove one")
        theta = _theta(keys, "rope_theta", [theta for _, theta in found if theta is not None])
        keys.only("partial_rotary_factor", (1, None), _PARTIAL)
        return {"rope_theta": theta, "rope_scaling": scalings[0] if scalings else None}

    def write(self, config: ModelConfig) -> Json:
        scaling = _written(config.rope_scaling)
        parameters = {"rope_type": "default"} | (scaling or {}) | {"rope_theta": config.rope_theta}
        return {"rope_theta": config.rope_theta, "rope_scaling": scaling, "rope_parameters": parameters}


@dataclass(frozen=True)
class LocalRope:
    """Gemma 3's: layers with a window have a table of their own, which nothing stretches."""

    def read(self, keys: Keys) -> Json:
        below = keys.below("rope_parameters")
        parts = {name: below.below(name) for name in ("full_attention", "sliding_attention")} if below else {}
        if below:
            below.finish(_TABLES)
        found = {name: _table(keys, part) for name, part in parts.items() if part}
        scaling, theta = found.get("full_attention", (None, None))
        stretched, local_theta = found.get("sliding_attention", (None, None))
        if stretched is not None:
            raise keys.wrong("rope_parameters", "stretches sliding_attention, which is not supported")
        if old := keys.below("rope_scaling"):
            old_scaling, _ = _table(keys, old)
            if "full_attention" in found and old_scaling != scaling:
                raise keys.wrong("rope_scaling", "says another thing than rope_parameters; remove one")
            scaling = old_scaling
        return {
            "rope_theta": _theta(keys, "rope_theta", [theta] if theta else []),
            "rope_local_theta": _theta(keys, "rope_local_base_freq", [local_theta] if local_theta else []),
            "rope_scaling": scaling,
        }

    def write(self, config: ModelConfig) -> Json:
        scaling, local = _written(config.rope_scaling), config.rope_local_theta or config.rope_theta
        full = {"rope_type": "default"} | (scaling or {}) | {"rope_theta": config.rope_theta}
        return {
            "rope_theta": config.rope_theta,
            "rope_local_base_freq": local,
            "rope_scaling": scaling,
            "rope_parameters": {
                "full_attention": full,
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            },
        }


_PARTIAL = "is not supported: all dimensions of a head are rotated"
_TABLES = "rotary positions"


def _table(keys: Keys, below: Keys) -> tuple[RopeScaling | None, float | None]:
    """What a mapping says: how frequencies are stretched, and their base."""
    names = [name for name in ("rope_type", "type") if name in below]
    kind = below.take(names[0], str) if names else "default"
    for name in names[1:]:
        below.only(name, (kind,), f"is another than {names[0]}; remove one")
    theta = below.take("rope_theta", float, None) if "rope_theta" in below else None
    below.only("partial_rotary_factor", (1, None), _PARTIAL)
    below.any("finetuned")  # what was done to the model, not what it does
    if kind not in ("default", *_FIELDS):
        raise below.wrong(names[0], f"is not supported; default, {', '.join(_FIELDS)} are")
    options = {}
    for option, key, of, absent in _FIELDS.get(kind, ()):
        value = below.take(key, of, absent) if absent is ... or key in below else absent
        if value is None and option == "original_length":
            value = keys.take("max_position_embeddings", int)
        options[option] = value
    below.finish(f"rope_type {kind}")
    if "factor" in options and options["factor"] is None:
        options["factor"] = keys.take("max_position_embeddings", int) / options["original_length"]
    return (RopeScaling(kind=kind, **options) if options else None), theta  # type: ignore[arg-type]


def _theta(keys: Keys, name: str, inside: list[float]) -> float:
    """The base, from the mappings or from the key of its own, or the family's default."""
    said = [*inside, *([keys.take(name, float)] if name in keys or not inside else [])]
    if any(theta != said[0] for theta in said):
        raise keys.wrong(name, f"is another than {said[0]:g} in the mapping of rotary positions; remove one")
    return said[0]


def _written(scaling: RopeScaling | None) -> Json | None:
    if scaling is None:
        return None
    json: Json = {"rope_type": scaling.kind}
    for option, key, _, absent in _FIELDS[scaling.kind]:
        if (value := getattr(scaling, option)) != absent:
            json[key] = value
    return json
