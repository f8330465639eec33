"""A tokenizer as the files that transformers reads beside a model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from meshsys.data.tokenizers.base import Tokenizer

__all__ = ["save_tokenizer"]

_FILES = """
tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.jinja tokenizer.model
vocab.json merges.txt generation_config.json
""".split()


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Writes the tokenizer's files; returns their names, none if it has no such form.

    What came out of a folder goes on as it is. Out of a GGUF file it is written as tokenizer.json, with its special
    tokens and its chat template in tokenizer_config.json and the ends of a text in generation_config.json.
    """
    path = Path(os.path.expanduser(tokenizer.name))
    beside = path if path.is_dir() else path.parent if path.suffix in (".json", ".model") else None
    if beside is not None:
        found = [name for name in _FILES if (beside / name).is_file()]
        for name in found:
            shutil.copyfile(beside / name, folder / name)
        return found
    if tokenizer.to_json is None:
        return []
    config = {**tokenizer.specials, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if tokenizer.chat is not None:
        config["chat_template"] = tokenizer.chat.source
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.stop_ids)}
    files = {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return list(files)
