"""The tokenizer and the chat template inside a GGUF file, in the words of llama.cpp (`src/llama-vocab.cpp`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from meshsys.data.tokenizers.base import FromFile, Origin, fingerprint
from meshsys.data.tokenizers.chat import ChatTemplate
from meshsys.data.tokenizers.hugging_face import from_library
from meshsys.data.tokenizers.pieces import Piece, PieceKind, from_pieces
from meshsys.errors import ConfigError

__all__ = ["load_gguf"]

_PREFIX = "tokenizer.ggml."

# Names of the end of a turn, for files that do not say which token it is.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")

_TEMPLATE_TOKENS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def load_gguf(origin: Origin) -> FromFile:
    """The tokenizer of a GGUF file: byte-level BPE (`gpt2`) or SentencePiece's (`llama`)."""
    from models.pretrained.gguf_file import GgufFile
    from models.pretrained.source import PretrainedError

    try:
        metadata = GgufFile(origin.path).metadata
    except PretrainedError as error:
        raise ConfigError(f"{origin.option}={origin.spec}: {error}") from None
    fields = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    _check(origin, fields)
    tokens = fields["tokens"]
    ids = {name: fields.get(f"{name}_token_id") for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    bos_id, eos_id = ids["bos"], ids["eos"]
    stops = {ids["eot"], ids["eom"]} - {None}
    if ids["eot"] is None:
        stops |= {tokens.index(name) for name in _TURN_ENDS if name in tokens}
    begins = fields.get("add_bos_token", fields["model"] == "llama" or fields.get("pre") in _LLAMA3)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise origin.unreadable("its tokenizer.chat_template is no text")
    specials = {name: tokens[ids[key]] for key, name in _TEMPLATE_TOKENS.items() if ids[key] is not None}
    rest = {
        "fingerprint": fingerprint(json.dumps(fields, sort_keys=True)),
        "vocab_size": len(tokens) + (eos_id is None),
        "bos_id": bos_id,
        "eos_id": len(tokens) if eos_id is None else eos_id,
        "stop_ids": frozenset(stops),
        "prompt_ids": (bos_id,) if begins and bos_id is not None else (),
        "specials": specials,
        "chat": ChatTemplate(template, specials, f"the chat template of {origin.path}") if template else None,
    }
    return _FAMILIES[fields["model"]](origin, fields, rest)


def _check(origin: Origin, fields: Mapping[str, Any]) -> None:
    if fields.get("model") not in _FAMILIES:
        raise ConfigError(
            f"{origin.option}={origin.spec}: its tokenizer is of the kind {_PREFIX}model={fields.get('model')}, "
            f"which is not read; use a file with {' or '.join(_FAMILIES)}, or the model's tokenizer.json"
        )
    tokens, kinds = _list(fields, "tokens", str), _list(fields, "token_type", int)
    if not tokens or len(tokens) != len(kinds):
        raise origin.unreadable(f"it has no {_PREFIX}tokens, or not a {_PREFIX}token_type for each")
    for key, value in fields.items():
        if key.endswith("_token_id") and not (isinstance(value, int) and 0 <= value < len(tokens)):
            raise origin.unreadable(f"{_PREFIX}{key}={value} is not one of its {len(tokens)} tokens")


def _list(fields: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    """A list of one type; empty where the file has none."""
    value = fields.get(key)
    return value if isinstance(value, list) and all(isinstance(item, kind) for item in value) else []


def _byte_level(origin: Origin, fields: Mapping[str, Any], rest: dict[str, Any]) -> FromFile:
    import tokenizers

    pre = fields.get("pre")
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"{origin.option}={origin.spec}: {_PREFIX}pre={pre} is no known way to cut text into words; "
            f"use a file with {', '.join(_PRE_TOKENIZERS)}, or the model's tokenizer.json"
        )
    tokens, merges = fields["tokens"], _list(fields, "merges", str)
    if not merges:
        raise origin.unreadable(f"it has no {_PREFIX}merges")
    try:
        model = tokenizers.models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=pre in _LLAMA3,
        )
    except Exception as error:  # the library raises a bare Exception
        raise origin.unreadable(error) from error
    library = tokenizers.Tokenizer(model)
    if pre in _QWEN2:
        library.normalizer = tokenizers.normalizers.NFC()
    library.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind == PieceKind.CONTROL, normalized=False)
            for token, kind in zip(tokens, fields["token_type"], strict=True)
            if kind in (PieceKind.CONTROL, PieceKind.USER_DEFINED)
        ]
    )
    return from_library(library, name=origin.spec, **rest)


def _pieces(origin: Origin, fields: Mapping[str, Any], rest: dict[str, Any]) -> FromFile:
    for key, plain in (("remove_extra_whitespaces", False), ("precompiled_charsmap", [])):
        if fields.get(key, plain) != plain:
            raise ConfigError(
                f"{origin.option}={origin.spec}: {_PREFIX}{key} changes the text, which is not supported; "
                "use the model's tokenizer.json"
            )
    tokens, scores, kinds = fields["tokens"], _list(fields, "scores", float), fields["token_type"]
    if len(scores) != len(tokens) or not {*kinds} <= {*PieceKind}:
        raise origin.unreadable(f"it has no {_PREFIX}scores for each of its tokens, or tokens of unknown types")
    pieces = [Piece(text, score, PieceKind(kind)) for text, score, kind in zip(tokens, scores, kinds, strict=True)]
    return from_pieces(origin, pieces, space_first=fields.get("add_space_prefix", True), **rest)


_FAMILIES: dict[str, Callable[[Origin, Mapping[str, Any], dict[str, Any]], FromFile]] = {
    "gpt2": _byte_level,
    "llama": _pieces,
}


# --- How text is cut into words, by the names that llama.cpp gives ------------------------------------------------


def _gpt2() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _tiktoken(digits: str) -> Any:
    """The pattern of tiktoken's cl100k_base, where numbers are of so many digits."""
    from tokenizers import Regex, pre_tokenizers

    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    **dict.fromkeys(_LLAMA3, lambda: _tiktoken("{1,3}")),
    **dict.fromkeys(_QWEN2, lambda: _tiktoken("")),
}
