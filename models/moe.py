"""Placeholder."""

from __future__ import annotations

from typing import Any

import flax.linen as nn

from models.config import ModelConfig
from models.parallel import WHOLE, ManualAxes


class Moe(nn.Module):
    config: ModelConfig
    manual: ManualAxes = WHOLE

    @nn.compact
    def __call__(self, x_BSD: Any, weights_BS: Any, segment_ids_BS: Any) -> Any:
        raise NotImplementedError
