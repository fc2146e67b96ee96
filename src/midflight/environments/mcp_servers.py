"""Servers of tools that speak the Model Context Protocol. They are started or asked, and begun
again when they are lost.

A call that a server's death cuts off fails its rollout (I10), because it is not known whether the
call was made. A reply of the tool itself is an answer, even when it is an error.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `_Connection.run` (one for each connection) | nothing | its end | `close`; the server, when it does not come up |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import TYPE_CHECKING, cast

from midflight.config.agents import McpSection
from midflight.environments.tools import ToolMissed
from midflight.errors import ConfigError, EnvironmentFailed
from midflight.types import Json

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import Tool

_log = logging.getLogger(__name__)
CONNECTION_CLOSED = -32000
"""The protocol's own code for a connection that ended under a call."""
CLOSE_SECONDS = 5.0
"""The seconds that a server may take to end after its connection is closed."""


class McpServerLost(EnvironmentFailed):
    """A server of tools did not come up, or was lost in a call."""


class McpTool:
    """A tool of a server. Implements `ToolSource`."""

    def __init__(self, found: Tool, server: McpServer) -> None:
        self.name = found.name
        self._server = server
        parameters = cast("dict[str, Json]", dict(found.input_schema))
        function: dict[str, Json] = {
            "name": found.name,
            "description": found.description or "",
            "parameters": parameters,
        }
        self.schema: Mapping[str, Json] = {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, Json]) -> str:
        return await self._server.call(self.name, arguments)


class _Connection:
    """One connection, which one task opens and closes."""

    def __init__(self, section: McpSection) -> None:
        self._section = section
        loop = asyncio.get_running_loop()
        self.client: asyncio.Future[Client] = loop.create_future()
        self._over = asyncio.Event()
        self.ended = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Waits to be closed. It is ended also by a server that does not come up, which `client`
        reports.
        """
        try:
            async with _client(self._section) as client:
                self.client.set_result(client)
                await self._over.wait()
        except Exception as error:
            if not self.client.done():
                self.client.set_exception(error)
            else:
                _log.warning("%s: closing its connection: %r", self._section.label, error)
        finally:
            self.client.cancel()
            self.ended.set()

    def close(self) -> None:
        self._over.set()
        if not self.client.done() and self.task is not None:
            self.task.cancel()  # it has not come up


def _client(section: McpSection) -> Client:
    try:
        from mcp import Client, StdioServerParameters
    except ImportError as error:
        raise ConfigError(
            "environment.mcp needs the package mcp; install it with: pip install 'midflight[mcp]'."
        ) from error
    if section.url:
        return Client(section.url)
    command, *arguments = section.command
    return Client(StdioServerParameters(command=command, args=arguments, env=section.env or None))


class McpServer:
    """A server that is begun again when it is lost. It is used between `open` and `close`."""

    def __init__(self, section: McpSection, tasks: asyncio.TaskGroup) -> None:
        self._section = section
        self._tasks = tasks
        self._connection: _Connection | None = None
        self._opening = asyncio.Lock()
        self.tools: list[McpTool] = []

    async def open(self) -> None:
        """Waits until the server is there and has listed its tools, for `start_seconds` at most.
        Raises `McpServerLost` with the reason if it is not there.
        """
        async with self._opening:
            if self._connection is not None:
                return
            connection = _Connection(self._section)
            connection.task = self._tasks.create_task(
                connection.run(), name=f"connection to {self._section.label}"
            )
            try:
                async with asyncio.timeout(self._section.start_seconds):
                    client = await asyncio.shield(connection.client)
                    self.tools = [McpTool(found, self) for found in await _listed(client)]
            except ConfigError:
                raise
            except Exception as error:
                connection.close()
                raise McpServerLost(
                    f"starting the tools of {self._section.label}: {_said(error)}; run "
                    f"{_how(self._section)} by hand, or raise its start_seconds."
                ) from error
            self._connection = connection

    async def call(self, name: str, arguments: Mapping[str, Json]) -> str:
        """Waits for the answer, until its caller's deadline. A server that is lost is begun again
        for the next call.
        """
        from mcp import MCPError

        await self.open()
        connection = self._connection
        assert connection is not None
        try:
            found = await connection.client.result().call_tool(name, dict(arguments))
        except MCPError as error:
            if error.error.code != CONNECTION_CLOSED:
                raise ToolMissed(str(error)) from None
            raise self._lost(connection, error) from error
        except Exception as error:
            raise self._lost(connection, error) from error
        text = "\n".join(
            getattr(part, "text", None) or part.model_dump_json(exclude_none=True)
            for part in found.content
        )
        if found.is_error:
            raise ToolMissed(text)
        return text

    def _lost(self, connection: _Connection, error: Exception) -> McpServerLost:
        if self._connection is connection:
            self._connection = None
            connection.close()
            _log.warning(
                "the tools of %s are lost (%s) and will be begun again",
                self._section.label,
                _said(error),
            )
        return McpServerLost(
            f"calling a tool of {self._section.label}: the server was lost ({_said(error)}); look "
            "at what it wrote in this log."
        )

    async def close(self) -> None:
        """Waits until the connection has ended, for `CLOSE_SECONDS` at most."""
        connection = self._connection
        self._connection = None
        if connection is not None:
            connection.close()
            async with asyncio.timeout(CLOSE_SECONDS):
                await connection.ended.wait()


async def _listed(client: Client) -> list[Tool]:
    """The tools of a server, from all pages."""
    page = await client.list_tools()
    found = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        found += page.tools
    return found


def _said(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _how(section: McpSection) -> str:
    if section.command:
        return f"`{' '.join(section.command)}`"
    return f"a client against {section.url}"


class McpServers:
    """All servers of a worker. The servers of the run are open within `async with`."""

    def __init__(self, sections: Sequence[McpSection]) -> None:
        self._sections = sections
        self._tasks = asyncio.TaskGroup()
        self._of_run: list[McpServer] = []
        self.start_seconds = sum([section.start_seconds for section in sections], 0.0)
        """The seconds that all of them may take to come up, one after another."""

    async def __aenter__(self) -> McpServers:
        """Makes the servers of the run. They come up when the first rollout needs them. One that
        does not come up is tried again by the next rollout.
        """
        if self._sections:
            await self._tasks.__aenter__()
        self._of_run = [
            McpServer(section, self._tasks) for section in self._sections if section.per == "run"
        ]
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._sections:
            for server in self._of_run:
                await _closed(server)
            # Its tasks have ended, and an error of the caller does not concern them.
            await self._tasks.__aexit__(None, None, None)

    @asynccontextmanager
    async def of_rollout(self) -> AsyncGenerator[list[McpTool]]:
        """The tools of a rollout. Waits for servers that are not there yet. The rollout's own
        servers end with it.
        """
        own = [
            McpServer(section, self._tasks)
            for section in self._sections
            if section.per == "rollout"
        ]
        servers = self._of_run + own
        try:
            for server in servers:
                await server.open()
            yield list(chain.from_iterable(server.tools for server in servers))
        finally:
            for server in own:
                await _closed(server)


async def _closed(server: McpServer) -> None:
    try:
        await server.close()
    except TimeoutError:
        _log.warning("a server of tools did not end within %g s", CLOSE_SECONDS)


async def check_servers(sections: Sequence[McpSection]) -> list[str]:
    """The names of the servers' tools. Raises `ConfigError` for a server that does not come up, or
    for a name that two tools have.
    """
    per_rollout = [section.model_copy(update={"per": "rollout"}) for section in sections]
    names: list[str] = []
    async with McpServers(per_rollout) as servers:
        try:
            async with servers.of_rollout() as tools:
                for tool in tools:
                    if tool.name in names:
                        raise ConfigError(
                            f"environment.mcp: two servers have a tool {tool.name!r}; leave one of "
                            "them out."
                        )
                    names.append(tool.name)
        except McpServerLost as error:
            raise ConfigError(f"environment.mcp: {error}") from error
    return names
