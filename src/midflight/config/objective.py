"""The loss that a configuration really minimises, as text: printed at the start so that nothing is counted twice unseen."""

from __future__ import annotations

from midflight.config.sections import Config, TrainerSection

_ADVANTAGES = {
    "grpo": "A = (reward - mean of group) / (std of group + 1e-6)",
    "dr_grpo": "A = reward - mean of group",
}


def effective_loss(config: Config) -> tuple[str, ...]:
    """Per-token loss, ratios, advantage and reduction, one line each; µ is the behaviour policy, π the current one, sg stops the gradient."""
    t = config.trainer
    lines = [_objective(t), _ADVANTAGES[t.advantage], _reduction(t, config.environment.max_tokens)]
    if t.overlong_buffer:
        start = config.environment.max_tokens - t.overlong_buffer
        lines.append(f"reward -= {t.overlong_penalty:g} * (length - {start}) / {t.overlong_buffer} beyond {start} tokens")
    return tuple(lines)


def _objective(t: TrainerSection) -> str:
    clip = f"clip({{}}, {1 - t.clip_low:g}, {1 + t.clip_high:g})"
    if t.loss == "bypass":
        return f"loss = -min(R A, {clip.format('R')} A),  R = π / µ  (PPO clip on the behaviour policy, no further weight)"
    weight, name = f"min(ρ, {t.tis_cap:g})", "token TIS"
    if t.updates_per_step == 1:
        # With one update the proximal policy is the current one: r is 1 in value and the clip can't act.
        return f"loss = -sg[{weight}] r A,  ρ = sg[π] / µ,  r = π / sg[π]  ({name}; one update per step, so the clip never acts)"
    return f"loss = -sg[{weight}] min(r A, {clip.format('r')} A),  ρ = π_prox / µ,  r = π / π_prox  ({name}; π_prox from the start of the step)"


def _reduction(t: TrainerSection, max_tokens: int) -> str:
    return {
        "token_mean": "reduction: sum over the batch's tokens / number of the batch's tokens",
        "sequence_mean": "reduction: mean over the tokens of a rollout, then mean over rollouts",
        "constant": f"reduction: sum over the batch's tokens / (rollouts * {max_tokens})",
    }[t.reduction]
