"""Games as rollouts: what is learned of them, how they are sampled, and a policy that learns from them."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshsys.config import Config
from meshsys.data.tokenizers.base import Bytes
from meshsys.errors import ConfigError
from meshsys.rl.environments import EnvironmentConfig, environment_maker
from meshsys.rl.games import Games
from meshsys.rl.objectives import PolicyLoss, PpoClip, TokenFields
from meshsys.rl.prompt import Prompt
from meshsys.rl.prompts import Asked
from meshsys.rl.rewards.registry import make_rewards
from meshsys.rl.rollouts import Game, Rollout, RolloutRows
from models.generation import Piece, Request
from tests.meshsys.rl.short_run import run

OWN = f"python:{Path(__file__).parent / 'own_tasks.py'}"
STOP = Bytes().eos_id


def game(prompt: str, turns: list[tuple[str, str]], number: int) -> Rollout:
    """From pairs of an action and the observation after it."""
    tokens, trained = [], []
    for action, observation in turns:
        tokens += [*action.encode(), *observation.encode()]
        trained += [True] * len(action) + [False] * len(observation)
    log_probs = np.where(trained, -np.arange(1, len(tokens) + 1, dtype=np.float32), 0).astype(np.float32)
    ids = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
    own = Game(np.array(trained), len(turns), 1.0)
    versions = np.zeros(len(tokens), np.int32)
    return Rollout(Prompt("a/0", prompt), ids, np.array(tokens, np.int32), log_probs, versions, 0, number, True, own)


def test_only_what_the_policy_chose_has_a_gradient() -> None:
    games = [game("ask", [("do", "seen!"), ("then", "")], 0), game("?", [("abc", "d")], 1)]
    rows = RolloutRows(games, rows=3, length=20, max_tokens=12)
    batch = rows.batch()
    fields = TokenFields(
        rows.is_sampled_RS.astype(np.int32),
        rows.to_rows(rows.padded("log_probs"), fill=np.nan),
        rows.to_rows(np.ones(rows.mask_NT.shape), fill=np.nan),
    )

    def loss(logp_RS: jax.Array) -> jax.Array:
        return jnp.sum(jnp.asarray(batch.weights) * PolicyLoss(PpoClip(0.2, 0.2))(logp_RS, fields).loss_BS)

    gradient_RS = np.asarray(jax.grad(loss)(rows.to_rows(rows.padded("log_probs"))))
    for row, (text, chosen) in enumerate((("askdoseen!then", "...do.....then"), ("?abcd", ".abc."))):
        for place in range(20):
            target = place + 1  # of the place's own next token
            is_chosen = target < len(chosen) and chosen[target] != "."
            assert (gradient_RS[row, place] != 0) == rows.is_sampled_RS[row, place] == is_chosen
            assert batch.segment_ids[row, place] == (place < len(text))
            if target < len(text):
                assert batch.targets[row, place] == ord(text[target])
    assert not gradient_RS[2].any() and list(rows.lengths_N) == [11, 4]
    tokens_NT = rows.to_tokens(rows.to_rows(rows.padded("log_probs")))
    assert np.isnan(tokens_NT[0, 2:7]).all() and list(tokens_NT[0, :2]) == [-1, -2] and tokens_NT[0, 7] == -8


class Scripted:
    """A sampler that says `ab` and the stop token, or as much of it as it may; it keeps what it is asked."""

    version = 3

    def __init__(self) -> None:
        self.rounds: list[list[Request]] = []

    def sample(self, requests: list[Request]) -> list[Piece]:
        self.rounds.append(list(requests))
        said = np.array([97, 98, STOP], np.int32)
        pieces = []
        for number, request in enumerate(requests):
            tokens = said[: request.max_tokens]
            pieces.append(Piece(number, tokens[:1], np.full(1, -1, np.float32), ""))
            pieces.append(Piece(number, tokens[1:], np.full(len(tokens) - 1, -2, np.float32), "stop"))
        return pieces


def made(**config) -> Games:
    own = EnvironmentConfig(kind=f"{OWN}:Countdown", **config)
    return Games(own, environment_maker(own), Bytes(), (STOP,), max_prompt_tokens=16, max_response_tokens=25)


def asked(games: Games, *texts: str) -> list[Asked]:
    return [Asked(7 + n, Prompt(f"a/{n}", t), games.opening(Prompt("", t))) for n, t in enumerate(texts)]


def request(one: Asked, sample: int, context, max_tokens: int) -> Request:
    return Request(prompt=context, max_tokens=max_tokens, prompt_number=one.number, sample=sample)


def test_games_are_played_in_rounds_and_within_bounds() -> None:
    games, sampler = made(), Scripted()
    rollouts = games.play(asked(games, "1", "3", "bad"), 2, sampler, request)
    # A turn is 3 tokens, and what is seen between turns 8; the third would begin at 22 of 25.
    assert [len(one) for one in sampler.rounds] == [4, 2, 2]
    assert [r.max_tokens for one in sampler.rounds for r in one] == [25] * 4 + [14] * 2 + [3] * 2
    assert [(r.prompt_number, r.sample) for r in sampler.rounds[1]] == [(8, 0), (8, 1)]
    assert [(one.group, one.sample) for one in rollouts] == [(7, 0), (7, 1), (8, 0), (8, 1), (9, 0), (9, 1)]
    assert [one.game.turns for one in rollouts] == [1, 1, 3, 3, 0, 0]
    assert [one.game.reward for one in rollouts] == [1, 1, 3, 3, 0, 0]
    for one in rollouts[2:4]:
        assert bytes(one.prompt_ids[1:].tolist()).decode() == "3 left\n" and one.prompt_ids[0] == STOP
        seen = [[*f"\n{n} left\n".encode()] for n in (2, 1)]
        assert one.tokens.tolist() == [97, 98, STOP, *seen[0], 97, 98, STOP, *seen[1], 97, 98, STOP]
        assert one.game.trained.tolist() == [True] * 3 + [False] * 8 + [True] * 3 + [False] * 8 + [True] * 3
        assert one.log_probs.tolist() == [-1, -2, -2, *[0] * 8, -1, -2, -2, *[0] * 8, -1, -2, -2]
        assert (one.versions == 3).all() and one.has_stopped
    # The request of a turn is the whole context so far.
    assert list(sampler.rounds[2][0].prompt) == [*rollouts[2].prompt_ids, *rollouts[2].tokens[:-3]]
    assert all(one.game.error == "KeyError: 'no game'" and not one.tokens.size for one in rollouts[4:])


def test_an_action_may_be_cut_off() -> None:
    games, sampler = made(max_action_tokens=2), Scripted()
    rollouts = games.play(asked(games, "3"), 1, sampler, request)
    assert [one[0].max_tokens for one in sampler.rounds] == [2, 2, 2]
    assert rollouts[0].game.trained.sum() == 6


def test_games_that_begin_otherwise_than_before_are_refused() -> None:
    games = made()
    one = asked(games, "3")[0]
    longer = Asked(one.number, Prompt("a/0", "3" * 20), one.ids)
    with pytest.raises(ConfigError, match="rl.max_prompt_tokens=16, and not as it did before"):
        games.play([longer], 1, Scripted(), request)


def test_the_reward_of_a_task_is_the_environments() -> None:
    config = Config.model_validate({"run": {"name": "a"}, "rl": {"tasks": [{"source": "rack"}]}})
    (reward,) = make_rewards(config.rl.rewards, (), "rl.rewards")
    assert reward(Prompt("a/0", "?", answer="4", earned=0.25), "4") == 0.25
    assert reward(Prompt("a/0", "?", answer="4"), "4") == 1
    with pytest.raises(ValueError, match="the environment's own reward"):
        Config.model_validate(
            {
                "run": {"name": "a"},
                "rl": {
                    "tasks": [{"source": "rack"}],
                    "environment": {"kind": "rack"},
                    "rewards": [{"extract": "(.)"}],
                },
            }
        )


@pytest.mark.slow
def test_a_policy_learns_from_games(tmp_path: Path) -> None:
    records = run(tmp_path, 30, algorithm={"name": "dr_grpo"})
    rewards = [record["reward_mean"] for record in records]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.3, rewards
    assert all(record["turns_mean"] == 2 and record["environment_errors"] == 0 for record in records)
    assert all(0 <= record["success"] <= 1 and record["sampler_logprob_error"] < 1e-4 for record in records)
    assert records[0]["tokens"] <= 16 * 8  # of both turns, without what was seen between them
