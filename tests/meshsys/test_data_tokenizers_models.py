"""Tokenizers of models: those in GGUF and llama2.c files equal the libraries' own, and real ones other software."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers

from meshsys.data.tokenizers import load_tokenizer
from meshsys.errors import ConfigError
from tests.meshsys.test_data_tokenizers import TEXT, check_round_trip, train_bpe, train_sentencepiece

TEXTS = [
    TEXT,
    "",
    " ",
    "a",
    "  two  spaces\n\n\nlines\t",
    "It's 2025; we'll see 12345.",
    "漢字 🙂 é",
    "<|im_start|>x<|im_end|>",
]


def write(path: Path, fields: dict[str, object]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        key = key if "." in key else f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(folder: Path, **more: object) -> tuple[dict[str, object], tokenizers.Tokenizer]:
    """The fields of a small byte-level tokenizer, and itself."""
    library = tokenizers.Tokenizer.from_file(str(train_bpe(folder, ("<|im_start|>", "<|im_end|>"))))
    library.no_truncation()
    library.no_padding()
    model = json.loads(library.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return fields | more, library


def test_smollm2_is_transformers(shared: Path, smollm2: Path):
    golden = json.loads((shared / "fixtures/smollm2/golden.json").read_text())
    tokenizer = load_tokenizer(str(smollm2))
    for case in golden["tok_cases"]:
        assert tokenizer.encode(case["text"]).tolist() == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["text"]
    assert tokenizer.chat is not None
    message = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
    prompt = tokenizer.chat.render([message], add_generation_prompt=True)
    assert prompt == golden["prompt"]
    assert tokenizer.encode(prompt).tolist() == golden["prompt_ids"]
    reply = golden["full_ids"][len(golden["prompt_ids"]) :]
    assert reply[-1] in tokenizer.stop_ids and f"{tokenizer.decode(reply)}<|im_end|>" == golden["text"]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.prompt_ids) == (49152, 1, 2, ())


def test_llama2c(shared: Path):
    """Its text of 256 greedy tokens is cut as the model wrote it."""
    tokenizer = load_tokenizer(str(shared / "fixtures/stories260k/tok512.bin"))
    ids = np.load(shared / "fixtures/stories260k/golden_ids.npy")
    text = tokenizer.decode(ids)
    assert text.startswith("Once upon a time, there was a little girl named Lily.")
    np.testing.assert_array_equal(tokenizer.encode(text), ids[1:])
    check_round_trip(tokenizer, TEXT.replace("<s>", ""))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.prompt_ids, tokenizer.vocab_size) == (1, 2, (1,), 512)
    encoding = tokenizer.locate("Hé  </s> you漢\n")
    np.testing.assert_array_equal(encoding.ids, tokenizer.encode("Hé  </s> you漢\n"))
    assert tokenizer.eos_id in encoding.ids
    assert encoding.starts[list(encoding.ids).index(tokenizer.eos_id)] == 4


def test_byte_level(tmp_path: Path):
    fields, library = byte_level(tmp_path)
    tokenizer = load_tokenizer(str(write(tmp_path / "model.gguf", fields)))
    check_round_trip(tokenizer)
    for text in TEXTS:
        expected = library.encode(text, add_special_tokens=False)
        encoding = tokenizer.locate(text)
        assert encoding.ids.tolist() == tokenizer.encode(text).tolist() == expected.ids
        assert encoding.starts.tolist() == [start for start, _ in expected.offsets]
    assert tokenizer.stop_ids == {1} and tokenizer.prompt_ids == ()


def test_turn_ends(tmp_path: Path):
    """The end of a turn is found by the file's word, or by its name."""
    fields, _ = byte_level(tmp_path)
    for more, stops in (
        ({"eos_token_id": 0}, {0, 1}),
        ({"eos_token_id": 0, "eot_token_id": 5}, {0, 5}),
        ({"eos_token_id": 0, "eot_token_id": 5, "eom_token_id": 6, "add_bos_token": True}, {0, 5, 6}),
    ):
        tokenizer = load_tokenizer(str(write(tmp_path / "model.gguf", fields | more)))
        assert tokenizer.stop_ids == stops
        assert tokenizer.prompt_ids == ((0,) if "add_bos_token" in more else ())


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "It's 2025  a!\n", ["It", "'s", "Ġ2025", "Ġ", "Ġa", "!", "Ċ"]),
        ("smollm", "It's 2025  a!\n", ["It", "'s", "Ġ", "2", "0", "2", "5", "Ġ", "Ġa", "!", "Ċ"]),
        ("llama-bpe", "It's 2025  a!\n\nb", ["It", "'s", "Ġ", "202", "5", "Ġ", "Ġa", "!ĊĊ", "b"]),
        ("qwen2", "IT'S 2025  a!\n\nb", ["IT", "'S", "Ġ", "2", "0", "2", "5", "Ġ", "Ġa", "!ĊĊ", "b"]),
    ],
)
def test_words(pre: str, text: str, words: list[str]):
    from meshsys.data.tokenizers.gguf import _PRE_TOKENIZERS

    assert [word for word, _ in _PRE_TOKENIZERS[pre]().pre_tokenize_str(text)] == words


@pytest.mark.parametrize("space_first", [False, True])
def test_pieces(tmp_path: Path, space_first: bool):
    """Equal to the SentencePiece model whose pieces the file lists."""
    path = train_sentencepiece(tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    kinds: list[tuple[Callable[[int], bool], int]] = [
        (library.is_unknown, 2),
        (library.is_control, 3),
        (library.is_unused, 5),
        (library.is_byte, 6),
    ]
    size = library.vocab_size()
    fields = {
        "model": "llama",
        "tokens": [library.id_to_piece(i) for i in range(size)],
        "scores": [library.get_score(i) for i in range(size)],
        "token_type": [next((kind for is_kind, kind in kinds if is_kind(i)), 1) for i in range(size)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": space_first,
    }
    tokenizer = load_tokenizer(str(write(tmp_path / "model.gguf", fields)))
    check_round_trip(tokenizer, TEXT.replace("<s>", ""))
    for text in TEXTS:
        if "<s>" not in text:
            expected = library.encode(" " * (space_first and text != "") + text)
            encoding = tokenizer.locate(text)
            assert encoding.ids.tolist() == tokenizer.encode(text).tolist() == expected
            assert (np.diff(encoding.starts) >= 0).all()
    ids = tokenizer.encode("the stage</s><s>of")
    assert ids.tolist() == [*tokenizer.encode("the stage"), 2, 1, *tokenizer.encode("of")]
    assert tokenizer.prompt_ids == (1,)


def test_refused(tmp_path: Path):
    fields, _ = byte_level(tmp_path)
    path = tmp_path / "model.gguf"
    for more, words in (
        ({"model": "bert"}, "tokenizer.ggml.model=bert"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre=tekken"),
        ({"token_type": [1]}, "not a tokenizer.ggml.token_type for each"),
        ({"merges": ["zz qq"]}, "is not what its name says"),
        ({"eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id=1000000 is not one of its"),
        ({"model": "llama"}, "no tokenizer.ggml.scores"),
        ({"model": "llama", "remove_extra_whitespaces": True}, "tokenizer.ggml.remove_extra_whitespaces"),
    ):
        write(path, fields | more)
        with pytest.raises(ConfigError, match="data.tokenizer=") as error:
            load_tokenizer(str(path))
        assert words in str(error.value) and str(path) in str(error.value)
    path.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="cut short"):
        load_tokenizer(str(path))
    (tmp_path / "cut.bin").write_bytes(b"\7\0\0\0\0\0\0\0\5\0\0\0<u")
    with pytest.raises(ConfigError, match="piece 0 has a length of 5"):
        load_tokenizer(str(tmp_path / "cut.bin"))


def test_hugging_face_ends_and_template(tmp_path: Path):
    """The stop ids of generation_config.json, and the template of a folder, a file of its own first."""
    path = train_bpe(
        tmp_path,
        ("<s>", "</s>", "<turn>"),
        bos_token="<s>",
        eos_token={"content": "</s>"},
        chat_template="{{ bos_token }}A",
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.stop_ids == {1, 2}
    assert tokenizer.chat is not None and tokenizer.chat.render([]) == "<s>A"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}B")
    assert load_tokenizer(str(tmp_path)).chat.render([]) == "</s>B"
