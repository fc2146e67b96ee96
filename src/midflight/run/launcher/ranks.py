"""The processes of a trainer, one for each rank, in one life.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `TrainerRanks._rank` (one each) | a process's messages | its end; that of the first is the trainer's | the process |
"""

import asyncio
from collections.abc import Sequence

import msgspec

from midflight.config.seats import config_in_place
from midflight.config.sections import Config
from midflight.run.launcher.access import Access
from midflight.run.launcher.children import Children
from midflight.run.parts import PartLost, ProcessKind, TrainerSpec, serve_while
from midflight.run.places.port import PartFailed, Place, Places

OWN_REASON_SECONDS = 5.0
"""The time in which a lost part may report its own reason, or be seen to end. Its connections break
first, and a busy machine takes seconds more.
"""


class TrainerRanks:
    """Starts all ranks together, and ends them together. `TrainerRestarts` starts them again."""

    def __init__(
        self,
        config: Config,
        places: Places,
        children: Children,
        *,
        access: Access,
        further_gateways: Sequence[str],
        resume: bool,
    ) -> None:
        """`further_gateways` are the URLs of all gateways but the first. `resume`: the first life
        goes on from the last checkpoint, as later ones always do.
        """
        self._config = config
        self._places = places
        self._children = children
        self._access = access
        self._further_gateways = tuple(further_gateways)
        self._resume = resume
        self._taken: Sequence[Place] = ()
        """The places of the ranks, the first rank's first."""

    async def live(self, life: int) -> None:
        """The first rank's end is the trainer's. The others end with it, and if one fails all
        do.
        """
        for place in self._taken:  # of an earlier life
            place.close()
        self._taken = await self._places.take_all(ProcessKind.TRAINER, self._config.trainer.ranks)
        first, *others = self._taken
        spec = TrainerSpec(
            config_in_place(self._config, "trainer").model_dump_json(),
            self._access.gateway,
            self._access.control_token,
            self._access.segment,
            resume=self._resume or life > 0,
            life=life,
            meeting=f"{first.host}:{first.port}",
            further_urls=self._further_gateways,
        )
        other_ranks = [
            self._rank(msgspec.structs.replace(spec, rank=rank), place)
            for rank, place in enumerate(others, start=1)
        ]
        first_rank = self._rank(msgspec.structs.replace(spec, meeting_fd=first.fd), first)
        await serve_while(first_rank, *other_ranks)

    async def end(self) -> None:
        """Kills the remaining processes of a life that failed. Waits until they have ended."""
        await self._children.stop(seconds=0.0, only=ProcessKind.TRAINER)

    async def _rank(self, spec: TrainerSpec, place: Place) -> None:
        trainer = await self._children.start(
            ProcessKind.TRAINER,
            f"trainer{spec.rank or ''}",
            place,
            listens=spec.meeting_fd is not None,
            writes=True,
        )
        await trainer.tell(msgspec.structs.replace(spec, host=place.host))
        try:
            await self._children.follow(trainer)
        except PartLost as lost:
            await asyncio.sleep(OWN_REASON_SECONDS)
            raise PartFailed(str(lost), part=trainer.name) from lost
