"""Scores of rows of tokens by a model: the log-probability of each token after those before it."""

import inspect
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from midflight.errors import NotSupported
from midflight.models.caches import cache_name
from midflight.types import Float32, Int32, Likely

MAX_LOGITS = 2**26
"""Logits that are in memory at once: 256 MiB in float32, and as much again for their softmax."""


def portions(lengths: NDArray[np.int64], *, max_tokens: int) -> list[list[int]]:
    """Rows that go through the model together, by number, shortest first. Together they have at
    most `max_tokens` with their padding, or are one row.
    """
    made: list[list[int]] = []
    for row in np.argsort(lengths, kind="stable").tolist():
        if made and (len(made[-1]) + 1) * int(lengths[row]) <= max_tokens:
            made[-1].append(row)
        else:
            made.append([row])
    return made


@torch.inference_mode()
def token_logprobs(
    model: PreTrainedModel,
    rows: Sequence[Int32],
    *,
    temperature: float,
    max_logits: int | None = None,
    resumes: bool = True,
) -> list[Float32]:
    """log softmax(logits / temperature) of each token after those before it in its row. It is 0 for
    the first, which nothing predicts.

    Padding comes after the tokens, where causal attention never looks.
    """
    ids = _padded(rows, model.device)
    found = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    for places, logits in _stretches(model, ids, max_logits=max_logits, resumes=resumes):
        found[:, places] = _chosen(_log_softmax(logits, temperature), ids[:, places])
    scores = found.cpu().numpy()
    return [scores[number, : len(row)] for number, row in enumerate(rows)]


@torch.inference_mode()
def likely_tokens(
    model: PreTrainedModel,
    row: Sequence[int],
    *,
    top: int,
    max_logits: int | None = None,
    resumes: bool = True,
) -> list[Likely]:
    """The candidates at the place of each token but the first: the token itself, then the `top`
    likeliest, each with its log-probability at temperature 1.
    """
    ids = torch.tensor([row], device=model.device)
    found: list[Likely] = []
    for places, logits in _stretches(model, ids, max_logits=max_logits, resumes=resumes):
        scores = _log_softmax(logits, 1.0)
        own = ids[:, places]
        best, which = scores[0].topk(min(top, scores.shape[-1]), dim=-1)
        columns = zip(
            own[0].tolist(),
            _chosen(scores, own)[0].tolist(),
            which.tolist(),
            best.tolist(),
            strict=True,
        )
        for token, logprob, others, logprobs in columns:
            likeliest = zip(others, logprobs, strict=True)
            found.append(((token, logprob), *likeliest))
    return found


def _stretches(
    model: PreTrainedModel, ids: Tensor, *, max_logits: int | None, resumes: bool
) -> Iterator[tuple[slice, Tensor]]:
    """The places from the second on, one stretch at a time, and the logits that predict them: [b,
    k, V].

    The logits of long rows need not all be in memory at once. With `resumes` the columns of a
    stretch go through the model over the keys of the columns before. Without it, because the model
    does not go on rightly from these keys, all columns before go through it again.
    """
    max_logits = MAX_LOGITS if max_logits is None else max_logits
    width = max(1, max_logits // (len(ids) * int(model.config.get_text_config().vocab_size)))
    takes = frozenset(inspect.signature(model.forward).parameters)
    name = cache_name(model) if resumes else None
    if resumes and name is None:
        raise NotSupported(
            f"scoring: {type(model).__name__} keeps nothing of a sequence that it could be "
            "continued from"
        )
    past = None
    for start in range(0, ids.shape[1] - 1, width):
        end = min(start + width, ids.shape[1] - 1)
        first = start if resumes else 0
        options: dict[str, object] = {} if name is None else {name: past}
        if resumes and "position_ids" in takes:
            options["position_ids"] = torch.arange(start, end, device=ids.device).expand(
                len(ids), -1
            )
        if "logits_to_keep" in takes and not resumes:
            options["logits_to_keep"] = end - start
        out = model(input_ids=ids[:, first:end], use_cache=resumes, **options)
        past = None if name is None else out[name]
        yield slice(start + 1, end + 1), out.logits[:, start - end :]


def _padded(rows: Sequence[Int32], device: torch.device) -> Tensor:
    """[rows, longest]; padding is token 0."""
    ids = np.zeros((len(rows), max(len(row) for row in rows)), dtype=np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    return torch.from_numpy(ids).to(device)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature), computed in float32, or in float64 for a float64 model. At
    the usual temperature, which is 1, no third copy of the logits is made.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    scaled = logits if temperature == 1 else logits / temperature
    return scaled.log_softmax(-1)


def _chosen(scores: Tensor, targets: Tensor) -> Tensor:
    """The scores of the targets: [b, k, V] and [b, k] -> [b, k]."""
    return scores.gather(-1, targets[..., None])[..., 0]
