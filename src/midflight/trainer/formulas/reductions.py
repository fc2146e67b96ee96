"""From losses per token to one number.

Denominators are those of the whole (mini-)batch and are passed in, so that the parts of a batch add up to the batch:
the gradient does not depend on how rows were packed or split.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor


def token_mean(loss: Float[Tensor, " T"], *, num_tokens: int) -> Float[Tensor, ""]:
    """Sum over tokens / tokens of the batch. DAPO (2503.14476), eq. 8: every token weighs the same."""
    return loss.sum() / num_tokens


def sequence_mean(
    loss: Float[Tensor, " T"], rollout: Int[Tensor, " T"], *, tokens_of_rollout: Int[Tensor, " M"], num_rollouts: int
) -> Float[Tensor, ""]:
    """Mean over the tokens of a rollout, then over rollouts. GRPO (2402.03300), eq. 3: every rollout weighs the same.

    `tokens_of_rollout` counts all tokens of each rollout in the batch, in whatever rows and micro-batches they lie;
    `num_rollouts` counts the rollouts that have any.
    """
    return (loss / tokens_of_rollout[rollout]).sum() / num_rollouts


def constant(loss: Float[Tensor, " T"], *, num_rollouts: int, length: int) -> Float[Tensor, ""]:
    """Sum over tokens / a constant length, then mean over rollouts. Dr.GRPO (2503.20783): long answers weigh more."""
    return loss.sum() / (num_rollouts * length)
