"""The networks: pure functions over parameter pytrees with logical axis names."""

from models.config import ModelConfig
from models.counting import count_parameters
from models.decoder import SAVEABLE_NAMES, Batch, Decoder
from models.parallel import ManualAxes

__all__ = ["SAVEABLE_NAMES", "Batch", "Decoder", "ManualAxes", "ModelConfig", "count_parameters"]
