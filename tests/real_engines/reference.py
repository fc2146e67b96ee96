"""What an answer of several versions should have said: by plain `transformers`, with the weights and the keys that its labels name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from transformers import PreTrainedModel

from midflight.models.caches import cache_name
from midflight.types import Version


def labelled_logprobs(
    models: Callable[[Version], PreTrainedModel],
    prompt: Sequence[int],
    output: Sequence[int],
    labels: Sequence[tuple[Version, Version]],
    *,
    prompt_read_by: Version | None = None,
) -> list[float]:
    """Of each token at temperature 1. `labels`: version and kv_version of each. `prompt_read_by`: the version that made the keys of the prompt but
    for its last token, where it is not that of the first token.

    The step that makes a token also makes the keys of the token before it. So where no key is older than the token, this is a forward of one
    version over everything before; elsewhere the keys are those that the labels of the tokens before imply.
    """
    whole = [*prompt, *output]
    found: list[float] = []
    keys, num_keys = None, 0
    if prompt_read_by not in (None, labels[0][0]):
        keys, num_keys = _read(models(prompt_read_by), prompt[:-1], None)[1], len(prompt) - 1
    for (version, kv_version), run in groupby(labels):
        num = len(list(run))
        if kv_version == version:
            keys, num_keys = None, 0
        end = len(prompt) + len(found) + num
        logits, keys = _read(models(version), whole[num_keys : end - 1], keys)
        num_keys = end - 1
        said = torch.tensor(whole[end - num : end])
        found += logits[-num:].double().log_softmax(-1).gather(-1, said[:, None])[:, 0].tolist()
    return found


def is_first_choice(
    models: Callable[[Version], PreTrainedModel], prompt: Sequence[int], token: int, *, version: Version, begun_by: Version
) -> bool:
    """True if the version makes this token out of the prompt without chance. A server may read a prompt in pieces, so its first tokens may have been
    read by the version `begun_by`, however many; the last one is read by the version that makes the token.
    """
    for num_before in range(len(prompt) if begun_by != version else 1):
        keys = _read(models(begun_by), prompt[:num_before], None)[1] if num_before else None
        logits, _ = _read(models(version), prompt[num_before:], keys)
        if int(logits[-1].argmax()) == token:
            return True
    return False


def _read(model: PreTrainedModel, tokens: Sequence[int], keys: object) -> tuple[torch.Tensor, object]:
    """Logits [len(tokens), vocabulary] over these keys, and the keys with those of the tokens."""
    name = cache_name(model)
    assert name is not None
    with torch.no_grad():
        made = model(torch.tensor([tokens]), use_cache=True, **({} if keys is None else {name: keys}))
    return made.logits[0], made[name]
