"""The processes of a ring that run agents, over all their lives.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `Workers.keep` (one each) | the worker's messages | its end; then it starts it again | cancellation, or starts that fail |
"""

import asyncio
from itertools import count

from midflight.config.agent import entries_of
from midflight.run.launcher.gateways import GatewayPart
from midflight.run.launcher.restarts import FAILED_STARTS, RestartBudget, is_power_of_two
from midflight.run.launcher.ring_context import RingContext
from midflight.run.parts import PartLost, ProcessKind, Restarted, WorkerSpec
from midflight.run.places.port import Child, PartFailed


class Workers:
    """Keeps the worker processes running, even if agents break them. The gateways know which worker
    belongs to which of them.
    """

    def __init__(self, context: RingContext) -> None:
        self._context = context
        self.are_done = False
        """Notes that no rollouts are left: workers that end now do so because the rollout process
        does.
        """

    async def keep(self, name: str, gateway: GatewayPart) -> None:
        """Runs one process of agents, and starts it again whenever it dies, which agents may cause.
        Raises `PartFailed` if it does not come up.
        """
        budget = RestartBudget(FAILED_STARTS)
        for num_ended in count(1):
            worker = await self._context.children.start(
                ProcessKind.WORKER,
                name,
                gateway.place,
                arguments=entries_of(self._context.config.environment),
            )
            error = await self._life(worker, gateway)
            has_worked = name in self._context.children.ready
            if has_worked:
                budget.earn()
            self._context.children.ready.discard(name)
            await self._context.children.kill(name)  # a failed one may linger
            if self.are_done:
                return
            if budget.spend(asyncio.get_running_loop().time(), counts=not has_worked) is None:
                raise PartFailed(
                    f"{name} was started {FAILED_STARTS.restarts + 1} times and ended each time "
                    f"before it ran an agent: {error}",
                    part=name,
                )
            if is_power_of_two(num_ended):  # an environment may do so all the time
                again = "" if num_ended == 1 else f" It was the {num_ended}th time."
                self._context.say(Restarted(name, error + again, None))

    async def _life(self, worker: Child, gateway: GatewayPart) -> str:
        """Waits for the end of one process, and returns why it ended."""
        spec = WorkerSpec(
            worker.name,
            gateway.url,
            self._context.worker_token,
            self._context.config.environment.model_dump_json(),
            self._context.config.gateway.public_url,
        )
        try:
            await worker.tell(spec)
            await self._context.children.follow(worker)
        except (PartFailed, PartLost) as failure:
            return str(failure)
        return f"{worker.name} ended, though nobody asked it to"
