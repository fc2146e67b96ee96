"""The host of the agents that run in the rollout process itself."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.routing import BaseRoute

from midflight.config.agent import SINGLE_TURN, agent_of
from midflight.config.sections import Config
from midflight.environments.agent_program import AgentProgram
from midflight.environments.agents import AgentHost, SharedClients
from midflight.environments.claimed import Board, Claimed
from midflight.environments.single_turn import LocalAnswers
from midflight.environments.worker_pool import HERE, RolloutPlacement
from midflight.gateway.http.chats import InProcessChats
from midflight.gateway.http.http import build_app
from midflight.run.rollout.serving import Serving
from midflight.wire.in_process import ask
from midflight.wire.memory import MemoryTransport


@dataclass(frozen=True, slots=True)
class Hosting:
    """The host of this process's agents, and the routes and services that it takes."""

    host: AgentHost
    routes: Sequence[BaseRoute] = ()
    services: Sequence[Coroutine[Any, Any, None]] = ()
    board: Board | None = None
    """The board at which outsiders claim rollouts."""
    placement: Callable[[str], RolloutPlacement] = lambda _: HERE
    """A function that returns the place of a session's rollout."""


@asynccontextmanager
async def hosting_here(
    config: Config, serving: Serving, *, control_token: str | None = None
) -> AsyncGenerator[Hosting]:
    """Agents run in this process. They talk to the gateway in memory, and like any other agent they
    may not pause it. At its end, waits for requests that are still being answered.
    """
    section = config.environment
    if agent_of(section) == SINGLE_TURN and not section.rewards:
        yield Hosting(LocalAnswers(InProcessChats(serving.gateway)))
        return
    app = build_app(serving.gateway, serving.control, control_token=control_token)
    program = AgentProgram(section)
    board = program.environment.board if isinstance(program.environment, Claimed) else None
    async with asyncio.TaskGroup() as requests:
        clients = partial(
            SharedClients,
            transport=MemoryTransport(app, requests),
            untracked=section.untracked,
            public_url=config.gateway.public_url,
        )
        async with program.host(partial(ask, app), clients) as host:
            if board is None:
                yield Hosting(host)
            else:
                yield Hosting(host, board=board, placement=board.placement)
