"""A loss of your own: Simple Policy Optimization, which bounds the ratio by a parabola where PPO
clips it.

    midflight train configs/demo.toml --folder runs/own \\
        --set objective.kind=examples.own_loss:spo --set objective.delta=0.3

A loss is a function of what its parameters name, one number per token, and returns one loss per
token. `docs/algorithms.md` has the names.
"""

from __future__ import annotations

from torch import Tensor


def spo(ratio: Tensor, advantage: Tensor, *, delta: float = 0.2) -> Tensor:
    """SPO (Xie et al. 2024, 2401.16025).

        L_t = -(R_t A_t - |A_t| / (2 delta) (R_t - 1)^2)

    Its least is at R = 1 + delta where the advantage is positive, and at 1 - delta where it is
    negative; beyond that it pulls back, where a clip has no gradient. `ratio` is R = pi / mu, or
    with `correction.weight` set r = pi / pi_prox, and the loss is weighted.
    """
    return -(ratio * advantage - advantage.abs() / (2 * delta) * (ratio - 1) ** 2)
