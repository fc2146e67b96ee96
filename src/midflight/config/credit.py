"""Reads from a configuration how rewards count: the weights of their components, and the options
that need one advantage for a whole rollout.
"""

from collections.abc import Iterator, Mapping

from midflight.config.loss import formula_of
from midflight.config.sections import Config


def component_weights(config: Config) -> Mapping[str, float] | None:
    """The weights other than 1, by name, if components of the reward are compared by themselves, or
    None if rewards are compared.
    """
    if config.objective.normalise == "reward":
        return None
    return {
        reward.label: reward.weight for reward in config.environment.rewards if reward.weight != 1.0
    }


def _whole_rollouts(config: Config) -> Iterator[str]:
    """The options that take one advantage for a whole rollout, so that answers cannot have rewards
    of their own.
    """
    if config.objective.normalise == "component":
        yield 'objective.normalise = "component"'
    if formula_of(config.objective, config.correction).is_per_rollout:
        yield f'objective.kind = "{config.objective.kind}"'
    if config.correction.opsm is not None:
        yield f"correction.opsm = {config.correction.opsm:g}"


def takes_whole_rollouts(config: Config) -> str:
    """The first of these options with its value; empty if there is none."""
    return next(_whole_rollouts(config), "")
