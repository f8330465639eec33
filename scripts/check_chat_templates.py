"""Compares chat templates with Hugging Face transformers: texts, ids, and which tokens are the assistant's.

    python scripts/check_chat_templates.py

Needs `pip install transformers` beside the packages of this repository. The templates are of published models' kinds,
and one that tries what transformers does with white space. Exits with 1 at a difference.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path

# As a script, Python looks beside this file; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from meshsys.data.conversations import encode_conversation  # noqa: E402
from meshsys.data.tokenizers import ChatTemplate, load_tokenizer  # noqa: E402

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    "instructions": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
        "{% endif %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "headers": (
        "{% for m in messages %}{% set text = '<|' + m.role + '|>\n\n' + m.content | trim + '<|end|>' %}"
        "{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n\n' }}{% endif %}"
    ),
    "marked": (
        "{% for m in messages %}{% if m.role == 'assistant' %}<a>{%- generation -%} {{ m.content }}{{ eos_token }}"
        " {%- endgeneration -%}\n{% else %}<u>{{ m.content }}\n{% endif %}{% endfor %}"
    ),
    "white space": """
  {%- if tools %}
    {{ tools | tojson }}
  {%- endif %}
{% for m in messages %}
  {% if m.role == "assistant" %}
    <a>{% generation %}
{{ m.content }}{{ eos_token }}
    {% endgeneration %}

  {% else %}
    {{ m | tojson(indent=2) }}
    {% continue %}
  {% endif %}
  after
{% endfor %}
{%- if add_generation_prompt -%} <a> {%- endif %}
""",
}

CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi  there\n"},
        {"role": "assistant", "content": ' Hello <é> "x".'},
        {"role": "user", "content": "Who 漢?"},
        {"role": "assistant", "content": "Me\n\nand you 🙂"},
    ],
]


def main() -> int:
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        path = _small_tokenizer(Path(folder))
        reference = PreTrainedTokenizerFast(tokenizer_file=str(path), **SPECIALS)
        plain = load_tokenizer(str(path))
    for name, source in TEMPLATES.items():
        ours = dataclasses.replace(plain, chat=ChatTemplate(source, SPECIALS, name))
        for number, messages in enumerate(CONVERSATIONS):
            found = _differences(ours, reference, source, messages)
            wrong += len(found)
            print(f"{name}, conversation {number}: {', '.join(found) or 'equal'}")
    return int(wrong > 0)


def _differences(ours, reference, source: str, messages: list[dict[str, str]]) -> list[str]:
    found = []
    for prompt in (False, True):
        text = reference.apply_chat_template(
            messages, chat_template=source, add_generation_prompt=prompt, tokenize=False
        )
        if text != ours.chat.render(messages, add_generation_prompt=prompt):
            found.append(f"another text with add_generation_prompt={prompt}")
    marked = "generation %}" in source or "generation -%}" in source
    encoded = reference.apply_chat_template(
        messages, chat_template=source, tokenize=True, return_dict=True, return_assistant_tokens_mask=marked
    )
    example = encode_conversation(messages, ours, "here")
    if encoded["input_ids"] != example.ids.tolist():
        found.append("other ids")
    elif marked and encoded["assistant_masks"] != example.learned.astype(int).tolist():
        found.append("other tokens of the assistant")
    return found


def _small_tokenizer(folder: Path) -> Path:
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIALS.values()), initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator([message["content"] for message in CONVERSATIONS[1]] * 9, trainer)
    library.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


if __name__ == "__main__":
    sys.exit(main())
