"""The watch over a ring's processes: it shows what the watchdog finds, and ends those processes.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `ProcessWatch.run` | beats | its interval; the stacks of a process that hangs, which it then ends | time |
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from midflight.run.launcher.children import Children
from midflight.run.launcher.watchdog import LOOK_SECONDS, HungProcess, Watchdog
from midflight.run.parts import Message, ProcessKind, Stalled
from midflight.run.places.port import Child


@dataclass(frozen=True, slots=True)
class ProcessWatch:
    """Looks at all processes once a second. It restarts no process: the loop that keeps a process
    does that.
    """

    children: Children
    watchdog: Watchdog
    say: Callable[[Message], None]
    spare: Callable[[str], Awaitable[None]]
    """It is awaited before a worker is ended that could not have run its agents, so that its
    gateway blames none of them.
    """

    async def run(self) -> None:
        """Waits for the interval to pass, for ever; ended by its task group."""
        async with asyncio.TaskGroup() as endings:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                self._look(endings)

    def _look(self, endings: asyncio.TaskGroup) -> None:
        for child in self.children.newest.values():
            child.cut_log()
            self.watchdog.see(child.name, child.state)
        found = self.watchdog.look()
        if not found and self.watchdog.due():
            self.say(Stalled(f"{self.watchdog.standstill()}.\n{self.watchdog.report()}"))
        for hung in found:
            report = self.watchdog.report()
            self.watchdog.end(hung.name)
            child = self.children.newest[hung.name]
            endings.create_task(self._end(hung, child, report))

    async def _end(self, hung: HungProcess, child: Child, report: str) -> None:
        """Waits for the stacks of a process that can still write them. Before it ends a stopped
        worker, it waits until the worker's gateway knows that no agent is to blame.
        """
        if hung.stopped and child.part is ProcessKind.WORKER:
            await self.spare(hung.name)
        stacks = ""
        if not hung.stopped:
            written = await child.stacks()
            stacks = f"\nthe stacks of {hung.name} (pid {child.pid}):\n{written}"
        self.say(Stalled(f"{hung.why}.\n{report}{stacks}"))
        child.condemn(hung.why)
