"""Tokenizers: round trips, ends of documents, and errors, on small models trained here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from meshsys.data.tokenizers import Tokenizer, load_tokenizer
from meshsys.errors import ConfigError

TEXT = 'def f(x):\n    """Twice x, é, 漢, 🙂."""\n\treturn 2 * x  # <s>\r\n'


def train_bpe(folder: Path, specials: tuple[str, ...] = (), **config: object) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(specials),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([TEXT] * 20, trainer)
    library.enable_truncation(8)
    library.enable_padding(length=8)
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def train_sentencepiece(folder: Path, **options: int) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(f"the {word} of line {word}" for word in ("stage", "rank", "tick", "slot")))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    return folder / "tokenizer.model"


def check_round_trip(tokenizer: Tokenizer, text: str = TEXT) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert 0 <= ids.min() and ids.max() < tokenizer.vocab_size
    ends = {end for end in (tokenizer.eos_id, tokenizer.bos_id) if end is not None}
    assert not ends & set(ids.tolist())
    assert all(end < tokenizer.vocab_size for end in ends)
    assert tokenizer.decode(ids) == text
    padded_vocabulary = tokenizer.vocab_size + 50
    assert tokenizer.decode([*ends, *ids, tokenizer.eos_id, padded_vocabulary]) == text
    assert tokenizer.encode("").shape == (0,) and tokenizer.decode([]) == ""


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    check_round_trip(tokenizer)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (264, None, 256)
    assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
    assert tokenizer.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("specials", "config", "bos", "eos"),
    [
        ((), {}, None, None),
        (("<|endoftext|>",), {}, None, "<|endoftext|>"),
        (("<s>", "</s>"), {"bos_token": "<s>", "eos_token": {"content": "</s>"}}, "<s>", "</s>"),
        (("<|endoftext|>", "<fin>", "None"), {"bos_token": None, "eos_token": "<fin>"}, None, "<fin>"),
    ],
)
def test_hugging_face(tmp_path, specials, config, bos, eos):
    path = train_bpe(tmp_path, specials, **config)
    tokenizer = load_tokenizer(str(path))
    if "<s>" not in specials:
        check_round_trip(tokenizer)
    long = "tick " * 100
    assert tokenizer.decode(tokenizer.encode(long)) == long, "neither truncated nor padded"
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    assert tokenizer.bos_id == (vocabulary[bos] if bos else None)
    assert tokenizer.eos_id == (vocabulary[eos] if eos else len(vocabulary))
    assert tokenizer.vocab_size == len(vocabulary) + (eos is None)
    assert load_tokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint


def test_fingerprint_follows_content(tmp_path):
    a, b, c = (
        load_tokenizer(str(train_bpe(tmp_path / name, specials)))
        for name, specials in [("a", ("</s>",)), ("b", ("</s>",)), ("c", ("<eos>",))]
    )
    assert a.fingerprint == b.fingerprint != c.fingerprint
    assert a.name != b.name


@pytest.mark.parametrize(
    ("options", "bos", "eos"),
    [({}, 1, 2), ({"bos_id": -1, "eos_id": 1}, None, 1), ({"bos_id": -1, "eos_id": -1}, None, None)],
)
def test_sentencepiece(tmp_path, options, bos, eos):
    tokenizer = load_tokenizer(str(train_sentencepiece(tmp_path, **options)))
    check_round_trip(tokenizer)
    assert tokenizer.bos_id == bos
    assert tokenizer.eos_id == (tokenizer.vocab_size - 1 if eos is None else eos)
    assert load_tokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no.json", None, "no such file"),
        ("", None, "no tokenizer.json or tokenizer.model in that folder"),
        ("a.txt", b"x", "of unknown kind"),
        ("tokenizer.json", b"{\n]", r"tokenizer\.json is not what its name says"),
        ("tokenizer.model", b"nonsense", r"tokenizer\.model is not what its name says"),
    ],
)
def test_errors(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^data.tokenizer={path}: .*{message}") as caught:
        load_tokenizer(str(path))
    assert "\n" not in str(caught.value)


def test_bad_tokenizer_config(tmp_path):
    path = train_bpe(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not what its name says"):
        load_tokenizer(str(path))
