"""Games of gymnasium and textarena as conversations: moves are read, each answer gets what it earned, and what never ends gets no score."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from midflight.adapters import gymnasium, textarena
from midflight.config.sources import SourceSection
from midflight.environments.sources import load_sources
from midflight.errors import ConfigError, EnvironmentFailed
from midflight.types import Json, Result, Task

LAKE = {"actions": ["left", "down", "right", "up"], "options": {"is_slippery": False}}
SAFE = ["down", "down", "right", "right", "down", "right"]
"""From the upper left of gymnasium's own lake of 4 x 4 to its goal: the holes are at 5, 7, 11 and 12."""


class Said(Exception):
    code = "context_length_exceeded"


class Speaker:
    """A client whose model says these in turn, and then has no room left."""

    def __init__(self, *said: str) -> None:
        self._said, self.seen = list(said), list[list[dict[str, Any]]]()
        self.chat = self.completions = self

    async def create(self, *, model: str, messages: Sequence[dict[str, Any]]) -> Any:
        self.seen.append([dict(message) for message in messages])
        if not self._said:
            raise Said
        message = {"role": "assistant", "content": self._said.pop(0), "tool_calls": None}
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(model_dump=lambda: message))])


def task_of(rows: Sequence[dict[str, Any]], seed: int = 0) -> Task:
    return Task(str(seed), "games", rows[seed])


def lake(client: Speaker, **options: Any) -> Result:
    return asyncio.run(gymnasium.play(task_of(gymnasium.tasks("FrozenLake-v1", size=1, **{**LAKE, **options})), client))


def guess(client: Speaker, *, seed: int = 0, **options: Any) -> Result:
    return asyncio.run(
        textarena.play(task_of(textarena.tasks("GuessTheNumber-v0-raw", size=seed + 1, **options), seed), client),
    )


def test_each_answer_has_earned_what_its_step_earned() -> None:
    client = Speaker(*(f"I go {move}." for move in SAFE))
    result = lake(client)
    assert (result.reward, list(result.turns)) == (1.0, [0.0] * 5 + [1.0])
    assert result.metrics == {"game/turns": 6.0, "game/invalid": 0.0, "game/unfinished": 0.0}
    first = client.seen[0][0]["content"]
    assert first.startswith("Answer with one of: left, down, right, up.\n\n") and "FFFH" in first


def test_an_answer_that_is_no_action_is_told_so_and_counts_as_a_turn() -> None:
    client = Speaker("north", "leftovers", *SAFE)
    result = lake(client)
    assert (result.reward, result.metrics["game/invalid"], len(result.turns)) == (1.0, 2.0, 8)
    assert client.seen[1][-1] == {"role": "user", "content": "That is no move. Answer with one of: left, down, right, up."}


def test_of_several_actions_the_last_one_counts_and_without_names_their_numbers_do() -> None:
    assert lake(Speaker("not up but down", "DOWN", *SAFE[2:])).reward == 1.0
    assert lake(Speaker(*(str(LAKE["actions"].index(move)) for move in SAFE)), actions=[]).reward == 1.0  # type: ignore[attr-defined]


def test_a_game_that_never_ends_is_not_scored_unless_it_is_said_what_it_is_worth() -> None:
    with pytest.raises(EnvironmentFailed, match=r"FrozenLake-v1 did not end in 3 answers.*raise max_turns.*unfinished = 0\.0"):
        lake(Speaker(*["left"] * 4), max_turns=3)
    with pytest.raises(EnvironmentFailed, match="before 2 answers filled the model's context"):
        lake(Speaker("left", "left"))
    result = lake(Speaker(*["left"] * 4), max_turns=3, unfinished=-0.5)
    assert (result.reward, list(result.turns), result.metrics["game/unfinished"]) == (-0.5, [0.0] * 3, 1.0)


def test_spaces_that_no_text_is_read_as_need_a_function() -> None:
    with pytest.raises(ConfigError, match=r"the actions of 'MountainCarContinuous-v0' are Box.*read = 'my_game:read'"):
        gymnasium.tasks("MountainCarContinuous-v0")
    with pytest.raises(ConfigError, match=r"has 4 actions, and options.actions names 1"):
        gymnasium.tasks("FrozenLake-v1", actions=["left"])
    with pytest.raises(ConfigError, match="makes no environment 'FrozenLake-v9'"):
        gymnasium.tasks("FrozenLake-v9")


def test_the_same_seed_is_the_same_game_however_many_are_played_and_no_other_luck_is_touched() -> None:
    rows = textarena.tasks("GuessTheNumber-v0-raw", size=4)
    random.seed(5)
    expected = random.Random(5).random()

    async def at_once() -> list[Result]:
        clients = [Speaker(*(f"[{number}]" for number in range(1, 21))) for _ in range(4)]
        return list(await asyncio.gather(*(textarena.play(task_of(rows, seed), client) for seed, client in enumerate(clients))))

    together = asyncio.run(at_once())
    alone = [guess(Speaker(*(f"[{number}]" for number in range(1, 21))), seed=seed) for seed in range(4)]
    assert [result.reward for result in together] == [result.reward for result in alone]
    assert len({result.reward for result in together}) > 1
    assert random.random() == expected


def test_a_raw_game_tells_only_what_is_new() -> None:
    client = Speaker(*(f"[{number}]" for number in (10, 5, 15, 3, 12, 8, 18, 1, 2, 4, 6)))
    guess(client)
    assert "You are playing Guess The Number" in client.seen[0][0]["content"]
    assert client.seen[1][2]["content"] in ("The target number is lower.", "The target number is higher.")


def test_moves_that_are_none_spoil_a_game_of_textarena() -> None:
    result = guess(Speaker("hello", "hello"))
    assert (result.reward, result.metrics["game/spoilt"], result.metrics["game/turns"]) == (0.0, 1.0, 2.0)


def test_others_play_the_other_seats_and_the_policy_has_each_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[str]()

    def opponent(said: str) -> str:
        shown.append(said)
        return next(f"[{cell}]" for cell in (8, 7, 5, 0) if f"'[{cell}]'" in said.rsplit("Available Moves", 1)[1])

    monkeypatch.setitem(__import__("sys").modules, "my_players", SimpleNamespace(opponent=opponent))
    rows = textarena.tasks("TicTacToe-v0-raw", size=2, players=2, opponent="my_players:opponent")
    shown.clear()
    first = asyncio.run(textarena.play(task_of(rows, 0), Speaker("[0]", "[1]", "[2]")))
    assert (first.reward, len(shown)) == (1.0, 2)  # cells 0, 1 and 2 are a row; the other had moved twice
    client = Speaker("[0]", "[1]", "[2]")
    second = asyncio.run(textarena.play(task_of(rows, 1), client))
    assert second.reward == 1.0 and "You are Player 1" in client.seen[0][0]["content"] and len(shown) == 5


def test_a_game_of_several_players_needs_somebody_for_the_other_seats() -> None:
    with pytest.raises(ConfigError, match=r"TicTacToe-v0-raw' with 2 players.*opponent = 'my_players:opponent'"):
        textarena.tasks("TicTacToe-v0-raw", players=2)
    with pytest.raises(ConfigError, match=r"cannot begin with 1 players.*change players"):
        textarena.tasks("TicTacToe-v0-raw")
    with pytest.raises(ConfigError, match="makes no game 'Nothing-v0'"):
        textarena.tasks("Nothing-v0")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gymnasium", {"env": "Some-v0"}),
        ("textarena", {"env": "Some-v0"}),
        ("verifiers", {"taskset": "some"}),
        ("openenv", {"url": "http://127.0.0.1:9", "action": "move"}),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Json]
) -> None:
    real = __import__("importlib").import_module

    def missing(wanted: str, *args: Any) -> Any:
        if wanted.partition(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(wanted, *args)

    monkeypatch.setattr("midflight.entries.importlib.import_module", missing)
    section = SourceSection(entry=f"midflight.adapters.{name}:tasks", options=options)
    with pytest.raises(ConfigError, match=rf"needs the package {name}[\w.]*; install it with: pip install 'midflight\[{name}\]'\.$"):
        load_sources([section], seed=0)


def test_held_out_games_are_other_seeds() -> None:
    section = SourceSection(
        entry="midflight.adapters.textarena:tasks", options={"env": "GuessTheNumber-v0-raw", "size": 40}, content="seed", heldout=10
    )
    (source,) = load_sources([section], seed=3)
    training, heldout = ({task.data["seed"] for task in side} for side in (source.training, source.heldout))
    assert (len(training), len(heldout), training & heldout) == (30, 10, set())
