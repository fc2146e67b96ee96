"""One generation: what is asked of an engine, what it streams back, and the turn that comes of it."""

from __future__ import annotations

from dataclasses import dataclass

from midflight.types.names import FinishReason, GrammarKind, Version


@dataclass(frozen=True, slots=True)
class Grammar:
    """What every answer must match, from its first output token to its last (the end of turn excluded)."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Limits count output tokens from `GenerateRequest.num_prompt_tokens`, also after a resume."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    """Unsigned 64 bits. The noise of a token is a function of (seed, absolute position, token id) and nothing else."""

    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each of its occurrences in the output so far; larger repeats less."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that the output so far holds."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by it where positive, multiplied where negative; 1 is none."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    grammar: Grammar | None = None
    top_logprobs: int = 0
    """How many of the likeliest tokens to report at each position. The sampled one is among them only where it is that likely; fewer are
    reported where fewer are possible (truncation, a grammar; one at temperature 0)."""

    @property
    def samples_the_policy(self) -> bool:
        """Whether the distribution sampled is the policy's own, up to its temperature (DECISIONS 11)."""
        return not (self._is_truncated or self.is_penalised or self.logit_bias or self.grammar)

    @property
    def _is_truncated(self) -> bool:
        return self.temperature <= 0 or self.top_p < 1 or self.top_k is not None or self.min_p > 0 or self.min_tokens > 0

    @property
    def is_penalised(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty) or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. To resume it, send it again with the tokens so far appended to `input_ids`; all else is unchanged."""

    request_id: str
    input_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    eager: bool = True
    """Whether each token is wanted as it comes; otherwise they may come several at a time, which costs less."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.input_ids) - self.num_prompt_tokens

    @property
    def remaining(self) -> int:
        """Output tokens that may still be generated."""
        return self.sampling.max_tokens - self.num_output_tokens


@dataclass(frozen=True, slots=True)
class Finish:
    """How a generation ended; `matched` is the stop string or stop id that ended it."""

    reason: FinishReason
    matched: str | int | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Output tokens [start, end) of a turn, or of one attempt at it, sampled under one version."""

    version: Version
    kv_version: Version
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive output tokens, all sampled under one version. The last chunk of a generation carries `finish`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: Version
    kv_version: Version
    """The oldest version whose keys these tokens attended to; below `version` only after a pause in `keep` mode."""
    finish: Finish | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token the likeliest (id, log-probability) at its position, likeliest first; empty unless asked for."""
    attested: tuple[Segment, ...] = ()
    """On the last chunk of an engine that says its tokens' versions only at the end: segments over all tokens of this attempt, which
    take the place of the labels given before."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the model inside a session, complete. All per-token tuples have the length of `output_ids`."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]
    finish: Finish
    policy_sampled: bool = True
    """False where the sampled support differs from the policy's: the turn is masked (`not_policy_sampled`)."""
    num_overshoot: int = 0
    """Tokens received after a stop string and cut from `output_ids`: dropped(overshoot)."""
    num_resumes: int = 0
