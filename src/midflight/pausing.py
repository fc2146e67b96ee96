"""Pausing an engine, for an operator or for a commit: in which mode, and with proof that it really made no token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager

from midflight.errors import NotSupported, PauseIgnored
from midflight.ports import Engine
from midflight.types import Capabilities, EngineHealth, PauseMode

BY_COST = (PauseMode.KEEP, PauseMode.RECOMPUTE, PauseMode.ABORT, PauseMode.DRAIN)
"""All modes, first the one that costs an engine least."""


def pause_mode(
    engine: str, capabilities: Capabilities, wanted: PauseMode | None, *, otherwise: Iterable[PauseMode] = BY_COST, remedy: str
) -> PauseMode:
    """The mode wanted, else the first of `otherwise` that the engine has. `NotSupported` names what it has, and ends with `remedy`."""
    has = capabilities.pause_modes
    for mode in otherwise if wanted is None else (wanted,):
        if mode in has:
            return mode
    listed = ", ".join(sorted(has)) or "no pause at all"
    raise NotSupported(f"pausing engine {engine!r} by {'any mode' if wanted is None else wanted.value}: it can {listed}; {remedy}.")


@asynccontextmanager
async def verified_pause(engine: Engine, mode: PauseMode) -> AsyncGenerator[EngineHealth]:
    """Pauses the engine, and gives its reading; `PauseIgnored` after the block if it made tokens during it.

    `pause` returns when no token is on its way any more, so the first count is final and the second must equal it. Waits for the
    engine; the caller has the deadline. The caller also ends the pause, by `resume` or by quarantine (I7, I9).
    """
    await engine.pause(mode)
    first = await engine.health()
    loop = asyncio.get_running_loop()
    began = loop.time()
    yield first
    made = (await engine.health()).num_tokens - first.num_tokens
    if made > 0:
        raise PauseIgnored(
            f"pausing engine {engine.name!r}: it made {made} tokens while paused, in {loop.time() - began:.3g} s. "
            "Restart it, or pause it in another mode."
        )
