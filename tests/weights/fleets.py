"""A fleet and an observer that only remember, and engines with the faults that the scripted one lacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import get_args

import msgspec

from midflight.ports import Engine
from midflight.testing.scripted import CAPABLE, Call, ScriptedEngine
from midflight.types import Attestation, Chunk, GenerateRequest, PauseMode, SamplingParams, Version, WeightManifest
from midflight.types.facts import Fact, WeightsCommitted
from midflight.weights.manifest import check_extents

LONG = GenerateRequest("long", (1, 2), 2, SamplingParams(max_tokens=100, ignore_eos=True))


async def drained(chunks: AsyncIterator[Chunk]) -> None:
    """Waits for the end of an answer."""
    async for _ in chunks:
        pass


def freeze(engine: ScriptedEngine) -> None:
    """As SIGSTOP does: it answers nothing any more, and no connection to it breaks."""
    engine.stall()
    for call in get_args(Call):
        for _ in range(1000):
            engine.hang_next(call)


def sent(manifest: WeightManifest) -> WeightManifest:
    """A manifest as an engine gets it: through JSON, and refused where it makes no sense."""
    found = msgspec.json.decode(msgspec.json.encode(manifest), type=WeightManifest)
    check_extents(found)
    return found


def manifest(version: Version) -> WeightManifest:
    return WeightManifest(version, f"print-{version}", "file", "nowhere", ())


class RecordingFleet:
    """Implements `ports.EngineFleet` without routing anything."""

    def __init__(self, *engines: ScriptedEngine) -> None:
        self._engines = engines
        self.versions: dict[str, Version] = {e.name: e.served.version for e in engines}
        self.in_quarantine: dict[str, BaseException] = {}
        self.holds: set[tuple[str, str]] = set()
        self.reserved_engine: str | None = None
        self.log: list[str] = []

    def engines(self) -> tuple[Engine, ...]:
        return self._engines

    def hold(self, engine: str, owner: str) -> None:
        self.holds.add((engine, owner))
        self.log.append(f"hold {engine}")

    def release(self, engine: str, owner: str) -> None:
        self.holds.discard((engine, owner))
        self.log.append(f"release {engine}")

    def served(self, engine: str, version: Version) -> None:
        self.versions[engine] = version
        self.in_quarantine.pop(engine, None)
        self.log.append(f"served {engine} {version}")

    def quarantine(self, engine: str, error: BaseException) -> None:
        self.in_quarantine[engine] = error
        self.log.append(f"quarantine {engine}")

    def served_version(self) -> Version:
        return min((v for e, v in self.versions.items() if e not in self.in_quarantine), default=0)

    def reserved(self) -> str | None:
        return self.reserved_engine

    def check_whole(self) -> None:
        """I7: every engine runs on one whole version, the one the fleet knows of, or is in quarantine; and no hold is left."""
        assert not self.holds
        for engine in self._engines:
            if engine.name in self.in_quarantine:
                continue
            assert engine.paused is None, f"{engine.name} is paused for ever"
            version = engine.served.version
            assert engine.served == Attestation(version, f"print-{version}" if version else "initial")
            assert self.versions[engine.name] == version


class Commits:
    """Keeps the commits, and no other fact."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Version]] = []
        self.seconds: list[tuple[float, float]] = []

    def apply(self, fact: Fact) -> None:
        if isinstance(fact, WeightsCommitted):
            self.seen.append((fact.engine, fact.version))
            self.seconds.append((fact.stage_seconds, fact.pause_seconds))


class WrongVersionEngine(ScriptedEngine):
    """Goes on serving its old weights and says so."""

    async def commit(self, version: Version) -> Attestation:
        await super().commit(version)
        return Attestation(version - 1, "print-0")


class PausedLoadingEngine(ScriptedEngine):
    """Takes weights only while it is paused, as an engine without a second buffer does."""

    def __init__(self, name: str) -> None:
        super().__init__(name, capabilities=replace(CAPABLE, stages_weights=False))

    async def stage(self, manifest: WeightManifest) -> None:
        assert self.paused is not None, "weights were loaded while requests ran"
        self._staged = manifest


class LateTokensEngine(ScriptedEngine):
    """Its last tokens come while its pause is under way, which waits for them."""

    num_late = 0

    async def pause(self, mode: PauseMode) -> None:
        before = (await self.health()).num_tokens
        await asyncio.sleep(0.1)
        await super().pause(mode)
        self.num_late = (await self.health()).num_tokens - before


def only(*modes: PauseMode, **changes: object) -> ScriptedEngine:
    return ScriptedEngine("a", capabilities=replace(CAPABLE, pause_modes=frozenset(modes), **changes))
