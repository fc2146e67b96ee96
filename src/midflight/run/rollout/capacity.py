"""The number of rollouts that run at once, for training and for evaluations. It is the configured
number, else as many as the engines can hold just now.

A request that an engine cannot decode at once waits inside it, counted as open, and only grows old
there. So there are as many rollouts as the engine has slots, or room for keys, and more where
agents spend part of their time in tools. The bound on age holds in any case (`buffer.staleness`):
that is the hard limit, this is the soft one.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from midflight.buffer.books import Wait
from midflight.config.derived import in_flight, most_in_flight
from midflight.config.sections import Config
from midflight.gateway.fleet.fleet import Fleet
from midflight.types import Capabilities, Trajectory
from midflight.types.facts import RolloutEnded

MOST_IN_TOOLS = 8
"""The most rollouts for each slot, however long their tools take: agents may all come back at once.
"""
MEMORY = 0.98
"""The weight of earlier rollouts in each mean: about the last fifty count."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """The number of rollouts that may run, and its limit: the option that is `set`, the `slots` or
    `keys` of engines, or the bound on `staleness`.
    """

    number: int
    reason: Literal["set", "slots", "keys", "staleness"]

    @property
    def words(self) -> str:
        because = {
            "set": "what the option allows",
            "slots": "what the engines' slots hold",
            "keys": "what the engines' room for keys and values holds",
            "staleness": "all that max_staleness allows",
        }
        return f"{self.number} are {because[self.reason]}"


class Capacity:
    """Follows the engines that take requests, the time that agents spend on requests, and the
    length of their requests. It is synchronous.
    """

    def __init__(self, config: Config, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self.most_turns = 0
        """The most turns that a rollout with a reward took."""
        self._asking = 0.0
        self._running = 0.0
        self._tokens = 0.0
        self._lengths = 0.0
        self._engines: dict[bool, list[Capabilities]] = {False: [], True: []}
        """The engines that take requests, by whether these are of evaluations. While no engine
        does, they are the last that did.
        """
        self.evaluations = EvaluationSlots(self)
        self.on_changed: Callable[[], None] | None = None
        """Called whenever more or fewer may run."""
        fleet.on_changed = self._moved
        self._moved()

    def training(self) -> InFlight:
        """Returns the number of training rollouts that may run; a group fits in any case. Rollouts
        of an evaluation on the same engines are subtracted.
        """
        held, reason = self._holds(evaluates=False)
        # an equal part: the other gateways use the same engines
        slots = -(-held // self._config.gateway.shards)
        beside = self.evaluations.num_running if self._fleet.shares_evaluations() else 0
        number = in_flight(self._config, self._rollouts(slots) - beside)
        if self._config.rollout.max_in_flight is not None:
            return InFlight(number, "set")
        if number >= most_in_flight(self._config.rollout):
            return InFlight(number, "staleness")
        return InFlight(number, reason)

    def full(self, running: int) -> Wait | None:
        """Returns the reason why no further group may start beside so many rollouts, or None if one
        may.
        """
        may = self.training()
        if running + self._config.rollout.group_size <= may.number:
            return None
        return Wait("slots", f"{running} rollouts run; {may.words}")

    def evaluating(self) -> InFlight:
        slots, reason = self._holds(evaluates=True)
        return InFlight(max(1, slots), reason)

    def limits(self) -> dict[str, tuple[int, str]]:
        """Returns for each kind the number of rollouts that may run, and the reason."""
        training = self.training()
        evaluating = self.evaluating()
        return {
            "training": (training.number, training.reason),
            "evaluation": (evaluating.number, evaluating.reason),
        }

    def ended(self, rollout: RolloutEnded) -> None:
        """Notes, at the end of a training rollout, how much of its time it waited for answers, and
        how many there were.
        """
        asking = sum(turn.ended - turn.began for turn in rollout.times)
        self._asking = MEMORY * self._asking + asking
        self._running = MEMORY * self._running + rollout.seconds
        if rollout.error is None:
            self.most_turns = max(self.most_turns, rollout.num_turns)

    def kept(self, trajectory: Trajectory) -> None:
        """Notes the room for keys that the longest row took, on the mean over its answers: all that
        it read, and half of the tokens that were sampled.
        """
        lengths = (len(row.token_ids) - row.num_trainable / 2 for row in trajectory.rows)
        longest = max(lengths, default=0.0)
        self._tokens = MEMORY * self._tokens + longest
        self._lengths = MEMORY * self._lengths + (longest > 0)

    def changed(self) -> None:
        """Wakes the waiting line: a rollout of an evaluation ended, or engines came or went."""
        self.evaluations.follow()
        if self.on_changed is not None:
            self.on_changed()

    def _rollouts(self, slots: int) -> int:
        """The number of rollouts that keep so many slots full."""
        share = 1.0
        if self._asking > 0 and self._running > 0:
            share = self._asking / self._running
        return round(slots / max(share, 1 / MOST_IN_TOOLS))

    def _moved(self) -> None:
        for evaluates in self._engines:
            takers = self._fleet.takers(evaluates=evaluates)
            if takers:
                self._engines[evaluates] = takers
        self.changed()

    def _holds(self, *, evaluates: bool) -> tuple[int, Literal["slots", "keys"]]:
        """The number of requests that such engines hold together, and whether their slots are full
        first or their keys.
        """
        length = self._tokens / self._lengths if self._lengths else self._config.model.max_context
        engines = self._engines[evaluates]
        slots = sum(engine.max_running for engine in engines)
        held = sum(_held(engine, length) for engine in engines)
        return held, "slots" if held == slots else "keys"


def _held(engine: Capabilities, length: float) -> int:
    if engine.max_keys is None:
        return engine.max_running
    by_keys = max(1, int(engine.max_keys / length))
    return min(engine.max_running, by_keys)


class EvaluationSlots:
    """Implements the slots of an `Evaluator`: there are as many as the engines hold. The waiting
    line is first come, first served; the number of held-out tasks bounds it.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._line: list[asyncio.Future[None]] = []
        self.num_running = 0

    async def __aenter__(self) -> None:
        """Waits for the end of another rollout, or for engines."""
        if not self._line and self.num_running < self._capacity.evaluating().number:
            self.num_running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            await turn
        except BaseException:
            if turn in self._line:
                self._line.remove(turn)
            elif not turn.cancelled():
                self._leave()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        self._leave()

    def follow(self) -> None:
        """Starts the rollouts that there is room for."""
        if not self._line:
            return
        free = self._capacity.evaluating().number - self.num_running
        for turn in self._line[: max(0, free)]:
            self._line.remove(turn)
            if not turn.cancelled():
                self.num_running += 1
                turn.set_result(None)

    def _leave(self) -> None:
        self.num_running -= 1
        self._capacity.changed()
