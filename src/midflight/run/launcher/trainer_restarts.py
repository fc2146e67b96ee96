"""The restarts of a trainer. When one of its ranks is lost, all ranks begin again from the last
checkpoint, and everything else goes on.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `TrainerRestarts.lead` | lives of all ranks together | the end of the first rank; then the back-off of the next life | the ranks; a spent budget |
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from midflight.run.launcher.folder import can_go_on
from midflight.run.launcher.restart_budgets import RestartBudgets
from midflight.run.launcher.watchdog import Watchdog
from midflight.run.parts import Restarted

STAYS = "The trainer goes on from its last checkpoint; engines, gateway and agents stay."


class TrainerRestarts:
    """Starts the trainer again when it fails. If another life cannot help, the failure is raised,
    and all parts may start again. That is so if there is no checkpoint yet, if the trainer did not
    come up beside the others, or if its budget is spent.
    """

    def __init__(
        self,
        folder: Path,
        budgets: RestartBudgets,
        watchdog: Watchdog,
        *,
        say: Callable[[Restarted], None],
    ) -> None:
        self._folder = folder
        self._budgets = budgets
        self._watchdog = watchdog
        self._say = say
        self._came_up = False

    def came_up(self) -> None:
        """Notes that the trainer of this life has its weights, and a place beside the others."""
        self._came_up = True
        self._watchdog.weights_found()

    async def lead(
        self, live: Callable[[int], Awaitable[None]], end: Callable[[], Awaitable[None]]
    ) -> None:
        """Waits for the last step. `live` runs the life of a number until its last step. `end` ends
        all processes of one that failed.
        """
        number = -1
        while True:
            number += 1
            try:
                await live(number)
                return
            except BaseExceptionGroup as failures:
                possible = self._came_up and can_go_on(self._folder)
                again = self._budgets.spend_on(
                    failures, now=asyncio.get_running_loop().time(), possible=possible
                )
            self._came_up = False
            self._watchdog.weights_lost()
            await end()
            self._say(msgspec.structs.replace(again, error=f"{again.error}\n{STAYS}"))
            await asyncio.sleep(again.seconds)
