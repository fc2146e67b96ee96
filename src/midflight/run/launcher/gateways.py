"""The rollout processes of a ring: one, or several with a gateway each.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `Gateways.keep` (one each) | the process's messages | its end, which is an error before the trainer's; of several, then its restart | cancellation |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from midflight.config.agent import entries_of
from midflight.config.derived import num_workers
from midflight.config.sections import Config
from midflight.config.shards import shard_of
from midflight.observe.status import Status, merge_statuses
from midflight.run.launcher.engines import Engines
from midflight.run.launcher.ring_context import RingContext
from midflight.run.parts import (
    TEACHER,
    ModelReady,
    ProcessKind,
    Purpose,
    Restarted,
    RolloutSpec,
    Spec,
)
from midflight.run.places.port import Child, PartFailed, Place, Places
from midflight.wire.hosts import is_every_address

OTHERS_STAY = "It goes on from its store; trainer, engines and the other gateways stay."


@dataclass(frozen=True, slots=True)
class GatewayPart:
    """One rollout process, in all its lives; `config` is its part of the run's."""

    shard: int
    place: Place
    config: Config
    workers: tuple[str, ...] = ()
    """Names of the processes that run its agents, or none if it runs them itself, or has none."""

    @property
    def name(self) -> str:
        return f"rollout{self.shard or ''}"

    @property
    def folder(self) -> Path:
        return Path(self.config.run.folder)

    @property
    def url(self) -> str:
        return f"http://{self.place.host}:{self.place.port}"


async def take_gateways(config: Config, places: Places, purpose: Purpose) -> list[GatewayPart]:
    """Takes a place for each rollout process of a run, the one that clients know first. On a
    cluster the others may be on other machines, which do not have the first one's address.
    """
    section = config.gateway
    further: str | None = section.host
    if config.cluster.kind != "local" and not is_every_address(section.host):
        further = None
    taken = [await places.take(ProcessKind.ROLLOUT, host=section.host, port=section.port)]
    for _ in range(1, section.shards):
        taken.append(await places.take(ProcessKind.ROLLOUT, host=further))
    parts: list[GatewayPart] = []
    for shard, place in enumerate(taken):
        own = shard_of(config, shard)
        number = 0 if purpose is Purpose.SERVE else num_workers(own.environment)
        first = shard * number
        workers = tuple(f"worker{index}" for index in range(first, first + number))
        parts.append(GatewayPart(shard, place, own, workers))
    return parts


class Gateways:
    """Keeps the rollout processes running. With several, one that dies is started again alone,
    within its budget, and goes on from its store. If its machine is lost, the whole ring goes back
    to the last checkpoint, because its store is lost too.
    """

    def __init__(
        self,
        context: RingContext,
        parts: Sequence[GatewayPart],
        engines: Engines,
    ) -> None:
        self._context = context
        self._parts = parts
        self._engines = engines

    async def keep(self, part: GatewayPart) -> None:
        """Runs one rollout process until that has ended as it should, or cannot be started
        again.
        """

        async def live(number: int) -> None:
            await self._life(part, again=number > 0)

        async def end(restart: Restarted) -> None:
            self._context.say(
                msgspec.structs.replace(restart, error=f"{restart.error}\n{OTHERS_STAY}")
            )
            self._context.children.ready.discard(part.name)
            # a failed one may linger, and its successor listens on the same socket
            await self._context.children.kill(part.name)

        def possible() -> bool:
            # a store on a lost machine has steps that the trainer made and no copy has
            stays = part.name in self._context.children.ready and not part.place.lost
            return len(self._parts) > 1 and stays

        await self._context.budgets.keep(live, between=end, possible=possible)

    async def _life(self, part: GatewayPart, *, again: bool) -> None:
        """Waits for the end of one process. In training that is an error, because the trainer ends
        first.
        """
        rollout = await self._start(part)
        addresses = self._engines.addresses()
        teacher = addresses.pop(TEACHER, None)

        def spec(model: ModelReady) -> Spec:
            return RolloutSpec(
                config=part.config.model_dump_json(),
                model=model.folder,
                socket_fd=part.place.fd,
                url=part.url,
                token=self._context.engine_token,
                control_token=self._context.control_token,
                engines=addresses,
                teacher=teacher,
                worker_token=self._context.worker_token if part.workers else None,
                workers=part.workers,
                purpose=self._context.purpose,
                version=model.version,
                checkpoint=None if again else model.checkpoint,
                alarms=() if again else model.alarms,
                shard=part.shard,
                owner=self._context.gateways[0] if part.shard else None,
                again=again,
                seconds=self._context.seconds(),
            )

        await self._context.children.brief_and_follow(rollout, spec)
        if self._context.purpose is Purpose.TRAIN:
            raise PartFailed("the rollout process ended before the trainer did", part=rollout.name)

    async def _start(self, part: GatewayPart) -> Child:
        runs_agents = self._context.purpose is not Purpose.SERVE and not part.workers
        entries = entries_of(self._context.config.environment) if runs_agents else ()
        return await self._context.children.start(
            ProcessKind.ROLLOUT, part.name, part.place, listens=True, writes=True, arguments=entries
        )


class Statuses:
    """The last status of the run from each of its rollout processes."""

    def __init__(self) -> None:
        self._by_name: dict[str, Status] = {}

    def whole(self, name: str, status: Status) -> Status:
        """The run's status, after one rollout process has sent its own."""
        self._by_name[name] = status
        first, *others = [self._by_name[part] for part in sorted(self._by_name)]
        return merge_statuses(first, others) if others else status
