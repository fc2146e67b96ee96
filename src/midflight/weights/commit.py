"""The commit on one engine: hold, pause, swap, attest, resume; and none of its weights are served that it did not attest (I7)."""

from __future__ import annotations

import asyncio
from typing import Literal

from midflight.errors import WeightsCorrupt
from midflight.pausing import verified_pause
from midflight.ports import Engine, Fleet
from midflight.types import Attestation, PauseMode, WeightManifest
from midflight.types.facts import Record, WeightsCommitted
from midflight.weights.barrier import Barrier
from midflight.weights.guard import Guard, standing
from midflight.weights.modes import mode_for, swaps_between_steps

OWNER = "handover"
"""The name of its holds."""


class Committer:
    """Without state of its own: each call is one engine's commit."""

    def __init__(self, fleet: Fleet, *, pause_mode: PauseMode | Literal["auto"], seconds: float, record: Record) -> None:
        """`seconds`: the engine's own time for all of it; what it waits for others at the barrier does not count."""
        self._fleet, self._record = fleet, record
        self._pause_mode: PauseMode | Literal["auto"] = pause_mode
        self._seconds = seconds

    def mode(self, engine: Engine) -> PauseMode:
        """`NotSupported` when the engine lacks the configured pause mode."""
        return mode_for(engine.name, engine.capabilities, self._pause_mode)

    async def commit(self, engine: Engine, manifest: WeightManifest, *, stage_seconds: float, guard: Guard, barrier: Barrier) -> bool:
        """Makes the version live on the engine and the engine routable; or quarantine. No new request goes to a paused engine.

        Waits for the engine, and for the others at the barrier. Whatever happens, the engine has left it in the end.
        """
        started = asyncio.get_running_loop().time()
        deed = f"committing version {manifest.version} on engine {engine.name!r}"
        try:
            async with guard.over(engine.name, deed, seconds=self._seconds) as own_time:
                mode = self.mode(engine)
                if barrier.alone and swaps_between_steps(engine.capabilities, mode):
                    await _swap(engine, manifest)
                else:
                    self._fleet.hold(engine.name, OWNER)
                    await _swap_paused(engine, manifest, mode, barrier=barrier, own_time=own_time)
                # Also where nothing was paused: an earlier attempt may have ended in quarantine with the engine paused.
                await engine.resume()
                self._fleet.served(engine.name, manifest.version)
        finally:
            barrier.leave(engine.name)
            self._fleet.release(engine.name, OWNER)
        if engine.name in guard.errors:
            return False
        seconds = asyncio.get_running_loop().time() - started
        self._record(WeightsCommitted(engine.name, manifest.version, stage_seconds, pause_seconds=seconds))
        return True


async def _swap(engine: Engine, manifest: WeightManifest) -> None:
    """What is attested is what is served: anything but the manifest's version and fingerprint must not run."""
    said = await engine.commit(manifest.version)
    if said != Attestation(manifest.version, manifest.fingerprint):
        raise WeightsCorrupt(
            f"committing version {manifest.version} ({manifest.fingerprint[:12]}) on engine {engine.name!r}: it serves version "
            f"{said.version} ({said.fingerprint[:12]}); it rejoins when it has the published weights."
        )


async def _swap_paused(engine: Engine, manifest: WeightManifest, mode: PauseMode, *, barrier: Barrier, own_time: asyncio.Timeout) -> None:
    async with verified_pause(engine, mode):
        with standing(own_time):
            await barrier.reach("paused", engine.name)
        if not engine.capabilities.stages_weights:
            await engine.stage(manifest)
        await _swap(engine, manifest)
    with standing(own_time):
        await barrier.reach("committed", engine.name)
