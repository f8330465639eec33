"""Games in turns: transcripts against what a scripted policy said and saw, put together by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshsys.data.tokenizers import load_tokenizer
from meshsys.data.tokenizers.base import Bytes
from meshsys.data.tokenizers.chat import ChatTemplate
from meshsys.errors import ConfigError
from meshsys.rl.environments import EnvironmentConfig, Transcript, environment_maker, play
from meshsys.rl.environments.rack import Instance, RackGame, solve
from meshsys.rl.environments.turns import Turns
from meshsys.rl.prompt import Prompt
from meshsys.rl.tasks.config import TaskConfig
from meshsys.rl.tasks.registry import open_task

OWN = f"python:{Path(__file__).with_name('own_tasks.py')}"
STOP = 256  # of the tokenizer of bytes


class Script:
    """A policy that says given lines, whatever it sees, with log-probabilities that name the token and its place."""

    def __init__(self, *lines: list[list[int]]) -> None:
        self.left = [list(line) for line in lines]
        self.seen: list[list[list[int]]] = []

    def __call__(self, _: list[int], contexts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        self.seen.append([list(context) for context in contexts])
        said = [self.left[self.number(context)].pop(0) for context in contexts]
        return [(tokens, [-float(token) for token in tokens]) for tokens in said]

    def number(self, context: list[int]) -> int:
        """The game that a context is of, which begins with how many turns it has."""
        return len(self.left) - int(chr(context[0]))


def naive(pieces: list[tuple[str, list[int]]]) -> tuple[list[int], list[bool], list[float]]:
    """Tokens, mask and log-probabilities of pieces that were seen or said."""
    tokens, trained, log_probs = [], [], []
    for kind, piece in pieces:
        for token in piece:
            tokens.append(token)
            trained.append(kind == "said")
            log_probs.append(-float(token) if kind == "said" else 0.0)
    return tokens, trained, log_probs


def test_transcripts_hold_what_was_said_and_seen():
    """Three games of different lengths; tokens that no text would have (255, 0) stay as they were sampled."""
    policy = Script([[65, STOP], [255, 0, STOP], [66]], [[67], [68, 69]], [[70, STOP]])
    prompts = [Prompt(f"a/{turns}", str(turns)) for turns in (3, 2, 1)]
    maker = environment_maker(EnvironmentConfig(kind=f"{OWN}:Countdown", options={"reward": 0.5}))
    games = play(maker, prompts, policy, Bytes(), max_turns=9, max_tokens=500)
    seen = {turns: list(f"{turns} left\n".encode()) for turns in range(4)}
    after = {turns: list(f"\n{turns} left\n".encode()) for turns in range(4)}
    expected = [
        [
            ("seen", seen[3]),
            ("said", [65, STOP]),
            ("seen", after[2]),
            ("said", [255, 0, STOP]),
            ("seen", after[1]),
            ("said", [66]),
        ],
        [("seen", seen[2]), ("said", [67]), ("seen", after[1]), ("said", [68, 69])],
        [("seen", seen[1]), ("said", [70, STOP])],
    ]
    for game, pieces, prompt in zip(games, expected, prompts, strict=True):
        assert (game.tokens, game.trained, game.log_probs) == naive(pieces)
        said = [piece for kind, piece in pieces if kind == "said"]
        assert [game.tokens[turn.start : turn.stop] for turn in game.turns] == said
        assert game.prompt is prompt and game.ended == "done" and game.reward == 0.5 * len(said)
    assert games[0].turns[0].text == "A"
    # Every round samples the games that go on, each from all that it has.
    assert [len(contexts) for contexts in policy.seen] == [3, 2, 1]
    assert policy.seen[1][1] == naive(expected[1][:3])[0]


@pytest.mark.parametrize(
    ("limits", "ended", "turns"),
    [
        ({"max_turns": 2, "max_tokens": 500}, "turns", 2),
        ({"max_turns": 9, "max_tokens": 10}, "tokens", 1),
        ({"max_turns": 9, "max_tokens": 11}, "tokens", 2),
        ({"max_turns": 9, "max_tokens": 500}, "done", 5),
    ],
)
def test_limits(limits: dict, ended: str, turns: int):
    def sample(_, contexts):
        assert all(len(context) - len("5 left\n") < limits["max_tokens"] for context in contexts)
        return [([65, 66], [-1.0, -1.0]) for _ in contexts]

    (game,) = play(
        environment_maker(EnvironmentConfig(kind=f"{OWN}:Countdown")),
        [Prompt("a/0", "5")],
        sample,
        Bytes(),
        **limits,
    )
    assert (game.ended, len(game.turns)) == (ended, turns)
    assert not game.turns or game.trained[-1]  # nothing is seen that no action follows


def test_an_environment_that_raises_ends_its_game_only():
    def sample(_, contexts):
        return [(list(b"boom" if context[:1] == [50] else b"stop"), [0.0] * 4) for context in contexts]

    maker = environment_maker(EnvironmentConfig(kind=f"{OWN}:Countdown"))
    prompts = [Prompt("a/0", "2"), Prompt("a/1", "bad"), Prompt("a/2", "3")]
    games = play(maker, prompts, sample, Bytes(), max_turns=5, max_tokens=99)
    assert [(game.ended, game.error, game.reward) for game in games] == [
        ("error", "ValueError: boom", 0.0),
        ("error", "KeyError: 'no game'", 0.0),
        ("done", "", 1.0),
    ]
    assert len(games[0].turns) == 1 and games[1].tokens == []


def test_log_probabilities_are_of_each_token():
    with pytest.raises(ValueError, match="2 tokens were sampled with 1 log-probabilities"):
        Transcript(Prompt("a/0", "")).act([1, 2], [0.0], "", 0.0)


CHATTING = Bytes(
    chat=ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        {},
        "the template",
    )
)
ASKED = Prompt("a/0", "2", ({"role": "system", "content": "play"}, {"role": "user", "content": "2"}))


def test_observations_are_the_users_messages():
    turns = Turns(CHATTING)
    assert bytes(turns.first(ASKED, "begin")) == b"<system>play</><user>begin</><assistant>"
    assert bytes(turns.next(ASKED, list(b"move"), "seen")) == b"</><user>seen</><assistant>"


def test_a_conversation_is_what_the_template_makes_of_it(smollm2: Path):
    """With a real tokenizer: a game of replies with their stop token has the tokens of the whole conversation."""
    tokenizer = load_tokenizer(str(smollm2))
    (stop,) = tokenizer.encode("<|im_end|>").tolist()
    assert stop in tokenizer.stop_ids
    replies = ["first move", "the second", "stop"]
    left = iter(replies)

    def sample(_, contexts):
        tokens = [*tokenizer.encode(next(left)).tolist(), stop]
        return [(tokens, [-1.0] * len(tokens))]

    prompt = Prompt("a/0", "3", ({"role": "system", "content": "play"}, {"role": "user", "content": "3"}))
    maker = environment_maker(EnvironmentConfig(kind=f"{OWN}:Countdown"))
    (game,) = play(maker, [prompt], sample, tokenizer, max_turns=9, max_tokens=500)
    said = [{"role": "assistant", "content": reply} for reply in replies]
    seen = [{"role": "user", "content": f"{left} left"} for left in (3, 2, 1)]
    messages = [prompt.messages[0], *(message for pair in zip(seen, said, strict=True) for message in pair)]
    assert tokenizer.chat is not None
    whole = tokenizer.encode(tokenizer.chat.render(messages)).tolist()
    assert game.tokens == whole[: len(game.tokens)]
    assert tokenizer.decode(whole[len(game.tokens) :]).strip() == ""  # the line break after the last reply
    assert sum(game.trained) == sum(len(tokenizer.encode(reply)) + 1 for reply in replies)
    # A reply that was cut short has no stop token, which the template then gives.
    cut = Turns(tokenizer).next(prompt, [5], "2 left")
    assert cut[0] == stop and cut[1:] == Turns(tokenizer).next(prompt, [5, stop], "2 left")


def test_racks_are_solved_in_turns():
    """A policy with the shortest plans earns 1 in every game, one that writes nonsense 0."""
    task = open_task(TaskConfig(source="rack", options={"moves": 8}), 0, chat=False)
    prompts = [task[number] for number in range(6)]
    plans = [solve(*Instance.of(prompt.entry)[:2]) for prompt in prompts]

    begun = [RackGame().reset(prompt).encode() for prompt in prompts]

    def best(games, contexts):
        assert all(bytes(context).startswith(begun[n]) for n, context in zip(games, contexts, strict=True))
        said = [str(plans[game].pop(0)).encode() for game in games]
        return [(list(text), [0.0] * len(text)) for text in said]

    maker = environment_maker(EnvironmentConfig(kind="rack"))
    games = play(maker, prompts, best, Bytes(), max_turns=20, max_tokens=9999)
    assert [(game.reward, game.ended, game.success) for game in games] == [(1.0, "done", True)] * 6
    assert [len(game.turns) for game in games] == [prompt.entry["optimal"] for prompt in prompts]
    lost = play(
        maker, prompts, lambda _, contexts: [([65], [0.0])] * len(contexts), Bytes(), max_turns=20, max_tokens=9999
    )
    assert [(game.reward, game.ended, game.success, len(game.turns)) for game in lost] == [(0.0, "done", False, 1)] * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": f"{OWN}:NoEnvironment"}, "has no step; it needs reset(prompt) and step(action)"),
        ({"kind": f"{OWN}:Nothing"}, "cannot be imported"),
        ({"kind": f"{OWN}:Countdown", "options": {"prize": 1}}, "cannot be made with rl.environment.options"),
        ({"kind": "rack", "options": {"patience": 0}}, "patience at least 1"),
    ],
)
def test_environments_that_cannot_be_made(options: dict, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        environment_maker(EnvironmentConfig(**options))


def test_an_unknown_environment():
    with pytest.raises(ValueError, match="is not a kind of environment; did you mean rack"):
        EnvironmentConfig(kind="racks")
