"""One model on task files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshsys.data.conversations import Example, encode_conversation
from meshsys.errors import ConfigError
from meshsys.evaluation.likelihood import perplexity, total_loss, windows
from meshsys.evaluation.results import Metric, Result
from meshsys.evaluation.tasks import Conversations, Questions, Texts, read_task
from meshsys.load_model import LoadedModel

__all__ = ["Settings", "evaluate"]


@dataclass(frozen=True)
class Settings:
    """How tasks are run.

    Attributes:
        limit: items of each task; None for all.
        text_field: of text in JSONL.
        context: tokens that a model sees of a text at once.
        batch: rows, or sequences that are generated, at once.
        samples: answers to each question.
        temperature: at which they are drawn; 0 takes the likeliest tokens.
        max_tokens: of an answer.
        seed: of the randomness of answers.
    """

    limit: int | None = None
    text_field: str = "text"
    context: int = 1024
    batch: int = 8
    samples: int = 1
    temperature: float = 0.0
    max_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples > 1 and self.temperature == 0:
            raise ConfigError(
                f"--samples={self.samples} would be equal at --temperature=0; raise that, or leave out --samples"
            )


def evaluate(
    model: LoadedModel,
    tasks: Sequence[str],
    settings: Settings,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Result]:
    """The results of task files, in their order; see `meshsys.evaluation.tasks.read_task` for their kinds.

    Raises:
        ConfigError: a file that cannot be read, or a model that cannot do the task. All files are read before any
            is evaluated.
    """
    read = [(path, read_task(path, settings.limit, settings.text_field)) for path in tasks]
    results = []
    for path, task in read:
        match task:
            case Texts():
                results.append(_texts(model, path, task, settings))
            case Conversations():
                results.append(_conversations(model, path, task, settings))
            case Questions():
                results.append(_questions(model, path, task, settings, progress))
    return results


def _texts(model: LoadedModel, path: str, task: Texts, settings: Settings) -> Result:
    """Perplexity of a token, and bits for a byte of UTF-8, which do not depend on the tokenizer."""
    tokenizer = model.tokenizer
    begin = model.prompt_ids or (tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id,)
    examples = [
        window
        for text in task.documents
        for window in windows(np.concatenate((begin[-1:], tokenizer.encode(text))).astype(np.int32), settings.context)
    ]
    loss, tokens = total_loss(model.decoder, model.params, examples, context=settings.context, batch=settings.batch)
    size = sum(len(text.encode()) for text in task.documents)
    metrics = {
        "perplexity": Metric(perplexity(loss, tokens)),
        "nats_per_token": Metric(loss / tokens),
        "bits_per_byte": Metric(loss / math.log(2) / size),
    }
    return Result(path, "text", len(task.documents), metrics)


def _conversations(model: LoadedModel, path: str, task: Conversations, settings: Settings) -> Result:
    """Perplexity of what the assistant says."""
    if model.tokenizer.chat is None:
        raise ConfigError(f"--task={path} has conversations, and this model has no chat template; give it one")
    examples: list[Example] = []
    for where, messages in task.conversations:
        example = encode_conversation(messages, model.tokenizer, where)
        if len(example.ids) > settings.context + 1:
            size = len(example.ids)
            raise ConfigError(f"{where} has {size} tokens, and --context={settings.context}; raise that, or remove it")
        examples.append(example)
    loss, tokens = total_loss(model.decoder, model.params, examples, context=settings.context, batch=settings.batch)
    metrics = {"perplexity": Metric(perplexity(loss, tokens)), "nats_per_token": Metric(loss / tokens)}
    return Result(path, "chat", len(examples), metrics)


def _questions(
    model: LoadedModel, path: str, task: Questions, settings: Settings, progress: Callable[[int, int], None]
) -> Result:
    from meshsys.evaluation.questions import ask, score

    texts = ask(
        model,
        task.questions,
        samples=settings.samples,
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        batch=settings.batch,
        seed=settings.seed,
        progress=progress,
    )
    metrics, records = score(task.questions, texts)
    return Result(path, "questions", len(task.questions), metrics, records)
