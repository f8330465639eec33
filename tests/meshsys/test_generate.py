"""`meshsys generate`: from runs and from models' files to text."""

from __future__ import annotations

import io
import json
import sys

import jax
import jax.numpy as jnp
import pytest

from meshsys.checkpoint import Checkpoints
from meshsys.cli import main
from meshsys.config import Config, to_yaml
from meshsys.generate import Sampling, TextGenerator
from meshsys.load_model import load_model
from models import Decoder, ModelConfig
from models.generation import Generator, Request
from tests.oracles.inputs import random_parameters

MODEL = ModelConfig(layers=2, d_model=16, heads=4, d_ff=32, vocab_size=264)
CHAT = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def spread(params):
    """Around zero, so that the text does not settle on one byte."""
    return jax.tree.map(lambda leaf: 2 * leaf - 0.2, params)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What training leaves behind, as far as `generate` reads it."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "chat.jinja").write_text(CHAT)
    data = {"tokenizer": "bytes", "chat_template": str(folder / "chat.jinja")}
    config = Config.model_validate({"run": {"name": "run"}, "model": vars(MODEL), "data": data})
    (folder / "config.yaml").write_text(to_yaml(config))
    state = {"step": jnp.int32(3), "params": spread(random_parameters(Decoder(MODEL))), "opt_state": jnp.zeros((3,))}
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    checkpoints.save(3, state, {})
    checkpoints.close()
    return folder


@pytest.fixture(scope="module")
def texts(run):
    return TextGenerator(load_model(str(run)), 4)


def wanted(text: str, **how) -> str:
    """By the generator below, from the beginning of a text on."""
    decoder = Decoder(MODEL)
    generator = Generator(decoder, spread(random_parameters(decoder)), slots=1)
    made = generator.generate([Request(prompt=[256, *text.encode()], stop_ids=(256,), **how)])[0]
    return bytes(token for token in made.tokens if token < 256).decode(errors="replace")


def streamed(texts: TextGenerator, prompts: list[str], every: int | None = None, **how) -> list[str]:
    found = [""] * len(prompts)
    for piece in texts.stream([texts.prompt(prompt) for prompt in prompts], Sampling(**how), every=every):
        found[piece.prompt] += piece.text
    return found


def test_a_run_continues_texts(texts):
    """The prompt follows the beginning of a text, and the pieces are the text of the tokens."""
    assert streamed(texts, ["Grüße"], max_tokens=9) == [wanted("Grüße", max_tokens=9)]


def test_settings_reach_the_generator(texts):
    how = {"max_tokens": 9, "temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.001, "seed": 3}
    found = streamed(texts, ["one", "two"], **how)
    assert found == [wanted("one", **how), wanted("two", **how)]
    assert found != streamed(texts, ["one", "two"], **(how | {"seed": 4}))
    assert streamed(texts, ["one"] * 2, every=1, **how)[0] == found[0]


def test_a_stop_string_ends_a_text(texts):
    whole = streamed(texts, ["x"], max_tokens=30, temperature=1.0)[0]
    stop = whole[5:7]
    for every in (1, None):
        found = streamed(texts, ["x", "y"], every=every, max_tokens=30, temperature=1.0, stops=(stop,))
        assert found[0] == whole[: whole.index(stop)]


# --- The command -----------------------------------------------------------------------------------------------------


def test_command(run, capsys):
    assert main(["generate", str(run), "--prompt", "def", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == wanted("def", max_tokens=5) + "\n"


def test_several_prompts(run, capsys, tmp_path):
    """As arguments, as lines and as JSON; in their order."""
    continuations = [wanted(prompt, max_tokens=5) for prompt in ("def", "class")]
    command = ["generate", str(run), "--max-tokens", "5", "--batch", "2"]
    assert main([*command, "--prompt", "def", "--prompt", "class"]) == 0
    assert capsys.readouterr().out == f"> def\n{continuations[0]}\n\n> class\n{continuations[1]}\n\n"
    (tmp_path / "p.txt").write_text("def\n\nclass\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "def"}\n{"prompt": "class", "other": 1}\n')
    for name in ("p.txt", "p.jsonl"):
        assert main([*command, "--prompts", str(tmp_path / name), "--json"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["text"] for line in lines] == continuations
        assert lines[1]["prompt"] == "class" and lines[1]["reason"] in ("length", "stop")


def test_chat_keeps_the_history(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n  again \n/exit\nnever\n"))
    assert main(["generate", str(run), "--chat", "--system", "be", "--max-tokens", "6"]) == 0
    chat = TextGenerator(load_model(str(run)), 1)

    def reply(text: str) -> str:
        return "".join(piece.text for piece in chat.stream([chat.tokenizer.encode(text)], Sampling(max_tokens=6)))

    first = reply("<s>be<u>hello<a>")
    second = reply(f"<s>be<u>hello<a>{first}<u>again<a>")
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_chat_ends_with_its_input(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["generate", str(run), "--chat"]) == 0
    assert capsys.readouterr().out == ""


# --- What cannot be --------------------------------------------------------------------------------------------------


def test_models_that_cannot_be_read(run, tmp_path, capsys):
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert str(tmp_path) in one_line(capsys)
    assert main(["generate", str(tmp_path / "absent"), "--prompt", "x"]) == 2
    assert "absent does not exist" in one_line(capsys)
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    assert main(["generate", str(tmp_path / "damaged.gguf"), "--prompt", "x"]) == 2
    assert "damaged.gguf" in one_line(capsys)
    (tmp_path / "model.bin").write_bytes(b"")
    assert main(["generate", str(tmp_path / "model.bin"), "--prompt", "x"]) == 2
    assert "has no tokenizer in it; give --tokenizer" in one_line(capsys)
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    for _ in range(2):
        assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
        assert "has no checkpoint yet; train it first" in one_line(capsys)
        assert not (tmp_path / "checkpoints").exists() or not any((tmp_path / "checkpoints").iterdir())
        (tmp_path / "checkpoints").mkdir(exist_ok=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --prompt --prompts --chat is required"),
        (["--prompt", "x", "--chat"], "not allowed with argument"),
        (["--prompt", "x", "--system", "y"], "--system is for --chat"),
        (["--chat", "--json"], "--json is for prompts"),
        (["--chat", "--tokenizer", "bytes"], "the model has no chat template"),
        (["--prompt", "x", "--top-p", "0"], "0 must be above 0"),
        (["--prompt", "x", "--min-p", "2"], "2 must be at most 1"),
        (["--prompts", "absent.txt"], "--prompts=absent.txt cannot be read"),
        (["--prompts", "{tmp}/empty.txt"], "has no prompt; write one a line"),
        (["--prompts", "{tmp}/bad.jsonl"], 'prompt 2 is not as in {"prompt": "some text"}'),
    ],
)
def test_arguments_that_cannot_be(run, tmp_path, capsys, arguments, message):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"prompt": 3}\n')
    assert main(["generate", str(run), *(word.replace("{tmp}", str(tmp_path)) for word in arguments)]) == 2
    assert message in one_line(capsys)


def one_line(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("meshsys: error: ") and err.count("\n") == 1
    return err
