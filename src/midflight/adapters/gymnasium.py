"""Environments of the package gymnasium, played as text. An observation is shown as text, and an
action is read from the answer.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

from midflight.adapters.games import GameBound, Move, play_game, settings
from midflight.entries import load_entry, package
from midflight.environments.agents import in_thread
from midflight.errors import ConfigError
from midflight.types import Json, Result, Task

NAME = "gymnasium"


def tasks(
    env: str,
    size: int = 1000,
    instruction: str = "",
    actions: Sequence[str] = (),
    show: str = "",
    read: str = "",
    options: dict[str, Json] | None = None,
    max_turns: int = 100,
    unfinished: float | None = None,
) -> list[dict[str, Json]]:
    """A task for each of `size` seeds. `options` are those of `gymnasium.make`. `show` (observation
    to text) and `read` (text to action, or None if it is no move) name functions,
    `module:function`, in place of those made from the spaces. Raises `ConfigError` if there is no
    such environment, or if its spaces need one of these functions.
    """
    told: dict[str, Json] = {
        "env": env,
        "actions": list(actions),
        "show": show,
        "read": read,
        "options": options or {},
        "max_turns": max_turns,
        "unfinished": unfinished,
    }
    game = GymnasiumGame(told, seed=0)
    game.close()
    question = instruction
    if not question and actions:
        question = f"Answer with one of: {', '.join(actions)}."
    elif not question:
        question = "Answer with your move."
    return [{"question": question, "seed": seed, NAME: told} for seed in range(size)]


async def play(task: Task, client: Any) -> Result:
    """Plays a rollout. Waits for answers and for steps, which take a thread each, or until its
    caller cancels it.
    """
    told = settings(task, NAME)
    game = GymnasiumGame(told, seed=cast(int, task.data["seed"]))
    try:
        return await play_game(task, client, game, bound=GameBound.of(told))
    finally:
        game.close()


class GymnasiumGame:
    """Implements `Game`."""

    def __init__(self, told: Any, *, seed: int) -> None:
        self.name = str(told["env"])
        self._seed = seed
        self._actions = [str(action) for action in told["actions"]]
        gym = package(NAME, extra=NAME)
        try:
            options: dict[str, Any] = {}
            if "ansi" in _modes(gym, self.name):
                options["render_mode"] = "ansi"
            options.update(told["options"])
            self._env: Any = gym.make(self.name, **options)
        except Exception as error:
            raise ConfigError(
                f"gymnasium makes no environment {self.name!r}: {type(error).__name__}: {error}; "
                "change env or options."
            ) from error
        self._renders = self._env.render_mode == "ansi"
        self._show = named_function(told["show"], "show")
        self._read = named_function(told["read"], "read") or self._reader()

    def _reader(self) -> Callable[[str], Any]:
        space = self._env.action_space
        if hasattr(space, "charset"):
            return lambda said: said if space.contains(said) else None
        if not hasattr(space, "n") or len(getattr(space, "shape", ())):
            raise ConfigError(
                f"the actions of {self.name!r} are {space}, which no text is read as; name a "
                "function in the source's options that does it: read = 'my_game:read'."
            )
        if self._actions and len(self._actions) != int(space.n):
            raise ConfigError(
                f"{self.name!r} has {space.n} actions, and options.actions names "
                f"{len(self._actions)}; name each, in order."
            )
        names = [name.casefold() for name in self._actions]
        if not names:
            numbers = range(int(space.start), int(space.start + space.n))
            names = [str(number) for number in numbers]
        longest_first = sorted(names, key=len, reverse=True)
        word = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, longest_first))})(?!\w)")

        def read(said: str) -> int | None:
            """The last action that the answer names."""
            found = word.findall(said.casefold())
            if not found:
                return None
            return int(space.start) + names.index(found[-1])

        return read

    async def begin(self) -> str:
        observation, _ = await in_thread(lambda: self._env.reset(seed=self._seed))  # pyright: ignore[reportGeneralTypeIssues]
        return self._shown(observation)

    async def move(self, said: str) -> Move:
        action = self._read(said)
        if action is None:
            known = f" Answer with one of: {', '.join(self._actions)}." if self._actions else ""
            return Move(f"That is no move.{known}", valid=False)
        observation, reward, ended, cut, _ = cast(
            Any, await in_thread(lambda: self._env.step(action))
        )
        return Move(self._shown(observation), float(reward), bool(ended or cut))

    def _shown(self, observation: Any) -> str:
        if self._show is not None:
            return str(self._show(observation))
        return str(self._env.render()).strip() if self._renders else str(observation)

    def close(self) -> None:
        self._env.close()


def _modes(gym: Any, name: str) -> Sequence[str]:
    """The ways in which an environment can be shown, as its class says."""
    entry = gym.spec(name).entry_point
    found = gym.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    return getattr(found, "metadata", {}).get("render_modes", ())


def named_function(entry: str, option: str) -> Callable[..., Any] | None:
    """The function that an option names, or None if the option is empty."""
    if not entry:
        return None
    found = load_entry(entry, option=f"options.{option}", such_as=f"my_game:{option}")
    return cast("Callable[..., Any]", found)
