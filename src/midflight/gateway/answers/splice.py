"""One answer out of several attempts: what was received, what to send next, what to cut. Synchronous (I5)."""

from __future__ import annotations

import math
from dataclasses import replace

from midflight.errors import EngineUnavailable
from midflight.text import StopMatcher, Tokenizer
from midflight.types import Chunk, Finish, FinishReason, GenerateRequest, Segment, Version

_MAX_LOGPROB = 1e-3
"""Rounding may lift the log-probability of a certain token a little above 0."""


class Splice:
    """The stitched answer to one request. Tokens never exceed its budget; a seam leaves no gap and no duplicate (I5)."""

    def __init__(self, request: GenerateRequest, *, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self._request = request
        self._input_ids = list(request.input_ids)
        self._stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else tokenizer.eos_token_ids)
        self._matcher = StopMatcher(tokenizer, sampling.stop, min_tokens=sampling.min_tokens) if sampling.stop else None
        if self._matcher is not None:
            self._matcher.feed(request.input_ids[request.num_prompt_tokens :])
        self._floor: Version | None = None
        """The version of this attempt's last chunk."""
        self.version: Version | None = None
        """The version of the last token, over all attempts."""
        self.kv_version: Version | None = None
        self.interrupted = False
        """Whether the current attempt has ended without finishing the answer."""
        self.ended = False
        """Whether the engine has said that the current attempt is over."""
        self.num_gained = 0
        """Output tokens of the current attempt."""
        self.num_overshoot = 0
        """Tokens received past a stop string or past the budget: cut, dropped(overshoot)."""

    @property
    def num_output(self) -> int:
        """Output tokens of the answer so far, those the request came with included."""
        return len(self._input_ids) - self._request.num_prompt_tokens

    @property
    def remaining(self) -> int:
        return self._request.sampling.max_tokens - self.num_output

    @property
    def load(self) -> int:
        """Tokens that the answer will hold on an engine at most."""
        return len(self._input_ids) + max(0, self.remaining)

    def attempt(self, request_id: str) -> GenerateRequest:
        """What to send now: the prompt and all tokens so far; seed, limits and `num_prompt_tokens` unchanged (DECISIONS 9)."""
        self._floor = None
        self.interrupted = self.ended = False
        self.num_gained = 0
        asked = self._request
        return GenerateRequest(request_id, tuple(self._input_ids), asked.num_prompt_tokens, asked.sampling, eager=asked.eager)

    def accept(self, chunk: Chunk, *, vocab_size: int) -> Chunk:
        """What of an engine's chunk belongs to the answer. Its `finish` is the answer's; an abort only sets `interrupted`.

        Nonsense raises `EngineUnavailable` and changes nothing.
        """
        if (wrong := self._nonsense(chunk, vocab_size)) is not None:
            raise EngineUnavailable(f"reading a chunk of {len(chunk.token_ids)} tokens: {wrong}. Check the engine and its adapter.")
        kept, finish = self._kept(chunk)
        self.ended = chunk.finish is not None
        self._floor = chunk.version
        self.num_overshoot += len(chunk.token_ids) - kept
        self._input_ids.extend(chunk.token_ids[:kept])
        self.num_gained += kept
        attested = _clipped(chunk.attested, self.num_gained)
        if kept:
            self.version, self.kv_version = chunk.version, chunk.kv_version
        if attested:
            self.version, self.kv_version = attested[-1].version, attested[-1].kv_version
        if finish is None and chunk.finish is not None:
            self.interrupted = chunk.finish.reason is FinishReason.ABORT
            finish = self.end_at_seam() if self.interrupted else chunk.finish
        if kept == len(chunk.token_ids) and finish is chunk.finish:
            return chunk
        return Chunk(
            chunk.token_ids[:kept],
            chunk.logprobs[:kept],
            chunk.version,
            chunk.kv_version,
            finish,
            top_logprobs=chunk.top_logprobs[:kept],
            attested=attested,
        )

    def end_at_seam(self) -> Finish | None:
        """How the answer ends if nothing more is sent: at a stop id, or with no budget left (P4). `None`: it goes on."""
        last = self._input_ids[-1] if self.num_output else None
        if last in self._stop_ids and self.num_output > self._request.sampling.min_tokens:
            return Finish(FinishReason.STOP, last)
        if self._matcher is not None and self._matcher.match is not None:
            return Finish(FinishReason.STOP, self._matcher.match.stop)
        return Finish(FinishReason.LENGTH) if self.remaining <= 0 else None

    def _kept(self, chunk: Chunk) -> tuple[int, Finish | None]:
        """How many tokens of a chunk stand, and the finish that cuts it there, if any does."""
        first = self.num_output
        if self._matcher is not None:
            match = self._matcher.feed(chunk.token_ids[: self.remaining])
            if match is not None:
                return match.token_index + 1 - first, Finish(FinishReason.STOP, match.stop)
        if len(chunk.token_ids) > self.remaining:
            return self.remaining, Finish(FinishReason.LENGTH)
        return len(chunk.token_ids), None

    def _nonsense(self, chunk: Chunk, vocab_size: int) -> str | None:
        """Why no engine in its senses sends such a chunk (I6)."""
        if len(chunk.token_ids) != len(chunk.logprobs):
            return f"it has {len(chunk.logprobs)} log-probabilities"
        if strange := [i for i in chunk.token_ids if not 0 <= i < vocab_size]:
            return f"token id {strange[0]} is outside the vocabulary of {vocab_size}"
        if strange := [p for p in chunk.logprobs if not (math.isfinite(p) and p <= _MAX_LOGPROB)]:
            return f"a log-probability is {strange[0]}"
        if self._floor is not None and chunk.version < self._floor:
            return f"its version went back from {self._floor} to {chunk.version}"
        if chunk.kv_version > chunk.version:
            return f"its keys are of version {chunk.kv_version}, its tokens of version {chunk.version}"
        return self._false_account(chunk) if chunk.attested else None

    def _false_account(self, chunk: Chunk) -> str | None:
        """Why its segments can't be an account of this attempt's tokens."""
        if chunk.finish is None:
            return "it attests versions before the end"
        end, version = 0, 0
        for segment in chunk.attested:
            if segment.start != end or segment.end <= end:
                return f"its account goes on from token {end} with tokens {segment.start} to {segment.end}"
            if segment.version < version or segment.kv_version > segment.version:
                return f"its account has version {segment.version} with keys of {segment.kv_version} after version {version}"
            end, version = segment.end, segment.version
        received = self.num_gained + len(chunk.token_ids)
        return None if end == received else f"its account is of {end} tokens and it sent {received}"


def _clipped(segments: tuple[Segment, ...], end: int) -> tuple[Segment, ...]:
    """What they say of the tokens before `end`."""
    return tuple(replace(s, end=min(s.end, end)) for s in segments if s.start < end)
