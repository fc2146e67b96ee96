"""One generation: its sampling parameters, its request to an engine, the chunks that the engine
streams, and the resulting turn.

The gateway's bodies, checks and defaults, the engines' checks and the dictionaries for other
servers are made from the list of parameters. A new parameter is one line in `SamplingParams`, and
its implementation in the embedded sampler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter
from types import UnionType
from typing import Any, Final, TypeAlias, TypeVar, get_type_hints

import msgspec

from midflight.types.names import Feature, FinishReason, GrammarKind, Version
from midflight.types.token_ids import AnyIds, SharedIds

T = TypeVar("T")

MAX_BIASES = 300
"""The most tokens of one `logit_bias`, as many as OpenAI's endpoint takes. They travel with the
request, and each changes a row of logits at every step.
"""
LEAST_TEMPERATURE = 1e-4
"""The least temperature above 0 that clients may set. Logits divided by less leave single
precision.
"""
MAX_TOP_LOGPROBS = 20
"""The most alternatives of a token, which is OpenAI's bound."""
MAX_STOPS = 16
"""The most stop strings of one request. Each token is compared with all of them."""
_MOST = 2**31 - 1
"""The largest count, because engines keep counts in 32 bits."""


class Api(StrEnum):
    """The interfaces over which sampling parameters are sent. Each has names of its own."""

    OPENAI = "openai"
    """Clients of OpenAI's routes, with the extra fields that vLLM's clients send."""
    ANTHROPIC = "anthropic"
    """Clients of the messages route."""
    GOOGLE = "google"
    """Clients of Google's routes."""
    NATIVE = "native"
    """Clients of `/generate`, under SGLang's names."""
    VLLM = "vllm"
    """Requests of ours to a vLLM server."""
    SGLANG = "sglang"
    """Requests of ours to an SGLang server."""


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` to `most`, both included. With `above` `least` itself is excluded."""

    least: float
    most: float | None = None
    above: bool = False

    def holds(self, value: float) -> bool:
        """True if the value is in the range. False for NaN. Infinity passes only a range without
        `most`, which whole numbers have.
        """
        is_enough = self.least < value if self.above else self.least <= value
        return is_enough and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        first = f"above {self.least}" if self.above else f"from {self.least}"
        if self.most is None:
            return first if self.above else f"of at least {self.least}"
        return f"{first} to {self.most}"


_SAME: Final = "="
"""Stands for the parameter's own name."""
_declared: list[dict[str, Any]] = []
"""The arguments of the calls of `parameter`, in the order of the fields."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """The description of a sampling parameter."""

    name: str
    kind: type | UnionType
    default: object
    range: Range | None
    """The range of a number. `None` for other kinds."""
    feature: Feature | None
    """The feature that an engine must have for any value but the default."""
    reshapes: bool
    """True if any value but the default samples from another distribution than the policy's."""
    truncates: bool
    """True if it reshapes the distribution only by leaving ids out."""
    names: Mapping[Api, str]
    """Its name in each interface that sends its value as it is. An interface that is missing does
    not have the parameter, or has code of its own that writes it in another form.
    """


def parameter(
    default: T,
    range: Range | None = None,
    feature: Feature | None = None,
    *,
    reshapes: bool = True,
    truncates: bool = False,
    openai: str | None = _SAME,
    anthropic: str | None = _SAME,
    native: str | None = _SAME,
    google: str | None = None,
    copied: bool = True,
    vllm: str = _SAME,
    sglang: str = _SAME,
) -> T:
    """A field of `SamplingParams`. `copied=False`: the value is not sent to servers as it is; the
    code for each server translates it.
    """
    clients = {
        Api.OPENAI: openai,
        Api.ANTHROPIC: anthropic,
        Api.NATIVE: native,
        Api.GOOGLE: google,
    }
    servers = {Api.VLLM: vllm, Api.SGLANG: sglang} if copied else {}
    _declared.append(
        {
            "range": range,
            "feature": feature,
            "reshapes": reshapes,
            "truncates": truncates,
            "names": {**clients, **servers},
        }
    )
    return default


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an answer must match, from its first output token to its last (the end of turn
    excluded).
    """

    kind: GrammarKind
    text: str


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sampling parameters of a request. Limits count output tokens from
    `GenerateRequest.num_prompt_tokens`, also after a resume.
    """

    max_tokens: int = parameter(
        16,
        Range(1, _MOST),
        reshapes=False,
        openai=None,
        native="max_new_tokens",
        google="maxOutputTokens",
        copied=False,
    )
    min_tokens: int = parameter(0, Range(0, _MOST), native="min_new_tokens", copied=False)
    temperature: float = parameter(1.0, Range(0, 1000), reshapes=False, google=_SAME)
    """0 is greedy."""
    top_p: float = parameter(1.0, Range(0, 1, above=True), truncates=True, google="topP")
    top_k: int | None = parameter(
        None, Range(1, _MOST), truncates=True, google="topK", copied=False
    )
    min_p: float = parameter(0.0, Range(0, 1), truncates=True)
    stop: tuple[str, ...] = parameter(
        (), reshapes=False, anthropic="stop_sequences", google="stopSequences"
    )
    stop_token_ids: tuple[int, ...] = parameter((), reshapes=False, anthropic=None, copied=False)
    ignore_eos: bool = parameter(False, reshapes=False, anthropic=None, copied=False)
    seed: int = parameter(
        0,
        Range(0, 2**64 - 1),
        reshapes=False,
        native="sampling_seed",
        google=_SAME,
        copied=False,
    )
    """Unsigned 64 bits. The noise of a token is a function of (seed, absolute position, token id)
    and nothing else.
    """

    frequency_penalty: float = parameter(
        0.0, Range(-2, 2), Feature.PENALTIES, anthropic=None, google="frequencyPenalty"
    )
    """Subtracted from a token's logit for each of its occurrences in the output so far. Larger
    repeats less.
    """
    presence_penalty: float = parameter(
        0.0, Range(-2, 2), Feature.PENALTIES, anthropic=None, google="presencePenalty"
    )
    """Subtracted once from the logit of each token that the output so far holds."""
    repetition_penalty: float = parameter(1.0, Range(0.01, 100), Feature.PENALTIES, anthropic=None)
    """Positive logits of tokens in prompt or output are divided by it, negative ones multiplied. 1
    changes nothing. Far outside its range a logit becomes infinite.
    """
    logit_bias: tuple[tuple[int, float], ...] = parameter(
        (), None, Feature.LOGIT_BIAS, anthropic=None, copied=False
    )
    """Pairs of a token id and the number that is added to its logit."""
    grammar: Grammar | None = parameter(
        None, None, Feature.GRAMMARS, openai=None, anthropic=None, native=None, copied=False
    )
    top_logprobs: int = parameter(
        0,
        Range(0, MAX_TOP_LOGPROBS),
        Feature.TOP_LOGPROBS,
        reshapes=False,
        openai=None,
        anthropic=None,
        native=None,
        copied=False,
    )
    """The number of the likeliest tokens that are reported at each position. The sampled token is
    among them only if it is that likely. Fewer are reported if fewer are possible (truncation, a
    grammar). At temperature 0 they are those of temperature 1.
    """

    def changed(self, **values: object) -> SamplingParams:
        """A copy with these values changed."""
        return msgspec.structs.replace(self, **values)

    @property
    def samples_the_policy(self) -> bool:
        """True if the sampled distribution is the policy's own, except for its temperature."""
        return self.temperature > 0 and _reshaping(self) == _RESHAPES_NOT

    @property
    def truncates_the_policy(self) -> bool:
        """True if the sampled distribution is the policy's own over the part of the vocabulary that
        top-p, top-k or min-p left.
        """
        if self.temperature <= 0 or _distorting(self) != _DISTORTS_NOT:
            return False
        return _truncating(self) != _TRUNCATES_NOT

    @property
    def reshaped_by(self) -> tuple[str, ...]:
        """The parameters for which `samples_the_policy` is false, by name."""
        found = [
            p.name for p in PARAMETERS.values() if p.reshapes and getattr(self, p.name) != p.default
        ]
        return ("temperature", *found) if self.temperature <= 0 else tuple(found)

    @property
    def truncated_by(self) -> tuple[str, ...]:
        """The parameters that leave ids out, by name."""
        return tuple(
            p.name
            for p in PARAMETERS.values()
            if p.truncates and getattr(self, p.name) != p.default
        )

    @property
    def features(self) -> frozenset[Feature]:
        """The features that an engine must have for these parameters."""
        if _featured(self) == _FEATURELESS:
            return frozenset()
        return frozenset(
            p.feature
            for p in FEATURED
            if p.feature is not None and getattr(self, p.name) != p.default
        )


def _parameters() -> Mapping[str, Parameter]:
    kinds = get_type_hints(SamplingParams)
    fields = SamplingParams.__struct_fields__
    defaults = SamplingParams.__struct_defaults__
    found: dict[str, Parameter] = {}
    for name, default, about in zip(fields, defaults, _declared, strict=True):
        found[name] = Parameter(
            name=name,
            kind=kinds[name],
            default=default,
            range=about["range"],
            feature=about["feature"],
            reshapes=about["reshapes"],
            truncates=about["truncates"],
            names=_names(name, about["names"]),
        )
    return found


def _names(parameter: str, names: Mapping[Api, str | None]) -> dict[Api, str]:
    """The names of a parameter in the interfaces that have it."""
    found: dict[Api, str] = {}
    for api, own in names.items():
        if own is not None:
            found[api] = parameter if own == _SAME else own
    return found


PARAMETERS: Final = _parameters()
"""The parameters by name, in the order of the fields."""
RANGED: Final = tuple((p, p.range) for p in PARAMETERS.values() if p.range is not None)
"""The parameters that are numbers, with their ranges."""
FEATURED: Final = tuple(p for p in PARAMETERS.values() if p.feature is not None)
"""The parameters that not every engine can honour."""


ranged_values = attrgetter(*(p.name for p, _ in RANGED))
"""Reads the values of `RANGED`, in the same order."""
_reshaping = attrgetter(*(p.name for p in PARAMETERS.values() if p.reshapes))
_RESHAPES_NOT: Final = tuple(p.default for p in PARAMETERS.values() if p.reshapes)
_truncating = attrgetter(*(p.name for p in PARAMETERS.values() if p.truncates))
_TRUNCATES_NOT: Final = tuple(p.default for p in PARAMETERS.values() if p.truncates)
_distorting = attrgetter(*(p.name for p in PARAMETERS.values() if p.reshapes and not p.truncates))
_DISTORTS_NOT: Final = tuple(
    p.default for p in PARAMETERS.values() if p.reshapes and not p.truncates
)
OWN_SAMPLING: Final = frozenset(
    p.name for p in PARAMETERS.values() if p.reshapes and p.name != "grammar"
) | {"temperature", "seed"}
"""The parameters in whose place a run may put its own. A grammar is not among them, because the
client reads the answer by it.
"""
_featured = attrgetter(*(p.name for p in FEATURED))
_FEATURELESS: Final = tuple(p.default for p in FEATURED)


def _copied_by(server: Api) -> list[Parameter]:
    return [p for p in PARAMETERS.values() if server in p.names]


def _names_in(server: Api) -> tuple[str, ...]:
    return tuple(p.names[server] for p in _copied_by(server))


def _values_of(server: Api) -> attrgetter[tuple[object, ...]]:
    return attrgetter(*(p.name for p in _copied_by(server)))


_SERVERS = (Api.VLLM, Api.SGLANG)
_names_for = {server: _names_in(server) for server in _SERVERS}
_values_for = {server: _values_of(server) for server in _SERVERS}


def copied(params: SamplingParams, server: Api) -> dict[str, object]:
    """The parameters that are sent to a server as they are, under its names."""
    return dict(zip(_names_for[server], _values_for[server](params), strict=True))


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """The request of one generation. To resume it, send it again with the tokens so far appended to
    `input_ids` and everything else unchanged.
    """

    request_id: str
    input_ids: AnyIds
    num_prompt_tokens: int
    sampling: SamplingParams
    eager: bool = True
    """True if each token is wanted as soon as it is there. Otherwise several may come at a time,
    which costs less.
    """
    wants_kept: bool = False
    """True if each token is wanted with a record of the ids that truncation kept."""
    seeded: bool = False
    """True if the client set its seed. Seeds cost servers time, so they are sent only then."""

    @property
    def with_own_ids(self) -> GenerateRequest:
        """The same request, for an engine that looks at the ids again and again."""
        if not isinstance(self.input_ids, SharedIds):
            return self
        return replace(self, input_ids=tuple(self.input_ids))

    @property
    def num_output_tokens(self) -> int:
        return len(self.input_ids) - self.num_prompt_tokens

    @property
    def remaining(self) -> int:
        """Output tokens that may still be generated."""
        return self.sampling.max_tokens - self.num_output_tokens


class Finish(msgspec.Struct, frozen=True):
    """The end of a generation. `matched` is the stop string or stop id that ended it."""

    reason: FinishReason
    matched: str | int | None = None


class Segment(msgspec.Struct, frozen=True):
    """The output tokens [start, end) of a turn, or of one attempt at it, that were sampled under
    one version.
    """

    version: Version
    kv_version: Version
    start: int
    end: int


KeyRuns: TypeAlias = tuple[tuple[Version, int], ...]
"""The versions that computed the keys of a sequence's tokens, in order, and for how many tokens each
did.
"""


class OlderKeys(msgspec.Struct, frozen=True, array_like=True):
    """The keys that an output token of a turn attended to, if some were of an older version when an
    engine began with it. The tokens after it add keys of their own versions.
    """

    place: int
    """The number of output tokens before it."""
    runs: KeyRuns
    """The keys of the prompt and of those tokens."""


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive output tokens, all sampled under one version. The last chunk of a generation has
    a `finish`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: Version
    kv_version: Version
    """The oldest version whose keys these tokens attended to. It is below `version` only after a
    pause in `keep` mode.
    """
    finish: Finish | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """The likeliest (id, log-probability) pairs at the position of each token, likeliest first.
    Empty unless asked for.
    """
    attested: tuple[Segment, ...] = ()
    """Segments over all tokens of this attempt. An engine that knows its tokens' versions only at
    the end sends them with the last chunk. They replace the versions of the earlier chunks.
    """
    kept: tuple[bytes, ...] = ()
    """The record of `types.sampling_masks` of each token: the ids that truncation kept. Empty unless asked
    for, or if the engine has none.
    """
    experts: bytes = b""
    """The experts that each position of this attempt was sent to, from the first of `input_ids` on.
    An engine that records them sends them with the last chunk. Every position has the same number
    of bytes; all of them are 255 if there is no record, as for the last token.
    """
    key_runs: KeyRuns = ()
    """The keys of all tokens before the first one of this chunk, if that is the first of an attempt
    or the first after keys were computed again, and if keys of an older version are among them.
    Empty if the engine cannot tell.
    """

    def changed(self, **values: object) -> Chunk:
        """A copy with these values changed."""
        return msgspec.structs.replace(self, **values)


class Turn(msgspec.Struct, frozen=True):
    """One complete call of the model in a session. All per-token tuples have the length of
    `output_ids`.
    """

    prompt_ids: AnyIds
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]
    finish: Finish
    policy_sampled: bool = True
    """False if the sampled support differs from the policy's. Then the turn is masked
    (`not_policy_sampled`).
    """
    num_overshoot: int = 0
    """Tokens that were received after a stop string and cut from `output_ids`. They count as
    dropped(overshoot).
    """
    num_resumes: int = 0
    kept: tuple[bytes, ...] = ()
    """The record of each output token, as in `Chunk`, if the turn was sampled with truncation and
    can be trained.
    """
    experts: bytes = b""
    """The experts that each token of prompt and output was sent to, as in `Chunk`. Empty if no
    engine recorded any.
    """
    role: str = ""
    """The role of its session, if the rollout has several."""
    masked_by: tuple[str, ...] = ()
    """The fields of the request for which it is masked, by the client's names. A field of the
    session's own sampling is called `sampling.` and its name.
    """
    older_keys: tuple[OlderKeys, ...] = ()
    """`Chunk.key_runs` of its chunks, as far as its engines told them."""

    @property
    def num_expert_bytes(self) -> int:
        """The number of bytes of each token's record of experts."""
        if not self.experts:
            return 0
        return len(self.experts) // (len(self.prompt_ids) + len(self.output_ids))


class TurnTimes(msgspec.Struct, frozen=True):
    """The times of a turn, in seconds of CLOCK_MONOTONIC."""

    began: float
    """The time of the request."""
    ended: float
    placed: tuple[tuple[str, float], ...]
    """The engines that were asked, and the times. There are several if the turn was resumed after
    an interruption.
    """
    sampled: tuple[tuple[Version, float], ...]
    """The versions of its tokens, and the arrival time of the first token of each. An engine that
    attests versions at the end may correct the versions.
    """
    num_tokens: int
