"""Where each parameter is in a Hugging Face file: the tensor's name, and how its axes lie.

Axes: V vocabulary, D d_model, F d_ff, N query heads, K key-value heads, H a head's dimensions, R Q the latents' widths,
E experts; `NH D` in the file is `DNH` here: its first axis holds two of ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from models.config import ModelConfig
from models.pretrained.families import Family
from models.pretrained.source import Index

__all__ = ["Layout", "layouts"]


@dataclass(frozen=True)
class Layout:
    """A tensor of a file as a parameter.

    Attributes:
        tensor: its name; `{layer}` and `{expert}` stand for numbers, and each expert is a tensor of its own.
        stored: the file's axes, a space between them; one may hold several of ours.
        canonical: our axes, without those of layers and experts.
        interleaved: of the last of our axes so many dimensions, the last ones, are rotated; the file has them in
            pairs (2i, 2i + 1), the parameter in halves (i, i + half).
    """

    tensor: str
    stored: str
    canonical: str
    interleaved: int = 0

    @property
    def by_expert(self) -> bool:
        return "{expert}" in self.tensor

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape, from that of the parameter."""
        sizes = dict(zip(self.canonical, shape, strict=True))
        return tuple(math.prod(sizes[letter] for letter in axis) for axis in self.stored.split())

    def parts(
        self, tensor: np.ndarray, shape: tuple[int, ...], index: Index, out: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """What to copy for a part of the parameter: views of the tensor, each with the view of `out` that it goes to.

        Args:
            tensor: as it is stored.
            shape: of the parameter.
            index: of the part.
            out: of the part's shape.
        """
        sizes = dict(zip(self.canonical, shape, strict=True))
        letters = self.stored.replace(" ", "")
        whole = tensor.reshape([sizes[letter] for letter in letters])
        whole = whole.transpose([letters.index(letter) for letter in self.canonical])
        last = index[-1]
        for start, part in self._in_order(whole):
            first, end = max(last.start, start), min(last.stop, start + part.shape[-1])
            if first < end:
                place = (*index[:-1], slice(first - start, end - start))
                yield part[place], out[..., first - last.start : end - last.start]

    def read(self, tensor: np.ndarray, shape: tuple[int, ...], index: Index, out: np.ndarray) -> None:
        """Writes a part of the parameter to `out`; arguments are those of `parts`."""
        for part, target in self.parts(tensor, shape, index, out):
            target[...] = part

    def written(self, leaf: np.ndarray) -> np.ndarray:
        """The tensor of a parameter."""
        if self.interleaved:
            paired = np.empty_like(leaf)
            for start, part in self._in_order(paired):
                part[...] = leaf[..., start : start + part.shape[-1]]
            leaf = paired
        letters = self.stored.replace(" ", "")
        stored = leaf.transpose([self.canonical.index(letter) for letter in letters])
        return stored.reshape(self.stored_shape(leaf.shape))

    def _in_order(self, paired: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Views of rotary pairs that in a row make the parameter's last axis, each with its place there."""
        if not self.interleaved:
            yield 0, paired
            return
        plain, half = paired.shape[-1] - self.interleaved, self.interleaved // 2
        if plain:
            yield 0, paired[..., :plain]
        yield plain, paired[..., plain::2]
        yield plain + half, paired[..., plain + 1 :: 2]


_SHARED = {
    "shared.embed.embedding": Layout("model.embed_tokens.weight", "V D", "VD"),
    "shared.head.norm.scale": Layout("model.norm.weight", "D", "D"),
    "shared.head.kernel": Layout("lm_head.weight", "V D", "DV"),
}

_LAYER = {
    "attention_norm.scale": Layout("input_layernorm.weight", "D", "D"),
    "attention_post_norm.scale": Layout("post_attention_layernorm.weight", "D", "D"),
    "mlp_norm.scale": Layout("post_attention_layernorm.weight", "D", "D"),
    "mlp_post_norm.scale": Layout("post_feedforward_layernorm.weight", "D", "D"),
    "attention.query": Layout("self_attn.q_proj.weight", "NH D", "DNH"),
    "attention.key": Layout("self_attn.k_proj.weight", "KH D", "DKH"),
    "attention.value": Layout("self_attn.v_proj.weight", "KH D", "DKH"),
    "attention.out": Layout("self_attn.o_proj.weight", "D NH", "NHD"),
    "attention.query_bias": Layout("self_attn.q_proj.bias", "NH", "NH"),
    "attention.key_bias": Layout("self_attn.k_proj.bias", "KH", "KH"),
    "attention.value_bias": Layout("self_attn.v_proj.bias", "KH", "KH"),
    "attention.out_bias": Layout("self_attn.o_proj.bias", "D", "D"),
    "attention.query_norm.scale": Layout("self_attn.q_norm.weight", "H", "H"),
    "attention.key_norm.scale": Layout("self_attn.k_norm.weight", "H", "H"),
    "mlp.gate": Layout("mlp.gate_proj.weight", "F D", "DF"),
    "mlp.up": Layout("mlp.up_proj.weight", "F D", "DF"),
    "mlp.down": Layout("mlp.down_proj.weight", "D F", "FD"),
    "mlp.gate_bias": Layout("mlp.gate_proj.bias", "F", "F"),
    "mlp.up_bias": Layout("mlp.up_proj.bias", "F", "F"),
    "mlp.down_bias": Layout("mlp.down_proj.bias", "D", "D"),
    "moe.router": Layout("mlp.gate.weight", "E D", "DE"),
    "moe.router_bias": Layout("mlp.gate.e_score_correction_bias", "E", "E"),
    "moe.gate": Layout("mlp.experts.{expert}.gate_proj.weight", "F D", "DF"),
    "moe.up": Layout("mlp.experts.{expert}.up_proj.weight", "F D", "DF"),
    "moe.down": Layout("mlp.experts.{expert}.down_proj.weight", "D F", "FD"),
    "moe.shared.gate": Layout("mlp.shared_experts.gate_proj.weight", "F D", "DF"),
    "moe.shared.up": Layout("mlp.shared_experts.up_proj.weight", "F D", "DF"),
    "moe.shared.down": Layout("mlp.shared_experts.down_proj.weight", "D F", "FD"),
}

_NORM_OF_ALL_HEADS = {
    "attention.query_norm.scale": Layout("self_attn.q_norm.weight", "NH", "NH"),
    "attention.key_norm.scale": Layout("self_attn.k_norm.weight", "KH", "KH"),
}

_LATENT = {
    "attention.query_down": Layout("self_attn.q_a_proj.weight", "Q D", "DQ"),
    "attention.query_norm.scale": Layout("self_attn.q_a_layernorm.weight", "Q", "Q"),
    "attention.query_up": Layout("self_attn.q_b_proj.weight", "NH Q", "QNH"),
    "attention.kv_down": Layout("self_attn.kv_a_proj_with_mqa.weight", "R D", "DR"),
    "attention.kv_norm.scale": Layout("self_attn.kv_a_layernorm.weight", "R", "R"),
    "attention.kv_up": Layout("self_attn.kv_b_proj.weight", "NH R", "RNH"),
}

_ROTATED = ("attention.query", "attention.query_up", "attention.kv_down")
"""Under latent attention."""


def layouts(config: ModelConfig, family: Family, *, interleaved: bool) -> dict[str, Layout]:
    """By leaf (`models.pretrained.source.WeightSource`), for all that models of the family can have.

    Args:
        interleaved: the file has rotary dimensions in pairs; only latent attention's can be.
    """
    table = _LAYER | (_NORM_OF_ALL_HEADS if config.qk_norm == "all" else {})
    if config.latent:
        pairs = config.latent.rope_dim if interleaved else 0
        table |= _LATENT
        table |= {leaf: replace(table[leaf], interleaved=pairs) for leaf in _ROTATED}
    named = _SHARED | {f"layers.{leaf}": one for leaf, one in table.items()}
    named |= {leaf: replace(named[leaf], tensor=name) for leaf, name in family.names.items()}
    return {
        leaf: replace(one, tensor=f"model.layers.{{layer}}.{one.tensor}") if leaf.startswith("layers.") else one
        for leaf, one in named.items()
    }
