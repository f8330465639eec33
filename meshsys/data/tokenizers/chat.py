"""Chat templates: messages to one text, as transformers renders them.

A template is Jinja source, with what transformers gives to it: blocks trimmed, `raise_exception`, `strftime_now`,
`tojson` without HTML escapes, loop controls, special tokens as variables, and `{% generation %}` around what the
assistant writes (https://huggingface.co/docs/transformers/chat_templating). It comes with a downloaded model, so it
runs in Jinja's sandbox.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshsys.errors import ConfigError

__all__ = ["ChatTemplate", "Message", "Replies"]

Message = Mapping[str, Any]
"""`role` and `content`, as OpenAI's interface has them; templates may read other keys."""

# What the assistant writes stands between these while a template is rendered; as noncharacters, no text has them.
_BEGIN, _END = "\U0010fffe", "\U0010ffff"
_MARKS = str.maketrans("", "", _BEGIN + _END)


class Replies(NamedTuple):
    """A conversation as text, and the parts of it that the assistant wrote.

    Attributes:
        text: all of it.
        spans: characters from .. to.
        marked: the template itself says what they are; otherwise they go from what asks for a reply to the next
            message, and may hold more after the end of the turn.
    """

    text: str
    spans: list[tuple[int, int]]
    marked: bool


class ChatTemplate:
    """One template.

    Attributes:
        source: its text.
        origin: where it comes from, for messages.
    """

    def __init__(self, source: str, variables: Mapping[str, str], origin: str) -> None:
        """`variables`: the special tokens, as `bos_token`, that the template may use."""
        self.source = source
        self.origin = origin
        self._variables = dict(variables)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of a conversation.

        Args:
            add_generation_prompt: end with what the assistant's reply follows.

        Raises:
            ConfigError: the template is not valid, or does not take these messages.
        """
        return self._render(messages, add_generation_prompt).translate(_MARKS)

    def replies(self, messages: Sequence[Message]) -> Replies:
        """The text of a conversation, and what in it the assistant wrote.

        Where the template does not mark that by `{% generation %}`, it is what a conversation up to a reply has more
        than the same without it. That needs each to begin the next, as in most templates.

        Raises:
            ConfigError: of `render`; or the reply cannot be told from the rest.
        """
        whole = self._render(messages, False)
        if _BEGIN in whole:
            return _between_marks(whole)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:number], True)
                after = self._render(messages[: number + 1], False)
                if not (after.startswith(before) and whole.startswith(after)):
                    raise ConfigError(
                        f"{self.origin} writes message {number + 1} in another way when others follow it, so that a "
                        "reply cannot be told from the rest; put {% generation %} and {% endgeneration %} around the "
                        "assistant's text in it"
                    )
                spans.append((len(before), len(after)))
        return Replies(whole, spans, marked=False)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ConfigError(f"{self.origin} does not take these messages: {error}; change them") from error

    @property
    def fingerprint(self) -> str:
        """Equal for templates that give equal texts."""
        return hashlib.blake2b(json.dumps([self.source, self._variables]).encode(), digest_size=16).hexdigest()

    @cached_property
    def _template(self) -> Template:
        try:
            return _environment().from_string(self.source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"{self.origin} is not valid in line {error.lineno}: {error.message}; mend it") from error


def _between_marks(marked: str) -> Replies:
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    for number, part in enumerate(marked.split(_BEGIN)):
        inside, mark, outside = part.partition(_END)
        if number and mark:
            spans.append((length, length + len(inside)))
        pieces += [inside, outside]
        length += len(inside) + len(outside)
    return Replies("".join(pieces), spans, marked=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class _Generation(Extension):
    """The tag `{% generation %}`: marks what it encloses."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"
