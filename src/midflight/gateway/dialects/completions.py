"""OpenAI's text completions: `POST /v1/completions`."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Annotated, cast

from pydantic import Field, JsonValue, WithJsonSchema

from midflight.errors import RequestRejected
from midflight.gateway.answers.answer import Answer, Event, News
from midflight.gateway.dialects.constraints import SamplingBody
from midflight.gateway.dialects.exchange import Reply, alternatives, token_name, token_text, usage, usage_so_far, weight_versions
from midflight.gateway.dialects.fields import TopLogprobs, parse
from midflight.gateway.dialects.policy import Unread
from midflight.gateway.sessions.session import CompletionCall, Source, Text, TokenIds
from midflight.text import Tokenizer
from midflight.types import Json

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""

MAX_TOKEN_ID = 2**31 - 1
"""Ids are kept in 32 bits. Whether the vocabulary has an id is checked later."""

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}, "minItems": 1},
    ]
}
"""One prompt or several, as text or as token ids."""

_Object = dict[str, Json]


class CompletionBody(SamplingBody):
    prompt: Annotated[JsonValue, WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: TopLogprobs | None = None
    best_of: int | None = None
    echo: bool | None = None


class CompletionExchange:
    """One request: a text, a list of texts, token ids, or a list of token ids."""

    def __init__(self, body: bytes) -> None:
        self.unread = Unread()
        parsed = parse(CompletionBody, body, unread=self.unread)
        _check(parsed)
        self._logprobs = parsed.logprobs is not None
        self._names_as_ids = bool(parsed.return_tokens_as_token_ids)
        self._token_ids = bool(parsed.return_token_ids)
        self._include_usage = parsed.include_usage
        self._usage_so_far = parsed.continuous_usage
        self._num_streamed = 0
        """Tokens of all choices."""
        self._offsets: dict[int, int] = {}
        """Letters streamed so far, by choice."""
        self.call = CompletionCall(
            sources=sources(parsed.prompt),
            asked=parsed.asked(parsed.max_tokens, top_logprobs=parsed.logprobs),
            names=parsed.names(top_logprobs="logprobs"),
            n=parsed.n or 1,
            stream=bool(parsed.stream),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            model=parsed.model,
        )

    def whole(self, reply: Reply, answers: Sequence[Answer]) -> Json:
        return {**_envelope(reply, [self._choice(reply, answer) for answer in answers]), "usage": usage(answers)}

    def opening(self, reply: Reply) -> Iterable[Json]:
        if self._token_ids:
            for answer in reply.job.answers:
                ids: _Object = {"prompt_token_ids": list(answer.prompt.ids), "token_ids": []}
                yield self._chunk(reply, answer.index, "", **ids)

    def frames(self, reply: Reply, event: Event) -> Iterable[Json]:
        if isinstance(event, Answer):
            none: _Object = {"token_ids": []} if self._token_ids else {}
            yield self._chunk(reply, event.index, event.tail, **self._finish(event), **none)
            return
        self._num_streamed += len(event.token_ids)
        if event.text or self._logprobs or self._token_ids:
            yield self._chunk(reply, event.index, event.text, **self._of_tokens(reply.tokenizer, event))

    def closing(self, reply: Reply, answers: Sequence[Answer]) -> Iterable[Json]:
        if self._include_usage:
            yield {**_envelope(reply, []), "usage": usage(answers)}

    def _of_tokens(self, tokenizer: Tokenizer, event: News) -> _Object:
        told: _Object = {}
        if self._logprobs:
            start = self._offsets.get(event.index, 0)
            told["logprobs"] = self._spread(tokenizer, event, event.token_ids, start=start)
            self._offsets[event.index] = start + sum(len(token_text(tokenizer, i)) for i in event.token_ids)
        if self._token_ids:
            told["token_ids"] = list(event.token_ids)
        return told

    def _choice(self, reply: Reply, answer: Answer) -> Json:
        ids = answer.turn.output_ids
        choice: _Object = {
            "index": answer.index,
            "text": answer.text,
            "logprobs": self._spread(reply.tokenizer, answer, ids, start=0) if self._logprobs else None,
            **self._finish(answer),
        }
        if self._token_ids:
            choice |= {"prompt_token_ids": list(answer.prompt.ids), "token_ids": list(ids)}
        return choice

    def _finish(self, answer: Answer) -> _Object:
        finish = answer.turn.finish
        ended: _Object = {"finish_reason": finish.reason.value}
        if isinstance(finish.matched, str):
            ended["stop_reason"] = finish.matched
        if self._token_ids:
            ended["weight_versions"] = weight_versions(answer.turn)
        return ended

    def _spread(self, tokenizer: Tokenizer, event: Event, token_ids: Sequence[int], *, start: int) -> Json:
        """OpenAI's four parallel lists. Offsets count letters of the tokens' own texts. Alternatives also hold the sampled token."""
        logprobs = event.logprobs if isinstance(event, News) else event.turn.logprobs
        lengths = [len(token_text(tokenizer, i)) for i in token_ids]
        pairs = list(zip(token_ids, logprobs, strict=True))
        rows = zip(pairs, alternatives(event.top_logprobs, len(pairs)), strict=True)
        top: list[Json] = [dict(self._named(tokenizer, (pair, *reversed(others)))) for pair, others in rows]
        return {
            "tokens": [token_name(tokenizer, i, as_id=self._names_as_ids) for i in token_ids],
            "token_logprobs": list(logprobs),
            "top_logprobs": top if event.top_logprobs else None,
            "text_offset": cast("list[Json]", list(accumulate(lengths[:-1], initial=start)) if lengths else []),
        }

    def _named(self, tokenizer: Tokenizer, pairs: Iterable[tuple[int, float]]) -> Iterable[tuple[str, Json]]:
        """Pairs by name. If several tokens have the same text, the last pair counts, which is the likeliest."""
        return ((token_name(tokenizer, i, as_id=self._names_as_ids), p) for i, p in pairs)

    def _chunk(self, reply: Reply, index: int, text: str, **more: Json) -> Json:
        chunk = _envelope(reply, [{"index": index, "text": text, "logprobs": None, "finish_reason": None, **more}])
        if self._usage_so_far:
            chunk["usage"] = usage_so_far(reply.job.answers, self._num_streamed)
        elif self._include_usage:
            chunk["usage"] = None
        return chunk


def _envelope(reply: Reply, choices: list[Json]) -> _Object:
    return {
        "id": f"cmpl-{reply.job.request_id}",
        "object": "text_completion",
        "created": reply.created,
        "model": reply.model,
        "choices": choices,
    }


def _check(body: CompletionBody) -> None:
    """Refuses fields that contradict each other or ask for what is not supported."""
    if body.echo:
        raise RequestRejected(
            "echo is not supported here: leave it out. Log-probabilities of a prompt are not known to the gateway.", param="echo"
        )
    if body.max_tokens == 0:
        raise RequestRejected("max_tokens is 0: send 1 or more.", param="max_tokens")
    if body.best_of not in (None, body.n or 1):
        raise RequestRejected(
            f"best_of is {body.best_of}, which is not supported here: leave it out, or send n = {body.n or 1}.", param="best_of"
        )


def sources(prompt: JsonValue, *, param: str = "prompt") -> tuple[Source, ...]:
    """The prompts of a request, in order. A flat list of numbers is one prompt."""
    if isinstance(prompt, str):
        return (Text(prompt),)
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, int) for item in prompt):
            return (token_ids(prompt, param),)
        return tuple(Text(item) if isinstance(item, str) else token_ids(item, f"{param}.{k}") for k, item in enumerate(prompt))
    raise RequestRejected(f"{param} is {prompt!r:.80}: send a text, token ids, or a list of either.", param=param)


def token_ids(value: JsonValue, param: str) -> TokenIds:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise RequestRejected(f"{param} is {value!r:.80}: send a text or a list of token ids.", param=param)
    ids = tuple(cast("list[int]", value))
    if bad := [i for i in ids if not 0 <= i <= MAX_TOKEN_ID]:
        raise RequestRejected(f"{param} holds token id {bad[0]!r:.80}: send ids of the vocabulary.", param=param)
    return TokenIds(ids)
