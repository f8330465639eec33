"""What a decoder is made of, as one frozen record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DType", "ModelConfig"]

DType = Literal["float32", "bfloat16"]

_LARGEST = 1 << 20  # far above any model; keeps a slip of the finger from filling the memory


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    Attributes:
        layers: number of decoder layers.
        d_model: width of the residual stream.
        heads: number of query heads; each has `d_model // heads` dimensions.
        kv_heads: number of key and value heads; divides `heads`. 0 means `heads`.
        d_ff: width of the SwiGLU hidden layer.
        vocab_size: rows of the embedding. 0 means the tokenizer's own size.
        tie_embeddings: the output layer is the embedding, transposed.
        dtype: of the computation.
        param_dtype: of the stored parameters and the optimizer state.
        dropout: rate on each residual branch, 0 to 1.
        rope_theta: base of the rotary frequencies (Su et al. 2021, RoFormer).
        norm_epsilon: added to the mean square in RMSNorm.
    """

    layers: int = 4
    d_model: int = 128
    heads: int = 4
    kv_heads: int = 0
    d_ff: int = 512
    vocab_size: int = 0
    tie_embeddings: bool = False
    dtype: DType = "float32"
    param_dtype: DType = "float32"
    dropout: float = 0.0
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("layers", "d_model", "heads", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1; raise it")
        for name in ("kv_heads", "vocab_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 0; raise it")
        for name in ("layers", "d_model", "heads", "kv_heads", "d_ff", "vocab_size"):
            if getattr(self, name) > _LARGEST:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at most {_LARGEST}; lower it")
        if self.d_model % self.heads:
            raise ValueError(
                f"model.heads={self.heads} does not divide model.d_model={self.d_model}; "
                f"use {_divisors_near(self.d_model, self.heads)}"
            )
        if (self.d_model // self.heads) % 2:
            raise ValueError(
                f"model.heads={self.heads} gives heads of {self.d_model // self.heads} dimensions; "
                "RoPE rotates pairs, so model.d_model / model.heads must be even"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(
                f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}; "
                f"use {_divisors_near(self.heads, self.kv_heads)}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout={self.dropout} must be at least 0 and below 1; change it")
        for name, most in (("rope_theta", 1e30), ("norm_epsilon", 1.0)):
            if getattr(self, name) <= 0:
                raise ValueError(f"model.{name}={getattr(self, name)} must be above 0; raise it")
            if getattr(self, name) > most:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at most {most:g}; lower it")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads


def _divisors_near(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return " or ".join(str(d) for d in sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:2]))
