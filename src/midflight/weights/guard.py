"""The guard of I7: what is done to an engine is done within its time, or the engine is in quarantine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

from midflight.errors import EngineError, EngineUnavailable
from midflight.ports import Fleet


class Guard:
    """For one turn: `errors` says which engines fell out of it, and why."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.errors: dict[str, str] = {}

    @asynccontextmanager
    async def over(self, engine: str, deed: str, *, seconds: float, when_cancelled: bool = True) -> AsyncGenerator[asyncio.Timeout]:
        """The block runs to its end within `seconds`, or the engine is in quarantine and `errors` says why. Gives its deadline.

        The engine's error ends here. A cancellation goes on, with the engine, whose state is now unknown, behind quarantine.
        """
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                yield deadline
        except Exception as error:
            late = isinstance(error, TimeoutError) and deadline.expired()
            self._give_up(engine, EngineUnavailable(f"{deed}: not done within {seconds:g} s; restart the engine.") if late else error)
        except BaseException:
            if when_cancelled:
                self._give_up(engine, EngineError(f"{deed}: cancelled on the way; it rejoins at the current version."))
            raise

    def _give_up(self, engine: str, error: BaseException) -> None:
        self.errors[engine] = f"{type(error).__name__}: {error}"
        self._fleet.quarantine(engine, error)


@contextmanager
def standing(deadline: asyncio.Timeout) -> Generator[None]:
    """The deadline stands still within: nobody's time runs out by waiting for others."""
    clock, ends = asyncio.get_running_loop().time, deadline.when()
    assert ends is not None
    left = ends - clock()
    deadline.reschedule(None)
    yield
    deadline.reschedule(clock() + left)
