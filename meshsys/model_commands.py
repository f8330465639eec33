"""`meshsys import` and `meshsys export`: models of any format, and of runs, as folders that transformers loads."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshsys.arguments import command
from meshsys.errors import ConfigError
from meshsys.run_folder import run_folder

if TYPE_CHECKING:
    from meshsys.data import Tokenizer

__all__ = ["add_model_commands"]


def add_model_commands(commands: Any) -> None:
    """Adds `meshsys import PATH OUT` and `meshsys export RUN OUT` to the commands."""
    about = "write a model's files of any format as a Hugging Face folder"
    importing = command(commands, "import", _import, about)
    importing.add_argument(
        "path", metavar="PATH", help="a Hugging Face folder, a PEFT adapter, a .gguf file, or a .bin file of llama2.c"
    )
    importing.add_argument("--tokenizer", metavar="SPEC", help="in place of the model's own, as data.tokenizer")
    exporting = command(commands, "export", _export, "write a run's newest checkpoint as a Hugging Face folder")
    exporting.add_argument("run", metavar="RUN", help="a run's folder, or its name under runs/")
    exporting.add_argument("--adapter", action="store_true", help="the low-rank updates alone, as PEFT has them")
    for parser in (importing, exporting):
        parser.add_argument("out", metavar="OUT", help="the new folder")
        parser.add_argument(
            "--dtype", choices=["float32", "bfloat16"], help="of the written parameters; by default as they are"
        )


def _import(args: argparse.Namespace) -> None:
    from meshsys.data import load_tokenizer
    from models.pretrained import PretrainedError, new_folder, open_pretrained, write_source

    path = Path(args.path).expanduser()
    try:
        source = open_pretrained(path)
        tokenizer = _own_tokenizer(path) if args.tokenizer is None else load_tokenizer(args.tokenizer, "--tokenizer")
        with new_folder(Path(args.out).expanduser()) as folder:
            write_source(source, folder, args.dtype)
            files = _save_tokenizer(tokenizer, folder)
    except PretrainedError as error:
        raise ConfigError(str(error)) from None
    for note in source.notes:
        print(note)
    _say(args.out, files)


def _export(args: argparse.Namespace) -> None:
    run = run_folder(args.run)

    import dataclasses

    import jax

    from meshsys.checkpoint import restore_params
    from meshsys.config import load_config
    from meshsys.data import load_tokenizer
    from meshsys.pretrained import open_model
    from models import Decoder
    from models.pretrained import PretrainedError, save_adapter, save_pretrained

    if not (run / "config.yaml").is_file():
        raise ConfigError(
            f"{run} is not a run: it has no config.yaml; give a folder that `meshsys train` or `meshsys rl` wrote"
        )
    config = load_config(run / "config.yaml")
    if args.adapter and config.model.lora is None:
        raise ConfigError(f"--adapter: {run} trained all parameters, and no low-rank updates; leave it out")
    tokenizer = load_tokenizer(config.data.tokenizer or "bytes", chat_template=config.data.chat_template)
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or tokenizer.vocab_size)
    params = restore_params(run / "checkpoints", jax.eval_shape(Decoder(model).init, jax.random.key(0)))
    if args.dtype:
        model = dataclasses.replace(model, param_dtype=args.dtype)
        params = jax.tree.map(lambda leaf: leaf.astype(args.dtype), params)
    # What the file says besides the architecture goes on, as far as it is still there.
    source = open_model(config) if Path(config.model.pretrained).expanduser().exists() else None
    facts = dict(source.facts) if source else _facts(tokenizer, config.data.sequence_length)
    out = Path(args.out).expanduser()
    try:
        if args.adapter:
            base = str(Path(config.model.pretrained).expanduser().absolute()) if config.model.pretrained else ""
            save_adapter(model, params, out, base=base, facts=facts)
            print(f"{args.out}: the updates alone, of {base or 'a model that adapter_config.json has to name'}")
        else:
            save_pretrained(model, params, out, facts=facts)
            _say(args.out, _save_tokenizer(tokenizer, out))
    except PretrainedError as error:
        raise ConfigError(str(error)) from None


def _facts(tokenizer: Tokenizer, length: int) -> dict[str, Any]:
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "max_position_embeddings": length,
    }


def _own_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer that a model's files hold, if they hold one that can be read."""
    from meshsys.data import load_tokenizer
    from models.pretrained import base_of

    path = base_of(path)
    holds = path.suffix == ".gguf" or any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return load_tokenizer(str(path), "PATH") if holds else None


def _save_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> list[str]:
    from meshsys.data.tokenizers.save import save_tokenizer

    return [] if tokenizer is None else save_tokenizer(tokenizer, folder)


def _say(out: str, files: Iterable[str]) -> None:
    files = list(files)
    print(f"{out}: {'with ' + ', '.join(files) if files else 'without a tokenizer, as there is none in a form for it'}")
