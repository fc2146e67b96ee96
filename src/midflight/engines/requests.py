"""The conditions that a request must satisfy before it enters an engine. A bad request is refused
alone, and the engine goes on.
"""

import math

import numpy as np

from midflight.errors import ContextExceeded, RequestRejected
from midflight.types import Feature, GenerateRequest, Int32, SamplingParams
from midflight.types.generation import MAX_BIASES, RANGED, ranged_values
from midflight.types.token_ids import AnyIds


def check_request(request: GenerateRequest, *, vocab_size: int, max_context: int) -> None:
    """Raises `RequestRejected` or `ContextExceeded`, naming the value and the remedy."""
    _check_ids("input_ids", request.input_ids, vocab_size)
    _check_ids("stop_token_ids", request.sampling.stop_token_ids, vocab_size)
    _check_ids("logit_bias", tuple(i for i, _ in request.sampling.logit_bias), vocab_size)
    check_sampling(request.sampling)
    length = len(request.input_ids)
    prompt = request.num_prompt_tokens
    if length == 0:
        raise RequestRejected(
            "generating: the prompt is empty. Send at least one token.", param="input_ids"
        )
    if not 1 <= prompt <= length:
        raise RequestRejected(
            (
                f"generating: num_prompt_tokens is {prompt} but input_ids has {length} tokens. "
                f"Send a number from 1 to {length}."
            ),
            param="num_prompt_tokens",
        )
    if length > max_context or prompt >= max_context:
        raise ContextExceeded(
            (
                f"generating: {length} input tokens leave no room in a context of {max_context}. "
                f"Send at most {max_context - 1} tokens."
            ),
            param="input_ids",
        )


def check_rows(
    token_ids: Int32, row_offsets: Int32, *, temperature: float, vocab_size: int, max_context: int
) -> None:
    """Checks rows to score. Raises `RequestRejected` or `ContextExceeded`, naming the value and the
    remedy.
    """
    if not math.isfinite(temperature) or temperature <= 0:
        raise _refused("temperature", temperature, "a finite number above 0")
    spans = len(row_offsets) > 1 and row_offsets[0] == 0 and row_offsets[-1] == len(token_ids)
    lengths = np.diff(row_offsets)
    if not spans or lengths.min() < 1:
        raise RequestRejected(
            (
                "scoring: the rows are empty, or do not span the tokens. Send at least one row, "
                "each with a token."
            ),
            param="rows",
        )
    longest = int(lengths.max())
    if longest > max_context:
        raise ContextExceeded(
            f"scoring: a row has {longest} tokens, the context {max_context}. Send shorter rows.",
            param="rows",
        )
    bad = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if len(bad):
        raise RequestRejected(
            (
                f"scoring: token id {bad[0]} is outside the vocabulary. Send ids from 0 to "
                f"{vocab_size - 1}."
            ),
            param="rows",
        )


def check_features(sampling: SamplingParams, features: frozenset[Feature], *, engine: str) -> None:
    """Raises `RequestRejected` if the engine does not have a way of sampling that is asked for. The
    error names it.
    """
    lacking = sorted(sampling.features - features)
    if lacking:
        raise RequestRejected(
            f"generating on {engine}: it has no {lacking[0]}. Leave that out.", param=lacking[0]
        )


def check_sampling(sampling: SamplingParams) -> None:
    """Checks every limit once, so that the sampler may trust its numbers."""
    for (p, bounds), value in zip(RANGED, ranged_values(sampling), strict=True):
        if value != p.default and (value is None or not bounds.holds(value)):
            raise _refused(p.name, value, f"a number {bounds}")
    max_tokens = sampling.max_tokens
    if sampling.min_tokens > max_tokens:
        expected = f"an integer from 0 to max_tokens ({max_tokens})"
        raise _refused("min_tokens", sampling.min_tokens, expected)
    num_biases = len(sampling.logit_bias)
    if num_biases > MAX_BIASES:
        raise _refused("logit_bias", f"{num_biases} ids", f"at most {MAX_BIASES} ids")
    for token_id, bias in sampling.logit_bias:
        if not -100 <= bias <= 100:
            value = f"{bias} for token {token_id}"
            raise _refused("logit_bias", value, "numbers from -100 to 100")


def _refused(param: str, value: object, expected: str) -> RequestRejected:
    return RequestRejected(f"sampling: {param} is {value!r}. Send {expected}.", param=param)


def _check_ids(param: str, ids: AnyIds, vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise RequestRejected(
            (
                f"generating: token id {bad} in {param} is outside the vocabulary. Send ids from 0 "
                f"to {vocab_size - 1}."
            ),
            param=param,
        )
