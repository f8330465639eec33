"""Text in, packed batches out: `load_tokenizer` and `make_loader` are all that a trainer needs."""

from __future__ import annotations

from meshsys.data.loader import Batch, Loader, make_loader
from meshsys.data.sources import check_source
from meshsys.data.tokenizers import Tokenizer, load_tokenizer

__all__ = ["Batch", "Loader", "Tokenizer", "check_source", "load_tokenizer", "make_loader"]
