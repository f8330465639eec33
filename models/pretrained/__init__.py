"""Models that others have trained, and back: Hugging Face folders, GGUF and llama2.c files."""

from models.pretrained.source import PretrainedError, WeightSource, fill

__all__ = ["PretrainedError", "WeightSource", "fill"]
