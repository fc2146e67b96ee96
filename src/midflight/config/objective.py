"""The loss that a configuration really minimises, as text: printed at the start so that nothing is counted twice unseen."""

from __future__ import annotations

from collections.abc import Iterator

from midflight.config.loss import KINDS, MASKS, WEIGHTS, CorrectionSection, Loss, loss_of
from midflight.config.sections import Config

_ADVANTAGES = {
    "grpo": "A = (reward - mean of group) / (std of group + 1e-6)",
    "dr_grpo": "A = reward - mean of group",
    "rloo": "A = reward - mean of the others of the group",
    "reinforce_pp": "A = (reward - mean of group) / std of the batch",
    "gae": "A_t = (Â_t - mean) / std over the batch's tokens,  Â_t = δ_t + {trace:g} Â_t+1,  δ_t = {discount:g} V_t+1 - V_t, at the end reward - V_t",
}
_DIVERGENCES = {
    "k2": "log²(π / π_ref) / 2",
    "k3": "(x - 1 - log x),  x = π_ref / π",
    "unbiased": "R (x - 1 - log x),  x = π_ref / π",
}


def effective_loss(config: Config) -> tuple[str, ...]:
    """Per-token loss, ratios, masks, advantage and reduction, one line each; µ is the behaviour policy, π the current one, sg stops the gradient."""
    return tuple(_lines(config))


def _lines(config: Config) -> Iterator[str]:
    o, loss = config.objective, loss_of(config.objective, config.correction)
    yield _token(config, loss)
    yield from _ratios(config, loss)
    for name in loss.masks:
        yield f"masked unless {MASKS[name].format(**_bounds(config.correction))}"
    if o.kl_coefficient:
        yield f"loss += {o.kl_coefficient:g} {_DIVERGENCES[o.kl]},  π_ref = the weights that the run began with"
    if o.entropy_coefficient:
        yield f"loss -= {o.entropy_coefficient:g} entropy of π"
    yield from _advantage(config)
    yield _reduction(loss, config.environment.max_tokens)
    if o.overlong_buffer:
        start = config.environment.max_tokens - o.overlong_buffer
        yield f"reward -= {o.overlong_penalty:g} * (length - {start}) / {o.overlong_buffer} beyond {start} tokens"


def _token(config: Config, loss: Loss) -> str:
    numbers = {**loss.knobs, "low": 1 - (loss.knobs.get("clip_low") or 0), "high": 1 + (loss.knobs.get("clip_high") or 0)}
    token = KINDS[loss.kind].formula.format(**numbers)
    if loss.knobs.get("dual_clip") is not None:
        token += f", at most {-loss.knobs['dual_clip']:g} A where A < 0"  # type: ignore[operator]
    factors = [f"sg[{WEIGHTS[loss.weight][0].format(**loss.bounds)}]"] if loss.weight != "off" else []
    if config.correction.self_normalised:
        factors = [f"{factors[0]} / mean over the batch"]
    if config.correction.age_decay < 1:
        factors.append(f"{config.correction.age_decay:g}^age")
    return "loss = " + (" * ".join([*factors, f"({token})"]) if factors else token)


def _ratios(config: Config, loss: Loss) -> Iterator[str]:
    updates = config.trainer.updates_per_step
    if loss.is_bypass:
        yield "R = π / µ: the ratio to the behaviour policy, no further weight"
    elif config.objective.proximal == "interpolated":
        yield "ρ = π_prox / µ,  r = π / π_prox,  log π_prox between log µ and log sg[π] by the versions (A-3PO)"
    elif updates == 1:
        yield "ρ = sg[π] / µ,  r = π / sg[π]: one update per step, so r is 1 and no clip acts"
    else:
        yield "ρ = π_prox / µ,  r = π / π_prox,  π_prox from the start of the step"


def _advantage(config: Config) -> Iterator[str]:
    d = config.distillation
    if d.teacher is None or d.rewards:
        c = config.critic
        yield _ADVANTAGES[config.objective.advantage].format(discount=c.discount, trace=c.discount * c.trace_decay)
    if config.objective.advantage == "gae":
        yield f"critic: loss = max((V - G)², (clip(V, V_start ± {config.critic.clip:g}) - G)²) / 2,  G = Â + V_start, mean over the batch's tokens"
    if d.teacher is not None:
        yield f"A {'+=' if d.rewards else '='} {d.weight:g} log(π_teacher / µ), token by token"


def _bounds(correction: CorrectionSection) -> dict[str, float]:
    """Open ends are said as 0 and infinity."""
    given = correction.model_dump()
    return {name: (0.0 if name.endswith("low") else float("inf")) if value is None else value for name, value in given.items()}


def _reduction(loss: Loss, max_tokens: int) -> str:
    return {
        "token_mean": "reduction: sum over the batch's tokens / number of the batch's tokens",
        "sequence_mean": "reduction: mean over the tokens of a rollout, then mean over rollouts",
        "constant": f"reduction: sum over the batch's tokens / (rollouts * {max_tokens})",
    }[loss.reduction]
