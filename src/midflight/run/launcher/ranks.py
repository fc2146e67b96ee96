"""The processes of a trainer, one for each rank, over all their lives. When one rank is lost, all
begin again from the last checkpoint, and everything else goes on.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `TrainerRanks.keep` | lives of all ranks together | the end of the first rank; then the back-off of the next life | the ranks; a spent budget |
| `TrainerRanks._rank` (one each) | a process's messages | its end; that of the first is the trainer's | the process |
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from midflight.config.seats import config_in_place
from midflight.run.launcher.folder import can_go_on
from midflight.run.launcher.ring_context import RingContext
from midflight.run.launcher.watchdog import Watchdog
from midflight.run.parts import PartLost, ProcessKind, Restarted, TrainerSpec, serve_while
from midflight.run.places.port import PartFailed, Place

OWN_REASON_SECONDS = 5.0
"""The time in which a lost part may report its own reason, or be seen to end. Its connections break
first, and a busy machine takes seconds more.
"""
STAYS = "The trainer goes on from its last checkpoint; engines, gateway and agents stay."


class TrainerRanks:
    """Starts all ranks together, and ends them together."""

    def __init__(
        self,
        context: RingContext,
        watchdog: Watchdog,
        *,
        resume: bool,
    ) -> None:
        """`resume`: the first life goes on from the last checkpoint, as later ones always do."""
        self._context = context
        self._watchdog = watchdog
        self._resume = resume
        self._came_up = False
        self._life = 0
        self._taken: Sequence[Place] = ()
        """The places of the ranks, the first rank's first."""

    def came_up(self) -> None:
        """Notes that the trainer of this life has its weights, and a place beside the others."""
        self._came_up = True
        self._watchdog.weights_found()

    async def keep(self) -> None:
        """Waits for the last step. Starts the trainer again when it fails. If another life cannot
        help, it raises the failure, and all parts may start again. That is so if there is no
        checkpoint yet, or if the trainer did not come up beside the others.
        """
        await self._context.budgets.keep(self._live, between=self._end, possible=self._can_go_on)

    def _can_go_on(self) -> bool:
        return self._came_up and can_go_on(Path(self._context.config.run.folder))

    async def _live(self, life: int) -> None:
        """Waits for the end of the first rank, which is the trainer's. The others end with it, and
        if one fails all do.
        """
        self._life = life
        for place in self._taken:  # of an earlier life
            place.close()
        self._taken = await self._context.places.take_all(
            ProcessKind.TRAINER, self._context.config.trainer.ranks
        )
        first, *others = self._taken
        url, *further_urls = self._context.gateways
        spec = TrainerSpec(
            config_in_place(self._context.config, "trainer").model_dump_json(),
            url,
            self._context.control_token,
            self._context.segment,
            resume=self._resume or life > 0,
            life=life,
            meeting=f"{first.host}:{first.port}",
            further_urls=tuple(further_urls),
        )
        other_ranks = [
            self._rank(msgspec.structs.replace(spec, rank=rank), place)
            for rank, place in enumerate(others, start=1)
        ]
        first_rank = self._rank(msgspec.structs.replace(spec, meeting_fd=first.fd), first)
        await serve_while(first_rank, *other_ranks)

    async def _end(self, restart: Restarted) -> None:
        """Kills the remaining processes of a life that failed. Waits until they have ended."""
        self._came_up = False
        self._watchdog.weights_lost()
        await self._context.children.stop(seconds=0.0, only=ProcessKind.TRAINER)
        if self._context.config.engine.takes_turns:
            await self._wake_engines()
        self._context.say(msgspec.structs.replace(restart, error=f"{restart.error}\n{STAYS}"))

    async def _wake_engines(self) -> None:
        # few runs need it, and it imports an HTTP client
        from midflight.run.launcher.gateway_client import GatewayClient

        await GatewayClient(self._context).trainer_gone(self._life)

    async def _rank(self, spec: TrainerSpec, place: Place) -> None:
        trainer = await self._context.children.start(
            ProcessKind.TRAINER,
            f"trainer{spec.rank or ''}",
            place,
            listens=spec.meeting_fd is not None,
            writes=True,
        )
        await trainer.tell(msgspec.structs.replace(spec, host=place.host))
        try:
            await self._context.children.follow(trainer)
        except PartLost as lost:
            await asyncio.sleep(OWN_REASON_SECONDS)
            raise PartFailed(str(lost), part=trainer.name) from lost
