"""Runs an agent with its client, on a thread if it needs one, and on its own copy of the task. A
rollout has an `AgentHost` do that.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import functools
import inspect
import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from midflight.config.agents import UntrackedSection
from midflight.environments.result_checks import UnscoredRollout
from midflight.errors import AgentFailed, ConfigError, EnvironmentFailed, UntrackedUnavailable
from midflight.ports import SessionHandle
from midflight.types import Result, Task

if TYPE_CHECKING:
    from httpx2 import AsyncBaseTransport as Transport
    from openai import AsyncOpenAI, OpenAI

    from midflight.environments.clients import Client, PlainClient, RolloutClientState


class Environment(Protocol):
    """The function that a rollout runs: a coroutine function or a plain one. `checked_result`
    checks the result, which may therefore have any type.
    """

    def __call__(self, task: Task, client: Any, /) -> Any: ...


class AgentHost(Protocol):
    """Runs agents, in this process or in others."""

    async def run(self, task: Task, session: SessionHandle) -> object:
        """Runs an agent on its own copy of the task. Waits for its return value, which is not
        checked yet, and raises the agent's errors. It is ended by the agent, or by cancellation,
        after which nothing comes from the agent any more.
        """
        ...

    async def judge(
        self, task: Task, attempts: Sequence[UnscoredRollout], *, name: str
    ) -> Sequence[Result]:
        """Scores attempts of one group that `run` returned, under a name in the place of a session.
        Waits for the reward functions, and raises their errors.
        """
        ...

    def excused(self, session_id: str) -> float:
        """Seconds so far that the agent could not use: it had no place to run, or no processor."""
        ...

    def tool_seconds(self, session_id: str) -> float:
        """Seconds so far in which the agent ran tools that have limits of their own, up to these
        limits.
        """
        ...


class LocalAgents:
    """Implements `AgentHost` on the event loop of this process. A plain function gets a thread of
    its own for each rollout.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        client_for: Callable[[SessionHandle], AsyncOpenAI],
        plain_client_for: Callable[[SessionHandle], OpenAI],
    ) -> None:
        """Both functions make the client of a session. The caller owns their connections and closes
        them.
        """
        self._environment = environment
        self._client_for = client_for
        self._plain_client_for = plain_client_for
        self._is_async = is_async(environment)

    async def run(self, task: Task, session: SessionHandle) -> object:
        own = replace(task, data=copy.deepcopy(task.data))
        if self._is_async:
            client = self._client_for(session)
            found = await self._environment(own, client)
        else:
            client = self._plain_client_for(session)
            found = await in_thread(functools.partial(self._environment, own, client))
        # A client that was not made here has no such attribute.
        beside: RolloutClientState | None = getattr(client, "beside", None)
        if beside is not None and beside.trouble:
            raise UntrackedUnavailable(
                f"the agent went on without what it had asked: {beside.trouble}"
            )
        return found

    async def judge(
        self, task: Task, attempts: Sequence[UnscoredRollout], *, name: str
    ) -> Sequence[Result]:
        raise EnvironmentFailed(
            "nothing here scores groups; name a function in [[environment.rewards]]."
        )

    def excused(self, session_id: str) -> float:
        """The seconds that the environment itself excuses, if it does."""
        said: Callable[[str], float] | None = getattr(self._environment, "excused_seconds", None)
        return 0.0 if said is None else said(session_id)

    def tool_seconds(self, session_id: str) -> float:
        """The tools of an agent of one's own count as its own time."""
        del session_id
        return 0.0


def is_async(environment: Environment) -> bool:
    """True if the environment has to be awaited. Otherwise it is a plain function."""
    call = getattr(environment, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(environment) or inspect.iscoroutinefunction(call)


async def in_thread(work: Callable[[], object]) -> object:
    """Runs the work in a thread of its own, and waits for it. The thread does not keep a process
    alive. After a cancellation its result is ignored.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[object] = loop.create_future()

    def tell(value: object, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def run() -> None:
        value = None
        error = None
        try:
            value = work()
        except StopIteration as failure:  # a future takes no such error
            error = AgentFailed(f"StopIteration: {failure}")
        except Exception as failure:
            error = failure
        except BaseException as failure:  # it would end the loop
            error = AgentFailed(f"{type(failure).__name__}: {failure}")
        with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
            loop.call_soon_threadsafe(tell, value, error)

    context = contextvars.copy_context()  # it tells which rollout the code belongs to
    threading.Thread(target=context.run, args=(run,), name="agent", daemon=True).start()
    return await done


# --- Clients --------------------------------------------------------------------------------------


LOGGERS = ("httpx", "httpx2", "openai._base_client")
"""Loggers that write the address of every request once logging is on. The address of a session
holds its secret.
"""
_SECRET = re.compile(r"(/s/[^/.\s]+\.)[^/\s]+")


def without_secrets(text: str) -> str:
    """The text with `...` in place of the secret in the address of a session: messages name
    sessions by their id only.
    """
    return _SECRET.sub(r"\1...", text)


class SecretFilter(logging.Filter):
    """Hides secrets in the records of a log."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        hidden = without_secrets(message)
        if hidden != message:
            record.msg = hidden
            record.args = ()
        return True


_hide = SecretFilter()


def hide_secrets() -> None:
    """Hides secrets in the logs of the clients' libraries from now on. It may be called again."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_hide)


class SharedClients:
    """Makes the client of a session. It is an async context manager that closes the pools. Clients
    need not be closed. An agent that closes its client does no harm to others: the call does
    nothing, and a pool that was closed all the same is made anew.

    Proxies that environment variables name are not used, because the gateway is ours. Requests have
    no deadline of their own, because a paused gateway may keep them waiting; the rollout has one.
    There may be as many connections as rollouts, which are bounded.
    """

    def __init__(
        self,
        *,
        transport: Transport | None = None,
        untracked: UntrackedSection = UntrackedSection(),
        public_url: str = "",
    ) -> None:
        """`transport` takes the place of the network, for agents on the event loop of the gateway's
        own process. `untracked` names the server for requests that are not trained on. Servers
        outside the run are reached over the network, and by proxies. `public_url` is
        `gateway.public_url`.
        """
        hide_secrets()
        self._sdk = _Sdk()
        self._public_url = public_url.rstrip("/")
        self._transport = transport
        self._untracked = untracked
        self._client = self._sdk.client(transport)
        self._plain: PlainClient | None = None
        self._outside: dict[bool, Any] = {}

    def client_for(self, session: SessionHandle) -> Client:
        if self._client.is_closed():
            self._client = self._sdk.client(self._transport)
        client = self._client.with_options(base_url=session.base_url, api_key=session.api_key)
        client.beside = self._sdk.clients.RolloutClientState(
            self._untracked, lambda: self._beyond(is_async=True), public_url=self._public_url
        )
        return client

    def plain_client_for(self, session: SessionHandle) -> PlainClient:
        """The client for an agent in a thread of its own. It goes over the network, even if
        `transport` is given.
        """
        if self._plain is None or self._plain.is_closed():
            self._plain = self._sdk.plain_client()
        client = self._plain.with_options(base_url=session.base_url, api_key=session.api_key)
        client.beside = self._sdk.clients.RolloutClientState(
            self._untracked, lambda: self._beyond(is_async=False), public_url=self._public_url
        )
        return client

    def _beyond(self, *, is_async: bool) -> Any:
        """Connections out of the run."""
        if is_async not in self._outside or self._outside[is_async].is_closed:
            openai = self._sdk.openai
            kind = openai.DefaultAsyncHttpxClient if is_async else openai.DefaultHttpxClient
            self._outside[is_async] = kind(limits=self._sdk.limits)
        return self._outside[is_async]

    async def __aenter__(self) -> SharedClients:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Waits until the connections are closed, which end by themselves."""
        await self._sdk.openai.AsyncOpenAI.close(self._client)
        if self._plain is not None:
            self._sdk.openai.OpenAI.close(self._plain)
        outside = self._outside.get(True)
        if outside is not None:
            await outside.aclose()
        plain_outside = self._outside.get(False)
        if plain_outside is not None:
            plain_outside.close()


class _Sdk:
    """The package `openai`, and our clients of it. Importing it takes a second."""

    def __init__(self) -> None:
        try:
            import openai
        except ImportError as error:
            raise ConfigError(
                "environments need the package openai; install it with: pip install "
                "'midflight[openai]'."
            ) from error
        # The SDK looks whether httpx2 is loaded, and would take it as complete while a thread is
        # still importing it.
        with contextlib.suppress(ImportError):
            import httpx2 as _  # noqa: F401
        from midflight.environments import clients

        self.openai = openai
        self.clients = clients
        self.limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
            max_connections=None, max_keepalive_connections=None
        )
        self._pool: dict[str, Any] = {"trust_env": False, "limits": self.limits}
        self._options: dict[str, Any] = {
            "base_url": "http://unused.invalid/v1",
            "api_key": "unused",
            "timeout": None,
        }

    def client(self, transport: Transport | None) -> Client:
        http_client = self.openai.DefaultAsyncHttpxClient(transport=transport, **self._pool)
        return self.clients.SessionClient(http_client=http_client, **self._options)

    def plain_client(self) -> PlainClient:
        return self.clients.PlainSessionClient(
            http_client=self.openai.DefaultHttpxClient(**self._pool), **self._options
        )
