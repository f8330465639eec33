"""Hugging Face's `tokenizer.json`, and what lies beside it: special tokens, chat template, ends of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshsys.data.tokenizers.base import FromFile, Origin, fingerprint
from meshsys.data.tokenizers.chat import ChatTemplate

if TYPE_CHECKING:
    import tokenizers

__all__ = ["from_library", "load_hugging_face"]

# Names of the end and the beginning of a text, for a tokenizer.json that comes without tokenizer_config.json.
_USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
_USUAL_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]")


def load_hugging_face(origin: Origin) -> FromFile:
    """The tokenizer of a `tokenizer.json`."""
    import tokenizers

    path = origin.path
    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise origin.unreadable(error) from error
    vocabulary = library.get_vocab(with_added_tokens=True)
    special = [token.content for token in library.get_added_tokens_decoder().values() if token.special]
    config, generation = (_json(origin, path.with_name(f"{name}_config.json")) for name in ("tokenizer", "generation"))

    def find(key: str, usual: tuple[str, ...]) -> int | None:
        if key in config:
            return vocabulary.get(_content(config[key]))
        return next((vocabulary[token] for token in usual if token in special), None)

    size = 1 + max(vocabulary.values(), default=-1)  # ids can have gaps
    eos_id, bos_id = find("eos_token", _USUAL_EOS), find("bos_token", _USUAL_BOS)
    stops = generation.get("eos_token_id", ())
    named = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
    specials = {key: token for key, token in named.items() if token}
    return from_library(
        library,
        name=origin.spec,
        fingerprint=fingerprint(path.read_bytes(), f"{bos_id},{eos_id}"),
        vocab_size=size + (eos_id is None),
        bos_id=bos_id,
        eos_id=size if eos_id is None else eos_id,
        stop_ids=frozenset(i for i in (stops if isinstance(stops, list) else [stops]) if isinstance(i, int)),
        prompt_ids=tuple(library.encode("", add_special_tokens=True).ids),
        specials=specials,
        chat=_chat_template(origin, config, specials),
    )


def from_library(library: tokenizers.Tokenizer, **rest: Any) -> FromFile:
    """A tokenizer that encodes all of a text, and that alone."""
    library.no_truncation()  # many published files would cut documents at 512 ids
    library.no_padding()
    library.post_processor = None  # some would take spaces out of the tokens' places in the text

    def locate(text: str) -> tuple[list[int], list[int]]:
        encoding = library.encode(text, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]

    return FromFile(
        to_ids=lambda text: library.encode(text, add_special_tokens=False).ids,
        to_located=locate,
        to_text=lambda ids: library.decode(ids, skip_special_tokens=False),
        to_json=lambda: library.to_str(pretty=True),
        **rest,
    )


def _chat_template(origin: Origin, config: dict[str, Any], specials: dict[str, str]) -> ChatTemplate | None:
    place, source = origin.path.with_name("tokenizer_config.json"), config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = (one for one in source if isinstance(one, dict) and one.get("name") == "default")
        source = next(named, {}).get("template")
    beside = origin.path.with_name("chat_template.jinja")
    if beside.is_file():
        try:
            place, source = beside, beside.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise origin._replace(path=beside).unreadable(error) from error
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, specials, f"the chat template of {place}")


def _content(token: Any) -> str:
    """Of a special token: a string, an object that holds it, or null."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _json(origin: Origin, path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise origin._replace(path=path).unreadable(error) from error
    return config if isinstance(config, dict) else {}
