"""One answer: all that is known of one choice, from its first chunk to the recorded turn.
Synchronous.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from midflight.errors import EngineUnavailable
from midflight.gateway.sessions.history import Prompt
from midflight.text import StopMatcher, Tokenizer
from midflight.text.formats import AssistantMessage, MessageParser, Piece
from midflight.text.formats.assistant import joined
from midflight.types import (
    Chunk,
    Finish,
    FinishReason,
    GenerateRequest,
    Likely,
    Segment,
    Turn,
    UInt8,
    Version,
    fill_unknown,
)

_MAX_LOGPROB = 1e-3
"""Rounding may lift the log-probability of a certain token a little above 0."""

Mark: TypeAlias = tuple[int, int, int]
"""How much of an answer a reader has been told: tokens, texts, pieces."""

START: Mark = (0, 0, 0)


class News(msgspec.Struct, frozen=True):
    """New tokens of an answer, and the text that became certain with them (it may lag behind the
    tokens).
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    pieces: tuple[Piece, ...] = ()
    """Of a chat: the text, parsed."""
    top_logprobs: tuple[Likely, ...] = ()
    """One for each token where they were asked for, else empty."""


class ChatReading(msgspec.Struct, frozen=True, eq=False):
    """How the answer to a chat is taken apart."""

    parser: MessageParser
    keep: frozenset[int]
    """Special tokens that the parser needs to see."""
    one_call: bool
    """Whether the answer ends with its first tool call."""


class Answer:
    """Grows by `accept`, over one attempt or several, until `finish` is set; `close` makes the turn
    of it.

    Tokens never exceed the request's budget, and a seam between two attempts leaves no gap and no
    duplicate (I5). Every token has a log-probability and the version that its engine attests, with
    it or at the end of the attempt (I6). Text and stop strings come from one detokenisation. Told
    in pieces or told whole, the agent gets the same message.
    """

    finish: Finish | None = None
    num_overshoot = 0
    """Tokens received past a stop string or past the budget: cut, dropped(overshoot)."""
    num_attempts = 0
    num_gained = 0
    """Output tokens of the current attempt."""
    prompt_logprobs: Sequence[Likely] = ()
    """Where they were asked for, as `ports.PromptScorer` gives them."""
    ended = False
    """Whether the engine has said that the current attempt is over."""
    is_closed = False
    text = ""
    """What the agent sees, without the stop string. This and the next three are set by `close`."""
    message = AssistantMessage("")
    """Of a chat: `text`, parsed."""
    tail = ""
    """The text that no news has carried."""
    tail_pieces: tuple[Piece, ...] = ()
    _has_called = False
    """Whether a call has been read, where the agent wants one."""
    _floor: Version | None = None
    """The version of this attempt's last chunk."""
    _turn: Turn | None = None

    def __init__(
        self,
        request: GenerateRequest,
        prompt: Prompt,
        tokenizer: Tokenizer,
        *,
        index: int = 0,
        number: int = 0,
        policy_sampled: bool = True,
        chat: ChatReading | None = None,
    ) -> None:
        """`number`: of its request in the session, which the choices of n > 1 share. The text is
        told as it comes if the request is `eager`."""
        self.index = index
        self.number = number
        self.prompt = prompt
        self.request = request
        self.request_id = request.request_id
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[Likely] = []
        self.kept: list[bytes] = []
        self.clock: Callable[[], float] = time.monotonic
        self.placed: list[tuple[str, float]] = []
        """As in `TurnTimes`, and so is the next."""
        self.sampled: list[tuple[Version, float]] = []
        self._policy_sampled = policy_sampled
        self._tokenizer = tokenizer
        self._chat = chat
        self._keep = frozenset[int]() if chat is None else chat.keep
        self._labels: list[list[int]] = []
        """Version, version of the oldest key, and end of each run of tokens."""
        self._experts: UInt8 | None = None
        """[T, B], of prompt and output; None where no engine recorded any."""
        self._texts: list[str] = []
        self._pieces: list[Piece] = []
        sampling = request.sampling
        needs_text = request.eager or bool(sampling.stop)
        self._matcher = (
            StopMatcher(tokenizer, sampling.stop, min_tokens=sampling.min_tokens, keep=self._keep)
            if needs_text
            else None
        )

    # --- For the engine's side --------------------------------------------------------------------

    @property
    def load(self) -> int:
        """Tokens that the answer will hold on an engine at most."""
        return len(self.request.input_ids) + max(
            len(self.output_ids), self.request.sampling.max_tokens
        )

    @property
    def room(self) -> int:
        """Tokens left of its own limit."""
        return self.request.sampling.max_tokens - len(self.output_ids)

    @property
    def num_resumes(self) -> int:
        return max(0, self.num_attempts - 1)

    def next_request(self, request_id: str) -> GenerateRequest:
        """What a new attempt sends: the prompt and all tokens so far; seed, limits and
        `num_prompt_tokens` do not change.
        """
        self._floor = None
        self.ended = False
        self.num_gained = 0
        self.num_attempts += 1
        asked = self.request
        ids = (*asked.input_ids, *self.output_ids) if self.output_ids else asked.input_ids
        return GenerateRequest(
            request_id,
            ids,
            asked.num_prompt_tokens,
            asked.sampling,
            asked.eager,
            asked.wants_kept,
            asked.seeded,
        )

    def accept(self, chunk: Chunk, *, vocab_size: int) -> None:
        """Adds what of an engine's chunk belongs to the answer. An abort ends the attempt and not
        the answer.

        Nonsense raises `EngineUnavailable` and changes nothing.
        """
        wrong = nonsense(
            chunk, vocab_size=vocab_size, floor=self._floor, num_before=self.num_gained
        )
        if wrong is None and chunk.experts:
            num_tokens = len(self.prompt.ids) + len(self.output_ids) + len(chunk.token_ids)
            if len(chunk.experts) % num_tokens:
                wrong = (
                    f"its record of experts has {len(chunk.experts)} bytes for {num_tokens} tokens"
                )
        if wrong is not None:
            raise EngineUnavailable(
                f"reading a chunk of {len(chunk.token_ids)} tokens: {wrong}. Check the engine and "
                "its adapter."
            )
        self.ended = chunk.finish is not None
        self._floor = chunk.version
        num_kept, finish = self._cut(chunk.token_ids)
        if num_kept < len(chunk.token_ids):
            self.num_overshoot += len(chunk.token_ids) - num_kept
            self._add(
                chunk.token_ids[:num_kept],
                chunk.logprobs[:num_kept],
                chunk.top_logprobs[:num_kept],
                chunk.kept[:num_kept],
            )
        elif num_kept:
            self._add(chunk.token_ids, chunk.logprobs, chunk.top_logprobs, chunk.kept)
        self.num_gained += num_kept
        last = self._labels[-1] if self._labels else None
        if last is not None and last[0] == chunk.version and last[1] == chunk.kv_version:
            last[2] = len(self.output_ids)
        else:
            self._label(chunk.version, chunk.kv_version, end=len(self.output_ids))
            self.sampled.append((chunk.version, self.clock()))
        if chunk.attested and self.num_gained:
            self._relabel(chunk.attested)
        if chunk.experts:
            self._note_experts(chunk.experts, num_overshoot=len(chunk.token_ids) - num_kept)
        if (
            finish is None
            and chunk.finish is not None
            and chunk.finish.reason is not FinishReason.ABORT
        ):
            finish = chunk.finish
        self.finish = finish

    def end_at_seam(self) -> None:
        """Finishes the answer between two attempts if no token may follow: after a stop id, or
        without budget.
        """
        sampling = self.request.sampling
        num_output = len(self.output_ids)
        last = self.output_ids[-1] if num_output > sampling.min_tokens else None
        if last is not None and (
            last in sampling.stop_token_ids
            or (not sampling.ignore_eos and last in self._tokenizer.eos_token_ids)
        ):
            self.finish = Finish(FinishReason.STOP, last)
        elif num_output >= sampling.max_tokens:
            self.finish = Finish(FinishReason.LENGTH)

    def replay(self, turn: Turn) -> None:
        """Takes over a turn that was recorded before: the same tokens, log-probabilities and
        versions, without an engine.
        """
        if self._matcher is not None:
            self._matcher.feed(turn.output_ids)
        self._add(turn.output_ids, turn.logprobs, (), turn.kept)
        for segment in turn.segments:
            self._label(segment.version, segment.kv_version, end=segment.end)
        self.num_overshoot = turn.num_overshoot
        self.num_attempts = turn.num_resumes + 1
        self.finish = turn.finish

    # --- For the agent's side ---------------------------------------------------------------------

    @property
    def mark(self) -> Mark:
        return len(self.output_ids), len(self._texts), len(self._pieces)

    def since(self, mark: Mark) -> News:
        """All that came after `mark`, but for the tail."""
        tokens, texts, pieces = mark
        return News(
            self.index,
            "".join(self._texts[texts:]),
            tuple(self.output_ids[tokens:]),
            tuple(self.logprobs[tokens:]),
            tuple(self._pieces[pieces:]),
            tuple(self.top_logprobs[tokens:]),
        )

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All of the message, after `close`."""
        return (*self._pieces, *self.tail_pieces)

    def close(self) -> Turn:
        """The turn, after `finish` was set."""
        assert self.finish is not None, "I5: a generation ends with a finish"
        if self._matcher is not None:
            self.tail = self._matcher.take() + self._matcher.finish()
        else:
            self.tail = self._tokenizer.decode(self.output_ids, skip_special=True, keep=self._keep)
        self.text = "".join((*self._texts, self.tail)) if self._texts else self.tail
        if self._chat is None:
            self.message = AssistantMessage(self.text)
        else:
            self.tail_pieces = (
                self._chat.parser.feed(self.tail) if self.tail else ()
            ) + self._chat.parser.finish()
            self.message = joined(self.pieces)
        # A record that an engine left out can't be made up: then the turn is context, as if it had
        # never been asked for.
        has_kept = len(self.kept) == len(self.output_ids)
        self._turn = Turn(
            prompt_ids=self.prompt.ids,
            output_ids=tuple(self.output_ids),
            logprobs=tuple(self.logprobs),
            segments=self.segments,
            finish=self.finish,
            policy_sampled=self._policy_sampled and (has_kept or not self.request.wants_kept),
            num_overshoot=self.num_overshoot,
            num_resumes=self.num_resumes,
            kept=tuple(self.kept) if has_kept else (),
            experts=b"" if self._experts is None else self._experts.tobytes(),
        )
        self.is_closed = True
        return self._turn

    @property
    def turn(self) -> Turn:
        assert self._turn is not None, "only a closed answer has a turn"
        return self._turn

    @property
    def segments(self) -> tuple[Segment, ...]:
        found: list[Segment] = []
        start = 0
        for version, kv_version, end in self._labels:
            found.append(Segment(version, kv_version, start, end))
            start = end
        return tuple(found)

    @property
    def versions(self) -> set[Version]:
        """Of its tokens so far. They may change where an engine says at the end what it was unsure
        of before.
        """
        return {version for version, _, _ in self._labels}

    # --- Inside -----------------------------------------------------------------------------------

    def _cut(self, token_ids: tuple[int, ...]) -> tuple[int, Finish | None]:
        """How many new tokens stand, and the finish that cuts them there, if any does. The matcher
        has read them then.
        """
        room = self.request.sampling.max_tokens - len(self.output_ids)
        if self._matcher is not None and self._chat is not None and self._chat.one_call:
            cut = self._cut_after_call(self._matcher, token_ids[:room])
            if cut is not None:
                return cut
        elif self._matcher is not None:
            match = self._matcher.feed(token_ids if len(token_ids) <= room else token_ids[:room])
            if match is not None:
                return match.token_index + 1 - len(self.output_ids), Finish(
                    FinishReason.STOP, match.stop
                )
        return (
            (len(token_ids), None)
            if len(token_ids) <= room
            else (room, Finish(FinishReason.LENGTH))
        )

    def _cut_after_call(
        self, matcher: StopMatcher, token_ids: tuple[int, ...]
    ) -> tuple[int, Finish] | None:
        """The same where the agent wants one call: the answer ends with it, and with the end of
        turn if that comes next. So what the agent sends back is all that was said."""
        ends = self._tokenizer.eos_token_ids.union(self.request.sampling.stop_token_ids)
        for place, token_id in enumerate(token_ids):
            if self._has_called and token_id not in ends:
                return place, Finish(FinishReason.STOP)
            if (match := matcher.feed((token_id,))) is not None:
                return match.token_index + 1 - len(self.output_ids), Finish(
                    FinishReason.STOP, match.stop
                )
            self._tell(matcher)
        return None

    def _tell(self, matcher: StopMatcher) -> None:
        """Text that has become certain is news."""
        if text := matcher.take():
            self._texts.append(text)
            if self._chat is not None:
                self._pieces += self._chat.parser.feed(text)
                self._has_called = self._chat.one_call and self._chat.parser.num_calls > 0

    def _add(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[float, ...],
        top_logprobs: tuple[Likely, ...],
        kept: tuple[bytes, ...],
    ) -> None:
        self.output_ids += token_ids
        self.logprobs += logprobs
        self.top_logprobs += top_logprobs
        self.kept += kept
        if self.request.eager and self._matcher is not None:
            self._tell(self._matcher)

    def _label(self, version: Version, kv_version: Version, *, end: int) -> None:
        """Tokens before `end` that have no label get this one."""
        if self._labels:
            last = self._labels[-1]
            if last[2] == end:
                return
            if last[0] == version and last[1] == kv_version:
                self._labels.pop()
        if end:
            self._labels.append([version, kv_version, end])

    def _note_experts(self, record: bytes, *, num_overshoot: int) -> None:
        """An attempt's record of all its tokens. It counts for those that no earlier attempt has
        computed.
        """
        num_tokens = len(self.prompt.ids) + len(self.output_ids)
        found = (
            np.frombuffer(record, np.uint8)
            .reshape(num_tokens + num_overshoot, -1)[:num_tokens]
            .copy()
        )
        known = self._experts
        self._experts = found
        if known is not None and known.shape[1] == found.shape[1]:
            later = found[: len(known)].copy()
            earlier = found[: len(known)]
            earlier[:] = known
            fill_unknown(earlier, later)

    def _relabel(self, attested: Sequence[Segment]) -> None:
        """The tokens of the current attempt get the labels that its engine gave at the end."""
        start = len(self.output_ids) - self.num_gained
        before = self._labels
        self._labels = []
        for version, kv_version, end in before:
            if not self._labels or self._labels[-1][2] < start:
                self._label(version, kv_version, end=min(end, start))
        for segment in attested:
            if segment.start < self.num_gained:
                self._label(
                    segment.version,
                    segment.kv_version,
                    end=start + min(segment.end, self.num_gained),
                )


Event: TypeAlias = News | Answer
"""What a reader is told: news of an answer, or the closed answer."""


def nonsense(
    chunk: Chunk, *, vocab_size: int, floor: Version | None, num_before: int
) -> str | None:
    """Why no engine in its senses sends such a chunk (I6); `None` if it makes sense.

    `floor`: the version of the chunk before it in its attempt. `num_before`: the attempt's output
    tokens before it.
    """
    ids = chunk.token_ids
    logprobs = chunk.logprobs
    if (
        len(ids) == len(logprobs) == 1
        and 0 <= ids[0] < vocab_size
        and -math.inf < logprobs[0] <= _MAX_LOGPROB
        and not chunk.kept
    ):
        pass  # as most are
    elif len(ids) != len(logprobs):
        return f"it has {len(logprobs)} log-probabilities"
    elif chunk.kept and len(chunk.kept) != len(ids):
        return f"it says of {len(chunk.kept)} tokens what truncation kept"
    elif ids and (min(ids) < 0 or max(ids) >= vocab_size):
        strange = next(i for i in ids if not 0 <= i < vocab_size)
        return f"token id {strange} is outside the vocabulary of {vocab_size}"
    elif not all(map(math.isfinite, logprobs)) or (logprobs and max(logprobs) > _MAX_LOGPROB):
        return (
            "a log-probability is "
            f"{next(p for p in logprobs if not (math.isfinite(p) and p <= _MAX_LOGPROB))}"
        )
    if floor is not None and chunk.version < floor:
        return f"its version went back from {floor} to {chunk.version}"
    if chunk.kv_version > chunk.version:
        return f"its keys are of version {chunk.kv_version}, its tokens of version {chunk.version}"
    return _false_account(chunk, num_tokens=num_before + len(ids)) if chunk.attested else None


def _false_account(chunk: Chunk, *, num_tokens: int) -> str | None:
    """Why its segments cannot be an account of its attempt's `num_tokens` tokens."""
    if chunk.finish is None:
        return "it attests versions before the end"
    end = 0
    version = 0
    for segment in chunk.attested:
        if segment.start != end or segment.end <= end:
            return (
                f"its account goes on from token {end} with tokens {segment.start} to {segment.end}"
            )
        if segment.version < version or segment.kv_version > segment.version:
            return (
                f"its account has version {segment.version} with keys of {segment.kv_version} "
                f"after version {version}"
            )
        end = segment.end
        version = segment.version
    return None if end == num_tokens else f"its account is of {end} tokens and it sent {num_tokens}"
