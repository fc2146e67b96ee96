"""Log-probabilities of tokens under a model: the one place where the trainer meets the architecture."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from midflight.trainer.microbatch import MicroBatch


def token_logprobs(model: PreTrainedModel, micro: MicroBatch, *, temperature: float) -> Float[Tensor, " k"]:
    """log softmax(logits / temperature) of each target, in float32 (float64 for a float64 model).

    Logits are computed where a prediction is wanted and nowhere else. With the temperature of sampling and no truncation this is the
    distribution an engine samples from. `model` attends raggedly (`attention.attend_raggedly`).
    """
    logits: Tensor = model(
        input_ids=micro.input_ids,
        position_ids=micro.position_ids,
        use_cache=False,
        logits_to_keep=micro.inputs,
        runs=micro.runs,
    ).logits[0]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1:
        logits = logits / temperature
    return logits.log_softmax(-1).gather(-1, micro.targets[:, None]).squeeze(-1)
