"""Games as conversations: the game's text is the user's message, and the model's answer is its
move.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from midflight.environments.built_in_loop import with_observation
from midflight.errors import EnvironmentFailed
from midflight.types import Json, Result, Task


@dataclass(frozen=True, slots=True)
class Move:
    """The effect of an answer in a game."""

    shown: str
    """This text is the model's next message. It is not used if the game has ended."""
    reward: float = 0.0
    ended: bool = False
    valid: bool = True
    """True if the answer was a move at all."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Game(Protocol):
    """A game that is played by texts."""

    name: str

    async def begin(self) -> str:
        """Begins the game, and returns the text that the model is shown first. Waits for the game,
        until the rollout's deadline.
        """
        ...

    async def move(self, said: str) -> Move:
        """Makes a move. Waits as `begin` does. An error fails the rollout, which is then not
        scored.
        """
        ...


@dataclass(frozen=True, slots=True)
class GameBound:
    """The bound on games that never end. `unfinished` is the reward of an unfinished game, in
    addition to the rewards of its moves. None leaves it without a score.
    """

    max_turns: int
    unfinished: float | None = None

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "GameBound":
        unfinished = told["unfinished"]
        return cls(int(told["max_turns"]), None if unfinished is None else float(unfinished))


async def play_game(task: Task, client: Any, game: Game, *, bound: GameBound) -> Result:
    """Plays one game. Each answer gets the reward of its move. Waits for answers and moves, or
    until its caller cancels it.
    """
    shown = await game.begin()
    messages: list[dict[str, Json]] = with_observation(
        task.messages, f"\n\n{shown}" if task.prompt else shown
    )
    earned = list[float]()
    metrics = dict[str, float]()
    num_invalid = 0
    for _ in range(bound.max_turns):
        answer = await ask_model(client, messages)
        if answer is None:
            break
        move = await game.move(str(answer.get("content") or ""))
        messages.append(answer)
        earned.append(move.reward)
        num_invalid += not move.valid
        metrics |= move.metrics
        if move.ended:
            return _result(earned, 0.0, metrics, messages, num_invalid, finished=True)
        messages.append({"role": "user", "content": move.shown})
    if bound.unfinished is None:
        why = f"before {len(earned)} answers filled the model's context"
        if len(earned) == bound.max_turns:
            why = f"in {bound.max_turns} answers"
        raise EnvironmentFailed(
            f"task {task.id} of {task.source}: the game {game.name} did not end {why}, so nobody "
            "knows what it is worth; raise max_turns in the options of its source or "
            "model.max_context, or say there what such a game is worth: unfinished = 0.0."
        )
    return _result(earned, bound.unfinished, metrics, messages, num_invalid, finished=False)


def _result(
    earned: list[float],
    beside: float,
    metrics: dict[str, float],
    messages: list[dict[str, Json]],
    num_invalid: int,
    *,
    finished: bool,
) -> Result:
    counted = {
        "game/turns": float(len(earned)),
        "game/invalid": float(num_invalid),
        "game/unfinished": float(not finished),
    }
    total = sum(earned) + beside
    fields: dict[str, Json] = {"messages": cast(Json, messages)}
    return Result(
        total,
        components={"game": total},
        metrics={**metrics, **counted},
        turns=earned,
        fields=fields,
    )


async def ask_model(client: Any, messages: list[dict[str, Json]]) -> dict[str, Json] | None:
    """Returns the model's message, or None if the conversation has filled its context."""
    try:
        said = await client.chat.completions.create(model="policy", messages=messages)
    except Exception as error:
        if getattr(error, "code", None) == "context_length_exceeded":
            return None
        raise
    message = said.choices[0].message.model_dump()
    kept = {name: value for name, value in message.items() if value not in (None, [])}
    return {**kept, "content": kept.get("content", "")}


def settings(task: Task, name: str) -> Mapping[str, Any]:
    """The settings that the source of that adapter wrote into the task."""
    found = task.data.get(name)
    if not isinstance(found, dict):
        raise EnvironmentFailed(
            f"task {task.id} of {task.source} has no {name!r}: its source must be the function "
            f"`midflight.adapters.{name}:tasks`."
        )
    return found
