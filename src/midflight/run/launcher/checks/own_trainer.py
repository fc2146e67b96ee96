"""The check of options that a run for a foreign trainer must leave out."""

from collections.abc import Iterator

from midflight.config.derived import trains_truncated
from midflight.run.launcher.checks.check import Finding, Plan, error


def own_trainer(plan: Plan) -> Iterator[Finding]:
    """Finds options that only our trainer can fulfil, and a model that is missing."""
    config = plan.config
    truncates = config.environment.sampling.truncates_the_policy
    if truncates and not trains_truncated(config, trainer_is_ours=False):
        yield error(
            "rollouts",
            "environment.top_p, top_k and min_p leave nothing to train for a trainer that does "
            "not read `kept`. Set correction.sampling_masks = true if yours does, or remove them.",
        )
    if config.engine.lend:
        yield error(
            "rollouts",
            "engine.lend lends what our trainer computes on, and here another trains. Remove it, "
            "or raise engine.count.",
        )
    if config.engine.takes_turns:
        yield error(
            "rollouts",
            'engine.share = "time" has engines sleep while our trainer steps, and here another '
            "trains. Remove it.",
        )
    if config.model.path is None:
        yield error(
            "rollouts",
            "no model was given: set model.path to a Hugging Face model folder; `midflight "
            "new-model DIR` makes one to try with.",
        )
