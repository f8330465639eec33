"""Conversations for fine-tuning: JSONL with messages, as tokens and which of them the assistant wrote.

A line is `{"messages": [{"role": "user", "content": "..."}, ...]}`, as OpenAI's and TRL's, or
`{"conversations": [{"from": "human", "value": "..."}, ...]}`, as ShareGPT's. The tokenizer's chat template makes it
one text. What the assistant wrote, the end of its turn included, is learned; the rest is only seen.

All of it is rendered and tokenized once, when the source is opened, so that a template or a line that does not fit
stops a run before it begins.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from meshsys.data.sources import check_unicode, json_lines
from meshsys.data.tokenizers import Message, Tokenizer
from meshsys.errors import ConfigError

__all__ = ["Conversations", "Example", "TooLong", "encode_conversation", "open_conversations", "read_messages"]

TooLong = Literal["truncate", "drop", "error"]

_SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


class Example(NamedTuple):
    """One conversation.

    Attributes:
        ids: int32 [n].
        learned: bool [n], whether a token is a target of the loss; of the first it is never.
    """

    ids: np.ndarray
    learned: np.ndarray


@dataclass(frozen=True)
class Conversations(Sequence[Example]):
    """All conversations of a source, in memory: five bytes a token.

    Attributes:
        digest: hexadecimal hash of the messages, in order.
        note: what was read and left out, in one line for the user.
    """

    ids: np.ndarray
    learned: np.ndarray
    starts: np.ndarray
    digest: str
    note: str

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: Any) -> Any:
        part = slice(self.starts[index], self.starts[index + 1])
        return Example(self.ids[part], self.learned[part])


def open_conversations(source: str, tokenizer: Tokenizer, sequence_length: int, too_long: TooLong) -> Conversations:
    """The conversations of `data.source`.

    Args:
        source: a file, a folder or a glob of JSONL.
        tokenizer: one with a chat template.
        sequence_length: S; a conversation has at most S + 1 tokens, the last of which is a target only.
        too_long: whether a longer one is cut at its end, left out, or an error. What is left of it may hold nothing
            to learn; it is left out then.

    Raises:
        ConfigError: the tokenizer has no template; or a line does not fit, which the message names.
    """
    if tokenizer.chat is None:
        raise ConfigError(
            f"data.format=chat needs a chat template, and data.tokenizer={tokenizer.name} has none; "
            "set data.chat_template to a file of Jinja source"
        )
    hasher = hashlib.blake2b(digest_size=16)
    ids: list[np.ndarray] = []
    learned: list[np.ndarray] = []
    counts: Counter[str] = Counter()
    for where, record in json_lines(source):
        messages = read_messages(record, where)
        hasher.update(json.dumps(messages, sort_keys=True).encode())
        example = encode_conversation(messages, tokenizer, where)
        counts["read"] += 1
        if len(example.ids) > sequence_length + 1:
            if too_long == "error":
                raise ConfigError(
                    f"{where} has {len(example.ids)} tokens, and a row "
                    f"data.sequence_length={sequence_length}; raise that, or set data.too_long to truncate or drop"
                )
            counts[too_long] += 1
            if too_long == "drop":
                continue
            example = Example(*(part[: sequence_length + 1] for part in example))
        if not example.learned.any():
            counts["empty"] += 1
            continue
        ids.append(example.ids)
        learned.append(example.learned)
    if not ids:
        what = f"{counts['read']} conversations, none with a reply within data.sequence_length={sequence_length} tokens"
        raise ConfigError(f"data.source={source} holds {what if counts['read'] else 'no conversation'}; give another")
    starts = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    joined = Example(np.concatenate(ids), np.concatenate(learned))
    return Conversations(*joined, starts, hasher.hexdigest(), _note(joined, counts, sequence_length))


def encode_conversation(messages: Sequence[Message], tokenizer: Tokenizer, where: str) -> Example:
    """One conversation as tokens.

    Where the template marks what the assistant wrote, that is learned, and otherwise what follows the prompt for its
    reply, up to the last token that ends a turn. A token that ends a turn right after it is learned too. A token
    that begins before a reply and ends in it is not.

    Args:
        tokenizer: one with a chat template.
        where: names the conversation in errors.
    """
    assert tokenizer.chat is not None
    try:
        replies = tokenizer.chat.replies(messages)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    encoding = tokenizer.locate(replies.text)
    stops = np.isin(encoding.ids, list(tokenizer.stop_ids))
    learned = np.zeros(len(encoding.ids), np.bool_)
    for start, stop in replies.spans:
        first, last = np.searchsorted(encoding.starts, (start, stop))
        ends = np.flatnonzero(stops[first:last])
        if not replies.marked and len(ends):
            last = first + ends[-1] + 1  # templates have a line break after the end of a turn
        elif last < len(stops) and stops[last]:
            last += 1
        learned[first:last] = True
    learned[:1] = False
    return Example(encoding.ids, learned)


def read_messages(record: dict[str, Any], where: str) -> list[Message]:
    """The messages of a line, in OpenAI's form; `where` names it in errors."""
    if record.get("tools"):
        raise ConfigError(f"{where} has tools, which are not supported; remove them")
    listed = record.get("messages")
    if listed is None and isinstance(record.get("conversations"), list):
        listed = [_from_sharegpt(message, where) for message in record["conversations"]]
    if not isinstance(listed, list):
        raise ConfigError(f"{where} has no list of messages; its fields are {', '.join(record) or 'none'}")
    for number, message in enumerate(listed, start=1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ConfigError(f"{where}: message {number} has no text for role and content; mend or remove that line")
        check_unicode(message["content"], where)
    if not any(message["role"] == "assistant" for message in listed):
        raise ConfigError(f"{where} has no message of the role assistant, so nothing to learn; remove that line")
    return listed


def _from_sharegpt(message: Any, where: str) -> Message:
    role = message.get("from") if isinstance(message, dict) else None
    if role not in _SHAREGPT_ROLES:
        raise ConfigError(f"{where}: a message is from {role}; use {', '.join(_SHAREGPT_ROLES)}")
    return {"role": _SHAREGPT_ROLES[role], "content": message.get("value")}


def _note(joined: Example, counts: Counter[str], sequence_length: int) -> str:
    kept = counts["read"] - counts["drop"] - counts["empty"]
    parts = [f"{kept:,} conversations of {len(joined.ids):,} tokens, {joined.learned.sum():,} of them to learn"]
    longer = f"longer than data.sequence_length={sequence_length}"
    parts += [f"{counts['truncate']:,} {longer} were cut"] if counts["truncate"] else []
    parts += [f"{counts['drop']:,} {longer} were left out"] if counts["drop"] else []
    parts += [f"{counts['empty']:,} without a reply in what was left were left out"] if counts["empty"] else []
    return "; ".join(parts)
