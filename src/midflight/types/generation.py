"""One generation: what is asked of an engine, what it streams back, and the turn that comes of it."""

from __future__ import annotations

from dataclasses import dataclass

from midflight.types.names import FinishReason, Version
from midflight.types.sampling import SamplingParams


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
