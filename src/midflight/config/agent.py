"""The agent that runs the rollouts of `[environment]`."""

from midflight.config.environment import EnvironmentSection

SINGLE_TURN = "midflight.environments.single_turn:answer"
"""This entry of ours, and `CLAIMED`, run in the rollout process, because they block nothing."""
BUILT_IN = "built-in loop"
"""It stands in the place of an entry."""


def agent_of(environment: EnvironmentSection) -> str:
    """The entry of the agent that runs a rollout, or `BUILT_IN`."""
    has_parts = environment.rewards or environment.tools or environment.mcp
    return environment.entry or (BUILT_IN if has_parts else SINGLE_TURN)


def is_built_in(environment: EnvironmentSection) -> bool:
    return agent_of(environment) == BUILT_IN


def entries_of(environment: EnvironmentSection) -> tuple[str, ...]:
    """The entries that must be imported to run a rollout."""
    entries = list(environment.tools)
    if not is_built_in(environment):
        entries.insert(0, agent_of(environment))
    entries += [reward.entry for reward in environment.rewards]
    return tuple(entries)
