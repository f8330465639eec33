"""Text from the newest checkpoint of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from meshsys.checkpoint import restore_params
from meshsys.config import load_config
from meshsys.data import load_tokenizer
from meshsys.errors import ConfigError
from models import Decoder
from models.sampling import sample

__all__ = ["generate"]


def generate(run: Path, prompt: str, *, max_tokens: int, temperature: float = 0.0, seed: int = 0) -> Iterator[str]:
    """Yields the continuation of a prompt, piece by piece, computed on one device.

    Args:
        run: the folder of a run that has a checkpoint.
        temperature: 0 takes the likeliest token.

    Raises:
        ConfigError: the folder is not a run, or has no checkpoint yet.
    """
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is not a run: it has no config.yaml; give a folder that `meshsys train` wrote")
    config = load_config(run / "config.yaml")
    tokenizer = load_tokenizer(config.data.tokenizer or "bytes", chat_template=config.data.chat_template)
    decoder = Decoder(dataclasses.replace(config.model, vocab_size=config.model.vocab_size or tokenizer.vocab_size))
    params = restore_params(run / "checkpoints", jax.eval_shape(decoder.init, jax.random.key(0)))
    start = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    ids = np.concatenate(([start], tokenizer.encode(prompt))).astype(np.int32)
    tokens: list[int] = []
    shown = ""
    for token in sample(
        decoder,
        decoder.cast(params),
        ids,
        max_tokens=max_tokens,
        temperature=temperature,
        key=jax.random.key(seed),
        stop=tokenizer.eos_id,
    ):
        tokens.append(token)
        text = tokenizer.decode(tokens)
        # A character's bytes may be spread over tokens: hold back what is not whole yet.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(tokens)[len(shown) :]
