"""`meshsys generate`: continuations of prompts, or a conversation."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshsys.arguments import command, number
from meshsys.errors import ConfigError

if TYPE_CHECKING:
    from meshsys.generate import Sampling, TextGenerator

__all__ = ["add_generate_command"]


def add_generate_command(commands: Any) -> None:
    """Adds `meshsys generate PATH` to the commands."""
    parser = command(commands, "generate", _generate, "continue texts with a model, or talk with it")
    about = "a run's folder or its name under runs/, a folder of Hugging Face, a .gguf file, or a .bin file of llama2.c"
    parser.add_argument("path", metavar="PATH", help=about)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", type=_unicode, action="append", help="to continue; may be repeated")
    what.add_argument("--prompts", metavar="FILE", help="a prompt a line; in *.jsonl, the `prompt` of each object")
    what.add_argument("--chat", action="store_true", help="talk, a line a message; ends with /exit")
    parser.add_argument("--system", metavar="TEXT", type=_unicode, help="with --chat: the system message")
    parser.add_argument(
        "--max-tokens", metavar="N", type=number(int, 1, 1 << 20), default=None, help="64; in chats 512"
    )
    parser.add_argument(
        "--temperature", metavar="T", type=number(float, 0, 1e30), default=0.0, help="0 takes the likeliest"
    )
    parser.add_argument("--top-k", metavar="K", type=number(int, 0, 2**31 - 1), default=0, help="0 keeps all tokens")
    parser.add_argument("--top-p", metavar="P", type=_share, default=1.0, help="1 keeps all tokens")
    parser.add_argument("--min-p", metavar="P", type=number(float, 0, 1), default=0.0, help="0 keeps all tokens")
    parser.add_argument(
        "--stop", metavar="TEXT", type=_unicode, action="append", default=[], help="ends a text; may be repeated"
    )
    parser.add_argument("--seed", metavar="S", type=number(int, 0, 2**31 - 1), default=0)
    parser.add_argument("--batch", metavar="B", type=number(int, 1, 1 << 12), default=16, help="texts at once, at most")
    parser.add_argument("--tokenizer", metavar="SPEC", help="in place of the model's own, as data.tokenizer")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each prompt, in their order")


def _generate(args: argparse.Namespace) -> None:
    if args.system is not None and not args.chat:
        raise ConfigError("--system is for --chat; put it into the prompt")
    if args.json and args.chat:
        raise ConfigError("--json is for prompts, and --chat has none; leave one out")
    texts = _read_prompts(args.prompts) if args.prompts is not None else args.prompt

    from meshsys.generate import Sampling, TextGenerator
    from meshsys.load_model import load_model

    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    how = Sampling(
        max_tokens=args.max_tokens or (512 if args.chat else 64),
        stops=tuple(args.stop),
        **{name: getattr(args, name) for name in names},
    )
    at_once = 1 if args.chat else min(args.batch, len(texts))
    generator = TextGenerator(load_model(args.path, tokenizer=args.tokenizer), at_once)
    if args.chat:
        generator.chat_prompt([{"role": "user", "content": ""}])  # complains before anyone types
        _talk(generator, how, args.system)
        return
    if args.json:
        _write_json(generator, texts, how)
    else:
        _write(generator, texts, how)


def _write(generator: TextGenerator, texts: list[str], how: Sampling) -> None:
    """The continuation of one prompt as it comes; of several, each with its prompt, in their order."""
    if len(texts) == 1:
        for piece in generator.stream([generator.prompt(texts[0])], how, every=1):
            print(piece.text, end="", flush=True)
        print()
        return
    for prompt, text, _ in _whole(generator, texts, how):
        print(f"> {prompt}\n{text}\n", flush=True)


def _write_json(generator: TextGenerator, texts: list[str], how: Sampling) -> None:
    for prompt, text, reason in _whole(generator, texts, how):
        print(json.dumps({"prompt": prompt, "text": text, "reason": reason}, ensure_ascii=False), flush=True)


def _whole(generator: TextGenerator, texts: list[str], how: Sampling) -> Iterator[tuple[str, str, str]]:
    """Prompt, continuation, and why that ends; each as soon as those before it are whole too."""
    parts: list[list[str]] = [[] for _ in texts]
    reasons = [""] * len(texts)
    given = 0
    for piece in generator.stream([generator.prompt(text) for text in texts], how):
        parts[piece.prompt].append(piece.text)
        reasons[piece.prompt] = piece.reason
        while given < len(texts) and reasons[given]:
            yield texts[given], "".join(parts[given]), reasons[given]
            given += 1


def _talk(generator: TextGenerator, how: Sampling, system: str | None) -> None:
    """Reads messages from standard input, and writes replies, until its end or /exit."""
    messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    while (line := _message()) is not None:
        messages.append({"role": "user", "content": line})
        reply = []
        for piece in generator.stream([generator.chat_prompt(messages)], how, every=1):
            reply.append(piece.text)
            print(piece.text, end="", flush=True)
        print(flush=True)
        messages.append({"role": "assistant", "content": "".join(reply)})


def _message() -> str | None:
    """The next line that is not blank; None at the end, or at /exit."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return None
        if line.strip():
            return line.strip()


def _read_prompts(name: str) -> list[str]:
    try:
        lines = [line for line in Path(name).expanduser().read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--prompts={name} cannot be read: {error.strerror}; give a text file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--prompts={name} is not UTF-8; convert it") from None
    if not lines:
        raise ConfigError(f"--prompts={name} has no prompt; write one a line")
    return [_prompt(name, *numbered) for numbered in enumerate(lines, 1)] if name.endswith(".jsonl") else lines


def _prompt(name: str, number: int, line: str) -> str:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    prompt = found.get("prompt") if isinstance(found, dict) else None
    if not isinstance(prompt, str):
        raise ConfigError(f'--prompts={name}: prompt {number} is not as in {{"prompt": "some text"}}; mend it')
    return prompt


def _share(text: str) -> float:
    share = number(float, 0, 1)(text)
    if share == 0:
        raise argparse.ArgumentTypeError("0 must be above 0; for the likeliest token alone set --temperature 0")
    return share


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid Unicode; write it in UTF-8") from None
    return text
