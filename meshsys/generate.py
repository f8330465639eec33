"""Texts that continue prompts, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from meshsys.data.tokenizers import Message
from meshsys.errors import ConfigError
from meshsys.load_model import LoadedModel
from meshsys.text_stream import TextStream
from models.generation import Generator, Request

__all__ = ["Sampling", "TextGenerator", "TextPiece"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How texts are generated.

    Attributes:
        max_tokens: the most tokens of each.
        temperature, top_k, top_p, min_p: see `models.sampling.Settings`.
        stops: strings that end a text, of which they are no part; the tokenizer's own end does too.
        seed: of the randomness.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stops: tuple[str, ...] = ()
    seed: int = 0


class TextPiece(NamedTuple):
    """New text of one prompt.

    Attributes:
        prompt: its number.
        text: may be empty.
        reason: why the text ends here; empty if it goes on.
    """

    prompt: int
    text: str
    reason: Literal["", "stop", "length"]


class TextGenerator:
    """Continues texts.

    Args:
        model: whose parameters are copied; the generator does not keep them.
        at_once: texts that are generated at once, at most.
    """

    def __init__(self, model: LoadedModel, at_once: int = 16):
        self.tokenizer, self._prompt_ids = model.tokenizer, model.prompt_ids
        self.generator = Generator(model.decoder, model.params, slots=at_once)

    def prompt(self, text: str) -> np.ndarray:
        """The ids that a continuation of the text follows, int32 [n], one at least."""
        tokenizer = self.tokenizer
        ids = np.concatenate((np.array(self._prompt_ids, np.int32), tokenizer.encode(text)))
        begin = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        return ids if len(ids) else np.array([begin], np.int32)

    def chat_prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """The ids that the assistant's reply follows, int32 [n].

        Raises:
            ConfigError: the tokenizer has no chat template, or its does not take these messages.
        """
        if self.tokenizer.chat is None:
            raise ConfigError("the model has no chat template, which --chat needs; give --prompt")
        return self.tokenizer.encode(self.tokenizer.chat.render(messages, add_generation_prompt=True))

    def stream(self, prompts: Sequence[np.ndarray], how: Sampling, *, every: int | None = None) -> Iterator[TextPiece]:
        """The continuations of token ids.

        Args:
            every: the most tokens of a piece; see `models.generation.Generator.start`.

        Raises:
            ConfigError: the tokenizer gives ids that the model does not have.
        """
        tokenizer = self.tokenizer
        requests = [
            Request(
                prompt=prompt,
                max_tokens=how.max_tokens,
                temperature=how.temperature,
                top_k=how.top_k,
                top_p=how.top_p,
                min_p=how.min_p,
                stop_ids=tuple(sorted(tokenizer.stop_ids)),
                seed=how.seed,
            )
            for prompt in prompts
        ]
        streams = [TextStream(tokenizer.decode, how.stops) for _ in prompts]
        try:
            generation = self.generator.start(requests, every=every)
        except ValueError as error:
            raise ConfigError(f"{error}; give the model's own tokenizer as --tokenizer") from None
        for piece in generation:
            stream = streams[piece.request]
            text = stream.push(piece.tokens, is_last=bool(piece.reason))
            if stream.has_stopped and not piece.reason:
                generation.cancel(piece.request)
            yield TextPiece(piece.request, text, "stop" if stream.has_stopped else piece.reason)
