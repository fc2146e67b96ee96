"""A worker: it runs agents of many rollouts on one event loop, or in threads. A thread watches the
loop.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `Worker.run` | rollouts and cancellations | the next | the rollout process; its end ends the worker |
| `Worker._beat` | nothing | its interval | time |
| `LoopWatch._run`, a thread | the loop's beats | its interval | time |
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import logging
import signal
import sys
import threading
import time
import traceback
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import aiohttp

from midflight.config.environment import EnvironmentSection
from midflight.environments.agent_program import AgentProgram
from midflight.environments.agents import AgentHost, SharedClients
from midflight.environments.built_in_loop import BuiltInLoop
from midflight.environments.processor_waits import ProcessorWaits
from midflight.environments.result_checks import UnscoredRollout, checked_result, result_of
from midflight.environments.worker_pool import BEAT_SECONDS
from midflight.errors import Cost, MidflightError
from midflight.run.api import worker_wire as wire
from midflight.run.heartbeat import Doing, LoopReport
from midflight.run.parts import LauncherPipe, PartLost, Ready, WorkerSpec
from midflight.run.worker.limits import StartedProcesses, limit_memory
from midflight.types import Task
from midflight.wire.client import LOSSES, HttpClient

_log = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 600.0
"""The time that the rollout process has to answer a ping. It is long, because the worker dies with
the launcher and the ring in any case.
"""
AGAIN_SECONDS = 5.0
"""The seconds after which an agent that has swallowed its cancellation is cancelled once more."""
LOOK_SECONDS = 0.25
BLOCKED_SECONDS = 1.0
"""The seconds in one step of an agent after which a loop counts as blocked. The rollout process is
told which agent blocks it, at once and every second.
"""
MAX_AGENTS = 3
"""The number of running agents that a report names, the oldest first. Of the others it gives the
number.
"""
MAX_TRACE = 20_000
"""The number of characters of a traceback that are sent, from its end."""

_running: ContextVar[str] = ContextVar("session_id")
"""The session of the agent that the code belongs to; tasks that an agent starts inherit it."""


@dataclass(frozen=True, slots=True)
class WorkerSession:
    """Implements `SessionHandle`."""

    session_id: str
    base_url: str
    api_key: str


def gateway_client(spec: WorkerSpec) -> HttpClient:
    """The client of the rollout process. A lost call ends the worker, and programs that agents and
    rewards start may take all processors for seconds, so connecting has no bound.
    """
    return HttpClient(
        spec.url,
        lost=lambda deed: PartLost(f"the rollout process {deed}"),
        token=spec.token,
        connect_seconds=None,
    )


async def run_worker(spec: WorkerSpec, launcher: LauncherPipe) -> None:
    """Runs agents until the launcher ends it, or the rollout process is gone."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # there is nothing to save, and an agent may hold the loop
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
    http_client = gateway_client(spec)
    section = EnvironmentSection.model_validate_json(spec.environment)
    program = AgentProgram(section)
    clients = partial(SharedClients, untracked=section.untracked, public_url=spec.public_url)
    async with http_client, program.host(partial(http_client.call, "POST"), clients) as host:
        count = None
        if section.max_processes is not None:
            count = StartedProcesses(section.max_processes, session=_running)
            count.watch(loop)
        if section.worker_mb is not None:
            limit_memory(section.worker_mb)
        watch = LoopWatch(spec, loop)
        worker = Worker(spec.name, host, http_client, watch, cancels=program.cancels, count=count)
        launcher.heartbeat.ask = worker.situation
        launcher.heartbeat.beside = watch.held
        await worker.run(launcher)


class Worker:
    """One connection, and the agents that run. `cancels` is true if agents can be cancelled; agents
    in threads cannot, and end by themselves.
    """

    def __init__(
        self,
        name: str,
        host: AgentHost,
        http_client: HttpClient,
        watch: LoopWatch,
        *,
        cancels: bool,
        count: StartedProcesses | None = None,
    ) -> None:
        self._name = name
        self._host = host
        self._http = http_client
        self._watch = watch
        self._cancels = cancels
        self._count = count
        self._agents: dict[str, asyncio.Task[None]] = {}
        self._began: dict[str, float] = {}
        """The time at which each agent was given, the earliest first."""
        if isinstance(host, BuiltInLoop):
            host.on_tools = self._tools_run
        self._outbox: asyncio.Queue[
            wire.Joined | wire.LoopTurned | wire.ToolsRun | wire.ProgramsWait | wire.AgentEnded
        ] = asyncio.Queue()

    def situation(self) -> LoopReport:
        """The agents that run. They have no limit here: each rollout has its deadline in the
        rollout process.
        """
        first = itertools.islice(self._began.items(), MAX_AGENTS)
        oldest = [Doing(f"runs the agent of {session}", since) for session, since in first]
        return LoopReport(tuple(oldest), counters=f"{len(self._began)} agents run")

    async def run(self, launcher: LauncherPipe) -> None:
        """Waits for rollouts; ended by the loss of the connection."""
        try:
            async with self._http.socket(wire.PATH, heartbeat_seconds=HEARTBEAT_SECONDS) as socket:
                self._outbox.put_nowait(wire.Joined(self._name))
                launcher.tell(Ready())
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._send(socket))
                    tasks.create_task(self._beat())
                    self._watch.start()
                    async for message in socket:
                        if message.type is aiohttp.WSMsgType.TEXT:
                            self._hear(wire.decode_for_worker(message.data), tasks)
                    raise PartLost("the rollout process closed the connection")
        except LOSSES as error:
            raise PartLost(f"the rollout process was lost: {error!r}") from error

    async def _send(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Waits for messages to send; ended by its task group."""
        while True:
            message = await self._outbox.get()
            await socket.send_str(wire.encode(message).decode())

    async def _beat(self) -> None:
        """Waits for the interval to pass, for ever; ended by its task group."""
        while True:
            self._outbox.put_nowait(wire.LoopTurned())
            await asyncio.sleep(BEAT_SECONDS)

    def _hear(self, said: wire.RunAgent | wire.CancelAgent, tasks: asyncio.TaskGroup) -> None:
        if isinstance(said, wire.RunAgent):
            _running.set(said.session_id)  # for the task, which copies it; this one starts no other
            agent = tasks.create_task(self._agent(said), name=f"agent of {said.session_id}")
            self._agents[said.session_id] = agent
            self._began[said.session_id] = time.monotonic()
        elif self._cancels:
            self._cancel(said.session_id)

    def _cancel(self, session_id: str) -> None:
        agent = self._agents.get(session_id)
        if agent is not None:
            agent.cancel()
            asyncio.get_running_loop().call_later(AGAIN_SECONDS, agent.cancel)

    def _tools_run(self, session_id: str, limit: float | None) -> None:
        self._outbox.put_nowait(wire.ToolsRun(session_id, limit))

    def _programs_wait(self, session_id: str, waits: bool) -> None:
        self._outbox.put_nowait(wire.ProgramsWait(session_id, waits))

    async def _judged(self, given: wire.RunAgent, task: Task) -> wire.AgentEnded:
        """Waits for the functions that score a group."""
        attempts = [UnscoredRollout(**each) for each in json.loads(given.attempts or "[]")]
        results = await self._host.judge(task, attempts, name=given.session_id)
        checked = [checked_result(result, task=task) for result in results]
        return wire.group_ended_with(given.session_id, checked)

    async def _agent(self, given: wire.RunAgent) -> None:
        """Waits for one agent. An exception of the agent ends that agent alone."""
        task = Task(given.task_id, given.source, json.loads(given.data))
        session = WorkerSession(given.session_id, given.base_url, given.api_key)
        waits = ProcessorWaits(partial(self._programs_wait, given.session_id))
        ended = wire.AgentEnded(given.session_id, error="the agent was cancelled")
        try:
            with waits.counting():
                if given.attempts is None:
                    returned = await self._host.run(task, session)
                    result = await result_of(returned, task=task)
                    ended = wire.ended_with(given.session_id, result)
                else:
                    ended = await self._judged(given, task)
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None:
                while current.uncancel():  # by itself, or by us: either way this is its end
                    pass
            said = "the agent let a CancelledError escape; catch it where the inner task is awaited"
            ended = _failed(given.session_id, error, said=said)
        except BaseException as error:
            ended = _failed(given.session_id, error)
        finally:
            self._agents.pop(given.session_id, None)
            self._began.pop(given.session_id, None)
            if self._count is not None:
                self._count.forget(given.session_id)
            self._outbox.put_nowait(ended)


def _failed(session_id: str, error: BaseException, *, said: str | None = None) -> wire.AgentEnded:
    trace = "".join(traceback.format_exception(error))
    # whole lines: half of a secret would not be known as one, and be shown
    if len(trace) > MAX_TRACE:
        trace = trace[-MAX_TRACE:].partition("\n")[2]
    ends_run = isinstance(error, MidflightError) and error.cost is Cost.RUN
    text = str(error) if ends_run else f"{type(error).__name__}: {error}"
    if said:
        text = said
    return wire.AgentEnded(session_id, error=text, trace=trace, ends_run=ends_run)


class LoopWatch:
    """A thread that sees when the event loop is blocked, and tells the rollout process which agent
    blocks it, on a connection of its own.
    """

    def __init__(self, spec: WorkerSpec, loop: asyncio.AbstractEventLoop) -> None:
        self._spec = spec
        self._loop = loop
        self._turned = time.monotonic()
        self._since = self._turned
        self._current: object = None
        self._held: tuple[Doing, ...] = ()
        self._main = threading.get_ident()
        self._sessions: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()

    def start(self) -> None:
        self._loop.set_task_factory(self._task)
        self._turn()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def _turn(self) -> None:
        self._turned = time.monotonic()
        self._loop.call_later(LOOK_SECONDS, self._turn)

    def _run(self) -> None:
        """Waits for the interval to pass, until the loop is closed."""
        pause = threading.Event()
        while not self._loop.is_closed():
            seconds = self._stands(time.monotonic(), asyncio.current_task(self._loop))
            self._held = self._holds(seconds)
            if seconds > BLOCKED_SECONDS:
                self._tell(seconds)
                pause.wait(BLOCKED_SECONDS)
            else:
                pause.wait(LOOK_SECONDS)

    def held(self) -> tuple[Doing, ...]:
        """The agent that blocks the loop, if one does. The rollout process judges it. The launcher
        finds a loop that something else blocks.
        """
        return self._held

    def _holds(self, seconds: float) -> tuple[Doing, ...]:
        session_id = self._culprit() if seconds > BLOCKED_SECONDS else None
        if session_id is None:
            return ()
        what = f"is blocked by the agent of {session_id}"
        return (Doing(what, time.monotonic() - seconds, holds_loop=True),)

    def _stands(self, now: float, current: object) -> float:
        """The seconds that the loop has been in one step of one task. On a busy machine a turn of
        the loop may take long, with a hundred agents that each take a moment: no agent is at fault
        then, and the next turn comes.
        """
        if current is not self._current:
            self._current = current
            self._since = now
        return now - max(self._turned, self._since)

    def _tell(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._main)  # pyright: ignore[reportPrivateUsage] (documented, and there is no other way)
        where = "" if frame is None else _where(frame)
        if seconds < 2 * BLOCKED_SECONDS and frame is not None:  # once for each time it is blocked
            stack = "".join(traceback.format_stack(frame))
            _log.warning("the event loop is blocked since %.1f s:\n%s", seconds, stack)
        said = wire.LoopBlocked(self._spec.name, self._culprit(), where, seconds)
        address = urlsplit(self._spec.url)
        connection = http.client.HTTPConnection(
            address.hostname or "127.0.0.1", address.port, timeout=5
        )
        try:
            headers = {"Authorization": f"Bearer {self._spec.token}"}
            connection.request("POST", wire.BLOCKED_PATH, wire.encode(said), headers)
            connection.getresponse().read()
        except OSError as error:
            _log.warning("telling that the event loop is blocked: %r", error)
        finally:
            connection.close()

    def _culprit(self) -> str | None:
        """Returns the session whose agent is on the loop's stack."""
        current = asyncio.current_task(self._loop)
        return None if current is None else self._sessions.get(current)

    def _task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any
    ) -> asyncio.Task[Any]:
        """The loop's task factory: it remembers to which session a task belongs."""
        task = asyncio.Task(coro, loop=loop, **options)
        session_id = _running.get(None)
        if session_id is not None:
            self._sessions[task] = session_id
        return task


def _where(frame: FrameType) -> str:
    """The innermost call that is in no library, as file, line and function."""
    stack = traceback.extract_stack(frame)
    library = asyncio.__file__.rpartition("/asyncio/")[0]
    last = stack[-1]
    for entry in reversed(stack):
        is_library = entry.filename.startswith((library, "<"))
        if not is_library and "site-packages" not in entry.filename:
            last = entry
            break
    return f"{last.name} ({last.filename}:{last.lineno})"
