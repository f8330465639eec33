"""The networks: pure functions over parameter pytrees with logical axis names."""

from models.config import ModelConfig
from models.counting import count_parameters
from models.decoder import SAVEABLE_NAMES, Batch, Decoder, forward
from models.parallel import ManualAxes
from models.pretrained import PretrainedError, load_pretrained, save_adapter, save_pretrained

__all__ = [
    "SAVEABLE_NAMES",
    "Batch",
    "Decoder",
    "ManualAxes",
    "ModelConfig",
    "PretrainedError",
    "count_parameters",
    "forward",
    "load_pretrained",
    "save_adapter",
    "save_pretrained",
]
