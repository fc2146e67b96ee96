"""Games of the package textarena. The policy has one seat; functions of yours play the others.

These games draw from Python's one generator of random numbers. Each game here has its own state of
that generator, so that a seed makes the same game however many are played at once.
"""

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

from midflight.adapters.games import GameBound, Move, play_game, settings
from midflight.entries import load_entry, package
from midflight.errors import ConfigError, EnvironmentFailed
from midflight.types import Json, Result, Task

NAME = "textarena"
MAX_MOVES = 1000
"""The number of moves of other players that may come in a row. With more, the game does not wait
for ours.
"""


def tasks(
    env: str,
    size: int = 1000,
    players: int = 1,
    opponent: str = "",
    options: dict[str, Json] | None = None,
    max_turns: int = 100,
    unfinished: float | None = None,
) -> list[dict[str, Json]]:
    """A task for each of `size` seeds. With several players the policy has each seat in turn.
    `opponent` names a function, `module:function`, that takes the text that another player is shown
    and returns that player's move. `options` are those of `textarena.make`. Raises `ConfigError` if
    there is no such game.
    """
    if players > 1 and not opponent:
        raise ConfigError(
            f"{env!r} with {players} players needs somebody for the other seats; name a function "
            "in the source's options: opponent = 'my_players:opponent'."
        )
    told: dict[str, Json] = {
        "env": env,
        "players": players,
        "opponent": opponent,
        "options": options or {},
        "max_turns": max_turns,
        "unfinished": unfinished,
    }
    TextArenaGame(told, seed=0).begin_now()
    return [{"question": "", "seed": seed, NAME: told} for seed in range(size)]


async def play(task: Task, client: Any) -> Result:
    """Plays a rollout. Waits for answers, or until its caller cancels it."""
    told = settings(task, NAME)
    game = TextArenaGame(told, seed=cast(int, task.data["seed"]))
    return await play_game(task, client, game, bound=GameBound.of(told))


class TextArenaGame:
    """Implements `Game`."""

    def __init__(self, told: Any, *, seed: int) -> None:
        self.name = str(told["env"])
        self._players = int(told["players"])
        self._seed = seed
        self._seat = seed % self._players
        self._opponent: object = None
        opponent = str(told["opponent"])
        if opponent:
            self._opponent = load_entry(
                opponent, option="options.opponent", such_as="my_players:opponent"
            )
        self._luck: object = random.Random(seed).getstate()
        arena = package(NAME, extra=NAME)
        try:
            with self._own_luck():
                self._env: Any = arena.make(self.name, **told["options"])
        except Exception as error:
            raise ConfigError(
                f"textarena makes no game {self.name!r}: {type(error).__name__}: {error}; change "
                "env or options."
            ) from error

    @contextmanager
    def _own_luck(self) -> Generator[None]:
        """Gives the generator the state of this game. Nothing within the context may wait."""
        theirs = random.getstate()
        random.setstate(cast(Any, self._luck))
        try:
            yield
        finally:
            self._luck = random.getstate()
            random.setstate(theirs)

    async def begin(self) -> str:
        return self.begin_now()

    def begin_now(self) -> str:
        """Begins the game. Raises `ConfigError` if it refuses so many players."""
        with self._own_luck():
            try:
                self._env.reset(num_players=self._players, seed=self._seed)
            except AssertionError as error:
                raise ConfigError(
                    f"the game {self.name!r} cannot begin with {self._players} players: {error}; "
                    "change players."
                ) from error
            ended, shown = self._until_ours(ended=False)
        if ended:
            raise EnvironmentFailed(
                f"the game {self.name} was over before the policy's first move; change its "
                "opponent."
            )
        return shown

    async def move(self, said: str) -> Move:
        with self._own_luck():
            ended, _ = self._env.step(said)
            ended, shown = self._until_ours(ended=bool(ended))
            if not ended:
                return Move(shown)
            rewards, info = self._env.close()
        if not rewards or self._seat not in rewards:
            raise EnvironmentFailed(
                f"the game {self.name} ended without a reward for player {self._seat}; it cannot "
                "be scored."
            )
        spoilt = float(bool((info or {}).get(self._seat, {}).get("invalid_move")))
        return Move("", float(rewards[self._seat]), ended=True, metrics={"game/spoilt": spoilt})

    def _until_ours(self, *, ended: bool) -> tuple[bool, str]:
        """Lets the others move until it is the policy's turn. Returns whether the game has ended,
        and the text that the policy is shown.
        """
        for _ in range(MAX_MOVES):
            if ended:
                return True, ""
            player, observation = self._env.get_observation()
            shown = observation
            if not isinstance(observation, str):
                texts = [text for author, text, *_ in observation if author != player]
                shown = "\n".join(texts)
            if player == self._seat:
                return False, shown.strip()
            assert self._opponent is not None, f"player {player} of {self._players}"
            opponent = cast("Callable[[str], object]", self._opponent)
            ended, _ = self._env.step(str(opponent(shown.strip())))
        raise EnvironmentFailed(
            f"the game {self.name}: {MAX_MOVES} moves of other players in a row; change its "
            "opponent."
        )
