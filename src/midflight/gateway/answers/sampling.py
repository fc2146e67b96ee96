"""What a request samples with: the client's wishes over the session's defaults, checked; and the seed of its noise. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from midflight.errors import ContextExceeded, RequestRejected
from midflight.gateway.sessions.call import CompletionCall
from midflight.types import Capabilities, Feature, LogprobKind, SamplingParams
from midflight.types.sampling import FEATURED


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engines can take."""

    max_context: int
    """Prompt plus answer, in tokens."""
    vocab_size: int
    features: frozenset[Feature] = frozenset()
    """What every engine can do."""
    honours_seed: bool = True
    """Whether every engine does."""
    logprob_kinds: frozenset[LogprobKind] = frozenset({LogprobKind.SAMPLED})
    """Those of all engines."""

    @classmethod
    def of(cls, engines: Sequence[Capabilities]) -> Limits:
        """What all of them can take."""
        smallest = min(engines, key=lambda engine: engine.max_context)
        return cls(
            max_context=smallest.max_context,
            vocab_size=smallest.vocab_size,
            features=frozenset.intersection(*(engine.features for engine in engines)),
            honours_seed=all(engine.honours_seed for engine in engines),
            logprob_kinds=frozenset(engine.logprob_kind for engine in engines),
        )


def check_prompt(ids: tuple[int, ...], limits: Limits, *, param: str) -> None:
    """Refuses a prompt that no engine could take: empty, with unknown ids, or without room for one token of answer."""
    if not ids:
        raise RequestRejected(f"{param} is empty: send at least one token.", param=param)
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        bad = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise RequestRejected(f"{param} holds token id {bad}: send ids from 0 to {limits.vocab_size - 1}.", param=param)
    if len(ids) + 1 > limits.max_context:
        raise ContextExceeded(
            f"This model's maximum context length is {limits.max_context} tokens, but the {param} has {len(ids)} tokens and leaves"
            f" no room for an answer. Shorten the {param}.",
            param=param,
        )


def params_for(call: CompletionCall, num_prompt_tokens: int, *, defaults: SamplingParams | None, limits: Limits) -> SamplingParams:
    """Client over session over dialect. A default of `max_tokens` shrinks to the room there is, an explicit one must fit."""
    asked, own = call.asked, defaults or SamplingParams()
    _check_features(call, limits)
    room = limits.max_context - num_prompt_tokens
    default = own.max_tokens if defaults is not None else (call.default_max_tokens or room)
    explicit = asked.number("max_tokens")
    max_tokens = min(default, room) if explicit is None else explicit
    if max_tokens > room:
        raise ContextExceeded(
            f"This model's maximum context length is {limits.max_context} tokens, but you asked for {num_prompt_tokens + max_tokens}"
            f" tokens ({num_prompt_tokens} in the {call.prompt_param}, {max_tokens} in the answer). Shorten one of them.",
            param=call.name_of("max_tokens"),
        )
    merged = {**asked.given, "max_tokens": max_tokens, "min_tokens": _min_tokens(call, own, max_tokens)}
    params = replace(own, **{"top_logprobs": 0, **merged})
    _check_ids("stop_token_ids", "holds", params.stop_token_ids, call, limits)
    _check_ids("logit_bias", "names token", [i for i, _ in params.logit_bias], call, limits)
    return params


def samples_the_policy(params: SamplingParams, defaults: SamplingParams | None, *, limits: Limits) -> bool:
    """Whether the trainer's distribution is the one sampled: not truncated, and at the session's temperature (DECISIONS 11).

    An engine that leaves the temperature out of its log-probabilities tells those of another distribution, at any but 1.
    """
    told = params.temperature == 1 or LogprobKind.RAW not in limits.logprob_kinds
    return told and params.samples_the_policy and (defaults is None or params.temperature == defaults.temperature)


def _min_tokens(call: CompletionCall, own: SamplingParams, max_tokens: int) -> int:
    asked, name = call.asked.number("min_tokens"), call.name_of("min_tokens")
    if asked is not None and asked > max_tokens:
        raise RequestRejected(f"{name} is {asked}, above {call.name_of('max_tokens')} = {max_tokens}: lower it.", param=name)
    return min(own.min_tokens if asked is None else asked, max_tokens)


def _check_features(call: CompletionCall, limits: Limits) -> None:
    """What the engines cannot do is refused by the client's own name for it."""
    given = call.asked.given
    for lacking in (p for p in FEATURED if p.name in given and given[p.name] != p.default and p.feature not in limits.features):
        param = call.name_of(lacking.name)
        raise RequestRejected(f"{param} is not supported by the engines behind this endpoint: leave it out.", param=param)
    if "seed" in given and not limits.honours_seed:
        param = call.name_of("seed")
        raise RequestRejected(
            f"{param} is not honoured by every engine behind this endpoint, which would sample anew each time: leave it out.", param=param
        )


def _check_ids(name: str, verb: str, ids: Sequence[int], call: CompletionCall, limits: Limits) -> None:
    """Refuses ids that the vocabulary does not have."""
    if not ids:
        return
    bad = next((i for i in ids if not 0 <= i < limits.vocab_size), None)
    if bad is not None:
        param = call.name_of(name)
        raise RequestRejected(f"{param} {verb} {bad}: send ids from 0 to {limits.vocab_size - 1}.", param=param)
