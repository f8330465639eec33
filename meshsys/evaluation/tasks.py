"""Task files: text, conversations, or questions with answers, told apart by the fields of the first line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from meshsys.answers import marked_answer
from meshsys.data.conversations import read_messages
from meshsys.data.sources import check_unicode, json_lines, open_documents
from meshsys.data.tokenizers import Message
from meshsys.errors import ConfigError

__all__ = ["Conversations", "Question", "Questions", "Task", "Texts", "read_question", "read_task"]

_OPTION = "--task"


class Question(NamedTuple):
    """A question, and the answer that follows `####`."""

    question: str
    gold: str


@dataclass(frozen=True)
class Texts:
    documents: Sequence[str]


@dataclass(frozen=True)
class Conversations:
    """Each with what names it in errors."""

    conversations: Sequence[tuple[str, Sequence[Message]]]


@dataclass(frozen=True)
class Questions:
    questions: Sequence[Question]


Task = Texts | Conversations | Questions


def read_task(path: str, limit: int | None, text_field: str) -> Task:
    """The first items of a task file, all without a limit.

    Args:
        path: a file, a folder or a glob. Lines of `.jsonl` with `question` and `answer` are questions, lines with
            `messages` or `conversations` are conversations, and all else is text.
        text_field: the field of the text in JSONL.

    Raises:
        ConfigError: nothing there, or a line that does not fit; the message names it.
    """
    first = next(json_lines(path, _OPTION), (None, {}))[1] if path.endswith(".jsonl") else {}
    if "question" in first and "answer" in first:
        return Questions([read_question(*line) for line in islice(json_lines(path, _OPTION), limit)])
    if "messages" in first or "conversations" in first:
        lines = islice(json_lines(path, _OPTION), limit)
        return Conversations([(where, read_messages(record, where)) for where, record in lines])
    documents = open_documents(path, text_field, _OPTION)
    return Texts([documents[number] for number in range(min(len(documents), limit or len(documents)))])


def read_question(where: str, record: dict[str, Any]) -> Question:
    """The question in a line of JSONL; `where` names it in errors."""
    question, answer = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise ConfigError(f"{where} has no text for question and answer; mend or remove that line")
    check_unicode(question, where)
    gold = marked_answer(answer)
    if gold is None:
        raise ConfigError(f"{where} has no #### in its answer; put the result after it, as GSM8K does")
    return Question(question, gold)
