"""The processes of a run. The launcher starts them, reads their messages and stops them."""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from midflight import given
from midflight.config.devices import VISIBLE, num_present, visible
from midflight.config.seats import device_map
from midflight.config.sections import Config
from midflight.errors import first_error
from midflight.observe.logs import PROCESS_VARIABLE
from midflight.run.launcher.watchdog import Watchdog
from midflight.run.parts import Failed, Message, ModelReady, ProcessKind, Spec, serve_while
from midflight.run.places.port import Child, ChildOrder, HasDescriptor, Place, error_of, stop_all

LAST_WORDS_SECONDS = 0.5
"""The time for reading the messages that ended processes left in their pipes."""
ONE_ARENA = {"MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "1")}
"""Set for processes with tensors. Without it, glibc gives threads memory of their own, and no
thread uses memory that another has freed. Versions are staged and steps are made in any free
thread, so an engine of 135 million parameters would keep 0.4 GB for nothing."""


class Children:
    """Starts processes, gives each its spec once there is a model, and reads the messages of each
    until it ends.
    """

    def __init__(
        self,
        config: Config,
        *,
        watchdog: Watchdog,
        hear: Callable[[str, Message], None],
        objects: bytes = given.NOTHING,
        lock: HasDescriptor | None = None,
    ) -> None:
        """`hear` gets every message of a process except its failure, with the name of its part.
        `objects` are the objects of a program, packed. `lock` holds the run's folder while a part
        that writes there lives.
        """
        self._config = config
        self._watchdog = watchdog
        self._hear = hear
        self._objects = objects
        self._writing = () if lock is None else (lock,)
        self._devices: Mapping[str, tuple[int, ...]] = {}
        """GPUs of this machine, by the part that is to see them."""
        self._model: asyncio.Future[ModelReady]
        self.newest: dict[str, Child] = {}
        """The newest process of each part."""
        self.ready = set[str]()
        """Parts that have come up and not ended."""
        self.memory: dict[str, int] = {}
        """The bytes that each part reported last, of parts that this process cannot look at."""

    # --- The model that they begin with -----------------------------------------------------------

    def expect_model(self) -> None:
        """Specs wait for a model from now on."""
        self._model = asyncio.get_running_loop().create_future()

    def model_ready(self, model: ModelReady) -> None:
        """Records the model, so that specs wait no longer. A later trainer brings its model by a
        handover, and its message is ignored here.
        """
        if not self._model.done():
            self._model.set_result(model)

    @property
    def model(self) -> ModelReady:
        """There is one when a part is ready."""
        return self._model.result()

    # --- Start ------------------------------------------------------------------------------------

    def lay_out(self, *, ranks: bool, teacher: bool) -> None:
        """Gives each process that computes on GPUs of this machine its own; a cluster gives each
        seat its own.
        """
        laid = device_map(
            self._config, number=num_present(os.environ) or None, ranks=ranks, teacher=teacher
        )
        self._devices = {part.who: part.devices for part in laid if part.devices}

    async def start(
        self,
        part: ProcessKind,
        name: str,
        place: Place,
        *,
        listens: bool = False,
        writes: bool = False,
        arguments: Sequence[str] = (),
    ) -> Child:
        """Waits until the process is there. One that `writes` into the run's folder also holds
        it.
        """
        order = ChildOrder(
            part,
            name,
            log=str(Path(self._config.run.folder) / "logs" / f"{name}.log"),
            environ=self._environment(part, name),
            arguments=arguments,
            objects=given.NOTHING if part is ProcessKind.ENGINE else self._objects,
            listens=listens,
        )
        child = place.child(order, inherited=self._writing if writes else ())
        self.newest[name] = child
        await child.start()
        self._watchdog.begin(name, child.pid)
        return child

    def _environment(self, part: ProcessKind, name: str) -> dict[str, str]:
        environ = {
            "OMP_NUM_THREADS": str(self._num_threads(part)),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if part in (ProcessKind.ENGINE, ProcessKind.TRAINER):
            environ |= ONE_ARENA
        if name in self._devices:
            environ[VISIBLE] = visible(self._devices[name], os.environ)
        if self._config.observe.log_format == "json":
            environ[PROCESS_VARIABLE] = name
        return environ

    def _num_threads(self, part: ProcessKind) -> int:
        if part is ProcessKind.ENGINE:
            return self._config.engine.threads
        if part is ProcessKind.TRAINER:
            return self._config.trainer.threads
        return 1

    # --- While they run ---------------------------------------------------------------------------

    async def brief_and_follow(self, child: Child, spec: Callable[[ModelReady], Spec]) -> None:
        """Reads the child's messages from its start, and sends it its spec as soon as there is a
        model. The child may fail before that.
        """

        async def brief() -> None:
            await child.tell(spec(await asyncio.shield(self._model)))

        try:
            await serve_while(self.follow(child), brief())
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def follow(self, child: Child) -> None:
        """Reads the child's messages until it ends. Raises its failure, with its traceback (I9). It
        is ended by the child.
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

    # --- Their ends -------------------------------------------------------------------------------

    async def kill(self, name: str) -> None:
        """Kills the newest process of a part, which may have ended. Waits for its end."""
        child = self.newest[name]
        child.signal(signal.SIGKILL)
        await child.ended()

    async def stop(self, *, seconds: float, only: ProcessKind | None = None) -> None:
        """Waits for the ends of all, or of all of one kind. After `seconds`, or when it is
        cancelled, they are killed.
        """
        children = [child for child in self.newest.values() if only in (None, child.part)]
        await stop_all(children, seconds=seconds)

    async def last_words(self, hear: Callable[[str, Message], None]) -> None:
        """`hear` gets the messages that parts sent while they ended. Waits only for bytes that are
        there.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                for name, child in self.newest.items():
                    if not child.was_started:
                        continue
                    async for message in child.messages():
                        hear(name, message)
