"""Conversations: what of them is learned, how rows are filled, exact resume, and lines that are refused."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

from meshsys.data import Batch, Loader, load_tokenizer, make_loader
from meshsys.data.conversations import Example, encode_conversation, open_conversations
from meshsys.data.whole_rows import WholeRows
from meshsys.errors import ConfigError
from tests.meshsys.test_data import assert_equal

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{{ m.content }}{% endgeneration %};"
    "{% else %}<u>{{ m.content }}{% endif %}{% endfor %}"
)


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def write(path: Path, conversations: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return path


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def learned_text(example: Example, tokenizer: Any) -> list[str]:
    """The runs of learned tokens, as text."""
    edges = np.flatnonzero(np.diff(np.r_[0, example.learned.astype(int), 0]))
    return [tokenizer.decode(example.ids[a:b]) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize(
    ("source", "expected"), [(TEMPLATE, ["yes é\n", "漢\n"]), (MARKED, ["yes é", "漢"])]
)  # fmt: skip
def test_what_is_learned(tmp_path: Path, source: str, expected: list[str]):
    (tmp_path / "t.jinja").write_text(source)
    tokenizer = load_tokenizer("bytes", chat_template=str(tmp_path / "t.jinja"))
    example = encode_conversation(chat("hi ü", "yes é", "and 🙂?", "漢"), tokenizer, "here")
    assert learned_text(example, tokenizer) == expected


def test_what_is_learned_of_smollm2(smollm2: Path):
    """The reply and the end of its turn, not the line break after it."""
    tokenizer = load_tokenizer(str(smollm2))
    example = encode_conversation(chat("Hi", "Hello there.", "Who?", "\n\nMe."), tokenizer, "here")
    runs = np.flatnonzero(np.diff(np.r_[0, example.learned.astype(int), 0])).reshape(-1, 2)
    first, second = (example.ids[a:b].tolist() for a, b in runs)
    assert first == [*tokenizer.encode("Hello there."), 2]
    # The template's line break and the reply's are one token, which begins before the reply.
    assert second == [*tokenizer.encode("\nMe."), 2]
    assert (
        example.ids.tolist()
        == tokenizer.encode(tokenizer.chat.render(chat("Hi", "Hello there.", "Who?", "\n\nMe."))).tolist()
    )


def test_the_end_of_a_turn_outside_the_marks(tmp_path: Path, smollm2: Path):
    source = (
        "{% for m in messages %}<|im_start|>{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}"
    )
    (tmp_path / "t.jinja").write_text(source)
    tokenizer = load_tokenizer(str(smollm2), chat_template=str(tmp_path / "t.jinja"))
    example = encode_conversation([{"role": "assistant", "content": "Hello"}], tokenizer, "here")
    assert example.ids[example.learned].tolist() == [*tokenizer.encode("Hello"), 2]


def naive_rows(
    examples: list[Example], queue: list[int], sequence_length: int, batch_size: int
) -> tuple[list[list[Example]], list[int], list[int]]:
    """The rows of one batch, and the numbers of the examples that wait and that were not drawn."""
    pairs = [len(example.ids) - 1 for example in examples]
    drawn = 0
    while sum(pairs[number] for number in queue[:drawn]) < (batch_size + 4) * sequence_length and drawn < len(queue):
        drawn += 1
    pool = queue[:drawn]
    rows: list[list[int]] = [[] for _ in range(batch_size)]
    for number in [pool[0], *sorted(pool[1:], key=lambda number: pairs[number], reverse=True)]:
        free = [sequence_length - sum(pairs[one] for one in row) for row in rows]
        fits = [(room, row) for row, room in enumerate(free) if room >= pairs[number]]
        if fits:
            rows[min(fits)[1]].append(number)
    waiting = [number for number in pool if not any(number in row for row in rows)]
    return [[examples[number] for number in row] for row in rows], waiting, queue[drawn:]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_rows_are_whole(batch_size: int):
    """Against a naive best fit; every example is in one row, and what is not one's is padding."""
    rng = np.random.default_rng(batch_size)
    sizes = rng.integers(2, 10, 120)
    examples = [Example(rng.integers(1, 99, n).astype(np.int32), rng.random(n) < 0.5) for n in sizes]
    source = grain.MapDataset.source(examples).repeat()
    batches = iter(WholeRows(source, sequence_length=12, batch_size=batch_size, rows=range(batch_size)))
    queue = list(range(120))
    while len(queue) > 60:
        batch = next(batches)
        rows, waiting, following = naive_rows(examples, queue, 12, batch_size)
        queue = waiting + following
        assert batches.get_state() == {"waiting": waiting, "document": following[0]}
        for number, row in enumerate(rows):
            end = sum(len(one.ids) - 1 for one in row)
            np.testing.assert_array_equal(batch.tokens_BS[number, :end], np.concatenate([one.ids[:-1] for one in row]))
            np.testing.assert_array_equal(batch.targets_BS[number, :end], np.concatenate([one.ids[1:] for one in row]))
            weights = np.concatenate([one.learned[1:] for one in row])
            np.testing.assert_array_equal(batch.weights_BS[number, :end], weights.astype(np.float32))
            segments = np.concatenate([np.full(len(one.ids) - 1, n) for n, one in enumerate(row, start=1)])
            np.testing.assert_array_equal(batch.segment_ids_BS[number, :end], segments)
            places = np.concatenate([np.arange(len(one.ids) - 1) for one in row])
            np.testing.assert_array_equal(batch.positions_BS[number, :end], places)
            assert not batch.segment_ids_BS[number, end:].any() and not batch.weights_BS[number, end:].any()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rng = random.Random(0)
    return write(
        tmp_path / "chat.jsonl",
        [chat(*["x" * rng.randint(1, 20) for _ in range(rng.choice((2, 4)))]) for _ in range(50)],
    )


def loader_of(corpus: Path, template: str, **options: Any) -> Loader:
    defaults = {"text_field": "text", "sequence_length": 64, "batch_size": 4, "seed": 3, "format": "chat"}
    tokenizer = load_tokenizer("bytes", chat_template=template)
    return make_loader(source=str(corpus), tokenizer=tokenizer, **(defaults | options))


def test_resume_is_exact(corpus: Path, template: str):
    whole = list(islice(loader_of(corpus, template), 30))
    first = loader_of(corpus, template)
    for _ in range(11):
        next(first)
    state = json.loads(json.dumps(first.state()))
    second = loader_of(corpus, template)
    second.restore(state)
    for expected, got in zip(whole[11:], islice(second, 19), strict=True):
        assert_equal(got, expected)


def test_shards_are_parts_of_the_batch(corpus: Path, template: str):
    whole = next(loader_of(corpus, template))
    shards = [next(loader_of(corpus, template, shard=shard, shards=2)) for shard in range(2)]
    parts = (np.concatenate([getattr(one, name) for one in shards]) for name in Batch.__dataclass_fields__)
    assert_equal(Batch(*parts), whole)


def test_another_template_does_not_continue(corpus: Path, template: str):
    state = loader_of(corpus, template).state()
    Path(template).write_text(TEMPLATE.replace("<", "["))
    with pytest.raises(ConfigError, match="data.chat_template=.* does not continue the checkpoint's data"):
        loader_of(corpus, template).restore(state)
    Path(template).write_text(TEMPLATE)
    with pytest.raises(ConfigError, match="data.too_long=drop does not continue the checkpoint's data"):
        loader_of(corpus, template, too_long="drop").restore(state)


def test_long_conversations(tmp_path: Path, template: str):
    path = write(tmp_path / "chat.jsonl", [chat("a", "b"), chat("a", "b" * 30), chat("a" * 30, "b")])
    tokenizer = load_tokenizer("bytes", chat_template=template)
    cut = open_conversations(str(path), tokenizer, 12, "truncate")
    assert [len(example.ids) for example in cut] == [10, 13]
    assert tokenizer.decode(cut[1].ids[cut[1].learned]) == "b" * 5
    assert cut.note == (
        "2 conversations of 23 tokens, 7 of them to learn; 2 longer than data.sequence_length=12 were cut; "
        "1 without a reply in what was left were left out"
    )
    dropped = open_conversations(str(path), tokenizer, 12, "drop")
    assert len(dropped) == 1
    assert "2 longer than data.sequence_length=12 were left out" in dropped.note
    with pytest.raises(ConfigError, match=r"chat.jsonl:2 has 39 tokens, and a row data.sequence_length=12; raise that"):
        open_conversations(str(path), tokenizer, 12, "error")
    with pytest.raises(ConfigError, match="holds 3 conversations, none with a reply within data.sequence_length=4"):
        open_conversations(str(path), tokenizer, 4, "truncate")


def test_sharegpt(tmp_path: Path, template: str):
    path = tmp_path / "sharegpt.jsonl"
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    path.write_text(json.dumps({"conversations": turns}))
    tokenizer = load_tokenizer("bytes", chat_template=template)
    assert tokenizer.decode(open_conversations(str(path), tokenizer, 99, "error")[0].ids) == "<s>s\n<u>a\n<a>b\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"text": "a"}, "chat.jsonl:1 has no list of messages; its fields are text"),
        ({"messages": []}, "has no message of the role assistant"),
        ({"messages": [{"role": "user", "content": "a"}]}, "has no message of the role assistant"),
        ({"messages": [{"role": "assistant", "content": None}]}, "message 1 has no text for role and content"),
        ({"messages": ["a"]}, "message 1 has no text for role and content"),
        ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "holds half of a surrogate pair"),
        ({"messages": chat("a", "b"), "tools": [{}]}, "has tools, which are not supported"),
        ({"conversations": [{"from": "bing", "value": "a"}]}, "a message is from bing; use system, human"),
        ({"conversations": [{"from": "gpt"}]}, "message 1 has no text for role and content"),
        ([], "is not a JSON object"),
    ],
)
def test_refused(tmp_path: Path, template: str, line: Any, words: str):
    (tmp_path / "chat.jsonl").write_text(json.dumps(line))
    with pytest.raises(ConfigError) as error:
        open_conversations(str(tmp_path), load_tokenizer("bytes", chat_template=template), 99, "error")
    assert words in str(error.value) and str(error.value).startswith(f"data.source={tmp_path}")


def test_templates_that_are_refused(tmp_path: Path):
    path = write(tmp_path / "chat.jsonl", [chat("a", "b", "c", "d")])
    with pytest.raises(ConfigError, match="data.format=chat needs a chat template, and data.tokenizer=bytes has none"):
        open_conversations(str(path), load_tokenizer("bytes"), 99, "error")
    with pytest.raises(ConfigError, match="data.chat_template=.* cannot be read"):
        load_tokenizer("bytes", chat_template=str(tmp_path / "absent"))
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content if loop.last else '' }}{% endfor %}")
    tokenizer = load_tokenizer("bytes", chat_template=str(tmp_path / "t.jinja"))
    with pytest.raises(ConfigError, match=r"chat.jsonl:1: data.chat_template=.* writes message 2 in another way"):
        open_conversations(str(path), tokenizer, 99, "error")
    with pytest.raises(ConfigError, match="data.source=python_docs is text"):
        open_conversations("python_docs", tokenizer, 99, "error")
