"""Text to token ids and back: plain bytes, or the tokenizer of a model in one of the usual files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from meshsys.data.tokenizers.base import Bytes, Encoding, FromFile, Origin, Tokenizer
from meshsys.data.tokenizers.chat import ChatTemplate, Message
from meshsys.data.tokenizers.gguf import load_gguf
from meshsys.data.tokenizers.hugging_face import load_hugging_face
from meshsys.data.tokenizers.llama2c import load_llama2c
from meshsys.data.tokenizers.pieces import load_sentencepiece
from meshsys.errors import ConfigError

__all__ = ["ChatTemplate", "Encoding", "Message", "Tokenizer", "load_tokenizer"]

_LOADERS = {
    ".json": load_hugging_face,
    ".model": load_sentencepiece,
    ".gguf": load_gguf,
    ".bin": load_llama2c,
}
_KINDS = "bytes, a tokenizer.json, a SentencePiece *.model, a *.gguf, or llama2.c's tokenizer *.bin"


def load_tokenizer(spec: str, option: str = "data.tokenizer", *, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of `data.tokenizer`.

    Args:
        spec: `bytes`; or a `tokenizer.json` of Hugging Face; or a SentencePiece `*.model`; or a folder
            with `tokenizer.json` or `tokenizer.model`; or a GGUF file; or a tokenizer of llama2.c. Beginning and end
            of a text are read from `tokenizer_config.json` beside a `tokenizer.json`, else they are its special
            tokens with the usual names. A tokenizer without an end gets one more id for it.
        option: by which the user gave it, for messages.
        chat_template: `data.chat_template`, a file of Jinja source that is used in place of the tokenizer's own.

    Raises:
        ConfigError: no such file, or one that the library does not read.
    """
    tokenizer = _load(spec, option)
    if chat_template is None:
        return tokenizer
    said = f"data.chat_template={chat_template}"
    try:
        source = Path(os.path.expanduser(chat_template)).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{said} cannot be read: {error.strerror}; give a file of Jinja source") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{said} is not text; give a file of Jinja source") from None
    return dataclasses.replace(tokenizer, chat=ChatTemplate(source, tokenizer.specials, said))


def _load(spec: str, option: str) -> Bytes | FromFile:
    if spec == "bytes":
        return Bytes()
    path = Path(os.path.expanduser(spec))
    if spec and os.path.isdir(path):
        inside = [path / name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()]
        if not inside:
            raise ConfigError(
                f"{option}={spec}: no tokenizer.json or tokenizer.model in that folder; name the file itself"
            )
        path = inside[0]
    if not os.path.isfile(path):
        raise ConfigError(f"{option}={spec}: no such file; give {_KINDS}")
    if path.suffix not in _LOADERS:
        raise ConfigError(f"{option}={spec}: of unknown kind; give {_KINDS}")
    return _LOADERS[path.suffix](Origin(option, spec, path))
