"""What public implementations returned for the same inputs, each from its own unmodified function on a CPU in float32.

Sources: verl 0.9.1, AReaL 1.0.4, trl 1.16.0. Values are the loss, the L2 norm and the sum of its gradient by `logp`.
verl: clip .2 / .28, dual clip 3, token means unless named (gspo, sapo: mean of sequence means). AReaL: clip .2, token means,
proximal `old`, behaviour `roll`. trl: clip .2 / .28; dapo and bnpo are token means, grpo a mean of sequence means.
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
    ref: Tensor
    rollout: Tensor

    @property
    def whole(self) -> dict:
        """What functions of whole rollouts take beside their values."""
        return {"sequence": self.rollout, "num_sequences": len(LENGTHS)}


def inputs() -> Inputs:
    """The seeded inputs. The order of draws and the outliers (so that every clip, cap and mask is hit) are part of them."""
    draw = np.random.RandomState(20251120)
    shape = (6, 12)
    logp = -draw.gamma(1.5, 0.8, size=shape)
    old = logp + draw.normal(0, 0.25, shape)
    roll = old + draw.normal(0, 0.15, shape)
    ref = logp + draw.normal(0, 0.3, shape)
    roll[0, 3] -= 3.0
    roll[4, 5] += 2.0
    old[1, 2] -= 2.0
    old[5, 1] += 1.1
    inside = np.arange(12)[None] < np.array(LENGTHS)[:, None]
    logp, *others = (torch.tensor(a[inside], dtype=torch.float32) for a in (logp, *(np.minimum(a, -1e-4) for a in (old, roll, ref))))
    return Inputs(logp.requires_grad_(), *others, rollout=torch.tensor(np.repeat(np.arange(6), LENGTHS)))


@dataclass(frozen=True)
class Known:
    value: float
    grad_l2: float
    grad_sum: float


KNOWN: dict[str, Known] = {
    "verl/vanilla/token-mean": Known(0.008128859102725983, 0.11332885175943375, 0.018001798540353775),
    "verl/vanilla/seq-mean-token-sum": Known(0.06232094764709473, 0.8688545227050781, 0.13801372051239014),
    "verl/vanilla/seq-mean-token-mean": Known(0.09604042768478394, 0.14984843134880066, 0.11037761718034744),
    "verl/vanilla/seq-mean-token-sum-norm": Known(0.0051934123039245605, 0.07240454852581024, 0.011501145549118519),
    "verl/vanilla+tis_token_2.0": Known(-0.05163886770606041, 0.12060026824474335, -0.008603349328041077),
    "verl/gspo": Known(0.08099430054426193, 0.16335131227970123, 0.08099429309368134),
    "verl/sapo": Known(0.03505631163716316, 0.16057051718235016, 0.020057715475559235),
    "verl/gpg": Known(0.09334493428468704, 0.1279963254928589, -0.07776832580566406),
    "verl/cispo": Known(0.05609540268778801, 0.13200519979000092, -0.057524096220731735),
    "verl/geo_mean": Known(0.0980130136013031, 0.15432097017765045, 0.11865422874689102),
    "verl/dppo_tv": Known(0.03455927595496178, 0.15025171637535095, -0.03339533507823944),
    "verl/dppo_kl": Known(0.027765076607465744, 0.1511058211326599, -0.01735190860927105),
    "verl/clip_cov": Known(0.030267078429460526, 0.16514603793621063, 0.10535727441310883),
    "verl/kl_cov": Known(0.044966693967580795, 0.1862732619047165, 0.045874834060668945),
    "verl/kl_kl": Known(0.032637592405080795, 0.14744196832180023, 1.0),
    "verl/kl_abs": Known(0.210347980260849, 0.14744196832180023, 0.0),
    "verl/kl_mse": Known(0.034209366887807846, 0.03856635466217995, 0.03263760358095169),
    "verl/kl_low_var_kl": Known(0.032894548028707504, 0.03749875724315643, -0.0002569444477558136),
    "verl/kl_k3+": Known(0.032894548028707504, 0.03856635466217995, 0.03263760358095169),
    "areal/ppo": Known(0.07667625695466995, 0.16966895759105682, 0.1442718803882599),
    "areal/ppo_dual_hi0.28_c3": Known(0.008128859102725983, 0.11332885175943375, 0.018001798540353775),
    "areal/gspo_0.2": Known(-0.010669615119695663, 0.13475191593170166, -0.010669590905308723),
    "areal/decoupled_token_mask_ratio_mean_2.0_None": Known(0.006253763567656279, 0.11149045079946518, 0.058470286428928375),
    "areal/decoupled_token_clamp_ratio_mean_2.0_None": Known(-0.043044112622737885, 0.12190324813127518, 0.009172409772872925),
    "areal/decoupled_token_clamp_ratio_mean_2.0_0.5": Known(0.0023151570931077003, 0.13612662255764008, 0.05453169718384743),
    "areal/decoupled_sequence_mask_ratio_mean_1.1_0.9": Known(0.02247069776058197, 0.06900962442159653, 0.0753006637096405),
    "areal/decoupled_sequence_mask_kl_k3_mean_0.05_None": Known(0.02603837288916111, 0.0699116587638855, 0.06885343044996262),
    "areal/decoupled_sequence_mask_kl_k3_max_0.5_None": Known(0.02603837288916111, 0.0699116587638855, 0.06885343044996262),
    "areal/decoupled_sequence_clamp_ratio_mean_1.1_0.9": Known(0.016442425549030304, 0.16191737353801727, 0.09535932540893555),
    "areal/sapo_1.0_1.05": Known(-0.13229058682918549, 0.13094788789749146, -0.07848948985338211),
    "trl/loss_grpo": Known(0.14804840087890625, 0.18445712327957153, 0.21794100105762482),
    "trl/loss_bnpo": Known(0.06918167322874069, 0.16966895759105682, 0.1442718803882599),
    "trl/loss_dr_grpo": Known(0.04419940337538719, 0.10839962214231491, 0.09217369556427002),
    "trl/loss_dapo": Known(0.06918167322874069, 0.16966895759105682, 0.1442718803882599),
    "trl/loss_cispo": Known(0.01900961622595787, 0.17433983087539673, 0.026126274839043617),
    "trl/loss_sapo": Known(0.03505631163716316, 0.16057051718235016, 0.020057715475559235),
    "trl/loss_luspo": Known(0.530392587184906, 1.3007954359054565, 1.1060842275619507),
    "trl/loss_grpo_beta0.1": Known(0.15176697075366974, 0.17994095385074615, 0.21244178712368011),
    "trl/loss_dapo_delta2": Known(-0.01361022423952818, 0.11332885175943375, 0.018001798540353775),
    "trl/gspo": Known(0.08099430054426193, 0.16335132718086243, 0.08099434524774551),
    "trl/loss_grpo_offpolicymask0.1": Known(0.14804840087890625, 0.18445712327957153, 0.21794100105762482),
    "trl/loss_dapo_tis_cap2": Known(-0.0495605431497097, 0.12190324813127518, 0.009172409772872925),
}

PER_ROLLOUT: dict[str, tuple[float, ...]] = {
    "tis_seq_2.0": (2.0, 0.111009, 1.224149, 1.406334, 0.97312, 1.392033),
    "rs_seq_sum_k1_0.5_2.0": (0.0, 0.0, 1.0, 1.0, 1.0, 1.0),
    "rs_seq_mean_k1_0.8_1.25": (1.0, 0.0, 1.0, 1.0, 1.0, 1.0),
    "rs_seq_mean_k3_0.05": (0.0, 0.0, 1.0, 1.0, 1.0, 1.0),
    "rs_seq_max_k3_0.5": (0.0, 0.0, 1.0, 1.0, 1.0, 1.0),
    "adv_grpo": (0.999998, -0.999998, 0.0, -0.57735, -0.57735, 1.1547),
    "adv_rloo": (0.75, -0.75, 0.0, -1.0, -1.0, 2.0),
    "adv_opo": (0.442308, -0.557692, -0.057692, -0.7, -0.7, 1.3),
    "adv_reinforce_plus_plus_baseline": (0.628458, -0.759177, -0.06536, -0.99045, -0.99045, 1.784821),
    "adv_reinforce_plus_plus": (0.525413, -0.855672, -0.16513, -0.855672, -0.855672, 1.906497),
    "adv_gpg": (1.0, -1.0, 0.0, -1.333333, -1.333333, 2.666667),
    "adv_drgrpo": (0.5, -0.5, 0.0, -0.666667, -0.666667, 1.333333),
}
"""Arrays that are alike on all tokens of a completion: one number for each."""

PER_TOKEN: dict[str, tuple[float, ...]] = {
    "tis_token_2.0": (
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
        0.947045,
        0.890405,
        0.140776,
        0.89913,
        1.0,
        0.982,
        0.887296,
        1.126138,
        1.059933,
        0.992091,
        0.976694,
        1.222691,
        0.882149,
        1.171294,
        0.979652,
        1.176526,
        1.080659,
        1.042536,
        0.932034,
        0.822395,
        1.104051,
        1.274195,
        0.868341,
        1.161778,
        0.929205,
        1.071453,
        0.97312,
        0.940979,
        1.345189,
        1.27995,
        1.018542,
        1.089245,
        0.86764,
        0.892584,
    ),
    "icepop_token_0.5_2.0": (
        0.712488,
        1.001447,
        1.151034,
        0.0,
        0.792691,
        1.063046,
        0.946055,
        0.810828,
        0.925358,
        0.815113,
        1.112704,
        0.905753,
        0.947045,
        0.890405,
        0.0,
        0.89913,
        1.0,
        0.982,
        0.887296,
        1.126138,
        1.059933,
        0.992091,
        0.976694,
        1.222691,
        0.882149,
        1.171294,
        0.979652,
        1.176526,
        1.080659,
        1.042536,
        0.932034,
        0.822395,
        1.104051,
        1.274195,
        0.868341,
        1.161778,
        0.929205,
        1.071453,
        0.97312,
        0.940979,
        1.345189,
        1.27995,
        1.018542,
        1.089245,
        0.86764,
        0.892584,
    ),
    "rs_token_k1_0.5_2.0": (
        1.0,
        1.0,
        1.0,
        0.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        0.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
    ),
    "rs_token_k3_0.1": (
        1.0,
        1.0,
        1.0,
        0.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        0.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
    ),
}
"""Arrays of the tokens inside a completion."""
