"""One answer: the state of one choice, from its first chunk to the recorded turn. Synchronous."""

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from midflight.errors import EngineUnavailable
from midflight.gateway.sessions.history import Prompt
from midflight.text import StopMatch, StopMatcher, Tokenizer
from midflight.text.formats import AssistantMessage, MessageParser, Piece
from midflight.text.formats.assistant import joined
from midflight.types import (
    Chunk,
    Finish,
    FinishReason,
    GenerateRequest,
    Likely,
    OlderKeys,
    Segment,
    Turn,
    UInt8,
    Version,
    fill_unknown,
)

_MAX_LOGPROB = 1e-3
"""The largest accepted log-probability. Rounding may lift that of a certain token a little above
0.
"""

Mark: TypeAlias = tuple[int, int, int]
"""The part of an answer that a reader has received: the numbers of tokens, texts and pieces."""

START: Mark = (0, 0, 0)


class News(msgspec.Struct, frozen=True):
    """New tokens of an answer, and the text that became certain with them. The text may lag behind
    the tokens.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    pieces: tuple[Piece, ...] = ()
    """The parsed text, for a chat."""
    top_logprobs: tuple[Likely, ...] = ()
    """One entry for each token if the client asked for them, else empty."""


class ChatReading(msgspec.Struct, frozen=True, eq=False):
    """The parameters by which the answer to a chat is parsed."""

    parser: MessageParser
    keep: frozenset[int]
    """Special tokens that the parser needs to see."""
    one_call: bool
    """True if the answer ends with its first tool call."""


class Answer:
    """One choice of a request. It grows by `accept`, over one attempt or several, until `finish` is
    set. Then `close` makes the turn.

    Tokens never exceed the request's budget, and a seam between two attempts leaves no gap and no
    duplicate (I5). Every token has a log-probability and a version. Its engine attests the version
    with the token or at the end of the attempt (I6). Text and stop strings come from one
    detokenisation. The agent gets the same message whether it is streamed or sent whole.
    """

    finish: Finish | None = None
    num_overshoot = 0
    """Tokens received past a stop string or past the budget. They are cut, and count as
    dropped(overshoot).
    """
    num_attempts = 0
    num_gained = 0
    """Output tokens of the current attempt."""
    prompt_logprobs: Sequence[Likely] = ()
    """The prompt's scores as `ports.PromptScorer` gives them. Empty unless the client asked for
    them.
    """
    ended = False
    """True if the engine has said that the current attempt is over."""
    is_closed = False
    text = ""
    """The text that the agent sees, without the stop string. `close` sets this and the next
    three.
    """
    message = AssistantMessage("")
    """`text`, parsed, for a chat."""
    tail = ""
    """The text that no `News` has carried."""
    tail_pieces: tuple[Piece, ...] = ()
    _has_called = False
    """True if a call has been read. It is only set if the agent wants one call."""
    _floor: Version | None = None
    """The version of this attempt's last chunk."""
    _turn: Turn | None = None
    _older_keys: tuple[OlderKeys, ...] = ()

    def __init__(
        self,
        request: GenerateRequest,
        prompt: Prompt,
        tokenizer: Tokenizer,
        *,
        index: int = 0,
        number: int = 0,
        policy_sampled: bool = True,
        masked_by: tuple[str, ...] = (),
        chat: ChatReading | None = None,
    ) -> None:
        """`number` is the number of its request in the session, which the choices of n > 1 share.
        `masked_by` has the fields for which it is not `policy_sampled`. If the request is `eager`, text becomes news as soon as it is certain.
        """
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
        """The engines that were asked and the times, as `TurnTimes` has them. `sampled` is as there
        too.
        """
        self.sampled: list[tuple[Version, float]] = []
        self._policy_sampled = policy_sampled
        self._masked_by = masked_by
        self._tokenizer = tokenizer
        self._chat = chat
        self._keep = frozenset[int]() if chat is None else chat.keep
        self._labels: list[list[int]] = []
        """The version, the version of the oldest key, and the end of each run of tokens."""
        self._experts: UInt8 | None = None
        """[T, B], for prompt and output. It is None if no engine recorded any."""
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
        """The most tokens that the answer will hold on an engine."""
        num_output = max(len(self.output_ids), self.request.sampling.max_tokens)
        return len(self.request.input_ids) + num_output

    @property
    def room(self) -> int:
        """Tokens that its own limit still allows."""
        return self.request.sampling.max_tokens - len(self.output_ids)

    @property
    def num_resumes(self) -> int:
        return max(0, self.num_attempts - 1)

    def next_request(self, request_id: str) -> GenerateRequest:
        """The request of a new attempt. It sends the prompt and all tokens so far. Seed, limits and
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
        """Adds the part of an engine's chunk that belongs to the answer. An abort ends the attempt
        but not the answer.

        A chunk that makes no sense raises `EngineUnavailable` and changes nothing.
        """
        wrong = nonsense(
            chunk, vocab_size=vocab_size, floor=self._floor, num_before=self.num_gained
        )
        if wrong is None and chunk.experts:
            wrong = self._wrong_experts(chunk)
        if wrong is None and chunk.key_runs:
            wrong = self._wrong_keys(chunk)
        if wrong is not None:
            raise EngineUnavailable(
                f"reading a chunk of {len(chunk.token_ids)} tokens: {wrong}. Check the engine and "
                "its adapter."
            )
        self.ended = chunk.finish is not None
        self._floor = chunk.version
        if chunk.key_runs:
            self._older_keys += (OlderKeys(len(self.output_ids), chunk.key_runs),)
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
        """Finishes the answer between two attempts if no token may follow: after a stop id, or when
        the budget is spent.
        """
        sampling = self.request.sampling
        num_output = len(self.output_ids)
        last = self.output_ids[-1] if num_output > sampling.min_tokens else None
        if last is not None and self._ends(last):
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
        self._older_keys += turn.older_keys
        self.num_overshoot = turn.num_overshoot
        self.num_attempts = turn.num_resumes + 1
        self.finish = turn.finish

    # --- For the agent's side ---------------------------------------------------------------------

    @property
    def mark(self) -> Mark:
        return len(self.output_ids), len(self._texts), len(self._pieces)

    def since(self, mark: Mark) -> News:
        """Everything that came after `mark`, except the tail."""
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
        """All pieces of the message, after `close`."""
        return (*self._pieces, *self.tail_pieces)

    def close(self) -> Turn:
        """The turn, after `finish` was set."""
        assert self.finish is not None, "I5: a generation ends with a finish"
        if self._matcher is not None:
            self.tail = self._matcher.take() + self._matcher.finish()
        else:
            self.tail = self._tokenizer.decode(self.output_ids, skip_special=True, keep=self._keep)
        self.text = "".join(self._texts) + self.tail
        if self._chat is None:
            self.message = AssistantMessage(self.text)
        else:
            tail_pieces = self._chat.parser.feed(self.tail) if self.tail else ()
            self.tail_pieces = tail_pieces + self._chat.parser.finish()
            self.message = joined(self.pieces)
        # A record of truncation that an engine left out cannot be made up. Without it the turn is
        # not the policy's and becomes context.
        has_kept = len(self.kept) == len(self.output_ids)
        masked_by = self._masked_by
        if self.request.wants_kept and not has_kept:
            masked_by = self.request.sampling.truncated_by
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
            masked_by=masked_by,
            older_keys=tuple(
                [keys for keys in self._older_keys if keys.place < len(self.output_ids)]
            ),
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
        """The versions of its tokens so far. They may change, because an engine may correct them at
        the end of an attempt.
        """
        return {version for version, _, _ in self._labels}

    # --- Inside -----------------------------------------------------------------------------------

    def _wrong_experts(self, chunk: Chunk) -> str | None:
        """Returns why the chunk's record of experts makes no sense, or `None` if it makes sense."""
        num_tokens = len(self.prompt.ids) + len(self.output_ids) + len(chunk.token_ids)
        if len(chunk.experts) % num_tokens == 0:
            return None
        return f"its record of experts has {len(chunk.experts)} bytes for {num_tokens} tokens"

    def _wrong_keys(self, chunk: Chunk) -> str | None:
        """Returns why the chunk's runs of keys make no sense, or `None` if they make sense."""
        versions = [version for version, _ in chunk.key_runs]
        numbers = [number for _, number in chunk.key_runs]
        num_keys = len(self.prompt.ids) + len(self.output_ids)
        if not chunk.token_ids or min(numbers) < 1 or sum(numbers) != num_keys:
            return f"its runs of keys have lengths {numbers} for {num_keys} tokens before it"
        if min(versions) != chunk.kv_version:
            return f"its keys are of version {chunk.kv_version}, its runs of keys of {versions}"
        return None

    def _ends(self, token_id: int) -> bool:
        """True if no token may follow this one."""
        sampling = self.request.sampling
        if token_id in sampling.stop_token_ids:
            return True
        return not sampling.ignore_eos and token_id in self._tokenizer.eos_token_ids

    def _cut(self, token_ids: tuple[int, ...]) -> tuple[int, Finish | None]:
        """Returns how many of the new tokens stay, and the finish if they are cut there. The
        matcher has read them afterwards.
        """
        room = self.request.sampling.max_tokens - len(self.output_ids)
        if self._matcher is not None and self._chat is not None and self._chat.one_call:
            cut = self._cut_after_call(self._matcher, token_ids[:room])
            if cut is not None:
                return cut
        elif self._matcher is not None:
            match = self._matcher.feed(token_ids if len(token_ids) <= room else token_ids[:room])
            if match is not None:
                return self._stopped(match)
        if len(token_ids) <= room:
            return len(token_ids), None
        return room, Finish(FinishReason.LENGTH)

    def _stopped(self, match: StopMatch) -> tuple[int, Finish]:
        """Returns how many of the new tokens stay up to a stop string, and the finish."""
        return match.token_index + 1 - len(self.output_ids), Finish(FinishReason.STOP, match.stop)

    def _cut_after_call(
        self, matcher: StopMatcher, token_ids: tuple[int, ...]
    ) -> tuple[int, Finish] | None:
        """Does the work of `_cut` for an agent that wants one call. The answer ends with the call,
        or with an end of turn right after it. So the message that the agent sends back is the whole
        answer.
        """
        ends = self._tokenizer.eos_token_ids.union(self.request.sampling.stop_token_ids)
        for place, token_id in enumerate(token_ids):
            if self._has_called and token_id not in ends:
                return place, Finish(FinishReason.STOP)
            match = matcher.feed((token_id,))
            if match is not None:
                return self._stopped(match)
            self._tell(matcher)
        return None

    def _tell(self, matcher: StopMatcher) -> None:
        """Adds text that has become certain, so that readers get it as news."""
        text = matcher.take()
        if not text:
            return
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
        """Labels all tokens before `end` that have no label yet."""
        if self._labels:
            last = self._labels[-1]
            if last[2] == end:
                return
            if last[0] == version and last[1] == kv_version:
                self._labels.pop()
        if end:
            self._labels.append([version, kv_version, end])

    def _note_experts(self, record: bytes, *, num_overshoot: int) -> None:
        """Takes an attempt's record of all its tokens. It counts for the tokens that no earlier
        attempt has computed.
        """
        num_tokens = len(self.prompt.ids) + len(self.output_ids)
        rows = np.frombuffer(record, np.uint8).reshape(num_tokens + num_overshoot, -1)
        found = rows[:num_tokens].copy()
        known = self._experts
        self._experts = found
        if known is not None and known.shape[1] == found.shape[1]:
            later = found[: len(known)].copy()
            earlier = found[: len(known)]
            earlier[:] = known
            fill_unknown(earlier, later)

    def _relabel(self, attested: Sequence[Segment]) -> None:
        """Gives the tokens of the current attempt the labels that its engine attested at the
        end.
        """
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
"""A reader receives the news of an answer, and finally the closed answer."""


def nonsense(
    chunk: Chunk, *, vocab_size: int, floor: Version | None, num_before: int
) -> str | None:
    """Returns why the chunk makes no sense (I6), or `None` if it makes sense.

    `floor` is the version of the chunk before it in its attempt. `num_before` counts the attempt's
    output tokens before it.
    """
    ids = chunk.token_ids
    logprobs = chunk.logprobs
    if (
        len(ids) == len(logprobs) == 1
        and 0 <= ids[0] < vocab_size
        and -math.inf < logprobs[0] <= _MAX_LOGPROB
        and not chunk.kept
    ):
        pass  # most chunks have one token, and need no further check
    elif len(ids) != len(logprobs):
        return f"it has {len(logprobs)} log-probabilities"
    elif chunk.kept and len(chunk.kept) != len(ids):
        return f"it says of {len(chunk.kept)} tokens what truncation kept"
    elif ids and (min(ids) < 0 or max(ids) >= vocab_size):
        strange = next(i for i in ids if not 0 <= i < vocab_size)
        return f"token id {strange} is outside the vocabulary of {vocab_size}"
    elif not all(map(math.isfinite, logprobs)) or (logprobs and max(logprobs) > _MAX_LOGPROB):
        bad = next(p for p in logprobs if not (math.isfinite(p) and p <= _MAX_LOGPROB))
        return f"a log-probability is {bad}"
    if floor is not None and chunk.version < floor:
        return f"its version went back from {floor} to {chunk.version}"
    if chunk.kv_version > chunk.version:
        return f"its keys are of version {chunk.kv_version}, its tokens of version {chunk.version}"
    if chunk.attested:
        return _false_account(chunk, num_tokens=num_before + len(ids))
    return None


def _false_account(chunk: Chunk, *, num_tokens: int) -> str | None:
    """Returns why the attested segments cannot describe the `num_tokens` tokens of the attempt, or
    `None` if they can.
    """
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
