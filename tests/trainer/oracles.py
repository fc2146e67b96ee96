"""What public implementations returned for the same inputs, each from its own unmodified function on a CPU in float32.

Sources: verl 0.9.1, AReaL 1.0.4, trl 1.16.0. Values are the loss, the L2 norm and the sum of its gradient by `logp`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LENGTHS = (12, 9, 5, 12, 1, 7)
REWARDS = (1.0, 0.0, 0.5, 0.0, 0.0, 2.0)
GROUPS = (0, 0, 0, 1, 1, 1)
ABSOLUTE = 2e-5
"""How closely we agree."""


@dataclass(frozen=True)
class Inputs:
    """Six completions of up to 12 tokens in two groups of three; only the tokens inside a completion, laid end to end: [46]."""

    logp: Tensor
    old: Tensor
    roll: Tensor
    rollout: Tensor


def inputs() -> Inputs:
    """The seeded inputs. The order of draws and the outliers (so that every clip, cap and mask is hit) are part of them."""
    draw = np.random.RandomState(20251120)
    shape = (6, 12)
    logp = -draw.gamma(1.5, 0.8, size=shape)
    old = logp + draw.normal(0, 0.25, shape)
    roll = old + draw.normal(0, 0.15, shape)
    draw.normal(0, 0.3, shape)  # A reference policy that nothing here uses.
    roll[0, 3] -= 3.0
    roll[4, 5] += 2.0
    old[1, 2] -= 2.0
    old[5, 1] += 1.1
    inside = np.arange(12)[None] < np.array(LENGTHS)[:, None]
    flat = [torch.tensor(a[inside], dtype=torch.float32) for a in (logp, np.minimum(old, -1e-4), np.minimum(roll, -1e-4))]
    return Inputs(flat[0].requires_grad_(), flat[1], flat[2], torch.tensor(np.repeat(np.arange(6), LENGTHS)))


@dataclass(frozen=True)
class Known:
    value: float
    grad_l2: float
    grad_sum: float


VERL_VANILLA_TOKEN_MEAN = Known(0.008128859102725983, 0.11332885175943375, 0.018001798540353775)
"""verl: clip .2 / .28, dual clip 3. AReaL's dual clip gives the same digits."""
VERL_VANILLA_SEQUENCE_MEAN = Known(0.09604042768478394, 0.14984843134880066, 0.11037761718034744)
"""verl `seq-mean-token-mean`."""
VERL_VANILLA_CONSTANT = Known(0.0051934123039245605, 0.07240454852581024, 0.011501145549118519)
"""verl `seq-mean-token-sum-norm`, over 12 tokens."""
VERL_TIS = Known(-0.05163886770606041, 0.12060026824474335, -0.008603349328041077)
"""verl: token TIS of old / roll capped at 2."""
AREAL_PPO = Known(0.07667625695466995, 0.16966895759105682, 0.1442718803882599)
"""AReaL: clip .2."""
AREAL_DECOUPLED = Known(-0.043044112622737885, 0.12190324813127518, 0.009172409772872925)
"""AReaL: proximal `old`, behaviour `roll`, weight clamped at 2."""
TRL_TOKEN_MEAN = Known(0.06918167322874069, 0.16966895759105682, 0.1442718803882599)
"""trl `dapo` and `bnpo`: clip .2 / .28."""
TRL_SEQUENCE_MEAN = Known(0.14804840087890625, 0.18445712327957153, 0.21794100105762482)
"""trl `grpo`."""
TRL_CONSTANT = Known(0.04419940337538719, 0.10839962214231491, 0.09217369556427002)
"""trl `dr_grpo`, over the padded size of 12."""
TRL_TIS = Known(-0.0495605431497097, 0.12190324813127518, 0.009172409772872925)
"""trl `dapo` with truncated importance sampling capped at 2."""

VERL_GRPO_ADVANTAGES = (0.999998, -0.999998, 0.0, -0.57735, -0.57735, 1.1547)
VERL_DR_GRPO_ADVANTAGES = (0.5, -0.5, 0.0, -0.666667, -0.666667, 1.333333)
VERL_TIS_WEIGHTS_OF_FIRST = (
    0.712488,
    1.001447,
    1.151034,
    2.0,
    0.792691,
    1.063046,
    0.946055,
    0.810828,
    0.925358,
    0.815113,
    1.112704,
    0.905753,
)
