"""Watches whether the rollouts that wait for workers outside are claimed. Nothing ends their wait,
so people are told of it.
"""

from collections.abc import Callable

from midflight.environments.claimed import Board
from midflight.observe.readable import duration, unclaimed_words
from midflight.types import facts


class ClaimWatch:
    """Records an alarm when no rollout has been claimed for `stall_seconds`, and again each time
    that this time has doubled.

    While a claimed rollout is under way there is no alarm: its worker may be busy, and has a limit.
    It is synchronous; `look` is called about every second.
    """

    def __init__(
        self,
        board: Board,
        record: Callable[[facts.Alarmed], None],
        *,
        stall_seconds: float,
        where: str,
    ) -> None:
        """`where` names the place in which workers find address and token."""
        self.board = board
        self._record = record
        self._where = where
        self._stall_seconds = stall_seconds
        self._after = stall_seconds

    def look(self) -> None:
        found = self.board.unclaimed()
        if found is None or found.idle_seconds < self._stall_seconds:
            self._after = self._stall_seconds
        elif found.idle_seconds >= self._after:
            self._after = 2 * found.idle_seconds
            #: `unclaimed`: No worker outside (docs/sessions.md#claims) has claimed a waiting rollout for
            #: `run.stall_seconds`, and for each doubling of that.
            self._record(
                facts.Alarmed(
                    "unclaimed",
                    f"nobody has claimed a rollout for {duration(found.idle_seconds)}: "
                    f"{unclaimed_words(found)}. What needs them waits for that, without an end. "
                    "Start workers, which claim by `POST /midflight/v1/claims`; their address and "
                    f"token are in {self._where}.",
                )
            )
