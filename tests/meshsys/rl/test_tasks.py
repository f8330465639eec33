"""Tasks: prompts by number, mixtures against a naive walk, and what is refused."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest

from meshsys.config_file import FromList, Section, load
from meshsys.data.tokenizers import load_tokenizer
from meshsys.data.tokenizers.base import Bytes
from meshsys.data.tokenizers.chat import ChatTemplate
from meshsys.errors import ConfigError
from meshsys.rl.prompt import Prompt
from meshsys.rl.tasks.config import TaskConfig
from meshsys.rl.tasks.encode import encode_prompt
from meshsys.rl.tasks.mixture import Mixture
from meshsys.rl.tasks.registry import open_task, open_tasks

OWN = Path(__file__).with_name("own_tasks.py")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHATTING = Bytes(chat=ChatTemplate(TEMPLATE, {}, "the template"))


@pytest.fixture
def lines(tmp_path: Path):
    def write(*records: object) -> Path:
        path = tmp_path / "lines.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


class _Numbers:
    """Prompts named by their number."""

    scorer = "exact_match"

    def __init__(self, name: str, size: int | None) -> None:
        self.name, self.size = name, size

    def __getitem__(self, number: int) -> Prompt:
        assert number >= 0 and (self.size is None or number < self.size)
        return Prompt(f"{self.name}/{number}", str(number))


def test_a_mixture_asks_each_task_in_turn():
    """Against a walk that counts: endless tasks go on, others give all of themselves in every epoch."""
    mixture = Mixture([_Numbers("endless", None), _Numbers("five", 5)], [1.0, 3.0], seed=3)
    ids = [mixture[n].id for n in range(2100)]
    assert ids == [Mixture(mixture.tasks, [1.0, 3.0], seed=3)[n].id for n in range(2100)]
    assert mixture[2099].id == ids[2099] and mixture[7].id == ids[7]  # whatever was asked before
    endless = [int(i.partition("/")[2]) for i in ids if i.startswith("endless")]
    five = [int(i.partition("/")[2]) for i in ids if i.startswith("five")]
    assert endless == list(range(len(endless)))
    assert len(endless) / 2100 == pytest.approx(0.25, abs=0.04)
    epochs = [five[first : first + 5] for first in range(0, len(five) - 4, 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 50  # in other orders
    other = [Mixture(mixture.tasks, [1.0, 3.0], seed=4)[n].id for n in range(100)]
    assert other != ids[:100]


def test_gsm8k(lines):
    path = lines(
        {"question": "1+1?", "answer": "that is 2\n#### 2"}, {"question": "a thousand?", "answer": "#### 1,000"}
    )
    plain = open_task(TaskConfig(source=f"gsm8k:{path}"), 0, chat=False)
    assert (plain.name, plain.size, plain.scorer) == ("lines", 2, "gsm8k")
    assert plain[1] == Prompt("lines/1", "Question: a thousand?\nAnswer:", None, "1000", None, "lines", "gsm8k")
    chat = open_task(TaskConfig(source=f"gsm8k:{path}", size=1, system="Be brief."), 0, chat=True)
    assert chat.size == 1 and chat[0].messages is not None
    assert [message["role"] for message in chat[0].messages] == ["system", "user"]
    assert chat[0].messages[1]["content"].startswith("1+1?\nSolve the problem")
    own = open_task(TaskConfig(source=f"gsm8k:{path}", template="Q: {question} A:", name="math"), 0, chat=False)
    assert own[0].text == "Q: 1+1? A:" and own[0].id == "math/0"


def test_all_of_gsm8k(shared: Path):
    task = open_task(TaskConfig(source=f"gsm8k:{shared / 'data' / 'gsm8k' / 'test.jsonl'}"), 0, chat=False)
    assert task.size == 1319 and task[0].answer == "18"


def test_lines_of_prompts(lines):
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "?"}]
    asked = [*conversation, {"role": "user", "content": "2+2"}]
    path = lines({"prompt": "1+1", "answer": 2, "level": "easy"}, {"messages": asked, "answer": "4"}, {"prompt": asked})
    task = open_task(TaskConfig(source=f"jsonl:{path}", template="{question}="), 0, chat=False)
    assert task[0] == Prompt("lines/0", "1+1=", None, "2", {"level": "easy"}, "lines", "exact_match")
    assert (task[1].text, task[1].messages, task[1].answer) == ("2+2", tuple(asked), "4")
    assert task[2].answer is None
    assert open_task(TaskConfig(source=f"jsonl:{path}"), 0, chat=True)[0].messages == (
        {"role": "user", "content": "1+1"},
    )


def test_fields_have_other_names(lines):
    path = lines({"problem": "1+1", "solution": "2", "prompt": "a part", "answer": "not this"})
    config = TaskConfig(source=f"jsonl:{path}", prompt_field="problem", answer_field="solution")
    prompt = open_task(config, 0, chat=False)[0]
    assert (prompt.text, prompt.answer) == ("1+1", "2")
    with pytest.raises(ConfigError, match="lines.jsonl:1 has no field question; its fields are problem, solution"):
        open_task(TaskConfig(source=f"jsonl:{path}", prompt_field="question"), 0, chat=False)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"answer": "4"}, "has no prompt"),
        ({"prompt": [], "answer": "4"}, "has no prompt"),
        ({"prompt": "x", "answer": ["4"]}, "answer that is no text"),
        ({"prompt": [{"role": "user"}]}, "message 1 has no text"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, "last message is the assistant's"),
    ],
)
def test_lines_that_do_not_fit(lines, record: dict, message: str):
    path = lines(record)
    with pytest.raises(ConfigError, match=f"rl.task.source={re.escape(str(path))}.*:1.*{message}"):
        open_task(TaskConfig(source=f"jsonl:{path}"), 0, chat=False)


def test_functions_of_ones_own():
    task = open_task(TaskConfig(source=f"python:{OWN}:sums", options={"largest": 4}, size=10), 3, chat=False)
    assert (task.size, task.name) == (10, "sums")
    assert task[5] == Prompt("sums/5", "0+2=", None, "2", (0, 2), "sums")
    listed = open_task(TaskConfig(source=f"python:{OWN}:listed"), 0, chat=True)
    assert listed.size == 2 and listed[1].answer == "two" and listed[1].entry == {"level": 3}
    assert listed[0].messages == ({"role": "user", "content": "a?"},)


def test_racks_are_prompts():
    task = open_task(TaskConfig(source="rack", options={"moves": 4}), 0, chat=False)
    assert task.size is None and task.scorer == "rack" and "Write all moves" in task[3].text
    again, other = (open_task(TaskConfig(source="rack", options={"moves": 4}), seed, chat=False) for seed in (0, 1))
    assert pickle.loads(pickle.dumps(task[3])) == again[3]
    assert task[3].text != other[3].text
    assert task[3].text != task[4].text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "jsonl:none.jsonl"}, "rl.tasks.0.source=none.jsonl: no file"),
        ({"source": f"python:{OWN}:nothing"}, "gives no prompt"),
        ({"source": f"python:{OWN}:no_sequence"}, "gives int"),
        ({"source": f"python:{OWN}:listed", "size": 3}, "rl.tasks.0.size=3, and"),
        ({"source": f"python:{OWN}:sums", "options": {"smallest": 1}}, "rl.tasks.0.options"),
        ({"source": f"python:{OWN}:absent"}, "cannot be imported"),
        ({"source": "rack", "options": {"rows": 99}}, "rl.tasks.0.options of a rack: rows=99"),
        ({"source": "rack", "options": {"depth": 9}}, "it has rows, columns"),
        ({"source": "rack", "chat": True}, "rl.tasks.0.chat=true, and the tokenizer has no chat template"),
        ({"source": "rack", "system": "x"}, "rl.tasks.0.system is for models that chat"),
    ],
)
def test_tasks_that_cannot_be_opened(options: dict, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_tasks([TaskConfig(**options)], 0, chat=False)


def test_two_tasks_of_one_name():
    with pytest.raises(ConfigError, match="two tasks of the name rack"):
        open_tasks([TaskConfig(source="rack"), TaskConfig(source="rack")], 0, chat=False)


def test_a_prompt_that_is_none():
    with pytest.raises(ConfigError, match="prompt 1 is int"):
        open_task(TaskConfig(source=f"python:{OWN}:numbers"), 0, chat=False)[1]


class _File(Section):
    tasks: Annotated[tuple[TaskConfig, ...], FromList]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("source: gsm8k", "tasks.0.source=gsm8k is not a task; write gsm8k:FILE.jsonl"),
        ("source: rack:3", "tasks.0.source=rack:3 is not a task; write rack"),
        ("source: reasoning_jym:gcd", "tasks.0.source=reasoning_jym:gcd is not a task; did you mean reasoning_gym?"),
        ("{source: rack, template: hello}", "tasks.0.template=hello has no {question}"),
        ("{source: jsonl:a.jsonl, options: {a: 1}}", "source=jsonl:a.jsonl has no options"),
        ("{source: rack, prompt_field: a}", "a task of source=rack has no prompt_field"),
        ("{source: rack, weight: 0}", "tasks.0.weight=0"),
        ("{source: rack, wait: 1}", "did you mean tasks.0.weight?"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, text: str, message: str):
    text = text if text.startswith("{") else "{" + text + "}"
    (tmp_path / "file.yaml").write_text(f"tasks: [{text}]")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(_File, tmp_path / "file.yaml", example="tasks.0.weight=2")


def test_prompts_as_tokens():
    plain, asked = Prompt("a/0", "1+1="), Prompt("a/0", "1+1", ({"role": "user", "content": "1+1"},))
    assert encode_prompt(plain, Bytes()).tolist() == list(b"1+1=")
    assert encode_prompt(plain, Bytes(), (256,)).tolist() == [256, *b"1+1="]
    assert bytes(encode_prompt(asked, CHATTING).tolist()) == b"<user>1+1</><assistant>"
    assert encode_prompt(asked, CHATTING).dtype == encode_prompt(plain, Bytes()).dtype == np.int32
    with pytest.raises(ConfigError, match="has no chat template"):
        encode_prompt(asked, Bytes())


def test_prompts_of_a_real_chat_model(smollm2: Path):
    tokenizer = load_tokenizer(str(smollm2))
    prompt = open_task(TaskConfig(source="rack", system="You sort."), 0, chat=True)[0]
    text = tokenizer.decode(encode_prompt(prompt, tokenizer))
    assert "You sort." in text and text.rstrip().endswith("assistant")


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym", reason="the extra `rl` is not installed")
    easy = TaskConfig(source="reasoning_gym:chain_sum", options={"min_terms": 2, "max_terms": 2, "max_digits": 1})
    task = open_task(easy, 5, chat=False)
    again = open_task(easy, 5, chat=False)
    assert (task.name, task.size, task.scorer) == ("chain_sum", None, "reasoning_gym")
    for number in (0, 3, 511, 512, 10**9):
        assert task[number] == again[number] and task[number].id == f"chain_sum/{number}"
        assert len(re.findall(r"\d+", task[number].text)) == 2
    # Neighbouring seeds of the package share all items but one.
    texts = {open_task(easy, seed, chat=False)[number].text for seed in range(4) for number in range(100)}
    shifted = sum(
        open_task(easy, 5, chat=False)[number + 1].text == open_task(easy, 6, chat=False)[number].text
        for number in range(50)
    )
    assert len(texts) > 100 and shifted < 10
    # These make all of their items at once, and have no more.
    words = open_task(TaskConfig(source="reasoning_gym:list_functions"), 0, chat=True)
    assert words[1300].messages is not None


def test_each_task_of_reasoning_gym_opens_and_scores_its_own_answer():
    pytest.importorskip("reasoning_gym", reason="the extra `rl` is not installed")
    from meshsys.rl.extract import extractor
    from meshsys.rl.rewards.packages import reasoning_gym

    reward = reasoning_gym(extractor("<answer>(.*?)</answer>"), "said")
    right = Counter[bool]()
    for name in ("chain_sum", "gcd", "spell_backward", "countdown", "letter_counting", "prime_factorization"):
        prompt = open_task(TaskConfig(source=f"reasoning_gym:{name}"), 0, chat=False)[7]
        right[reward(prompt, f"so <answer>1</answer> no <answer> {prompt.answer} </answer>") == 1.0] += 1
        assert reward(prompt, "no tags") < 0.1
    assert right == {True: 6}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "reasoning_gym:chain_sums"}, "did you mean chain_sum?"),
        ({"source": "reasoning_gym:composite"}, "is no task of reasoning-gym"),
        ({"source": "reasoning_gym:gcd", "options": {"levels": 3}}, "it has min_numbers"),
        ({"source": "reasoning_gym:gcd", "options": {"min_numbers": 0}}, "does not take rl.tasks.0.options"),
        ({"source": "reasoning_gym:gcd", "options": {"seed": 3}}, "write it as rl.tasks.0.seed"),
        ({"source": "reasoning_gym:word_ladder"}, "start with PYTHONHASHSEED=0"),
    ],
)
def test_reasoning_gym_refused(options: dict, message: str, monkeypatch):
    pytest.importorskip("reasoning_gym", reason="the extra `rl` is not installed")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_tasks([TaskConfig(**options)], 0, chat=False)


def test_the_packages_are_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"reasoning-gym; install it by pip install 'meshsys\[rl\]'"):
        open_tasks([TaskConfig(source="reasoning_gym:gcd")], 0, chat=False)


def test_rewards_and_environments_import_no_jax():
    script = "import sys; import meshsys.rl.rewards.server, meshsys.rl.environments.rack; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
