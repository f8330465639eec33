"""The networks: pure functions over parameter pytrees with logical axis names."""

from models.config import ModelConfig
from models.decoder import SAVEABLE_NAMES, Batch, Decoder, count_parameters
from models.parallel import ManualAxes

__all__ = ["SAVEABLE_NAMES", "Batch", "Decoder", "ManualAxes", "ModelConfig", "count_parameters"]
