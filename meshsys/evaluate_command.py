"""The command `meshsys evaluate`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from meshsys.arguments import command, number

__all__ = ["add_evaluate_command"]


def add_evaluate_command(commands: Any) -> None:
    """Adds the command to a parser's subcommands."""
    about = "measure a model on files of text, conversations, or questions with answers"
    parser = command(commands, "evaluate", _evaluate, about)
    count = number(int, 1, 1 << 20)
    parser.add_argument("path", metavar="PATH", help="a run, a Hugging Face folder, a GGUF or a llama2.c file")
    parser.add_argument("--task", metavar="FILE", action="append", required=True, help="again for more files")
    parser.add_argument("--limit", metavar="N", type=count, help="items of each file; all by default")
    parser.add_argument("--context", metavar="N", type=number(int, 2, 1 << 20), default=1024, help="tokens of a row")
    parser.add_argument("--batch", metavar="N", type=count, default=8, help="rows at once")
    parser.add_argument("--samples", metavar="K", type=count, default=1, help="answers to each question, for pass@k")
    parser.add_argument("--temperature", metavar="T", type=number(float, 0, 1e30), default=0.0, help="0: the likeliest")
    parser.add_argument("--max-tokens", metavar="N", type=count, default=512, help="of an answer")
    parser.add_argument("--seed", metavar="S", type=number(int, 0, 2**31 - 1), default=0)
    parser.add_argument("--text-field", metavar="NAME", default="text", help="field of the text in JSONL")
    parser.add_argument("--tokenizer", metavar="PATH", help="in place of the model's own")
    parser.add_argument("--output", metavar="FILE", help="write all as JSON, with every answer")


def _evaluate(args: argparse.Namespace) -> None:
    from meshsys.files import writable, write_whole

    output = None if args.output is None else writable(args.output, "--output")

    from rich.console import Console

    from meshsys.evaluation import Settings, evaluate, table, to_json
    from meshsys.load_model import load_model

    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(args, name) for name in names})
    model = load_model(args.path, tokenizer=args.tokenizer)
    with Console(stderr=True).status("evaluating") as status:
        results = evaluate(model, args.task, settings, lambda done, of: status.update(f"answers {done}/{of}"))
    chosen = dataclasses.asdict(settings)
    print(table(results))
    print(to_json(args.path, chosen, results, samples=False))
    if output is not None:
        write_whole(output, to_json(args.path, chosen, results, samples=True) + "\n", "--output")
