"""Evaluation: likelihoods against whole forward passes, answers against cases by eye, pass@k against all draws."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshsys.answers import last_number, marked_answer, pass_at_k, same_answer
from meshsys.cli import main
from meshsys.data.conversations import Example
from meshsys.errors import ConfigError
from meshsys.evaluation.evaluate import Settings, evaluate
from meshsys.evaluation.likelihood import total_loss, windows
from meshsys.evaluation.results import mean
from meshsys.evaluation.tasks import Question, Questions, read_task
from meshsys.load_model import load_model
from models import Decoder, ModelConfig

TINY = ModelConfig(layers=2, d_model=16, heads=2, d_ff=32, vocab_size=40)


@pytest.mark.parametrize(
    ("text", "marked", "last"),
    [
        ("so 9 * 2 = $18\n#### 18", "18", "18"),
        ("#### $1,234.50.", "1234.50", "1234.50"),
        ("#### 5\nQuestion: another 7\n#### 8", "5", "8"),
        ("it is -3 apples", None, "-3"),
        ("#### \n", None, None),
        ("costs $1,200, not .5", None, ".5"),
        ("no number", None, None),
        ("#### 10 apples", "10apples", "10"),
    ],
)
def test_answers(text: str, marked: str | None, last: str | None):
    assert (marked_answer(text), last_number(text)) == (marked, last)


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [("18", "18.0", True), ("1e1", "10", True), ("18", "19", False), (None, "1", False), ("Yes", "yes", True)],
)
def test_same_answer(answer: str | None, gold: str, same: bool):
    assert same_answer(answer, gold) == same


def test_pass_at_k_is_the_mean_over_all_draws():
    for samples in range(1, 7):
        for correct in range(samples + 1):
            for k in range(1, samples + 1):
                draws = list(combinations([True] * correct + [False] * (samples - correct), k))
                assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_mean():
    metric = mean([0.0, 1.0, 1.0, 0.0])
    assert metric.value == 0.5 and metric.error == pytest.approx(np.std([0, 1, 1, 0], ddof=1) / 2)
    assert mean([0.5]).error is None


@pytest.mark.parametrize("context", [2, 7, 8, 100])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 30])
def test_windows(context: int, length: int):
    """Every token but the first is a target once, after half a context or all that there is."""
    seen = []
    for example in windows(np.arange(length, dtype=np.int32), context):
        assert len(example.ids) <= context + 1
        for place in np.flatnonzero(example.learned):
            token = int(example.ids[place])
            assert place >= min(token, context // 2) and place > 0
            seen.append(token)
    assert seen == list(range(1, length))


@pytest.mark.parametrize("logits_at_once", [1, 300, 1 << 24])
def test_total_loss(monkeypatch, logits_at_once: int):
    """Equal to a forward pass of each example alone."""
    monkeypatch.setattr("meshsys.evaluation.likelihood._LOGITS", logits_at_once)
    decoder = Decoder(TINY)
    params = decoder.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    examples, expected = [], 0.0
    for size in (2, 5, 13, 9, 3, 13):
        ids, learned = rng.integers(0, 40, size).astype(np.int32), rng.random(size) < 0.7
        learned[0] = False
        examples.append(Example(ids, learned))
        log_probs = jax.nn.log_softmax(decoder.forward(params, jnp.asarray(ids[None])))[0]
        expected -= sum(float(log_probs[place - 1, ids[place]]) for place in np.flatnonzero(learned))
    loss, tokens = total_loss(decoder, params, examples, context=12, batch=2)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert tokens == sum(example.learned.sum() for example in examples)


def test_perplexity_of_a_text_is_the_other_program_s(shared: Path, tmp_path: Path, capsys):
    """Of llama2.c's own text under its own logits; run, files and all, by the command."""
    folder = shared / "fixtures/stories260k"
    ids, logits = np.load(folder / "golden_ids.npy"), np.load(folder / "golden_logits.npy").astype(np.float64)
    picked = logits[np.arange(255), ids[1:]] - np.log(np.exp(logits[:255]).sum(-1))
    model = load_model(str(folder / "stories260K.bin"), tokenizer=str(folder / "tok512.bin"))
    text = model.tokenizer.decode(ids)
    (tmp_path / "story.txt").write_text(text)
    command = ["evaluate", str(folder / "stories260K.bin"), "--tokenizer", str(folder / "tok512.bin")]
    output = tmp_path / "out.json"
    assert main([*command, "--task", str(tmp_path / "story.txt"), "--context", "256", "--output", str(output)]) == 0
    table, line = capsys.readouterr().out.strip().rsplit("\n", 1)
    metrics = json.loads(line)["results"][0]["metrics"]
    assert json.loads(output.read_text()) == json.loads(line)
    assert metrics["nats_per_token"]["value"] == pytest.approx(-picked.mean(), rel=1e-4)
    assert metrics["perplexity"]["value"] == pytest.approx(math.exp(-picked.mean()), rel=1e-4)
    assert metrics["bits_per_byte"]["value"] == pytest.approx(-picked.sum() / math.log(2) / len(text), rel=1e-4)
    assert f"{metrics['perplexity']['value']:.4f}" in table


def test_gsm8k_is_read(shared: Path):
    task = read_task(str(shared / "data/gsm8k/test.jsonl"), None, "text")
    assert isinstance(task, Questions) and len(task.questions) == 1319
    assert [question.gold for question in task.questions[:4]] == ["18", "3", "70000", "540"]
    assert all(last_number(question.gold) == question.gold for question in task.questions)
    assert len(read_task(str(shared / "data/gsm8k/test.jsonl"), 5, "text").questions) == 5


def test_score():
    from meshsys.evaluation.questions import score

    questions = [Question("a", "1"), Question("b", "2")]
    texts = [["#### 1", "it is 1", "#### 3", "4"], ["5", "6", "#### 2.0", "7 or 2"]]
    metrics, records = score(questions, texts)
    assert {name: metric.value for name, metric in metrics.items()} == pytest.approx(
        {"exact_match": 0.5, "marked_match": 0.25, "pass@1": 0.5, "pass@2": 5 / 6, "pass@4": 1.0}
    )
    assert records[0]["answers"] == ["1", "1", "3", "4"] and records[1]["right"] == [False, False, True, True]
    assert list(score(questions, [row[:3] for row in texts])[0])[2:] == ["pass@1", "pass@2", "pass@3"]
    assert list(score(questions, [row[:1] for row in texts])[0]) == ["exact_match", "marked_match"]


def test_answers_do_not_depend_on_the_batch(shared: Path):
    """Nor on how many questions follow."""
    from meshsys.evaluation.questions import ask

    folder = shared / "fixtures/stories260k"
    model = load_model(str(folder / "stories260K.bin"), tokenizer=str(folder / "tok512.bin"))
    questions = [Question(f"Lily has {n} apples.", "1") for n in range(3)]
    options = {"samples": 2, "temperature": 1.0, "max_tokens": 12, "seed": 1}
    texts = ask(model, questions, batch=6, **options)
    assert ask(model, questions[:2], batch=2, **options) == texts[:2]
    assert texts[0][0] != texts[0][1]
    assert ask(model, questions, batch=6, **options | {"seed": 2}) != texts


def refused(capsys, *arguments: str) -> str:
    assert main(["evaluate", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "Traceback" not in message
    return message


def test_refused(shared: Path, tmp_path: Path, capsys):
    folder = shared / "fixtures/stories260k"
    model = [str(folder / "stories260K.bin"), "--tokenizer", str(folder / "tok512.bin")]
    task = tmp_path / "task.jsonl"
    task.write_text('{"question": "a", "answer": "1"}\n')
    assert f"--task={task}: {task}:1 has no #### in its answer" in refused(capsys, *model, "--task", str(task))
    task.write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n')
    assert "this model has no chat template" in refused(capsys, *model, "--task", str(task))
    assert f"--task={tmp_path / 'absent'}: no file" in refused(capsys, *model, "--task", str(tmp_path / "absent"))
    assert "has no tokenizer in it; give --tokenizer" in refused(capsys, model[0], "--task", str(task))
    assert "the model absent does not exist" in refused(capsys, "absent", "--task", str(task))
    assert "--samples=2 would be equal" in refused(capsys, *model, "--task", str(task), "--samples", "2")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0")
    assert "cut.gguf: its header ends beyond the file" in refused(
        capsys, str(tmp_path / "cut.gguf"), "--task", str(task)
    )
    with pytest.raises(ConfigError, match="--samples"):
        Settings(samples=2)


@pytest.mark.slow
def test_conversations(tmp_path: Path, smollm2: Path):
    """Only what the assistant says counts: the reply and the end of its turn."""
    path = tmp_path / "chat.jsonl"
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
    ]
    path.write_text(json.dumps({"messages": messages}))
    model = load_model(str(smollm2))
    result = evaluate(model, [str(path)], Settings(context=64, batch=1))[0]
    assert result.kind == "chat" and result.count == 1
    text = model.tokenizer.chat.render(messages)
    ids = model.tokenizer.encode(text)
    log_probs = jax.nn.log_softmax(model.decoder.forward(model.params, jnp.asarray(ids[None])))[0]
    last = int(np.flatnonzero(ids == 2)[-1])
    expected = -np.mean([float(log_probs[place - 1, ids[place]]) for place in range(last - 2, last + 1)])
    assert model.tokenizer.decode(ids[last - 2 : last]) == "Paris."
    assert result.metrics["nats_per_token"].value == pytest.approx(expected, rel=1e-4)
