"""The rack: moves by hand, and shortest plans against breadth-first search over all moves."""

from __future__ import annotations

import random
from collections import deque

import pytest

from meshsys.errors import ConfigError
from meshsys.rl.environments.rack import (
    Instance,
    Move,
    Rack,
    RackGame,
    RackOptions,
    describe,
    least_moves,
    make_instance,
    plan_reward,
    read_moves,
    solve,
)
from meshsys.rl.prompt import Prompt

# C . .
# A B .    row 0 is the front; column 0 is for A, 1 for B, 2 for C
RACK = Rack(2, (1, 2, 3))
STATE = bytes([3, 0, 0, 1, 2, 0])


def breadth_first(rack: Rack, start: bytes) -> dict[bytes, int]:
    """Moves to every state that can be reached, by all moves that are allowed."""
    distance, queue = {start: 0}, deque([start])
    while queue:
        state = queue.popleft()
        for move in rack.moves(state):
            following = rack.moved(state, move)
            if following not in distance:
                distance[following] = distance[state] + 1
                queue.append(following)
    return distance


def test_moves_by_hand():
    assert {str(move) for move in RACK.moves(STATE)} == {
        "0,0 -> 0,1",
        "0,0 -> 0,2",
        "0,0 -> 1,2",
        "1,1 -> 0,1",
        "1,1 -> 0,2",
        "1,1 -> 1,2",
    }
    problems = {
        "1,0 -> 1,2": "another tube stands before cell 1,0",
        "0,1 -> 0,2": "cell 0,1 is empty",
        "0,0 -> 1,1": "cell 1,1 is not empty",
        "0,0 -> 0,0": "cell 0,0 is not empty",
        "0,0 -> 2,0": "there is no cell 2,0",
        "0,0 -> 0,7": "there is no cell 0,7",
        "0,0 -> 1,2": None,
    }
    for text, problem in problems.items():
        assert RACK.problem(STATE, *read_moves(text)) == problem
    behind = bytes([0, 0, 1, 0, 0, 0])  # A at 0,2: nothing goes behind it
    assert RACK.problem(bytes([0, 2, *behind[2:]]), *read_moves("0,1 -> 1,2")) == "another tube stands before cell 1,2"
    assert RACK.problem(behind, *read_moves("0,2 -> 1,2")) is None  # it may go further in itself


@pytest.mark.parametrize(
    ("rows", "owners", "tubes"),
    [
        (2, (1, 2, 0), (1, 1, 2)),
        (3, (1, 2, 0), (1, 1, 2, 2)),
        (2, (1, 1, 2), (1, 1, 2, 2)),
        (3, (1, 0), (1, 1, 1)),
        (2, (1, 2, 3, 0), (1, 1, 2, 2, 3)),
    ],
)
def test_plans_are_as_short_as_breadth_first_search_finds(rows: int, owners: tuple[int, ...], tubes: tuple[int, ...]):
    """From every state, gaps and all: the plan is legal, ends in order, and no estimate is above what is left."""
    rack = Rack(rows, owners)
    start = bytes(tubes) + bytes(rows * len(owners) - len(tubes))
    states = sorted(breadth_first(rack, start))
    ordered = [state for state in states if not rack.misplaced(state)]
    distance = {state: 0 for state in ordered}
    queue = deque(ordered)
    while queue:  # moves can be undone, so distances to order are those from it
        state = queue.popleft()
        for move in rack.moves(state):
            before = rack.moved(state, move)
            if before not in distance:
                distance[before] = distance[state] + 1
                queue.append(before)
    assert set(distance) == set(states)
    for state in states:
        assert least_moves(rack, state) <= distance[state]
        for move in rack.moves(state):
            assert least_moves(rack, rack.moved(state, move)) >= least_moves(rack, state) - 1
    for state in random.Random(0).sample(states, min(len(states), 150)):
        plan = solve(rack, state)
        assert plan is not None and len(plan) == distance[state]
        for move in plan:
            assert move in set(rack.moves(state)) and rack.problem(state, move) is None
            state = rack.moved(state, move)
        assert not rack.misplaced(state)


def test_every_listed_move_is_allowed_and_every_allowed_one_is_listed():
    rack, state = make_instance(RackOptions(rows=3, columns=3, classes=2, tubes=2), 5)[:2]
    cells = [(row, column) for row in range(4) for column in range(4)]
    allowed = {Move(a, b) for a in cells for b in cells if rack.problem(state, Move(a, b)) is None}
    assert allowed == set(rack.moves(state))


def test_instances_follow_from_their_seeds():
    options = RackOptions(rows=3, columns=4, classes=3, tubes=2, moves=8)
    made = [make_instance(options, seed) for seed in range(30)]
    assert made == [make_instance(options, seed) for seed in range(30)]
    assert len({instance.start for instance in made}) > 20
    for instance in made:
        assert 1 <= instance.optimal <= 8 and instance.rack.misplaced(instance.start)
        assert Instance.of(instance.entry()) == instance


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rows": 0}, "rows=0"), ({"tubes": 4}, "tubes=4"), ({"classes": 4, "tubes": 3}, "no empty cell")],
)
def test_racks_that_cannot_be(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        RackOptions(**options)


def test_racks_that_take_too_long(monkeypatch):
    monkeypatch.setattr("meshsys.rl.environments.rack.instances.solve", lambda rack, state: None)
    with pytest.raises(ConfigError, match="take too long to solve; lower moves=6"):
        make_instance(RackOptions(), 0)


PROMPT = Prompt("rack/0", "", entry=Instance(RACK, STATE, 1).entry())


@pytest.mark.parametrize(
    ("plan", "reward"),
    [
        ("0,0 -> 1,2", 1.0),
        ("I lift C: 0,0->1,2", 1.0),
        ("0,0 -> 0,2\n0,2 -> 1,2", 1.0),  # in order after the first already
        ("1,1 -> 0,1\n0,0 -> 0,2", 0.5),
        ("1,0 -> 1,2\n0,0 -> 1,2", 0.0),  # not allowed at once
        ("1,1 -> 1,2", 0.0),
        ("nothing", 0.0),
    ],
)
def test_plans_are_judged(plan: str, reward: float):
    assert plan_reward(PROMPT, plan) == reward


def test_partial_progress():
    swapped = Instance(Rack(2, (1, 2, 0)), bytes([2, 1, 0, 0, 0, 0]), 3)
    prompt = Prompt("rack/0", "", entry=swapped.entry())
    assert len(solve(*swapped[:2]) or ()) == 3
    assert plan_reward(prompt, "0,0 -> 0,2\n0,1 -> 1,0", partial=0.4) == pytest.approx(0.2)  # one of two
    assert plan_reward(prompt, "0,0 -> 0,2", partial=0.4) == 0.0
    assert plan_reward(prompt, "0,0 -> 0,2\n0,1 -> 1,0\n0,2 -> 1,1", partial=0.4) == 1.0


def test_a_game():
    swapped = Prompt("rack/0", "", entry=Instance(Rack(2, (1, 2, 0)), bytes([2, 1, 0, 0, 0, 0]), 3).entry())
    game = RackGame()
    assert game.reset(swapped).startswith("A rack has 2 rows and 3 columns")
    seen = game.step("0,0 -> 0,2")
    assert (seen.reward, seen.done) == (0.0, False)
    assert seen.observation.splitlines()[1].split() == ["0", ".", "A", "B"]
    game.step("0,1 -> 1,0")
    assert game.step("0,2 -> 1,1 and then 0,0 -> 1,1") == ("The rack is in order.", 1.0, True, True)


def test_moves_that_are_not_allowed():
    strict, lenient = RackGame(), RackGame(illegal_cost=0.25, patience=3.0)
    strict.reset(PROMPT)
    assert strict.step("0,0 -> 1,1") == ("The game ends: cell 1,1 is not empty.", 0.0, True, False)
    lenient.reset(PROMPT)
    first = lenient.step("what?")
    assert (first.reward, first.done) == (-0.25, False) and "Not allowed: that is no move" in first.observation
    assert lenient.step("0,0 -> 1,2") == ("The rack is in order.", 0.5, True, True)
    lenient.reset(PROMPT)
    assert [lenient.step("1,0 -> 1,1")[1:3] for _ in range(3)] == [(-0.25, False), (-0.25, False), (-0.25, True)]


def test_what_is_read_of_an_action():
    game = RackGame(extract="<move>(.*?)</move>")
    game.reset(PROMPT)
    assert game.step("1,1 -> 0,1? No. <move>0,0 -> 1,2</move>").reward == 1.0
    with pytest.raises(ValueError, match="extract=move has no group"):
        RackGame(extract="move")


def test_the_question_shows_the_rack():
    text = describe(Instance(RACK, STATE, 1), whole_plan=True)
    assert "column 0 is for A, column 1 is for B, column 2 is for C" in text
    assert "         0  C  .  .\n         1  A  B  .\n     class  A  B  C" in text


def test_racks_that_moves_never_disorder_are_refused():
    with pytest.raises(ConfigError, match="are in order after moves=2; take another number"):
        make_instance(RackOptions(rows=2, columns=2, classes=2, tubes=1, moves=2), 0)
