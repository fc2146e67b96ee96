"""Brings a version to the engines. It is staged in the background and committed in turn or
together, and never half (I7).

The commit on one engine is hold, pause, swap, attest, resume. Only weights that the engine attested
are served.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

from midflight.allowance import Allowance, Expired
from midflight.errors import EngineError, EngineUnavailable, WeightsCorrupt
from midflight.ports import BY_COST, Engine, EngineFleet, pause_mode, verified_pause
from midflight.types import Attestation, Capabilities, PauseMode, Version, WeightManifest
from midflight.types.facts import Record, WeightsCommitted
from midflight.weights.turnstile import Barrier, Turnstile

OWNER = "handover"
"""The owner's name of the handover's holds."""


def commit_mode(
    engine: str, capabilities: Capabilities, wanted: PauseMode | Literal["auto"]
) -> PauseMode:
    """The mode in which an engine pauses for a commit. `auto` takes the mode that the engine asks
    for. If it asks for none, `auto` takes keep if the engine offers it and says the version of
    every token, else recompute, abort, drain.

    Raises `NotSupported` if the engine lacks the mode that was asked for, or has none at all.
    """
    otherwise = list(BY_COST)
    if not capabilities.versions_per_token:
        otherwise = [mode for mode in BY_COST if mode is not PauseMode.KEEP]
    if capabilities.commit_mode is not None:
        otherwise.insert(0, capabilities.commit_mode)
    if wanted == "auto":
        return pause_mode(
            engine, capabilities, None, otherwise=otherwise, remedy="use another engine"
        )
    remedy = "set rollout.pause_mode to one of these or auto"
    return pause_mode(engine, capabilities, wanted, otherwise=otherwise, remedy=remedy)


def swaps_between_steps(capabilities: Capabilities, mode: PauseMode) -> bool:
    """True if a commit needs no pause of ours. Then staged weights go live between two steps, if
    need be in a pause that the engine makes, or for new requests alone.
    """
    if not capabilities.stages_weights:
        return False
    own_mode = capabilities.commit_mode or PauseMode.KEEP
    return capabilities.side_by_side or mode is own_mode


class EngineGuard:
    """Bounds the time of each operation on an engine. An operation that fails or is late puts the
    engine in quarantine (I7); `errors` has the reason by the name of the engine.
    """

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet
        self.errors: dict[str, str] = {}

    @asynccontextmanager
    async def over(
        self, engine: str, deed: str, *, seconds: float, when_cancelled: bool = True
    ) -> AsyncGenerator[Allowance]:
        """The block runs to its end within `seconds`, or the engine is in quarantine and `errors`
        has the reason. The block gets its allowance of time.

        The engine's error ends here. A cancellation goes on, and the engine, whose state is then
        unknown, is in quarantine.
        """
        allowance = Allowance(seconds)
        try:
            async with allowance:
                yield allowance
        except Expired:
            late = f"{deed}: not done within {seconds:g} s; restart the engine."
            self._give_up(engine, EngineUnavailable(late))
        except Exception as error:
            self._give_up(engine, error)
        except BaseException:
            if when_cancelled:
                cancelled = f"{deed}: cancelled on the way; it rejoins at the current version."
                self._give_up(engine, EngineError(cancelled))
            raise

    def _give_up(self, engine: str, error: BaseException) -> None:
        self.errors[engine] = f"{type(error).__name__}: {error}"
        self._fleet.quarantine(engine, error)


class Committer:
    """Commits a version on one engine. It has no state of its own."""

    def __init__(
        self,
        fleet: EngineFleet,
        *,
        pause_mode: PauseMode | Literal["auto"],
        seconds: float,
        record: Record,
    ) -> None:
        """`seconds` is the engine's own time for the whole commit. The time that it waits for
        others at the barrier does not count.
        """
        self._fleet = fleet
        self._record = record
        self._pause_mode: PauseMode | Literal["auto"] = pause_mode
        self._seconds = seconds

    def mode(self, engine: str, capabilities: Capabilities) -> PauseMode:
        """Raises `NotSupported` if the engine lacks the configured pause mode."""
        return commit_mode(engine, capabilities, self._pause_mode)

    async def commit(
        self,
        engine: Engine,
        manifest: WeightManifest,
        *,
        stage_seconds: float,
        guard: EngineGuard,
        barrier: Barrier,
    ) -> bool:
        """Makes the version live on the engine and the engine routable, or puts the engine in
        quarantine. No new request goes to a paused engine.

        Waits for the engine, and for the others at the barrier. In the end the engine has left the
        barrier in every case.
        """
        started = asyncio.get_running_loop().time()
        deed = f"committing version {manifest.version} on engine {engine.name!r}"
        still_seconds: float | None = None
        try:
            async with guard.over(engine.name, deed, seconds=self._seconds) as own_time:
                mode = self.mode(engine.name, engine.capabilities)
                if barrier.alone and swaps_between_steps(engine.capabilities, mode):
                    still_seconds = (await _swap(engine, manifest)).still_seconds
                else:
                    self._fleet.hold(engine.name, OWNER)
                    await _swap_paused(engine, manifest, mode, barrier=barrier, own_time=own_time)
                # The engine is resumed even if nothing was paused now: an earlier attempt may
                # have ended in quarantine with the engine paused.
                await engine.resume()
                self._fleet.served(engine.name, manifest.version)
        finally:
            barrier.leave(engine.name)
            self._fleet.release(engine.name, OWNER)
        if engine.name in guard.errors:
            return False
        if still_seconds is None:
            still_seconds = asyncio.get_running_loop().time() - started
        self._record(
            WeightsCommitted(
                engine.name, manifest.version, stage_seconds, pause_seconds=still_seconds
            )
        )
        return True


async def _swap(engine: Engine, manifest: WeightManifest) -> Attestation:
    """Swaps the weights. An engine serves the weights that it attests, so it must not run if it
    attests anything but the manifest's version and fingerprint.
    """
    said = await engine.commit(manifest.version)
    if said != Attestation(manifest.version, manifest.fingerprint):
        raise WeightsCorrupt(
            f"committing version {manifest.version} ({manifest.fingerprint[:12]}) on engine "
            f"{engine.name!r}: it serves version {said.version} ({said.fingerprint[:12]}); it "
            "rejoins when it has the published weights."
        )
    return said


async def _swap_paused(
    engine: Engine,
    manifest: WeightManifest,
    mode: PauseMode,
    *,
    barrier: Barrier,
    own_time: Allowance,
) -> None:
    async with verified_pause(engine, mode):
        with own_time.standing():
            await barrier.reach("paused", engine.name)
        if not engine.capabilities.stages_weights:
            await engine.stage(manifest)
        await _swap(engine, manifest)
    with own_time.standing():
        await barrier.reach("committed", engine.name)


# --- The handover ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HandoverReport:
    """The result of publishing a version."""

    version: Version
    served_by: tuple[str, ...] = ()
    """Engines that attested it, in the order in which they did."""
    quarantined: Mapping[str, str] = field(default_factory=dict[str, str])
    """The engines that did not attest it, with the reason. They rejoin at this version, or a later
    one.
    """
    superseded_by: Version | None = None
    """The newer version that took its place before it was staged anywhere. In that case nothing
    else was done.
    """
    releasable: tuple[Version, ...] = ()
    """Versions that no engine will fetch any more. The publisher's slots may be released."""
    stage_seconds: float = 0.0
    """The time of the slowest engine that staged."""


class _Delivery:
    """The state of one handover, or of one rejoin."""

    def __init__(self, manifest: WeightManifest, fleet: EngineFleet, *, receivers: int) -> None:
        """`receivers` is the number of engines that take the version in at once. Engines that do it
        in their pause come one by one, or when all are paused.
        """
        self.manifest = manifest
        self.sent = replace(manifest, receivers=receivers or None)
        """The manifest as the engines get it."""
        self.guard = EngineGuard(fleet)
        self.stage_seconds: dict[str, float] = {}
        """The time of each engine that staged."""
        self.served: list[str] = []


ENGINES_OF_ONE_PAUSE = 64
"""The engines of which one is paused at a time. One by one, a thousand commits of 80 ms take 80 s;
at this number they take 5 s, and a 64th of the engines does not generate.
"""


class Handover:
    """Owns the current version. One handover at a time.

    `rolling`: each engine is committed when it has staged, one of each `ENGINES_OF_ONE_PAUSE` at a
    time, so that the others keep generating. `barrier`: when all have staged, all pause, then all commit, then all
    resume, so that no two versions are served at the same time.

    After any failure, timeout or cancellation, at any point, each engine is in one of two states
    (I7). It runs on weights that it attested whole, or it is in quarantine until `rejoin` or the
    next `publish` brings it back. The fleet records quarantines and rejoins; this class records
    commits.
    """

    def __init__(
        self,
        fleet: EngineFleet,
        *,
        pause_mode: PauseMode | Literal["auto"],
        stage_seconds: float,
        commit_seconds: float,
        record: Record,
        way: Literal["rolling", "barrier"] = "rolling",
    ) -> None:
        """`stage_seconds` and `commit_seconds` are deadlines for one engine. The commit's includes
        its pause.
        """
        self._fleet = fleet
        self._way = way
        self._stage_seconds = stage_seconds
        self._commit_seconds = commit_seconds
        self._committer = Committer(
            fleet, pause_mode=pause_mode, seconds=commit_seconds, record=record
        )
        self._turnstile = Turnstile()
        self._current: WeightManifest | None = None
        self._passed_over: set[str] = set()
        """Engines that were reserved for an evaluation when the current version came."""
        self._fetchable: set[Version] = set()
        """Versions that were published and not yet reported as releasable."""

    @property
    def current(self) -> WeightManifest | None:
        """The version that engines serve or rejoin at. `None` while they serve the weights that
        they started with.
        """
        return self._current

    def check(self, engine: str, capabilities: Capabilities) -> None:
        """Raises `NotSupported` if such an engine lacks the configured pause mode: `publish` would
        refuse every version.
        """
        self._committer.mode(engine, capabilities)

    async def publish(self, manifest: WeightManifest) -> HandoverReport:
        """Brings the version to every attached engine, those in quarantine too, but not to one that
        is reserved for an evaluation.

        Waits for the handover or the rejoins under way, which end by their deadlines. Only the
        newest of the versions that wait goes on, and the others' reports say `superseded_by` at
        once. It may be repeated with the same manifest. Raises `NotSupported` if an engine lacks
        the configured pause mode; then nothing was begun.
        """
        for engine in self._fleet.engines():
            self.check(engine.name, engine.capabilities)
        ticket = self._turnstile.for_version(manifest)
        self._fetchable.add(manifest.version)
        try:
            superseded_by = await ticket.admitted
            if superseded_by is not None:
                self._fetchable.discard(manifest.version)
                return HandoverReport(
                    manifest.version, superseded_by=superseded_by, releasable=(manifest.version,)
                )
            return await self._hand_over(manifest)
        finally:
            self._turnstile.leave(ticket)

    async def rejoin(self, engine: str) -> bool:
        """Brings an engine in quarantine to the current version. Returns True if it is routable
        now.

        Waits for the handover under way, and for no other engine. Returns `False` at once if the
        engine is rejoining already. Before the first publication the engine must still serve the
        version of the fleet.
        """
        ticket = self._turnstile.for_rejoin(engine)
        if ticket is None:
            return False
        try:
            await ticket.admitted
            found = next((e for e in self._fleet.engines() if e.name == engine), None)
            if found is None:
                return False
            return await self._readmit(found)
        finally:
            self._turnstile.leave(ticket)

    async def catch_up(self, engine: str) -> None:
        """Brings an engine that is no longer reserved to the current version, if that came
        meanwhile. Waits as `rejoin` does.
        """
        if engine in self._passed_over:
            await self.rejoin(engine)

    # --- A delivery -------------------------------------------------------------------------------

    async def _hand_over(self, manifest: WeightManifest) -> HandoverReport:
        reserved = self._fleet.reserved()
        self._passed_over = set() if reserved is None else {reserved}
        engines = [engine for engine in self._fleet.engines() if engine.name != reserved]
        receivers = sum(engine.capabilities.stages_weights for engine in engines)
        delivery = _Delivery(manifest, self._fleet, receivers=receivers)
        if self._way == "barrier":
            await self._together(delivery, engines)
        else:
            await self._in_turn(delivery, engines)
        self._current = manifest
        return HandoverReport(
            version=manifest.version,
            served_by=tuple(delivery.served),
            quarantined=delivery.guard.errors,
            releasable=self._forget_older(manifest.version),
            stage_seconds=max(delivery.stage_seconds.values(), default=0.0),
        )

    def _forget_older(self, version: Version) -> tuple[Version, ...]:
        """Returns the versions before this one, those of cancelled publications too, so that no
        slot is lost.
        """
        older = tuple(sorted(v for v in self._fetchable if v < version))
        self._fetchable.difference_update(older)
        return older

    async def _in_turn(self, delivery: _Delivery, engines: Sequence[Engine]) -> None:
        """All engines stage at once, while they generate, and are committed in the order in which
        they have staged. Engines that cannot stage load one after the other.
        """
        turns = asyncio.Semaphore(math.ceil(len(engines) / ENGINES_OF_ONE_PAUSE) or 1)
        loading = asyncio.Lock()
        async with asyncio.TaskGroup() as group:
            for engine in engines:
                alone = nullcontext() if engine.capabilities.stages_weights else loading
                group.create_task(self._bring(delivery, engine, turns, alone))

    async def _bring(
        self,
        delivery: _Delivery,
        engine: Engine,
        turns: asyncio.Semaphore,
        alone: AbstractAsyncContextManager[None],
    ) -> None:
        if await self._stage(delivery, engine):
            async with alone, turns:
                await self._commit(delivery, engine, Barrier([engine.name]))

    async def _together(self, delivery: _Delivery, engines: Sequence[Engine]) -> None:
        async with asyncio.TaskGroup() as group:
            staging = [group.create_task(self._stage(delivery, engine)) for engine in engines]
        staged = [engine for engine, task in zip(engines, staging, strict=True) if task.result()]
        barrier = Barrier(engine.name for engine in staged)
        async with asyncio.TaskGroup() as group:
            for engine in staged:
                group.create_task(self._commit(delivery, engine, barrier))

    async def _readmit(self, engine: Engine) -> bool:
        if self._current is None:
            return await self._readmit_unchanged(engine)
        delivery = _Delivery(self._current, self._fleet, receivers=1)
        if await self._stage(delivery, engine):
            await self._commit(delivery, engine, Barrier([engine.name]))
        self._passed_over.discard(engine.name)
        return engine.name in delivery.served

    async def _readmit_unchanged(self, engine: Engine) -> bool:
        """Readmits an engine before anything was published. Its weights count as whole if they are
        those that the fleet started with.
        """
        guard = EngineGuard(self._fleet)
        deed = f"readmitting engine {engine.name!r}"
        async with guard.over(engine.name, deed, seconds=self._commit_seconds):
            health = await engine.health()
            version = health.version
            if version != self._fleet.served_version():
                raise EngineError(
                    f"it serves version {version}, the fleet {self._fleet.served_version()}; "
                    "publish a version."
                )
            await engine.resume()
            self._fleet.served(engine.name, version)
        return not guard.errors

    # --- One engine -------------------------------------------------------------------------------

    async def _stage(self, delivery: _Delivery, engine: Engine) -> bool:
        """Stages the version. Returns whether the engine may commit; it is in quarantine if staging
        failed. An engine that cannot stage gets the weights in its pause.

        A cancellation leaves the engine as it is: it serves its whole old weights.
        """
        if not engine.capabilities.stages_weights:
            return True
        started = asyncio.get_running_loop().time()
        deed = f"staging version {delivery.manifest.version} on engine {engine.name!r}"
        async with delivery.guard.over(
            engine.name, deed, seconds=self._stage_seconds, when_cancelled=False
        ):
            await engine.stage(delivery.sent)
            delivery.stage_seconds[engine.name] = asyncio.get_running_loop().time() - started
        return engine.name not in delivery.guard.errors

    async def _commit(self, delivery: _Delivery, engine: Engine, barrier: Barrier) -> None:
        """Commits the version. From the first commit on it is the current one, and an engine that
        fails from then on rejoins at it.
        """
        self._current = delivery.manifest
        seconds = delivery.stage_seconds.get(engine.name, 0.0)
        is_served = await self._committer.commit(
            engine, delivery.sent, stage_seconds=seconds, guard=delivery.guard, barrier=barrier
        )
        if is_served:
            delivery.served.append(engine.name)
