"""How an agent is run: with which client, on which thread, and on a task of its own. `AgentHost` is
where a rollout has that done.
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
from midflight.environments.scoring import Unjudged
from midflight.errors import AgentFailed, ConfigError, EnvironmentFailed, UntrackedUnavailable
from midflight.ports import SessionHandle
from midflight.types import Result, Task

if TYPE_CHECKING:
    from httpx2 import AsyncBaseTransport as Transport
    from openai import AsyncOpenAI, OpenAI

    from midflight.environments.clients import Beside, Client, PlainClient


class Environment(Protocol):
    """What a rollout runs: a coroutine function or a plain one. The result is checked by
    `checked_result`, so its type is anything.
    """

    def __call__(self, task: Task, client: Any, /) -> Any: ...


class AgentHost(Protocol):
    async def run(self, task: Task, session: SessionHandle) -> object:
        """Runs an agent on its own copy of the task. Waits for what it returns, which is not
        checked yet; raises what it raises. Ended by the agent, or by cancellation, after which
        nothing of it is heard any more."""
        ...

    async def judge(
        self, task: Task, attempts: Sequence[Unjudged], *, name: str
    ) -> Sequence[Result]:
        """Scores attempts of one group that `run` returned, under a name in the place of a
        session's. Waits for the functions that do it; raises what they raise."""
        ...

    def excused(self, session_id: str) -> float:
        """Seconds so far that were not the agent's: it had no place to run, or no processor."""
        ...

    def tool_seconds(self, session_id: str) -> float:
        """Seconds so far in which it ran tools that have limits of their own, as far as these
        go.
        """
        ...


class AgentsHere:
    """Implements `AgentHost` on the event loop of this process; a plain function gets a thread of
    its own for each rollout.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        client_for: Callable[[SessionHandle], AsyncOpenAI],
        plain_client_for: Callable[[SessionHandle], OpenAI],
    ) -> None:
        """Both make the client of a session; the caller owns and closes their connections."""
        self._environment = environment
        self._client_for = client_for
        self._plain_client_for = plain_client_for
        self._is_async = is_async(environment)

    async def run(self, task: Task, session: SessionHandle) -> object:
        own = replace(task, data=copy.deepcopy(task.data))
        client = self._client_for(session) if self._is_async else self._plain_client_for(session)
        work = functools.partial(self._environment, own, client)
        found = await (work() if self._is_async else in_thread(work))
        # none where somebody else made the client
        beside: Beside | None = getattr(client, "beside", None)
        if beside is not None and beside.trouble:
            raise UntrackedUnavailable(
                f"the agent went on without what it had asked: {beside.trouble}"
            )
        return found

    async def judge(
        self, task: Task, attempts: Sequence[Unjudged], *, name: str
    ) -> Sequence[Result]:
        raise EnvironmentFailed(
            "nothing here scores groups; name a function in [[environment.rewards]]."
        )

    def excused(self, session_id: str) -> float:
        """What the environment itself says, if it does."""
        said: Callable[[str], float] | None = getattr(self._environment, "excused_seconds", None)
        return 0.0 if said is None else said(session_id)

    def tool_seconds(self, session_id: str) -> float:
        """An agent's own tools are its own time."""
        del session_id
        return 0.0


def is_async(environment: Environment) -> bool:
    """Whether it is to be awaited; else it is a plain function."""
    return inspect.iscoroutinefunction(environment) or inspect.iscoroutinefunction(
        getattr(environment, "__call__", None)  # noqa: B004
    )


async def in_thread(work: Callable[[], object]) -> object:
    """Waits for a thread of its own, which ends no process that ends before it. After a
    cancellation nobody hears of it any more.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[object] = loop.create_future()

    def tell(value: object, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(value) if error is None else done.set_exception(error)

    def run() -> None:
        value = None
        error = None
        try:
            value = work()
        except Exception as failure:
            error = (
                AgentFailed(f"StopIteration: {failure}")
                if isinstance(failure, StopIteration)
                else failure
            )
        except BaseException as failure:  # it would end the loop
            error = AgentFailed(f"{type(failure).__name__}: {failure}")
        with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
            loop.call_soon_threadsafe(tell, value, error)

    context = contextvars.copy_context()  # whose code it is
    threading.Thread(target=context.run, args=(run,), name="agent", daemon=True).start()
    return await done


# --- Clients --------------------------------------------------------------------------------------


LOGGERS = ("httpx", "httpx2", "openai._base_client")
"""Loggers that write the address of every request once logging is on. The address of a session
holds its secret.
"""
_SECRET = re.compile(r"(/s/[^/.\s]+\.)[^/\s]+")


def without_secrets(text: str) -> str:
    """`...` in place of the secret in the address of a session: messages name sessions by their id
    only.
    """
    return _SECRET.sub(r"\1...", text)


class HideSecrets(logging.Filter):
    """For logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if (hidden := without_secrets(message)) != message:
            record.msg = hidden
            record.args = ()
        return True


_hide = HideSecrets()


def hide_secrets() -> None:
    """Hides them in the logs of the clients' libraries from now on. May be called again."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_hide)


class SharedClients:
    """Makes the client of a session; an async context manager that closes the pools. Clients need
    not be closed, and an agent that closes its own takes no other along: that does nothing, and a
    pool that was closed all the same is made anew.

    Proxies of the surroundings are not used: the gateway is ours. Requests have no deadline of
    their own, because a paused gateway may keep them waiting; the rollout has one. There may be as
    many connections as rollouts, which are bounded.
    """

    def __init__(
        self,
        *,
        transport: Transport | None = None,
        untracked: UntrackedSection = UntrackedSection(),
        public_url: str = "",
    ) -> None:
        """`transport` takes the place of the network, for agents on the event loop of the gateway's
        own process. `untracked`: where what is not trained is answered; what is outside the run is
        reached over the network, and by proxies. `public_url`: `gateway.public_url`."""
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
        client.beside = self._sdk.clients.Beside(
            self._untracked, lambda: self._beyond(is_async=True), public_url=self._public_url
        )
        return client

    def plain_client_for(self, session: SessionHandle) -> PlainClient:
        """For an agent in a thread of its own. It goes over the network, also where `transport` is
        given.
        """
        if self._plain is None or self._plain.is_closed():
            self._plain = self._sdk.plain_client()
        client = self._plain.with_options(base_url=session.base_url, api_key=session.api_key)
        client.beside = self._sdk.clients.Beside(
            self._untracked, lambda: self._beyond(is_async=False), public_url=self._public_url
        )
        return client

    def _beyond(self, *, is_async: bool) -> Any:
        """Connections out of the run."""
        if is_async not in self._outside or self._outside[is_async].is_closed:
            made = (
                self._sdk.openai.DefaultAsyncHttpxClient
                if is_async
                else self._sdk.openai.DefaultHttpxClient
            )
            self._outside[is_async] = made(limits=self._sdk.limits)
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
        """Waits until the connections are closed; they end by themselves."""
        await self._sdk.openai.AsyncOpenAI.close(self._client)
        if self._plain is not None:
            self._sdk.openai.OpenAI.close(self._plain)
        if (outside := self._outside.get(True)) is not None:
            await outside.aclose()
        if (plain := self._outside.get(False)) is not None:
            plain.close()


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
        # The SDK looks whether this is loaded, and takes for whole what a thread is still
        # importing.
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
