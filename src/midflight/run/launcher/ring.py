"""The launcher's view of a run: its processes, started together, listened to, restarted within a
budget, always stopped.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `Ring._rank` (one each) | a trainer process's messages | its end; that of the first is the trainer's | the process |
| `Ring._rollout` | the rollout process's messages | its end, which is an error before the trainer's | cancellation |
| `Ring._worker` (one each) | the worker's messages | its end; then it starts it again | cancellation, or starts that fail |
| `Ring._watch` | beats | its interval; the stacks of a process that hangs, which it then ends | time |

Torch-free: this process only watches.
"""

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from midflight import given
from midflight.config.agent import entries_of
from midflight.config.derived import num_workers
from midflight.config.devices import VISIBLE, num_present, visible
from midflight.config.seats import config_in_place, device_map
from midflight.config.sections import Config
from midflight.config.shards import shard_of, unsharded
from midflight.errors import first_error
from midflight.observe.logs import PROCESS_VARIABLE
from midflight.observe.status import Phase
from midflight.run.endpoint import Endpoint, remove_endpoint, write_endpoint
from midflight.run.heart import Beat
from midflight.run.launcher.budgets import Budgets
from midflight.run.launcher.engines import Access, EnginePart, Engines
from midflight.run.launcher.gateways import GatewayPart, Statuses
from midflight.run.launcher.lives import Lives
from midflight.run.launcher.watchdog import LOOK_SECONDS, Hung, Watchdog
from midflight.run.parts import (
    TEACHER,
    Condemned,
    Failed,
    Message,
    ModelReady,
    PartLost,
    ProcessKind,
    Progress,
    Purpose,
    Ready,
    Restarted,
    RolloutSpec,
    Spec,
    Stalled,
    TrainerSpec,
    WarmStart,
    Words,
    Worked,
    WorkerSpec,
    serve_while,
)
from midflight.run.places.local import LocalPlaces
from midflight.run.places.port import (
    Child,
    HasDescriptor,
    PartFailed,
    Place,
    Places,
    error_of,
    stop_all,
)
from midflight.run.scratch import remove_left, segment_name

WRITING_SECONDS = 2.0
"""Of `stop_seconds`, what the launcher keeps for summary and plot after its parts have ended."""
MAX_FAILED_STARTS = 3
"""Of one worker in a row, before the run fails: its connection is refused, or the machine has no
room for it.
"""
LAST_WORDS_SECONDS = 0.5
"""To read what ended processes left in their pipes."""
OTHERS_STAY = "It goes on from its store; trainer, engines and the other gateways stay."
ONE_ARENA = {"MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "1")}
"""Set for processes with tensors: glibc gives threads memory of their own, and no thread uses what
another has freed. Versions are staged and steps are made in whichever thread is free, so that an
engine of 135 million parameters would keep 0.4 GB for nothing."""
OWN_REASON_SECONDS = 5.0
"""For a part that was lost to say why itself, or to be seen to end: its connections break first,
and a busy machine takes seconds more.
"""


class Ring:
    """One attempt at a run. `on_message` hears everything the parts say; it must not raise or
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
        budgets: Budgets | None = None,
        objects: bytes = given.NOTHING,
        watchdog: Watchdog | None = None,
    ) -> None:
        """`lock` holds the run's folder while a part that writes there lives. `budgets` outlive one
        attempt. `objects`: of a program, packed.
        """
        self._objects = objects
        self._config = config
        self._on_message = on_message
        self._given_model = model
        self._writing = () if lock is None else (lock,)
        self._control_token = control_token
        self._engine_token = secrets.token_urlsafe(24)
        self._budgets = budgets or Budgets(config.run.restarts)
        self._watchdog = watchdog or Watchdog(stall_seconds=config.run.stall_seconds)
        self._lives = Lives(Path(config.run.folder), self._budgets, self._watchdog, say=on_message)
        self._worker_token = secrets.token_urlsafe(24)
        self._segment = segment_name(Path(config.run.folder))
        self.children: dict[str, Child] = {}
        """The newest process of each part."""
        self._ready = set[str]()
        """Parts that have come up and not ended."""
        self._devices: Mapping[str, tuple[int, ...]] = {}
        """GPUs of this machine, by the part that is to see them."""
        self._rank_places: Sequence[Place] = ()
        self._workers = 0
        """Processes that run the agents of each gateway."""
        self._is_done = False
        """Nothing is left to be rolled out: parts that end now have done so because the rollout
        process does.
        """
        self._told = Statuses()
        self.memory: dict[str, int] = {}
        """Bytes of the parts that this process cannot look at, as each told last."""

    async def run(self, purpose: Purpose, *, resume: bool = False) -> None:
        """Until what `purpose` ends it by, or until a part fails. With our own trainer that is its
        last step, evaluated and exported. `resume`: the trainer goes on from its last
        checkpoint."""
        self._model: asyncio.Future[ModelReady] = asyncio.get_running_loop().create_future()
        if self._given_model is not None:
            self._model.set_result(self._given_model)
        async with self._new_places() as self._places:
            await self._run(purpose, resume=resume)

    def _new_places(self) -> Places:
        if self._config.cluster.kind == "local":
            return LocalPlaces()
        from midflight.run.places.ray import ray_places

        return ray_places(self._config, say=lambda text: self._on_message(Words(text)))

    async def _run(self, purpose: Purpose, *, resume: bool) -> None:
        gateway = self._config.gateway
        trains = purpose is Purpose.TRAIN
        taught = purpose in (Purpose.TRAIN, Purpose.ROLLOUTS)
        self.lay_out(ranks=trains, teacher=taught)
        config = self._config if trains else unsharded(self._config)
        self._gateway = await self._places.take(
            ProcessKind.ROLLOUT, host=gateway.host, port=gateway.port
        )
        beside = [
            await self._places.take(ProcessKind.ROLLOUT, host=gateway.host)
            for _ in range(1, config.gateway.shards)
        ]
        self._gateways = [
            GatewayPart(shard, place, shard_of(config, shard))
            for shard, place in enumerate([self._gateway, *beside])
        ]
        access = Access(self.url, self._control_token, self._engine_token, self._segment)
        self._engines = Engines(
            *(self._config, self._places, access),
            budgets=self._budgets,
            serving=self._ready,
            say=self._on_message,
            start=self._start_engine,
            follow=self._brief_and_follow,
            memory=partial(self._memory_words, trains=trains),
            holds=purpose is Purpose.SERVE,
        )
        engines = await self._engines.take(with_teacher=taught)
        remove_left()
        running = [*engines, self._watch(), self._places.watch()]
        rollout, *rollouts = [self._rollout(purpose, part) for part in self._gateways]
        self._workers = self._num_workers(purpose)
        running += [
            *rollouts,
            *(
                self._worker(name, part)
                for part in self._gateways
                for name in self._workers_of(part)
            ),
        ]
        try:
            if trains:
                await serve_while(
                    self._lives.lead(partial(self._trainer, resume), self._end_trainer),
                    rollout,
                    *running,
                )
            else:
                await serve_while(rollout, *running)
        finally:
            try:
                await self._end()
            finally:  # also when that is cut short
                remove_left()
                for part in self._gateways:
                    remove_endpoint(part.folder, self._control_token)

    def lay_out(self, *, ranks: bool, teacher: bool) -> None:
        """Gives each process that computes on GPUs of this machine its own; a cluster gives each
        seat its own.
        """
        laid = device_map(
            self._config, number=num_present(os.environ) or None, ranks=ranks, teacher=teacher
        )
        self._devices = {part.who: part.devices for part in laid if part.devices}

    def _memory_words(self, *, trains: bool) -> str:
        # it knows clusters, which few runs need
        from midflight.run.places.fit import memory_words, this_hardware

        return memory_words(self._config, this_hardware(), trains=trains)

    async def _end(self) -> None:
        """Waits for the parts' ends, and for what they still said; a cancellation kills them at
        once.
        """
        for place in (part.place for part in (*self._gateways, *self._engines.parts.values())):
            place.refuse()
        await stop_all(
            [*self.children.values()],
            seconds=max(0.5, self._config.run.stop_seconds - WRITING_SECONDS),
        )
        await self._last_words()

    async def _watch(self) -> None:
        """Waits for the interval to pass, for ever; ended by its task group. Who hangs is shown and
        ended: its own task starts it again.
        """
        async with asyncio.TaskGroup() as endings:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                for child in self.children.values():
                    child.cut_log()
                    self._watchdog.see(child.name, child.state)
                found = self._watchdog.look()
                if not found and self._watchdog.due():
                    self._on_message(
                        Stalled(f"{self._watchdog.standstill()}.\n{self._watchdog.report()}")
                    )
                for hung in found:
                    report = self._watchdog.report()
                    self._watchdog.end(hung.name)
                    endings.create_task(self._end_hung(hung, self.children[hung.name], report))

    async def _end_hung(self, hung: Hung, child: Child, report: str) -> None:
        """Waits for the stacks of a process that can still write them; and before the end of a
        worker that is stopped, for its gateway to hear that no agent is to blame."""
        if hung.stopped and child.part is ProcessKind.WORKER:
            await self._spare(hung.name)
        stacks = (
            ""
            if hung.stopped
            else f"\nthe stacks of {hung.name} (pid {child.pid}):\n{await child.stacks()}"
        )
        self._on_message(Stalled(f"{hung.why}.\n{report}{stacks}"))
        child.condemn(hung.why)

    async def _spare(self, worker: str) -> None:
        """Tells the gateway whose agents it runs. Waits for its answer, `stall_seconds` at most:
        one that does not answer hangs itself.
        """
        # only here and for engines does the launcher ask anybody
        from midflight.run.api import worker_wire as wire
        from midflight.wire.client import HttpClient

        gateway = next(part for part in self._gateways if worker in self._workers_of(part))
        async with HttpClient(gateway.url, lost=PartLost, token=self._control_token) as http:
            with suppress(PartLost):
                said = wire.encode(wire.WorkerSpared(worker))
                await http.call(
                    "POST", wire.SPARED_PATH, said, seconds=self._config.run.stall_seconds
                )

    @property
    def url(self) -> str:
        return self._gateways[0].url

    async def _trainer(self, resume: bool, life: int) -> None:
        """The first rank's end is the trainer's. The others end with it, and if one fails all
        do.
        """
        for place in self._rank_places:  # of an earlier life
            place.close()
        self._rank_places = first, *others = await self._places.take_all(
            ProcessKind.TRAINER, self._config.trainer.ranks
        )
        config = config_in_place(self._config, "trainer").model_dump_json()
        meeting = f"{first.host}:{first.port}"
        spec = TrainerSpec(
            config,
            self.url,
            self._control_token,
            self._segment,
            resume or life > 0,
            life,
            meeting=meeting,
        )
        spec = msgspec.structs.replace(
            spec, further_urls=tuple(part.url for part in self._gateways[1:])
        )
        ranks = [
            self._rank(msgspec.structs.replace(spec, rank=rank), place)
            for rank, place in enumerate(others, start=1)
        ]
        await serve_while(
            self._rank(msgspec.structs.replace(spec, meeting_fd=first.fd), first), *ranks
        )

    async def _end_trainer(self) -> None:
        await stop_all(
            [child for name, child in self.children.items() if name.startswith("trainer")],
            seconds=0.0,
        )

    async def _rank(self, spec: TrainerSpec, place: Place) -> None:
        trainer = await self._start(
            ProcessKind.TRAINER,
            f"trainer{spec.rank or ''}",
            place,
            listens=spec.meeting_fd is not None,
            writes=True,
        )
        await trainer.tell(msgspec.structs.replace(spec, host=place.host))
        try:
            await self._follow(trainer)
        except PartLost as lost:
            await asyncio.sleep(OWN_REASON_SECONDS)
            raise PartFailed(str(lost), part=trainer.name) from lost

    async def _rollout(self, purpose: Purpose, part: GatewayPart) -> None:
        """With several, one that dies is started again alone, within its budget, and goes on from
        its store.
        """
        again = False
        while True:
            try:
                await self._rollout_life(purpose, part, again=again)
                return
            except PartFailed as failure:
                possible = len(self._gateways) > 1 and part.name in self._ready
                said = self._budgets.spend_on(
                    failure, now=asyncio.get_running_loop().time(), possible=possible
                )
            self._on_message(msgspec.structs.replace(said, error=f"{said.error}\n{OTHERS_STAY}"))
            self._ready.discard(part.name)
            # a failed one may linger, and its successor listens on the same socket
            self.children[part.name].signal(signal.SIGKILL)
            await self.children[part.name].ended()
            await asyncio.sleep(said.seconds)
            again = True

    async def _rollout_life(self, purpose: Purpose, part: GatewayPart, *, again: bool) -> None:
        has_agents = purpose is not Purpose.SERVE and not self._workers
        entries = entries_of(self._config.environment) if has_agents else ()
        rollout = await self._start(
            ProcessKind.ROLLOUT, part.name, part.place, listens=True, writes=True, arguments=entries
        )
        addresses = self._engines.addresses()
        teacher = addresses.pop(TEACHER, None)

        def spec(model: ModelReady) -> Spec:
            return RolloutSpec(
                config=part.config.model_dump_json(),
                model=model.folder,
                socket_fd=part.place.fd,
                url=part.url,
                token=self._engine_token,
                control_token=self._control_token,
                engines=addresses,
                teacher=teacher,
                worker_token=self._worker_token if self._workers else None,
                workers=tuple(self._workers_of(part)),
                purpose=purpose,
                version=model.version,
                checkpoint=None if again else model.checkpoint,
                alarms=() if again else model.alarms,
                shard=part.shard,
                owner=self.url if part.shard else None,
                again=again,
            )

        await self._brief_and_follow(rollout, spec)
        if purpose is Purpose.TRAIN:
            raise PartFailed("the rollout process ended before the trainer did", part=rollout.name)

    def _num_workers(self, purpose: Purpose) -> int:
        """Of each gateway."""
        return 0 if purpose is Purpose.SERVE else num_workers(self._gateways[0].config.environment)

    def _workers_of(self, part: GatewayPart) -> Sequence[str]:
        return [f"worker{part.shard * self._workers + index}" for index in range(self._workers)]

    async def _worker(self, name: str, part: GatewayPart) -> None:
        """Runs one process of agents, and starts it again whenever it dies, as agents may have it.
        `PartFailed` if it does not come up.
        """
        failed_starts = 0
        num_ended = 0
        error = ""
        while failed_starts < MAX_FAILED_STARTS:
            worker = await self._start(
                ProcessKind.WORKER, name, part.place, arguments=entries_of(self._config.environment)
            )
            try:
                await worker.tell(
                    WorkerSpec(
                        name,
                        part.url,
                        self._worker_token,
                        self._config.environment.model_dump_json(),
                        self._config.gateway.public_url,
                    )
                )
                await self._follow(worker)
                error = f"{name} ended, though nobody asked it to"
            except (PartFailed, PartLost) as failure:
                error = str(failure)
            failed_starts = 0 if name in self._ready else failed_starts + 1
            self._ready.discard(name)
            worker.signal(signal.SIGKILL)  # a failed one may linger
            await worker.ended()
            if self._is_done:
                return
            num_ended += 1
            # the first, second, fourth, eighth: an environment may do so all the time
            if num_ended & (num_ended - 1) == 0:
                again = "" if num_ended == 1 else f" It was the {num_ended}th time."
                self._on_message(Restarted(name, error + again, None))
        raise PartFailed(
            (
                f"{name} was started {MAX_FAILED_STARTS} times and ended each time before it ran "
                f"an agent: {error}"
            ),
            part=name,
        )

    async def _start_engine(self, part: EnginePart) -> Child:
        return await self._start(
            ProcessKind.ENGINE, part.name, part.place, listens=True, arguments=[part.kind]
        )

    async def _start(
        self,
        part: ProcessKind,
        name: str,
        place: Place,
        *,
        listens: bool = False,
        writes: bool = False,
        arguments: Sequence[str] = (),
    ) -> Child:
        """`writes`: into the run's folder, so that it holds that too."""
        threads = {
            ProcessKind.ENGINE: self._config.engine.threads,
            ProcessKind.TRAINER: self._config.trainer.threads,
        }.get(part, 1)
        environ = {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if part in (ProcessKind.ENGINE, ProcessKind.TRAINER):
            environ |= ONE_ARENA
        if name in self._devices:
            environ[VISIBLE] = visible(self._devices[name], os.environ)
        if self._config.observe.log_format == "json":
            environ[PROCESS_VARIABLE] = name
        log = Path(self._config.run.folder) / "logs" / f"{name}.log"
        objects = given.NOTHING if part is ProcessKind.ENGINE else self._objects
        inherited = self._writing if writes else ()
        child = place.child(
            part,
            name,
            log=log,
            environ=environ,
            arguments=arguments,
            objects=objects,
            listens=listens,
            inherited=inherited,
        )
        self.children[name] = child
        await child.start()
        self._watchdog.begin(name, child.pid)
        return child

    async def _brief_and_follow(self, child: Child, spec: Callable[[ModelReady], Spec]) -> None:
        """Hears the child from its start, and tells it its spec as soon as there is a model; its
        failure may come before.
        """

        async def brief() -> None:
            await child.tell(spec(await asyncio.shield(self._model)))

        try:
            await serve_while(self._follow(child), brief())
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def _last_words(self) -> None:
        """What parts said while they ended: the last status. Waits for nothing but bytes that are
        there.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                for child in (child for child in self.children.values() if child.was_started):
                    async for message in child.messages():
                        # that connections break now alarms nobody
                        if isinstance(message, Progress):
                            self._on_message(Progress(self._told.whole(child.name, message.status)))

    async def _follow(self, child: Child) -> None:
        """Hears the child until it ends; its failure is ours, with its traceback (I9). Ended by the
        child.
        """
        try:
            async for message in child.messages():
                if isinstance(message, Failed):
                    raise error_of(child.name, message)
                self._hear(child.name, message)
            # one that has only closed its end of the pipe is silent, and found to be
            status = await child.ended()
        finally:
            self._watchdog.end(child.name)
            self.memory.pop(child.name, None)
        if status != 0:
            raise child.died(status)

    def _earn(self) -> None:
        """The run has made a step: all but the engines, which tell their own work, have worked."""
        for name in self.children.keys() - self._engines.parts.keys():
            self._budgets.of(name).earn()

    def _hear(self, name: str, message: Message) -> None:
        match message:
            case Beat():
                self._watchdog.hear(name, message)
                self.memory[name] = message.memory_bytes
                return
            case ModelReady():
                self._lives.came_up()
                if not self._model.done():  # a later trainer brings what it has by a handover
                    self._model.set_result(message)
            case Ready(url):
                self._watchdog.ready(name)
                self._ready.add(name)
                self._engines.came_up(name)
                # written before the address is announced: whoever waits for one may then read the
                # other
                if url is not None:
                    model = str(Path(self._model.result().folder).resolve())
                    folder = next(part.folder for part in self._gateways if part.name == name)
                    write_endpoint(
                        folder, Endpoint(url, self._control_token, self._config.run.name, model)
                    )
                    if folder != Path(self._config.run.folder):
                        return
            case Worked():
                self._budgets.of(name).earn()
                return
            case Condemned(part, why):  # a worker that hangs
                self._watchdog.condemn(part, why)
            case Progress(status):
                message = Progress(status := self._told.whole(name, status))
                totals = status.totals
                self._is_done = status.phase is Phase.DONE
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
            case WarmStart():
                self._watchdog.progress(message)
            case _:
                pass
        self._on_message(message)
