"""All processes of one attempt at a run. They are started together, each is kept alive by its loop
below within a budget of restarts, and they are always stopped.

| loop | keeps | in |
|---|---|---|
| `TrainerRanks.keep` | the processes of the trainer | `ranks.py` |
| `Gateways.keep` | a rollout process | `gateways.py` |
| `Engines.keep` | an engine | `engines.py` |
| `Workers.keep` | a process that runs agents | `workers.py` |
| `ProcessWatch.run` | nothing: it finds processes that hang, and ends them | `watch.py` |

The launcher never imports torch.
"""

import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from midflight import given
from midflight.config.sections import Config
from midflight.config.shards import unsharded
from midflight.observe.status import Phase, Status
from midflight.run.endpoint import Endpoint, remove_endpoint, write_endpoint
from midflight.run.heartbeat import Beat
from midflight.run.launcher.children import Children
from midflight.run.launcher.engines import Engines
from midflight.run.launcher.gateways import GatewayPart, Gateways, Statuses, take_gateways
from midflight.run.launcher.ranks import TrainerRanks
from midflight.run.launcher.restarts import RestartBudgets
from midflight.run.launcher.ring_context import RingContext
from midflight.run.launcher.watch import ProcessWatch
from midflight.run.launcher.watchdog import Watchdog
from midflight.run.launcher.workers import Workers
from midflight.run.parts import (
    FirstTokenMade,
    Message,
    ModelReady,
    Notice,
    Progress,
    Purpose,
    Ready,
    RestartWorker,
    WarmStart,
    serve_while,
)
from midflight.run.places.local import LocalPlaces
from midflight.run.places.port import HasDescriptor, Places
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
        self._statuses = Statuses()
        self._places: Places
        self._context: RingContext
        self._gateways: Sequence[GatewayPart]
        self._engines: Engines
        self._workers: Workers
        self._trainer: TrainerRanks
        self.children = Children(
            config, watchdog=self._watchdog, hear=self._hear, objects=objects, lock=lock
        )

    # --- Its beginning ----------------------------------------------------------------------------

    async def run(self, purpose: Purpose, *, resume: bool = False) -> None:
        """Runs until the end that `purpose` sets, or until a part fails. A run with our own trainer
        ends with its last step, evaluated and exported. With `resume`, the trainer goes on from its
        last checkpoint.
        """
        self.children.expect_model()
        if self._given_model is not None:
            self.children.model_ready(self._given_model)
        config = self._config if purpose is Purpose.TRAIN else unsharded(self._config)
        self._places = self._new_places(config)
        with closing(self._places):
            await self._run(config, purpose, resume=resume)

    def _new_places(self, config: Config) -> Places:
        if config.cluster.kind == "local":
            return LocalPlaces()
        from midflight.run.places.ray import ray_places

        return ray_places(config, say=lambda text: self._on_message(Notice(text)))

    async def _run(self, config: Config, purpose: Purpose, *, resume: bool) -> None:
        """`config` has the number of gateways that the purpose has."""
        trains = purpose is Purpose.TRAIN
        taught = purpose in (Purpose.TRAIN, Purpose.ROLLOUTS)
        self.children.lay_out(ranks=trains, teacher=taught)
        self._gateways = await take_gateways(config, self._places, purpose)
        context = self._context = self._new_context(purpose)
        self._engines = Engines(context)
        engines = await self._engines.take(with_teacher=taught)
        remove_left()
        first, *services = self._gateways_and_workers(context)
        watch = ProcessWatch(self.children, self._watchdog, self._on_message, self._spare)
        services = [*engines, watch.run(), self._places.watch(), *services]
        try:
            if trains:
                self._trainer = TrainerRanks(context, self._watchdog, resume=resume)
                await serve_while(self._trainer.keep(), first, *services)
            else:
                await serve_while(first, *services)
        finally:
            try:
                await self._end()
            finally:  # also when that is cut short
                remove_left()
                for part in self._gateways:
                    remove_endpoint(part.folder, self._control_token)

    def _new_context(self, purpose: Purpose) -> RingContext:
        return RingContext(
            self._config,
            purpose,
            self._places,
            self.children,
            self._budgets,
            self._on_message,
            gateways=tuple(part.url for part in self._gateways),
            control_token=self._control_token,
            engine_token=secrets.token_urlsafe(24),
            worker_token=secrets.token_urlsafe(24),
            segment=segment_name(Path(self._config.run.folder)),
            seconds=self._seconds,
        )

    def _gateways_and_workers(self, context: RingContext) -> Sequence[Coroutine[Any, Any, None]]:
        """Returns the loops that keep them running. The loop of the first gateway comes first,
        because its end is the end of a run without a trainer.
        """
        gateways = Gateways(context, self._gateways, self._engines)
        self._workers = Workers(context)
        loops = [gateways.keep(part) for part in self._gateways]
        for part in self._gateways:
            loops += [self._workers.keep(name, part) for name in part.workers]
        return loops

    # --- While it runs ----------------------------------------------------------------------------

    async def _spare(self, worker: str) -> None:
        # few runs need it, and it imports an HTTP client
        from midflight.run.launcher.gateway_client import GatewayClient

        gateway = next(part for part in self._gateways if worker in part.workers)
        await GatewayClient(self._context).spare(worker, url=gateway.url)

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
                self._trainer.came_up()
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
