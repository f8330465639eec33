"""Models that others have trained, and back: Hugging Face folders, PEFT adapters, GGUF and llama2.c files."""

from models.pretrained.load import (
    base_of,
    fill_tree,
    load_pretrained,
    new_folder,
    open_pretrained,
    save_adapter,
    save_pretrained,
    write_source,
)
from models.pretrained.source import PretrainedError, WeightSource, fill

__all__ = [
    "PretrainedError",
    "WeightSource",
    "base_of",
    "fill",
    "fill_tree",
    "load_pretrained",
    "new_folder",
    "open_pretrained",
    "save_adapter",
    "save_pretrained",
    "write_source",
]
