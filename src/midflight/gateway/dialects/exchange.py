"""The interface of a dialect: an exchange parses one request and writes its answer. Parts of
answers that several dialects write are here too.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar, cast

import msgspec
from pydantic_core import from_json

from midflight.gateway.answers.answer import Answer, Event
from midflight.gateway.answers.plan import Job
from midflight.gateway.dialects.resent import ResentBody, SentMessages
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.gateway.sessions.request import CompletionCall
from midflight.gateway.sessions.responses import KeptResponses
from midflight.text import Tokenizer
from midflight.types import Json, Likely, Turn
from midflight.wire.edge import Fault, fault_of


class Reply(msgspec.Struct, frozen=True):
    """The values that a dialect needs to write the answers of a request."""

    job: Job
    model: str
    created: int
    """Unix seconds."""
    tokenizer: Tokenizer
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Headers of the answer that report on the request."""
    around: dict[int, tuple[bytes, bytes]] = {}
    """The bytes of each choice before and after the text in an event in which only the
    text is new.
    """


class Exchange(Protocol):
    """One parsed request. It holds the call, and writes the answer."""

    @property
    def call(self) -> CompletionCall: ...
    @property
    def unread(self) -> UnreadFields:
        """The fields of the body that have no effect."""
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
        """Frames after the last answer, before the dialect's `done`."""
        ...


class ResumableExchange(Exchange, Protocol):
    """An exchange of a dialect whose bodies hold the whole conversation."""

    sent: SentMessages


class ReusableExchange(Protocol):
    """An exchange whose shallow copy can serve another request, if the copy gets its own
    `unread`.
    """

    unread: UnreadFields


E = TypeVar("E", bound=ReusableExchange)
_MAX_KEPT = 256
_MAX_KEPT_BYTES = 16_384
"""The most bodies that are kept, and the most bytes of each. They suffice for some batches of
groups and take 40 MB at most, together with the parsed requests.
"""


class ParsedBodyCache(Generic[E]):
    """Reads bodies as `read` does, and remembers recent ones. The rollouts of a group begin with
    the same body, so it is parsed and checked once for all of them.
    """

    def __init__(self, read: Callable[[bytes], E]) -> None:
        self._read = read
        self._kept: OrderedDict[bytes, E] = OrderedDict()
        """The parsed bodies, the newest last."""

    def __call__(self, body: bytes) -> E:
        if len(body) > _MAX_KEPT_BYTES:
            return self._read(body)
        kept = self._kept.pop(body, None)
        if kept is None:
            kept = self._read(body)
            if kept.unread.refusal is not None:
                return kept
        self._kept[body] = kept
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        exchange: E = object.__new__(type(kept))
        exchange.__dict__.update(kept.__dict__)
        exchange.unread = UnreadFields(dict(kept.unread.fields))
        return exchange


def told_alone(exchange: Exchange, fault: Fault) -> Json:
    """The error itself is the last frame."""
    return fault.body


_OPENAIS_END = b"data: [DONE]\n\n"
_COMMENT = b": waiting\n\n"


@dataclass(frozen=True, slots=True)
class Dialect:
    """A wire format as a route: its path, the reader of its bodies, and the form of its errors and
    its stream.
    """

    path: str
    """`{model}` in it stands for the name of the model."""
    exchange: Callable[[bytes], Exchange]
    """Parses a body; raises `RequestRejected`."""
    also: tuple[str, ...] = ()
    """Other paths at which it answers."""
    addressed: Callable[[bytes, Mapping[str, str]], Exchange] | None = None
    """Parses a body in a dialect that reads the address too: `model` of its path, and its query."""
    keeping: Callable[[bytes, KeptResponses], Exchange] | None = None
    """Parses a body in a dialect whose requests may name earlier responses."""
    resumed: Callable[[bytes, ResentBody], ResumableExchange] | None = None
    """Parses a body that begins as an earlier one of its session, in a dialect whose bodies hold
    the whole conversation.
    """
    fault: Callable[[BaseException], Fault] = fault_of
    """Makes an error's answer as this dialect's clients read it."""
    broken: "Callable[[Exchange, Fault], Json | bytes]" = told_alone
    """The last frame of a stream that fails after it began; bytes are sent as they are."""
    named_events: bool = False
    """True if frames are preceded by an `event:` line with their `type`."""
    done: bytes = _OPENAIS_END
    """The end of a stream."""
    waiting: bytes = _COMMENT
    """The bytes that keep a silent stream alive. Clients skip them."""


Alternatives: TypeAlias = Sequence[Likely]
"""The likeliest tokens at the place of each token, with their log-probabilities."""


def call_id(request_id: str, index: int) -> str:
    """The id of a tool call. It is the same in a stream and in a whole answer, and differs between
    answers and calls.
    """
    name = f"{index}.{request_id}".encode(errors="surrogatepass")
    return "call_" + hashlib.blake2b(name, digest_size=12).hexdigest()


def arguments_so_far(arguments: str) -> Json:
    """The arguments of a call as JSON. If the call broke off, it is what they say so far, as SDKs
    make it of a stream.
    """
    try:
        return cast(Json, json.loads(arguments))
    except ValueError:
        pass
    try:
        return cast(Json, from_json(arguments or "{}", allow_partial=True))
    except ValueError:  # it broke off in what no reader of JSON goes on from
        return {}


def usage(answers: Sequence[Answer]) -> Json:
    """OpenAI's token counts. A prompt counts once, however many choices it has."""
    prompts = {id(answer.prompt): len(answer.prompt.ids) for answer in answers}
    return _usage(sum(prompts.values()), sum([len(answer.turn.output_ids) for answer in answers]))


def usage_so_far(answers: Sequence[Answer], completion_tokens: int) -> Json:
    """OpenAI's token counts in the middle of a stream."""
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
    """One entry for each token; it is empty if no alternatives are known."""
    found = list(top[:num_tokens])
    found += [()] * (num_tokens - len(top))
    return found


def prompt_logprobs(tokenizer: Tokenizer, scored: Sequence[Likely]) -> Json:
    """vLLM's list of scores. For each token of a prompt there is an object by token id, with the
    token itself first and then its alternatives. The first token has no scores.
    """
    found: list[Json] = [None]
    for likely in scored:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(likely[1:], 1)}
        at: dict[str, Json] = {}
        for token_id, logprob in likely:
            at[str(token_id)] = {
                "logprob": logprob,
                "rank": ranks.get(token_id),
                "decoded_token": token_text(tokenizer, token_id),
            }
        found.append(at)
    return found


def logprob_entries(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    top: Alternatives,
    *,
    as_ids: bool = False,
) -> list[Json]:
    """OpenAI's list of tokens with log-probabilities. Each token has its alternatives if they were
    asked for.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Json]:
        return {
            "token": token_name(tokenizer, token_id, as_id=as_ids),
            "logprob": logprob,
            "bytes": token_bytes(tokenizer, token_id),
        }

    entries: list[Json] = []
    rows = zip(token_ids, logprobs, alternatives(top, len(token_ids)), strict=True)
    for token_id, logprob, others in rows:
        own = entry(token_id, logprob)
        own["top_logprobs"] = [entry(*other) for other in others]
        entries.append(own)
    return entries
