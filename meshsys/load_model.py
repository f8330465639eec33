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
from models import Decoder, PretrainedError, load_pretrained
from models.lora import merge
from models.pretrained import base_of, open_pretrained

__all__ = ["LoadedModel", "load_model"]


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer.

    Attributes:
        params: in canonical form, in the dtype that the computation reads, low-rank updates merged.
        prompt_ids: what a text begins with that the model is to continue: of a model that a run made from nothing,
            what its documents began with; of others, what the tokenizer's file says.
    """

    decoder: Decoder
    params: Any
    tokenizer: Tokenizer
    prompt_ids: tuple[int, ...]


def load_model(path: str, *, tokenizer: str | None = None) -> LoadedModel:
    """Reads a model onto the default device.

    Args:
        path: a run, by its folder or its name under `runs/`; a Hugging Face folder; a PEFT adapter; a GGUF file;
            a llama2.c file.
        tokenizer: as `data.tokenizer`; by default the model's own.

    Raises:
        ConfigError: nothing of these is there, or it is damaged.
    """
    run = next((folder for folder in (Path(path), Path("runs", path)) if (folder / "config.yaml").is_file()), None)
    return _load_run(run, tokenizer) if run else _load_pretrained(path, tokenizer)


def _load_run(run: Path, tokenizer: str | None) -> LoadedModel:
    config = load_config(run / "config.yaml")
    if tokenizer is None:
        own = load_tokenizer(config.data.tokenizer or "bytes", chat_template=config.data.chat_template)
    else:
        own = load_tokenizer(tokenizer, "--tokenizer")
    trained = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or own.vocab_size)
    params = restore_params(run / "checkpoints", jax.eval_shape(Decoder(trained).init, jax.random.key(0)))
    model, params = merge(trained, params)
    decoder = Decoder(model)
    start = own.eos_id if own.bos_id is None else own.bos_id
    prompt_ids = own.prompt_ids if config.model.pretrained else (start,)
    return LoadedModel(decoder, decoder.cast(params), own, prompt_ids)


def _load_pretrained(path: str, tokenizer: str | None) -> LoadedModel:
    if (empty := Path("runs", path)).is_dir() and not Path(path).exists():
        raise ConfigError(
            f"{empty} is not a run: it has no config.yaml; give a folder that `meshsys train` or `meshsys rl` wrote"
        )
    if not Path(path).exists():
        near = difflib.get_close_matches(path, [folder.name for folder in Path("runs").glob("*/")], 1)
        hint = f"did you mean {Path('runs', near[0])}?" if near else "give a run, a Hugging Face folder or a .gguf file"
        raise ConfigError(f"the model {path} does not exist; {hint}")
    if path.endswith(".bin") and tokenizer is None:
        raise ConfigError(f"{path} has no tokenizer in it; give --tokenizer its tokenizer.bin, say")
    try:
        open_pretrained(path)  # what is no model is not asked for its tokenizer
        own = load_tokenizer(tokenizer or str(base_of(path)), "--tokenizer" if tokenizer else "PATH")
        config, params = merge(*load_pretrained(path))
    except PretrainedError as error:
        raise ConfigError(str(error)) from None
    decoder = Decoder(config)
    return LoadedModel(decoder, decoder.cast(params), own, own.prompt_ids)
