"""A model to run, from wherever it is: a run's newest checkpoint, a Hugging Face folder, a GGUF or llama2.c file."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from meshsys.checkpoint import restore_params
from meshsys.config import load_config
from meshsys.data import Tokenizer, load_tokenizer
from meshsys.errors import ConfigError
from models import Decoder
from models.pretrained import PretrainedError
from models.pretrained.load import load_pretrained

__all__ = ["OpenModel", "open_model"]


@dataclass(frozen=True)
class OpenModel:
    """A model with its tokenizer.

    Attributes:
        params: in canonical form, in the dtype that the computation reads.
        prompt_ids: what a text begins with that the model is to continue: as its documents did in a run, and as the
            tokenizer's file says otherwise.
    """

    decoder: Decoder
    params: Any
    tokenizer: Tokenizer
    prompt_ids: tuple[int, ...]


def open_model(path: str, *, tokenizer: str | None = None) -> OpenModel:
    """Reads a model onto the default device.

    Args:
        path: a run, by its folder or its name under `runs/`; a Hugging Face folder; a GGUF file; a llama2.c file.
        tokenizer: as `data.tokenizer`; by default the model's own.

    Raises:
        ConfigError: nothing of these is there, or it is damaged.
    """
    run = next((folder for folder in (Path(path), Path("runs", path)) if (folder / "config.yaml").is_file()), None)
    return _open_run(run, tokenizer) if run else _open_pretrained(path, tokenizer)


def _open_run(run: Path, tokenizer: str | None) -> OpenModel:
    config = load_config(run / "config.yaml")
    own = load_tokenizer(tokenizer or config.data.tokenizer or "bytes", chat_template=config.data.chat_template)
    decoder = Decoder(dataclasses.replace(config.model, vocab_size=config.model.vocab_size or own.vocab_size))
    params = restore_params(run / "checkpoints", jax.eval_shape(decoder.init, jax.random.key(0)))
    start = own.eos_id if own.bos_id is None else own.bos_id
    return OpenModel(decoder, decoder.cast(params), own, (start,))


def _open_pretrained(path: str, tokenizer: str | None) -> OpenModel:
    if not Path(path).exists():
        near = difflib.get_close_matches(path, [folder.name for folder in Path("runs").glob("*/")], 1)
        hint = f"did you mean {Path('runs', near[0])}?" if near else "give a run, a Hugging Face folder or a .gguf file"
        raise ConfigError(f"the model {path} does not exist; {hint}")
    if path.endswith(".bin") and tokenizer is None:
        raise ConfigError(f"{path} has no tokenizer in it; give --tokenizer its tokenizer.bin, say")
    try:
        own = load_tokenizer(tokenizer or path, "--tokenizer" if tokenizer else "PATH")
        config, params = load_pretrained(path)
    except PretrainedError as error:
        raise ConfigError(str(error)) from None
    decoder = Decoder(config)
    return OpenModel(decoder, decoder.cast(params), own, own.prompt_ids)
