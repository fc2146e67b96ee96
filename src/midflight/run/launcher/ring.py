"""All processes of one attempt at a run. They are started together, each is kept alive by its loop
below within a budget of restarts, and they are always stopped.

| loop | keeps | in |
|---|---|---|
| `TrainerRestarts.lead` | the trainer, with its restarts | `trainer_restarts.py`, with `ranks.py` |
| `Gateways.keep` | a rollout process | `gateways.py` |
| `Engines.keep` | an engine | `engines.py` |
| `Workers.keep` | a process that runs agents | `workers.py` |
| `ProcessWatch.run` | nothing: it finds processes that hang, and ends them | `watch.py` |

The launcher never imports torch.
"""

import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from midflight import given
from midflight.config.sections import Config
from midflight.config.shards import unsharded
from midflight.observe.status import Phase, Status
from midflight.run.endpoint import Endpoint, remove_endpoint, write_endpoint
from midflight.run.heart import Beat
from midflight.run.launcher.access import Access
from midflight.run.launcher.children import Children
from midflight.run.launcher.engines import EnginePart, Engines
from midflight.run.launcher.gateways import GatewayPart, Gateways, Statuses, take_gateways
from midflight.run.launcher.ranks import TrainerRanks
from midflight.run.launcher.restart_budgets import RestartBudgets
from midflight.run.launcher.trainer_restarts import TrainerRestarts
from midflight.run.launcher.watch import ProcessWatch
from midflight.run.launcher.watchdog import Watchdog
from midflight.run.launcher.workers import Workers
from midflight.run.parts import (
    FirstTokenMade,
    Message,
    ModelReady,
    Notice,
    PartLost,
    ProcessKind,
    Progress,
    Purpose,
    Ready,
    RestartWorker,
    WarmStart,
    serve_while,
)
from midflight.run.places.local import LocalPlaces
from midflight.run.places.port import Child, HasDescriptor, Places
from midflight.run.scratch import remove_left, segment_name

WRITING_SECONDS = 2.0
"""The part of `stop_seconds` that the launcher keeps for summary and plot, after its parts have
ended.
"""


class Ring:
    """One attempt at a run. `on_message` receives every message of the parts; it must not raise or
    wait.
    """

    def __init__(
        self,
        config: Config,
        *,
        on_message: Callable[[Message], None],
        control_token: str,
        model: ModelReady | None = None,
        lock: HasDescriptor | None = None,
        budgets: RestartBudgets | None = None,
        objects: bytes = given.NOTHING,
        watchdog: Watchdog | None = None,
        seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`lock` holds the run's folder while a part that writes there lives. `budgets` outlive one
        attempt. `objects` are a program's, packed. `seconds` tells the time that the run has run so
        far.
        """
        self._config = config
        self._seconds = seconds
        self._on_message = on_message
        self._given_model = model
        self._control_token = control_token
        self._budgets = budgets or RestartBudgets(config.run.restarts)
        self._watchdog = watchdog or Watchdog(stall_seconds=config.run.stall_seconds)
        self._lives = TrainerRestarts(
            Path(config.run.folder), self._budgets, self._watchdog, say=on_message
        )
        self._statuses = Statuses()
        self._places: Places
        self._gateways: Sequence[GatewayPart]
        self._engines: Engines
        self._workers: Workers
        self.children = Children(
            config, watchdog=self._watchdog, hear=self._hear, objects=objects, lock=lock
        )

    @property
    def url(self) -> str:
        return self._gateways[0].url

    # --- Its beginning ----------------------------------------------------------------------------

    async def run(self, purpose: Purpose, *, resume: bool = False) -> None:
        """Runs until the end that `purpose` sets, or until a part fails. A run with our own trainer
        ends with its last step, evaluated and exported. With `resume`, the trainer goes on from its
        last checkpoint.
        """
        self.children.expect_model()
        if self._given_model is not None:
            self.children.model_ready(self._given_model)
        async with self._new_places() as self._places:
            await self._run(purpose, resume=resume)

    def _new_places(self) -> Places:
        if self._config.cluster.kind == "local":
            return LocalPlaces()
        from midflight.run.places.ray import ray_places

        return ray_places(self._config, say=lambda text: self._on_message(Notice(text)))

    async def _run(self, purpose: Purpose, *, resume: bool) -> None:
        trains = purpose is Purpose.TRAIN
        taught = purpose in (Purpose.TRAIN, Purpose.ROLLOUTS)
        self.children.lay_out(ranks=trains, teacher=taught)
        config = self._config if trains else unsharded(self._config)
        self._gateways = await take_gateways(config, self._places, purpose)
        access = Access(
            self.url,
            self._control_token,
            engine_token=secrets.token_urlsafe(24),
            segment=segment_name(Path(self._config.run.folder)),
        )
        self._engines = self._new_engines(access, purpose)
        engines = await self._engines.take(with_teacher=taught)
        remove_left()
        first, *services = self._gateways_and_workers(access, purpose)
        watch = ProcessWatch(self.children, self._watchdog, say=self._on_message, spare=self._spare)
        services = [*engines, watch.run(), self._places.watch(), *services]
        try:
            if trains:
                trainer = self._trainer(access, resume=resume)
                await serve_while(trainer, first, *services)
            else:
                await serve_while(first, *services)
        finally:
            try:
                await self._end()
            finally:  # also when that is cut short
                remove_left()
                for part in self._gateways:
                    remove_endpoint(part.folder, self._control_token)

    def _new_engines(self, access: Access, purpose: Purpose) -> Engines:
        return Engines(
            self._config,
            self._places,
            access,
            budgets=self._budgets,
            serving=self.children.ready,
            say=self._on_message,
            start=self._start_engine,
            follow=self.children.brief_and_follow,
            memory=partial(self._memory_words, trains=purpose is Purpose.TRAIN),
            holds=purpose is Purpose.SERVE,
        )

    async def _start_engine(self, part: EnginePart) -> Child:
        return await self.children.start(
            ProcessKind.ENGINE, part.name, part.place, listens=True, arguments=[part.kind]
        )

    def _memory_words(self, *, trains: bool) -> str:
        # it knows clusters, which few runs need
        from midflight.run.places.fit import memory_words, this_hardware

        return memory_words(self._config, this_hardware(), trains=trains)

    def _gateways_and_workers(
        self, access: Access, purpose: Purpose
    ) -> Sequence[Coroutine[Any, Any, None]]:
        """Returns the loops that keep them running. The loop of the first gateway comes first,
        because its end is the end of a run without a trainer.
        """
        worker_token = secrets.token_urlsafe(24)
        gateways = Gateways(
            self._config,
            self._gateways,
            self.children,
            engines=self._engines,
            access=access,
            worker_token=worker_token,
            budgets=self._budgets,
            purpose=purpose,
            say=self._on_message,
            seconds=self._seconds,
        )
        self._workers = Workers(
            self._config, self.children, token=worker_token, say=self._on_message
        )
        loops = [gateways.keep(part) for part in self._gateways]
        for part in self._gateways:
            loops += [self._workers.keep(name, part) for name in part.workers]
        return loops

    def _trainer(self, access: Access, *, resume: bool) -> Coroutine[Any, Any, None]:
        ranks = TrainerRanks(
            self._config,
            self._places,
            self.children,
            access=access,
            further_gateways=[part.url for part in self._gateways[1:]],
            resume=resume,
        )
        return self._lives.lead(ranks.live, ranks.end)

    # --- While it runs ----------------------------------------------------------------------------

    async def _spare(self, worker: str) -> None:
        """Tells the worker's gateway that no agent is to blame for the worker's end. Waits for its
        answer, `stall_seconds` at most: a gateway that does not answer hangs itself.
        """
        # only here and for engines does the launcher ask another process
        from midflight.run.api import worker_wire as wire
        from midflight.wire.client import HttpClient

        gateway = next(part for part in self._gateways if worker in part.workers)
        async with HttpClient(gateway.url, lost=PartLost, token=self._control_token) as http:
            with suppress(PartLost):
                said = wire.encode(wire.WorkerSpared(worker))
                await http.call(
                    "POST", wire.SPARED_PATH, said, seconds=self._config.run.stall_seconds
                )

    def _hear(self, name: str, message: Message) -> None:
        match message:
            case Beat():
                self._watchdog.hear(name, message)
                self.children.memory[name] = message.memory_bytes
                return
            case FirstTokenMade():
                self._budgets.of(name).earn()
                return
            case ModelReady():
                self._lives.came_up()
                self.children.model_ready(message)
            case Ready(url):
                self._came_up(name)
                if url is not None:
                    gateway = next(part for part in self._gateways if part.name == name)
                    # before the address is announced: whoever waits for one may then read the other
                    self._write_endpoint(gateway, url)
                    if gateway.shard:
                        return
            case RestartWorker(part, why):  # a worker that hangs
                self._watchdog.condemn(part, why)
            case Progress(status):
                status = self._statuses.whole(name, status)
                self._has_come_to(status)
                message = Progress(status)
            case WarmStart():
                self._watchdog.progress(message)
            case _:
                pass
        self._on_message(message)

    def _came_up(self, name: str) -> None:
        self._watchdog.ready(name)
        self.children.ready.add(name)
        self._engines.came_up(name)

    def _write_endpoint(self, gateway: GatewayPart, url: str) -> None:
        model = str(Path(self.children.model.folder).resolve())
        endpoint = Endpoint(url, self._control_token, self._config.run.name, model)
        write_endpoint(gateway.folder, endpoint)

    def _has_come_to(self, status: Status) -> None:
        totals = status.totals
        self._workers.are_done = status.phase is Phase.DONE
        if self._budgets.is_further(status.step):
            self._earn()
        self._watchdog.progress(
            (
                status.phase,
                status.step,
                status.evaluated,
                totals.generated_tokens,
                totals.rollouts,
            )
        )

    def _earn(self) -> None:
        """Notes that the run has made a step, so that all parts have worked. Engines tell of their
        own work.
        """
        for name in self.children.newest.keys() - self._engines.parts.keys():
            self._budgets.of(name).earn()

    # --- Its end ----------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Waits until the parts have ended, and then for their last messages. A cancellation kills
        the parts at once.
        """
        for part in self._gateways:
            part.place.refuse()
        for engine in self._engines.parts.values():
            engine.place.refuse()
        seconds = max(0.5, self._config.run.stop_seconds - WRITING_SECONDS)
        await self.children.stop(seconds=seconds)
        await self.children.last_words(self._hear_last)

    def _hear_last(self, name: str, message: Message) -> None:
        """Handles a message that arrives after the part's end: only its status counts. Connections
        that break at this time raise no alarm.
        """
        if isinstance(message, Progress):
            self._on_message(Progress(self._statuses.whole(name, message.status)))
