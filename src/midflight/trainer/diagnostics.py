"""What every batch says about how far the policy has moved from the one that sampled."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from midflight.trainer.corrections import MAX_LOG_RATIO


def effective_sample_size(weights: Float[Tensor, " T"]) -> Float[Tensor, ""]:
    """(sum w)^2 / (n sum w^2), in (0, 1]: the share of tokens that equally weighted ones would need. Kish 1965."""
    return weights.sum() ** 2 / (weights.numel() * (weights**2).sum())


def k1(log_rho: Float[Tensor, " T"]) -> Float[Tensor, ""]:
    """Mean of -log rho: KL(behaviour, proximal), unbiased, of either sign. Schulman 2020, "Approximating KL divergence"."""
    return -log_rho.mean()


def k3(log_rho: Float[Tensor, " T"]) -> Float[Tensor, ""]:
    """Mean of rho - 1 - log rho: the same divergence, unbiased, never negative, of less variance. Schulman 2020."""
    return (log_rho.exp() - 1 - log_rho).mean()


def chi2(log_rho: Float[Tensor, " T"]) -> Float[Tensor, ""]:
    """Mean of rho^2, minus 1: what the variance of importance weights grows with."""
    return (2 * log_rho).exp().mean() - 1


def sequence_log_ratios(log_rho: Float[Tensor, " T"], rollout: Int[Tensor, " T"]) -> Float[Tensor, " S"]:
    """log of the product of rho over each rollout that has tokens, clamped to +-20."""
    _, index = rollout.unique(return_inverse=True)
    sums = torch.zeros(int(index.max()) + 1, dtype=log_rho.dtype, device=log_rho.device).index_add(0, index, log_rho)
    return sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_metrics(log_rho: Float[Tensor, " T"], rollout: Int[Tensor, " T"], *, tis_cap: float | None) -> dict[str, float]:
    """The table's row for a batch of at least one token. ESS is of the weights used: truncated ones where there is a cap."""
    rho = log_rho.exp()
    weights = rho if tis_cap is None else rho.clamp(max=tis_cap)
    metrics = {
        "rho/mean": rho.mean(),
        "rho/min": rho.min(),
        "rho/max": rho.max(),
        "rho/std": rho.std(correction=0),
        "rho/ess": effective_sample_size(weights),
        "rho/k1": k1(log_rho),
        "rho/k3": k3(log_rho),
        "rho/chi2_token": chi2(log_rho),
        "rho/chi2_sequence": chi2(sequence_log_ratios(log_rho, rollout)),
    }
    if tis_cap is not None:
        metrics["rho/capped_share"] = (rho > tis_cap).to(rho.dtype).mean()
    return {name: float(value) for name, value in metrics.items()}


def clip_metrics(below: Bool[Tensor, " T"], above: Bool[Tensor, " T"]) -> dict[str, float]:
    """Shares of tokens whose gradient a clip took away."""
    return {"clip/low_share": float(below.double().mean()), "clip/high_share": float(above.double().mean())}


def age_metrics(age: Int[Tensor, " T"], log_rho: Float[Tensor, " T"]) -> dict[str, float]:
    """A histogram of token age in versions: for each age that occurs its share of tokens, mean rho and k3."""
    metrics = {"age/mean": float(age.double().mean()), "age/max": float(age.max())}
    for value in age.unique().tolist():
        here = log_rho[age == value]
        metrics[f"age/{value}/share"] = here.numel() / age.numel()
        metrics[f"age/{value}/rho_mean"] = float(here.exp().mean())
        metrics[f"age/{value}/k3"] = float(k3(here))
    return metrics


def alarms(metrics: dict[str, float]) -> tuple[str, ...]:
    """Sentences about readings that say training is off its distribution; none if all is well."""
    found = (
        (not 0.5 <= metrics["rho/mean"] <= 2, f"mean rho is {metrics['rho/mean']:.3g}, outside [0.5, 2]"),
        (metrics["rho/ess"] < 0.3, f"effective sample size is {metrics['rho/ess']:.3g}, below 0.3"),
        (abs(metrics["rho/k1"]) > 0.1, f"k1 is {metrics['rho/k1']:.3g}, beyond 0.1"),
        (metrics["rho/std"] > 1, f"standard deviation of rho is {metrics['rho/std']:.3g}, above 1"),
    )
    return tuple(sentence for alarmed, sentence in found if alarmed)
