"""Low-rank updates in the files of PEFT: adapter_config.json and adapter_model.safetensors, in and out.

An adapter names the model that it updates; as a `WeightSource` it is that model with its updates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.config import LORA_TARGETS, LoraConfig, ModelConfig
from models.parameters import LORA_PARAMETERS
from models.pretrained.config_file import config_keys
from models.pretrained.hugging_face import Place, Take, places
from models.pretrained.keys import Keys
from models.pretrained.layouts import Layout, layouts
from models.pretrained.source import Index, PretrainedError, WeightSource
from models.pretrained.tensor_files import Planned, StoredTensor, open_file, read_json, write_file
from models.pretrained.tree import Leaf, leaves_of

__all__ = ["ADAPTER_CONFIG", "AdapterFolder", "Merged", "write_adapter"]

ADAPTER_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"

# Keys that change nothing at these values, `...` for all; others must be empty, or they would be another update.
_HARMLESS: Mapping[str, Any] = {
    **dict.fromkeys(
        "auto_mapping base_model_class ensure_weight_tying inference_mode init_lora_weights megatron_core "
        "parent_library peft_version qalora_group_size revision task_type".split(),
        ...,
    ),
    "bias": ("none",),
    **dict.fromkeys("fan_in_fan_out lora_bias use_bdlora use_dora use_qalora".split(), (False, None)),
}


class AdapterFolder:
    """An adapter and its model as a `WeightSource`.

    Args:
        open_model: opens the model that the adapter names.

    Attributes:
        base: where that model is.

    Raises:
        PretrainedError: it is damaged, its model is not here, or it updates in another way than `LoraConfig` can say.
    """

    def __init__(self, path: Path, open_model: Callable[[Path], WeightSource]):
        self.path = path
        file = path / ADAPTER_CONFIG
        keys = Keys(file, read_json(file), {"lora_alpha": 8, "use_rslora": False})
        self._base = _base(keys, path, open_model)
        self.base = self._base.path
        family, _ = config_keys(self._base.config, self._base.facts)
        names = _names(self._base.config, layouts(self._base.config, family, interleaved=True))
        self.config = replace(self._base.config, lora=_lora(keys, names))
        self.facts, self.notes = self._base.facts, self._base.notes
        self._table, self._leaves = _table(self.config, self._base.facts), _updates(self.config)
        self._tensors = self._found(open_file(path / _TENSORS))

    def read(self, leaf: str, layer: int | None, index: Index, out: np.ndarray) -> None:
        if leaf not in self._leaves:
            self._base.read(leaf, layer, index, out)
            return
        layout = self._table[leaf]
        tensor = self._tensors[layout.tensor.format(layer=layer)]
        for part, target in layout.parts(tensor.view(), self._leaves[leaf].shape, index, out):
            tensor.copy(part, target)

    def _found(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        found = {}
        for place in places(self._table, self._leaves):
            tensor = stored.get(place.name)
            if tensor is None:
                raise PretrainedError(f"{self.path / _TENSORS} has no tensor {place.name}; copy it again")
            if tensor.shape != place.shape or not tensor.is_float:
                raise PretrainedError(
                    f"{tensor.file}: {tensor.name} is of {tensor.dtype} and the shape {list(tensor.shape)}, and "
                    f"{self._base.path} asks for floats of {list(place.shape)}; one of them is of another model"
                )
            found[place.name] = tensor
        if others := stored.keys() - found.keys():
            raise PretrainedError(
                f"{self.path / _TENSORS}: {min(others)} updates what has no low-rank update here; use only the targets "
                "query, key, value, out, gate, up and down"
            )
        return found


class Merged:
    """A source without updates: they are added to the matrices as these are read."""

    def __init__(self, source: WeightSource):
        assert source.config.lora is not None
        self._source, self._leaves = source, leaves_of(source.config)
        self._scale = source.config.lora.alpha / source.config.lora.rank
        self.path, self.facts, self.notes = source.path, source.facts, source.notes
        self.config = replace(source.config, lora=None)

    def read(self, leaf: str, layer: int | None, index: Index, out: np.ndarray) -> None:
        names = [leaf + end for end in LORA_PARAMETERS]
        if names[0] not in self._leaves:
            self._source.read(leaf, layer, index, out)
            return
        inputs = len(self._leaves[names[0]].shape) - 1
        rank = slice(0, self._leaves[names[0]].shape[-1])
        parts = [(*index[:inputs], rank), (rank, *index[inputs:])]
        first, second = (np.empty([one.stop - one.start for one in part], np.float32) for part in parts)
        for name, part, array in zip(names, parts, (first, second), strict=True):
            self._source.read(name, layer, part, array)
        matrix = np.empty(out.shape, np.float32)
        self._source.read(leaf, layer, index, matrix)
        out[...] = matrix + np.tensordot(first, second, 1) * np.float32(self._scale)


def write_adapter(folder: Path, config: ModelConfig, take: Take, facts: Mapping[str, Any], base: str) -> None:
    """Writes the updates alone.

    Args:
        folder: that is there; the files must not be.
        facts: of the `WeightSource` of the model.
        base: path or name of the model that is updated.

    Raises:
        PretrainedError: no family of models is like it.
    """
    lora = config.lora
    assert lora is not None
    table, leaves = _table(config, facts), _updates(config)
    dtype = np.dtype(jnp.dtype(config.param_dtype))

    def written(layout: Layout, place: Place) -> np.ndarray:
        return layout.written(take(place.leaf, place.layer, None))

    planned = [
        (Planned(one.name, dtype, one.shape), partial(written, table[one.leaf], one)) for one in places(table, leaves)
    ]
    write_file(folder / _TENSORS, planned)
    family, _ = config_keys(replace(config, lora=None), facts)
    names = _names(config, layouts(config, family, interleaved=True))
    modules = sorted({module for module, target in names.items() if target in lora.targets})
    keys = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(keys, indent=2) + "\n")


# --- Names --------------------------------------------------------------------------------------------------------


def _updates(config: ModelConfig) -> dict[str, Leaf]:
    """The updates' factors."""
    return {name: leaf for name, leaf in leaves_of(config).items() if name.endswith(LORA_PARAMETERS)}


def _names(config: ModelConfig, table: Mapping[str, Layout]) -> dict[str, str]:
    """The target of each module that can have an update, by the module's name."""
    every = replace(config, lora=LoraConfig(targets=LORA_TARGETS))
    found = {}
    for name in _updates(every):
        leaf = name[: -len(LORA_PARAMETERS[0])]
        found[table[leaf].tensor.split(".")[-2]] = leaf.rsplit(".", 1)[-1]
    return found


def _table(config: ModelConfig, facts: Mapping[str, Any]) -> dict[str, Layout]:
    """Where each factor is: PEFT has them as [rank, inputs] and [outputs, rank]."""
    family, _ = config_keys(replace(config, lora=None), facts)
    matrices = layouts(config, family, interleaved=True)
    found = {}
    for name in _updates(config):
        leaf, end = name[: -len(LORA_PARAMETERS[0])], name[-len(LORA_PARAMETERS[0]) :]
        matrix = matrices[leaf]
        outputs, inputs = matrix.stored.split()
        tensor = f"base_model.model.{matrix.tensor.removesuffix('.weight')}.lora_{{}}.weight"
        if end == LORA_PARAMETERS[0]:
            found[name] = Layout(_filled(tensor, "A"), f"r {inputs}", f"{inputs}r")
        else:
            found[name] = Layout(_filled(tensor, "B"), f"{outputs} r", f"r{outputs}", matrix.interleaved)
    return found


def _filled(tensor: str, factor: str) -> str:
    return tensor.replace("{}", factor)


# --- The configuration --------------------------------------------------------------------------------------------


def _base(keys: Keys, path: Path, open_model: Callable[[Path], WeightSource]) -> WeightSource:
    kind = keys.take("peft_type", str)
    if kind != "LORA":
        raise keys.wrong("peft_type", "is not supported; LORA is")
    named = Path(keys.take("base_model_name_or_path", str))
    for place in (path / named, named):  # what lies beside the adapter before what lies where one works
        if place.exists() and place.resolve() != path.resolve():
            return open_model(place)
    raise keys.wrong(
        "base_model_name_or_path", "is not here; set it to the path of the model that it updates"
    )


def _lora(keys: Keys, names: Mapping[str, str]) -> LoraConfig:
    rank, alpha, dropout = keys.take("r", int), keys.take("lora_alpha", float), keys.any("lora_dropout") or 0.0
    if keys.take("use_rslora", bool):
        alpha *= rank**0.5  # it divides by the root of the rank
    for key, values in _HARMLESS.items():
        if values is ...:
            keys.any(key)
        else:
            keys.only(key, values, "is not supported")
    targets = _targets(keys, names)
    keys.skip_empty()
    keys.finish("LoRA")
    try:
        return LoraConfig(rank=rank, alpha=alpha, targets=targets, dropout=float(dropout))
    except ValueError as error:
        raise PretrainedError(f"{keys.file}: {error}") from None


def _targets(keys: Keys, names: Mapping[str, str]) -> tuple[str, ...]:
    asked = keys.any("target_modules")
    modules = sorted(names) if asked == "all-linear" else asked
    if not isinstance(modules, list) or not modules:
        raise keys.wrong("target_modules", "is no list of modules; write their names")
    if unknown := [module for module in modules if module not in names]:
        raise keys.wrong("target_modules", f"has {unknown[0]}; use {', '.join(sorted(names))}")
    return tuple(target for target in LORA_TARGETS if target in {names[module] for module in modules})
