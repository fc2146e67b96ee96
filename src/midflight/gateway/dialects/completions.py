"""OpenAI's text completions: `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Annotated, cast

from pydantic import Field, JsonValue

from midflight.errors import RequestRejected
from midflight.gateway.call import Answer, CompletionCall, Delta, Event, Source, Text, TokenIds
from midflight.gateway.dialects.exchange import Reply
from midflight.gateway.dialects.fields import SamplingBody, Tokens, parse
from midflight.gateway.dialects.wording import token_text, usage, weight_versions
from midflight.text import Tokenizer
from midflight.types import Json

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


class CompletionBody(SamplingBody):
    prompt: JsonValue
    max_tokens: Tokens | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None


class CompletionExchange:
    """One request: a text, a list of texts, token ids, or a list of token ids."""

    def __init__(self, body: bytes) -> None:
        parsed = parse(CompletionBody, body)
        if parsed.logprobs:
            raise RequestRejected(
                f"logprobs is {parsed.logprobs}: alternatives are not known, send 0 for those of the sampled tokens.", param="logprobs"
            )
        self._logprobs = parsed.logprobs is not None
        self._token_ids = bool(parsed.return_token_ids)
        self._include_usage = parsed.include_usage
        self._offsets: dict[int, int] = {}
        """Letters streamed so far, by choice."""
        self.call = CompletionCall(
            sources=sources(parsed.prompt),
            asked=parsed.asked(parsed.max_tokens),
            n=parsed.n or 1,
            stream=bool(parsed.stream),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            model=parsed.model,
        )

    def whole(self, reply: Reply, answers: Sequence[Answer]) -> Json:
        return {**self._envelope(reply, [self._choice(reply, answer) for answer in answers]), "usage": usage(answers)}

    def opening(self, reply: Reply) -> Iterable[Json]:
        if self._token_ids:
            for choice in reply.job.choices:
                empty: dict[str, Json] = {"index": choice.index, "text": "", "logprobs": None, "finish_reason": None}
                yield self._envelope(reply, [{**empty, "prompt_token_ids": list(choice.prompt.ids), "token_ids": []}])

    def frames(self, reply: Reply, event: Event) -> Iterable[Json]:
        choice: dict[str, Json] = {"index": event.choice, "finish_reason": None, "logprobs": None}
        if isinstance(event, Answer):
            choice |= {"text": event.tail, "finish_reason": event.turn.finish.reason.value}
            if self._token_ids:
                choice |= {"token_ids": [], "weight_versions": weight_versions(event.turn)}
            yield self._envelope(reply, [choice])
        elif event.text or self._logprobs or self._token_ids:
            yield self._envelope(reply, [choice | self._delta(reply.tokenizer, event)])

    def closing(self, reply: Reply, answers: Sequence[Answer]) -> Iterable[Json]:
        if self._include_usage:
            yield {**self._envelope(reply, []), "usage": usage(answers)}

    def _delta(self, tokenizer: Tokenizer, event: Delta) -> dict[str, Json]:
        start = self._offsets.get(event.choice, 0)
        piece: dict[str, Json] = {"text": event.text, "logprobs": self._spread(tokenizer, event.token_ids, event.logprobs, start=start)}
        self._offsets[event.choice] = start + sum(len(token_text(tokenizer, i)) for i in event.token_ids) if self._logprobs else 0
        if self._token_ids:
            piece["token_ids"] = list(event.token_ids)
        return piece

    def _choice(self, reply: Reply, answer: Answer) -> Json:
        turn = answer.turn
        choice: dict[str, Json] = {
            "index": answer.choice,
            "text": answer.text,
            "logprobs": self._spread(reply.tokenizer, turn.output_ids, turn.logprobs, start=0),
            "finish_reason": turn.finish.reason.value,
        }
        if isinstance(turn.finish.matched, str):
            choice["stop_reason"] = turn.finish.matched
        if self._token_ids:
            choice |= {
                "prompt_token_ids": list(answer.prompt.ids),
                "token_ids": list(turn.output_ids),
                "weight_versions": weight_versions(turn),
            }
        return choice

    def _spread(self, tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[float], *, start: int) -> Json:
        """OpenAI's four parallel lists. Offsets count letters of the tokens' own texts."""
        if not self._logprobs:
            return None
        tokens = [token_text(tokenizer, i) for i in token_ids]
        offsets = list(accumulate((len(t) for t in tokens[:-1]), initial=start)) if tokens else []
        return {
            "tokens": cast("list[Json]", tokens),
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": cast("list[Json]", offsets),
        }

    def _envelope(self, reply: Reply, choices: list[Json]) -> dict[str, Json]:
        return {
            "id": f"cmpl-{reply.job.request_id}",
            "object": "text_completion",
            "created": reply.created,
            "model": reply.model,
            "choices": choices,
        }


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
    return TokenIds(tuple(cast("list[int]", value)))
