"""An environment server as an author of OpenEnv writes one: asks twice, and an answer whose letters have an even sum is worth a point."""

from __future__ import annotations

import socket
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Said(Action):
    said: str


class Shown(Observation):
    shown: str = ""


class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="0", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Shown:
        self._state = State(episode_id=str(seed), step_count=0)
        return Shown(shown=f"First, of {seed}?", done=False, reward=0.0)

    def step(self, action: Said, timeout_s: float | None = None, **kwargs: Any) -> Shown:  # type: ignore[override]
        self._state.step_count += 1
        right = float(sum(map(ord, action.said)) % 2 == 0)
        return Shown(shown="Second?", done=self._state.step_count == 2, reward=right)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    print("port", listening.getsockname()[1], flush=True)
    app = create_fastapi_app(Counting, Said, Shown, max_concurrent_envs=64)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
