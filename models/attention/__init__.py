"""Attention over masks that are data: one function, `attend`, and several ways to compute it."""

from models.attention.attend import Implementation, attend
from models.attention.fused import on_platform
from models.attention.masks import Mask, causal_mask, visible
from models.attention.ring import zigzag_order

__all__ = ["Implementation", "Mask", "attend", "causal_mask", "on_platform", "visible", "zigzag_order"]
