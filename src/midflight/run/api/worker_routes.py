"""The routes by which workers reach the rollout process: one WebSocket for each worker, behind a
token that opens nothing else.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `WorkerRoutes._serve` (one each worker) | its messages | the next | the worker; its end ends it |
| `_Line.drain` (one each worker) | rollouts and cancellations for it | the next | rollouts that begin and end |
| `watch_workers` | the pool | its interval | time |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from midflight.environments.worker_pool import (
    LOOK_SECONDS,
    Assignment,
    HungWorker,
    PoolWorker,
    WorkerPool,
)
from midflight.errors import AgentFailed, ConfigError
from midflight.run.api import worker_wire as wire
from midflight.wire.edge import bearer_in, headers_of, same_token
from midflight.wire.routes import body_of, json_answer, route


class WorkerRoutes:
    def __init__(self, pool: WorkerPool, *, token: str, control_token: str) -> None:
        """`token` is the workers'. The launcher uses `control_token` to say that it is about to end
        a worker.
        """
        self._pool = pool
        self._token = token
        self._control_token = control_token

    def routes(self) -> Sequence[BaseRoute]:
        return [
            WebSocketRoute(wire.PATH, self._serve),
            route(wire.BLOCKED_PATH, self._blocked, token=self._token),
            route(wire.SPARED_PATH, self._spared, token=self._control_token),
        ]

    async def _serve(self, socket: WebSocket) -> None:
        """Waits for the worker's messages; ended by the loss of its connection, with which its
        agents are lost.
        """
        if not same_token(bearer_in(headers_of(socket.scope)), self._token):
            return await socket.close(code=1008)
        await socket.accept()
        line = _Line()
        worker = None
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(line.drain(socket))
            try:
                with suppress(WebSocketDisconnect, msgspec.DecodeError):
                    while True:
                        worker = self._heard(line, worker, await socket.receive_text())
            finally:
                if worker is not None:
                    self._pool.leave(worker)
                sending.cancel()
        return None

    def _heard(self, line: _Line, worker: PoolWorker | None, text: str) -> PoolWorker:
        match wire.decode_from_worker(text):
            case wire.Joined(name):
                return self._pool.join(name, line)
            case said if worker is None:
                raise msgspec.DecodeError(f"{said} before the name")
            case wire.AgentEnded() as ended:
                self._pool.hear(worker)
                self._pool.ended(
                    worker, ended.session_id, result=ended.result(), error=_error(ended)
                )
            case wire.ToolsRun(session_id, limit):
                self._pool.hear(worker)
                self._pool.in_tools(worker, session_id, limit)
            case wire.ProgramsWait(session_id, waits):
                self._pool.hear(worker)
                self._pool.wait_for_processor(worker, session_id, waits=waits)
            case _:
                self._pool.hear(worker)
        return worker

    async def _blocked(self, request: Request) -> Response:
        said = await body_of(request, wire.LoopBlocked)
        self._pool.blocked(said.name, said.session_id, where=said.where, seconds=said.seconds)
        return json_answer({})

    async def _spared(self, request: Request) -> Response:
        said = await body_of(request, wire.WorkerSpared)
        self._pool.spare(said.name)
        return json_answer({})


def _error(ended: wire.AgentEnded) -> Exception | None:
    if ended.error is None:
        return None
    if ended.ends_run:
        return ConfigError(ended.error)
    return AgentFailed(ended.error, trace=ended.trace)


class _Line:
    """Implements the pool's `WorkerOutlet`: the messages on their way to one worker. It is bounded by
    the rollouts in flight, which admission limits.
    """

    def __init__(self) -> None:
        self._messages: asyncio.Queue[wire.RunAgent | wire.CancelAgent] = asyncio.Queue()

    def run(self, job: Assignment) -> None:
        task = job.task
        session = job.session
        self._messages.put_nowait(
            wire.RunAgent(
                session.session_id,
                session.base_url,
                session.api_key,
                task.id,
                task.source,
                job.data,
                job.attempts,
            )
        )

    def cancel(self, session_id: str) -> None:
        self._messages.put_nowait(wire.CancelAgent(session_id))

    async def drain(self, socket: WebSocket) -> None:
        """Waits for messages to send; ended by its task group, or by the loss of the connection."""
        # RuntimeError is Starlette's for a socket that is closed already
        with suppress(WebSocketDisconnect, RuntimeError):
            while True:
                message = await self._messages.get()
                await socket.send_text(wire.encode(message).decode())


async def watch_workers(pool: WorkerPool, condemn: Callable[[HungWorker], None]) -> None:
    """Waits for the interval to pass, for ever; ended by its task group."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        for hung in pool.look():
            condemn(hung)
