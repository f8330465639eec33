"""Prompts from JSONL files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from meshsys.answers import ASKED, CONTINUED
from meshsys.data.sources import check_unicode, json_lines
from meshsys.errors import ConfigError
from meshsys.evaluation.tasks import read_question
from meshsys.rl.prompt import Prompt
from meshsys.rl.tasks.base import Form
from meshsys.rl.tasks.config import TaskConfig

__all__ = ["Listed", "open_gsm8k", "open_jsonl", "prompt_of"]


@dataclass(frozen=True)
class Listed:
    """A task whose prompts are all there."""

    name: str
    scorer: str
    prompts: Sequence[Prompt]

    @property
    def size(self) -> int:
        return len(self.prompts)

    def __getitem__(self, number: int) -> Prompt:
        return self.prompts[number]


def open_gsm8k(config: TaskConfig, name: str, chat: bool, option: str) -> Listed:
    """Questions with answers in GSM8K's form, put as `meshsys evaluate` does."""
    form = Form(config, chat, asked=ASKED, continued=CONTINUED)

    def prompts() -> Iterator[Prompt]:
        for number, line in enumerate(_lines(config, option)):
            question = read_question(*line)
            text, messages = form(question.question)
            yield Prompt(f"{name}/{number}", text, messages, question.gold, None, name, "gsm8k")

    return _listed(config, name, "gsm8k", prompts(), option)


def open_jsonl(config: TaskConfig, name: str, chat: bool, option: str) -> Listed:
    """Prompts with answers; the other fields of a line are the prompt's entry."""
    form = Form(config, chat)

    def prompts() -> Iterator[Prompt]:
        for number, (where, record) in enumerate(_lines(config, option)):
            for wanted in (config.prompt_field, config.answer_field):
                if wanted is not None and wanted not in record:
                    raise ConfigError(f"{where} has no field {wanted}; its fields are {', '.join(record) or 'none'}")
            record["prompt"] = record.pop(config.prompt_field or "prompt", record.get("messages"))
            record["answer"] = record.pop(config.answer_field or "answer", None)
            yield prompt_of(record, f"{name}/{number}", name, form, where)

    return _listed(config, name, "exact_match", prompts(), option)


def prompt_of(record: Mapping[str, Any], identity: str, task: str, form: Form, where: str) -> Prompt:
    """The prompt in a mapping with `prompt`, text or messages, or `messages`; and `answer`, text or a number.

    Raises:
        ConfigError: it does not fit; `where` names it.
    """
    asked = record.get("prompt", record.get("messages"))
    answer = record.get("answer")
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str | None):
        raise ConfigError(f"{where} has an answer that is no text; mend or remove that line")
    if isinstance(asked, str):
        check_unicode(asked, where)
        text, messages = form(asked)
    else:
        messages = form.messages(_messages(asked, where))
        text = messages[-1]["content"]
    entry = {key: value for key, value in record.items() if key not in ("prompt", "messages", "answer")}
    return Prompt(identity, text, messages, answer, entry or None, task)


def _messages(asked: Any, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(asked, list) or not asked:
        raise ConfigError(f"{where} has no prompt; write text or messages as prompt, and an answer")
    for number, message in enumerate(asked, start=1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ConfigError(f"{where}: message {number} has no text for role and content; mend or remove that line")
        check_unicode(message["content"], where)
    if asked[-1]["role"] == "assistant":
        raise ConfigError(f"{where}: the last message is the assistant's, which the policy is to write; remove it")
    return asked


def _lines(config: TaskConfig, option: str) -> Iterator[tuple[str, dict[str, Any]]]:
    return islice(json_lines(config.what, f"{option}.source"), config.size)


def _listed(config: TaskConfig, name: str, scorer: str, prompts: Iterator[Prompt], option: str) -> Listed:
    listed = tuple(prompts)
    if not listed:
        raise ConfigError(f"{option}.source={config.source} holds no prompt; give another file")
    if config.size is not None and len(listed) < config.size:
        raise ConfigError(f"{option}.size={config.size}, and the file has {len(listed)} prompts; lower it")
    return Listed(name, scorer, listed)
