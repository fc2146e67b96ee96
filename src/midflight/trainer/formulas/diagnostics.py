"""What every batch says about how far the policy has moved from the one that sampled, as named
numbers.

Names are those of the metrics table: `rho/mean`, `clip/low_share`, `masked/geometric`, and the same
per age, `age/3/rho_mean`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from midflight.trainer.formulas import corrections
from midflight.trainer.formulas.corrections import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True, eq=False)
class TokenReadings:
    """What is known of each token in the loss of a (mini-)batch, once its training forward is
    done.
    """

    log_rho: Float[Tensor, " T"]
    weight: Float[Tensor, " T"]
    """The weight that the objective gave the token, whose effective sample size is reported. For a
    bypass objective it is rho itself.
    """
    sequence: Int[Tensor, " T"]
    below: Bool[Tensor, " T"]
    above: Bool[Tensor, " T"]
    """True where a clip took the gradient away."""
    masked: Mapping[str, Bool[Tensor, " T"]]
    """True where a rejection mask took it away, by its name. One token may be under several."""

    def at(self, where: Bool[Tensor, " T"]) -> TokenReadings:
        """Only these tokens."""
        gone = {reason: mask[where] for reason, mask in self.masked.items()}
        return TokenReadings(
            self.log_rho[where],
            self.weight[where],
            self.sequence[where],
            self.below[where],
            self.above[where],
            gone,
        )


def effective_sample_size(weights: Float[Tensor, " T"]) -> Float[Tensor, ""]:
    """(sum w)^2 / (n sum w^2), in [0, 1]: the share of tokens that equally weighted ones would
    need; 0 if all weights are. Kish 1965.
    """
    squares = (weights.double() ** 2).sum()
    return weights.double().sum() ** 2 / (
        weights.numel() * squares.clamp(min=torch.finfo(torch.float64).tiny)
    )


def k1(log_rho: Float[Tensor, " T"]) -> Float[Tensor, ""]:
    """Mean of -log rho: KL(behaviour, proximal), unbiased, of either sign. Schulman 2020,
    "Approximating KL divergence".
    """
    return -log_rho.mean()


def k3(log_rho: Float[Tensor, " T"]) -> Float[Tensor, ""]:
    """Mean of rho - 1 - log rho: the same divergence, unbiased, never negative, of less variance.
    Schulman 2020.
    """
    return corrections.k3(log_rho).mean()


def chi2(log_rho: Float[Tensor, " T"]) -> Float[Tensor, ""]:
    """Mean of rho^2, minus 1: what the variance of importance weights grows with."""
    return (2 * log_rho).exp().mean() - 1


def sequence_log_ratios(
    log_rho: Float[Tensor, " T"], rollout: Int[Tensor, " T"]
) -> Float[Tensor, " S"]:
    """log of the product of rho over each rollout that has tokens, clamped to +-20."""
    _, index = rollout.unique(return_inverse=True)
    sums = torch.zeros(int(index.max()) + 1, dtype=log_rho.dtype, device=log_rho.device).index_add(
        0, index, log_rho
    )
    return sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def batch_metrics(tokens: TokenReadings) -> dict[str, float]:
    """The table's row for at least one token: of rho its mean, extremes, deviation and divergences,
    and what clips and masks took.
    """
    rho = tokens.log_rho.exp()
    metrics = {
        #: Mean of ρ = π_prox / µ. Healthy: near 1 (alarm outside 0.5 to 2).
        "rho/mean": rho.mean(),
        #: `rho/min`, `rho/max`: Smallest and largest ρ.
        "rho/min": rho.min(),
        "rho/max": rho.max(),
        #: Standard deviation of ρ. Healthy: below 1 (alarm above).
        "rho/std": rho.std(correction=0),
        #: (Σw)² / (n Σw²) of the weights (of ρ under a bypass objective), without masks and age
        #: weight (share). Healthy: near 1 (alarm below 0.3).
        "rho/ess": effective_sample_size(tokens.weight),
        #: Mean of -log ρ (nats). Healthy: near 0 (alarm beyond 0.1, eight steps in a row).
        "rho/k1": k1(tokens.log_rho),
        #: Mean of ρ - 1 - log ρ (nats). Healthy: below 0.1.
        "rho/k3": k3(tokens.log_rho),
        #: `rho/chi2_token`, `rho/chi2_sequence`: Mean of ρ² - 1, of tokens and of the product of ρ
        #: over a rollout. Healthy: below 1 for tokens.
        "rho/chi2_token": chi2(tokens.log_rho),
        "rho/chi2_sequence": chi2(sequence_log_ratios(tokens.log_rho, tokens.sequence)),
        #: `clip/low_share`, `clip/high_share`: Tokens whose gradient the lower clip took (of `dppo_tv`
        #: and `ipo`, those outside the trust region), and the upper clip or `dual_clip`. Healthy: below
        #: 0.1.
        "clip/low_share": _share(tokens.below),
        "clip/high_share": _share(tokens.above),
        #: `masked/<mask>`: Tokens that a mask took out: geometric, product, k3, veto, m2po, opsm
        #: (share). Healthy: below 0.1.
        **{f"masked/{reason}": _share(mask) for reason, mask in tokens.masked.items()},
    }
    return {name: float(value) for name, value in metrics.items()}


def age_metrics(age: Int[Tensor, " T"], tokens: TokenReadings) -> dict[str, float]:
    """A histogram of token age in versions, and for each age that occurs all of `batch_metrics`.

    `rho/mean` of age 3 is `age/3/rho_mean`, `clip/low_share` is `age/3/clip_low_share`; ESS and
    divergences go by `age/3/k3`.
    """
    metrics = {
        #: `age/mean`, `age/max`: Mean and largest age of the tokens in the loss (versions). Healthy:
        #: at most `rollout.max_staleness`.
        "age/mean": float(age.double().mean()),
        "age/max": float(age.max()),
    }
    for value in age.unique().tolist():
        where = age == value
        #: `age/<n>/share`: Share of tokens of age n.
        metrics[f"age/{value}/share"] = float(_share(where))
        #: `age/<n>/<reading>`: Of tokens of age n: rho_mean, rho_min, rho_max, rho_std, ess, k1, k3,
        #: chi2_token, chi2_sequence, clip_low_share, clip_high_share, masked_<mask>. Healthy: worse
        #: with age.
        metrics |= {
            f"age/{value}/{_within_age(name)}": found
            for name, found in batch_metrics(tokens.at(where)).items()
        }
    return metrics


def mismatch_metrics(
    log_rho: Float[Tensor, " T"], age: Int[Tensor, " T"], *, has_older_keys: Bool[Tensor, " T"]
) -> dict[str, float]:
    """How engine and trainer differ on the same weights: on tokens of age 0, where rho would be 1
    if they computed alike.

    Also apart for tokens whose keys in the cache were all of their own version (`same_keys`) and
    those that attended to keys of an older one (`older_keys`), whose label understates their age.
    Parts without tokens are left out.
    """
    fresh = age == 0
    parts = {
        #: `mismatch/mean`, `mismatch/max`: Mean and largest |log ρ| of tokens of age 0, where engine
        #: and trainer have the same weights (nats). Healthy: mean 1e-6 in float32, 1e-2 in bfloat16.
        #: `mismatch/k3`: Mean of ρ - 1 - log ρ over them (nats). Healthy: below 1e-3.
        #: `mismatch/share`: Share of tokens of age 0.
        "mismatch": fresh,
        #: `mismatch/same_keys/<reading>`, `mismatch/older_keys/<reading>`: The same four of those
        #: with keys of their own version (rounding), and with older keys (pause mode `keep`).
        #: Healthy: as above with `same_keys`.
        "mismatch/same_keys": fresh & ~has_older_keys,
        "mismatch/older_keys": fresh & has_older_keys,
    }
    metrics: dict[str, float] = {}
    for name, where in parts.items():
        if where.any():
            metrics |= {
                f"{name}/{reading}": value for reading, value in _mismatch(log_rho[where]).items()
            }
            metrics[f"{name}/share"] = float(_share(where))
    return metrics


def entropy_metrics(policy: Float[Tensor, " T"]) -> dict[str, float]:
    """Entropy of the policy per token in nats, estimated by -mean log pi of the sampled tokens;
    exact in expectation on policy.
    """
    return {
        #: Mean of -log π of the sampled tokens (nats). Healthy: falls slowly.
        "entropy/estimate": float(-policy.mean()),
    }


def alarms(metrics: dict[str, float]) -> tuple[str, ...]:
    """Sentences about readings that say training is off its distribution; none if all is well."""
    mean = metrics["rho/mean"]
    ess = metrics["rho/ess"]
    divergence = metrics["rho/k1"]
    deviation = metrics["rho/std"]
    found: list[str] = []
    if not 0.5 <= mean <= 2:
        found.append(f"mean rho is {mean:.3g}, outside [0.5, 2]")
    if ess < 0.3:
        found.append(f"effective sample size is {ess:.3g}, below 0.3")
    if abs(divergence) > 0.1:
        found.append(f"k1 is {divergence:.3g}, beyond 0.1")
    if deviation > 1:
        found.append(f"standard deviation of rho is {deviation:.3g}, above 1")
    return tuple(found)


def _mismatch(log_rho: Float[Tensor, " T"]) -> dict[str, float]:
    return {
        "mean": float(log_rho.abs().mean()),
        "max": float(log_rho.abs().max()),
        "k3": float(k3(log_rho)),
    }


def _share(where: Bool[Tensor, " T"]) -> Float[Tensor, ""]:
    return where.double().mean()


_OF_RHO = frozenset({"rho/mean", "rho/min", "rho/max", "rho/std"})


def _within_age(name: str) -> str:
    """The name of a metric in the row of an age."""
    if name in _OF_RHO or not name.startswith("rho/"):
        return name.replace("/", "_")
    return name.removeprefix("rho/")
