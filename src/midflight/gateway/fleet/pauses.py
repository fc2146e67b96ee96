"""Pauses of an engine that several owners share."""

import asyncio
from collections.abc import AsyncIterator

from midflight.errors import EngineUnavailable
from midflight.ports import Engine
from midflight.types import (
    Attestation,
    Capabilities,
    Chunk,
    EngineHealth,
    GenerateRequest,
    PauseMode,
    Version,
    WeightManifest,
)


class SharedPause:
    """Counts the owners of an engine's pause. The mode of the first stays in force until the last
    has resumed.

    Without it an operator's `continue_generation` would start an engine in the middle of a commit,
    and a commit's resume would end an operator's pause.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._owners: set[str] = set()
        self._mode: PauseMode | None = None
        self._turn = asyncio.Lock()
        self._is_detached = False

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(sorted(self._owners))

    async def pause(self, owner: str, mode: PauseMode) -> None:
        """Pauses the engine for `owner` too. Waits for a pause or resume under way and for the
        engine.
        """
        async with self._turn:
            self._owners.add(owner)
            if self._mode is None:
                await self.engine.pause(mode)
                self._mode = mode

    async def renew(self) -> None:
        """Repeats the pause to the engine if one is in force. An engine may end a pause by itself
        if it is not repeated.
        """
        if self._mode is not None and not self._turn.locked():
            async with self._turn:
                await self.engine.pause(self._mode)

    async def resume(self, owner: str) -> None:
        """Ends this owner's pause. The engine resumes if no other owner pauses it. Idempotent.
        Waits as `pause` does. Raises `EngineUnavailable` if the engine was detached meanwhile.
        """
        async with self._turn:
            self._owners.discard(owner)
            if not self._owners:
                self._mode = None
                await self.engine.resume()
        if self._is_detached:
            raise EngineUnavailable(f"engine {self.engine.name} was detached")

    def detach(self) -> None:
        """The engine was detached. From now on `resume` raises, because another engine may have the
        name.
        """
        self._is_detached = True
        self.abandon()

    def abandon(self) -> None:
        """Ends every pause of the engine, because it is in quarantine. Before it is readmitted it
        must be made to run again.
        """
        self._owners.clear()
        self._mode = None


class OwnedEngine:
    """An engine as one owner sees it: `ports.Engine`, with pauses counted by owner."""

    def __init__(self, shared: SharedPause, owner: str) -> None:
        self._shared = shared
        self._engine = shared.engine
        self._owner = owner

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        return self._engine.generate(request)

    async def abort(self, request_id: str | None) -> None:
        await self._engine.abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        await self._shared.pause(self._owner, mode)

    async def resume(self) -> None:
        await self._shared.resume(self._owner)

    async def stage(self, manifest: WeightManifest) -> None:
        await self._engine.stage(manifest)

    async def commit(self, version: Version) -> Attestation:
        return await self._engine.commit(version)

    async def health(self) -> EngineHealth:
        return await self._engine.health()

    async def renew(self) -> None:
        """Repeats a pause that is in force. This is not part of the port."""
        await self._shared.renew()
