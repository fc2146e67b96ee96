"""What an answer of several versions should have said: by plain `transformers`, with the weights and the keys that its labels name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from transformers import PreTrainedModel

from midflight.models.caches import cache_name
from midflight.types import Version


def labelled_logprobs(
    models: Callable[[Version], PreTrainedModel], prompt: Sequence[int], output: Sequence[int], labels: Sequence[tuple[Version, Version]]
) -> list[float]:
    """Of each token at temperature 1. `labels`: version and kv_version of each.

    The step that makes a token also makes the keys of the token before it. So where no key is older than the token (`kv_version`), this is a forward
    of one version over everything before; elsewhere the keys are those that the labels of the tokens before imply.
    """
    whole = [*prompt, *output]
    found: list[float] = []
    keys, num_keys = None, 0
    for (version, kv_version), run in groupby(labels):
        num = len(list(run))
        model = models(version)
        name = cache_name(model)
        assert name is not None
        if kv_version == version:
            keys, num_keys = None, 0
        end = len(prompt) + len(found) + num
        read, said = whole[num_keys : end - 1], whole[end - num : end]
        with torch.no_grad():
            made = model(torch.tensor([read]), use_cache=True, **({} if keys is None else {name: keys}))
        logits = made.logits[0, -num:].double()
        found += logits.log_softmax(-1).gather(-1, torch.tensor(said)[:, None])[:, 0].tolist()
        keys, num_keys = made[name], end - 1
    return found
