"""One generation: the list of sampling parameters, what is asked of an engine, what it streams
back, and the turn that comes of it.

The gateway's bodies, checks and defaults, the engines' checks and the dictionaries for other
servers are made from the list. A new parameter is one line in `SamplingParams`, and the place in
the embedded sampler that carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from types import UnionType
from typing import Any, Final, TypeVar, get_type_hints

import msgspec

from midflight.types.names import Feature, FinishReason, GrammarKind, Version

T = TypeVar("T")

MAX_BIASES = 300
"""Tokens of one `logit_bias`, as many as OpenAI's endpoint takes: they travel with the request, and
each changes a row of logits at every step.
"""
LEAST_TEMPERATURE = 1e-4
"""The least that clients may ask for above 0: logits divided by less leave single precision."""
MAX_TOP_LOGPROBS = 20
"""Alternatives of a token, OpenAI's bound."""
MAX_STOPS = 16
"""Stop strings of one request: each token is compared with all of them."""
_MOST = 2**31 - 1
"""Of what is counted: engines keep 32 bits of it."""


class Api(StrEnum):
    """Who writes sampling parameters, each under its own names."""

    OPENAI = "openai"
    """Clients of OpenAI's routes, with the extra fields that vLLM's clients send."""
    ANTHROPIC = "anthropic"
    """Clients of the messages route."""
    NATIVE = "native"
    """Clients of `/generate`, in SGLang's words."""
    VLLM = "vllm"
    """We, to a vLLM server."""
    SGLANG = "sglang"
    """We, to an SGLang server."""


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` to `most`, both included; `above`: without `least` itself."""

    least: float
    most: float | None = None
    above: bool = False

    def holds(self, value: float) -> bool:
        """False for NaN. Infinity only passes a range without `most`, which whole numbers have."""
        return (self.least < value if self.above else self.least <= value) and (
            self.most is None or value <= self.most
        )

    def __str__(self) -> str:
        first = f"above {self.least}" if self.above else f"from {self.least}"
        if self.most is None:
            return first if self.above else f"of at least {self.least}"
        return f"{first} to {self.most}"


_SAME: Final = "="
"""Stands for the parameter's own name."""
_declared: list[dict[str, Any]] = []
"""What `parameter` was told, in the order of the fields."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """What is known of a sampling parameter besides its meaning."""

    name: str
    kind: type | UnionType
    default: object
    range: Range | None
    """Of a number."""
    feature: Feature | None
    """What an engine must be able to do for any value but the default."""
    reshapes: bool
    """Whether any value but the default samples from another distribution than the policy's."""
    truncates: bool
    """Whether it does so by leaving ids out alone."""
    names: Mapping[Api, str]
    """Its name for those who write it as it is. A wire that is missing does not have it, or its own
    code writes it in another form.
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
    copied: bool = True,
    vllm: str = _SAME,
    sglang: str = _SAME,
) -> T:
    """A field of `SamplingParams`. `copied=False`: servers are not sent the value as it is; their
    own code makes something of it.
    """
    clients = {Api.OPENAI: openai, Api.ANTHROPIC: anthropic, Api.NATIVE: native}
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
    """What every answer must match, from its first output token to its last (the end of turn
    excluded).
    """

    kind: GrammarKind
    text: str


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose tokens. Limits count output tokens from `GenerateRequest.num_prompt_tokens`,
    also after a resume.
    """

    max_tokens: int = parameter(
        16, Range(1, _MOST), reshapes=False, openai=None, native="max_new_tokens", copied=False
    )
    min_tokens: int = parameter(0, Range(0, _MOST), native="min_new_tokens", copied=False)
    temperature: float = parameter(1.0, Range(0, 1000), reshapes=False)
    """0 is greedy."""
    top_p: float = parameter(1.0, Range(0, 1, above=True), truncates=True)
    top_k: int | None = parameter(None, Range(1, _MOST), truncates=True, copied=False)
    min_p: float = parameter(0.0, Range(0, 1), truncates=True)
    stop: tuple[str, ...] = parameter((), reshapes=False, anthropic="stop_sequences")
    stop_token_ids: tuple[int, ...] = parameter((), reshapes=False, anthropic=None, copied=False)
    ignore_eos: bool = parameter(False, reshapes=False, anthropic=None, copied=False)
    seed: int = parameter(
        0, Range(0, 2**64 - 1), reshapes=False, native="sampling_seed", copied=False
    )
    """Unsigned 64 bits. The noise of a token is a function of (seed, absolute position, token id)
    and nothing else.
    """

    frequency_penalty: float = parameter(0.0, Range(-2, 2), Feature.PENALTIES, anthropic=None)
    """Subtracted from a token's logit for each of its occurrences in the output so far; larger
    repeats less.
    """
    presence_penalty: float = parameter(0.0, Range(-2, 2), Feature.PENALTIES, anthropic=None)
    """Subtracted once from the logit of each token that the output so far holds."""
    repetition_penalty: float = parameter(1.0, Range(0.01, 100), Feature.PENALTIES, anthropic=None)
    """Logits of tokens in prompt or output are divided by it where positive, multiplied where
    negative; 1 is none. Far outside its range a logit becomes infinite."""
    logit_bias: tuple[tuple[int, float], ...] = parameter(
        (), None, Feature.LOGIT_BIAS, anthropic=None, copied=False
    )
    """(token id, what is added to its logit)."""
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
    """How many of the likeliest tokens to report at each position. The sampled one is among them
    only where it is that likely; fewer are reported where fewer are possible (truncation, a
    grammar). At temperature 0 they are those of temperature 1."""

    def changed(self, **values: object) -> SamplingParams:
        """The same but for these."""
        return msgspec.structs.replace(self, **values)

    @property
    def samples_the_policy(self) -> bool:
        """Whether the distribution sampled is the policy's own, up to its temperature."""
        return self.temperature > 0 and _reshaping(self) == _RESHAPES_NOT

    @property
    def truncates_the_policy(self) -> bool:
        """Whether it is the policy's own over a part of the vocabulary, which top-p, top-k or min-p
        left.
        """
        return (
            self.temperature > 0
            and _truncating(self) != _TRUNCATES_NOT
            and _distorting(self) == _DISTORTS_NOT
        )

    @property
    def features(self) -> frozenset[Feature]:
        """What an engine must be able to do for this."""
        if _featured(self) == _FEATURELESS:
            return frozenset()
        return frozenset(
            p.feature
            for p in FEATURED
            if p.feature is not None and getattr(self, p.name) != p.default
        )


def _parameters() -> Mapping[str, Parameter]:
    kinds = get_type_hints(SamplingParams)

    def named(name: str, names: Mapping[Api, str | None]) -> dict[Api, str]:
        return {
            wire: name if own == _SAME else own for wire, own in names.items() if own is not None
        }

    defaults = zip(
        SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, _declared, strict=True
    )
    return {
        name: Parameter(
            *(
                name,
                kinds[name],
                default,
                about["range"],
                about["feature"],
                about["reshapes"],
                about["truncates"],
            ),
            named(name, about["names"]),
        )
        for name, default, about in defaults
    }


PARAMETERS: Final = _parameters()
"""The list, by name and in the order of the fields."""
RANGED: Final = tuple((p, p.range) for p in PARAMETERS.values() if p.range is not None)
"""Those that are numbers."""
FEATURED: Final = tuple(p for p in PARAMETERS.values() if p.feature is not None)
"""Those that not every engine can do."""


ranged_values = attrgetter(*(p.name for p, _ in RANGED))
"""Their values, in the same order."""
_reshaping = attrgetter(*(p.name for p in PARAMETERS.values() if p.reshapes))
_RESHAPES_NOT: Final = tuple(p.default for p in PARAMETERS.values() if p.reshapes)
_truncating = attrgetter(*(p.name for p in PARAMETERS.values() if p.truncates))
_TRUNCATES_NOT: Final = tuple(p.default for p in PARAMETERS.values() if p.truncates)
_distorting = attrgetter(*(p.name for p in PARAMETERS.values() if p.reshapes and not p.truncates))
_DISTORTS_NOT: Final = tuple(
    p.default for p in PARAMETERS.values() if p.reshapes and not p.truncates
)
_featured = attrgetter(*(p.name for p in FEATURED))
_FEATURELESS: Final = tuple(p.default for p in FEATURED)


_COPIED: Final = {
    wire: [p for p in PARAMETERS.values() if wire in p.names] for wire in (Api.VLLM, Api.SGLANG)
}
_names_for = {wire: tuple(p.names[wire] for p in copied) for wire, copied in _COPIED.items()}
_values_for = {wire: attrgetter(*(p.name for p in copied)) for wire, copied in _COPIED.items()}


def copied(params: SamplingParams, server: Api) -> dict[str, object]:
    """What a server is sent as it is, by its names."""
    return dict(zip(_names_for[server], _values_for[server](params), strict=True))


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. To resume it, send it again with the tokens so far appended to `input_ids`;
    all else is unchanged.
    """

    request_id: str
    input_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    eager: bool = True
    """Whether each token is wanted as it comes; otherwise they may come several at a time, which
    costs less.
    """
    wants_kept: bool = False
    """Whether each token is wanted with what truncation kept of the vocabulary."""
    seeded: bool = False
    """Whether the client asked for its seed: to servers seeds are an effort, made only then."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.input_ids) - self.num_prompt_tokens

    @property
    def remaining(self) -> int:
        """Output tokens that may still be generated."""
        return self.sampling.max_tokens - self.num_output_tokens


class Finish(msgspec.Struct, frozen=True):
    """How a generation ended; `matched` is the stop string or stop id that ended it."""

    reason: FinishReason
    matched: str | int | None = None


class Segment(msgspec.Struct, frozen=True):
    """Output tokens [start, end) of a turn, or of one attempt at it, sampled under one version."""

    version: Version
    kv_version: Version
    start: int
    end: int


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive output tokens, all sampled under one version. The last chunk of a generation
    carries `finish`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: Version
    kv_version: Version
    """The oldest version whose keys these tokens attended to; below `version` only after a pause in
    `keep` mode.
    """
    finish: Finish | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token the likeliest (id, log-probability) at its position, likeliest first; empty
    unless asked for.
    """
    attested: tuple[Segment, ...] = ()
    """On the last chunk of an engine that says its tokens' versions only at the end: segments over
    all tokens of this attempt, which take the place of the labels given before."""
    kept: tuple[bytes, ...] = ()
    """For each token what truncation kept of the vocabulary, a record of `types.kept`; empty unless
    asked for, or where an engine has none.
    """
    experts: bytes = b""
    """On the last chunk of an engine that records them: the experts that each position of this
    attempt was sent to, from the first of `input_ids` on, in as many bytes each; 255 in all of them
    where there is no record, as for the last token."""

    def changed(self, **values: object) -> Chunk:
        """The same but for these."""
        return msgspec.structs.replace(self, **values)


class Turn(msgspec.Struct, frozen=True):
    """One call of the model inside a session, complete. All per-token tuples have the length of
    `output_ids`.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]
    finish: Finish
    policy_sampled: bool = True
    """False where the sampled support differs from the policy's: the turn is masked
    (`not_policy_sampled`).
    """
    num_overshoot: int = 0
    """Tokens received after a stop string and cut from `output_ids`: dropped(overshoot)."""
    num_resumes: int = 0
    kept: tuple[bytes, ...] = ()
    """Of a turn that was sampled with truncation and can be trained: what was kept for each output
    token, as in `Chunk`.
    """
    experts: bytes = b""
    """Of each token of prompt and output the experts it was sent to, as in `Chunk`; empty where no
    engine recorded any.
    """
    role: str = ""
    """Of its rollout's sessions the one that it is of, where that has several."""

    @property
    def num_expert_bytes(self) -> int:
        """Of each token's record."""
        return (
            len(self.experts) // (len(self.prompt_ids) + len(self.output_ids))
            if self.experts
            else 0
        )


class TurnTimes(msgspec.Struct, frozen=True):
    """When a turn was made, in seconds of CLOCK_MONOTONIC."""

    began: float
    """It was asked for."""
    ended: float
    placed: tuple[tuple[str, float], ...]
    """Engines that were asked, and when: more than one where it went on after an interruption."""
    sampled: tuple[tuple[Version, float], ...]
    """Versions that its tokens came from, and when the first of each arrived. An engine that
    attests versions at the end may correct them.
    """
    num_tokens: int
