"""The last bound on a whole rollout. If it is not set, it follows from the most that a rollout may
say and from the speed of engines.
"""

from __future__ import annotations

from dataclasses import dataclass

from midflight.config.agent import SINGLE_TURN, agent_of, is_built_in
from midflight.config.environment import EnvironmentSection

SPARE = 4
"""A rollout may take this many times as long as its work should take at the most: rates differ from
engine to engine and from hour to hour.
"""
GUESSED_RATE = 1.0
"""Tokens a second of one request, before anything was measured. A small model on a busy CPU makes
this many.
"""
MANY_TURNS = 100
"""The turns of an agent whose number of requests is not known yet."""


@dataclass(frozen=True, slots=True)
class RolloutBound:
    seconds: float
    work: MostWork | None = None
    """The work that the bound follows from, or none if the option gives the bound."""

    @property
    def words(self) -> str:
        """The origin of the bound."""
        return "as environment.max_rollout_seconds says" if self.work is None else self.work.words


@dataclass(frozen=True, slots=True)
class MostWork:
    """The most work that a rollout may have to do."""

    own_seconds: float
    turns: int
    tokens: int
    """The most tokens of a turn."""
    rate: float | None
    """Tokens a second, as measured."""
    tool_seconds: float
    """The most that the tools of a turn may take."""

    @property
    def seconds(self) -> float:
        turn_seconds = self.tokens / (self.rate or GUESSED_RATE) + self.tool_seconds
        return self.own_seconds + self.turns * turn_seconds

    @property
    def words(self) -> str:
        rate = f"{GUESSED_RATE:.3g} tokens/s (guessed)"
        if self.rate:
            rate = f"{self.rate:.3g} tokens/s (measured)"
        tools = f" and {self.tool_seconds:g} s of tools" if self.tool_seconds else ""
        return (
            f"{SPARE} x ({self.own_seconds:g} s of its agent and {self.turns} turns of "
            f"{self.tokens} tokens at {rate}{tools})"
        )


def rollout_bound(
    environment: EnvironmentSection,
    *,
    tokens_per_second: float | None = None,
    longest_answer: int = 0,
    most_turns: int = 0,
) -> RolloutBound:
    """`max_rollout_seconds`, else

        SPARE * (rollout_seconds + turns * (tokens / rate + tool_seconds))

    `turns` is `max_turns` in the built-in loop, 1 if one question is asked, and for other agents
    MANY_TURNS or twice the most that one took. `tokens` is `max_tokens`, or as many as the longest
    answer had. `tool_seconds` counts if there are tools. The arguments are measurements.
    """
    if environment.max_rollout_seconds is not None:
        return RolloutBound(environment.max_rollout_seconds)
    tools = 0.0
    if is_built_in(environment) and (environment.tools or environment.mcp):
        tools = environment.tool_seconds
    work = MostWork(
        environment.rollout_seconds,
        _turns(environment, most_turns),
        max(environment.max_tokens, longest_answer),
        tokens_per_second,
        tools,
    )
    return RolloutBound(SPARE * work.seconds, work)


def _turns(environment: EnvironmentSection, most_turns: int) -> int:
    if is_built_in(environment):
        return environment.max_turns
    if agent_of(environment) == SINGLE_TURN:
        return max(1, 2 * most_turns)
    return max(MANY_TURNS, 2 * most_turns)
