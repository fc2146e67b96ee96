"""OpenAI clients for agents: one for each session, all on one pool of connections."""

from __future__ import annotations

import logging
import re
from types import TracebackType
from typing import TYPE_CHECKING

from midflight.errors import ConfigError
from midflight.ports import SessionHandle

if TYPE_CHECKING:
    from httpx2 import AsyncBaseTransport as Transport
    from openai import AsyncOpenAI

LOGGERS = ("httpx", "httpx2", "openai._base_client")
"""They log the address of every request once somebody turns logging on, and addresses of sessions hold their secrets."""
_SECRET = re.compile(r"(/s/[^/.\s]+\.)[^/\s]+")


class HideSecrets(logging.Filter):
    """Writes `...` for the secret in the address of a session: logs name sessions by their id only (G10)."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if (hidden := _SECRET.sub(r"\1...", message)) != message:
            record.msg, record.args = hidden, ()
        return True


_hide = HideSecrets()


def hide_secrets() -> None:
    """In the logs of the clients' libraries, from now on. Idempotent."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_hide)


class SharedClients:
    """Makes the client of a session; an async context manager that closes the pool. Until then clients cost nothing to drop.

    Proxies of the surroundings are not used: the gateway is ours. Requests have no deadline of their own, because a paused
    gateway may keep them waiting; the rollout has one. There may be as many connections as rollouts, which are bounded.
    """

    def __init__(self, *, transport: Transport | None = None) -> None:
        """`transport` takes the place of the network, for agents in the gateway's own process."""
        try:
            import openai
        except ImportError as error:
            raise ConfigError("environments need the package openai; install it with: pip install 'midflight[openai]'.") from error
        hide_secrets()
        limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_connections=None, max_keepalive_connections=None)
        pool = openai.DefaultAsyncHttpxClient(trust_env=False, limits=limits, transport=transport)
        self._template = openai.AsyncOpenAI(base_url="http://unused.invalid/v1", api_key="unused", http_client=pool, timeout=None)

    def client_for(self, session: SessionHandle) -> AsyncOpenAI:
        return self._template.with_options(base_url=session.base_url, api_key=session.api_key)

    async def __aenter__(self) -> SharedClients:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Waits until the connections are closed; they end by themselves."""
        await self._template.close()
