"""Engines that stand at addresses until they are asked to join, and a run that they may join; on virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from midflight.engines.introduction import About
from midflight.errors import EngineRefused, EngineUnavailable
from midflight.models.identity import ModelIdentity
from midflight.run.api.membership import EngineAddress
from midflight.run.rollout.members import Connections, JoinTerms, Members
from midflight.run.rollout.serving import Serving
from midflight.testing.scripted import ScriptedEngine
from midflight.types.facts import Record, record_nothing
from midflight.version import __version__

STALL_SECONDS = 10.0
"""After which one that has joined and is out of reach is forgotten."""


class Arriving(ScriptedEngine):
    """With the connection that a gateway has to it: when that is closed, its requests are cut off."""

    num_connected = 0

    @property
    def is_attached(self) -> bool:
        return not self._dead

    async def run(self) -> None:
        self.num_connected += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.die()

    async def connect(self, *, seconds: float) -> None:
        if self._dead:
            raise EngineUnavailable(f"{self.name} did not answer within {seconds:g} s")


def model_folder(folder: Path, **values: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "rope": {"theta": 10.0}, **values}))
    return folder


def at(url: str, *, token: str | None = None, again: bool = False) -> EngineAddress:
    return EngineAddress(url, token, again)


@dataclass
class Street:
    """Who stands at which address, and what it says of itself."""

    model: Path
    engines: dict[str, Arriving] = field(default_factory=dict[str, Arriving])
    says: dict[str, dict[str, object]] = field(default_factory=dict[str, dict[str, object]])
    """What an engine says otherwise than it should, by address."""
    seconds: float = 0.0
    """That an engine takes to say it."""
    shared: bool = True
    """Whether engines see the gateway's files."""
    num_asked: int = 0

    async def ask(self, address: EngineAddress, nonce: Path | None, weights: bool) -> About:
        self.num_asked += 1
        await asyncio.sleep(self.seconds)
        engine = self.engines.get(address.url)
        if engine is None or not engine.is_attached:
            raise EngineRefused(f"the engine at {address.url} did not answer.", param="url")
        about: dict[str, object] = {
            "process": str(id(engine)),
            "midflight": __version__,
            "capabilities": engine.capabilities,
            "version": engine.served.version,
            "model": ModelIdentity.of(self.model, weights=weights),
            "sees": nonce.read_text() if nonce is not None and self.shared else None,
        }
        return About(**{**about, **self.says.get(address.url, {})})  # type: ignore[arg-type]

    def connect(self, name: str, address: EngineAddress) -> Arriving:
        engine = self.engines[address.url]
        engine.name = name
        return engine


@dataclass
class Joinable:
    """The members of a serving side, with the street they come from."""

    members: Members
    connections: Connections
    street: Street

    @classmethod
    def of(
        cls,
        serving: Serving,
        first: Sequence[Arriving],
        folder: Path,
        *,
        record: Record = record_nothing,
        transport: str | None = None,
        drain_seconds: float = 5.0,
    ) -> Joinable:
        street, connections = Street(model_folder(folder / "model")), Connections(first)
        terms = JoinTerms(street.model, {}, transport, drain_seconds, STALL_SECONDS)
        known = {engine.name: (engine, at(f"http://first/{engine.name}")) for engine in first}
        members = Members(serving, connections, known, terms=terms, ask=street.ask, connect=street.connect, record=record)
        return cls(members, connections, street)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.connections.run())
            tasks.create_task(self.members.run())

    def states(self) -> dict[str, str]:
        return {member.name: member.state for member in self.members.members().engines}
