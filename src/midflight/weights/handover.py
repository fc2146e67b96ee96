"""Bringing a version to the engines: stage in the background, commit engine by engine, and never half of it (I7)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from midflight.errors import EngineError, EngineUnavailable, PauseIgnored, WeightsCorrupt
from midflight.ports import Engine, Fleet, Observer
from midflight.types import Attestation, PauseMode, Version, WeightManifest
from midflight.weights.modes import mode_for, swaps_between_steps
from midflight.weights.turnstile import Turnstile

OWNER = "handover"
"""The name of its holds."""


@dataclass(frozen=True, slots=True)
class HandoverReport:
    """What became of a published version."""

    version: Version
    served_by: tuple[str, ...] = ()
    """Engines that attested it."""
    quarantined: Mapping[str, str] = field(default_factory=dict[str, str])
    """Engines that did not, and why. They rejoin at this version, or a later one."""
    superseded_by: Version | None = None
    """A newer version took its place before it was staged anywhere; nothing else was done."""
    releasable: tuple[Version, ...] = ()
    """Versions no engine will fetch any more: the publisher's slots may be released."""
    stage_seconds: float = 0.0
    """From the start until the last engine had staged or failed."""
    commit_seconds: float = 0.0
    """All commits, one engine after the other."""


class Handover:
    """Owns the current version. One handover at a time; engines are committed one by one, so that the others keep generating.

    Whatever fails, times out or is cancelled, at whatever point, each engine ends in one of two ways (I7, DECISIONS 18): it runs on
    weights that it attested whole, or it is in quarantine, where `rejoin` or the next `publish` fetches it. The fleet tells
    the observer of quarantines and rejoins; commits are told here.
    """

    def __init__(
        self, fleet: Fleet, *, pause_mode: PauseMode | Literal["auto"], stage_seconds: float, commit_seconds: float, observer: Observer
    ) -> None:
        """`stage_seconds` and `commit_seconds` are deadlines for one engine; the commit's includes its pause."""
        self._fleet, self._observer = fleet, observer
        self._pause_mode: PauseMode | Literal["auto"] = pause_mode
        self._stage_seconds, self._commit_seconds = stage_seconds, commit_seconds
        self._turnstile = Turnstile()
        self._current: WeightManifest | None = None
        self._fetchable: set[Version] = set()
        """Versions that were published and not yet reported as releasable."""

    @property
    def current(self) -> WeightManifest | None:
        """The version that engines serve or rejoin at; `None` while they serve what they started with."""
        return self._current

    async def publish(self, manifest: WeightManifest) -> HandoverReport:
        """Brings the version to every attached engine, those in quarantine too.

        Waits for the handover under way, which ends by its deadlines; of the versions that wait, only the newest goes on and
        the others' reports say `superseded_by` at once. May be repeated with the same manifest. `NotSupported` when an engine
        lacks the configured pause mode; then nothing was begun.
        """
        for engine in self._fleet.engines():
            self._mode(engine)
        ticket = self._turnstile.for_version(manifest)
        self._fetchable.add(manifest.version)
        try:
            superseded_by = await ticket.admitted
            if superseded_by is not None:
                self._fetchable.discard(manifest.version)
                return HandoverReport(manifest.version, superseded_by=superseded_by, releasable=(manifest.version,))
            return await self._hand_over(manifest)
        finally:
            self._turnstile.leave(ticket)

    async def rejoin(self, engine: str) -> bool:
        """Brings an engine in quarantine to the current version; says whether it is routable now.

        Waits for the handover under way. Before the first publication the engine must still serve what the fleet serves.
        """
        ticket = self._turnstile.for_rejoin(engine)
        if ticket is None:
            return False
        try:
            await ticket.admitted
            found = next((e for e in self._fleet.engines() if e.name == engine), None)
            return found is not None and await self._readmit(found)
        finally:
            self._turnstile.leave(ticket)

    # --- A turn ------------------------------------------------------------------------------------------------------

    async def _hand_over(self, manifest: WeightManifest) -> HandoverReport:
        clock = asyncio.get_running_loop().time
        errors: dict[str, str] = {}
        started = clock()
        staged = await self._stage_all(manifest, errors)
        committing = clock()
        self._current = manifest
        served = [e.name for e, seconds in staged if await self._commit(e, manifest, seconds, errors)]
        return HandoverReport(
            version=manifest.version,
            served_by=tuple(served),
            quarantined=errors,
            releasable=self._forget_older(manifest.version),
            stage_seconds=committing - started,
            commit_seconds=clock() - committing,
        )

    def _forget_older(self, version: Version) -> tuple[Version, ...]:
        """Versions before this one, those of cancelled publications too, so that no slot is lost."""
        older = tuple(sorted(v for v in self._fetchable if v < version))
        self._fetchable.difference_update(older)
        return older

    async def _readmit(self, engine: Engine) -> bool:
        errors: dict[str, str] = {}
        if self._current is None:
            return await self._readmit_unchanged(engine, errors)
        seconds = await self._stage(engine, self._current, errors)
        return seconds is not None and await self._commit(engine, self._current, seconds, errors)

    async def _readmit_unchanged(self, engine: Engine, errors: dict[str, str]) -> bool:
        """Nothing was published yet: whole weights are those that the fleet started with."""
        async with self._or_quarantine(engine, f"readmitting engine {engine.name!r}", self._commit_seconds, errors):
            version = (await engine.health()).version
            if version != self._fleet.served_version():
                raise EngineError(f"it serves version {version}, the fleet {self._fleet.served_version()}; publish a version.")
            await engine.resume()
            self._fleet.served(engine.name, version)
        return not errors

    # --- Staging -----------------------------------------------------------------------------------------------------

    async def _stage_all(self, manifest: WeightManifest, errors: dict[str, str]) -> list[tuple[Engine, float]]:
        """All engines at once, while they generate. Those that staged, in the fleet's order, with their seconds."""
        engines = self._fleet.engines()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._stage(e, manifest, errors)) for e in engines]
        return [(e, seconds) for e, task in zip(engines, tasks, strict=True) if (seconds := task.result()) is not None]

    async def _stage(self, engine: Engine, manifest: WeightManifest, errors: dict[str, str]) -> float | None:
        """Seconds it took; `None` and quarantine if it failed. An engine that cannot stage gets the weights in its pause.

        A cancellation leaves the engine as it is: it serves its whole old weights.
        """
        if not engine.capabilities.stages_weights:
            return 0.0
        started = asyncio.get_running_loop().time()
        deed = f"staging version {manifest.version} on engine {engine.name!r}"
        async with self._or_quarantine(engine, deed, self._stage_seconds, errors, when_cancelled=False):
            await engine.stage(manifest)
        return None if engine.name in errors else asyncio.get_running_loop().time() - started

    # --- Committing --------------------------------------------------------------------------------------------------

    async def _commit(self, engine: Engine, manifest: WeightManifest, stage_seconds: float, errors: dict[str, str]) -> bool:
        """Makes the version live on one engine and the engine routable; or quarantine. No new request goes to a paused engine."""
        started = asyncio.get_running_loop().time()
        deed = f"committing version {manifest.version} on engine {engine.name!r}"
        try:
            async with self._or_quarantine(engine, deed, self._commit_seconds, errors):
                mode = self._mode(engine)
                if swaps_between_steps(engine.capabilities, mode):
                    await self._swap(engine, manifest)
                else:
                    self._fleet.hold(engine.name, OWNER)
                    await self._swap_paused(engine, manifest, mode)
                # Also where nothing was paused: an earlier attempt may have ended in quarantine with the engine paused.
                await engine.resume()
                self._fleet.served(engine.name, manifest.version)
        finally:
            self._fleet.release(engine.name, OWNER)
        if engine.name in errors:
            return False
        seconds = asyncio.get_running_loop().time() - started
        self._observer.weights_committed(engine=engine.name, version=manifest.version, stage_seconds=stage_seconds, pause_seconds=seconds)
        return True

    async def _swap(self, engine: Engine, manifest: WeightManifest) -> None:
        """What is attested is what is served: anything but the manifest's version and fingerprint must not run."""
        said = await engine.commit(manifest.version)
        if said != Attestation(manifest.version, manifest.fingerprint):
            raise WeightsCorrupt(
                f"committing version {manifest.version} ({manifest.fingerprint[:12]}) on engine {engine.name!r}: it serves version "
                f"{said.version} ({said.fingerprint[:12]}); it rejoins when it has the published weights."
            )

    async def _swap_paused(self, engine: Engine, manifest: WeightManifest, mode: PauseMode) -> None:
        await engine.pause(mode)
        before = (await engine.health()).num_tokens
        if not engine.capabilities.stages_weights:
            await engine.stage(manifest)
        await self._swap(engine, manifest)
        made = (await engine.health()).num_tokens - before
        if made > 0:
            raise PauseIgnored(
                f"pausing engine {engine.name!r}: it made {made} tokens while paused, of unknown weights; restart the engine."
            )

    # --- Failing -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _or_quarantine(
        self, engine: Engine, deed: str, seconds: float, errors: dict[str, str], *, when_cancelled: bool = True
    ) -> AsyncGenerator[None, None]:
        """The guard of I7: the block runs to its end within `seconds`, or the engine is in quarantine and `errors` says why.

        The engine's error ends here. A cancellation goes on, with the engine, whose state is now unknown, behind quarantine.
        """
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                yield
        except Exception as error:
            late = isinstance(error, TimeoutError) and deadline.expired()
            self._give_up(
                engine, EngineUnavailable(f"{deed}: not done within {seconds:g} s; restart the engine.") if late else error, errors
            )
        except BaseException:
            if when_cancelled:
                self._give_up(engine, EngineError(f"{deed}: cancelled on the way; it rejoins at the current version."), errors)
            raise

    def _give_up(self, engine: Engine, error: BaseException, errors: dict[str, str]) -> None:
        errors[engine.name] = f"{type(error).__name__}: {error}"
        self._fleet.quarantine(engine.name, error)

    def _mode(self, engine: Engine) -> PauseMode:
        return mode_for(engine.name, engine.capabilities, self._pause_mode)
