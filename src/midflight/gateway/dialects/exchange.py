"""What every dialect offers the HTTP shell, and the pieces of answers that several dialects
write.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

import msgspec

from midflight.gateway.answers.answer import Answer, Event
from midflight.gateway.answers.plan import Job
from midflight.gateway.dialects.policy import Unread
from midflight.gateway.sessions.kept import KeptResponses
from midflight.gateway.sessions.request import CompletionCall
from midflight.text import Tokenizer
from midflight.types import Json, Likely, Turn
from midflight.wire.edge import Fault, fault_of


class Reply(msgspec.Struct, frozen=True):
    """What a dialect needs to write the answers of a request."""

    job: Job
    model: str
    created: int
    """Unix seconds."""
    tokenizer: Tokenizer
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """What the head of the answer says of the request."""
    around: dict[int, tuple[bytes, bytes]] = {}
    """Of each choice what stands before and after the text in an event that holds nothing else
    new.
    """


class Exchange(Protocol):
    """One parsed request: the call that it means, and how its answer is written."""

    @property
    def call(self) -> CompletionCall: ...
    @property
    def unread(self) -> Unread:
        """What of the body has no effect."""
        ...

    def whole(self, reply: Reply, answers: Sequence[Answer]) -> Json:
        """The body of an answer that does not stream."""
        ...

    def opening(self, reply: Reply) -> Iterable[Json]:
        """Frames of a stream before the first event."""
        ...

    def frames(self, reply: Reply, event: Event) -> "Iterable[Json | bytes]":
        """Frames for one event of a stream; bytes are whole server-sent events."""
        ...

    def closing(self, reply: Reply, answers: Sequence[Answer]) -> Iterable[Json]:
        """Frames after the last answer, before `[DONE]` where the dialect has it."""
        ...


class Repeatable(Protocol):
    """An exchange of which a shallow copy is another one, but for `unread`."""

    unread: Unread


E = TypeVar("E", bound=Repeatable)
_MAX_KEPT = 256
_MAX_KEPT_BYTES = 16_384
"""Bodies that are kept, and the length of each: those of some batches of groups, in 40 MB at most
with what was read.
"""


class Recent(Generic[E]):
    """Reads bodies as `read` does. The rollouts of a group begin with the same body, so it is
    parsed and checked once for all of them.
    """

    def __init__(self, read: Callable[[bytes], E]) -> None:
        self._read = read
        self._kept: OrderedDict[bytes, E] = OrderedDict()
        """The newest last."""

    def __call__(self, body: bytes) -> E:
        kept = self._kept.pop(body, None)
        if kept is None:
            kept = self._read(body)
            if len(body) > _MAX_KEPT_BYTES or kept.unread.refusal is not None:
                return kept
        self._kept[body] = kept
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        exchange: E = object.__new__(type(kept))
        exchange.__dict__.update(kept.__dict__)
        exchange.unread = Unread(dict(kept.unread.fields))
        return exchange


def told_alone(exchange: Exchange, fault: Fault) -> Json:
    """The error itself is the last frame."""
    return fault.body


@dataclass(frozen=True, slots=True)
class Dialect:
    """A wire format as a route: where it is, how a body is read, and how its errors and its stream
    look.
    """

    path: str
    exchange: Callable[[bytes], Exchange]
    """Parses a body; raises `RequestRejected`."""
    keeping: Callable[[bytes, KeptResponses], Exchange] | None = None
    """The same, of a dialect whose requests name what was said before."""
    fault: Callable[[BaseException], Fault] = fault_of
    """An error as this dialect's clients read it."""
    broken: Callable[[Exchange, Fault], Json] = told_alone
    """The last frame of a stream that fails after it began."""
    named_events: bool = False
    """Frames are preceded by an `event:` line with their `type`, and no `[DONE]` ends the
    stream.
    """


Alternatives: TypeAlias = Sequence[Likely]
"""For each token the likeliest ones at its place, with their log-probabilities."""


def call_id(request_id: str, index: int) -> str:
    """The id of a tool call. It is the same in a stream and in a whole answer, and differs between
    answers and calls.
    """
    return (
        "call_"
        + hashlib.blake2b(
            f"{index}.{request_id}".encode(errors="surrogatepass"), digest_size=12
        ).hexdigest()
    )


def usage(answers: Sequence[Answer]) -> Json:
    """OpenAI's token counts. A prompt counts once, however many choices it has."""
    prompts = {id(answer.prompt): len(answer.prompt.ids) for answer in answers}
    return _usage(sum(prompts.values()), sum([len(answer.turn.output_ids) for answer in answers]))


def usage_so_far(answers: Sequence[Answer], completion_tokens: int) -> Json:
    """The same counts in mid-stream."""
    prompts = {id(answer.prompt): len(answer.prompt.ids) for answer in answers}
    return _usage(sum(prompts.values()), completion_tokens)


def _usage(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def weight_versions(turn: Turn) -> Json:
    """Spans of output tokens by the version that sampled them."""
    return [{"version": s.version, "start": s.start, "end": s.end} for s in turn.segments]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of one token. Half a character is written as U+FFFD."""
    return tokenizer.decode((token_id,))


def token_name(tokenizer: Tokenizer, token_id: int, *, as_id: bool) -> str:
    """The name of a token in lists of log-probabilities: its text, or `token_id:` and its id
    (vLLM's `return_tokens_as_token_ids`).
    """
    return f"token_id:{token_id}" if as_id else token_text(tokenizer, token_id)


def token_bytes(tokenizer: Tokenizer, token_id: int) -> Json:
    table = tokenizer.token_bytes
    raw = token_text(tokenizer, token_id).encode() if table is None else table.get(token_id, b"")
    return list(raw)


def alternatives(top: Alternatives, num_tokens: int) -> Alternatives:
    """One entry for each token, empty where no alternatives are known."""
    return (*top[:num_tokens], *((),) * (num_tokens - len(top)))


def prompt_logprobs(tokenizer: Tokenizer, scored: Sequence[Likely]) -> Json:
    """vLLM's list: for each token of a prompt an object by id of what may stand there, itself
    first; nothing for the first token.
    """

    def at(likely: Likely) -> Json:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(likely[1:], 1)}
        return {
            str(token_id): {
                "logprob": logprob,
                "rank": ranks.get(token_id),
                "decoded_token": token_text(tokenizer, token_id),
            }
            for token_id, logprob in likely
        }

    return [None, *map(at, scored)]


def logprob_entries(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    top: Alternatives,
    *,
    as_ids: bool = False,
) -> list[Json]:
    """OpenAI's list of tokens with log-probabilities, each with its alternatives where they were
    asked for.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Json]:
        return {
            "token": token_name(tokenizer, token_id, as_id=as_ids),
            "logprob": logprob,
            "bytes": token_bytes(tokenizer, token_id),
        }

    return [
        {**entry(i, p), "top_logprobs": [entry(*other) for other in others]}
        for (i, p), others in zip(
            zip(token_ids, logprobs, strict=True), alternatives(top, len(token_ids)), strict=True
        )
    ]
