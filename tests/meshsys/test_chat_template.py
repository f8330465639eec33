"""Chat templates: what transformers gives to them, where replies are, and what is refused."""

from __future__ import annotations

import re

import pytest

from meshsys.data.tokenizers import ChatTemplate
from meshsys.errors import ConfigError

TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "Me\nand you."},
]

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

MARKED = """{{ bos_token }}
{% for message in messages %}
{% if message.role == 'assistant' %}
A: {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}

{% else %}
U: {{ message.content }}
{% endif %}
{% endfor %}"""


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, "the chat template of x")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if true %}\n  {% if true %}\nx\n{% endif %}\n{% endif %}\ny", "x\ny"),  # blocks are trimmed
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hi"}'),
        ("{{ {'b': '<é>', 'a': 1} | tojson(indent=1) }}", '{\n "b": "<é>",\n "a": 1\n}'),
        ("{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role[0] }}{% endfor %}", "ua"),
        ("{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ unknown }}", "<s></s>True"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
    ],
)
def test_render(source: str, expected: str):
    assert template(source).render(TURNS) == expected


def test_render_of_the_day():
    assert re.fullmatch(r"\d\d \w{3} \d{4}", template("{{ strftime_now('%d %b %Y') }}").render([]))


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_replies(source: str):
    text, spans, marked = template(source).replies(TURNS)
    assert text == template(source).render(TURNS)
    end, extra = ("</s>", "") if marked else ("<|im_end|>", "\n")
    assert [text[start:stop] for start, stop in spans] == [f"Hello.{end}{extra}", f"Me\nand you.{end}{extra}"]
    assert marked == (source == MARKED)


def test_replies_that_cannot_be_told_apart():
    """As of templates that leave the reasoning out of all replies but the last."""
    forgets = "{% for m in messages %}[{{ m.content if loop.last or m.role == 'user' else '' }}]{% endfor %}"
    with pytest.raises(
        ConfigError, match=r"the chat template of x writes message 2 in another way .* {% generation %}"
    ):
        template(forgets).replies(TURNS)
    assert template(forgets).replies(TURNS[:2]).spans == [(4, 12)]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "is not valid in line 1"),
        ("{% generation %}a", "is not valid in line 1"),
        ("{{ raise_exception('roles must alternate') }}", "does not take these messages: roles must alternate"),
        ("{{ messages[0].content.no.such }}", "does not take these messages"),
        ("{{ 1 + 'a' }}", "does not take these messages"),
        ("{{ messages.append(1) }}", "does not take these messages: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", "does not take these messages: .*unsafe"),
    ],
)
def test_refused(source: str, words: str):
    with pytest.raises(ConfigError, match=f"the chat template of x {words}"):
        template(source).render(TURNS)
