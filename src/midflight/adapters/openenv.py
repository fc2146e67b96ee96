"""Environments of OpenEnv, which are servers. Each rollout has a session of its own there, over a
WebSocket.
"""

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, cast
from urllib.request import ProxyHandler, build_opener

from midflight.adapters.games import GameBound, Move, play_game, settings
from midflight.adapters.gymnasium import named_function
from midflight.entries import package
from midflight.errors import ConfigError, EnvironmentFailed
from midflight.types import Json, Result, Task

NAME = "openenv"


def tasks(
    url: str,
    size: int = 1000,
    instruction: str = "Answer with your action.",
    action: str = "",
    observation: str = "",
    read: str = "",
    show: str = "",
    seconds: float = 60.0,
    connect_seconds: float = 120.0,
    max_turns: int = 100,
    unfinished: float | None = None,
) -> list[dict[str, Json]]:
    """A task for each of `size` seeds. `action` is the field of the environment's action that takes
    the answer, or `read` names the function that makes an action of the answer, or None if it is no
    action. `observation` is the field that is shown, or `show` names the function that makes a text
    of the whole observation. `seconds` bound one step. `connect_seconds` bound the first answer of
    the server, and the opening of each session; a busy server may take long for both. Raises
    `ConfigError` if no such server answers.
    """
    if bool(action) == bool(read):
        raise ConfigError(
            f"options of the environment at {url}: one of action and read says what becomes of an "
            "answer; name the field that takes it, such as action = 'message', or a function, "
            "read = 'my_game:read'."
        )
    package("openenv.core.generic_client", extra=NAME)
    try:
        opener = build_opener(ProxyHandler({}))
        with opener.open(f"{url.rstrip('/')}/health", timeout=connect_seconds) as answered:
            answered.read()
    except TimeoutError as error:
        raise ConfigError(
            f"the server at {url} did not say within options.connect_seconds = {connect_seconds:g} "
            "whether it is one of OpenEnv; raise that, or correct url."
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no environment of OpenEnv answers at {url}: {error}; start its server, or correct "
            "url."
        ) from error
    told: dict[str, Json] = {
        "url": url,
        "action": action,
        "observation": observation,
        "read": read,
        "show": show,
        "seconds": seconds,
        "connect_seconds": connect_seconds,
        "max_turns": max_turns,
        "unfinished": unfinished,
    }
    return [{"question": instruction, "seed": seed, NAME: told} for seed in range(size)]


async def play(task: Task, client: Any) -> Result:
    """Plays a rollout. Waits for answers and for the server, or until its caller cancels it, which
    closes the session.
    """
    told = settings(task, NAME)
    kind = package("openenv.core.generic_client", extra=NAME).GenericEnvClient
    session = kind(
        base_url=told["url"],
        connect_timeout_s=told["connect_seconds"],
        message_timeout_s=told["seconds"],
    )
    async with AsyncExitStack() as stack:
        try:
            server = await stack.enter_async_context(session)
        except ConnectionError as error:
            raise EnvironmentFailed(
                f"the environment at {told['url']} opened no session ({error}); where it is only "
                f"slow, raise options.connect_seconds = {told['connect_seconds']:g}."
            ) from error
        game = OpenEnvGame(told, server, seed=cast(int, task.data["seed"]))
        return await play_game(task, client, game, bound=GameBound.of(told))


class OpenEnvGame:
    """Implements `Game`."""

    def __init__(self, told: Mapping[str, Any], server: Any, *, seed: int) -> None:
        self.name = str(told["url"])
        self._server = server
        self._seed = seed
        self._action = str(told["action"])
        self._observation = str(told["observation"])
        self._read = named_function(told["read"], "read")
        self._show = named_function(told["show"], "show")

    async def begin(self) -> str:
        return self._shown((await self._server.reset(seed=self._seed)).observation)

    async def move(self, said: str) -> Move:
        action = self._read(said) if self._read is not None else {self._action: said}
        if action is None:
            return Move("That is no move.", valid=False)
        step = await self._server.step(action)
        if step.done and step.reward is None:
            raise EnvironmentFailed(
                f"the environment at {self.name} ended without a reward; it cannot be scored."
            )
        return Move(self._shown(step.observation), float(step.reward or 0.0), bool(step.done))

    def _shown(self, observation: Mapping[str, Any]) -> str:
        if self._show is not None:
            return str(self._show(observation))
        if not self._observation:
            return json.dumps(observation)
        if self._observation not in observation:
            raise EnvironmentFailed(
                f"the environment at {self.name} shows {', '.join(observation)}, and no "
                f"{self._observation!r}; correct options.observation."
            )
        return str(observation[self._observation])
