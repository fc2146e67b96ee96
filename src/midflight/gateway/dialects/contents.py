"""The answers of Google's generateContent, whole or streamed, under
`POST /v1beta/models/{model}:generateContent` and `:streamGenerateContent`. `docs/contents.md` lists
its fields.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from midflight.errors import MidflightError, RequestRejected
from midflight.gateway.answers.answer import Answer, Event, News
from midflight.gateway.dialects.contents_input import ContentsBody, contents_call
from midflight.gateway.dialects.exchange import (
    Alternatives,
    Exchange,
    Reply,
    alternatives,
    arguments_so_far,
    call_id,
    token_text,
    weight_versions,
)
from midflight.gateway.dialects.fields import parse
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.text import Tokenizer
from midflight.text.formats import ArgumentsPiece, CallPiece, Piece, ReasoningPiece
from midflight.types import FinishReason, Json
from midflight.wire.edge import FAILED_HERE, Fault, retry_headers, retry_seconds

_Object = dict[str, Json]


class ContentsExchange:
    """One request."""

    streams = False

    def __init__(self, body: bytes, address: Mapping[str, str] | None = None) -> None:
        """`address` holds the `model` of the path, and the query."""
        self.unread = UnreadFields()
        parsed = parse(ContentsBody, body, unread=self.unread)
        asked = address or {}
        if self.streams and asked.get("alt") != "sse":
            raise RequestRejected(
                f"alt is {asked.get('alt')!r:.80}: send ?alt=sse in the address, because an answer "
                "is streamed as server-sent events.",
                param="alt",
            )
        self._token_ids = bool(parsed.return_token_ids)
        config = parsed.generation_config
        thinking = None if config is None else config.thinking_config
        self._thoughts = thinking is not None and bool(thinking.include_thoughts)
        self._logprobs = config is not None and bool(config.response_logprobs)
        self._streams: dict[int, PartStream] = {}
        self._ended: list[Answer] = []
        self.call = contents_call(
            parsed, self.unread, model=asked.get("model"), stream=self.streams
        )

    def whole(self, reply: Reply, answers: Sequence[Answer]) -> Json:
        candidates: list[Json] = []
        for answer in answers:
            stream = self._stream_of(reply, answer.index)
            said = joined(stream.feed(answer.pieces) + stream.end())
            turn = answer.turn
            stream.told(reply.tokenizer, turn.output_ids, turn.logprobs, answer.top_logprobs)
            candidates.append(stream.candidate(said, last=self._ending(answer)))
        return self._envelope(reply, candidates) | self._counts(answers)

    def opening(self, reply: Reply) -> Iterable[Json]:
        return ()

    def frames(self, reply: Reply, event: Event) -> Iterable[Json]:
        """One part is held back until the next one or the end, so that the end comes with the last
        part: SDKs before 3 drop an answer from their history if a content of it is empty.
        """
        stream = self._stream_of(reply, event.index)
        if isinstance(event, News):
            stream.told(reply.tokenizer, event.token_ids, event.logprobs, event.top_logprobs)
            parts = stream.without_last(stream.feed(event.pieces))
            if parts:
                yield self._envelope(reply, [stream.candidate(parts)])
            return
        self._ended.append(event)
        parts = stream.rest(stream.feed(event.tail_pieces) + stream.end())
        last = stream.candidate(parts, last=self._ending(event))
        yield self._envelope(reply, [last]) | self._counts(self._ended)

    def closing(self, reply: Reply, answers: Sequence[Answer]) -> Iterable[Json]:
        return ()

    def _stream_of(self, reply: Reply, index: int) -> "PartStream":
        found = self._streams.get(index)
        if found is None:
            found = self._streams[index] = PartStream(
                index,
                request_id=reply.job.answers[index].request_id,
                thoughts=self._thoughts,
                logprobs=self._logprobs,
            )
        return found

    def _envelope(self, reply: Reply, candidates: list[Json]) -> _Object:
        return {
            "candidates": candidates,
            "modelVersion": reply.model,
            "responseId": reply.job.request_id,
        }

    def _ending(self, answer: Answer) -> _Object:
        """The fields that end a candidate. A candidate that calls functions ends with `STOP`, as
        one that does not.
        """
        turn = answer.turn
        cut = turn.finish.reason is FinishReason.LENGTH
        ended: _Object = {"finishReason": "MAX_TOKENS" if cut else "STOP"}
        if self._logprobs and turn.logprobs:
            ended["avgLogprobs"] = sum(turn.logprobs) / len(turn.logprobs)
        if self._token_ids:
            ended["token_ids"] = list(turn.output_ids)
            ended["weight_versions"] = weight_versions(turn)
        return ended

    def _counts(self, answers: Sequence[Answer]) -> _Object:
        """The counts of these answers. A prompt counts once, however many candidates it has."""
        prompt_ids = answers[0].prompt.ids
        num_output = sum([len(answer.turn.output_ids) for answer in answers])
        details: Json = [{"modality": "TEXT", "tokenCount": len(prompt_ids)}]
        usage: Json = {
            "promptTokenCount": len(prompt_ids),
            "candidatesTokenCount": num_output,
            "totalTokenCount": len(prompt_ids) + num_output,
            "promptTokensDetails": details,
        }
        told: _Object = {"usageMetadata": usage}
        if self._token_ids:
            told["prompt_token_ids"] = list(prompt_ids)
        return told


class StreamedContentsExchange(ContentsExchange):
    """One request for a stream."""

    streams = True


class PartStream:
    """The parts of one candidate, as they become certain. A call is a part when it is whole."""

    def __init__(self, index: int, *, request_id: str, thoughts: bool, logprobs: bool) -> None:
        """`thoughts` and `logprobs` say what is told."""
        self._index = index
        self._request_id = request_id
        self._thoughts = thoughts
        self._logprobs = logprobs
        self._call: CallPiece | None = None
        """The call whose arguments come."""
        self._arguments = ""
        self._held: list[Json] = []
        self._chosen: list[Json] = []
        self._likeliest: list[Json] = []

    def feed(self, pieces: Iterable[Piece]) -> list[Json]:
        parts: list[Json] = []
        for piece in pieces:
            if isinstance(piece, CallPiece):
                parts += self.end()
                self._call = piece
                self._arguments = piece.call.arguments
                if not piece.begins:
                    parts += self.end()
            elif isinstance(piece, ArgumentsPiece):
                self._arguments += piece.text
                if piece.last:
                    parts += self.end()
            elif piece.text:
                parts += self._said(piece.text, thought=isinstance(piece, ReasoningPiece))
        return parts

    def end(self) -> list[Json]:
        """Ends the call that is open. One that broke off has the arguments so far."""
        if self._call is None:
            return []
        arguments = arguments_so_far(self._arguments)
        call: Json = {
            "id": call_id(self._request_id, self._call.index),
            "name": self._call.call.name,
            "args": arguments if isinstance(arguments, dict) else {},
        }
        self._call = None
        return [{"functionCall": call}]

    def without_last(self, parts: list[Json]) -> list[Json]:
        """The parts that may be told. The last is held back."""
        parts = self._held + parts
        self._held = parts[-1:]
        return parts[:-1]

    def rest(self, parts: list[Json]) -> list[Json]:
        """The last parts, with what was held back."""
        parts = self._held + parts
        self._held = []
        return parts

    def told(
        self,
        tokenizer: Tokenizer,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        top: Alternatives,
    ) -> None:
        """Notes tokens for the `logprobsResult` of the next candidate."""
        if not self._logprobs:
            return
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            self._chosen.append(_logprob(tokenizer, token_id, logprob))
        for likely in alternatives(top, len(token_ids)):
            candidates: Json = [_logprob(tokenizer, *each) for each in likely]
            self._likeliest.append({"candidates": candidates})

    def candidate(self, parts: list[Json], *, last: _Object | None = None) -> Json:
        """A candidate with these parts, and with the tokens since the one before. The last one of
        an answer that says nothing has an empty text.
        """
        empty: list[Json] = [{"text": ""}]
        told: _Object = {
            "content": {"role": "model", "parts": parts or empty},
            "index": self._index,
            **(last or {}),
        }
        if self._logprobs:
            told["logprobsResult"] = {
                "chosenCandidates": self._chosen,
                "topCandidates": self._likeliest,
            }
            self._chosen = []
            self._likeliest = []
        return told

    def _said(self, text: str, *, thought: bool) -> Iterator[Json]:
        if not thought:
            yield {"text": text}
        elif self._thoughts:
            yield {"text": text, "thought": True}


def _logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> Json:
    return {
        "token": token_text(tokenizer, token_id),
        "tokenId": token_id,
        "logProbability": logprob,
    }


def joined(parts: Sequence[Json]) -> list[Json]:
    """The parts, with neighbouring texts of one kind as one."""
    found: list[Json] = []
    for keys, group in groupby(
        parts, key=lambda part: tuple(part) if isinstance(part, dict) else ()
    ):
        same = [part for part in group if isinstance(part, dict)]
        if "text" in keys:
            found.append({**same[0], "text": "".join(str(part["text"]) for part in same)})
        else:
            found += same
    return found


def contents_fault(error: BaseException) -> Fault:
    """An error as Google's clients read it. The text of an unexpected error only goes to the
    log.
    """
    status = 500
    message = FAILED_HERE
    reason = "internal_error"
    param = None
    if isinstance(error, MidflightError):
        status = error.status
        message = str(error)
        reason = error.code
    if isinstance(error, RequestRejected):
        param = error.param
    info: _Object = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": reason,
        "domain": "midflight",
    }
    if param is not None:
        info["metadata"] = {"param": param}
    details: list[Json] = [info]
    seconds = retry_seconds(error)
    if seconds is not None:
        retry = "type.googleapis.com/google.rpc.RetryInfo"
        details.append({"@type": retry, "retryDelay": f"{seconds}s"})
    body: Json = {
        "error": {
            "code": status,
            "message": message,
            "status": _STATUSES.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL"),
            "details": details,
        }
    }
    return Fault(status, body, retry_headers(error))


_STATUSES: Mapping[int, str] = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    410: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def told_bare(exchange: Exchange, fault: Fault) -> bytes:
    """The error as JSON alone: Google's SDKs take an event for a piece of an answer, and raise for
    JSON that is none.
    """
    return msgspec.json.encode(fault.body) + b"\n\n"
