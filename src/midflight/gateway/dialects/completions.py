"""OpenAI's text completions: `POST /v1/completions`."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Annotated, cast

from pydantic import Field, JsonValue, WithJsonSchema

from midflight.errors import RequestRejected
from midflight.gateway.answers.answer import Answer, Event, News
from midflight.gateway.dialects.exchange import (
    Reply,
    alternatives,
    prompt_logprobs,
    token_name,
    token_text,
    usage,
    usage_so_far,
    weight_versions,
)
from midflight.gateway.dialects.fields import PromptTop, TopLogprobs, parse
from midflight.gateway.dialects.sampling_body import SamplingBody
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.gateway.sessions.request import CompletionCall, Source, Text, TokenIds
from midflight.text import Tokenizer
from midflight.types import Json

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""

MAX_TOKEN_ID = 2**31 - 1
"""The largest id, because ids are kept in 32 bits. A later check finds ids that the vocabulary does
not have.
"""

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}, "minItems": 1},
    ]
}
"""One prompt or several, as text or as token ids."""

PROMPT_IDS = Annotated[JsonValue, WithJsonSchema(_IDS)]
"""One prompt as token ids, for a body."""

_Object = dict[str, Json]


class CompletionBody(SamplingBody):
    prompt: Annotated[JsonValue, WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: TopLogprobs | None = None
    prompt_logprobs: PromptTop | None = None
    best_of: int | None = None
    echo: bool | None = None


class CompletionExchange:
    """One request: a text, a list of texts, token ids, or a list of token ids."""

    def __init__(self, body: bytes) -> None:
        self.unread = UnreadFields()
        parsed = parse(CompletionBody, body, unread=self.unread)
        _check(parsed)
        self._logprobs = parsed.logprobs is not None
        self._names_as_ids = bool(parsed.return_tokens_as_token_ids)
        self._token_ids = bool(parsed.return_token_ids)
        self._echo = bool(parsed.echo)
        self._prompt_logprobs = parsed.prompt_logprobs is not None
        self._include_usage = parsed.include_usage
        self._usage_so_far = parsed.continuous_usage
        self._num_streamed = 0
        """Tokens streamed so far, of all choices."""
        self._offsets: dict[int, int] = {}
        """Letters streamed so far, by choice."""
        self.call = CompletionCall(
            sources=sources(parsed.prompt),
            asked=parsed.asked(parsed.max_tokens, top_logprobs=parsed.logprobs),
            names={
                **parsed.names(top_logprobs="logprobs"),
                "prompt_logprobs": "prompt_logprobs" if self._prompt_logprobs else "echo",
            },
            n=parsed.n or 1,
            prompt_logprobs=_scored(parsed),
            stream=bool(parsed.stream),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            model=parsed.model,
        )

    def whole(self, reply: Reply, answers: Sequence[Answer]) -> Json:
        return {
            **_envelope(reply, [self._choice(reply, answer) for answer in answers]),
            "usage": usage(answers),
        }

    def opening(self, reply: Reply) -> Iterable[Json]:
        if not (self._token_ids or self._echo or self._prompt_logprobs):
            return
        tokenizer = reply.tokenizer
        for answer in reply.job.answers:
            told: _Object = {}
            if self._token_ids:
                told = {"prompt_token_ids": list(answer.prompt.ids), "token_ids": []}
            if self._echo and self._logprobs:
                told["logprobs"] = self._spread_prompt(tokenizer, answer)
                self._offsets[answer.index] = _num_letters(tokenizer, answer.prompt.ids)
            text = self._echoed(tokenizer, answer)
            told |= self._of_prompt(tokenizer, answer)
            yield self._chunk(reply, answer.index, text, **told)

    def frames(self, reply: Reply, event: Event) -> Iterable[Json]:
        if isinstance(event, Answer):
            none: _Object = {"token_ids": []} if self._token_ids else {}
            yield self._chunk(reply, event.index, event.tail, **self._finish(event), **none)
            return
        self._num_streamed += len(event.token_ids)
        if event.text or self._logprobs or self._token_ids:
            yield self._chunk(
                reply, event.index, event.text, **self._of_tokens(reply.tokenizer, event)
            )

    def closing(self, reply: Reply, answers: Sequence[Answer]) -> Iterable[Json]:
        if self._include_usage:
            yield {**_envelope(reply, []), "usage": usage(answers)}

    def _of_tokens(self, tokenizer: Tokenizer, event: News) -> _Object:
        told: _Object = {}
        if self._logprobs:
            start = self._offsets.get(event.index, 0)
            told["logprobs"] = self._spread(tokenizer, event, event.token_ids, start=start)
            self._offsets[event.index] = start + _num_letters(tokenizer, event.token_ids)
        if self._token_ids:
            told["token_ids"] = list(event.token_ids)
        return told

    def _choice(self, reply: Reply, answer: Answer) -> Json:
        ids = answer.turn.output_ids
        echoed = self._echoed(reply.tokenizer, answer)
        choice: _Object = {
            "index": answer.index,
            "text": echoed + answer.text,
            "logprobs": self._all_logprobs(reply.tokenizer, answer) if self._logprobs else None,
            **self._of_prompt(reply.tokenizer, answer),
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

    def _echoed(self, tokenizer: Tokenizer, answer: Answer) -> str:
        """The prompt as it was sent, if the client wants it echoed; else nothing."""
        if not self._echo:
            return ""
        if answer.prompt.text is None:
            return tokenizer.decode(answer.prompt.ids)
        return answer.prompt.text

    def _of_prompt(self, tokenizer: Tokenizer, answer: Answer) -> _Object:
        if not self._prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs(tokenizer, answer.prompt_logprobs)}

    def _all_logprobs(self, tokenizer: Tokenizer, answer: Answer) -> Json:
        """The log-probabilities of the answer. If the prompt is echoed, those of the prompt come
        first.
        """
        ids = answer.turn.output_ids
        if not self._echo:
            return self._spread(tokenizer, answer, ids, start=0)
        first = self._spread_prompt(tokenizer, answer)
        start = _num_letters(tokenizer, answer.prompt.ids)
        second = self._spread(tokenizer, answer, ids, start=start)
        joined: _Object = {}
        for name, one in first.items():
            joined[name] = one + _listed(second[name]) if isinstance(one, list) else None
        return joined

    def _spread_prompt(self, tokenizer: Tokenizer, answer: Answer) -> _Object:
        """The four lists of `_spread` for the prompt's tokens. Nothing predicts the first token."""
        ids = answer.prompt.ids
        top = self.call.asked.number("top_logprobs") or 0
        lengths = [len(token_text(tokenizer, i)) for i in ids]
        logprobs: list[Json] = [None]
        named: list[Json] = [None]
        for own, *others in answer.prompt_logprobs:
            logprobs.append(own[1])
            named.append(self._named(tokenizer, own, others[:top]))
        return {
            "tokens": [token_name(tokenizer, i, as_id=self._names_as_ids) for i in ids],
            "token_logprobs": logprobs,
            "top_logprobs": named if top else None,
            "text_offset": cast("list[Json]", list(accumulate(lengths[:-1], initial=0))),
        }

    def _spread(
        self, tokenizer: Tokenizer, event: Event, token_ids: Sequence[int], *, start: int
    ) -> _Object:
        """OpenAI's four parallel lists. Offsets count letters of the tokens' own texts. The
        alternatives also hold the sampled token.
        """
        logprobs = event.logprobs if isinstance(event, News) else event.turn.logprobs
        lengths = [len(token_text(tokenizer, i)) for i in token_ids]
        pairs = list(zip(token_ids, logprobs, strict=True))
        rows = zip(pairs, alternatives(event.top_logprobs, len(pairs)), strict=True)
        top: list[Json] = [self._named(tokenizer, own, others) for own, others in rows]
        offsets = list(accumulate(lengths[:-1], initial=start)) if lengths else []
        return {
            "tokens": [token_name(tokenizer, i, as_id=self._names_as_ids) for i in token_ids],
            "token_logprobs": list(logprobs),
            "top_logprobs": top if event.top_logprobs else None,
            "text_offset": cast("list[Json]", offsets),
        }

    def _named(
        self,
        tokenizer: Tokenizer,
        own: tuple[int, float],
        others: Sequence[tuple[int, float]],
    ) -> _Object:
        """The log-probabilities of a token and of its alternatives by their names. If several
        alternatives have the same text, the likeliest counts.
        """
        found: _Object = {}
        for token_id, logprob in (own, *reversed(others)):
            found[token_name(tokenizer, token_id, as_id=self._names_as_ids)] = logprob
        return found

    def _chunk(self, reply: Reply, index: int, text: str, **more: Json) -> Json:
        choice: _Object = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        choice |= more
        chunk = _envelope(reply, [choice])
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
    """Refuses fields that contradict each other, and values that are not supported."""
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise RequestRejected(
            "max_tokens is 0: send 1 or more, or ask for the prompt by `echo`.", param="max_tokens"
        )
    if body.best_of not in (None, body.n or 1):
        raise RequestRejected(
            (
                f"best_of is {body.best_of}, which is not supported here: leave it out, or send n "
                f"= {body.n or 1}."
            ),
            param="best_of",
        )


def _num_letters(tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
    """The letters of the tokens' own texts."""
    return sum([len(token_text(tokenizer, i)) for i in token_ids])


def _listed(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _scored(body: CompletionBody) -> int | None:
    """The number of alternatives for each token of a prompt. `None` if prompts are not scored."""
    asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((top for top in asked if top is not None), default=None)


def sources(prompt: JsonValue, *, param: str = "prompt") -> tuple[Source, ...]:
    """The prompts of a request, in order. A flat list of numbers is one prompt."""
    if isinstance(prompt, str):
        return (Text(prompt),)
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, int) for item in prompt):
            return (token_ids(prompt, param),)
        found: list[Source] = []
        for place, item in enumerate(prompt):
            if isinstance(item, str):
                found.append(Text(item))
            else:
                found.append(token_ids(item, f"{param}.{place}"))
        return tuple(found)
    raise RequestRejected(
        f"{param} is {prompt!r:.80}: send a text, token ids, or a list of either.", param=param
    )


def token_ids(value: JsonValue, param: str) -> TokenIds:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise RequestRejected(
            f"{param} is {value!r:.80}: send a text or a list of token ids.", param=param
        )
    ids = tuple(cast("list[int]", value))
    bad = [i for i in ids if not 0 <= i <= MAX_TOKEN_ID]
    if bad:
        raise RequestRejected(
            f"{param} holds token id {bad[0]!r:.80}: send ids of the vocabulary.", param=param
        )
    return TokenIds(ids)
