"""Sums over tokens: statistics of rollouts, and one number from the losses of a batch.

`sequence` numbers the rollout of each token, 0..S-1; a rollout's tokens may lie anywhere, in any
order and in several rows. Sums of rollouts are taken in float64, so that neither the order of
tokens nor of atomic additions moves a number across a bound. Index a result by `sequence` to spread
it over the tokens.

The denominators of a loss are those of the whole (mini-)batch and are passed in, so that the parts
of a batch add up to the batch: the gradient does not depend on how rows were packed or split.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def sums(
    values: Float[Tensor, " T"], sequence: Int[Tensor, " T"], *, num_sequences: int
) -> Float[Tensor, " S"]:
    """Sum over the tokens of each rollout; 0 for one without tokens."""
    found = torch.zeros(num_sequences, dtype=torch.float64, device=values.device)
    return found.index_add(0, sequence, values.double()).to(values.dtype)


def counts(sequence: Int[Tensor, " T"], *, num_sequences: int) -> Int[Tensor, " S"]:
    """Tokens of each rollout."""
    return torch.bincount(sequence, minlength=num_sequences)


def means(
    values: Float[Tensor, " T"], sequence: Int[Tensor, " T"], *, num_sequences: int
) -> Float[Tensor, " S"]:
    """Mean over the tokens of each rollout; 0 for one without tokens."""
    return sums(values, sequence, num_sequences=num_sequences) / counts(
        sequence, num_sequences=num_sequences
    ).clamp(min=1)


def maxima(
    values: Float[Tensor, " T"], sequence: Int[Tensor, " T"], *, num_sequences: int
) -> Float[Tensor, " S"]:
    """Largest value among the tokens of each rollout; -inf for one without tokens."""
    found = torch.full((num_sequences,), -torch.inf, dtype=values.dtype, device=values.device)
    return found.scatter_reduce(0, sequence, values, reduce="amax")


# --- One number -----------------------------------------------------------------------------------


def token_mean(loss: Float[Tensor, " T"], *, num_tokens: int) -> Float[Tensor, ""]:
    """Sum over tokens / tokens of the batch.

    DAPO (2503.14476), eq. 8. Every token weighs the same.
    """
    return loss.sum() / num_tokens


def sequence_mean(
    loss: Float[Tensor, " T"],
    rollout: Int[Tensor, " T"],
    *,
    tokens_of_rollout: Int[Tensor, " M"],
    num_rollouts: int,
) -> Float[Tensor, ""]:
    """Mean over the tokens of a rollout, then over rollouts.

    `tokens_of_rollout` counts all tokens of each rollout in the batch, in whatever rows and
    micro-batches they lie; `num_rollouts` counts the rollouts that have any.

    GRPO (2402.03300), eq. 3. Every rollout weighs the same.
    """
    return (loss / tokens_of_rollout[rollout]).sum() / num_rollouts


def constant(loss: Float[Tensor, " T"], *, num_rollouts: int, length: int) -> Float[Tensor, ""]:
    """Sum over tokens / a constant length, then mean over rollouts.

    Dr.GRPO (2503.20783). Long answers weigh more.
    """
    return loss.sum() / (num_rollouts * length)
