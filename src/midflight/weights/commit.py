"""The commit on one engine: hold, pause, swap, attest, resume; and no weights are served that the engine did not attest (I7)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Literal

from midflight.allowance import Allowance, Expired
from midflight.errors import EngineError, EngineUnavailable, WeightsCorrupt
from midflight.pausing import BY_COST, pause_mode, verified_pause
from midflight.ports import Engine, EngineFleet
from midflight.types import Attestation, Capabilities, PauseMode, WeightManifest
from midflight.types.facts import Record, WeightsCommitted
from midflight.weights.turns import Barrier

OWNER = "handover"
"""The name of its holds."""


def commit_mode(engine: str, capabilities: Capabilities, wanted: PauseMode | Literal["auto"]) -> PauseMode:
    """`auto`: what the engine says; else keep where it offers it and says the version of every token, else recompute, abort, drain.

    `NotSupported` when the engine lacks the mode that was asked for, or has none at all.
    """
    otherwise = [mode for mode in BY_COST if capabilities.versions_per_token or mode is not PauseMode.KEEP]
    if capabilities.commit_mode is not None:
        otherwise.insert(0, capabilities.commit_mode)
    remedy = "use another engine" if wanted == "auto" else "set rollout.pause_mode to one of these or auto"
    return pause_mode(engine, capabilities, None if wanted == "auto" else wanted, otherwise=otherwise, remedy=remedy)


def swaps_between_steps(capabilities: Capabilities, mode: PauseMode) -> bool:
    """Whether a commit needs no pause of ours: staged weights go live between two steps, if need be in a pause that the engine makes."""
    return capabilities.stages_weights and mode is (capabilities.commit_mode or PauseMode.KEEP)


class Guard:
    """What is done to an engine is done within its time, or the engine is in quarantine (I7). `errors` says which are, and why."""

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet
        self.errors: dict[str, str] = {}

    @asynccontextmanager
    async def over(self, engine: str, deed: str, *, seconds: float, when_cancelled: bool = True) -> AsyncGenerator[Allowance]:
        """The block runs to its end within `seconds`, or the engine is in quarantine and `errors` says why. Gives its time.

        The engine's error ends here. A cancellation goes on, with the engine, whose state is now unknown, behind quarantine.
        """
        allowance = Allowance(seconds)
        try:
            async with allowance:
                yield allowance
        except Expired:
            self._give_up(engine, EngineUnavailable(f"{deed}: not done within {seconds:g} s; restart the engine."))
        except Exception as error:
            self._give_up(engine, error)
        except BaseException:
            if when_cancelled:
                self._give_up(engine, EngineError(f"{deed}: cancelled on the way; it rejoins at the current version."))
            raise

    def _give_up(self, engine: str, error: BaseException) -> None:
        self.errors[engine] = f"{type(error).__name__}: {error}"
        self._fleet.quarantine(engine, error)


class Committer:
    """Without state of its own: each call is one engine's commit."""

    def __init__(self, fleet: EngineFleet, *, pause_mode: PauseMode | Literal["auto"], seconds: float, record: Record) -> None:
        """`seconds`: the engine's own time for all of it; what it waits for others at the barrier does not count."""
        self._fleet, self._record = fleet, record
        self._pause_mode: PauseMode | Literal["auto"] = pause_mode
        self._seconds = seconds

    def mode(self, engine: Engine) -> PauseMode:
        """`NotSupported` when the engine lacks the configured pause mode."""
        return commit_mode(engine.name, engine.capabilities, self._pause_mode)

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


async def _swap_paused(engine: Engine, manifest: WeightManifest, mode: PauseMode, *, barrier: Barrier, own_time: Allowance) -> None:
    async with verified_pause(engine, mode):
        with own_time.standing():
            await barrier.reach("paused", engine.name)
        if not engine.capabilities.stages_weights:
            await engine.stage(manifest)
        await _swap(engine, manifest)
    with own_time.standing():
        await barrier.reach("committed", engine.name)
