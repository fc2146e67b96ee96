"""Models without weights. The next token of `Script` is a hash of everything before it, so that
every answer is known beforehand. `Replies` gives replies that a test wrote down: tool calls, code,
anything that an agent should read.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from midflight.errors import RequestRejected
from midflight.text import StopMatcher, Tokenizer
from midflight.text.byte_tokenizer import CHAT_TEMPLATE, END, byte_tokenizer
from midflight.text.tokenizer import ChatTemplate
from midflight.types import Finish, FinishReason, GenerateRequest, Version

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_NUM_BYTES = 256
S = TypeVar("S")


def _mix(z: int) -> int:
    """SplitMix64's finaliser."""
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & _MASK
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def scripted_tokenizer() -> Tokenizer:
    """The byte tokenizer of made models, without a folder."""
    return Tokenizer(
        byte_tokenizer(), template=ChatTemplate(CHAT_TEMPLATE, {}), eos_token_ids=frozenset({END})
    )


class ScriptedPolicy(Protocol[S]):
    """Chooses a scripted engine's tokens. The choice depends on the request and on the tokens so
    far, and on nothing else (I5).

    `S` is the state that it keeps of them. States are values.
    """

    @property
    def end_id(self) -> int: ...
    def start(self, request: GenerateRequest) -> S:
        """The state after everything in `input_ids`."""
        ...

    def extend(self, state: S, token_id: int) -> S: ...
    def choose(self, state: S, version: Version, *, may_end: bool) -> tuple[int, float]:
        """The next token and its log-probability."""
        ...


@dataclass(frozen=True, slots=True)
class Script:
    """The deterministic "policy". A token depends on the seed and on every id before it, and
    therefore also on its position.

    A resumed request that misses, repeats or changes one token gets another answer, and tests see
    that (I5).
    """

    alphabet: tuple[int, ...] = tuple(b"abcdefghijklmnopqrstuvwxyz ")
    end_id: int = END
    mean_length: int | None = 40
    """The end comes with chance 1 / `mean_length` at each token. With None an answer never ends by
    itself.
    """
    by_version: bool = False
    """True if other weights (another version) choose other tokens."""

    def start(self, request: GenerateRequest) -> int:
        """The hash of the seed and the ids so far."""
        state = _mix(request.sampling.seed & _MASK)
        for token_id in request.input_ids:
            state = self.extend(state, token_id)
        return state

    def extend(self, state: int, token_id: int) -> int:
        return _mix(state ^ (token_id + 1) * _GAMMA & _MASK)

    def choose(self, state: int, version: Version, *, may_end: bool) -> tuple[int, float]:
        """The token after `state` under `version`, and its log-probability (made up, but always the
        same).
        """
        if self.by_version:
            state = state + (version + 1) * _GAMMA & _MASK
        bits = _mix(state)
        ends = may_end and self.mean_length is not None and bits % self.mean_length == 0
        token_id = self.end_id if ends else self.alphabet[(bits >> 20) % len(self.alphabet)]
        return token_id, math.log(((bits >> 40) + 1) / (1 << 24))


def likeliest(token_id: int, logprob: float, num: int) -> tuple[tuple[int, float], ...]:
    """The `num` likeliest tokens at the place of this one, likeliest first. They are always the
    same.

    They are made up: the bytes after the token have a half, a quarter, an eighth, and so on, of the
    mass that the token leaves.
    """
    rest = max(-math.expm1(logprob), 1e-12)
    pairs = [(token_id, logprob)]
    for k in range(1, num + 1):
        pairs.append(((token_id + k) % _NUM_BYTES, math.log(rest) - k * math.log(2)))
    pairs.sort(key=lambda pair: -pair[1])
    return tuple(pairs[:num])


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """A whole generation."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish


class ScriptedRun(Generic[S]):
    """One request on its way through the script. It is synchronous: `peek` looks ahead, and
    `accept` moves on.
    """

    def __init__(
        self,
        script: ScriptedPolicy[S],
        request: GenerateRequest,
        tokenizer: Tokenizer,
        *,
        stops_on_strings: bool = True,
    ) -> None:
        sampling = request.sampling
        self._script = script
        self._sampling = sampling
        self._state = script.start(request)
        self._matcher = StopMatcher(
            tokenizer, sampling.stop if stops_on_strings else (), min_tokens=sampling.min_tokens
        )
        self._matcher.feed(request.input_ids[request.num_prompt_tokens :])
        self.num_output = request.num_output_tokens
        self.finish: Finish | None = None

    def peek(self, max_tokens: int, version: Version) -> list[tuple[int, float]]:
        """Up to `max_tokens` next tokens under one version. There are fewer at the limit, or if a
        token ends the answer.
        """
        state = self._state
        tokens = list[tuple[int, float]]()
        end = min(self.num_output + max_tokens, self._sampling.max_tokens)
        for index in range(self.num_output, end):
            may_end = index >= self._sampling.min_tokens
            token_id, logprob = self._script.choose(state, version, may_end=may_end)
            state = self._script.extend(state, token_id)
            tokens.append((token_id, logprob))
            if self._ends(token_id, index):
                break
        return tokens

    def accept(self, tokens: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """Moves on by these tokens, up to the one that ends the answer, at which it sets
        `finish`.
        """
        for taken, (token_id, _) in enumerate(tokens, start=1):
            self._state = self._script.extend(self._state, token_id)
            self.num_output += 1
            match = self._matcher.feed((token_id,))
            if match is not None:
                self.finish = Finish(FinishReason.STOP, match.stop)
            elif self._ends(token_id, self.num_output - 1):
                self.finish = Finish(FinishReason.STOP, token_id)
            elif self.num_output >= self._sampling.max_tokens:
                self.finish = Finish(FinishReason.LENGTH)
            if self.finish is not None:
                return tokens[:taken]
        return tokens

    def _ends(self, token_id: int, index: int) -> bool:
        if index < self._sampling.min_tokens:
            return False
        if token_id in self._sampling.stop_token_ids:
            return True
        return token_id == self._script.end_id and not self._sampling.ignore_eos


def play(
    script: ScriptedPolicy[S],
    request: GenerateRequest,
    tokenizer: Tokenizer,
    *,
    version: Version = 0,
) -> ScriptedAnswer:
    """The uninterrupted answer under one version: the oracle of I5."""
    run = ScriptedRun(script, request, tokenizer)
    tokens = run.accept(run.peek(request.remaining, version))
    assert run.finish is not None
    return ScriptedAnswer(tuple(t for t, _ in tokens), tuple(p for _, p in tokens), run.finish)


# --- Replies that a test wrote down ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplyState:
    """A reply, how many tokens have come since the prompt, and the hash of all of them."""

    reply: tuple[int, ...]
    num_said: int
    hash: int


@dataclass(frozen=True, slots=True)
class Replies:
    """A policy that answers by rule. Give it to a `ScriptedEngine` as its script.

    `rule` makes the text of the reply from the text of the prompt. As a mapping, it holds texts
    that a prompt may contain and the reply to each. The key that comes last in the prompt counts,
    or the empty key if the prompt has none of them. Without an empty key such a request is refused.

    A reply depends on the prompt alone, so a resumed request goes on where it was (I5). Its
    log-probabilities are made up from the seed and every id before, so that a request that misses,
    repeats or changes a token has others.
    """

    rule: Callable[[str], str] | Mapping[str, str]
    tokenizer: Tokenizer = field(default_factory=scripted_tokenizer)
    end_id: int = END
    """The token after the reply. Before `min_tokens` a blank takes its place."""

    def start(self, request: GenerateRequest) -> ReplyState:
        prompt = request.input_ids[: request.num_prompt_tokens]
        reply = self.tokenizer.encode(self._reply(self.tokenizer.decode(prompt)))
        return ReplyState(reply, request.num_output_tokens, Script().start(request))

    def extend(self, state: ReplyState, token_id: int) -> ReplyState:
        return ReplyState(state.reply, state.num_said + 1, Script().extend(state.hash, token_id))

    def choose(self, state: ReplyState, version: Version, *, may_end: bool) -> tuple[int, float]:
        """The next token is the same under every version."""
        _, logprob = Script().choose(state.hash, version, may_end=may_end)
        if state.num_said < len(state.reply):
            return state.reply[state.num_said], logprob
        return self.end_id if may_end else self.tokenizer.encode(" ")[0], logprob

    def _reply(self, prompt: str) -> str:
        if not isinstance(self.rule, Mapping):
            return self.rule(prompt)
        last_place = -1
        last_key = ""
        for key in sorted(self.rule, key=lambda key: (len(key), key)):
            place = prompt.rfind(key) if key else 0
            if place >= last_place:
                last_place = place
                last_key = key
        if last_place < 0:
            raise RequestRejected(
                f"replying: no reply is written for a prompt that ends with {prompt[-80:]!r}. Add "
                "one to the rule."
            )
        return self.rule[last_key]
