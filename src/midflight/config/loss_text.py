"""The loss that a configuration asks for, as text. A run prints it at the start, so that nothing is
counted twice unseen.
"""

from collections.abc import Iterator

from midflight.config import formulas
from midflight.config.formulas import MASKS, WEIGHTS
from midflight.config.loss import Loss, loss_of
from midflight.config.sections import Config


def effective_loss(config: Config) -> tuple[str, ...]:
    """The loss of a token, ratios, masks, advantage and reduction, a line for each. µ is the
    behaviour policy, π the current one, and sg stops the gradient.
    """
    return tuple(_lines(config))


def _lines(config: Config) -> Iterator[str]:
    o = config.objective
    loss = loss_of(config.objective, config.correction)
    yield _token(config, loss)
    yield from _ratios(config, loss)
    for name, bounds in loss.masks.items():
        yield f"masked unless {MASKS[name].text.format(**bounds)}"
    if o.kl_coefficient:
        yield (
            f"loss += {o.kl_coefficient:g} {formulas.DIVERGENCES[o.kl].text},  π_ref = the "
            "weights that the run began with"
        )
    if o.behaviour_coefficient:
        yield f"loss += {o.behaviour_coefficient:g} log²(π / µ)"
    if o.entropy_coefficient:
        yield f"loss -= {o.entropy_coefficient:g} entropy of π"
    yield from _advantage(config)
    if o.normalise == "component":
        yield (
            "compared for each component of the reward by itself, summed by weight, then (A - "
            "mean) / std over the batch (GDPO)"
        )
    reduction = formulas.REDUCTIONS[loss.reduction].text
    yield f"reduction: {reduction.format(length=config.environment.max_tokens)}"
    if o.overlong_buffer:
        yield (
            f"reward -= {o.overlong_penalty:g} * (1 - room / {o.overlong_buffer}) where an "
            f"answer left room for less than {o.overlong_buffer} tokens"
        )
    if o.mask_truncated:
        yield "masked where an answer of the rollout was cut short by its limit"


def _token(config: Config, loss: Loss) -> str:
    numbers = {
        **loss.options,
        "low": 1 - loss.options.get("clip_low", 0),
        "high": 1 + loss.options.get("clip_high", 0),
    }
    template = loss.formula.text
    for name, text in loss.formula.at_will.items():
        if name in loss.options:
            template += text
    token = template.format(**numbers)
    factors: list[str] = []
    if loss.weight != "off":
        factors.append(f"sg[{WEIGHTS[loss.weight].text.format(**loss.bounds)}]")
    if config.correction.self_normalised:
        factors = [f"{factors[0]} / mean over the batch"]
    if config.correction.age_decay < 1:
        factors.append(f"{config.correction.age_decay:g}^age")
    if not factors:
        return f"loss = {token}"
    return f"loss = {' * '.join(factors)} * ({token})"


def _ratios(config: Config, loss: Loss) -> Iterator[str]:
    updates = config.trainer.updates_per_step * config.trainer.epochs_per_step
    if loss.is_bypass:
        yield "R = π / µ: the ratio to the behaviour policy, no further weight"
    elif config.objective.proximal == "interpolated":
        yield (
            "ρ = π_prox / µ,  r = π / π_prox,  log π_prox between log µ and log sg[π] by the "
            "versions (A-3PO)"
        )
    elif updates == 1:
        yield "ρ = sg[π] / µ,  r = π / sg[π]: one update per step, so r is 1 and no clip acts"
    else:
        yield "ρ = π_prox / µ,  r = π / π_prox,  π_prox from the start of the step"


def _advantage(config: Config) -> Iterator[str]:
    d = config.distillation
    c = config.critic
    if d.teacher is None or d.rewards:
        yield formulas.ADVANTAGES[config.objective.advantage].text.format(
            discount=c.discount, trace=c.discount * c.trace_decay
        )
    if config.objective.advantage == "gae":
        yield (
            f"critic: loss = max((V - G)², (clip(V, V_start ± {c.clip:g}) - G)²) / 2,  G = Â + "
            "V_start, mean over the batch's tokens"
        )
    if d.teacher is not None:
        yield f"A {'+=' if d.rewards else '='} {d.weight:g} log(π_teacher / µ), token by token"
