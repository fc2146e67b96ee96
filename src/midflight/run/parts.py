"""Inside a process only the main part ends by itself; its end cancels the services, and the failure of any ends all."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from midflight.errors import MidflightError

T = TypeVar("T")


class PartLost(MidflightError):
    """Another process of the run did not answer. Why it ended is its own to say; the ring may start again."""


class ServerLost(MidflightError):
    """A server beside us ended, or did not come up in time: started again, it may serve. Its message has the end of its log."""


async def serve_while(main: Coroutine[Any, Any, T], *services: Coroutine[Any, Any, None]) -> T:
    """Runs `services` for as long as `main` runs. A service that ends early is no error; one that raises ends `main`."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(service) for service in services]
        try:
            return await main
        finally:
            for task in running:
                task.cancel()
