"""Questions: what a model answers, and how often that is right."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshsys.answers import ASKED, CONTINUED, given_answer, marked_answer, pass_at_k, same_answer
from meshsys.evaluation.results import Metric, mean
from meshsys.evaluation.tasks import Question
from meshsys.load_model import LoadedModel
from models.generation import Generator, Request

__all__ = ["ask", "score"]


def ask(
    model: LoadedModel,
    questions: Sequence[Question],
    *,
    samples: int,
    temperature: float,
    max_tokens: int,
    batch: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[list[str]]:
    """What the model writes for each question, so many times.

    With a chat template the question is a user's message that asks for the form of the answer; without one it stands
    as `Question: ... Answer:`, and the text ends where the model writes the next question.

    Args:
        batch: sequences that are generated at once.
        progress: called with the number of texts that are done, and of all.
    """
    tokenizer = model.tokenizer
    stops = tuple(sorted(tokenizer.stop_ids))
    requests = [
        Request(
            prompt=_prompt(model, question.question),
            max_tokens=max_tokens,
            temperature=temperature,
            stop_ids=stops,
            seed=seed,
            prompt_number=number,
            sample=sample,
        )
        for number, question in enumerate(questions)
        for sample in range(samples)
    ]
    tokens: list[list[np.ndarray]] = [[] for _ in requests]
    done = 0
    for piece in Generator(model.decoder, model.params, slots=batch).start(requests):
        tokens[piece.request].append(piece.tokens)
        if piece.reason:
            done += 1
            progress(done, len(requests))
    texts = [tokenizer.decode(np.concatenate(parts)) for parts in tokens]
    if tokenizer.chat is None:
        texts = [re.split(r"\n\s*Question:", text)[0] for text in texts]
    return [texts[first : first + samples] for first in range(0, len(texts), samples)]


def score(
    questions: Sequence[Question], texts: Sequence[Sequence[str]]
) -> tuple[dict[str, Metric], list[dict[str, Any]]]:
    """Metrics, and each question with its answers.

    `exact_match` takes what follows `####` and, where a text has none, its last number; `marked_match` takes the
    former only. `pass@k` is for k of 1, 2, 4, .. up to the number of samples (Chen et al. 2021).
    """
    records: list[dict[str, Any]] = []
    for question, own in zip(questions, texts, strict=True):
        marked = [marked_answer(text) for text in own]
        answers = [given_answer(text) for text in own]
        records.append(
            {
                "question": question.question,
                "gold": question.gold,
                "texts": list(own),
                "answers": answers,
                "right": [same_answer(answer, question.gold) for answer in answers],
                "marked_right": [same_answer(answer, question.gold) for answer in marked],
            }
        )
    count = len(texts[0])
    metrics = {
        "exact_match": mean([sum(record["right"]) / count for record in records]),
        "marked_match": mean([sum(record["marked_right"]) / count for record in records]),
    }
    k = 1
    while count > 1 and k <= count:
        metrics[f"pass@{k}"] = mean([pass_at_k(count, sum(record["right"]), k) for record in records])
        k = count if k < count < 2 * k else 2 * k
    return metrics, records


def _prompt(model: LoadedModel, question: str) -> np.ndarray:
    tokenizer = model.tokenizer
    if tokenizer.chat is not None:
        message = {"role": "user", "content": ASKED.replace("{question}", question)}
        return tokenizer.encode(tokenizer.chat.render([message], add_generation_prompt=True))
    text = CONTINUED.replace("{question}", question)
    return np.concatenate((model.prompt_ids, tokenizer.encode(text))).astype(np.int32)
