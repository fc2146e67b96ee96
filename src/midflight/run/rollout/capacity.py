"""How many rollouts run at once, for training and for evaluations: the numbers that are set, else
what the engines hold just now.

What an engine cannot decode at once waits inside it, counted as open, and only grows old there. So
rollouts are as many as its slots, or as its room for keys, and more where agents spend part of
their time in tools. Whatever the engines hold, the bound on age stands (`buffer.staleness`): that
is the hard limit, this the soft one.
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
"""Rollouts for each slot, however long their tools take: agents may all come back at once."""
MEMORY = 0.98
"""Of what rollouts did: the last fifty count."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """How many may run, and what says so: the option that is `set`, `slots` or `keys` of engines,
    or the bound on `staleness`.
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
    """Follows the engines that take requests, the time that agents spend asking, and the length of
    what they ask. Synchronous.
    """

    def __init__(self, config: Config, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self.most_turns = 0
        """That a rollout with a reward took."""
        self._asking = self._running = self._tokens = self._lengths = 0.0
        self._engines: dict[bool, list[Capabilities]] = {False: [], True: []}
        """Whether they take requests of evaluations: those that do, or that did last while none
        does.
        """
        self.evaluations = EvaluationSlots(self)
        self.on_changed: Callable[[], None] | None = None
        """Told whenever more or fewer may run."""
        fleet.on_changed = self._moved
        self._moved()

    def training(self) -> InFlight:
        """A group fits in any case. Rollouts of an evaluation on the same engines are counted
        off.
        """
        held, reason = self._holds(evaluates=False)
        # an equal part: the other gateways use the same engines
        slots = -(-held // self._config.gateway.shards)
        beside = self.evaluations.num_running if self._fleet.shares_evaluations() else 0
        number = in_flight(self._config, self._rollouts(slots) - beside)
        if self._config.rollout.max_in_flight is not None:
            return InFlight(number, "set")
        return InFlight(
            number, reason if number < most_in_flight(self._config.rollout) else "staleness"
        )

    def full(self, running: int) -> Wait | None:
        """Why no further group may start beside so many rollouts; none if one may."""
        may = self.training()
        return (
            Wait("slots", f"{running} rollouts run; {may.words}")
            if running + self._config.rollout.group_size > may.number
            else None
        )

    def evaluating(self) -> InFlight:
        if (given := self._config.evaluation.max_in_flight) is not None:
            return InFlight(given, "set")
        slots, reason = self._holds(evaluates=True)
        return InFlight(max(1, slots), reason)

    def limits(self) -> dict[str, tuple[int, str]]:
        """Of each kind of rollouts how many may run, and why."""
        return {
            kind: (may.number, may.reason)
            for kind, may in (("training", self.training()), ("evaluation", self.evaluating()))
        }

    def ended(self, rollout: RolloutEnded) -> None:
        """A rollout of training: how much of its time it waited for answers, and how many there
        were.
        """
        self._asking = MEMORY * self._asking + sum(
            turn.ended - turn.began for turn in rollout.times
        )
        self._running = MEMORY * self._running + rollout.seconds
        if rollout.error is None:
            self.most_turns = max(self.most_turns, rollout.num_turns)

    def kept(self, trajectory: Trajectory) -> None:
        """The room for keys that its longest row took, on the mean over its answers: all that it
        read, and half of what it said.
        """
        longest = max(
            (len(row.token_ids) - row.num_trainable / 2 for row in trajectory.rows), default=0.0
        )
        self._tokens = MEMORY * self._tokens + longest
        self._lengths = MEMORY * self._lengths + (longest > 0)

    def changed(self) -> None:
        """A rollout of an evaluation ended, or engines came or went."""
        self.evaluations.follow()
        if self.on_changed is not None:
            self.on_changed()

    def _rollouts(self, slots: int) -> int:
        """That keep so many slots full."""
        share = self._asking / self._running if self._asking > 0 and self._running > 0 else 1.0
        return round(slots / max(share, 1 / MOST_IN_TOOLS))

    def _moved(self) -> None:
        for evaluates in self._engines:
            self._engines[evaluates] = (
                self._fleet.takers(evaluates=evaluates) or self._engines[evaluates]
            )
        self.changed()

    def _holds(self, *, evaluates: bool) -> tuple[int, Literal["slots", "keys"]]:
        """Requests that such engines hold together, and whether their slots are full first or their
        keys.
        """
        length = self._tokens / self._lengths if self._lengths else self._config.model.max_context
        slots = sum(engine.max_running for engine in self._engines[evaluates])
        held = sum(_held(engine, length) for engine in self._engines[evaluates])
        return held, "slots" if held == slots else "keys"


def _held(engine: Capabilities, length: float) -> int:
    return (
        engine.max_running
        if engine.max_keys is None
        else min(engine.max_running, max(1, int(engine.max_keys / length)))
    )


class EvaluationSlots:
    """Implements the slots of an `Evaluator`, as many as the engines hold. First come, first
    served; bounded by the held-out tasks.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._line: list[asyncio.Future[None]] = []
        self.num_running = 0

    async def __aenter__(self) -> None:
        """Waits for the end of another, or for engines."""
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
        """Starts those that there is room for."""
        free = self._capacity.evaluating().number - self.num_running if self._line else 0
        for turn in self._line[: max(0, free)]:
            self._line.remove(turn)
            if not turn.cancelled():
                self.num_running += 1
                turn.set_result(None)

    def _leave(self) -> None:
        self.num_running -= 1
        self._capacity.changed()
