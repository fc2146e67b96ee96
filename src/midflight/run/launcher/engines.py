"""The engines of a ring, over all their lives. An engine that dies is started again. It moves if
its machine is lost, and joins later if there was no room for it at first.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `Engines.keep` (one each) | the engine's messages | its end; then it starts it again | cancellation, or a spent budget |
| `Engines._leave` (one each) | nothing | word that its place is taken away; then for the gateway to let it go | that word, its requests; cancellation |
| `Engines.join` (one each) | nothing | a place, however long that takes; then as above | the cluster, cancellation |
"""

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from midflight.config.derived import num_engines
from midflight.config.seats import config_in_place, engine_resources, engines_min, server_of
from midflight.errors import RunFailed, first_error
from midflight.observe.readable import duration
from midflight.run.launcher.killed_starts import KilledStarts, is_told, why_ended, why_killed
from midflight.run.launcher.ring_context import RingContext
from midflight.run.parts import (
    TEACHER,
    EngineSpec,
    ModelReady,
    Notice,
    ProcessKind,
    Purpose,
    Restarted,
    Spec,
    serve_while,
)
from midflight.run.places.port import Child, PartFailed, Place, Wants
from midflight.run.reminder import Reminder

if TYPE_CHECKING:
    from midflight.run.launcher.gateway_client import GatewayClient


@dataclass(frozen=True, slots=True)
class EnginePart:
    """One engine process, in all its lives. `url` is the address of a server that it attaches to.
    `model` is the teacher's, which has its own.
    """

    name: str
    kind: str
    place: Place
    url: str | None = None
    model: str | None = None
    joins: bool = False
    """The rollout process did not get this address when it started."""

    @property
    def address(self) -> str:
        return f"http://{self.place.host}:{self.place.port}"


class Engines:
    """Keeps the engines running."""

    def __init__(self, context: RingContext) -> None:
        self._context = context
        self._config = context.config
        self._serving = context.children.ready
        self._killed = KilledStarts()
        self.parts: dict[str, EnginePart] = {}
        self._up: dict[str, asyncio.Event] = {}
        self._apart = set[str]()
        """The engines that only answer requests that are not trained on."""
        self._spent = set[str]()
        """Engines that wait for a restart to come back."""
        self._reminders: dict[str, Reminder] = {}
        """The engines of which people are reminded that they do not serve."""

    async def take(self, *, with_teacher: bool) -> Sequence[Coroutine[Any, Any, None]]:
        """Takes places for the engines that the run starts with. Returns the loops that keep them,
        and those that have the others join.
        """
        section = self._config.engine
        teacher = self._config.distillation.teacher
        urls = section.urls or (None,) * num_engines(section)
        least = engines_min(self._config)
        async with asyncio.TaskGroup() as group:
            taken = [group.create_task(self._take(f"engine{index}")) for index in range(least)]
        first = [
            EnginePart(f"engine{index}", section.kind, place.result(), url=urls[index])
            for index, place in enumerate(taken)
        ]
        num_trained = least - self._config.environment.untracked.engines
        self._apart = {part.name for part in first[num_trained:]}
        if teacher is not None and with_teacher:
            place = await self._take(TEACHER)
            first.append(EnginePart(TEACHER, "embedded", place, model=str(teacher)))
        self.parts = {part.name: part for part in first}
        loops = [self.keep(part) for part in first]
        for index, url in enumerate(urls):
            if index >= least:
                loops.append(self.join(f"engine{index}", url))
        return loops

    def _take(self, name: str, *, for_ever: bool = False) -> Coroutine[Any, Any, Place]:
        server = server_of(self._config, name)
        wants = None
        if server is not None:
            wants = Wants(engine_resources(self._config, server), server.host)
        return self._context.places.take(ProcessKind.ENGINE, for_ever=for_ever, wants=wants)

    def addresses(self) -> dict[str, str]:
        return {part.name: part.address for part in self.parts.values()}

    def came_up(self, name: str) -> None:
        self._stop_reminding(name)
        if (event := self._up.get(name)) is not None:
            event.set()

    async def join(self, name: str, url: str | None) -> None:
        """Waits for a place, however long that takes, and then keeps the engine there."""
        place = await self._elsewhere(name, for_ever=True)
        await self.keep(EnginePart(name, self._config.engine.kind, place, url=url, joins=True))

    async def keep(self, part: EnginePart) -> None:
        """Runs one engine, and starts it again when it dies. It comes back with the first weights,
        in quarantine; the teacher comes back with its own.
        """
        try:
            while True:
                part = await self._next_life(part)
        finally:
            self._stop_reminding(part.name)

    async def _next_life(self, part: EnginePart) -> EnginePart:
        """Waits for the end of one process, then for the time and the place of the next. Returns
        that one.
        """
        self.parts[part.name] = part
        failure = await self._life(part)
        was_killed_early = failure.was_killed and part.name not in self._serving
        if part.name in self._serving:
            self._killed.forget([part.name])
            self._killed.forget(
                one for one in self.parts if part.name in self._others(one, self.parts)
            )
        self._serving.discard(part.name)
        if not (part.place.lost or part.place.is_recalled):
            if was_killed_early:  # which says nothing about the model
                failure = self._killed_early(failure)
            left = await self._may_restart(failure, counts=not was_killed_early)
            return replace(part, joins=left or part.joins)
        if part.name == TEACHER:
            raise failure  # its address is told at the start alone
        part.place.close()
        self._context.say(Restarted(part.name, str(failure), None))
        return replace(part, place=await self._elsewhere(part.name), joins=True)

    def _killed_early(self, failure: PartFailed) -> PartFailed:
        """Returns the failure of an engine that was killed while it started. After some kills its
        text also names remedies. Raises `RunFailed` if no engine can be started.
        """
        name = failure.part
        num = self._killed.add(name)
        others = [] if name == TEACHER else self._others(name, self.parts)
        may_come_up = [one for one in others if one not in self._spent]
        candidates = [name, *may_come_up]
        works = bool(self._serving.intersection(others))
        # where there is only service, requests wait however often an engine is killed
        ends = self._context.purpose is not Purpose.SERVE and not works
        if ends and self._killed.have_ended(candidates):
            why = why_ended(sorted(candidates), self._memory())
            raise RunFailed(f"{why}\n{failure}") from failure
        if not is_told(num):
            return failure
        return PartFailed(f"{failure}\n{why_killed(num, name, self._memory())}", part=name)

    def _memory(self) -> str:
        """Says in sentences how much memory there is, how much the parts are estimated to take, and
        what helps.
        """
        # it knows clusters, which few runs need
        from midflight.run.launcher.checks.fit import memory_words, this_hardware

        trains = self._context.purpose is Purpose.TRAIN
        return memory_words(self._config, this_hardware(), trains=trains)

    async def _elsewhere(self, name: str, *, for_ever: bool = False) -> Place:
        """Waits for a place: while other engines serve, longer than for one that the run needs. A
        seat that dies as it is taken is another death of the engine.
        """
        while True:
            try:
                return await self._take(name, for_ever=for_ever)
            except PartFailed as failure:
                await self._may_restart(PartFailed(str(failure), part=name), counts=True)
            except RunFailed:
                if not self._others(name, self._serving):
                    raise

    async def _life(self, part: EnginePart) -> PartFailed:
        """Waits for the unexpected end of one process, and returns its failure."""
        self._up[part.name] = asyncio.Event()
        try:
            engine = await self._context.children.start(
                ProcessKind.ENGINE, part.name, part.place, listens=True, arguments=[part.kind]
            )
        except PartFailed as failure:
            return failure
        try:
            beside = [self._announce(part)] if part.joins else []
            if part.name != TEACHER:
                beside.append(self._leave(part))
            await serve_while(self._follow_on(part, engine), *beside)
            failure = PartFailed(f"{part.name} ended, though nobody asked it to", part=part.name)
        except BaseExceptionGroup as errors:
            failure = first_error(errors)
            if not isinstance(failure, PartFailed):
                raise failure from errors
        # a failed one may linger, and its successor listens on the same socket
        await self._context.children.kill(part.name)
        return failure

    async def _follow_on(self, part: EnginePart, engine: Child) -> None:
        def spec(model: ModelReady) -> Spec:
            return EngineSpec(
                name=part.name,
                model=part.model or model.folder,
                config=config_in_place(self._config, part.name).model_dump_json(),
                socket_fd=part.place.fd,
                token=self._context.engine_token,
                segment=self._context.segment,
                version=model.version,
                url=part.url,
            )

        await self._context.children.brief_and_follow(engine, spec)

    def _gateway_client(self) -> "GatewayClient":
        # few runs need it, and it imports an HTTP client
        from midflight.run.launcher.gateway_client import GatewayClient

        return GatewayClient(self._context)

    async def _leave(self, part: EnginePart) -> None:
        """Waits until its place is recalled, and then for its requests, which end there or go on
        elsewhere; only then it ends.
        """
        await part.place.recalled()
        said = await self._gateway_client().leave(part.name)
        where = f"its place at {part.place.host}, which is about to be taken away"
        raise PartFailed(f"{part.name} leaves {where}{said}", part=part.name)

    async def _announce(self, part: EnginePart) -> None:
        """Waits until the engine serves, and then for the gateway, which is told where it is."""
        await self._up[part.name].wait()
        await self._gateway_client().announce(part.name, part.address)

    def _others(self, name: str, among: Collection[str]) -> Sequence[str]:
        """Returns the other engines `among` these parts. For an engine whose answers are trained
        on, only such engines are returned.
        """
        unlike = set[str]() if name in self._apart else self._apart
        return sorted((self.parts.keys() & among) - {TEACHER, name} - unlike)

    async def _may_restart(self, failure: PartFailed, *, counts: bool) -> bool:
        """Waits for an engine's back-off. Returns True if the engine has left the run meanwhile.
        Only an engine whose answers are not trained on does that.

        Raises the failure when the budget is spent, unless another engine serves or can still come
        up: then the wait is longer.
        """
        name = failure.part
        now = asyncio.get_running_loop().time
        left = False
        budget = self._context.budgets.of(name)
        self._remind(name)
        while (wait := budget.spend(now(), counts=counts)) is None:
            self._spent.add(name)
            others = self._others(name, self.parts.keys() - self._spent)
            if not others or name == TEACHER:
                raise failure
            back = budget.seconds_to_next(now())
            error = f"{failure}\nIts restarts are spent; {self._said_of(others)}."
            self._context.say(Restarted(name, error, 0, back))
            if name in self._apart and not left:
                await self._gateway_client().give_up(name)
                left = True
            await asyncio.sleep(back)
        self._spent.discard(name)
        self._context.say(Restarted(name, str(failure), budget.left(now()), wait))
        await asyncio.sleep(wait)
        return left

    def _said_of(self, engines: Sequence[str]) -> str:
        """Returns a sentence about the present state of these engines."""
        serving = [name for name in engines if name in self._serving]
        if serving:
            return f"{', '.join(serving)} goes on"
        return f"{', '.join(engines)} is being started, and requests wait for that"

    def _remind(self, name: str) -> None:
        """Reminds people of requests that wait because no engine serves, until this one comes
        up.
        """
        log = f"logs/{name}.log in {self._config.run.folder}"

        def say(seconds: float) -> None:
            if not self._serving & self.parts.keys() - {TEACHER}:
                away = f"no engine has served for {duration(seconds)}"
                waits = f"requests wait for {name}, which is being started"
                self._context.say(Notice(f"{away}: {waits}. Its log is {log}."))

        if name not in self._reminders:
            self._reminders[name] = Reminder(say)

    def _stop_reminding(self, name: str) -> None:
        if (reminder := self._reminders.pop(name, None)) is not None:
            reminder.close()
