"""Rollouts that are run elsewhere. Each waits on a board until a worker outside claims it, runs an
agent, and posts the reward.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, cast

from midflight.environments.worker_pool import HERE, RolloutPlacement
from midflight.errors import RewardFixed, SessionClosed, UnknownSession
from midflight.stopwatch import Stopwatch
from midflight.types import Result, Task, UnclaimedRollouts

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Said: TypeAlias = "Result | float | None"
"""The outcome that a worker outside posts for a rollout: its reward, or a whole result."""
OUTSIDE = "a worker outside"
"""The name of the thing that an unclaimed rollout waits for."""
MAX_REMEMBERED = 10_000
"""The number of ended claims that are remembered with their rewards, so that a worker may send a
reward again. After that it gets an error.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A rollout that a worker may run: its task, and the session that its agent talks to."""

    task: Task
    session_id: str
    api_key: str = field(repr=False)
    reward: asyncio.Future[Said] = field(repr=False)


def reward_in(said: Said) -> float | None:
    """Returns the number of a reward. It was checked when it was posted, so no reward is late."""
    return cast("float | None", said.reward) if isinstance(said, Result) else said


class Board:
    """The offers and the claims. It is synchronous and never waits.

    An offer is claimed once. If its worker dies it ends with the rollout's deadline, and a further
    attempt is a new offer. It holds at most the rollouts in flight, which admission limits.
    """

    def __init__(self) -> None:
        self._offered: OrderedDict[str, Offer] = OrderedDict()
        self._claimed: dict[str, Offer] = {}
        self._ended: OrderedDict[str, asyncio.Future[Said]] = OrderedDict()
        self._waiting: list[asyncio.Future[None]] = []
        self._unclaimed: dict[str, Stopwatch] = {}
        """The time that each offered or claimed rollout was unclaimed, by session."""
        self._claimed_at: float | None = None
        """The time at which a worker last claimed a rollout."""
        self._ended_at = -math.inf
        """The time at which a claimed rollout last ended."""

    @property
    def num_offered(self) -> int:
        return len(self._offered)

    @property
    def num_claimed(self) -> int:
        return len(self._claimed)

    def __contains__(self, session_id: str) -> bool:
        known = (self._claimed, self._offered, self._ended)
        return any(session_id in sessions for sessions in known)

    def offer(self, offer: Offer) -> None:
        self._offered[offer.session_id] = offer
        self._unclaimed[offer.session_id] = Stopwatch()
        self._unclaimed[offer.session_id].start()
        self._wake()

    def claim(self, most: int) -> list[Offer]:
        """The oldest offers, `most` at most. From now on they belong to the caller."""
        taken: list[Offer] = []
        while self._offered and len(taken) < most:
            session_id, offer = self._offered.popitem(last=False)
            self._claimed[session_id] = offer
            self._unclaimed[session_id].stop()
            taken.append(offer)
        if taken:
            self._claimed_at = asyncio.get_running_loop().time()
        return taken

    def unclaimed(self) -> UnclaimedRollouts | None:
        """The rollouts that wait to be claimed, or None."""
        if not self._offered:
            return None
        now = asyncio.get_running_loop().time()
        seconds = self.unclaimed_seconds(next(iter(self._offered)))
        idle = 0.0 if self._claimed else min(seconds, now - self._ended_at)
        since_claim = None if self._claimed_at is None else now - self._claimed_at
        return UnclaimedRollouts(len(self._offered), seconds, idle, since_claim)

    def placement(self, session_id: str) -> RolloutPlacement:
        """The place of a rollout that has begun."""
        return RolloutPlacement(OUTSIDE, waits=True) if session_id in self._offered else HERE

    def unclaimed_seconds(self, session_id: str) -> float:
        """Returns the seconds that a rollout under way has waited for a worker."""
        waited = self._unclaimed.get(session_id)
        return 0.0 if waited is None else waited.seconds()

    def score(self, session_id: str, reward: Said) -> None:
        """Gives the worker's reward, which ends its rollout. Raises `SessionClosed` if the deadline
        has ended the rollout before.
        """
        given = self._reward(session_id)
        if given is None:
            raise UnknownSession(
                f"scoring {session_id[:80]!r}: no worker has claimed it; claim it first."
            )
        if not given.done():
            given.set_result(reward)
        elif given.cancelled():
            raise SessionClosed(
                f"scoring session {session_id}: its rollout has ended without a reward, by its "
                "deadline; claim another."
            )
        elif given.result() != reward:
            raise RewardFixed(
                f"scoring session {session_id}: its reward is {reward_in(given.result())} already; "
                "a reward is given once."
            )

    def give_up(self, session_id: str) -> Said:
        """Ends a rollout that its worker gives up, with no reward. If it has one already, this is
        returned.
        """
        given = self._reward(session_id)
        if given is not None and not given.done():
            given.set_result(None)
        return None if given is None or given.cancelled() else given.result()

    def withdraw(self, offer: Offer) -> None:
        """Takes back the offer of a rollout that has ended, for any reason."""
        offer.reward.cancel()
        self._unclaimed.pop(offer.session_id, None)
        self._offered.pop(offer.session_id, None)
        if self._claimed.pop(offer.session_id, None) is not None:
            self._ended_at = asyncio.get_running_loop().time()
        self._ended[offer.session_id] = offer.reward
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def _reward(self, session_id: str) -> asyncio.Future[Said] | None:
        """The reward of a rollout that was claimed or has ended; a cancelled future if it ended
        without one.
        """
        offer = self._claimed.get(session_id)
        return self._ended.get(session_id) if offer is None else offer.reward

    def changed(self) -> asyncio.Future[None]:
        """A future that is done at the next offer. Each offer wakes the waiter that has waited
        longest.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = [other for other in self._waiting if not other.done()]
        self._waiting.append(waiter)
        return waiter

    def pass_on(self) -> None:
        """Called by a waiter that leaves: if offers are left, the next waiter is woken."""
        if self._offered:
            self._wake()

    def _wake(self) -> None:
        while self._waiting:
            waiter = self._waiting.pop(0)
            if not waiter.done():
                waiter.set_result(None)
                return


async def claims(board: Board, *, most: int, wait_seconds: float) -> list[Offer]:
    """Claims offers. Waits for at least one, for `wait_seconds` at most, after which the list is
    empty, or until cancellation when the worker disconnects.
    """
    try:
        async with asyncio.timeout(wait_seconds):
            taken = board.claim(most)
            while not taken:
                await board.changed()
                taken = board.claim(most)
            return taken
    except TimeoutError:
        return []
    finally:
        board.pass_on()


class Claimed:
    """The environment of such rollouts. `run` connects its board with the routes that workers
    call.
    """

    def __init__(self) -> None:
        self.board = Board()

    async def __call__(self, task: Task, client: AsyncOpenAI) -> Said:
        """Offers the task and waits for a worker's reward, or until the rollout's deadline."""
        session_id, _, _ = client.api_key.partition(".")
        reward: asyncio.Future[Said] = asyncio.get_running_loop().create_future()
        offer = Offer(task, session_id, client.api_key, reward)
        self.board.offer(offer)
        try:
            return await offer.reward
        finally:
            self.board.withdraw(offer)

    def excused_seconds(self, session_id: str) -> float:
        """See `LocalAgents.excused`: no rollout is to blame for the wait for a worker."""
        return self.board.unclaimed_seconds(session_id)


claimed = Claimed
"""The name for `environment.entry`: `midflight.environments.claimed:claimed`."""
